"""A bisect of a real history on this machine's CPU: the planted slowdown is named, and what was measured is not measured again."""

from __future__ import annotations

import json
import re

import pytest

from ci import bisect
from ci.bisect import Answer, BisectFile, Step
from ci.device import DEVICE_VARIABLE, detect
from ci.lost_rows import listed
from tests.gate.conftest import Project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SELECT = r"KVWritePrefill.*T=512 float16"
TIMES = 6
"""So often that a machine with other tenants, whose readings differ by up to two times, shows it in each of seven pairs."""


def test_the_commit_that_writes_several_times_is_named(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    good = project.git("rev-parse", "HEAD")
    project.write_times(TIMES)
    culprit = project.commit("write 'often' [bold]")
    project.commit("after it")
    bad = project.commit("last")
    (row,) = (name for name in listed(project.path) if re.search(SELECT, name))

    # A bisect that was interrupted after the ends; seven pairs are the fewest that can show a regression of one row.
    ends = Step(good, bad, 7, Answer.BAD, 0.5, "of the interrupted one")
    file = project.path / "report" / "bisect.json"
    file.parent.mkdir()
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    machine = detect().key
    file.write_text(bisect.dump(BisectFile(bisect.SCHEMA_ID, row, good, bad, machine, [ends], [], False)), encoding="utf-8")
    command = ("bisect", row, "--good", good, "--bad", "HEAD", "--pairs", "7")
    done = project.ci(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (line for line in done.stdout.splitlines() if line.startswith("step "))
    assert first == f"step 1 of about 4: {bad[:12]} 'last' +50.0 % latency: bad (measured before)"
    found = re.fullmatch(rf"step 2 of about 4: {culprit[:12]} \"write 'often' \[bold\]\" \+([\d.]+) % latency: bad", second)
    assert found is not None, second
    assert float(found[1]) > 100
    assert f"The first bad commit is {culprit[:12]} \"write 'often' [bold]\"." in done.stdout

    data = json.loads(file.read_text(encoding="utf-8"))
    assert data["suspects"] == [culprit]
    assert data["confirmed"] is True
    assert (project.path / "report" / "runs" / f"bisect-{good[:12]}-{culprit[:12]}" / "records" / culprit[:12]).is_dir()
    again = project.ci(*command)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("(measured before)") == 2
