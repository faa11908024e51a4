"""The one command: measure, compare, confirm, report.

With a baseline for this device on the base branch, HEAD is measured and held against it; what looks suspicious is measured a second time.
Without one, merge-base and HEAD are measured in interleaved pairs of fresh processes; where HEAD is the merge-base, it is compared with
itself, which shows what this machine can see.
"""

from __future__ import annotations

import datetime
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console

from ci import baseline as baselines
from ci import compiled_gate, lost_rows, run
from ci.baseline import Baseline
from ci.compare import compare_baseline, needs_second_run
from ci.compiled import with_compiled
from ci.confirm import compare_pairs
from ci.device import Device, detect
from ci.errors import BaselineError, UsageError
from ci.jsonio import write_atomic
from ci.model import CommitResult, GateResult, RowKey, RowOutcome, RowVerdict
from ci.repo import Commit, Repository
from ci.report import write_report
from ci.run import Places, RunPlan
from ci.terminal import render_terminal
from ci.verdict_file import dump

SCREEN_ROUNDS = 3
PAIRS = 12
_STATE = "gate-state.json"
_RUNS = ("1", "2", "pairs", "compiled")
"""Folders in a report's `runs/` that a gate makes."""


@dataclass(frozen=True)
class Options:
    """What `python -m ci gate` was asked for."""

    directory: Path
    base: str | None = None
    select: str | None = None
    pairs: int = PAIRS
    rounds: int = SCREEN_ROUNDS
    ignore_baseline: bool = False
    require_baseline: bool = False
    resume: bool = True
    compiled: bool = True
    skip_identical: bool = False
    skip: tuple[str, ...] = ()
    """Ids of rows that `skip_identical` found."""


def gate(root: Path, options: Options, console: Console) -> GateResult:
    """Runs the gate and writes the report.

    Returns:
        The verdict; `exit_code` is what the process should exit with.
    Raises:
        GateError: The gate could not be run; nothing was decided.
    """
    clear(options.directory)
    situation = look(root, options)
    compiled = None
    if options.compiled:
        compiled = compiled_gate.judge(
            situation.repository,
            situation.places,
            situation.tip,
            situation.base,
            situation.head,
            select=options.select,
            directory=options.directory / "runs" / "compiled",
            console=console,
        )
    if options.skip_identical:
        skip = compiled_gate.rows_to_skip(situation.repository, situation.places, situation.device, situation.base, situation.head, console)
        options = replace(options, skip=skip)
    if situation.baseline is None:
        result = _against_merge_base(situation, options, console)
    else:
        result = _against_baseline(situation, situation.baseline, options, console)
    result = replace(
        result,
        notices=(*situation.notices, *result.notices),
        created_at=f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
    )
    result = lost_rows.judged(result, situation.repository, situation.base, select=options.select)
    if compiled is not None:
        result = with_compiled(result, compiled)
    publish(result, options.directory, console)
    return result


@dataclass(frozen=True)
class Situation:
    """What a gate finds before it measures: the commits, the device, and the baseline if the base branch has one."""

    repository: Repository
    places: Places
    device: Device
    head: Commit
    tip: Commit
    base: Commit
    notices: list[str]
    baseline: Baseline | None

    def pair(self) -> tuple[Commit, Commit]:
        """The two commits of a comparison without a baseline: a commit on its own is compared with an empty commit on it."""
        if self.base.sha != self.head.sha:
            return self.base, self.head
        return self.head, self.repository.empty_commit_on(self.head)


def look(root: Path, options: Options) -> Situation:
    """Finds out what is to be compared.

    Raises:
        GateError: The repository, the device or the baseline cannot be used.
    """
    repository = Repository(root)
    device = detect()
    head = repository.head()
    tip = repository.base(options.base)
    base = repository.merge_base(tip, head)
    notices = repository.review_notices(base, head)
    baseline = None if options.ignore_baseline else baseline_of(repository, tip, device.key)
    if baseline is not None:
        stale = of_another_protocol(baseline, root, device.key)
        if stale and options.require_baseline:
            raise BaselineError(stale)
        if stale:
            notices.append(f"{stale} Until then merge-base and HEAD are compared directly.")
            baseline = None
    if baseline is None and options.require_baseline:
        raise BaselineError(
            f"There is no baselines/{device.key}.json on {tip.label} ({tip.short}): record one with `python -m ci baseline"
            " record`, or leave --require-baseline out to compare with the merge-base."
        )
    if baseline is None and base.sha == head.sha and repository.is_shallow:
        raise UsageError(
            f"{repository.root} is a shallow clone, in which a commit cannot be compared with itself: run `git fetch --unshallow`."
        )
    return Situation(repository, Places(repository.root), device, head, tip, base, notices, baseline)


def of_another_protocol(baseline: Baseline, root: Path, device: str) -> str | None:
    """What is wrong where the checkout's timers are not those of the baseline; None where they are, or none are found."""
    timers = root / "asv_bench" / "microbench.py"
    found = re.search(r'^PROTOCOL = "(\w+)"', timers.read_text(encoding="utf-8"), re.MULTILINE) if timers.is_file() else None
    if found is None or found[1] == baseline.protocol.hash:
        return None
    return (
        f"baselines/{device}.json was measured under protocol {baseline.protocol.hash!r}, the instrument of this checkout is {found[1]!r}:"
        " record it again with `python -m ci baseline record`."
    )


def clear(directory: Path) -> None:
    """Makes the folder, and removes the last run's verdict and report.

    A run that ends without a verdict must not leave an old one to be read.
    A folder without a verdict.json is nobody's report, and is left as it is.

    Raises:
        UsageError: It is no folder.
    """
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is no folder: name one for the report with --report.")
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "verdict.json").is_file():
        return
    for name in ("verdict.json", "index.html", "summary.md", "junit.xml"):
        (directory / name).unlink(missing_ok=True)
    for name in _RUNS:
        shutil.rmtree(directory / "runs" / name, ignore_errors=True)


def publish(result: GateResult, directory: Path, console: Console) -> None:
    """Writes verdict.json and the report, and prints the table."""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / "verdict.json", dump(result))
    written = write_report(result, directory)
    render_terminal(result, console)
    console.print(f"report: {next(path for path in written if path.suffix == '.html')}", highlight=False, soft_wrap=True)


def baseline_of(repository: Repository, tip: Commit, machine: str) -> Baseline | None:
    """The baseline of a device as the base branch has it: a change cannot bring its own."""
    path = f"baselines/{machine}.json"
    content = repository.read(tip, path)
    return None if content is None else baselines.load(content, name=f"{path} of {tip.label}")


def _against_baseline(situation: Situation, baseline: Baseline, options: Options, console: Console) -> GateResult:
    places, device, head = situation.places, situation.device, situation.head
    console.print(
        f"{device.name}: measuring {head.label} ({head.short}) against the stored baseline, {options.rounds} processes", highlight=False
    )
    runs: list[CommitResult] = []
    while True:
        run.forget(places, device, [head])
        run.run_asv(places, RunPlan((head,), options.rounds, select=options.select, skip=options.skip), console)
        runs.append(selected(run.load(places, device, head), options.select, options.skip))
        run.keep(places, device, [head], options.directory / "runs" / str(len(runs)))
        if options.select or options.skip:
            baseline = selected_baseline(baseline, runs[0], options.select or "", options.skip)
        if len(runs) == 2 or not needs_second_run(runs, baseline):
            break
        console.print("some rows look different: measuring once more", highlight=False)
    return _told(options, runs[0], compare_baseline(runs, baseline, base=situation.base.sha, head=head.sha, device=device.name))


def _against_merge_base(situation: Situation, options: Options, console: Console) -> GateResult:
    places, device = situation.places, situation.device
    same = situation.base.sha == situation.head.sha
    base, head = situation.pair()
    what = f"{base.label} ({base.short}) with itself" if same else f"{base.label} ({base.short}) with {head.label} ({head.short})"
    console.print(f"{device.name}: no stored baseline, comparing {what} in {options.pairs} interleaved pairs of processes", highlight=False)
    measured = [selected(result, options.select, options.skip) for result in measure_pairs(places, device, (base, head), options, console)]
    run.keep(places, device, (base, head), options.directory / "runs" / "pairs")
    result = _told(options, measured[1], compare_pairs(*measured, mode="aa" if same else "ab", device=device.name))
    if same:
        offer = f"To hold later changes against this state, record baselines/{device.key}.json: CONTRIBUTING.md says how."
        result = replace(result, notices=(*result.notices, offer))
    return result


def measure_pairs(places: Places, device: Device, commits: Sequence[Commit], options: Options, console: Console) -> list[CommitResult]:
    """Measures commits in interleaved rounds; a run that was interrupted goes on where it stopped."""
    state_file = places.root / ".asv" / _STATE
    state = {"commits": [commit.sha for commit in commits], "select": options.select, "skip": list(options.skip), "device": device.key}
    done = 0
    if options.resume and _read_state(state_file) == state:
        done = _finished_rounds(places, device, commits)
    if done == 0:
        run.forget(places, device, commits)
    elif done < options.pairs:
        console.print(f"going on after {done} pairs of an interrupted run", highlight=False)
    write_atomic(state_file, json.dumps(state) + "\n")
    if done < options.pairs:
        plan = RunPlan(tuple(commits), options.pairs - done, append=done > 0, select=options.select, skip=options.skip)
        run.run_asv(places, plan, console)
    measured = [run.load(places, device, commit) for commit in commits]
    state_file.unlink(missing_ok=True)
    return measured


def selected(result: CommitResult, select: str | None, skip: Sequence[str] = ()) -> CommitResult:
    """Without the rows that the selection left out: asv lists them as skipped, and no process recorded them."""
    if select is None and not skip:
        return result
    return replace(result, rows={key: row for key, row in result.rows.items() if row.records or row.state != "skipped"})


def selected_baseline(baseline: Baseline, measured: CommitResult, select: str, skip: Sequence[str] = ()) -> Baseline:
    """The rows that were measured, and those that should have been: a selected row that is gone is still missed."""
    kept = {
        name: row
        for name, row in baseline.rows.items()
        if row.key in measured.rows or (not row.control and name not in skip and re.search(select, name) is not None)
    }
    return msgspec.structs.replace(baseline, rows=kept)


def _told(options: Options, measured: CommitResult, result: GateResult) -> GateResult:
    """Says in the report what was not measured: a selection's other rows, and rows that launch exactly what the base does."""
    if options.skip:
        why = "not measured: it launches exactly what the merge-base does (--skip-identical)"
        rows = tuple(RowOutcome(key=_key_of(name), verdict=RowVerdict.SKIPPED, reason=why, section="other") for name in options.skip)
        result = replace(result, rows=(*result.rows, *rows), notices=(*result.notices, f"{len(rows)} rows were {why}."))
    if options.select is None:
        return result
    return replace(result, notices=(*result.notices, f"Only the {len(measured.rows)} rows that {options.select!r} selects were measured."))


def _key_of(row_id: str) -> RowKey:
    benchmark, found, case = row_id.partition("(")
    return RowKey(benchmark, (case.removesuffix(")"),) if found else ())


def _read_state(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _finished_rounds(places: Places, device: Device, commits: Sequence[Commit]) -> int:
    """Rounds that every commit has in asv's results; 0 where one has none that can be used."""
    counts = []
    for commit in commits:
        if not list((places.results / device.key).glob(f"{commit.sha[:8]}-*.json")):
            return 0
        rows = run.load(places, device, commit).rows.values()
        counts.append(max((len(row.samples) for row in rows), default=0))
    return min(counts)
