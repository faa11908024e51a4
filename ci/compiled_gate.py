"""The compiled rows within the gate: compiled before anything is measured, compared exactly, and what need not be measured for them."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ci import compiled_run
from ci.compiled import Listing, compare_compiled, identical_rows
from ci.compiled_model import CompiledResult
from ci.device import Device
from ci.errors import InputError, UsageError
from ci.jsonio import write_atomic
from ci.repo import Commit, Repository
from ci.run import Places


def compile_both(
    repository: Repository,
    places: Places,
    tip: Commit,
    base: Commit,
    head: Commit,
    *,
    select: str | None,
    directory: Path,
    console: Console,
) -> None:
    """Compiles merge-base and HEAD for every architecture; all that `judged` needs goes to `directory`.

    Args:
        tip: Of the base branch, for its stored baselines.
        select: Regular expression over row ids.
    Raises:
        InputError: HEAD could not be compiled at all.
    """
    console.print(f"compiling every Triton row for {', '.join(compiled_run.ARCHITECTURES)}, no GPU needed", highlight=False)

    def told(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    ours = compiled_run.compile_commit(repository, places, head, select=select, told=told)
    made = {"head": ours}
    notice = ""
    try:
        made["base"] = ours if base.sha == head.sha else compiled_run.compile_commit(repository, places, base, select=select, told=told)
    except InputError as error:
        notice = f"The merge-base has no compiled rows: {error}"
    compiled_run.keep(made, compiled_run.stored_texts(repository, tip), directory, notice=notice)

    def kept_listing(code: str) -> str | None:
        found = compiled_run.listing(places.root / ".asv" / "compiled" / "sass", code)
        if found is not None:
            write_atomic(directory / "sass" / f"{code}.txt", found)
        return found

    _compared(directory, kept_listing, selected=select is not None)


def judged(directory: Path, *, selected: bool) -> CompiledResult:
    """The verdict on what `compile_both` left in `directory`.

    Args:
        selected: Only a selection was compiled, so that no row can be missing from a baseline.
    Raises:
        GateError: A file is missing or does not follow its schema.
    """
    return _compared(directory, lambda code: compiled_run.listing(directory / "sass", code), selected=selected)


def _compared(directory: Path, listing: Listing, *, selected: bool) -> CompiledResult:
    base, notice = directory / "base.json", directory / compiled_run.NOTICE
    return compare_compiled(
        compiled_run.read_compiled(base) if base.is_file() else None,
        compiled_run.read_compiled(directory / "head.json"),
        compiled_run.kept_baselines(directory),
        listing=listing,
        selected=selected,
        notices=[notice.read_text(encoding="utf-8")] if notice.is_file() else [],
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
