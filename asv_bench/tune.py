"""Searches the config of each tunable kernel on the suites' cases, and stores what was verified and is fastest.

`python -m asv_bench.tune` on a GPU: graph replay, cold, rotating working sets. On a machine without one Triton's interpreter goes through
the same steps on tiny shapes with a wall clock, says so, and stores nothing unless a file is named. `--trial` measures the variants of
paged decode at serving shapes and stores no config (`asv_bench/kernel_trial.py`), `--trial-write` does the same for the KV write
(`asv_bench/write_trial.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asv_bench import bench_kv_write, bench_paged_decode
from asv_bench.interpreter import device_or_interpreter
from asv_bench.lazy import LazyModule
from asv_bench.microbench import bench_graph
from asv_bench.suite import Case, Suite, case_with

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

autotune: Any = LazyModule("rapid_llm.kernels.autotune")
kernel_trial: Any = LazyModule("asv_bench.kernel_trial")
write_trial: Any = LazyModule("asv_bench.write_trial")
config_store: Any = LazyModule("rapid_llm.kernels.autotune.config_store")
dispatcher: Any = LazyModule("rapid_llm.kernels.ops.dispatch")
environment: Any = LazyModule("asv_bench.environment")
errors: Any = LazyModule("rapid_llm.errors")
specs: Any = LazyModule("rapid_llm.kernels.ops.spec")
tuned: Any = LazyModule("rapid_llm.kernels.ops.tuned")

_REP_MS = 8.0
_TINY_CANDIDATES = 3
_SUITES: tuple[type[Suite], ...] = (bench_paged_decode.PagedDecode, bench_kv_write.KVWritePrefill, bench_kv_write.KVWriteDecode)


def cases(device_type: str) -> list[tuple[type[Suite], Case]]:
    """What is tuned: the suites' cases for a GPU, one tiny case of each operation for the interpreter.

    Cases that differ in nothing a key holds (the order of the rows, the lengths within the row table) are tuned once, the first of them.
    """
    if device_type == "cpu":
        decode = bench_paged_decode.uniform(1, 20, "float16", "cpu", num_kv_heads=1, head_dim=16)
        write = bench_kv_write.KVWriteDecode.cases[0]
        return [(bench_paged_decode.PagedDecode, decode), (bench_kv_write.KVWriteDecode, case_with(write, devices=("cpu",)))]
    return [(suite, case) for suite in _SUITES for case in suite.cases if "cuda" in case.devices]


def tune(
    suite: type[Suite], case: Case, device: torch.device, *, store: Any, done: set[str], limit: int | None = None
) -> tuple[Any, Any] | None:
    """Searches one case.

    Args:
        suite, case: What is called.
        device: Where.
        store: ConfigStore to write to; None keeps nothing.
        done: Keys that were tuned already; this one is added.
        limit: Most candidates beside the config in use; None tries all.
    Returns:
        The search's result and the kernel's KernelSpec; None where the chosen kernel has no config, or its key is done.
    Raises:
        TuningError: No config could be verified and timed.
    """
    prepared = suite().build(case, device)
    selection = prepared.selection
    spec, request = selection.spec, selection.request
    if spec.config is None:
        return None
    key = tuned.config_key(spec, request)
    if key.text() in done:
        return None
    done.add(key.text())
    kind = specs.load_target(spec.config)
    sizes = dict(request.shape)
    candidates = kind.candidates(sizes, request.kv_dtype)[:limit]

    def timer(calls: Sequence[Callable[[], object]]) -> float:
        return float(bench_graph(calls, device=device, set_bytes=prepared.work.moved or 0.0, rep_ms=_REP_MS).reading_us)

    def applied(config: Any) -> AbstractContextManager[None]:
        return tuned.overridden(spec.name, config)  # type: ignore[no-any-return]

    problem = autotune.TuningProblem(f"{spec.name} [{case.label}]", prepared.calls, applied, prepared.poison, prepared.check)
    current = selection.config or kind.default(sizes, request.kv_dtype)
    result = autotune.AutotuneSearcher(timer).search(problem, candidates, current=current)
    if store is not None:
        best = result.best
        store.put(key, autotune.StoredConfig(dataclasses.asdict(best.config), best.latency_us, best.max_abs_diff, _environment(device)))
    return result, spec


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0, 1 where a case could not be tuned, 2 where nothing is selected."""
    given = list(sys.argv[1:] if argv is None else argv)
    if "--trial-write" in given:
        return int(write_trial.main([argument for argument in given if argument != "--trial-write"], device_or_interpreter))
    if "--trial" in given:
        return int(kernel_trial.main([argument for argument in given if argument != "--trial"], device_or_interpreter))
    parser = argparse.ArgumentParser(prog="python -m asv_bench.tune", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--select", default="", help="regular expression over the case labels")
    parser.add_argument("--store", type=Path, help="file to write; on a GPU the packaged file of this device by default")
    parser.add_argument("--trial", action="store_true", help="instead measure the variants of paged decode; see --trial --help")
    parser.add_argument("--trial-write", action="store_true", help="instead measure configs of the KV write; see --trial-write --help")
    arguments = parser.parse_args(given)
    with device_or_interpreter() as device:
        chosen = [(suite, case) for suite, case in cases(device.type) if re.search(arguments.select, case.label)]
        if not chosen:
            print(f"--select {arguments.select!r} finds no case; leave it out to see them all", file=sys.stderr)
            return 2
        store = _store(arguments.store, device)
        if device.type == "cpu":
            print("Triton's interpreter on a CPU, tiny shapes, wall clock: it shows that the search works, not what is fast")
        print(f"stored in {store.path}" if store is not None else "nothing is stored: name a file with --store")
        done: set[str] = set()
        failed = 0
        for suite, case in chosen:
            try:
                found = tune(suite, case, device, store=store, done=done, limit=_TINY_CANDIDATES if device.type == "cpu" else None)
            except errors.TuningError as error:
                print(f"FAILED {case.label}: {error}", file=sys.stderr)
                failed += 1
                continue
            if found is not None:
                print(_line(case, *found), flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return 1 if failed else 0


def _line(case: Case, result: Any, spec: Any) -> str:
    rule = result.trials[0]
    ratio = f"{result.best.latency_us / rule.latency_us:.3f}x of the config before" if rule.times_us else "the config before failed"
    tried = sum(trial.reason is None for trial in result.trials)
    kept = "kept" if result.kept_current else "new"
    return (
        f"{spec.name} [{case.label}]: {kept} {result.best.config}, {result.best.latency_us:.2f} us, {ratio}; "
        f"{tried} of {len(result.trials)} configs verified and timed"
    )


def _store(path: Path | None, device: torch.device) -> Any:
    if path is not None:
        return config_store.ConfigStore(path)
    return config_store.stores(torch.cuda.get_device_name(device))[-1] if device.type == "cuda" else None


def _environment(device: torch.device) -> dict[str, Any]:
    """The environment block of an entry: what the process record has of device and versions, and the day."""
    known = environment.collect_environment(device)
    kept = {name: known[name] for name in ("driver", "cuda", "torch", "triton", "python", "commit")}
    return {**kept, "device": known["device"]["name"], "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}"}


if __name__ == "__main__":
    sys.exit(main())
