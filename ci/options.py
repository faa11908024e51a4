"""The options of `python -m ci`, and what each may be."""

from __future__ import annotations

import argparse
from pathlib import Path

from ci import baseline_command, shards
from ci import gate as gating
from ci.baseline_command import expression

EXIT_CODES = """exit codes, the first that applies:
  2  the command line, the repository, the selection or the installation cannot be used
  4  the baseline or the environment is invalid
  6  a result is wrong: UNVERIFIED or over 100 % of peak (VIOLATION)
  5  the runner is unfit: controls moved, or all rows moved together
  3  incomplete: rows MISSING, FAILED, INVALID or BLIND
  1  a regression
  0  pass"""


def parser(description: str | None) -> argparse.ArgumentParser:
    """All commands and their options."""
    made = argparse.ArgumentParser(
        prog="python -m ci", description=description, epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")

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

    bisect = commands.add_parser("bisect", help="find the first commit that made a row slower")
    bisect.add_argument("row", metavar="ROW", help="exact name of a row, as the table and the report show it")
    bisect.add_argument("--good", required=True, metavar="COMMIT", help="a commit before the slowdown")
    bisect.add_argument("--bad", required=True, metavar="COMMIT", help="a commit that has it")
    bisect.add_argument("--pairs", type=_positive, default=gating.PAIRS, help="pairs of processes a step")
    bisect.add_argument("--report", type=Path, default=Path("report"), help="folder for bisect.json and the runs (default: report)")

    merge = commands.add_parser("merge", help="judge the shards of a gate, or merge kept runs into one")
    merge.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="folders of `gate --shard`, or of `run --keep`")
    merge.add_argument("--report", type=Path, default=Path("report"), help="folder for the verdict on shards (default: report)")
    merge.add_argument("--output", type=Path, help="folder for the merged run")

    report = commands.add_parser("report", help="write the report again from a verdict.json")
    report.add_argument("--from", dest="source", type=Path, default=Path("report"), help="folder with verdict.json (default: report)")
    report.add_argument("--report", type=Path, help="folder to write to (default: the same)")

    again = commands.add_parser("verdict", help="compute the verdict of a gate's report again, of its files alone")
    again.add_argument("--from", dest="source", type=Path, default=Path("report"), help="report folder of a gate (default: report)")
    again.add_argument("--report", type=Path, help="folder to write to (default: none, it is held against the verdict.json that is there)")

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
    return made


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--report", type=Path, default=Path("report"), help="folder to write to (default: report)")
    parser.add_argument("--select", metavar="REGEX", type=expression, help="only rows whose name the expression finds; controls always run")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _share(text: str) -> shards.Share:
    try:
        return shards.Share.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
