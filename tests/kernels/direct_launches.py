"""What reaches the launcher by the direct path, held against what `JITFunction.run` gives it; prints what differs by case, as JSON.

A process of its own, because Triton decides while it is imported whether kernels are compiled or interpreted:
`python -m tests.kernels.direct_launches [MUTANT]`. Tensors are the stand-in device's, and nothing is compiled or launched.
"""

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

from rapid_llm.kernels import direct_launch, workspace
from rapid_llm.kernels.configs import VARIANTS, choose_config
from rapid_llm.kernels.decode_int8 import paged_decode_int8_kernel, paged_decode_int8_stream_kernel
from rapid_llm.kernels.decode_split import paged_decode_kernel
from rapid_llm.kernels.decode_stream import paged_decode_stream_kernel
from rapid_llm.kernels.ops import attention, paged_decode_attention, registry
from rapid_llm.kernels.ops.dispatch import FORCE_BACKEND_VARIABLE, set_perf_provider
from rapid_llm.kernels.ops.tuned import overridden
from tests.kernels.launcher_bench import Bench, Call, patched_run, shapes_only, tensor, told_of
from tests.kernels.stub_driver import StubDriver, installed

NAME = "triton_paged_decode"
HEADS, GROUP, HEAD_DIM = 2, 4, 64


def decode(
    *,
    batch: int = 3,
    seq_len: int = 4096,
    q_dtype: torch.dtype = torch.float16,
    kv_dtype: torch.dtype = torch.float16,
    num_rows: int = 4096,
    block_size: int = 1,
    combined: bool = True,
    scales: tuple[float | None, float | None] = (None, None),
    **changes: dict[str, Any],
) -> Call:
    """A public call; `changes` are strides and offsets of a tensor by its name. An int8 cache has tensors for `scales`."""
    kv = {"dtype": kv_dtype, "strides": (2 * HEADS * HEAD_DIM, HEAD_DIM, 1)}
    k_rows = tensor(num_rows, HEADS, HEAD_DIM, **{**kv, **changes.get("k_rows", {})})
    v_rows = tensor(num_rows, HEADS, HEAD_DIM, **{**kv, **changes.get("v_rows", {})})
    if combined:
        buffer = tensor(num_rows, 2 * HEADS, HEAD_DIM, dtype=kv_dtype, **changes.get("buffer", {}))
        k_rows, v_rows = buffer[:, :HEADS], buffer[:, HEADS:]
    q, out = (tensor(batch, GROUP * HEADS, HEAD_DIM, dtype=q_dtype, **changes.get(name, {})) for name in ("q", "out"))
    table = tensor(batch, seq_len // block_size, dtype=torch.int32, **changes.get("row_table", {}))
    lens = tensor(batch, dtype=torch.int32, **changes.get("seq_lens", {}))
    named: dict[str, Any] = {"block_size": block_size, "out": out, "backend": "triton", **scales_for(kv_dtype, scales, changes)}
    return lambda: paged_decode_attention(q, k_rows, v_rows, table, lens, **named)  # type: ignore[arg-type]


def scales_for(kv_dtype: torch.dtype, scales: tuple[float | None, float | None], changes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of a cache of that dtype, with the offsets of `changes` where they are tensors."""
    names = ("k_scale", "v_scale")
    if kv_dtype != torch.int8:
        return dict(zip(names, scales, strict=True))
    return {name: tensor(HEADS, dtype=torch.float32, **changes.get(name, {})) for name in names}


def every_variant(bench: Bench) -> list[str]:
    """Variants, dtypes, block sizes, one split and several; scales that differ share a form."""
    problems = []
    half, brain, e4m3, int8 = torch.float16, torch.bfloat16, torch.uint8, torch.int8
    for variant in VARIANTS:
        for q_dtype, kv_dtype in ((half, half), (brain, brain), (half, e4m3), (brain, e4m3), (half, int8), (brain, int8)):
            config = choose_config(GROUP, HEAD_DIM, one_byte=kv_dtype.itemsize == 1, variant=variant)
            kinds = {"q_dtype": q_dtype, "kv_dtype": kv_dtype}
            calls = {
                f"{variant} {q_dtype} {kv_dtype} {size} {seq_len} {scales}": decode(
                    **kinds, block_size=size, seq_len=seq_len, scales=scales
                )  # type: ignore[arg-type]
                for size, seq_len in ((1, 32), (1, 4096), (16, 4096))
                for scales in (((None, None), (0.02, 0.3)) if kv_dtype == e4m3 else ((None, None),))
            }
            with overridden(NAME, config):
                problems += bench.differences(calls)
    return problems


def every_alignment_and_stride(bench: Bench) -> list[str]:
    """Each argument in each class that Triton tells apart: an address by 16 bytes, an integer by being 1, by 16 and by 32 bits."""
    row, head = 2 * HEADS * HEAD_DIM, HEAD_DIM
    huge = 2**31
    calls: dict[str, Call] = {"plain": decode(), "split": decode(combined=False)}
    for name, width in (("q", GROUP * HEADS * head), ("out", GROUP * HEADS * head)):
        for place, (batch_stride, head_stride) in enumerate(
            ((width, head), (width + 8, head), (width + 1, head), (huge + 8, head), (width * 2, head + 8))
        ):
            calls |= {f"{name} {place} {o}": decode(**{name: {"strides": (batch_stride, head_stride, 1), "offset": o}}) for o in (0, 1, 8)}  # type: ignore[arg-type]
    for name in ("k_rows", "v_rows"):
        for place, (row_stride, head_stride) in enumerate(
            ((row, head), (row + 8, head), (row + 1, head), (row + 64, head + 8), (huge + 16, head))
        ):
            calls |= {
                f"{name} {place} {o}": decode(combined=False, **{name: {"strides": (row_stride, head_stride, 1), "offset": o}})  # type: ignore[arg-type]
                for o in (0, 1, 8)
            }
    for stride, offset in itertools.product((4096, 4100, 4097, 4112), (0, 1, 4)):
        calls[f"row_table {stride} {offset}"] = decode(row_table={"strides": (stride, 1), "offset": offset})
    for offset in (0, 1, 4):
        calls[f"seq_lens {offset}"] = decode(seq_lens={"offset": offset})
        calls[f"buffer {offset}"] = decode(buffer={"offset": offset})
        calls[f"all {offset}"] = decode(**{name: {"offset": offset} for name in ("q", "out", "row_table", "seq_lens", "buffer")})  # type: ignore[arg-type]
    for batch, seq_len in itertools.product((1, 2, 16), (1, 16, 17, 4096)):
        calls[f"batch {batch} {seq_len}"] = decode(batch=batch, seq_len=seq_len)
    for num_rows in (2**31 // row - 1, 2**31 // row, 2**31 + 16):
        calls[f"rows {num_rows}"] = decode(num_rows=num_rows)
        calls[f"e4m3 rows {num_rows}"] = decode(num_rows=num_rows, kv_dtype=torch.uint8, buffer={"offset": 2})
    for k_offset, v_offset in itertools.product((0, 1, 4), repeat=2):
        offsets = {"k_scale": {"offset": k_offset}, "v_scale": {"offset": v_offset}}
        calls[f"int8 {k_offset} {v_offset}"] = decode(kv_dtype=torch.int8, **offsets)
    problems = bench.differences(calls)
    told = {bench.made(call)[0].kernel for call in calls.values()}
    if len(told) < 20:
        problems.append(f"{len(told)} kernels for all of these: the classes are not told apart")
    with overridden(NAME, choose_config(GROUP, HEAD_DIM, one_byte=False, variant="stream")):
        return problems + bench.differences({name: call for name, call in calls.items() if "e4m3" not in name and "int8" not in name})


def what_decides(bench: Bench) -> list[str]:
    """As `seen`, of a decode call."""
    return seen(bench, decode(seq_len=32), NAME, choose_config(GROUP, HEAD_DIM, one_byte=False, variant="stream"), attention)


def seen(bench: Bench, call: Call, name: str, config: Any, op: Any) -> list[str]:
    """The environment, registry, perf provider, a forced config and the device: each is seen by the next call.

    Args:
        bench: Makes the calls.
        call: A public call.
        name: Its KernelSpec's.
        config: Another than the rule's.
        op: Module of the public call.
    """
    problems = []
    plain = bench.differences({"plain": call}) or bench.made(call)[0]
    if isinstance(plain, list):
        return plain
    with overridden(name, config):
        if bench.made(call)[0].kernel is plain.kernel:
            problems.append("a forced config was not seen")
    asked: list[str] = []
    original = op.dispatch

    def noted(*args: Any, **kwargs: Any) -> Any:
        asked.append("")
        return original(*args, **kwargs)

    def is_seen(what: str) -> None:
        asked.clear()
        call()
        if not asked:
            problems.append(f"{what} was not seen")
        asked.clear()
        call()
        if asked:
            problems.append(f"{what}: the new decision was not kept")

    with mock.patch.object(op, "dispatch", noted):
        is_seen("the end of a forced config")
        set_perf_provider(None)
        is_seen("a perf provider")
        with registry.isolated():
            registry.record_golden(name, None)
            is_seen("a golden record")
        is_seen("the registry as it was")
        for variable in (FORCE_BACKEND_VARIABLE, "RAPID_LLM_CONFIG_DIR"):
            with mock.patch.dict(os.environ, {variable: "triton"}):
                is_seen(variable)
            call()
        with mock.patch.object(os, "environ", dict(os.environ, RAPID_LLM_CONFIG_DIR="elsewhere")):
            is_seen("a dictionary in place of os.environ")
    for current, direct in ((1, False), (0, True)):
        bench.driver.device = current
        if bench.made(call)[1] != direct:
            problems.append(f"device {current} is current, and the launch was {'not ' if direct else ''}direct")
    bench.driver.stream = 99
    if bench.made(call)[0].stream != 99:
        problems.append("another stream was not seen")
    return problems


def what_takes_the_ordinary_path(bench: Bench) -> list[str]:
    """As `asked`, of a decode call."""
    return asked(bench, decode(seq_len=32), decode(seq_len=64), decode(batch=5, seq_len=32))


def asked(bench: Bench, call: Call, new: Call, third: Call) -> list[str]:
    """Whatever Triton would do besides looking the kernel up: then it is asked.

    Args:
        bench: Makes the calls.
        call: A public call.
        new, third: Calls of two other forms, which the same kernel serves.
    """
    problems = bench.differences({"plain": call})
    plain = bench.made(call)[0]
    kernel: Any = plain.kernel.src.fn
    hooked: list[object] = []

    def hook(*args: Any, **kwargs: Any) -> None:
        hooked.append(args)

    def inspect(*args: Any) -> tuple[str, str]:
        return "key", "hash"

    runtime = knobs.runtime
    chains = [mock.patch.object(getattr(runtime, name), "calls", [hook]) for name in ("launch_enter_hook", "launch_exit_hook")]
    states = {
        "an enter hook": chains[0],
        "an exit hook": chains[1],
        "a function as hook": mock.patch.object(runtime, "launch_enter_hook", hook),
        "a pre-run hook": mock.patch.object(kernel, "pre_run_hooks", [hook]),
        "debug": mock.patch.object(runtime, "debug", True),
        "debug of the kernel": mock.patch.object(kernel, "debug", True),
        "instrumentation": mock.patch.object(knobs.compilation, "instrumentation_mode", "proton"),
        "an inspection of the stages": mock.patch.object(runtime, "add_stages_inspection_hook", inspect),
        "a patched run": patched_run(),
        "a patched run of the kernel": mock.patch.object(kernel, "run", lambda *args, **kwargs: type(kernel).run(kernel, *args, **kwargs)),
        "a patched subscript": mock.patch.object(
            JITFunction, "__getitem__", lambda own, grid: lambda *args, **kwargs: own.run(*args, grid=grid, warmup=False, **kwargs)
        ),
    }
    for name, state in states.items():
        with state:
            if bench.made(call)[1] or bench.made(call)[1]:
                problems.append(f"{name}: launched directly")
        launch, direct = bench.made(call)
        if not direct or launch.told != plain.told:
            problems.append(f"after {name}: {'another launch' if direct else 'not direct'}")
    if not hooked:
        problems.append("no hook was called")
    with mock.patch.object(runtime, "debug", True):
        under = [bench.made(new)[0].kernel for _ in range(2)]
    if bench.made(new)[0].kernel in under:
        problems.append("what was compiled for debugging is launched without it")
    problems += _a_changed_global(bench, kernel, third)
    with installed(StubDriver()):
        if bench.made(call)[1]:
            problems.append("launched directly under another driver")
    return problems


def _a_changed_global(bench: Bench, kernel: Any, call: Call) -> list[str]:
    """Triton refuses to launch a kernel whose code read a global that has changed since."""
    namespace = {"_GLOBAL": 1}
    with mock.patch.object(kernel, "used_global_vals", {("_GLOBAL", id(namespace)): (1, namespace)}):
        bench.made(call)
        if not bench.made(call)[1]:
            return ["a global that stays keeps a launch from being direct"]
        namespace["_GLOBAL"] = 2
        try:
            bench.made(call)
        except RuntimeError:
            return []
    return ["a global of the kernel changed, and it was launched"]


def captures(bench: Bench) -> list[str]:
    """Eager calls, a capture and another capture: one form, launched directly, each on counters of its own."""
    call, problems = decode(), []
    firsts = {}
    for told in ((7, None), (7, 5), (7, 6), (8, None)):
        with mock.patch.object(workspace, "_stream_and_capture", lambda device, told=told: told):
            pieces = []
            original = workspace.workspace_for
            with mock.patch("rapid_llm.kernels.paged_decode.workspace_for", lambda *args: pieces.append(original(*args)) or pieces[-1]):  # noqa: B023
                addresses = itertools.count(1 << 20, 1 << 12)
                with mock.patch.object(workspace, "Workspace", _at(addresses, len(firsts))):
                    bench.made(call)
                    launch, direct = bench.made(call)
        if not direct or pieces[0] is not pieces[1]:
            problems.append(f"{told}: not direct, or not on a piece that is kept")
        if launch.arguments[6] != pieces[1].floats_ptr or launch.arguments[8] != pieces[1].counters_ptr:
            problems.append(f"{told}: not on the counters of its piece")
        firsts[told] = launch.arguments[8]
    if len(set(firsts.values())) != len(firsts):
        problems.append(f"counters are shared: {firsts}")
    return problems


def _at(addresses: Iterator[int], place: int) -> Any:
    """Workspaces whose addresses differ, as they would on a device."""
    made = workspace.Workspace
    return lambda floats, counters, capture, *_: made(
        floats, counters, capture, next(addresses) + (place << 24), next(addresses) + (place << 24)
    )


CASES = (every_variant, every_alignment_and_stride, what_decides, what_takes_the_ordinary_path, captures)
MUTANTS: dict[str, Callable[[], Any]] = {
    "alignment": lambda: mock.patch.object(direct_launch, "_alignment", return_value=()),
    "state": lambda: mock.patch.object(direct_launch.Launches, "_is_plain", return_value=True),
    "form": lambda: mock.patch.object(attention, "_call_key", shapes_only),
}


if __name__ == "__main__":
    mutated = MUTANTS[sys.argv[1]] if sys.argv[1:] else contextlib.nullcontext
    chosen = [case for case in CASES if case.__name__ in sys.argv[2:] or not sys.argv[2:]]
    kernels = (paged_decode_kernel, paged_decode_stream_kernel, paged_decode_int8_kernel, paged_decode_int8_stream_kernel)
    print(json.dumps(told_of(chosen, kernels, mutated)))
