"""The data classes of the compiled rows: what the compiler made of each kernel, and what changed in it.

A record (`CompiledFile`) is what `asv_bench.compiled` writes of one commit; a stored baseline is the part of it that one architecture has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Literal

import msgspec

SCHEMA_ID = "rapid_llm/compiled/2"
BASELINE_SCHEMA_ID = "rapid_llm/compiled-baseline/2"
BASELINE_DIR = "baselines/compiled"

Count = Annotated[int, msgspec.Meta(ge=0)]
Codes = dict[str, dict[str, Count]]


class LaunchFile(msgspec.Struct, frozen=True):
    """One kernel that a public call starts."""

    kind: Literal["triton", "torch"]
    name: str
    code: str = ""
    grid: tuple[Count, ...] = ()
    threads: Count = 0
    shared_bytes: Count = 0
    arguments: tuple[str, ...] = ()
    direct: bool = False
    """Started without Triton's `JITFunction.run`, as like calls are where their form is known."""
    occupancy_warps: Count = 0


class CompiledRow(msgspec.Struct, frozen=True):
    """One row of one architecture: the launches of one public call, in order, and those of a like one that follows it."""

    state: Literal["compiled", "failed", "unsupported"]
    op: str
    impl: str
    version: str
    launches: tuple[LaunchFile, ...] = ()
    like_launches: tuple[LaunchFile, ...] = ()
    reason: str | None = None
    launch_hash: str | None = None


class ArchitectureFile(msgspec.Struct, frozen=True):
    """All rows of one architecture, and the device whose figures launchers were told."""

    device: dict[str, Any]
    rows: dict[str, CompiledRow]
    died: str | None = None


class CompiledFile(msgspec.Struct, frozen=True):
    """The record of one commit."""

    schema: Literal["rapid_llm/compiled/2"]
    source: str
    triton: str
    torch: str
    ptxas: dict[str, str]
    architectures: dict[str, ArchitectureFile]
    codes: Codes


class CompiledBaseline(msgspec.Struct, frozen=True):
    """What was accepted for one architecture; a file of schema 1 says nothing of like calls, and is not comparable."""

    schema: Literal["rapid_llm/compiled-baseline/1", "rapid_llm/compiled-baseline/2"]
    architecture: str
    triton: str
    ptxas: str
    commit: str
    reason: str
    device: dict[str, Any]
    rows: dict[str, CompiledRow]
    codes: Codes


class CompiledVerdict(str, Enum):
    """What is said of a compiled row, or of one figure of it."""

    REGRESSED = "REGRESSED"
    FAILED = "FAILED"
    MISSING = "MISSING"
    CHANGED = "CHANGED"
    IMPROVED = "IMPROVED"
    NEW = "NEW"
    IDENTICAL = "IDENTICAL"
    UNSUPPORTED = "UNSUPPORTED"


@dataclass(frozen=True)
class CompiledChange:
    """One figure that differs."""

    metric: str
    unit: str
    before: str
    after: str
    verdict: CompiledVerdict
    meaning: str
    kernel: str = ""
    """The kernel that it is of, where it is of one."""


@dataclass(frozen=True)
class CompiledFinding:
    """Rows of one architecture with the same change in the same kernel."""

    architecture: str
    kernel: str
    verdict: CompiledVerdict
    rows: tuple[str, ...]
    reference: str
    """What the row was compared with: `merge-base` or `baseline`."""
    reason: str = ""
    changes: tuple[CompiledChange, ...] = ()
    sass_diff: str = ""


@dataclass(frozen=True)
class CompiledResult:
    """The verdict on the compiled rows."""

    exit_code: int
    reason: str
    counts: dict[str, dict[str, int]]
    """Rows by architecture and verdict."""
    findings: tuple[CompiledFinding, ...] = ()
    notices: tuple[str, ...] = ()
    tools: dict[str, str] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    """The device that stands for each architecture."""
