"""The SASS of many cubins by few calls of cuobjdump.

The disassembler takes about as long to start as to print a large kernel. So the code of all kernels of a kind is put into one cubin, each
as a function of its own, which is what a cubin with several kernels looks like (System V ABI, chapter 4). Branches name addresses within
a function, so that a kernel reads as it does alone; constants, debug information and relocations are no part of what is read here.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from asv_bench.machine_code import ToolError, code_bytes, sections

_TIMEOUT_S = 240
_FUNCTION = re.compile(r"^\t\tFunction : (\w+)$", re.MULTILINE)

_KIND = (".nv.compat",)
"""Sections that have to be the same, beside the file's header, in cubins that are read together."""
_KEPT = (".note.nv.tkinfo", ".note.nv.cuinfo", ".nv.compat")
"""Sections without which nvdisasm refuses a cubin of compute capability 10.0 or more; the second names the others."""


def disassemble(cubins: Mapping[str, bytes], tool: Path) -> dict[str, str]:
    """The SASS of each cubin, as cuobjdump prints it.

    Args:
        cubins: Of one kernel each, by a name of letters, digits and underlines.
        tool: cuobjdump, beside nvdisasm.
    Returns:
        By the same names.
    Raises:
        ToolError: A cubin is not read as expected, cuobjdump failed, or what it printed is not all of the code.
    """
    kinds: dict[bytes, dict[str, bytes]] = {}
    for name, cubin in cubins.items():
        kinds.setdefault(_kind(cubin), {})[name] = cubin
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as several:
        found = list(several.map(lambda alike: _printed(alike, tool), kinds.values()))
    return {name: text for texts in found for name, text in texts.items()}


def _kind(cubin: bytes) -> bytes:
    """What decides how code is read: ELF identification and type, the flags (of the architecture), and `_KIND`."""
    return cubin[:0x18] + cubin[0x30:0x34] + b"".join(section.content for section in sections(cubin) if section.name in _KIND)


def _printed(cubins: dict[str, bytes], tool: Path) -> dict[str, str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(merged(cubins))
        file.flush()
        done = subprocess.run([str(tool), "-sass", file.name], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    _, *parts = _FUNCTION.split(done.stdout)
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    if done.returncode or found.keys() != cubins.keys():
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise ToolError(
            f"{tool} ended with {done.returncode} and printed {len(found)} of {len(cubins)} kernels ({said[-1] if said else 'no output'}):"
            " is the triton wheel whole?"
        )
    for name, text in found.items():
        size = sum(len(section.content) for section in sections(cubins[name]) if section.name.startswith(".text."))
        if code_bytes(text) != size:
            raise ToolError(
                f"{tool} printed {code_bytes(text)} of {size} bytes of code: its output has changed, mend asv_bench/machine_code.py"
            )
    return found


def merged(cubins: Mapping[str, bytes]) -> bytes:
    """A cubin that has the code of each of them, as a function of its name.

    Args:
        cubins: Of one kernel and one kind; they may not be empty.
    Raises:
        ToolError: One has not exactly one section of code.
    """
    first = next(iter(cubins.values()))
    kept = [section for section in sections(first) if section.name in _KEPT]
    strings = bytearray(b"\0")

    def string(text: str) -> int:
        strings.extend(text.encode() + b"\0")
        return len(strings) - len(text) - 1

    # Sections: null, strings, symbols, what is kept, then the code.
    numbers = {section.name: 3 + i for i, section in enumerate(kept)}
    body, table, symbols = bytearray(64), [bytes(64)], bytearray(24)

    def add(name: str, kind: int, content: bytes, *, flags: int = 0, link: int = 0, info: int = 0, align: int = 8, entry: int = 0) -> bytes:
        body.extend(bytes(-len(body) % align))
        header = struct.pack("<IIQQQQIIQQ", string(name), kind, flags, 0, len(body), len(content), link, info, align, entry)
        body.extend(content)
        return header

    for section in kept:
        others = {"link": numbers[_KEPT[0]], "info": numbers[_KEPT[2]]} if section.name == _KEPT[1] else {}
        table.append(add(section.name, section.kind, section.content, flags=section.flags, **others))
    for name, cubin in cubins.items():
        codes = [section for section in sections(cubin) if section.name.startswith(".text.")]
        if len(codes) != 1:
            raise ToolError(f"a cubin has {len(codes)} sections of code: Triton's output has changed, mend asv_bench/sass.py")
        (code,) = codes
        number = len(symbols) // 24
        # A global function (0x12) that is a kernel's entry (0x10, NVIDIA's own).
        symbols.extend(struct.pack("<IBBHQQ", string(name), 0x12, 0x10, len(table) + 2, 0, len(code.content)))
        registers = code.info & 0xFF000000
        table.append(add(f".text.{name}", 1, code.content, flags=code.flags, link=2, info=registers | number, align=128))
    table.insert(1, add(".symtab", 2, bytes(symbols), link=1, info=1, entry=24))
    name_at = string(".strtab")
    start = len(body)
    body.extend(strings)
    table.insert(1, struct.pack("<IIQQQQIIQQ", name_at, 3, 0, 0, start, len(strings), 0, 0, 1, 0))
    body.extend(bytes(-len(body) % 8))
    body[:64] = first[:64]
    struct.pack_into("<QQ", body, 0x20, 0, len(body))  # no program headers; the section headers come last
    struct.pack_into("<HHHHH", body, 0x36, 0, 0, 64, len(table), 1)
    return bytes(body) + b"".join(table)
