"""What only a GPU can show of the direct path of KV writes: eager, captured, on streams, and the launch's cost."""

import pytest
import torch

from asv_bench.verify import check_guards, check_write
from rapid_llm.kernels.ops import kv_write
from tests.kernels.head_scales import scales_on_device
from tests.kernels.host_cost import MOST_OF_A_BARE_LAUNCH, host_ratio

pytestmark = pytest.mark.gpu

BYTES = [(torch.uint8, {"k_scale": 0.02, "v_scale": 0.01}), (torch.uint8, {"k_scale": 2.0**-70, "v_scale": 1.0})]
POOLS = [(torch.float16, {}), *BYTES, (torch.int8, {"k_scale": 0.02, "v_scale": 0.01})]
HEADS, HEAD_DIM, ROWS = 8, 128, 1 << 12


class Step:
    """New tokens of one step, and a pool of its own."""

    def __init__(self, dtype: torch.dtype, scales: dict[str, float], num_tokens: int = 64) -> None:
        self.pool = torch.full((ROWS, 2 * HEADS, HEAD_DIM), 77, dtype=dtype, device="cuda")
        self.k_rows, self.v_rows, self.scales = self.pool[:, :HEADS], self.pool[:, HEADS:], scales_on_device(dtype, scales, HEADS)
        qkv = torch.randn(num_tokens, 6 * HEADS, HEAD_DIM, device="cuda").half()
        self.k, self.v = qkv[:, 4 * HEADS : 5 * HEADS], qkv[:, 5 * HEADS :]
        self.slots = torch.randperm(ROWS, device="cuda")[:num_tokens].int()

    def run(self) -> None:
        kv_write(self.k, self.v, self.slots, self.k_rows, self.v_rows, backend="triton", **self.scales)

    def anew(self) -> None:
        """Other values, other rows, and a pool that nobody wrote to."""
        self.pool.fill_(77)
        self.k.normal_()
        self.v.normal_()
        self.slots.copy_(torch.randperm(ROWS, device="cuda")[: len(self.slots)])

    def check(self) -> None:
        check_write(self.k, self.v, self.slots, self.k_rows, self.v_rows, **self.scales)
        untouched = torch.ones(ROWS, dtype=torch.bool, device="cuda")
        untouched[self.slots.long()] = False
        check_guards(torch.full_like(self.pool, 77)[untouched], self.pool[untouched], what="KV write")


@pytest.mark.parametrize(("dtype", "scales"), POOLS)
def test_like_writes_are_launched_directly_eager_and_captured(firsts: list[object], dtype: torch.dtype, scales: dict[str, float]) -> None:
    """Two pools and other values are one form: Triton is asked once, and each pool holds what its own call wrote."""
    steps = [Step(dtype, scales) for _ in range(2)]
    for step in steps * 3:
        step.anew()
        step.run()
        step.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step.run()
    assert len(firsts) == 1
    for _ in range(3):
        for step in steps:
            step.anew()
        graph.replay()
        for step in steps:
            step.check()


def test_scales_that_the_kernel_divides_by_have_a_kernel_of_their_own(firsts: list[object]) -> None:
    """One form, in turn."""
    steps = [Step(torch.uint8, scales) for _, scales in BYTES]
    for step in steps * 3:
        step.anew()
        step.run()
        step.check()
    assert len(firsts) == 2


def test_writes_on_several_streams() -> None:
    steps = [Step(torch.float16, {}) for _ in range(4)]
    steps[0].run()
    for step in steps:
        step.anew()
    streams = [torch.cuda.Stream() for _ in steps]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, step in zip(streams, steps, strict=True):
            with torch.cuda.stream(stream):
                step.run()
    torch.cuda.synchronize()
    for step in steps:
        step.check()


def test_the_public_op_costs_the_host_little_more_than_a_bare_launch() -> None:
    """One token, with the instrument and the peer of the trial."""
    step = Step(torch.float16, {}, num_tokens=1)
    assert host_ratio(step.run) <= MOST_OF_A_BARE_LAUNCH
