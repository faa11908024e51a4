"""Around asv: one gate at a time, and nothing of it left running."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gate_builders import BASE_COMMIT, HEAD_COMMIT, commit_of, measured
from kept_runs import write_kept
from rich.console import Console

from ci import gate, run
from ci.device import Device
from ci.errors import UsageError
from ci.repo import Commit
from ci.run import Places


def test_a_second_gate_in_one_checkout_is_refused(tmp_path: Path) -> None:
    places = Places(tmp_path)
    places.logs.mkdir(parents=True)
    with run._only_one(places):
        with pytest.raises(UsageError, match="Another gate is measuring"):
            with run._only_one(places):
                pass
    with run._only_one(places):
        pass


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_the_lock_is_held_as_long_as_the_asv_of_a_killed_gate_runs(tmp_path: Path) -> None:
    places = Places(tmp_path)
    places.logs.mkdir(parents=True)
    with run._only_one(places) as lock:
        asv = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=(lock,))
    with pytest.raises(UsageError, match="asv of one that was killed"):
        with run._only_one(places):
            pass
    asv.kill()
    asv.wait()
    with run._only_one(places):
        pass


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_stopping_asv_ends_its_children_whatever_their_groups(tmp_path: Path) -> None:
    child = "import os, time; os.setpgid(0, 0); open('ready', 'w').close(); time.sleep(60)"
    parent = (
        "import signal, subprocess, sys; signal.signal(signal.SIGINT, lambda *a: sys.exit(0));"
        f" subprocess.run([sys.executable, '-c', {child!r}])"
    )
    asv = subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path, start_new_session=True)
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    assert len(run._session_of(asv.pid)) == 2
    run._stop(asv)
    for _ in range(100):
        if not run._session_of(asv.pid):
            break
        time.sleep(0.02)
    assert run._session_of(asv.pid) == []
    with pytest.raises(ProcessLookupError):
        os.kill(asv.pid, 0)


def test_a_measuring_process_whose_parents_were_killed_keeps_gates_away(tmp_path: Path, root: Path) -> None:
    """The measuring process inherits a lock of its own, for when gate and asv are both gone."""
    places = Places(tmp_path)
    places.logs.mkdir(parents=True)
    code = (
        "import os, subprocess, sys\n"
        "from asv_bench import session\n"
        "with session._measuring() as lock:\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], pass_fds=(lock,), stdout=subprocess.DEVNULL)\n"
        "    print(child.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    env = {**os.environ, run.LOCK_VARIABLE: str(places.measuring)}
    asv = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, stdout=subprocess.PIPE, text=True, timeout=60)
    worker = int(asv.stdout)
    with pytest.raises(UsageError, match="asv of one that was killed"):
        with run._only_one(places):
            pass
    os.kill(worker, 9)
    deadline_s = time.monotonic() + 10
    while True:
        try:
            with run._only_one(places):
                break
        except UsageError:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


def test_a_round_that_lacks_its_other_commit_is_made_whole_before_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the two commits of a round: what followed would be paired with the process of another round."""
    places, device = Places(tmp_path), Device("NVIDIA H200", "cuda")
    base = commit_of([measured("bench.A.track_x", [1.0, 2.0])], commit=BASE_COMMIT)
    head = commit_of([measured("bench.A.track_x", [3.0, 4.0, 5.0])])
    write_kept(tmp_path / ".asv", [base, head])
    commits = [Commit(sha, "subject") for sha in (BASE_COMMIT, HEAD_COMMIT)]
    plans: list[run.RunPlan] = []
    monkeypatch.setattr(run, "run_asv", lambda places, plan, console: plans.append(plan))
    console = Console(quiet=True)
    assert gate._finish_round(places, device, commits, gate.Options(tmp_path / "report", select="A", skip=("B",)), console) == 3
    assert plans == [run.RunPlan((commits[0],), 1, append=True, select="A", skip=("B",))]
    run.forget(places, device, commits[:1])
    assert gate._finish_round(places, device, commits, gate.Options(tmp_path / "report"), console) == 0
    assert len(plans) == 1


def test_the_first_half_of_the_first_round_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by killing gates at random moments: a kill between the commits of the first round lost the process that had ended."""
    places, device = Places(tmp_path), Device("NVIDIA H200", "cuda")
    write_kept(tmp_path / ".asv", [commit_of([measured("bench.A.track_x", [1.0])], commit=BASE_COMMIT)])
    commits = [Commit(sha, "subject") for sha in (BASE_COMMIT, HEAD_COMMIT)]
    plans: list[run.RunPlan] = []
    monkeypatch.setattr(run, "run_asv", lambda places, plan, console: plans.append(plan))
    assert gate._finish_round(places, device, commits, gate.Options(tmp_path / "report"), Console(quiet=True)) == 1
    assert plans == [run.RunPlan((commits[1],), 1, append=True)]
