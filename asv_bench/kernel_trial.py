"""Measures variants and configs of paged decode at serving shapes, each verified before it is timed, with torch's SDPA beside them.

`python -m asv_bench.tune --trial --json FILE` on a GPU, for one sitting of `--seconds`: shapes in the order of what is wanted to be known
of them, configs best guess first, results written as they come. Kernels are compiled beforehand, in `--jobs` processes on the stand-in
of this device. `--quick` goes through the same steps at tiny shapes, on a CPU in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asv_bench import kv_pool, trial_command, trial_peers, verify
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
_HEADS, _QUICK_HEADS = (32, 8, 128), (4, 2, 16)
"""num_q_heads, num_kv_heads, head_dim."""
_BLOCK_SIZE = 16
_TILES = (
    ("split", (64, 4, 3)), ("split", (128, 4, 2)), ("split", (64, 4, 4)), ("swap", (64, 4, 3)),
    ("split", (64, 4, 2)), ("split", (64, 8, 3)),
)  # fmt: skip
"""Variant; block_n, num_warps, num_stages."""
_REP_MS = 8.0
_FINAL = 3
"""Configs of a cell that are read again at its end, and tried over a block table."""
_FINAL_ROUNDS = 2
_FINAL_SHARE = 0.25
_MOST_SETS = 64


@dataclass(frozen=True)
class Cell:
    """A shape with a cache dtype.

    Attributes:
        label: Such as "32x8k float16".
        seq_lens: In tokens.
        kv_dtype: "float16" or "e4m3".
        heads: num_q_heads, num_kv_heads, head_dim.
    """

    label: str
    seq_lens: tuple[int, ...]
    kv_dtype: str
    heads: tuple[int, int, int] = _HEADS

    @property
    def sizes(self) -> dict[str, int]:
        """As a request's."""
        heads = dict(zip(("num_q_heads", "num_kv_heads", "head_dim"), self.heads, strict=True))
        return {"batch": len(self.seq_lens), "max_seq_len": max(self.seq_lens), **heads}

    @property
    def row_elements(self) -> int:
        """Elements of K and V of a token."""
        _, num_kv_heads, head_dim = self.heads
        return 2 * num_kv_heads * head_dim


_SHAPES: dict[str, tuple[int, ...]] = {
    "32x32k": (32768,) * 32,
    "1x1k": (1024,),
    "ragged 32": tuple(1024 * (1 + (7 * i) % 32) for i in range(32)),
    "1x8k": (8192,),
    "1x32k": (32768,),
    "8x8k": (8192,) * 8,
    "128x8k": (8192,) * 128,
    "128x1k": (1024,) * 128,
    "8x1k": (1024,) * 8,
    "32x8k": (8192,) * 32,
    "8x32k": (32768,) * 8,
}
_QUICK_SHAPES: dict[str, tuple[int, ...]] = {"1x20": (20,), "ragged 3": (40, 0, 17)}


def cells(*, quick: bool) -> list[Cell]:
    """Every shape with both dtypes, in the order in which they are measured."""
    shapes = _QUICK_SHAPES if quick else _SHAPES
    heads = _QUICK_HEADS if quick else _HEADS
    return [Cell(f"{name} {dtype}", lens, dtype, heads) for name, lens in shapes.items() for dtype in ("float16", "e4m3")]


def short_list(sizes: dict[str, int], kv_dtype: str) -> list[Any]:
    """Configs to try at a shape, the rule's first and then by guess; those that cannot serve it are left out."""
    group = sizes["num_q_heads"] // sizes["num_kv_heads"]

    def made(variant: str, block_n: int, num_warps: int, num_stages: int, per_sm: int, **more: Any) -> Any:
        rule = configs.choose_config(group, sizes["head_dim"], e4m3=kv_dtype == "e4m3", variant=variant)
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
    tried = [dataclasses.replace(config, tiles_ahead=ahead) for config in tried for ahead in (config.tiles_ahead, 3 - config.tiles_ahead)]
    return [config for config in dict.fromkeys(tried) if config.problem(sizes, kv_dtype) is None]


@dataclass
class Prepared:
    """A cell's inputs on the device.

    Attributes:
        cell: Which.
        pool: Rows, row tables and lengths.
        q: [batch, num_q_heads, head_dim].
        block_tables: One [batch, max_blocks] int32 table a set, of blocks of `_BLOCK_SIZE` rows.
        outs: [sets, batch, num_q_heads, head_dim].
        expected: By block size, float64 of the shape of `outs`.
        moved: Bytes that a call moves, at a block size of 1.
    """

    cell: Cell
    pool: kv_pool.PagedPool
    q: torch.Tensor
    block_tables: list[torch.Tensor]
    outs: torch.Tensor
    expected: dict[int, torch.Tensor]
    moved: float

    def calls(self, block_size: int) -> list[Call]:
        """The public call, one a set."""
        pool = self.pool
        tables = pool.row_tables if block_size == 1 else self.block_tables
        k_rows, v_rows = (_whole_blocks(rows, block_size) for rows in (pool.k_rows, pool.v_rows))

        def call(table: torch.Tensor, out: torch.Tensor) -> Call:
            return lambda: ops.paged_decode_attention(
                self.q, k_rows, v_rows, table, pool.seq_lens, out=out, block_size=block_size, backend="triton", **pool.scales
            )

        return [call(table, out) for table, out in zip(tables, self.outs, strict=True)]

    def verified(self, calls: Sequence[Call], block_size: int) -> float:
        """Makes each call once over poison and compares; raises `VerificationError`."""
        self.outs.fill_(float("nan"))
        for call in calls:
            call()
        return verify.check_decode(self.outs, self.expected[block_size], kv_dtype=self.cell.kv_dtype)


def prepare(cell: Cell, device: torch.device) -> Prepared:
    """Builds pool, tables and references of a cell."""
    tokens = sum(cell.seq_lens)
    num_q_heads, num_kv_heads, head_dim = cell.heads
    kv_bytes = tokens * cell.row_elements * kv_pool.pool_dtype(cell.kv_dtype).itemsize
    num_sets = min(_MOST_SETS, kv_pool.num_sets_for(kv_bytes, device))
    heads: dict[str, Any] = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
    pool = kv_pool.paged_pool(seq_lens=list(cell.seq_lens), kv_dtype=cell.kv_dtype, device=device, num_sets=num_sets, **heads)
    batch, width = pool.row_tables[0].shape
    max_blocks = -(-width // _BLOCK_SIZE)
    blocks = pool.k_rows.shape[0] // _BLOCK_SIZE
    generator = torch.Generator().manual_seed(5)
    scattered = torch.randperm(blocks, generator=generator).to(device).int()
    # Where the pool has too few blocks for all sets and for what no token is in, a block is taken again.
    a_set = torch.arange(batch * max_blocks, device=device)
    block_tables = [scattered[(i * len(a_set) + a_set) % blocks].view(batch, max_blocks) for i in range(num_sets)]
    q = kv_pool.random_values((batch, num_q_heads, head_dim), torch.float16, device, seed=7)
    inside = torch.arange(_BLOCK_SIZE, dtype=torch.int32, device=device)
    as_rows = [(table[:, :, None] * _BLOCK_SIZE + inside).flatten(1) for table in block_tables]

    def expected(tables: Sequence[torch.Tensor]) -> torch.Tensor:
        scales = {"k_scale": pool.k_scale or 1.0, "v_scale": pool.v_scale or 1.0}
        return torch.stack([verify.decode_reference(q, pool.k_rows, pool.v_rows, table, pool.seq_lens, **scales) for table in tables])

    outs = torch.empty(num_sets, *q.shape, dtype=q.dtype, device=device)
    moved = float(kv_bytes + 4 * (tokens + batch) + 2 * q.numel() * q.element_size())
    return Prepared(cell, pool, q, block_tables, outs, {1: expected(pool.row_tables), _BLOCK_SIZE: expected(as_rows)}, moved)


def _whole_blocks(rows: torch.Tensor, block_size: int) -> torch.Tensor:
    return rows[: rows.shape[0] // block_size * block_size]


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
                self.reading(prepared, config, _BLOCK_SIZE)

    def reading(self, prepared: Prepared, config: Any, block_size: int) -> float | None:
        """Verifies and times a config; microseconds, or None where it failed, which is written too."""
        told = {"what": "ours", "cell": prepared.cell.label, "block_size": block_size, "config": dataclasses.asdict(config)}
        calls = prepared.calls(block_size)
        try:
            with tuned.overridden(KERNEL, config):
                difference = prepared.verified(calls, block_size)
                latency_us = self._timed(prepared, calls, poison=lambda: prepared.outs.fill_(float("nan")))
                verify.check_decode(prepared.outs, prepared.expected[block_size], kv_dtype=prepared.cell.kv_dtype)
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


def _compile_some(chosen: Sequence[Cell], own: dict[str, Any], first: int, step: int) -> None:
    with trial_command.compiling_only(own) as cuda:
        for cell, config, block_size in _to_compile(chosen)[first::step]:
            try:
                _call_on_stand_in(cell, config, block_size, cuda)
            except Exception as error:  # the trial meets it again, and tells it
                print(f"compiling for {cell.label}: {type(error).__name__}", file=sys.stderr)


def _to_compile(chosen: Sequence[Cell]) -> list[tuple[Cell, Any, int]]:
    """One call for each thing that has to be compiled: configs best guess first, those over a block table later."""
    ranked: dict[tuple[Any, ...], tuple[int, Cell, Any, int]] = {}
    for cell in chosen:
        narrow = _rows_of(cell) * cell.row_elements // (2 if cell.kv_dtype == "e4m3" else 1) < 2**31
        for rank, config in enumerate(short_list(cell.sizes, cell.kv_dtype)):
            for block_size in (1, _BLOCK_SIZE):
                same = dataclasses.replace(config, num_splits=None, programs_per_sm=1)
                key = (same, cell.kv_dtype, narrow, len(cell.seq_lens) // 32, block_size)
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
    q = torch.empty(batch, num_q_heads, head_dim, dtype=torch.float16, device=cuda)
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
