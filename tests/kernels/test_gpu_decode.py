"""What only a GPU can show of the decode variants: programs that arrive in any order, captures, several streams, the launch's cost."""

from typing import Any

import pytest
import torch

from asv_bench.verify import check_decode, decode_reference
from rapid_llm.kernels.configs import VARIANTS, choose_config
from rapid_llm.kernels.ops import paged_decode_attention
from rapid_llm.kernels.ops.tuned import overridden
from tests.kernels.head_scales import scales_on_device
from tests.kernels.host_cost import MOST_OF_A_BARE_LAUNCH, host_ratio

pytestmark = pytest.mark.gpu

POOLS = [(torch.float16, {}), (torch.uint8, {"k_scale": 0.02, "v_scale": 0.01}), (torch.int8, {"k_scale": 0.02, "v_scale": 0.01})]
HEADS, GROUP, HEAD_DIM, ROWS = 8, 4, 128, 1 << 15


class Step:
    """One decode step on a pool of its own."""

    def __init__(self, dtype: torch.dtype, scales: dict[str, float], lengths: list[int]) -> None:
        values = torch.randn(ROWS, 2 * HEADS, HEAD_DIM, device="cuda")
        if dtype == torch.uint8:
            pool = (values * 30).to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            pool = values.half() if dtype == torch.float16 else (values * 30).clamp(-128, 127).to(dtype)
        self.k_rows, self.v_rows, self.scales = pool[:, :HEADS], pool[:, HEADS:], scales_on_device(dtype, scales, HEADS)
        self.q = torch.randn(len(lengths), GROUP * HEADS, HEAD_DIM, device="cuda").half()
        self.table = torch.randint(0, ROWS, (len(lengths), 4096), device="cuda").int()
        self.lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.out = torch.empty_like(self.q)

    def run(self) -> None:
        paged_decode_attention(self.q, self.k_rows, self.v_rows, self.table, self.lens, out=self.out, backend="triton", **self.scales)

    def check(self) -> None:
        reference = decode_reference(self.q, self.k_rows, self.v_rows, self.table, self.lens, **self.scales)
        check_decode(self.out, reference, kv_dtype=str(self.k_rows.dtype))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "scales"), POOLS)
def test_every_variant_eager_and_replayed(dtype: torch.dtype, scales: dict[str, float], variant: str) -> None:
    """Captured once, replayed with other lengths and rows: many times, since a lost part depends on who arrives last."""
    step = Step(dtype, scales, [4096, 1, 0, 777, 64, 2049])
    with overridden("triton_paged_decode", choose_config(GROUP, HEAD_DIM, one_byte=bool(scales), variant=variant)):
        for _ in range(20):
            step.out.fill_(torch.nan)
            step.run()
        step.check()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.run()
    for lengths in ([4096, 1, 0, 777, 64, 2049], [1, 4096, 4096, 0, 33, 128], [0] * 6):
        step.lens.copy_(torch.tensor(lengths))
        step.table.random_(0, ROWS)
        for _ in range(20):
            step.out.fill_(torch.nan)
            graph.replay()
        step.check()


@pytest.mark.parametrize("variant", VARIANTS)
def test_graphs_and_eager_calls_at_the_same_time(variant: str) -> None:
    """Two graphs that were captured one after the other, and two eager streams: none counts into another's counters."""
    steps = [Step(torch.float16, {}, [4096, 3000, 5, 1500]) for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in steps]
    graphs = []
    with overridden("triton_paged_decode", choose_config(GROUP, HEAD_DIM, one_byte=False, variant=variant)):
        steps[0].run()
        torch.cuda.synchronize()
        for step in steps[:2]:
            graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step.run()
            graphs.append(graph.replay)
        for step in steps:
            step.out.fill_(torch.nan)
        torch.cuda.synchronize()
        for _ in range(50):
            for stream, call in zip(streams, [*graphs, steps[2].run, steps[3].run], strict=True):
                with torch.cuda.stream(stream):
                    call()
        torch.cuda.synchronize()
    for step in steps:
        step.check()


def test_one_graph_may_be_replayed_without_the_one_captured_before_it() -> None:
    """Each sets its own counters to 0: the second does not rest on what the first's replay would have done."""
    steps = [Step(torch.float16, {}, [4096, 3000]) for _ in range(2)]
    steps[0].run()
    graphs = [torch.cuda.CUDAGraph() for _ in steps]
    for graph, step in zip(graphs, steps, strict=True):
        with torch.cuda.graph(graph):
            step.run()
    steps[1].out.fill_(torch.nan)
    for _ in range(3):
        graphs[1].replay()
    steps[1].check()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "scales"), POOLS)
def test_like_calls_are_launched_directly_eager_and_captured(
    firsts: list[object], dtype: torch.dtype, scales: dict[str, float], variant: str
) -> None:
    """Two pools and other lengths are one form: Triton is asked once, and every result is that of the call's own tensors."""
    steps = [Step(dtype, scales, lengths) for lengths in ([4096, 1, 0, 777], [64, 4095, 2049, 3])]
    with overridden("triton_paged_decode", choose_config(GROUP, HEAD_DIM, one_byte=bool(scales), variant=variant)):
        for step in steps * 3:
            step.out.fill_(torch.nan)
            step.run()
            step.check()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for step in steps:
                step.run()
        assert len(firsts) == 1
    for lengths in ([4096, 1, 0, 777], [5, 5, 4096, 0]):
        for step in steps:
            step.lens.copy_(torch.tensor(lengths))
            step.table.random_(0, ROWS)
            step.out.fill_(torch.nan)
        graph.replay()
        for step in steps:
            step.check()


def test_misaligned_tensors_have_a_kernel_of_their_own(firsts: list[object]) -> None:
    """An aligned and a misaligned row table and lengths in turn: the loads of the one are not those of the other."""
    aligned, misaligned = (Step(torch.float16, {}, [4096, 1, 0, 777]) for _ in range(2))
    misaligned.table = torch.randint(0, ROWS, (4, 4096 + 1), device="cuda").int()[:, 1:]
    aligned.table = torch.randint(0, ROWS, (4, 4096 + 1), device="cuda").int()[:, :-1]
    misaligned.lens = torch.tensor([0, 4096, 1, 0, 777], device="cuda").int()[1:]
    for step in (aligned, misaligned) * 3:
        step.out.fill_(torch.nan)
        step.run()
        step.check()
    assert len(firsts) == 2


def test_the_public_op_costs_the_host_little_more_than_a_bare_launch() -> None:
    """1 x 1k, with the instrument and the peer of the trial."""
    step = Step(torch.float16, {}, [1024])
    step.table = step.table[:, :1024].contiguous()
    assert host_ratio(step.run) <= MOST_OF_A_BARE_LAUNCH
