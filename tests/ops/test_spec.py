"""What a spec declares: layout algebra, limits, preferences, lazy targets."""

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rapid_llm.errors import RegistryError
from rapid_llm.kernels.ops.spec import (
    KernelSpec,
    LayoutRequirement,
    Preference,
    Request,
    ShapeLimit,
    load_target,
)

TAGS = st.frozensets(st.sampled_from(["kv:paged", "kv:row-table", "kv:combined", "kv:split", "kv:contiguous"]))

REQUEST = Request(
    op="op",
    device_type="cuda",
    capability=(8, 6),
    q_dtype="float16",
    kv_dtype="e4m3",
    layout_tags=frozenset({"kv:paged"}),
    shape=Request.sorted_shape({"head_dim": 96, "batch": 3}),
)


def spec(**changes: object) -> KernelSpec:
    fields = {
        "name": "one", "op": "op", "target": "math:sqrt", "backend": "b", "device_types": ("cuda",),
        "q_dtypes": ("float16",), "kv_dtypes": ("e4m3",),
    }  # fmt: skip
    return KernelSpec(**{**fields, **changes})  # type: ignore[arg-type]


@given(required=TAGS, forbidden=TAGS, tags=TAGS)
def test_layout_requirement_is_set_algebra(required: frozenset[str], forbidden: frozenset[str], tags: frozenset[str]) -> None:
    """R74."""
    requirement = LayoutRequirement(required=tuple(required), forbidden=tuple(forbidden))
    assert set(requirement.missing(tags)) == required - tags
    assert set(requirement.unwanted(tags)) == forbidden & tags
    assert requirement.accepts(tags) == (required <= tags and forbidden.isdisjoint(tags))
    assert requirement.missing(tags) == tuple(sorted(requirement.missing(tags)))


@given(required=TAGS, tags=TAGS, more=TAGS)
def test_more_tags_never_miss_more(required: frozenset[str], tags: frozenset[str], more: frozenset[str]) -> None:
    """R74."""
    requirement = LayoutRequirement(required=tuple(required))
    assert set(requirement.missing(tags | more)) <= set(requirement.missing(tags))


def test_every_reason_in_a_fixed_order() -> None:
    rejecting = spec(
        device_types=("cpu",),
        min_capability=(9, 0),
        probe=f"{__name__}:_never_available",
        q_dtypes=("bfloat16",),
        kv_dtypes=("float16",),
        layout=LayoutRequirement(required=("kv:row-table", "kv:combined"), forbidden=("kv:paged",)),
        shape_limits=(ShapeLimit("head_dim", maximum=64), ShapeLimit("batch", minimum=4)),
    )
    assert rejecting.rejections(REQUEST) == (
        "device type cuda is not one of cpu",
        "compute capability 8.6 is below 9.0",
        "not available: never for float16",
        "q dtype float16 is not one of bfloat16",
        "kv dtype e4m3 is not one of float16",
        "layout tag kv:combined is missing",
        "layout tag kv:row-table is missing",
        "layout tag kv:paged is not supported",
        "head_dim 96 is above 64",
        "batch 3 is below 4",
    )
    assert spec().rejections(REQUEST) == ()


def _never_available(request: Request) -> str:
    return f"never for {request.q_dtype}"


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        (ShapeLimit("head_dim", multiple_of=64), "head_dim 96 is no multiple of 64 (kv e4m3)"),
        (ShapeLimit("head_dim", multiple_of=64, kv_dtypes=("float16",)), None),
        (ShapeLimit("head_dim", minimum=96, maximum=96, multiple_of=32), None),
        (ShapeLimit("no_such_dim", maximum=0), None),
    ],
)
def test_shape_limit(limit: ShapeLimit, reason: str | None) -> None:
    assert limit.reason(REQUEST) == reason


def test_preference_score_counts_those_that_hold() -> None:
    preferences = (
        Preference("always"),
        Preference("cuda", device_types=("cuda",)),
        Preference("cpu", device_types=("cpu",)),
        Preference("both parts", device_types=("cuda",), kv_dtypes=("float16",)),
        Preference("paged", layout=LayoutRequirement(required=("kv:paged",))),
        Preference("combined", layout=LayoutRequirement(required=("kv:combined",))),
        Preference("aligned", shapes=(ShapeLimit("head_dim", multiple_of=32),)),
        Preference("power of two", shapes=(ShapeLimit("head_dim", multiple_of=64),)),
    )
    assert spec(preferences=preferences).preference_score(REQUEST) == 4


def test_spec_is_frozen_and_hashable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec().name = "other"  # type: ignore[misc]
    assert hash(spec()) == hash(spec())
    assert {REQUEST: 1}[dataclasses.replace(REQUEST)] == 1


@pytest.mark.parametrize("target", ["math", "math:", ":sqrt", "math:no_such", "no_such_module_at_all:f", "math:pi"])
def test_a_bad_target_says_so(target: str) -> None:
    with pytest.raises(RegistryError, match="correct the KernelSpec"):
        load_target(target)


def test_a_target_is_loaded_when_called_for() -> None:
    assert spec().load()(9.0) == 3.0


def test_declaring_specs_imports_no_triton() -> None:
    """R1: the rows are declarations; their kernels are imported at the first call."""
    script = "import sys; from rapid_llm.kernels import backends; print('triton' in sys.modules, len(backends.SPECS))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "12"]


def test_the_package_imports_no_torch() -> None:
    script = "import sys; import rapid_llm; print('torch' in sys.modules, rapid_llm.__version__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False ")
