"""Faults that are planted in copies of the kernels' sources: what a slow-down usually comes from, and what changes nothing."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

_DECODE = "rapid_llm/kernels/paged_decode.py"
_SPLIT = "rapid_llm/kernels/decode_split.py"
_CONFIGS = "rapid_llm/kernels/configs.py"
_WRITE = "rapid_llm/kernels/kv_write.py"
_WRITE_OP = "rapid_llm/kernels/ops/kv.py"
_DECODE_OP = "rapid_llm/kernels/ops/attention.py"
_DIRECT = "rapid_llm/kernels/direct_launch.py"

DECODE_ROW = "decode B=8 S=8192 float16 combined"
WRITE_ROW = "prefill T=16384 float16"


@dataclass(frozen=True)
class Edit:
    """Replaces `old`, which stands `times` in the file, by `new`."""

    path: str
    old: str
    new: str
    times: int = 1


@dataclass(frozen=True)
class Fault:
    """A planted change.

    Attributes:
        name: What it is.
        rows: Regular expression of a row that it is in.
        edits: Of the sources.
        metrics: Figures of which at least one has to be named, each with the verdict that it has to have; none where no figure moves.
    """

    name: str
    rows: str
    edits: tuple[Edit, ...]
    metrics: tuple[tuple[str, str], ...] = ()

    def plant(self, root: Path) -> None:
        """Edits the sources under `root`.

        Raises:
            AssertionError: What it edits has moved.
        """
        for edit in self.edits:
            file = root / edit.path
            text = file.read_text(encoding="utf-8")
            assert text.count(edit.old) == edit.times, f"{self.name}: {edit.old!r} stands {text.count(edit.old)} times in {edit.path}"
            file.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


_WRITE_CALL = "        accepted.run(k, v, slot_mapping, k_rows, v_rows, k_scale=k_factor, v_scale=v_factor, **accepted.options)\n"
_DECODE_CALL = "        accepted.run(q, k_rows, v_rows, row_table, seq_lens, out, **factors, **accepted.options)\n"
_AGAIN = "    if memory is not None and plan.launches.again(pointers, factors):\n"
_DIRECT_CALL = "        chosen.launch(*pointers, *factors, *self._rest, stream=active.get_current_stream(self._device))\n"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "forced spill",
        DECODE_ROW,
        (Edit(_DECODE, '"num_warps": config.num_warps,', '"num_warps": config.num_warps,\n        "maxnreg": 48,'),),
        (("spill stores", "REGRESSED"), ("spill loads", "REGRESSED")),
    ),
    Fault(
        "lost vectorisation",
        DECODE_ROW,
        (
            Edit(
                _SPLIT,
                'do_not_specialize=["max_seq_len", "num_splits"]',
                'do_not_specialize=["max_seq_len", "num_splits", "k_row_stride"]',
            ),
        ),
        (("mean width of global loads", "REGRESSED"), ("asynchronous copies", "REGRESSED")),
    ),
    Fault(
        "lost num_stages",
        DECODE_ROW,
        (Edit(_DECODE, '"STAGES": config.num_stages', '"STAGES": 1'),),
        (("asynchronous copies", "REGRESSED"),),
    ),
    Fault(
        "an extra torch operation in each call",
        DECODE_ROW,
        (Edit(_DECODE_OP, _DECODE_CALL, f"{_DECODE_CALL}        out.mul_(1.0)\n"),),
        (("launches", "REGRESSED"),),
    ),
    Fault("the work done twice", WRITE_ROW, (Edit(_WRITE_OP, _WRITE_CALL, 2 * _WRITE_CALL),), (("launches", "REGRESSED"),)),
    Fault(
        "like calls launch twice",
        DECODE_ROW,
        (Edit(_DIRECT, _DIRECT_CALL, 2 * _DIRECT_CALL),),
        (("launches of a like call", "REGRESSED"),),
    ),
    Fault(
        "an extra torch operation in like calls",
        DECODE_ROW,
        (Edit(_DECODE, _AGAIN, f"{_AGAIN}        out.mul_(1.0)\n"),),
        (("launches of a like call", "REGRESSED"),),
    ),
    Fault(
        "another grid",
        DECODE_ROW,
        (Edit(_CONFIGS, "wanted = programs_per_sm * num_sms", "wanted = programs_per_sm * num_sms * 3 // 4"),),
        (("grid", "CHANGED"),),
    ),
    Fault(
        "a block size doubled",
        DECODE_ROW,
        (Edit(_CONFIGS, "block_n=32 if wide else 64", "block_n=64 if wide else 128"),),
        (("registers", "CHANGED"), ("shared memory", "CHANGED")),
    ),
)
"""Each has to be named."""

HARMLESS: tuple[Fault, ...] = (
    Fault(
        "renamed kernel and argument",
        WRITE_ROW,
        (Edit(_WRITE, "kv_write_kernel", "scatter_rows_kernel", 5), Edit(_WRITE, "slot_ptr", "slots_pointer", 4)),
    ),
    Fault(
        "a comment",
        WRITE_ROW,
        (
            Edit(_WRITE, "import torch\n", "# A comment, and three lines further down.\n\n\nimport torch\n"),
            Edit(_WRITE, "    column = element % HEAD_DIM\n", "    column = element % HEAD_DIM  # of the head\n"),
            Edit(_DIRECT, _DIRECT_CALL, f"        # Like an earlier one.\n{_DIRECT_CALL}"),
            Edit(_DIRECT, '    """The launches of one call form.\n', '    """What one call form launches.\n'),
        ),
    ),
)
"""None of them changes anything."""


def planted_copy(root: Path, fault: Fault, target: Path) -> Path:
    """A copy of the product's sources with the fault in it."""
    shutil.copytree(root / "rapid_llm", target / "rapid_llm", ignore=shutil.ignore_patterns("__pycache__"))
    fault.plant(target)
    return target
