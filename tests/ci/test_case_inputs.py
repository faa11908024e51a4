"""The series, histories and degenerate inputs of the cases, as they are written there, through whole comparisons (docs/cases.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gate_builders import BASE_COMMIT, HEAD_COMMIT, ROWS, a_run, commit_of, control, environment, foreign, measured, write_tree
from gate_shortcuts import BASELINE, compare, head, verdicts

from ci import baseline as baselines
from ci.compare import compare_history
from ci.confirm import compare_pairs
from ci.errors import BaselineError, GateError, InputError
from ci.jsonio import read_json, strict_dumps
from ci.model import CommitResult, GateResult, RowKey, RunVerdict
from ci.results import load_commit, read_tree

GB = {"unit": "GB/s", "higher_is_better": True}
US = {"unit": "us", "higher_is_better": False}


# ---------------------------------------------------------------- case 1: both directions in one suite


def _suite(throughput: float, latency: float, commit: str, count: int) -> CommitResult:
    def near(value: float) -> list[float]:
        return [value * (1 + 1e-5 * i) for i in range(count)]

    rows = [
        measured("track_gbs", near(throughput), unit="GB/s", direction="higher"),
        measured("track_us", near(latency), unit="us", direction="lower"),
        *(control(f"control_{i}", near(3000.0)) for i in range(3)),
    ]
    return commit_of(rows, commit)


@pytest.mark.parametrize(
    ("before", "after", "verdict"), [((1000.0, 10.0), (500.0, 20.0), "REGRESSED"), ((500.0, 20.0), (1000.0, 10.0), "IMPROVED")]
)
@pytest.mark.parametrize("mode", ["baseline", "history", "pairs"])
def test_case_1_a_suite_of_both_directions(before: tuple[float, float], after: tuple[float, float], verdict: str, mode: str) -> None:
    """{gbs 1000, us 10} against {gbs 500, us 20}, and swapped: the two rows have one verdict and one effect in every mode."""
    if mode == "pairs":
        result = compare_pairs(_suite(*before, BASE_COMMIT, 12), _suite(*after, HEAD_COMMIT, 12))
    elif mode == "baseline":
        runs = [
            replace(run, processes=tuple(replace(p, environment=environment(boot_id=f"boot-{i % 3}")) for p in run.processes))
            for i, run in enumerate(_suite(*before, BASE_COMMIT, 3) for _ in range(6))
        ]
        result = compare(_suite(*after, HEAD_COMMIT, 3), baselines.record(runs, accepted_by="A"))
    else:
        steady = [foreign(f"steady_{i}", 100.0) for i in range(3)]

        def of(values: tuple[float, float], commit: str) -> CommitResult:
            both = [foreign("track_gbs", values[0]), foreign("track_us", values[1], unit="us", direction="lower")]
            return commit_of([*both, *steady], commit, own=False)

        result = compare_history([of(before, f"{i:040x}") for i in range(8)], [of(after, HEAD_COMMIT)])
    found = {row.key.benchmark: row for row in result.rows}
    assert (found["track_gbs"].verdict.value, found["track_us"].verdict.value) == (verdict, verdict)
    assert found["track_gbs"].effect == pytest.approx(1.0 if verdict == "REGRESSED" else -0.5, abs=1e-3)
    assert found["track_us"].effect == pytest.approx(found["track_gbs"].effect, abs=1e-3)
    assert result.exit_code == (1 if verdict == "REGRESSED" else 0)


# ---------------------------------------------------------------- case 2: crashed or vanished, from files


def _tree(folder: Path, results: dict[str, Any], commit: str) -> CommitResult:
    write_tree(folder, dict.fromkeys("abc", GB), {name: [[value], [], "v1"] for name, value in results.items()}, commit=commit)
    return load_commit(folder, "box", commit)


WHOLE = {"a": 100.0, "b": 100.0, "c": 100.0}


@pytest.mark.parametrize(
    ("current", "expected"),
    [
        ({"a": 100.0, "b": None}, {"a": "PASS", "b": "FAILED", "c": "MISSING"}),
        ({"a": 100.0, "b": math.nan, "c": 100.0}, {"a": "PASS", "b": "FAILED", "c": "PASS"}),
        ({}, {"a": "MISSING", "b": "MISSING", "c": "MISSING"}),
    ],
)
def test_case_2_values_that_are_gone(tmp_path: Path, current: dict[str, Any], expected: dict[str, str]) -> None:
    """Null, absent and NaN against 100: each has its own word, and none of them passes."""
    history = [_tree(tmp_path / str(i), WHOLE, f"{i + 1:040x}") for i in range(4)]
    result = compare_history(history, [_tree(tmp_path / "head", current, HEAD_COMMIT)])
    assert verdicts(result) == expected
    assert (result.verdict, result.exit_code) == (RunVerdict.INCOMPLETE, 3)


def test_case_2_null_on_both_sides_is_failed_and_not_equal(tmp_path: Path) -> None:
    broken = {**WHOLE, "b": None}
    history = [_tree(tmp_path / str(i), broken, f"{i + 1:040x}") for i in range(4)]
    result = compare_history(history, [_tree(tmp_path / "head", broken, HEAD_COMMIT)])
    assert (verdicts(result)["b"], result.exit_code) == ("FAILED", 3)


def test_case_2_a_baseline_of_null_and_a_value_now_is_new(tmp_path: Path) -> None:
    history = [_tree(tmp_path / str(i), {**WHOLE, "b": None}, f"{i + 1:040x}") for i in range(4)]
    result = compare_history(history, [_tree(tmp_path / "head", WHOLE, HEAD_COMMIT)])
    assert (verdicts(result)["b"], result.exit_code) == ("NEW", 0)


def test_case_2_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"benchmarks\.json cannot be read"):
        read_tree(tmp_path)


# ---------------------------------------------------------------- case 7: which device


def _run_of(name: str) -> CommitResult:
    run = head()
    processes = tuple(replace(process, environment=environment(device__name=name)) for process in run.processes)
    return replace(run, processes=processes)


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H200 ", " NVIDIA  H200"])
def test_case_7_spaces_make_no_other_device(name: str) -> None:
    result = compare(_run_of(name))
    assert (result.exit_code, bool(result.rows)) == (0, True)


@pytest.mark.parametrize(
    "name", ["nvidia h200", "NVIDIA H200 NVL", "NVIDIA A100-SXM4-80GB", "Intel(R)_Arc(TM)_Pro_B60", "AMD Radeon/Graphics"]
)
def test_case_7_another_name_is_another_device(name: str) -> None:
    """BASELINE INVALID, with both names and what to do; no row is judged."""
    result = compare(_run_of(name))
    assert (result.verdict, result.exit_code, result.rows) == (RunVerdict.BASELINE_INVALID, 4, ())
    assert f"is of device.name 'NVIDIA H200', but the run of {name!r}; record this device's own" in result.reason


def test_case_7_a_run_that_names_no_device_is_refused() -> None:
    with pytest.raises(BaselineError, match=r"p0\.json: the environment of the run names no device"):
        compare(_run_of(""))


# ---------------------------------------------------------------- case 17: a series that slides


def test_case_17_a_series_that_passes_commit_by_commit_fails_against_the_baseline() -> None:
    """100, 98, 96, 94.1 ...: each step is under 5 %; held against what was accepted, the third is red at the latest and all after it."""
    series = [100.0 * 0.98**step for step in range(1, 11)]
    steps = [after / before for before, after in zip([100.0, *series], series, strict=False)]
    assert all(step > 0.95 for step in steps)
    codes = [compare([head(factors={"decode_a": value / 100}, seed=i) for i in (1, 2)]).exit_code for value in series]
    assert codes[2:] == [1] * 8


# ---------------------------------------------------------------- case 20: units


@pytest.mark.parametrize(
    ("before", "after"), [(("us", 900.0), ("ms", 1.1)), (("GB/s", 900.0), ("GiB/s", 838.2)), (("unit", 500.0), ("TFLOP/s", 500.0))]
)
@pytest.mark.parametrize("mode", ["history", "pairs"])
def test_case_20_another_unit_is_not_comparable(before: tuple[str, float], after: tuple[str, float], mode: str) -> None:
    """900 us against 1.1 ms is no gain of 818 times, and GB/s against GiB/s no loss of 7 %."""

    def of(unit: str, value: float, commit: str) -> CommitResult:
        direction: Any = "lower" if unit in ("us", "ms") else "higher"
        if mode == "history":
            return commit_of([foreign("row", value, unit=unit, direction=direction)], commit, own=False)
        return commit_of([measured("row", [value] * 12, unit=unit, direction=direction)], commit)

    old, new = of(*before, BASE_COMMIT), of(*after, HEAD_COMMIT)
    history = [replace(old, commit=f"{i:040x}") for i in range(6)]
    result = compare_history(history, [new]) if mode == "history" else compare_pairs(old, new)
    assert (verdicts(result)["row"], result.exit_code) == ("NOT COMPARABLE", 3)
    (row,) = result.rows
    assert before[0] in row.reason
    assert after[0] in row.reason


# ---------------------------------------------------------------- case 21: names


def _renamed(run: CommitResult, name: Callable[[RowKey], RowKey]) -> CommitResult:
    rows = {}
    for key, row in run.rows.items():
        new = key if key.benchmark.startswith("control") else name(key)
        rows[new] = replace(row, key=new, records=tuple(replace(record, key=new) for record in row.records))
    return replace(run, rows=rows)


@pytest.mark.parametrize(
    "name",
    [
        lambda key: RowKey(f"{key.benchmark}_v2", key.params),
        lambda key: RowKey(key.benchmark.upper(), key.params),
        lambda key: RowKey(key.benchmark, (*key.params, "float16")),
    ],
    ids=["renamed", "other case", "one axis more"],
)
def test_case_21_no_row_in_common_is_incomplete(name: Callable[[RowKey], RowKey]) -> None:
    """All rows renamed: every old name is missed, every new one shown, and nothing passes."""
    result = compare(_renamed(head(), name))
    assert result.exit_code == 3
    found = [row.verdict.value for row in result.rows if not row.control]
    assert sorted(found) == ["MISSING"] * len(ROWS) + ["NEW"] * len(ROWS)


# ---------------------------------------------------------------- case 25: files, as a baseline and as one of a history


@pytest.mark.parametrize("content", ["", "[]", "null", "{", '{"schema": 1, "schema": 2}', "\ufeff{", "{};"])
def test_case_25_a_broken_baseline_fails_closed(tmp_path: Path, content: str) -> None:
    path = tmp_path / "NVIDIA_H200.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(GateError, match=r"NVIDIA_H200\.json"):
        baselines.load(path)
    assert path.read_text(encoding="utf-8") == content


def test_case_25_a_truncated_baseline_fails_closed_at_every_length(tmp_path: Path) -> None:
    whole = baselines.to_json(BASELINE).rstrip()
    for share in (0.1, 0.5, 0.9, 0.999):
        path = tmp_path / "NVIDIA_H200.json"
        path.write_text(whole[: int(share * len(whole))], encoding="utf-8")
        with pytest.raises(GateError, match=r"NVIDIA_H200\.json"):
            baselines.load(path)


@pytest.mark.parametrize("value", [[[2.0]], [2.0], 2.0])
def test_case_25_a_value_as_list_and_as_a_scalar(tmp_path: Path, value: object) -> None:
    """A row as [[value]], [value], or a scalar: the same number."""
    write_tree(tmp_path, {"a": GB}, {"a": value})
    (row,) = load_commit(tmp_path, "box", HEAD_COMMIT).rows.values()
    assert (row.state, row.samples) == ("measured", (2.0,))


# ---------------------------------------------------------------- case 39: what is committed and written is strict JSON


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def test_case_39_every_committed_file_of_this_project_is_strict_json(root: Path) -> None:
    """All but asv's own results, which are in its dialect."""
    paths = [path for folder in ("baselines", "docs") for path in sorted((root / folder).rglob("*.json")) if "results" not in path.parts]
    assert len(paths) > 20
    for path in paths:
        json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)


def test_case_39_the_refusal_would_refuse(tmp_path: Path) -> None:
    for number in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="not JSON compliant"):
            strict_dumps({"a": [number]})
    with pytest.raises(ValueError, match="NaN is no JSON"):
        json.loads('{"a": NaN}', parse_constant=_refuse)
    (tmp_path / "x.json").write_text('{"a": Infinity}', encoding="utf-8")
    with pytest.raises(InputError):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("limits", [(-math.inf, math.inf), (math.nan, math.nan), (None, None)])
def test_case_39_infinite_confidence_limits_are_unknown_and_change_nothing(tmp_path: Path, limits: tuple[Any, Any]) -> None:
    """asv writes bare Infinity for the limits of one sample: the value counts, and the limits are no reason for a pass."""

    def tree(folder: str, value: float, commit: str) -> CommitResult:
        row = [[value], [], "v1", None, None, [limits[0]], [[value]]]
        write_tree(tmp_path / folder, {"a": GB, "b": GB}, {"a": row, "b": [[1.0], [], "v1"]}, commit=commit)
        return load_commit(tmp_path / folder, "box", commit)

    history = [tree(str(i), 100.0, f"{i + 1:040x}") for i in range(8)]
    result: GateResult = compare_history(history, [tree("head", 50.0, HEAD_COMMIT)])
    assert (verdicts(result)["a"], result.exit_code) == ("REGRESSED", 1)


# ---------------------------------------------------------------- case 9: what a bad runner leaves


@pytest.mark.parametrize("share", [0.08, 0.5, 0.82])
def test_case_9_all_rows_at_a_share_and_back(share: float) -> None:
    """Twelve rows at .08 to .82 of the median are the machine; the normal run after them is no improvement."""
    slow = head(shift=share)
    result = compare(slow)
    assert (result.verdict, result.exit_code) == (RunVerdict.RUNNER_UNFIT, 5)
    assert compare(head()).exit_code == 0
    bad = baselines.record([a_run(seed, shift=share) for seed in range(10)], accepted_by="A")
    back = compare(head(), bad)
    assert back.exit_code == 5
    assert "IMPROVED" not in verdicts(back).values()
