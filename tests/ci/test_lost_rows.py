"""A row that the change takes away is missed even where no stored baseline has it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ci import lost_rows
from ci.errors import InputError
from ci.lost_rows import Listed, missed
from ci.model import GateResult, RowKey, RowOutcome, RowVerdict, RunVerdict
from ci.repo import review_lines

ROW = Listed("bench_a.A.track_x", ["case"], ["cpu", "cuda"], False, "read-bandwidth", "GB/s", "v1")
NAME = "bench_a.A.track_x(case)"
OTHER = msgspec.structs.replace(ROW, params=["other"])
BEFORE = {NAME: ROW, "bench_a.A.track_x(other)": OTHER}

PASSED = GateResult(
    verdict=RunVerdict.PASS,
    exit_code=0,
    reason="1 row compared, none regressed",
    mode="ab",
    device="CPU",
    base="a" * 40,
    head="b" * 40,
    rows=(RowOutcome(RowKey("bench_a.A.track_x", ("other",)), RowVerdict.PASS, "", "other"),),
)


def _after(**changes: object) -> dict[str, Listed]:
    return {**BEFORE, NAME: msgspec.structs.replace(ROW, **changes)}


def test_nothing_changed_changes_nothing() -> None:
    assert missed(PASSED, BEFORE, BEFORE, device_type="cpu") == PASSED


@pytest.mark.parametrize(
    ("after", "why"),
    [
        ({"bench_a.A.track_x(other)": OTHER}, "the change's have not"),
        ({"bench_a.A.track_y(case)": ROW, "bench_a.A.track_x(other)": OTHER}, "the change's have not"),
        (_after(control=True), "makes it a control"),
        (_after(devices=["cuda"]), "takes it off cpu devices"),
    ],
)
def test_a_row_that_is_taken_away_is_missing_and_no_pass(after: dict[str, Listed], why: str) -> None:
    """Deleted, renamed, turned into a control, taken off the device."""
    result = missed(PASSED, BEFORE, after, device_type="cpu")
    assert (result.exit_code, result.verdict) == (3, RunVerdict.INCOMPLETE)
    (row,) = [row for row in result.rows if row.verdict is RowVerdict.MISSING]
    assert str(row.key) == NAME
    assert why in row.reason
    assert NAME in result.reason
    regressed = missed(replace(PASSED, exit_code=1, verdict=RunVerdict.REGRESSION, reason="x regressed"), BEFORE, after, device_type="cpu")
    assert (regressed.exit_code, regressed.reason.startswith("x regressed; and ")) == (3, True)
    wrong = missed(replace(PASSED, exit_code=6, verdict=RunVerdict.WRONG_RESULTS), BEFORE, after, device_type="cpu")
    assert wrong.exit_code == 6


def test_rows_that_were_not_selected_or_not_of_this_device_are_not_missing() -> None:
    gone = {"bench_a.A.track_x(other)": OTHER}
    assert missed(PASSED, BEFORE, gone, device_type="cpu", select="other") == PASSED
    before = {**BEFORE, NAME: msgspec.structs.replace(ROW, devices=["cuda"])}
    elsewhere = missed(PASSED, before, gone, device_type="cpu")
    assert elsewhere.exit_code == 0
    assert any("takes away 1 rows" in notice and NAME in notice for notice in elsewhere.notices)
    assert missed(PASSED, before, gone, device_type="").exit_code == 3


def test_rows_of_the_merge_base_that_are_not_known_are_no_pass() -> None:
    unknown = lost_rows.Suites(None, {}, "The suites in x cannot be listed: no suites today; mend them.")
    result = lost_rows.judged(PASSED, unknown)
    assert (result.exit_code, result.verdict) == (3, RunVerdict.INCOMPLETE)
    assert "no suites today" in result.reason
    regressed = lost_rows.judged(replace(PASSED, exit_code=6, verdict=RunVerdict.WRONG_RESULTS, reason="wrong"), unknown)
    assert (regressed.exit_code, regressed.reason.startswith("wrong; and the merge-base's rows")) == (6, True)
    assert lost_rows.judged(PASSED, lost_rows.Suites({}, BEFORE)) == PASSED


def test_a_row_that_the_baseline_misses_is_told_once() -> None:
    waived = RowOutcome(RowKey("bench_a.A.track_x", ("case",)), RowVerdict.MISSING, "waived", "other", flags=("WAIVED",))
    told = replace(PASSED, rows=(waived, *PASSED.rows))
    assert missed(told, BEFORE, {"bench_a.A.track_x(other)": OTHER}, device_type="cpu") == told


@pytest.mark.parametrize(("field", "value"), [("version", "v2"), ("unit", "TFLOP/s"), ("bottleneck", "launch")])
def test_what_else_changes_in_a_row_is_named(field: str, value: str) -> None:
    result = missed(PASSED, BEFORE, _after(**{field: value}), device_type="cpu")
    assert result.exit_code == 0
    assert result.notices == (f"The change gives 1 rows another {field}: {NAME}.",)


def test_the_suites_of_this_checkout_are_listed(root: Path) -> None:
    rows = lost_rows.listed(root)
    assert any(row.control for row in rows.values())
    assert any(name.startswith("bench_kv_write.Allocator.track_calls(") and row.gated_on("cpu") for name, row in rows.items())


def test_suites_that_cannot_be_listed_are_named(tmp_path: Path) -> None:
    (tmp_path / "asv_bench").mkdir()
    (tmp_path / "asv_bench" / "__init__.py").write_text("raise RuntimeError('no suites today')\n", encoding="utf-8")
    with pytest.raises(InputError, match=re.escape(str(tmp_path)) + ".*no suites today"):
        lost_rows.listed(tmp_path)


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("baselines/NVIDIA_H200.json", "a baseline or its schema"),
        ("asv_bench/verify.py", "the instrument or a suite"),
        ("asv_bench/bench_kv_write.py", "the instrument or a suite"),
        ("ci/screen.py", "the gate itself"),
        ("ci/plugins/direction.py", "the gate itself"),
        ("asv.conf.json", "asv's configuration"),
        ("constraints-gpu.txt", "pinned versions"),
        (".github/workflows/gpu-gate.yml", "the workflows that run the gate"),
        ("Makefile", "the commands of the gate"),
        ("pyproject.toml", "the packages that the gate is installed with"),
        ("numpy.py", "files that are neither product, tests nor docs"),
        ("asv/__init__.py", "files that are neither product, tests nor docs"),
        (".gitattributes", "files that are neither product, tests nor docs"),
    ],
)
def test_what_could_move_its_own_verdict_is_named(path: str, what: str) -> None:
    assert review_lines(["rapid_llm/kv_cache.py", path, "README.md"]) == [f"The change touches {what}: {path}."]


def test_product_tests_and_docs_need_no_word() -> None:
    assert review_lines(["rapid_llm/kv_cache.py", "tests/test_kv_cache.py", "docs/h200.md", "README.md", "LICENSE"]) == []
