"""What a verdict says in words: the cause first, what it means, one route to accept it, how sure it is and what was not seen."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import pytest
from report_pages import Page, outcome, page_of, read_markdown, result_of
from rich.console import Console

from ci import noise
from ci.answer import COMMANDS, headline, how_sure, meaning, next_steps, plain, short_names
from ci.compiled_model import CompiledChange, CompiledFinding, CompiledResult, CompiledVerdict
from ci.model import GateResult, RowKey, RowOutcome, RowVerdict, RunVerdict
from ci.report import render_html
from ci.summary import render_summary
from ci.templates.sections import chance, tally, why
from ci.templates.words import WORDS, words_of
from ci.terminal import render_terminal

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
LAUNCHES = CompiledChange("launches", "a call", "1 (kernel)", "2 (kernel, kernel)", CompiledVerdict.REGRESSED, "one more kernel")
SLOW = {"verdict": RowVerdict.REGRESSED, "reason": "beyond chance", "num_pairs": 12, "p_value": 2.0**-12, "mde80": 0.3}


def compiled(*architectures: str) -> CompiledResult:
    findings = [
        CompiledFinding(
            name, "kernel", CompiledVerdict.REGRESSED, ("b.C.t(1)", "b.C.t(2)"), "baseline", changes=(LAUNCHES,), sass_diff=f"-{name}"
        )
        for name in architectures
    ]
    findings.append(CompiledFinding("sm_80", "other", CompiledVerdict.CHANGED, ("b.D.t(1)",), "merge-base", "other machine code"))
    reason = f"{2 * len(architectures)} compiled rows regressed: kernel: launches 1 (kernel) → 2 (kernel, kernel) a call"
    return CompiledResult(
        1, reason, {name: {"REGRESSED": 2} for name in architectures}, tuple(findings), devices=dict.fromkeys(architectures, "X")
    )


def regression(**changes: Any) -> GateResult:
    rows = (
        outcome("b.C.t", "decode T=1", effect=0.5, **SLOW),
        outcome("b.C.t", "decode T=8", effect=1.0, **SLOW),
        outcome("b.C.t", "fine"),
    )
    told = "2 rows regressed: b.C.t(decode T=8) (+100.0 % latency), b.C.t(decode T=1) (+50.0 % latency)"
    usual: dict[str, Any] = {"verdict": RunVerdict.REGRESSION, "exit_code": 1, "reason": told, "compiled": compiled(*ARCHITECTURES)}
    return result_of(*rows, **{**usual, **changes})


def printed(result: GateResult) -> str:
    said = io.StringIO()
    render_terminal(result, Console(file=said, width=250))
    return said.getvalue()


def test_the_exact_cause_comes_first_and_rows_have_short_names() -> None:
    lines = headline(regression())
    assert lines == [
        "Compiled, exact: kernel: launches 1 (kernel) → 2 (kernel, kernel) a call on sm_80, sm_90, sm_100",
        "Timed: 2 rows slower, +50.0 % to +100.0 % latency; most: decode T=8",
    ]
    assert headline(regression(compiled=None)) == lines[1:]


def test_a_reason_of_another_verdict_has_short_names_too() -> None:
    result = regression(verdict=RunVerdict.INCOMPLETE, exit_code=3)
    assert headline(result) == ["2 rows regressed: decode T=8 (+100.0 % latency), decode T=1 (+50.0 % latency)"]


def test_cases_that_two_benchmarks_share_stay_apart() -> None:
    rows = [
        outcome("b.Alloc.t", "n=64"),
        outcome("b.Device.t", "n=64"),
        outcome("b.Alloc.t", "n=65"),
        replace(outcome("b.X.t"), key=RowKey("b.X.t")),
    ]
    names = short_names([*rows, rows[2]])
    assert [names[row.key] for row in rows] == ["b.Alloc.t: n=64", "b.Device.t: n=64", "n=65", "b.X.t"]


@pytest.mark.parametrize("mode", ["ab", "baseline"])
@pytest.mark.parametrize("with_compiled", [True, False])
def test_one_route_to_accept_a_slow_down_that_holds_here(mode: Any, with_compiled: bool) -> None:
    """A waiver stands in a baseline: a device without one is told so, and never sent to a file that it lacks."""
    result = regression(mode=mode, **({} if with_compiled else {"compiled": None}))
    *_, route = next_steps(result)
    assert route.count("accepted") == 1
    assert ("python -m ci compiled record" in route) == with_compiled
    assert ("this device has none" in route) == (mode == "ab")
    assert ("an expiry date in this device's baseline" in route) == (mode == "baseline")
    for text in (Page(render_html(result)).text, read_markdown(render_summary(result)).text, printed(result)):
        assert text.count("If the slow-down is wanted") == 1
        assert "`" not in text


def test_it_says_what_the_exit_code_means() -> None:
    assert "blocks the merge" in meaning(regression())
    assert meaning(regression(verdict=RunVerdict.PASS, exit_code=0, compiled=None)) == "the check passes"


def test_commands_are_code_and_nothing_that_a_name_brings() -> None:
    page = render_html(regression(notices=(f"refresh it with `{COMMANDS[0]}`", "`rm -rf`")))
    assert f"<code>{COMMANDS[0]}</code>" in page
    assert "`rm -rf`" in Page(page).text
    summary = render_summary(regression(notices=(f"refresh it with `{COMMANDS[0]}`",)))
    assert "&#96;" not in summary
    assert f"with <code>{COMMANDS[0]}</code>" in summary
    assert plain(f"a `{COMMANDS[0]}` b `c`") == f"a {COMMANDS[0]} b `c`"


def test_the_compiled_finding_is_told_once_in_the_summary_and_once_over_its_architectures_on_the_page() -> None:
    result = regression()
    assert render_summary(result).count("launches 1 (kernel)") == 1
    assert "CHANGED: other: other machine code on sm_80" in render_summary(result)
    section = Page(render_html(result)).section("compiled")
    assert section.count("one more kernel") == 1
    assert "REGRESSED: kernel on sm_80, sm_90, sm_100" in section
    assert "2 rows on each" in section
    assert "-sm_80" in section
    assert Page(render_html(result)).ids.index("compiled") < Page(render_html(result)).ids.index("decode-read"), "the cause before the rows"


# How sure, and what was not seen


def sure(*rows: RowOutcome, **changes: Any) -> dict[str, str]:
    return dict(how_sure(result_of(*rows, **changes)))


def test_what_was_timed_what_was_not_and_how_small_a_change_stays_unseen() -> None:
    skipped = [
        outcome("b.C.t", f"gpu {i}", verdict=RowVerdict.SKIPPED, reason="needs a cuda device", value=None, record=None) for i in range(3)
    ]
    rows = [outcome("b.C.t", f"{i}", mde80=mde80, record_instrument="wall-clock") for i, mde80 in enumerate((0.02, 0.1, 1.16))]
    told = sure(*rows, *skipped, compiled=compiled("sm_90"))
    assert (
        told["Timed"]
        == "3 rows of triton_paged_decode (3): wall clock on a CPU: not a GPU figure; Triton's kernels were compiled, not timed"
    )
    assert told["Skipped"] == "3 of 6 rows: needs a cuda device (3). No time on a GPU was measured"
    assert told["Unseen"].startswith("slow-downs under 10.0 % in the median row, under 116.0 % in the worst (2)")
    device = sure(outcome("b.C.t", "1"))
    assert device["Timed"] == "1 row of triton_paged_decode (1)"
    assert "Skipped" not in device
    blind = sure(outcome("b.C.t", "1", mde80=math.inf), outcome("b.C.t", "2", mde80=0.01))
    assert "in 1 row a slow-down of any size" in blind["Unseen"]


def _control(name: str, effect: float, samples: tuple[float, ...], *flags: str, **changes: Any) -> RowOutcome:
    return outcome("b.Control.t", name, section="control", control=True, effect=effect, samples=samples, flags=flags, mde80=None, **changes)


def test_controls_that_scatter_say_that_the_machine_was_noisy() -> None:
    quiet = _control("copy", 0.001, (100.0, 100.2, 99.9))
    told = sure(quiet, outcome("b.C.t", "1"))["Controls"]
    assert "none beyond its band" in told
    assert "noisy" not in told
    noisy = sure(quiet, _control("matmul", -0.188, (32.0, 88.0, 41.0)), outcome("b.C.t", "1"))["Controls"]
    assert "moved by −18.8 % to +0.10 % latency" in noisy
    assert "The machine was noisy: between processes matmul by" in noisy
    assert "copy by" not in noisy
    host = _control("host", 0.0, (100.0, 105.0, 96.0), record_instrument="wall-clock")
    assert "noisy" not in sure(host, outcome("b.C.t", "1"))["Controls"], "under 10 % by the host's clock"
    assert "noisy" in sure(replace(host, record=quiet.record), outcome("b.C.t", "1"))["Controls"], "over 2 % by the device's"
    assert "MOVED" in sure(_control("copy", 0.3, (100.0, 101.0), "MOVED"), outcome("b.C.t", "1"))["Controls"]
    assert "unnoticed" in sure(outcome("b.C.t", "1"))["Controls"]


def test_controls_have_no_verdict_and_are_not_counted() -> None:
    rows = (_control("copy", 0.0, ()), outcome("b.C.t", "1"))
    assert tally(rows) == "1 PASS; 1 control, not judged"
    page = page_of(*rows)
    assert "PASS" not in page.section("control")
    assert "1 control, not judged" in page.section("sure")
    failed = replace(rows[0], verdict=RowVerdict.FAILED)
    assert tally((failed,)) == "1 FAILED", "a control that broke is counted"


@pytest.mark.parametrize(
    ("p_value", "said"), [(2.0**-12, "1 in 4,100, the least of 12 pairs"), (2.0**-11, "1 in 2,000"), (None, "not tested")]
)
def test_the_least_that_pairs_can_show_is_called_so(p_value: float | None, said: str) -> None:
    assert chance(outcome("b.C.t", "1", p_value=p_value, num_pairs=12)) == said
    assert noise.smallest_p(12) == 2.0**-12


def test_a_reason_does_not_repeat_the_change_beside_it() -> None:
    row = outcome("b.C.t", "1", effect=0.5, reason="+50.0 % latency over 12 pairs, over the floor of +3.0 % and beyond chance")
    assert why(row) == "over 12 pairs, over the floor of +3.0 % and beyond chance"
    assert why(replace(row, reason="+50.0 % latency, within the band")) == "within the band"
    for reason in ("+50.0 % latency over its floor over 12 pairs", "+50.0 % latency from its anchor", "because"):
        assert why(replace(row, reason=reason)) == reason


# Words


def test_a_page_lists_the_words_that_stand_on_it_and_no_others() -> None:
    bare = {word.term for word in words_of(render_html(result_of(outcome("b.C.t", "1"))).partition('<dl class="words">')[0])}
    assert {"Row", "PASS", "KernelSpec", "MDE80", "Band"} <= bare
    assert not bare & {"CREEP", "sm_NN", "e4m3, fp8", "IDENTICAL", "WIDE, BLIND", "Waiver", "CHANGED"}
    row = outcome("b.C.t", "decode T=64 e4m3 combined fragmented cold", flags=("BLIND",), mde80=0.2)
    full = Page(render_html(regression(rows=(row,)))).section("rest")
    for term in ("e4m3, fp8", "sm_NN", "WIDE, BLIND", "T, B, S", "combined, split", "fragmented, contiguous", "cold, warm", "CHANGED"):
        assert term in full


def test_every_verdict_and_flag_has_a_word() -> None:
    terms = {part for word in WORDS for part in word.term.split(", ")}
    assert {verdict.value for verdict in (*RowVerdict, *CompiledVerdict)} - {"UNSUPPORTED"} <= terms
    assert {"WIDE", "BLIND", "IDENTICAL", "NEAR LIMIT", "MOVED", "CREEP", "WAIVED", "SCREENED", "DECLARED NOISE", "FLOOR", "WARM"} <= terms
