"""A call that is like an earlier one skips validation and dispatch; one that differs in anything that these look at does not."""

import math
import os
from typing import Any

import pytest
import torch

from rapid_llm.errors import BackendError, DTypeError, RapidLLMError, ScaleError, ShapeError
from rapid_llm.kernels.ops import attention, kv, kv_write, paged_decode_attention, registry, spec
from rapid_llm.kernels.ops.dispatch import FORCE_BACKEND_VARIABLE, decision_state, set_perf_provider
from rapid_llm.kernels.ops.tuned import overridden

Arguments = dict[str, Any]


def arguments(**changes: Any) -> Arguments:
    pool = torch.randn(12, 4, 16).half()
    made = {
        "q": torch.randn(3, 4, 16).half(),
        "k_rows": pool[:, :2],
        "v_rows": pool[:, 2:],
        "row_table": torch.arange(12, dtype=torch.int32).view(3, 4),
        "seq_lens": torch.tensor([4, 1, 3], dtype=torch.int32),
    }
    return {**made, **changes}


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by an entry for each call that is validated."""
    seen: list[str] = []
    original = attention.decode_request

    def counted(*args: Any) -> Any:
        seen.append("validated")
        return original(*args)

    monkeypatch.setattr(attention, "decode_request", counted)
    attention._accepted.cache_clear()
    return seen


def test_a_like_call_is_validated_once(validated: list[str]) -> None:
    """Other tensors and values of the same form are like it."""
    outputs = [paged_decode_attention(**arguments()) for _ in range(3)]
    assert validated == ["validated"]
    assert not torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize(
    "changes",
    [
        {"q": torch.zeros(3, 8, 16).half()},
        {"q": torch.zeros(3, 5, 16).half()[:, :4]},
        {"k_rows": torch.zeros(12, 2, 16).half()},
        {"k_rows": torch.zeros(13, 2, 16).half(), "v_rows": torch.zeros(13, 2, 16).half()},
        {"k_rows": torch.zeros(12, 2, 16, dtype=torch.uint8), "v_rows": torch.zeros(12, 2, 16, dtype=torch.uint8)},
        {
            **dict.fromkeys(("k_rows", "v_rows"), torch.zeros(12, 2, 16, dtype=torch.int8)),
            **dict.fromkeys(("k_scale", "v_scale"), torch.ones(2)),
        },
        {"row_table": torch.zeros(3, 5, dtype=torch.int32)},
        {"row_table": torch.zeros(3, 8, dtype=torch.int32)[:, :4]},
        {"seq_lens": torch.zeros(6, dtype=torch.int32)[:3], "out": torch.zeros(3, 4, 16).half()},
        {"block_size": 2, "row_table": (torch.arange(12, dtype=torch.int32) % 6).view(3, 4)},
        {"backend": "torch"},
    ],
)
def test_what_differs_is_validated_again(validated: list[str], changes: Arguments) -> None:
    paged_decode_attention(**arguments())
    paged_decode_attention(**arguments(**changes))
    assert len(validated) == 2


def test_what_decides_is_looked_at_in_every_call(validated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry, the perf provider, a forced config and the environment: a decision made before they changed is stale."""
    paged_decode_attention(**arguments())
    before = set_perf_provider(None)
    paged_decode_attention(**arguments())
    set_perf_provider(before)
    with overridden("triton_paged_decode", None):
        paged_decode_attention(**arguments())
    with registry.isolated():
        registry.record_golden("torch_paged_decode", registry.get("triton_paged_decode").golden)
        paged_decode_attention(**arguments())
    assert len(validated) == 4
    monkeypatch.setenv(FORCE_BACKEND_VARIABLE, "nobody")
    with pytest.raises(BackendError):
        paged_decode_attention(**arguments())


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"q": None}, ShapeError),
        ({"q": torch.zeros(3, 4)}, ShapeError),
        ({"q": torch.zeros(3, 4, 16)}, DTypeError),
        ({"seq_lens": torch.zeros(2, dtype=torch.int32)}, ShapeError),
        ({"row_table": torch.zeros(3, 4, dtype=torch.int64)}, DTypeError),
        ({"out": torch.zeros(3, 4, 16)}, DTypeError),
        ({"out": torch.zeros(3, 4, 8).half()}, ShapeError),
        ({"out": "out"}, ShapeError),
        ({"k_scale": 1.0}, ScaleError),
        ({"v_scale": True}, ScaleError),
        ({"softmax_scale": math.nan}, ScaleError),
        ({"softmax_scale": True}, ScaleError),
        ({"block_size": 0}, ShapeError),
        ({"block_size": True}, ShapeError),
        ({"block_size": 1.0}, ShapeError),
        ({"block_size": 5}, ShapeError),
        ({"block_size": "2"}, ShapeError),
    ],
)
def test_a_wrong_call_after_a_right_one_is_refused(changes: Arguments, error: type[RapidLLMError]) -> None:
    for _ in range(2):
        paged_decode_attention(**arguments())
        with pytest.raises(error, match=r"^paged_decode_attention expected"):
            paged_decode_attention(**arguments(**changes))


def test_scales_are_looked_at_in_every_call() -> None:
    """True is equal to 1.0, and is no scale."""
    pool = torch.zeros(12, 4, 16, dtype=torch.uint8)
    quantised = {"k_rows": pool[:, :2], "v_rows": pool[:, 2:]}
    paged_decode_attention(**arguments(**quantised, k_scale=1.0, v_scale=1.0))
    for bad in (True, 0.0, math.nan):
        with pytest.raises(ScaleError):
            paged_decode_attention(**arguments(**quantised, k_scale=bad, v_scale=1.0))


def test_scales_of_heads_are_looked_at_in_every_call_by_their_form(validated: list[str]) -> None:
    """Others are like the first, since their values are the device's to read; a wrong kind is refused after a right one too."""
    pool = torch.randint(-127, 128, (12, 4, 16)).to(torch.int8)
    rows = {"k_rows": pool[:, :2], "v_rows": pool[:, 2:]}
    query = {"q": torch.ones(3, 4, 16).half(), "row_table": torch.arange(12, dtype=torch.int32).view(3, 4)}
    outputs = []
    for factor in (1.0, 2.0):
        scales = {"k_scale": torch.full((2,), 0.01), "v_scale": torch.full((2,), 0.01 * factor)}
        outputs.append(paged_decode_attention(**arguments(**rows, **query, **scales)))
    assert validated == ["validated"]
    torch.testing.assert_close(outputs[1], 2.0 * outputs[0], rtol=2e-3, atol=1e-3)
    good = torch.ones(2)
    for bad in (None, 1.0, torch.ones(3), torch.ones(2).half(), torch.ones(4)[::2], torch.ones(2, device="meta"), torch.ones(1, 2)):
        with pytest.raises(ScaleError, match="expected v_scale"):
            paged_decode_attention(**arguments(**rows, k_scale=good, v_scale=bad))


@pytest.mark.parametrize("op", ["decode", "write"])
def test_bytes_that_begin_at_an_odd_address_are_another_form(op: str) -> None:
    """int8 ones as e4m3 ones: pairs of them cannot be read as 16 bits."""
    for dtype in (torch.uint8, torch.int8):
        memory = torch.zeros(12 * 64 + 1, dtype=dtype)
        even, odd = (memory[first:][: 12 * 64].view(12, 4, 16) for first in (0, 1))
        keys = []
        for pool in (even, odd):
            if op == "decode":
                made = arguments(k_rows=pool[:, :2], v_rows=pool[:, 2:])
                keys.append(attention._call_key(*made.values(), None, 1, None))
            else:
                keys.append(kv._call_key(*writing(k_rows=pool[:, :2], v_rows=pool[:, 2:]).values(), None))
        assert None not in keys
        assert keys[0] != keys[1]


def test_one_row_is_never_taken_as_known(validated: list[str]) -> None:
    """Two storages may lie as near to each other as K and V of one row do."""
    row = torch.zeros(1, 4, 16).half()
    one = {"k_rows": row[:, :2], "v_rows": row[:, 2:], "row_table": torch.zeros(3, 1, dtype=torch.int32)}
    for _ in range(2):
        paged_decode_attention(**arguments(**one))
    assert len(validated) == 2


def test_a_target_that_is_loaded_anew_has_a_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a planted fault is: what the code before it kept is none of its own."""
    attention._accepted.cache_clear()
    seen: list[dict[str, Any]] = []

    def load(target: str) -> Any:
        return lambda *args, memory=None, **kwargs: None if memory is None else seen.append(memory)

    for _ in range(2):
        loaded = load("")
        monkeypatch.setattr(spec, "load_target", lambda target, loaded=loaded: loaded)
        for _ in range(2):
            paged_decode_attention(**arguments(backend="triton"))
    attention._accepted.cache_clear()
    assert [memory is seen[0] for memory in seen] == [True, True, False, False]
    assert seen[2] is seen[3]


def test_what_is_not_taken_as_known_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    row = torch.zeros(1, 4, 16).half()
    seen: list[object] = []
    loaded = lambda *args, memory=None, **kwargs: seen.append(memory) if len(args) > 1 else None  # noqa: E731
    monkeypatch.setattr(spec, "load_target", lambda target: loaded)
    one = {"k_rows": row[:, :2], "v_rows": row[:, 2:], "row_table": torch.zeros(3, 1, dtype=torch.int32)}
    for _ in range(2):
        paged_decode_attention(**arguments(**one, backend="triton"))
    assert seen == [None, None]


@pytest.mark.parametrize("stood_in", [False, True])
def test_every_way_to_change_the_environment_is_seen(monkeypatch: pytest.MonkeyPatch, stood_in: bool) -> None:
    monkeypatch.delenv(FORCE_BACKEND_VARIABLE, raising=False)
    if stood_in:
        monkeypatch.setattr(os, "environ", dict(os.environ))
    name, without = FORCE_BACKEND_VARIABLE, decision_state()
    states = [without]
    for change in (
        lambda: os.environ.update({name: "a"}),
        lambda: os.environ.__setitem__(name, "b"),
        lambda: os.environ.pop(name),
        lambda: os.environ.setdefault(name, "c"),
        lambda: os.environ.__delitem__(name),
        lambda: os.environ.update(RAPID_LLM_ANOTHER="1"),
        lambda: os.environ.pop("RAPID_LLM_ANOTHER"),
    ):
        change()
        states.append(decision_state())
    assert [state == without for state in states] == [True, False, False, True, False, True, True, True]
    assert len({states[1], states[2], states[4]}) == 3


def writing(**changes: Any) -> Arguments:
    pool = torch.zeros(12, 4, 16).half()
    made = {
        "k": torch.randn(3, 2, 16).half(),
        "v": torch.randn(3, 2, 16).half(),
        "slot_mapping": torch.tensor([4, 1, 3]),
        "k_rows": pool[:, :2],
        "v_rows": pool[:, 2:],
    }
    return {**made, **changes}


@pytest.fixture
def validated_writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by an entry for each write that is validated."""
    seen: list[str] = []
    original = kv.write_request

    def counted(*args: Any) -> Any:
        seen.append("validated")
        return original(*args)

    monkeypatch.setattr(kv, "write_request", counted)
    kv._accepted.cache_clear()
    return seen


def test_a_like_write_is_validated_once_and_writes_its_own_rows(validated_writes: list[str]) -> None:
    for _ in range(3):
        made = writing()
        kv_write(**made)
        assert torch.equal(made["k_rows"][made["slot_mapping"]], made["k"])
        assert torch.equal(made["v_rows"][made["slot_mapping"]], made["v"])
    assert validated_writes == ["validated"]


@pytest.mark.parametrize(
    "changes",
    [
        {"k": torch.zeros(3, 4, 16).half()[:, :2]},
        {"v": torch.zeros(3, 4, 16).half()[:, :2]},
        {"k": torch.zeros(4, 2, 16).half(), "v": torch.zeros(4, 2, 16).half(), "slot_mapping": torch.arange(4)},
        {"slot_mapping": torch.tensor([4, 1, 3], dtype=torch.int32)},
        {"slot_mapping": torch.arange(6)[::2]},
        {"k_rows": torch.zeros(12, 2, 16).half()},
        {"k_rows": torch.zeros(13, 2, 16).half(), "v_rows": torch.zeros(13, 2, 16).half()},
        {"k_rows": torch.zeros(12, 2, 16, dtype=torch.uint8), "v_rows": torch.zeros(12, 2, 16, dtype=torch.uint8)},
        {
            **dict.fromkeys(("k_rows", "v_rows"), torch.zeros(12, 2, 16, dtype=torch.int8)),
            **dict.fromkeys(("k_scale", "v_scale"), torch.ones(2)),
        },
        {"backend": "torch"},
    ],
)
def test_a_write_that_differs_is_validated_again(validated_writes: list[str], changes: Arguments) -> None:
    kv_write(**writing())
    kv_write(**writing(**changes))
    assert len(validated_writes) == 2


def test_what_decides_for_a_write_is_looked_at_in_every_call(validated_writes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kv_write(**writing())
    set_perf_provider(set_perf_provider(None))
    kv_write(**writing())
    with overridden("triton_kv_write", None):
        kv_write(**writing())
    assert len(validated_writes) == 3
    monkeypatch.setenv(FORCE_BACKEND_VARIABLE, "nobody")
    with pytest.raises(BackendError):
        kv_write(**writing())


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"k": None}, ShapeError),
        ({"v": torch.zeros(3, 2, 16)}, ShapeError),
        ({"k": torch.zeros(3, 2, 16), "v": torch.zeros(3, 2, 16)}, DTypeError),
        ({"slot_mapping": torch.zeros(3)}, DTypeError),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, ShapeError),
        ({"slot_mapping": [1, 2, 3]}, ShapeError),
        ({"v_rows": torch.zeros(12, 2, 16).bfloat16()}, DTypeError),
        ({"k_scale": 1.0}, ScaleError),
    ],
)
def test_a_wrong_write_after_a_right_one_is_refused(changes: Arguments, error: type[RapidLLMError]) -> None:
    for _ in range(2):
        kv_write(**writing())
        with pytest.raises(error, match=r"^kv_write expected"):
            kv_write(**writing(**changes))


def test_a_write_to_a_cache_of_one_row_has_no_memory(validated_writes: list[str]) -> None:
    row = torch.zeros(1, 4, 16).half()
    for _ in range(2):
        kv_write(**writing(k_rows=row[:, :2], v_rows=row[:, 2:], slot_mapping=torch.tensor([0, -1, -1])))
    assert len(validated_writes) == 2
    assert kv._accepted.known == {}
