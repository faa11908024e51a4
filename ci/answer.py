"""What a verdict says in words, once for the page, the summary and the terminal: what was found and what it means, what to do next, how
sure it is, and what was not seen. Backticks stand around the commands of `COMMANDS`, which each output sets as code.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from ci.compiled import REFRESH, summary_lines
from ci.compiled_model import CompiledVerdict
from ci.confirm import UNFIT_DEVICE, UNFIT_WALL_CLOCK
from ci.model import GateResult, RowKey, RowOutcome, RowVerdict, RunVerdict
from ci.noise import log_latency
from ci.rows import ONLY_NEW, WAIVED, counted
from ci.templates.figures import change, percent
from ci.templates.sections import has_number

SELECT = "make gate ARGS='--select NAME'"
COMMANDS = (REFRESH, SELECT)
"""What may be set as code in a text: nothing that a name in a file could bring."""
NOT_A_GPU = "wall clock on a CPU: not a GPU figure"

_NEXT_STEP: dict[RunVerdict, str] = {
    RunVerdict.PASS: "Nothing to mend; where rows are IMPROVED, record a fresh baseline so that the gain is kept.",
    RunVerdict.REGRESSION: "Mend the kernel.",
    RunVerdict.INCOMPLETE: (
        "Mend what is missing, failed, invalid or blind in the list, then run the gate again: a row that was not measured never passes."
    ),
    RunVerdict.BASELINE_INVALID: (
        "Record this device's baseline again in the environment of this run, or run the gate where the stored one was recorded."
    ),
    RunVerdict.RUNNER_UNFIT: (
        "Run the gate again on a quiet machine: rows that this change cannot touch have moved, so that no row of this "
        "run says anything of the code."
    ),
    RunVerdict.WRONG_RESULTS: (
        "Mend the results before their speed: for an UNVERIFIED row compare with the reference; for a VIOLATION check "
        "unit factors, the FLOP and byte formula, skipped work, a working set left in L2, and a base that does another "
        "operation, in this order."
    ),
}
_NEXT_STEP_AA = (
    "Read the smallest detectable regression of each row, which is what this machine can see, and record a baseline if that is fine enough."
)
_NEXT_STEP_NEW = "Measure the new rows together with others: a gate without --select, or with a wider one, passes with new rows in it."
_MAX_LINES = 3
_MAX_REASON = 160


def parts_of(text: str) -> list[tuple[str, bool]]:
    """The text in parts, each with whether it is one of `COMMANDS` that stood in backticks."""
    parts = re.split("|".join(f"(`{re.escape(command)}`)" for command in COMMANDS), text)
    found = [part for part in parts if part]
    return [(part[1:-1], True) if part[1:-1] in COMMANDS and part[0] == "`" else (part, False) for part in found]


def plain(text: str) -> str:
    """The text with its commands out of their backticks, for where there is no code type."""
    return "".join(part for part, _ in parts_of(text))


def short_names(rows: Iterable[RowOutcome]) -> dict[RowKey, str]:
    """Rows by their cases; where two benchmarks have the same case, the benchmark stands in front."""
    keys = {row.key for row in rows}
    cases = Counter(", ".join(key.params) for key in keys)

    def name(key: RowKey) -> str:
        case = ", ".join(key.params)
        return case if case and cases[case] == 1 else f"{key.benchmark}: {case}" if case else key.benchmark

    return {key: name(key) for key in keys}


def _with_short_names(text: str, names: dict[RowKey, str]) -> str:
    for key in sorted(names, key=lambda key: -len(str(key))):
        if key.params and str(key) in text:
            text = text.replace(str(key), names[key])
    return text


def mode_in_words(result: GateResult) -> str:
    """What was compared with what."""
    pairs = max((row.num_pairs or 0 for row in result.rows), default=0)
    pairs = pairs or max((len(row.samples) for row in result.rows), default=0) or result.processes
    runs = counted(result.runs, "run")
    return {
        "baseline": f"HEAD against this device's stored baseline, {runs}" + (f", {result.processes} processes" if result.processes else ""),
        "ab": f"merge-base and HEAD compared directly, {pairs} interleaved pairs of processes",
        "aa": f"a commit against itself: what this machine can see, in {pairs} interleaved pairs of processes",
        "history": "against the stored results of earlier commits: values only, without records",
    }[result.mode]


def compiled_against(result: GateResult) -> str:
    """What compiled rows were held against, where any differs; it need not be what the timed rows were."""
    found = sorted({finding.reference for finding in result.compiled.findings}) if result.compiled else []
    told = {"baseline": "the accepted record of the base branch (baselines/compiled)", "merge-base": "the merge-base"}
    return " and ".join(told.get(name, name) for name in found)


def worse_compiled(result: GateResult) -> list[str]:
    """One line for each figure of a kernel that the compiler made worse."""
    if result.compiled is None:
        return []
    return summary_lines(finding for finding in result.compiled.findings if finding.verdict is CompiledVerdict.REGRESSED)


def headline(result: GateResult) -> list[str]:
    """What was found, the cause first: of a regression the exact finding of the compiler, then the timed rows; else the run's reason."""
    names = short_names(result.rows)
    if result.verdict is not RunVerdict.REGRESSION:
        return [_with_short_names(result.reason, names)]
    lines = worse_compiled(result)
    told = [f"Compiled, exact: {line}" for line in lines[:_MAX_LINES]]
    if len(lines) > _MAX_LINES:
        told.append(f"Compiled, exact: {counted(len(lines) - _MAX_LINES, 'more figure')} of kernels got worse")
    slower = regressed(result)
    if slower:
        worst, least = slower[0], slower[-1]
        one = len(slower) == 1
        size = change(worst.effect) if one else f"{change(least.effect)} to {change(worst.effect)}"
        told.append(f"Timed: {counted(len(slower), 'row')} slower, {size} latency{':' if one else '; most:'} {names[worst.key]}")
    return told or [_with_short_names(result.reason, names)]


def regressed(result: GateResult) -> list[RowOutcome]:
    """Timed rows that regressed and that no waiver excuses, the slowest first."""
    rows = [row for row in result.rows if row.verdict is RowVerdict.REGRESSED and WAIVED not in row.flags]
    return sorted(rows, key=lambda row: -(row.effect or 0.0))


def meaning(result: GateResult) -> str:
    """What the exit code means for the change."""
    if result.mode == "aa":
        return "a commit against itself: no change is judged"
    return "the check fails, which blocks the merge where it is required" if result.exit_code else "the check passes"


def next_steps(result: GateResult) -> list[str]:
    """What to do now, a sentence or two each, in order."""
    if result.mode == "aa" and result.verdict is RunVerdict.PASS:
        return [_NEXT_STEP_AA]
    compiled, slower = worse_compiled(result), regressed(result)
    if result.verdict is not RunVerdict.REGRESSION:
        step = _NEXT_STEP_NEW if ONLY_NEW in result.reason else _NEXT_STEP[result.verdict]
        return [step, *([_accepting(result, timed=False)] if compiled else [])]
    steps = []
    if compiled:
        steps.append(
            "Begin with what the compiler made: it is exact, holds for each architecture that is named, and needs no GPU to look into."
            + (" Where the slow rows call the same kernel, it is their likely cause." if slower else "")
        )
    if slower:
        steps.append(
            f"{'Then mend' if compiled else 'Mend'} the rows that are listed, the slowest first; `{SELECT}` measures one row again."
        )
    return [*(steps or [_NEXT_STEP[result.verdict]]), _accepting(result, timed=bool(slower))]


def _accepting(result: GateResult, *, timed: bool) -> str:
    """The one route by which a change for the worse is accepted: a pull request of its own that is merged first."""
    ways = []
    if worse_compiled(result):
        ways.append(f"`{REFRESH}` for the compiled rows")
    if timed and result.mode == "baseline":
        ways.append("a waiver with a reason and an expiry date in this device's baseline for the timed rows")
    elif timed:
        ways.append("for the timed rows this device's first baseline, as a waiver stands in one and this device has none")
    route = "; ".join(ways) or "a waiver with a reason and an expiry date in this device's baseline"
    return f"If the slow-down is wanted, it is accepted by a pull request of its own, merged before this one: {route}."


# How sure, and what was not seen --------------------------------------------------------------------------------------


def how_sure(result: GateResult) -> list[tuple[str, str]]:
    """Heading and sentence of what bounds this verdict: what was timed, what was not seen, what could be found, and the controls."""
    told = [("Timed", _timed(result)), ("Skipped", _skipped(result))]
    told += [("Unseen", _unseen(result.rows)), ("Controls", _controls(result))]
    return [(name, text) for name, text in told if text]


def _timed(result: GateResult) -> str:
    rows = [row for row in result.rows if row.record is not None and not row.control and has_number(row)]
    if not rows:
        return ""
    kernels = Counter(row.record.impl for row in rows if row.record is not None).most_common()
    named = ", ".join(f"{name} ({count})" for name, count in kernels[:6])
    more = f" and {len(kernels) - 6} more" if len(kernels) > 6 else ""
    clock = sum(row.record is not None and row.record.instrument == "wall-clock" for row in rows)
    if clock == len(rows):
        compiled = "; Triton's kernels were compiled, not timed" if result.compiled else ""
        return f"{counted(len(rows), 'row')} of {named}{more}: {NOT_A_GPU}{compiled}"
    hosts = f"; {clock} of them by the {NOT_A_GPU}" if clock else ""
    return f"{counted(len(rows), 'row')} of {named}{more}{hosts}"


def all_by_wall_clock(result: GateResult) -> bool:
    """Whether no row that has a number was timed by a device."""
    records = [row.record for row in result.rows if row.record is not None and has_number(row)]
    return bool(records) and all(record.instrument == "wall-clock" for record in records)


def _skipped(result: GateResult) -> str:
    skipped = [row for row in result.rows if row.verdict is RowVerdict.SKIPPED]
    if not skipped:
        return ""
    reasons = Counter(row.reason or "no reason given" for row in skipped).most_common()
    shown = "; ".join(f"{reason[:_MAX_REASON]} ({count})" for reason, count in reasons[:_MAX_LINES])
    left = f"; {counted(len(reasons) - _MAX_LINES, 'further reason')}" if len(reasons) > _MAX_LINES else ""
    gpu = ". No time on a GPU was measured" if all_by_wall_clock(result) else ""
    return f"{len(skipped)} of {len(result.rows)} rows: {shown}{left}{gpu}"


def _unseen(rows: Sequence[RowOutcome]) -> str:
    known = [row for row in rows if row.mde80 is not None and has_number(row)]
    if not known:
        return ""
    finite = sorted((row for row in known if row.mde80 is not None and math.isfinite(row.mde80)), key=lambda row: row.mde80 or 0.0)
    none = len(known) - len(finite)
    without = f"; in {counted(none, 'row')} a slow-down of any size" if none else ""
    if not finite:
        return f"a slow-down of any size, in {'the row' if none == 1 else f'all {none} rows'}"
    middle = statistics.median(row.mde80 or 0.0 for row in finite)
    worst = finite[-1]
    return (
        f"slow-downs under {percent(middle)} in the median row, under {percent(worst.mde80)} in the worst"
        f" ({short_names(rows)[worst.key]}){without}: smaller ones are found in fewer than 4 of 5 runs (MDE80)"
    )


def _controls(result: GateResult) -> str:
    controls = [row for row in result.rows if row.control and row.effect is not None]
    if not controls:
        return "none: a shift of the whole machine would go unnoticed" if any(row.effect is not None for row in result.rows) else ""
    names = short_names(result.rows)
    sizes = sorted(row.effect or 0.0 for row in controls)
    span = " to ".join(dict.fromkeys((change(sizes[0]), change(sizes[-1]))))
    moved = [row for row in controls if "MOVED" in row.flags]
    scatter = {row.key: _scatter(row) for row in controls if len(row.samples) > 1}
    device = {row.key for row in controls if row.record is not None and row.record.instrument == "device"}
    limits = {key: UNFIT_DEVICE if key in device else UNFIT_WALL_CLOCK for key in scatter}
    noisy = sorted((key for key, sd in scatter.items() if sd > limits[key]), key=lambda key: -scatter[key])
    told = f"{counted(len(controls), 'operation')} that this change cannot touch moved by {span} latency"
    if moved:
        told += f"; {', '.join(names[row.key] for row in moved[:_MAX_LINES])} beyond chance (MOVED), so that the machine changed"
    if noisy:
        shown = ", ".join(f"{names[key]} by {percent(scatter[key])}" for key in noisy[:_MAX_LINES])
        return f"{told}. The machine was noisy: between processes {shown} (SD); only large changes stand"
    return (
        told
        if moved or not scatter
        else f"{told}, none beyond its band; between processes by {percent(max(scatter.values()))} (SD) at most"
    )


def _scatter(row: RowOutcome) -> float:
    """SD of a process about the others, as a relative change of latency."""
    try:
        y = log_latency(row.samples, row.direction)
    except ValueError:
        return 0.0
    return math.expm1(float(y.std(ddof=1)))
