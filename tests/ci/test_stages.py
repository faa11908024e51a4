"""The gate's flow against a stored baseline, with a machine of which the truth is known instead of asv: what is measured, and when."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gate_builders import ROWS, a_baseline, commit_of, control, environment, measured, noisy
from kept_runs import renamed, write_kept
from rich.console import Console

from ci import case as cases
from ci import gate, lost_rows
from ci.baseline_file import to_json
from ci.device import Device
from ci.errors import InputError
from ci.gate import Options
from ci.model import GateResult
from ci.run import Places, RunPlan
from ci.verdict_file import dump

DEVICE = Device("NVIDIA H200", "cuda")
CONTROLS = ("control_0", "control_1", "control_2")


@dataclass
class Machine:
    """Stands for asv: writes what it would have left. `speed` of a commit's row is 1 where it is not named."""

    root: Path
    slow: dict[tuple[str, str], float] = field(default_factory=dict)
    sd: float = 0.001
    broken: set[str] = field(default_factory=set)
    interrupt_at: int | None = None
    plans: list[RunPlan] = field(default_factory=list)

    def run_asv(self, places: Places, plan: RunPlan, console: Console) -> None:
        if self.interrupt_at == len(self.plans):
            self.interrupt_at = None
            raise KeyboardInterrupt
        self.plans.append(plan)
        if any(commit.sha in self.broken for commit in plan.commits):
            raise InputError("A commit could not be measured: no module named x.")
        commits = []
        for side, commit in enumerate(plan.commits):
            rng = np.random.default_rng([len(self.plans), side])
            rows = []
            for index, name in enumerate(ROWS):
                if re.search(plan.select or "", name):
                    level = 1000.0 * (1 + index) * self.slow.get((commit.sha, name), 1.0)
                    rows.append(measured(name, noisy(level, self.sd, plan.rounds, rng)))
            rows += [control(name, noisy(3000.0, self.sd, plan.rounds, rng)) for name in CONTROLS]
            made = commit_of(rows, commit.sha, env=environment(), date_ms=side)
            commits.append(renamed(made, f"n{len(self.plans)}s{side}"))
        shutil.rmtree(places.results, ignore_errors=True)
        shutil.rmtree(places.records, ignore_errors=True)
        kept = write_kept(places.root / ".asv" / "kept", commits)
        (kept / "results").rename(places.results)
        (kept / "records").rename(places.records)
        kept.rmdir()


@dataclass
class Change:
    """A checkout with a baseline on main and a change on a branch."""

    path: Path
    machine: Machine

    def git(self, *arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.invalid")
        return subprocess.run(["git", *identity, *arguments], cwd=self.path, check=True, capture_output=True, text=True).stdout.strip()

    def slower(self, **speeds: float) -> None:
        head = self.git("rev-parse", "HEAD")
        self.machine.slow.update({(head, name): speed for name, speed in speeds.items()})

    def gate(self, **options: Any) -> GateResult:
        return gate.gate(self.path, Options(self.path / "report", compiled=False, **options), Console(quiet=True))

    def measured(self) -> list[tuple[int, int]]:
        """(commits, rounds) of each call of asv."""
        return [(len(plan.commits), plan.rounds) for plan in self.machine.plans]


@pytest.fixture
def change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Change:
    path = tmp_path / "checkout"
    (path / "baselines").mkdir(parents=True)
    made = Change(path, Machine(path))
    (path / "baselines" / "NVIDIA_H200.json").write_text(to_json(a_baseline(10)), encoding="utf-8")
    (path / ".gitignore").write_text(".asv\nreport\n", encoding="utf-8")
    (path / ".asv").mkdir()
    made.git("init", "-q", "-b", "main")
    made.git("add", "-A")
    made.git("commit", "-qm", "main")
    made.git("checkout", "-qb", "change")
    made.git("commit", "-qm", "change", "--allow-empty")
    monkeypatch.setattr(gate, "detect", lambda: DEVICE)
    monkeypatch.setattr(gate.run, "run_asv", made.machine.run_asv)
    monkeypatch.setattr(lost_rows, "suites", lambda *_: None)
    return made


def verdict(result: GateResult, name: str) -> str:
    return next(row.verdict.value for row in result.rows if row.key.benchmark == name)


def test_a_change_that_costs_nothing_is_measured_once(change: Change) -> None:
    result = change.gate()
    assert (result.exit_code, change.measured()) == (0, [(1, 3)])
    assert not (change.path / "report" / "unfinished.json").exists()


def test_a_slower_row_is_confirmed_in_twelve_pairs_of_that_row_alone(change: Change) -> None:
    change.slower(decode_b=0.97)
    result = change.gate()
    assert (result.exit_code, verdict(result, "decode_b")) == (1, "REGRESSED")
    assert change.measured() == [(1, 3), (2, 12)]
    assert change.machine.plans[1].select == "^decode_b$"
    assert cases.judge(change.path / "report").rows == result.rows
    assert dump(cases.judge(change.path / "report")) == (change.path / "report" / "verdict.json").read_text(encoding="utf-8")


def test_what_is_slower_than_the_baseline_but_not_than_the_merge_base_is_cleared(change: Change) -> None:
    """The row got slower before this change: the baseline is behind, and the change is not to blame."""
    main = change.git("rev-parse", "main")
    change.slower(decode_b=0.97)
    change.machine.slow[main, "decode_b"] = 0.97
    result = change.gate()
    assert (result.exit_code, verdict(result, "decode_b")) == (0, "CLEARED")


def test_rows_stay_open_for_24_and_48_pairs(change: Change) -> None:
    """A change of the size of the floor, in noise of four times that, is not decided; what is decided at once is not measured on."""
    change.machine.sd = 0.02
    change.slower(decode_b=0.8, decode_c=0.985)
    baseline = change.path / "baselines" / "NVIDIA_H200.json"
    change.git("checkout", "-q", "main")
    baseline.write_text(to_json(a_baseline(10, sd=0.01)), encoding="utf-8")
    change.git("commit", "-qam", "noisier")
    change.git("checkout", "-q", "change")
    change.git("rebase", "-q", "main")
    change.slower(decode_b=0.8, decode_c=0.96)
    result = change.gate()
    assert verdict(result, "decode_b") == "REGRESSED"
    looks = change.machine.plans[1:]
    assert [plan.rounds for plan in looks] == [12, 12, 24][: len(looks)]
    assert len(looks) >= 2
    assert all("decode_b" not in (plan.select or "") for plan in looks[1:])


def test_an_interrupted_gate_measures_only_what_is_missing(change: Change) -> None:
    change.slower(decode_b=0.97)
    change.machine.interrupt_at = 1
    with pytest.raises(KeyboardInterrupt):
        change.gate()
    assert (change.path / "report" / "unfinished.json").is_file()
    assert not (change.path / "report" / "verdict.json").exists()
    result = change.gate()
    assert result.exit_code == 1
    assert change.measured() == [(1, 3), (2, 12)]
    assert change.gate().exit_code == 1
    assert change.measured() == [(1, 3), (2, 12)] * 2, "a gate that ended is not taken up again"


@pytest.mark.parametrize("what", ["commit", "options", "baseline", "no resume"])
def test_an_interrupted_gate_of_something_else_is_not_taken_up(change: Change, what: str) -> None:
    change.slower(decode_b=0.97)
    change.machine.interrupt_at = 1
    with pytest.raises(KeyboardInterrupt):
        change.gate()
    options: dict[str, Any] = {}
    if what == "commit":
        change.git("commit", "-qm", "more", "--allow-empty")
        change.slower(decode_b=0.97)
    elif what == "options":
        options["rounds"] = 4
    elif what == "no resume":
        options["resume"] = False
    else:
        change.git("checkout", "-q", "main")
        (change.path / "baselines" / "NVIDIA_H200.json").write_text(to_json(a_baseline(11)), encoding="utf-8")
        change.git("commit", "-qam", "another baseline")
        change.git("checkout", "-q", "change")
    assert change.gate(**options).exit_code == 1
    assert [commits for commits, _ in change.measured()] == [1, 1, 2]


def test_a_merge_base_that_cannot_be_measured_costs_a_second_run(change: Change) -> None:
    change.machine.broken.add(change.git("rev-parse", "main"))
    change.slower(decode_b=0.97)
    result = change.gate()
    assert (result.exit_code, verdict(result, "decode_b"), result.runs) == (1, "REGRESSED", 2)
    assert change.measured() == [(1, 3), (2, 12), (1, 3)]
    assert any("no module named x" in notice for notice in result.notices)


def test_main_itself_is_paired_with_an_empty_commit_on_it(change: Change) -> None:
    change.git("checkout", "-q", "main")
    change.slower(decode_b=0.97)
    main = change.git("rev-parse", "HEAD")
    result = change.gate()
    assert change.measured() == [(1, 3), (2, 12)]
    assert (result.base, result.head) == (main, main)
    assert change.git("rev-parse", f"{change.machine.plans[1].commits[0].sha}^{{tree}}") == change.git("rev-parse", "main^{tree}")


def test_folders_that_no_gate_made_are_not_mixed_with(change: Change) -> None:
    mine = change.path / "report" / "runs" / "1" / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine", encoding="utf-8")
    with pytest.raises(gate.UsageError, match="no gate left it"):
        change.gate()
    assert mine.read_text(encoding="utf-8") == "mine"
