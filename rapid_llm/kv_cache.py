"""The KV cache of a model: one combined buffer a layer, and a token-level allocator of its rows."""

from __future__ import annotations

from typing import Literal

import torch

from rapid_llm.errors import DTypeError, RapidLLMError, ShapeError

__all__ = ["AllocPath", "KVCacheManager"]

AllocPath = Literal["bump", "run_search", "fragmented"]
"""How an allocation found its rows, see `KVCacheManager.alloc_kvcache_index`."""

_DTYPES = (torch.float16, torch.bfloat16, torch.uint8)
_NEVER = torch.iinfo(torch.int64).max


def _check_count(call: str, name: str, value: int) -> None:
    """Refuses what is no count before anything is changed: bool and float would pass through the arithmetic of the cursor.

    Raises:
        ShapeError: It is no int, or negative.
    """
    if type(value) is not int or value < 0:
        raise ShapeError(f"{call} expected {name} of 0 or more, got {value!r}; pass a plain int.")


class KVCacheManager:
    """Owns the cache rows of all layers: hands them out, counts references, keeps released rows as evictable.

    A row holds one token's K and V of one layer; row r of every layer belongs to the same token. A row is free,
    referenced (reference count above 0), or cached: released with `keep_cached`, unreferenced, contents kept until
    evicted. Reference counts live on the device, the numbers of free and cached rows on the host.

    Not thread-safe: one thread, or one lock around every call.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        block_size: int = 16,
        allocate_kv: bool = True,
    ) -> None:
        """Allocates the buffers; every row is free.

        Args:
            num_rows: Rows a layer, in tokens.
            num_layers: Layers, each with a buffer of its own.
            num_kv_heads, head_dim: Geometry of K, and of V, in a row.
            dtype: fp16, bf16, or uint8 holding e4m3.
            device: Where the buffers and reference counts live.
            block_size: Rows of a block that `alloc_blocks` hands out.
            allocate_kv: False allocates no K/V buffers: an allocator of row numbers alone.

        Raises:
            ShapeError: A size is not a positive int32.
            DTypeError: Another dtype.
        """
        sizes = {"num_rows": num_rows, "num_layers": num_layers, "num_kv_heads": num_kv_heads}
        for name, size in {**sizes, "head_dim": head_dim, "block_size": block_size}.items():
            if type(size) is not int or not 0 < size <= torch.iinfo(torch.int32).max:
                raise ShapeError(f"KVCacheManager expected {name} to be a positive int32, got {size!r}; correct it.")
        if dtype not in _DTYPES:
            raise DTypeError(f"KVCacheManager expected dtype float16, bfloat16, or uint8 for e4m3, got {dtype}; choose one of these.")
        self._num_rows = num_rows
        self._block_size = block_size
        self._num_layers = num_layers
        self._num_kv_heads = num_kv_heads
        self._buffers = [
            torch.empty(num_rows, 2 * num_kv_heads, head_dim, dtype=dtype, device=device) for _ in range(num_layers if allocate_kv else 0)
        ]
        self._all_rows = torch.arange(num_rows, dtype=torch.int32, device=device)
        self._ref_counts = torch.zeros(num_rows, dtype=torch.int32, device=device)
        # 0 where a row is not cached; otherwise the number of its release: the smallest is the oldest.
        self._cached_at = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._num_releases = 0
        self._num_free = num_rows
        self._num_cached = 0
        # Every row from the cursor on is free; None once a row before it may have become free.
        self._cursor: int | None = 0
        self._last_alloc_path: AllocPath | None = None

    @property
    def num_rows(self) -> int:
        """Rows a layer."""
        return self._num_rows

    @property
    def block_size(self) -> int:
        """Rows of a block."""
        return self._block_size

    @property
    def device(self) -> torch.device:
        """Device of the buffers and of every row tensor that is handed out."""
        return self._all_rows.device

    @property
    def num_free_rows(self) -> int:
        """Rows that are neither referenced nor cached."""
        return self._num_free

    @property
    def num_cached_rows(self) -> int:
        """Unreferenced rows whose contents are kept until evicted."""
        return self._num_cached

    @property
    def last_alloc_path(self) -> AllocPath | None:
        """Path of the last successful allocation of at least one row; None before the first, and after `free_all`."""
        return self._last_alloc_path

    def layer_views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V rows of a layer: strided views of its combined buffer [num_rows, 2 * num_kv_heads, head_dim].

        Args:
            layer: 0 to num_layers - 1.

        Returns:
            (k_rows, v_rows), each [num_rows, num_kv_heads, head_dim].

        Raises:
            ShapeError: There is no such layer.
            RapidLLMError: The manager was made with allocate_kv=False.
        """
        if not 0 <= layer < self._num_layers:
            raise ShapeError(f"layer_views expected a layer from 0 to {self._num_layers - 1}, got {layer}; correct it.")
        if not self._buffers:
            raise RapidLLMError("layer_views expected K/V buffers, got allocate_kv=False; construct with True.")
        buffer = self._buffers[layer]
        return buffer[:, : self._num_kv_heads], buffer[:, self._num_kv_heads :]

    def is_free(self, rows: torch.Tensor) -> torch.Tensor:
        """Whether each row is free (a cached row is not): bool, shape of `rows`.

        Args:
            rows: int32 or int64, any shape, from 0 to num_rows - 1.

        Raises:
            ValueError: A row is foreign.
        """
        flat = self._checked("is_free", rows)
        self._raise_for("is_free", "is not a row of this cache", rows, self._is_foreign(flat))
        return ((self._ref_counts[flat] == 0) & (self._cached_at[flat] == 0)).view(rows.shape)

    def ref_counts(self) -> torch.Tensor:
        """Copy of the reference counts: int32, [num_rows]."""
        return self._ref_counts.clone()

    def alloc_kvcache_index(self, num_tokens: int) -> torch.Tensor | None:
        """Takes one row a token; each then has one reference.

        Three paths, of which `last_alloc_path` names the one taken:

        - bump: until a release frees rows, everything from the cursor on is free. The rows are a slice of a table made
          beforehand and their counts are set on the device: one launch, no host synchronisation.
        - run_search: afterwards, the first run of that many neighbouring free rows is searched on the device, and the
          host waits for its place (`nonzero`, `item`). This path waits because a run is what keeps a sequence's rows
          adjacent, and its cost is a row of its own among the measured ones.
        - fragmented: no run is long enough, so the lowest free rows are taken wherever they are; it costs the search
          and a second wait.

        Where too few rows are free, the oldest cached rows are evicted first, as many as are lacking.

        Args:
            num_tokens: How many; 0 gives an empty tensor.

        Returns:
            int32, [num_tokens], distinct rows, or None where free and cached rows together are too few: then nothing
            has changed. The tensor may be a view of the manager's own table: read it, do not write to it.

        Raises:
            ValueError: num_tokens is negative.
        """
        _check_count("alloc_kvcache_index", "num_tokens", num_tokens)
        if num_tokens == 0:
            return self._all_rows[:0]
        if num_tokens > self._num_free + self._num_cached:
            return None
        if num_tokens > self._num_free:
            self.evict(num_tokens - self._num_free)
        if self._cursor is not None and self._cursor + num_tokens <= self._num_rows:
            return self._bump(self._cursor, num_tokens)
        self._cursor = None
        free = (self._ref_counts == 0) & (self._cached_at == 0)
        start = self._first_run(free, num_tokens)
        if start is not None:
            rows = self._all_rows[start : start + num_tokens]
            self._last_alloc_path = "run_search"
        else:
            rows = free.nonzero().view(-1)[:num_tokens].int()
            self._last_alloc_path = "fragmented"
        self._take(rows)
        return rows

    def alloc_blocks(self, num_blocks: int) -> torch.Tensor | None:
        """Takes whole blocks of `block_size` neighbouring rows, aligned to it; each row then has one reference.

        Before a release has freed rows the next aligned blocks are taken without a host synchronisation ("bump").
        Otherwise ("run_search") the free blocks are searched; where too few are free, blocks of free and cached rows
        follow in the order of their newest cached row, oldest first, and their cached rows are evicted. A block with a
        referenced row is never taken.

        Args:
            num_blocks: How many; 0 gives an empty tensor.

        Returns:
            int32, [num_blocks, block_size], distinct rows, or None where there are too few such blocks: then nothing
            has changed. As of `alloc_kvcache_index`, read it, do not write to it.

        Raises:
            ValueError: num_blocks is negative.
        """
        _check_count("alloc_blocks", "num_blocks", num_blocks)
        size = self._block_size
        if num_blocks == 0:
            return self._all_rows[:0].view(0, size)
        if num_blocks * size > self._num_free + self._num_cached:
            return None
        if self._cursor is not None:
            first = -(-self._cursor // size) * size
            if first + num_blocks * size <= self._num_rows:
                return self._bump(first, num_blocks * size).view(num_blocks, size)
        whole = self._num_rows // size * size
        newest = self._cached_at.masked_fill(self._ref_counts > 0, _NEVER)[:whole].view(-1, size).amax(1)
        chosen = newest.sort(stable=True).indices[:num_blocks]
        if chosen.numel() < num_blocks:
            return None
        rows = (self._all_rows[:whole].view(-1, size))[chosen]
        flat = rows.view(-1).long()
        worst, num_evicted = torch.stack([newest[chosen[-1]], (self._cached_at[flat] > 0).sum()]).tolist()
        if worst == _NEVER:
            return None
        self._cached_at[flat] = 0
        self._num_cached -= num_evicted
        self._num_free += num_evicted
        self._cursor = None
        self._last_alloc_path = "run_search"
        self._take(rows.view(-1))
        return rows

    def add_ref(self, rows: torch.Tensor) -> None:
        """Adds a reference to each row, as often as it is named; a cached row is in use again.

        The host waits for the check.

        Args:
            rows: int32 or int64, any shape.

        Raises:
            ValueError: A row is foreign or free; then nothing has changed.
        """
        flat = self._checked("add_ref", rows)
        if flat.numel() == 0:
            return
        foreign = self._is_foreign(flat)
        added = self._occurrences(flat)
        idle = (added > 0) & (self._ref_counts == 0)
        cached = idle & (self._cached_at > 0)
        any_foreign, num_idle, num_revived = torch.stack([foreign.sum(), idle.sum(), cached.sum()]).tolist()
        if any_foreign:
            self._raise_for("add_ref", "is not a row of this cache", rows, foreign)
        if num_idle != num_revived:
            self._raise_for("add_ref", "is free, allocate it instead", rows, (idle & ~cached)[flat])
        self._ref_counts += added
        self._cached_at.masked_fill_(cached, 0)
        self._num_cached -= num_revived

    def release(self, rows: torch.Tensor, *, keep_cached: bool = False) -> None:
        """Takes a reference from each row, as often as it is named; a row without references left is free, or cached.

        Freeing a row invalidates the bump cursor until `free_all`. The host waits for the check.

        Args:
            rows: int32 or int64, any shape.
            keep_cached: Keep the contents of rows without references until they are evicted, in the order of release.

        Raises:
            ValueError: A row is foreign or has fewer references than are released; then nothing has changed.
        """
        flat = self._checked("release", rows)
        if flat.numel() == 0:
            return
        foreign = self._is_foreign(flat)
        removed = self._occurrences(flat)
        excess = removed > self._ref_counts
        done = (removed > 0) & (removed == self._ref_counts)
        any_foreign, any_excess, num_done = torch.stack([foreign.sum(), excess.sum(), done.sum()]).tolist()
        if any_foreign:
            self._raise_for("release", "is not a row of this cache", rows, foreign)
        if any_excess:
            self._raise_for("release", "has fewer references than are released", rows, excess[flat])
        self._ref_counts -= removed
        if keep_cached:
            number = torch.arange(1, flat.numel() + 1, device=flat.device) + self._num_releases
            released_at = torch.zeros_like(self._cached_at).scatter_reduce_(0, flat, number, "amax")
            self._cached_at = torch.where(done, released_at, self._cached_at)
            self._num_releases += flat.numel()
            self._num_cached += num_done
        else:
            self._num_free += num_done
            if num_done:
                self._cursor = None

    def evict(self, num_rows: int) -> int:
        """Frees cached rows, the oldest release first; a referenced row is never taken.

        Freeing a row invalidates the bump cursor until `free_all`.

        Args:
            num_rows: At most so many.

        Returns:
            How many were freed.

        Raises:
            ValueError: num_rows is negative.
        """
        _check_count("evict", "num_rows", num_rows)
        count = min(num_rows, self._num_cached)
        if count == 0:
            return 0
        age = self._cached_at.masked_fill(self._cached_at == 0, _NEVER)
        self._cached_at[age.topk(count, largest=False).indices] = 0
        self._num_cached -= count
        self._num_free += count
        self._cursor = None
        return count

    def free_all(self) -> None:
        """Frees every row, referenced or cached, and restores the bump cursor."""
        self._ref_counts.zero_()
        self._cached_at.zero_()
        self._num_free = self._num_rows
        self._num_cached = 0
        self._cursor = 0
        self._last_alloc_path = None

    def _bump(self, first: int, count: int) -> torch.Tensor:
        self._cursor = first + count
        self._num_free -= count
        self._ref_counts[first : first + count] = 1
        self._last_alloc_path = "bump"
        return self._all_rows[first : first + count]

    def _take(self, rows: torch.Tensor) -> None:
        self._ref_counts[rows.long()] = 1
        self._num_free -= rows.numel()

    @staticmethod
    def _first_run(free: torch.Tensor, length: int) -> int | None:
        """Where the first run of `length` free rows starts; waits for the device."""
        up_to = torch.nn.functional.pad(free.cumsum(0), (1, 0))
        starts = (up_to[length:] - up_to[:-length] == length).nonzero()
        return int(starts[0].item()) if starts.numel() else None

    def _checked(self, call: str, rows: torch.Tensor) -> torch.Tensor:
        """`rows` flat and int64."""
        if not isinstance(rows, torch.Tensor) or rows.dtype not in (torch.int32, torch.int64):
            got = str(rows.dtype) if isinstance(rows, torch.Tensor) else type(rows).__name__
            raise DTypeError(f"{call} expected rows as an int32 or int64 tensor, got {got}; pass what was allocated.")
        if rows.device != self.device:
            raise ShapeError(f"{call} expected rows on {self.device}, got {rows.device}; move them there.")
        return rows.reshape(-1).long()

    def _is_foreign(self, flat: torch.Tensor) -> torch.Tensor:
        return (flat < 0) | (flat >= self._num_rows)

    def _occurrences(self, flat: torch.Tensor) -> torch.Tensor:
        """How often each row is named; a foreign one counts as its nearest neighbour, for the caller to refuse."""
        ones = torch.ones_like(flat, dtype=torch.int32)
        return torch.zeros_like(self._ref_counts).index_add_(0, flat.clamp(0, self._num_rows - 1), ones)

    @staticmethod
    def _raise_for(call: str, what: str, rows: torch.Tensor, wrong: torch.Tensor) -> None:
        """Raises where an element of `wrong` is set, and names the first of its rows."""
        named = rows.reshape(-1)[wrong]
        if named.numel():
            more = f" (and {named.numel() - 1} more)" if named.numel() > 1 else ""
            raise ShapeError(f"{call} expected rows that were allocated here, but row {int(named[0])}{more} {what}; nothing was changed.")
