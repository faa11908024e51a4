"""Compares what the compiler made of two commits, row by row and architecture by architecture. Exact: there is no noise in it.

Where the base branch has a baseline of the same Triton and ptxas, the row is held against that; else against the merge-base, compiled by
the same tools. So a change for the worse that is wanted is accepted by a baseline that was merged before it.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ci.compiled_metrics import (
    ARGUMENTS_MEANING,
    GRID_MEANING,
    LAUNCHES_MEANING,
    LIKE_LAUNCHES,
    LIKE_LAUNCHES_MEANING,
    PATH_MEANING,
    compare_figures,
)
from ci.compiled_model import (
    BASELINE_DIR,
    BASELINE_SCHEMA_ID,
    Codes,
    CompiledBaseline,
    CompiledChange,
    CompiledFile,
    CompiledFinding,
    CompiledResult,
    CompiledRow,
    CompiledVerdict,
    LaunchFile,
)
from ci.errors import ExitCode
from ci.model import GateResult
from ci.rows import RUN_ORDER, VERDICTS

Listing = Callable[[str], "str | None"]
"""Gives the SASS of a machine code, None where it is not kept."""

_ORDER = list(CompiledVerdict)
_SASS_LINES = 160
_OTHER_WAY = "all launches are the same; the code that launches like calls (rapid_llm/kernels/direct_launch.py) is not"
REFRESH = "python -m ci compiled record --reason ..."
"""The command that records baselines of compiled rows."""


@dataclass(frozen=True)
class _Reference:
    """One side's row, where it comes from, and the figures of its codes."""

    row: CompiledRow
    codes: Codes
    name: str


def identical_rows(base: CompiledFile, head: CompiledFile, architecture: str) -> set[str]:
    """Rows that launch exactly the same at both commits, like calls too: the same code, grids, blocks and arguments in the same order.

    A row of a name that only one side has, or that did not compile, is not identical.
    """
    here, there = (side.architectures[architecture].rows for side in (head, base))
    return {
        name
        for name, row in here.items()
        if row.state == "compiled" and row.launch_hash is not None and name in there and there[name].launch_hash == row.launch_hash
    }


def compare_compiled(
    base: CompiledFile | None,
    head: CompiledFile,
    baselines: Mapping[str, CompiledBaseline],
    *,
    listing: Listing = lambda code: None,
    selected: bool = False,
    notices: Iterable[str] = (),
) -> CompiledResult:
    """The verdict on the compiled rows of HEAD.

    Args:
        base: Of the merge-base; None where it could not be compiled.
        head: Of the commit under test.
        baselines: Stored on the base branch, by architecture.
        listing: SASS of a code, for the difference that is shown.
        selected: Only a selection was compiled, so that no row can be missing from a baseline.
        notices: Further things to tell.
    """
    told = list(notices)
    findings: list[CompiledFinding] = []
    counts: dict[str, dict[str, int]] = {}
    architectures = sorted(head.architectures, key=_natural)
    for architecture in architectures:
        side = head.architectures[architecture]
        stored, why = _comparable(baselines.get(architecture), head, architecture)
        if why:
            told.append(why)
        others = base.architectures[architecture].rows if base is not None and architecture in base.architectures else {}
        names = set(side.rows) | set(others) | (set(stored.rows) if stored is not None and not selected else set())
        found = []
        for name in sorted(names):
            reference = _reference(name, stored, others, base, side.rows.get(name))
            found.append(_judge(architecture, name, reference, side.rows.get(name), head.codes, listing))
        counts[architecture] = dict(sorted(Counter(finding.verdict.value for finding in found).items()))
        findings += _grouped(finding for finding in found if finding.verdict not in _QUIET)
    findings.sort(key=lambda finding: (_ORDER.index(finding.verdict), finding.kernel, architectures.index(finding.architecture)))
    code, reason = _conclude(findings, counts)
    return CompiledResult(
        exit_code=int(code),
        reason=reason,
        counts=counts,
        findings=tuple(findings),
        notices=tuple(dict.fromkeys(told)),
        tools={"triton": head.triton, **{f"ptxas {arch}": version for arch, version in head.ptxas.items() if arch in architectures}},
        devices={arch: str(head.architectures[arch].device.get("name", "unknown")) for arch in architectures},
    )


def _natural(architecture: str) -> tuple[int, str]:
    """sm_90 before sm_100."""
    digits = architecture.rpartition("_")[2]
    return (int(digits) if digits.isdigit() else 0, architecture)


_QUIET = (CompiledVerdict.IDENTICAL, CompiledVerdict.UNSUPPORTED)


def _comparable(stored: CompiledBaseline | None, head: CompiledFile, architecture: str) -> tuple[CompiledBaseline | None, str]:
    """The baseline where the same tools made it, else why not and how to refresh it."""
    ptxas = head.ptxas.get(architecture, "unknown")
    path = f"{BASELINE_DIR}/{architecture}.json"
    if stored is None:
        return None, f"There is no {path} on the base branch: rows are held against the merge-base; record it with `{REFRESH}`."
    if stored.schema != BASELINE_SCHEMA_ID:
        return None, (
            f"{path} is NOT COMPARABLE (it was recorded before like calls were): rows are held against the merge-base; refresh it with"
            f" `{REFRESH}`."
        )
    if (stored.triton, stored.ptxas) == (head.triton, ptxas):
        return stored, ""
    return None, (
        f"{path} is NOT COMPARABLE (Triton {stored.triton} with ptxas {stored.ptxas}, here {head.triton} with {ptxas}): rows are held"
        f" against the merge-base; refresh it with `{REFRESH}`."
    )


def _reference(
    name: str, stored: CompiledBaseline | None, others: Mapping[str, CompiledRow], base: CompiledFile | None, row: CompiledRow | None
) -> _Reference | None:
    """The baseline's row where it is of the same version of the suite, else the merge-base's."""
    if stored is not None and name in stored.rows and (row is None or stored.rows[name].version == row.version):
        return _Reference(stored.rows[name], stored.codes, "baseline")
    if base is not None and name in others:
        return _Reference(others[name], base.codes, "merge-base")
    return None


def _judge(
    architecture: str, name: str, reference: _Reference | None, row: CompiledRow | None, codes: Codes, listing: Listing
) -> CompiledFinding:
    before = None if reference is None else reference.row
    shown = row or before
    kernels = [] if shown is None else [launch.name for launch in shown.launches if launch.kind == "triton"]
    finding = CompiledFinding(
        architecture=architecture,
        kernel=kernels[0] if kernels else "" if shown is None else shown.impl,
        verdict=CompiledVerdict.IDENTICAL,
        rows=(name,),
        reference="merge-base" if reference is None else reference.name,
    )
    was = before is not None and before.state == "compiled"
    if row is None:
        verdict = CompiledVerdict.MISSING if was else CompiledVerdict.UNSUPPORTED
        return replace(finding, verdict=verdict, reason=f"the {finding.reference} has it, HEAD has not")
    if row.state == "failed":
        again = "" if was or before is None else ", as at the base"
        return replace(finding, verdict=CompiledVerdict.FAILED, reason=f"{row.impl} does not compile{again}: {row.reason}")
    if row.state == "unsupported":
        if not was:
            return replace(finding, verdict=CompiledVerdict.UNSUPPORTED, reason=row.reason or "")
        return replace(finding, verdict=CompiledVerdict.FAILED, reason=f"{row.impl} does not serve it any more: {row.reason}")
    if before is None or reference is None or not was:
        why = "the base does not have it" if before is None else f"it did not compile before ({before.state}: {before.reason})"
        return replace(finding, verdict=CompiledVerdict.NEW, reason=why)
    if row.launch_hash == before.launch_hash:
        return finding
    changes, pairs = _compare_launches(before.launches, row.launches, reference.codes, codes)
    like, others = _compare_launches(before.like_launches, row.like_launches, reference.codes, codes)
    changes += [_of_like_call(change) for change in like if change not in changes]
    pairs += others
    verdict = min((change.verdict for change in changes), key=_ORDER.index, default=CompiledVerdict.CHANGED)
    reason = "" if changes else "other machine code with the same figures" if pairs else _OTHER_WAY
    return replace(finding, verdict=verdict, changes=tuple(changes), reason=reason, sass_diff=_sass_diff(pairs, listing))


def _compare_launches(
    before: tuple[LaunchFile, ...], after: tuple[LaunchFile, ...], old_codes: Codes, new_codes: Codes
) -> tuple[list[CompiledChange], list[tuple[LaunchFile, LaunchFile]]]:
    """What differs between two lists of launches, and the pairs whose machine code does."""
    changes: list[CompiledChange] = []
    if len(before) != len(after):
        verdict = CompiledVerdict.REGRESSED if len(after) > len(before) else CompiledVerdict.IMPROVED
        changes.append(CompiledChange("launches", "a call", _told(before), _told(after), verdict, LAUNCHES_MEANING))
    pairs = []
    for old, new in _aligned(before, after):
        if old.kind == "triton" and old.code != new.code:
            pairs.append((old, new))
            changes += _of(new, compare_figures(_figures(old, old_codes), _figures(new, new_codes)))
        told = []
        if old.direct != new.direct:
            old_path, new_path = ("direct" if launch.direct else "Triton's run" for launch in (old, new))
            told.append(CompiledChange("launch path", "", old_path, new_path, CompiledVerdict.CHANGED, PATH_MEANING))
        if old.grid != new.grid:
            old_grid, new_grid = (" × ".join(map(str, launch.grid)) for launch in (old, new))
            told.append(CompiledChange("grid", "programs", old_grid, new_grid, CompiledVerdict.CHANGED, GRID_MEANING))
        if old.arguments != new.arguments or (old.kind == "torch" and old.name != new.name):
            old_arguments, new_arguments = (_arguments(launch, other) for launch, other in ((old, new), (new, old)))
            told.append(CompiledChange("arguments", "", old_arguments, new_arguments, CompiledVerdict.CHANGED, ARGUMENTS_MEANING))
        changes += _of(new, told)
    return changes, pairs


def _of_like_call(change: CompiledChange) -> CompiledChange:
    """A change in what like calls start that is none of the first call's."""
    if change.metric == "launches":
        return replace(change, metric=LIKE_LAUNCHES, unit="", meaning=LIKE_LAUNCHES_MEANING)
    return replace(change, metric=f"{change.metric} of a like call")


def _of(launch: LaunchFile, changes: list[CompiledChange]) -> list[CompiledChange]:
    return [replace(change, kernel=launch.name) for change in changes]


def _aligned(before: tuple[LaunchFile, ...], after: tuple[LaunchFile, ...]) -> list[tuple[LaunchFile, LaunchFile]]:
    """Launches that correspond: by place where there are as many, else by kernel in their order."""
    if len(before) == len(after):
        return list(zip(before, after, strict=True))
    matcher = difflib.SequenceMatcher(a=[launch.name for launch in before], b=[launch.name for launch in after], autojunk=False)
    return [(before[a + i], after[b + i]) for a, b, size in matcher.get_matching_blocks() for i in range(size)]


def _figures(launch: LaunchFile, codes: Codes) -> dict[str, int]:
    extra = {"occupancy_warps": launch.occupancy_warps, "shared_bytes": launch.shared_bytes, "threads": launch.threads}
    return {**codes.get(launch.code, {}), **extra}


def _told(launches: tuple[LaunchFile, ...]) -> str:
    return f"{len(launches)} ({', '.join(launch.name for launch in launches)})" if launches else "0"


def _arguments(launch: LaunchFile, other: LaunchFile) -> str:
    """The arguments in which a launch differs, by place; where their number differs, that."""
    if len(launch.arguments) != len(other.arguments):
        return f"{len(launch.arguments)} arguments"
    differing = [f"#{i} {value}" for i, value in enumerate(launch.arguments) if value != other.arguments[i]]
    return ", ".join(differing) or launch.name


def _sass_diff(pairs: list[tuple[LaunchFile, LaunchFile]], listing: Listing) -> str:
    """Unified difference of the machine code of the first pair that has both listings."""
    for old, new in pairs:
        before, after = listing(old.code), listing(new.code)
        if before is None or after is None:
            continue
        lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), "base", "HEAD", lineterm="", n=2))
        left = len(lines) - _SASS_LINES
        return "\n".join([*lines[:_SASS_LINES], *([f"... {left} more lines"] if left > 0 else [])])
    return ""


def _grouped(findings: Iterable[CompiledFinding]) -> list[CompiledFinding]:
    """One finding for all rows of an architecture in which the same kernel changed in the same way."""
    groups: dict[object, CompiledFinding] = {}
    for finding in findings:
        key = (finding.architecture, finding.kernel, finding.verdict, finding.reference, finding.reason, finding.changes)
        same = groups.get(key)
        groups[key] = finding if same is None else replace(same, rows=(*same.rows, *finding.rows))
    return list(groups.values())


def _conclude(findings: list[CompiledFinding], counts: Mapping[str, Mapping[str, int]]) -> tuple[ExitCode, str]:
    def rows(*verdicts: CompiledVerdict) -> int:
        return sum(found.get(verdict.value, 0) for found in counts.values() for verdict in verdicts)

    parts: dict[ExitCode, str] = {}
    lost = [finding for finding in findings if finding.verdict in (CompiledVerdict.FAILED, CompiledVerdict.MISSING)]
    worse = [finding for finding in findings if finding.verdict is CompiledVerdict.REGRESSED]
    if lost:
        number = rows(CompiledVerdict.FAILED, CompiledVerdict.MISSING)
        parts[ExitCode.INCOMPLETE] = f"{number} compiled rows failed or missing, first {_first(lost[0])}"
    if worse:
        parts[ExitCode.REGRESSION] = f"{rows(CompiledVerdict.REGRESSED)} compiled rows regressed: {'; '.join(summary_lines(worse)[:3])}"
        if lost:
            parts[ExitCode.INCOMPLETE] += f"; and {parts[ExitCode.REGRESSION]}"
    tally = ", ".join(f"{rows(verdict)} {verdict.value}" for verdict in _ORDER if rows(verdict))
    parts[ExitCode.PASS] = f"compiled rows: {tally or 'none'}"
    code = next(code for code in RUN_ORDER if code in parts)
    return code, parts[code]


def _first(finding: CompiledFinding) -> str:
    return f"{finding.rows[0]} on {finding.architecture}: {finding.reason}"


def summary_lines(findings: Iterable[CompiledFinding]) -> list[str]:
    """One line a kernel and figure: what changed on which architectures; a finding without figures has a line of its own."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for finding in findings:
        told = [change for change in finding.changes if change.verdict is finding.verdict] or list(finding.changes)
        for change in told:
            unit = f" {change.unit}" if change.unit else ""
            key = (change.kernel or finding.kernel, finding.verdict.value, f"{change.metric} {change.before} → {change.after}{unit}")
            places = lines.setdefault(key, [])
            if finding.architecture not in places:
                places.append(finding.architecture)
        if not told:
            lines.setdefault((finding.kernel, finding.verdict.value, finding.reason or "differs"), []).append(finding.architecture)
    return [f"{kernel}: {what} on {', '.join(places)}" for (kernel, _, what), places in lines.items()]


def over_architectures(findings: Iterable[CompiledFinding]) -> list[tuple[CompiledFinding, list[str]]]:
    """Findings of the same rows with the same change once, with the architectures that have it; shown is the first with machine code."""
    groups: dict[object, tuple[CompiledFinding, list[str]]] = {}
    for finding in findings:
        key = (finding.kernel, finding.verdict, finding.reference, finding.reason, finding.changes, finding.rows)
        shown, places = groups.setdefault(key, (finding, []))
        places.append(finding.architecture)
        if finding.sass_diff and not shown.sass_diff:
            groups[key] = (finding, places)
    return list(groups.values())


def alike_architectures(compiled: CompiledResult) -> list[tuple[list[str], list[str], dict[str, int]]]:
    """Architectures with the same counts, the devices that stand for them, and the counts."""
    alike: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for architecture, found in by_architecture(compiled):
        alike.setdefault(tuple(found.items()), []).append(architecture)
    return [(names, [compiled.devices.get(name, "unknown") for name in names], dict(found)) for found, names in alike.items()]


def by_architecture(compiled: CompiledResult) -> list[tuple[str, dict[str, int]]]:
    """Counts of each architecture in their order, whatever order a file has them in."""
    return sorted(compiled.counts.items(), key=lambda item: _natural(item[0]))


def with_compiled(result: GateResult, compiled: CompiledResult) -> GateResult:
    """The verdict on the run with that on the compiled rows: the first of both in `RUN_ORDER`."""
    codes = [ExitCode(result.exit_code), ExitCode(compiled.exit_code)]
    code = min(codes, key=RUN_ORDER.index)
    reasons = [result.reason, compiled.reason]
    if code is not codes[0]:
        reasons.reverse()
    told = (
        "; ".join(reason for reason, own in zip(reasons, codes, strict=True) if reason) if codes[1] is not ExitCode.PASS else result.reason
    )
    return replace(
        result,
        exit_code=int(code),
        verdict=VERDICTS[code],
        reason=told,
        notices=(*result.notices, *compiled.notices),
        compiled=compiled,
    )
