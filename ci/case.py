"""What a gate measured and what it has to judge, as files; and the verdict as a pure function of them.

A report folder holds `case.json`, the stored baseline as the base branch had it (`baseline.json`), and in `runs/` what was measured:
`1` and `2` are runs of HEAD, `look-1` to `look-3` pairs of the rows that run 1 picked, `pairs` pairs of all rows, and `compiled` what the
compiler made.
`judge` reads nothing else, neither the repository nor the clock, so that anybody can compute the verdict again from an artifact.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ci import baseline as baselines
from ci import compiled_gate, lost_rows, staged
from ci.baseline import Baseline
from ci.compare import compare_baseline
from ci.compiled import with_compiled
from ci.confirm import compare_pairs
from ci.errors import InputError
from ci.jsonio import read_json, strict_dumps, write_atomic
from ci.merge import load_all_kept, load_kept
from ci.model import CommitResult, GateResult, RowKey, RowOutcome, RowVerdict
from ci.rows import TIME_FORMAT
from ci.sequential import LOOKS

SCHEMA_ID: Literal["rapid_llm/case/1"] = "rapid_llm/case/1"
FILE_NAME = "case.json"
BASELINE_NAME = "baseline.json"
RUN_NAMES = ("1", "2", "pairs", "compiled", *(f"look-{number}" for number in range(1, len(LOOKS) + 1)))
"""Folders in a report's `runs/` that a gate makes."""

Sha = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{40}$")]


class CaseFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that a verdict depends on besides the measurements and the stored baseline."""

    schema: Literal["rapid_llm/case/1"] = SCHEMA_ID
    mode: Literal["baseline", "ab", "aa"]
    confirm: Literal["pairs", "runs"] = "pairs"
    """What confirms a row that run 1 picked: pairs with the merge-base, or a second run, as in shards."""
    device: str
    base: Sha
    head: Sha
    """The two commits that were measured; in mode ``aa`` HEAD and an empty commit on it."""
    stand_in: Sha | None = None
    """In pairs for a stored baseline: the empty commit that stands for the merge-base where that is HEAD itself."""
    select: str | None = None
    skip: list[str] = []
    """Ids of rows that launch exactly what the merge-base does, and were not measured."""
    notices: list[str] = []
    fallback: str | None = None
    """Why the merge-base could not be measured, where it could not."""
    suites: lost_rows.Suites | None = None
    """The rows of both commits' suites."""
    compiled: bool = False
    shards: Annotated[int, msgspec.Meta(ge=1)] = 1
    created_at: str


def write(case: CaseFile, directory: Path) -> None:
    """Writes `case.json`, whole or not at all."""
    write_atomic(directory / FILE_NAME, strict_dumps(msgspec.to_builtins(case)))


def read(directory: Path) -> CaseFile:
    """Reads `case.json`.

    Raises:
        InputError: There is none, or it does not follow the schema.
    """
    path = directory / FILE_NAME
    if not path.is_file():
        raise InputError(f"{directory} has no {FILE_NAME}, so nothing says what its runs are of: give a report of `python -m ci gate`.")
    try:
        case = msgspec.convert(read_json(path), CaseFile)
        re.compile(case.select or "")
        datetime.datetime.strptime(case.created_at, TIME_FORMAT)
    except msgspec.ValidationError as error:
        raise InputError(f"{path} does not follow {SCHEMA_ID}: {error}; run the gate again.") from error
    except re.error as error:
        raise InputError(f"{path} selects rows by what is no regular expression ({error}); run the gate again.") from error
    except ValueError as error:
        raise InputError(f"{path} was made at {case.created_at!r}, which is no time; run the gate again.") from error
    return case


def judge(directory: Path) -> GateResult:
    """The verdict on what a report folder holds.

    Raises:
        GateError: A file is missing or cannot be read; the message names it.
    """
    case = read(directory)
    result = _against_baseline(case, directory) if case.mode == "baseline" else _in_pairs(case, directory)
    result = replace(result, notices=(*case.notices, *result.notices), created_at=case.created_at)
    if case.suites is not None:
        result = lost_rows.judged(result, case.suites, select=case.select)
    if case.shards > 1:
        told = f"Measured in {case.shards} shards, each with all rows and the controls of its own GPU."
        result = replace(result, notices=(*result.notices, told))
    result = replace(result, notices=tuple(dict.fromkeys(result.notices)))
    if case.compiled:
        result = with_compiled(result, compiled_gate.judged(directory / "runs" / "compiled", selected=case.select is not None))
    return result


def _against_baseline(case: CaseFile, directory: Path) -> GateResult:
    runs = [selected(load_kept(folder), case.select, case.skip) for folder in _runs(directory, ("1", "2"))]
    if not runs:
        raise InputError(f"{directory} has no runs/1, which the baseline would be held against: run the gate again.")
    baseline = baseline_of(case, directory, runs[0])
    screen = compare(case, runs[:1], baseline)
    second = compare(case, runs, baseline) if len(runs) > 1 else None
    looks = load_looks(case, directory)
    if case.confirm == "runs" or case.fallback is not None:
        result = second or screen
    else:
        result = staged.confirm(screen, looks, baseline, second=second, now=_now(case))
    if case.fallback is not None:
        told = f"The merge-base could not be measured ({case.fallback}), so that rows are confirmed by a second run of HEAD alone."
        result = replace(result, notices=(*result.notices, told))
    return _told(case, runs[0], result)


def compare(case: CaseFile, runs: Sequence[CommitResult], baseline: Baseline) -> GateResult:
    """One or two runs against the stored baseline, before anything is confirmed in pairs."""
    pairs = LOOKS[-1] if case.confirm == "pairs" and case.fallback is None else None
    return compare_baseline(runs, baseline, base=case.base, head=case.head, device=case.device, now=_now(case), pairs=pairs)


def baseline_of(case: CaseFile, directory: Path, run: CommitResult) -> Baseline:
    """The stored baseline, without the rows that were not to be measured."""
    stored = baselines.load(directory / BASELINE_NAME)
    return selected_baseline(stored, run, case.select or "", case.skip) if case.select or case.skip else stored


def load_looks(case: CaseFile, directory: Path) -> list[staged.Look]:
    """The pairs of each look made, (merge-base, HEAD)."""
    return [_arms(case, folder) for folder in _runs(directory, [f"look-{number}" for number in range(1, len(LOOKS) + 1)])]


def _in_pairs(case: CaseFile, directory: Path) -> GateResult:
    arms = [selected(arm, case.select, case.skip) for arm in _arms(case, directory / "runs" / "pairs")]
    result = _told(case, arms[1], compare_pairs(arms[0], arms[1], mode="aa" if case.mode == "aa" else "ab", device=case.device))
    if case.mode == "aa":
        offer = f"To hold later changes against this state, record baselines/{arms[1].machine}.json: CONTRIBUTING.md says how."
        result = replace(result, notices=(*result.notices, offer))
    return result


def _arms(case: CaseFile, folder: Path) -> staged.Look:
    by_commit = {result.commit: result for result in load_all_kept(folder)}
    base = case.stand_in or case.base
    if set(by_commit) != {base, case.head}:
        raise InputError(f"{folder} does not hold the two commits of the comparison: measure it again.")
    return by_commit[base], by_commit[case.head]


def _runs(directory: Path, names: Sequence[str]) -> list[Path]:
    """The folders of `names` that are there: the first ones, without a gap."""
    found = [directory / "runs" / name for name in names if (directory / "runs" / name).is_dir()]
    if [folder.name for folder in found] != list(names[: len(found)]):
        raise InputError(f"{directory} has runs/{found[-1].name} without those before it: run the gate again.")
    return found


def _now(case: CaseFile) -> datetime.datetime:
    return datetime.datetime.strptime(case.created_at, TIME_FORMAT).replace(tzinfo=datetime.timezone.utc)


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


def _told(case: CaseFile, measured: CommitResult, result: GateResult) -> GateResult:
    """Says in the report what was not measured: a selection's other rows, and rows that launch exactly what the base does."""
    if case.skip:
        why = "not measured: it launches exactly what the merge-base does (--skip-identical)"
        rows = tuple(RowOutcome(key=_key_of(name), verdict=RowVerdict.SKIPPED, reason=why, section="other") for name in case.skip)
        result = replace(result, rows=(*result.rows, *rows), notices=(*result.notices, f"{len(rows)} rows were {why}."))
    if case.select is None:
        return result
    return replace(result, notices=(*result.notices, f"Only the {len(measured.rows)} rows that {case.select!r} selects were measured."))


def _key_of(row_id: str) -> RowKey:
    benchmark, found, case = row_id.partition("(")
    return RowKey(benchmark, (case.removesuffix(")"),) if found else ())
