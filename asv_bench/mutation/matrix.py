"""The matrix: which rows are measured with which fault, what came of each, and the process that measures them."""

from __future__ import annotations

import importlib
import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asv_bench import host, interpreter, kv_pool
from asv_bench.lazy import LazyModule
from asv_bench.mutation import cases, of_allocator, of_calls, of_decode, of_int8, of_write
from asv_bench.mutation.fault import SUITES, Fault, PlantError
from asv_bench.mutation.plant import ROOT, SUITE_MODULES, planted, safe_name
from asv_bench.timing import MIN_SAMPLES

worker: Any = LazyModule("asv_bench.worker")

UNMUTATED = Fault("unmutated", "The code as it is.", dict.fromkeys(SUITES, ()), (), harmless=True)
FAULTS: tuple[Fault, ...] = (*of_decode.FAULTS, *of_int8.FAULTS, *of_write.FAULTS, *of_calls.FAULTS, *of_allocator.FAULTS)

REFUSED, MISSED, ACCEPTED, ERROR = "refused", "MISSED", "accepted", "ERROR"
GOOD = (REFUSED, ACCEPTED)

_CALLS_OF_RIGHT_CODE = 2
"""Checked calls before the timer on the interpreter, where nothing is planted or what is planted is harmless."""


@dataclass(frozen=True)
class Cell:
    """What came of one row with one fault.

    Attributes:
        fault, suite, case: Which.
        outcome: "refused" or "MISSED" for a fault; "accepted" or "ERROR" for the unmutated code and what is harmless. "ERROR" also where a
            fault could not be planted or the row failed for another reason than the fault.
        message: The refusal's reason, or what is wrong.
    """

    fault: str
    suite: str
    case: str
    outcome: str
    message: str


def run(faults: Sequence[Fault], device: str, *, jobs: int = 1) -> Iterator[Cell]:
    """Measures the rows of the faults, and of the code as it is in their suites, in processes of their own; gives each cell when known.

    Args:
        faults: Some of `FAULTS`.
        device: "cpu" (Triton's interpreter) or "cuda".
        jobs: Processes at a time; on a GPU they share it: their times are worthless, their verdicts are not.
    """
    planted_here = [fault for fault in faults if device in fault.devices]
    used = [suite for suite in SUITES if any(suite in fault.rows for fault in planted_here)]
    wanted = [(UNMUTATED.name, suite) for suite in used] + [(fault.name, suite) for fault in planted_here for suite in fault.rows]
    cells: queue.SimpleQueue[Cell | None] = queue.SimpleQueue()
    shares = [wanted[start::jobs] for start in range(jobs)]
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(_share, share, device, cells) for share in shares]
        for _ in running:
            yield from iter(cells.get, None)
        for done in running:
            done.result()


def _share(wanted: list[tuple[str, str]], device: str, cells: queue.SimpleQueue[Cell | None]) -> None:
    """Runs some faults, each in one suite; a process that dies in a row fails that fault there, and another goes on with the next."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            while wanted:
                place, died = ("", ""), ""
                for event in _child(wanted, device, Path(folder)):
                    if "start" in event:
                        place = event["start"]
                    elif "done" in event:
                        wanted.remove(tuple(event["done"]))
                    elif "died" in event:
                        died = event["died"]
                    else:
                        cells.put(Cell(**event))
                if died and wanted:
                    cells.put(Cell(wanted.pop(0)[0], *place, ERROR, f"the process died: {died}"))
    finally:
        cells.put(None)


def _child(wanted: list[tuple[str, str]], device: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Events of one measuring process; the last says how it died, if it did."""
    command = [sys.executable, "-m", "asv_bench.mutation", "--measure", json.dumps(wanted)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "RAPID_LLM_BENCH_DEVICE": device}
    if device == "cpu":
        variables |= {"TRITON_INTERPRET": "1", "RAPID_LLM_FORCE_BACKEND": "triton"}
    with (folder / "errors").open("w+", encoding="utf-8") as errors:
        with subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            for line in process.stdout or ():
                if line.startswith("{"):
                    yield json.loads(line)
        if process.returncode != 0:
            errors.seek(0)
            lines = errors.read().strip().splitlines()
            yield {"died": f"exit {process.returncode}: {lines[-1] if lines else 'no message'}"}


def measure(wanted: Iterable[tuple[str, str]]) -> None:
    """The measuring process, for faults by name and suite: a line of JSON for each start, each cell, each fault that is done there."""
    device = worker.choose_device()
    bench = worker.Bench(device)
    if device.type == "cpu":
        interpreter.remember_builtins()
        # A call takes up to a second, and its time says nothing: the checks around the timer are all the same.
        host.BLOCKS = host.WALL_LEAST_SAMPLES = MIN_SAMPLES
        kv_pool.CHECKED_FILL_ROWS = 8
    known = {fault.name: fault for fault in (UNMUTATED, *FAULTS)}
    checked_calls = worker.CHECKED_CALLS
    with tempfile.TemporaryDirectory() as folder:
        for name, suite in wanted:
            # The interpreter does the same in each call: code that is right in a few is right in all. A fault may begin with the 11th.
            worker.CHECKED_CALLS = _CALLS_OF_RIGHT_CODE if known[name].harmless and device.type == "cpu" else checked_calls
            for event in _events(known[name], suite, bench, device.type, Path(folder) / safe_name(name)):
                print(json.dumps(event), flush=True)
            print(json.dumps({"done": [name, suite]}), flush=True)


def _events(fault: Fault, wanted: str, bench: Any, device: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Plants the fault anew for each row: a fault that counts calls starts from nothing."""
    for suite, case in (place for place in places(fault, device) if place[0] == wanted):
        yield {"start": [suite, case]}
        place = folder / safe_name(f"{suite} {case}")
        place.mkdir(parents=True)
        try:
            with planted(fault.edits, place, small=device == "cpu") as modules:
                cell = _cell(fault, suite, case, bench.measure(cases.rows(modules, device)[suite][case]))
        except PlantError as error:
            cell = Cell(fault.name, suite, case, ERROR, str(error))
        yield asdict(cell)


def places(fault: Fault, device: str) -> list[tuple[str, str]]:
    """(suite, case) of the rows that the fault is measured in; a case that the device does not have is left out."""
    modules = {name: importlib.import_module(name) for name in SUITE_MODULES}
    known = {suite: list(rows) for suite, rows in cases.rows(modules, device).items()}
    places = []
    for suite, named in fault.rows.items():
        wanted = known[suite] if fault is UNMUTATED else list(named) or known[suite][:1]
        places += [(suite, case) for case in wanted if case in known[suite]]
    return places


def _cell(fault: Fault, suite: str, case: str, record: dict[str, Any]) -> Cell:
    message = record["reason"] or f"a number: {record['value']}"
    if fault.harmless:
        return Cell(fault.name, suite, case, ACCEPTED if record["status"] == "ok" else ERROR, message)
    try:
        refused = fault.refused_by(record)
    except PlantError as error:
        return Cell(fault.name, suite, case, ERROR, str(error))
    return Cell(fault.name, suite, case, REFUSED if refused else MISSED, message)


def outcome_of(cells: Iterable[Cell]) -> str:
    """One word for several rows of a suite: the worst; "" where there are none."""
    found = {cell.outcome for cell in cells}
    return next((word for word in (ERROR, MISSED, REFUSED, ACCEPTED) if word in found), "")
