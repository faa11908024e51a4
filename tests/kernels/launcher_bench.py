"""Makes public calls on a stand-in device and holds what reaches the launcher by the direct path against what `JITFunction.run` gives it.

What `direct_launches` and `direct_writes` share; nothing is compiled or launched.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from asv_bench.stand_in import DEVICES, standing_in
from rapid_llm.kernels import direct_launch
from rapid_llm.kernels.ops.accepted import AcceptedCalls
from tests.kernels.stub_driver import Launch, StubDriver, installed

Call = Callable[[], object]
Case = Callable[["Bench"], list[str]]


def tensor(*shape: int, dtype: torch.dtype, strides: tuple[int, ...] | None = None, offset: int = 0) -> torch.Tensor:
    """One with these strides, its first element `offset` elements behind an aligned address; no memory is behind it."""
    strides = strides or tuple(torch.empty(shape, device="meta").stride())
    extent = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.empty(extent, dtype=dtype, device="cuda").as_strided(shape, strides, offset)


class Bench:
    """Makes calls and takes what reached the launcher."""

    def __init__(self, driver: StubDriver) -> None:
        self.driver = driver
        self.firsts = 0
        first = direct_launch.Launches.first

        def counted(launches: Any, *args: Any, **kwargs: Any) -> None:
            self.firsts += 1
            first(launches, *args, **kwargs)

        direct_launch.Launches.first = counted  # type: ignore[method-assign]

    def made(self, call: Call) -> tuple[Launch, bool]:
        """What a call launches, and whether it did so directly."""
        self.driver.launches.clear()
        before = self.firsts
        call()
        (launch,) = self.driver.launches
        return launch, self.firsts == before

    def by_triton(self, call: Call) -> Launch:
        """What the ordinary path launches for it."""
        with patched_run():
            launch, direct = self.made(call)
        assert not direct, "a patched JITFunction.run was passed over"
        return launch

    def anew(self, call: Call) -> Launch:
        """What it launches where no call was made before."""
        add = AcceptedCalls.add
        with (
            mock.patch.object(AcceptedCalls, "find", return_value=None),
            mock.patch.object(AcceptedCalls, "add", lambda known, key, *made: add(known, None, *made)),
        ):
            return self.made(call)[0]

    def differences(self, calls: dict[str, Call]) -> list[str]:
        """Makes all calls, makes them again in another order, and holds these against the ordinary path and against a call made anew."""
        for call in calls.values():
            self.made(call)
        problems = []
        for name in sorted(calls, reverse=True):
            launch, direct = self.made(calls[name])
            expected = self.by_triton(calls[name])
            if not direct:
                problems.append(f"{name}: not launched directly")
            if launch.told != expected.told:
                problems.append(f"{name}: {launch.told} is not {expected.told}")
            if launch.told != (made := self.anew(calls[name])).told:
                problems.append(f"{name}: {launch.told} is not {made.told}, which it would be had there been no like call")
            if launch.kernel.src.fn.arg_names != list(launch.kernel.src.signature) or len(launch.arguments) != len(
                launch.kernel.src.signature
            ):
                problems.append(f"{name}: {len(launch.arguments)} arguments for {len(launch.kernel.src.signature)} parameters")
        return problems


@contextlib.contextmanager
def patched_run() -> Iterator[None]:
    original = JITFunction.run
    with mock.patch.object(JITFunction, "run", lambda kernel, *args, **kwargs: original(kernel, *args, **kwargs)):
        yield


def shapes_only(*arguments: Any) -> tuple[Any, ...]:
    """A call form that forgets strides, dtypes, and what decides."""
    return tuple(one.shape if isinstance(one, torch.Tensor) else one for one in arguments)


def told_of(cases: Sequence[Case], kernels: Sequence[Any], mutated: Callable[[], Any]) -> dict[str, list[str]]:
    """What each case finds, on a driver of its own, under a context of `mutated`; `kernels` are those that are launched."""
    told = {}
    for case in cases:
        driver = StubDriver()
        with standing_in(DEVICES["sm_90"]), installed(driver), mutated():
            for kernel in kernels:
                kernel.device_caches.clear()
            first = direct_launch.Launches.first
            try:
                told[case.__name__] = case(Bench(driver))
            except (AssertionError, TypeError) as error:  # a plan of another form may not even fit the kernel's parameters
                told[case.__name__] = [str(error)]
            finally:
                direct_launch.Launches.first = first  # type: ignore[method-assign]
    return told
