"""Results and verdicts with names that want to be markup."""

from __future__ import annotations

import json
from pathlib import Path

from ci.model import GateResult, RowKey, RowOutcome, RowVerdict, RunVerdict

NASTY = ("<img src=x onerror=alert(1)>", "a|b", "@everyone", "</script><script>alert(2)</script>", "{{7*7}}")

GATE_FIELDS = ("benchmark", "parameter", "device", "reason", "commit", "notice")


def nasty_result(template: GateResult) -> GateResult:
    """A verdict in which every text is one of NASTY, on rows that have all that a row can have."""
    from dataclasses import replace

    rows = []
    measured = [row for row in template.rows if row.record and row.verdict is RowVerdict.PASS]
    for index, text in enumerate(NASTY):
        row = measured[index]
        assert row.record is not None
        record = replace(row.record, impl=text, explain=f"chosen: {text}", timer=text, flags=(text,))
        key = RowKey(f"bench.{text}", (text, f"{text} float16"))
        rows.append(replace(row, key=key, record=record, reason=text, flags=(text,), verdict=RowVerdict.REGRESSED, effect=0.1))
    rows.append(RowOutcome(RowKey(NASTY[0]), RowVerdict.SKIPPED, NASTY[3], "other"))
    return replace(
        template,
        verdict=RunVerdict.REGRESSION,
        exit_code=1,
        reason=NASTY[0],
        device=NASTY[3],
        base=NASTY[1],
        head=NASTY[0],
        rows=tuple(rows),
        notices=NASTY,
        environment={NASTY[0]: NASTY[4], "branch": NASTY[2]},
    )


def write_tree(folder: Path, device: str = "Device", values: dict[str, list[float]] | None = None) -> None:
    """A results tree of 12 commits: a throughput and a latency that get worse, and both that get better, under nasty parameters."""
    down, up = [100.0] * 6 + [70.0] * 6, [100.0] * 6 + [140.0] * 6
    found = values or {
        "bench.Rate.track_falls": down,
        "bench.Rate.track_rises": up,
        "bench.Time.track_falls": down,
        "bench.Time.track_rises": up,
    }
    names = [repr(text) for text in NASTY]
    benchmarks: dict[str, object] = {"version": 2}
    for name in found:
        benchmarks[name] = {
            "code": f"def {NASTY[0]}: return '{NASTY[3]}'",
            "name": name,
            "param_names": [NASTY[0]],
            "params": [names],
            "type": "track",
            "unit": "us" if "Time" in name else "GB/s",
            "higher_is_better": "Time" not in name,
            "version": "1",
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "benchmarks.json").write_text(json.dumps(benchmarks), encoding="utf-8")
    place = folder / device
    place.mkdir()
    machine = {"machine": device, "gpu": NASTY[0], "cpu": NASTY[3], NASTY[0]: NASTY[0], "version": 1}
    (place / "machine.json").write_text(json.dumps(machine), encoding="utf-8")
    for commit in range(12):
        wave = 1 + 0.001 * (-1) ** commit
        results = {
            name: [[series[commit] * wave * (1 + index) for index in range(len(names))], [names], "1"] for name, series in found.items()
        }
        data = {
            "commit_hash": f"{commit:08x}{'d' * 32}",
            "env_name": "env",
            "date": 1_700_000_000_000 + commit * 86_400_000,
            "params": {"machine": device, "python": "3.12", "tag": NASTY[0]},
            "env_vars": {},
            "result_columns": ["result", "params", "version"],
            "results": results,
            "version": 2,
        }
        (place / f"{commit:08x}-env.json").write_text(json.dumps(data), encoding="utf-8")
