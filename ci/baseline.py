"""Baselines: what was accepted on a device. One name for each thing that is done with them."""

from __future__ import annotations

import numpy as np

from ci.baseline_check import MIN_BOOTS, MIN_RUNS, Problem, check, file_name
from ci.baseline_file import SCHEMA_ID, Baseline, Waiver, content_hash, load, load_waivers, save, to_json
from ci.baseline_record import record
from ci.baseline_refresh import Refreshed, refresh
from ci.identity import device_key

__all__ = [
    "MIN_BOOTS",
    "MIN_RUNS",
    "SCHEMA_ID",
    "Baseline",
    "Problem",
    "Refreshed",
    "Waiver",
    "check",
    "content_hash",
    "describe",
    "device_key",
    "file_name",
    "load",
    "load_waivers",
    "record",
    "refresh",
    "save",
    "to_json",
]


def describe(baseline: Baseline) -> str:
    """The baseline for a person: device, runs, rows with their medians, waivers."""
    when = sorted(run.time for run in baseline.runs)
    boots = len({(run.boot, run.gpu_uuid) for run in baseline.runs})
    lines = [
        f"{file_name(baseline)}: {baseline.device.name}{', advisory' if baseline.advisory else ''}",
        f"accepted by {baseline.accepted_by}{f': {baseline.reason}' if baseline.reason else ''}",
        f"{len(baseline.runs)} runs of {baseline.protocol.processes} processes on {boots} boots or GPUs, {when[0]} to {when[-1]}",
        f"anchor {baseline.anchor_commit[:12]}, protocol {baseline.protocol.hash}, torch {baseline.environment.torch}, "
        f"triton {baseline.environment.triton}, driver {baseline.environment.driver}",
        "",
    ]
    for key, row in sorted(baseline.rows.items()):
        medians = [float(np.median(values)) for values in row.values if values]
        spread = 100 * (max(medians) / min(medians) - 1)
        run_set = f", run set {row.run_set}" if len(baseline.run_sets) > 1 and not row.control else ""
        noisy = ", accepted as noisy" if row.noisy else ""
        lines.append(f"{key}: {float(np.median(medians)):.6g} {row.unit}, runs within {spread:.2f} %{run_set}{noisy}")
        lines.extend(
            f"  before: {old.value:.6g} {old.unit} at {old.commit[:12]} ({old.time}), replaced: {old.reason}" for old in row.replaced
        )
        if row.anchor is not None:
            lines.append(f"  anchor: {float(np.median(row.anchor.values)):.6g} {row.unit} at {row.anchor.commit[:12]} ({row.anchor.time})")
    lines.extend(
        f"waived: {waiver.row} may be {waiver.change} until {waiver.expires} ({waiver.approver}, {waiver.reference}): {waiver.reason}"
        for waiver in baseline.waivers
    )
    return "\n".join(lines)
