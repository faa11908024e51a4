"""The registry: names, look-ups, golden records, isolation."""

import dataclasses
import importlib.util
from collections.abc import Iterator

import pytest

from rapid_llm.errors import RegistryError
from rapid_llm.kernels.ops import registry
from rapid_llm.kernels.ops.spec import GoldenRecord


@pytest.fixture(autouse=True)
def isolated() -> Iterator[None]:
    with registry.isolated():
        yield


def test_the_declared_rows() -> None:
    """R2: these are the names that measured rows carry."""
    assert registry.names() == (
        "flashinfer_xqa_decode",
        "sdpa_cudnn_decode",
        "sdpa_flash_decode",
        "sdpa_math_decode",
        "torch_kv_write",
        "torch_paged_decode",
        "torch_quantize_e4m3",
        "torch_rope_norm_kv_write",
        "triton_kv_write",
        "triton_paged_decode",
        "triton_quantize_e4m3",
        "triton_rope_norm_kv_write",
    )
    assert registry.backends() == ("flashinfer", "sdpa-cudnn", "sdpa-flash", "sdpa-math", "torch", "triton")
    for name in registry.names():
        assert registry.get(name).name == name
        if name != "flashinfer_xqa_decode" or importlib.util.find_spec("flashinfer"):
            assert callable(registry.get(name).load())


def test_every_decode_row_requires_pages_and_a_row_table() -> None:
    """R74."""
    rows = registry.specs_for("paged_decode_attention")
    assert [row.name for row in rows] == ["flashinfer_xqa_decode", "torch_paged_decode", "triton_paged_decode"]
    assert all({"kv:paged", "kv:row-table"} <= set(row.layout.required) for row in rows)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(RegistryError, match="'torch_kv_write' is registered already"):
        registry.register(registry.get("torch_kv_write"))


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(RegistryError, match="No kernel spec is named 'nothing'; registered are flashinfer_xqa_decode, "):
        registry.get("nothing")
    with pytest.raises(RegistryError, match="'nothing'"):
        registry.record_golden("nothing", GoldenRecord(verified=True))


def test_an_op_without_specs_has_none() -> None:
    assert registry.specs_for("no such op") == ()


def test_golden_records_and_registrations_are_undone_by_isolation() -> None:
    names, before = registry.names(), registry.get("torch_kv_write")
    with registry.isolated():
        registry.record_golden("torch_kv_write", GoldenRecord(verified=True, max_abs_diff=0.5))
        registry.register(dataclasses.replace(before, name="another"))
        assert registry.get("torch_kv_write").golden == GoldenRecord(True, 0.5)
        inside = registry.generation()
    assert registry.get("torch_kv_write") == before
    assert registry.names() == names
    assert registry.generation() > inside
