"""Files from elsewhere: pipes, links, sizes, names that lead out of their folder (issue 8.7)."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from gate_builders import record_file, row_file

from ci import compiled_run, jsonio, run
from ci.baseline_file import load as load_baseline
from ci.errors import BaselineError, InputError, UsageError, one_line
from ci.jsonio import read_bounded, read_json
from ci.merge import load_kept, merge_runs
from ci.model import GateResult, RowKey, RowOutcome, RowVerdict, RunVerdict
from ci.records import read_process_record
from ci.run import Places
from ci.shards import FILE_NAME
from ci.shards import read as read_shard
from ci.verdict_file import dump, load


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", Path("/dev/zero"), tmp_path):
        with pytest.raises(InputError, match=re.escape(str(path)) + " cannot be read"):
            read_json(path)
    with pytest.raises(BaselineError, match="no regular file"):
        load_baseline(tmp_path / "pipe.json")


def test_what_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    path.write_bytes(b"[" + b" " * 100)
    with pytest.raises(InputError, match="over 100 bytes and is not read"):
        read_bounded(path, limit=100)
    with path.open("wb") as sparse:
        sparse.truncate(jsonio.MAX_BYTES + 1)
    with pytest.raises(InputError, match="over 268,435,456 bytes"):
        read_json(path)


@pytest.mark.parametrize("folder", ["results", "records"])
def test_a_link_in_a_kept_run_is_refused(root: Path, tmp_path: Path, folder: str) -> None:
    """It would copy a file of this machine into the merged run, which is published."""
    runs = [tmp_path / name for name in ("boot1-1", "boot2-1")]
    for kept in runs:
        shutil.copytree(root / "docs" / "data" / "baseline-t1" / "runs" / kept.name, kept)
    (tmp_path / "secret.json").write_text("{}", encoding="utf-8")
    (runs[1] / folder / "link.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(InputError, match=r"link\.json is a link"):
        load_kept(runs[1])
    with pytest.raises(InputError, match=r"link\.json is a link"):
        merge_runs(runs, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("process", ["../p", "a/b", "", ".hidden", "x" * 200, "a\nb", "/etc/passwd"])
def test_a_process_is_named_by_a_plain_name(tmp_path: Path, process: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record_file(process, [row_file("x", 1.0)])), encoding="utf-8")
    with pytest.raises(InputError, match=r"record\.json does not follow"):
        read_process_record(path)


def test_a_machine_code_is_named_by_a_plain_name(tmp_path: Path) -> None:
    folder = tmp_path / "compiled" / "sass"
    folder.mkdir(parents=True)
    (folder / "c0.txt").write_text("MOV", encoding="utf-8")
    (tmp_path / "secret.txt").write_text("secret", encoding="utf-8")
    assert compiled_run.listing(folder, "c0") == "MOV"
    assert compiled_run.listing(folder, "../../secret") is None


def test_a_listing_is_no_link_no_pipe_and_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is quoted in the report, which is published."""
    (tmp_path / "secret.txt").write_text("secret", encoding="utf-8")
    folder = tmp_path / "sass"
    folder.mkdir()
    (folder / "c1.txt").symlink_to(tmp_path / "secret.txt")
    os.mkfifo(folder / "c2.txt")
    (folder / "c3.txt").write_bytes(b"MOV \xff")
    assert [compiled_run.listing(folder, code) for code in ("c1", "c2", "c3", "c4")] == [None, None, "MOV \ufffd", None]
    monkeypatch.setattr(compiled_run, "_MAX_LISTING", 3)
    assert compiled_run.listing(folder, "c3") is None


@pytest.mark.parametrize(
    ("field", "value"), [("tip", "--upload-pack=x"), ("base", "HEAD"), ("index", 0), ("processes", -1), ("select", "(")]
)
def test_a_shard_says_nothing_that_git_or_a_search_takes_for_more(tmp_path: Path, field: str, value: object) -> None:
    shard = {
        "schema": "rapid_llm/shard/1", "index": 1, "count": 2, "mode": "ab", "device": "CPU", "tip": "a" * 40, "base": "a" * 40,
        "head": "b" * 40, "processes": 12, "select": None, "notices": [],
    }  # fmt: skip
    (tmp_path / FILE_NAME).write_text(json.dumps(shard), encoding="utf-8")
    assert read_shard(tmp_path).count == 2
    (tmp_path / FILE_NAME).write_text(json.dumps({**shard, field: value}), encoding="utf-8")
    with pytest.raises(InputError, match=FILE_NAME):
        read_shard(tmp_path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" + "9" * 5000 + "]", "of 5000 digits"),
        ("[18446744073709551616]", "which no field can hold"),
        ("[1e400]", "beyond what a float can hold"),
        (r'["\ud800"]', "half of a surrogate pair"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_numbers_and_texts_that_break_later_are_refused_first(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=why):
        read_json(path)


def test_a_refusal_is_one_line_that_moves_no_cursor() -> None:
    said = str(InputError("a file says 'x\n\x1b[2J\u202e' " + "y" * 5000))
    assert said.isprintable()
    assert len(said) <= 1000
    assert said.startswith("a file says 'x \\x1b[2J\\u202e' yyy")
    assert one_line("plain: é ü 试") == "plain: é ü 试"


def _verdict(**changes: object) -> dict[str, object]:
    row = RowOutcome(RowKey("x"), RowVerdict.REGRESSED, "slower", "other")
    result = GateResult(RunVerdict.REGRESSION, 1, "r", "ab", "CPU", "a" * 40, "b" * 40, (row,))
    data: dict[str, object] = json.loads(dump(result))["result"]
    return {"schema": "rapid_llm/verdict/1", "result": {**data, **changes}}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"exit_code": 0}, "says REGRESSION and has the exit code of PASS"),
        ({"exit_code": 7}, "which no verdict has"),
        ({"exit_code": 0, "verdict": "PASS"}, "passes although x is REGRESSED"),
    ],
)
def test_a_verdict_that_contradicts_itself_does_not_pass(changes: dict[str, object], why: str) -> None:
    assert load(json.dumps(_verdict())).exit_code == 1
    with pytest.raises(InputError, match=why):
        load(json.dumps(_verdict(**changes)))


def test_a_gpu_has_one_gate_whatever_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "gpu_uuid", lambda: "GPU-../x")
    monkeypatch.setattr(run.tempfile, "gettempdir", lambda: str(tmp_path))
    with run._gpu_free() as locks:
        assert len(locks) == 1
        with pytest.raises(UsageError, match=r"Another gate is measuring on GPU-\.\./x, from another checkout"):
            with run._gpu_free():
                pass
    with run._gpu_free():
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["rapid-llm-GPU-___x.lock"]
    monkeypatch.setattr(run, "gpu_uuid", lambda: None)
    with run._gpu_free() as none:
        assert none == ()


def test_a_file_system_without_locks_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_locks(handle: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(run.fcntl, "flock", no_locks)
    (tmp_path / ".asv").mkdir()
    with pytest.raises(UsageError, match=r"lock cannot be locked \(No locks available\).*local disk"):
        with run._only_one(Places(tmp_path)):
            pass


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"results_dir": "elsewhere"}, "results_dir"),
        ({"benchmark_dir": "other"}, "benchmark_dir"),
        ({"environment_type": "virtualenv"}, "environment_type"),
        ({"plugins": []}, "leaves out the plugin"),
        ({"repo": "https://example.invalid"}, "repo"),
    ],
)
def test_asvs_configuration_is_the_gates(root: Path, tmp_path: Path, change: dict[str, object], why: str) -> None:
    from ci import asv_config

    data = json.loads((root / "asv.conf.json").read_text(encoding="utf-8"))
    path = tmp_path / "asv.conf.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    asv_config.check(path)
    path.write_text(json.dumps({**data, **change}), encoding="utf-8")
    with pytest.raises(UsageError, match=why):
        asv_config.check(path)
