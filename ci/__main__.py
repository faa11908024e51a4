"""`python -m ci`: gate, run, compare, bisect, merge, report, verdict, table, baseline, site, and what a job on GitHub needs."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ci import baseline as baselines
from ci import baseline_command, bisect_run, compiled_run, github, run, shards, spread, tables
from ci import case as cases
from ci import comment as comments
from ci import gate as gating
from ci import merge as merging
from ci.compare import compare_baseline, compare_history
from ci.confirm import compare_pairs
from ci.device import detect
from ci.errors import ExitCode, GateError, InputError, UsageError
from ci.jsonio import read_bounded
from ci.model import CommitResult, GateResult
from ci.options import parser
from ci.repo import Repository
from ci.results import load_commit
from ci.rows import now_text
from ci.run import Places, RunPlan
from ci.terminal import render_terminal
from ci.verdict_file import dump as dump_verdict
from ci.verdict_file import load as load_verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    options = parser(__doc__).parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(soft_wrap=not sys.stdout.isatty())
    errors = Console(stderr=True, soft_wrap=True)
    try:
        return int(_COMMANDS[options.command](options, console))
    except GateError as error:
        errors.print(f"ci: {error}", style="bold red", highlight=False, markup=False)
        return int(error.exit_code)
    except OSError as error:
        errors.print(
            f"ci: {error.filename or 'a file'}: {error.strerror or error}; mend it, or name another place.", style="bold red", markup=False
        )
        return int(ExitCode.USAGE)
    except KeyboardInterrupt:
        errors.print("ci: interrupted; what was measured is kept, run the same command again to go on", highlight=False)
        return 130
    except Exception:
        # Python would end with 1, which here means a regression.
        errors.print_exception()
        return int(ExitCode.INCOMPLETE)


def _interrupt(number: int, frame: object) -> None:
    """A cancelled job ends like an interrupted one: asv is stopped, what was measured is kept."""
    raise KeyboardInterrupt


def _gate(options: argparse.Namespace, console: Console) -> int:
    wanted = gating.Options(
        directory=options.report,
        base=options.base,
        select=options.select,
        pairs=options.pairs,
        rounds=options.rounds,
        ignore_baseline=options.no_baseline,
        require_baseline=options.require_baseline,
        resume=not options.no_resume,
        compiled=not options.no_compiled,
        skip_identical=options.skip_identical,
    )
    if options.shard is None:
        return gating.gate(Path.cwd(), wanted, console).exit_code
    left = shards.measure(Path.cwd(), wanted, options.shard, console)
    console.print(f"{left}: measured; `python -m ci merge` judges it with the other shards", markup=False, highlight=False)
    return int(ExitCode.PASS)


def _run(options: argparse.Namespace, console: Console) -> int:
    repository = Repository(Path.cwd())
    places, device, commit = Places(repository.root), detect(), repository.commit(options.commit)
    run.forget(places, device, [commit])
    run.run_asv(places, RunPlan((commit,), options.rounds, select=options.select), console)
    measured = run.load(places, device, commit)
    if options.keep:
        run.keep(places, device, [commit], options.keep)
    states: dict[str, int] = {}
    for row in measured.rows.values():
        states[row.state] = states.get(row.state, 0) + 1
        if row.state not in ("measured", "skipped"):
            console.print(f"{row.state}: {row.key}: {row.reason}", markup=False, highlight=False)
    console.print(f"{commit.short} on {device.name}: {', '.join(f'{n} {state}' for state, n in sorted(states.items()))}", highlight=False)
    return int(ExitCode.PASS if set(states) <= {"measured", "skipped"} and "measured" in states else ExitCode.INCOMPLETE)


def _bisect(options: argparse.Namespace, console: Console) -> int:
    return int(bisect_run.find(Path.cwd(), options.row, options.good, options.bad, options.pairs, options.report, console))


def _compare(options: argparse.Namespace, console: Console) -> int:
    result = _compared(options)
    result = replace(result, created_at=now_text())
    gating.publish(result, options.report, console)
    return result.exit_code


def _compared(options: argparse.Namespace) -> GateResult:
    if options.baseline and options.base:
        raise UsageError("compare takes --baseline or --base, not both.")
    if options.runs:
        if not options.baseline:
            raise UsageError("compare --runs needs a --baseline to hold them against.")
        runs = [merging.load_kept(folder) for folder in options.runs]
        baseline = baselines.load(options.baseline, name=str(options.baseline))
        return compare_baseline(runs, baseline, base=baseline.anchor_commit, head=runs[0].commit, device=runs[0].machine)
    if not options.head:
        raise UsageError("compare needs a commit under test, or --runs with folders that `run --keep` made.")
    own = options.results is None
    results = Path(".asv/results") if own else options.results
    machine = options.machine or detect().key
    records = Path(".asv/records") if own else None
    if options.baseline:
        runs = [load_commit(results, machine, name, records_dir=records) for name in options.head]
        baseline = baselines.load(options.baseline, name=str(options.baseline))
        return compare_baseline(runs, baseline, base=baseline.anchor_commit, head=runs[0].commit, device=machine)
    if not options.base:
        raise UsageError("compare needs something to compare with: --baseline FILE, or --base COMMIT ....")
    if len(options.base) == 1 and own:
        pair = [load_commit(results, machine, name, records_dir=records) for name in (*options.base, options.head[0])]
        return compare_pairs(pair[0], pair[1], mode="ab", device=machine)
    history = [_named(results, machine, name) for name in options.base]
    return compare_history(history, [_named(results, machine, name) for name in options.head], device=machine)


def _named(results: Path, machine: str, name: str) -> CommitResult:
    """One commit of a foreign tree; only its file is read, however long the history is."""
    try:
        return load_commit(results, machine, name)
    except InputError as error:
        raise UsageError(f"{error}; name the machine with --machine and one commit in full.") from error


def _merge(options: argparse.Namespace, console: Console) -> int:
    if options.output is not None:
        merging.merge_runs(options.folders, options.output)
        console.print(f"{options.output}: one run of {len(options.folders)}", markup=False, highlight=False)
        return int(ExitCode.PASS)
    result = shards.verdict(Path.cwd(), options.folders, options.report)
    gating.publish(result, options.report, console)
    return result.exit_code


def _report(options: argparse.Namespace, console: Console) -> int:
    source = options.source / "verdict.json" if options.source.is_dir() else options.source
    result = _verdict(source)
    gating.publish(result, options.report or source.parent, console)
    return result.exit_code


def _verdict(source: Path) -> GateResult:
    if not source.exists():
        raise UsageError(f"There is no verdict at {source}: run `python -m ci gate` first.")
    return load_verdict(read_bounded(source), name=str(source))


def _judge_again(options: argparse.Namespace, console: Console) -> int:
    folder: Path = options.source
    result = cases.judge(folder)
    kept = folder / "verdict.json"
    if options.report is None and kept.is_file():
        if read_bounded(kept).decode("utf-8", "replace") != dump_verdict(result):
            raise InputError(
                f"{kept} is not what the files beside it give ({result.verdict.value}): it was changed, or another version of the gate"
                " made it; name a folder with --report to see what they give."
            )
        render_terminal(result, console)
        console.print(f"{kept} is what its files give, byte for byte", markup=False, highlight=False)
        return result.exit_code
    gating.publish(result, options.report or folder, console)
    return result.exit_code


def _summary(options: argparse.Namespace, console: Console) -> int:
    for line in github.publish(_verdict(options.report / "verdict.json")):
        sys.stdout.write(f"{line}\n")
    return int(ExitCode.PASS)


def _comment(options: argparse.Namespace, console: Console) -> int:
    for line in comments.comment():
        console.print(line, markup=False, highlight=False)
    return int(ExitCode.PASS)


def _compiled(options: argparse.Namespace, console: Console) -> int:
    repository = Repository(Path.cwd())
    commit = repository.commit(options.commit)
    made = compiled_run.compile_commit(repository, Places(repository.root), commit)
    for path in compiled_run.record_baselines(made, commit, repository.root, reason=options.reason):
        console.print(f"{path.relative_to(repository.root)}", markup=False, highlight=False)
    return int(ExitCode.PASS)


def _site(options: argparse.Namespace, console: Console) -> int:
    from ci.history import site

    made = site.build(
        options.trees,
        options.output,
        project=options.project,
        commit_url=options.commit_url,
        repository=options.repository,
        reports=options.reports,
    )
    console.print(f"site: {options.output / 'index.html'}: {made}", markup=False, highlight=False)
    return int(ExitCode.PASS)


def _history(options: argparse.Namespace, console: Console) -> int:
    from ci.history import branch

    console.print(branch.add(Path.cwd(), options.runs, branch=options.branch, remote=options.remote), markup=False, highlight=False)
    return int(ExitCode.PASS)


def _table(options: argparse.Namespace, console: Console) -> int:
    sys.stdout.write(spread.spread_table(options.runs) if options.spread else tables.table(options.runs))
    return int(ExitCode.PASS)


_COMMANDS = {
    "gate": _gate,
    "run": _run,
    "compare": _compare,
    "bisect": _bisect,
    "merge": _merge,
    "report": _report,
    "verdict": _judge_again,
    "summary": _summary,
    "comment": _comment,
    "site": _site,
    "history": _history,
    "table": _table,
    "baseline": baseline_command.run,
    "compiled": _compiled,
}

if __name__ == "__main__":
    sys.exit(main())
