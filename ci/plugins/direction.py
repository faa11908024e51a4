"""Makes `asv compare` and `asv continuous` treat throughputs as higher-is-better, and keeps the table when a row fails.

A benchmark is higher-is-better if benchmarks.json says so (`higher_is_better`), else if its unit ends in "/s". Of a benchmark that is
`exact` (what a compiler made) any difference counts, however small: it has no noise.

Exit status of `asv continuous` with this plugin: 0 nothing got worse (rises and new rows included), 1 something got worse, 2 a row
failed or is newly skipped on the tested commit; the table is printed in each case.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from asv import runner, util
from asv.benchmarks import Benchmarks
from asv.commands import compare, continuous, run

Cell = tuple[str, str, int]


class Higher(float):
    """A result of which more is better: a marker, arithmetic unchanged."""

    factor: float | None = None
    """The row's own factor, where `ci.plugins.bands` knows one."""


class Exact(float):
    """A result without noise, of which less is better."""


class ExactHigher(Exact):
    """A result without noise, of which more is better."""


def higher_is_better(benchmark: dict[str, Any] | None) -> bool:
    """Direction of a benchmark as benchmarks.json declares it."""
    declared = (benchmark or {}).get("higher_is_better")
    return str((benchmark or {}).get("unit", "")).endswith("/s") if declared is None else bool(declared)


class _Seen:
    """What the comparison of one `asv continuous` call has seen."""

    def __init__(self) -> None:
        self.higher: set[str] = set()
        self.exact: set[str] = set()
        self.failed: list[str] = []
        self.new: list[str] = []

    def compare(self, base: dict[Cell, Any], head: dict[Cell, Any]) -> None:
        self.failed = sorted({cell[0] for cell, value in head.items() if value is None or (_skipped(value) and _measured(base.get(cell)))})
        self.new = sorted({cell[0] for cell, value in head.items() if _measured(value) and not _measured(base.get(cell))})


_seen = _Seen()
_original_table = compare.Compare.print_table.__func__
_original_unroll = compare.unroll_result
_original_better = compare._is_result_better
_original_continuous = continuous.Continuous.run.__func__
_original_human = util.human_value


def _skipped(value: Any) -> bool:
    return value is not None and value != value


def _measured(value: Any) -> bool:
    return value is not None and value == value


def _cells(results: Iterable[tuple[Any, ...]]) -> dict[Cell, Any]:
    cells: dict[Cell, Any] = {}
    for name, _params, values, _stats, _samples, _version, _machine, env_name in results:
        listed = values if isinstance(values, list) else [values]
        cells.update({(name, env_name, i): value for i, value in enumerate(listed)})
    return cells


def print_table(cls: Any, /, conf: Any, hash_1: str, hash_2: str, factor: float, split: bool, **kwargs: Any) -> Any:
    known = Benchmarks.load(conf)
    _seen.higher = {name for name, benchmark in known.items() if higher_is_better(benchmark)}
    _seen.exact = {name for name, benchmark in known.items() if benchmark.get("exact")}
    if kwargs.get("resultset_2") is not None:  # called by continuous
        kwargs["resultset_1"], kwargs["resultset_2"] = list(kwargs["resultset_1"]), list(kwargs["resultset_2"])
        _seen.compare(_cells(kwargs["resultset_1"]), _cells(kwargs["resultset_2"]))
    return _original_table(cls, conf, hash_1, hash_2, factor, split, **kwargs)


def unroll(name: str, params: Any, *values: Any) -> Iterator[tuple[Any, ...]]:
    for label, value, *rest in _original_unroll(name, params, *values):
        yield (label, _marked(name, value), *rest)


def _marked(name: str, value: Any) -> Any:
    if not isinstance(value, (int, float)):
        return value
    if name in _seen.exact:
        return ExactHigher(value) if name in _seen.higher else Exact(value)
    return Higher(value) if name in _seen.higher else value


def better(a: Any, b: Any, a_stats: Any, b_stats: Any, factor: float, use_stats: bool = True) -> bool:
    """asv's rule on the reciprocals of throughputs; the rank test between the samples has no direction."""
    if isinstance(a, Exact) and isinstance(b, Exact):
        return float(a) > float(b) if isinstance(a, ExactHigher) else float(a) < float(b)
    if isinstance(a, Higher):
        a, b = (1.0 / float(v) if v else float("inf") for v in (a, b))
    return bool(_original_better(a, b, a_stats, b_stats, factor, use_stats=use_stats))


def _human_value(value: Any, unit: str | None, err: float | None = None) -> str:
    """asv's wording, with four digits for the throughput units that it does not know."""
    if not _measured(value) or not str(unit).endswith("/s"):
        return str(_original_human(value, unit, err=err))
    spread = "" if err is None else f"±{100 * err / value:.1f}%" if value else ""
    return f"{value:,.4g}{spread}{unit}" if abs(value) < 1e4 else f"{value:,.0f}{spread}{unit}"


class _RunForContinuous:
    """Stands for the Run command inside continuous: failed rows (2) do not hide the comparison."""

    @staticmethod
    def run(*args: Any, **kwargs: Any) -> Any:
        status = run.Run.run(*args, **kwargs)
        return None if status == 2 else status


def _continuous(cls: Any, /, conf: Any, **kwargs: Any) -> Any:
    _seen.failed, _seen.new = [], []
    status = _original_continuous(cls, conf, **kwargs)
    print("For throughputs + marks a drop and - a rise; the ratio is tested / base.")
    if _seen.new:
        print(f"NEW ON THE TESTED COMMIT: {', '.join(_seen.new)}")
    if _seen.failed:
        print(f"FAILED OR NEWLY SKIPPED ON THE TESTED COMMIT: {', '.join(_seen.failed)}")
        return 2
    return int(status or 0)


def setup() -> None:
    compare.Compare.print_table = classmethod(print_table)
    compare.unroll_result = unroll
    compare._is_result_better = better
    for module in (util, compare, runner):
        if hasattr(module, "human_value"):
            module.human_value = _human_value
    continuous.Run = _RunForContinuous
    continuous.Continuous.run = classmethod(_continuous)
