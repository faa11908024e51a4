"""`replay`: the eight rules of other systems and the gate's own on the same recorded gates.

No recorded gate has pairs to confirm with, so that the gate's rule stands twice: what its one-run verdict (Holm over all rows) calls
REGRESSED, and what its screen would have sent to the confirm stage. `resample` shows the stage itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.statistics import rules, tables
from tests.statistics.recorded import Recorded, RecordedRow

ONE_RUN = "ours, one run's verdict"
SCREEN = "ours, what the screen picks"


def _found(row: RecordedRow, name: str) -> bool:
    if name == ONE_RUN:
        return row.red
    if name == SCREEN:
        return row.picked
    return bool(rules.RULES[name](row.base, row.head))


def replay(gates: Sequence[Recorded]) -> list[dict[str, Any]]:
    """Counts of each rule: runs without a regression that fail, and known regressions that are found, by source.

    A run that the gate calls unfit is counted apart: it ends with exit code 5, and no row of it is called slower.
    """
    made = []
    for name in (*rules.RULES, ONE_RUN, SCREEN):
        own = name in (ONE_RUN, SCREEN)
        red: dict[str, list[int]] = {}
        found: dict[str, list[int]] = {}
        unfit = 0
        for gate in gates:
            stopped = own and gate.unfit
            if gate.clean:
                unfit += stopped
                count = red.setdefault(gate.source, [0, 0])
                count[0] += not stopped and any(_found(row, name) for row in gate.rows)
                count[1] += 1
            slower = [row for row in gate.rows if row.slower]
            if slower:
                count = found.setdefault(gate.source, [0, 0])
                count[0] += 0 if stopped else sum(_found(row, name) for row in slower)
                count[1] += len(slower)
        made.append({"rule": name, "red": red, "found": found, "unfit": unfit})
    return made


def _sum(counts: dict[str, list[int]]) -> tuple[int, int]:
    return sum(found for found, _ in counts.values()), sum(of for _, of in counts.values())


def render(data: dict[str, Any]) -> str:
    """The tables, as Markdown: all sources together, then each by itself in counts."""
    head = ["rule", "whole-run false reds (95 % interval)", "known regressions found (95 % interval)"]
    body = []
    for row in data["rows"]:
        red = tables.share(*_sum(row["red"])) + (f", {row['unfit']} more unfit" if row["unfit"] else "")
        body.append([row["rule"], red, tables.share(*_sum(row["found"]))])
    first = data["rows"][0]
    by_source = ["rule", *(f"false reds: {name}" for name in first["red"]), *(f"found: {name}" for name in first["found"])]
    counts = [[row["rule"], *(f"{found}/{of}" for part in ("red", "found") for found, of in row[part].values())] for row in data["rows"]]
    return f"{tables.markdown(head, body)}\n{tables.markdown(by_source, counts)}"
