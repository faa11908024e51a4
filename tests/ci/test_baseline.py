"""Baseline files: what may be recorded, what is read, and when it may be compared with (R94, R108; cases 5, 7, 17, 25, 28, 39)."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from gate_builders import PROTOCOL, ROWS, a_baseline, a_run, commit_of, environment, foreign, measured, with_row, without_row

from ci import baseline as baselines
from ci.baseline import Baseline, Waiver, check, device_key, file_name
from ci.errors import BaselineError, UsageError
from ci.identity import device_of, throttles
from ci.model import CommitResult, RowKey
from ci.schemas import SCHEMA_DIR

NOW = datetime.datetime(2026, 11, 30, tzinfo=datetime.timezone.utc)


def _refuse(constant: str) -> Any:
    raise AssertionError(f"the file has the bare constant {constant}")


# ---------------------------------------------------------------- names of devices


def test_four_variants_of_a_device_are_four_keys() -> None:
    """Case 7: silicon is told apart by its whole name."""
    names = [
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA H200",
        "NVIDIA H200 NVL",
    ]
    assert len({device_key(name) for name in names}) == len(names)
    assert device_key("NVIDIA H100 80GB HBM3", mig="3g.40gb") == device_key("NVIDIA H100 80GB HBM3 MIG 3g.40gb")


@pytest.mark.parametrize(
    ("name", "key"),
    [("NVIDIA H200", "NVIDIA_H200"), (" NVIDIA  H200 ", "NVIDIA_H200"), ("NVIDIA A100-SXM4-80GB", "NVIDIA_A100-SXM4-80GB")],
)
def test_plain_names_stay_readable(name: str, key: str) -> None:
    assert device_key(name) == key


@pytest.mark.parametrize(
    "name", ["Intel(R)_Arc(TM)_Pro_B60", "AMD Radeon/Graphics", "a=b:c", "x\\y", "über 9", "x" * 300, "../../etc/passwd"]
)
def test_any_name_makes_a_safe_short_file_name(name: str) -> None:
    """Cases 7 and 46: no separator, no colon, at most 96 characters, and a hash that keeps two names apart."""
    key = device_key(name)
    assert set(key) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
    assert 0 < len(key) <= 96
    assert not key.startswith(".")
    assert key == device_key(name) != device_key(name + "'")


@pytest.mark.parametrize("name", ["", "  ", "..", "///", "()"])
def test_a_device_without_a_name_is_an_error(name: str) -> None:
    with pytest.raises(UsageError, match="no letter or digit"):
        device_key(name)


def test_mig_states_that_are_no_profile_do_not_count() -> None:
    for word in (None, "", "Disabled", "[N/A]"):
        assert device_of(environment(device__mig=word)).mig is None
    assert device_of(environment(device__mig="3g.71gb")).mig == "3g.71gb"
    assert device_key("NVIDIA H200", mig="Enabled") == "NVIDIA_H200"


# ---------------------------------------------------------------- recording


def test_a_baseline_keeps_raw_values_and_where_they_come_from() -> None:
    """R108: throughput with unit and latency of each process; no band is stored."""
    runs = [a_run(seed) for seed in range(5)]
    made = baselines.record(runs, accepted_by="A. Reviewer", reason="new kernels")
    row = made.rows["decode_a"]
    assert row.values == [list(run.rows[RowKey("decode_a")].samples) for run in runs]
    assert row.latency_us == [[record.latency_us for record in run.rows[RowKey("decode_a")].records] for run in runs]
    assert (row.unit, row.direction, row.bottleneck, row.impl, row.metric) == (
        "GB/s",
        "higher",
        "read-bandwidth",
        "triton_paged_decode",
        "throughput",
    )
    assert (made.protocol.processes, made.protocol.hash, made.accepted_by, made.reason) == (3, PROTOCOL, "A. Reviewer", "new kernels")
    assert (made.device.name, made.environment.torch) == ("NVIDIA H200", "2.11.0+cu130")
    assert [run.boot for run in made.runs] == ["boot-0", "boot-1", "boot-2", "boot-0", "boot-1"]
    assert set(made.runs[0].controls) == {"control_0", "control_1", "control_2"}
    assert not made.advisory
    assert '"band"' not in baselines.to_json(made)
    assert file_name(made) == "baselines/NVIDIA_H200.json"


def test_a_successor_names_its_predecessor_and_keeps_the_anchor() -> None:
    """Case 17: slow drift is held against an anchor that a refresh does not move."""
    first = a_baseline(5)
    second = baselines.record([a_run(seed, commit="c" * 40) for seed in range(5)], accepted_by="B", previous=first)
    assert second.previous_hash == baselines.content_hash(first)
    assert second.anchor_commit == first.anchor_commit == "a" * 40


def _runs(change: Callable[[CommitResult], CommitResult]) -> list[CommitResult]:
    """Five runs, the last of them changed."""
    runs = [a_run(seed) for seed in range(5)]
    return [*runs[:4], change(runs[4])]


def _env(**changes: Any) -> Callable[[CommitResult], CommitResult]:
    def change(run: CommitResult) -> CommitResult:
        made = environment(boot_id="boot-1", **changes)
        return replace(run, processes=tuple(replace(process, environment=made) for process in run.processes))

    return change


def _row(**changes: Any) -> Callable[[CommitResult], CommitResult]:
    return lambda run: with_row(run, measured("decode_a", run.rows[RowKey("decode_a")].samples, **changes))


def _state(state: Any, reason: str) -> Callable[[CommitResult], CommitResult]:
    return lambda run: with_row(run, replace(run.rows[RowKey("decode_a")], state=state, reason=reason, samples=()))


REFUSED: dict[str, tuple[Callable[[CommitResult], CommitResult], list[str]]] = {
    "other device": (_env(device__name="NVIDIA H100 PCIe"), ["device.name", "'NVIDIA H200'", "'NVIDIA H100 PCIe'"]),
    "other memory": (_env(device__memory_bytes=1), ["device.memory_bytes", "150000000000", "1"]),
    "other power limit": (_env(state__power_limit_w=500.0), ["power_limit_w", "700.0", "500.0"]),
    "other torch": (_env(torch="2.12.0"), ["torch", "'2.11.0+cu130'", "'2.12.0'"]),
    "other triton": (_env(triton="3.7.0"), ["triton", "'3.6.0'", "'3.7.0'"]),
    "other driver": (_env(driver="590.1"), ["driver", "'580.159.04'", "'590.1'"]),
    "throttled": (_env(state__throttle_reasons=["hw_thermal_slowdown"]), ["throttled", "hw_thermal_slowdown"]),
    "other protocol": (
        lambda run: replace(run, processes=tuple(replace(p, protocol="protocol-2") for p in run.processes)),
        ["protocol", "'protocol-1'", "'protocol-2'"],
    ),
    "over the peak": (_row(peak_fraction=1.2), ["decode_a", "1.2000 of the peak"]),
    "other inputs": (_row(input_hash="other"), ["input_hash of decode_a", "'inputs'", "'other'"]),
    "other unit": (_row(unit="GiB/s"), ["unit of decode_a", "'GB/s'", "'GiB/s'"]),
    "other version": (_row(version="v2"), ["version of decode_a", "'v1'", "'v2'"]),
    "unverified": (_state("unverified", "off by 3"), ["decode_a is unverified", "off by 3"]),
    "violation": (_state("violation", "6000 GB/s"), ["decode_a is violation", "6000 GB/s"]),
    "failed": (_state("failed", "crashed"), ["decode_a is failed", "crashed"]),
    "skipped in one run": (_state("skipped", "no device"), ["decode_a is skipped"]),
    "row missing": (lambda run: without_row(run, "decode_a"), ["decode_a is missing from 1 of 5 runs"]),
    "sample missing": (
        lambda run: with_row(run, measured("decode_a", run.rows[RowKey("decode_a")].samples[:2])),
        ["decode_a has 2 values", "3 processes"],
    ),
    "foreign": (lambda run: commit_of([foreign(name, 1.0) for name in ROWS], own=False), ["no process records"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_not_become_a_baseline(name: str) -> None:
    """Cases 5, 7, 9, 28: the refusal names the key and both values."""
    change, told = REFUSED[name]
    with pytest.raises(BaselineError) as caught:
        baselines.record(_runs(change), accepted_by="A")
    for part in told:
        assert part in str(caught.value)


def test_five_runs_over_three_boots_are_needed() -> None:
    with pytest.raises(BaselineError, match="at least 5 runs, but 4"):
        baselines.record([a_run(seed) for seed in range(4)], accepted_by="A")
    two_boots = [a_run(seed, boot=f"boot-{seed % 2}") for seed in range(5)]
    with pytest.raises(BaselineError, match="3 boots or GPUs, but 2"):
        baselines.record(two_boots, accepted_by="A")
    assert baselines.record(two_boots, accepted_by="A", allow_single_boot=True).advisory


def test_two_keys_of_one_text_are_refused() -> None:
    """Case 21: one of them would be lost."""
    runs = [with_row(with_row(a_run(seed), measured("x", [1.0] * 3, "a, b")), measured("x", [1.0] * 3, "a", "b")) for seed in range(5)]
    with pytest.raises(BaselineError, match=r"both written x\(a, b\)"):
        baselines.record(runs, accepted_by="A")


def test_rows_that_every_run_skipped_are_left_out() -> None:
    runs = [_state("skipped", "needs another device")(a_run(seed)) for seed in range(5)]
    assert "decode_a" not in baselines.record(runs, accepted_by="A").rows


@pytest.mark.parametrize(
    ("reasons", "found"),
    [
        (None, []),
        ([], []),
        (["none"], []),
        (["gpu_idle", "SW Power Cap"], []),
        ("sw_power_cap", []),
        (["sw_power_cap", "SW Thermal Slowdown"], ["sw_thermal_slowdown"]),
        ("hw_slowdown,gpu_idle", ["hw_slowdown"]),
    ],
)
def test_throttle_reasons(reasons: object, found: list[str]) -> None:
    """Case 28: a power cap is normal under load, heat is not; a state that cannot be read is no throttle."""
    assert throttles(environment(state__throttle_reasons=reasons)) == found


# ---------------------------------------------------------------- files


def test_the_file_is_strict_deterministic_and_reads_back(tmp_path: Path) -> None:
    """Case 39: any parser reads it, and the same baseline is the same text."""
    made = a_baseline(5)
    text = baselines.to_json(made)
    assert text == baselines.to_json(baselines.load(text.encode(), name="copy"))
    data = json.loads(text, parse_constant=_refuse)
    assert list(data["rows"]) == sorted(data["rows"])
    jsonschema.validate(data, json.loads((SCHEMA_DIR / "baseline.schema.json").read_text(encoding="utf-8")))
    path = tmp_path / "baselines" / "x.json"
    baselines.save(made, path)
    assert baselines.load(path) == made
    assert [entry.name for entry in path.parent.iterdir()] == ["x.json"]


def _edited(**changes: Any) -> str:
    data = json.loads(baselines.to_json(a_baseline(5)))
    for name, value in changes.items():
        target = data
        *outer, last = name.split("__")
        for part in outer:
            target = target[int(part) if isinstance(target, list) else part]
        target[last] = value
    return json.dumps(data)


WAIVER = {"row": "decode_a", "change": "BLIND", "reason": "r", "approver": "a", "reference": "x", "expires": "2026-12-31"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("{", "is not valid JSON"),
        ("[]", "has the schema 'list'"),
        ('{"schema": "rapid_llm/baseline/3"}', "rapid_llm/baseline/3"),
        ('{"schema": NaN}', "NaN"),
        ('{"schema": 1, "schema": 2}', "twice"),
        (_edited(surprise=1), "surprise"),
        (_edited(accepted_by=""), "accepted_by"),
        (_edited(rows__decode_a__values=[]), "values of 0 runs"),
        (_edited(rows__decode_a__values=[[1.0]] * 4), "values of 4 runs"),
        (_edited(rows__decode_a__values=[[-1.0]] * 5), "values"),
        (_edited(rows__decode_a__values=[[]] * 5), "values"),
        (_edited(rows__decode_a__latency_us=[[1.0]] * 5), "do not match its values"),
        (_edited(rows__decode_a__benchmark="decode_z"), "under the key 'decode_a'"),
        (_edited(rows__decode_a__direction="up"), "direction"),
        (_edited(rows__decode_a__peak_fraction=1.2), "peak_fraction"),
        (_edited(waivers=[{**WAIVER, "row": "nope"}]), "waives the row 'nope'"),
        (_edited(waivers=[{**WAIVER, "expires": "soon"}]), "expires"),
        (_edited(waivers=[{**WAIVER, "reason": ""}]), "reason"),
        (_edited(waivers=[{**WAIVER, "change": "ANY"}]), "change"),
        (_edited(waivers=[{k: v for k, v in WAIVER.items() if k != "approver"}]), "approver"),
    ],
)
def test_a_broken_baseline_names_file_and_reason(text: str, reason: str) -> None:
    """Cases 5 and 25: fails closed, with exit code 4."""
    with pytest.raises(BaselineError) as caught:
        baselines.load(text.encode(), name="baselines/x.json of main")
    assert "baselines/x.json of main" in str(caught.value)
    assert reason in str(caught.value)
    assert caught.value.exit_code == 4


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BaselineError, match=r"absent\.json cannot be read"):
        baselines.load(tmp_path / "absent.json")


def test_description_for_a_person() -> None:
    text = baselines.describe(msgspec.structs.replace(a_baseline(5), waivers=[msgspec.convert(WAIVER, Waiver)]))
    for part in ("baselines/NVIDIA_H200.json", "A. Reviewer", "5 runs of 3 processes on 3 boots", "decode_a: ", "waived: decode_a"):
        assert part in text


# ---------------------------------------------------------------- validity


def _check(baseline: Baseline, protocol: str = PROTOCOL, now: datetime.datetime = NOW, **changes: Any) -> list[tuple[str, str, str]]:
    return [(p.kind, p.severity, p.message) for p in check(baseline, environment(**changes), protocol, now=now)]


def test_a_fitting_baseline_has_no_problem() -> None:
    assert _check(a_baseline(5), boot_id="another", driver="580.999") == []


@pytest.mark.parametrize(
    ("changes", "kind", "told"),
    [
        ({"device__name": "NVIDIA H200 NVL"}, "device", ["'NVIDIA H200'", "'NVIDIA H200 NVL'"]),
        ({"device__name": "nvidia h200"}, "device", ["'NVIDIA H200'", "'nvidia h200'"]),
        ({"device__multiprocessors": 60}, "device", ["132", "60"]),
        ({"device__mig": "1g.18gb"}, "device", ["None", "1g.18gb"]),
        ({"driver": "590.1"}, "environment", ["580", "590"]),
        ({"torch": "2.12.0"}, "environment", ["2.11.0+cu130", "2.12.0"]),
        ({"triton": "3.7.0"}, "environment", ["3.6.0", "3.7.0"]),
        ({"protocol": "protocol-2"}, "protocol", ["'protocol-1'", "'protocol-2'"]),
        ({"now": datetime.datetime(2027, 6, 1, tzinfo=datetime.timezone.utc)}, "age", ["days old", "90"]),
        ({"now": datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)}, "age", ["after today", "set the clock"]),
    ],
)
def test_what_makes_a_baseline_unfit_for_a_run(changes: dict[str, Any], kind: str, told: list[str]) -> None:
    """Case 7: one sentence with both values and the file to update; only old age is a mere warning."""
    ((got, severity, message),) = _check(a_baseline(5), **changes)
    assert (got, severity) == (kind, "warning" if "days old" in told else "error")
    assert "baselines/NVIDIA_H200.json" in message
    for part in told:
        assert part in message


def test_too_few_runs_a_single_boot_an_expired_waiver_and_heat_are_errors() -> None:
    whole = a_baseline(5)
    few = msgspec.structs.replace(whole, runs=whole.runs[:4])
    boot = msgspec.structs.replace(whole, runs=[msgspec.structs.replace(run, boot="boot-0") for run in whole.runs])
    hot = msgspec.structs.replace(whole, runs=[msgspec.structs.replace(whole.runs[0], throttle_reasons=["hw_slowdown"]), *whole.runs[1:]])
    waived = msgspec.structs.replace(whole, waivers=[msgspec.convert({**WAIVER, "expires": "2026-11-29"}, Waiver)])
    today = msgspec.structs.replace(whole, waivers=[msgspec.convert({**WAIVER, "expires": "2026-11-30"}, Waiver)])
    assert [p[:2] for p in _check(few)] == [("runs", "error")]
    assert [p[:2] for p in _check(boot)] == [("runs", "error")]
    assert [p[:2] for p in _check(hot)] == [("runs", "error")]
    assert [p[:2] for p in _check(waived)] == [("waiver", "error")]
    assert _check(today) == []
    assert [p[:2] for p in _check(msgspec.structs.replace(boot, advisory=True))] == [("advisory", "warning")]
