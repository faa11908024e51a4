"""A bisect of a real history on this machine's CPU: the planted slowdown is named, and what was measured is not measured again."""

from __future__ import annotations

import json
import re

import pytest

from ci.lost_rows import listed
from tests.gate.conftest import Project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SELECT = r"KVWritePrefill.*T=512 float16"


def test_the_commit_that_writes_twice_is_named(project: Project) -> None:
    good = project.git("rev-parse", "HEAD")
    (project.path / "rapid_llm" / "note.txt").write_text("no change of a row\n", encoding="utf-8")
    before = project.commit("a note")
    project.write_twice()
    culprit = project.commit("write 'twice' [bold]")
    project.commit("after it")

    (row,) = (name for name in listed(project.path) if re.search(SELECT, name))
    # Nine pairs of one row: the sign-flip test still decides when one pair is turned by the machine's noise.
    command = ("bisect", row, "--good", good, "--bad", "HEAD", "--pairs", "9")
    done = project.ci(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"The first bad commit is {culprit[:12]} \"write 'twice' [bold]\"." in done.stdout
    steps = re.findall(r"^step (\d) of about 4: ([0-9a-f]{12}) .* ([+-][\d.]+) % latency: (good|bad)$", done.stdout, flags=re.MULTILINE)
    assert [(number, answer) for number, _, _, answer in steps] == [("1", "bad"), ("2", "good"), ("3", "bad"), ("4", "bad")]
    assert [sha for _, sha, _, _ in steps][1:] == [before[:12], culprit[:12], culprit[:12]]
    assert all((float(effect) > 20) == (answer == "bad") for _, _, effect, answer in steps)

    file = json.loads((project.path / "report" / "bisect.json").read_text(encoding="utf-8"))
    assert file["suspects"] == [culprit]
    assert file["steps"][3]["base"] == before
    again = project.ci(*command)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("(measured before)") == 4
    assert "measuring:" not in again.stdout
