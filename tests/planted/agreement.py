"""What the compiled rows say of each planted fault, and what a GPU says of it: `python -m tests.planted.agreement {static,timed,table}`.

`static FILE` compiles every fault for every architecture (no GPU). `timed FILE` measures the row of each fault in interleaved fresh
processes on the GPU of this machine: base, every fault, base again, in each round. `table STATIC TIMED` prints both side by side.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from asv_bench import session, suite
from ci import compiled_run
from ci.compiled import compare_compiled, summary_lines
from ci.compiled_model import CompiledFile
from tests.planted.faults import DECODE_ROW, FAULTS, WRITE_ROW, planted_copy

ROOT = Path(__file__).resolve().parents[2]
BASE, AGAIN = "base", "base again"


def static(select: str = f"{DECODE_ROW}|{WRITE_ROW}") -> dict[str, Any]:
    """Findings of each fault on each architecture: figure, before, after, verdict."""
    with tempfile.TemporaryDirectory() as scratch:
        base = _compiled(ROOT, Path(scratch), select)
        found: dict[str, Any] = {}
        for fault in FAULTS:
            source = planted_copy(ROOT, fault, Path(scratch, fault.name.replace(" ", "-")))
            result = compare_compiled(base, _compiled(source, Path(scratch), select), {})
            found[fault.name] = {
                "exit_code": result.exit_code,
                "lines": summary_lines(result.findings),
                "architectures": {
                    finding.architecture: {
                        "verdict": finding.verdict.value,
                        "reason": finding.reason,
                        "changes": [[c.metric, c.before, c.after, c.verdict.value] for c in finding.changes],
                    }
                    for finding in result.findings
                },
            }
    tools = {"triton": base.triton, "ptxas": base.ptxas}
    return {"tools": tools, "rows": sorted(base.architectures["sm_90"].rows), "faults": found}


def _compiled(source: Path, scratch: Path, select: str) -> CompiledFile:
    output, cache = scratch / "compiled.json", ROOT / ".asv" / "compiled"
    command = [sys.executable, "-m", "asv_bench.compiled", "--source", str(source), "--cache", str(cache), "--output", str(output)]
    subprocess.run([*command, "--select", select], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    return compiled_run.read_compiled(output)


def timed(rounds: int, kept: Path) -> None:
    """Latencies of each fault's row in µs by round, the base's before and after them; why a row was refused, where it was.

    Written to `kept` after each round, so that a machine that is taken away leaves what was measured.
    """
    rows = {pattern: _row_on_gpu(pattern) for pattern in (DECODE_ROW, WRITE_ROW)}
    latencies: dict[str, dict[str, list[float]]] = {row: {} for row in rows.values()}
    environment: dict[str, Any] = {}
    refused: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        sources = {fault.name: planted_copy(ROOT, fault, Path(scratch, fault.name.replace(" ", "-"))) for fault in FAULTS}
        plan = [(BASE, ROOT, list(rows.values()))]
        plan += [(fault.name, sources[fault.name], [rows[fault.rows]]) for fault in FAULTS]
        plan += [(AGAIN, ROOT, list(rows.values()))]
        for done in range(1, rounds + 1):
            for name, source, wanted in plan:
                print(f"round {done}: {name} ...", file=sys.stderr, flush=True)
                environment, outcomes = _measured(source, wanted)
                for row, outcome in outcomes.items():
                    if outcome["status"] == "ok":
                        latencies[row].setdefault(name, []).append(outcome["latency_us"])
                    else:
                        refused[name] = f"{outcome['status']}: {outcome['reason']}"
            known = {name: environment.get(name) for name in ("device", "driver", "cuda", "torch", "triton", "python", "commit")}
            _write(kept, {"environment": known, "rounds": done, "latency_us": latencies, "refused": refused})


def _write(path: Path, made: dict[str, Any]) -> None:
    path.write_text(json.dumps(made, allow_nan=False, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _row_on_gpu(pattern: str) -> str:
    (row,) = [row.id for row in suite.all_rows() if pattern in row.id and "cuda" in row.case.devices]
    return row


def _measured(source: Path, rows: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    os.environ.update(PYTHONPATH=str(source), ASV_BUILD_DIR=str(source))
    os.chdir(source)  # the process looks there first
    events, death = session._run_worker(rows)
    if death is not None:
        raise RuntimeError(f"the measuring process {death}")
    (header,) = [event for event in events if event["event"] == "header"]
    return header["environment"], {event["row"]: event["outcome"] for event in events if event["event"] == "row"}


def table(flags: dict[str, Any], times: dict[str, Any] | None, arch: str = "sm_90") -> str:
    """Markdown: each fault, what the compiled row of `arch` says first, and the timed change."""
    lines = ["| planted | architectures that flag it | on " + arch + " | timed | agree |", "|---|---|---|--:|---|"]
    for fault in FAULTS:
        found = flags["faults"][fault.name]["architectures"]
        by_verdict: dict[str, list[str]] = {}
        for name, finding in sorted(found.items(), key=lambda item: int(item[0][3:])):
            by_verdict.setdefault(finding["verdict"], []).append(name.removeprefix("sm_"))
        where = "; ".join(f"{verdict} {', '.join(names)}" for verdict, names in by_verdict.items())
        here = found.get(arch, {"verdict": "IDENTICAL", "changes": [], "reason": ""})
        said = [f"{metric} {old} → {new}" for metric, old, new, verdict in here["changes"] if verdict == here["verdict"]]
        change, agrees = "not measured", ""
        if times is not None and fault.name in times["refused"]:
            change, agrees = times["refused"][fault.name], "no number"
        elif times is not None and any(fault.name in row for row in times["latency_us"].values()):
            effect, noise = _effect(times, fault.name, fault.rows)
            change = f"{effect:+.1%}"
            slower = effect > max(0.005, 2 * noise)
            agrees = "yes" if slower == (here["verdict"] == "REGRESSED") else "no"
        lines.append(f"| {fault.name} | {where} | {here['verdict']}: {'; '.join(said[:3]) or here['reason']} | {change} | {agrees} |")
    return "\n".join(lines) + "\n"


def _effect(times: dict[str, Any], name: str, pattern: str) -> tuple[float, float]:
    """Change of latency against the mean of the two bases of each round, and how far those are apart."""
    (row,) = [latencies for row, latencies in times["latency_us"].items() if pattern in row]
    pairs = list(zip(row[name], row[BASE], row[AGAIN], strict=True))
    effect = statistics.mean(math.log(value / math.sqrt(first * last)) for value, first, last in pairs)
    noise = max(abs(math.log(last / first)) for _, first, last in pairs)
    return math.expm1(effect), noise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("static", "timed", "table"))
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    if options.action == "table":
        print(
            table(*(json.loads(path.read_text(encoding="utf-8")) for path in options.files), *([None] if len(options.files) == 1 else [])),
            end="",
        )
        return
    if options.action == "static":
        _write(options.files[0], static())
    else:
        timed(options.rounds, options.files[0])


if __name__ == "__main__":
    main()
