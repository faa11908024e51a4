"""Does dispatch choose the fastest kernel? Decode at shapes that nobody tuned for, drawn with a fixed seed; all that could serve is timed.

    python -m asv_bench.held_out --json FILE [--seconds N] [--count N]

The perf provider is made from the device's baseline file. For each shape: what `dispatch()` chooses, and the time of each candidate,
verified before and after. A candidate that a rough reading shows to be far slower is not read again. The file is written after each shape;
where the time ends before the last one, the same command goes on from it. Without a GPU, `--quick` goes through the same steps at tiny
shapes, with Triton's interpreter as one candidate and no baseline.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asv_bench.decode_cells import Cell, Prepared, prepare
from asv_bench.interpreter import device_or_interpreter
from asv_bench.kernel_trial import compile_beforehand
from asv_bench.kv_pool import pool_dtype
from asv_bench.lazy import LazyModule
from asv_bench.microbench import bench_graph, bench_host, now_s
from asv_bench.trial_results import write_strictly

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

config_store: Any = LazyModule("rapid_llm.kernels.autotune.config_store")
dispatcher: Any = LazyModule("rapid_llm.kernels.ops.dispatch")
environment: Any = LazyModule("asv_bench.environment")
errors: Any = LazyModule("rapid_llm.errors")
evidence: Any = LazyModule("rapid_llm.kernels.ops.evidence")
registry: Any = LazyModule("rapid_llm.kernels.ops.registry")

SCHEMA = "rapid_llm/held-out/1"
SEED, COUNT = 20261130, 200
NEAR = 1.02
"""A choice is right where it takes at most so many times what the fastest does."""

_MOST_BYTES = 1 << 30
"""Of K and V of one call."""
_MOST_Q_HEADS = 64
_FAR = 1.5
"""Roughly read to take so many times what the choice does, a candidate is not read again."""
_REP_MS = 8.0
_COMPILE_SHARE = 0.2
_CALLS_A_SAMPLE = 1000
_SAME = ("schema", "seed", "count", "quick", "baseline_sha256")
_SAME_ENVIRONMENT = ("commit", "modified_files", "torch", "triton", "driver")


@dataclass(frozen=True)
class HeldOut:
    """A shape, and the block size of its tables."""

    cell: Cell
    block_size: int

    @property
    def told(self) -> dict[str, Any]:
        """All that was drawn."""
        return {**self.cell.sizes, "kv_dtype": self.cell.kv_dtype, "block_size": self.block_size}


def draw(count: int, *, quick: bool, seed: int = SEED) -> list[HeldOut]:
    """Shapes: batch and length evenly by their logarithm, the rest evenly; a length is halved until K and V fit in the bound.

    The first shapes of a larger count are those of a smaller one.

    Args:
        count: How many.
        quick: Tiny ones.
        seed: Of the draw.
    """
    source = random.Random(seed)  # its random() is the same in every version of Python

    def one_of(values: Sequence[Any]) -> Any:
        return values[int(source.random() * len(values))]

    def between(low: int, high: int) -> int:
        return round(2 ** (math.log2(low) + source.random() * math.log2(high / low)))

    drawn = []
    for place in range(count):
        batch, length = (between(1, 3), between(16, 40)) if quick else (between(1, 128), between(64, 32768))
        kv_dtype, block_size = one_of(("float16", "bfloat16", "e4m3")), one_of((1, 4, 16) if quick else (1, 16, 64))
        head_dim = one_of((16, 32)) if quick else one_of((64, 96, 128, 192, 256))
        num_kv_heads = one_of((1, 2) if quick else (1, 2, 4, 8))
        groups = (1, 2, 4) if quick else (1, 2, 3, 4, 5, 7, 8, 16)
        group = one_of([group for group in groups if group * num_kv_heads <= _MOST_Q_HEADS])
        row_bytes = 2 * num_kv_heads * head_dim * pool_dtype(kv_dtype).itemsize
        while batch * length * row_bytes > _MOST_BYTES:
            length //= 2
        heads = (group * num_kv_heads, num_kv_heads, head_dim)
        drawn.append(HeldOut(Cell(f"held out {place}", (length,) * batch, kv_dtype, heads), block_size))
    return drawn


def measured(shape: HeldOut, device: torch.device) -> dict[str, Any]:
    """What dispatch chooses for a shape, and the times of all candidates.

    Returns:
        shape, chosen, by_measurement (whether a time of the baseline ranked the choice), why, candidates (spec, latency_us, rough,
        max_abs_diff, reason), and what `judged` says of them.
    """
    prepared = prepare(shape.cell, device, (shape.block_size,))
    selection = dispatcher.dispatch(prepared.request(shape.block_size))
    found: list[dict[str, Any]] = []
    for candidate in selection.ranking:
        least = found[0]["latency_us"] if found else None
        found.append({"spec": candidate.spec.name, **_timed(prepared, shape.block_size, candidate.spec.backend, least)})
    best = selection.ranking[0]
    told = {"shape": shape.told, "chosen": best.spec.name, "by_measurement": math.isfinite(best.perf_ms), "why": best.note}
    return {**told, "candidates": found, **judged(found)}


def _timed(prepared: Prepared, block_size: int, backend: str, chosen_us: float | None) -> dict[str, Any]:
    """The time of one candidate; read roughly first where the choice has a time, on one working set."""
    calls = prepared.calls(block_size, backend)
    none: dict[str, Any] = {"latency_us": None, "rough": False, "max_abs_diff": None, "reason": None}

    def read(count: int) -> float:
        timed = calls[:count]
        timing = bench_graph(timed, device=prepared.q.device, set_bytes=prepared.moved, rep_ms=_REP_MS, poison=prepared.poison)
        for call in calls[count:]:
            call()
        prepared.check(block_size)
        return float(timing.reading_us)

    try:
        difference = prepared.verified(calls, block_size)
        if chosen_us is not None and (us := read(1)) > _FAR * chosen_us:
            return {**none, "latency_us": us, "rough": True, "max_abs_diff": difference}
        return {**none, "latency_us": read(len(calls)), "max_abs_diff": difference}
    except Exception as error:  # one that is wrong, or does not fit the device, is told, and the others are measured
        lines = str(error).splitlines()
        return {**none, "reason": f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"}


def judged(candidates: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Whether the first of the candidates, which was chosen, is near the fastest.

    Returns:
        fastest: KernelSpec's name, or None where none has a time; ratio: the choice's time over its, or None where either is missing;
        near: whether that is at most `NEAR`; False for a choice without a time.
    """
    times = [(one["latency_us"], one["spec"]) for one in candidates if one["latency_us"] is not None]
    fastest = min(times, default=None)
    chosen_us = candidates[0]["latency_us"]
    ratio = None if fastest is None or chosen_us is None else chosen_us / fastest[0]
    return {"fastest": fastest and fastest[1], "ratio": ratio, "near": ratio is not None and ratio <= NEAR}


def dispatch_us(request: Any, device: torch.device) -> float:
    """Host time of a `dispatch()` whose decision is cached, in microseconds: of many in a row, on a host that is left alone."""
    dispatch = dispatcher.dispatch

    def many() -> None:
        for _ in range(_CALLS_A_SAMPLE):
            dispatch(request)

    return float(bench_host(many, device=device).reading_us) / _CALLS_A_SAMPLE


class HeldOutFile:
    """The file of results, which a later sitting goes on with."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        """Begins a file, or takes up the one that is there.

        Args:
            path: Of the file; its folder is made.
            head: All but the results.
        Raises:
            ValueError: The file there is no such file, or of other shapes, code, versions or device: their times cannot be put together.
        """
        self.path, self.head, self.rows = path, head, list[dict[str, Any]]()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            dates, self.rows = _taken_up(path, head)
            head["dates"] = [*dates, *head["dates"]]

    def add(self, row: dict[str, Any]) -> None:
        """Adds the result of the next shape, and writes."""
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Writes all, at once."""
        write_strictly(self.path, {**self.head, **totals(self.rows), "results": self.rows})


def _taken_up(path: Path, head: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """The sittings' dates and the results of a file that can be gone on with; raises `ValueError`."""
    another = "name another file, or delete it"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        pairs = {name: (stored[name], head[name]) for name in _SAME}
        pairs |= {name: (stored["environment"][name], head["environment"][name]) for name in _SAME_ENVIRONMENT}
        pairs["device"] = tuple(one["environment"]["device"]["name"] for one in (stored, head))
        dates, rows = list(stored["dates"]), list(stored["results"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no file of this command ({type(error).__name__}: {error}); {another}") from error
    differing = [f"{name} {was!r} is not {now!r}" for name, (was, now) in pairs.items() if was != now]
    if differing:
        raise ValueError(f"{path} cannot be gone on with: {'; '.join(differing)}; {another}")
    return dates, rows


def totals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many shapes were measured, choices were near the fastest, had no rival with a time, and rested on a measurement."""
    alone = sum(sum(one["latency_us"] is not None for one in row["candidates"]) < 2 for row in rows)
    near = sum(row["near"] for row in rows)
    share = near / len(rows) if rows else None
    ranked = sum(row["by_measurement"] for row in rows)
    return {"measured": len(rows), "near": near, "near_share": share, "without_rival": alone, "by_measurement": ranked}


def summary(head: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What the command prints at its end."""
    found = totals(rows)
    share = "" if found["near_share"] is None else f", {found['near_share']:.1%}"
    yield (
        f"{found['measured']} of {head['count']} shapes measured; the choice takes at most {NEAR} times what the fastest does in"
        f" {found['near']}{share}; {found['without_rival']} shapes have no rival with a time, and in {found['by_measurement']} a recorded"
        " time ranked the choice, in the others fit and priority did"
    )
    for place, row in enumerate(rows):
        if not row["near"]:
            ratio = "no time" if row["ratio"] is None else f"{row['ratio']:.3f} times {row['fastest']}"
            yield f"  {place}: {row['shape']}: {row['chosen']} ({row['why']}): {ratio}"
    wrong = [f"  {place}: {one['spec']}: {one['reason']}" for place, row in enumerate(rows) for one in row["candidates"] if one["reason"]]
    if wrong:
        yield from ["failed:", *wrong]
    if head["dispatch_us"] is not None:
        yield f"a dispatch() whose decision is cached takes {head['dispatch_us']:.2f} us of the host"


def _baseline(given: Path | None, device: torch.device) -> Path | None:
    """The baseline file to rank by; None on a CPU where none is given."""
    if given is not None or device.type != "cuda":
        return given
    name: str = config_store.file_name(torch.cuda.get_device_name(device))
    return Path("baselines") / name


def _stored_rows(path: Path) -> int:
    """How many shapes a file has; 0 where it is none, which is looked at when it is taken up."""
    try:
        return len(json.loads(path.read_text(encoding="utf-8"))["results"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _compile(shapes: Sequence[HeldOut], jobs: int, ends_s: float) -> None:
    """Fills Triton's cache with the kernels of these shapes. It forks, so that nothing may have used the GPU before it."""
    for size in sorted({shape.block_size for shape in shapes}):
        compile_beforehand([shape.cell for shape in shapes if shape.block_size == size], jobs, ends_s, 1, (size,))


def _measure(arguments: argparse.Namespace, device: torch.device, ends_s: float) -> int:
    shapes = draw(arguments.count, quick=arguments.quick)
    if arguments.jobs and device.type == "cuda":
        _compile(shapes[_stored_rows(arguments.json) :], arguments.jobs, now_s() + _COMPILE_SHARE * arguments.seconds)
    path = _baseline(arguments.baseline, device)
    if path is not None:
        installed = evidence.install_evidence(path, device_name=None if device.type == "cuda" else "cpu")
        print(f"ranked by {path}: {installed.device_name}, commit {installed.commit[:12]}, {installed.measured_at:%Y-%m-%d}")
    head = {
        "schema": SCHEMA,
        "seed": SEED,
        "count": arguments.count,
        "quick": arguments.quick,
        "interpreted": device.type != "cuda",
        "baseline": path and str(path),
        "baseline_sha256": path and hashlib.sha256(path.read_bytes()).hexdigest(),
        "dates": [f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%dT%H:%M:%SZ}"],
        "environment": environment.collect_environment(device),
        "dispatch_us": None,
    }
    file = HeldOutFile(arguments.json, head)
    left = shapes[len(file.rows) :]
    first = prepare(shapes[0].cell, device, (shapes[0].block_size,))
    head["dispatch_us"] = dispatch_us(first.request(shapes[0].block_size), device)
    del first
    file.write()
    for shape in left:
        if now_s() > ends_s:
            break
        file.add(measured(shape, device))
        row = file.rows[-1]
        told = "no time" if row["ratio"] is None else f"{row['ratio']:.3f} of {row['fastest']}"
        print(f"{len(file.rows) - 1}: {shape.told}: {row['chosen']}, {told}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print("\n".join(summary(head, file.rows)))
    if len(file.rows) < len(shapes):
        print(f"the time was over before shape {len(file.rows)}; the same command goes on from {arguments.json}", file=sys.stderr)
    failed = any(one["reason"] for row in file.rows for one in row["candidates"])
    return 1 if failed or len(file.rows) < len(shapes) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0, 1 where a candidate failed or a shape was not reached, 2 for what cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m asv_bench.held_out", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write, anew after each shape, and to go on from")
    parser.add_argument("--seconds", type=float, default=540.0, help="time for all of it")
    parser.add_argument("--count", type=int, default=COUNT, help="shapes to measure")
    parser.add_argument("--baseline", type=Path, help="the baseline to rank by; on a GPU this device's by default")
    jobs = max(1, len(os.sched_getaffinity(0)) - 2)
    parser.add_argument("--jobs", type=int, default=jobs, help="processes that compile beforehand; 0 compiles at the first call")
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    arguments = parser.parse_args(argv)
    ends_s = now_s() + arguments.seconds
    if arguments.count < 1:
        print(f"--count expected 1 or more, got {arguments.count}; give how many shapes to measure", file=sys.stderr)
        return 2
    with device_or_interpreter(forced=False) as device:
        if device.type != "cuda":
            if not arguments.quick:
                print("held_out expected a CUDA device, and torch sees none; give --quick for tiny shapes", file=sys.stderr)
                return 2
            print("CPU: Triton's interpreter, tiny shapes, wall clock: it shows that the steps work, not what is fast")
        with registry.isolated():
            before = dispatcher.set_perf_provider(None)
            try:
                return _measure(arguments, device, ends_s)
            except (OSError, ValueError, errors.EvidenceError) as error:
                print(error, file=sys.stderr)
                return 2
            finally:
                dispatcher.set_perf_provider(before)


if __name__ == "__main__":
    sys.exit(main())
