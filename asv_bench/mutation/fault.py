"""What a fault is: a name, a sentence, edits of source text, and the rows that have to refuse it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

DECODE = "PagedDecode fp16/bf16"
DECODE_E4M3 = "PagedDecode e4m3"
DECODE_INT8 = "PagedDecode int8"
PREFILL = "KVWritePrefill"
DECODE_WRITE = "KVWriteDecode"
ALLOCATOR = "Allocator"
DEVICE_ALLOCATOR = "DeviceStateAllocator"
SUITES = (DECODE, DECODE_E4M3, DECODE_INT8, PREFILL, DECODE_WRITE, ALLOCATOR, DEVICE_ALLOCATOR)
"""Columns of the matrix. Controls run no code of this project that a fault could be planted in."""

EVERYWHERE = ("cpu", "cuda")
GPU_ONLY = ("cuda",)


class PlantError(RuntimeError):
    """A fault cannot be planted, or what refused the row is not the fault: a mistake of the matrix, never a refusal."""


@dataclass(frozen=True)
class Edit:
    """One replacement in a source file; with an empty `old`, text that is added at the end.

    Attributes:
        path: Of the file, from the root of the checkout.
        old: Text that has to occur exactly once.
        new: What stands there instead.
    """

    path: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        """`text` with the edit made.

        Raises:
            PlantError: `old` does not occur exactly once.
        """
        if not self.old:
            return f"{text}\n{self.new}"
        if (count := text.count(self.old)) != 1:
            raise PlantError(f"{self.path} has {count} times, not once, the text {self.old!r}: bring the fault up to date with the code")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        name: Unique; a few words with hyphens.
        what: One sentence.
        rows: By suite, the cases that have to refuse it; an empty tuple means the suite's first case. A suite that is not named runs
            nothing of what is edited, or gives the same result with it.
        edits: Of the source.
        status: Outcomes that are a refusal by the instrument.
        reason: What the refusal has to say, a regular expression.
        devices: Where it can be planted.
        harmless: Not a fault but another right way to compute: it has to give a number.
    """

    name: str
    what: str
    rows: Mapping[str, tuple[str, ...]]
    edits: tuple[Edit, ...]
    status: tuple[str, ...] = ("unverified",)
    reason: str = ""
    devices: tuple[str, ...] = EVERYWHERE
    harmless: bool = False

    def refused_by(self, record: Mapping[str, object]) -> bool:
        """Whether a row's record is a refusal.

        Raises:
            PlantError: The row failed for another reason than the fault.
        """
        if record["status"] == "ok":
            return False
        if record["status"] not in self.status or not re.search(self.reason, str(record["reason"])):
            expected = f"{' or '.join(self.status)} with a reason like {self.reason!r}"
            raise PlantError(f"{self.name}: expected {expected}, got {record['status']}: {record['reason']}")
        return record["value"] is None and record["latency_us"] is None
