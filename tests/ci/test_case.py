"""A verdict is a function of the files in a report folder: in stages against a baseline, in pairs, and again elsewhere."""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gate_builders import BASE_COMMIT, HEAD_COMMIT, ROWS, a_baseline, a_run, commit_of, control, environment, measured, noisy, without_row
from kept_runs import renamed, write_kept

from ci import case as cases
from ci import staged
from ci.__main__ import main
from ci.baseline import Waiver
from ci.baseline_file import to_json
from ci.case import CaseFile
from ci.compare import waive
from ci.errors import BaselineError, InputError
from ci.model import CommitResult, GateResult, RowOutcome, RowVerdict
from ci.sequential import LOOKS
from ci.verdict_file import dump

STEPS = [after - before for before, after in zip((0, *LOOKS), LOOKS, strict=False)]


def look(
    number: int, factors: Mapping[str, float], names: tuple[str, ...] = ROWS, *, sd: float = 0.001, controls: float = 1.0, **changes: Any
) -> list[CommitResult]:
    """Merge-base and HEAD in the pairs of a look; `factors` multiply HEAD's throughput, `controls` that of its controls."""
    arms = []
    for side, commit in enumerate((BASE_COMMIT, HEAD_COMMIT)):
        rng = np.random.default_rng([number, side])
        pairs = STEPS[number - 1]
        rows = [measured(name, noisy(1000.0 * (factors.get(name, 1.0) if side else 1.0), sd, pairs, rng), **changes) for name in names]
        rows += [control(f"control_{i}", noisy(3000.0 * (controls if side else 1.0), sd, pairs, rng)) for i in range(3)]
        arms.append(renamed(commit_of(rows, commit, env=environment(), date_ms=side), f"l{number}{'bh'[side]}"))
    return arms


Report = Callable[..., Path]


@pytest.fixture
def report(tmp_path: Path) -> Report:
    """Writes a report folder: a baseline, runs of HEAD, looks."""

    def make(*runs: CommitResult, looks: tuple[list[CommitResult], ...] = (), waivers: tuple[Waiver, ...] = (), **fields: Any) -> Path:
        folder = tmp_path / "report"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        baseline = msgspec.structs.replace(a_baseline(10), waivers=list(waivers))
        (folder / "baseline.json").write_text(to_json(baseline), encoding="utf-8")
        for index, run in enumerate(runs, 1):
            write_kept(folder / "runs" / str(index), [renamed(run, f"r{index}")])
        for index, arms in enumerate(looks, 1):
            write_kept(folder / "runs" / f"look-{index}", arms)
        told: dict[str, Any] = {"mode": "baseline", "device": "NVIDIA H200", "base": BASE_COMMIT, "head": HEAD_COMMIT}
        cases.write(CaseFile(**{**told, "created_at": "2026-11-30T00:00:00Z", **fields}), folder)
        return folder

    return make


def head(**changes: Any) -> CommitResult:
    return a_run(100, commit=HEAD_COMMIT, **changes)


def row(result: GateResult, name: str) -> RowOutcome:
    return next(row for row in result.rows if row.key.benchmark == name)


SLOW = {"decode_b": 0.97}


def test_a_run_within_the_band_needs_no_pairs(report: Report) -> None:
    folder = report(head())
    result = cases.judge(folder)
    assert (result.exit_code, result.mode, result.created_at) == (0, "baseline", "2026-11-30T00:00:00Z")
    assert all(row.num_pairs is None for row in result.rows)


def test_what_looks_slower_is_a_regression_only_when_pairs_confirm_it(report: Report) -> None:
    unconfirmed = cases.judge(report(head(factors=SLOW)))
    assert "SCREENED" in row(unconfirmed, "decode_b").flags
    assert (unconfirmed.exit_code, row(unconfirmed, "decode_b").verdict.value) == (3, "INVALID")
    assert "look 1, which has to confirm or clear it, was not measured" in unconfirmed.reason
    confirmed = cases.judge(report(head(factors=SLOW), looks=(look(1, SLOW, ("decode_b",)),)))
    found = row(confirmed, "decode_b")
    assert (confirmed.exit_code, found.verdict.value, found.num_pairs) == (1, "REGRESSED", 12)
    assert "against the merge-base over 12 pairs" in found.reason
    assert found.effect == pytest.approx(1 / 0.97 - 1, abs=0.002)
    assert any("HEAD: 1 REGRESSED." in notice for notice in confirmed.notices)
    cleared = cases.judge(report(head(factors=SLOW), looks=(look(1, {}, ("decode_b",)),)))
    assert (cleared.exit_code, row(cleared, "decode_b").verdict.value) == (0, "CLEARED")
    assert row(cleared, "decode_a").verdict.value == "PASS"


def test_rows_are_open_until_a_look_decides_them(report: Report) -> None:
    both = {"decode_b": 0.97, "decode_c": 0.97}
    folder = report(head(factors=both))
    case = cases.read(folder)
    run = cases.selected(cases.load_kept(folder / "runs" / "1"), None)
    baseline = cases.baseline_of(case, folder, run)
    screen = cases.compare(case, [run], baseline)
    looks: list[staged.Look] = []
    asked = []
    while left := staged.open_rows(screen, looks):
        asked.append([key.benchmark for key in left])
        names = tuple(asked[-1])
        base, tested = look(len(looks) + 1, {"decode_b": 0.97, "decode_c": 0.996}, names, sd=0.02 if "decode_b" not in names else 0.004)
        looks.append((base, tested))
    assert asked[0] == ["decode_b", "decode_c"]
    assert all(names == ["decode_c"] for names in asked[1:])
    assert 2 <= len(looks) <= len(LOOKS)
    result = staged.confirm(screen, looks, baseline)
    assert row(result, "decode_b").num_pairs == 12
    assert row(result, "decode_c").num_pairs in LOOKS[1:]


def test_controls_that_moved_between_the_arms_make_the_runner_unfit(report: Report) -> None:
    """A shift of HEAD's processes alone is the machine's, whatever the row says."""
    result = cases.judge(report(head(factors=SLOW), looks=(look(1, SLOW, ("decode_b",), controls=0.9),)))
    assert (result.exit_code, result.verdict.value) == (5, "RUNNER UNFIT")
    assert "control" in result.reason
    assert row(result, "decode_b").verdict.value == "INVALID"


def test_a_row_whose_launches_did_not_change_cannot_regress(report: Report) -> None:
    same = look(1, SLOW, ("decode_b",), launch_hash="same")
    result = cases.judge(report(head(factors=SLOW), looks=(same,)))
    assert row(result, "decode_b").verdict.value != "REGRESSED"
    assert result.exit_code == 5


def test_a_waived_regression_does_not_fail_and_says_so(report: Report) -> None:
    leave = Waiver("decode_b", "REGRESSED", "known", "A. Reviewer", "#1", datetime.date(2027, 1, 1))
    arms = look(1, SLOW, ("decode_b",))
    result = cases.judge(report(head(factors=SLOW), looks=(arms,), waivers=(leave,)))
    assert (result.exit_code, row(result, "decode_b").verdict.value) == (0, "REGRESSED")
    assert row(result, "decode_b").flags.count("WAIVED") == 1
    late = cases.judge(report(head(factors=SLOW), looks=(arms,), waivers=(leave,), created_at="2027-02-01T00:00:00Z"))
    assert late.exit_code == 4


def test_a_screened_row_that_the_pairs_lack_is_no_pass(report: Report) -> None:
    base, tested = look(1, {}, ("decode_b",))
    gone = cases.judge(report(head(factors=SLOW), looks=([base, without_row(tested, "decode_b")],)))
    assert (gone.exit_code, row(gone, "decode_b").verdict.value) == (3, "MISSING")
    lacks = [without_row(base, "decode_b"), tested]
    alone = cases.judge(report(head(factors=SLOW), looks=(lacks,)))
    assert (alone.exit_code, row(alone, "decode_b").verdict.value) == (3, "INVALID")
    again = cases.judge(report(head(factors=SLOW), a_run(101, commit=HEAD_COMMIT, factors=SLOW), looks=(lacks,)))
    found = row(again, "decode_b")
    assert (again.exit_code, found.verdict.value) == (1, "REGRESSED")
    assert "judged by two runs, because it cannot be paired" in found.reason


def test_a_merge_base_that_cannot_run_is_replaced_by_a_second_run_and_the_report_says_so(report: Report) -> None:
    second = a_run(101, commit=HEAD_COMMIT, factors=SLOW)
    result = cases.judge(report(head(factors=SLOW), second, fallback="it does not import"))
    assert (result.exit_code, result.runs) == (1, 2)
    assert any("could not be measured (it does not import)" in notice for notice in result.notices)


def test_a_wrong_result_is_told_without_pairs(report: Report) -> None:
    run = head(factors=SLOW)
    key = next(key for key in run.rows if key.benchmark == "decode_c")
    records = tuple(replace(record, peak_fraction=1.5) for record in run.rows[key].records)
    folder = report(head(factors=SLOW))
    case = cases.read(folder)
    assert staged.open_rows(cases.compare(case, [run], a_baseline(10)), [])
    wrong = replace(run, rows={**run.rows, key: replace(run.rows[key], records=records)})
    result = cases.compare(case, [wrong], a_baseline(10))
    assert result.exit_code == 6
    assert not staged.open_rows(result, [])


def test_the_verdict_is_the_same_byte_for_byte_elsewhere(report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = report(head(factors=SLOW), looks=(look(1, SLOW, ("decode_b",)),))
    assert main(["verdict", "--from", str(folder)]) == 1
    written = (folder / "verdict.json").read_bytes()
    elsewhere = tmp_path / "unpacked" / "artifact"
    shutil.copytree(folder, elsewhere)
    assert dump(cases.judge(elsewhere)).encode() == written
    capsys.readouterr()
    assert main(["verdict", "--from", str(elsewhere)]) == 1
    assert "byte for byte" in capsys.readouterr().out
    assert (elsewhere / "verdict.json").read_bytes() == written


def test_a_verdict_that_was_changed_is_told(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    folder = report(head(factors=SLOW), looks=(look(1, SLOW, ("decode_b",)),))
    main(["verdict", "--from", str(folder)])
    kept = folder / "verdict.json"
    kept.write_text(kept.read_text(encoding="utf-8").replace("REGRESSED", "CLEARED"), encoding="utf-8")
    capsys.readouterr()
    assert main(["verdict", "--from", str(folder)]) == 3
    assert "is not what the files beside it give" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mode": "else"}, "does not follow"),
        ({"select": "("}, "no regular expression"),
        ({"created_at": "today"}, "no time"),
        ({"head": "HEAD"}, "does not follow"),
        ({"more": 1}, "does not follow"),
    ],
)
def test_a_case_of_another_form_is_refused(report: Report, change: dict[str, Any], says: str) -> None:
    folder = report(head())
    data = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    (folder / "case.json").write_text(json.dumps({**data, **change}), encoding="utf-8")
    with pytest.raises(InputError, match=says):
        cases.judge(folder)


def test_what_is_missing_in_a_folder_is_named(report: Report, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no case\.json"):
        cases.judge(tmp_path)
    folder = report(head())
    (folder / "baseline.json").unlink()
    with pytest.raises(BaselineError, match=r"baseline\.json"):
        cases.judge(folder)
    folder = report()
    with pytest.raises(InputError, match="no runs/1"):
        cases.judge(folder)
    folder = report(head(), looks=(look(1, {}), look(2, {})))
    shutil.rmtree(folder / "runs" / "look-1")
    with pytest.raises(InputError, match="look-2 without those before"):
        cases.judge(folder)
    folder = report(head(), looks=(look(1, {})[:1],))
    with pytest.raises(InputError, match="does not hold the two commits"):
        cases.judge(folder)


def test_rows_are_selected_exactly() -> None:
    import re

    keys = [row.key for row in head().rows.values()][:2]
    pattern = staged.pattern_of(keys)
    assert [bool(re.search(pattern, str(key))) for key in keys] == [True, True]
    assert not re.search(pattern, f"{keys[0]}x")
    assert not re.search(pattern, f"x{keys[0]}")


def test_a_sample_that_one_look_lacks_does_not_shift_the_pairs_of_the_next(report: Report) -> None:
    """Noise common to both arms of a pair cancels only where sample i meets sample i."""
    noisy_looks = [look(number, {}, ("decode_b",), sd=1e-6) for number in (1, 2)]
    for number, arms in enumerate(noisy_looks):
        together = np.exp(np.random.default_rng(number).normal(0, 0.05, 12))
        for side, arm in enumerate(arms):
            rows = {}
            for key, row_ in arm.rows.items():
                samples = tuple(float(x) for x in np.array(row_.samples) * together)
                keep = 11 if (number, side, key.benchmark) == (0, 0, "decode_b") else 12
                rows[key] = replace(row_, samples=samples[:keep], records=row_.records[:keep])
            arms[side] = replace(arm, rows=rows)
    pairs, _ = staged._paired([(arms[0], arms[1]) for arms in noisy_looks], {key for arms in noisy_looks for key in arms[0].rows})
    (d,) = [pair.d for pair in pairs if pair.key.benchmark == "decode_b"]
    assert d.size == 23
    assert float(np.abs(d).max()) < 1e-4


def test_a_screened_row_that_the_pairs_skip_is_no_pass(report: Report) -> None:
    arms = [
        replace(
            arm,
            rows={k: replace(r, state="skipped", samples=(), reason="no room") if not r.record.control else r for k, r in arm.rows.items()},
        )
        for arm in look(1, {}, ("decode_b",))
    ]
    run = head(factors=SLOW)
    screen = cases.compare(cases.read(report(run)), [run], a_baseline(10))
    result = staged.confirm(screen, [(arms[0], arms[1])], a_baseline(10))
    assert (result.exit_code, row(result, "decode_b").verdict.value) == (3, "INVALID")
    assert "no room" in row(result, "decode_b").reason


def test_nothing_is_measured_on_when_the_machine_moved(report: Report) -> None:
    run = head(factors=SLOW)
    screen = cases.compare(cases.read(report(run)), [run], a_baseline(10))
    base, tested = look(1, {"decode_b": 0.995}, ("decode_b",), sd=0.004)
    assert staged.open_rows(screen, [(base, tested)])
    moved = look(1, {"decode_b": 0.995}, ("decode_b",), sd=0.004, controls=0.9)
    assert not staged.open_rows(screen, [(moved[0], moved[1])])


def test_a_blind_row_that_was_cleared_is_blind_all_the_same() -> None:
    known = next(row for row in cases.compare_baseline([head()], a_baseline(10)).rows if row.key.benchmark == "decode_b")
    blind = replace(known, verdict=RowVerdict.CLEARED, mde80=0.2)
    (judged,), _ = waive([blind], a_baseline(10), datetime.datetime(2026, 11, 30))
    assert judged.verdict is RowVerdict.BLIND
