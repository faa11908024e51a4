"""The figures of a compiled kernel that are compared: which way is better, what decides the gate, and what a change usually means.

The figures have no noise. A rule with a tolerance is about what a change means, not about chance: below it the change is told and passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ci.compiled_model import CompiledChange, CompiledVerdict

Figures = Mapping[str, int]
_WIDTHS = (8, 16, 32, 64, 128, 256)


def _total(figures: Figures, access: str) -> int:
    return sum(figures.get(f"{access}_{width}", 0) for width in _WIDTHS)


def _mean_bits(figures: Figures, *accesses: str) -> float:
    """Mean width of a memory instruction; 0 where there is none."""
    count = sum(_total(figures, access) for access in accesses)
    bits = sum(width * figures.get(f"{access}_{width}", 0) for access in accesses for width in _WIDTHS)
    return bits / count if count else 0.0


def _named(name: str) -> Callable[[Figures], float]:
    return lambda figures: figures.get(name, 0)


def _tensor_kind(figures: Figures) -> float:
    """2 where the newer tensor instructions are used (wgmma, tcgen05), 1 for mma, 0 for none."""
    return 2.0 if figures.get("wgmma", 0) or figures.get("tcgen05", 0) else float(figures.get("mma", 0) > 0)


@dataclass(frozen=True)
class Metric:
    """One figure of a launch.

    Attributes:
        name, unit: As reports call it.
        better: "lower", "higher", or "none" where a change is neither.
        gates: Whether the worse direction is a regression.
        tolerance: Relative change up to which it is not.
        meaning: What a change for the worse usually means.
        of: Computes it from the figures of a launch.
    """

    name: str
    unit: str
    better: Literal["lower", "higher", "none"]
    gates: bool
    tolerance: float
    meaning: str
    of: Callable[[Figures], float]


METRICS: tuple[Metric, ...] = (
    Metric("spill stores", "bytes", "lower", True, 0, "registers do not suffice: values go to local memory", _named("spill_store_bytes")),
    Metric("spill loads", "bytes", "lower", True, 0, "registers do not suffice: values come from local memory", _named("spill_load_bytes")),
    Metric("stack", "bytes", "lower", True, 0, "an array that is indexed at run time, or spills", _named("stack_bytes")),
    Metric(
        "local memory instructions", "", "lower", True, 0, "loads and stores of local memory, which is off the chip",
        lambda f: f.get("local_loads", 0) + f.get("local_stores", 0),
    ),
    Metric(
        "mean width of global loads", "bits", "higher", True, 0.1, "a lost vector load: a stride or an alignment is not known any more",
        lambda f: _mean_bits(f, "global_loads", "async_copies"),
    ),
    Metric(
        "mean width of global stores", "bits", "higher", True, 0.1, "a lost vector store: a stride or an alignment is not known any more",
        lambda f: _mean_bits(f, "global_stores"),
    ),
    Metric(
        "asynchronous copies", "", "higher", True, 0.1, "a lost or shorter pipeline: num_stages, or loads that cannot be copied ahead",
        lambda f: _total(f, "async_copies") if not f.get("bulk_copies", 0) else float(2**31),
    ),
    Metric("tensor-core generation", "", "higher", True, 0, "a dot left the tensor cores, or their newer instructions", _tensor_kind),
    Metric(
        "occupancy", "warps", "higher", True, 0.25, "fewer programs hide each other's waits: registers, shared memory or block size",
        _named("occupancy_warps"),
    ),
    Metric("registers", "a thread", "lower", False, 0, "nothing by itself: see occupancy and spills", _named("registers")),
    Metric("shared memory", "bytes", "lower", False, 0, "another tile or another number of stages: see occupancy", _named("shared_bytes")),
    Metric("threads", "a block", "none", False, 0, "another num_warps", _named("threads")),
    Metric("conversions", "", "lower", False, 0.1, "operands are widened or narrowed more often", _named("conversions")),
    Metric(
        "tensor-core instructions", "", "none", False, 0, "another tile or another unrolling",
        lambda f: f.get("mma", 0) + f.get("wgmma", 0) + f.get("tcgen05", 0),
    ),
    Metric("global loads", "", "lower", False, 0.1, "more of the data is loaded, or in smaller parts", lambda f: _total(f, "global_loads")),
    Metric("global stores", "", "lower", False, 0.1, "more is stored, or in smaller parts", lambda f: _total(f, "global_stores")),
    Metric("barriers", "", "lower", False, 0, "the warps of a program wait for each other more often", _named("barriers")),
    Metric("instructions", "", "lower", False, 0.02, "more code: unrolling, another tile, or more work", _named("instructions")),
    Metric("code size", "bytes", "lower", False, 0.02, "as instructions", _named("code_bytes")),
)  # fmt: skip
"""In the order in which they are told; docs/compiled.md has the same table."""

LAUNCHES_MEANING = "one more kernel or torch operation in each call: a few µs each, and its own traffic"
LIKE_LAUNCHES = "launches of a like call"
LIKE_LAUNCHES_MEANING = "as launches, in every call of a form but the first: the launcher, or what only a call of a known form does"
PATH_MEANING = "the host's time of every call: Triton binds and specialises each argument again, or does so no more"
GRID_MEANING = "another split of the work: programs differ in number or shape"
ARGUMENTS_MEANING = "other strides, sizes or scales, or an alignment that is not known any more"


def compare_figures(before: Figures, after: Figures) -> list[CompiledChange]:
    """What differs between two launches, in the order of `METRICS`."""
    changes = []
    for metric in METRICS:
        old, new = metric.of(before), metric.of(after)
        if old != new:
            changes.append(CompiledChange(metric.name, metric.unit, _text(old), _text(new), _verdict(metric, old, new), metric.meaning))
    return changes


def _verdict(metric: Metric, old: float, new: float) -> CompiledVerdict:
    if not metric.gates:
        return CompiledVerdict.CHANGED
    worse = new > old if metric.better == "lower" else new < old
    beyond = abs(new - old) > metric.tolerance * old
    if not beyond:
        return CompiledVerdict.CHANGED
    return CompiledVerdict.REGRESSED if worse else CompiledVerdict.IMPROVED


def _text(value: float) -> str:
    if value >= 2**31:
        return "bulk"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
