"""The data classes that pass between the rooms of the gate: results -> compare -> report.

Nothing here computes a verdict. Throughputs are in the row's `unit`, latencies in microseconds, effects are relative changes of
latency (``+0.03`` is 3 % slower), whatever the direction of the metric.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from ci.compiled_model import CompiledResult

Direction = Literal["higher", "lower"]


class RowVerdict(str, Enum):
    """What the gate says of one row."""

    PASS = "PASS"
    IMPROVED = "IMPROVED"
    REGRESSED = "REGRESSED"
    CLEARED = "CLEARED"
    UNCONFIRMED = "UNCONFIRMED"
    NEW = "NEW"
    MISSING = "MISSING"
    FAILED = "FAILED"
    UNVERIFIED = "UNVERIFIED"
    VIOLATION = "VIOLATION"
    INVALID = "INVALID"
    NOT_COMPARABLE = "NOT COMPARABLE"
    SKIPPED = "SKIPPED"
    BLIND = "BLIND"


class RunVerdict(str, Enum):
    """What the gate says of the whole run."""

    PASS = "PASS"
    REGRESSION = "REGRESSION"
    INCOMPLETE = "INCOMPLETE"
    BASELINE_INVALID = "BASELINE INVALID"
    RUNNER_UNFIT = "RUNNER UNFIT"
    WRONG_RESULTS = "WRONG RESULTS"


@dataclass(frozen=True, order=True)
class RowKey:
    """Identity of a row: the asv benchmark name and its parameter texts, in order."""

    benchmark: str
    params: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.benchmark}({', '.join(self.params)})" if self.params else self.benchmark


@dataclass(frozen=True)
class RowRecord:
    """What one process wrote of one row beside the asv sample (schema: baselines/schema/process-record.schema.json)."""

    key: RowKey
    process: str
    status: Literal["ok", "failed", "unverified", "violation", "invalid", "skipped"]
    reason: str | None
    op: str
    impl: str
    control: bool
    bottleneck: str
    phase: str | None
    kv_dtype: str | None
    unit: str
    value: float | None
    latency_us: float | None
    timer: str
    instrument: str
    floor_us: float | None
    samples: int
    gb_per_s: float | None
    tflop_per_s: float | None
    peak_fraction: float | None
    copy_fraction: float | None
    max_abs_diff: float | None
    explain: str
    version: str
    flags: tuple[str, ...] = ()
    input_hash: str | None = None
    launch_hash: str | None = None
    quantiles_us: tuple[float, ...] = ()
    """The 20 % and 80 % quantiles of the latency within the process."""
    l2: str | None = None
    flops: float | None = None
    moved_bytes: float | None = None
    rtol: float | None = None
    atol: float | None = None
    tick_us: float | None = None
    """Resolution of the timer for one call, where the process knows it."""
    estimator: str | None = None
    """How the latency is made from the samples: "median", or "quiet" (the first decile of the blocks of a host timer)."""
    host_us: float | None = None
    """Time in which the host enqueues a call, where the timer measured it."""
    ceiling_fraction: float | None = None
    """Share of the rate that the same process measured for the row's mix of reads and writes."""
    host_floor_us: float | None = None
    """`floor_us` where the row is held against it: a row of which `bench_host` read both beside a CUDA device (`ci.host_floor`)."""


@dataclass(frozen=True)
class ProcessRecord:
    """One measuring process: its environment, the ceilings it measured, and its rows."""

    process: str
    commit: str
    env_name: str
    started_at: str
    environment: dict[str, object]
    ceilings: dict[str, float]
    rows: tuple[RowRecord, ...]
    source: str
    finished_at: str | None = None
    protocol: str = ""


@dataclass(frozen=True)
class RowResult:
    """One row of one commit as asv stored it, joined with its records.

    `samples` has one value a process. `state` says whether there is anything to compare; `reason` why not.
    """

    key: RowKey
    unit: str
    direction: Direction
    version: str
    state: Literal["measured", "failed", "skipped", "invalid", "unverified", "violation"]
    samples: tuple[float, ...] = ()
    reason: str | None = None
    records: tuple[RowRecord, ...] = ()
    declared_version: str = ""
    """The version in benchmarks.json; `version` is the one that the result was measured with."""

    @property
    def record(self) -> RowRecord | None:
        """The last process' record, for what does not change between processes."""
        return self.records[-1] if self.records else None


@dataclass(frozen=True)
class CommitResult:
    """All rows of one commit on one machine in one environment."""

    machine: str
    commit: str
    env_name: str
    date_ms: int
    rows: dict[RowKey, RowResult]
    params: dict[str, str]
    source: str
    processes: tuple[ProcessRecord, ...] = ()
    foreign: bool = False
    """Read without records: values only, nothing says how they were measured or whether they were verified."""
    notices: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    """Names with results in this file that benchmarks.json no longer declares."""


@dataclass(frozen=True)
class RowOutcome:
    """A row's verdict with all that a reader needs to judge it."""

    key: RowKey
    verdict: RowVerdict
    reason: str
    section: str
    control: bool = False
    flags: tuple[str, ...] = ()
    unit: str = ""
    direction: Direction = "higher"
    value: float | None = None
    """Of the commit under test."""
    baseline: float | None = None
    """What the base would have read beside `value`: `value` taken back by `effect`, as are `band` and `baseline_latency_us`."""
    effect: float | None = None
    p_value: float | None = None
    floor: float | None = None
    mde80: float | None = None
    band: tuple[float | None, float | None] | None = None
    """Throughputs between which the row would pass, (low, high), in `unit`; None for a side on which nothing bounds it."""
    samples: tuple[float, ...] = ()
    record: RowRecord | None = None
    latency_us: float | None = None
    baseline_latency_us: float | None = None
    num_pairs: int | None = None
    """Pairs of processes behind the effect, in the paired modes."""
    history: tuple[float, ...] = ()
    """Values of earlier runs or commits that this one is held against, in `unit`, in the order of time."""


@dataclass(frozen=True)
class GateResult:
    """The verdict on a run: everything that the report shows, and all that it needs."""

    verdict: RunVerdict
    exit_code: int
    reason: str
    mode: Literal["baseline", "ab", "aa", "history"]
    """`baseline`: against the stored baseline; `ab`: merge-base and HEAD, paired; `aa`: a commit against itself; `history`: foreign
    results."""
    device: str
    base: str
    head: str
    rows: tuple[RowOutcome, ...]
    notices: tuple[str, ...] = ()
    """Things a reviewer has to see: changed baseline, band, waiver or instrument; differences of the environment."""
    environment: dict[str, object] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)
    """What HEAD's processes measured of the device, the median of each."""
    base_environment: dict[str, object] = field(default_factory=dict)
    """What is known of the environment of the other side: the baseline's, or the base commit's last process'."""
    runs: int = 1
    processes: int = 0
    created_at: str = ""
    compiled: CompiledResult | None = None
    """The compiled rows; None where they were left out."""
