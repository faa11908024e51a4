"""Any command line in a folder that holds nothing: refused with 2, 3 or 4 and no traceback; nothing passes."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ci.__main__ import _COMMANDS, main

OPTIONS = (
    "--report", "--select", "--base", "--pairs", "--rounds", "--no-baseline", "--require-baseline", "--no-compiled", "--skip-identical",
    "--no-resume", "--shard", "--keep", "--results", "--runs", "--machine", "--baseline", "--output", "--from", "--spread", "--project",
    "--commit-url", "--repository", "--reports", "--branch", "--remote", "--reason", "--accepted-by", "--single-boot", "--waivers",
    "record", "show",
)  # fmt: skip
VALUES = (
    "", " ", ".", "..", "x", "x.json", "HEAD", "a" * 40, "-1", "0", "1", "1/2", "2/1", "1e9", "9" * 30, "(", "(a+)+$", "--", "-", "é🚀",
    "\ud800", "a\nb", "no/such/folder", "x" * 300, "\x1b[31m", "a=b", "'; rm", "*",
)  # fmt: skip

WORDS = st.one_of(st.sampled_from(OPTIONS), st.sampled_from(VALUES), st.text(st.characters(exclude_characters="\0/"), max_size=12))


@pytest.fixture(scope="module")
def nothing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outer") / "nothing"
    folder.mkdir()
    (folder / "x").write_text("x", encoding="utf-8")
    return folder


def ended(arguments: list[str]) -> tuple[int, str]:
    """Exit code and what was said on stderr."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(arguments)
        except SystemExit as left:
            code = int(left.code or 0)
    return code, said.getvalue()


def test_any_command_line_is_refused(nothing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(nothing)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(nothing.parent))
    monkeypatch.setenv("RAPID_LLM_BENCH_DEVICE", "cpu")
    for name in ("GITHUB_EVENT_PATH", "GITHUB_TOKEN", "GIT_DIR"):
        monkeypatch.delenv(name, raising=False)
    handler = signal.getsignal(signal.SIGTERM)

    @settings(max_examples=150, deadline=5000, database=None, suppress_health_check=list(HealthCheck))
    @example("compare", ["x", "--results", "x", "--base", "y"])
    @example("merge", ["x", "--output", "x"])
    @example("table", ["x"])
    @given(st.sampled_from([*_COMMANDS, "", "x"]), st.lists(WORDS, max_size=6))
    def holds(command: str, words: list[str]) -> None:
        code, said = ended([command, *words])
        asked_for_help = code == 0 and any(word.startswith(("-h", "--h")) for word in words)
        assert code in (2, 3, 4) or asked_for_help, (code, said)
        assert "Traceback" not in said
        assert "Error:" not in said

    try:
        holds()
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert os.listdir(nothing.parent) == [nothing.name], "something was written beside the folder"
