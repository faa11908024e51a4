"""Shapes of paged decode that are measured outside of the suites, and their inputs: a pool, tables of rows and of blocks, references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asv_bench import kv_pool, verify
from asv_bench.lazy import LazyModule
from asv_bench.timing import Call

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

ops: Any = LazyModule("rapid_llm.kernels.ops")

BLOCK_SIZE = 16
"""Rows of a block, where a shape names no other."""

_HEADS, _QUICK_HEADS = (32, 8, 128), (4, 2, 16)
"""num_q_heads, num_kv_heads, head_dim."""
_MOST_SETS = 64


@dataclass(frozen=True)
class Cell:
    """A shape with a cache dtype.

    Attributes:
        label: Such as "32x8k float16".
        seq_lens: In tokens.
        kv_dtype: "float16", "bfloat16" or "e4m3".
        heads: num_q_heads, num_kv_heads, head_dim.
    """

    label: str
    seq_lens: tuple[int, ...]
    kv_dtype: str
    heads: tuple[int, int, int] = _HEADS

    @property
    def q_dtype(self) -> torch.dtype:
        """That of the cache; fp16 for an e4m3 one."""
        return torch.bfloat16 if self.kv_dtype == "bfloat16" else torch.float16

    @property
    def sizes(self) -> dict[str, int]:
        """As a request's."""
        heads = dict(zip(("num_q_heads", "num_kv_heads", "head_dim"), self.heads, strict=True))
        return {"batch": len(self.seq_lens), "max_seq_len": max(self.seq_lens), **heads}

    @property
    def row_elements(self) -> int:
        """Elements of K and V of a token."""
        _, num_kv_heads, head_dim = self.heads
        return 2 * num_kv_heads * head_dim


_SHAPES: dict[str, tuple[int, ...]] = {
    "32x32k": (32768,) * 32,
    "1x1k": (1024,),
    "ragged 32": tuple(1024 * (1 + (7 * i) % 32) for i in range(32)),
    "1x8k": (8192,),
    "1x32k": (32768,),
    "8x8k": (8192,) * 8,
    "128x8k": (8192,) * 128,
    "128x1k": (1024,) * 128,
    "8x1k": (1024,) * 8,
    "32x8k": (8192,) * 32,
    "8x32k": (32768,) * 8,
}
_QUICK_SHAPES: dict[str, tuple[int, ...]] = {"1x20": (20,), "ragged 3": (40, 0, 17)}


def cells(*, quick: bool) -> list[Cell]:
    """Every shape with both dtypes, in the order in which they are measured."""
    shapes = _QUICK_SHAPES if quick else _SHAPES
    heads = _QUICK_HEADS if quick else _HEADS
    return [Cell(f"{name} {dtype}", lens, dtype, heads) for name, lens in shapes.items() for dtype in ("float16", "e4m3")]


@dataclass
class Prepared:
    """A cell's inputs on the device.

    Attributes:
        cell: Which.
        pool: Rows, row tables and lengths.
        q: [batch, num_q_heads, head_dim].
        tables: By block size, one [batch, max_blocks] int32 table a set; those of 1 are the pool's row tables.
        outs: [sets, batch, num_q_heads, head_dim].
        expected: By block size, float64 of the shape of `outs`.
        moved: Bytes that a call moves, at a block size of 1.
    """

    cell: Cell
    pool: kv_pool.PagedPool
    q: torch.Tensor
    tables: dict[int, list[torch.Tensor]]
    outs: torch.Tensor
    expected: dict[int, torch.Tensor]
    moved: float

    def rows(self, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the pool's rows that are whole blocks."""
        whole = self.pool.k_rows.shape[0] // block_size * block_size
        return self.pool.k_rows[:whole], self.pool.v_rows[:whole]

    def request(self, block_size: int) -> Any:
        """That of the public call."""
        return ops.decode_request(self.q, *self.rows(block_size), self.tables[block_size][0], self.pool.seq_lens, block_size)

    def calls(self, block_size: int, backend: str = "triton") -> list[Call]:
        """The public call, one a set."""
        pool = self.pool
        k_rows, v_rows = self.rows(block_size)

        def call(table: torch.Tensor, out: torch.Tensor) -> Call:
            return lambda: ops.paged_decode_attention(
                self.q, k_rows, v_rows, table, pool.seq_lens, out=out, block_size=block_size, backend=backend, **pool.scales
            )

        return [call(table, out) for table, out in zip(self.tables[block_size], self.outs, strict=True)]

    def verified(self, calls: Sequence[Call], block_size: int) -> float:
        """Makes each call once over poison and compares; raises `VerificationError`."""
        self.poison()
        for call in calls:
            call()
        return self.check(block_size)

    def poison(self) -> None:
        """Makes all outputs wrong."""
        self.outs.fill_(float("nan"))

    def check(self, block_size: int) -> float:
        """Compares all outputs; the largest absolute difference, or a `VerificationError`."""
        return verify.check_decode(self.outs, self.expected[block_size], kv_dtype=self.cell.kv_dtype)

    def relative_error(self, block_size: int) -> float:
        """Root mean square of what the outputs are off, over that of the reference."""
        expected = self.expected[block_size]
        return float((self.outs.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def prepare(cell: Cell, device: torch.device, block_sizes: Sequence[int] = (1, BLOCK_SIZE)) -> Prepared:
    """Builds pool, tables and references of a cell.

    Args:
        cell: Which.
        device: Where.
        block_sizes: Of the tables.
    """
    tokens = sum(cell.seq_lens)
    num_q_heads, num_kv_heads, head_dim = cell.heads
    kv_bytes = tokens * cell.row_elements * kv_pool.pool_dtype(cell.kv_dtype).itemsize
    num_sets = min(_MOST_SETS, kv_pool.num_sets_for(kv_bytes, device))
    heads: dict[str, Any] = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
    pool = kv_pool.paged_pool(seq_lens=list(cell.seq_lens), kv_dtype=cell.kv_dtype, device=device, num_sets=num_sets, **heads)
    batch, width = pool.row_tables[0].shape
    tables = {size: pool.row_tables if size == 1 else _block_tables(pool, size, batch, width) for size in block_sizes}
    q = kv_pool.random_values((batch, num_q_heads, head_dim), cell.q_dtype, device, seed=7)

    def expected(size: int) -> torch.Tensor:
        inside = torch.arange(size, dtype=torch.int32, device=device)
        as_rows = [(table[:, :, None] * size + inside).flatten(1) for table in tables[size]]
        scales = pool.factors
        return torch.stack([verify.decode_reference(q, pool.k_rows, pool.v_rows, rows, pool.seq_lens, **scales) for rows in as_rows])

    outs = torch.empty(num_sets, *q.shape, dtype=q.dtype, device=device)
    moved = float(kv_bytes + 4 * (tokens + batch) + 2 * q.numel() * q.element_size())
    return Prepared(cell, pool, q, tables, outs, {size: expected(size) for size in block_sizes}, moved)


def _block_tables(pool: kv_pool.PagedPool, size: int, batch: int, width: int) -> list[torch.Tensor]:
    """Scattered blocks for all sets; where the pool has too few for them and for what no token is in, a block is taken again."""
    max_blocks, blocks = -(-width // size), pool.k_rows.shape[0] // size
    device = pool.k_rows.device
    scattered = torch.randperm(blocks, generator=torch.Generator().manual_seed(5)).to(device).int()
    a_set = torch.arange(batch * max_blocks, device=device)
    return [scattered[(i * len(a_set) + a_set) % blocks].view(batch, max_blocks) for i in range(len(pool.row_tables))]
