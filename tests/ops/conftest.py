"""What tests of operations share."""

from collections.abc import Iterator

import pytest

from rapid_llm.kernels.ops import registry
from rapid_llm.kernels.ops.dispatch import FORCE_BACKEND_VARIABLE, set_perf_provider


@pytest.fixture
def isolated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A registry as declared and no perf provider, whatever a test makes of them; no backend is forced."""
    monkeypatch.delenv(FORCE_BACKEND_VARIABLE, raising=False)
    with registry.isolated():
        before = set_perf_provider(None)
        yield
        set_perf_provider(before)
