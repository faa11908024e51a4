"""What a suite is: cases, and how each is built; the rest (verify, time, record) is the same for all.

A suite class declares `cases`, builds one of them in `build`, and has one `track_` method that returns `self.value(...)`. asv calls
`setup_cache` once a round and commit; it starts one fresh process that measures every row of every suite (`asv_bench.session`), and the
`track_` methods hand out what that process found. A row that could not be verified or timed raises there, so that asv stores no number.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from asv_bench import kv_pool, microbench

if TYPE_CHECKING:
    import torch

Bottleneck = Literal["read-bandwidth", "dequant", "write-bandwidth", "compute", "launch", "host"]
BOTTLENECKS: tuple[str, ...] = get_args(Bottleneck)
UNITS = ("GB/s", "TFLOP/s", "calls/s")
"""Throughputs that are told: of bytes, of FLOPs, and of calls where neither says what bounds them."""
Outcomes = dict[str, dict[str, Any]]
Track = Callable[[Any, Outcomes, str], float]

_SETUP_TIMEOUT_S = 1800


class RowError(RuntimeError):
    """Raised in place of a number: the row failed, and why."""


@dataclass(frozen=True)
class Case:
    """One row of a suite.

    Attributes:
        label: States everything that changes the number; it is the asv parameter.
        bottleneck: Chooses the timer, the metric and the section of the report.
        devices: Device types on which the row is measured; elsewhere it is skipped with the reason.
        phase: "prefill" or "decode", None for what has neither.
        kv_dtype: "float16", "bfloat16", "e4m3", "int8", or None.
        args: Arguments of the suite's `build`.
    """

    label: str
    bottleneck: Bottleneck
    devices: tuple[str, ...]
    phase: Literal["prefill", "decode"] | None = None
    kv_dtype: str | None = None
    args: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass
class Prepared:
    """A case that is ready to be verified and timed.

    Attributes:
        calls: The operation on rotating working sets; each call is the operation only.
        work: Theoretical cost of one call.
        poison: Makes every output wrong, so that a call that writes nothing is seen.
        check: Compares the outputs with the reference; returns the largest absolute difference, raises VerificationError.
        selection: What `dispatch()` chose for exactly these inputs; None where nothing is dispatched.
        called: Name of what the calls run where nothing is dispatched; None for a control.
        reset: Brings the state back before each call, for calls that change it.
        vary: Changes inputs in place, and what the check expects with them, so that a remembered result is a wrong one.
        inputs: Index tensors whose content identifies the input.
    """

    calls: Sequence[Callable[[], object]]
    work: microbench.Work
    poison: Callable[[], object]
    check: Callable[[], float]
    selection: Any = None
    called: str | None = None
    reset: Callable[[], object] | None = None
    vary: Callable[[], object] | None = None
    inputs: Sequence[torch.Tensor] = ()


class Suite:
    """Base of the suites; see the module's docstring."""

    op: ClassVar[str]
    unit: ClassVar[str]
    """Unit of the `track_` method; read from it."""
    cases: ClassVar[tuple[Case, ...]]
    impl: ClassVar[dict[str, str]]
    """KernelSpec name by device type: the module's `_IMPL`, or "vendor:<op>" names of controls."""
    control: ClassVar[bool] = False
    work_version: ClassVar[str] = "w1"
    """Version of the work formula and the cases' construction: raise it with any change that can move a number."""

    rounds = 7  # the fewest with which asv's rank test can find a difference
    timeout = 120
    params: ClassVar[list[list[str]]]
    param_names: ClassVar[list[str]] = ["case"]
    version: ClassVar[str]

    def __init_subclass__(cls) -> None:
        labels = [case.label for case in cls.cases]
        if len(set(labels)) != len(labels):
            raise ValueError(f"{cls.__name__} has two cases with one label")
        for case in cls.cases:
            if case.bottleneck not in BOTTLENECKS:
                known = ", ".join(BOTTLENECKS)
                raise ValueError(f"{cls.__name__}: the bottleneck of {case.label!r} is {case.bottleneck!r}, which is none of {known}")
        cls.params = [labels]
        cls.unit = _track_method(cls).unit
        cls.version = f"{microbench.PROTOCOL}.{kv_pool.PROTOCOL}.{cls.work_version}"

    def setup_cache(self) -> Outcomes:
        from asv_bench import session

        return session.measure()

    setup_cache.timeout = _SETUP_TIMEOUT_S  # type: ignore[attr-defined]

    def setup(self, outcomes: Outcomes, case: str) -> None:
        """Skips, for asv, what the measuring process skipped."""
        outcome = outcomes.get(row_id(benchmark_name(type(self)), case))
        if outcome is None:
            raise NotImplementedError("not selected")
        if outcome["status"] == "skipped":
            raise NotImplementedError(outcome["reason"])

    def value(self, outcomes: Outcomes, case: str) -> float:
        """The throughput that the measuring process found.

        Raises:
            RowError: It found none.
        """
        outcome = outcomes[row_id(benchmark_name(type(self)), case)]
        if outcome["status"] != "ok":
            raise RowError(f"{outcome['status']}: {outcome['reason']}")
        return float(outcome["value"])

    def build(self, case: Case, device: torch.device) -> Prepared:
        """Makes the inputs of a case on `device`."""
        raise NotImplementedError(f"{type(self).__name__} has no build")


@dataclass(frozen=True)
class SuiteRow:
    """A case with the suite it belongs to and the asv name of its benchmark."""

    benchmark: str
    suite: type[Suite]
    case: Case

    @property
    def id(self) -> str:
        return row_id(self.benchmark, self.case.label)

    def describe(self) -> dict[str, Any]:
        """The part of the row's record that is known before it is measured."""
        suite, case = self.suite, self.case
        return {
            "benchmark": self.benchmark,
            "params": [case.label],
            "op": suite.op,
            "control": suite.control,
            "bottleneck": case.bottleneck,
            "phase": case.phase,
            "kv_dtype": case.kv_dtype,
            "unit": suite.unit,
            "version": suite.version,
        }


def row_id(benchmark: str, case: str) -> str:
    return f"{benchmark}({case})"


def throughput(unit: str) -> Callable[[Track], Track]:
    """Marks a `track_` method as returning a throughput in `unit`, of which more is better.

    asv keeps attributes of functions, not of classes.

    Args:
        unit: One of `UNITS`.
    Raises:
        ValueError: It is another.
    """
    if unit not in UNITS:
        raise ValueError(f"a throughput is told in {', '.join(UNITS)}, and not in {unit!r}")

    def mark(method: Track) -> Track:
        vars(method).update(unit=unit, higher_is_better=True)
        return method

    return mark


def _track_method(suite: type[Suite]) -> Any:
    """The one `track_` method of a suite.

    Raises:
        TypeError: It has none, or several, or one that is not marked.
    """
    methods = [value for name, value in vars(suite).items() if name.startswith("track_")]
    if len(methods) == 1 and not hasattr(methods[0], "unit"):
        raise TypeError(f"the track_ method of {suite.__name__} is not marked by suite.throughput")
    if len(methods) != 1:
        raise TypeError(f"{suite.__name__} has to have one track_ method, marked by suite.throughput, not {len(methods)}")
    return methods[0]


def benchmark_name(suite: type[Suite]) -> str:
    """The name that asv gives the suite's `track_` method."""
    module = suite.__module__
    if module == "__main__":
        module = str(sys.modules["__main__"].__spec__.name)  # type: ignore[union-attr]  # scripts run by -m
    return f"{module.partition('.')[2]}.{suite.__name__}.{_track_method(suite).__name__}"


def rows_of(suites: Sequence[type[Suite]]) -> Iterator[SuiteRow]:
    for suite in suites:
        for case in suite.cases:
            yield SuiteRow(benchmark_name(suite), suite, case)


def all_rows() -> list[SuiteRow]:
    """Every row of every `bench_*` module, controls first."""
    package = importlib.import_module("asv_bench")
    suites: list[type[Suite]] = []
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda i: i.name):
        if info.name.startswith("bench_"):
            suites.extend(suites_in(importlib.import_module(f"asv_bench.{info.name}")))
    return list(rows_of(sorted(suites, key=lambda s: not s.control)))


def suites_in(module: Any) -> list[type[Suite]]:
    """The suite classes that a module defines, in order of definition."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Suite) and value is not Suite and value.__module__ == module.__name__
    ]


def main(module: Any) -> int:
    """Script mode of a suite: measures its rows in this process and prints the table with `explain()` beside it."""
    from asv_bench import worker

    return worker.run_script(list(rows_of(suites_in(module))), title=(module.__doc__ or "").strip().splitlines()[0])


def case_with(case: Case, **changes: Any) -> Case:
    """A copy of a case with some fields replaced."""
    return dataclasses.replace(case, **changes)
