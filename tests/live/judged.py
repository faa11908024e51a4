"""Process records of two commits, measured alternately, judged as the gate's confirm stage judges them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ci import baseline as baselines
from ci import gate, sequential
from ci.compare import baseline_floors
from ci.confirm import as_controls, judge_controls
from ci.device import detect
from ci.errors import InputError
from ci.model import CommitResult, ProcessRecord, RowKey, RowResult
from ci.pairs import Pairs, outcome, sort_out
from ci.results import direction_of
from ci.sequential import LOOKS


def side(records: Sequence[ProcessRecord]) -> CommitResult:
    """The processes of one commit as the gate's results: row by row, a sample a process.

    Raises:
        InputError: Nobody knows which way a row's unit is better.
    """
    rows: dict[RowKey, RowResult] = {}
    for record in records:
        for row in record.rows:
            if row.status != "ok" or row.value is None:
                continue
            direction = direction_of(row.unit, "", None)
            if direction is None:
                raise InputError(f"{row.key} has the unit {row.unit!r}, of which nobody knows which way is better; leave the row out")
            known = rows.get(row.key) or RowResult(row.key, row.unit, direction, row.version, "measured")
            rows[row.key] = replace(known, samples=(*known.samples, row.value), records=(*known.records, row))
    first = records[0]
    return CommitResult(detect().key, first.commit, first.env_name, 0, rows, {}, first.source, tuple(records))


_NO_BAND = (-1.0, math.inf)
"""Nothing is drawn here."""


def stored_floors(root: Path) -> dict[RowKey, float]:
    """The floors of the checkout's baseline of this device; none where it has none that the checkout's timers measured."""
    path = root / "baselines" / f"{detect().key}.json"
    if not path.is_file():
        return {}
    stored = baselines.load(path)
    return {} if gate.of_another_protocol(stored, root, detect().key) else baseline_floors(stored)


def judge(base: Sequence[ProcessRecord], head: Sequence[ProcessRecord], floors: Mapping[RowKey, float]) -> dict[str, Any]:
    """What the confirm stage says of the rows, as if the screen had picked every one.

    Args:
        base, head: As many of each; number i of both is pair i. The looks are those that the pairs suffice for, the first one in any case.
        floors: Of the stored baseline, by row; the instrument's where a row has none.
    Returns:
        `looks`: pairs at each look made; `unfit`: what shows that the machine moved; `rows`: by id, verdict, effect, p, pairs, floor.
    """
    found, others = sort_out(side(base), side(head))
    rows: list[Pairs] = [replace(row, least_floor=floors.get(row.key, 0.0)) for row in found if not row.control]
    looks = [count for count in LOOKS if count <= len(base)] or [LOOKS[0]]
    decisions = sequential.decide([row.series for row in rows], looks=looks)
    judged = [
        outcome(replace(row, d=row.d[: decided.pairs]), decided.verdict, "", decided.effect, decided.p_value, None, _NO_BAND)
        for row, decided in zip(rows, decisions, strict=True)
    ]
    _, unfit = judge_controls([row for row in found if row.control], rows)
    judged, also_unfit = as_controls(rows, judged)
    made = {
        str(row.key): {
            "verdict": row.verdict.value,
            "effect": row.effect,
            "p": row.p_value,
            "pairs": row.num_pairs,
            "floor": row.floor,
            "class": "" if row.record is None else row.record.bottleneck,
        }
        for row in judged
    }
    told = {str(row.key): {"verdict": row.verdict.value, "effect": row.effect, "reason": row.reason} for row in others if not row.control}
    return {"looks": looks, "unfit": unfit or also_unfit, "rows": {**made, **told}}
