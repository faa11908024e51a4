"""The pool fixture: KV caches in the state in which a server leaves them.

A freshly built tensor has neither the state nor the layout of a server's cache; `paged_pool` has, and this is why each property stays.
Figures are of one NVIDIA H200, from the finding of docs/findings-h200.md that is named; a test holds them against it.

- *Fragmented row table.* The rows come from `KVCacheManager` after releases have scattered them, and sequences take them in no
  particular order. `order="contiguous"` builds the other extreme. Scattered rows cost 5.7 % with one sequence of 32k tokens and 0.6 %
  with 64 of 8k (finding 3): a bound on what paging can cost, and a number that a contiguous pool would make look better than it is.
- *Combined per-layer buffer.* K and V are strided views of one buffer, as `KVCacheManager.layer_views` hands them to
  `rapid_llm.modules.attention`; it is here because it is what runs. `layout="split"` allocates them apart, which is 10.8 % slower with
  one sequence of 32k and 8.9 % with one KV head, but 0.8 % faster with 64 sequences of 8k (finding 4). No layout wins everywhere, so the
  split rows stay as the guard.
- *A pool of at least eight times the L2*, for room: rows have to be scattered among free ones, and working sets may not share any. It
  neither keeps rows out of the cache nor makes a row bound by bandwidth: over pools of 1, 8 and 32 times the L2 the same decode takes
  24.19, 24.16 and 24.22 us and stays at 29.0 % of peak (finding 5). What is attended decides that.
- *e4m3 through the real quantiser*: bytes in a uint8 container with scales on the caller's side, not a cast. It is here for the check,
  since a cast has the scale 1 and hides a kernel that forgets a scale; the time moves by 0.4 %, 271.19 to 272.31 us (finding 12).
- *Heads of different magnitude*, as in models: V is smaller than K, so that their e4m3 scales differ, and the last head of V is so small
  that its e4m3 bytes are subnormal. An int8 pool, filled by the library's own write, has a scale a head, and half of its K heads are half
  as large. A kernel that mistakes a scale or flushes subnormals is then wrong where the check looks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asv_bench import verify
from asv_bench.lazy import LazyModule
from asv_bench.quiet import l2_bytes

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

ops: Any = LazyModule("rapid_llm.kernels.ops")
kv_cache: Any = LazyModule("rapid_llm.kv_cache")

PROTOCOL = "p2"
"""Version of the fixture: raise it with any change that can move a number."""

_L2_FACTOR = 8
_PAGE_BYTES = 2 << 20
_PAGE_SHIFT = 17 * 256  # so that the tensors do not all lie at the same place of their page
_ALIGNMENT = 256
_FILL_CHUNK_ROWS = 1 << 16
CHECKED_FILL_ROWS = 64
_V_MAGNITUDE = 0.25
_OTHER_K_MAGNITUDE = 0.5
_SMALL_HEAD_MAGNITUDE = 2.0**-13


@dataclass
class PagedPool:
    """A filled KV pool and the row tables that attend it.

    Attributes:
        k_rows, v_rows: [num_rows, num_kv_heads, head_dim] views; uint8 holds e4m3 bytes.
        row_tables: One [batch, max_seq_len] int32 table a working set; the sets share no rows.
        seq_lens: [batch], int32, in tokens.
        k_scale, v_scale: Scales of an e4m3 pool; of an int8 one fp32 [num_kv_heads]; None otherwise.
        free_rows: Rows that no table uses, int32, in random order.
        used_rows: Rows of all tables, int32.
    """

    k_rows: torch.Tensor
    v_rows: torch.Tensor
    row_tables: list[torch.Tensor]
    seq_lens: torch.Tensor
    k_scale: float | torch.Tensor | None
    v_scale: float | torch.Tensor | None
    free_rows: torch.Tensor
    used_rows: torch.Tensor

    @property
    def scales(self) -> dict[str, Any]:
        """Keyword arguments of the public calls for this pool's scales; empty where it has none."""
        return {} if self.k_scale is None or self.v_scale is None else {"k_scale": self.k_scale, "v_scale": self.v_scale}

    @property
    def factors(self) -> dict[str, Any]:
        """As `scales`, for a reference: 1 where it has none."""
        return {"k_scale": 1.0, "v_scale": 1.0, **self.scales}


def pool_dtype(kv_dtype: str) -> torch.dtype:
    """The container dtype of a pool: e4m3 lives in uint8."""
    return {"float16": torch.float16, "bfloat16": torch.bfloat16, "e4m3": torch.uint8, "int8": torch.int8}[kv_dtype]


def num_sets_for(bytes_a_set: float, device: torch.device, *, least: int = 1, most: int = 256) -> int:
    """How many working sets a rotation needs, so that none is still in the L2 when its turn comes again.

    Args:
        bytes_a_set: Bytes of device memory that one call touches.
        device: Where they lie; on a CPU the answer is 1.
        least: On a device at least so many, for rows whose time depends on where in memory a set lies.
        most: Never more; the timer flushes where this is too few.
    """
    if device.type != "cuda":
        return 1
    return max(least, min(most, math.ceil(4 * l2_bytes(device) / bytes_a_set)))


def spread(count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """`count` uninitialised tensors; on a device, small ones lie in a memory page of their own each.

    A short kernel waits for its first loads, and how long that takes depends on which page they lie in: on an H200 a write of one row
    read 1.17, 1.19 or 1.22 us, the same all through a process, another in the next. Over many pages the mean is the same each time.

    Args:
        count, shape, dtype, device: As the tensors are wanted.
    """
    size = math.prod(shape) * dtype.itemsize
    pitch = -(-size // _ALIGNMENT) * _ALIGNMENT
    if device.type == "cuda" and size < _PAGE_BYTES:
        pitch = _PAGE_BYTES + _PAGE_SHIFT
    memory = torch.empty(count * pitch, dtype=torch.uint8, device=device)
    return [memory[i * pitch : i * pitch + size].view(dtype).view(shape) for i in range(count)]


def paged_pool(
    *,
    seq_lens: list[int],
    num_kv_heads: int,
    head_dim: int,
    kv_dtype: str,
    device: torch.device,
    layout: str = "combined",
    order: str = "fragmented",
    num_sets: int = 1,
    spare_rows: int = 0,
    l2_factor: float = _L2_FACTOR,
    quantiser: str = "real",
    occupied_rows: int = 0,
    seed: int = 0,
) -> PagedPool:
    """Builds a filled pool.

    Args:
        seq_lens: Tokens of each sequence.
        num_kv_heads, head_dim: Geometry of a cache row.
        kv_dtype: "float16", "bfloat16", "e4m3" or "int8".
        device: Where it lives.
        layout: "combined" (K and V views of one buffer) or "split".
        order: "fragmented" (as the allocator hands rows out after releases) or "contiguous".
        num_sets: Disjoint row tables to build.
        spare_rows: Rows to leave free, for writes.
        l2_factor: Least size of the pool in units of the L2. From 8 on it has twice the rows in use at least, below only those in use.
        quantiser: "real" (the library's, with a scale), or "cast" (torch's plain cast, scale 1), for an e4m3 pool.
        occupied_rows: Rows at the start of the pool that others hold, not filled: they push these rows up, past 2**31 elements where
            that is wanted.
        seed: Of the values and of the scatter.
    Raises:
        ValueError: An unknown layout, order or quantiser.
        VerificationError: The quantiser's bytes are wrong.
        NotImplementedError: An int8 pool of a commit that has none.
    """
    known = layout in ("combined", "split") and order in ("fragmented", "contiguous") and quantiser in ("real", "cast")
    if not known:
        raise ValueError(
            "paged_pool knows the layouts combined and split, the orders fragmented and contiguous, the quantisers real and cast, not"
            f" {layout}/{order}/{quantiser}"
        )
    generator = torch.Generator(device="cpu").manual_seed(seed)
    used = sum(seq_lens) * num_sets + spare_rows
    row_bytes = 2 * num_kv_heads * head_dim * pool_dtype(kv_dtype).itemsize
    slack = 2 if l2_factor >= _L2_FACTOR else 1
    num_rows = occupied_rows + max(slack * used, math.ceil(l2_factor * l2_bytes(device) / row_bytes))
    if kv_dtype == "int8" and not hasattr(ops, "int8_scales"):
        raise NotImplementedError("this commit has no int8 cache")
    manager = kv_cache.KVCacheManager(
        num_rows,
        num_layers=1,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=pool_dtype(kv_dtype),
        device=device,
        allocate_kv=layout == "combined",
    )
    if layout == "combined":
        k_rows, v_rows = manager.layer_views(0)
    else:
        k_rows, v_rows = (torch.empty(num_rows, num_kv_heads, head_dim, dtype=pool_dtype(kv_dtype), device=device) for _ in range(2))
    k_scale: float | torch.Tensor | None
    v_scale: float | torch.Tensor | None
    if kv_dtype == "int8":
        k_scale, v_scale = _fill_int8(k_rows[occupied_rows:], v_rows[occupied_rows:], seed)
    else:
        k_scale = _fill(k_rows[occupied_rows:], seed + 1, torch.ones(num_kv_heads, device=device), quantiser)
        v_scale = _fill(v_rows[occupied_rows:], seed + 2, _v_magnitudes(num_kv_heads, device), quantiser)
    rows = _take_rows(manager, used, occupied_rows, order, generator)
    per_set = sum(seq_lens)
    tables = [_table(rows[i * per_set : (i + 1) * per_set], seq_lens) for i in range(num_sets)]
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    return PagedPool(k_rows, v_rows, tables, lengths, k_scale, v_scale, rows[num_sets * per_set :], rows[: num_sets * per_set])


def random_values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Normal values from a seeded generator of the device."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def _take_rows(manager: Any, count: int, occupied: int, order: str, generator: torch.Generator) -> torch.Tensor:
    """`count` rows from the manager, behind the `occupied` ones, in the state that `order` names."""
    rows: torch.Tensor | None
    if order == "contiguous":
        manager.alloc_kvcache_index(occupied)
        rows = manager.alloc_kvcache_index(count)
    else:
        ours = manager.alloc_kvcache_index(manager.num_rows)[occupied:]
        shuffled = torch.randperm(ours.numel(), generator=generator).to(ours.device)
        manager.release(ours[shuffled[: max(count, ours.numel() // 2)]])
        rows = manager.alloc_kvcache_index(count)
    if rows is None:
        raise RuntimeError(f"paged_pool: the manager of {manager.num_rows} rows could not serve {count}")
    if order == "contiguous":
        return rows
    return rows[torch.randperm(count, generator=generator).to(rows.device)]


def _table(rows: torch.Tensor, seq_lens: list[int]) -> torch.Tensor:
    """Row table of sequences that take `rows` one after the other; entries past a length repeat row 0."""
    table = torch.zeros(len(seq_lens), max(seq_lens, default=0), dtype=torch.int32, device=rows.device)
    start = 0
    for b, length in enumerate(seq_lens):
        table[b, :length] = rows[start : start + length]
        start += length
    return table


def _v_magnitudes(num_kv_heads: int, device: torch.device) -> torch.Tensor:
    magnitudes = torch.full((num_kv_heads,), _V_MAGNITUDE, device=device)
    if num_kv_heads > 1:
        magnitudes[-1] = _SMALL_HEAD_MAGNITUDE
    return magnitudes


def _fill(pool: torch.Tensor, seed: int, magnitudes: torch.Tensor, quantiser: str) -> float | None:
    """Fills a view with normal values times the magnitude of their head, by the real quantiser for e4m3; returns the scale or None."""
    scale: float | None = None
    for start in range(0, pool.shape[0], _FILL_CHUNK_ROWS):
        part = pool[start : start + _FILL_CHUNK_ROWS]
        values = _values(part, seed + start, magnitudes)
        if pool.dtype == torch.uint8 and quantiser == "cast":
            scale = 1.0
            part.copy_(values.to(torch.float8_e4m3fn).view(torch.uint8))
        elif pool.dtype == torch.uint8:
            if scale is None:
                scale = ops.e4m3_scale(values)
            part.copy_(ops.quantize_e4m3(values, scale))
            head = slice(0, CHECKED_FILL_ROWS)
            verify.check_e4m3(part[head], values[head], scale, what="pool fixture, quantiser")
        else:
            part.copy_(values)
    return scale


def _fill_int8(k_rows: torch.Tensor, v_rows: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Fills both views as `_fill` does, by the library's own write; gives the scales of K and V, each of the first rows' heads."""
    k_magnitudes = torch.ones(k_rows.shape[1], device=k_rows.device)
    k_magnitudes[1::2] = _OTHER_K_MAGNITUDE
    v_magnitudes = _v_magnitudes(v_rows.shape[1], v_rows.device)
    scales: tuple[torch.Tensor, ...] = ()
    for start in range(0, k_rows.shape[0], _FILL_CHUNK_ROWS):
        parts = [rows[start : start + _FILL_CHUNK_ROWS] for rows in (k_rows, v_rows)]
        values = [_values(parts[0], seed + 1 + start, k_magnitudes), _values(parts[1], seed + 2 + start, v_magnitudes)]
        scales = scales or tuple(map(ops.int8_scales, values))
        slots = torch.arange(parts[0].shape[0], dtype=torch.int32, device=k_rows.device)
        head = slice(0, CHECKED_FILL_ROWS)
        if k_rows.device.type != "cuda":
            # On a CPU all but the rows that are checked by torch: Triton's interpreter, where it serves, would take seconds for all.
            ops.kv_write(*values, slots, *parts, k_scale=scales[0], v_scale=scales[1], backend="torch")
            slots = slots[head]
        written = [value[: len(slots)] for value in values]
        ops.kv_write(*written, slots, *parts, k_scale=scales[0], v_scale=scales[1])
        for part, value, scale in zip(parts, values, scales, strict=True):
            verify.check_int8(part[head], value[head], scale, what="pool fixture, quantiser")
    return scales[0], scales[1]


def _values(part: torch.Tensor, seed: int, magnitudes: torch.Tensor) -> torch.Tensor:
    """fp16 normal values of the shape of `part`, times the magnitude of their head."""
    return random_values(tuple(part.shape), torch.float16, part.device, seed) * magnitudes[:, None].to(torch.float16)
