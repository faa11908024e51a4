"""The table of every row of kept runs, as Markdown for the docs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from ci.errors import UsageError
from ci.model import ProcessRecord, RowRecord
from ci.records import read_process_records
from ci.rows import section_of

_TITLES = {
    "decode-read": "Decode read, fp16 and bf16",
    "decode-read-fp8": "Decode read, e4m3 and int8",
    "kv-write-prefill": "KV write, prefill",
    "kv-write-prefill-fp8": "KV write, prefill, e4m3 and int8",
    "kv-write-decode": "KV write, decode (launch)",
    "allocator": "Allocator (host)",
    "control": "Controls",
    "other": "Other",
}
_SHARES = ("peak_fraction", "ceiling_fraction", "copy_fraction")
_WITHOUT_SHARES = ("kv-write-decode", "allocator")


def table(folders: Sequence[Path]) -> str:
    """Markdown tables, a section each, of the medians over all processes of the runs in `folders`.

    Raises:
        UsageError: The folders hold no records.
    """
    processes = [process for folder in folders for process in read_process_records(folder / "records")]
    if not processes:
        raise UsageError(f"{', '.join(map(str, folders))} hold no process records: name folders that `python -m ci run --keep` made.")
    rows: dict[str, dict[str, list[RowRecord]]] = defaultdict(lambda: defaultdict(list))
    for record in (row for process in processes for row in process.rows if row.status != "skipped"):
        rows[section_of(record, record.key)][str(record.key)].append(record)
    parts = [_heading(processes)]
    for section, title in _TITLES.items():
        if section in rows:
            parts.append(f"## {title}\n\n{_section(rows[section].values(), shares=section not in _WITHOUT_SHARES)}")
    return "\n\n".join(parts) + "\n"


def _heading(processes: Sequence[ProcessRecord]) -> str:
    known = processes[-1].environment
    device = known["device"]
    assert isinstance(device, dict)
    boots = len({process.environment.get("boot_id") for process in processes})
    peak = statistics.median(p.ceilings.get("memory_peak_gb_per_s", 0.0) for p in processes)
    rates = ", ".join(
        f"{name} {statistics.median(p.ceilings[f'{name}_gb_per_s'] for p in processes):,.0f} GB/s"
        for name in ("read", "write", "copy")
        if all(f"{name}_gb_per_s" in p.ceilings for p in processes)
    )
    days = sorted({process.started_at[:10] for process in processes})
    return (
        f"{device['name']}, driver {known['driver']}, CUDA {known['cuda']}, torch {known['torch']}, triton {known['triton']}, commit"
        f" {processes[-1].commit[:12]}, {' to '.join(days)}: medians of {len(processes)} processes"
        f" on {boots} {'boots' if boots > 1 else 'boot'}. Memory peak {peak:,.0f} GB/s from the device's properties;"
        f" measured ceilings: {rates} (bytes read plus bytes written)."
    )


def _section(groups: Iterable[list[RowRecord]], *, shares: bool) -> str:
    head = [
        "case",
        "kernel",
        "throughput",
        "latency",
        *(["of peak", "of ceiling", "of copy"] if shares else []),
        "between processes",
        "max abs diff",
        "timer",
    ]
    lines = [head, ["---"] + ["---" if name in ("kernel", "timer") else "---:" for name in head[1:]]]
    for records in groups:
        last = records[-1]
        values = [record.value for record in records if record.value is not None]
        latencies = [record.latency_us for record in records if record.latency_us is not None]
        share = [_median_percent([getattr(r, name) for r in records]) for name in _SHARES] if shares else []
        lines.append(
            [
                ", ".join(last.key.params),
                last.impl,
                f"{_digits(statistics.median(values))} {last.unit}",
                f"{_digits(statistics.median(latencies))} µs",
                *share,
                f"{100 * statistics.stdev(values) / statistics.mean(values):.2f} %" if len(values) > 1 else "",
                "" if last.max_abs_diff is None else f"{max(r.max_abs_diff or 0.0 for r in records):.1e}",
                last.timer,
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _median_percent(fractions: Sequence[float | None]) -> str:
    known = [fraction for fraction in fractions if fraction is not None]
    return f"{100 * statistics.median(known):.1f} %" if known else ""


def _digits(value: float) -> str:
    """Four significant digits, thousands separated."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
