"""Measures variants and configs of paged decode at serving shapes, each verified before it is timed, with torch's SDPA beside them.

`python -m asv_bench.tune --trial --json FILE` on a GPU, for one sitting of `--seconds`: shapes in the order of what is wanted to be known
of them, configs best guess first, results written as they come. Kernels are compiled beforehand, in `--jobs` processes on the stand-in
of this device. `--quick` goes through the same steps at tiny shapes, on a CPU in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asv_bench import kv_pool, trial_command, trial_peers
from asv_bench.decode_cells import BLOCK_SIZE, Cell, Prepared, cells, prepare
from asv_bench.lazy import LazyModule
from asv_bench.microbench import bench, bench_graph, now_s
from asv_bench.quiet import do_nothing
from asv_bench.timing import Call
from asv_bench.trial_results import Results

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

configs: Any = LazyModule("rapid_llm.kernels.configs")
ops: Any = LazyModule("rapid_llm.kernels.ops")
tuned: Any = LazyModule("rapid_llm.kernels.ops.tuned")

KERNEL = "triton_paged_decode"
_TILES = (
    ("split", (64, 4, 3)), ("split", (128, 4, 2)), ("split", (64, 4, 4)), ("swap", (64, 4, 3)),
    ("split", (64, 4, 2)), ("split", (64, 8, 3)),
)  # fmt: skip
"""Variant; block_n, num_warps, num_stages."""
_OF_FEW = (
    ("swap", (64, 4, 4)), ("swap", (128, 4, 2)), ("swap", (128, 4, 3)), ("swap", (64, 8, 3)), ("swap", (64, 4, 6)), ("split", (32, 4, 4)),
    ("split", (32, 2, 6)), ("split", (64, 4, 6)), ("swap", (128, 8, 3)), ("split", (32, 4, 8)),
)  # fmt: skip
"""More for few sequences, with one program a multiprocessor: its loads have to cover the memory's latency alone."""
_FEW = 8
_BOTH = (1, BLOCK_SIZE)
"""Block sizes of a cell's tables."""
_REP_MS = 8.0
_FINAL = 3
"""Configs of a cell that are read again at its end, and tried over a block table."""
_FINAL_ROUNDS = 2
_FINAL_SHARE = 0.25


def short_list(sizes: dict[str, int], kv_dtype: str) -> list[Any]:
    """Configs to try at a shape, the rule's first and then by guess; those that cannot serve it are left out."""
    group = sizes["num_q_heads"] // sizes["num_kv_heads"]

    def made(variant: str, block_n: int, num_warps: int, num_stages: int, per_sm: int, **more: Any) -> Any:
        rule = configs.choose_config(group, sizes["head_dim"], one_byte=kv_dtype == "e4m3", variant=variant)
        known = {"block_n": block_n, "num_warps": num_warps, "num_stages": num_stages, "programs_per_sm": per_sm}
        return dataclasses.replace(rule, **known, **more)

    tried = [configs.DecodeConfig.default(sizes, kv_dtype)]
    if sizes["batch"] == 1:
        tried += [made(variant, *tile, per_sm) for per_sm in (1, 2) for variant, tile in _TILES]
    else:
        # Several times as many programs as are resident even out what each of them takes, where the lengths are the same too.
        tried += [made(variant, *tile, per_sm) for per_sm in (2, 4) for variant, tile in _TILES]
        tried += [made("stream", *tile, per_sm) for tile, per_sm in (((64, 4, 3), 2), ((64, 4, 3), 3), ((128, 8, 3), 1))]
        tried += [made("stream-swap", 64, 4, 3, 2), made("stream", 64, 4, 3, 3, block_s=8)]
    if sizes["batch"] <= _FEW:
        tried += [made(variant, *tile, 1) for variant, tile in _OF_FEW]
    tried = [dataclasses.replace(config, tiles_ahead=ahead) for config in tried for ahead in (config.tiles_ahead, 3 - config.tiles_ahead)]
    return [config for config in dict.fromkeys(tried) if config.problem(sizes, kv_dtype) is None]


@dataclass
class Trial:
    """The measurements of one sitting.

    Attributes:
        device: Where.
        results: Where they go.
        ends_s: When it has to be over, on the clock of `now_s`.
    """

    device: torch.device
    results: Results
    ends_s: float
    failed: int = field(default=0)

    def cell(self, cell: Cell, ends_s: float) -> None:
        """Measures a cell until its share of the time is over: configs, then peers, then the best again and over a block table."""
        prepared = prepare(cell, self.device)
        times: dict[Any, list[float]] = {}
        last_s = ends_s - _FINAL_SHARE * (ends_s - now_s())
        for config in short_list(cell.sizes, cell.kv_dtype):
            if times and now_s() > last_s:
                break
            if (reading := self.reading(prepared, config, 1)) is not None:
                times[config] = [reading]
        for name, calls, checked in trial_peers.peers(prepared.q, prepared.pool, prepared.outs):
            self.peer(prepared, name, calls, checked)
        best = sorted(times, key=lambda config: times[config][0])[:_FINAL]
        for _ in range(_FINAL_ROUNDS):
            for config in best:
                if now_s() < ends_s and (reading := self.reading(prepared, config, 1)) is not None:
                    times[config].append(reading)
        for config in best:
            if now_s() < ends_s or config is best[0]:
                self.reading(prepared, config, BLOCK_SIZE)

    def reading(self, prepared: Prepared, config: Any, block_size: int) -> float | None:
        """Verifies and times a config; microseconds, or None where it failed, which is written too."""
        told = {"what": "ours", "cell": prepared.cell.label, "block_size": block_size, "config": dataclasses.asdict(config)}
        calls = prepared.calls(block_size)
        try:
            with tuned.overridden(KERNEL, config):
                difference = prepared.verified(calls, block_size)
                latency_us = self._timed(prepared, calls, poison=prepared.poison)
                prepared.check(block_size)
        except Exception as error:  # a config that does not compile, fit or compute is told, and the trial goes on
            self.not_measured(told, error)
            return None
        self.results.add(told, latency_us=latency_us, moved=prepared.moved, max_abs_diff=difference)
        return latency_us

    def peer(self, prepared: Prepared, name: str, calls: Sequence[Call], checked: Sequence[Call]) -> None:
        """The same for another implementation, over K and V that were gathered beforehand; `checked` also write to the outputs."""
        told = {"what": name, "cell": prepared.cell.label, "block_size": None, "config": None}
        try:
            difference = prepared.verified(checked, 1)
            latency_us = self._timed(prepared, calls)
        except Exception as error:  # a backend that is not available here is told
            self.not_measured(told, error)
            return
        self.results.add(told, latency_us=latency_us, moved=prepared.moved, max_abs_diff=difference)

    def host(self) -> None:
        """What a call costs the host, beside the bare Triton launch that it ends in."""
        if self.device.type != "cuda":
            return
        prepared = prepare(Cell("1x1k float16", (1024,), "float16"), self.device)
        call = prepared.calls(1)[0]
        call()
        launch = trial_peers.bare_launch(call)
        told = {"cell": prepared.cell.label, "block_size": 1, "config": None}
        for name, timed in (("host of the public op", call), ("host of the bare launch", launch)):
            self.results.add({"what": name, **told}, latency_us=bench(timed, device=self.device).host_us, moved=None, max_abs_diff=None)

    def _timed(self, prepared: Prepared, calls: Sequence[Call], poison: Call = do_nothing) -> float:
        return float(bench_graph(calls, device=self.device, set_bytes=prepared.moved, rep_ms=_REP_MS, poison=poison).reading_us)

    def not_measured(self, told: dict[str, Any], error: Exception) -> None:
        """Tells why something has no number."""
        lines = str(error).splitlines()
        self.failed += 1
        self.results.add(told, reason=f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}")


def compile_beforehand(
    chosen: Sequence[Cell], jobs: int, ends_s: float, most: int | None = None, block_sizes: Sequence[int] = _BOTH
) -> None:
    """Fills Triton's cache in forked processes, which take the cells' configs in turn, on the stand-in of this machine's GPU.

    Args:
        chosen: The cells.
        jobs: Processes.
        ends_s: When it has to be over, on the clock of `now_s`.
        most: Only so many configs of each cell, from the rule's on; None takes the whole short list.
        block_sizes: Of the tables.
    """
    entries = _to_compile(chosen, most, block_sizes)
    trial_command.compile_beforehand(functools.partial(_compile_entries, entries), jobs, ends_s)


def _compile_some(chosen: Sequence[Cell], own: dict[str, Any], first: int, step: int) -> None:
    _compile_entries(_to_compile(chosen), own, first, step)


def _compile_entries(entries: Sequence[tuple[Cell, Any, int]], own: dict[str, Any], first: int, step: int) -> None:
    with trial_command.compiling_only(own) as cuda:
        for cell, config, block_size in entries[first::step]:
            try:
                _call_on_stand_in(cell, config, block_size, cuda)
            except Exception as error:  # the trial meets it again, and tells it
                print(f"compiling for {cell.label}: {type(error).__name__}", file=sys.stderr)


def _to_compile(chosen: Sequence[Cell], most: int | None = None, block_sizes: Sequence[int] = _BOTH) -> list[tuple[Cell, Any, int]]:
    """One call for each thing that has to be compiled: configs best guess first, those over a block table later."""
    ranked: dict[tuple[Any, ...], tuple[int, Cell, Any, int]] = {}
    for cell in chosen:
        narrow = _rows_of(cell) * cell.row_elements // (2 if cell.kv_dtype == "e4m3" else 1) < 2**31
        for rank, config in enumerate(short_list(cell.sizes, cell.kv_dtype)[:most]):
            for block_size in block_sizes:
                same = dataclasses.replace(config, num_splits=None, programs_per_sm=1)
                key = (same, cell.kv_dtype, cell.heads, narrow, len(cell.seq_lens) // 32, block_size)
                ranked.setdefault(key, (rank + (_FINAL if block_size > 1 else 0), cell, config, block_size))
    return [(cell, config, block_size) for _, cell, config, block_size in sorted(ranked.values(), key=lambda entry: entry[0])]


def _rows_of(cell: Cell) -> int:
    """About the rows of the pool that `prepare` makes: what decides whether offsets fit in 32 bits."""
    return 2 * sum(cell.seq_lens)


def _call_on_stand_in(cell: Cell, config: Any, block_size: int, cuda: torch.device) -> None:
    """The public call with a config, on tensors that are not there."""
    batch = len(cell.seq_lens)
    num_q_heads, num_kv_heads, head_dim = cell.heads
    rows = -(-_rows_of(cell) // block_size) * block_size
    pool = torch.empty(rows, 2 * num_kv_heads, head_dim, dtype=kv_pool.pool_dtype(cell.kv_dtype), device=cuda)
    q = torch.empty(batch, num_q_heads, head_dim, dtype=cell.q_dtype, device=cuda)
    table = torch.empty(batch, -(-max(cell.seq_lens) // block_size), dtype=torch.int32, device=cuda)
    lens = torch.empty(batch, dtype=torch.int32, device=cuda)
    scales = {"k_scale": 0.5, "v_scale": 0.25} if cell.kv_dtype == "e4m3" else {}
    k_rows, v_rows = pool[:, :num_kv_heads], pool[:, num_kv_heads:]
    with tuned.overridden(KERNEL, config):
        ops.paged_decode_attention(q, k_rows, v_rows, table, lens, block_size=block_size, backend="triton", **scales)


def _trial(device: torch.device, results: Results, ends_s: float) -> Trial:
    made = Trial(device, results, ends_s)
    made.host()
    return made


def main(argv: Sequence[str], device_context: Any) -> int:
    """The command; returns the exit status: 0, 1 where something failed, 2 where nothing is selected."""
    sitting = trial_command.Sitting(
        prog="python -m asv_bench.tune --trial",
        description=(__doc__ or "").partition("\n\n")[0],
        seconds=540.0,
        compile_share=0.4,
        select_example="32x32k|1x1k",
        quick_help="tiny shapes",
        cells=lambda quick: cells(quick=quick),
        compile_some=_compile_some,
        trial=_trial,
        told=lambda cell: {"what": "cell", "cell": cell.label, "block_size": None, "config": None},
        summary=lambda results: results.summary(),
    )
    return trial_command.main(sitting, argv, device_context)
