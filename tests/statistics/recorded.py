"""Recorded gates with a known truth: real results, and what is known of each row of them.

The sources, each with its licence: the results tree of devitocodes/thematrix (MIT), an asv tree and process medians of an H200 of this
project's prototype (both beside the checkout), and this repository's own H200 runs: the accepted ones (`baselines/asv`), and the first
ones (`docs/data/baseline-t1`) with what was held against them (`docs/data/planted-h200`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ci import baseline as baselines
from ci import noise
from ci.compare import compare_history
from ci.model import CommitResult, RowVerdict
from ci.results import load_commit, read_tree
from ci.screen import ALPHA, SCREENED
from ci.verdict_file import load as load_verdict
from tests.statistics import ours
from tests.statistics.records import kept_runs, read_processes

FLAT_MACHINES = ("gpu00-Standard-NC6-Promo_1x1-acc", "gpu00-Standard-NC6-Promo_1x1-omp")
REGRESSED_MACHINE = "gpu01-Standard-NC24-Promo_1x4-mpi-acc"
LAST_GOOD = "bd92e5a7"
LATER = ("27cd702a", "34663d7d", "46cd3b99", "1ee45cee", "6d7bbfea")
BEFORE_BAD_RUNNER, BAD_RUNNER = "4f7b31a9", "c3eaad27"
METRIC = "track_gflopss"
FIRST, ACCEPTED = "H200, this suite (t1)", "H200, this suite (t2)"
"""This repository's runs: the first ones with the timers of protocol t1, and the accepted ones."""
DROPPED = frozenset(
    {
        "IsotropicAcousticForward",
        "IsotropicAcousticAdjoint",
        "IsotropicAcousticJacobian",
        "IsotropicSSAForward",
        "IsotropicSSAAdjoint",
        "IsotropicSSAJacobian",
        "TTIAcousticForward",
        "Elastic",
        "Viscoelastic",
    }
)
"""Kernels that fell to .53 to .80 on one machine from 27cd702a on."""


@dataclass(frozen=True)
class RecordedRow:
    """One row: `base` [B, K] and `head` [K'] in ln latency, whether it is known to be slower, and what the gate's rule said."""

    base: noise.Array
    head: noise.Array
    slower: bool = False
    red: bool = False
    picked: bool = False


@dataclass(frozen=True)
class Recorded:
    """One run with its history.

    Attributes:
        source: Group of the table.
        name: Which run.
        clean: Nothing is slower by a change of the code; a bad runner is clean.
        rows: Without controls and without rows of unknown truth.
        unfit: The gate's rule called the runner unfit.
    """

    source: str
    name: str
    clean: bool
    rows: tuple[RecordedRow, ...]
    unfit: bool
    told: str = field(default="", compare=False)


def from_history(source: str, name: str, history: Sequence[CommitResult], head: CommitResult, slower: frozenset[str]) -> Recorded:
    """A commit of a foreign tree against earlier ones; the gate's verdict is `ci.compare.compare_history` of this one run."""
    result = compare_history(history, [head])
    rows = []
    for row in result.rows:
        now = head.rows.get(row.key)
        if now is None or row.effect is None or now.state != "measured":
            continue
        past = [commit.rows.get(row.key) for commit in history]
        alike = [r for r in past if r is not None and r.state == "measured" and (r.version, r.unit) == (now.version, now.unit)]
        base = np.array([[float(np.median(noise.log_latency(r.samples, r.direction)))] for r in alike])
        kernel = row.key.benchmark.split(".")[1]
        regressed = row.verdict is RowVerdict.REGRESSED
        if slower and kernel == "TTIAcousticAdjoint":
            continue  # it fell to .94: whether that is a regression is for a band to say
        value = noise.log_latency(now.samples, now.direction)
        rows.append(RecordedRow(base, value, kernel in slower, regressed, SCREENED in row.flags))
    return Recorded(source, name, not slower, tuple(rows), result.exit_code == 5, result.reason)


def thematrix(folder: Path) -> Iterator[Recorded]:
    """The real results tree of a GPU suite, one value a row and commit."""
    tree = read_tree(folder / "results")
    source = "thematrix, GPU machines"

    def commits(machine: str) -> dict[str, CommitResult]:
        return {
            result.commit[:8]: replace(result, rows={key: row for key, row in result.rows.items() if key.benchmark.endswith(METRIC)})
            for result in tree.commits(machine)
        }

    for machine in (*FLAT_MACHINES, REGRESSED_MACHINE):
        known = commits(machine)
        names = list(known)
        history = [known[name] for name in names[: names.index(LAST_GOOD) + 1]]
        slower = DROPPED if machine == REGRESSED_MACHINE else frozenset()
        for head in LATER:
            yield from_history(source, f"{machine} {head}", history, known[head], slower)
        if machine != REGRESSED_MACHINE:
            bad = [known[name] for name in names[: names.index(BEFORE_BAD_RUNNER) + 1]]
            yield from_history(f"{source}, bad runner", f"{machine} {BAD_RUNNER}", bad, known[BAD_RUNNER], frozenset())


def judged(
    source: str,
    name: str,
    base: noise.Array,
    head: noise.Array,
    layout: ours.Layout,
    slower: Sequence[bool],
    *,
    clean: bool,
    over_floors: tuple[noise.Array, noise.Array] | None = None,
) -> Recorded:
    """A run with controls: base [rows, B, K], head [rows, K']; the gate's one-run verdict is that of `ci.screen.judge`, by arrays.

    `over_floors` are base and head with their floors taken off, which the gate compares; the other rules know no floors.
    """
    ours_base, ours_head = over_floors or (base, head)
    screened = ours.screen(noise.fast60(ours_base), noise.fast60(ours_head), layout)
    rows = layout.judged
    holm = np.zeros(len(layout.names), dtype=np.bool_)
    holm[rows] = noise.holm(screened.p_value[rows], ALPHA)
    red = holm & (np.expm1(screened.z) >= screened.floor) & (not screened.unfit)
    picked = screened.picked()
    made = tuple(RecordedRow(base[row], head[row], bool(slower[row]), bool(red[row]), bool(picked[row])) for row in rows)
    return Recorded(source, name, clean, made, screened.unfit)


def _matrix(files: Sequence[Path]) -> tuple[list[str], noise.Array]:
    tables = [json.loads(file.read_text(encoding="utf-8"))["rows"] for file in files]
    names = [name for name in tables[0] if all(name in table and table[name].get("us") for table in tables)]
    return names, np.array([[math.log(table[name]["us"]) for table in tables] for name in names])


def _bottleneck(name: str) -> str:
    parts = name.split("/")
    if parts[0] == "ctl":
        return {"copy": "write-bandwidth", "read": "read-bandwidth"}.get(parts[1].partition("_")[0], "compute")
    if parts[0] == "decode":
        return "dequant" if parts[1] == "fp8" else "read-bandwidth"
    if parts[0] == "scatter":
        return "write-bandwidth" if int(parts[2][1:]) >= 4096 else "launch"
    return "host"


def do_bench_processes(folder: Path) -> Iterator[Recorded]:
    """Fresh processes of one code under `do_bench`: each held against the other processes of boot 1, one process a run."""
    boots = [sorted((folder / boot).glob("*.json")) for boot in ("boot1", "boot2")]
    names, y = _matrix([file for boot in boots for file in boot])
    layout = ours.layout_of(names, [_bottleneck(name) for name in names], [name.startswith("ctl/") for name in names])
    first = len(boots[0])
    for head in range(y.shape[1]):
        base = [i for i in range(first) if i != head]
        yield judged("H200, do_bench", f"process {head + 1}", y[:, base, None], y[:, [head]], layout, [False] * len(names), clean=True)


def planted_values(folder: Path) -> Iterator[Recorded]:
    """Five processes of two commits, the Decode values of one multiplied by .97 as they were returned; the rest is an A/A."""
    base, head = load_commit(folder, "H200", "302f5103"), load_commit(folder, "H200", "04ba6b59")
    keys = sorted(base.rows)
    sides = [np.array([noise.log_latency(side.rows[key].samples, side.rows[key].direction) for key in keys]) for side in (base, head)]
    names = [str(key) for key in keys]
    bottlenecks = []
    for name in names:
        if "Control" in name:
            bottlenecks.append("compute" if "matmul" in name else "write-bandwidth" if "copy" in name else "read-bandwidth")
        else:
            large = any(f", {count})" in name for count in (4096, 16384))
            bottlenecks.append("read-bandwidth" if "Decode" in name else "write-bandwidth" if large else "launch")
    slower = np.array(["Decode" in name for name in names])
    for planted in (True, False):
        keep = np.flatnonzero(slower == planted) if not planted else np.arange(len(names))
        layout = ours.layout_of([names[i] for i in keep], [bottlenecks[i] for i in keep], ["Control" in names[i] for i in keep])
        what = "values times .97" if planted else "rows that were left alone"
        yield judged("H200, graph replay", what, sides[0][keep, :, None], sides[1][keep], layout, slower[keep].tolist(), clean=not planted)


def held_out(source: str, folders: Sequence[Path]) -> Iterator[Recorded]:
    """Each kept run against the others."""
    processes = read_processes(folders)
    held = np.stack(processes.runs(), axis=1)
    runs = np.stack(processes.as_measured().runs(), axis=1)
    layout = processes.layout
    for i, folder in enumerate(folders):
        others = [j for j in range(len(folders)) if j != i]
        nothing = [False] * len(layout.names)
        pair = held[:, others], held[:, i]
        yield judged(source, folder.name, runs[:, others], runs[:, i], layout, nothing, clean=True, over_floors=pair)


def planted_gates(root: Path) -> Iterator[Recorded]:
    """A planted and an unchanged commit, measured as protocol t1 did, against the runs of the first baseline."""
    first = root / "docs" / "data" / "baseline-t1"
    processes = read_processes(kept_runs(first / "runs")).as_measured()
    runs = np.stack(processes.runs(), axis=1)
    layout = processes.layout
    stored = baselines.load(first / "NVIDIA_H200.json")
    for name in ("gate-unchanged", "gate-planted"):
        verdict = load_verdict((root / "docs" / "data" / "planted-h200" / f"{name}.verdict.json").read_text(encoding="utf-8"))
        found = {
            str(row.key): row
            for row in verdict.rows
            if row.samples
            and row.record is not None
            and str(row.key) in stored.rows
            and row.record.version == stored.rows[str(row.key)].version
        }
        keep = [i for i, key in enumerate(layout.names) if key in found]
        part = layout.take(keep)
        head = np.array([noise.log_latency(found[key].samples, found[key].direction) for key in part.names])
        planted = name == "gate-planted"
        slower = [planted and "KVWrite" in key for key in part.names]
        yield judged(FIRST, name, runs[keep], head, part, slower, clean=not planted)


def all_recorded(root: Path, shared_data: Path) -> list[Recorded]:
    """Every recorded gate, by source."""
    return [
        *thematrix(shared_data / "thematrix_gpu_asv"),
        *do_bench_processes(shared_data / "h200_noise"),
        *planted_values(shared_data / "h200_asv"),
        *held_out(FIRST, kept_runs(root / "docs" / "data" / "baseline-t1" / "runs")),
        *planted_gates(root),
        *held_out(ACCEPTED, kept_runs(root / "baselines" / "asv")),
    ]


__all__ = ["DROPPED", "FLAT_MACHINES", "LATER", "Recorded", "RecordedRow", "all_recorded"]
