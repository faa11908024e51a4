"""`python -m ci`: gate, run, compare, merge, report, table, baseline, site, and what a job on GitHub needs."""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ci import baseline as baselines
from ci import baseline_command, compiled_run, github, run, shards, spread, tables
from ci import comment as comments
from ci import gate as gating
from ci import merge as merging
from ci.baseline_command import expression
from ci.compare import compare_baseline, compare_history
from ci.confirm import compare_pairs
from ci.device import detect
from ci.errors import ExitCode, GateError, InputError, UsageError
from ci.jsonio import read_bounded
from ci.model import CommitResult, GateResult
from ci.repo import Repository
from ci.results import load_commit
from ci.run import Places, RunPlan
from ci.verdict_file import load as load_verdict

EXIT_CODES = """exit codes, the first that applies:
  2  the command line, the repository or the selection cannot be used
  4  the baseline or the environment is invalid
  6  a result is wrong: UNVERIFIED or over 100 % of peak (VIOLATION)
  5  the runner is unfit: controls moved, or all rows moved together
  3  incomplete: rows MISSING, FAILED, INVALID or BLIND
  1  a regression
  0  pass"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ci", description=__doc__, epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    gate = commands.add_parser("gate", help="measure, compare, report: the whole way")
    _common(gate)
    gate.add_argument("--base", help="base branch or commit (default: main, else origin/main)")
    gate.add_argument("--pairs", type=_positive, default=gating.PAIRS, help="pairs of processes without a stored baseline")
    gate.add_argument("--rounds", type=_positive, default=gating.SCREEN_ROUNDS, help="processes a run against a stored baseline")
    gate.add_argument("--no-baseline", action="store_true", help="compare with the merge-base though there is a stored baseline")
    gate.add_argument("--require-baseline", action="store_true", help="no baseline for this device is an error (4)")
    gate.add_argument("--no-compiled", action="store_true", help="leave out what the compiler makes of the kernels")
    gate.add_argument(
        "--skip-identical", action="store_true", help="do not measure rows that launch exactly what the merge-base launches (GPU only)"
    )
    gate.add_argument("--no-resume", action="store_true", help="start anew after an interrupted run")

    gate.add_argument("--shard", metavar="I/N", type=_share, help="measure the I-th of N shares of the processes, for `merge` to judge")

    measure = commands.add_parser("run", help="measure a commit and keep its results")
    _common(measure)
    measure.add_argument("commit", nargs="?", default="HEAD")
    measure.add_argument("--rounds", type=_positive, default=gating.SCREEN_ROUNDS, help="fresh processes")
    measure.add_argument("--keep", type=Path, help="folder to copy results and records to (one run of a baseline)")

    compare = commands.add_parser("compare", help="compare results that are there")
    compare.add_argument("head", nargs="*", help="commits under test (two runs of a foreign tree may be given)")
    compare.add_argument("--report", type=Path, default=Path("report"), help="folder to write to (default: report)")
    compare.add_argument("--results", type=Path, help="asv results_dir (default: .asv/results; another one is read as a foreign tree)")
    compare.add_argument("--runs", type=Path, nargs="+", help="folders that `run --keep` made, of the commit under test")
    compare.add_argument("--machine", help="machine of the results (default: this device)")
    compare.add_argument("--baseline", type=Path, help="a baseline file")
    compare.add_argument("--base", nargs="+", default=[], metavar="COMMIT", help="commits to compare with: one, or a history")

    merge = commands.add_parser("merge", help="judge the shards of a gate, or merge kept runs into one")
    merge.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="folders of `gate --shard`, or of `run --keep`")
    merge.add_argument("--report", type=Path, default=Path("report"), help="folder for the verdict on shards (default: report)")
    merge.add_argument("--output", type=Path, help="folder for the merged run")

    report = commands.add_parser("report", help="write the report again from a verdict.json")
    report.add_argument("--from", dest="source", type=Path, default=Path("report"), help="folder with verdict.json (default: report)")
    report.add_argument("--report", type=Path, help="folder to write to (default: the same)")

    table = commands.add_parser("table", help="print every row of kept runs as Markdown")
    table.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders that `run --keep` made")
    table.add_argument("--spread", action="store_true", help="print how far fresh processes differ, instead")

    site = commands.add_parser("site", help="build the history site from asv results trees")
    site.add_argument("trees", type=Path, nargs="+", metavar="RESULTS", help="results folders of asv, or kept runs")
    site.add_argument("--output", type=Path, required=True, help="folder to write")
    site.add_argument("--project", default="benchmarks", help="name on the pages")
    site.add_argument("--commit-url", default="", help="address of a commit, without its hash")
    site.add_argument("--repository", type=Path, help="checkout that orders the commits (default: by date)")
    site.add_argument("--reports", type=Path, nargs="*", default=[], help="folders of gate reports to link")

    summary = commands.add_parser("summary", help="print GitHub annotations and append the summary to the job's page")
    summary.add_argument("--report", type=Path, default=Path("report"), help="folder with verdict.json (default: report)")
    commands.add_parser("comment", help="post the verdict of a finished run on its pull request")
    history = commands.add_parser("history", help="add kept runs to the history branch, push it, lay it out for the site")
    history.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="folders that `run --keep` made")
    history.add_argument("--branch", default="benchmark-history")
    history.add_argument("--remote", default="origin")

    compiled = commands.add_parser("compiled", help="compile HEAD for every architecture and accept what comes of it, no GPU needed")
    compiled_actions = compiled.add_subparsers(dest="action", required=True, metavar="ACTION")
    accept = compiled_actions.add_parser("record", help="write baselines/compiled/<architecture>.json")
    accept.add_argument("commit", nargs="?", default="HEAD")
    accept.add_argument("--reason", required=True, help="why this state is accepted")

    baseline_command.add_parser(commands)
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--report", type=Path, default=Path("report"), help="folder to write to (default: report)")
    parser.add_argument("--select", metavar="REGEX", type=expression, help="only rows whose name the expression finds; controls always run")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    options = _parser().parse_args(arguments)
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


def _share(text: str) -> shards.Share:
    try:
        return shards.Share.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


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


def _compare(options: argparse.Namespace, console: Console) -> int:
    result = _compared(options)
    result = replace(result, created_at=f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%dT%H:%M:%SZ}")
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
    "merge": _merge,
    "report": _report,
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
