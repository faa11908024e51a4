"""The rows that faults are planted under: cases of the suites, small enough for the interpreter, or of a useful size on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from asv_bench.mutation.fault import ALLOCATOR, DECODE, DECODE_E4M3, DECODE_INT8, DECODE_WRITE, DEVICE_ALLOCATOR, PREFILL
from asv_bench.suite import Case, Suite, SuiteRow, case_with, rows_of

_DECODE_MODULE, _WRITE_MODULE = "asv_bench.bench_paged_decode", "asv_bench.bench_kv_write"

_RAGGED = {"cpu": [130, 20], "cuda": [1000, 3001, 2048, 517]}
_SHORT = {"cpu": [40, 20], "cuda": [100, 37]}
_MANY = {"cpu": [130, 100, 90, 20], "cuda": [130 * (1 + (5 * i) % 32) for i in range(32)]}
"""So many sequences that the rule takes a stream (`plant.py` lowers its threshold for the interpreter); some begin within a program's piece
and end in the next."""
_LONG = [4096] * 64
_TOKENS = {"cpu": 18, "cuda": 5002}
_FAR_ROWS = {"cpu": (1 << 23) + 8, "cuda": (1 << 20) + 8}
"""Rows before ours that push them past 2**31 elements of a 16-bit pool."""


def rows(modules: Mapping[str, ModuleType], device: str) -> dict[str, dict[str, SuiteRow]]:
    """The rows of each suite by short names: column of the matrix, then case; the first case is the usual one.

    Args:
        modules: The suites' modules as `plant.planted` gives them.
        device: "cpu" (the interpreter) or "cuda".
    """
    decode, write = modules[_DECODE_MODULE], modules[_WRITE_MODULE]
    lens = _RAGGED[device]
    far = _FAR_ROWS[device]
    first = decode.PagedDecode.cases[0]
    decodes = {
        "fp16": _decode(first, lens),
        "bf16": _decode(first, lens, kv="bfloat16", q="bfloat16"),
        "one split": _decode(first, _SHORT[device]),
        "many": _decode(first, _MANY[device]),
        "far": _decode(first, _SHORT[device], occupied_rows=far),
    }
    bytes_ = {
        "e4m3": _decode(first, lens, kv="e4m3"),
        "e4m3 bf16": _decode(first, lens, kv="e4m3", q="bfloat16"),
        "many": _decode(first, _MANY[device], kv="e4m3"),
    }
    int8 = {
        "int8": _decode(first, lens, kv="int8"),
        "int8 bf16": _decode(first, lens, kv="int8", q="bfloat16"),
        "many": _decode(first, _MANY[device], kv="int8"),
    }
    prefill = write.KVWritePrefill.cases[0]
    prefills = {
        "fp16": _write(prefill, _TOKENS[device]),
        "bf16": _write(prefill, _TOKENS[device], kv="bfloat16", dtype="bfloat16"),
        "e4m3": _write(prefill, _TOKENS[device], kv="e4m3"),
        "int8": _write(prefill, _TOKENS[device], kv="int8"),
        "far": _write(prefill, _TOKENS[device], occupied_rows=far),
    }
    one = write.KVWriteDecode.cases[0]
    writes = {"fp16": _write(one, 5), "e4m3": _write(one, 5, kv="e4m3"), "one token": _write(one, 1)}
    if device == "cuda":
        decodes["long"] = _decode(first, _LONG)
        bytes_["one split"] = _decode(first, _SHORT[device], kv="e4m3")
        bytes_["far"] = _decode(first, _SHORT[device], kv="e4m3", occupied_rows=2 * _FAR_ROWS[device])
    states = {case.args["state"]: case for case in write.Allocator.cases}
    return {
        DECODE: _rows(decode.PagedDecode, decodes, decode),
        DECODE_E4M3: _rows(decode.PagedDecode, bytes_, decode),
        DECODE_INT8: _rows(decode.PagedDecode, int8, decode),
        PREFILL: _rows(write.KVWritePrefill, prefills, write),
        DECODE_WRITE: _rows(write.KVWriteDecode, writes, write),
        ALLOCATOR: _rows(write.Allocator, states, write),
        DEVICE_ALLOCATOR: _rows(write.DeviceStateAllocator, states, write),
    }


def _decode(like: Case, seq_lens: list[int], *, kv: str = "float16", q: str = "float16", **pool: Any) -> Case:
    bottleneck = "dequant" if kv in ("e4m3", "int8") else "read-bandwidth"
    known = {**like.args, "seq_lens": seq_lens, "kv_dtype": kv, "q_dtype": q, "pool": {**like.args["pool"], **pool}}
    return case_with(like, bottleneck=bottleneck, kv_dtype=kv, args=known)


def _write(like: Case, num_tokens: int, *, kv: str = "float16", dtype: str = "float16", **args: Any) -> Case:
    return case_with(like, kv_dtype=kv, args={**like.args, "num_tokens": num_tokens, "kv_dtype": kv, "dtype": dtype, **args})


def _rows(suite: type[Suite], cases: Mapping[str, Case], module: ModuleType) -> dict[str, SuiteRow]:
    """The rows of a suite with other cases, on every device under the KernelSpec that it names for a GPU."""
    labelled = [case_with(case, label=label, devices=("cpu", "cuda")) for label, case in cases.items()]
    track = next(name for name in vars(suite) if name.startswith("track_"))
    members = {
        "cases": tuple(labelled),
        "impl": dict.fromkeys(("cpu", "cuda"), suite.impl["cuda"]),
        track: vars(suite)[track],
        "__module__": module.__name__,
    }
    made = type(suite.__name__, (suite,), members)
    return {row.case.label: row for row in rows_of([made])}
