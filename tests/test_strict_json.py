"""What the product reads of others: strict JSON in a regular file of bounded size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rapid_llm import strict_json
from rapid_llm.strict_json import read_strict_json


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "-Infinity", "1e400", "-1e400", "[" * 100_000, "", "{", "9" * 5000, "'x'", "\xff"])
def test_what_is_no_strict_json_is_one_kind_of_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"\w"):
        read_strict_json(path)


def test_values_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text('{"a": [1, 2.5, null, "é"]}', encoding="utf-8")
    assert read_strict_json(path) == {"a": [1, 2.5, None, "é"]}


def test_a_pipe_is_not_waited_for_and_what_never_ends_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=r"regular file|directory"):
            read_strict_json(path)
    monkeypatch.setattr(strict_json, "MAX_BYTES", 100)
    (tmp_path / "large").write_text(" " * 100 + "1", encoding="utf-8")
    with pytest.raises(ValueError, match="over 100 bytes"):
        read_strict_json(tmp_path / "large")
