"""The verdict on compiled rows, from files alone: references, states, exit codes, and what people read of it."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from gate_builders import HEAD_COMMIT, a_baseline, a_run
from rich.console import Console

from ci import compiled_gate, compiled_run
from ci.compare import compare_baseline
from ci.compiled import compare_compiled, identical_rows, summary_lines, with_compiled
from ci.compiled_metrics import LIKE_LAUNCHES, LIKE_LAUNCHES_MEANING, METRICS, PATH_MEANING, compare_figures
from ci.compiled_model import BASELINE_SCHEMA_ID, CompiledBaseline, CompiledFile, CompiledResult, CompiledVerdict
from ci.device import Device
from ci.errors import BaselineError, InputError, UsageError
from ci.model import GateResult
from ci.repo import Commit
from ci.report import render_html, render_junit, render_summary
from ci.schemas import SCHEMA_DIR
from ci.terminal import render_terminal
from ci.verdict_file import dump, load

ARCH = "sm_90"
ROW = "bench_x.X.track_y(case)"
FIGURES = {"registers": 40, "instructions": 1000, "async_copies_128": 8, "global_loads_32": 4, "mma": 4}


def a_launch(code: str = "c0", **changes: Any) -> dict[str, Any]:
    made = {"kind": "triton", "name": "kernel", "code": code, "grid": [8, 1, 1], "threads": 128, "shared_bytes": 1024}
    return {**made, "arguments": ["float16@0", "4096"], "occupancy_warps": 16, **changes}


def a_row(
    *launches: dict[str, Any],
    like: list[dict[str, Any]] | None = None,
    state: str = "compiled",
    reason: str | None = None,
    version: str = "1",
) -> dict[str, Any]:
    """`like`: launches of a like call, where they are not those of the first, started directly."""
    again = [{**launch, "direct": True} for launch in launches] if like is None else like
    told = json.dumps([{**launch, "name": ""} for launch in (*launches, {"name": "like"}, *again)])
    return {
        "state": state, "op": "op", "impl": "triton_op", "version": version, "launches": list(launches), "like_launches": again,
        "reason": reason, "launch_hash": told if state == "compiled" else None,
    }  # fmt: skip


def a_record(rows: dict[str, Any], codes: dict[str, dict[str, int]] | None = None, **changes: Any) -> CompiledFile:
    made = {
        "schema": "rapid_llm/compiled/2", "source": "s", "triton": "3.7.1", "torch": "2", "ptxas": {ARCH: "12.8.93"},
        "architectures": {ARCH: {"device": {"name": "H200"}, "rows": rows}}, "codes": codes or {"c0": FIGURES}, **changes,
    }  # fmt: skip
    return msgspec.convert(made, CompiledFile)


def a_stored(rows: dict[str, Any], codes: dict[str, dict[str, int]] | None = None, **changes: Any) -> CompiledBaseline:
    made = {
        "schema": "rapid_llm/compiled-baseline/2", "architecture": ARCH, "triton": "3.7.1", "ptxas": "12.8.93", "commit": "a" * 40,
        "reason": "first", "device": {"name": "H200"}, "rows": rows, "codes": codes or {"c0": FIGURES}, **changes,
    }  # fmt: skip
    return msgspec.convert(made, CompiledBaseline)


BASE = a_record({ROW: a_row(a_launch())})


def judged(row: dict[str, Any] | None, figures: dict[str, int] | None = None, **options: Any) -> CompiledResult:
    head = a_record({} if row is None else {ROW: row}, {"c0": FIGURES, "c1": figures or FIGURES})
    return compare_compiled(BASE, head, options.pop("baselines", {}), **options)


def verdict_of(result: CompiledResult) -> str:
    (verdict,) = result.counts[ARCH]
    return verdict


@pytest.mark.parametrize(
    ("figures", "metric", "verdict"),
    [
        ({"spill_store_bytes": 4}, "spill stores", "REGRESSED"),
        ({"spill_load_bytes": 4}, "spill loads", "REGRESSED"),
        ({"stack_bytes": 8}, "stack", "REGRESSED"),
        ({"local_loads": 1}, "local memory instructions", "REGRESSED"),
        ({"async_copies_128": 0, "global_loads_16": 64}, "mean width of global loads", "REGRESSED"),
        ({"async_copies_128": 5}, "asynchronous copies", "REGRESSED"),
        ({"async_copies_128": 0, "bulk_copies": 2}, "asynchronous copies", "IMPROVED"),
        ({"mma": 0}, "tensor-core generation", "REGRESSED"),
        ({"wgmma": 1}, "tensor-core generation", "IMPROVED"),
        ({"registers": 48}, "registers", "CHANGED"),
        ({"instructions": 900}, "instructions", "CHANGED"),
        ({"conversions": 4}, "conversions", "CHANGED"),
    ],
)
def test_each_figure_has_its_verdict(figures: dict[str, int], metric: str, verdict: str) -> None:
    changes = {change.metric: change.verdict.value for change in compare_figures(FIGURES, {**FIGURES, **figures})}
    assert changes[metric] == verdict


def test_within_a_tolerance_a_change_is_told_and_passes() -> None:
    (change,) = compare_figures({**FIGURES, "occupancy_warps": 16}, {**FIGURES, "occupancy_warps": 12})
    assert (change.metric, change.verdict) == ("occupancy", CompiledVerdict.CHANGED)
    (change,) = compare_figures({**FIGURES, "occupancy_warps": 16}, {**FIGURES, "occupancy_warps": 11})
    assert change.verdict is CompiledVerdict.REGRESSED


@pytest.mark.parametrize(
    ("row", "verdict", "exit_code", "told"),
    [
        (a_row(a_launch()), "IDENTICAL", 0, ""),
        (a_row(a_launch(), a_launch()), "REGRESSED", 1, "launches 1 (kernel) → 2 (kernel, kernel) a call"),
        (a_row(a_launch(), a_launch("", kind="torch", name="aten.mul")), "REGRESSED", 1, "launches 1 (kernel) → 2 (kernel, aten.mul)"),
        (a_row(a_launch(grid=[16, 1, 1])), "CHANGED", 0, "grid 8 × 1 × 1 → 16 × 1 × 1 programs"),
        (a_row(a_launch(arguments=["float16@8", "4096"])), "CHANGED", 0, "arguments #0 float16@0 → #0 float16@8"),
        (a_row(a_launch("c1")), "CHANGED", 0, "other machine code with the same figures"),
        (a_row(state="failed", reason="PTXASError: no"), "FAILED", 3, "triton_op does not compile: PTXASError: no"),
        (a_row(state="unsupported", reason="capability"), "FAILED", 3, "triton_op does not serve it any more: capability"),
        (None, "MISSING", 3, "the merge-base has it, HEAD has not"),
    ],
)
def test_each_state_of_a_row_has_its_verdict(row: dict[str, Any] | None, verdict: str, exit_code: int, told: str) -> None:
    result = judged(row)
    assert verdict_of(result) == verdict
    assert result.exit_code == exit_code
    lines = summary_lines(result.findings)
    assert [line for line in lines if told in line and line.endswith(f"on {ARCH}")] or not told
    assert bool(lines) == (verdict != "IDENTICAL")


@pytest.mark.parametrize(
    ("like", "verdict", "exit_code", "told"),
    [
        ([a_launch(direct=True)] * 2, "REGRESSED", 1, ["launches of a like call 1 (kernel) → 2 (kernel, kernel)"]),
        (
            [a_launch(direct=True), a_launch("", kind="torch", name="aten.mul_")],
            "REGRESSED", 1, ["launches of a like call 1 (kernel) → 2 (kernel, aten.mul_)"],
        ),
        ([], "IMPROVED", 0, ["launches of a like call 1 (kernel) → 0"]),
        ([a_launch(direct=True, grid=[9, 1, 1])], "CHANGED", 0, ["grid of a like call 8 × 1 × 1 → 9 × 1 × 1 programs"]),
        ([a_launch(direct=True, arguments=["float16@0", "1"])], "CHANGED", 0, ["arguments of a like call #1 4096 → #1 1"]),
        ([a_launch()], "CHANGED", 0, ["launch path of a like call direct → Triton's run"]),
        ([a_launch("c1", direct=True)], "REGRESSED", 1, ["spill stores of a like call 0 → 64 bytes"]),
    ],
)  # fmt: skip
def test_a_change_of_like_calls_alone_is_told_as_theirs(like: list[dict[str, Any]], verdict: str, exit_code: int, told: list[str]) -> None:
    result = judged(a_row(a_launch(), like=like), WORSE)
    assert (verdict_of(result), result.exit_code) == (verdict, exit_code)
    assert summary_lines(result.findings) == [f"kernel: {line} on {ARCH}" for line in told]


def test_a_change_of_every_call_is_told_once() -> None:
    result = judged(a_row(a_launch("c1", grid=[9, 1, 1]), a_launch()), WORSE)
    named = [change.metric for change in result.findings[0].changes]
    assert "launches" in named
    assert len(named) == len(set(named))
    assert not [name for name in named if "like call" in name]


def test_a_baseline_that_is_silent_on_like_calls_is_not_comparable() -> None:
    """Nor does it end the gate: the base branch has it until one is recorded anew."""
    old = a_stored({ROW: a_row(a_launch("c9"), like=[])}, {"c9": WORSE}, schema="rapid_llm/compiled-baseline/1")
    result = judged(a_row(a_launch()), baselines={ARCH: old})
    assert verdict_of(result) == "IDENTICAL"
    (notice,) = result.notices
    assert "NOT COMPARABLE (it was recorded before like calls were)" in notice


@pytest.mark.parametrize("state", ["failed", "unsupported"])
def test_a_row_that_starts_to_compile_is_new(state: str) -> None:
    base = a_record({ROW: a_row(state=state, reason="why")})
    result = compare_compiled(base, BASE, {})
    assert (verdict_of(result), result.exit_code) == ("NEW", 0)
    assert verdict_of(compare_compiled(None, BASE, {})) == "NEW"


def test_a_row_that_fails_on_both_sides_is_failed_and_one_that_nobody_claims_is_not() -> None:
    failed, unclaimed = (a_record({ROW: a_row(state=state, reason="why")}) for state in ("failed", "unsupported"))
    result = compare_compiled(failed, failed, {})
    assert (verdict_of(result), result.exit_code) == ("FAILED", 3)
    assert "as at the base" in result.findings[0].reason
    assert compare_compiled(unclaimed, unclaimed, {}).exit_code == 0


WORSE = {**FIGURES, "spill_store_bytes": 64}


def test_the_stored_baseline_decides_where_the_same_tools_made_it() -> None:
    """A change for the worse is accepted by a baseline that was merged before it, and nothing else accepts it."""
    assert judged(a_row(a_launch("c1")), WORSE).exit_code == 1
    accepted = a_stored({ROW: a_row(a_launch("c1"))}, {"c1": WORSE})
    assert judged(a_row(a_launch("c1")), WORSE, baselines={ARCH: accepted}).exit_code == 0
    stale = judged(a_row(a_launch("c0")), baselines={ARCH: accepted})
    assert (verdict_of(stale), stale.findings[0].reference) == ("IMPROVED", "baseline")


@pytest.mark.parametrize("changes", [{"triton": "3.6.0"}, {"ptxas": "13.0"}])
def test_a_baseline_of_other_tools_is_not_comparable_and_says_how_to_refresh_it(changes: dict[str, str]) -> None:
    result = judged(a_row(a_launch()), baselines={ARCH: a_stored({ROW: a_row(a_launch("c9"))}, {"c9": WORSE}, **changes)})
    assert verdict_of(result) == "IDENTICAL"
    (notice,) = result.notices
    assert "baselines/compiled/sm_90.json is NOT COMPARABLE" in notice
    assert "`python -m ci compiled record --reason ...`" in notice


def test_a_row_of_another_version_of_its_suite_is_held_against_the_merge_base() -> None:
    result = judged(a_row(a_launch()), baselines={ARCH: a_stored({ROW: a_row(a_launch("c9"), version="0")})})
    assert verdict_of(result) == "IDENTICAL"


def test_a_row_of_the_baseline_that_is_gone_is_missing_unless_it_was_not_selected() -> None:
    stored = a_stored({ROW: a_row(a_launch()), "bench_x.X.track_y(gone)": a_row(a_launch())})
    assert judged(a_row(a_launch()), baselines={ARCH: stored}).exit_code == 3
    assert judged(a_row(a_launch()), baselines={ARCH: stored}, selected=True).exit_code == 0


def test_architectures_are_told_in_their_order_and_each_kernel_once() -> None:
    order = ["sm_100", "sm_80", "sm_90"]
    base, head = (
        a_record(
            {},
            {"c0": FIGURES, "c1": WORSE},
            ptxas=dict.fromkeys(order, "1"),
            architectures={arch: {"device": {}, "rows": {ROW: a_row(a_launch(code), a_launch("", kind="torch"))}} for arch in order},
        )
        for code in ("c0", "c1")
    )
    result = compare_compiled(base, head, {})
    assert list(result.counts) == ["sm_80", "sm_90", "sm_100"]
    assert summary_lines(result.findings) == ["kernel: spill stores 0 → 64 bytes on sm_80, sm_90, sm_100"]


def test_rows_with_the_same_change_are_one_finding() -> None:
    other = ROW.replace("case", "other")
    base = a_record({ROW: a_row(a_launch()), other: a_row(a_launch())})
    codes = {"c0": FIGURES, "c1": WORSE}
    result = compare_compiled(base, a_record({ROW: a_row(a_launch("c1")), other: a_row(a_launch("c1"))}, codes), {})
    (finding,) = result.findings
    assert finding.rows == (ROW, other)
    assert result.reason == "2 compiled rows regressed: kernel: spill stores 0 → 64 bytes on sm_90"


def test_the_machine_code_of_both_sides_is_shown_as_a_difference() -> None:
    listings = {"c0": "LDG.E.128 R4\nEXIT\n", "c1": "LDG.E R4\nEXIT\n"}
    result = judged(a_row(a_launch("c1")), WORSE, listing=listings.get)
    assert result.findings[0].sass_diff.splitlines()[-3:] == ["-LDG.E.128 R4", "+LDG.E R4", " EXIT"]


def test_identical_rows_need_the_same_launches() -> None:
    twice = a_record({ROW: a_row(a_launch(), a_launch())})
    assert identical_rows(BASE, BASE, ARCH) == {ROW}
    assert identical_rows(BASE, twice, ARCH) == set()
    like = a_record({ROW: a_row(a_launch(), like=[a_launch(direct=True)] * 2)})
    assert identical_rows(BASE, like, ARCH) == set()
    failed = a_record({ROW: a_row(state="failed", reason="why")})
    assert identical_rows(failed, failed, ARCH) == set()


def test_skip_identical_is_refused_where_it_cannot_be_right(tmp_path: Path) -> None:
    commits = Commit("a" * 40, "base"), Commit("b" * 40, "head")
    nothing: Any = None
    with pytest.raises(UsageError, match="this machine has none"):
        compiled_gate.rows_to_skip(nothing, nothing, Device("CPU x", "cpu"), *commits, Console())
    with pytest.raises(UsageError, match="compared with itself"):
        compiled_gate.rows_to_skip(nothing, nothing, Device("NVIDIA H200", "cuda"), commits[0], commits[0], Console())


def test_skip_identical_names_rows_of_suites_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {ROW: a_row(a_launch()), "claim.triton_op(x)": a_row(a_launch())}
    record = a_record(rows, architectures={compiled_run.THIS_DEVICE: {"device": {}, "rows": rows}})
    monkeypatch.setattr(compiled_run, "compile_commit", lambda *args, **kwargs: record)
    nothing: Any = None
    commits = Commit("a" * 40, "base"), Commit("b" * 40, "head")
    assert compiled_gate.rows_to_skip(nothing, nothing, Device("NVIDIA H200", "cuda"), *commits, Console(quiet=True)) == (ROW,)


# With the run's verdict, and as people read it ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def passing() -> GateResult:
    return compare_baseline([a_run(100, commit=HEAD_COMMIT)], a_baseline(5))


@pytest.fixture(scope="module")
def regressed() -> CompiledResult:
    hostile = a_row(a_launch("c1", name="<b>kernel</b>"))
    return judged(hostile, WORSE, listing={"c0": "A ;\n", "c1": "<script>B ;\n"}.get)


def test_the_first_verdict_that_applies_is_the_runs(passing: GateResult, regressed: CompiledResult) -> None:
    assert passing.exit_code == 0
    both = with_compiled(passing, regressed)
    assert (both.exit_code, both.verdict.value) == (1, "REGRESSION")
    assert both.reason.startswith("1 compiled rows regressed")
    unfit = with_compiled(replace(passing, exit_code=5, reason="controls moved"), regressed)
    assert unfit.exit_code == 5
    assert unfit.reason.startswith("controls moved; 1 compiled rows regressed")
    failed = with_compiled(replace(passing, exit_code=1, reason="slow"), judged(None))
    assert failed.exit_code == 3
    assert failed.reason.startswith("1 compiled rows failed or missing")
    fine = with_compiled(passing, judged(a_row(a_launch())))
    assert (fine.exit_code, fine.reason) == (0, passing.reason)


def test_the_verdict_file_carries_the_compiled_rows(passing: GateResult, regressed: CompiledResult) -> None:
    both = with_compiled(passing, regressed)
    assert load(dump(both)) == both
    jsonschema.validate(json.loads(dump(both)), json.loads((SCHEMA_DIR / "verdict.schema.json").read_text(encoding="utf-8")))


def test_every_report_names_figure_and_architecture(passing: GateResult, regressed: CompiledResult) -> None:
    both = with_compiled(passing, regressed)
    page, summary, xml = render_html(both), render_summary(both), render_junit(both)
    said = io.StringIO()
    render_terminal(both, Console(file=said, width=200))
    for text in (page, summary, xml, said.getvalue()):
        assert "spill stores" in text
        assert ARCH in text
    assert "REGRESSED  <b>kernel</b>: spill stores 0 → 64 bytes on sm_90" in said.getvalue()
    assert "&lt;b&gt;kernel&lt;/b&gt;" in page
    assert "<script>" not in page
    assert "<summary>Difference of the machine code (SASS)</summary>" in page
    assert "registers do not suffice" in page
    assert 'type="REGRESSED"' in xml
    assert "H200" in page


def test_a_report_without_compiled_rows_says_nothing_of_them(passing: GateResult) -> None:
    assert "What the compiler made" not in render_html(passing) + render_summary(passing)


# Files --------------------------------------------------------------------------------------------------------------


def test_a_baseline_is_written_an_architecture_and_reads_back(tmp_path: Path) -> None:
    (path,) = compiled_run.record_baselines(BASE, Commit("a" * 40, "HEAD"), tmp_path, reason="first")
    assert path == tmp_path / "baselines" / "compiled" / "sm_90.json"
    stored = compiled_run.load_baseline(path.read_bytes(), name="x")
    assert compare_compiled(None, BASE, {ARCH: stored}).counts == {ARCH: {"IDENTICAL": 1}}
    jsonschema.validate(json.loads(path.read_text()), json.loads((SCHEMA_DIR / "compiled-baseline.schema.json").read_text()))


def test_a_failed_row_is_no_baseline(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="1 compiled rows failed and can be no baseline"):
        compiled_run.record_baselines(a_record({ROW: a_row(state="failed", reason="why")}), Commit("a" * 40, "HEAD"), tmp_path, reason="x")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema": "x"}'])
def test_a_baseline_of_another_form_is_refused(content: bytes) -> None:
    with pytest.raises(BaselineError):
        compiled_run.load_baseline(content, name="baselines/compiled/sm_90.json of main")


def test_committed_baselines_follow_their_schema(root: Path) -> None:
    for architecture in compiled_run.ARCHITECTURES:
        path = root / "baselines" / "compiled" / f"{architecture}.json"
        stored = compiled_run.load_baseline(path.read_bytes(), name=str(path))
        assert stored.architecture == architecture
        assert stored.schema == BASELINE_SCHEMA_ID


def test_the_page_has_the_table_of_the_rules(root: Path) -> None:
    page = (root / "docs" / "compiled.md").read_text(encoding="utf-8")
    for metric in METRICS:
        unit = f", {metric.unit}" if metric.unit else ""
        gates = f"beyond {metric.tolerance:.0%}" if metric.tolerance else "any"
        row = f"| {metric.name}{unit} | {metric.better} | {gates if metric.gates else 'told only'} | {metric.meaning} |"
        assert row in page
    assert f"| {LIKE_LAUNCHES} | lower | any | {LIKE_LAUNCHES_MEANING} |" in page
    assert f"| launch path of a like call | none | told only | {PATH_MEANING} |" in page
