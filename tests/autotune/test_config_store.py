"""Files of tuned configs: whole or not at all, exact keys, misses instead of crashes, microseconds by name (R70, R71, cases 36, 38)."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rapid_llm.kernels.autotune import ConfigKey, ConfigStore, StoredConfig, config_store, get_best_config
from rapid_llm.kernels.configs import VARIANTS, DecodeConfig, WriteConfig
from rapid_llm.kernels.ops import registry, tuned
from rapid_llm.kernels.ops.dispatch import FORCE_BACKEND_VARIABLE, dispatch
from rapid_llm.kernels.ops.spec import Request

KEY = ConfigKey(
    "kv_write", "triton_kv_write", "float16", "e4m3", ("kv:combined", "kv:paged"), (("num_tokens", 64),), "NVIDIA H200",
    (("torch", "2.11.0"), ("triton", "3.6.0")), "0123456789abcdef",
)  # fmt: skip
STORED = StoredConfig({"tokens": 2, "block": 512, "num_warps": 4}, 11.5, 0.25, {"device": "NVIDIA H200", "commit": "c" * 40})


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(config_store, "_warned", set())
    monkeypatch.delenv(config_store.CONFIG_DIR_VARIABLE, raising=False)
    monkeypatch.delenv(FORCE_BACKEND_VARIABLE, raising=False)
    return


@pytest.fixture
def store(tmp_path: Path) -> ConfigStore:
    return ConfigStore(tmp_path / "NVIDIA_H200.json")


def test_round_trip_in_microseconds_with_an_environment_block(store: ConfigStore) -> None:
    """R70: the field says its unit, the file is strict JSON, and key, config and environment can be read in it."""
    assert store.get(KEY) is None
    assert store.put(KEY, STORED)
    assert store.get(KEY) == STORED
    (entry,) = json.loads(store.path.read_text("utf-8"), parse_constant=pytest.fail)["entries"].values()
    assert entry["latency_us"] == 11.5
    assert entry["environment"]["device"] == "NVIDIA H200"
    assert set(entry["key"]) == {field.name for field in dataclasses.fields(ConfigKey)}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ConfigKey)])
def test_every_part_of_the_key_counts(store: ConfigStore, field: str) -> None:
    store.put(KEY, STORED)
    other = {"layout_tags": ("kv:paged",), "shape": (("num_tokens", 128),), "versions": (("triton", "3.7.1"),)}
    assert store.get(dataclasses.replace(KEY, **{field: other.get(field, "another")})) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"latency_us": math.nan}, {"latency_us": -1.0}, {"latency_us": 0.0}, {"latency_us": math.inf}, {"latency_us": True},
        {"max_abs_diff": math.nan}, {"max_abs_diff": None}, {"config": {}}, {"config": {"tokens": 1.5}}, {"environment": {}},
    ],
)  # fmt: skip
def test_nothing_unverified_or_untimed_gets_in(store: ConfigStore, wrong: dict[str, Any]) -> None:
    """R110."""
    with pytest.raises(ValueError, match="expected a verified, timed config for triton_kv_write"):
        store.put(KEY, dataclasses.replace(STORED, **wrong))
    assert not store.path.exists()


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"schema": "rapid_llm/configs/1", "entries": []}', '{"schema": "x", "entries": {}}', "\ufeff{}",
        "[" * 100_000, '{"schema": "rapid_llm/configs/1", "entries": {"x": 1e400}}',
    ],
    ids=lambda text: text[:60],
)  # fmt: skip
def test_a_malformed_file_is_a_miss_with_one_warning_and_is_not_overwritten(store: ConfigStore, text: str) -> None:
    store.path.write_text(text, encoding="utf-8")
    with pytest.warns(RuntimeWarning, match=r"NVIDIA_H200\.json is no file of configs .* delete it and tune again"):
        assert store.get(KEY) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.get(KEY) is None
        assert store.put(KEY, STORED)
    assert store.get(KEY) == STORED
    assert store.path.with_name("NVIDIA_H200.json.malformed").read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    "change",
    [
        {"latency_us": -3}, {"latency_us": "3"}, {"latency_us": None}, {"config": 3}, {"config": {"tokens": [2]}}, {"max_abs_diff": None},
        {"config": {"no field": 2}}, {"config": {"x" * 70_000: 2}}, {"config": {"tokens": "x" * 70_000}}, {"config": {"tokens": 10**30}},
        {"config": {"tokens": "a\nb"}}, {"latency_us": {"x" * 100: ["y" * 100] * 100}}, {"max_abs_diff": "z" * 9_000},
    ],
    ids=lambda change: str(change)[:60],
)  # fmt: skip
def test_a_malformed_entry_is_a_miss_and_the_others_stay(store: ConfigStore, change: dict[str, Any]) -> None:
    other = dataclasses.replace(KEY, op="another")
    store.put(KEY, STORED)
    store.put(other, STORED)
    data = json.loads(store.path.read_text("utf-8"))
    data["entries"][KEY.text()].update(change)
    store.path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.warns(RuntimeWarning, match="the entry of triton_kv_write is passed over") as told:
        assert store.get(KEY) is None
    assert len(str(told[0].message)) < 1000
    assert store.get(other) == STORED


def test_a_config_file_of_another_project_is_a_miss(tmp_path: Path) -> None:
    """Case 36: text keys among integer ones, and a name with '=' and ','."""
    path = tmp_path / "E=128,N=192,device_name=NVIDIA_A10.json"
    path.write_text('{"triton_version": "3.7.1", "1": {"BLOCK_SIZE_M": 16}, "4096": {"BLOCK_SIZE_M": 64}}', encoding="utf-8")
    with pytest.warns(RuntimeWarning, match="its schema is not rapid_llm/configs/1"):
        assert ConfigStore(path).get(KEY) is None


def test_the_real_config_file_of_another_project_is_a_miss(shared_data: Path, tmp_path: Path) -> None:
    """Case 36: holes between its keys, and a name with '=' and ','; it stays as it was, beside what is stored then."""
    (real,) = (shared_data / "vllm_tuned_config").glob("*.json")
    path = tmp_path / real.name
    path.write_bytes(real.read_bytes())
    with pytest.warns(RuntimeWarning, match="its schema is not rapid_llm/configs/1"):
        assert ConfigStore(path).get(KEY) is None
    assert ConfigStore(path).put(KEY, STORED)
    assert ConfigStore(path).get(KEY) == STORED
    assert path.with_name(f"{path.name}.malformed").read_bytes() == real.read_bytes()


def test_a_file_system_without_locks_is_one_warning(store: ConfigStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 36: without a lock one writer could undo another's entry, so nothing is stored; what is there is read on."""
    store.put(KEY, STORED)

    def no_locks(handle: Any, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(config_store.fcntl, "flock", no_locks)
    other = dataclasses.replace(KEY, op="another")
    with pytest.warns(RuntimeWarning, match=r"cannot be written \(\[Errno 37\] No locks available\)"):
        assert not store.put(other, STORED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not store.put(other, STORED)
        assert store.get(other) is None
        assert store.get(KEY) == STORED


def test_what_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    """A file where the folder should be; a folder where the file should be."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "folder.json").mkdir()
    for path in (tmp_path / "file" / "x.json", tmp_path / "folder.json"):
        with pytest.warns(RuntimeWarning, match="cannot be"):
            assert not ConfigStore(path).put(KEY, STORED)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not ConfigStore(path).put(KEY, STORED)
            assert ConfigStore(path).get(KEY) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        assert not ConfigStore(tmp_path / "x.json").put(KEY, STORED)


def test_a_writer_that_dies_leaves_the_old_file(store: ConfigStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(KEY, STORED)
    before = store.path.read_text("utf-8")

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        store.put(dataclasses.replace(KEY, op="another"), STORED)
    assert store.path.read_text("utf-8") == before
    assert [path.name for path in store.path.parent.iterdir() if not path.name.endswith(".lock")] == ["NVIDIA_H200.json"]


def _write_fifty(path: str, writer: int) -> None:
    for i in range(50):
        ConfigStore(path).put(dataclasses.replace(KEY, op=f"op {writer}.{i % 10}"), dataclasses.replace(STORED, latency_us=1.0 + i))


def test_eight_processes_of_fifty_writes_leave_a_valid_file_and_lose_none(store: ConfigStore) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_fifty, args=(str(store.path), writer)) for writer in range(8)]
    for process in writers:
        process.start()
    while any(process.is_alive() for process in writers):
        if store.path.exists():
            json.loads(store.path.read_text("utf-8"))
        writers[0].join(0.01)
    assert [process.exitcode for process in writers] == [0] * 8
    for writer in range(8):
        for i in range(10):
            found = store.get(dataclasses.replace(KEY, op=f"op {writer}.{i}"))
            assert found is not None
            assert found.latency_us == 41.0 + i


def test_get_best_config_asks_the_users_folder_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R71."""
    packaged, ours = tmp_path / "packaged", tmp_path / "ours"
    monkeypatch.setattr(config_store, "_PACKAGED", packaged)
    assert get_best_config(KEY) is None
    ConfigStore(packaged / "NVIDIA_H200.json").put(KEY, STORED)
    assert get_best_config(KEY) == STORED
    for blank in ("", " "):
        monkeypatch.setenv(config_store.CONFIG_DIR_VARIABLE, blank)
        assert get_best_config(KEY) == STORED
    monkeypatch.setenv(config_store.CONFIG_DIR_VARIABLE, str(ours))
    assert get_best_config(KEY) == STORED
    better = dataclasses.replace(STORED, latency_us=9.0)
    ConfigStore(ours / "NVIDIA_H200.json").put(KEY, better)
    assert get_best_config(KEY) == better


def test_file_names_are_safe_and_bounded() -> None:
    assert config_store.file_name("../NVIDIA H200: x/y\\z") == ".._NVIDIA_H200_x_y_z.json"
    assert len(config_store.file_name("n" * 300)) <= 128


def test_the_bucket_keeps_the_heads_and_rounds_the_rest() -> None:
    shape = Request.sorted_shape({"batch": 33, "max_seq_len": 8192, "head_dim": 96, "num_kv_heads": 3, "num_q_heads": 24, "num_rows": 999})
    assert dict(config_store.shape_bucket(shape)) == {
        "batch": 64, "max_seq_len": 8192, "head_dim": 96, "num_kv_heads": 3, "num_q_heads": 24,
    }  # fmt: skip
    assert config_store.shape_bucket((("batch", 0),)) == (("batch", 0),)


REQUEST = Request(
    "kv_write", "cuda", (9, 0), "float16", "float16", frozenset({"kv:paged", "kv:combined"}),
    Request.sorted_shape({"num_tokens": 64, "num_kv_heads": 8, "head_dim": 128, "num_rows": 4096}),
)  # fmt: skip


def test_dispatch_hands_the_stored_config_to_the_kernel_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config_store.CONFIG_DIR_VARIABLE, str(tmp_path))
    assert dispatch(REQUEST).options == {}
    assert "config by rule: none is stored for this key" in dispatch(REQUEST).explain()
    key = tuned.config_key(registry.get("triton_kv_write"), REQUEST)
    ConfigStore(tmp_path / config_store.file_name(key.device)).put(key, STORED)
    selection = dispatch(REQUEST)
    assert selection.options == {"config": WriteConfig(2, 512, 4)}
    assert "config tuned: WriteConfig(tokens=2, block=512, num_warps=4, halves=1), 11.5 us when chosen" in selection.explain()
    monkeypatch.delenv(config_store.CONFIG_DIR_VARIABLE)
    assert dispatch(REQUEST).options == {}


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"tokens": 3, "block": 512}, "tokens is 3 and no power of two"), ({"tokens": 1, "blocks": 512}, "unexpected keyword argument")],
)
def test_a_stored_config_that_does_not_fit_is_a_miss_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, int], reason: str
) -> None:
    """Case 38."""
    monkeypatch.setenv(config_store.CONFIG_DIR_VARIABLE, str(tmp_path))
    key = tuned.config_key(registry.get("triton_kv_write"), REQUEST)
    ConfigStore(tmp_path / config_store.file_name(key.device)).put(key, dataclasses.replace(STORED, config=config))
    with pytest.warns(RuntimeWarning, match=f"stored config of triton_kv_write in .*json is passed over: .*{reason}"):
        assert dispatch(REQUEST).options == {}


def test_an_override_holds_within_and_ends() -> None:
    with tuned.overridden("triton_kv_write", WriteConfig(4, 256)):
        assert dispatch(REQUEST).options == {"config": WriteConfig(4, 256)}
    assert dispatch(REQUEST).options == {}


def test_the_source_hash_follows_what_the_kernel_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "rapid_llm.kernels.paged_decode"
    before = tuned._source_hash(module)
    assert before == tuned._source_hash.__wrapped__(module)
    read = Path.read_text
    for edited, changes in (("e4m3.py", True), ("paged_decode.py", True), ("kv_write.py", False)):
        monkeypatch.setattr(Path, "read_text", lambda self, name=edited, **k: read(self, **k) + "#" * (self.name == name))
        assert (tuned._source_hash.__wrapped__(module) != before) == changes


@pytest.mark.parametrize("kv_dtype", ["float16", "e4m3"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_candidates_start_with_the_rule_and_fit(kv_dtype: str, head_dim: int) -> None:
    sizes = {"batch": 4, "num_q_heads": 32, "num_kv_heads": 8, "head_dim": head_dim, "max_seq_len": 1024, "num_tokens": 64}
    for kind in (DecodeConfig, WriteConfig):
        candidates: list[Any] = kind.candidates(sizes, kv_dtype)
        assert candidates[0] == kind.default(sizes, kv_dtype)
        assert len(candidates) == len(set(candidates)) > 10
        assert [c for c in candidates if c.problem(sizes, kv_dtype) is not None] == []


def test_a_config_of_other_heads_is_refused() -> None:
    """block_d below the columns would leave part of each head out: a wrong result, not a slow one."""
    sizes = {"batch": 4, "max_seq_len": 1024, "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    config = DecodeConfig(16, 64, 64, 4, 3)
    stream = dataclasses.replace(config, variant="stream")
    assert stream.problem(sizes, "e4m3") is None
    for wide in ({"batch": 5000}, {"max_seq_len": 2**31 * 64 // 4}):
        assert stream.problem({**sizes, **wide}, "e4m3") is not None
        assert DecodeConfig.default({**sizes, "num_kv_heads": 32, **wide}, "e4m3").variant == "split"
    assert config.problem(sizes, "float16") == "block_d is 64 where these heads take 128"
    assert config.problem(sizes, "e4m3") is None
    tiles = [{"num_warps": 3}, {"num_stages": 0}, {"block_n": 48}, {"block_m": 8}, {"block_s": 3}]
    splits = [{"num_splits": 0}, {"variant": "fast"}, {"variant": "stream", "num_splits": 2}, {"programs_per_sm": 0}, {"max_registers": 8}]
    for wrong in (*tiles, *splits):
        assert dataclasses.replace(config, **wrong).problem(sizes, "e4m3") is not None


def test_the_rule_takes_what_was_fastest_on_an_h200() -> None:
    """Of the shapes in docs/performance.md: variant and programs a multiprocessor."""
    heads = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    found = {}
    for batch, max_seq_len in ((1, 1024), (1, 8192), (1, 32768), (8, 8192), (128, 1024), (32, 8192)):
        rules = [DecodeConfig.default({"batch": batch, "max_seq_len": max_seq_len, **heads}, kind) for kind in ("float16", "e4m3")]
        found[batch, max_seq_len] = [(rule.variant, rule.programs_per_sm, rule.tiles_ahead) for rule in rules]
    assert found == {
        (1, 1024): [("split", 1, 2), ("split", 2, 2)],
        (1, 8192): [("swap", 1, 2), ("split", 2, 2)],
        (1, 32768): [("swap", 1, 2), ("split", 2, 2)],
        (8, 8192): [("split", 2, 1), ("split", 2, 2)],
        (128, 1024): [("split", 2, 1), ("split", 4, 2)],
        (32, 8192): [("stream", 3, 2), ("stream", 3, 2)],
    }


@pytest.mark.parametrize("batch", [1, 8, 32, 128])
@pytest.mark.parametrize("max_seq_len", [1024, 32768])
def test_a_search_has_every_variant_and_ends(batch: int, max_seq_len: int) -> None:
    """A stream of one sequence is a split of it, and is not tried."""
    sizes = {"batch": batch, "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "max_seq_len": max_seq_len}
    candidates = DecodeConfig.candidates(sizes, "float16")
    assert {config.variant for config in candidates} == set(VARIANTS if batch > 1 else VARIANTS[:2])
    assert len(candidates) <= 72


@pytest.mark.parametrize("wrong", [{"num_warps": "4"}, {"block_n": "64"}, {"num_splits": "2"}, {"variant": 1}])
def test_text_for_a_number_is_passed_over(wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config_store.CONFIG_DIR_VARIABLE, str(tmp_path))
    shape = {"batch": 4, "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "max_seq_len": 64, "num_rows": 99}
    tags = frozenset({"kv:paged", "kv:row-table", "kv:16bit-aligned"})
    request = Request("paged_decode_attention", "cuda", (9, 0), "float16", "float16", tags, Request.sorted_shape(shape))
    key = tuned.config_key(registry.get("triton_paged_decode"), request)
    config = {**dataclasses.asdict(DecodeConfig.default(shape, "float16")), **wrong}
    ConfigStore(tmp_path / config_store.file_name(key.device)).put(key, dataclasses.replace(STORED, config=config))
    with pytest.warns(RuntimeWarning, match="stored config of triton_paged_decode in .*json is passed over"):
        assert dispatch(request).options == {}


def test_the_rule_of_int8_is_that_of_e4m3_with_room_for_three_programs() -> None:
    """It was measured for e4m3 alone; the cap on registers keeps the assembler from spilling, and three programs resident."""
    for batch, max_seq_len, head_dim in itertools.product((1, 8, 64), (1024, 8192, 32768), (64, 128, 256)):
        sizes = {"batch": batch, "max_seq_len": max_seq_len, "num_q_heads": 32, "num_kv_heads": 8, "head_dim": head_dim}
        rule = DecodeConfig.default(sizes, "e4m3")
        assert DecodeConfig.default(sizes, "int8") == dataclasses.replace(rule, max_registers=168)
        assert {config.max_registers for config in DecodeConfig.candidates(sizes, "int8")} == {168}
    for num_tokens in (1, 256, 4096, 32768):
        sizes = {"num_tokens": num_tokens, "num_kv_heads": 8, "head_dim": 128}
        assert WriteConfig.default(sizes, "int8") == WriteConfig.default(sizes, "e4m3")
