"""What the compiler made of a kernel: figures of one cubin, exact and without a GPU.

Registers, stack and spills are what ptxas says of its own work; instructions are counted in the SASS that cuobjdump prints
(`asv_bench.sass`; both tools are in Triton's wheel). Counts are of instructions in the code, not of how often a loop runs them.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections import Counter
from dataclasses import dataclass

_COMMENT = re.compile(r"//.*")
_DEBUG_SECTION = re.compile(r"^\s*\.section\s+\.debug\w*\s*\{.*?^\s*\}", re.MULTILINE | re.DOTALL)
_DEBUG_LINES = (".loc ", ".file ", "$L__tmp", "$L__func_")
_NO_CONTENT = 8
"""Type of a section that takes no room in the file."""
_INSTRUCTION_BYTES = 16
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);", re.MULTILINE)

_CONVERSIONS = frozenset({"F2F", "F2FP", "F2I", "F2IP", "I2F", "I2FP", "I2I", "I2IP"})
_BULK_COPIES = frozenset({"UBLKCP", "UTMALDG", "UTMASTG", "UBLKPF"})
_TENSOR = re.compile(r"[HIDQOB]MMA$")
_WGMMA = re.compile(r"[HIQB]GMMA$")
_TCGEN05 = re.compile(r"UTC\w*MMA$")
_WIDTHS = (8, 16, 32, 64, 128, 256)
_ACCESSES = {"LDG": "global_loads", "STG": "global_stores", "LDGSTS": "async_copies"}

REGISTERS_A_MULTIPROCESSOR = 65536
_REGISTER_UNIT = 256
"""Registers are given to a warp in steps of this many."""
_WARP_UNIT = 4
_SHARED_UNIT = 128
"""Shared memory is given to a block in steps of this many bytes."""
_RESERVED_SHARED_BYTES = 1024
"""Shared memory of a block that the system takes from compute capability 8.0 on."""


class ToolError(RuntimeError):
    """A tool of Triton's wheel failed or said something else than expected."""


@dataclass(frozen=True)
class Limits:
    """What can reside on a multiprocessor; see `asv_bench.stand_in.Device`."""

    warps: int
    blocks: int
    shared_bytes: int


def code_hash(ptx: str, name: str, *, threads: int, shared_bytes: int) -> str:
    """Identity of what is executed: the program that ptxas is given, not names, comments, line numbers or paths.

    Not its cubin: ptxas 13.1 makes other code of the same PTX each time, of the same figures, where a kernel for sm_100 uses tcgen05.

    Args:
        ptx: Of one kernel.
        name: Of the kernel, which names its parameters.
        threads: A block's.
        shared_bytes: Dynamic shared memory of a block.
    Returns:
        32 hex digits.
    Raises:
        ToolError: It has no kernel of that name.
    """
    if not re.search(rf"^\.visible \.entry {re.escape(name)}\(", ptx, re.MULTILINE):
        raise ToolError(f"the PTX of {name} has no entry of that name: Triton's output has changed, mend asv_bench/machine_code.py")
    program = _DEBUG_SECTION.sub("", _COMMENT.sub("", ptx))
    lines = [" ".join(line.split()) for line in program.replace(name, "kernel").splitlines()]
    told = [line for line in lines if line and not line.startswith(_DEBUG_LINES)]
    return hashlib.sha256("\n".join([f"threads={threads} shared={shared_bytes}", *told]).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Section:
    """A section of an ELF file; `kind`, `flags` and `info` as its header has them."""

    name: str
    kind: int
    flags: int
    info: int
    content: bytes


def sections(elf: bytes) -> list[Section]:
    """The sections of a 64-bit little-endian ELF file (System V ABI, chapter 4).

    Raises:
        ToolError: It is no such file.
    """
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ToolError("a cubin is no ELF file of 64 bits: Triton's output has changed, mend asv_bench/machine_code.py")
    (start,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, start + i * size) for i in range(count)]
    table = headers[names_at][4]
    found = []
    for name, kind, flags, _address, offset, length, _link, info, *_ in headers:
        end = elf.index(b"\0", table + name)
        content = b"" if kind == _NO_CONTENT else elf[offset : offset + length]
        found.append(Section(elf[table + name : end].decode(), kind, flags, info, content))
    return found


def listing(sass: str) -> str:
    """One instruction a line, without addresses and encodings, for a difference that people read."""
    return "".join(f"{match[1]}{match[2].rstrip()}\n" for match in _INSTRUCTION.finditer(sass))


def code_bytes(sass: str) -> int:
    """Size of the instructions that a disassembler printed."""
    return _INSTRUCTION_BYTES * sum(1 for _ in _INSTRUCTION.finditer(sass))


def assembled(ptxas_log: str) -> dict[str, int]:
    """The figures that ptxas tells of a kernel.

    Args:
        ptxas_log: What ptxas said with -v.
    Raises:
        ToolError: The log does not have what is read from it.
    """
    spills, registers = _SPILLS.search(ptxas_log), _REGISTERS.search(ptxas_log)
    if spills is None or registers is None:
        raise ToolError("ptxas said nothing of registers and spills: its wording has changed, mend asv_bench/machine_code.py")
    return {
        "registers": int(registers[1]),
        "stack_bytes": int(spills[1]),
        "spill_store_bytes": int(spills[2]),
        "spill_load_bytes": int(spills[3]),
    }


def counted(sass: str) -> dict[str, int]:
    """The figures that are counted in a kernel's SASS, as `asv_bench.sass.disassemble` gives it."""
    counts: Counter[str] = Counter()
    total = size = 0
    for opcode, operands in (match.groups() for match in _INSTRUCTION.finditer(sass)):
        name, *modifiers = opcode.split(".")
        size += _INSTRUCTION_BYTES
        if name == "NOP":
            continue
        total += 1
        counts[_class_of(name, modifiers, operands)] += 1
    made = {"instructions": total, "code_bytes": size}
    for access in _ACCESSES.values():
        made |= {f"{access}_{width}": counts[f"{access}_{width}"] for width in _WIDTHS}
    names = ("bulk_copies", "mma", "wgmma", "tcgen05", "conversions", "local_loads", "local_stores", "barriers")
    return made | {name: counts[name] for name in names}


def _class_of(name: str, modifiers: list[str], operands: str) -> str:
    if name in _ACCESSES:
        return f"{_ACCESSES[name]}_{_width(modifiers)}"
    if name in ("LDL", "STL"):
        return "local_loads" if name == "LDL" else "local_stores"
    if name in _BULK_COPIES:
        return "bulk_copies"
    if name in _CONVERSIONS or (name == "HADD2" and "F32" in modifiers and "-RZ" in operands):
        return "conversions"
    if name == "BAR":
        return "barriers"
    for pattern, kind in ((_TCGEN05, "tcgen05"), (_WGMMA, "wgmma"), (_TENSOR, "mma")):
        if pattern.match(name):
            return kind
    return "other"


def _width(modifiers: list[str]) -> int:
    """Bits of a memory access by its modifiers; 32 where none says."""
    for modifier in modifiers:
        if modifier in ("U8", "S8"):
            return 8
        if modifier in ("U16", "S16"):
            return 16
        if modifier in ("64", "128", "256"):
            return int(modifier)
    return 32


def occupancy_warps(limits: Limits, *, registers: int, shared_bytes: int, warps_a_block: int) -> int:
    """Warps that can reside on a multiprocessor at a time (as the CUDA Occupancy Calculator counts).

    Args:
        limits: Of the device.
        registers: A thread's.
        shared_bytes: A block's, without what the system takes.
        warps_a_block: As launched.
    """
    a_warp = -(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = (REGISTERS_A_MULTIPROCESSOR // a_warp) // _WARP_UNIT * _WARP_UNIT // warps_a_block if registers else limits.blocks
    a_block = -(-(shared_bytes + _RESERVED_SHARED_BYTES) // _SHARED_UNIT) * _SHARED_UNIT
    return warps_a_block * min(limits.blocks, limits.warps // warps_a_block, by_registers, limits.shared_bytes // a_block)
