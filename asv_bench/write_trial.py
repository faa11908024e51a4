"""Measures configs of the KV write, each verified before and after it is timed, beside torch's `index_copy_` and a plain copy.

`python -m asv_bench.tune --trial-write --json FILE` on a GPU, for one sitting of `--seconds`: shapes in the order of what is wanted to be
known of them, configs best guess first, results written as they come. Kernels are compiled beforehand, in `--jobs` processes on the
stand-in of this device. The plain copy reads and writes the same bytes, in order and without slots: what a scatter can reach at that
size. `--quick` goes through the same steps at a few tokens, on a CPU in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asv_bench import bench_kv_write, kv_pool, trial_command, verify
from asv_bench.lazy import LazyModule
from asv_bench.microbench import bench_graph, now_s
from asv_bench.peaks import measured_ceilings
from asv_bench.suite import Case, case_with
from asv_bench.timing import Call
from asv_bench.trial_results import Results

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

configs: Any = LazyModule("rapid_llm.kernels.configs")
probes: Any = LazyModule("asv_bench.probes")
tuned: Any = LazyModule("rapid_llm.kernels.ops.tuned")

KERNEL = "triton_kv_write"
PLAIN, TORCH = "plain copy", "index_copy_"
_REP_MS = 8.0
_FINAL = 3
"""Configs of a cell that are read again at its end."""
_FINAL_ROUNDS = 2
_FINAL_SHARE = 0.25
_FEW_TOKENS = 256

_CELLS = (
    *((32768, dtype) for dtype in ("e4m3", "float16")),
    *((num_tokens, "float16") for num_tokens in (1, 64)),
    *((num_tokens, "e4m3") for num_tokens in (64, 4096, 16384)),
    *((num_tokens, "float16") for num_tokens in (4096, 16384, 8)),
    *((num_tokens, "e4m3") for num_tokens in (1, 8)),
    *((num_tokens, "bfloat16") for num_tokens in (32768, 16384, 4096, 64, 8, 1)),
)
_QUICK_CELLS = ((1, "float16"), (9, "e4m3"))

# tokens, parts of a token's elements, num_warps, halves
_OF_FEW = (
    (1, 1, 4, 2), (1, 2, 2, 1), (1, 1, 2, 1), (1, 1, 8, 2), (1, 4, 1, 1), (1, 2, 2, 2), (2, 1, 8, 2),
    (1, 1, 1, 1), (1, 2, 4, 2), (2, 1, 4, 1),
)  # fmt: skip
_OF_MANY = (
    (1, 1, 4, 2), (2, 1, 8, 2), (1, 1, 4, 1), (2, 1, 2, 2), (4, 1, 8, 2), (1, 1, 2, 2), (4, 1, 16, 2),
    (2, 1, 4, 1), (8, 1, 16, 2), (1, 2, 2, 2), (4, 1, 4, 1), (4, 1, 4, 2), (1, 1, 8, 2), (8, 1, 8, 2),
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A number of tokens with a cache dtype; e4m3 is written of fp16 values."""

    num_tokens: int
    kv_dtype: str

    @property
    def label(self) -> str:
        """Such as "T=4096 e4m3"."""
        return f"T={self.num_tokens} {self.kv_dtype}"

    @property
    def case(self) -> Case:
        """As a case of the suites."""
        dtype = "bfloat16" if self.kv_dtype == "bfloat16" else "float16"
        like = (bench_kv_write.KVWriteDecode if self.num_tokens <= _FEW_TOKENS else bench_kv_write.KVWritePrefill).cases[0]
        args = {"num_tokens": self.num_tokens, "kv_dtype": self.kv_dtype, "dtype": dtype}
        return case_with(like, label=self.label, kv_dtype=self.kv_dtype, devices=("cuda", "cpu"), args=args)


def cells(*, quick: bool) -> list[Cell]:
    """In the order in which they are measured."""
    return [Cell(*cell) for cell in (_QUICK_CELLS if quick else _CELLS)]


def short_list(sizes: dict[str, int], kv_dtype: str) -> list[Any]:
    """Configs to try at a shape: the rule's, then by guess, then the other candidates of a search.

    Args:
        sizes: Of the request: num_tokens, num_kv_heads, head_dim.
        kv_dtype: Of the request.
    """
    candidates = configs.WriteConfig.candidates(sizes, kv_dtype)
    whole = max(config.block for config in candidates)
    guesses = _OF_FEW if sizes["num_tokens"] <= _FEW_TOKENS else _OF_MANY
    tried = [configs.WriteConfig(tokens, whole // parts, warps, halves) for tokens, parts, warps, halves in guesses]
    return [config for config in dict.fromkeys([candidates[0], *tried, *candidates]) if config.problem(sizes, kv_dtype) is None]


@dataclass
class Plain:
    """Working sets of the plain copy.

    Attributes:
        sources: [n] int16, of random bits.
        outs: [n] int16, or int8 for an e4m3 cache.
    """

    sources: list[torch.Tensor]
    outs: list[torch.Tensor]

    def call(self, i: int) -> Call:
        """The copy of set `i`: a kernel of the instrument, on a CPU torch's."""
        source, out = self.sources[i], self.outs[i]
        return (lambda: probes.copy(source, out)) if source.device.type == "cuda" else (lambda: out.copy_(source))

    def poison(self) -> None:
        """Makes all outputs wrong."""
        for source, out in zip(self.sources, self.outs, strict=True):
            out.copy_(source + 1)

    def check(self) -> float:
        """Compares all outputs; raises `VerificationError`."""
        for source, out in zip(self.sources, self.outs, strict=True):
            if not torch.equal(out, source.to(out.dtype)):
                raise verify.VerificationError("the plain copy: its output is not its source")
        return 0.0


def plain_copy(sets: bench_kv_write.WriteSets) -> Plain:
    """As many sets as those of the write, of as many elements each."""
    device = sets.slots[0].device
    elements = sets.keys[0].numel() + sets.values[0].numel()
    out_dtype = torch.int8 if sets.pool.k_rows.dtype == torch.uint8 else torch.int16
    sources = kv_pool.spread(len(sets.slots), (elements,), torch.int16, device)
    for i, source in enumerate(sources):
        source.copy_(kv_pool.random_values((elements,), torch.float16, device, seed=i).view(torch.int16))
    return Plain(sources, kv_pool.spread(len(sets.slots), (elements,), out_dtype, device))


def index_copies(sets: bench_kv_write.WriteSets) -> list[Call]:
    """What torch alone does for the same rows: two `index_copy_` a call, behind a division and a cast for an e4m3 cache."""

    def call(i: int) -> Call:
        slots = sets.slots[i].long()
        pool = sets.pool
        halves = ((sets.keys[i], pool.k_rows, pool.k_scale), (sets.values[i], pool.v_rows, pool.v_scale))

        def copied() -> None:
            for values, rows, scale in halves:
                stored = values if scale is None else (values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
                rows.index_copy_(0, slots, stored)

        return copied

    return [call(i) for i in range(len(sets.slots))]


@dataclass
class Trial:
    """The measurements of one sitting.

    Attributes:
        device: Where.
        results: Where they go.
        ceilings: Of the device, for the mix of bytes of each cell.
    """

    device: torch.device
    results: Results
    ceilings: Any
    failed: int = field(default=0)

    def cell(self, cell: Cell, ends_s: float) -> None:
        """Measures a cell until its share of the time is over: peers, configs, the best again, and all on other values."""
        sets = bench_kv_write.write_sets(cell.case, self.device)
        prepared = bench_kv_write.prepared_write(cell.case, sets)
        plain = plain_copy(sets)
        self.reading(cell, PLAIN, None, [plain.call(i) for i in range(len(plain.outs))], plain.poison, plain.check, sets.work)
        self.reading(cell, TORCH, None, index_copies(sets), prepared.poison, prepared.check, sets.work)

        def ours(config: Any) -> float | None:
            with tuned.overridden(KERNEL, config):
                return self.reading(cell, "ours", config, prepared.calls, prepared.poison, prepared.check, sets.work)

        times: dict[Any, float] = {}
        last_s = ends_s - _FINAL_SHARE * (ends_s - now_s())
        for config in short_list(dict(prepared.selection.request.shape), cell.kv_dtype):
            if times and now_s() > last_s:
                break
            if (reading := ours(config)) is not None:
                times[config] = reading
        for _ in range(_FINAL_ROUNDS):
            for config in sorted(times, key=lambda config: times[config])[:_FINAL]:
                if now_s() < ends_s:
                    ours(config)
        if prepared.vary is not None:
            prepared.vary()
        for config in times:
            with tuned.overridden(KERNEL, config):
                self.verified(cell, config, prepared)

    def reading(
        self, cell: Cell, what: str, config: Any, calls: Sequence[Call], poison: Call, check: Callable[[], float], work: Any
    ) -> float | None:
        """Verifies, times and verifies again; microseconds, or None where something failed, which is written too."""
        told = _told(cell, what, config)
        try:
            difference = _verified(calls, poison, check)
            timing = bench_graph(calls, device=self.device, set_bytes=work.moved, rep_ms=_REP_MS, poison=poison)
            check()
        except Exception as error:  # a config that does not compile, fit or compute is told, and the trial goes on
            self.not_measured(told, error)
            return None
        rate, ceiling = work.moved / timing.reading_us / 1e3, self.ceilings.rate(work)
        told |= {"gb_per_s": rate, "ceiling_gb_per_s": ceiling, "share_of_ceiling": rate / ceiling}
        self.results.add(told, latency_us=timing.reading_us, max_abs_diff=difference)
        return float(timing.reading_us)

    def verified(self, cell: Cell, config: Any, prepared: Any) -> None:
        """Compares once more, on the values that are in now; a failure is written."""
        try:
            _verified(prepared.calls, prepared.poison, prepared.check)
        except Exception as error:
            self.not_measured(_told(cell, "ours on edge values", config), error)

    def not_measured(self, told: dict[str, Any], error: Exception) -> None:
        """Tells why something has no number."""
        lines = str(error).splitlines()
        self.failed += 1
        self.results.add(told, reason=f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}")


def _told(cell: Cell, what: str, config: Any) -> dict[str, Any]:
    return {"what": what, "cell": cell.label, "block_size": None, "config": None if config is None else dataclasses.asdict(config)}


def _verified(calls: Sequence[Call], poison: Call, check: Callable[[], float]) -> float:
    poison()
    for call in calls:
        call()
    return check()


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each cell: its best config by the median of its readings, held against the ceiling, the peers and the rule's config."""
    for cell in dict.fromkeys(row["cell"] for row in rows):
        times: dict[tuple[str, str], list[float]] = {}
        for row in rows:
            if row["cell"] == cell and row["latency_us"] is not None:
                times.setdefault((row["what"], _shown(row["config"])), []).append(row["latency_us"])
        medians = {key: statistics.median(readings) for key, readings in times.items()}
        ours = {shown: us for (what, shown), us in medians.items() if what == "ours"}
        if not ours:
            yield f"{cell}: nothing was measured"
            continue
        best = min(ours, key=lambda shown: ours[shown])
        rate = next(row for row in rows if (row["cell"], row["what"], _shown(row["config"])) == (cell, "ours", best) and row["latency_us"])
        share = rate["share_of_ceiling"] * rate["latency_us"] / ours[best]
        parts = [f"{cell}: {best}: {ours[best]:.2f} us, {share:.1%} of the ceiling for its bytes"]
        parts += [f"{ours[best] / us:.3f}x {what}" for (what, _), us in medians.items() if what in (PLAIN, TORCH)]
        yield "; ".join([*parts, f"{ours[best] / next(iter(ours.values())):.3f}x the rule's config"])


def _shown(config: dict[str, Any] | None) -> str:
    return " ".join(f"{name}={value}" for name, value in (config or {}).items())


def compile_some(chosen: Sequence[Cell], own: dict[str, Any], first: int, step: int) -> int:
    """Compiles every `step`-th config of each cell from the `first` on, by the public call on tensors that are not there.

    Args:
        chosen: The cells.
        own: Of `compiled.this_device`.
        first, step: This process's share.
    Returns:
        How many calls were compiled.
    """
    compiled = 0
    with trial_command.compiling_only(own) as cuda:
        for cell in chosen:
            sets = bench_kv_write.write_sets(cell.case, cuda)
            sizes = dict(bench_kv_write.request_of(sets).shape)
            for config in short_list(sizes, cell.kv_dtype)[: len(_OF_MANY)][first::step]:
                try:
                    with tuned.overridden(KERNEL, config):
                        sets.call(0)()
                    compiled += 1
                except Exception as error:  # the trial meets it again, and tells it
                    print(f"compiling for {cell.label}: {type(error).__name__}", file=sys.stderr)
    return compiled


def _trial(device: torch.device, results: Results, ends_s: float) -> Trial:
    del ends_s
    made = Trial(device, results, measured_ceilings(device))
    print(made.ceilings, flush=True)
    return made


def main(argv: Sequence[str], device_context: Any) -> int:
    """The command; returns the exit status: 0, 1 where something failed, 2 where nothing is selected."""
    sitting = trial_command.Sitting(
        prog="python -m asv_bench.tune --trial-write",
        description=(__doc__ or "").partition("\n\n")[0],
        seconds=120.0,
        compile_share=0.3,
        select_example="e4m3|T=64",
        quick_help="a few tokens",
        cells=lambda quick: cells(quick=quick),
        compile_some=compile_some,
        trial=_trial,
        told=lambda cell: _told(cell, "cell", None),
        summary=lambda results: "\n".join(summary(results.rows)),
    )
    return trial_command.main(sitting, argv, device_context)
