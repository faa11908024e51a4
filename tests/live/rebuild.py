"""`rebuild`: how far a kernel that is built anew differs from the one before, in processes of one commit.

Groups of processes alternate: one of the old build, with one Triton cache and checkout all along, and one of a fresh build, with an empty
cache and a checkout in a new place; what a fresh one needs is compiled by a process of its own before. The difference of the two groups
holds the effect of the build and the spread of processes; the spread within groups is known, so that the effect's is what is left.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from tests.live.asked import Session
from tests.live.measure import Instrument, LiveError, Source, alone, compile_rows, measured
from tests.statistics import compact
from tests.statistics.ours import Array
from tests.statistics.records import ln_latency

GROUPS = 4
PROCESSES = 2
CONFIDENCE = 0.95


def build_effect(old: Array, fresh: Array, confidence: float = CONFIDENCE) -> dict[str, float]:
    """The effect of a build on one row.

    With `n` processes a group, the difference of the means of two groups has the variance of the build effect and 2 / n of that within a
    group. Their ratio is F distributed, which gives the exact interval of the ratio of variances; it is told with the spread within as
    found. Negative estimates are 0.

    Args:
        old: [groups, processes], ln latency of the old build; two groups or more, two processes or more.
        fresh: As `old`, a build of its own each.
        confidence: Of the interval.
    Returns:
        `mean`: of the differences, fresh less old; `mean_error`: its standard error; `within_sd`; `build_sd`; `low`, `high`: its interval.
    Source:
        Searle, Casella and McCulloch, Variance Components, 1992: the one-way model, and the interval of the ratio.
    """
    groups, processes = old.shape
    d = fresh.mean(axis=1) - old.mean(axis=1)
    free = 2 * groups * (processes - 1)
    within = float(old.var(axis=1, ddof=1).sum() + fresh.var(axis=1, ddof=1).sum()) / (2 * groups)
    expected = 2 * within / processes
    between = float(d.var(ddof=1))
    ratio = between / expected if expected > 0 else math.inf
    tail = (1 - confidence) / 2
    edges = [ratio / float(stats.f.ppf(level, groups - 1, free)) for level in (1 - tail, tail)] if expected > 0 else [1.0, 1.0]
    low, high = (math.sqrt(max(0.0, edge - 1) * expected) for edge in edges)
    return {
        "mean": float(d.mean()),
        "mean_error": math.sqrt(between / groups),
        "within_sd": math.sqrt(within),
        "build_sd": math.sqrt(max(0.0, between - expected)),
        "low": low,
        "high": high,
    }


def effects(found: Sequence[compact.Labelled]) -> list[dict[str, Any]]:
    """The build effect of each row that every process measured; none while there are fewer than two whole groups of each kind.

    Raises:
        InputError: A record does not follow its schema.
    """
    values: dict[str, dict[tuple[str, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    known: dict[str, Any] = {}
    for one in found:
        (record,) = compact.records_of([one], source=Path("rebuild"))
        for row in record.rows:
            if row.status == "ok":
                values[str(row.key)][one.label["build"], one.label["group"]].append(ln_latency(row))
                known[str(row.key)] = row
    made = []
    for name, table in values.items():
        sizes = [len(table[kind, number]) for kind, number in list(table)]
        groups = min(sum(kind == wanted for kind, _ in table) for wanted in ("old", "fresh"))
        count = max(sizes)
        whole = [n for n in range(groups) if len(table["old", n]) == len(table["fresh", n]) == count]
        if len(whole) < 2 or count < 2:
            continue
        old, fresh = (np.array([table[kind, n] for n in whole]) for kind in ("old", "fresh"))
        row = known[name]
        made.append({"row": name, "class": row.bottleneck, "control": row.control, "groups": len(whole), **build_effect(old, fresh)})
    return made


def pooled(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By class: the root of the mean variances of the build effect and within, and the row with the largest one."""
    made = []
    for name in sorted({row["class"] for row in rows}):
        of_class = [row for row in rows if row["class"] == name and not row["control"]]
        if of_class:
            largest = max(of_class, key=lambda row: row["build_sd"])
            sds = {field: math.sqrt(float(np.mean([row[field] ** 2 for row in of_class]))) for field in ("build_sd", "within_sd")}
            made.append({"class": name, "rows": len(of_class), **sds, "largest": largest["row"], "largest_sd": largest["build_sd"]})
    return made


def rebuild(session: Session) -> None:
    """Measures alternating groups until the count or the time is reached.

    Raises:
        OutOfTimeError: Fewer than asked were measured.
        LiveError: A process measured nothing.
    """
    asked, watch = session.asked, session.watch
    groups, processes = asked.groups or (1 if asked.quick else GROUPS), asked.processes or (1 if asked.quick else PROCESSES)
    if not asked.quick and min(groups, processes) < 2:
        raise LiveError(f"{groups} groups of {processes} processes show no spread: ask for two or more of both")
    commit, instrument = session.clone.head, Instrument(session.clone.path, asked.select)
    found: list[compact.Labelled] = []

    def source(name: str) -> Source:
        path = session.clone.checkout_at(session.work / f"build-{name}")
        return Source(path, commit, {"TRITON_CACHE_DIR": str(session.work / f"cache-{name}")})

    def compiled(name: str) -> Source:
        made = source(name)
        with watch.step("compile", f"compiling what {name} needs"):
            compile_rows(instrument, made, watch)
        return made

    with alone():
        old = compiled("old")
        for group in range(groups):
            for build in ("old", "fresh"):
                of = old if build == "old" else compiled(f"fresh-{group}")
                for number in range(processes):
                    with watch.step("process", f"group {group + 1} of {groups}, {build} build, process {number + 1} of {processes}"):
                        record = measured(instrument, of, watch)
                    found.append(compact.Labelled(record, {"build": build, "group": group, "process": number}))
                    compact.write(asked.out / f"rebuild{compact.SUFFIX}", found)
            rows = effects(found)
            session.kept.found = {"groups": group + 1, "processes_a_group": processes, "rows": rows, "classes": pooled(rows)}
            session.write()
