"""`python -m ci baseline`: record, refresh, show."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from ci import acceptable
from ci import baseline as baselines
from ci import merge as merging
from ci.device import detect
from ci.errors import BaselineError, ExitCode, UsageError
from ci.identity import device_key, device_of
from ci.jsonio import read_bounded
from ci.model import CommitResult


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of `python -m ci`."""
    baseline = commands.add_parser("baseline", help="record, refresh or show a baseline")
    actions = baseline.add_subparsers(dest="action", required=True, metavar="ACTION")
    record = actions.add_parser("record", help="make a baseline of runs that `run --keep` made")
    record.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs of one commit on one kind of device")
    record.add_argument("--reason", required=True, help="why this state is accepted")
    record.add_argument("--accepted-by", default=os.environ.get("USER", ""), help="who accepts it")
    record.add_argument("--single-boot", action="store_true", help="accept runs of one boot, as an advisory baseline")
    record.add_argument("--waivers", type=Path, help="JSON file of waivers to carry: row, change, reason, approver, reference, expires")
    record.add_argument("--output", type=Path, help="file to write (default: baselines/<device>.json)")
    record.add_argument("--accept-noisy", action="store_true", help="accept and mark rows in which one run looks like a regression")
    record.add_argument("--new-anchor", action="store_true", help="leave the anchors of the file that is replaced behind")
    again = actions.add_parser("refresh", help="replace the rows of a baseline that really changed by those of kept runs")
    again.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs of one commit on the baseline's device")
    again.add_argument("--reason", required=True, help="why the rows changed")
    again.add_argument("--accepted-by", default=os.environ.get("USER", ""), help="who accepts it")
    again.add_argument("--rows", metavar="REGEX", type=expression, help="replace these rows and no others (default: those that changed)")
    again.add_argument("--file", type=Path, help="the baseline (default: baselines/<device of the runs>.json)")
    again.add_argument("--waivers", type=Path, help="JSON file of waivers that take the place of the baseline's")
    again.add_argument("--single-boot", action="store_true", help="accept runs of one boot; the baseline is then advisory")
    again.add_argument("--accept-noisy", action="store_true", help="accept and mark rows in which one run looks like a regression")
    again.add_argument("--new-anchor", action="store_true", help="drift of the replaced rows is held against the new values from now on")
    show = actions.add_parser("show", help="print what a baseline holds")
    show.add_argument("file", type=Path, nargs="?", help="a baseline file (default: this device's)")


_WHOLE_NAME = re.compile(r"bench_\w+\.\w+\.track_\w+\(.*\)")


def expression(text: str) -> str:
    """A regular expression of the command line, as argparse takes a type; a row's whole name, as reports have it, stands for that row."""
    if _WHOLE_NAME.fullmatch(text):
        return re.escape(text)
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression ({error})") from error
    return text


def run(options: argparse.Namespace, console: Console) -> int:
    """Does what the command line asks for; returns the exit code."""
    if options.action == "record":
        return _record(options, console)
    if options.action == "refresh":
        return _refresh(options, console)
    file = options.file or Path("baselines") / f"{detect().key}.json"
    if not file.exists():
        raise UsageError(f"There is no baseline at {file}: record one with `python -m ci baseline record`.")
    console.print(baselines.describe(baselines.load(file)), markup=False, highlight=False)
    return int(ExitCode.PASS)


def _record(options: argparse.Namespace, console: Console) -> int:
    runs = [merging.load_kept(folder) for folder in options.runs]
    target = options.output or _file_of(runs[0])
    previous, lost = _previous(target)
    made = baselines.record(
        runs,
        previous=previous,
        previous_hash=None if previous is None else hashlib.sha256(read_bounded(target, error=BaselineError)).hexdigest(),
        new_anchor=options.new_anchor,
        reason=options.reason,
        accepted_by=options.accepted_by,
        waivers=baselines.load_waivers(options.waivers) if options.waivers else (),
        allow_single_boot=options.single_boot,
        accept_noisy=options.accept_noisy,
    )
    baselines.save(made, target)
    noisy = [f"accepted as noisy: {name}" for name, row in made.rows.items() if row.noisy]
    for line in (*lost, *acceptable.untold(runs), *noisy, f"{target}: {len(made.rows)} rows of {len(made.runs)} runs"):
        console.print(line, markup=False, highlight=False)
    return int(ExitCode.PASS)


def _file_of(run: CommitResult) -> Path:
    """Where the baseline of a run's device belongs."""
    device = device_of(acceptable.processes_of(run)[-1].environment)
    return Path("baselines") / f"{device_key(device.name, mig=device.mig)}.json"


def _previous(target: Path) -> tuple[baselines.Baseline | None, list[str]]:
    """The baseline that is about to be replaced, and what cannot be carried over from it."""
    if not target.exists():
        return None, []
    try:
        return baselines.load(target), []
    except BaselineError as error:
        return None, [f"no anchor is carried over: {error}"]


def _refresh(options: argparse.Namespace, console: Console) -> int:
    runs = [merging.load_kept(folder) for folder in options.runs]
    file = options.file or _file_of(runs[0])
    if not file.exists():
        raise UsageError(f"There is no baseline at {file}: name one with --file, or record one with `python -m ci baseline record`.")
    text = read_bounded(file, error=BaselineError)
    made = baselines.refresh(
        baselines.load(text, name=str(file)),
        runs,
        reason=options.reason,
        accepted_by=options.accepted_by,
        rows=options.rows,
        previous_hash=hashlib.sha256(text).hexdigest(),
        waivers=baselines.load_waivers(options.waivers) if options.waivers else None,
        allow_single_boot=options.single_boot,
        accept_noisy=options.accept_noisy,
        new_anchor=options.new_anchor,
    )
    if not (made.replaced or made.added):
        console.print(f"{file}: no row changed beyond chance, so the file stays as it is", markup=False, highlight=False)
        return int(ExitCode.PASS)
    baselines.save(made.baseline, file)
    lines = [*acceptable.untold(runs), *(f"replaced: {name}" for name in made.replaced), *(f"added: {name}" for name in made.added)]
    lines += [f"accepted as noisy: {name}" for name in (*made.replaced, *made.added) if made.baseline.rows[name].noisy]
    kept = len(made.baseline.rows) - len(made.replaced) - len(made.added)
    for line in (*lines, *made.notices, f"{file}: {len(made.replaced)} rows replaced, {len(made.added)} added, {kept} as they were"):
        console.print(line, markup=False, highlight=False)
    return int(ExitCode.PASS)
