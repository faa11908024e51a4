"""One round: the record it leaves, and what a crash, a hang or a stranger's library costs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

pytestmark = pytest.mark.slow

_FAULTY = '''
"""Rows that misbehave."""
import os
import time
from asv_bench import suite
from asv_bench.microbench import Work
from asv_bench.suite import Case, Prepared


def _case(what):
    return Case(what, "launch", ("cpu",), args={"what": what})


class Faulty(suite.Suite):
    op = "faulty"
    control = True
    impl = {"cpu": "vendor:none"}
    cases = tuple(map(_case, ("good", "dies", "leaves", "raises", "is lost", "hangs", "nan", "good again")))

    def build(self, case, device):
        what = case.args["what"]
        if what == "raises":
            raise ValueError("no such luck\\nand more")
        if what == "is lost":
            raise BaseException("what was wrong\\nCompile with some option to see more")
        if what == "dies":
            os.kill(os.getpid(), 11)
        if what == "leaves":
            os._exit(0)
        if what == "hangs":
            time.sleep(60)
        difference = float("nan") if what == "nan" else 0.0
        return Prepared(calls=[lambda: None], work=Work(), poison=lambda: None, check=lambda: difference)

    @suite.throughput("calls/s")
    def track_calls(self, outcomes, case):
        return self.value(outcomes, case)
'''

_MEASURE = """
import importlib.util, json, sys
path = sys.argv[1]
spec = importlib.util.spec_from_file_location("asv_bench", path + "/__init__.py", submodule_search_locations=[path])
module = importlib.util.module_from_spec(spec)
sys.modules["asv_bench"] = module
spec.loader.exec_module(module)
from asv_bench import session
print(json.dumps(session.measure()))
"""


def _instrument(root: Path, tmp_path: Path) -> Path:
    """A copy of the instrument whose only suite misbehaves."""
    copy = tmp_path / "asv_bench"
    shutil.copytree(root / "asv_bench", copy, ignore=shutil.ignore_patterns("bench_*.py", "__pycache__"))
    (copy / "bench_faulty.py").write_text(_FAULTY, encoding="utf-8")
    return copy


def _measure(root: Path, tmp_path: Path, instrument: Path, **env: str) -> subprocess.CompletedProcess[str]:
    known = {
        **os.environ,
        "PYTHONPATH": str(root),
        "RAPID_LLM_BENCH_DEVICE": "cpu",
        "RAPID_LLM_RECORDS_DIR": str(tmp_path / "records"),
        "ASV_COMMIT": "c0ffee" + "0" * 34,
        "RAPID_LLM_ROW_TIMEOUT_S": "9",
    }
    command = [sys.executable, "-c", _MEASURE, str(instrument)]
    return subprocess.run(command, env={**known, **env}, cwd=tmp_path, capture_output=True, text=True, timeout=200)


def test_one_fault_costs_one_row_and_each_says_why(root: Path, tmp_path: Path) -> None:
    done = _measure(root, tmp_path, _instrument(root, tmp_path))
    assert done.returncode == 0, done.stderr
    outcomes = {key.partition("(")[2].rstrip(")"): value for key, value in json.loads(done.stdout).items()}
    assert {what: outcome["status"] for what, outcome in outcomes.items()} == {
        "good": "ok",
        "dies": "failed",
        "leaves": "failed",
        "raises": "failed",
        "is lost": "failed",
        "hangs": "failed",
        "nan": "unverified",
        "good again": "ok",
    }
    assert "SIGSEGV" in outcomes["dies"]["reason"]
    assert outcomes["raises"]["reason"] == "ValueError: no such luck"
    assert outcomes["is lost"]["reason"].endswith("died with exit status 1: BaseException: what was wrong")
    assert "hung for 9 s" in outcomes["hangs"]["reason"]
    (record,) = (tmp_path / "records").rglob("*.json")
    assert record.parent.name == "c0ffee000000"
    text = record.read_text(encoding="utf-8")
    data = json.loads(text, parse_constant=lambda token: pytest.fail(f"{token} is not strict JSON"))
    schema = json.loads((root / "baselines" / "schema" / "process-record.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(data, schema)
    assert [row["status"] for row in data["rows"]] == ["ok", "failed", "failed", "failed", "failed", "failed", "unverified", "ok"]
    assert data["environment"]["device"]["type"] == "cpu"
    assert data["ceilings"]["copy_gb_per_s"] > 0


def test_a_library_from_outside_the_checkout_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    done = _measure(root, tmp_path, _instrument(root, tmp_path), ASV_BUILD_DIR=str(tmp_path / "elsewhere"))
    assert done.returncode != 0
    assert "outside the checkout of the commit under test" in done.stderr
    assert not list((tmp_path / "records").rglob("*.json"))


def test_a_device_that_does_not_exist_is_refused(root: Path, tmp_path: Path) -> None:
    done = _measure(root, tmp_path, _instrument(root, tmp_path), RAPID_LLM_BENCH_DEVICE="tpu")
    assert done.returncode != 0
    assert "names no device" in done.stderr


def test_selection_keeps_the_controls_of_its_classes_and_refuses_what_selects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from asv_bench import session

    monkeypatch.setenv(session.SELECT_VARIABLE, "KVWritePrefill|PagedDecode.*e4m3")
    rows = session.selected_rows()
    assert {row.suite.__name__ for row in rows if not row.suite.control} == {"KVWritePrefill", "PagedDecode"}
    assert {row.case.bottleneck for row in rows if row.suite.control} == {"write-bandwidth", "read-bandwidth"}
    for pattern, why in (("(", "no regular expression"), ("no such row", "selects no row")):
        monkeypatch.setenv(session.SELECT_VARIABLE, pattern)
        with pytest.raises(session.SelectionError, match=why):
            session.selected_rows()
