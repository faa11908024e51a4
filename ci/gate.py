"""The one command: measure, compare, confirm, report.

With a baseline for this device on the base branch, HEAD is measured and held against it; what looks slower is then measured in pairs of
processes of merge-base and HEAD. Without one, merge-base and HEAD are measured in interleaved pairs of fresh processes, all rows; where
HEAD is the merge-base, it is compared with itself, which shows what this machine can see.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console

from ci import baseline as baselines
from ci import case as cases
from ci import compiled_gate, lost_rows, plots, run, staged
from ci.baseline import Baseline
from ci.case import CaseFile
from ci.device import Device, detect
from ci.errors import BaselineError, InputError, UsageError
from ci.jsonio import write_atomic
from ci.merge import load_kept
from ci.model import CommitResult, GateResult, RowKey
from ci.repo import Commit, Repository
from ci.report import write_report
from ci.rows import now_text
from ci.run import Places, RunPlan
from ci.sequential import LOOKS
from ci.terminal import render_terminal
from ci.verdict_file import dump

SCREEN_ROUNDS = 3
PAIRS = 12
_STATE = "gate-state.json"
_UNFINISHED = "unfinished.json"
"""In a report folder: what the gate that is measuring, or was interrupted, is about."""


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

    A gate that was interrupted goes on where it stopped: what lies whole in the report's `runs/` is not measured again.

    Returns:
        The verdict; `exit_code` is what the process should exit with.
    Raises:
        GateError: The gate could not be run; nothing was decided.
    """
    clear(options.directory)
    situation = look(root, options)
    plots.ready()  # before minutes of measuring
    if options.skip_identical:
        skip = compiled_gate.rows_to_skip(situation.repository, situation.places, situation.device, situation.base, situation.head, console)
        options = replace(options, skip=skip)
    _take_up(situation, options, console)
    if options.compiled:
        compiled_gate.compile_both(
            situation.repository,
            situation.places,
            situation.tip,
            situation.base,
            situation.head,
            select=options.select,
            directory=options.directory / "runs" / "compiled",
            console=console,
        )
    case = situation.case(options)
    if situation.baseline is None:
        _measure_pairs(situation, options, console)
    else:
        case = _measure_in_stages(case, situation, options, console)
    case = msgspec.structs.replace(case, suites=lost_rows.suites(situation.repository, situation.base))
    cases.write(case, options.directory)
    result = cases.judge(options.directory)
    publish(result, options.directory, console)
    (options.directory / _UNFINISHED).unlink(missing_ok=True)
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
    baseline: bytes | None
    """The stored baseline's file as the base branch has it."""

    def case(self, options: Options) -> CaseFile:
        """What a verdict on this situation depends on besides measurements."""
        base, head = self.pair() if self.baseline is None else (self.base, self.head)
        mode = "baseline" if self.baseline is not None else "aa" if self.base.sha == self.head.sha else "ab"
        return CaseFile(
            mode=mode,  # type: ignore[arg-type]
            device=self.device.name,
            base=base.sha,
            head=head.sha,
            select=options.select,
            skip=list(options.skip),
            notices=self.notices,
            compiled=options.compiled,
            created_at=now_text(),
        )

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
    content = None if options.ignore_baseline else stored_baseline(repository, tip, device.key)
    if content is not None:
        stored = baselines.load(content, name=f"baselines/{device.key}.json of {tip.label}")
        stale = of_another_protocol(stored, root, device.key)
        if stale and options.require_baseline:
            raise BaselineError(stale)
        if stale:
            notices.append(f"{stale} Until then merge-base and HEAD are compared directly.")
            content = None
    if content is None and options.require_baseline:
        raise BaselineError(
            f"There is no baselines/{device.key}.json on {tip.label} ({tip.short}): record one with `python -m ci baseline"
            " record`, or leave --require-baseline out to compare with the merge-base."
        )
    if content is None and base.sha == head.sha and repository.is_shallow:
        raise UsageError(
            f"{repository.root} is a shallow clone, in which a commit cannot be compared with itself: run `git fetch --unshallow`."
        )
    return Situation(repository, Places(repository.root), device, head, tip, base, notices, content)


def stored_baseline(repository: Repository, tip: Commit, device: str) -> bytes | None:
    """The baseline file of a device as the base branch has it: a change cannot bring its own."""
    return repository.read(tip, f"baselines/{device}.json")


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
    for name in ("verdict.json", "index.html", "summary.md", "junit.xml", cases.FILE_NAME, cases.BASELINE_NAME):
        (directory / name).unlink(missing_ok=True)
    for name in cases.RUN_NAMES:
        shutil.rmtree(directory / "runs" / name, ignore_errors=True)


def publish(result: GateResult, directory: Path, console: Console) -> None:
    """Writes verdict.json and the report, and prints the table.

    Raises:
        UsageError: The report cannot be drawn; then nothing is written.
    """
    plots.ready()
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / "verdict.json", dump(result))
    written = write_report(result, directory)
    render_terminal(result, console)
    console.print(f"report: {next(path for path in written if path.suffix == '.html')}", highlight=False, soft_wrap=True)


def _take_up(situation: Situation, options: Options, console: Console) -> None:
    """Keeps what an interrupted gate of the same commits, rows and baseline left, and removes what another one left.

    Raises:
        UsageError: The folder's `runs/` holds folders of the same names that no gate made.
    """
    directory = options.directory
    wanted = {
        "base": situation.base.sha,
        "head": situation.head.sha,
        "device": situation.device.key,
        "baseline": None if situation.baseline is None else hashlib.sha256(situation.baseline).hexdigest(),
        "select": options.select,
        "skip": list(options.skip),
        "rounds": options.rounds,
        "pairs": options.pairs,
    }
    state = directory / _UNFINISHED
    there = [name for name in cases.RUN_NAMES if (directory / "runs" / name).exists()]
    if there and not state.is_file():
        raise UsageError(f"{directory / 'runs' / there[0]} is there already, and no gate left it: name another folder with --report.")
    if options.resume and _read_state(state) == wanted:
        measured = [name for name in there if name != "compiled"]
        if measured:
            console.print(f"going on after an interrupted gate, which measured {', '.join(measured)}", highlight=False)
        return
    for name in there:
        shutil.rmtree(directory / "runs" / name)
    write_atomic(state, json.dumps(wanted) + "\n")


def _keep(situation: Situation, commits: Sequence[Commit], directory: Path, name: str) -> None:
    """Puts what was measured into the report's `runs/`, whole or not at all."""
    target = directory / "runs" / name
    partial = target.with_name(f".{name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    run.keep(situation.places, situation.device, commits, partial)
    partial.rename(target)


def _measure_run(situation: Situation, options: Options, console: Console, name: str) -> None:
    """Measures HEAD alone, unless an interrupted gate did."""
    places, device, head = situation.places, situation.device, situation.head
    if (options.directory / "runs" / name).is_dir():
        return
    run.forget(places, device, [head])
    run.run_asv(places, RunPlan((head,), options.rounds, select=options.select, skip=options.skip), console)
    _keep(situation, [head], options.directory, name)


def _measure_in_stages(case: CaseFile, situation: Situation, options: Options, console: Console) -> CaseFile:
    """Measures HEAD, and what looks slower than the stored baseline in pairs with the merge-base; returns the case as it then is."""
    device, head, directory = situation.device, situation.head, options.directory
    assert situation.baseline is not None
    write_atomic(directory / cases.BASELINE_NAME, situation.baseline.decode("utf-8"))
    console.print(
        f"{device.name}: measuring {head.label} ({head.short}) against the stored baseline, {options.rounds} processes", highlight=False
    )
    _measure_run(situation, options, console, "1")
    runs = [cases.selected(load_kept(directory / "runs" / "1"), options.select, options.skip)]
    baseline = cases.baseline_of(case, directory, runs[0])
    screen = cases.compare(case, runs, baseline)
    commits = (situation.base, head)
    if situation.base.sha == head.sha:
        commits = (situation.repository.empty_commit_on(head), head)
        case = msgspec.structs.replace(case, stand_in=commits[0].sha)
    looks: list[staged.Look] = []
    while left := staged.open_rows(screen, looks):
        try:
            looks.append(_measure_look(case, situation, commits, left, len(looks), options, console))
        except InputError as error:
            console.print(f"the merge-base could not be measured: {error}", markup=False, highlight=False)
            case = msgspec.structs.replace(case, fallback=str(error))
            break
    if case.fallback is not None or (looks and staged.unpaired_rows(screen, looks)):
        console.print("some rows cannot be held against the merge-base: measuring HEAD once more", highlight=False)
        _measure_run(situation, options, console, "2")
    return case


def _measure_look(
    case: CaseFile,
    situation: Situation,
    commits: Sequence[Commit],
    rows: Sequence[RowKey],
    done: int,
    options: Options,
    console: Console,
) -> staged.Look:
    """Measures the pairs of one look, unless an interrupted gate did."""
    name, pairs = f"look-{done + 1}", LOOKS[done] - (LOOKS[done - 1] if done else 0)
    if not (options.directory / "runs" / name).is_dir():
        told = f"{len(rows)} row(s) {'look slower' if not done else 'are still open'}: {pairs} pairs of processes with the merge-base"
        console.print(told, highlight=False)
        wanted = replace(options, select=staged.pattern_of(rows), pairs=pairs, skip=())
        measure_pairs(situation.places, situation.device, commits, wanted, console, name=name)
        _keep(situation, commits, options.directory, name)
    return cases.load_looks(case, options.directory)[done]


def _measure_pairs(situation: Situation, options: Options, console: Console) -> None:
    """Measures merge-base and HEAD alternately, all rows."""
    base, head = situation.pair()
    same = situation.base.sha == situation.head.sha
    what = f"{base.label} ({base.short}) with itself" if same else f"{base.label} ({base.short}) with {head.label} ({head.short})"
    told = f"{situation.device.name}: no stored baseline, comparing {what} in {options.pairs} interleaved pairs of processes"
    console.print(told, highlight=False)
    if not (options.directory / "runs" / "pairs").is_dir():
        measure_pairs(situation.places, situation.device, (base, head), options, console)
        _keep(situation, (base, head), options.directory, "pairs")


def measure_pairs(
    places: Places, device: Device, commits: Sequence[Commit], options: Options, console: Console, *, name: str = "pairs"
) -> list[CommitResult]:
    """Measures commits in interleaved rounds; a run of the same `name` that was interrupted goes on where it stopped."""
    state_file = places.root / ".asv" / _STATE
    state = {
        "commits": [commit.sha for commit in commits],
        "select": options.select,
        "skip": list(options.skip),
        "device": device.key,
        "name": name,
    }
    done = 0
    if options.resume and _read_state(state_file) == state:
        done = _finish_round(places, device, commits, options, console)
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


def _read_state(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _finish_round(places: Places, device: Device, commits: Sequence[Commit], options: Options, console: Console) -> int:
    """Rounds that every commit has in asv's results; 0 where one has none of several.

    A round that was interrupted between two commits is made whole first: what follows would be paired with processes of other rounds.
    """
    counts = _rounds_of(places, device, commits)
    done = max(counts) if min(counts) > 0 or max(counts) == 1 else 0
    behind = tuple(commit for commit, count in zip(commits, counts, strict=True) if count < done)
    if behind:
        console.print(f"finishing round {done} of an interrupted run", highlight=False)
        missing = done - min(counts)
        run.run_asv(places, RunPlan(behind, missing, append=True, select=options.select, skip=options.skip), console)
    return done


def _rounds_of(places: Places, device: Device, commits: Sequence[Commit]) -> list[int]:
    """Rounds of each commit in asv's results."""
    counts = []
    for commit in commits:
        if not list((places.results / device.key).glob(f"{commit.sha[:8]}-*.json")):
            counts.append(0)
            continue
        rows = run.load(places, device, commit).rows.values()
        counts.append(max((len(row.samples) for row in rows), default=0))
    return counts
