"""Every planted fault is refused by every suite it applies to, and the code as it is by none (R4, R8, R53, R59, R64, R66, R105)."""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from asv_bench.mutation import __main__ as command
from asv_bench.mutation import cases, matrix, plant
from asv_bench.mutation.fault import SUITES, Edit, Fault, PlantError
from asv_bench.mutation.matrix import FAULTS, Cell
from asv_bench.mutation.plant import ROOT, planted
from rapid_llm.kernels.configs import DecodeConfig

REAL = [fault for fault in FAULTS if not fault.harmless]


def test_there_are_thirty_faults_and_eight_a_suite_that_need_no_gpu() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    here = [fault for fault in REAL if "cpu" in fault.devices and matrix.places(fault, "cpu")]
    assert len(here) >= 30
    by_suite = Counter(suite for fault in here for suite in {suite for suite, _ in matrix.places(fault, "cpu")})
    assert set(by_suite) == set(SUITES)
    assert min(by_suite.values()) >= 8


def test_each_module_is_loaded_after_those_that_it_imports() -> None:
    """Else it would keep the real one, and a fault in that would be planted where nobody calls."""
    for place, name in enumerate(plant._LIBRARY):
        tree = ast.parse((ROOT / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert imported & set(plant._LIBRARY) <= set(plant._LIBRARY[:place]), name


@pytest.mark.parametrize("kv_dtype", ["float16", "e4m3"])
def test_the_many_of_a_gpu_take_a_stream(kv_dtype: str) -> None:
    """Else the faults of a stream would be planted where nothing runs (on the interpreter the thresholds are lowered)."""
    lens = cases._MANY["cuda"]
    sizes = {"batch": len(lens), "max_seq_len": max(lens), "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    assert DecodeConfig.default(sizes, kv_dtype).streamed


def test_every_edit_fits_the_code() -> None:
    for fault in FAULTS:
        for path in {edit.path for edit in fault.edits}:
            text = (ROOT / path).read_text(encoding="utf-8")
            for edit in fault.edits:
                text = edit.apply(text) if edit.path == path else text
            compile(text, path, "exec")


def test_a_text_that_is_gone_is_an_error_and_not_a_refusal(tmp_path: Path) -> None:
    gone = Edit("rapid_llm/kv_cache.py", "no such line", "")
    with pytest.raises(PlantError, match="has 0 times, not once"), planted([gone], tmp_path, small=True):
        pass
    with pytest.raises(PlantError, match="not loaded anew"), planted([Edit("README.md", "", "x")], tmp_path, small=True):
        pass
    with pytest.raises(PlantError, match="cannot be imported"), planted([Edit(gone.path, "", "x = (")], tmp_path, small=True):
        pass


def _record(status: str, reason: str = "", value: float | None = None) -> dict[str, object]:
    return {"status": status, "reason": reason, "value": value, "latency_us": value}


def test_only_the_expected_kind_without_a_number_is_a_refusal() -> None:
    fault = Fault("f", "w", {}, (), reason="are off")
    assert fault.refused_by(_record("unverified", "5 are off"))
    assert not fault.refused_by(_record("ok", value=5.0))
    assert not fault.refused_by(_record("unverified", "5 are off", value=5.0))
    for record in (_record("failed", "NameError"), _record("unverified", "another"), _record("violation", "are off", 5.0)):
        with pytest.raises(PlantError, match="expected unverified"):
            fault.refused_by(record)


def test_the_command_ends_with_1_for_a_miss_or_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RAPID_LLM_BENCH_DEVICE", "cpu")
    for outcome, status in (("refused", 0), ("MISSED", 1), ("ERROR", 1)):
        cell = Cell("zeros", SUITES[0], "fp16", outcome, "why")
        monkeypatch.setattr(matrix, "run", lambda faults, device, jobs, cell=cell: iter([cell]))
        assert command.main(["--select", "zeros"]) == status
        assert f"{outcome:9} zeros: {SUITES[0]} [fp16]: why" in capsys.readouterr().out
    assert command.main(["--select", "nothing has this"]) == 2


def test_a_process_that_dies_is_an_error_of_its_fault_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unmutated code is done, the first fault kills the process, and another goes on with the second."""
    first, second, suite = FAULTS[0].name, FAULTS[1].name, SUITES[0]
    lives = [
        [{"start": [suite, "c"]}, {"done": ["unmutated", suite]}, {"start": [suite, "d"]}, {"died": "exit -11: no message"}],
        [{"start": [suite, "c"]}, {"done": [second, suite]}],
    ]
    asked: list[list[tuple[str, str]]] = []

    def child(wanted: list[tuple[str, str]], device: str, folder: Path) -> Iterator[dict[str, object]]:
        asked.append(list(wanted))
        yield from lives[len(asked) - 1]

    monkeypatch.setattr(matrix, "_child", child)
    cells = list(matrix.run([replace(fault, rows={suite: ()}) for fault in FAULTS[:2]], "cpu"))
    assert cells == [Cell(first, suite, "d", "ERROR", "the process died: exit -11: no message")]
    assert asked == [[("unmutated", suite), (first, suite), (second, suite)], [(second, suite)]]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_applicable_fault_is_refused_and_the_code_as_it_is_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAPID_LLM_BENCH_DEVICE", "cpu")
    status = command.main(["--jobs", "2", "--json", str(tmp_path / "matrix.json")])
    printed = capsys.readouterr().out
    cells = [Cell(**cell) for cell in json.loads((tmp_path / "matrix.json").read_text(encoding="utf-8"))["cells"]]
    assert [cell for cell in cells if cell.outcome not in matrix.GOOD] == []
    assert status == 0, printed
    harmless = {fault.name for fault in FAULTS if fault.harmless} | {"unmutated"}
    assert {cell.fault for cell in cells if cell.outcome == "accepted"} == harmless
    planned = [(f.name, *place) for f in FAULTS if "cpu" in f.devices for place in matrix.places(f, "cpu")]
    assert sorted((cell.fault, cell.suite, cell.case) for cell in cells if cell.fault != "unmutated") == sorted(planned)
    passed = {(cell.suite, cell.case) for cell in cells if cell.fault == "unmutated"}
    assert {(cell.suite, cell.case) for cell in cells} <= passed, "a fault was measured in a row that the code as it is was not"


def test_the_page_lists_every_fault(root: Path) -> None:
    page = (root / "docs" / "mutation.md").read_text(encoding="utf-8")
    assert command.listed(FAULTS) in page, "docs/mutation.md: put the output of `python -m asv_bench.mutation --list` in place of its table"


def test_the_pages_figures_of_the_h200_are_those_of_the_kept_matrix(root: Path) -> None:
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for path in sorted((root / "docs" / "data" / "mutation-h200").glob("matrix-*.json")):  # what was measured again counts
        kept = json.loads(path.read_text(encoding="utf-8"))
        assert (kept["device"], kept["instrument"]) == ("NVIDIA H200", "cuda")
        assert {fault["name"] for fault in kept["faults"]} >= {cell["fault"] for cell in kept["cells"]} - {matrix.UNMUTATED.name}
        cells.update({(cell["fault"], cell["suite"], cell["case"]): cell for cell in kept["cells"]})
    outcomes = Counter(cell["outcome"] for cell in cells.values())
    assert set(outcomes) == {matrix.REFUSED, matrix.ACCEPTED}
    page = " ".join((root / "docs" / "mutation.md").read_text(encoding="utf-8").split())
    assert f"{len(cells)} rows measured, all {outcomes[matrix.REFUSED]}" in page
    assert f"all {outcomes[matrix.ACCEPTED]} of the" in page
    measured = {suite for _, suite, _ in cells}
    assert measured == set(SUITES)
    for suite in measured:
        refused = {fault for (fault, of, _), cell in cells.items() if of == suite and cell["outcome"] == matrix.REFUSED}
        assert len(refused) >= 8
        assert f"{suite} {len(refused)}" in page


def test_every_fault_of_now_was_refused_on_the_h200(root: Path) -> None:
    """By name, at every place where it applies; of a fault whose text has moved the page says so."""
    seen = set()
    for path in sorted((root / "docs" / "data" / "mutation-h200").glob("matrix-*.json")):
        seen |= {(cell["fault"], cell["suite"], cell["case"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]}
    planned = {(fault.name, *place) for fault in FAULTS if "cuda" in fault.devices for place in matrix.places(fault, "cuda")}
    assert planned <= seen, (
        "measure the new faults: python -m asv_bench.mutation --select WORD --json docs/data/mutation-h200/matrix-N.json"
    )
