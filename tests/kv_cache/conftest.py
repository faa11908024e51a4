"""Each test runs with both allocators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rapid_llm.kv_cache import KVCacheManager
from tests.kv_cache.caches import KINDS, made


@pytest.fixture(autouse=True, params=KINDS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> Iterator[type[KVCacheManager]]:
    """Both allocators in turn; `manager` makes the one whose turn it is."""
    made["kind"] = request.param
    yield request.param
    made["kind"] = KVCacheManager
