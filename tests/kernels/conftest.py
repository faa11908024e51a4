"""Kernels run on the GPU where there is one, elsewhere in Triton's interpreter, each against references in torch.

Triton decides while it is imported whether it interprets, so tests/conftest.py sets the variable before any test module is loaded.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

BACKENDS = ("torch", "triton")

MakeCache = Callable[..., "Cache"]


@pytest.fixture(scope="session")
def device() -> str:
    """ "cuda" where there is a GPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, device: str) -> str:
    """Each backend in turn; Triton must be the interpreter's where there is no GPU, for a skip would hide it all."""
    name: str = request.param
    if name == "triton" and device == "cpu":
        from rapid_llm.kernels.launch import interpreted

        assert interpreted(), "triton was imported before tests/conftest.py could set TRITON_INTERPRET=1"
    return name


@pytest.fixture
def firsts(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by an entry for each launch that goes through Triton's `JITFunction.run`; what earlier tests made known is forgotten."""
    from rapid_llm.kernels.direct_launch import Launches
    from rapid_llm.kernels.ops import attention, kv

    attention._accepted.cache_clear()
    kv._accepted.cache_clear()
    made: list[object] = []
    original = Launches.first

    def counted(launches: Any, *args: Any, **kwargs: Any) -> None:
        made.append(launches)
        original(launches, *args, **kwargs)

    monkeypatch.setattr(Launches, "first", counted)
    return made


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory from torch.empty holds NaN (0x7F in bytes): what a kernel fails to write is seen."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        memory = empty(*args, **kwargs)
        return memory.fill_(float("nan") if memory.is_floating_point() else 0x7F)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Every test draws the same numbers, alone or in company."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        yield


@dataclass
class Cache:
    """A combined pool and one decode step on it.

    The table's entries past a length are rows that no pool has, and the row that stands at 0 is nobody's and holds NaN.
    """

    q: torch.Tensor
    k_rows: torch.Tensor
    v_rows: torch.Tensor
    row_table: torch.Tensor
    seq_lens: torch.Tensor
    scales: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Positional arguments of the decode calls."""
        return (self.q, self.k_rows, self.v_rows, self.row_table, self.seq_lens)


@pytest.fixture
def make_cache(device: str) -> MakeCache:
    """Makes a `Cache`: make_cache(lengths, num_q_heads, num_kv_heads, head_dim, dtype=…, kv_dtype=…)."""

    def make(
        lengths: list[int],
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float16,
        kv_dtype: torch.dtype | None = None,
    ) -> Cache:
        num_rows = sum(lengths) + 7
        shape = (num_rows, 2 * num_kv_heads, head_dim)
        scales: dict[str, Any] = {}
        if kv_dtype == torch.int8:
            # Heads' scales differ by more than any tolerance, and K's from V's.
            steps = 1.0 + torch.arange(num_kv_heads, device=device)
            scales = {"k_scale": 0.02 / steps, "v_scale": 0.01 * steps}
            pool = torch.randn(shape, device=device) / torch.cat(list(scales.values()))[:, None]
            pool = pool.round().clamp(-127, 127).to(torch.int8)
            pool[0] = 127  # there is no NaN; what nobody's row adds is large enough to be seen
        elif kv_dtype == torch.uint8:
            scales = {"k_scale": 0.02, "v_scale": 0.005}
            pool = torch.randn(shape, device=device)
            pool[:, :num_kv_heads] /= scales["k_scale"]
            pool[:, num_kv_heads:] /= scales["v_scale"]
            pool = pool.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            pool[0] = 0x7F
        else:
            pool = torch.randn(shape, device=device).to(dtype)
            pool[0] = torch.nan
        scattered = (torch.randperm(num_rows - 1) + 1).int()
        garbage = torch.tensor([-1, 2**31 - 1, -(2**31)], dtype=torch.int32)
        width = max(lengths, default=0) + 3
        table = garbage[torch.randint(0, 3, (len(lengths), width))]
        taken = 0
        for sequence, length in enumerate(lengths):
            table[sequence, :length] = scattered[taken : taken + length]
            taken += length
        return Cache(
            q=torch.randn(len(lengths), num_q_heads, head_dim, device=device).to(dtype),
            k_rows=pool[:, :num_kv_heads],
            v_rows=pool[:, num_kv_heads:],
            row_table=table.to(device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            scales=scales,
        )

    return make
