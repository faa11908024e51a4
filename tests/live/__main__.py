"""`python -m tests.live ACTION --out FOLDER`: shows the properties of the verdict on the device of this machine.

Each action works in clones of this checkout's HEAD, writes its findings to FOLDER after each step, and ends by itself before --seconds are
over. `table FOLDER...` prints what was kept as Markdown. A CPU does for a dry run (`--quick`), whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ci.errors import GateError
from tests.live import disturbed, pairs, power, rebuild, same, table, walls
from tests.live.asked import Asked, Session, perform

ACTIONS: dict[str, tuple[Callable[[Session], Any], str]] = {
    "same": (same.same, "whole gates of a commit that changes nothing"),
    "rebuild": (rebuild.rebuild, "the bias of a kernel that is built anew, in processes of one commit"),
    "pairs": (pairs.pairs, "interleaved pairs of processes of one commit, for `python -m tests.statistics resample FOLDER`"),
    "power": (power.power, "rows that are really slower by a calibrated share, in pairs with the base"),
    "second": (disturbed.second, "a gate beside a process that keeps the device busy"),
    "lowered": (disturbed.lowered, "a gate whose commit slows every row down, controls included"),
    "walls": (walls.walls, "the seconds of a process by part, and of whole commands"),
}


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _sizes(text: str) -> tuple[float, ...]:
    values = tuple(float(part) for part in text.split(","))
    if not all(0 < value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text} is no list of percentages")
    return values


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.live", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (_, told) in ACTIONS.items():
        made = actions.add_parser(name, help=told)
        made.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the results go")
        made.add_argument("--select", metavar="REGEX", help="only rows whose name the expression finds; controls always run")
        made.add_argument("--seconds", type=float, default=530.0, help="the action has ended by then (default: 530)")
        made.add_argument("--work", type=Path, metavar="FOLDER", help="keep the clones there, so that an interrupted action goes on")
        made.add_argument("--pairs", type=_positive, help="pairs of processes")
        made.add_argument("--quick", action="store_true", help="the least of everything: shows that it runs")
        made.add_argument("--no-compiled", dest="compiled", action="store_false", help="gates leave out what the compiler makes")
        if name == "same":
            made.add_argument("--gates", type=_positive, help="gates (default: 1)")
            made.add_argument("--cold", action="store_true", help="an empty Triton cache for each gate")
        if name == "rebuild":
            made.add_argument("--groups", type=_positive, help="fresh builds, each behind a group of the old one (default: 4)")
            made.add_argument("--processes", type=_positive, help="processes a group (default: 2)")
        if name == "power":
            made.add_argument("--sizes", type=_sizes, default=(2.0,), help="slow-downs in percent, such as 1,2,3 (default: 2)")
        if name == "lowered":
            made.add_argument("--how", choices=disturbed.HOW, help="default: busy on a GPU, timers on a CPU")
    made = actions.add_parser("table", help="the kept results as Markdown")
    made.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    made.add_argument("--page", type=Path, metavar="FILE", help="write it between the marks of this page instead of printing it")
    return parser


def _end(number: int, frame: object) -> None:
    """Ends as after an exception, so that no process is left behind."""
    del frame
    sys.exit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs an action; 0 done, 2 it cannot be done, 3 stopped before all was measured."""
    words = tuple(sys.argv[1:] if arguments is None else arguments)
    options = vars(_parser().parse_args(words))
    signal.signal(signal.SIGTERM, _end)
    try:
        if options["action"] == "table":
            return table.show(options["folders"], options["page"])
        return perform(Asked(words=words, **options), ACTIONS[options["action"]][0])
    except GateError as error:
        print(f"live: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
