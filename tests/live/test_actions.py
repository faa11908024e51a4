"""The actions from end to end: with recorded processes in place of measured ones, and once each on the CPU."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ci import verdict_file
from ci.errors import UsageError
from tests.live import __main__ as command
from tests.live import kept as keeping
from tests.live import pairs, power, rebuild, table, watch
from tests.live.asked import Asked, perform
from tests.live.measure import Instrument, LiveError, Source, measured
from tests.live.places import ROOT, changed_files, clone
from tests.statistics import compact
from tests.statistics.records import read_processes

PAGE = ROOT / "docs" / "live-h200.md"
DATA = ROOT / "docs" / "data" / "live-h200"


# ---------------------------------------------------------------- with recorded processes


@pytest.fixture
def recorded(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    """Puts a recorded process in place of each measured one; returns what was asked for."""
    path = sorted((root / "docs" / "data" / "baseline-t1" / "runs").rglob("records/*/*.json"))[0]
    record = json.loads(path.read_text(encoding="utf-8"))
    asked: list[Source] = []

    def made(instrument: Instrument, source: Source, of: watch.Watch) -> dict[str, Any]:
        assert (instrument.path / "asv_bench").is_dir()
        assert (source.path / "rapid_llm").is_dir()
        asked.append(source)
        return {**record, "process": f"p{len(asked)}", "commit": source.commit}

    for module in (pairs, power, rebuild):
        monkeypatch.setattr(module, "measured", made)
    monkeypatch.setattr(rebuild, "compile_rows", lambda instrument, source, of: None)
    return asked


def kept(out: Path, action: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((out / f"{action}.json").read_text(encoding="utf-8"))
    return data


def test_pairs_are_kept_one_by_one_and_go_on(recorded: list[Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command.main(["pairs", "--out", str(tmp_path), "--pairs", "2"]) == 0
    assert [source.path.name for source in recorded] == ["arm-a", "arm-b", "arm-b", "arm-a"]
    assert kept(tmp_path, "pairs")["pairs"] == 2
    assert command.main(["pairs", "--out", str(tmp_path), "--pairs", "3"]) == 0
    assert len(recorded) == 6
    assert len(read_processes([tmp_path]).y) == 6

    def late(instrument: Instrument, source: Source, of: watch.Watch) -> dict[str, Any]:
        raise watch.OutOfTimeError("no time")

    monkeypatch.setattr(pairs, "measured", late)
    assert command.main(["pairs", "--out", str(tmp_path), "--pairs", "4"]) == 3
    assert (kept(tmp_path, "pairs")["complete"], kept(tmp_path, "pairs")["stopped"]) == (False, "no time")
    assert len(read_processes([tmp_path]).y) == 6, "what was measured is kept"
    assert command.main(["pairs", "--out", str(tmp_path), "--pairs", "4", "--select", "x"]) == 2


def test_a_rebuild_has_a_new_place_and_cache_for_each_fresh_build(recorded: list[Source], tmp_path: Path) -> None:
    assert command.main(["rebuild", "--out", str(tmp_path), "--groups", "2", "--processes", "2"]) == 0
    assert [source.path.name for source in recorded] == [
        name for fresh in (0, 1) for name in ("build-old", "build-old", f"build-fresh-{fresh}", f"build-fresh-{fresh}")
    ]
    caches = {source.path: source.env["TRITON_CACHE_DIR"] for source in recorded}
    assert len(set(caches.values())) == 3
    assert len(kept(tmp_path, "rebuild")["rows"]) == 33
    assert command.main(["rebuild", "--out", str(tmp_path), "--groups", "1"]) == 3
    assert "show no spread" in kept(tmp_path, "rebuild")["stopped"]


def test_power_measures_the_base_and_every_size_in_turn(
    recorded: list[Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    """The recorded rows are a GPU's, so that its plants are made; what is asked for has to be what was recorded."""
    monkeypatch.setattr(Asked, "device_type", "cuda")
    words = ["power", "--out", str(tmp_path), "--select", "KVWritePrefill|B=64", "--sizes", "1,2", "--pairs", "6"]
    assert command.main(words) == 0
    found = kept(tmp_path, "power")
    assert set(found["knobs"]) == {"1", "2"}
    assert set(found["knobs"]["1"]) == {"decode_fp16", "decode_e4m3", "prefill_fp16", "prefill_e4m3"}
    assert not any(any(of_size.values()) for of_size in found["calibrated"].values()), "recorded rows are not slower"
    assert len(found["readings"]) == 2 * 3 * 4
    names = [source.path.name for source in recorded]
    assert names[:6] == ["base", "slowed-1", "slowed-2", "slowed-2", "slowed-1", "base"]
    assert len(names) == 3 * 3 + 6 * 3
    text = table.page(keeping.results([tmp_path]))
    name = "PagedDecode: decode B=64 S=8192 float16 combined fragmented cold"
    assert f"| {name} | each program waits at its start | 2 % (not calibrated to within .2 %) | +0.00 % | 0.50 % |" in text
    assert [len(judged["rows"]) for judged in found["sizes"].values()] == [26, 26]
    before = len(names)
    assert command.main([*words[:-1], "7"]) == 0
    assert len(recorded) == before + 3, "no second calibration, one more pair"
    assert kept(tmp_path, "power")["knobs"] == found["knobs"]
    assert command.main([*words[:-3], "3", "--pairs", "7"]) == 2, "other sizes"
    again = power.verdicts(compact.read(tmp_path / "power.slowed.json"), Path("x"), {})
    assert again["sizes"] == kept(tmp_path, "power")["sizes"]


def test_a_row_without_a_number_stops_the_calibration(recorded: list[Source], tmp_path: Path) -> None:
    """On a CPU the rows have other names than the recorded ones."""
    assert command.main(["power", "--out", str(tmp_path), "--select", "B=2"]) == 3
    assert "reading 1, base: no number of bench_paged_decode" in kept(tmp_path, "power")["stopped"]


# ---------------------------------------------------------------- what surrounds them


def test_only_the_time_that_is_left_is_used(tmp_path: Path) -> None:
    """A process that would take longer is stopped, and nothing of it is left."""
    source = Source(ROOT, "a" * 40)
    with pytest.raises(watch.OutOfTimeError, match="was stopped"):
        measured(Instrument(ROOT, "T=64 float16"), source, watch.Watch(5.5))
    with pytest.raises(LiveError, match="selects no row"):
        measured(Instrument(ROOT, "no such row"), source, watch.Watch(60))


def test_a_clone_is_of_head_and_is_used_again(tmp_path: Path) -> None:
    made = clone(ROOT, tmp_path / "clone")
    head = made.head

    def plant() -> None:
        (made.path / "README.md").write_text("other", encoding="utf-8")

    branch = made.branch("b", "m", plant)
    assert (branch != head, made.branch("b", "m")) == (True, branch)
    assert made.git("diff", "--name-only", "main", "b") == "README.md"
    assert clone(ROOT, tmp_path / "clone").head == head, "it is on main again"
    place = made.checkout_at(tmp_path / "x")
    (place / "README.md").write_text("other", encoding="utf-8")
    assert made.checkout_at(place) == place
    assert changed_files(place) == []
    made.git("checkout", "-q", "--detach")
    made.git("branch", "-f", "main", "b")
    with pytest.raises(UsageError, match="a clone of another commit"):
        clone(ROOT, tmp_path / "clone")


def test_results_of_another_commit_are_not_gone_on_with(tmp_path: Path) -> None:
    made = keeping.made_with("same", "c", ROOT)
    one = keeping.Kept(tmp_path / "same.json", {**made, "commit": "0" * 40}, {"gates": [1]})
    one.write(complete=False, elapsed_s=1.0)
    with pytest.raises(UsageError, match="of another commit than this call"):
        keeping.Kept(tmp_path / "same.json", made).take_up("gates")
    one.made["commit"] = made["commit"]
    one.write(complete=False, elapsed_s=1.0)
    later = keeping.Kept(tmp_path / "same.json", made)
    later.take_up("gates", "other")
    assert later.found == {"gates": [1]}


@pytest.mark.parametrize("words", [["same"], ["power", "--out", "x", "--sizes", "0"], ["pairs", "--out", "x", "--pairs", "0"], ["other"]])
def test_a_wrong_command_line_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(words)
    assert caught.value.code == 2


def test_folders_without_results_make_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["table", str(tmp_path)]) == 2
    assert "no result of an action" in capsys.readouterr().err


def test_tables_are_written_between_the_marks(recorded: list[Source], tmp_path: Path) -> None:
    assert command.main(["pairs", "--out", str(tmp_path / "a"), "--pairs", "1"]) == 0
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- live -->\nold\n<!-- end of live -->\nafter\n", encoding="utf-8")
    assert command.main(["table", str(tmp_path), "--page", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- live -->\n## Pairs of one commit\n\n`python -m tests.live pairs --out ")
    assert "**A CPU: not a GPU figure.**" in text
    assert "| 1 | 33 | 1 |" in text
    page.write_text("no marks", encoding="utf-8")
    assert command.main(["table", str(tmp_path), "--page", str(page)]) == 2


def test_a_table_tells_red_and_unfit_gates_what_was_not_passed_and_what_was_stopped() -> None:
    made = {**keeping.made_with("same", "python -m tests.live same", ROOT), "device_type": "cuda", "modified_files": ["README.md"]}
    gate = {
        "mode": "baseline",
        "resumed": False,
        "cold": True,
        "exit_code": 0,
        "verdict": "PASS",
        "verdicts": {"PASS": 3},
        "processes": {"1": 3, "look-1": 24},
        "wall_s": 500.0,
        "phases_s": [["screen", 123.0], ["look-1", 370.0], ["report", 7.0]],
        "not_passed": [],
        "moved": [],
        "reason": "fine",
    }
    red = {**gate, "cold": False, "resumed": True, "exit_code": 1, "verdict": "REGRESSION", "not_passed": ["row: REGRESSED: why"]}
    unfit = {**gate, "exit_code": 5, "verdict": "RUNNER UNFIT", "moved": ["row: +3 %"]}
    data = {"made": made, "complete": False, "stopped": "no time", "elapsed_s": 530.0, "gates": [gate, red, unfit]}
    text = table.page([data])
    assert "| 1 | baseline, cold | 0 PASS | 3 PASS | 1 3, look-1 24 | 500 | screen 123, look-1 370, report 7 |" in text
    assert "| 2 | baseline, continued | 1 REGRESSION |" in text
    assert "Red (exit code 1): 1/3 = .333" in text
    assert "Unfit (exit code 5): 1/3 = .333" in text
    assert "- row: REGRESSED: why\n" in text
    assert "- moved: row: +3 %\n" in text
    assert "Stopped before all was measured: no time." in text
    assert "differed from the commit, which alone was measured: README.md" in text
    assert "not a GPU figure" not in text
    disturbed = {**data, "made": {**made, "action": "second"}, "disturbance": "busy", "expected": [0, 5], "as_expected": False}
    assert "| busy | baseline | 1 REGRESSION | 0 or 5 | **no** | fine |" in table.page([{**disturbed, "gates": [red]}])


def test_the_page_is_what_its_data_give() -> None:
    if not DATA.is_dir():
        pytest.skip("nothing has been measured for docs/live-h200.md yet: `python -m tests.live`, then `table docs/data/live-h200 --page`")
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition("<!-- live -->\n")[2].partition("<!-- end of live -->")[0] == table.page(keeping.results([DATA]))


# ---------------------------------------------------------------- on the CPU


ROWS = ["--select", "KVWriteDecode.*T=64 float16", "--quick"]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    monkeypatch.setenv("RAPID_LLM_BENCH_DEVICE", "cpu")

    def run(*words: str) -> dict[str, Any]:
        assert command.main([words[0], "--out", str(tmp_path), *ROWS, *words[1:]]) == 0
        found = kept(tmp_path, words[0])
        assert found["complete"]
        assert found["made"]["device_type"] == "cpu"
        page = table.page(keeping.results([tmp_path]))
        assert "**A CPU: not a GPU figure.**" in page
        return found

    return run


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_on_the_cpu(on_cpu: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    found = on_cpu("power", "--sizes", "100")
    slowed = compact.read(tmp_path / "power.slowed.json")
    latency = {one.label["arm"]: power.latencies(one.record)[found["asked"]["rows"]["launch"]] for one in slowed}
    assert latency["100"] > 1.2 * latency["base"], "the wait really runs"
    assert [name for name, _ in on_cpu("walls")["parts_s"]][:2] == ["python", "import torch"]


@pytest.mark.slow
def test_a_gate_on_the_cpu(on_cpu: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """One pair decides nothing: the gate is incomplete, and everything on the way is kept. `same` is it without a plant, `second` that
    beside `busy.py`."""
    (gate,) = on_cpu("lowered", "--no-compiled")["gates"]
    assert (gate["exit_code"], gate["mode"], gate["processes"], gate["num_rows"]) == (3, "ab", {"pairs": 2}, 1)
    assert [name for name, _ in gate["phases_s"]] == ["pairs", "report"]
    (verdict,) = tmp_path.glob("*.verdict.json.gz")
    assert verdict_file.load(gzip.decompress(verdict.read_bytes()).decode("utf-8")).exit_code == 3
    (file,) = tmp_path.glob(f"*{compact.SUFFIX}")
    readings = {one.label["arm"]: power.latencies(one.record) for one in compact.read(file)}
    assert set(readings) == {"base", "head"}


@pytest.mark.slow
def test_what_keeps_the_device_busy_ends_with_its_pipe() -> None:
    script = ROOT / "tests" / "live" / "busy.py"
    child = subprocess.Popen([sys.executable, str(script), "cpu"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == b"busy\n"
    assert child.poll() is None
    child.stdin.close()
    assert child.wait(timeout=20) == 0
    child.stdout.close()


@pytest.mark.slow
def test_an_action_that_is_ended_leaves_no_process(tmp_path: Path) -> None:
    """As when the machine's time is over: a gate, its asv and the measuring process go with the action."""
    mark = f"mark-of-{tmp_path.name}-{os.getpid()}"
    env = {**os.environ, "RAPID_LLM_BENCH_DEVICE": "cpu", "MARK_OF_THIS_TEST": mark}
    command_line = [sys.executable, "-m", "tests.live", "second", "--out", str(tmp_path), *ROWS, "--no-compiled"]
    child = subprocess.Popen(command_line, cwd=ROOT, env=env, stderr=subprocess.DEVNULL)

    def left() -> list[Path]:
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark.encode() in entry.read_bytes():
                    found.append(entry)
        return found

    deadline_s = time.monotonic() + 60
    while len(left()) < 6 and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert len(left()) >= 6, "the action, the busy process, the gate, asv, its server, the measuring process"
    child.terminate()
    assert child.wait(timeout=60) == 128 + signal.SIGTERM
    while left() and time.monotonic() < deadline_s + 30:
        time.sleep(0.2)
    assert left() == []


def test_an_unknown_end_is_told(tmp_path: Path) -> None:
    """What an action raises for want of time or of a number is kept; anything else is not hidden."""

    def failing(session: object) -> None:
        raise RuntimeError("unforeseen")

    with pytest.raises(RuntimeError, match="unforeseen"):
        perform(Asked("same", tmp_path), failing)
