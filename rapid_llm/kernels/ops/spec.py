"""What a kernel declares about itself, and what a call asks for. Free of torch and triton.

`rapid_llm.kernels.backends` imports this module, and nothing else of `ops`.
"""

from __future__ import annotations

import datetime
import functools
import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rapid_llm.errors import RegistryError

__all__ = ["GoldenRecord", "KernelSpec", "LayoutRequirement", "Measurement", "Preference", "Request", "ShapeLimit", "load_target"]


@dataclass(frozen=True)
class Request:
    """What one call needs from a kernel. Hashable: decisions are cached by it.

    Attributes:
        op: Name of the operation, such as "paged_decode_attention".
        device_type: torch's device type, "cpu" or "cuda".
        capability: (major, minor) of a CUDA device; None elsewhere.
        q_dtype: "float16", "bfloat16" or "float32": the dtype of the operand that is computed with or written.
        kv_dtype: "float16", "bfloat16", "e4m3" or "int8": the dtype of the cache; the uint8 container is "e4m3".
        layout_tags: Tags that the call's tensors satisfy, see `rapid_llm.kernels.ops.layout.layout_tags`.
        shape: Sorted (name, size) pairs.
    """

    op: str
    device_type: str
    capability: tuple[int, int] | None
    q_dtype: str
    kv_dtype: str
    layout_tags: frozenset[str]
    shape: tuple[tuple[str, int], ...]

    @staticmethod
    def sorted_shape(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        """The form that `shape` takes."""
        return tuple(sorted(sizes.items()))

    def size(self, name: str) -> int | None:
        """Size of the named dimension, None where the request has none of that name."""
        return dict(self.shape).get(name)

    def describe(self) -> str:
        """One line: device, dtypes, layout tags, shape."""
        where = self.device_type if self.capability is None else f"{self.device_type} {_dotted(self.capability)}"
        sizes = ", ".join(f"{name}={size}" for name, size in self.shape)
        tags = ", ".join(sorted(self.layout_tags)) or "none"
        return f"{where}; q {self.q_dtype}, kv {self.kv_dtype}; layout tags: {tags}; {sizes}"


@dataclass(frozen=True)
class LayoutRequirement:
    """Which layout tags a kernel needs, and which it cannot take: plain set algebra."""

    required: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()

    def missing(self, tags: Collection[str]) -> tuple[str, ...]:
        """Required tags that are not among `tags`, sorted."""
        return tuple(sorted(set(self.required) - set(tags)))

    def unwanted(self, tags: Collection[str]) -> tuple[str, ...]:
        """Forbidden tags that are among `tags`, sorted."""
        return tuple(sorted(set(self.forbidden) & set(tags)))

    def accepts(self, tags: Collection[str]) -> bool:
        """Whether nothing is missing and nothing unwanted."""
        return not self.missing(tags) and not self.unwanted(tags)


@dataclass(frozen=True)
class GoldenRecord:
    """Outcome of a kernel's check against its reference.

    Attributes:
        verified: Whether the check passed; False takes the kernel out of every unforced dispatch.
        max_abs_diff: Largest absolute difference seen, None where none was stored.
    """

    verified: bool
    max_abs_diff: float | None = None


@dataclass(frozen=True)
class Measurement:
    """A measured time and where it comes from.

    Attributes:
        latency_ms: Of one call, in milliseconds.
        source: The measured case, device and commit, for `explain()`.
        measured_at: When, with its time zone.
    """

    latency_ms: float
    source: str
    measured_at: datetime.datetime


@dataclass(frozen=True)
class ShapeLimit:
    """Hard limit on one dimension of a request's shape; a request without that dimension is not limited.

    Attributes:
        dim: Name of the dimension.
        minimum, maximum: Inclusive bounds; None means unbounded.
        multiple_of: The size must be divisible by this.
        one_of: The size must be one of these; empty means any.
        kv_dtypes: The limit holds for these cache dtypes only; empty means all.
    """

    dim: str
    minimum: int | None = None
    maximum: int | None = None
    multiple_of: int = 1
    kv_dtypes: tuple[str, ...] = ()
    one_of: tuple[int, ...] = ()

    def reason(self, request: Request) -> str | None:
        """Why `request` breaks the limit, None where it does not."""
        size = request.size(self.dim)
        if size is None or (self.kv_dtypes and request.kv_dtype not in self.kv_dtypes):
            return None
        if self.minimum is not None and size < self.minimum:
            return f"{self.dim} {size} is below {self.minimum}"
        if self.maximum is not None and size > self.maximum:
            return f"{self.dim} {size} is above {self.maximum}"
        if size % self.multiple_of:
            return f"{self.dim} {size} is no multiple of {self.multiple_of} (kv {request.kv_dtype})"
        if self.one_of and size not in self.one_of:
            return f"{self.dim} {size} is not one of {_listed(tuple(map(str, self.one_of)))}"
        return None


@dataclass(frozen=True)
class Preference:
    """A named condition under which a kernel does well; it holds where every part that is given holds."""

    name: str
    device_types: tuple[str, ...] = ()
    kv_dtypes: tuple[str, ...] = ()
    layout: LayoutRequirement = LayoutRequirement()
    shapes: tuple[ShapeLimit, ...] = ()

    def holds(self, request: Request) -> bool:
        """Whether `request` meets the condition."""
        return (
            (not self.device_types or request.device_type in self.device_types)
            and (not self.kv_dtypes or request.kv_dtype in self.kv_dtypes)
            and self.layout.accepts(request.layout_tags)
            and all(limit.reason(request) is None for limit in self.shapes)
        )


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """One row of a backend: what it computes, where, on what, and how it is called.

    Attributes:
        name: Unique name; measured rows carry it.
        op: The operation it serves.
        target: "module:attribute" of the callable, imported at the first call only.
        backend: "torch", "triton", …: the name that forces it.
        device_types: Device types it runs on.
        min_capability: Lowest CUDA compute capability; None means any.
        q_dtypes, kv_dtypes: Dtypes it takes, named as in `Request`.
        layout: Layout tags it needs.
        shape_limits: Hard limits.
        preferences: Conditions it does well under; `preference_score` counts those that hold.
        priority: Tie-break after measurements and preferences; higher first.
        golden: Outcome of its verification; None means that nothing is recorded.
        config: "module:attribute" of the class of its tunable config, whose instance the callable takes as `config`; None where
            nothing is tuned.
        probe: "module:attribute" of `probe(request) -> str | None`, the reason why it is not available here.
        remembers: Whether the callable takes `memory`, a dictionary that like calls share: those that differ in the contents and addresses
            of tensors (V being as far from K) and in the values of scales only. It may keep there what follows from the rest.
    """

    name: str
    op: str
    target: str
    backend: str
    device_types: tuple[str, ...]
    q_dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    min_capability: tuple[int, int] | None = None
    layout: LayoutRequirement = LayoutRequirement()
    shape_limits: tuple[ShapeLimit, ...] = ()
    preferences: tuple[Preference, ...] = ()
    priority: int = 0
    golden: GoldenRecord | None = None
    config: str | None = None
    probe: str | None = None
    remembers: bool = False

    def load(self) -> Callable[..., Any]:
        """The callable behind `target`.

        Raises:
            RegistryError: `target` is malformed, or names no attribute of an importable module.
        """
        return load_target(self.target)

    def preference_score(self, request: Request) -> int:
        """How many of `preferences` hold for `request`."""
        return sum(preference.holds(request) for preference in self.preferences)

    def rejections(self, request: Request) -> tuple[str, ...]:
        """Every reason why this kernel cannot serve `request`; empty where it can.

        The order is fixed: device, capability, availability, q dtype, kv dtype, layout, shape.
        """
        reasons: list[str] = []
        if request.device_type not in self.device_types:
            reasons.append(f"device type {request.device_type} is not one of {_listed(self.device_types)}")
        if self.min_capability and request.capability and request.capability < self.min_capability:
            needed, found = _dotted(self.min_capability), _dotted(request.capability)
            reasons.append(f"compute capability {found} is below {needed}")
        if self.probe is not None:
            unavailable = load_target(self.probe)(request)
            if unavailable is not None:
                reasons.append(f"not available: {unavailable}")
        if request.q_dtype not in self.q_dtypes:
            reasons.append(f"q dtype {request.q_dtype} is not one of {_listed(self.q_dtypes)}")
        if request.kv_dtype not in self.kv_dtypes:
            reasons.append(f"kv dtype {request.kv_dtype} is not one of {_listed(self.kv_dtypes)}")
        reasons += [f"layout tag {tag} is missing" for tag in self.layout.missing(request.layout_tags)]
        reasons += [f"layout tag {tag} is not supported" for tag in self.layout.unwanted(request.layout_tags)]
        reasons += [reason for limit in self.shape_limits if (reason := limit.reason(request)) is not None]
        return tuple(reasons)

    def requirements(self) -> str:
        """One line: the layout tags and dtypes that this kernel requires."""
        text = f"requires layout tags {_listed(self.layout.required)}"
        if self.layout.forbidden:
            text += f" without {_listed(self.layout.forbidden)}"
        return f"{text}; q {_listed(self.q_dtypes, '|')}; kv {_listed(self.kv_dtypes, '|')}"


@functools.cache
def load_target(target: str) -> Callable[..., Any]:
    """Imports "module:attribute".

    Raises:
        RegistryError: The text is malformed, or names no attribute of an importable module.
    """
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        raise RegistryError(f'A kernel target is "module:attribute", got {target!r}; correct the KernelSpec.')
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise RegistryError(f"Kernel target {target!r} cannot be loaded ({error}); correct the KernelSpec.") from error
    if not callable(found):
        raise RegistryError(f"Kernel target {target!r} is no callable but {found!r}; correct the KernelSpec.")
    return found  # type: ignore[no-any-return]


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _listed(names: tuple[str, ...], separator: str = ", ") -> str:
    return separator.join(names) or "none"
