# mypy: disable-error-code="no-untyped-call"
"""A stand-in for a CUDA device: the public call's own code path runs, no kernel does, and no GPU is needed.

Tensors are meta tensors that say they are on cuda:0: they have shapes, strides and offsets, and no memory. Triton is asked for a named
target and compiles exactly what a launch on that device would ask for. What launchers ask of the device (multiprocessors, L2, compute
capability) is answered from `DEVICES`, one named device an architecture.

What has to be known of values (`item`, `nonzero`) is answered as if every value were zero and every element counted; the inputs of a case
are built this way, and a launch that depended on them would be recorded for zeros.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import triton
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

KIB, MIB = 1024, 1024 * 1024

_REMEMBERING = (
    "rapid_llm.kernels.launch",
    "rapid_llm.kernels.paged_decode",
    "rapid_llm.kernels.workspace",
    "rapid_llm.kernels.ops.accepted",
    "rapid_llm.kernels.ops.attention",
    "rapid_llm.kernels.ops.checks",
    "rapid_llm.kernels.ops.kv",
)
"""Modules of the library that remember a device."""

_BASE_ALIGNMENT = 512
"""Bytes to which torch's CUDA allocator aligns a storage."""


@dataclass(frozen=True)
class Device:
    """What is stated of one device of an architecture.

    Attributes:
        name: The device that the figures are of.
        capability: (major, minor).
        multiprocessors: Of the device.
        l2_bytes: Of the device.
        warps, blocks: Most that can reside on a multiprocessor.
        shared_bytes: Shared memory of a multiprocessor.
        block_shared_bytes: Most of one block.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    l2_bytes: int
    warps: int
    blocks: int
    shared_bytes: int
    block_shared_bytes: int


DEVICES: dict[str, Device] = {
    "sm_80": Device("A100 SXM 80GB", (8, 0), 108, 40 * MIB, 64, 32, 164 * KIB, 163 * KIB),
    "sm_86": Device("A10", (8, 6), 72, 6 * MIB, 48, 16, 100 * KIB, 99 * KIB),
    "sm_89": Device("L4", (8, 9), 58, 48 * MIB, 48, 24, 100 * KIB, 99 * KIB),
    "sm_90": Device("H200", (9, 0), 132, 60 * MIB, 64, 32, 228 * KIB, 227 * KIB),
    "sm_100": Device("B200", (10, 0), 148, 126 * MIB, 64, 32, 228 * KIB, 227 * KIB),
    "sm_120": Device("RTX PRO 6000 Blackwell", (12, 0), 188, 128 * MIB, 48, 24, 100 * KIB, 99 * KIB),
}
"""Limits of a multiprocessor: CUDA C++ Programming Guide, technical specifications per compute capability. The rest: NVIDIA's
data sheets."""


class _Driver:
    """Answers what Triton's launcher asks of its driver."""

    def __init__(self, device: Device) -> None:
        major, minor = device.capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _OnMeta(TorchFunctionMode):
    """Makes every tensor a meta tensor that says it is on cuda:0."""

    _DEVICE = torch.Tensor.device.__get__
    _IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]  # a getter, which torch's stubs call a bool

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == self._DEVICE:
            return torch.device("cuda", 0)
        if func == self._IS_CUDA:
            return True
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.data_ptr:
            return _address(args[0])
        if func is torch.Tensor.tolist:
            return _zeros(tuple(args[0].shape), 0.0 if args[0].is_floating_point() else 0)
        kwargs = {name: _meta(value) for name, value in (kwargs or {}).items() if name != "generator"}
        if func in _factories():
            kwargs.setdefault("device", torch.device("meta"))
            if kwargs["device"] is None:
                kwargs["device"] = torch.device("meta")
        return func(*map(_meta, args), **kwargs)


@functools.cache
def _factories() -> frozenset[Any]:
    """Functions that make a tensor of no tensor, and take a device."""
    from torch.utils._device import _device_constructors

    return frozenset(_device_constructors())


def _meta(value: Any) -> Any:
    """`value`, where it names a device the meta device."""
    if isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] in ("cuda", "cpu")):
        return torch.device("meta")
    return value


def _zeros(shape: tuple[int, ...], zero: float) -> Any:
    return zero if not shape else [_zeros(shape[1:], zero) for _ in range(shape[0])]


def _address(tensor: torch.Tensor) -> int:
    """A number with the alignment that the tensor's first element has in an aligned storage."""
    return _BASE_ALIGNMENT + int(tensor.storage_offset()) * tensor.element_size()


class _Zeros(TorchDispatchMode):
    """Answers for values that are not there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet is torch.ops.aten._local_scalar_dense:
            return 0.0 if args[0].is_floating_point() else False if args[0].dtype == torch.bool else 0
        if packet is torch.ops.aten.nonzero:
            return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64, device="meta")
        return func(*args, **(kwargs or {}))


class _Generator(torch.Generator):
    """A generator of the CPU, whatever device is asked for: on the meta device nothing is drawn."""

    def __new__(cls, device: Any = None) -> _Generator:
        del device
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]  # torch's stubs know its __init__ only


def _forget_the_device(*modules: ModuleType) -> None:
    """Clears what the library has cached of a device."""
    own = {module.__name__ for module in modules}
    for module in modules:
        for value in vars(module).values():
            clear: Callable[[], None] | None = getattr(value, "cache_clear", None)
            if clear is not None and not isinstance(value, type) and getattr(value, "__module__", None) in own:
                clear()


@contextlib.contextmanager
def standing_in(device: Device) -> Iterator[torch.device]:
    """Within it cuda:0 is a device of that kind, and launches have to be intercepted (`asv_bench.launches.recorded`).

    Args:
        device: One of `DEVICES`, or one with the figures of a device at hand.
    Yields:
        torch.device("cuda", 0).
    """
    from rapid_llm.kv_cache import KVCacheManager

    def take(manager: Any, num_tokens: int) -> torch.Tensor:
        return torch.empty(num_tokens, dtype=torch.int32, device=manager.device)

    major, minor = device.capability
    properties = mock.Mock(multi_processor_count=device.multiprocessors, L2_cache_size=device.l2_bytes, major=major, minor=minor, spec=[])
    properties.name = device.name
    # The library may be that of an older commit, which lacks some of them.
    modules = [importlib.import_module(name) for name in _REMEMBERING if importlib.util.find_spec(name) is not None]
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Driver(device))
    _forget_the_device(*modules)
    try:
        with (
            mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
            mock.patch.object(torch.cuda, "get_device_capability", return_value=device.capability),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
            mock.patch.object(torch, "Generator", _Generator),
            mock.patch.object(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata),
            mock.patch.object(KVCacheManager, "alloc_kvcache_index", take),
            mock.patch.object(KVCacheManager, "release", return_value=None),
            _OnMeta(),
            _Zeros(),
        ):
            yield torch.device("cuda", 0)
    finally:
        triton.runtime.driver._active = before
        _forget_the_device(*modules)
