"""One sitting of a trial (`kernel_trial`, `write_trial`): the command line, what is compiled beforehand, and the cells in turn."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from asv_bench.lazy import LazyModule
from asv_bench.microbench import now_s
from asv_bench.trial_results import Results

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


class Trial(Protocol):
    """What measures the cells; `failed` counts what has no number."""

    failed: int

    def cell(self, cell: Any, ends_s: float, /) -> object: ...

    def not_measured(self, told: dict[str, Any], error: Exception, /) -> object: ...


@dataclass(frozen=True)
class Sitting:
    """What two trials differ in.

    Attributes:
        prog, description: Of the command.
        seconds: Time for all of it, where the command line says nothing else.
        compile_share: Part of the time after which compiling beforehand is stopped.
        select_example, quick_help: For the help of these options.
        cells: Of the quick trial, or of the whole.
        compile_some: Compiles one of so many shares of the cells' configs; takes the cells, `compiled.this_device()`, the share's number
            and the number of shares.
        trial: Takes the device, where results go, and when the time is over.
        told: How a cell that could not be measured stands in the results.
        summary: What is printed at the end.
    """

    prog: str
    description: str
    seconds: float
    compile_share: float
    select_example: str
    quick_help: str
    cells: Callable[[bool], list[Any]]
    compile_some: Callable[[Sequence[Any], dict[str, Any], int, int], object]
    trial: Callable[[torch.device, Results, float], Trial]
    told: Callable[[Any], dict[str, Any]]
    summary: Callable[[Results], str]


def main(sitting: Sitting, argv: Sequence[str], device_context: Any) -> int:
    """The command; returns the exit status: 0, 1 where something failed, 2 where nothing is selected."""
    parser = argparse.ArgumentParser(prog=sitting.prog, description=sitting.description)
    parser.add_argument("--json", type=Path, required=True, help="file to write, anew after each result")
    parser.add_argument("--seconds", type=float, default=sitting.seconds, help="time for all of it")
    parser.add_argument("--select", default="", help=f"regular expression over the cells' labels, such as '{sitting.select_example}'")
    jobs = max(1, len(os.sched_getaffinity(0)) - 2)
    parser.add_argument("--jobs", type=int, default=jobs, help="processes that compile beforehand; 0 compiles at the first call")
    parser.add_argument("--quick", action="store_true", help=sitting.quick_help)
    arguments = parser.parse_args(argv)
    began_s = now_s()
    ends_s = began_s + arguments.seconds
    chosen = [cell for cell in sitting.cells(arguments.quick) if re.search(arguments.select, cell.label)]
    if not chosen:
        print(f"--select {arguments.select!r} finds no cell; leave it out to see them all", file=sys.stderr)
        return 2
    with device_context() as device:
        if arguments.jobs and device.type == "cuda":
            compile_some = functools.partial(sitting.compile_some, chosen)
            compile_beforehand(compile_some, arguments.jobs, began_s + sitting.compile_share * arguments.seconds)
        results = Results(arguments.json, device, quick=arguments.quick)
        print(f"compiled in {now_s() - began_s:.0f} s", flush=True)
        trial = sitting.trial(device, results, ends_s)
        for place, cell in enumerate(chosen):
            left_s = ends_s - now_s()
            if left_s <= 0:
                print(f"the time is over before {cell.label}", file=sys.stderr)
                break
            try:
                trial.cell(cell, now_s() + left_s / (len(chosen) - place))
            except Exception as error:  # a cell that does not fit the device's memory, say; the others are measured
                trial.not_measured(sitting.told(cell), error)
            if device.type == "cuda":
                torch.cuda.empty_cache()
        print(sitting.summary(results))
    return 1 if trial.failed else 0


def compile_beforehand(compile_some: Callable[[dict[str, Any], int, int], object], jobs: int, ends_s: float) -> None:
    """Fills Triton's cache in forked processes, on the stand-in of this machine's GPU.

    Args:
        compile_some: Compiles one of so many shares; takes `compiled.this_device()`, the share's number and the number of shares.
        jobs: Processes.
        ends_s: When it has to be over, on the clock of `now_s`.
    """
    from asv_bench import compiled

    own = compiled.this_device()
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=compile_some, args=(own, first, jobs)) for first in range(jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0.0, ends_s - now_s()))
        if worker.is_alive():
            worker.kill()
            worker.join()


@contextlib.contextmanager
def compiling_only(own: dict[str, Any]) -> Iterator[torch.device]:
    """Within it a launch compiles its kernel and starts nothing, on the stand-in of this machine's GPU.

    Args:
        own: Of `compiled.this_device`.
    Yields:
        The device that stands in.
    """
    from triton.runtime.jit import JITFunction

    from asv_bench.stand_in import DEVICES, standing_in

    figures = {name: own[name] for name in ("name", "multiprocessors", "l2_bytes")}
    device = dataclasses.replace(DEVICES["sm_{}{}".format(*own["capability"])], **figures)
    original = JITFunction.run

    def compiled_only(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        del warmup
        return original(kernel, *args, warmup=True, **kwargs)

    JITFunction.run = compiled_only
    try:
        with standing_in(device) as cuda:
            yield cuda
    finally:
        JITFunction.run = original
