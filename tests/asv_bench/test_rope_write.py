"""The suite of a decode step's new tokens: its reference, what its check refuses, and its rows on a CPU."""

from typing import Any

import pytest
import torch

from asv_bench import bench_rope_write, verify_rope
from asv_bench.suite import Prepared, case_with
from asv_bench.verify import VerificationError
from rapid_llm.kernels.backends import torch_impl
from rapid_llm.kernels.ops.spec import load_target

CPU = torch.device("cpu")


def _prepared(kv_dtype: str, *, interleaved: bool = False) -> Prepared:
    case = bench_rope_write.RopeWriteDecode.cases[0]
    args = {**case.args, "num_tokens": 3, "kv_dtype": kv_dtype, "interleaved": interleaved}
    return bench_rope_write.RopeWriteDecode().build(case_with(case, kv_dtype=kv_dtype, args=args), CPU)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_reference_turns_pairs_by_their_angle(interleaved: bool) -> None:
    """A quarter turn takes (1, 0) to (0, 1) and (0, 1) to (-1, 0); the columns after the rotated ones stay."""
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0]]])
    cos_sin = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]])
    turned = verify_rope.rotation_reference(x, torch.tensor([1]), cos_sin, weight=None, norm_eps=0.0, interleaved=interleaved)
    assert turned.tolist() == [[[-2.0, 1.0, 3.0, 4.0, 5.0]]] if interleaved else [[[-3.0, 2.0, 1.0, 4.0, 5.0]]]
    normed = verify_rope.rotation_reference(
        x[..., :4], torch.tensor([0]), cos_sin, weight=torch.full((4,), 2.0), norm_eps=2.5, interleaved=interleaved
    )
    torch.testing.assert_close(normed, x[..., :4].double() * 2 / 10**0.5)


@pytest.mark.parametrize("kv_dtype", ["float16", "e4m3"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_row_passes_its_check_and_its_poison_does_not(kv_dtype: str, interleaved: bool) -> None:
    prepared = _prepared(kv_dtype, interleaved=interleaved)
    assert prepared.vary is not None
    for _ in range(2):
        prepared.poison()
        with pytest.raises(VerificationError):
            prepared.check()
        for call in prepared.calls:
            call()
        assert 0 < prepared.check() < 0.5
        prepared.vary()
        with pytest.raises(VerificationError):
            prepared.check()


FAULTS: dict[str, Any] = {
    "no norm": lambda given, known: (given, {**known, "q_weight": None, "k_weight": None}),
    "no eps but a large one": lambda given, known: (given, {**known, "norm_eps": 1e-2}),
    "the other style": lambda given, known: (given, {**known, "interleaved": not known["interleaved"]}),
    "the next position": lambda given, known: ((*given[:3], given[3] + 1, *given[4:]), known),
    "the weight of Q for K": lambda given, known: (given, {**known, "k_weight": known["q_weight"]}),
    "swapped sines and cosines": lambda given, known: ((*given[:4], given[4].roll(64, 1), *given[5:]), known),
    "K in the V half": lambda given, known: ((*given[:6], given[7], given[6], given[8]), known),
    "swapped scales": lambda given, known: (given, {**known, "k_scale": known["v_scale"], "v_scale": known["k_scale"]}),
    "rounded twice": lambda given, known: ((given[0], (given[1].float() * 1.001).half(), *given[2:]), known),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    right = torch_impl.rope_norm_kv_write

    def wrong(*given: Any, **known: Any) -> None:
        given, known = FAULTS[fault](given, known)
        right(*given, **known)

    monkeypatch.setattr(torch_impl, "rope_norm_kv_write", wrong)
    load_target.cache_clear()
    try:
        prepared = _prepared("e4m3")
        prepared.poison()
        for call in prepared.calls:
            call()
        with pytest.raises(VerificationError, match="norm, rotation and write"):
            prepared.check()
    finally:
        load_target.cache_clear()


def test_an_element_a_rounding_away_is_refused() -> None:
    reference = torch.randn(4, 64, dtype=torch.float64)
    for dtype in (torch.float16, torch.bfloat16):
        stored = reference.to(dtype)
        verify_rope.check_rotated(stored, reference, what="rounded")
        off = stored.clone()
        off[1, 2] = torch.nextafter(stored[1, 2], torch.tensor(9.0).to(dtype))
        off[1, 2] = torch.nextafter(off[1, 2], torch.tensor(9.0).to(dtype))
        with pytest.raises(VerificationError, match="1 of 256 elements"):
            verify_rope.check_rotated(off, reference, what="rounded")
    stored = (reference / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    verify_rope.check_rotated(stored, reference, scale=0.01, what="bytes")
    off = stored.clone()
    off[1, 2] += 1
    with pytest.raises(VerificationError, match="1 of 256 elements"):
        verify_rope.check_rotated(off, reference, scale=0.01, what="bytes")
