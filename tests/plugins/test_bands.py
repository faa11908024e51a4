"""Bands in `asv continuous` and `asv compare`: each row's own, from the baseline of the base commit, where that speaks for the runs."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from asv import _stats
from asv.commands import compare as asv_compare

from ci import baseline as baselines
from ci.compare import baseline_floors, compare_baseline
from ci.compared import MIN_FLOOR
from ci.device import detect
from ci.plugins import bands, direction
from tests.ci.gate_builders import PROTOCOL, a_baseline, a_run, commit_of, environment, with_row, without_row
from tests.plugins.conftest import Toy

pytestmark = pytest.mark.slow

Continuous = Callable[..., subprocess.CompletedProcess[str]]

SDS = {"large": 0.0005, "small": 0.06}
"""Relative SD of a run of each case in the toy's baseline: `large` is quiet, `small` noisy."""


def _baseline(**changes: Any) -> str:
    """A baseline of the toy: five runs of three processes on three boots."""
    steps = (-1.2, -0.6, 0.0, 0.6, 1.2)
    rows = {}
    for case, method in itertools.product(SDS, ("track_rate", "track_latency")):
        rate = {"small": 100.0, "large": 200.0}[case]
        levels = [rate * (1 + SDS[case] * step) for step in steps]
        rows[f"bench_toy.Copy.{method}({case})"] = {
            "benchmark": f"bench_toy.Copy.{method}",
            "params": [case],
            "metric": "throughput",
            "unit": "GB/s" if method == "track_rate" else "us",
            "direction": "higher" if method == "track_rate" else "lower",
            "class": case,
            "version": "1",
            "values": [[level if method == "track_rate" else 1e3 / level] * 3 for level in levels],
            "op": "copy",
            "impl": "toy",
            "control": False,
            "timer": case,
            "instrument": "device",
        }
    data = {
        "schema": "rapid_llm/baseline/1",
        "protocol": {"processes": 3, "estimator": "fast60", "timers": ["large", "small"], "l2": [], "hash": "t1"},
        "device": {"type": "cpu", "name": "CPU toy"},
        "environment": {"torch": "1"},
        "anchor_commit": "a" * 40,
        "runs": [
            {"id": f"{i}-x", "boot": f"boot-{i % 3}", "gpu_uuid": None, "time": "2026-11-29T00:00:00Z", "commit": "a" * 40}
            for i in range(len(steps))
        ],
        "rows": rows,
        "accepted_by": "toy",
    }
    for name, value in changes.items():
        outer, _, inner = name.partition("__")
        if inner:
            data[outer][inner] = value  # type: ignore[index]
        else:
            data[outer] = value
    text = json.dumps(data)
    baselines.load(text.encode())
    return text


@pytest.fixture
def continuous(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> Continuous:
    """Compares two states of the toy, whose base commit has the baseline (or `head_baseline`, the tested one)."""
    monkeypatch.setenv("RAPID_LLM_BENCH_DEVICE", "cpu")
    file = toy.path / "baselines" / f"{detect().key}.json"
    file.parent.mkdir()

    def compare(
        head: dict[str, Any], *arguments: str, baseline: str | None = None, head_baseline: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        if baseline is not None:
            file.write_text(baseline, encoding="utf-8")
        base = toy.commit()
        if head_baseline is not None:
            file.write_text(head_baseline, encoding="utf-8")
        return toy.continuous(base, toy.commit(**head), *arguments)

    return compare


THREE_ROUNDS = ("-a", "rounds=3")
"""With two, asv calls no change of 2 % significant."""


def _marked(done: subprocess.CompletedProcess[str], mark: str) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith(f"| {mark} ")]


def _told(done: subprocess.CompletedProcess[str]) -> str:
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Bands: ")]
    return line


def test_a_quiet_row_that_falls_by_two_per_cent_regresses_and_a_noisy_one_that_falls_by_fifteen_does_not(
    continuous: Continuous, toy: Toy
) -> None:
    done = continuous({"large": 196.0, "small": 85.0}, *THREE_ROUNDS, baseline=_baseline())
    assert done.returncode == 1, done.stdout
    marked = _marked(done, "+")
    assert len(marked) == 2, done.stdout  # the rate, and the latency that rose with it
    assert all("'large'" in line for line in marked)
    base = toy.git("rev-parse", "HEAD~1")
    name = f"baselines/{detect().key}.json of {base[:12]}"
    assert _told(done) == f"Bands: 4 row(s) by their own band, 0 by the factor 1.1 ({name}; 2 band(s) are wider than that factor)."

    again = toy.asv("compare", base, "HEAD", "--only-changed")
    assert [line.split("|")[-2] for line in _marked(again, "+")] == sorted(line.split("|")[-2] for line in marked)
    assert _told(again) == _told(done)

    by_factor = toy.asv("compare", base, "HEAD", "--only-changed", "-f", "1.1")
    assert all("'small'" in line for line in _marked(by_factor, "+"))
    assert _told(by_factor) == "Bands: 0 row(s) by their own band, 4 by the factor 1.1 (-f holds for every row)."


def test_a_quiet_row_that_rises_by_two_per_cent_improves(continuous: Continuous) -> None:
    done = continuous({"large": 204.0}, *THREE_ROUNDS, baseline=_baseline())
    assert done.returncode == 0, done.stdout
    assert len(_marked(done, "-")) == 2
    assert not _marked(done, "+")


def test_an_explicit_factor_wins_even_where_it_is_the_default(continuous: Continuous) -> None:
    done = continuous({"large": 196.0}, "-f", "1.1", baseline=_baseline())
    assert done.returncode == 0, done.stdout
    assert _told(done) == "Bands: 0 row(s) by their own band, 4 by the factor 1.1 (-f holds for every row)."


def test_a_change_cannot_bring_its_own_band(continuous: Continuous) -> None:
    done = continuous({"large": 196.0}, head_baseline=_baseline())
    assert done.returncode == 0, done.stdout
    assert "Bands: 0 row(s) by their own band, 4 by the factor 1.1 (" in _told(done)
    assert f"has no baselines/{detect().key}.json" in _told(done)


def test_a_stale_baseline_is_not_used_and_told(continuous: Continuous) -> None:
    done = continuous({"large": 196.0}, baseline=_baseline(protocol__hash="t2"))
    assert done.returncode == 0, done.stdout
    assert "Bands: 0 row(s) by their own band, 4 by the factor 1.1 (not used: " in _told(done)
    assert "under protocol 't2', but the run under 't1'" in _told(done)


@pytest.mark.parametrize(
    ("env", "protocol", "why"),
    [
        ({"device__name": "NVIDIA H100"}, PROTOCOL, "device.name"),
        ({"device__multiprocessors": 66}, PROTOCOL, "device.multiprocessors"),
        ({"torch": "2.12.0"}, PROTOCOL, "torch"),
        ({"triton": None}, PROTOCOL, "triton"),
        ({"driver": "590.1"}, PROTOCOL, "driver major"),
        ({}, "protocol-2", "protocol"),
    ],
)
@pytest.mark.parametrize("stale_side", [0, 1])
def test_one_run_of_another_kind_makes_the_baseline_stale(env: dict[str, Any], protocol: str, why: str, stale_side: int) -> None:
    baseline = a_baseline()
    sides = [a_run(20), a_run(21)]
    assert bands._stale(baseline, sides, "file") is None
    sides[stale_side] = commit_of(list(sides[stale_side].rows.values()), env=environment(**env), protocol=protocol)
    assert why in str(bands._stale(baseline, sides, "file"))


def test_runs_without_records_make_the_baseline_stale() -> None:
    bare = a_run(21)
    bare = replace(bare, rows={key: replace(row, records=()) for key, row in bare.rows.items()})
    assert "no process records say" in str(bands._stale(a_baseline(), [a_run(20), bare], "file"))


@pytest.mark.parametrize(
    ("change", "alike"),
    [
        ({}, True),
        ({"version": "v2"}, False),
        ({"unit": "TB/s"}, False),
        ({"direction": "lower"}, False),
        ({"state": "unverified"}, False),
        ({"samples": (1.0, 2.0)}, False),
        ({"samples": (1.0, 2.0, 3.0, 4.0)}, True),
    ],
)
@pytest.mark.parametrize("side", [0, 1])
def test_a_row_that_is_measured_in_another_way_has_no_band(change: dict[str, Any], alike: bool, side: int) -> None:
    baseline = a_baseline()
    row = baseline.rows["decode_a"]
    sides = [a_run(20), a_run(21)]
    sides[side] = with_row(sides[side], replace(sides[side].rows[row.key], **change))
    assert bands._measured_alike(row, baseline, sides) == alike
    assert not bands._measured_alike(row, baseline, [sides[1 - side], without_row(sides[side], "decode_a")])


def test_a_baseline_that_cannot_be_read_is_told(continuous: Continuous) -> None:
    done = continuous({"large": 150.0}, baseline="{")
    assert done.returncode == 1, done.stdout
    assert "0 row(s) by their own band, 4 by the factor 1.1 (no baseline can be used: " in _told(done)
    assert "is not valid JSON" in _told(done)


@pytest.mark.parametrize("count", range(1, 12))
def test_the_rank_test_is_asked_only_where_it_can_reject(count: int) -> None:
    low, high = [1.0 + i / 1000 for i in range(count)], [2.0 + i / 1000 for i in range(count)]
    overlapping = {"ci_99_a": 0.0, "ci_99_b": 9.0}
    rejects = _stats.is_different(low, high, overlapping, overlapping)
    assert bands.can_reject(count, count) == rejects == (count >= 7)


def _stated(samples: list[float]) -> tuple[dict[str, float], list[float]]:
    return {"repeat": len(samples), "ci_99_a": 0.0, "ci_99_b": math.inf}, samples


@pytest.mark.parametrize(
    ("base", "head", "worse"),
    [
        ([100.0, 101, 102], [106.0, 107, 108], True),  # too few for the rank test: the band decides
        ([100.0, 101, 102, 103, 104, 105], [110.0, 111, 112, 113, 114, 115], True),  # six: asv would never reject
        ([100.0, 101, 102, 103, 104, 105, 106], [110.0, 111, 112, 113, 114, 115, 116], True),
        ([90.0, 99, 102, 100, 101, 120, 121], [98.0, 99, 100, 107, 108, 109, 110], False),  # beyond the band, but mixed
        ([100.0, 101, 102, 103, 104, 105, 106], [103.1, 104.1, 105.1, 106.1, 107.1, 108.1, 109.1], False),  # within the band
    ],
)
def test_band_and_rank_test_together(base: list[float], head: list[float], worse: bool) -> None:
    before, after = bands.Lower(np.median(base)), bands.Lower(np.median(head))
    before.factor = after.factor = 1.04
    assert bands.better(before, after, _stated(base), _stated(head), 9.0) == worse
    assert not bands.better(after, before, _stated(head), _stated(base), 9.0)
    rate_before, rate_after = direction.Higher(1e3 / before), direction.Higher(1e3 / after)
    rate_before.factor = rate_after.factor = 1.04
    rates = [[1e3 / value for value in samples] for samples in (base, head)]
    assert bands.better(rate_before, rate_after, _stated(rates[0]), _stated(rates[1]), 9.0) == worse
    assert not bands.better(rate_after, rate_before, _stated(rates[1]), _stated(rates[0]), 9.0)


def test_without_a_band_it_is_asvs_rule() -> None:
    few = _stated([1.0, 2.0, 3.0])
    for a, b in ((1.0, 1.2), (1.2, 1.0), (1.0, 1.05)):
        expected = asv_compare._is_result_better(a, b, few, few, 1.1)
        assert bands.better(a, b, few, few, 1.1) == expected
        assert bands.better(a, b, None, None, 1.1) == (a < b / 1.1)


def test_the_floor_between_two_runs_is_the_gates_with_the_sd_of_a_difference() -> None:
    baseline = a_baseline()
    floors = baseline_floors(baseline)
    judged = compare_baseline([a_run(99)], baseline).rows
    assert {row.key for row in judged} == set(floors)
    for row in judged:
        assert row.floor is not None
        assert floors[row.key] >= row.floor >= MIN_FLOOR
        if row.floor > MIN_FLOOR:
            assert floors[row.key] == pytest.approx(math.sqrt(2) * row.floor)
    assert any(row.floor > MIN_FLOOR for row in judged if row.floor is not None)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["continuous", "main", "HEAD"], False),
        (["continuous", "main", "HEAD", "-f", "1.1"], True),
        (["continuous", "-f1.1", "main", "HEAD"], True),
        (["continuous", "main", "HEAD", "--factor=1.1"], True),
        (["continuous", "main", "HEAD", "--fact", "1.1"], True),
    ],
)
def test_a_factor_on_the_command_line_is_seen_however_it_is_written(arguments: list[str], named: bool) -> None:
    assert bands.names_factor("continuous", arguments) == named
