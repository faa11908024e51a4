"""What trials of paged decode or of the K/V write found, as Markdown: the last one by shape, and all of decode's beside each other.

    python -m asv_bench.trial_table FILE... [--compact FOLDER]

Files as `python -m asv_bench.tune --trial --json FILE` (or `--trial-write`) writes them, or as `--compact` makes of them, a line
a result. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asv_bench.trial_results import SCHEMA

_FIELDS = ("what", "cell", "block_size", "config", "latency_us", "share_of_read_ceiling", "max_abs_diff", "reason")
_WRITE_FIELDS = (*_FIELDS, "gb_per_s", "ceiling_gb_per_s", "share_of_ceiling")
_NUMBERS = ("latency_us", "share_of_read_ceiling", "max_abs_diff", "gb_per_s", "ceiling_gb_per_s", "share_of_ceiling")
_BLOCKS = 16


@dataclass(frozen=True)
class TrialFile:
    """A trial that was read.

    Attributes:
        head: All but the results.
        rows: The results, as `asv_bench.trial_results.Results.add` takes them.
    """

    head: dict[str, Any]
    rows: list[dict[str, Any]]

    def times(self, cell: str, what: str, block_size: int | None) -> dict[str, float]:
        """Median microseconds by config (as JSON), in the order in which they were first measured."""
        found: dict[str, list[float]] = {}
        for row in self.rows:
            if (row["cell"], row["what"], row["block_size"]) == (cell, what, block_size) and row["latency_us"] is not None:
                found.setdefault(json.dumps(row["config"]), []).append(row["latency_us"])
        return {config: statistics.median(times) for config, times in found.items()}

    @property
    def cells(self) -> list[str]:
        """In the order in which they were measured."""
        return list(dict.fromkeys(row["cell"] for row in self.rows if row["what"] == "ours"))

    @property
    def of_writes(self) -> bool:
        """Whether it is of the K/V write."""
        return any("tokens" in row["config"] for row in self.rows if row["config"] is not None)

    @property
    def label(self) -> str:
        """Day and commit."""
        return f"{self.head['date'][:10]} {str(self.head['environment']['commit'])[:12]}"


def read(path: Path) -> TrialFile:
    """Reads a trial.

    Raises:
        ValueError: It is none, or one of a tiny or interpreted run, whose times say nothing.
    """
    stored = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no trial ({SCHEMA}); name a file that `python -m asv_bench.tune --trial` wrote")
    if stored["quick"] or stored["interpreted"]:
        raise ValueError(f"{path} is of tiny shapes or of Triton's interpreter: its times say nothing")
    names = stored.pop("config_fields", None)
    rows = stored.pop("results")
    if names is not None:
        fields = _WRITE_FIELDS if "tokens" in names else _FIELDS
        rows = [dict(zip(fields, row, strict=True)) for row in rows]
        rows = [row if row["config"] is None else {**row, "config": dict(zip(names, row["config"], strict=True))} for row in rows]
    return TrialFile(stored, rows)


def compact(trial: TrialFile) -> str:
    """The same in a line a result."""
    names = next(list(row["config"]) for row in trial.rows if row["config"] is not None)
    fields = _WRITE_FIELDS if trial.of_writes else _FIELDS
    lines = []
    for row in trial.rows:
        config = None if row["config"] is None else [row["config"][name] for name in names]
        rounded = {name: None if row[name] is None else float(f"{row[name]:.6g}") for name in _NUMBERS if name in row}
        lines.append(json.dumps([{**row, **rounded, "config": config}.get(name) for name in fields], separators=(",", ":")))
    head = json.dumps({**trial.head, "config_fields": names}, indent=1)
    return head.removesuffix("\n}") + ',\n "results": [\n' + ",\n".join(lines) + "\n]}\n"


def by_shape(trial: TrialFile) -> str:
    """A line a shape: the rule's config, the best one, and what they are held against."""
    lines = [
        "| batch x context | rule, us | best, us | best config | of read ceiling | pages of 16, us | cuDNN SDPA, us | flash SDPA, us"
        " | rule / best | best / cuDNN | pages of 16 / cuDNN | e4m3 / fp16 |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for cell in trial.cells:
        times = trial.times(cell, "ours", 1)
        if not times:
            continue
        rule, (config, best) = next(iter(times.values())), min(times.items(), key=lambda entry: entry[1])
        pages, *peers = (
            min(trial.times(cell, what, size).values(), default=None)
            for what, size in (("ours", _BLOCKS), ("sdpa-cudnn", None), ("sdpa-flash", None))
        )
        half = min(trial.times(cell.replace(" e4m3", " float16"), "ours", 1).values(), default=None) if cell.endswith(" e4m3") else None
        share = next(
            row["share_of_read_ceiling"] * row["latency_us"] for row in trial.rows if row["cell"] == cell and row["share_of_read_ceiling"]
        )
        told = [_us(value) for value in (pages, *peers)]
        ratios = [_ratio(rule, best), _ratio(best, peers[0]), _ratio(pages, peers[0]), _ratio(best, half)]
        lines.append(
            f"| {cell} | {_us(rule)} | {_us(best)} | {_config(config)} | {share / best:.1%} | {' | '.join(told)} | {' | '.join(ratios)} |"
        )
    return "\n".join(lines)


def by_tokens(trial: TrialFile) -> str:
    """A line a number of tokens and dtype of the K/V write: the rule's config, the best one, and what they are held against."""
    lines = [
        "| tokens, cache | rule, us | best, us | best config | of the ceiling for its bytes | plain copy, us | index_copy_, us"
        " | rule / best | rule / plain copy |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for cell in sorted(trial.cells, key=lambda cell: (cell.split()[1], int(cell.split()[0].removeprefix("T=")))):
        times = trial.times(cell, "ours", None)
        if not times:
            continue
        rule, (text, best) = next(iter(times.values())), min(times.items(), key=lambda entry: entry[1])
        copy, index = (min(trial.times(cell, what, None).values(), default=None) for what in ("plain copy", "index_copy_"))
        full = next(row["share_of_ceiling"] * row["latency_us"] for row in trial.rows if row["cell"] == cell and row["latency_us"])
        config = json.loads(text)
        told = f"{config['tokens']} of {config['block']} x {config['num_warps']} warps, {'K and V' if config['halves'] == 2 else 'K or V'}"
        columns = [_us(rule), _us(best), told, f"{full / best:.1%}", _us(copy), _us(index), _ratio(rule, best), _ratio(rule, copy)]
        lines.append(f"| {cell} | {' | '.join(columns)} |")
    return "\n".join(lines)


def beside_each_other(trials: Sequence[TrialFile]) -> str:
    """A line a shape, a trial a column: microseconds of the rule's config and of the best, tables of rows and of pages."""
    labels = [trial.label for trial in trials]
    lines = [
        f"| batch x context | {' | '.join(f'{label}: rule, best, pages' for label in labels)} |",
        f"| --- | {' | '.join('---:' for _ in labels)} |",
    ]
    for cell in trials[-1].cells:
        columns = []
        for trial in trials:
            times = trial.times(cell, "ours", 1)
            pages = min(trial.times(cell, "ours", _BLOCKS).values(), default=None)
            columns.append(", ".join(_us(value) for value in (next(iter(times.values())), min(times.values()), pages)) if times else "")
        lines.append(f"| {cell} | {' | '.join(columns)} |")
    return "\n".join(lines)


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _ratio(value: float | None, to: float | None) -> str:
    return "" if value is None or to is None else f"{value / to:.3f}"


def _config(text: str) -> str:
    config = json.loads(text)
    told = f"{config['variant']} {config['block_n']} x {config['num_warps']} warps, {config['num_stages']} stages"
    return f"{told}, {config['programs_per_sm']} a multiprocessor"


def told_of(trial: TrialFile) -> str:
    """Device, versions, day and commit in a sentence."""
    known = trial.head["environment"]
    return (
        f"{known['device']['name']}, driver {known['driver']}, CUDA {known['cuda']}, torch {known['torch']}, triton {known['triton']},"
        f" commit {str(known['commit'])[:12]}, {trial.head['date'][:10]}; read ceiling {trial.head['read_ceiling_gb_per_s']:,.0f} GB/s."
    )


def page(trials: Sequence[TrialFile]) -> str:
    """What the command prints."""
    last = trials[-1]
    parts = [told_of(last), "", by_tokens(last) if last.of_writes else by_shape(last)]
    if len(trials) > 1 and not any(trial.of_writes for trial in trials):
        parts += ["", beside_each_other(trials)]
    return "\n".join(parts)


def main(arguments: Sequence[str]) -> int:
    """The command; 2 where a file is no trial."""
    parser = argparse.ArgumentParser(prog="python -m asv_bench.trial_table", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("files", type=Path, nargs="+", help="trials, the oldest first")
    parser.add_argument("--compact", type=Path, metavar="FOLDER", help="instead write each to this folder, a line a result")
    options = parser.parse_args(arguments)
    try:
        trials = [read(path) for path in options.files]
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.compact is None:
        print(page(trials))
        return 0
    options.compact.mkdir(parents=True, exist_ok=True)
    for path, trial in zip(options.files, trials, strict=True):
        (options.compact / path.name).write_text(compact(trial), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
