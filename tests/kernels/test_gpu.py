"""What only a GPU can show: real memory past 2**31 elements, CUDA graphs, no host synchronisation."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from asv_bench import bench_rope_write
from asv_bench.suite import Case
from asv_bench.verify import check_decode, check_write, decode_reference
from rapid_llm.kernels.launch import has_e4m3_convert
from rapid_llm.kernels.ops import kv_write, paged_decode_attention, quantize_e4m3, rope_norm_kv_write
from tests.kernels.head_scales import scales_on_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning"),
]

POOLS = [(torch.float16, {}), (torch.uint8, {"k_scale": 0.02, "v_scale": 0.01}), (torch.int8, {"k_scale": 0.02, "v_scale": 0.01})]
HEADS, HEAD_DIM = 8, 128


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    """torch raises where an operation would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("dtype", "scales"), POOLS)
def test_a_real_pool_past_two_to_the_31(dtype: torch.dtype, scales: dict[str, Any], backend: str) -> None:
    num_rows = 1_048_580 if dtype == torch.float16 else 2_097_156
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of free device memory")
    pool, scales = torch.zeros(num_rows, 2 * HEADS, HEAD_DIM, dtype=dtype, device="cuda"), scales_on_device(dtype, scales, HEADS)
    k_rows, v_rows = pool[:, :HEADS], pool[:, HEADS:]
    slots = torch.tensor([0, num_rows - 5, num_rows - 4, num_rows - 1], dtype=torch.int32, device="cuda")
    k, v = (torch.randn(4, HEADS, HEAD_DIM, device="cuda").half() for _ in range(2))
    kv_write(k, v, slots, k_rows, v_rows, **scales, backend=backend)
    check_write(k, v, slots, k_rows, v_rows, **scales)
    neighbours = torch.tensor([1, num_rows - 6, num_rows - 3, num_rows - 2], device="cuda")
    assert not pool[neighbours].any()
    q = torch.randn(1, 4 * HEADS, HEAD_DIM, device="cuda").half()
    lens = torch.tensor([4], dtype=torch.int32, device="cuda")
    out = paged_decode_attention(q, k_rows, v_rows, slots[None], lens, **scales, backend=backend)
    reference = decode_reference(q, k_rows, v_rows, slots[None], lens, **scales)
    check_decode(out, reference, kv_dtype=str(dtype))


@pytest.mark.parametrize(("dtype", "scales"), POOLS)
def test_write_and_decode_in_one_cuda_graph(dtype: torch.dtype, scales: dict[str, Any], backend: str) -> None:
    """Captured once, replayed with other tokens, slots, tables and lengths."""
    num_rows, batch, width = 4096, 3, 700
    pool, scales = torch.zeros(num_rows, 2 * HEADS, HEAD_DIM, dtype=dtype, device="cuda"), scales_on_device(dtype, scales, HEADS)
    k_rows, v_rows = pool[:, :HEADS], pool[:, HEADS:]
    kv_write(
        *(torch.randn(num_rows, HEADS, HEAD_DIM, device="cuda").half() for _ in range(2)),
        torch.arange(num_rows, device="cuda"), k_rows, v_rows, **scales,
    )  # fmt: skip
    q = torch.randn(batch, 4 * HEADS, HEAD_DIM, device="cuda").half()
    k, v = (torch.randn(batch, HEADS, HEAD_DIM, device="cuda").half() for _ in range(2))
    table = torch.randint(0, num_rows, (batch, width), device="cuda").int()
    lens = torch.tensor([1, 0, width], dtype=torch.int32, device="cuda")
    slots = torch.tensor([5, 6, -1], dtype=torch.int32, device="cuda")
    out = torch.empty_like(q)

    def step() -> None:
        kv_write(k, v, slots, k_rows, v_rows, **scales, backend=backend)
        paged_decode_attention(q, k_rows, v_rows, table, lens, out=out, **scales, backend=backend)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for new_lens, new_slots in (([700, 33, 1], [9, -1, 11]), ([0, 129, 64], [4095, 5000, 0])):
        for tensor in (q, k, v):
            tensor.normal_()
        lens.copy_(torch.tensor(new_lens))
        slots.copy_(torch.tensor(new_slots))
        table.random_(0, num_rows)
        graph.replay()
        check_write(k, v, slots, k_rows, v_rows, **scales)
        reference = decode_reference(q, k_rows, v_rows, table, lens, **scales)
        check_decode(out, reference, kv_dtype=str(dtype))


@pytest.mark.parametrize(("dtype", "scales"), POOLS)
@pytest.mark.usefixtures("no_synchronisation")
def test_the_calls_do_not_wait_for_the_device(dtype: torch.dtype, scales: dict[str, Any], backend: str) -> None:
    pool, scales = torch.zeros(64, 2 * HEADS, HEAD_DIM, dtype=dtype, device="cuda"), scales_on_device(dtype, scales, HEADS)
    x = torch.ones(2, HEADS, HEAD_DIM, device="cuda", dtype=torch.float16)
    slots = torch.arange(2, dtype=torch.int32, device="cuda")
    table, lens = slots[:, None].contiguous(), torch.ones_like(slots)
    kv_write(x, x, slots, pool[:, :HEADS], pool[:, HEADS:], **scales, backend=backend)
    paged_decode_attention(x, pool[:, :HEADS], pool[:, HEADS:], table, lens, **scales, backend=backend)
    quantize_e4m3(x, 0.5, backend=backend)
    cos_sin = torch.ones(8, HEAD_DIM, device="cuda")
    if dtype != torch.int8:  # which it does not take
        rope_norm_kv_write(x, x, x, slots, cos_sin, slots, pool[:, :HEADS], pool[:, HEADS:], **scales, backend=backend)


@pytest.mark.parametrize("case", bench_rope_write.RopeWriteDecode.cases, ids=lambda case: case.label)
def test_a_steps_new_tokens_in_one_cuda_graph(case: Case) -> None:
    """Captured once, replayed with other tokens and positions; nothing is allocated by a call."""
    prepared = bench_rope_write.RopeWriteDecode().build(case, torch.device("cuda"))
    assert prepared.selection.spec.name == "triton_rope_norm_kv_write"
    assert prepared.vary is not None
    prepared.calls[0]()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    prepared.calls[0]()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in prepared.calls:
            call()
    for _ in range(2):
        prepared.poison()
        graph.replay()
        prepared.check()
        prepared.vary()


def test_the_conversion_instructions_are_the_ones_under_test() -> None:
    """On 8.9 and later the other tests of this folder run the hardware's conversions, not the integer arithmetic."""
    device = torch.device("cuda")
    assert has_e4m3_convert(device) == (torch.cuda.get_device_capability(device) >= (8, 9))
