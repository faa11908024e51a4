# mypy: disable-error-code="no-untyped-call,untyped-decorator,no-untyped-def"
"""A kernel with one fault for each tool of compute-sanitizer: `python -m tests.kernels.broken TOOL`. A tool that finds nothing here is
not looking, and what it says of other kernels is worth nothing."""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

_THREADS = 128
_FAR = 1 << 24


@triton.jit
def store_outside_kernel(x_ptr, distance, BLOCK: tl.constexpr):
    """For memcheck: writes behind its tensor."""
    lane = tl.arange(0, BLOCK)
    tl.store(x_ptr + distance + lane, lane)


@triton.jit
def read_unwritten_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """For initcheck: reads what nobody wrote."""
    lane = tl.arange(0, BLOCK)
    tl.store(out_ptr + lane, tl.load(x_ptr + lane))


@triton.jit
def race_kernel(out_ptr, BLOCK: tl.constexpr):
    """For racecheck: all threads store a value of their own at one place of shared memory, which the sum over the warps takes."""
    lane = tl.arange(0, BLOCK)
    stored = tl.inline_asm_elementwise(
        "{ st.shared.u32 [global_smem], $1; mov.u32 $0, $1; }", constraints="=r,r", args=[lane], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(out_ptr, tl.sum(stored, 0))


def run(tool: str) -> None:
    """Launches the kernel of that tool.

    Raises:
        KeyError: There is none for it.
    """
    x = torch.empty(_THREADS, dtype=torch.int32, device="cuda")
    out = torch.zeros(_THREADS, dtype=torch.int32, device="cuda")
    {
        "memcheck": lambda: store_outside_kernel[(1,)](out, _FAR, BLOCK=_THREADS),
        "initcheck": lambda: read_unwritten_kernel[(1,)](x, out, BLOCK=_THREADS),
        "racecheck": lambda: race_kernel[(1,)](out, BLOCK=_THREADS),
    }[tool]()
    torch.cuda.synchronize()


if __name__ == "__main__":
    run(sys.argv[1])
