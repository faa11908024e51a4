"""Slow-downs that really run: edits of a checkout's sources that give one row of each bottleneck class more to do, each with a knob.

On a GPU:

- decode: every program waits at its start, in a chain of dependent operations; its first address is computed behind it;
- KV write of a prompt: more programs, which write the first tokens once more (the same bytes to the same rows);
- KV write of a decode step: every program waits, as in decode;
- allocator: the host runs an empty loop in the call.

On a CPU device, for a dry run, every call runs such a loop.
"""

from __future__ import annotations

import re
import timeit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ci.errors import UsageError

_WAIT_NS = 5.0
_SHARE_UNITS = 100_000
"""The knob of more programs is in 1 / 100,000 of the programs that there are."""
_FEW_TOKENS = 1024


LOOP = "an empty loop of the host in the call"


@dataclass(frozen=True)
class Slowed:
    """A row that is slowed down.

    Attributes:
        name: Of its knob.
        row: Its id on a GPU.
        on_cpu: Its id on a CPU device.
        how: What a GPU does more.
        unit_ns: What a step of the knob is expected to take on a GPU, in ns; None where the knob counts programs or turns of a loop.
    """

    name: str
    row: str
    on_cpu: str
    how: str
    unit_ns: float | None = None

    def id_on(self, device_type: str) -> str:
        return self.row if device_type == "cuda" else self.on_cpu

    def loops(self, device_type: str) -> bool:
        """Whether the host's loop slows the row down: its time is known, so that the knob needs no readings of a row that may be noisy."""
        return device_type != "cuda" or self.name == "host"

    def how_on(self, device_type: str) -> str:
        return LOOP if self.loops(device_type) else self.how

    def first_knob(self, share: float, latency_us: float, device_type: str, loop_ns: float) -> int:
        """The knob for a slow-down by `share` of a row that takes `latency_us`: a guess, or exact where the host's loop does it.

        Args:
            loop_ns: Time of one turn of an empty loop.
        """
        unit_ns = loop_ns if self.loops(device_type) else self.unit_ns
        return max(1, round(share * _SHARE_UNITS if unit_ns is None else share * latency_us * 1e3 / unit_ns))


_DECODE = "bench_paged_decode.PagedDecode.track_bandwidth"
_PREFILL = "bench_kv_write.KVWritePrefill.track_bandwidth"
_LAUNCH = "bench_kv_write.KVWriteDecode.track_calls(decode T=64 float16 combined fragmented)"
_ALLOCATOR = "bench_kv_write.Allocator.track_calls(alloc n=64 of 131072 rows, state=fragmented)"
_MORE = "more programs that write the first tokens once more"

SLOWED: tuple[Slowed, ...] = (
    Slowed(
        "decode_fp16",
        f"{_DECODE}(decode B=64 S=8192 float16 combined fragmented cold)",
        f"{_DECODE}(decode B=2 S=256 float16 combined fragmented cold)",
        "each program waits at its start",
        _WAIT_NS,
    ),
    Slowed(
        "decode_e4m3",
        f"{_DECODE}(decode B=64 S=8192 e4m3 combined fragmented cold)",
        f"{_DECODE}(decode B=2 S=256 e4m3 combined fragmented cold)",
        "each program waits at its start",
        _WAIT_NS,
    ),
    Slowed(
        "prefill_fp16",
        f"{_PREFILL}(prefill T=16384 float16 combined fragmented cold)",
        f"{_PREFILL}(prefill T=512 float16 combined fragmented cold)",
        _MORE,
    ),
    Slowed(
        "prefill_e4m3",
        f"{_PREFILL}(prefill T=16384 e4m3 combined fragmented cold)",
        f"{_PREFILL}(prefill T=512 e4m3 combined fragmented cold)",
        _MORE,
    ),
    Slowed("launch", _LAUNCH, _LAUNCH, "each program waits at its start", _WAIT_NS),
    Slowed("host", _ALLOCATOR, _ALLOCATOR, LOOP),
)


def loop_ns(turns: int = 1_000_000, times: int = 5) -> float:
    """Time of one turn of an empty loop on this host, in ns: the quickest of some."""
    taken = timeit.repeat("for _ in range(turns): pass", globals={"turns": turns}, number=1, repeat=times)
    return min(taken) / turns * 1e9


def chosen(select: str | None, device_type: str) -> list[Slowed]:
    """The slowed rows that an expression finds.

    Raises:
        UsageError: It finds none.
    """
    found = [slowed for slowed in SLOWED if select is None or re.search(select, slowed.id_on(device_type))]
    if not found:
        raise UsageError(
            f"--select {select!r} finds none of the rows that can be slowed: {', '.join(s.id_on(device_type) for s in SLOWED)}."
        )
    return found


@dataclass(frozen=True)
class Edit:
    """Replaces `old`, which stands once in the file, by `new`."""

    path: str
    old: str
    new: str


_WAIT_MODULE = '''# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""A wait in a kernel."""

import triton
import triton.language as tl


@triton.jit
def planted_wait(STEPS: tl.constexpr, opaque):
    """0, after a chain of STEPS dependent steps. Each can be undone, so that the chain never gets from 1 or more to 0.

    The compiler sees neither that nor a shorter chain: shifts do not pass through products. `opaque` is an argument under 2**30, which
    keeps it from knowing how often the loop runs.
    """
    x = tl.num_programs(0)
    for _ in tl.range(0, STEPS // 16 + (opaque >> 30)):
        for i in tl.static_range(16):
            if i % 2 == 0:
                x = x ^ (x << 1)
            else:
                x = x * 5
    for i in tl.static_range(STEPS % 16):
        if i % 2 == 0:
            x = x ^ (x << 1)
        else:
            x = x * 5
    x = x ^ (x << 1)
    return tl.where(x == 0, 1, 0)
'''
_WAIT_PATH = "rapid_llm/kernels/planted.py"
_WAIT_IMPORT = "from rapid_llm.kernels.planted import planted_wait\n"
_KV_HEAD = "    kv_head = tl.program_id(0) // GROUP_BLOCKS\n"
_PLACE = "    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)\n"
_WRITE_ARGUMENTS = '    DIVIDE: tl.constexpr,\n):\n    """One program'
_INT8_ARGUMENTS = "    RUN: tl.constexpr,\n):"
_INT8_CALL = "TOGETHER, False, False, False,\n"
_GRID = "    grid = (triton.cdiv(num_tokens, config.tokens), triton.cdiv(num_elements, config.block), 2 // config.halves)\n"
_WARPS = '        "num_warps": config.num_warps,\n    }\n'
_ALLOCATE = '        check_count("alloc_kvcache_index", "num_tokens", num_tokens)\n'


def _wait_in_decode(path: str, knobs: Mapping[str, int]) -> list[Edit]:
    steps = f"{knobs['decode_e4m3']} if PAIRED else {knobs['decode_fp16']}"
    tile = "from rapid_llm.kernels.decode_tile import attend, load_query, normalised\n"
    return [Edit(path, tile, tile + _WAIT_IMPORT), Edit(path, _KV_HEAD, f"{_KV_HEAD}    kv_head += planted_wait({steps}, max_seq_len)\n")]


def _in_kv_write(knobs: Mapping[str, int]) -> list[Edit]:
    path = "rapid_llm/kernels/kv_write.py"
    block = (
        "    block = tl.program_id(0)\n"
        "    if PLANTED_MORE:\n"
        "        block = block % tl.cdiv(num_tokens, TOKENS)\n"
        "    if PLANTED_STEPS > 0:\n"
        "        block += planted_wait(PLANTED_STEPS, num_tokens)\n"
        "    place = block * TOKENS + tl.arange(0, TOKENS)\n"
    )
    grid = (
        "    blocks = triton.cdiv(num_tokens, config.tokens)\n"
        f"    few = num_tokens < {_FEW_TOKENS}\n"
        f"    share = 0 if few else {knobs['prefill_e4m3']} if k_rows.dtype.itemsize == 1 else {knobs['prefill_fp16']}\n"
        f"    grid = (blocks + blocks * share // {_SHARE_UNITS}, triton.cdiv(num_elements, config.block), 2 // config.halves)\n"
    )
    launch = "from rapid_llm.kernels.launch import has_e4m3_convert\n"
    return [
        Edit(path, launch, launch + _WAIT_IMPORT),
        Edit(
            path, _WRITE_ARGUMENTS, _WRITE_ARGUMENTS.replace("):", "    PLANTED_STEPS: tl.constexpr,\n    PLANTED_MORE: tl.constexpr,\n):")
        ),
        Edit(path, _INT8_ARGUMENTS, _INT8_ARGUMENTS.replace("):", "    PLANTED_STEPS: tl.constexpr,\n    PLANTED_MORE: tl.constexpr,\n):")),
        Edit(path, _INT8_CALL, _INT8_CALL.replace(",\n", ", PLANTED_STEPS, PLANTED_MORE,\n")),
        Edit(path, _PLACE, block),
        Edit(path, _GRID, grid),
        Edit(path, _WARPS, f'        "PLANTED_STEPS": {knobs["launch"]} if few else 0,\n        "PLANTED_MORE": not few,\n{_WARPS}'),
    ]


def _loop(count: str) -> str:
    return f"for _ in range({count}):\n            pass\n"


def _in_calls(knobs: Mapping[str, int]) -> list[Edit]:
    """The same slow-downs for a CPU device, in the public calls."""
    load = "    if k.numel() > 0:\n        accepted.run(k,"
    few = f"k.shape[0] < {_FEW_TOKENS // 8}"
    write = f"{knobs['launch']} if {few} else {knobs['prefill_e4m3']} if k_rows.dtype.itemsize == 1 else {knobs['prefill_fp16']}"
    made = "    if out is None:\n        out = torch.empty(q.shape"
    decode = f"{knobs['decode_e4m3']} if k_rows.dtype.itemsize == 1 else {knobs['decode_fp16']}"
    return [
        Edit("rapid_llm/kernels/ops/kv.py", load, f"    {_loop(write)}{load}"),
        Edit("rapid_llm/kernels/ops/attention.py", made, f"    {_loop(decode)}{made}"),
    ]


def edits(knobs: Mapping[str, int], device_type: str) -> list[Edit]:
    """The edits of a device; a knob that is left out is 0 and slows nothing."""
    known = {slowed.name: 0 for slowed in SLOWED} | dict(knobs)
    host = [Edit("rapid_llm/kv_cache.py", _ALLOCATE, f"{_ALLOCATE}        {_loop(str(known['host']))}")]
    if device_type != "cuda":
        return [*_in_calls(known), *host]
    decode = [edit for name in ("split", "stream") for edit in _wait_in_decode(f"rapid_llm/kernels/decode_{name}.py", known)]
    return [*decode, *_in_kv_write(known), *host]


def plant(root: Path, knobs: Mapping[str, int], device_type: str) -> None:
    """Edits the sources under `root`, which has none of these edits yet.

    Raises:
        UsageError: What an edit looks for does not stand there exactly once.
    """
    if device_type == "cuda":
        (root / _WAIT_PATH).write_text(_WAIT_MODULE, encoding="utf-8")
    apply(root, edits(knobs, device_type))


def apply(root: Path, changes: Sequence[Edit]) -> None:
    """Makes the edits under `root`.

    Raises:
        UsageError: What an edit looks for does not stand there exactly once.
    """
    for edit in changes:
        file = root / edit.path
        text = file.read_text(encoding="utf-8")
        if text.count(edit.old) != 1:
            raise UsageError(
                f"{edit.path} has {text.count(edit.old)} times what a slow-down is planted at ({edit.old.strip()!r}): mend it."
            )
        file.write_text(text.replace(edit.old, edit.new), encoding="utf-8")
