"""docs/findings-h200.md against its raw files (R14, R16, R107), the reasons in kv_pool.py against the page (R15), and its tables."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from asv_bench import finding_tables, findings, kv_pool
from asv_bench.finding_tables import Sheets

PARTS = ["Question", "Change", "Correctness", "Result", "Observation", "Next"]
VERDICTS = {"holds", "differs", "not testable"}
CLAIMED = set(range(1, 11))
"""Findings about claims with a figure of the specification (R81 to R90)."""

Table = list[list[str]]


def figures(text: str) -> set[str]:
    """Numbers with a decimal point, but versions of software."""
    return set(re.findall(r"(?<![\w.])\d+\.\d+(?![\w.]*\.\d)", re.sub(r"`[^`]*`|driver [\d.]+|CUDA [\d.]+|triton [\d.]+", "", text)))


def sections(page: str) -> dict[int, str]:
    """Each finding's text by its number."""
    found = re.split(r"^## (\d+)\. .*$", page, flags=re.MULTILINE)
    return {int(number): text for number, text in zip(found[1::2], found[2::2], strict=True)}


def tables_of(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.startswith("|"))


def prose_of(section: str) -> str:
    """All but the questions, which quote the specification, and the tables with the lines above them."""
    text = re.sub(r"<!-- (.+?) -->.*?<!-- end of \1 -->", "", section, flags=re.DOTALL)
    return "\n\n".join(paragraph for paragraph in text.split("\n\n") if not paragraph.strip().startswith("**Question.**"))


def claims(page: str) -> Table:
    lines = page.partition("<!-- claims -->\n")[2].partition("<!-- end of claims -->")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def known_figures(text: str, number: int, by_number: dict[int, str], root: Path) -> set[str]:
    """Figures that a text of this finding may use: of its tables, of the tables of findings and of the pages that it names."""
    named = {number, *map(int, re.findall(r"finding (\d+)", text))}
    pages = [(root / name).read_text(encoding="utf-8") for name in re.findall(r"docs/(?:h200|performance)\.md", text)]
    return figures("\n".join([*(tables_of(by_number[i]) for i in named), *pages]))


def unbacked(page: str, root: Path) -> list[str]:
    """Figures of the prose and of the claims that no table has."""
    by_number = sections(page)
    wrong = [
        f"finding {number}: {figure}"
        for number, section in by_number.items()
        for figure in sorted(figures(prose_of(section)) - known_figures(section, number, by_number, root))
    ]
    for row in claims(page):
        number, told = int(row[0]), row[3]
        wrong += [f"claim {number}: {figure}" for figure in sorted(figures(told) - known_figures(told, number, by_number, root))]
    return wrong


def without_caption(page: str) -> list[str]:
    """First lines of tables above which no line says device, day and command (R107)."""
    wrong, last, inside = [], "", False
    for line in page.splitlines():
        if line.startswith("|"):
            said = "NVIDIA H200" in last and re.search(r"\d{4}-\d\d-\d\d", last) and "`python -m " in last
            if not inside and not said:
                wrong.append(line)
        elif line and not line.startswith("<!--"):
            last = line
        inside = line.startswith("|")
    return wrong


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "findings-h200.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def data(root: Path) -> Path:
    return root / "docs" / "data" / "findings-h200"


@pytest.fixture(scope="module")
def sheets(data: Path) -> Sheets:
    return findings.read(data)


def test_the_page_has_what_the_command_prints(page: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert findings.main([str(data)]) == 0
    printed = re.findall(r"<!-- (?!end of)(.+?) -->\n(.*?)<!-- end of \1 -->", capsys.readouterr().out, flags=re.DOTALL)
    on_page = re.findall(r"<!-- (?!end of)(.+?) -->\n(.*?)<!-- end of \1 -->", page, flags=re.DOTALL)
    assert sorted(printed) == sorted(entry for entry in on_page if entry[0] != "claims")
    assert len(printed) == len(findings.TABLES)


def test_tables_are_put_between_their_marks_and_nothing_else_moves(page: str, sheets: Sheets) -> None:
    assert findings.filled(page, sheets) == page
    assert findings.filled(page.replace("| 24.16 |", "| 23.16 |"), sheets) == page
    with pytest.raises(ValueError, match="no marks of the table 'stall'"):
        findings.filled(page.replace("<!-- stall -->", ""), sheets)


def test_r16_each_finding_has_the_parts_of_a_note_in_their_order(page: str) -> None:
    by_number = sections(page)
    assert list(by_number) == list(range(1, len(by_number) + 1))
    for number, section in by_number.items():
        assert re.findall(r"^\*\*(\w+)\.\*\* \S", section, flags=re.MULTILINE) == PARTS, number


def test_r14_each_claim_has_an_artifact_and_a_verdict(page: str, root: Path) -> None:
    rows = claims(page)
    assert {int(row[0]) for row in rows} >= CLAIMED
    assert all(len(row) == 6 and all(row) for row in rows)
    assert {row[5] for row in rows} <= VERDICTS
    assert sum(row[5] == "not testable" for row in rows) <= 3
    assert all(re.match(r"(ablation|construction|second construction|trace|rows): ", row[4]) for row in rows)
    assert {name for row in rows for name in re.findall(r"ablation: \[(.+?)\]", row[4])} <= set(findings.TABLES)
    for row in rows:
        linked = re.findall(r"\]\((.+?)\)", row[4])
        assert linked, row
        assert all((root / "docs" / name).is_file() for name in linked), row


def test_r14_an_observation_says_what_backs_it_or_that_it_is_a_hypothesis(page: str) -> None:
    for number, section in sections(page).items():
        (observation,) = re.findall(r"^\*\*Observation\.\*\*(.*?)\n\n", section, flags=re.MULTILINE | re.DOTALL)
        assert re.search(r"[Bb]acked\s+by|hypothesis", observation), number


def test_r107_each_table_says_device_day_and_command(page: str) -> None:
    assert len(re.findall(r"^\| --- \|", page, flags=re.MULTILINE)) == len(findings.TABLES) + 1
    assert without_caption(page) == []
    bare = page.replace("## 8. ", "A table of another day.\n\n| a |\n| --- |\n| 1.5 |\n\n## 8. ")
    assert without_caption(bare) == ["| a |"]


def test_r107_the_a10_is_spoken_of_in_questions_and_in_its_column_only(page: str) -> None:
    for number, section in sections(page).items():
        assert "A10" not in prose_of(section), number
    header = page.partition("<!-- claims -->\n")[2].splitlines()[0]
    assert header.split(" | ")[2:4] == ["A10, quoted", "this H200"]


def test_every_figure_of_the_prose_is_in_a_table(page: str, root: Path) -> None:
    assert unbacked(page, root) == []
    assert len(figures("\n".join(map(prose_of, sections(page).values())))) > 80


@pytest.mark.parametrize(
    ("told", "instead"),
    [
        ("**Result.** 5.7 % at one sequence", "**Result.** 5.8 % at one sequence"),
        ("is 1.0000 for `bench_graph`", "is 1.0100 for `bench_graph`"),
        ("| 5.44 to 5.86 µs cold", "| 26.6 to 5.86 µs cold"),
        ("502.6 and 507.9", "502.6 and 508.9"),
        ("reach 87.8 % (finding 3)", "reach 87.8 %"),
    ],
)
def test_a_figure_that_no_table_has_is_seen(page: str, root: Path, told: str, instead: str) -> None:
    assert told in page
    assert unbacked(page.replace(told, instead, 1), root) != []


def reasons(docstring: str) -> dict[str, str]:
    """The bullets of the fixture's docstring by what is set in italics."""
    return {match[1]: match[0] for match in re.finditer(r"^- \*(.+?)\*.*?(?=^- |\Z)", docstring, flags=re.MULTILINE | re.DOTALL)}


def stale_reasons(docstring: str, page: str) -> list[str]:
    """Of the four properties, those whose reason cites no finding, or a figure that the finding's tables lack (R15)."""
    by_number, wrong = sections(page), []
    for name, text in reasons(docstring).items():
        if name == "Heads of different magnitude":
            continue
        cited = [int(number) for number in re.findall(r"finding (\d+)", text)]
        known = figures("\n".join(tables_of(by_number[number]) for number in cited))
        if not cited or not figures(text) or figures(text) - known:
            wrong.append(name)
    return wrong


def test_r15_r79_each_property_of_the_pool_survives_for_a_figure_of_the_page(page: str) -> None:
    docstring = kv_pool.__doc__ or ""
    four = [name for name in reasons(docstring) if name != "Heads of different magnitude"]
    assert len(four) == 4
    assert "docs/findings-h200.md" in docstring
    assert stale_reasons(docstring, page) == []


@pytest.mark.parametrize(
    ("told", "instead", "stale"),
    [
        ("5.7 %", "3.0 %", "Fragmented row table."),
        ("10.8 %", "8.0 %", "Combined per-layer buffer."),
        ("24.16", "23.16", "A pool of at least eight times the L2"),
        ("(finding 12)", "", "e4m3 through the real quantiser"),
    ],
)
def test_r15_a_reason_that_the_page_does_not_have_is_seen(page: str, told: str, instead: str, stale: str) -> None:
    docstring = kv_pool.__doc__ or ""
    assert told in docstring
    assert stale_reasons(docstring.replace(told, instead), page) == [stale]


def test_r15_new_raw_data_make_the_old_reason_stale(page: str, data: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(data, tmp_path / "data")
    stored = json.loads((folder / "ablations.json").read_text(encoding="utf-8"))
    for row in stored["rows"]:
        if "l2_factor=32" in row["case"]:
            row["latency_us"] *= 0.9
    (folder / "ablations.json").write_text(json.dumps(stored), encoding="utf-8")
    anew = findings.filled(page, findings.read(folder))
    assert stale_reasons(kv_pool.__doc__ or "", anew) == ["A pool of at least eight times the L2"]


def reading(us: float, floor_us: float = 1.0, *, limited: bool = False) -> dict[str, Any]:
    return {"us": us, "floor_us": floor_us, "quantiles_us": [us, us], "host_limited": limited}


ENVIRONMENT = {"device": {"name": "A"}, "driver": "1", "cuda": "2", "torch": "3", "triton": "4", "commit": "c" * 40}


def sitting(**parts: Any) -> Sheets:
    stored = {"kind": "demonstrations", "name": "one", "date": "2026-01-02", "environment": ENVIRONMENT, **parts}
    return Sheets([stored], {"kind": "ablations", "name": "ablations", "date": "2026-01-02", "environment": ENVIRONMENT, "rows": []})


def body(table: str) -> Table:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[4:]]


def test_a_table_says_where_it_is_from() -> None:
    parts = {"two_mib": {"cold": reading(5), "warm": reading(1), "synchronised_events_us": 9.0, "synchronised_host_us": 11.0,
                         "floor_synchronised_events_us": 7.0}}  # fmt: skip
    first = finding_tables.synchronised(sitting(**parts)).splitlines()[0]
    command = "`python -m asv_bench.demonstrations --json FILE`"
    assert first == f"A, driver 1, CUDA 2, torch 3, triton 4; {command}; 2026-01-02, commit cccccccccccc (one.json)."


def test_a_timer_that_reads_a_tenth_more_has_a_slope_of_1_1() -> None:
    waits = [{"known_us": x, "bench_graph": reading(x + 2.0), "bench": reading(1.1 * x + 3.0)} for x in (2.0, 10.0, 200.0)]
    rows = body(finding_tables.known_waits(sitting(known_waits=waits)))
    assert [row[3:6] for row in rows] == [["1.0000", "2.00", "0.00"], ["1.1000", "3.00", "0.00"]]


def test_timers_agree_without_their_floors_and_a_new_construction_has_a_column() -> None:
    told = [
        {"case": "long", "bench_graph": reading(101.0), "bench": reading(105.0, 3.5), "bench_behind_like_calls": reading(106.5, 3.5)},
        {"case": "short", "bench_graph": reading(50.0), "bench": reading(60.0, 3.5)},
    ]
    table = finding_tables.both_timers(sitting(both_timers=told))
    assert "`bench_behind_like_calls` less that, µs" in table
    assert body(table) == [
        ["one", "long", "100.00", "+1.50 (+1.5 %)", "yes", "+3.00 (+3.0 %)", "no"],
        ["one", "short", "49.00", "+7.50 (+15.3 %)", "", "", ""],
    ]


def test_a_host_limited_reading_is_marked() -> None:
    told = {"events_behind_a_held_queue": reading(4), "kernel_alone": reading(3, limited=True), "bench_host": reading(250)}
    assert [row[1] for row in body(finding_tables.stall(sitting(stall=told)))] == ["4.00", "3.00 (host-limited)", "250.00"]


def test_an_allocation_is_held_against_its_own_managers_first_state() -> None:
    told = [
        {"impl": impl, "case": f"alloc, state={state}", "bench_host": reading(us), "waits": waits}
        for impl, state, us, waits in (
            ("A", "bump", 10, []),
            ("A", "fragmented", 25, []),
            ("B", "bump", 20, []),
            ("B", "f", 240, ["x.py:1"]),
        )
    ]
    rows = body(finding_tables.allocators(sitting(allocator_waits=told)))
    assert [row[3] for row in rows] == ["nowhere", "nowhere", "nowhere", "x.py:1"]
    assert [row[6] for row in rows] == ["1.0", "2.5", "1.0", "12.0"]


def test_an_ablation_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"ablations\.json has no row of the case 'decode B=1 S=32768 float16 combined contiguous cold'"):
        finding_tables.order(sitting())


def raw_ablations(**changes: Any) -> dict[str, Any]:
    row = dict.fromkeys(findings._ROW_FIELDS) | {
        "params": ["a case"],
        "latency_us": 1.23456789,
        "status": "ok",
        "explain": "long",
        **changes,
    }
    return {"environment": ENVIRONMENT, "ceilings": {}, "protocol": "t2", "rows": [row], "event": "header"}


def test_what_no_table_needs_is_left_out() -> None:
    stored = json.loads(findings.kept(raw_ablations(), "2026-01-02"))
    assert (stored["kind"], stored["date"], stored["rows"][0]["case"], stored["rows"][0]["latency_us"]) == (
        "ablations", "2026-01-02", "a case", 1.23457,
    )  # fmt: skip
    assert "explain" not in stored["rows"][0]


@pytest.mark.parametrize(
    ("stored", "date", "says"),
    [
        (raw_ablations(status="failed"), "2026-01-02", "not ok, as a case"),
        (raw_ablations(), "yesterday", "has to be the day"),
        ({"environment": ENVIRONMENT}, "2026-01-02", "this is not what"),
        ({"environment": ENVIRONMENT, "rows": [{"status": "ok", "params": ["a case"]}]}, "2026-01-02", "lacks 'impl'; it is of another"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    stored: dict[str, Any], date: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raw.json").write_text(json.dumps(stored), encoding="utf-8")
    assert findings.main(["--keep", str(tmp_path / "raw.json"), "--date", date, "--to", str(tmp_path / "kept.json")]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "kept.json").exists()


def test_files_that_do_not_belong_together_are_refused(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(data, tmp_path / "data")
    path = folder / "demonstrations-2.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**stored, "environment": {**stored["environment"], "triton": "3.7.1"}}), encoding="utf-8")
    assert findings.main([str(folder)]) == 2
    assert "of different devices or versions" in capsys.readouterr().err
    path.write_text(json.dumps({**stored, "kind": "other"}), encoding="utf-8")
    assert findings.main([str(folder)]) == 2
    assert "demonstrations-2.json is no kept file" in capsys.readouterr().err
    path.unlink()
    (folder / "ablations.json").unlink()
    assert findings.main([str(folder)]) == 2
    assert "one kept file of ablations" in capsys.readouterr().err
