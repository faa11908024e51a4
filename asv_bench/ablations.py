"""Does each property of the pool fixture matter here? Rows that differ in one property, measured side by side in one process.

    python -m asv_bench.ablations [--json FILE]

The rows go through the same verify, time and record as the gate's, but are not part of it: they are for `docs/findings-h200.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from asv_bench import bench_kv_write, bench_paged_decode, microbench, suite
from asv_bench.bench_paged_decode import uniform
from asv_bench.suite import Case, Outcomes, Prepared

if TYPE_CHECKING:
    import torch

_SHAPES = ((1, 32768), (8, 8192), (64, 8192), (128, 1024))
_POOL_FACTORS = (1, 8, 32)


def _decode_cases() -> tuple[Case, ...]:
    cases = []
    for batch, context in _SHAPES:
        cases += [
            uniform(batch, context, "float16", "cuda"),
            uniform(batch, context, "float16", "cuda", order="contiguous"),
            uniform(batch, context, "float16", "cuda", layout="split"),
            uniform(batch, context, "e4m3", "cuda"),
        ]
    for geometry in ({"num_kv_heads": 1}, {"head_dim": 64}):
        for layout in ("combined", "split"):
            cases.append(uniform(64, 8192, "float16", "cuda", layout=layout, **geometry))
    cases += [uniform(8, 1024, "float16", "cuda", l2_factor=factor) for factor in _POOL_FACTORS]
    cases += [uniform(64, 8192, "e4m3", "cuda", quantiser=quantiser) for quantiser in ("real", "cast")]
    return tuple(cases)


class DecodeAblations(suite.Suite):
    """Paged decode over pools that differ in one property."""

    op = "paged_decode_attention"
    impl = bench_paged_decode.PagedDecode.impl
    cases = _decode_cases()

    def build(self, case: Case, device: torch.device) -> Prepared:
        return bench_paged_decode.build(case, device)

    @suite.throughput("GB/s")
    def track_bandwidth(self, outcomes: Outcomes, case: str) -> float:
        return self.value(outcomes, case)


def main(arguments: list[str]) -> int:
    """Measures the ablations and the write suites on this device, prints the table, and keeps the records."""
    from asv_bench.worker import Bench, choose_device

    parser = argparse.ArgumentParser(prog="python -m asv_bench.ablations", description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write the records to")
    options = parser.parse_args(arguments)
    machine = Bench(choose_device())
    suites = [DecodeAblations, bench_kv_write.KVWritePrefill, bench_kv_write.KVWriteDecode, bench_kv_write.Allocator]
    rows = [row for row in suite.rows_of(suites) if machine.device.type in row.case.devices]
    records, table, failed = [], [], []
    for row in rows:
        record = machine.measure(row)
        records.append(record)
        if record["status"] in ("ok", "violation"):
            table.append(machine.table_row(row, record))
        else:
            failed.append(f"{record['status'].upper()}: {row.id}: {record['reason']}")
    if options.json:
        options.json.write_text(json.dumps({**machine.header(), "rows": records}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(microbench.report(table), end="")
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed or any(row.violation for row in table) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
