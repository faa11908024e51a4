"""The compiled rows within the gate: compiled before anything is measured, compared exactly, and what need not be measured for them."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ci import compiled_run
from ci.compiled import compare_compiled, identical_rows
from ci.compiled_model import CompiledResult
from ci.device import Device
from ci.errors import InputError, UsageError
from ci.repo import Commit, Repository
from ci.run import Places


def judge(
    repository: Repository,
    places: Places,
    tip: Commit,
    base: Commit,
    head: Commit,
    *,
    select: str | None,
    directory: Path,
    console: Console,
) -> CompiledResult:
    """Compiles merge-base and HEAD for every architecture and compares them; the records go to `directory`.

    Args:
        tip: Of the base branch, for its stored baselines.
        select: Regular expression over row ids.
    Raises:
        InputError: HEAD could not be compiled at all.
    """
    console.print(f"compiling every Triton row for {', '.join(compiled_run.ARCHITECTURES)}, no GPU needed", highlight=False)
    ours = compiled_run.compile_commit(repository, places, head, select=select)
    notices = []
    try:
        theirs = ours if base.sha == head.sha else compiled_run.compile_commit(repository, places, base, select=select)
    except InputError as error:
        theirs = None
        notices.append(f"The merge-base has no compiled rows: {error}")
    compiled_run.keep({"head": ours} if theirs is None else {"base": theirs, "head": ours}, directory)
    return compare_compiled(
        theirs,
        ours,
        compiled_run.stored_baselines(repository, tip),
        listing=lambda code: compiled_run.listing(places, code),
        selected=select is not None,
        notices=notices,
    )


def rows_to_skip(repository: Repository, places: Places, device: Device, base: Commit, head: Commit, console: Console) -> tuple[str, ...]:
    """Rows whose launches on this GPU are the same at both commits, so that measuring them shows the machine only.

    Raises:
        UsageError: There is no GPU: rows of the host's clock depend on more than their launches.
        InputError: A commit could not be compiled.
    """
    if not device.is_gpu:
        raise UsageError("--skip-identical is for rows that a GPU times, and this machine has none: leave it out.")
    if base.sha == head.sha:
        raise UsageError("--skip-identical would skip every row of a commit that is compared with itself: leave it out.")
    ours, theirs = (compiled_run.compile_commit(repository, places, commit, this_device=True) for commit in (head, base))
    same = sorted(name for name in identical_rows(theirs, ours, compiled_run.THIS_DEVICE) if not name.startswith("claim."))
    console.print(f"{len(same)} rows launch exactly the same at both commits and are skipped", highlight=False)
    return tuple(same)
