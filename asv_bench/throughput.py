"""The asv benchmark type of this project: `track_` methods that return one throughput sample a process.

Stock `track_` benchmarks keep the last value only. This type hands the value to asv as a sample, so that rounds accumulate, and lets class
attributes set the number of rounds and the direction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from asv_runner import discovery
from asv_runner.benchmarks import benchmark_types
from asv_runner.benchmarks._base import _get_first_attr
from asv_runner.benchmarks.track import TrackBenchmark

_PACKAGE = __name__.partition(".")[0]
_disc_modules = discovery.disc_modules


class ThroughputBenchmark(TrackBenchmark):  # type: ignore[misc]  # asv_runner has no types
    """A `track_` benchmark with samples, rounds and a declared direction."""

    name_regex = re.compile(r"^track_.+$")

    def __init__(self, name: str, func: Any, attr_sources: list[Any]) -> None:
        super().__init__(name, func, attr_sources)
        self.rounds = int(_get_first_attr(attr_sources, "rounds", 1))
        declared = _get_first_attr(attr_sources, "higher_is_better", None)
        self.higher_is_better = self.unit.endswith("/s") if declared is None else bool(declared)

    def run(self, *param: Any) -> Any:
        value = super().run(*param)
        if isinstance(value, (int, float)):
            return {"samples": [float(value)], "number": 1}
        return value


def register() -> None:
    """Puts the type first, so that it claims `track_` before asv's own, and keeps discovery to the suites.

    asv imports every module below the suites' package in each process that it starts; the instrument's own modules import torch and
    Triton, which takes seconds each time, and hold no benchmarks.
    """
    if ThroughputBenchmark not in benchmark_types:
        benchmark_types.insert(0, ThroughputBenchmark)
    discovery.disc_modules = _suites_only


def _suites_only(module_name: str, ignore_import_errors: bool = False) -> Iterator[Any]:
    package, _, name = module_name.partition(".")
    if package != _PACKAGE or not name or name.startswith("bench_"):
        yield from _disc_modules(module_name, ignore_import_errors)
