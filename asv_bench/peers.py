"""Paged decode beside what other libraries offer: ours and what is installed, in one process, with one instrument, and their ratios.

    python -m asv_bench.peers --json FILE [--select RE] [--peers RE] [--seconds N]

Each is made ready first, which compiles and plans; then its results are compared with the slow reference; then all are timed in turn, for
`--rounds`, by graph replay on rotating working sets (`bench_graph`), and compared again. One that is wrong is told as such, and nothing is
held against it. Without a GPU, `--quick` goes through the same steps at tiny shapes in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asv_bench import flashinfer_peers, trial_peers
from asv_bench.decode_cells import BLOCK_SIZE, Cell, Prepared, cells, prepare
from asv_bench.interpreter import device_or_interpreter
from asv_bench.kernel_trial import compile_beforehand
from asv_bench.lazy import LazyModule
from asv_bench.microbench import bench_graph, now_s
from asv_bench.quiet import do_nothing
from asv_bench.timing import Call
from asv_bench.trial_results import Results

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

SCHEMA = "rapid_llm/peers/1"
OURS, CUDNN = "ours", "sdpa-cudnn"
_REP_MS = 8.0
_COMPILE_SHARE = 0.2

Calls = tuple[Sequence[Call], Sequence[Call]]
"""What is timed, and the same calls in a form that writes to the outputs; a call a working set."""


@dataclass(frozen=True)
class Contender:
    """One implementation of a cell.

    Attributes:
        name: Such as "flashinfer-planned".
        block_size: Of the blocks that it reads; None for K and V that were gathered beforehand.
        build: Makes its calls; compiles and plans, which may take long.
        why_not: Why it cannot serve the cell at all; None where it can.
    """

    name: str
    block_size: int | None
    build: Callable[[], Calls]
    why_not: str | None = None

    @property
    def table(self) -> int:
        """Block size of the tables whose reference it is compared with."""
        return self.block_size or 1


def contenders(prepared: Prepared) -> Iterator[Contender]:
    """All that could serve a cell, those included that cannot, with the reason."""
    for size in (1, BLOCK_SIZE):
        yield Contender(OURS, size, functools.partial(_ours, prepared, size))
    device, uneven = prepared.q.device, trial_peers.not_contiguous(prepared.pool)
    sets = functools.cache(lambda: trial_peers.gathered(prepared.pool))

    def contiguous(attend: Callable[[], trial_peers.Attention]) -> Calls:
        return trial_peers.contiguous_calls(attend(), prepared.q, sets(), prepared.outs)

    for name, backend in trial_peers.sdpa_backends(device).items():
        yield Contender(name, None, functools.partial(contiguous, functools.partial(trial_peers.sdpa, backend)), uneven)
    no_gpu = None if device.type == "cuda" else "it is measured on a GPU only"
    yield Contender("flex", None, functools.partial(contiguous, trial_peers.flex), no_gpu or uneven)
    absent = no_gpu or flashinfer_peers.missing()
    for size in (1, BLOCK_SIZE):
        yield Contender("flashinfer-planned", size, functools.partial(_same, flashinfer_peers.planned, prepared, size), absent)
    yield Contender("flashinfer-xqa", BLOCK_SIZE, functools.partial(_same, flashinfer_peers.xqa, prepared, BLOCK_SIZE), absent)


def _ours(prepared: Prepared, block_size: int) -> Calls:
    calls = prepared.calls(block_size)
    return calls, calls


def _same(make: Callable[[Prepared, int], list[Call]], prepared: Prepared, block_size: int) -> Calls:
    calls = make(prepared, block_size)
    return calls, calls


@dataclass
class Sitting:
    """The measurements of one sitting.

    Attributes:
        device: Where.
        results: Where they go.
        rounds: How often each contender of a cell is timed.
        wanted: Regular expression over the names of peers.
        failed: Contenders that could have served and have no number, the peers' included.
        ours_failed: Of these, ours.
    """

    device: torch.device
    results: Results
    rounds: int
    wanted: str = ""
    failed: int = field(default=0)
    ours_failed: int = field(default=0)
    _unbuilt: dict[tuple[str, str], str] = field(default_factory=dict)

    def cell(self, cell: Cell, ends_s: float, every: Callable[[Prepared], Iterator[Contender]] = contenders) -> None:
        """Measures a cell: the first round whatever the time, further ones until `ends_s`."""
        prepared = prepare(cell, self.device)
        chosen = [one for one in every(prepared) if one.name == OURS or re.search(self.wanted, one.name)]
        ready = [(one, calls) for one in chosen if (calls := self._ready(prepared, one)) is not None]
        for place in range(self.rounds):
            if place and now_s() > ends_s:
                break
            for one, calls in list(ready):
                if not self._timed(prepared, one, calls, place):
                    ready.remove((one, calls))

    def _ready(self, prepared: Prepared, one: Contender) -> Calls | None:
        """Its calls, built and compared; None where it has none or is wrong, which is told."""
        told, key = self._told(prepared, one), (one.name, prepared.cell.kv_dtype)
        if one.why_not is not None or key in self._unbuilt:
            self.results.add(told, reason=one.why_not or self._unbuilt[key])
            return None
        try:
            calls = one.build()
        except Exception as error:  # a peer that does not compile here is told, and not tried again at each shape
            self._unbuilt[key] = f"not built: {_first_line(error)}"
            self._fail(one, told, self._unbuilt[key])
            return None
        try:
            prepared.verified(calls[1], one.table)
        except Exception as error:  # one that is wrong, or refuses the shape
            self._fail(one, told, _first_line(error))
            return None
        return calls

    def _timed(self, prepared: Prepared, one: Contender, calls: Calls, place: int) -> bool:
        """Times it once and compares it again; False where it failed, which is told."""
        told = self._told(prepared, one) | {"round": place}
        try:
            timed, checked = calls
            # What writes to the outputs is compared as the timed calls left them; a result of its own is made once more.
            poison = prepared.poison if timed is checked else do_nothing
            timing = bench_graph(timed, device=self.device, set_bytes=prepared.moved, rep_ms=_REP_MS, poison=poison)
            difference = prepared.check(one.table) if timed is checked else prepared.verified(checked, one.table)
        except Exception as error:  # the others are measured
            self._fail(one, told, _first_line(error))
            return False
        told["relative_error"] = prepared.relative_error(one.table)
        self.results.add(told, latency_us=timing.reading_us, moved=prepared.moved, max_abs_diff=difference)
        return True

    def _told(self, prepared: Prepared, one: Contender) -> dict[str, Any]:
        return {"what": one.name, "cell": prepared.cell.label, "block_size": one.block_size, "config": None}

    def _fail(self, one: Contender, told: dict[str, Any], reason: str) -> None:
        self.failed += 1
        self.ours_failed += one.name == OURS
        self.results.add(told, reason=reason)


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each cell and block size: our time over others', each the median of its rounds; None where there is no such time.

    A contender that failed once in a cell, before or after it was timed, has no time there.

    Args:
        rows: As of `Results`.
    Returns:
        cell, block_size, ours_us, best_peer and its ratio (of peers that read the same blocks), any_peer and its ratio (of those that read
        blocks of any size), over_cudnn (contiguous), over_float16 (ours, same blocks).
    """
    failed = {_who(row) for row in rows if row["reason"] is not None}
    times: dict[tuple[str, str, int | None], list[float]] = {}
    for row in rows:
        if row["latency_us"] is not None and _who(row) not in failed:
            times.setdefault(_who(row), []).append(row["latency_us"])
    medians = {who: statistics.median(readings) for who, readings in times.items()}
    made = []
    for cell in dict.fromkeys(row["cell"] for row in rows):
        for size in (1, BLOCK_SIZE):
            ours = medians.get((cell, OURS, size))
            paged = {(what, blocks): us for (of, what, blocks), us in medians.items() if of == cell and what != OURS and blocks is not None}
            best = min(((us, what) for (what, blocks), us in paged.items() if blocks == size), default=None)
            any_ = min(((us, f"{what} blocks of {blocks}") for (what, blocks), us in paged.items()), default=None)
            half = medians.get((cell.replace(" e4m3", " float16"), OURS, size)) if cell.endswith(" e4m3") else None
            made.append(
                {
                    "cell": cell,
                    "block_size": size,
                    "ours_us": ours,
                    "best_peer": best and best[1],
                    "over_best_peer": _over(ours, best and best[0]),
                    "any_peer": any_ and any_[1],
                    "over_any_peer": _over(ours, any_ and any_[0]),
                    "over_cudnn": _over(ours, medians.get((cell, CUDNN, None))),
                    "over_float16": _over(ours, half),
                }
            )
    return made


def _who(row: dict[str, Any]) -> tuple[str, str, int | None]:
    return row["cell"], row["what"], row["block_size"]


def _over(ours: float | None, other: float | None) -> float | None:
    return None if ours is None or other is None else ours / other


def table(found: Sequence[dict[str, Any]]) -> str:
    """The ratios as Markdown; an empty cell where there is none."""
    lines = [
        "| batch x context | blocks | ours, us | ours / best peer of these blocks | ours / best paged peer | ours / cuDNN contiguous"
        " | e4m3 / float16 |",
        "| --- | ---: | ---: | --- | --- | ---: | ---: |",
    ]
    for row in found:
        us = "no number" if row["ours_us"] is None else f"{row['ours_us']:.2f}"
        peers = [_beside(row["over_best_peer"], row["best_peer"]), _beside(row["over_any_peer"], row["any_peer"])]
        rest = [_beside(row[name]) for name in ("over_cudnn", "over_float16")]
        lines.append(f"| {row['cell']} | {row['block_size']} | {us} | {' | '.join([*peers, *rest])} |")
    return "\n".join(lines)


def _beside(ratio: float | None, name: str | None = None) -> str:
    return "" if ratio is None else f"{ratio:.3f}" + (f" {name}" if name else "")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0, 1 where one of ours has no number or a cell was not reached, 2 for what cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m asv_bench.peers", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write, anew after each result")
    parser.add_argument("--select", default="", help="regular expression over the cells' labels, such as '32x32k|1x1k'")
    parser.add_argument("--peers", default="", help="regular expression over the peers' names, such as 'sdpa|flashinfer-xqa'")
    parser.add_argument("--seconds", type=float, default=540.0, help="time for all of it")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is timed, in turn")
    jobs = max(1, len(os.sched_getaffinity(0)) - 2)
    parser.add_argument(
        "--jobs", type=int, default=jobs, help="processes that compile our kernels beforehand; 0 compiles at the first call"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    arguments = parser.parse_args(argv)
    began_s = now_s()
    ends_s = began_s + arguments.seconds
    chosen = [cell for cell in cells(quick=arguments.quick) if re.search(arguments.select, cell.label)]
    if not chosen:
        print(f"--select {arguments.select!r} finds no cell; leave it out to see them all", file=sys.stderr)
        return 2
    if arguments.rounds < 1:
        print(f"--rounds expected 1 or more, got {arguments.rounds}; give how often each is timed", file=sys.stderr)
        return 2
    with device_or_interpreter() as device:
        if device.type != "cuda":
            if not arguments.quick:
                print("peers expected a CUDA device for serving shapes, and torch sees none; give --quick for tiny ones", file=sys.stderr)
                return 2
            print("CPU: Triton's interpreter, tiny shapes, wall clock: it shows that the steps work, not what is fast")
        elif arguments.jobs:
            compile_beforehand(chosen, arguments.jobs, began_s + _COMPILE_SHARE * arguments.seconds, most=1)
        results = Results(arguments.json, device, quick=arguments.quick, schema=SCHEMA)
        results.note(rounds=arguments.rounds, flashinfer=flashinfer_peers.version(), not_reached=[], ratios=[])
        sitting, late = Sitting(device, results, arguments.rounds, arguments.peers), []
        for place, cell in enumerate(chosen):
            left_s = ends_s - now_s()
            if left_s <= 0:
                late.append(cell.label)
                continue
            try:
                sitting.cell(cell, now_s() + left_s / (len(chosen) - place))
            except Exception as error:  # a cell that does not fit the device's memory, say; the others are measured
                sitting.ours_failed += 1
                results.add({"what": OURS, "cell": cell.label, "block_size": None, "config": None}, reason=_first_line(error))
            results.note(ratios=ratios(results.rows))
            if device.type == "cuda":
                torch.cuda.empty_cache()
        results.note(not_reached=late)
        print(table(ratios(results.rows)))
        for label in late:
            print(f"the time was over before {label}", file=sys.stderr)
    return 1 if sitting.ours_failed or late else 0


if __name__ == "__main__":
    sys.exit(main())
