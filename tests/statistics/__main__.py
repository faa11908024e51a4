"""`python -m tests.statistics NAME`: prints tables of docs/statistics.md, and stores what they rest on with `--json FILE`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ci.errors import GateError, InputError
from ci.pairs import DELTA0
from tests.statistics import page, recorded, replay, resample, simulate, spreads, tables, worlds
from tests.statistics.records import against, kept_runs, read_processes

ROOT = Path(__file__).resolve().parents[2]
BIAS_SDS = (0.0, 0.001, 0.002, 0.005)
DELTAS = (0.0, 0.002, 0.004, 0.01, 0.015)


def own_folders(root: Path) -> list[Path]:
    """The kept runs of the repository."""
    return kept_runs(root / "baselines" / "asv")


def run_replay(root: Path, shared_data: Path) -> dict[str, Any]:
    """Data of `replay`."""
    return {"rows": replay.replay(recorded.all_recorded(root, shared_data)), "made": tables.made_with("replay", 0)}


def run_spreads(folders: Sequence[Path]) -> dict[str, Any]:
    """Data of `spreads`, which draws nothing."""
    return {**spreads.spreads(read_processes(folders)), "made": tables.made_with(" ".join(["spreads", *map(str, folders)]), 0)}


def _rows(world: worlds.World) -> str:
    return f"{world.layout.judged.size} judged rows and {int(world.layout.control.sum())} controls"


def run_simulate(root: Path, *, quick: bool = False, seed: int = simulate.SEED, only: int | None = None) -> dict[str, Any]:
    """Data of `simulate`; `only` is the number of one world, from 1."""
    own = read_processes(own_folders(root))
    real, on_device = worlds.measured(own), worlds.measured(own, leave_out=("host",))
    many = worlds.measured(own, 100, seed=seed, leave_out=("host",))
    few, runs = "3 processes as baseline", len(own.runs())
    large, small = worlds.pessimistic(100), worlds.pessimistic(len(real.layout.names))
    plan = [
        (f"1. Pessimistic noise (simulated), {_rows(large)}, 10 runs of {few}", large, 10),
        (f"2. Pessimistic noise (simulated), {_rows(small)}, 10 runs of {few}", small, 10),
        (f"3. Simulated with the spreads of the H200's records, {_rows(real)}, {runs} runs of {few}", real, runs),
        (f"4. As 3, without the rows that the host's clock times, {_rows(on_device)}", on_device, runs),
        (f"5. As 4, {_rows(many)} drawn from those rows", many, runs),
    ]
    gates, moved, hit = (20, 10, 10) if quick else (2000, 300, 200)
    found = [
        {
            "title": title,
            "rows": simulate.simulate(world, seed=seed, runs=runs, gates=gates, shifted_gates=moved, power_gates=hit, delta0=DELTA0),
        }
        for title, world, runs in (plan if only is None else plan[only - 1 : only])
    ]
    return {"worlds": found, "delta0": DELTA0, "made": tables.made_with("simulate" + (" --quick" if quick else ""), seed)}


def with_others(found: dict[str, Any], path: Path) -> dict[str, Any]:
    """A part of what a command finds, among the other parts that the file has of the same command, seed and versions.

    Parts of `simulate` are worlds, by the number in the title; those of `bias` lines, by bias and delta0.

    Raises:
        InputError: The file's were made by something else.
    """
    if not path.exists():
        return found
    known = json.loads(path.read_text(encoding="utf-8"))
    if {**known["made"], "date": ""} != {**found["made"], "date": ""}:
        raise InputError(f"{path} was made by {known['made']}, and not as now by {found['made']}; make all of it anew")
    if "worlds" in found:
        titles = {world["title"][:2]: world for world in [*known["worlds"], *found["worlds"]]}
        return {**found, "worlds": [titles[title] for title in sorted(titles)]}
    lines = {(row["bias_sd"], row["delta0"]): row for row in [*known["rows"], *found["rows"]]}
    return {**found, "rows": [lines[line] for line in sorted(lines)]}


def run_bias(root: Path, *, quick: bool = False, seed: int = simulate.SEED, only: float | None = None) -> dict[str, Any]:
    """Data of `bias`; `only` is one delta0."""
    own = read_processes(own_folders(root))
    world, runs = worlds.measured(own, leave_out=("host",)), len(own.runs())
    gates, power = (20, 10) if quick else (1000, 300)
    deltas = DELTAS if only is None else (only,)
    rows = simulate.bias_table(world, seed=seed, runs=runs, gates=gates, power_gates=power, sds=BIAS_SDS, deltas=deltas)
    return {"rows": rows, "made": tables.made_with("bias" + (" --quick" if quick else ""), seed)}


def run_resample(
    folders: Sequence[Path], *, quick: bool = False, one_code: bool = False, baseline: Path | None = None, seed: int = resample.SEED
) -> dict[str, Any]:
    """Data of `resample`."""
    processes, runs = read_processes(folders, one_code=one_code), None
    words = ["resample", *(["--one-code"] if one_code else [])]
    if baseline is not None:
        processes, runs = against(processes, baseline)
        words += ["--baseline", str(baseline)]
    gates, power = (30, 3) if quick else (2000, 40)
    made = tables.made_with(" ".join([*words, *map(str, folders)]), seed)
    return {**resample.resample(processes, seed=seed, gates=gates, power_gates=power, baseline=runs), "made": made}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.statistics", description=__doc__)
    parser.add_argument("--json", type=Path, help="store what was found here")
    parser.add_argument("--quick", action="store_true", help="few gates, to see that it runs; the shares mean nothing")
    names = parser.add_subparsers(dest="name", required=True)
    made = names.add_parser("replay", help="every rule on the recorded gates")
    made.add_argument("--data", type=Path, help="folder of the shared data; $RAPID_LLM_SHARED/data where it is left out")
    made = names.add_parser("spreads", help="how far recorded runs differ: within a run, within a boot, between boots")
    made.add_argument("folders", type=Path, nargs="*", help="kept runs; baselines/asv/* where left out")
    made = names.add_parser("simulate", help="every rule on simulated noise")
    made.add_argument("--world", type=int, choices=range(1, 6), help="one of the five worlds alone; the file of --json keeps the others")
    made = names.add_parser("bias", help="a persistent bias of a rebuild against delta0")
    made.add_argument("--delta0", type=float, help="this margin alone; the file of --json keeps the others")
    made = names.add_parser("resample", help="A/A gates drawn from recorded processes")
    made.add_argument("folders", type=Path, nargs="*", help="kept runs, or runs/pairs of a gate; baselines/asv/* where left out")
    made.add_argument("--one-code", action="store_true", help="the folders' commits run the same code")
    made.add_argument("--baseline", type=Path, help="screen against this stored baseline, not against the remaining processes")
    names.add_parser("page", help="write docs/data/statistics/*.json into docs/statistics.md")
    return parser


def _own_folders_as_told() -> list[Path]:
    """The kept runs by the names that a reader in the checkout's root would type."""
    return [folder.relative_to(ROOT) if Path.cwd() == ROOT else folder for folder in own_folders(ROOT)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; 2 where it cannot."""
    chosen = _parser().parse_args(arguments)
    if chosen.name == "page":
        print("docs/statistics.md has changed" if page.rewrite(ROOT) else "docs/statistics.md is up to date")
        return 0
    try:
        if chosen.name == "replay":
            data = chosen.data or Path(os.environ.get("RAPID_LLM_SHARED", ROOT.parent / "shared")) / "data"
            if not data.is_dir():
                print(f"the shared data are not at {data}; name their folder with --data", file=sys.stderr)
                return 2
            found = run_replay(ROOT, data)
        elif chosen.name == "simulate":
            found = run_simulate(ROOT, quick=chosen.quick, only=chosen.world)
            if chosen.world and chosen.json:
                found = with_others(found, chosen.json)
        elif chosen.name == "bias":
            found = run_bias(ROOT, quick=chosen.quick, only=chosen.delta0)
            if chosen.delta0 is not None and chosen.json:
                found = with_others(found, chosen.json)
        elif chosen.name == "spreads":
            found = run_spreads(chosen.folders or _own_folders_as_told())
        else:
            folders = chosen.folders or _own_folders_as_told()
            found = run_resample(folders, quick=chosen.quick, one_code=chosen.one_code, baseline=chosen.baseline)
    except GateError as error:
        print(error, file=sys.stderr)
        return 2
    print(page.part(chosen.name, found))
    if chosen.json:
        tables.store(chosen.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
