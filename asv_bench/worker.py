"""The measuring process: verifies, times and journals one row after the other.

`main` is what `asv_bench.session` starts; `run_script` is the same in the foreground, for people.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch

import rapid_llm
from asv_bench import launches, microbench, peaks, records
from asv_bench.environment import collect_environment, collect_state, foreign_processes
from asv_bench.microbench import Row, Timing, TimingError, bench, bench_graph, bench_host
from asv_bench.quiet import do_nothing
from asv_bench.suite import Prepared, SuiteRow, all_rows
from asv_bench.verify import VerificationError

DEVICE_VARIABLE = "RAPID_LLM_BENCH_DEVICE"
CHECKOUT_VARIABLE = "ASV_BUILD_DIR"

_LONG_CALL_US = 1000.0
"""Calls that cannot be shorter than this by their work are timed one by one with a flush; shorter ones by graph replay."""


CHECKED_CALLS = 12
"""At least so many calls are made over fresh poison, each checked, before a row is timed: a kernel that is wrong now and then is seen."""

_SPIN_CYCLES = 2_000_000
"""About a millisecond on the current stream before a poison."""

_GENEROUS_GB_PER_S = 1e4
_GENEROUS_TFLOP_PER_S = 1e3
"""Rates beyond today's devices, for choosing a timer where the device's own are not known."""


class WrongKernelError(RuntimeError):
    """`dispatch()` chose another kernel than the one the row is named after."""


def choose_device() -> torch.device:
    """The device that RAPID_LLM_BENCH_DEVICE names, else the GPU, else the CPU.

    Raises:
        ValueError: The variable names none, or one that is not there.
    """
    wanted = os.environ.get(DEVICE_VARIABLE, "auto")
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f"{DEVICE_VARIABLE}={wanted!r} names no device: use auto, cpu or cuda")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{DEVICE_VARIABLE}=cuda, and torch sees no CUDA device: unset it or mend the driver")
    if wanted == "cpu" or not torch.cuda.is_available():
        torch.set_num_threads(1)  # the second core keeps the rest of the machine off the measurement
        return torch.device("cpu")
    return torch.device("cuda")


def check_checkout() -> None:
    """Refuses to measure when `rapid_llm` was imported from outside the commit's checkout.

    Raises:
        ImportError: It comes from elsewhere.
    """
    checkout = os.environ.get(CHECKOUT_VARIABLE)
    where = Path(rapid_llm.__file__ or "").resolve()
    if checkout and Path(checkout).resolve() not in where.parents:
        raise ImportError(
            f"rapid_llm comes from {where}, outside the checkout of the commit under test ({checkout}): the number would be another"
            " commit's; remove the installed copy or mend PYTHONPATH"
        )


class Bench:
    """A device, its peaks and ceilings, and how a row is measured on it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.environment = collect_environment(device)
        self.memory_peak_gb_per_s = peaks.memory_peak_gb_per_s(device)
        self.ceilings = peaks.measured_ceilings(device)
        self.release()
        gc.freeze()  # what was imported stays: only what the rows make is looked through between them
        self._most_foreign: int | None = None

    def look_around(self) -> None:
        """Counts the other processes on a GPU, between two rows: one that comes and goes within a run is seen."""
        found = foreign_processes(self.device) if self.device.type == "cuda" else None
        if found is not None:
            self._most_foreign = max(found, self._most_foreign or 0)

    def last_state(self) -> dict[str, Any]:
        """The state now, with the most other processes that were seen between rows."""
        self.look_around()
        state = collect_state(self.device)
        return state if self._most_foreign is None else {**state, "foreign_processes": self._most_foreign}

    def header(self) -> dict[str, Any]:
        ceilings = {f"{name}_gb_per_s": rate for name, rate in dataclasses.asdict(self.ceilings).items()}
        if self.memory_peak_gb_per_s is not None:
            ceilings["memory_peak_gb_per_s"] = self.memory_peak_gb_per_s
        return {
            "event": "header",
            "commit": self.environment["commit"] or "unknown",
            "environment": self.environment,
            "ceilings": ceilings,
            "protocol": microbench.PROTOCOL,
        }

    def release(self) -> None:
        """Frees what the last row left, so that the next measures no fragmented allocator."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def measure(self, row: SuiteRow) -> dict[str, Any]:
        """The record of a row; a row without a number says why in `status` and `reason`."""
        known = row.describe()
        if self.device.type not in row.case.devices:
            return records.complete({**known, "status": "skipped", "reason": f"needs a {' or '.join(row.case.devices)} device"})
        try:
            return records.complete({**known, **self._measure(row)})
        except NotImplementedError as error:
            outcome = ("skipped", str(error))
        except VerificationError as error:
            outcome = ("unverified", str(error))
        except TimingError as error:
            outcome = ("invalid", str(error))
        except Exception as error:  # one row's fault is that row's alone
            outcome = ("failed", f"{type(error).__name__}: {error}{_cache_to_look_at(error)}")
            if self.device.type == "cuda" and _device_lost(error):
                raise
        finally:
            self.release()
        return records.complete({**known, "status": outcome[0], "reason": _reason(outcome[1])})

    def _measure(self, row: SuiteRow) -> dict[str, Any]:
        impl = row.suite.impl[self.device.type]
        began_s = microbench.now_s()
        prepared = row.suite().build(row.case, self.device)
        self._check_selection(prepared, impl)
        rounds = 1 if row.suite.control else math.ceil(CHECKED_CALLS / len(prepared.calls))
        # Calls with a reset are poisoned once: the reset is what the later rounds check.
        differences = [
            self._checked_anew(prepared) if turn == 0 or prepared.reset is None else _checked(prepared) for turn in range(rounds)
        ]
        if not row.suite.control:
            self._check_that_poison_is_seen(prepared)
        timed_from_s = microbench.now_s()
        timing = self._time(row, prepared)
        timed_s = microbench.now_s() - timed_from_s
        # What the timed calls left over poison; then a call over poison, for a kernel that writes only at first; then one on other
        # inputs at the same addresses, for a result that was kept instead of computed.
        differences += [_checked(prepared), self._checked_anew(prepared)]
        if prepared.vary is not None:
            prepared.vary()
            differences.append(self._checked_anew(prepared))
        record = self._record(row, impl, prepared, timing, max(differences))
        return {**record, "wall_s": round(microbench.now_s() - began_s, 3), "timed_s": round(timed_s, 3)}

    def _check_that_poison_is_seen(self, prepared: Prepared) -> None:
        """Refuses a check that takes poison over a right result; calls with a reset make their own output in the check."""
        if prepared.reset is not None:
            return
        self._poison(prepared)
        try:
            prepared.check()
        except VerificationError:
            return
        raise VerificationError("the suite's check takes outputs that its poison made wrong: it would take any kernel")

    def _checked_anew(self, prepared: Prepared) -> float:
        """Makes every output wrong, calls, and checks."""
        self._poison(prepared)
        for call in prepared.calls if prepared.reset is None else ():
            call()
        return _checked(prepared)

    def _poison(self, prepared: Prepared) -> None:
        """Makes every output wrong, after a wait on the current stream: what a call puts on another stream is overwritten, and seen."""
        if self.device.type == "cuda":
            torch.cuda._sleep(_SPIN_CYCLES)  # type: ignore[no-untyped-call]
        prepared.poison()

    @staticmethod
    def _check_selection(prepared: Prepared, impl: str) -> None:
        if prepared.called is not None and prepared.called != impl:
            raise WrongKernelError(f"the row is named after {impl} and its calls run {prepared.called}")
        selection = prepared.selection
        if selection is not None and selection.spec.name != impl:
            raise WrongKernelError(
                f"the row is named after {impl} and dispatch() runs {selection.spec.name}; its decision: {selection.explain()}"
            )

    def _time(self, row: SuiteRow, prepared: Prepared) -> Timing:
        def poison() -> None:
            """Wrong again just before the timed calls; what these do not make, when only the first call is timed, is made here."""
            prepared.poison()
            for call in prepared.calls[1:]:
                call()

        bottleneck = row.case.bottleneck
        if bottleneck == "host" or (bottleneck == "launch" and self.device.type == "cpu"):
            again = do_nothing if prepared.reset is not None else poison
            return bench_host(prepared.calls[0], prepared.reset, device=self.device, poison=again)
        if self.device.type == "cuda" and self._shortest_us(prepared) < _LONG_CALL_US:
            return bench_graph(prepared.calls, device=self.device, set_bytes=prepared.work.moved or 0.0, poison=prepared.poison)
        timing = bench(prepared.calls[0], device=self.device, poison=poison)
        if timing.host_limited:
            raise TimingError(
                f"HOST-LIMITED: a call that reads {timing.reading_us:.0f} us takes the host {timing.host_us:.0f} us to enqueue, longer than"
                " the flush that hides it; time it with bench_graph, or class it host"
            )
        return timing

    def _shortest_us(self, prepared: Prepared) -> float:
        """What the call takes at the device's best, from its bytes and FLOPs; 0 where neither bounds it."""
        by_bytes = (prepared.work.moved or 0.0) / (self.memory_peak_gb_per_s or _GENEROUS_GB_PER_S) / 1e3
        by_flops = (prepared.work.flops or 0.0) / _GENEROUS_TFLOP_PER_S / 1e6
        return max(by_bytes, by_flops)

    def _record(self, row: SuiteRow, impl: str, prepared: Prepared, timing: Timing, difference: float) -> dict[str, Any]:
        case = row.case
        flags = []
        if timing.near_floor and case.bottleneck != "launch":
            flags.append("FLOOR")
        if timing.l2 == "warm":
            flags.append("WARM")
        if timing.disturbed:
            flags.append("DISTURBED")
        table_row = self._table_row(
            row, impl, timing.reading_us, prepared.work, max_abs_diff=None if row.suite.control else difference, flags=tuple(flags)
        )
        value = {"GB/s": table_row.gb_per_s, "TFLOP/s": table_row.tflop_per_s, "calls/s": table_row.calls_per_s}[row.suite.unit]
        status, reason = "ok", None
        if table_row.violation:
            status, reason = "violation", f"reads {table_row.peak_fraction:.1%} of peak; check {', then '.join(microbench.CHECK_ORDER)}"
        return {
            "status": status,
            "reason": reason,
            "impl": impl,
            "value": value,
            "latency_us": timing.reading_us,
            "quantiles_us": [timing.quantile_us(0.2), timing.quantile_us(0.8)],
            "samples": len(timing.samples_us),
            "timer": timing.timer,
            "instrument": timing.instrument,
            "floor_us": timing.floor_us,
            "estimator": timing.estimator,
            "host_us": timing.host_us,
            "tick_us": timing.tick_us,
            "l2": timing.l2,
            "work": {"flops": prepared.work.flops, "moved_bytes": prepared.work.moved, "written_bytes": prepared.work.written},
            "gb_per_s": table_row.gb_per_s if table_row.bandwidth_bound else None,
            "tflop_per_s": table_row.tflop_per_s,
            "peak_fraction": table_row.peak_fraction,
            "copy_fraction": table_row.copy_fraction,
            "ceiling_fraction": table_row.ceiling_fraction,
            "max_abs_diff": table_row.max_abs_diff,
            "explain": "" if prepared.selection is None else prepared.selection.explain(),
            "flags": [mark for mark in table_row.marks if mark != "VIOLATION"],
            "input_hash": _hash(prepared),
            "launch_hash": launches.row_hash(prepared) if self.device.type == "cuda" else None,
        }

    def _table_row(self, row: SuiteRow, impl: str, us: float, work: microbench.Work, **more: Any) -> Row:
        return Row(
            impl,
            row.case.label,
            us,
            work,
            bottleneck=row.case.bottleneck,
            peak_gb_per_s=self.memory_peak_gb_per_s,
            peak_tflop_per_s=peaks.tensor_peak_tflop_per_s(self.environment["device"]["name"], str(row.case.args.get("dtype"))),
            ceilings=self.ceilings,
            **more,
        )

    def table_row(self, row: SuiteRow, record: dict[str, Any]) -> Row:
        """The table's line of a row that was measured here, from its record."""
        work = microbench.Work(record["work"]["flops"], record["work"]["moved_bytes"], record["work"]["written_bytes"])
        flags = tuple(flag for flag in record["flags"] if flag != "STALE-CEILING")
        return self._table_row(row, record["impl"], record["latency_us"], work, max_abs_diff=record["max_abs_diff"], flags=flags)


def _reason(message: str) -> str:
    """The first line of a message, and where it announces a list, the list: what follows it otherwise is advice on how to look further."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return (" ".join(lines) if lines and lines[0].endswith(":") else lines[0] if lines else "no message")[:500]


def _checked(prepared: Prepared) -> float:
    """The largest difference that the check found; one that is no number is no verification."""
    difference = prepared.check()
    if not math.isfinite(difference):
        raise VerificationError(f"the check returned {difference} for a difference")
    return difference


def _hash(prepared: Prepared) -> str | None:
    if not prepared.inputs:
        return None
    digest = hashlib.sha256()
    for tensor in prepared.inputs:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _cache_to_look_at(error: Exception) -> str:
    """What to do where the error is one that a damaged file in Triton's cache gives."""
    if not isinstance(error, json.JSONDecodeError) and "kernel image is invalid" not in str(error):
        return ""
    from triton import knobs

    return f"; Triton's cache in {knobs.cache.dir} may be damaged: delete it and run again"


def _device_lost(error: Exception) -> bool:
    """Whether the CUDA context is beyond use: the process has to end, and another goes on with the next row."""
    text = str(error)
    return (
        isinstance(error, RuntimeError)
        and ("CUDA error" in text or "Triton Error [CUDA]" in text)
        and not any(harmless in text for harmless in ("out of memory", "kernel image is invalid"))
    )


def _bench(device: torch.device) -> Bench:
    # What the imports left stays: without it each look for garbage between two rows goes through all of torch again.
    gc.collect()
    gc.freeze()
    try:
        return Bench(device)
    except Exception as error:
        if told := _cache_to_look_at(error):
            raise SystemExit(f"{type(error).__name__}: {error}{told}") from error
        raise


def main() -> NoReturn:
    """Measures the rows named in a file and journals them: `worker ROWS.json JOURNAL`. Ends the process, without tearing torch down."""
    wanted = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with Path(sys.argv[2]).open("a", encoding="utf-8") as journal:

        def say(event: dict[str, Any]) -> None:
            journal.write(json.dumps(event, allow_nan=False) + "\n")
            journal.flush()

        check_checkout()
        rows = {row.id: row for row in all_rows()}
        machine = _bench(choose_device())
        say(machine.header())
        for number, row_id in enumerate(wanted, 1):
            say({"event": "start", "row": row_id, "number": number, "of": len(wanted)})
            say({"event": "row", "row": row_id, "outcome": machine.measure(rows[row_id])})
            machine.look_around()
        say({"event": "end", "state": machine.last_state()})
    sys.stderr.flush()
    os._exit(0)


def run_script(rows: list[SuiteRow], *, title: str) -> int:
    """Measures rows in this process and prints the table, `explain()` of each kernel beside it; returns the exit status."""
    machine = Bench(choose_device())
    known = machine.environment
    versions = f"torch {known['torch']}, triton {known['triton']}, commit {machine.header()['commit'][:12]}"
    print(f"{title}\n{known['device']['name']}, {versions}")
    if machine.device.type == "cpu":
        print("wall clock on a CPU with a cache flush: not a GPU figure")
    table: list[Row] = []
    explained: dict[tuple[str, str | None], tuple[str, str]] = {}
    failed: list[str] = []
    floor_us = None
    for row in rows:
        record = machine.measure(row)
        if record["status"] == "skipped":
            continue
        if record["status"] not in ("ok", "violation"):
            failed.append(f"{record['status'].upper()}: {row.id}: {record['reason']}")
            continue
        floor_us = record["floor_us"] or floor_us
        explained.setdefault((record["impl"], record["kv_dtype"]), (row.case.label, record["explain"]))
        table.append(machine.table_row(row, record))
    print(microbench.report(table, floor_us=floor_us), end="")
    for label, text in explained.values():
        if text:
            print(f"\n[{label}]\n{text}")
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed or any(row.violation for row in table) else 0
