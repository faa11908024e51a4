"""`python -m ci bisect`: which commit made a row slower, by the gate's own paired test.

Each step measures the good commit and another one in interleaved pairs of fresh processes on this machine, with the controls that serve
the row, and judges them as the gate does without a baseline (`ci.confirm`). Both sides run the suites of this checkout, and only
`rapid_llm` is theirs: so one instrument measures the whole history, whatever its suites were. It follows that a row which became slower
because its suite changed cannot be found, and that commits whose library the present suites cannot call are left out, as commits that
cannot be built would be. To look from older suites, check out a commit that has them.
"""

from __future__ import annotations

import difflib
import shutil
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ci import bisect, gate, noise, run
from ci import case as cases
from ci.bisect import Answer, Bisect, BisectFile, Measured, Step
from ci.confirm import ALPHA, compare_pairs
from ci.device import Device, detect
from ci.errors import BaselineError, ExitCode, InputError, UnfitError, UsageError
from ci.jsonio import read_bounded, write_atomic
from ci.lost_rows import listed
from ci.model import GateResult, RowVerdict
from ci.repo import Commit, Repository
from ci.run import Places
from ci.staged import pattern_of

FILE = "bisect.json"
_NEAREST = 3


def find(root: Path, row: str, good: str, bad: str, pairs: int, directory: Path, console: Console) -> ExitCode:
    """Looks for the first bad commit, prints a line a step and a table, and keeps both in `directory`.

    Args:
        root: The checkout.
        row: The row's exact id.
        good, bad: Names of the ends.
        pairs: Pairs of processes a step.
        directory: Folder for `bisect.json` and the measured runs; a bisect of the same row, ends and device goes on from it.
    Returns:
        PASS where one commit is named, INCOMPLETE where none or several are.
    Raises:
        UsageError: The ends, the row or the pairs cannot be used, or the bad end is not shown to be slower.
        InputError: The ends cannot be measured.
        UnfitError: The machine moved during a step.
    """
    repository, device = Repository(root), detect()
    ends = repository.commit(good), repository.commit(bad)
    commits = repository.first_parent_path(*ends)
    _check_row(repository.root, row, device)
    if noise.smallest_p(pairs) > ALPHA:
        raise UsageError(f"{pairs} pairs cannot show a regression of one row at {ALPHA:g}: measure more with --pairs.")
    path = directory / FILE
    known = _known(path, row, ends, device)
    if known is None:
        _print(console, f"{path} is of another row, other ends or another device, and is replaced")

    def measure(base: Commit, commit: Commit, count: int, wanted: float | None) -> Measured:
        if count > pairs:
            _print(console, f"{commit.short} is unconfirmed with {pairs} pairs: measuring {count}")
        try:
            result = _compare(repository, device, row, base, commit, count, directory, console)
        except InputError as error:
            if wanted is None:
                raise
            return Measured(Answer.SKIP, None, str(error))
        return answer(result, row, wanted)

    def save(search: Bisect) -> None:
        suspects = [commit.sha for commit in search.suspects]
        file = BisectFile(bisect.SCHEMA_ID, row, ends[0].sha, ends[1].sha, device.key, search.all_steps(), suspects, search.confirmed)
        write_atomic(path, bisect.dump(file))

    def decided(search: Bisect, fresh: bool) -> None:
        step = search.steps[-1]
        label = next(commit.label for commit in commits if commit.sha == step.commit)
        again = "" if fresh else " (measured before)"
        _print(console, f"step {len(search.steps)} of about {search.expected}: {step.commit[:12]} {label!r} {step.shown}{again}")
        save(search)

    _print(console, f"{device.name}: {len(commits) - 1} commit(s) from {ends[0].short} to {ends[1].short}, {pairs} pairs a step")
    search = Bisect(commits, measure, pairs, known=known or (), decided=decided)
    search.run()
    save(search)
    console.print(_table(search, commits))
    _print(console, search.conclusion)
    return ExitCode.PASS if search.confirmed else ExitCode.INCOMPLETE


def answer(result: GateResult, row: str, wanted: float | None) -> Measured:
    """What a paired comparison says of one row.

    A row that is not slower is good only where the pairs would have found what is looked for: its MDE80 is no larger, or both sides ask
    the device for exactly the same work. Otherwise chance may have hidden it, and the row is unconfirmed.

    Args:
        result: Of `compare_pairs`.
        row: The row's id.
        wanted: Effect that is looked for, relative; None where it is not known yet.
    Raises:
        UnfitError: The machine moved.
        BaselineError: The two sides were measured on different devices.
    """
    found = next((outcome for outcome in result.rows if str(outcome.key) == row), None)
    if result.exit_code == ExitCode.UNFIT:
        raise UnfitError(f"The runner is unfit: {result.reason}; the steps so far are kept, run the same command again to go on.")
    if result.exit_code == ExitCode.BASELINE:
        raise BaselineError(result.reason)
    if found is None:
        return Measured(Answer.SKIP, None, "neither commit has the row")
    if found.verdict is RowVerdict.REGRESSED:
        return Measured(Answer.BAD, found.effect, found.reason)
    if found.verdict in (RowVerdict.PASS, RowVerdict.CLEARED, RowVerdict.IMPROVED):
        blind = wanted is not None and "IDENTICAL" not in found.flags and (found.mde80 is None or found.mde80 > wanted)
        if not blind:
            return Measured(Answer.GOOD, found.effect, found.reason)
        return Measured(
            Answer.UNCONFIRMED, found.effect, f"{found.reason}, but a regression of {100 * (wanted or 0):.1f} % could be missed"
        )
    if found.verdict is RowVerdict.UNCONFIRMED:
        return Measured(Answer.UNCONFIRMED, found.effect, found.reason)
    return Measured(Answer.SKIP, None, f"{found.verdict.value}: {found.reason}")


def _compare(
    repository: Repository, device: Device, row: str, base: Commit, commit: Commit, pairs: int, directory: Path, console: Console
) -> GateResult:
    """Measures one row of two commits in pairs, keeps the runs, and judges them."""
    places = Places(repository.root)
    options = gate.Options(directory, select=pattern_of([row]), pairs=pairs, compiled=False)
    measured = gate.measure_pairs(places, device, (base, commit), options, console)
    kept = directory / "runs" / f"bisect-{base.short}-{commit.short}"
    shutil.rmtree(kept, ignore_errors=True)
    run.keep(places, device, (base, commit), kept)
    return compare_pairs(*(cases.selected(side, options.select) for side in measured), device=device.name)


def _check_row(root: Path, row: str, device: Device) -> None:
    rows = listed(root)
    if row not in rows:
        near = difflib.get_close_matches(row, rows, n=_NEAREST, cutoff=0) or sorted(rows)[:_NEAREST]
        raise UsageError(f"The suites of this checkout have no row {row!r}: name one of theirs, such as {', '.join(near)}.")
    if rows[row].control or not rows[row].gated_on(device.type):
        why = "is a control, which no change can touch" if rows[row].control else f"is not measured on {device.name}"
        raise UsageError(f"{row} {why}: name another row.")


def _known(path: Path, row: str, ends: tuple[Commit, Commit], device: Device) -> list[Step] | None:
    """Steps of an interrupted bisect of the same row, ends and device; None where the file is of another one."""
    if not path.exists():
        return []
    file = bisect.load(read_bounded(path), name=str(path))
    return file.steps if file.is_of(row, *ends, device.key) else None


def _table(search: Bisect, commits: list[Commit]) -> Table:
    """All commits in the order of history, with what is known of each."""
    steps = {step.commit: step for step in search.steps if step.base == commits[0].sha}
    suspects = {commit.sha for commit in search.suspects}
    table = Table("commit", "subject", "latency", "pairs", "answer", box=None)
    for commit in commits:
        step = steps.get(commit.sha)
        effect = "" if step is None or step.effect is None else f"{100 * step.effect:+.1f} %"
        told = "good (named)" if commit is commits[0] else "" if step is None else step.answer.value
        if commit.sha in suspects:
            told = f"{told}, {'first bad' if search.confirmed else 'suspect'}".removeprefix(", ")
        table.add_row(commit.short, Text(commit.label), effect, "" if step is None else str(step.pairs), told)
    return table


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
