"""Chooses the kernel for a request: filter with reasons, then rank on (perf, -preference_score, -priority, name)."""

from __future__ import annotations

import datetime
import math
import numbers
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rapid_llm.errors import BackendError, NoKernelError, PerfProviderError
from rapid_llm.kernels.autotune.config_store import CONFIG_DIR_VARIABLE
from rapid_llm.kernels.ops import registry, tuned
from rapid_llm.kernels.ops.spec import KernelSpec, Measurement, Request

__all__ = [
    "FORCE_BACKEND_VARIABLE",
    "Candidate",
    "PerfProvider",
    "Rejection",
    "Selection",
    "decision_state",
    "dispatch",
    "set_perf_provider",
]

PerfProvider = Callable[[KernelSpec, Request], "float | Measurement | None"]
"""Gives the measured time of a spec for a request in milliseconds, bare or with its source, None where it was not measured."""

FORCE_BACKEND_VARIABLE = "RAPID_LLM_FORCE_BACKEND"

# These change what is available or chosen without changing the request, so they belong to a decision's key.
_DECIDING_VARIABLES = (FORCE_BACKEND_VARIABLE, "TRITON_INTERPRET", CONFIG_DIR_VARIABLE)
_MAX_CACHED_DECISIONS = 4096


@dataclass(frozen=True)
class Candidate:
    """A spec that can serve the request, with what it is ranked on.

    Attributes:
        spec: The spec.
        perf_ms: Measured time that counts for the ranking; inf where there is none.
        preference_score: How many of its preferences hold.
        note: Says what `perf_ms` is, or why a measurement does not count.
        measurement: Where the time comes from; None where nothing says so.
    """

    spec: KernelSpec
    perf_ms: float
    preference_score: int
    note: str
    measurement: Measurement | None = None

    @property
    def rank_key(self) -> tuple[float, int, int, str]:
        """Ascending: the smallest is chosen."""
        return (self.perf_ms, -self.preference_score, -self.spec.priority, self.spec.name)


@dataclass(frozen=True)
class Rejection:
    """A spec that cannot serve the request, with every reason in the fixed order of the checks."""

    spec: KernelSpec
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Selection:
    """A decision and how it came about.

    Attributes:
        request: What was asked for.
        ranking: Specs that can serve it, the chosen one first.
        rejected: The others, by name.
        forced: What named the backend, such as 'backend="triton"'; None where nothing did.
        config: Tuned config of the chosen kernel; None leaves it to the kernel's rule.
        config_note: Says where the config comes from.
    """

    request: Request
    ranking: tuple[Candidate, ...]
    rejected: tuple[Rejection, ...]
    forced: str | None = None
    config: Any = None
    config_note: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for the chosen kernel beside those of the call."""
        return {} if self.config is None else {"config": self.config}

    @property
    def spec(self) -> KernelSpec:
        """The chosen spec."""
        return self.ranking[0].spec

    def explain(self) -> str:
        """The decision as text: request, winner, runners-up with their rank keys, and every rejection's reasons."""
        lines = [f"{self.request.op}: {self.spec.name}", f"  request: {self.request.describe()}"]
        if self.forced is not None:
            lines.append(f"  forced by {self.forced}: the golden gate is bypassed, every other check holds")
        if self.spec.config is not None:
            lines.append(f"  {self.config_note}")
        lines.append("  ranked on (perf, -preference_score, -priority, name):")
        for place, candidate in enumerate(self.ranking, start=1):
            perf_ms, *rest = candidate.rank_key
            key = ", ".join(str(part) for part in (f"{perf_ms:.6g} ms", *rest))
            lines.append(f"    {place}. {candidate.spec.name} ({key}): {candidate.note}")
            if candidate.measurement is not None:
                lines.append(f"       {_provenance(candidate.measurement)}")
            lines.append(f"       {candidate.spec.requirements()}")
        lines.append("  rejected:" if self.rejected else "  rejected: none")
        lines += _rejection_lines(self.rejected)
        return "\n".join(lines)


class _Decisions:
    """The perf provider and the decisions made with it."""

    def __init__(self) -> None:
        self.provider: PerfProvider | None = None
        self.providers = 0
        self.generation = -1
        self.cache: dict[tuple[Request, str | None, tuple[object, ...]], Selection] = {}


_decisions = _Decisions()


def set_perf_provider(provider: PerfProvider | None) -> PerfProvider | None:
    """Installs the source of measured times, and forgets every decision made so far.

    Args:
        provider: `provider(spec, request)` gives milliseconds, or None where that spec was not measured for that
            request. None installs "nothing is measured".

    Returns:
        The provider that was installed before.
    """
    before = _decisions.provider
    _decisions.provider = provider
    _decisions.providers += 1
    _decisions.cache.clear()
    return before


def decision_state() -> tuple[object, ...]:
    """Everything beside a request and a named backend that a decision depends on; another value makes a decision stale."""
    # Neither generation ever falls.
    return (registry.generation() + tuned.generation(), _decisions.providers, _deciding_values())


_Environment = type(os.environ)
_FORCED, _INTERPRETED, _CONFIGS = map(os.environ.encodekey, _DECIDING_VARIABLES)


def _deciding_values() -> tuple[object, ...]:
    """The values of the deciding variables, to be held against each other only."""
    environment = os.environ
    # A missing variable costs `os.environ.get` two exceptions in every call. The dictionary below it, which all of its methods read and
    # write, has the values as the system encodes them. Where something else stands in for os.environ, that is asked.
    if type(environment) is _Environment and type(values := environment.__dict__.get("_data")) is dict:
        get = values.get
        return get(_FORCED), get(_INTERPRETED), get(_CONFIGS)
    return tuple(map(environment.get, _DECIDING_VARIABLES))


def dispatch(request: Request, *, backend: str | None = None) -> Selection:
    """Chooses the kernel that serves `request`.

    A spec is rejected for its device, capability, availability, dtypes, layout, shape, or because its recorded
    verification failed. A backend that is named, by `backend` or else by the environment variable
    RAPID_LLM_FORCE_BACKEND, passes over the last of these and never falls back to another backend.

    Args:
        request: What is needed.
        backend: Name of the backend that has to serve it; None leaves the choice to the ranking.

    Raises:
        BackendError: No registered spec has the named backend.
        NoKernelError: No spec can serve the request; the message lists each with its reasons.
        PerfProviderError: The perf provider raised, or gave something that is no time.
    """
    generation = registry.generation() + tuned.generation()  # neither ever falls
    if _decisions.generation != generation or len(_decisions.cache) >= _MAX_CACHED_DECISIONS:
        _decisions.cache.clear()
        _decisions.generation = generation
    key = (request, backend, _deciding_values())
    selection = _decisions.cache.get(key)
    if selection is None:
        selection = _decide(request, *_forced_backend(backend))
        _decisions.cache[key] = selection
    return selection


def _forced_backend(backend: str | None) -> tuple[str | None, str | None]:
    """The backend that has to serve the call, and what says so."""
    if backend is not None:
        name, source = backend, f'backend="{backend}"'
    elif variable := os.environ.get(FORCE_BACKEND_VARIABLE):
        name, source = variable, f"{FORCE_BACKEND_VARIABLE}={variable}"
    else:
        return None, None
    if name not in registry.backends():
        choices = ", ".join(registry.backends())
        raise BackendError(f"dispatch expected one of the backends {choices}, got {source}; name one of these or none.")
    return name, source


def _decide(request: Request, forced: str | None, source: str | None) -> Selection:
    candidates: list[Candidate] = []
    rejected: list[Rejection] = []
    for spec in registry.specs_for(request.op):
        reasons = list(spec.rejections(request))
        if forced is not None and spec.backend != forced:
            reasons.insert(0, f"backend {spec.backend} is not the one that {source} names")
        elif forced is None and spec.golden is not None and not spec.golden.verified:
            reasons.append(f"its verification failed (max_abs_diff {spec.golden.max_abs_diff})")
        if reasons:
            rejected.append(Rejection(spec, tuple(reasons)))
        else:
            perf_ms, note, measurement = _perf(spec, request)
            candidates.append(Candidate(spec, perf_ms, spec.preference_score(request), note, measurement))
    if not candidates:
        raise NoKernelError(_nothing_serves(request, rejected, source))
    ranking = tuple(sorted(candidates, key=lambda c: c.rank_key))
    return Selection(request, ranking, tuple(rejected), source, *tuned.chosen_config(ranking[0].spec, request))


def _perf(spec: KernelSpec, request: Request) -> tuple[float, str, Measurement | None]:
    """Milliseconds that count for the ranking, what to say about them, and where they come from."""
    provider = _decisions.provider
    if provider is None:
        return math.inf, "unmeasured (no perf provider is installed)", None
    try:
        given = provider(spec, request)
    except Exception as error:
        raise PerfProviderError(
            f"The perf provider raised {type(error).__name__} for {spec.name} ({error}); it should give None for what was not measured."
        ) from error
    if given is None:
        return math.inf, "unmeasured", None
    measurement = given if isinstance(given, Measurement) else None
    perf_ms = given.latency_ms if isinstance(given, Measurement) else given
    if isinstance(perf_ms, bool) or not isinstance(perf_ms, numbers.Real) or not 0 < perf_ms < math.inf:
        raise PerfProviderError(
            f"The perf provider gave {perf_ms!r} for {spec.name}, expected a positive finite number of milliseconds, "
            "or None for what was not measured."
        )
    if spec.golden is None or not spec.golden.verified:
        why = "no golden record" if spec.golden is None else "verification failed"
        return math.inf, f"measured {float(perf_ms):.6g} ms, which does not count: {why}", measurement
    return float(perf_ms), "measured and verified", measurement


def _provenance(measurement: Measurement) -> str:
    """Source, day and age of a measurement; its age is that of the moment in which this is asked."""
    age = datetime.datetime.now(datetime.timezone.utc) - measurement.measured_at
    return f"measured as {measurement.source}, {measurement.measured_at:%Y-%m-%d}, {age.days} days ago"


def _nothing_serves(request: Request, rejected: list[Rejection], source: str | None) -> str:
    asked = f" with {source}" if source else ""
    head = f"No kernel serves {request.op}{asked} for {request.describe()}."
    if not rejected:
        return f"{head} No spec is registered for that op."
    return "\n".join([f"{head} Change what the reasons name:", *_rejection_lines(rejected)])


def _rejection_lines(rejected: list[Rejection] | tuple[Rejection, ...]) -> list[str]:
    lines = []
    for rejection in rejected:
        lines.append(f"    {rejection.spec.name}: {'; '.join(rejection.reasons)}")
        lines.append(f"       {rejection.spec.requirements()}")
    return lines
