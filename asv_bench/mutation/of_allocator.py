"""Faults of the allocator, and of the reset between its timed calls."""

from __future__ import annotations

from asv_bench.mutation.fault import ALLOCATOR, EVERYWHERE, GPU_ONLY, Edit, Fault

_CACHE = "rapid_llm/kv_cache.py"
_SUITE = "asv_bench/bench_kv_write.py"
_ALL = ("bump", "run_search", "fragmented")
_SEARCHED = ("run_search", "fragmented")


def _returned(
    name: str,
    what: str,
    lines: str,
    reason: str,
    *,
    status: tuple[str, ...] = ("unverified",),
    devices: tuple[str, ...] = EVERYWHERE,
) -> Fault:
    """A fault in what a call for 64 rows, the measured one, returns."""
    body = lines.replace("\n", "\n    ")
    text = f"""
_right = KVCacheManager.alloc_kvcache_index
_calls = 0


def _wrong(self, num_tokens):
    global _calls
    if num_tokens != 64:
        return _right(self, num_tokens)
    _calls += 1
    {body}


_wrong.__qualname__ = _right.__qualname__
KVCacheManager.alloc_kvcache_index = _wrong
"""
    edit = Edit(_CACHE, "", text)
    return Fault(name, what, {ALLOCATOR: _ALL}, (edit,), status=status, reason=reason, devices=devices)


def _reset(name: str, what: str, *edits: tuple[str, str], states: tuple[str, ...], reason: str = "the reset leaves") -> Fault:
    return Fault(name, what, {ALLOCATOR: states}, tuple(Edit(_SUITE, old, new) for old, new in edits), reason=reason)


_DUPLICATE = "rows = _right(self, num_tokens).clone()\nrows[1] = rows[0]\nreturn rows"

FAULTS = (
    _returned("duplicate-row", "A row is handed out twice in one call.", _DUPLICATE, "handed out twice"),
    _returned(
        "occupied-row",
        "The rows are some that others hold.",
        "used = (self._ref_counts > 0).nonzero().view(-1)[:64].int()\n_right(self, num_tokens)\nreturn used",
        "were in use already",
    ),
    _returned("foreign-row", "The rows lie behind the pool.", "return _right(self, num_tokens) + self._num_rows", "outside the pool"),
    _returned("negative-row", "The rows are negative.", "return -1 - _right(self, num_tokens)", "outside the pool"),
    _returned(
        "too-few-rows", "A row fewer than asked for is returned.", "return _right(self, num_tokens)[:-1]", "asked for 64 rows, got 63"
    ),
    _returned("no-rows", "Nothing is returned although rows are free.", "return None", "got none"),
    _returned(
        "rows-not-taken",
        "The rows stay free, and the next call returns them again.",
        "rows = _right(self, num_tokens)\nself._ref_counts[rows.long()] = 0\nreturn rows",
        "that should not be",
    ),
    _returned(
        "more-taken-than-returned",
        "A row is taken that nobody gets.",
        "rows = _right(self, num_tokens)\nfree = (self._ref_counts == 0).nonzero().view(-1)\nself._ref_counts[free[:1]] = 1\nreturn rows",
        "that should not be",
    ),
    _returned("rows-in-64-bit", "The rows are int64, which no kernel takes.", "return _right(self, num_tokens).long()", "got int64"),
    _returned(
        "rows-on-the-host",
        "The rows are on the host, which saves the device's part.",
        "return _right(self, num_tokens).cpu()",
        "on cpu",
        devices=GPU_ONLY,
    ),
    _returned(
        "duplicate-in-the-11th-call",
        "Only the 11th call hands a row out twice.",
        f"if _calls != 11:\n    return _right(self, num_tokens)\n{_DUPLICATE}",
        "handed out twice",
    ),
    _returned(
        "duplicate-after-20-calls",
        "From the 21st call on a row is handed out twice.",
        f"if _calls <= 20:\n    return _right(self, num_tokens)\n{_DUPLICATE}",
        "handed out twice|has fewer references than are released",
        status=("unverified", "failed"),  # giving a row back twice is refused by the manager, in the reset
    ),
    Fault(
        "lost-bump-cursor",
        "Every allocation searches, although everything behind the cursor is free.",
        {ALLOCATOR: ("bump",)},
        (Edit(_CACHE, "if self._cursor is not None and self._cursor + num_tokens <= self._num_rows:", "if self._num_rows < 0:"),),
        reason="the row says bump and the call took the run_search path",
    ),
    Fault(
        "first-run-too-early",
        "The search takes a run that starts a row before the free one.",
        {ALLOCATOR: ("run_search",)},
        (
            Edit(
                _CACHE, "return int(starts[0].item()) if starts.numel()", "return int(starts[0].item()) - (length == 64) if starts.numel()"
            ),
        ),
        reason="1 rows were in use already",
    ),
    _reset(
        "reset-is-free-all",
        "The reset is free_all alone: the timed calls meet an empty pool.",
        ("manager.release(taken.pop())", "manager.free_all()"),
        ('if state == "bump" or not taken:\n                reach()', "if False:\n                reach()"),
        states=_ALL,
    ),
    _reset(
        "incomplete-reset",
        "The reset gives back half of what the last call took.",
        ("manager.release(taken.pop())", "manager.release(taken.pop()[:32])"),
        states=_SEARCHED,
    ),
    _reset(
        "no-reset",
        "The reset does nothing.",
        ("manager.release(taken.pop())", "taken.pop()"),
        ('if state == "bump" or not taken:\n                reach()', 'if state == "bump" or not taken:\n                taken.clear()'),
        states=_ALL,
    ),
    _reset(
        "state-not-reached",
        "All rows are released, where the state needs scattered ones or a short run.",
        ("manager.release(everything[_ALLOCATOR_ROWS // 2 :][: _ALLOCATOR_FREE[state]])", "manager.release(everything)"),
        ("manager.release(everything[::2])", "manager.release(everything)"),
        states=_SEARCHED,
    ),
    Fault(
        "wrong-allocator-impl",
        "The suite is named after another call than the one that it makes.",
        {ALLOCATOR: _ALL},
        (Edit(_SUITE, '{"cuda": "KVCacheManager.alloc_kvcache_index"', '{"cuda": "KVCacheManager.alloc_blocks"'),),
        status=("failed",),
        reason="WrongKernelError.*named after KVCacheManager.alloc_blocks and its calls run KVCacheManager.alloc_kvcache_index",
    ),
)
