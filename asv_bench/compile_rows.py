"""One architecture: every row's public call on a stand-in device, its launches, and the machine code of what they would run.

`asv_bench.compiled` starts it, in a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what a dispatch mode imports at its first use, once before the processes are forked
import triton

import rapid_llm
from asv_bench import claims, compile_cache, launches, machine_code, suite
from asv_bench.compiled import SourceError
from asv_bench.launches import Launch, Recorded
from asv_bench.stand_in import DEVICES, Device, standing_in
from rapid_llm.errors import NoKernelError
from rapid_llm.kernels.ops import registry

_REASON = 400
_NOTHING: dict[str, Any] = {"launches": [], "like_launches": []}


class UnsupportedError(Exception):
    """The registry does not say that this architecture is served."""


def check_source(source: Path) -> None:
    """Refuses to compile another checkout's library.

    Raises:
        SourceError: `rapid_llm` comes from outside `source`.
    """
    where = Path(rapid_llm.__file__ or "").resolve()
    if source not in where.parents:
        raise SourceError(f"rapid_llm comes from {where}, not from {source}: remove the installed copy or mend PYTHONPATH")


def compile_architecture(arch: str, cache: Path, journal: Path, select: str | None, own: dict[str, Any] | None = None) -> None:
    """Compiles the rows for one architecture and journals them, a line each.

    Args:
        arch: Of `asv_bench.stand_in.DEVICES`.
        cache: Where machine codes are kept.
        journal: File to write.
        select: Regular expression over row ids.
        own: Figures of the device of this machine, in place of those of the architecture's named device.
    """
    device = DEVICES[arch]
    if own is not None:
        figures = {name: own[name] for name in ("name", "multiprocessors", "l2_bytes")}
        device = dataclasses.replace(device, **figures)
    wanted = re.compile(select) if select else None
    with journal.open("a", encoding="utf-8") as file, standing_in(device) as cuda, warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def say(event: dict[str, Any]) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()

        say({"device": {"name": device.name, "multiprocessors": device.multiprocessors, "l2_bytes": device.l2_bytes}})
        for row_id, known, call in _rows(cuda):
            if wanted is None or wanted.search(row_id):
                say({"start": row_id})
                say({"row": {"id": row_id, **known, **_compile_row(call, device, cache)}})


def _rows(cuda: torch.device) -> Iterator[tuple[str, dict[str, Any], Callable[[], Recorded]]]:
    """Id, description and recorder of every row whose kernel is a registered Triton spec: the suites', then the claims."""
    launched = set()
    for row in suite.all_rows():
        impl = row.suite.impl.get("cuda", "")
        if "cuda" in row.case.devices and impl in registry.names() and registry.get(impl).backend == claims.BACKEND:
            launched.add(impl)
            known = {"op": row.suite.op, "impl": impl, "version": row.suite.version}
            yield row.id, known, lambda row=row, impl=impl: _record_row(row, impl, cuda)  # type: ignore[misc]
    for claim in claims.claims():
        known = {"op": claim.spec.op, "impl": claim.spec.name, "version": "claim"}
        yield claim.id, known, lambda claim=claim: _record_claim(claim, cuda)  # type: ignore[misc]
    for spec in claims.ops_without_calls():
        if spec.name not in launched:
            known = {"op": spec.op, "impl": spec.name, "version": "claim"}
            yield f"claim.{spec.name}()", known, lambda spec=spec: _nothing_launches(spec)  # type: ignore[misc]


def _record_claim(claim: claims.Claim, cuda: torch.device) -> Recorded:
    with _nothing_is_launched():
        claim.call(cuda)
    return launches.record_form([lambda: claim.call(cuda)], launch=False)


def _nothing_launches(spec: Any) -> Recorded:
    raise LookupError(f"no suite launches {spec.name} and asv_bench/claims.py has no call of {spec.op}: add one of the two")


def _record_row(row: suite.SuiteRow, impl: str, cuda: torch.device) -> Recorded:
    with _nothing_is_launched():
        prepared = row.suite().build(row.case, cuda)
        prepared.calls[0]()  # what a first call makes once, such as its workspace, is no part of a call
    if prepared.selection is not None and prepared.selection.spec.name != impl:
        raise UnsupportedError(f"dispatch() runs {prepared.selection.spec.name}")
    return launches.record_form(prepared.calls, reset=prepared.reset, launch=False)


@contextlib.contextmanager
def _nothing_is_launched() -> Iterator[None]:
    """While inputs are built, launches are neither compiled nor recorded."""
    run = triton.JITFunction.run
    triton.JITFunction.run = lambda *args, **kwargs: None
    try:
        yield
    finally:
        triton.JITFunction.run = run


def _compile_row(call: Callable[[], Recorded], device: Device, cache: Path) -> dict[str, Any]:
    """The part of a row's record that the compiler decides."""
    try:
        made = call()
        first, like = ([{**launch.record(), **_resources(launch, device, cache)} for launch in part] for part in made)
    except (NoKernelError, UnsupportedError) as error:
        return {"state": "unsupported", "reason": _first_line(error), **_NOTHING}
    except Exception as error:  # one row's fault is that row's alone
        return {"state": "failed", "reason": f"{type(error).__name__}: {_first_line(error)}", **_NOTHING}
    return {"state": "compiled", "reason": None, "launches": first, "like_launches": like, "launch_hash": launches.hash_of(made)}


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A compiler's message begins with where it is and ends with what is wrong.
    return " ".join(lines[-2:] if len(lines) > 1 and not isinstance(error, NoKernelError) else lines[:1])[:_REASON] or "no message"


def _resources(launch: Launch, device: Device, cache: Path) -> dict[str, int]:
    """Occupancy of a Triton launch, whose machine code it keeps in the cache.

    Raises:
        ValueError: It needs more shared memory than a block of the device can have.
    """
    if launch.kind != "triton":
        return {}
    if launch.shared_bytes > device.block_shared_bytes:
        raise ValueError(
            f"{launch.name} needs {launch.shared_bytes:,} bytes of shared memory a block and the device has {device.block_shared_bytes:,}"
        )
    figures = _assembled(launch, cache)
    limits = machine_code.Limits(device.warps, device.blocks, device.shared_bytes)
    warps = machine_code.occupancy_warps(
        limits, registers=figures["registers"], shared_bytes=launch.shared_bytes, warps_a_block=launch.threads // 32
    )
    return {"occupancy_warps": warps}


def _assembled(launch: Launch, cache: Path) -> dict[str, int]:
    made = compile_cache.assembled(cache, launch.code)
    if made is None:
        made = machine_code.assembled(launch.ptxas_log or _assembled_again(launch))
        compile_cache.keep(cache, launch.code, launch.kernel.asm["cubin"], made)
    return made


def _assembled_again(launch: Launch) -> str:
    """What ptxas says of a kernel that came from Triton's cache, where its words are not kept."""
    from triton import knobs

    source, target = launch.kernel.src, launch.kernel.metadata.target
    options = {name: value for name, value in launch.kernel.metadata._asdict().items() if name in _OPTIONS}
    with knobs.compilation.scope(), launches.told_by_ptxas() as said:
        knobs.compilation.always_compile = True
        triton.compile(source, target=target, options=options)
    return said.getvalue()


_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "launch_cooperative_grid", "launch_pdl", "debug")
