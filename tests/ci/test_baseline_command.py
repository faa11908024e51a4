"""`python -m ci baseline` on the accepted H200 runs: record, refresh, show."""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest

from ci import baseline as baselines
from ci.__main__ import main

ROW = "bench_paged_decode.PagedDecode.track_bandwidth(decode B=64 S=8192 float16 combined fragmented cold)"
HOST_CONTROL = "bench_controls.Small.track_calls(nonzero and item of 4096 int32)"
NAMES = ("boot1-1", "boot2-1", "boot2-2", "boot3-1", "boot1-1")
"""The accepted runs without the one whose host control moved, the first of them twice."""


def _scaled(folder: Path, name: str, factor: float, *, level: float | None = None) -> None:
    """Multiplies the values of one row, in asv's results and in the records alike; to the median `level` where one is given."""
    benchmark, case = name.removesuffix(")").split("(")
    (path,) = [path for path in folder.glob("results/*/*.json") if path.name != "machine.json"]
    data = json.loads(path.read_text(encoding="utf-8"))
    entry = dict(zip(data["result_columns"], data["results"][benchmark], strict=False))
    (index,) = [number for number, text in enumerate(entry["params"][0]) if text.strip("'") == case]
    if level is not None:
        factor = level / statistics.median(entry["samples"][index])
    entry["result"][index] *= factor
    entry["samples"][index] = [value * factor for value in entry["samples"][index]]
    path.write_text(json.dumps(data), encoding="utf-8")
    for path in folder.glob("records/*/*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        for row in data["rows"]:
            if (row["benchmark"], row["params"]) == (benchmark, [case]):
                row["value"] *= factor
        path.write_text(json.dumps(data), encoding="utf-8")


@pytest.fixture
def place(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the H200's baseline and five kept runs, in which one row is 4 % slower and the host took equally long."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "baselines").mkdir()
    shutil.copy(root / "docs" / "data" / "baseline-t1" / "NVIDIA_H200.json", tmp_path / "baselines")
    for number, name in enumerate(NAMES):
        shutil.copytree(root / "docs" / "data" / "baseline-t1" / "runs" / name, tmp_path / "runs" / str(number))
        _scaled(tmp_path / "runs" / str(number), ROW, 0.96)
        _scaled(tmp_path / "runs" / str(number), HOST_CONTROL, 1.0, level=19_500.0)
    return tmp_path


def _baseline(*words: str) -> int:
    return main(["baseline", words[0], *[f"runs/{number}" for number in range(5)], "--accepted-by", "A", *words[1:]])


def test_refresh_replaces_the_row_that_changed_and_says_so(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = place / "baselines" / "NVIDIA_H200.json"
    before, text = baselines.load(file), file.read_bytes()
    assert _baseline("refresh", "--reason", "a slower clamp") == 0
    told = capsys.readouterr().out
    assert f"replaced: {ROW}" in told
    assert "1 rows replaced, 0 added, 32 as they were" in told
    assert "5 of 5 runs do not say whether tracked files were modified" in told
    assert f"creep: {ROW} now stands +4." in told
    after = baselines.load(file)
    assert after.previous_hash == hashlib.sha256(text).hexdigest()
    assert {name for name, row in after.rows.items() if row.run_set == "2" and not row.control} == {ROW}
    assert after.rows[ROW].anchor is not None
    assert after.waivers == before.waivers
    assert main(["baseline", "show", str(file)]) == 0
    assert "replaced: a slower clamp" in capsys.readouterr().out


def test_refresh_without_a_change_leaves_the_file_alone(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = place / "baselines" / "NVIDIA_H200.json"
    assert _baseline("refresh", "--reason", "r") == 0
    text = file.read_bytes()
    assert _baseline("refresh", "--reason", "r") == 0
    assert "no row changed beyond chance" in capsys.readouterr().out
    assert file.read_bytes() == text


def test_record_over_a_baseline_keeps_its_anchors(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = place / "baselines" / "NVIDIA_H200.json"
    before, text = baselines.load(file), file.read_bytes()
    assert _baseline("record", "--reason", "r", "--accept-noisy") == 0
    again = baselines.load(file)
    assert again.previous_hash == hashlib.sha256(text).hexdigest()
    assert again.rows[ROW].anchor is not None
    assert (again.rows[ROW].anchor.commit, again.anchor_commit) == (before.anchor_commit, before.anchor_commit)
    file.write_text("{", encoding="utf-8")
    assert _baseline("record", "--reason", "r", "--accept-noisy") == 0
    assert "no anchor is carried over: baselines/NVIDIA_H200.json is not valid JSON" in capsys.readouterr().out


REFUSALS: dict[str, tuple[list[str], str]] = {
    "no such row": (["--reason", "r", "--rows", "nope"], "'nope' finds no row"),
    "no such file": (["--reason", "r", "--file", "x.json"], "There is no baseline at x.json"),
    "no reason": (["--reason", ""], "needs a reason"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refresh_refuses_in_one_sentence(place: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, told = REFUSALS[name]
    text = (place / "baselines" / "NVIDIA_H200.json").read_bytes()
    assert _baseline("refresh", *words) == 2
    assert told in capsys.readouterr().err
    assert (place / "baselines" / "NVIDIA_H200.json").read_bytes() == text


def test_a_run_beside_another_process_is_refused_by_name(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sorted((place / "runs" / "3").glob("records/*/*.json"))[0]
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    data["environment"]["state"]["foreign_processes"] = 1
    path.write_text(json.dumps(data), encoding="utf-8")
    for action in ("record", "refresh"):
        assert _baseline(action, "--reason", "r") == 4
        said = capsys.readouterr().err
        assert "runs/3" in said
        assert "shared its device with 1 other process" in said
