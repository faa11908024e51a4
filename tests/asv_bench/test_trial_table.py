"""The tables of trials, on a small example and on the files that docs/performance.md rests on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asv_bench import trial_table

CONFIG = {"variant": "split", "block_n": 64, "num_warps": 4, "num_stages": 3, "programs_per_sm": 2}
HEAD = {
    "schema": "rapid_llm/trial/1",
    "quick": False,
    "interpreted": False,
    "date": "2026-11-30T08:00:00Z",
    "environment": {"device": {"name": "A"}, "driver": "1", "cuda": "2", "torch": "3", "triton": "4", "commit": "c" * 40},
    "read_ceiling_gb_per_s": 4000.0,
}


def row(what: str, cell: str, us: float | None, *, block_size: int | None = 1, **config: Any) -> dict[str, Any]:
    return {
        "what": what,
        "cell": cell,
        "block_size": block_size,
        "config": {**CONFIG, **config} if what == "ours" else None,
        "latency_us": us,
        "share_of_read_ceiling": None if us is None else 2.0 / us,
        "max_abs_diff": None if us is None else 0.0,
        "reason": None if us is not None else "did not fit",
    }


ROWS = [
    row("ours", "1x1k float16", 10.0),
    row("ours", "1x1k float16", 8.0, block_n=128),
    row("ours", "1x1k float16", 9.0, block_n=128),
    row("ours", "1x1k float16", 7.0, block_n=128),
    row("ours", "1x1k float16", None, block_n=256),
    row("ours", "1x1k float16", 6.0, block_size=16),
    row("sdpa-cudnn", "1x1k float16", 4.0, block_size=None),
    row("ours", "1x1k e4m3", 4.0),
]


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "trial.json"
    path.write_text(json.dumps({**HEAD, "results": ROWS, **changes}), encoding="utf-8")
    return path


def test_a_shape_is_the_rule_the_best_median_and_their_ratios(tmp_path: Path) -> None:
    lines = trial_table.by_shape(trial_table.read(written(tmp_path))).splitlines()
    assert lines[2] == (
        "| 1x1k float16 | 10 | 8 | split 128 x 4 warps, 3 stages, 2 a multiprocessor | 25.0% | 6 | 4 |  | 1.250 | 2.000 | 1.500 |  |"
    )
    assert lines[3].endswith("| 50.0% |  |  |  | 1.000 |  |  | 0.500 |")


def test_a_compact_file_reads_back_the_same(tmp_path: Path) -> None:
    whole = trial_table.read(written(tmp_path))
    (tmp_path / "small.json").write_text(trial_table.compact(whole), encoding="utf-8")
    again = trial_table.read(tmp_path / "small.json")
    share = "share_of_read_ceiling"  # rounded to six digits
    assert [{**row, share: None} for row in again.rows] == [{**row, share: None} for row in whole.rows]
    assert trial_table.page([again]) == trial_table.page([whole])


@pytest.mark.parametrize(
    ("changes", "says"), [({"schema": "other"}, "is no trial"), ({"quick": True}, "say nothing"), ({"interpreted": True}, "say nothing")]
)
def test_what_says_nothing_is_refused(tmp_path: Path, changes: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert trial_table.main([str(written(tmp_path, **changes))]) == 2
    assert says in capsys.readouterr().err


def test_a_write_is_the_rule_the_best_and_its_share_of_the_ceiling(tmp_path: Path) -> None:
    config = {"tokens": 1, "block": 1024, "num_warps": 4, "halves": 2}
    rows = [
        {**row("ours", "T=8 e4m3", us, block_size=None), "config": {**config, "halves": halves}, "share_of_ceiling": 2.0 / us}
        for us, halves in ((5.0, 1), (4.0, 2))
    ]
    rows += [
        {**row(what, "T=8 e4m3", us, block_size=None), "share_of_ceiling": 2.0 / us}
        for what, us in (("plain copy", 2.5), ("index_copy_", 9.0))
    ]
    path = written(tmp_path, results=rows)
    line = "| T=8 e4m3 | 5 | 4 | 1 of 1024 x 4 warps, K and V | 50.0% | 2.5 | 9 | 1.250 | 2.000 |"
    assert trial_table.by_tokens(trial_table.read(path)).splitlines()[2] == line
    small = tmp_path / "small.json"
    small.write_text(trial_table.compact(trial_table.read(path)), encoding="utf-8")
    assert trial_table.page([trial_table.read(small)]).splitlines()[-1] == line


@pytest.mark.parametrize(
    ("folder", "begins", "ends"), [("decode-h200", "\n---\n", "\n---\n"), ("write-h200", "<!-- writes -->", "<!-- end of writes -->")]
)
def test_the_page_is_what_the_command_prints(root: Path, folder: str, begins: str, ends: str) -> None:
    files = sorted((root / "docs" / "data" / folder).glob("*.json"))
    assert files
    printed = trial_table.page([trial_table.read(path) for path in files])
    assert (root / "docs" / "performance.md").read_text(encoding="utf-8").split(begins)[1].split(ends)[0].strip() == printed
