"""Who shares a workspace: launches of one stream; a capture shares with nobody."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rapid_llm.errors import WorkspaceError
from rapid_llm.kernels import workspace

CPU = torch.device("cpu")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """on(stream, capture) gives the piece that a call there would have."""
    workspace.kept.cache_clear()

    def piece(stream: int, capture: int | None = None, *, floats: int = 8, counters: int = 8) -> workspace.Workspace:
        monkeypatch.setattr(workspace, "_stream_and_capture", lambda device: (stream, capture))
        return workspace.workspace_for(CPU, floats, counters)

    yield piece
    workspace.kept.cache_clear()


def test_a_stream_keeps_its_piece_and_shares_it_with_no_other(on: Any) -> None:
    first = on(1)
    assert on(1) is first
    assert on(2) is not first
    assert on(1) is first


def test_a_capture_shares_with_neither_eager_calls_nor_another_capture(on: Any) -> None:
    """All on one stream, as torch captures graphs: pieces of captures are told apart by the capture's id."""
    eager, one, again, two = on(1), on(1, 7), on(1, 7), on(1, 8)
    assert one is again
    assert len({id(piece) for piece in (eager, one, two)}) == 3
    assert on(1) is eager
    assert on(1, 8) is two


def test_a_larger_need_makes_a_larger_piece_with_counters_at_zero(on: Any) -> None:
    first = on(1)
    more = on(1, floats=len(first.floats) + 1)
    assert len(more.floats) >= len(first.floats) + 1
    more_counters = on(1, counters=len(first.counters) + 1)
    assert len(more_counters.counters) >= len(first.counters) + 1
    assert len(more_counters.floats) == workspace._LEAST_FLOATS
    assert not bool(more_counters.counters.any())


@pytest.mark.parametrize(("code", "status", "message"), [(1, 1, "gave 1 and"), (0, 2, "capture status 2")])
def test_a_capture_without_an_id_is_refused(monkeypatch: pytest.MonkeyPatch, code: int, status: int, message: str) -> None:
    import ctypes

    def ask(stream: int, status_at: int, identity_at: int, *rest: None) -> int:
        ctypes.c_int.from_address(status_at).value = status
        ctypes.c_uint64.from_address(identity_at).value = 42
        assert len(rest) == 3
        return code

    monkeypatch.setattr(workspace, "_capture_info", lambda: (ask, 3))
    with pytest.raises(WorkspaceError, match=message):
        workspace._capture_id(5)
    code, status = 0, 1
    assert workspace._capture_id(5) == 42


def test_the_older_form_of_the_drivers_question_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def library(**names: Any) -> Any:
        monkeypatch.setattr(workspace.ctypes, "CDLL", lambda name: SimpleNamespace(**names))
        return workspace._capture_info.__wrapped__

    v2, v3 = SimpleNamespace(), SimpleNamespace()
    assert library(cuStreamGetCaptureInfo_v2=v2, cuStreamGetCaptureInfo_v3=v3)() == (v2, 3)
    assert library(cuStreamGetCaptureInfo_v3=v3)() == (v3, 4)
    assert (len(v2.argtypes), len(v3.argtypes)) == (6, 7)
    with pytest.raises(WorkspaceError, match="use a driver"):
        library()()
