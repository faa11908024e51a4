"""Small Triton kernels of the instrument itself: nothing, a wait of a known length, a plain read and a plain copy of memory.

Imported only where there is a CUDA device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

READ_BLOCK = 8192
READ_UNROLL = 4
_READ_WARPS = 16
COPY_BLOCK = 2048
_COPY_WARPS = 4


@triton.jit
def _nothing(out):  # type: ignore[no-untyped-def]
    pass


@triton.jit
def _spin(out, wait_ns):  # type: ignore[no-untyped-def]
    start = globaltimer()
    now = start
    while now - start < wait_ns:
        now = globaltimer()
    tl.store(out, now - start)


@triton.jit  # type: ignore[untyped-decorator]
def _read(source, out, BLOCK: tl.constexpr, UNROLL: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * (BLOCK * UNROLL)
    folded = tl.zeros((BLOCK,), tl.int32)
    for part in tl.static_range(UNROLL):
        folded ^= tl.load(source + first + part * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.xor_sum(folded, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _copy(source, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(source + place).to(out.dtype.element_ty))


def nothing(out: torch.Tensor) -> None:
    """Launches a kernel that does nothing."""
    _nothing[(1,)](out, num_warps=1)


def spin(out: torch.Tensor, wait_ns: int) -> None:
    """Keeps one warp busy until the device's global timer has advanced by `wait_ns`.

    Args:
        out: [1] int64; receives the time that the kernel itself saw pass, in ns.
        wait_ns: At least this long.
    """
    _spin[(1,)](out, wait_ns, num_warps=1)


def read(source: torch.Tensor, out: torch.Tensor) -> Any:
    """Reads every element of `source` once and folds it by exclusive or.

    Args:
        source: [n] int32, n a multiple of READ_BLOCK * READ_UNROLL.
        out: [n / (READ_BLOCK * READ_UNROLL)] int32.
    """
    grid = (source.numel() // (READ_BLOCK * READ_UNROLL),)
    return _read[grid](source, out, READ_BLOCK, READ_UNROLL, num_warps=_READ_WARPS)


def copy(source: torch.Tensor, out: torch.Tensor) -> Any:
    """Writes every element of `source` in its place, or the low byte of it: the plainest kernel that reads and writes these bytes.

    Args:
        source: [n] int16, n a multiple of COPY_BLOCK.
        out: [n] int16 or int8.
    """
    return _copy[(source.numel() // COPY_BLOCK,)](source, out, COPY_BLOCK, num_warps=_COPY_WARPS)
