"""`spreads`: how far recorded runs of one code differ, within a run, within a boot and between boots, and what the controls take off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ci import noise
from ci.errors import InputError
from ci.pairs import WALL_CLOCK_FLOOR
from tests.statistics import ours, tables
from tests.statistics.records import Array, Processes

LEVELS = ("process", "run", "boot", "all", "normalised", "floor")
"""Of each row. SDs of ln latency: of a process within its run, of a run's mean within its boot, of the boots' means, of all runs as the
gate takes them, and of these with the controls of the class taken off. Then the floor that the screen makes of the last."""
HEADS = (
    "processes of a run",
    "runs of a boot",
    "boots",
    "all runs",
    "all runs, controls taken off",
    "floor against the baseline",
)


def _pooled_sd(groups: Sequence[Array]) -> Array:
    """[rows], SD within groups of [rows, members], pooled over those of two members or more."""
    squares = sum(((group - group.mean(axis=1, keepdims=True)) ** 2).sum(axis=1) for group in groups)
    return np.asarray(np.sqrt(squares / sum(group.shape[1] - 1 for group in groups)))


def spreads(processes: Processes) -> dict[str, Any]:
    """The SDs of each row.

    Args:
        processes: Of one code: at least two boots, one of them with two runs or more.
    Raises:
        InputError: There is nothing to take an SD of.
    """
    runs, boots = processes.runs(), processes.run_boots()
    means = np.stack([run.mean(axis=1) for run in runs], axis=1)
    by_boot = [means[:, [i for i, of_run in enumerate(boots) if of_run == boot]] for boot in dict.fromkeys(boots)]
    if len(by_boot) < 2 or max(boot.shape[1] for boot in by_boot) < 2:
        raise InputError(f"{len(runs)} runs over {len(by_boot)} boots show no spread of both; name two runs of a boot, and another boot")
    layout = processes.layout
    values = np.stack([noise.fast60(run) for run in runs], axis=1)
    flat = values.copy()
    for row in layout.judged:
        serving = layout.served_by([layout.bottlenecks[row]])
        flat[[row]] = noise.control_normalised(values[[row]], values[serving])
    levels = {
        "process": _pooled_sd(runs),
        "run": _pooled_sd(by_boot),
        "boot": np.stack([boot.mean(axis=1) for boot in by_boot], axis=1).std(axis=1, ddof=1),
        "all": values.std(axis=1, ddof=1),
        "normalised": flat.std(axis=1, ddof=1),
        "floor": ours.screen(values, values[:, 0], layout).floor,
    }
    rows = [
        {
            "row": layout.names[i],
            "class": layout.bottlenecks[i],
            "control": bool(layout.control[i]),
            "host": bool(layout.least[i] == WALL_CLOCK_FLOOR),
            **{name: None if np.isnan(level[i]) else float(level[i]) for name, level in levels.items()},
        }
        for i in range(len(layout.names))
    ]
    return {"device": processes.device, "commit": processes.commit, "runs": [boot.shape[1] for boot in by_boot], "rows": rows}


def median(rows: Sequence[dict[str, Any]], level: str) -> float:
    """The median of a level over rows that have it; NaN where none has."""
    known = [row[level] for row in rows if row[level] is not None]
    return float(np.median(known)) if known else float("nan")


def _line(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    made = [median(rows, level) for level in LEVELS]
    return [name, *("" if np.isnan(value) else f"{100 * value:.2f} %" for value in made)]


def render(data: dict[str, Any]) -> str:
    """The sentences and the table, as Markdown: medians over the judged rows of a class, then each control."""
    rows = data["rows"]
    judged = [row for row in rows if not row["control"]]
    body = []
    for name in sorted({row["class"] for row in judged}):
        of_class = [row for row in judged if row["class"] == name]
        body.append(_line(f"{name} ({len(of_class)} rows)", of_class))
    on_device = [row for row in judged if not row["host"]]
    body.append(_line(f"all that the device times ({len(on_device)} rows)", on_device))
    body += [_line(f"control: {row['row']}", [row]) for row in rows if row["control"]]
    counts = ", ".join(map(str, data["runs"]))
    text = (
        f"{data['device']}, commit {data['commit'][:12]}, {sum(data['runs'])} runs over {len(data['runs'])} boots ({counts}). SDs of "
        "ln latency between what the head of a column names; medians over the rows.\n\n"
    )
    return text + tables.markdown(["rows", *HEADS], body)
