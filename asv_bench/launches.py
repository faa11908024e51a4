# mypy: disable-error-code="no-untyped-call"
"""The launch record of a call: what it starts on the device, in order.

A Triton launch is its machine code, grid, block, scalar arguments, and the dtype and alignment of its tensors; a torch operation is its
name with the shapes and dtypes of its arguments. Names of kernels and arguments, line numbers and addresses are not part of it: a rename
changes nothing. What the tensors hold is not part of it either (`input_hash` of a row's record is).
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rapid_llm
from asv_bench import machine_code
from asv_bench.suite import Prepared

_DIRECT = "kernels/direct_launch.py"
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
    kernel: Any = field(default=None, repr=False)
    ptxas_log: str = field(default="", repr=False)

    def record(self) -> dict[str, Any]:
        """The launch as JSON."""
        names = ("kind", "name", "code", "grid", "threads", "shared_bytes", "arguments")
        made = {name: getattr(self, name) for name in names}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in made.items()}


def hash_of(launches: list[Launch]) -> str:
    """Identity of an ordered list of launches: 16 hex digits; the name of a Triton kernel does not count.

    Like calls go to the kernel without Triton's `run`, and so unseen: what launches them is part of the identity of a Triton launch.
    """
    told: list[dict[str, Any]] = [{**launch.record(), "name": "" if launch.kind == "triton" else launch.name} for launch in launches]
    direct = Path(rapid_llm.__file__).parent / _DIRECT
    if any(launch.kind == "triton" for launch in launches) and direct.is_file():
        told.append({"like calls": syntax_hash(direct.read_text(encoding="utf-8"))})
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def syntax_hash(source: str) -> str:
    """Identity of what Python code does: comments, layout and docstrings are not part of it. 16 hex digits."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [line for line in body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))]  # type: ignore[attr-defined]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def row_hash(prepared: Prepared) -> str:
    """Identity of what one call of a prepared row starts; the call is made once more."""
    if prepared.reset is not None:
        prepared.reset()
    return hash_of(record(prepared.calls[0]))


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
            launches.append(_triton_launch(kernel, compiled, args, grid, kwargs, said.getvalue()))
        return compiled

    JITFunction.run = run
    try:
        with _TorchOperations(launches):
            yield launches
    finally:
        JITFunction.run = original


@contextlib.contextmanager
def told_by_ptxas() -> Iterator[io.StringIO]:
    """Collects what ptxas says of the kernels that are compiled within it."""
    from triton import knobs

    said = io.StringIO()
    with knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = True
        yield said


def _triton_launch(kernel: Any, compiled: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any], said: str) -> Launch:
    bound = dict(zip(kernel.arg_names, args, strict=False)) | {name: kwargs[name] for name in kernel.arg_names if name in kwargs}
    size = tuple(int(n) for n in (grid(bound) if callable(grid) else grid))
    constexprs = {param.name for param in kernel.params if param.is_constexpr}
    metadata = compiled.metadata
    threads = 32 * int(metadata.num_warps)
    return Launch(
        kind="triton",
        name=kernel.fn.__name__,
        code=machine_code.code_hash(compiled.asm["cubin"], metadata.name, threads=threads, shared_bytes=int(metadata.shared)),
        grid=(*size, 1, 1)[:3],
        threads=threads,
        shared_bytes=int(metadata.shared),
        arguments=tuple(_argument(bound[name]) for name in kernel.arg_names if name in bound and name not in constexprs),
        kernel=compiled,
        ptxas_log=said,
    )


def _argument(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}@{value.data_ptr() % 16}"
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
