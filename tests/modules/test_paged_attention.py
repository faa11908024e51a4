"""A served sequence equals full causal attention over its whole history in float64."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from asv_bench.verify import check_decode, widen
from rapid_llm.errors import ShapeError
from rapid_llm.kv_cache import KVCacheManager
from rapid_llm.modules import PagedAttention, SequenceTable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 32
SCALES = {"k_scale": 0.02, "v_scale": 0.01}


@dataclass
class History:
    """Everything a sequence has been given, and what came out."""

    q: list[torch.Tensor] = field(default_factory=list)
    k: list[torch.Tensor] = field(default_factory=list)
    v: list[torch.Tensor] = field(default_factory=list)
    out: list[torch.Tensor] = field(default_factory=list)

    def fork(self) -> "History":
        return History(*(list(tensors) for tensors in (self.q, self.k, self.v, self.out)))


def draw(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as slices of one fused projection."""
    qkv = torch.randn(num_tokens, NUM_Q_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, device=DEVICE).to(dtype)
    q, k, v = qkv.split([NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    return q, k, v


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Full causal attention in float64: token i of the queries sees the keys up to its own place."""
    group = NUM_Q_HEADS // NUM_KV_HEADS
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * HEAD_DIM**-0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1 + k.shape[0] - q.shape[0])
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.uint8), (torch.bfloat16, torch.int8)],
)
@pytest.mark.parametrize("in_blocks", [True, False])
def test_prefill_and_eight_steps_equal_causal_attention(dtype: torch.dtype, cache_dtype: torch.dtype, in_blocks: bool) -> None:
    """Two prompts, a fork of the first after two steps, an earlier request that left holes.

    With an e4m3 or int8 cache a decoded token attends the cache's bytes, so the reference does; a prompt attends its own K, V.
    """
    torch.manual_seed(0)
    quantised = cache_dtype in (torch.uint8, torch.int8)
    scales: dict[str, Any] = SCALES if quantised else {}
    if cache_dtype == torch.int8:
        steps = 1.0 + torch.arange(NUM_KV_HEADS, device=DEVICE)
        scales = {"k_scale": 0.02 * steps, "v_scale": 0.04 / steps}
    cache = KVCacheManager(96, num_layers=2, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype=cache_dtype, device=DEVICE, block_size=4)
    for layer in range(2):
        for rows in cache.layer_views(layer):
            rows.fill_(0x7F if quantised else torch.nan)
    table = SequenceTable(cache, max_batch=4, max_seq_len=32)
    attention = PagedAttention(1, num_q_heads=NUM_Q_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, **scales)
    earlier = table.add(3)
    histories: dict[int, History] = {}
    for num_tokens in (13, 6):
        sequence_id = table.add(num_tokens, in_blocks=in_blocks)
        q, k, v = draw(num_tokens, dtype)
        out = attention(q, k, v, cache, table.prefill_step(sequence_id))
        check_decode(out, causal(q, k, v), kv_dtype=str(cache_dtype))
        histories[sequence_id] = History([q], [k], [v], [out])
    table.finish(earlier)
    for step_number in range(8):
        if step_number == 2:
            parent = min(histories)
            histories[table.fork(parent)] = histories[parent].fork()
        step = table.append()
        q, k, v = draw(table.num_live, dtype)
        out = attention(q, k, v, cache, step)
        for place, sequence_id in enumerate(table.sequence_ids):
            history = histories[sequence_id]
            for tensors, tensor in ((history.q, q), (history.k, k), (history.v, v), (history.out, out)):
                tensors.append(tensor[place : place + 1])
    assert len(histories) == 3
    for sequence_id, history in histories.items():
        q, k, v, out = (torch.cat(tensors)[-8:] for tensors in (history.q, history.k, history.v, history.out))
        keys, values = torch.cat(history.k), torch.cat(history.v)
        if quantised:
            rows = table.rows(sequence_id).long()
            k_rows, v_rows = cache.layer_views(1)
            keys, values = widen(k_rows[rows], scales["k_scale"]), widen(v_rows[rows], scales["v_scale"])
            # e4m3 rounds to a 16th of a value, int8 to half a step of the head's scale; a value may lie beyond 127 of these.
            written = torch.cat(history.k).double()
            if cache_dtype == torch.int8:
                step = scales["k_scale"].double()[:, None]
                assert ((keys - written.clamp(-127 * step, 127 * step)).abs() <= 0.501 * step).all()
            else:
                torch.testing.assert_close(keys, written, rtol=1 / 16, atol=scales["k_scale"] / 1024)
        check_decode(out, causal(q, keys, values), kv_dtype=str(cache_dtype))


def test_only_its_own_layer_is_written() -> None:
    cache = KVCacheManager(8, num_layers=2, num_kv_heads=2, head_dim=32, dtype=torch.float16, device=DEVICE)
    for layer in range(2):
        for rows in cache.layer_views(layer):
            rows.zero_()
    table = SequenceTable(cache, max_batch=1, max_seq_len=8)
    attention = PagedAttention(1, num_q_heads=6, num_kv_heads=2, head_dim=32)
    attention(*draw(3, torch.float16), cache, table.prefill_step(table.add(3)))
    assert not any(rows.any() for rows in cache.layer_views(0))
    assert all(rows[:3].any(-1).all() and not rows[3:].any() for rows in cache.layer_views(1))


def test_the_backend_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCacheManager(8, num_layers=1, num_kv_heads=2, head_dim=32, dtype=torch.float16, device=DEVICE)
    table = SequenceTable(cache, max_batch=1, max_seq_len=8)
    attention = PagedAttention(0, num_q_heads=6, num_kv_heads=2, head_dim=32, backend="no such backend")
    with pytest.raises(ValueError, match="no such backend"):
        attention(*draw(3, torch.float16), cache, table.prefill_step(table.add(3)))


def test_wrong_shapes() -> None:
    with pytest.raises(ShapeError, match="PagedAttention expected num_q_heads to be a positive multiple"):
        PagedAttention(0, num_q_heads=3, num_kv_heads=2, head_dim=32)
    cache = KVCacheManager(8, num_layers=1, num_kv_heads=2, head_dim=32, dtype=torch.float16, device=DEVICE)
    table = SequenceTable(cache, max_batch=1, max_seq_len=8)
    step = table.prefill_step(table.add(3))
    attention = PagedAttention(0, num_q_heads=6, num_kv_heads=2, head_dim=32)
    q, k, v = draw(3, torch.float16)
    with pytest.raises(ShapeError, match=r"k of shape \(3, 2, 32\) for this step, got \(2, 2, 32\)"):
        attention(q, k[:2], v, cache, step)
    with pytest.raises(ShapeError, match=r"q of shape \(3, 6, 32\) for this step, got \(3, 2, 32\)"):
        attention(k, k, v, cache, step)
