"""Faults of the allocators, and of the reset between their timed calls."""

from __future__ import annotations

from asv_bench.mutation.fault import ALLOCATOR, DEVICE_ALLOCATOR, EVERYWHERE, GPU_ONLY, Edit, Fault

_CACHE = "rapid_llm/kv_cache.py"
_DEVICE_CACHE = "rapid_llm/device_state_cache.py"
_SEARCH = "rapid_llm/row_search.py"
_STAGED = "rapid_llm/staged_rows.py"
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
    manager: str = "KVCacheManager",
    states: tuple[str, ...] = _ALL,
) -> Fault:
    """A fault in what a call for 64 rows, the measured one, returns."""
    body = lines.replace("\n", "\n    ")
    text = f"""
_right = {manager}.alloc_kvcache_index
_calls = 0


def _wrong(self, num_tokens):
    global _calls
    if num_tokens != 64:
        return _right(self, num_tokens)
    _calls += 1
    {body}


_wrong.__qualname__ = _right.__qualname__
{manager}.alloc_kvcache_index = _wrong
"""
    on_host = manager == "KVCacheManager"
    edit = Edit(_CACHE if on_host else _DEVICE_CACHE, "", text)
    return Fault(name, what, {ALLOCATOR if on_host else DEVICE_ALLOCATOR: states}, (edit,), status=status, reason=reason, devices=devices)


def _reset(name: str, what: str, *edits: tuple[str, str], states: tuple[str, ...], reason: str = "the reset leaves") -> Fault:
    return Fault(
        name, what, {ALLOCATOR: states, DEVICE_ALLOCATOR: states[-1:]}, tuple(Edit(_SUITE, old, new) for old, new in edits), reason=reason
    )


_OCCUPIED = "used = (self.ref_counts() > 0).nonzero().view(-1)[:64].int()\n_right(self, num_tokens)\nreturn used"
_NOT_TAKEN = "rows = _right(self, num_tokens)\nself.release(rows)\nreturn rows"
_MORE_TAKEN = "rows = _right(self, num_tokens)\n_right(self, 1)\nreturn rows"
_DUPLICATE = "rows = _right(self, num_tokens).clone()\nrows[1] = rows[0]\nreturn rows"


def _device_faults() -> tuple[Fault, ...]:
    """The same kinds in the manager whose state is on the device, a state each."""
    kinds = (
        ("duplicate-row", _DUPLICATE, "handed out twice", "bump"),
        ("occupied-row", _OCCUPIED, "were in use already", "run_search"),
        ("foreign-row", "return _right(self, num_tokens) + self._num_rows", "outside the pool", "fragmented"),
        ("too-few-rows", "return _right(self, num_tokens)[:-1]", "asked for 64 rows, got 63", "bump"),
        ("no-rows", "return None", "got none", "run_search"),
        ("rows-not-taken", _NOT_TAKEN, "that should not be", "fragmented"),
        ("more-taken-than-returned", _MORE_TAKEN, "that should not be", "run_search"),
        ("rows-in-64-bit", "return _right(self, num_tokens).long()", "got int64", "fragmented"),
    )
    what = "As of the other allocator, in the one whose state is on the device."
    returned = [
        _returned(f"device-{name}", what, lines, reason, manager="DeviceStateKVCacheManager", states=(state,))
        for name, lines, reason, state in kinds
    ]
    first_run = Fault(
        "device-first-run-too-early",
        what,
        {DEVICE_ALLOCATOR: ("run_search",)},
        (
            Edit(
                _DEVICE_CACHE,
                "return int(starts[0].item()) if starts.numel()",
                "return int(starts[0].item()) - (length == 64) if starts.numel()",
            ),
        ),
        reason="1 rows were in use already",
    )
    return (*returned, first_run)


FAULTS = (
    _returned("duplicate-row", "A row is handed out twice in one call.", _DUPLICATE, "handed out twice"),
    _returned(
        "occupied-row",
        "The rows are some that others hold.",
        _OCCUPIED,
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
        _NOT_TAKEN,
        "that should not be",
    ),
    _returned(
        "more-taken-than-returned",
        "A row is taken that nobody gets.",
        _MORE_TAKEN,
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
        (Edit(_SEARCH, "self._all_rows[start : start + count]", "self._all_rows[start - (count == 64) :][:count]"),),
        reason="1 rows were in use already",
    ),
    _reset(
        "reset-is-free-all",
        "The reset is free_all alone: the timed calls meet an empty pool.",
        ("manager.release(taken.pop())", "manager.free_all()"),
        ('if state == "bump" or not taken:\n            reach()', "if False:\n            reach()"),
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
        ('if state == "bump" or not taken:\n            reach()', 'if state == "bump" or not taken:\n            taken.clear()'),
        states=_ALL,
    ),
    _reset(
        "state-not-reached",
        "All rows are released, where the state needs scattered ones or a short run.",
        ("manager.release(everything[ALLOCATOR_ROWS // 2 :][: ALLOCATOR_FREE[state]])", "manager.release(everything)"),
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
    Fault(
        "scattered-rows-shifted",
        "What is uploaded of the scattered rows is a row beside each.",
        {ALLOCATOR: ("fragmented",)},
        (Edit(_STAGED, "numbers.astype(np.int32)", "(numbers.astype(np.int32) + 1)"),),
        reason="rows were in use already",
    ),
    Fault(
        "scattered-rows-not-taken",
        "Scattered rows that are handed out stay free.",
        {ALLOCATOR: ("fragmented",)},
        (Edit(_CACHE, "self._refs[found.numbers] = 1", 'self._refs[found.numbers] = found.path == "run_search"'),),
        reason="that should not be",
    ),
    Fault(
        "run-not-cut",
        "A run is handed out and stays the free run that it was, so that the next call gets it again.",
        {ALLOCATOR: ("run_search",)},
        (Edit(_CACHE, "self._refs[found.numbers] = 1", 'self._refs[found.numbers] = found.path == "fragmented"'),),
        reason="that should not be",
    ),
    *_device_faults(),
)
