"""The compiling process as the gate starts it: its progress is told, and however it ends there is a sentence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ci import compiled_run
from ci.errors import InputError
from ci.repo import Commit
from ci.run import Places

COMMIT = Commit("a" * 40, "head")


class _Repository:
    def export(self, commit: Commit, path: str, target: Path) -> None:
        target.mkdir()


def _compile(folder: Path, script: str, told: Any = None) -> Any:
    """Runs `compile_commit` with a stand-in for `asv_bench.compiled`."""
    (folder / "asv_bench").mkdir()
    (folder / "asv_bench" / "__init__.py").touch()
    (folder / "asv_bench" / "compiled.py").write_text(script, encoding="utf-8")
    repository: Any = _Repository()
    return compiled_run.compile_commit(repository, Places(folder), COMMIT, told=told)


_RECORD = """
import pathlib, sys
print("compiled for sm_80: 1 of 2, 1 s", flush=True)
print("compiled for sm_90: 2 of 2, 2 s", flush=True)
pathlib.Path(sys.argv[sys.argv.index("--output") + 1]).write_text(
    '{"schema": "rapid_llm/compiled/2", "source": "s", "triton": "3", "torch": "2", "ptxas": {}, "architectures": {}, "codes": {}}'
)
"""


def test_progress_is_told_and_the_record_read(tmp_path: Path) -> None:
    told: list[str] = []
    assert _compile(tmp_path, _RECORD, told.append).architectures == {}
    assert told == ["compiled for sm_80: 1 of 2, 1 s", "compiled for sm_90: 2 of 2, 2 s"]


def test_a_failure_is_one_sentence_with_its_last_word(tmp_path: Path) -> None:
    script = "import sys; print('a warning', file=sys.stderr); sys.exit('asv_bench.compiled: no ptxas')"
    with pytest.raises(InputError, match=r"^The kernels of head \(a{12}\) could not be compiled: no ptxas; mend it"):
        _compile(tmp_path, script)


def test_one_that_does_not_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_run, "_TIMEOUT_S", 0.5)
    with pytest.raises(InputError, match="could not be compiled: exit status -9"):
        _compile(tmp_path, "import time; time.sleep(60)")


def test_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    processes: list[int] = []

    def interrupted(line: str) -> None:
        processes.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _compile(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(60)", interrupted)
    with pytest.raises(ProcessLookupError):
        os.kill(processes[0], 0)
