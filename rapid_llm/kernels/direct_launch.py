# mypy: disable-error-code="import-untyped"
"""Launches of one call form: the first goes through Triton's `JITFunction.run`, like ones go straight to the kernel that it chose.

`JITFunction.run` binds and specialises every argument of every call, and then looks the compiled kernel up. What it looks at is the dtype
of each pointer and whether its address is a multiple of 16; of each integer whether it is 1, a multiple of 16, or too large for 32 bits;
the constexprs and options; the device; what the process has set for debugging and instrumentation. Dtypes, integers, constexprs, options
and device are those of the form, so that a call has to be asked for the alignment of its pointers and for the state of the process only.

Source:
    triton 3.6.0 and 3.7.1: `JITFunction.run` in `runtime/jit.py`, `CompiledKernel.__getitem__` in `compiler/compiler.py`.
"""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

__all__ = ["Launches"]

_ALIGNMENT = 16
"""Bytes; what Triton asks of an address."""

_RUN, _SUBSCRIPT = JITFunction.run, JITFunction.__getitem__
_ARE_TRITONS = all(isinstance(own, types.FunctionType) and own.__module__ == JITFunction.__module__ for own in (_RUN, _SUBSCRIPT))
"""False where something had put its own functions in their place before this module was imported: then nothing is launched directly."""


class _Chosen(NamedTuple):
    """What Triton chose, the driver under which it did, and the globals that the kernel's code has read: namespace, name, value."""

    launch: Any
    active: Any
    read: tuple[tuple[dict[str, Any], str, Any], ...]


class Launches:
    """The launches of one call form.

    Args:
        kernel: The decorated kernel; its parameters are pointers, then factors (floats), integers and constexprs, in this order.
        grid: Programs, [3].
        integers: The integers, the same in every call.
        constants: The constexprs by name, and launch options.
        device: Where the tensors of every call are.
    """

    __slots__ = ("_chosen", "_constants", "_device", "_grid", "_integers", "_kernel", "_rest")

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], integers: tuple[int, ...], constants: dict[str, Any], device: torch.device
    ) -> None:
        self._kernel, self._grid, self._integers, self._constants, self._device = kernel, grid, integers, constants, device.index
        self._chosen: dict[tuple[bool, ...], _Chosen] = {}
        self._rest: tuple[Any, ...] = ()

    def again(self, pointers: tuple[int, ...], factors: tuple[float, ...]) -> bool:
        """Launches what Triton chose for a like call on the current stream; where it may not, does nothing and says False.

        Args:
            pointers: Addresses, in bytes, of what `first` takes as tensors.
            factors: As there.
        """
        chosen = self._chosen.get(_alignment(pointers))
        if chosen is None or not self._is_plain():
            return False
        active = driver.active
        if active is not chosen.active or active.get_current_device() != self._device:
            return False
        for namespace, name, value in chosen.read:
            if namespace.get(name) is not value:  # Triton refuses such a launch
                return False
        chosen.launch(*pointers, *factors, *self._rest, stream=active.get_current_stream(self._device))
        return True

    def first(self, tensors: tuple[torch.Tensor, ...], factors: tuple[float, ...], *, keep: bool) -> None:
        """Launches through Triton, on the current stream.

        Args:
            tensors: The pointers.
            factors: Python floats.
            keep: Whether `again` may be asked for like calls: those with tensors of the same dtypes.
        """
        keep = keep and self._is_plain()
        active = driver.active if keep else None
        compiled = self._kernel[self._grid](*tensors, *factors, *self._integers, **self._constants)
        if not (keep and self._is_plain() and self._is_current(active) and type(compiled) is CompiledKernel):
            return
        if compiled.metadata.target.backend != "cuda":  # another specialises on more, AMD's on the size of a tensor's storage
            return
        given = len(tensors) + len(factors) + len(self._integers)
        self._rest = (*self._integers, *(self._constants.get(param.name, param.default) for param in self._kernel.params[given:]))
        read = tuple((space, name, space.get(name)) for (name, _), (_, space) in self._kernel.used_global_vals.items())
        key = _alignment(tuple(tensor.data_ptr() for tensor in tensors))
        self._chosen[key] = _Chosen(compiled[self._grid], active, read)

    def _is_current(self, active: Any) -> bool:
        return active is driver.active and bool(active.get_current_device() == self._device)

    def _is_plain(self) -> bool:
        """Whether Triton would do no more for a launch of the kernel than look it up and start it.

        Not so for the interpreter, where `run` or `[grid]` is patched (launch records, the stand-in device), and with hooks (profilers),
        debugging or instrumentation.
        """
        kernel, runtime = self._kernel, knobs.runtime
        return (
            type(kernel) is JITFunction
            and JITFunction.run is _RUN
            and JITFunction.__getitem__ is _SUBSCRIPT
            and _ARE_TRITONS
            and "run" not in kernel.__dict__
            and not (kernel.pre_run_hooks or kernel.debug or runtime.debug or knobs.compilation.instrumentation_mode)
            # A chain of hooks is without effect while it is empty.
            and not getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook)
            and not getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook)
            and runtime.add_stages_inspection_hook is None
        )


def _alignment(pointers: tuple[int, ...]) -> tuple[bool, ...]:
    """Which of them are misaligned for Triton; empty where none is."""
    bits = 0
    for pointer in pointers:
        bits |= pointer
    return tuple(pointer % _ALIGNMENT != 0 for pointer in pointers) if bits % _ALIGNMENT else ()
