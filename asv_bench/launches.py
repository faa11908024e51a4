# mypy: disable-error-code="no-untyped-call"
"""The launch record of a call: what it starts on the device, in order.

A Triton launch is its machine code, grid, block, scalar arguments, and the dtype and alignment of its tensors; a torch operation is its
name with the shapes and dtypes of its arguments. Names of kernels and arguments, line numbers and addresses are not part of it: a rename
changes nothing. What the tensors hold is not part of it either (`input_hash` of a row's record is).

A call form is recorded twice. A call that goes through Triton's `JITFunction.run` is noted there (`record`). A like one may pass `run` over
(`rapid_llm.kernels.direct_launch`) and is noted where every launch ends: at the launcher of the compiled kernel (`record_like`).
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rapid_llm
from asv_bench import machine_code
from asv_bench.suite import Prepared

_DIRECT = "kernels/direct_launch.py"
_BEFORE_ARGUMENTS = 6
"""What a launcher is given between the grid and the kernel's arguments: stream, function, two kinds of metadata, two hooks."""
_NO_KERNEL = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias", "detach"}
)
"""Operations that start nothing on the device though they are no views."""


@dataclass
class Launch:
    """One kernel.

    Attributes:
        kind: "triton" or "torch".
        name: The kernel's function, or the torch operation; of a Triton kernel it is not part of the identity.
        code: Of a Triton kernel `machine_code.code_hash`.
        grid: Programs, [3].
        threads: Of a block.
        shared_bytes: Dynamic shared memory of a block.
        arguments: Scalars as they are, tensors by dtype and alignment (a torch operation's also by shape).
        direct: Whether a Triton kernel was started without `JITFunction.run`: its launcher was given addresses in place of tensors.
        kernel: The compiled kernel, for who wants its figures.
        ptxas_log: What ptxas said, where this very launch compiled it.
    """

    kind: str
    name: str
    code: str = ""
    grid: tuple[int, ...] = ()
    threads: int = 0
    shared_bytes: int = 0
    arguments: tuple[str, ...] = ()
    direct: bool = False
    kernel: Any = field(default=None, repr=False)
    ptxas_log: str = field(default="", repr=False)

    def record(self) -> dict[str, Any]:
        """The launch as JSON."""
        names = ("kind", "name", "code", "grid", "threads", "shared_bytes", "arguments", "direct")
        made = {name: getattr(self, name) for name in names}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in made.items()}


class Recorded(NamedTuple):
    """What the calls of one form start.

    Attributes:
        first: A call that goes through `JITFunction.run`, as the first of a form does.
        like: A like one, with other tensors.
    """

    first: list[Launch]
    like: list[Launch]


def hash_of(recorded: Recorded) -> str:
    """Identity of what a form's calls start: 16 hex digits; the name of a Triton kernel does not count.

    The code that launches like calls is part of the identity of a Triton launch: it may do what no record shows, such as wait.
    """
    told: list[Any] = [[_identity(launch) for launch in made] for made in recorded]
    direct = Path(rapid_llm.__file__).parent / _DIRECT
    if any(launch.kind == "triton" for made in recorded for launch in made) and direct.is_file():
        told.append({"like calls": syntax_hash(direct.read_text(encoding="utf-8"))})
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def _identity(launch: Launch) -> dict[str, Any]:
    return {**launch.record(), "name": "" if launch.kind == "triton" else launch.name}


def syntax_hash(source: str) -> str:
    """Identity of what Python code does: comments, layout and docstrings are not part of it. 16 hex digits."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [line for line in body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))]  # type: ignore[attr-defined]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def row_hash(prepared: Prepared) -> str:
    """Identity of what the calls of a prepared row start; three more are made."""
    return hash_of(record_form(prepared.calls, reset=prepared.reset))


def record_form(calls: Sequence[Callable[[], object]], *, reset: Callable[[], object] | None = None, launch: bool = True) -> Recorded:
    """Makes calls of one form and records what they start.

    Args:
        calls: Of one form, each with tensors of its own; the first two are made.
        reset: Brings the state back before each call.
        launch: As of `record`.
    """
    before = reset or (lambda: None)
    before()
    return Recorded(record(calls[0], launch=launch), record_like(calls[0], calls[1 % len(calls)], reset=before, launch=launch))


def record(call: Callable[[], object], *, launch: bool = True) -> list[Launch]:
    """Makes the call once and records what it starts.

    Args:
        call: One public call.
        launch: False compiles the kernels and starts none; for `asv_bench.stand_in`, where there is no device.
    """
    with recorded(launch=launch) as launches:
        call()
    return launches


@contextlib.contextmanager
def recorded(*, launch: bool = True) -> Iterator[list[Launch]]:
    """Records the launches within it; see `record`."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    original = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        with told_by_ptxas() as said:
            compiled = original(kernel, *args, grid=grid, warmup=warmup or not launch, **kwargs)
        if not warmup:
            launches.append(_through_run(kernel, compiled, args, grid, kwargs, said.getvalue()))
        return compiled

    JITFunction.run = run
    try:
        with _TorchOperations(launches):
            yield launches
    finally:
        JITFunction.run = original


def record_like(
    call: Callable[[], object], like: Callable[[], object], *, reset: Callable[[], object] = lambda: None, launch: bool = True
) -> list[Launch]:
    """Makes `call`, with Triton's own `run`, so that its form is known, and then `like`, and records what that starts.

    Where the form has no direct path, `like` goes through `run` once more and is recorded all the same.

    Args:
        call: One public call.
        like: One of the same form.
        reset: Brings the state back before each of them.
        launch: As of `record`.
    """
    with _noted_at_the_launcher(launch=launch) as launches:
        reset()
        call()
        reset()
        launches.clear()
        like()
    return launches


@contextlib.contextmanager
def _noted_at_the_launcher(*, launch: bool) -> Iterator[list[Launch]]:
    """Records what reaches the launchers of compiled kernels; `JITFunction` stays as Triton made it, or nothing would be launched directly.

    Source:
        triton 3.6.0 and 3.7.1: `CompiledKernel.run` in `compiler/compiler.py` and its call in `JITFunction.run`.
    """
    from triton.compiler import CompiledKernel

    launches: list[Launch] = []
    own, load = vars(CompiledKernel)["run"], CompiledKernel._init_handles

    def run(compiled: Any) -> Callable[..., None]:
        def noted(x: int, y: int, z: int, *rest: Any) -> None:
            launches.append(_at_the_launcher(compiled, (x, y, z), rest[_BEFORE_ARGUMENTS:]))
            if launch:
                own.fget(compiled)(x, y, z, *rest)

        return noted

    CompiledKernel.run = property(run)
    if not launch:
        CompiledKernel._init_handles = lambda compiled: None  # it would load the machine code into a device
    try:
        with _TorchOperations(launches):
            yield launches
    finally:
        CompiledKernel.run, CompiledKernel._init_handles = own, load


@contextlib.contextmanager
def told_by_ptxas() -> Iterator[io.StringIO]:
    """Collects what ptxas says of the kernels that are compiled within it."""
    from triton import knobs

    said = io.StringIO()
    with knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = True
        yield said


def _at_the_launcher(compiled: Any, grid: tuple[int, int, int], values: tuple[Any, ...]) -> Launch:
    """A launch as its launcher is given it: one value for each parameter of the kernel, constexprs among them.

    Raises:
        LookupError: There are more or fewer.
    """
    names, types = compiled.src.fn.arg_names, compiled.src.signature
    if len(values) != len(names):
        raise LookupError(
            f"{compiled.name} has {len(names)} parameters and was launched with {len(values)} arguments: mend the direct launch"
        )
    pointers = [value for name, value in zip(names, values, strict=True) if types[name].startswith("*")]
    direct = bool(pointers) and not any(isinstance(value, torch.Tensor) for value in pointers)
    return _launch(compiled, grid, dict(zip(names, values, strict=True)), direct=direct)


def _through_run(kernel: Any, compiled: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any], said: str) -> Launch:
    bound = dict(zip(kernel.arg_names, args, strict=False)) | {name: kwargs[name] for name in kernel.arg_names if name in kwargs}
    size = tuple(int(n) for n in (grid(bound) if callable(grid) else grid))
    return _launch(compiled, (*size, 1, 1)[:3], bound, ptxas_log=said)


def _launch(compiled: Any, grid: tuple[int, ...], values: dict[str, Any], **more: Any) -> Launch:
    kernel, types, metadata = compiled.src.fn, compiled.src.signature, compiled.metadata
    constexprs = {param.name for param in kernel.params if param.is_constexpr}
    threads = 32 * int(metadata.num_warps)
    return Launch(
        kind="triton",
        name=kernel.fn.__name__,
        code=machine_code.code_hash(compiled.asm["ptx"], metadata.name, threads=threads, shared_bytes=int(metadata.shared)),
        grid=grid,
        threads=threads,
        shared_bytes=int(metadata.shared),
        arguments=tuple(_argument(types[name], values[name]) for name in kernel.arg_names if name in values and name not in constexprs),
        kernel=compiled,
        **more,
    )


def _argument(type_: str, value: Any) -> str:
    """A pointer, given as a tensor or as its address, by Triton's name of its dtype and by its alignment."""
    if type_.startswith("*"):
        return f"{type_[1:]}@{(value.data_ptr() if isinstance(value, torch.Tensor) else value) % 16}"
    return repr(value)


class _TorchOperations(TorchDispatchMode):
    """Notes torch operations that start a kernel or wait for one."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self._launches = launches

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not, since nothing is compiled within it: to skip it torch would import all of its compiler, seconds of each process."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _NO_KERNEL:
            told = tuple(_operand(value) for value in (*args, *sorted((kwargs or {}).items())))
            self._launches.append(Launch("torch", f"{func.namespace}.{name}.{func._overloadname}", arguments=told))
        return func(*args, **(kwargs or {}))


def _operand(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}/{list(value.stride())}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_operand, value))}]"
    if isinstance(value, torch.device):
        return "device"
    return repr(value)
