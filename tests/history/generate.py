"""Makes a results tree of any size with steps at known commits, for tests of the site and of its speed.

python -m tests.history.generate FOLDER --commits 10000 --rows 200 --devices 2
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

START_MS = 1_500_000_000_000
DAY_MS = 86_400_000


@dataclass(frozen=True)
class Planted:
    """A step: from `commit` on the row has `factor` of its value."""

    device: str
    benchmark: str
    index: int
    commit: int
    factor: float


def commit_hash(index: int) -> str:
    return f"{index:08x}" + "c" * 32


def write(
    folder: Path, *, commits: int, rows: int, devices: int, steps: int = 12, seed: int = 0, first: int = 0, per_benchmark: int = 20
) -> list[Planted]:
    """Writes `<folder>/benchmarks.json` and one file for each commit and device; returns the planted steps.

    Args:
        first: Write only commits from this one on; the numbers are those of the whole tree.
    """
    names = [f"bench_made.Suite{number:02d}.track_rate" for number in range(-(-rows // per_benchmark))]
    counts = [min(per_benchmark, rows - per_benchmark * number) for number in range(len(names))]
    params = {name: [f"'case {index:02d} float16 cold'" for index in range(count)] for name, count in zip(names, counts, strict=True)}
    benchmarks: dict[str, object] = {"version": 2}
    for number, name in enumerate(names):
        # Every fourth benchmark is a latency, of which less is better.
        lower = number % 4 == 3
        benchmarks[name] = {
            "code": "def track_rate(self): ...",
            "name": name,
            "param_names": ["case"],
            "params": [params[name]],
            "type": "track",
            "unit": "us" if lower else "GB/s",
            "higher_is_better": not lower,
            "version": "1",
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "benchmarks.json").write_text(json.dumps(benchmarks), encoding="utf-8")
    planted = []
    for device_number in range(devices):
        device = f"Device_{device_number}"
        rng = np.random.default_rng([seed, device_number])
        table = rng.uniform(500, 4000, rows) * (1 + rng.normal(0, 0.004, (commits, rows)))
        away = rng.random(table.shape) < 0.01
        table[away] *= 1 + rng.choice([-1, 1], away.sum()) * rng.uniform(0.03, 0.2, away.sum())
        chosen = rng.choice(rows, steps, replace=False)
        places = np.sort(rng.choice(np.arange(commits // 20, commits - 8), steps, replace=False))
        for order, (row, place) in enumerate(zip(chosen.tolist(), places.tolist(), strict=True)):
            factor = (0.9, 1.1, 0.95, 1.06)[order % 4]
            table[place - 1 : place + 1, row] = np.median(table[:, row])  # an outlier just there could belong to either side
            table[place:, row] *= factor
            planted.append(Planted(device, names[row // per_benchmark], row % per_benchmark, place, factor))
        home = folder / device
        home.mkdir(exist_ok=True)
        (home / "machine.json").write_text(json.dumps({"machine": device, "gpu": f"Made GPU {device_number}", "version": 1}), "utf-8")
        text = np.char.mod("%.6g", table)
        for commit in range(first, commits):
            cells = text[commit].tolist()
            results = []
            for number, name in enumerate(names):
                part = cells[number * per_benchmark : number * per_benchmark + counts[number]]
                samples = ",".join(f"[{value},{value},{value}]" for value in part)
                head = f'"{name}":[[{",".join(part)}],{json.dumps([params[name]])},"1",{START_MS},0.1'
                results.append(head + f",null,null,null,null,null,null,[{samples}]]")
            columns = '["result","params","version","started_at","duration","stats_ci_99_a","stats_ci_99_b","stats_q_25","stats_q_75",'
            columns += '"stats_number","stats_repeat","samples"]'
            (home / f"{commit_hash(commit)[:8]}-env.json").write_text(
                f'{{"commit_hash":"{commit_hash(commit)}","env_name":"env","date":{START_MS + commit * DAY_MS // 4},'
                f'"params":{{"machine":"{device}","python":"3.12","torch":"2.11.0"}},"python":"3.12","requirements":{{}},"env_vars":{{}},'
                f'"result_columns":{columns},"results":{{{",".join(results)}}},"durations":{{}},"version":2}}',
                encoding="utf-8",
            )
    return planted


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--commits", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args()
    for step in write(options.folder, commits=options.commits, rows=options.rows, devices=options.devices):
        print(step)
