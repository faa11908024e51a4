"""The KV cache of a model: one combined buffer a layer, and a token-level allocator of its rows whose state is on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from rapid_llm.errors import DTypeError, RapidLLMError, ShapeError
from rapid_llm.free_runs import Rows
from rapid_llm.row_checks import check_count, flat_rows, raise_for
from rapid_llm.row_search import AllocPath, RowSearch
from rapid_llm.staged_rows import StagedRows, uploaded

__all__ = ["AllocPath", "KVCacheManager"]

_DTYPES = (torch.float16, torch.bfloat16, torch.uint8, torch.int8)
_NEVER = np.iinfo(np.int64).max


class KVCacheManager:
    """Owns the cache rows of all layers: hands them out, counts references, keeps released rows as evictable.

    A row holds one token's K and V of one layer; row r of every layer belongs to the same token. A row is free,
    referenced (reference count above 0), or cached: released with `keep_cached`, unreferenced, contents kept until
    evicted. All of this is known to the host: an allocation never waits for the device. What takes row tensors (`add_ref`,
    `release`, `is_free`) does, for their values.

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
            dtype: fp16, bf16, uint8 holding e4m3, or int8.
            device: Where the buffers and the row tensors live.
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
            raise DTypeError(f"KVCacheManager expected dtype float16, bfloat16, uint8 for e4m3, or int8, got {dtype}; choose one of these.")
        self._num_rows = num_rows
        self._block_size = block_size
        self._num_layers = num_layers
        self._num_kv_heads = num_kv_heads
        self._buffers = [
            torch.empty(num_rows, 2 * num_kv_heads, head_dim, dtype=dtype, device=device) for _ in range(num_layers if allocate_kv else 0)
        ]
        self._all_rows = torch.arange(num_rows, dtype=torch.int32, device=device)
        self._num_releases = 0
        self._num_free = num_rows
        self._num_cached = 0
        # Every row from the cursor on is free; None once a row before it may have become free.
        self._cursor: int | None = 0
        self._last_alloc_path: AllocPath | None = None
        self._init_state()

    def _init_state(self) -> None:
        self._refs = np.zeros(self._num_rows, np.int32)
        # 0 where a row is not cached; otherwise the number of its release: the smallest is the oldest.
        self._released_at = np.zeros(self._num_rows, np.int64)
        self._staged = StagedRows(self._all_rows.device)
        # None while the cursor holds, and where the search has to begin anew.
        self._search: RowSearch | None = None
        self._last_count = 0

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
        flat, numbers = self._numbers("is_free", rows)
        raise_for("is_free", "is not a row of this cache", flat, self._foreign(numbers))
        free = (self._refs[numbers] == 0) & (self._released_at[numbers] == 0)
        return torch.from_numpy(free).to(rows.device).view(rows.shape)

    def ref_counts(self) -> torch.Tensor:
        """Copy of the reference counts: int32, [num_rows]."""
        return torch.from_numpy(self._refs.copy()).to(self.device)

    def alloc_kvcache_index(self, num_tokens: int) -> torch.Tensor | None:
        """Takes one row a token; each then has one reference.

        Three paths, of which `last_alloc_path` names the one taken:

        - bump: until a release frees rows, everything from the cursor on is free.
        - run_search: afterwards, a run of that many neighbouring free rows, which keeps a sequence's rows adjacent; see
          `rapid_llm.free_runs` for which.
        - fragmented: no run is long enough, so scattered rows are taken, the lowest first. They were uploaded some hundreds at a time
          ahead (`rapid_llm.staged_rows`); a call that finds too few of them uploads anew.

        In each the state is the host's: nothing waits for the device, and what is returned is a view of a table on it.

        Each `release` searches ahead for an allocation of as many rows as were last asked for (`rapid_llm.row_search`), which costs the
        release a short search. Only the first allocation after a release, of that size, finds its rows ready. One of another size, a
        second one, and one that has to evict, to upload or to search long are searched for when they are asked, and cost several times
        as much; so does the first after `evict` and `alloc_blocks`. The rows are the same either way.

        Where too few rows are free, the oldest cached rows are evicted first, as many as are lacking.

        Args:
            num_tokens: How many; 0 gives an empty tensor.

        Returns:
            int32, [num_tokens], distinct rows, or None where free and cached rows together are too few: then nothing
            has changed. The tensor may be a view of the manager's own table: read it, do not write to it.

        Raises:
            ValueError: num_tokens is negative.
            RapidLLMError: Rows would have to be uploaded while a CUDA graph is captured; then none is taken.
        """
        check_count("alloc_kvcache_index", "num_tokens", num_tokens)
        if num_tokens == 0:
            return self._all_rows[:0]
        if num_tokens > self._num_free + self._num_cached:
            return None
        if num_tokens > self._num_free:
            self.evict(num_tokens - self._num_free)
        self._last_count = num_tokens
        if self._cursor is not None and self._cursor + num_tokens <= self._num_rows:
            return self._bump(self._cursor, num_tokens)
        found = self._searchable().take(num_tokens, self._num_free)
        self._refs[found.numbers] = 1
        self._num_free -= num_tokens
        self._last_alloc_path = found.path
        return found.rows

    def alloc_blocks(self, num_blocks: int) -> torch.Tensor | None:
        """Takes whole blocks of `block_size` neighbouring rows, aligned to it; each row then has one reference.

        Before a release has freed rows the next aligned blocks are taken ("bump").
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
            RapidLLMError: As of `alloc_kvcache_index`.
        """
        check_count("alloc_blocks", "num_blocks", num_blocks)
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
        newest = np.where(self._refs > 0, _NEVER, self._released_at)[:whole].reshape(-1, size).max(1)
        chosen = np.argsort(newest, kind="stable")[:num_blocks]
        if chosen.size < num_blocks or newest[chosen[-1]] == _NEVER:
            return None
        numbers = (chosen[:, None] * size + np.arange(size)).reshape(-1)
        rows = uploaded(numbers, self.device).view(num_blocks, size)
        num_evicted = int((self._released_at[numbers] > 0).sum())
        self._released_at[numbers] = 0
        self._refs[numbers] = 1
        self._num_cached -= num_evicted
        self._num_free += num_evicted - numbers.size
        self._cursor = None
        self._search = None
        self._last_alloc_path = "run_search"
        return rows

    def add_ref(self, rows: torch.Tensor) -> None:
        """Adds a reference to each row, as often as it is named; a cached row is in use again.

        The host waits for the check.

        Args:
            rows: int32 or int64, any shape.

        Raises:
            ValueError: A row is foreign or free; then nothing has changed.
        """
        flat, numbers = self._numbers("add_ref", rows)
        if numbers.size == 0:
            return
        raise_for("add_ref", "is not a row of this cache", flat, self._foreign(numbers))
        distinct, place, counts = np.unique(numbers, return_inverse=True, return_counts=True)
        idle = self._refs[distinct] == 0
        revived = idle & (self._released_at[distinct] > 0)
        raise_for("add_ref", "is free, allocate it instead", flat, (idle & ~revived)[place])
        self._refs[distinct] += counts.astype(np.int32)
        self._released_at[distinct[revived]] = 0
        self._num_cached -= int(revived.sum())

    def release(self, rows: torch.Tensor, *, keep_cached: bool = False) -> None:
        """Takes a reference from each row, as often as it is named; a row without references left is free, or cached.

        Freeing a row invalidates the bump cursor until `free_all`. The host waits for the check.

        Args:
            rows: int32 or int64, any shape.
            keep_cached: Keep the contents of rows without references until they are evicted, in the order of release.

        Raises:
            ValueError: A row is foreign or has fewer references than are released; then nothing has changed.
        """
        flat, numbers = self._numbers("release", rows)
        if numbers.size == 0:
            return
        raise_for("release", "is not a row of this cache", flat, self._foreign(numbers))
        distinct, place, counts = np.unique(numbers, return_inverse=True, return_counts=True)
        raise_for("release", "has fewer references than are released", flat, (counts > self._refs[distinct])[place])
        self._refs[distinct] -= counts.astype(np.int32)
        done = self._refs[distinct] == 0
        if keep_cached:
            last = np.zeros(distinct.size, np.int64)
            np.maximum.at(last, place, np.arange(1, numbers.size + 1) + self._num_releases)
            self._released_at[distinct[done]] = last[done]
            self._num_releases += numbers.size
            self._num_cached += int(done.sum())
        else:
            self._freed(distinct[done])
        if self._search is not None and self._last_count:
            self._search.prepare(self._last_count)

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
        check_count("evict", "num_rows", num_rows)
        count = min(num_rows, self._num_cached)
        if count == 0:
            return 0
        cached = np.flatnonzero(self._released_at)
        oldest = np.sort(cached[np.argsort(self._released_at[cached])[:count]])
        self._released_at[oldest] = 0
        self._num_cached -= count
        self._freed(oldest)
        return count

    def free_all(self) -> None:
        """Frees every row, referenced or cached, and restores the bump cursor."""
        self._refs[:] = 0
        self._released_at[:] = 0
        self._search = None
        self._num_free = self._num_rows
        self._num_cached = 0
        self._cursor = 0
        self._last_alloc_path = None

    def _bump(self, first: int, count: int) -> torch.Tensor:
        self._cursor = first + count
        self._num_free -= count
        self._refs[first : first + count] = 1
        self._last_alloc_path = "bump"
        return self._all_rows[first : first + count]

    def _freed(self, rows: Rows) -> None:
        """Rows, ascending, that have become free."""
        if rows.size == 0:
            return
        self._num_free += rows.size
        if self._search is None:
            self._searchable()
        else:
            self._search.add(rows)

    def _searchable(self) -> RowSearch:
        """The search of the free rows; from here on the cursor does not hold."""
        if self._search is None:
            self._cursor = None
            self._search = RowSearch(self._all_rows, self._staged, (self._refs == 0) & (self._released_at == 0))
        return self._search

    def _numbers(self, call: str, rows: torch.Tensor) -> tuple[torch.Tensor, Rows]:
        """`rows` flat on the host, as a tensor and as numbers; waits for the device."""
        flat = flat_rows(call, rows, self.device).cpu()
        return flat, flat.numpy()

    def _foreign(self, numbers: Rows) -> npt.NDArray[np.bool_]:
        return (numbers < 0) | (numbers >= self._num_rows)
