"""Rows that the merge-base's suites measure and the change's do not: without a stored baseline nothing else would miss them.

Both commits of a comparison are measured with the suites of the change, so that a suite that it deletes is gone on both sides.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from ci.errors import ExitCode, InputError, UsageError
from ci.identity import table
from ci.jsonio import decode_json
from ci.model import GateResult, RowKey, RowOutcome, RowVerdict
from ci.repo import Commit, Repository
from ci.rows import RUN_ORDER, VERDICTS, named

SUITES = "asv_bench"
_TIMEOUT_S = 120
_MAX_NAMED_ROWS = 5
_LIST = """
import json, sys
from asv_bench.suite import all_rows
rows = {row.id: {**row.describe(), "devices": list(row.case.devices)} for row in all_rows()}
print(json.dumps({name: {field: row[field] for field in sys.argv[1].split(",")} for name, row in rows.items()}))
"""


class Listed(msgspec.Struct, frozen=True):
    """What a suite says of a row before anything is measured."""

    benchmark: str
    params: list[str]
    devices: list[str]
    control: bool
    bottleneck: str
    unit: str
    version: str

    def gated_on(self, device_type: str) -> bool:
        """Whether the row decides anything on a device; an unknown type ("") counts as any."""
        return not self.control and (not device_type or device_type in self.devices)


def listed(folder: Path) -> dict[str, Listed]:
    """The rows of the suites in ``folder/asv_bench`` by their id, as a process of its own finds them; nothing is measured.

    Raises:
        InputError: The suites cannot be imported.
    """
    fields = ",".join(Listed.__struct_fields__)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LIST, fields],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(f"The suites in {folder} were not listed within {_TIMEOUT_S} s; mend what they do on import.") from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise InputError(f"The suites in {folder} cannot be listed: {said[-1] if said else f'exit status {done.returncode}'}; mend them.")
    try:
        return msgspec.convert(decode_json(done.stdout, name=f"the list of rows of {folder}"), dict[str, Listed])
    except msgspec.ValidationError as error:
        raise InputError(f"The list of rows of {folder} is of another form ({error}); mend its suites.") from error


class Suites(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows that the suites of both commits have."""

    before: dict[str, Listed] | None
    """Of the merge-base; none where it has no suites, None where they could not be listed."""
    after: dict[str, Listed]
    problem: str = ""
    """Why they could not be listed."""


def suites(repository: Repository, base: Commit) -> Suites:
    """Lists the rows of the merge-base's suites, and those of the suites of the change, in the working tree.

    A merge-base from before this project had suites has no rows that could be missed.

    Raises:
        InputError: The suites of the checkout cannot be listed.
    """
    if repository.read(base, f"{SUITES}/__init__.py") is None:
        return Suites({}, listed(repository.root))
    try:
        with tempfile.TemporaryDirectory(prefix="rapid-llm-suites-") as scratch:
            repository.export(base, SUITES, Path(scratch))
            before = listed(Path(scratch))
    except (UsageError, InputError) as error:
        return Suites(None, {}, str(error))
    return Suites(before, listed(repository.root))


def judged(result: GateResult, found: Suites, *, select: str | None = None) -> GateResult:
    """`result` with a MISSING row for each row of the merge-base that the suites of the change have no more, and what else changed in them.

    Where the merge-base's rows are not known, nothing says that none is gone: the verdict is INCOMPLETE then.

    Args:
        result: The verdict on what was measured; its environment names the device's type.
        found: The rows of both commits.
        select: Regular expression over row ids: others were not to be measured.
    """
    if found.before is None:
        return _incomplete(result, f"the merge-base's rows are not known, so that one which is gone would not be missed: {found.problem}")
    device_type = str(table(result.environment, "device").get("type") or "")
    return missed(result, found.before, found.after, device_type=device_type, select=select)


def missed(
    result: GateResult, before: Mapping[str, Listed], after: Mapping[str, Listed], *, device_type: str, select: str | None = None
) -> GateResult:
    """As `judged`, of two lists of rows."""
    wanted = re.compile(select or "")
    told = {row.key for row in result.rows}
    rows = []
    for name, row in before.items():
        key = RowKey(row.benchmark, tuple(row.params))
        if not row.gated_on(device_type) or not wanted.search(name) or _is_gated(after.get(name), device_type):
            continue
        if key in told and name not in after:
            continue  # the stored baseline misses it already, and may waive it
        rows.append(RowOutcome(key=key, verdict=RowVerdict.MISSING, reason=_why(after.get(name), device_type), section="other"))
    other = sorted(name for name, row in before.items() if name not in after and not row.gated_on(device_type))
    notices = list(result.notices)
    if other:
        notices.append(f"The change takes away {len(other)} rows that do not decide on this device: {_some(other)}.")
    for field in ("version", "unit", "bottleneck"):
        changed = sorted(name for name, row in before.items() if name in after and getattr(after[name], field) != getattr(row, field))
        if changed:
            notices.append(f"The change gives {len(changed)} rows another {field}: {_some(changed)}.")
    result = replace(result, notices=tuple(notices))
    if not rows:
        return result
    gone = {row.key for row in rows}
    kept = [row for row in result.rows if row.key not in gone]
    reason = f"{len(rows)} rows of the merge-base are not measured any more: {named(rows, lambda row: f'{row.key} ({row.reason})')}"
    return _incomplete(replace(result, rows=tuple(sorted([*kept, *rows], key=lambda row: row.key))), reason)


def _incomplete(result: GateResult, reason: str) -> GateResult:
    """`result` as INCOMPLETE, unless it is something graver; the reason is told in either case."""
    code = min(ExitCode(result.exit_code), ExitCode.INCOMPLETE, key=RUN_ORDER.index)
    told = reason if result.exit_code == ExitCode.PASS else f"{result.reason}; and {reason}"
    return replace(result, exit_code=int(code), verdict=VERDICTS[code], reason=told)


def _is_gated(row: Listed | None, device_type: str) -> bool:
    return row is not None and row.gated_on(device_type)


def _why(now: Listed | None, device_type: str) -> str:
    if now is None:
        return "the merge-base's suites have it, and the change's have not"
    return "the change makes it a control, which decides nothing" if now.control else f"the change takes it off {device_type} devices"


def _some(names: list[str]) -> str:
    rest = len(names) - _MAX_NAMED_ROWS
    return ", ".join(names[:_MAX_NAMED_ROWS]) + (f" and {rest} more" if rest > 0 else "")
