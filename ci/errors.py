"""What can go wrong in the gate, and the exit code that says so.

Every message is one sentence that says what is wrong, where, and what to do next.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of ``python -m ci``; where several apply, the first in `ci.rows.RUN_ORDER` wins."""

    PASS = 0
    REGRESSION = 1
    USAGE = 2
    INCOMPLETE = 3
    BASELINE = 4
    UNFIT = 5
    WRONG = 6


_MAX_MESSAGE = 1000


def one_line(text: str) -> str:
    """A text as one line that a terminal prints as it is: what foreign files are quoted with cannot break it or move the cursor."""
    line = " ".join(text.split())
    line = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in line)
    return line if len(line) <= _MAX_MESSAGE else f"{line[: _MAX_MESSAGE - 250]} ... {line[-200:]}"


class GateError(Exception):
    """A refusal with its exit code; the message is one sentence for a person."""

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class UsageError(GateError):
    """The command line, the repository, the selection or the installation cannot be used as given."""

    exit_code = ExitCode.USAGE


class InputError(GateError):
    """A file that is the subject of the comparison cannot be read as what it should be."""

    exit_code = ExitCode.INCOMPLETE


class BaselineError(GateError):
    """The baseline is absent, malformed, of another device or environment."""

    exit_code = ExitCode.BASELINE


class UnfitError(GateError):
    """The machine moved while it measured, so that no comparison stands."""

    exit_code = ExitCode.UNFIT
