"""Filtering, ranking, forcing, explaining (R3, R30, R67, R68, R69, R72, R74, R76)."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rapid_llm.kernels.ops as ops
from rapid_llm.errors import BackendError, NoKernelError, PerfProviderError
from rapid_llm.kernels.ops import registry
from rapid_llm.kernels.ops.dispatch import FORCE_BACKEND_VARIABLE, dispatch, set_perf_provider
from rapid_llm.kernels.ops.spec import GoldenRecord, KernelSpec, LayoutRequirement, Preference, Request

pytestmark = pytest.mark.usefixtures("isolated")

VERIFIED = GoldenRecord(verified=True, max_abs_diff=1e-3)
REQUEST = Request("op", "cpu", None, "float16", "float16", frozenset({"kv:paged"}), (("batch", 1),))


def add(name: str, **changes: Any) -> KernelSpec:
    fields = {
        "op": "op", "target": "math:sqrt", "backend": "torch", "device_types": ("cpu",), "q_dtypes": ("float16",),
        "kv_dtypes": ("float16",), "golden": VERIFIED,
    }  # fmt: skip
    spec = KernelSpec(name=name, **{**fields, **changes})
    registry.register(spec)
    return spec


def measured(**milliseconds: Any) -> None:
    set_perf_provider(lambda spec, _: milliseconds.get(spec.name))


@given(rows=st.lists(st.tuples(st.sampled_from([None, 0.5, 1.0, 2.0]), st.integers(0, 2), st.integers(-1, 1)), min_size=1, max_size=6))
def test_ranks_on_perf_then_preference_then_priority_then_name(rows: list[tuple[float | None, int, int]]) -> None:
    """R67."""
    with registry.isolated():
        perf: dict[str, float | None] = {}
        expected = []
        for place, (perf_ms, score, priority) in enumerate(rows):
            name = f"spec{(place * 7) % 10}"
            add(name, preferences=(Preference("always"),) * score, priority=priority)
            perf[name] = perf_ms
            expected.append((math.inf if perf_ms is None else perf_ms, -score, -priority, name))
        set_perf_provider(lambda spec, _: perf[spec.name])
        selection = dispatch(REQUEST)
        assert [candidate.rank_key for candidate in selection.ranking] == sorted(expected)
        assert selection.spec.name == min(expected)[3]


def test_swapped_measurements_swap_the_choice() -> None:
    """R3."""
    add("a")
    add("b")
    measured(a=1.0, b=2.0)
    assert dispatch(REQUEST).spec.name == "a"
    measured(a=2.0, b=1.0)
    assert dispatch(REQUEST).spec.name == "b"


def test_real_rows_swap_with_their_measurements() -> None:
    """R3, R69: on the registered rows, given in milliseconds; a second torch row stands in for another backend."""
    torch_row = registry.get("torch_paged_decode")
    registry.register(KernelSpec(**{**vars(torch_row), "name": "torch_paged_decode_2"}))
    for name in ("torch_paged_decode", "torch_paged_decode_2"):
        registry.record_golden(name, VERIFIED)
    tags = frozenset({"kv:paged", "kv:row-table"})
    request = Request("paged_decode_attention", "cpu", None, "float16", "e4m3", tags, (("head_dim", 128),))
    measured(torch_paged_decode=0.025, torch_paged_decode_2=0.024)
    assert dispatch(request).spec.name == "torch_paged_decode_2"
    measured(torch_paged_decode=0.024, torch_paged_decode_2=0.025)
    assert dispatch(request).spec.name == "torch_paged_decode"


def test_the_provider_is_not_re_exported() -> None:
    """R68."""
    assert not hasattr(ops, "set_perf_provider")


def test_an_unverified_spec_is_not_chosen_however_fast() -> None:
    """R72."""
    add("right")
    add("wrong", golden=GoldenRecord(verified=False, max_abs_diff=0.7))
    measured(right=5.0, wrong=0.1)
    selection = dispatch(REQUEST)
    assert selection.spec.name == "right"
    assert "wrong: its verification failed (max_abs_diff 0.7)" in selection.explain()


def test_without_a_record_a_measurement_does_not_count() -> None:
    """R72, R73: it stays eligible, and explain() says why its time is passed over."""
    add("recorded")
    add("unrecorded", golden=None, priority=9)
    measured(recorded=5.0, unrecorded=0.1)
    selection = dispatch(REQUEST)
    assert selection.spec.name == "recorded"
    assert "measured 0.1 ms, which does not count: no golden record" in selection.explain()
    registry.record_golden("unrecorded", VERIFIED)
    assert dispatch(REQUEST).spec.name == "unrecorded"


def test_a_missing_tag_is_named_and_nothing_takes_over_silently() -> None:
    """R76."""
    add("needs_more", layout=LayoutRequirement(required=("kv:paged", "kv:combined")))
    with pytest.raises(NoKernelError, match="needs_more: layout tag kv:combined is missing"):
        dispatch(REQUEST)
    add("serves", layout=LayoutRequirement(required=("kv:paged",)))
    selection = dispatch(REQUEST)
    assert selection.spec.name == "serves"
    assert "needs_more: layout tag kv:combined is missing" in selection.explain()


def test_explain_in_full() -> None:
    """R30: required tags and dtypes, the winner, the runners-up with their keys, each rejection with its reasons."""
    add("fast", layout=LayoutRequirement(required=("kv:paged",)), preferences=(Preference("p"),))
    add("slow", priority=2)
    add("other_device", device_types=("cuda",), kv_dtypes=("e4m3", "bfloat16"))
    measured(fast=0.25, slow=4.0)
    assert dispatch(REQUEST).explain() == "\n".join(
        [
            "op: fast",
            "  request: cpu; q float16, kv float16; layout tags: kv:paged; batch=1",
            "  ranked on (perf, -preference_score, -priority, name):",
            "    1. fast (0.25 ms, -1, 0, fast): measured and verified",
            "       requires layout tags kv:paged; q float16; kv float16",
            "    2. slow (4 ms, 0, -2, slow): measured and verified",
            "       requires layout tags none; q float16; kv float16",
            "  rejected:",
            "    other_device: device type cpu is not one of cuda; kv dtype float16 is not one of e4m3, bfloat16",
            "       requires layout tags none; q float16; kv e4m3|bfloat16",
        ]
    )


def test_no_candidate_lists_every_spec_with_every_reason() -> None:
    add("a", q_dtypes=("bfloat16",), kv_dtypes=("e4m3",))
    add("b", golden=GoldenRecord(verified=False))
    with pytest.raises(NoKernelError) as caught:
        dispatch(REQUEST)
    message = str(caught.value)
    assert "a: q dtype float16 is not one of bfloat16; kv dtype float16 is not one of e4m3" in message
    assert "b: its verification failed (max_abs_diff None)" in message


def test_no_spec_at_all() -> None:
    with pytest.raises(NoKernelError, match="No spec is registered for that op"):
        dispatch(REQUEST)


@pytest.mark.parametrize("by_variable", [True, False])
def test_forcing_bypasses_the_golden_gate_only(monkeypatch: pytest.MonkeyPatch, by_variable: bool) -> None:
    add("preferred")
    add("forced", backend="triton", golden=GoldenRecord(verified=False))
    add("unfit", backend="triton", q_dtypes=("bfloat16",))
    measured(preferred=1.0, forced=2.0)
    assert dispatch(REQUEST).spec.name == "preferred"
    if by_variable:
        monkeypatch.setenv(FORCE_BACKEND_VARIABLE, "triton")
    selection = dispatch(REQUEST, backend=None if by_variable else "triton")
    assert selection.spec.name == "forced"
    source = "RAPID_LLM_FORCE_BACKEND=triton" if by_variable else 'backend="triton"'
    assert f"forced by {source}" in selection.explain()
    assert f"preferred: backend torch is not the one that {source} names" in selection.explain()
    assert "unfit: q dtype float16 is not one of bfloat16" in selection.explain()
    assert "measured 2 ms, which does not count: verification failed" in selection.explain()


def test_a_forced_backend_never_falls_back() -> None:
    add("torch_row")
    with pytest.raises(NoKernelError, match='with backend="triton"'):
        dispatch(REQUEST, backend="triton")


def test_an_argument_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    add("torch_row")
    monkeypatch.setenv(FORCE_BACKEND_VARIABLE, "triton")
    assert dispatch(REQUEST, backend="torch").forced == 'backend="torch"'


def test_an_unknown_backend_names_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    add("torch_row")
    with pytest.raises(BackendError, match='sdpa-math, torch, triton, got backend="cuda"'):
        dispatch(REQUEST, backend="cuda")
    monkeypatch.setenv(FORCE_BACKEND_VARIABLE, "trition")
    with pytest.raises(BackendError, match="sdpa-math, torch, triton, got RAPID_LLM_FORCE_BACKEND=trition"):
        dispatch(REQUEST)


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.nan, math.inf, -math.inf, "1.0", True, [1.0]])
def test_a_provider_that_gives_no_time_is_reported(value: Any) -> None:
    add("row")
    set_perf_provider(lambda spec, request: value)
    with pytest.raises(PerfProviderError, match=r"gave .* for row, expected a positive finite number of milliseconds"):
        dispatch(REQUEST)


def test_a_provider_that_raises_is_reported() -> None:
    add("row")
    measured_us: dict[str, float] = {}
    set_perf_provider(lambda spec, request: measured_us[spec.name])
    with pytest.raises(PerfProviderError, match="raised KeyError for row") as caught:
        dispatch(REQUEST)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_decision_is_cached_until_something_that_decides_changes() -> None:
    add("a")
    asked = []

    def provider(spec: KernelSpec, request: Request) -> float:
        asked.append(spec.name)
        return 1.0

    set_perf_provider(provider)
    assert dispatch(REQUEST) is dispatch(REQUEST)
    assert asked == ["a"]
    add("b")
    dispatch(REQUEST)
    registry.record_golden("a", VERIFIED)
    dispatch(REQUEST)
    assert asked == ["a", "a", "b", "a", "b"]
    assert set_perf_provider(None) is provider
    dispatch(REQUEST)
    assert len(asked) == 5


def test_on_a_cpu_torch_serves_and_the_interpreter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tags = frozenset({"kv:paged", "kv:row-table", "kv:16bit-aligned"})
    request = Request("paged_decode_attention", "cpu", None, "float16", "e4m3", tags, (("head_dim", 128),))
    selection = dispatch(request)
    assert selection.spec.name == "torch_paged_decode"
    assert "triton_paged_decode: not available: Triton compiles for no cpu" in selection.explain()


def test_on_a_gpu_triton_serves_from_8_0_on() -> None:
    """R106: what the registered rows say of devices that are not here."""
    tags = frozenset({"kv:paged", "kv:row-table", "kv:16bit-aligned", "kv:combined"})
    for capability in [(8, 0), (8, 6), (9, 0), (10, 0)]:
        request = Request("paged_decode_attention", "cuda", capability, "float16", "e4m3", tags, (("head_dim", 128),))
        assert dispatch(request).spec.name == "triton_paged_decode"
    old = Request("paged_decode_attention", "cuda", (7, 5), "float16", "e4m3", tags, (("head_dim", 128),))
    assert dispatch(old).spec.name == "torch_paged_decode"
    assert "triton_paged_decode: compute capability 7.5 is below 8.0" in dispatch(old).explain()


@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "tag", "reason"),
    [
        ("e4m3", 128, "", "layout tag kv:16bit-aligned is missing"),
        ("e4m3", 63, "kv:16bit-aligned", "head_dim 63 is no multiple of 2"),
        ("float16", 320, "kv:16bit-aligned", "head_dim 320 is above 256"),
    ],
)
def test_what_triton_decode_does_not_take(kv_dtype: str, head_dim: int, tag: str, reason: str) -> None:
    tags = frozenset({"kv:paged", "kv:row-table", tag})
    shape = (("head_dim", head_dim),)
    selection = dispatch(Request("paged_decode_attention", "cuda", (9, 0), "float16", kv_dtype, tags, shape))
    assert selection.spec.name == "torch_paged_decode"
    assert reason in selection.explain()
