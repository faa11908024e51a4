"""What was measured and verified on a device, read from its baseline file for `dispatch()`.

The file is `baselines/<device>.json` (schemas: rapid_llm/baseline/2 and 1); nothing of what wrote it is imported. Times stand there in
microseconds and become milliseconds here, once (`_MS_PER_US`).

Which recorded case speaks for a request: of the cases that were recorded for the operation with exactly its dtypes, its buffer layout and
its head geometry, the one whose varying sizes (batch and max_seq_len, or num_tokens) are nearest: the smallest sum of squared base-2
logarithms of the ratios, ties to the first label. None speaks for a request that is more than 4 times larger or smaller in a size.
The case is chosen before the kernel, so that two kernels are compared on one case only; one that was not measured in it is unmeasured.

Not used: controls, rows without a verification, contiguous row tables and ragged batches, since a request's shape does not tell them
from the usual ones, and rows that vary the fixture.
"""

from __future__ import annotations

import datetime
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapid_llm.errors import EvidenceError
from rapid_llm.kernels.ops import registry
from rapid_llm.kernels.ops.dispatch import set_perf_provider
from rapid_llm.kernels.ops.spec import GoldenRecord, KernelSpec, Measurement, Request
from rapid_llm.strict_json import read_strict_json

__all__ = ["Evidence", "RecordedCase", "device_name_here", "install_evidence", "load_evidence", "parse_label", "record_goldens"]

_SCHEMAS = ("rapid_llm/baseline/2", "rapid_llm/baseline/1")
_RECORD_SCHEMAS = ("rapid_llm/process-record/1",)
_MS_PER_US = 1e-3
_MAX_RATIO = 4.0
_UNIT_TOLERANCE = 1e-3
_US_PER_S = 1e6
_MAX_QUOTED = 200
"""Characters of a foreign file in a message."""
_FAILED_VERIFICATION = "unverified"

_NUM_Q_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 32, 8, 128
"""Geometry of a label that names none."""

_LABEL = re.compile(
    r"(?P<phase>decode|prefill) (?:B=(?P<batch>\d+) S=(?P<context>\d+)|T=(?P<tokens>\d+)) (?P<kv>float16|bfloat16|e4m3|int8)"
    r"(?: q=(?P<q>float16|bfloat16))?(?: (?P<heads>\d+)x(?P<width>\d+))? (?P<layout>combined|split) fragmented(?: cold)?"
)


@dataclass(frozen=True)
class RecordedCase:
    """What the label of a measured row says of the request it was measured on.

    Attributes:
        op: The operation.
        q_dtype, kv_dtype: As of `Request`.
        layout: "combined" or "split".
        geometry: Sizes that have to agree: sorted (name, size) pairs.
        sizes: Sizes of which the nearest is taken: sorted (name, size) pairs.
    """

    op: str
    q_dtype: str
    kv_dtype: str
    layout: str
    geometry: tuple[tuple[str, int], ...]
    sizes: tuple[tuple[str, int], ...]

    def distance(self, request: Request) -> float | None:
        """How far the request's sizes are from the recorded ones, None where the case cannot speak for it."""
        same = (self.op, self.q_dtype, self.kv_dtype) == (request.op, request.q_dtype, request.kv_dtype)
        # What was measured had a row table.
        same = same and f"kv:{self.layout}" in request.layout_tags and "kv:block-table" not in request.layout_tags
        if not same or any(request.size(dim) != size for dim, size in self.geometry):
            return None
        octaves = []
        for dim, size in self.sizes:
            asked = request.size(dim)
            if not asked or not 1 / _MAX_RATIO <= asked / size <= _MAX_RATIO:
                return None
            octaves.append(math.log2(asked / size))
        return sum(octave * octave for octave in octaves)


def parse_label(op: str, label: str) -> RecordedCase | None:
    """The case that a row's label names; None for a label that speaks for no request.

    Args:
        op: Operation of the row: "paged_decode_attention" or "kv_write".
        label: Such as "decode B=8 S=8192 float16 combined fragmented cold".
    """
    found = _LABEL.fullmatch(label)
    if found is None or op != ("kv_write" if found["tokens"] else "paged_decode_attention"):
        return None
    kv_dtype = found["kv"]
    geometry = {"num_kv_heads": int(found["heads"] or _NUM_KV_HEADS), "head_dim": int(found["width"] or _HEAD_DIM)}
    if found["tokens"]:
        sizes = {"num_tokens": int(found["tokens"])}
    else:
        sizes = {"batch": int(found["batch"]), "max_seq_len": int(found["context"])}
        geometry["num_q_heads"] = _NUM_Q_HEADS
    if any(size <= 0 for size in (*sizes.values(), *geometry.values())):
        return None
    q_dtype = found["q"] or ("float16" if kv_dtype in ("e4m3", "int8") else kv_dtype)
    return RecordedCase(op, q_dtype, kv_dtype, found["layout"], Request.sorted_shape(geometry), Request.sorted_shape(sizes))


@dataclass(frozen=True)
class Evidence:
    """The measurements of one device; called as a perf provider, see `rapid_llm.kernels.ops.dispatch.set_perf_provider`.

    Attributes:
        device_name: As the driver names the device.
        device_type, capability: As of `Request`.
        latency_ms: By case label, then KernelSpec name: the case, and the median of all processes in milliseconds.
        golden: By KernelSpec name: the largest difference over all of its rows.
        commit: Of the code that the last of the accepted runs measured.
        measured_at: When the last of the accepted runs began, UTC.
    """

    device_name: str
    device_type: str
    capability: tuple[int, int] | None
    latency_ms: Mapping[str, tuple[RecordedCase, Mapping[str, float]]]
    golden: Mapping[str, GoldenRecord]
    commit: str
    measured_at: datetime.datetime

    def __call__(self, spec: KernelSpec, request: Request) -> Measurement | None:
        """The measurement of `spec` that speaks for `request`, by the module's rule; None where there is none."""
        label = self.nearest(request)
        if label is None or spec.name not in self.latency_ms[label][1]:
            return None
        source = f"[{label}] on {self.device_name} at commit {self.commit[:12]}"
        return Measurement(self.latency_ms[label][1][spec.name], source, self.measured_at)

    def nearest(self, request: Request) -> str | None:
        """Label of the recorded case that speaks for `request`, whichever kernels were measured in it."""
        if (request.device_type, request.capability) != (self.device_type, self.capability):
            return None
        near = [(d, label) for label, (case, _) in self.latency_ms.items() if (d := case.distance(request)) is not None]
        return min(near)[1] if near else None


def load_evidence(path: str | Path) -> Evidence:
    """Reads a device's baseline file.

    Raises:
        EvidenceError: The file cannot be read, is of another schema, or holds a time that is none.
    """
    data = _read(Path(path), _SCHEMAS)
    try:
        return _evidence(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EvidenceError(
            f"{path} is no usable baseline ({_quoted(error)}); restore it from the base branch, or record it anew."
        ) from error


def install_evidence(path: str | Path, *, device_name: str | None = None) -> Evidence:
    """Makes `dispatch()` rank by a device's baseline: installs the perf provider and the golden records.

    Args:
        path: The device's baseline file.
        device_name: Name of the device at hand, as its driver gives it; None asks torch for that of the current CUDA device.

    Returns:
        What was installed; kernels in it that are not registered here are passed over.

    Raises:
        EvidenceError: The file is unusable, or of another device; then nothing has changed.
    """
    evidence = load_evidence(path)
    here = device_name_here() if device_name is None else device_name
    if evidence.device_name != here:
        raise EvidenceError(
            f"{path} was measured on {evidence.device_name}, and this device is {here}; "
            "install the baseline of this device, or none: times of another device say nothing here."
        )
    for name in sorted(set(evidence.golden) & set(registry.names())):
        registry.record_golden(name, evidence.golden[name])
    set_perf_provider(evidence)
    return evidence


def record_goldens(path: str | Path) -> dict[str, GoldenRecord]:
    """Records the outcome of the verifications that a process record holds: a KernelSpec that failed one row is unverified.

    Args:
        path: Of a file of schema rapid_llm/process-record/1, as a measuring process leaves it.

    Returns:
        The records, by KernelSpec name.

    Raises:
        EvidenceError: The file cannot be read, or is of another schema.
    """
    data = _read(Path(path), _RECORD_SCHEMAS)
    try:
        goldens = _goldens((row, row["status"] == _FAILED_VERIFICATION) for row in data["rows"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EvidenceError(f"{path} is no usable process record ({_quoted(error)}); measure again.") from error
    for name in sorted(set(goldens) & set(registry.names())):
        registry.record_golden(name, goldens[name])
    return goldens


def device_name_here() -> str:
    """Name of the current CUDA device.

    Raises:
        EvidenceError: There is none.
    """
    import torch

    if not torch.cuda.is_available():
        raise EvidenceError("install_evidence expected a CUDA device or a device_name, and torch sees no CUDA device; give device_name.")
    return torch.cuda.get_device_name()


def _evidence(data: dict[str, Any]) -> Evidence:
    latency_ms: dict[str, tuple[RecordedCase, dict[str, float]]] = {}
    used = [row for row in data["rows"].values() if not row["control"] and row["max_abs_diff"] is not None]
    for row in used:
        (label,) = row["params"]
        case = parse_label(row["op"], label)
        if case is not None and row["instrument"] == "device":
            _, by_spec = latency_ms.setdefault(label, (case, {}))
            by_spec[row["impl"]] = _median_us(row, label) * _MS_PER_US
    capability = data["device"]["compute_capability"]
    began = [(datetime.datetime.fromisoformat(run["time"].replace("Z", "+00:00")), run["commit"]) for run in data["runs"]]
    measured_at, commit = max(began)
    return Evidence(
        device_name=data["device"]["name"],
        device_type=data["device"]["type"],
        capability=None if capability is None else _capability(capability),
        latency_ms=latency_ms,
        golden=_goldens((row, False) for row in used),
        commit=commit,
        measured_at=measured_at,
    )


def _median_us(row: Mapping[str, Any], label: str) -> float:
    """Median over every process, in microseconds.

    Raises:
        ValueError: A time is not positive and finite, or rate and time of a row that counts calls disagree: then the unit is another.
    """
    times_us = [float(us) for run in row["latency_us"] for us in run]
    if not times_us or not all(0.0 < us < math.inf for us in times_us):
        raise ValueError(f"[{label}] has a latency_us that is no positive finite number")
    if row["unit"] == "calls/s":
        rates = [float(rate) for run in row["values"] for rate in run]
        if len(rates) != len(times_us) or any(
            abs(rate * us / _US_PER_S - 1) > _UNIT_TOLERANCE for rate, us in zip(rates, times_us, strict=True)
        ):
            raise ValueError(f"[{label}]: calls/s times latency_us is not a second, so its times are in another unit")
    return statistics.median(times_us)


def _goldens(rows: Iterator[tuple[Mapping[str, Any], bool]]) -> dict[str, GoldenRecord]:
    found: dict[str, GoldenRecord] = {}
    for row, failed in rows:
        difference = row["max_abs_diff"]
        if row["control"] or not row["impl"] or (difference is None and not failed):
            continue
        before = found.get(row["impl"], GoldenRecord(True, None))
        seen = [d for d in (before.max_abs_diff, difference) if d is not None]
        found[row["impl"]] = GoldenRecord(before.verified and not failed, max(seen, default=None))
    return found


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def _quoted(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:_MAX_QUOTED]}"


def _read(path: Path, schemas: Sequence[str]) -> dict[str, Any]:
    try:
        data = read_strict_json(path)
    except (OSError, ValueError) as error:
        raise EvidenceError(f"{path} cannot be read as strict JSON ({error}); restore it, or record it anew.") from error
    found = data.get("schema") if isinstance(data, dict) else None
    if found not in schemas:
        raise EvidenceError(f"{path} expected schema {' or '.join(schemas)}, got {str(found)[:_MAX_QUOTED]!r}; give a file of that schema.")
    return data  # type: ignore[no-any-return]
