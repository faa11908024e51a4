"""A driver of Triton that compiles and launches nothing, and notes what would have been: for the host's part of a launch, without a GPU.

`python -m tests.kernels.stub_driver` prints what a call of the public decode and write ops costs the host beside the bare
`JITFunction.run` that an ordinary call ends in, both with nothing behind the launcher, in microseconds. It stands on tensors of the CPU,
so that what torch asks of a CUDA device (stream, capture, current device) is not in it.
"""

import contextlib
import json
import timeit
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

_Metadata = namedtuple("_Metadata", ("name", "target", "num_warps", "shared"))


class Launch(NamedTuple):
    """What reached the launcher."""

    kernel: CompiledKernel
    grid: tuple[int, int, int]
    stream: int
    arguments: tuple[Any, ...]

    @property
    def told(self) -> tuple[Any, ...]:
        """As a value: tensors are their addresses, which is all that a launcher makes of them."""
        plain = (one.data_ptr() if isinstance(one, torch.Tensor) else one for one in self.arguments)
        return (id(self.kernel), self.grid, self.stream, tuple((type(one), one) for one in plain))


class StubDriver:
    """Answers what Triton asks of its driver, and notes the launches of the kernels that it "compiles".

    Attributes:
        device, stream: The current ones.
        launches: What was launched.
        compiled: What Triton asked the compiler for: sources with their options.
    """

    def __init__(self, device: int | None = 0, *, noting: bool = True) -> None:
        self.device, self.stream, self.noting = device, 7, noting
        self.launches: list[Launch] = []
        self.compiled: list[tuple[Any, dict[str, Any]]] = []

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int | None:
        return self.device

    def get_current_stream(self, device: int | None) -> int:
        return self.stream

    def compile(self, src: Any, target: GPUTarget, options: dict[str, Any], **more: Any) -> CompiledKernel:
        """A kernel of its own for each question."""
        src.fn.cache_key  # noqa: B018  # the compiler reads the kernel's code, and notes the globals in it
        self.compiled.append((src, options))
        kernel: Any = object.__new__(CompiledKernel)
        kernel.metadata = _Metadata(src.fn.__name__, target, options["num_warps"], 0)
        kernel.src, kernel.name, kernel.module, kernel.function, kernel.packed_metadata = src, src.fn.__name__, 1, 2, (4, 1, 0)

        def launch(
            x: int, y: int, z: int, stream: int, function: int, packed: Any, metadata: Any, enter: Any, leave: Any, *rest: Any
        ) -> None:
            if self.noting:
                self.launches.append(Launch(kernel, (x, y, z), stream, rest))

        kernel._run = launch
        return kernel  # type: ignore[no-any-return]


@contextlib.contextmanager
def installed(driver: StubDriver) -> Iterator[StubDriver]:
    """Within it Triton compiles and launches with `driver`; kernels that were bound before it have to be bound anew by the caller."""
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(driver)
    try:
        with mock.patch("triton.compiler.compile", driver.compile):
            yield driver
    finally:
        triton.runtime.driver._active = before


def _median_us(call: Callable[[], object]) -> float:
    """Of 31 blocks of 500 calls."""
    call()
    return sorted(timeit.repeat(call, number=500, repeat=31))[15] / 500 * 1e6


def times_us() -> dict[str, dict[str, float]]:
    """Of a public call and of its bare launch, fp16 and e4m3: a 1 x 1k decode, one split and several, and a write of 64 tokens."""
    from asv_bench.trial_peers import bare_launch
    from rapid_llm.kernels.configs import choose_config
    from rapid_llm.kernels.ops import attention, dispatch, kv_write, paged_decode_attention, registry
    from rapid_llm.kernels.ops.tuned import overridden

    spec = registry.get("triton_paged_decode")
    told: dict[str, dict[str, float]] = {}
    with installed(StubDriver(None, noting=False)), mock.patch("rapid_llm.kernels.backends.triton.probe", return_value=None):
        for name, dtype in (("fp16", torch.float16), ("e4m3", torch.uint8)):
            pool = torch.zeros(2048, 16, 128, dtype=dtype)
            tensors = (
                torch.zeros(1, 32, 128, dtype=torch.float16), pool[:, :8], pool[:, 8:],
                torch.zeros(1, 1024, dtype=torch.int32), torch.ones(1, dtype=torch.int32),
            )  # fmt: skip
            out = torch.empty_like(tensors[0])
            qkv, slots = torch.zeros(64, 48, 128, dtype=torch.float16), torch.arange(64, dtype=torch.int32)
            new = (qkv[:, 32:40], qkv[:, 40:], slots, *tensors[1:3])
            scales = {"k_scale": 0.5, "v_scale": 0.25} if name == "e4m3" else {}

            def write() -> object:
                return kv_write(*new, backend="triton", **scales)  # noqa: B023

            write()
            told[f"{name} write"] = {"public op": round(_median_us(write), 2), "bare run": round(_median_us(bare_launch(write)), 2)}
            for variant in ("split", "stream"):
                with overridden(spec.name, choose_config(4, 128, one_byte=name == "e4m3", variant=variant)):

                    def call() -> object:
                        return paged_decode_attention(*tensors, out=out, backend="triton")  # noqa: B023

                    call()
                    row = {"public op": _median_us(call), "bare run": _median_us(bare_launch(call))}
                    row["op without out"] = _median_us(lambda: paged_decode_attention(*tensors, backend="triton"))  # noqa: B023
                    row["key and look-up"] = _median_us(
                        lambda: attention._accepted.known.get(attention._call_key(*tensors, out, 1, "triton"))  # noqa: B023
                    )
                    row["decision_state"] = _median_us(dispatch.decision_state)
                    told[f"{name} {variant}"] = {what: round(value, 2) for what, value in row.items()}
    return told


if __name__ == "__main__":
    print(json.dumps({"torch": torch.__version__, "triton": triton.__version__, "us": times_us()}, indent=1))
