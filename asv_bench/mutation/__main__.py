"""`python -m asv_bench.mutation`: plants every fault, and prints which suite refused it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asv_bench.lazy import LazyModule
from asv_bench.mutation import matrix
from asv_bench.mutation.fault import SUITES, Fault
from asv_bench.mutation.matrix import Cell

worker: Any = LazyModule("asv_bench.worker")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 0 when every fault was refused and the code as it is was measured, 1 otherwise, 2 for bad usage."""
    parser = argparse.ArgumentParser(prog="python -m asv_bench.mutation", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write device, faults and cells to this file")
    parser.add_argument("--select", default="", metavar="WORD", help="only faults with this in their name or in a suite's name")
    parser.add_argument("--list", action="store_true", help="print the faults as a table in Markdown and measure nothing")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time; on a GPU they share it")
    parser.add_argument("--measure", metavar="NAMES", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        matrix.measure(json.loads(options.measure))
        return 0
    faults = [fault for fault in matrix.FAULTS if options.select in " ".join([fault.name, *fault.rows])]
    if not faults:
        print(f"no fault has {options.select!r} in its name or in the name of a suite: --list prints them", file=sys.stderr)
        return 2
    if options.list:
        print(listed(faults), end="")
        return 0
    device = worker.choose_device()
    name = worker.collect_environment(device)["device"]["name"]
    print(f"{name}{' (Triton interpreter)' if device.type == 'cpu' else ''}: {len(faults)} faults")
    cells = []
    for cell in matrix.run(faults, device.type, jobs=options.jobs):
        cells.append(cell)
        print(f"{cell.outcome:9} {cell.fault}: {cell.suite} [{cell.case}]: {cell.message}", flush=True)
    print(table(faults, cells, device.type), end="")
    if options.json:
        known = [{"name": f.name, "what": f.what, "harmless": f.harmless, "suites": sorted(f.rows)} for f in faults]
        document = {"device": name, "instrument": device.type, "faults": known, "cells": [asdict(cell) for cell in cells]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    bad = [cell for cell in cells if cell.outcome not in matrix.GOOD]
    print(f"{len(cells)} rows measured, {len(bad)} of them missed or failed for another reason")
    return 1 if bad else 0


def table(faults: Sequence[Fault], cells: Sequence[Cell], device: str) -> str:
    """Fault by suite: refused, MISSED, accepted (harmless), ERROR; a dash where the fault does not apply."""
    width = max(len(fault.name) for fault in (*faults, matrix.UNMUTATED))
    lines = ["", f"{'fault':{width}}  " + "  ".join(f"{suite:21}" for suite in SUITES)]
    for fault in (matrix.UNMUTATED, *faults):
        mine = [cell for cell in cells if cell.fault == fault.name]
        lost = matrix.outcome_of(cell for cell in mine if not cell.suite)
        words = [lost or matrix.outcome_of(c for c in mine if c.suite == suite) or "-" for suite in SUITES]
        note = "" if device in fault.devices else "  (needs a GPU)"
        lines.append((f"{fault.name:{width}}  " + "  ".join(f"{word:21}" for word in words)).rstrip() + note)
    return "\n".join(lines) + "\n\n"


def listed(faults: Sequence[Fault]) -> str:
    """The faults as a Markdown table: name, sentence, suites."""
    lines = ["| fault | what is wrong | suites |", "| --- | --- | --- |"]
    for fault in faults:
        notes = [*fault.rows, *(["GPU only"] if "cpu" not in fault.devices else []), *(["harmless"] if fault.harmless else [])]
        lines.append(f"| {fault.name} | {fault.what} | {', '.join(notes)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
