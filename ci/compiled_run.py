"""Compiles commits with `asv_bench.compiled`, and reads and writes the stored baselines of the compiled rows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ci.compiled_model import BASELINE_DIR, BASELINE_SCHEMA_ID, CompiledBaseline, CompiledFile
from ci.errors import BaselineError, InputError
from ci.jsonio import decode_json, read_bounded, read_json, strict_dumps, write_atomic
from ci.repo import Commit, Repository
from ci.run import Places

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
THIS_DEVICE = "this-device"
NOTICE = "notice.txt"
_TIMEOUT_S = 900
_MAX_LISTING = 16 << 20
"""Bytes of one machine code's listing."""


def compile_commit(
    repository: Repository,
    places: Places,
    commit: Commit,
    *,
    select: str | None = None,
    this_device: bool = False,
    told: Callable[[str], object] | None = None,
) -> CompiledFile:
    """What the compiler makes of a commit's kernels, with the suites of this checkout.

    Args:
        repository: Has the commit.
        places: Where the cache lies.
        commit: To compile.
        select: Regular expression over row ids.
        this_device: Compile for the GPU of this machine, with its own figures, instead of the architectures.
        told: Is given each line in which the compiling process says how far it is.
    Raises:
        InputError: It could not be compiled at all.
    """
    cache = places.root / ".asv" / "compiled"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rapid-llm-compile-") as scratch:
        source, output = Path(scratch, "source"), Path(scratch, "compiled.json")
        repository.export(commit, "rapid_llm", source)
        command = [sys.executable, "-m", "asv_bench.compiled", "--source", str(source), "--cache", str(cache), "--output", str(output)]
        command += ["--select", select] if select else []
        command += ["--this-device"] if this_device else []
        code, said = _run(command, places.root, Path(scratch, "errors"), told or (lambda line: None))
        if code:
            why = said[-1].removeprefix("asv_bench.compiled: ") if said else f"exit status {code}"
            raise InputError(
                f"The kernels of {commit.label} ({commit.short}) could not be compiled: {why}; mend it, or leave the compiled rows out"
                " with --no-compiled."
            )
        return read_compiled(output)


def _run(command: Sequence[str], root: Path, errors: Path, told: Callable[[str], object]) -> tuple[int, list[str]]:
    """Exit status of a command, and the lines that it wrote to its standard error; the others are told as they come."""
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (
        errors.open("w", encoding="utf-8") as stderr,
        subprocess.Popen(
            command,
            cwd=root,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            errors="replace",
        ) as child,
    ):
        limit = threading.Timer(_TIMEOUT_S, child.kill)
        limit.start()
        try:
            for line in child.stdout or ():
                told(line.rstrip())
            child.wait()
        except BaseException:
            child.kill()
            raise
        finally:
            limit.cancel()
    text = errors.read_text(encoding="utf-8", errors="replace")
    return child.returncode, [line.strip() for line in text.splitlines() if line.strip()]


def read_compiled(path: Path) -> CompiledFile:
    """Reads a record of `asv_bench.compiled`.

    Raises:
        InputError: It does not follow the schema.
    """
    try:
        return msgspec.convert(read_json(path), CompiledFile)
    except msgspec.ValidationError as exc:
        raise InputError(
            f"{path} does not follow the schema of compiled rows: {exc}; compile again with the suite of this checkout"
        ) from exc


def listing(folder: Path, code: str) -> str | None:
    """The SASS of a machine code that `folder` has, None where it has not, or where `code` is no name of one.

    A link is none: it would put a file of this machine into the report.
    """
    path = folder / f"{code}.txt"
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", code) or path.is_symlink():
        return None
    try:
        return read_bounded(path, limit=_MAX_LISTING).decode("utf-8", "replace")
    except InputError:
        return None


def stored_texts(repository: Repository, tip: Commit, architectures: Sequence[str] = ARCHITECTURES) -> dict[str, bytes]:
    """The baselines of the compiled rows as the base branch has them, by architecture.

    Raises:
        BaselineError: A file does not follow the schema.
    """
    found = {}
    for architecture in architectures:
        path = f"{BASELINE_DIR}/{architecture}.json"
        content = repository.read(tip, path)
        if content is not None:
            load_baseline(content, name=f"{path} of {tip.label}")
            found[architecture] = content
    return found


def kept_baselines(directory: Path) -> dict[str, CompiledBaseline]:
    """The baselines that `keep` put beside the records.

    Raises:
        BaselineError: A file cannot be read, or does not follow the schema.
    """
    files = sorted((directory / "baselines").glob("*.json"))
    return {path.stem: load_baseline(read_bounded(path, error=BaselineError), name=str(path)) for path in files}


def load_baseline(content: bytes, *, name: str) -> CompiledBaseline:
    """Reads a stored baseline.

    Raises:
        BaselineError: It does not follow the schema.
    """
    try:
        return msgspec.convert(decode_json(content, name=name, error=BaselineError), CompiledBaseline)
    except msgspec.ValidationError as exc:
        raise BaselineError(
            f"{name} does not follow {BASELINE_SCHEMA_ID}: {exc}; record it again with `python -m ci compiled record`"
        ) from exc


def record_baselines(compiled: CompiledFile, commit: Commit, root: Path, *, reason: str) -> list[Path]:
    """Writes one baseline an architecture; returns the files.

    Raises:
        InputError: A row failed, so that there is nothing to accept.
    """
    failed = [
        f"{name} on {arch} ({row.reason})"
        for arch, side in compiled.architectures.items()
        for name, row in side.rows.items()
        if row.state == "failed"
    ]
    if failed:
        raise InputError(f"{len(failed)} compiled rows failed and can be no baseline, first {failed[0]}; mend them first")
    written = []
    for architecture, side in compiled.architectures.items():
        launched = {launch.code for row in side.rows.values() for launch in (*row.launches, *row.like_launches)}
        made = CompiledBaseline(
            schema="rapid_llm/compiled-baseline/2",
            architecture=architecture,
            triton=compiled.triton,
            ptxas=compiled.ptxas[architecture],
            commit=commit.sha,
            reason=reason,
            device=side.device,
            rows=side.rows,
            codes={code: {name: n for name, n in figures.items() if n} for code, figures in compiled.codes.items() if code in launched},
        )
        path = root / BASELINE_DIR / f"{architecture}.json"
        write_atomic(path, strict_dumps(msgspec.to_builtins(made)))
        written.append(path)
    return written


def keep(compiled: dict[str, CompiledFile], baselines: dict[str, bytes], directory: Path, *, notice: str = "") -> None:
    """Puts the commits' records, the stored baselines and what was noticed beside a report: the verdict can be computed of them again."""
    shutil.rmtree(directory, ignore_errors=True)
    for name, record in compiled.items():
        write_atomic(directory / f"{name}.json", strict_dumps(msgspec.to_builtins(record)))
    for architecture, content in baselines.items():
        write_atomic(directory / "baselines" / f"{architecture}.json", content.decode("utf-8"))
    if notice:
        write_atomic(directory / NOTICE, notice)
