"""Rows of other libraries: what they say of a request that they cannot serve, and that none takes a call unasked."""

import importlib
import importlib.util
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asv_bench.verify import check_decode, decode_reference
from rapid_llm.errors import DTypeError, NoKernelError, ScaleError, ShapeError
from rapid_llm.kernels.backends import flashinfer, sdpa
from rapid_llm.kernels.ops import contiguous_decode_attention, contiguous_decode_request, decode_request, registry
from rapid_llm.kernels.ops.dispatch import dispatch, set_perf_provider
from rapid_llm.kernels.ops.spec import GoldenRecord, Request, ShapeLimit

pytestmark = pytest.mark.usefixtures("isolated")

OP = "contiguous_decode_attention"
INSTALLED = importlib.util.find_spec("flashinfer") is not None


def contiguous(**changes: Any) -> Request:
    sizes = {"batch": 8, "seq_len": 1024, "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, **changes.pop("sizes", {})}
    known = {"device_type": "cuda", "capability": (9, 0), "q_dtype": "float16", "kv_dtype": "float16", **changes}
    tags = known.pop("layout_tags", frozenset({"kv:contiguous"}))
    return Request(OP, layout_tags=tags, shape=Request.sorted_shape(sizes), **known)


def paged(*, block_size: int = 16, tags: tuple[str, ...] = ("kv:split", "kv:contiguous"), **changes: Any) -> Request:
    sizes = {"batch": 8, "max_seq_len": 1024, "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "num_rows": 1 << 16}
    sizes |= {"block_size": block_size} if block_size > 1 else {}
    all_tags = {"kv:paged", "kv:row-table", "kv:16bit-aligned", *tags, *(("kv:block-table",) if block_size > 1 else ())}
    known = {"device_type": "cuda", "capability": (9, 0), "q_dtype": "float16", "kv_dtype": "float16", **changes}
    return Request("paged_decode_attention", layout_tags=frozenset(all_tags), shape=Request.sorted_shape(sizes), **known)


def reasons(name: str, request: Request) -> tuple[str, ...]:
    return registry.get(name).rejections(request)


@pytest.fixture
def has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every peer is available: what is left of the reasons is the request's."""
    for module, probe in ((sdpa, "probe_flash"), (sdpa, "probe_cudnn"), (flashinfer, "probe")):
        monkeypatch.setattr(module, probe, lambda request: None)
    importlib.import_module("rapid_llm.kernels.ops.spec").load_target.cache_clear()


@pytest.fixture(autouse=True)
def targets_anew() -> Iterator[None]:
    yield
    importlib.import_module("rapid_llm.kernels.ops.spec").load_target.cache_clear()


@pytest.mark.usefixtures("has_all")
def test_no_sdpa_row_is_of_the_paged_operation_and_each_refuses_pages() -> None:
    """Whatever were measured of it: a request with a table never finds one, and their layouts would refuse it as well."""
    for spec in map(registry.get, registry.names()):
        if spec.backend.startswith("sdpa"):
            assert spec.op == OP
            assert not spec.layout.accepts(paged().layout_tags)
            registry.record_golden(spec.name, GoldenRecord(True, 0.0))
    set_perf_provider(lambda spec, request: 1e-6 if spec.backend.startswith("sdpa") else 1.0)
    for request in (paged(), paged(block_size=1), paged(tags=("kv:combined",))):
        assert dispatch(request).spec.name == "triton_paged_decode"


@pytest.mark.usefixtures("has_all")
def test_the_contiguous_call_takes_contiguous_memory_only() -> None:
    with pytest.raises(NoKernelError, match="sdpa_flash_decode: layout tag kv:contiguous is missing"):
        dispatch(contiguous(layout_tags=frozenset()))
    for tag in ("kv:paged", "kv:row-table", "kv:block-table"):
        with pytest.raises(NoKernelError, match=f"sdpa_cudnn_decode: layout tag {tag} is not supported"):
            dispatch(contiguous(layout_tags=frozenset({"kv:contiguous", tag})))


@pytest.mark.usefixtures("has_all")
@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("sdpa_flash_decode", {"device_type": "cpu", "capability": None}, "device type cpu is not one of cuda"),
        ("sdpa_flash_decode", {"capability": (7, 5)}, "compute capability 7.5 is below 8.0"),
        ("sdpa_flash_decode", {"kv_dtype": "e4m3"}, "kv dtype e4m3 is not one of float16, bfloat16"),
        ("sdpa_flash_decode", {"sizes": {"head_dim": 264}}, "head_dim 264 is above 256"),
        ("sdpa_flash_decode", {"sizes": {"seq_len": 0}}, "seq_len 0 is below 1"),
        ("sdpa_cudnn_decode", {"sizes": {"head_dim": 256}}, "head_dim 256 is above 128"),
        ("sdpa_cudnn_decode", {"sizes": {"head_dim": 100}}, "head_dim 100 is no multiple of 8 (kv float16)"),
    ],
)
def test_each_reason_of_sdpa(name: str, changes: dict[str, Any], reason: str) -> None:
    assert reasons(name, contiguous()) == ()
    assert reason in reasons(name, contiguous(**changes))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch is built for CUDA")
def test_what_this_torch_lacks_is_a_reason_in_explain() -> None:
    text = dispatch(contiguous()).explain()
    assert "sdpa_flash_decode: not available: this build of torch has no flash attention for CUDA" in text
    assert "sdpa_cudnn_decode: not available: this build of torch has no cuDNN" in text


@pytest.mark.usefixtures("has_all")
@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (paged(capability=(8, 0)), "compute capability 8.0 is below 9.0"),
        (paged(kv_dtype="e4m3"), "kv dtype e4m3 is not one of float16, bfloat16"),
        (paged(block_size=1), "layout tag kv:block-table is missing"),
        (paged(tags=("kv:combined",)), "layout tag kv:contiguous is missing"),
        (paged(block_size=8), "block_size 8 is not one of 16, 32, 64, 128"),
        (paged(block_size=48), "block_size 48 is not one of 16, 32, 64, 128"),
        (paged(device_type="cpu", capability=None), "device type cpu is not one of cuda"),
    ],
)
def test_each_reason_of_flashinfer(request_: Request, reason: str) -> None:
    assert reasons("flashinfer_xqa_decode", paged()) == ()
    assert reason in reasons("flashinfer_xqa_decode", request_)


@pytest.mark.usefixtures("has_all")
def test_flashinfer_serves_unasked_only_what_it_was_measured_and_verified_on() -> None:
    assert dispatch(paged()).spec.name == "triton_paged_decode"
    without_triton = Request(**{**vars(paged()), "shape": Request.sorted_shape({**dict(paged().shape), "batch": 1 << 16})})
    assert dispatch(without_triton).spec.name == "torch_paged_decode"
    set_perf_provider(lambda spec, request: 0.5 if spec.backend == "flashinfer" else None)
    assert dispatch(paged()).spec.name == "triton_paged_decode"
    registry.record_golden("flashinfer_xqa_decode", GoldenRecord(True, 1e-3))
    assert dispatch(paged()).spec.name == "flashinfer_xqa_decode"
    assert dispatch(paged(), backend="triton").spec.name == "triton_paged_decode"


def test_flashinfer_that_is_not_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "flashinfer" else found(name, *rest))
    text = dispatch(paged()).explain()
    assert "flashinfer_xqa_decode: not available: the package flashinfer is not installed (the extra rapid-llm[peers] has it)" in text
    with pytest.raises(NoKernelError, match="flashinfer is not installed"):
        dispatch(paged(), backend="flashinfer")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise OSError('libcudart.so.12 is missing\\nand more')", "flashinfer cannot be imported (OSError: libcudart.so.12 is missing)"),
        ("", "this version of flashinfer has no xqa_batch_decode_with_kv_cache"),
        ("xqa_batch_decode_with_kv_cache = print", None),
    ],
)
def test_flashinfer_that_does_not_do_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, reason: str | None) -> None:
    package = tmp_path / "flashinfer"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "decode.py").write_text(body, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("flashinfer", "flashinfer.decode"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    try:
        for other in (paged(block_size=1), paged(tags=("kv:combined",)), paged(device_type="cpu", capability=None)):
            assert flashinfer.probe(other) is None
        assert "flashinfer" not in sys.modules
        assert flashinfer.probe(paged()) == reason
    finally:
        for name in ("flashinfer", "flashinfer.decode"):
            sys.modules.pop(name, None)


def test_flashinfers_row_hands_over_pages_lengths_and_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for FlashInfer that attends by the reference: every table entry is a page of the cache, lengths are within it."""
    seen: dict[str, Any] = {}

    def attended(
        q: Any, pages: Any, workspace: Any, table: Any, lens: Any, max_seq_len: int, *, bmm1_scale: float, bmm2_scale: float
    ) -> Any:
        seen.update(table=table, lens=lens)
        k, v = (part.flatten(0, 1) for part in pages)
        size = pages[0].shape[1]
        rows = (table[:, :, None] * size + torch.arange(size, dtype=table.dtype)).flatten(1)
        made = decode_reference(q, k, v, rows, lens, softmax_scale=bmm1_scale) * bmm2_scale
        return made.to(q.dtype)

    module = types.ModuleType("flashinfer.decode")
    module.xqa_batch_decode_with_kv_cache = attended  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.decode", module)
    name = "rapid_llm.kernels.backends.flashinfer_impl"
    monkeypatch.delitem(sys.modules, name, raising=False)
    row = importlib.import_module(name)
    monkeypatch.setattr(row, "_workspace", lambda device, stream: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0))
    generator = torch.Generator().manual_seed(1)
    k_rows, v_rows = torch.randn(2, 96, 2, 16, generator=generator).half()
    q, out = torch.randn(3, 4, 16, generator=generator).half(), torch.full((3, 4, 16), float("nan")).half()
    table = torch.tensor([[5, 2, 0], [1, -7, 2**31 - 1], [-1, -1, -1]], dtype=torch.int32)
    lens = torch.tensor([90, 16, 0], dtype=torch.int32)
    row.xqa_decode(q, k_rows, v_rows, table, lens, out, k_scale=1.0, v_scale=1.0, softmax_scale=0.25, block_size=16)
    rows = (table[:, :, None] * 16 + torch.arange(16, dtype=torch.int32)).flatten(1)
    expected = decode_reference(q, k_rows, v_rows, rows, lens.clamp(max=48), softmax_scale=0.25)
    check_decode(out, expected, kv_dtype="float16")
    assert bool(((seen["table"] >= 0) & (seen["table"] < 6)).all())
    assert bool((seen["lens"] >= 1).all())
    sys.modules.pop(name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "seq_len"), [(4, 2, 64, 33), (6, 1, 96, 1), (3, 3, 17, 50)])
def test_contiguous_decode_is_attention(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, seq_len: int) -> None:
    generator = torch.Generator().manual_seed(2)
    k, v = torch.randn(2, 3, kv_heads, seq_len, head_dim, generator=generator).to(dtype)
    q = torch.randn(3, heads, head_dim, generator=generator).to(dtype)
    rows = [part.transpose(1, 2).reshape(-1, kv_heads, head_dim) for part in (k, v)]
    table, lens = torch.arange(3 * seq_len, dtype=torch.int32).view(3, -1), torch.full((3,), seq_len, dtype=torch.int32)
    for scale in (None, 0.5):
        out = contiguous_decode_attention(q, k, v, softmax_scale=scale)
        check_decode(out, decode_reference(q, *rows, table, lens, softmax_scale=scale), kv_dtype=str(dtype))
    assert dispatch(contiguous_decode_request(q, k, v)).spec.name == "sdpa_math_decode"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.zeros(2, 4, 16)}, DTypeError, "q of dtype float16 or bfloat16"),
        ({"k": torch.zeros(2, 2, 8, 16, dtype=torch.uint8)}, DTypeError, "k of the dtype of q"),
        ({"v": torch.zeros(2, 2, 9, 16).half()}, ShapeError, "v of the shape of k"),
        ({"q": torch.zeros(3, 4, 16).half()}, ShapeError, "k of the batch and head_dim of q"),
        ({"q": torch.zeros(2, 3, 16).half()}, ShapeError, "num_q_heads to be a positive multiple"),
        ({"k": torch.zeros(2, 8, 16).half()}, ShapeError, "k \\[batch, num_kv_heads, seq_len, head_dim\\]"),
        ({"softmax_scale": float("inf")}, ScaleError, "a finite softmax_scale"),
    ],
)
def test_a_wrong_contiguous_call_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    known = {"q": torch.zeros(2, 4, 16).half(), "k": torch.zeros(2, 2, 8, 16).half(), "v": torch.zeros(2, 2, 8, 16).half(), **changes}
    with pytest.raises(error, match=f"^{OP} expected {message}"):
        contiguous_decode_attention(**known)


def test_a_strided_cache_is_not_copied_in_silence() -> None:
    k = torch.zeros(2, 8, 2, 16).half().transpose(1, 2)
    with pytest.raises(NoKernelError, match="layout tag kv:contiguous is missing"):
        contiguous_decode_attention(torch.zeros(2, 4, 16).half(), k, k)


def test_a_limit_to_some_sizes() -> None:
    limit = ShapeLimit("block_size", one_of=(16, 32))
    assert limit.reason(paged(block_size=32)) is None
    assert limit.reason(paged(block_size=24)) == "block_size 24 is not one of 16, 32"
    assert limit.reason(paged(block_size=1)) is None


def test_declaring_the_peers_imports_none_of_them(root: Path) -> None:
    code = (
        "import sys; from rapid_llm.kernels.backends import SPECS;"
        "print([name for name in ('triton', 'flashinfer') if name in sys.modules], len(SPECS) > 10)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] True"


def test_a_paged_call_of_this_machine_says_why_each_peer_is_out() -> None:
    pool = torch.zeros(2, 64, 2, 16).half()
    table, lens = torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    text = dispatch(decode_request(torch.zeros(2, 4, 16).half(), *pool, table, lens, 16), backend="torch").explain()
    assert "flashinfer_xqa_decode: backend flashinfer is not the one that" in text
    assert ("flashinfer is not installed" in text) != INSTALLED
