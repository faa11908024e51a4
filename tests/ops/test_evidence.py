"""Measurements from a baseline file: units, nearest case, device, golden records, dispatch and explain() (R3, R69, R72, R73, R108)."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asv_bench import bench_kv_write, bench_paged_decode
from rapid_llm.errors import EvidenceError
from rapid_llm.kernels.ops import registry
from rapid_llm.kernels.ops.dispatch import dispatch, set_perf_provider
from rapid_llm.kernels.ops.evidence import device_name_here, install_evidence, load_evidence, parse_label, record_goldens
from rapid_llm.kernels.ops.spec import Request

pytestmark = pytest.mark.usefixtures("isolated")

H200 = "NVIDIA H200"
TAGS = frozenset({"kv:paged", "kv:row-table", "kv:16bit-aligned", "kv:combined"})


LABELS = [
    "decode B=64 S=8192 float16 combined fragmented cold",
    "decode B=8 S=8192 float16 combined fragmented cold",
    "decode B=1 S=32768 float16 combined fragmented cold",
    "decode B=64 S=8192 float16 combined contiguous cold",
    "decode B=32 S=256..8192 ragged float16 combined fragmented cold",
    "decode B=64 S=8192 float16 split fragmented cold",
    "decode B=8 S=8192 bfloat16 combined fragmented cold",
    "decode B=64 S=8192 e4m3 combined fragmented cold",
    "decode B=8 S=8192 e4m3 combined fragmented cold",
    "decode B=8 S=8192 e4m3 combined fragmented quantiser=cast cold",
    "decode B=64 S=8192 int8 combined fragmented cold",
    "decode T=8 float16 combined fragmented",
]


@pytest.fixture
def recorded(root: Path, tmp_path: Path) -> Path:
    """The committed baseline with rows of these cases alone, so that a new record of the device changes no expectation."""
    data = json.loads((root / "baselines" / "NVIDIA_H200.json").read_text(encoding="utf-8"))
    rows = {}
    for label in LABELS:
        op, suite = ("kv_write", "KVWriteDecode") if "T=" in label else ("paged_decode_attention", "PagedDecode")
        like = next(row for row in data["rows"].values() if row["op"] == op and f".{suite}." in row["benchmark"])
        row = {**copy.deepcopy(like), "params": [label], "latency_us": [[608.0, 609.0], [610.0, 616.0]]}
        row["values"] = [[1e6 / us for us in run] for run in row["latency_us"]]
        rows[f"{row['benchmark']}({label})"] = row
    data.update(rows=rows, anchor_commit="3e3e3654d818" + 28 * "0")
    for run in data["runs"]:
        run.update(time="2026-11-29T22:24:04Z", commit=data["anchor_commit"])
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_the_committed_baseline_ranks_the_decode_kernel(root: Path) -> None:
    """Each device row of the suites' cases is a time of its kernel, in milliseconds."""
    path = root / "baselines" / "NVIDIA_H200.json"
    evidence = load_evidence(path)
    for row in json.loads(path.read_text("utf-8"))["rows"].values():
        (label,) = row["params"]
        if row["instrument"] != "device" or row["control"] or parse_label(row["op"], label) is None:
            continue
        times_us = [us for run in row["latency_us"] for us in run]
        assert min(times_us) / 1e3 <= evidence.latency_ms[label][1][row["impl"]] <= max(times_us) / 1e3
    assert len(evidence.latency_ms) > 10


def decode(batch: int, context: int, **changes: Any) -> Request:
    sizes = {"batch": batch, "max_seq_len": context, "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "num_rows": 1 << 20}
    sizes |= changes.pop("sizes", {})
    fields = {"capability": (9, 0), "q_dtype": "float16", "kv_dtype": "float16", "layout_tags": TAGS, **changes}
    return Request("paged_decode_attention", "cuda", shape=Request.sorted_shape(sizes), **fields)


LABEL = "decode B=64 S=8192 float16 combined fragmented cold"
ROW = f"bench_paged_decode.PagedDecode.track_bandwidth({LABEL})"


def changed(recorded: Path, tmp_path: Path, change: Any) -> Path:
    data = json.loads(recorded.read_text(encoding="utf-8"))
    change(data)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def with_second_spec(data: dict[str, Any], factor: float) -> None:
    """Gives every decode row a sister of another kernel, `factor` times as slow."""
    for name, row in list(data["rows"].items()):
        if row["op"] == "paged_decode_attention":
            sister = copy.deepcopy(row)
            sister["impl"] = "torch_paged_decode"
            sister["latency_us"] = [[us * factor for us in run] for run in row["latency_us"]]
            data["rows"][f"other.{name}"] = sister


def test_microseconds_become_milliseconds_once(recorded: Path) -> None:
    """R69, R108, case 20: the file has about 609.5 us, and dispatch ranks on 0.6095 ms."""
    evidence = install_evidence(recorded, device_name=H200)
    selection = dispatch(decode(64, 8192))
    assert selection.spec.name == "triton_paged_decode"
    assert selection.ranking[0].perf_ms == pytest.approx(0.6095)
    assert evidence.latency_ms[LABEL][1].keys() == {"triton_paged_decode"}


def test_explain_shows_number_case_commit_day_and_age(recorded: Path) -> None:
    install_evidence(recorded, device_name=H200)
    text = dispatch(decode(64, 8192)).explain()
    assert "measured and verified" in text
    assert f"measured as [{LABEL}] on NVIDIA H200 at commit 3e3e3654d818, 2026-11-29, " in text
    assert " days ago" in text


@pytest.mark.parametrize(("factor", "winner"), [(0.5, "torch_paged_decode"), (2.0, "triton_paged_decode")])
def test_swapped_latencies_swap_the_choice(recorded: Path, tmp_path: Path, factor: float, winner: str) -> None:
    """R3: the same file with the other kernel twice as fast, and twice as slow."""
    install_evidence(changed(recorded, tmp_path, lambda data: with_second_spec(data, factor)), device_name=H200)
    for request in (decode(64, 8192), decode(50, 7000), decode(8, 8192, kv_dtype="e4m3"), decode(1, 20000)):
        selection = dispatch(request)
        assert selection.spec.name == winner, selection.explain()
        assert len([c for c in selection.ranking if c.measurement is not None]) == 2


@pytest.mark.parametrize(
    ("request_", "label"),
    [
        (decode(64, 8192), LABEL),
        (decode(40, 8192), LABEL),
        (decode(9, 9000), "decode B=8 S=8192 float16 combined fragmented cold"),
        (decode(64, 8192, kv_dtype="e4m3"), "decode B=64 S=8192 e4m3 combined fragmented cold"),
        (decode(64, 8192, kv_dtype="int8"), "decode B=64 S=8192 int8 combined fragmented cold"),
        (decode(64, 8192, q_dtype="bfloat16", kv_dtype="int8"), None),
        (decode(64, 8192, layout_tags=TAGS - {"kv:combined"} | {"kv:split"}), "decode B=64 S=8192 float16 split fragmented cold"),
        (decode(10, 8192, q_dtype="bfloat16", kv_dtype="bfloat16"), "decode B=8 S=8192 bfloat16 combined fragmented cold"),
        (decode(64, 8192, q_dtype="bfloat16", kv_dtype="e4m3"), None),
        (decode(64, 8192, layout_tags=TAGS - {"kv:combined"}), None),
        (decode(64, 8192, capability=(8, 0)), None),
        (decode(64, 8192, sizes={"head_dim": 64}), None),
        (decode(64, 8192, sizes={"num_q_heads": 64}), None),
        (decode(2048, 8192), None),
        (decode(1, 128), None),
        (decode(0, 8192), None),
    ],
)
def test_the_nearest_case_and_never_across_dtype_layout_device_or_geometry(recorded: Path, request_: Request, label: str | None) -> None:
    assert load_evidence(recorded).nearest(request_) == label


def test_two_kernels_are_compared_on_one_case_only(recorded: Path, tmp_path: Path) -> None:
    """A kernel that was measured at a small batch alone does not win a large one with that time."""

    def only_small(data: dict[str, Any]) -> None:
        with_second_spec(data, 1.0)
        for name in [n for n in data["rows"] if n.startswith("other.") and "B=8 S=8192" not in n]:
            del data["rows"][name]

    evidence = load_evidence(changed(recorded, tmp_path, only_small))
    spec = registry.get("torch_paged_decode")
    assert evidence(spec, decode(64, 8192)) is None
    assert evidence(spec, decode(8, 8192)) is not None


def test_another_device_is_refused_and_nothing_changes(recorded: Path) -> None:
    with pytest.raises(EvidenceError, match=r"measured on NVIDIA H200, and this device is NVIDIA A10; install the baseline of this"):
        install_evidence(recorded, device_name="NVIDIA A10")
    assert set_perf_provider(None) is None
    assert registry.get("triton_paged_decode").golden is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a machine without CUDA")
def test_without_a_device_its_name_has_to_be_given(recorded: Path) -> None:
    with pytest.raises(EvidenceError, match="give device_name"):
        install_evidence(recorded)
    with pytest.raises(EvidenceError, match="no CUDA device"):
        device_name_here()


def test_golden_records_come_with_the_times(recorded: Path) -> None:
    """R72, R73."""
    install_evidence(recorded, device_name=H200)
    golden = registry.get("triton_paged_decode").golden
    assert golden is not None
    assert golden.verified
    rows = [r for r in json.loads(recorded.read_text("utf-8"))["rows"].values() if r["impl"] == "triton_paged_decode"]
    assert golden.max_abs_diff == max(row["max_abs_diff"] for row in rows)


def test_an_unverified_row_gives_no_time(recorded: Path, tmp_path: Path) -> None:
    path = changed(recorded, tmp_path, lambda data: data["rows"][ROW].update(max_abs_diff=None))
    assert LABEL not in load_evidence(path).latency_ms


def test_a_failed_verification_takes_the_kernel_out(tmp_path: Path) -> None:
    """A process record with one unverified row rejects its KernelSpec, with the reason in explain()."""
    row = {"impl": "triton_paged_decode", "control": False, "status": "ok", "max_abs_diff": 0.01}
    rows = [row, {**row, "status": "unverified", "max_abs_diff": None}, {**row, "impl": "torch_paged_decode"}]
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"schema": "rapid_llm/process-record/1", "rows": rows}), encoding="utf-8")
    assert record_goldens(path)["torch_paged_decode"].verified
    selection = dispatch(decode(64, 8192))
    assert selection.spec.name == "torch_paged_decode"
    assert "triton_paged_decode: its verification failed (max_abs_diff 0.01)" in selection.explain()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema="rapid_llm/baseline/3"), "baseline/2 or rapid_llm/baseline/1, got 'rapid_llm/baseline/3'"),
        (lambda d: d["rows"][ROW].update(latency_us=[[-1.0]]), "no positive finite number"),
        (lambda d: d["rows"][ROW].update(latency_us=[]), "no positive finite number"),
        (lambda d: d["rows"][ROW].update(latency_us=[[float("nan")]]), "NaN is no JSON number"),
        (lambda d: d["rows"][ROW].pop("latency_us"), "KeyError"),
        (lambda d: d["device"].pop("name"), "KeyError"),
        (lambda d: d.update(rows=[1]), "AttributeError"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(recorded: Path, tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(EvidenceError, match=message) as caught:
        load_evidence(changed(recorded, tmp_path, change))
    assert "changed.json" in str(caught.value)


def test_times_in_another_unit_are_found_where_the_file_tells(recorded: Path, tmp_path: Path) -> None:
    """Case 20: a row that counts calls says its time twice; milliseconds under the name latency_us are refused."""

    def in_ms(data: dict[str, Any]) -> None:
        row = data["rows"]["bench_kv_write.KVWriteDecode.track_calls(decode T=8 float16 combined fragmented)"]
        row["latency_us"] = [[us / 1e3 for us in run] for run in row["latency_us"]]

    with pytest.raises(EvidenceError, match="its times are in another unit"):
        load_evidence(changed(recorded, tmp_path, in_ms))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{", '{"schema": 1};', "[" * 100_000, '{"schema": 1e400}', '{"schema": "%s"}' % ("x" * 70_000)],
    ids=lambda text: text[:20],
)
def test_what_is_no_baseline(tmp_path: Path, text: str) -> None:
    path = tmp_path / "b.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(EvidenceError, match=r"b\.json") as caught:
        load_evidence(path)
    assert len(str(caught.value)) < 1000
    with pytest.raises(EvidenceError, match="cannot be read"):
        load_evidence(tmp_path / "absent.json")


def test_the_labels_of_the_suites_are_understood() -> None:
    """Every case that the suites can name is read back as what it was built from, or speaks for no request."""
    read = 0
    for case in bench_paged_decode.PagedDecode.cases:
        found = parse_label("paged_decode_attention", case.label)
        lens, pool = case.args["seq_lens"], case.args["pool"]
        if len(set(lens)) > 1 or pool["order"] != "fragmented" or set(pool) != {"layout", "order"}:
            assert found is None
            continue
        assert found is not None, case.label
        read += 1
        assert dict(found.sizes) == {"batch": len(lens), "max_seq_len": lens[0]}
        geometry = {name: case.args[name] for name in ("num_kv_heads", "head_dim")}
        assert dict(found.geometry) == {**geometry, "num_q_heads": bench_paged_decode._NUM_Q_HEADS}
        expected = (case.args["q_dtype"], case.args["kv_dtype"], pool["layout"])
        assert dataclasses.astuple(found)[1:4] == expected
    for case in (*bench_kv_write.KVWritePrefill.cases, *bench_kv_write.KVWriteDecode.cases):
        found = parse_label("kv_write", case.label)
        assert found is not None, case.label
        read += 1
        assert dict(found.sizes) == {"num_tokens": case.args["num_tokens"]}
        assert (found.q_dtype, found.kv_dtype) == (case.args["dtype"], case.args["kv_dtype"])
        assert dict(found.geometry) == {"num_kv_heads": bench_kv_write._NUM_KV_HEADS, "head_dim": bench_kv_write._HEAD_DIM}
    assert read > 15
