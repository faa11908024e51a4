"""How well the instrument repeats: the spread between fresh processes, row by row, as Markdown for the docs."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ci.errors import UsageError
from ci.host_floor import TIMER
from ci.model import ProcessRecord, RowRecord
from ci.noise import control_normalised
from ci.records import read_process_records
from ci.rows import serving_classes

_CLASSES = ("read-bandwidth", "dequant", "write-bandwidth", "compute", "launch", "host")
_MIN_PROCESSES = 2

Reading = Callable[[RowRecord], float | None]


def spread_table(folders: Sequence[Path]) -> str:
    """Coefficient of variation of each row's reading between fresh processes, boot by boot, in per cent.

    A host row that is held against the floor of its own blocks has a second line, of latency over floor, which is what the gate compares;
    for all other rows it compares the latency. The last column is what the gate works with: the spread within boots after the deviation
    of the control rows of the class has been taken off, process by process.

    Args:
        folders: Folders that `python -m ci run --keep` made.
    Raises:
        UsageError: The folders hold no records, or no boot has two processes.
    """
    boots: dict[str, list[ProcessRecord]] = defaultdict(list)
    for folder in folders:
        for process in read_process_records(folder / "records"):
            boots[str(process.environment.get("boot_id"))].append(process)
    groups = [group for group in boots.values() if len(group) >= _MIN_PROCESSES]
    if not groups:
        raise UsageError(
            "no boot has two processes in these folders, so there is no spread: name folders that `python -m ci run --keep` made."
        )
    head = ["case", "class", "timer", *(f"boot {n} ({len(group)})" for n, group in enumerate(groups, 1)), "all", "normalised"]
    lines = [head, ["---"] * 3 + ["---:"] * (len(head) - 3)]
    first = groups[0][0]
    rows = sorted(
        (row for row in first.rows if row.latency_us is not None), key=lambda row: (_CLASSES.index(row.bottleneck), not row.control)
    )
    hosts = [row for row in rows if row.timer == TIMER]
    held = all(None not in _readings(row, group, over_floor) for row in hosts for group in groups)
    for row in rows:
        if any(None in _readings(row, group, latency) for group in groups):
            raise UsageError(f"{row.key} has no reading in one of the processes: name folders of whole runs.")
        lines.append(_line(row, "", first, groups, latency))
        if held and row in hosts:
            lines.append(_line(row, ", over its floor", first, groups, over_floor))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def latency(row: RowRecord) -> float | None:
    """What was measured, in us."""
    return row.latency_us


def over_floor(row: RowRecord) -> float | None:
    """Latency over the floor that the row is held against; None where there is none."""
    return None if row.latency_us is None or row.host_floor_us is None else row.latency_us / row.host_floor_us


def _line(row: RowRecord, what: str, first: ProcessRecord, groups: Sequence[Sequence[ProcessRecord]], reading: Reading) -> list[str]:
    known = [[value for value in _readings(row, group, reading) if value is not None] for group in groups]
    return [
        f"{', '.join(row.key.params)}{' (control)' if row.control else ''}{what}",
        row.bottleneck,
        row.timer,
        *(_cv(values) for values in known),
        _cv([value for values in known for value in values]),
        _normalised(row, first, groups, known, reading),
    ]


def _readings(row: RowRecord, group: Sequence[ProcessRecord], reading: Reading) -> list[float | None]:
    return [next((reading(r) for r in process.rows if r.key == row.key), None) for process in group]


def _cv(values: Sequence[float]) -> str:
    return f"{100 * statistics.stdev(values) / statistics.mean(values):.2f} %"


def _normalised(
    row: RowRecord, first: ProcessRecord, groups: Sequence[Sequence[ProcessRecord]], known: Sequence[Sequence[float]], reading: Reading
) -> str:
    """Pooled spread within boots, the deviation of the class's controls taken off; empty for controls and where there are none."""
    controls = [r for r in first.rows if r.control and r.latency_us is not None and r.bottleneck in serving_classes([row.bottleneck])]
    if row.control or not controls:
        return ""
    squares, degrees = 0.0, 0
    for group, values in zip(groups, known, strict=True):
        levels = np.log(np.array([[value or math.nan for value in _readings(control, group, reading)] for control in controls]))
        left = control_normalised(np.log(np.array([values])), levels)[0]
        squares += float(((left - left.mean()) ** 2).sum())
        degrees += len(group) - 1
    return f"{100 * math.sqrt(squares / degrees):.2f} %"
