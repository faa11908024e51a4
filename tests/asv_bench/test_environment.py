"""What the process says of its machine: states that cannot be read are unknown, and stop nothing (case 28)."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch

from asv_bench import environment


def _says(monkeypatch: pytest.MonkeyPatch, **fields: str) -> dict[str, Any]:
    line = ", ".join(fields.get(name, "[N/A]") for name in environment._SMI_FIELDS)

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, line + "\n", "")

    monkeypatch.setattr(environment.subprocess, "run", run)
    return environment.collect_state(torch.device("cuda"))


@pytest.mark.parametrize(
    ("said", "clock"), [("1168", 1168.0), ("0", 0.0), ("[N/A]", None), ("N/A", None), ("[Insufficient Permissions]", None), ("", None)]
)
def test_a_state_that_cannot_be_read_is_unknown(monkeypatch: pytest.MonkeyPatch, said: str, clock: float | None) -> None:
    """59 % of 1,980 MHz, 0, refused: the number, or None, and never an error."""
    state = _says(monkeypatch, sm_clock_mhz=said, throttle_reasons="Active" if said == "" else "0x0000000000000004")
    assert state["sm_clock_mhz"] == clock
    assert state["throttle_reasons"] == (None if said == "" else ["sw_power_cap"])


def test_a_query_that_is_refused_leaves_everything_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(255, command)

    for fault in (refuse, lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError("nvidia-smi"))):
        monkeypatch.setattr(environment.subprocess, "run", fault)
        assert set(environment.collect_state(torch.device("cuda")).values()) == {None}
    monkeypatch.setattr(environment.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, "\n", ""))
    assert set(environment.collect_state(torch.device("cuda")).values()) == {None}
