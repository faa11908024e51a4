"""How well the instrument repeats: the spread between fresh processes, row by row, as Markdown for the docs."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ci.errors import UsageError
from ci.model import ProcessRecord, RowRecord
from ci.noise import control_normalised
from ci.records import read_process_records
from ci.rows import serving_classes

_CLASSES = ("read-bandwidth", "dequant", "write-bandwidth", "compute", "launch", "host")
_MIN_PROCESSES = 2


def spread_table(folders: Sequence[Path]) -> str:
    """Coefficient of variation of each row's reading between fresh processes, boot by boot, in per cent.

    The last column is what the gate works with: the spread within boots after the deviation of the control rows of the class has been
    taken off, process by process.

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
    for row in rows:
        readings = [_readings(row, group) for group in groups]
        if any(None in values for values in readings):
            raise UsageError(f"{row.key} has no reading in one of the processes: name folders of whole runs.")
        known = [[value for value in values if value is not None] for values in readings]
        lines.append(
            [
                f"{', '.join(row.key.params)}{' (control)' if row.control else ''}",
                row.bottleneck,
                row.timer,
                *(_cv(values) for values in known),
                _cv([value for values in known for value in values]),
                _normalised(row, first, groups, known),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _readings(row: RowRecord, group: Sequence[ProcessRecord]) -> list[float | None]:
    return [next((r.latency_us for r in process.rows if r.key == row.key), None) for process in group]


def _cv(values: Sequence[float]) -> str:
    return f"{100 * statistics.stdev(values) / statistics.mean(values):.2f} %"


def _normalised(row: RowRecord, first: ProcessRecord, groups: Sequence[Sequence[ProcessRecord]], known: Sequence[Sequence[float]]) -> str:
    """Pooled spread within boots of ln latency less the deviation of the class's controls; empty for controls and where there are none."""
    controls = [r for r in first.rows if r.control and r.latency_us is not None and r.bottleneck in serving_classes([row.bottleneck])]
    if row.control or not controls:
        return ""
    squares, degrees = 0.0, 0
    for group, values in zip(groups, known, strict=True):
        levels = np.log(np.array([[value or math.nan for value in _readings(control, group)] for control in controls]))
        left = control_normalised(np.log(np.array([values])), levels)[0]
        squares += float(((left - left.mean()) ** 2).sum())
        degrees += len(group) - 1
    return f"{100 * math.sqrt(squares / degrees):.2f} %"
