"""`power`: one row of each bottleneck class is really slower by a calibrated share; what the confirm stage says of it in pairs.

The rows are slowed down by `tests.live.plants`, all in one commit for each size; the knobs are found by pairs of processes of the base and
the slowed commit, and then stay. The pairs that are judged are measured after that. The screen is not part of it: its share of the power is
in `docs/statistics.md`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ci import staged
from ci.errors import UsageError
from tests.live.asked import Session
from tests.live.calibrate import Reading, close, effect_of, next_knob
from tests.live.judged import judge, stored_floors
from tests.live.measure import Instrument, LiveError, Source, alone, measured, unmeasured
from tests.live.places import Clone
from tests.live.plants import Slowed, chosen, loop_ns, plant
from tests.statistics import compact

PAIRS = 12
READINGS = 3
BASE = "base"


def slowed_commit(session: Session, size: str, knobs: Mapping[str, int]) -> Source:
    """A checkout with a commit on `main` that slows the rows down by these knobs."""
    path = session.clone.checkout_at(session.work / f"slowed-{size}")
    plant(path, knobs, session.asked.device_type)
    return Source(path, Clone(path).commit(f"slower by {size} %"))


def latencies(record: Mapping[str, Any]) -> dict[str, float]:
    """Latency in us of each row of a record that has one, by id."""
    return {f"{row['benchmark']}({', '.join(row['params'])})": row["latency_us"] for row in record["rows"] if row["status"] == "ok"}


def in_order(arms: Sequence[str], number: int) -> list[str]:
    """The arms of round `number`, from 0: every second one backwards, so that a drift favours none."""
    return list(arms) if number % 2 == 0 else list(reversed(arms))


def power(session: Session) -> None:
    """Calibrates the slow-downs and measures pairs; a folder that has some of this commit, these rows and sizes goes on.

    Raises:
        OutOfTimeError: Fewer pairs than asked were measured.
        LiveError: A row could not be measured.
        UsageError: The folder's results are of something else.
    """
    asked = session.asked
    slowed = chosen(asked.select, asked.device_type)
    sizes = [f"{size:g}" for size in asked.sizes]
    instrument = Instrument(session.clone.path, staged.pattern_of([one.id_on(asked.device_type) for one in slowed]))
    base = Source(session.clone.checkout_at(session.work / "base"), session.clone.head)
    asked_for = {"commit": base.commit, "rows": {one.name: one.id_on(asked.device_type) for one in slowed}, "sizes": sizes}
    session.kept.take_up("asked", "knobs", "readings", "calibrated", "loop_ns")
    state = session.kept.found
    if state.setdefault("asked", asked_for) != asked_for:
        raise UsageError(f"{session.kept.path} is of other rows or other sizes: name another --out.")
    path = asked.out / "power.slowed.json"
    found = compact.read(path) if state.get("knobs") and path.is_file() else []
    state["how"] = {one.name: one.how_on(asked.device_type) for one in slowed}
    with alone():
        if not state.get("knobs"):
            _calibrate(session, instrument, base, slowed, sizes)
        sources = {BASE: base, **{size: slowed_commit(session, size, state["knobs"][size]) for size in sizes}}
        _measure(session, instrument, sources, found, path)


def _calibrate(session: Session, instrument: Instrument, base: Source, slowed: Sequence[Slowed], sizes: Sequence[str]) -> None:
    """Finds the knobs; what was read is kept beside them."""
    watch, device_type = session.watch, session.asked.device_type
    ids = {one.name: one.id_on(device_type) for one in slowed}
    loops = {one.name for one in slowed if one.loops(device_type)}

    def read(source: Source, told: str) -> dict[str, float]:
        with watch.step("process", told):
            record = measured(instrument, source, watch)
        found = latencies(record)
        lacking = [row for row in ids.values() if row not in found]
        if lacking:
            why = [one for one in unmeasured(record) if any(one.startswith(row.partition("(")[2][:-1]) for row in lacking)]
            raise LiveError(f"{told}: no number of {lacking[0]}; {'; '.join(why) or 'it is not there'}")
        return found

    first, turn_ns = read(base, "reading 1, base"), loop_ns()
    knobs = {
        size: {one.name: one.first_knob(float(size) / 100, first[ids[one.name]], device_type, turn_ns) for one in slowed} for size in sizes
    }
    readings: dict[str, list[Reading]] = {one.name: [] for one in slowed}
    kept: list[dict[str, Any]] = []
    done = {size: {name: "loop" if name in loops else "" for name in ids} for size in sizes}
    for number in range(1 if session.asked.quick else READINGS):
        taken = {BASE: first} if number == 0 else {}
        used = {size: dict(knobs[size]) for size in sizes}
        for arm in in_order([BASE, *sizes], number):
            if arm not in taken:
                source = base if arm == BASE else slowed_commit(session, arm, knobs[arm])
                taken[arm] = read(source, f"reading {number + 1}, {arm if arm == BASE else f'{arm} %'}")
        for size in sizes:
            for name, row in ids.items():
                reading = Reading(used[size][name], effect_of(taken[BASE][row], taken[size][row]))
                readings[name].append(reading)
                kept.append({"row": name, "size": size, "reading": number + 1, "knob": reading.knob, "effect": reading.effect})
        for size in sizes:
            for name in ids.keys() - loops:
                done[size][name] = "read" if close(readings[name], knobs[size][name], float(size) / 100) else ""
                if not done[size][name]:
                    knobs[size][name] = next_knob(readings[name], float(size) / 100)
        session.kept.found |= {"readings": kept}
        session.write()
        if all(all(of_size.values()) for of_size in done.values()):
            break
    session.kept.found |= {"knobs": knobs, "calibrated": done, "loop_ns": turn_ns}
    session.write()


def _measure(session: Session, instrument: Instrument, sources: Mapping[str, Source], found: list[compact.Labelled], path: Path) -> None:
    asked, watch = session.asked, session.watch
    wanted = asked.pairs or (1 if asked.quick else PAIRS)
    floors = stored_floors(asked.root)
    for number in range(len(found) // len(sources), wanted):
        of_round = {}
        seconds = {}
        for arm in in_order(list(sources), number):
            with watch.step("process", f"pair {number + 1} of {wanted}, {arm if arm == BASE else f'{arm} %'}"):
                began_s = watch.elapsed_s
                of_round[arm] = measured(instrument, sources[arm], watch)
                seconds[arm] = round(watch.elapsed_s - began_s, 2)
        found += [compact.Labelled(of_round[arm], {"pair": number, "arm": arm, "wall_s": seconds[arm]}) for arm in sources]
        compact.write(path, found)
        session.kept.found |= verdicts(found, path, floors)
        session.write()


def verdicts(found: Sequence[compact.Labelled], source: Path, floors: Mapping[Any, float]) -> dict[str, Any]:
    """What the confirm stage says of each size by the pairs that are there; recomputed from the file of processes alone."""
    arms: dict[str, list[Any]] = {}
    for one, record in zip(found, compact.records_of(found, source), strict=True):
        arms.setdefault(str(one.label["arm"]), []).append(record)
    base = arms.pop(BASE)
    spent = {arm: math.fsum(one.label.get("wall_s", 0.0) for one in found if one.label["arm"] == arm) for arm in (BASE, *arms)}
    return {
        "pairs": len(base),
        "seconds": {size: round(spent[BASE] + spent[size], 1) for size in sorted(arms)},
        "floors": {str(key): floor for key, floor in floors.items()},
        "sizes": {size: judge(base, records, floors) for size, records in sorted(arms.items())},
    }
