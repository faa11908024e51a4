"""What a KV write gives the launcher by the direct path, held against `JITFunction.run`; as `tests.kernels.direct_launches`, for its calls.

`python -m tests.kernels.direct_writes [MUTANT]`.
"""

import contextlib
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from rapid_llm.kernels import direct_launch
from rapid_llm.kernels import kv_write as launcher
from rapid_llm.kernels.configs import WriteConfig
from rapid_llm.kernels.ops import kv, kv_write
from rapid_llm.kernels.ops.spec import KernelSpec
from rapid_llm.kernels.ops.tuned import overridden
from tests.kernels.direct_launches import HEAD_DIM, HEADS, asked, scales_for, seen
from tests.kernels.launcher_bench import Bench, Call, patched_run, shapes_only, tensor, told_of

NAME = "triton_kv_write"
FUSED = 4 * HEADS * HEAD_DIM
"""Elements between two tokens of a fused projection."""


def write(
    *,
    num_tokens: int = 8,
    dtype: torch.dtype = torch.float16,
    kv_dtype: torch.dtype = torch.float16,
    slot_dtype: torch.dtype = torch.int32,
    num_rows: int = 4096,
    scales: tuple[float | None, float | None] = (None, None),
    **changes: dict[str, Any],
) -> Call:
    """A public call; `changes` are strides and offsets of a tensor by its name."""
    new = {"dtype": dtype, "strides": (FUSED, HEAD_DIM, 1)}
    k, v = (tensor(num_tokens, HEADS, HEAD_DIM, **{**new, **changes.get(name, {})}) for name in ("k", "v"))
    slots = tensor(num_tokens, dtype=slot_dtype, **changes.get("slots", {}))
    rows = {"dtype": kv_dtype, "strides": (2 * HEADS * HEAD_DIM, HEAD_DIM, 1)}
    k_rows, v_rows = (tensor(num_rows, HEADS, HEAD_DIM, **{**rows, **changes.get(name, {})}) for name in ("k_rows", "v_rows"))
    if not changes.keys() & {"k_rows", "v_rows"}:
        buffer = tensor(num_rows, 2 * HEADS, HEAD_DIM, dtype=kv_dtype, **changes.get("buffer", {}))
        k_rows, v_rows = buffer[:, :HEADS], buffer[:, HEADS:]
    of_cache = scales_for(kv_dtype, scales, changes)
    return lambda: kv_write(k, v, slots, k_rows, v_rows, backend="triton", **of_cache)


def every_form(bench: Bench) -> list[str]:
    """Dtypes, sizes and tiles. Scales that differ share a form, those whose inverse has no exact parts too: for them the kernel divides."""
    problems = []
    half, brain, e4m3, int8 = torch.float16, torch.bfloat16, torch.uint8, torch.int8
    of_bytes = ((None, None), (0.02, 0.3), (2.0**-70, 0.3))
    calls = {
        f"{dtype} {kv_dtype} {slot_dtype} {num_tokens} {scales}": write(
            dtype=dtype, kv_dtype=kv_dtype, slot_dtype=slot_dtype, num_tokens=num_tokens, scales=scales
        )
        for dtype, kv_dtype in ((half, half), (brain, brain), (half, e4m3), (brain, e4m3), (half, int8), (brain, int8))
        for slot_dtype in (torch.int32, torch.int64)
        for num_tokens in (1, 8, 4096)
        for scales in (of_bytes if kv_dtype == e4m3 else of_bytes[:1])
    }
    problems += bench.differences(calls)
    divided = {scales: bench.made(write(kv_dtype=e4m3, scales=scales))[0].kernel for scales in of_bytes}
    if divided[of_bytes[0]] is not divided[of_bytes[1]] or divided[of_bytes[1]] is divided[of_bytes[2]]:
        problems.append("the kernel that divides is not told apart by the values of the scales alone")
    for config in (WriteConfig(2, 64, 2, 1), WriteConfig(1, 128, 4, 2)):
        with overridden(NAME, config):
            problems += bench.differences(calls)
    return problems


def every_alignment_and_stride(bench: Bench) -> list[str]:
    """Each argument in each class that Triton tells apart: an address by 16 bytes, an integer by being 1, by 16 and by 32 bits."""
    row, huge = 2 * HEADS * HEAD_DIM, 2**31
    calls = {"plain": write()}
    for name, place in itertools.product(("k", "v", "k_rows", "v_rows"), range(5)):
        width = FUSED if name in ("k", "v") else row
        strides = ((width, HEAD_DIM), (width + 8, HEAD_DIM), (width + 1, HEAD_DIM), (huge + 16, HEAD_DIM), (width + 64, HEAD_DIM + 8))
        for offset in (0, 1, 8):
            calls[f"{name} {place} {offset}"] = write(**{name: {"strides": (*strides[place], 1), "offset": offset}})
    for stride, offset, dtype in itertools.product((1, 2, 16), (0, 1, 4), (torch.int32, torch.int64)):
        calls[f"slots {stride} {offset} {dtype}"] = write(slots={"strides": (stride,), "offset": offset}, slot_dtype=dtype)
    for num_tokens, num_rows in itertools.product((1, 2, 16, 17), (16, 17, huge // row, huge + 16)):
        calls[f"{num_tokens} tokens {num_rows} rows"] = write(num_tokens=num_tokens, num_rows=num_rows)
    for offset in (0, 1, 2):
        calls[f"bytes {offset}"] = write(kv_dtype=torch.uint8, buffer={"offset": offset})
    for k_offset, v_offset in itertools.product((0, 1, 4), repeat=2):
        offsets = {"k_scale": {"offset": k_offset}, "v_scale": {"offset": v_offset}}
        calls[f"int8 {k_offset} {v_offset}"] = write(kv_dtype=torch.int8, **offsets)
    problems = bench.differences(calls)
    told = {bench.made(call)[0].kernel for call in calls.values()}
    if len(told) < 20:
        problems.append(f"{len(told)} kernels for all of these: the classes are not told apart")
    return problems


def what_decides(bench: Bench) -> list[str]:
    """As `tests.kernels.direct_launches.seen`, of a write."""
    return seen(bench, write(), NAME, WriteConfig(2, 64, 2, 1), kv)


def what_takes_the_ordinary_path(bench: Bench) -> list[str]:
    """As `tests.kernels.direct_launches.asked`, of a write."""
    return asked(bench, write(), write(num_tokens=16), write(num_tokens=5))


def streams(bench: Bench) -> list[str]:
    """Each call goes to the stream that is current, with the addresses of its own tensors; a capture's stream is one like others."""
    calls, problems = [write() for _ in range(2)], []
    _, direct = bench.made(calls[0])
    if direct:
        problems.append("the first call of a form was launched directly")
    for stream in (7, 99, 7):
        bench.driver.stream = stream
        for call in calls:
            launch, direct = bench.made(call)
            with patched_run():
                expected, _ = bench.made(call)
            if not direct or launch.stream != stream or launch.told != expected.told:
                problems.append(f"stream {stream}: {launch.told} is not {expected.told}")
    return problems


CASES = (every_form, every_alignment_and_stride, what_decides, what_takes_the_ordinary_path, streams)


def _one_plan(call: Callable[..., Any]) -> Callable[..., Any]:
    """The launcher with a memory that takes every division for the first."""

    class Same(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            return next(iter(self.values()), default)

    kept: dict[int, Same] = {}

    def called(*args: Any, memory: Any = None, **kwargs: Any) -> None:
        call(*args, memory=None if memory is None else kept.setdefault(id(memory), Same()), **kwargs)

    return called


MUTANTS: dict[str, Callable[[], Any]] = {
    "alignment": lambda: mock.patch.object(direct_launch, "_alignment", return_value=()),
    "state": lambda: mock.patch.object(direct_launch.Launches, "_is_plain", return_value=True),
    "form": lambda: mock.patch.object(kv, "_call_key", shapes_only),
    "division": lambda: mock.patch.object(KernelSpec, "load", return_value=_one_plan(launcher.kv_write)),
}


if __name__ == "__main__":
    mutated = MUTANTS[sys.argv[1]] if sys.argv[1:] else contextlib.nullcontext
    chosen = [case for case in CASES if case.__name__ in sys.argv[2:] or not sys.argv[2:]]
    print(json.dumps(told_of(chosen, (launcher.kv_write_kernel, launcher.kv_write_int8_kernel), mutated)))
