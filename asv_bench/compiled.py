"""Compiles what the suites launch for every architecture, without a GPU, and writes one record of it.

`python -m asv_bench.compiled --source CHECKOUT --cache FOLDER --output FILE` takes the suites of this checkout and `rapid_llm` of the other
one. Each architecture has a process of its own; what the compiler made is kept by the hash of the sources and of the tools, so that a
second call reads one file.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asv_bench import compile_cache, machine_code

SCHEMA = "rapid_llm/compiled/2"
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

THIS_DEVICE = "this-device"
"""Stands for the GPU of this machine, with its own number of multiprocessors and L2, where an architecture is named."""

_HERE = Path(__file__).resolve().parent
_POLL_S = 0.05
_HANG_S = 300.0


class SourceError(RuntimeError):
    """The sources to compile, or the tools to compile them with, cannot be used."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the record of one checkout; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m asv_bench.compiled", description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="checkout whose rapid_llm is compiled")
    parser.add_argument("--cache", type=Path, required=True, help="folder of what was compiled before")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parser.add_argument("--select", help="only rows whose id the regular expression finds")
    parser.add_argument("--this-device", action="store_true", help="compile for this machine's GPU, with its own figures")
    parser.add_argument("--architectures", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    options = parser.parse_args(arguments)
    try:
        architectures = [THIS_DEVICE] if options.this_device else options.architectures
        record = compiled(options.source.resolve(), options.cache.resolve(), architectures, select=options.select)
    except SourceError as error:
        print(f"asv_bench.compiled: {error}", file=sys.stderr)
        return 1
    compile_cache.write(options.output, record)
    return 0


def compiled(source: Path, cache: Path, architectures: Sequence[str], *, select: str | None = None) -> dict[str, Any]:
    """The record of a checkout, from the cache or made now.

    Args:
        source: Has the folder rapid_llm.
        cache: Is made where it is missing.
        architectures: Of `ARCHITECTURES`.
        select: Regular expression over row ids.
    Raises:
        SourceError: There is no rapid_llm in `source`, or triton is not installed.
    """
    tools = tool_versions()
    device = this_device() if THIS_DEVICE in architectures else None
    if device is not None:
        tools["this_device"] = device
        tools["ptxas"][THIS_DEVICE] = tools["ptxas"][_architecture_of(device)]
    key = _key(source, tools, architectures, select)
    kept = cache / "records" / f"{key}.json"
    made = compile_cache.cached(kept)
    if made is not None and (made.get("schema"), made.get("source")) == (SCHEMA, key):
        return made
    found = _compile_all(source, cache, architectures, select, device)
    record = {"schema": SCHEMA, "source": key, **tools, "architectures": found}
    try:
        record["codes"] = compile_cache.figures(cache, _codes(found), tool("cuobjdump"))
    except machine_code.ToolError as error:
        raise SourceError(str(error)) from error
    if not any(arch["died"] for arch in found.values()):
        compile_cache.write(kept, record)
    return record


def tool_versions() -> dict[str, Any]:
    """Versions of what compiles: `triton`, `torch`, and `ptxas` by architecture.

    Raises:
        SourceError: One of them is not here.
    """
    try:
        versions = {name: importlib.metadata.version(name) for name in ("triton", "torch")}
    except importlib.metadata.PackageNotFoundError as error:
        raise SourceError(f"{error.name} is not installed for {sys.executable}: install the project's dependencies") from error
    return {**versions, "ptxas": {arch: _ptxas_version(_ptxas(arch)) for arch in ARCHITECTURES}}


def this_device() -> dict[str, Any]:
    """Name, capability, multiprocessors and L2 of this machine's GPU, asked by a process that ends: a forked one must not have used it.

    Raises:
        SourceError: torch sees none.
    """
    code = (
        "import json, torch; p = torch.cuda.get_device_properties(0); print(json.dumps(dict(name=p.name, capability=[p.major, p.minor],"
        " multiprocessors=p.multi_processor_count, l2_bytes=p.L2_cache_size)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise SourceError(f"torch sees no GPU on this machine ({done.stderr.strip().splitlines()[-1]}): name architectures instead")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _architecture_of(device: dict[str, Any]) -> str:
    major, minor = device["capability"]
    arch = f"sm_{10 * major + minor}"
    if arch not in ARCHITECTURES:
        raise SourceError(
            f"{device['name']} has the compute capability {major}.{minor}, of which asv_bench/stand_in.py knows no limits: add it"
        )
    return arch


def _ptxas(arch: str) -> Path:
    """The assembler that Triton takes for an architecture."""
    blackwell = int(arch.removeprefix("sm_")) >= 100
    named = os.environ.get("TRITON_PTXAS_BLACKWELL_PATH" if blackwell else "TRITON_PTXAS_PATH")
    return Path(named) if named else tool("ptxas-blackwell" if blackwell else "ptxas")


def tool(name: str) -> Path:
    """A tool of Triton's wheel.

    Raises:
        SourceError: It is not there.
    """
    spec = importlib.util.find_spec("triton")
    path = Path(spec.origin or "").parent / "backends" / "nvidia" / "bin" / name if spec is not None else Path(name)
    if not path.is_file():
        raise SourceError(f"there is no {name} at {path}: install a triton wheel that has NVIDIA's tools")
    return path


@functools.cache
def _ptxas_version(path: Path) -> str:
    done = subprocess.run([str(path), "--version"], capture_output=True, text=True, check=False, timeout=60)
    match = re.search(r"\bV(\d+(?:\.\d+)+)", done.stdout)
    if match is None:
        raise SourceError(f"{path} --version tells no version: install a whole triton wheel")
    return match[1]


def _key(source: Path, tools: dict[str, Any], architectures: Sequence[str], select: str | None) -> str:
    """Hash of everything that the record depends on."""
    if not (source / "rapid_llm").is_dir():
        raise SourceError(f"{source} has no folder rapid_llm: name a checkout of this project with --source")
    digest = hashlib.sha256(json.dumps([SCHEMA, tools, list(architectures), select, sys.version_info[:2]]).encode())
    for folder in (source / "rapid_llm", _HERE):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"\0{path.relative_to(folder.parent)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def _compile_all(
    source: Path, cache: Path, architectures: Sequence[str], select: str | None, device: dict[str, Any] | None
) -> dict[str, Any]:
    """Runs one forked process an architecture, as many at a time as there are cores."""
    os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path.insert(0, str(source))
    from asv_bench import compile_rows  # imports torch, triton and the library: once for all processes

    compile_rows.check_source(source)
    context = multiprocessing.get_context("fork")
    cache.mkdir(parents=True, exist_ok=True)
    # The newest first: compiling takes longer for them, and what comes last should be short.
    waiting, results, began_s = list(reversed(architectures)), {}, time.monotonic()
    running: dict[str, tuple[Any, Path, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                arch = waiting.pop(0)
                journal = cache / f".{arch}-{os.getpid()}.jsonl"
                journal.unlink(missing_ok=True)
                of = _architecture_of(device) if device is not None else arch
                child = context.Process(target=compile_rows.compile_architecture, args=(of, cache, journal, select, device))
                child.start()
                running[arch] = (child, journal, time.monotonic())
            for arch, (child, journal, started_s) in list(running.items()):
                if child.is_alive() and time.monotonic() - started_s > _HANG_S:
                    child.kill()
                if not child.is_alive():
                    child.join()
                    results[arch] = _result(arch, journal, child.exitcode)
                    print(f"compiled for {arch}: {len(results)} of {len(architectures)}, {time.monotonic() - began_s:.0f} s", flush=True)
                    journal.unlink(missing_ok=True)
                    del running[arch]
            time.sleep(_POLL_S)
    finally:
        for child, journal, _ in running.values():
            child.kill()
            child.join()
            journal.unlink(missing_ok=True)
    return {arch: results[arch] for arch in architectures}


def _result(arch: str, journal: Path, status: int | None) -> dict[str, Any]:
    """What an architecture's process left; where it died, the row in which it did is failed and the rest is missing."""
    lines = journal.read_text(encoding="utf-8").split("\n")[:-1] if journal.is_file() else []
    events = [json.loads(line) for line in lines]
    rows = [event["row"] for event in events if "row" in event]
    died = None
    if status != 0:
        begun = [event["start"] for event in events if "start" in event]
        where = begun[-1] if len(begun) > len(rows) else "no row"
        died = f"the process that compiles for {arch} ended with {status} in {where}"
        if begun and len(begun) > len(rows):
            unknown = {"op": "", "impl": "", "version": "", "launches": [], "like_launches": []}
            rows.append({"id": begun[-1], "state": "failed", "reason": died, **unknown})
    device: dict[str, Any] = next((event["device"] for event in events if "device" in event), {})
    return {"device": device, "died": died, "rows": {row.pop("id"): row for row in rows}}


def _codes(architectures: dict[str, Any]) -> Iterator[str]:
    """Machine code that a row launches, each once."""
    codes = {
        launch["code"]
        for arch in architectures.values()
        for row in arch["rows"].values()
        for launch in (*row["launches"], *row["like_launches"])
        if launch["kind"] == "triton"
    }
    return iter(sorted(codes))


if __name__ == "__main__":
    sys.exit(main())
