"""What the compiler makes of the rows' kernels, as asv suites: exact figures on any machine, no GPU needed.

`asv continuous main HEAD` compares them; the gate itself does not come this way but compares row by row (`ci.compiled`). These figures are
no throughputs: each suite declares its unit, which way is better, and whether any change counts or only one beyond asv's factor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from asv_bench.compiled import ARCHITECTURES
from asv_bench.suite import all_rows

_ROOT = Path(__file__).resolve().parent.parent
_SELECT_VARIABLE = "RAPID_LLM_BENCH_SELECT"
_CHECKOUT_VARIABLE = "ASV_BUILD_DIR"

Record = dict[str, Any]


def _suites() -> dict[str, list[str]]:
    """Ids of the rows that Triton kernels serve, by suite."""
    found: dict[str, list[str]] = {}
    for row in all_rows():
        if "cuda" in row.case.devices and row.suite.impl.get("cuda", "").startswith("triton_"):
            found.setdefault(row.suite.__name__, []).append(row.id)
    return found


def compile_time(unit: str, *, higher_is_better: bool = False, exact: bool = False) -> Callable[[Any], Any]:
    """Marks a `track_` method as returning a figure of the compiler, which is no throughput.

    Args:
        unit: Of the figure.
        higher_is_better: Less is better otherwise.
        exact: Any change counts; otherwise one beyond asv's factor (10 % where nothing else is asked for).
    """

    def mark(method: Any) -> Any:
        vars(method).update(unit=unit, higher_is_better=higher_is_better, exact=exact)
        return method

    return mark


class Compiled:
    """One figure by architecture and suite: the sum over all kernels that one call of each of the suite's rows launches."""

    params: ClassVar[list[list[str]]] = [list(ARCHITECTURES), list(_suites())]
    param_names: ClassVar[list[str]] = ["architecture", "suite"]
    rounds = 1
    timeout = 120
    version = "1"

    def setup_cache(self) -> Record:
        """Compiles the commit under test, or reads what was compiled of the same sources."""
        source = os.environ.get(_CHECKOUT_VARIABLE, str(_ROOT))
        with tempfile.TemporaryDirectory(prefix="rapid-llm-compile-") as scratch:
            output = Path(scratch, "compiled.json")
            command = [sys.executable, "-m", "asv_bench.compiled", "--source", source, "--output", str(output)]
            command += ["--cache", str(_ROOT / ".asv" / "compiled")]
            pattern = os.environ.get(_SELECT_VARIABLE)
            command += ["--select", pattern] if pattern else []
            subprocess.run(command, cwd=_ROOT, check=True, stdin=subprocess.DEVNULL)
            record: Record = json.loads(output.read_text(encoding="utf-8"))
        return record

    setup_cache.timeout = 900  # type: ignore[attr-defined]

    def setup(self, record: Record, architecture: str, name: str) -> None:
        """Skips, for asv, a suite of which nothing was selected or the registry claims nothing."""
        states = {row["state"] for row in _rows_of(record, architecture, name)}
        if not states - {"unsupported"}:
            raise NotImplementedError("not selected" if not states else "no KernelSpec serves it")

    @staticmethod
    def figures(record: Record, architecture: str, name: str, launches: str = "launches") -> list[dict[str, int]]:
        """Figures of every kernel that one call of each row launches.

        Args:
            record: Of `asv_bench.compiled`.
            architecture: Of it.
            name: Of a suite.
            launches: "like_launches" for those of a like call.
        Raises:
            RuntimeError: A row does not compile.
        """
        rows = [row for row in _rows_of(record, architecture, name) if row["state"] != "unsupported"]
        for row in rows:
            if row["state"] != "compiled":
                raise RuntimeError(f"{row['state']}: {row['reason']}")
        return [{**record["codes"].get(launch["code"], {}), **_numbers(launch)} for row in rows for launch in row[launches]]


def _rows_of(record: Record, architecture: str, name: str) -> list[Record]:
    rows = record["architectures"][architecture]["rows"]
    return [rows[row_id] for row_id in _suites()[name] if row_id in rows]


def _numbers(launch: dict[str, Any]) -> dict[str, int]:
    return {name: value for name, value in launch.items() if isinstance(value, int)}


def _sum(figures: list[dict[str, int]], *names: str) -> int:
    return sum(kernel.get(name, 0) for kernel in figures for name in names)


class Registers(Compiled):
    @compile_time("registers/thread")
    def track_registers(self, record: Record, architecture: str, name: str) -> int:
        return _sum(self.figures(record, architecture, name), "registers")


class Spills(Compiled):
    @compile_time("bytes/thread", exact=True)
    def track_spills(self, record: Record, architecture: str, name: str) -> int:
        return _sum(self.figures(record, architecture, name), "spill_store_bytes", "spill_load_bytes", "stack_bytes")


class Instructions(Compiled):
    @compile_time("instructions")
    def track_instructions(self, record: Record, architecture: str, name: str) -> int:
        return _sum(self.figures(record, architecture, name), "instructions")


class SharedMemory(Compiled):
    @compile_time("bytes/block")
    def track_shared_memory(self, record: Record, architecture: str, name: str) -> int:
        return _sum(self.figures(record, architecture, name), "shared_bytes")


class Occupancy(Compiled):
    @compile_time("warps", higher_is_better=True)
    def track_occupancy(self, record: Record, architecture: str, name: str) -> int:
        return _sum(self.figures(record, architecture, name), "occupancy_warps")


class Launches(Compiled):
    @compile_time("launches/call", exact=True)
    def track_launches(self, record: Record, architecture: str, name: str) -> int:
        return len(self.figures(record, architecture, name))


class LikeLaunches(Compiled):
    @compile_time("launches/like call", exact=True)
    def track_like_launches(self, record: Record, architecture: str, name: str) -> int:
        return len(self.figures(record, architecture, name, "like_launches"))
