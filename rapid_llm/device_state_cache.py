"""The row allocator whose state is on the device: it waits for the device to search, and is measured beside the one that does not."""

from __future__ import annotations

import torch

from rapid_llm.kv_cache import KVCacheManager
from rapid_llm.row_checks import check_count, flat_rows, raise_for

__all__ = ["DeviceStateKVCacheManager"]

_NEVER = torch.iinfo(torch.int64).max


class DeviceStateKVCacheManager(KVCacheManager):
    """`KVCacheManager` with the reference counts on the device; the calls, their results and their errors are those of its base.

    A run search and a scattered allocation wait for the device (`nonzero`, `item`). Kept as a measured row: what the wait costs is a
    claim to show, and here it can be seen on any device.
    """

    def _init_state(self) -> None:
        device = self._all_rows.device
        self._ref_counts = torch.zeros(self._num_rows, dtype=torch.int32, device=device)
        # 0 where a row is not cached; otherwise the number of its release: the smallest is the oldest.
        self._cached_at = torch.zeros(self._num_rows, dtype=torch.int64, device=device)

    def is_free(self, rows: torch.Tensor) -> torch.Tensor:
        flat = flat_rows("is_free", rows, self.device)
        raise_for("is_free", "is not a row of this cache", flat, self._is_foreign(flat))
        return ((self._ref_counts[flat] == 0) & (self._cached_at[flat] == 0)).view(rows.shape)

    def ref_counts(self) -> torch.Tensor:
        return self._ref_counts.clone()

    def alloc_kvcache_index(self, num_tokens: int) -> torch.Tensor | None:
        check_count("alloc_kvcache_index", "num_tokens", num_tokens)
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
        flat = flat_rows("add_ref", rows, self.device)
        if flat.numel() == 0:
            return
        foreign = self._is_foreign(flat)
        added = self._occurrences(flat)
        idle = (added > 0) & (self._ref_counts == 0)
        cached = idle & (self._cached_at > 0)
        any_foreign, num_idle, num_revived = torch.stack([foreign.sum(), idle.sum(), cached.sum()]).tolist()
        if any_foreign:
            raise_for("add_ref", "is not a row of this cache", flat, foreign)
        if num_idle != num_revived:
            raise_for("add_ref", "is free, allocate it instead", flat, (idle & ~cached)[flat])
        self._ref_counts += added
        self._cached_at.masked_fill_(cached, 0)
        self._num_cached -= num_revived

    def release(self, rows: torch.Tensor, *, keep_cached: bool = False) -> None:
        flat = flat_rows("release", rows, self.device)
        if flat.numel() == 0:
            return
        foreign = self._is_foreign(flat)
        removed = self._occurrences(flat)
        excess = removed > self._ref_counts
        done = (removed > 0) & (removed == self._ref_counts)
        any_foreign, any_excess, num_done = torch.stack([foreign.sum(), excess.sum(), done.sum()]).tolist()
        if any_foreign:
            raise_for("release", "is not a row of this cache", flat, foreign)
        if any_excess:
            raise_for("release", "has fewer references than are released", flat, excess[flat])
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
        check_count("evict", "num_rows", num_rows)
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

    def _is_foreign(self, flat: torch.Tensor) -> torch.Tensor:
        return (flat < 0) | (flat >= self._num_rows)

    def _occurrences(self, flat: torch.Tensor) -> torch.Tensor:
        """How often each row is named; a foreign one counts as its nearest neighbour, for the caller to refuse."""
        ones = torch.ones_like(flat, dtype=torch.int32)
        return torch.zeros_like(self._ref_counts).index_add_(0, flat.clamp(0, self._num_rows - 1), ones)
