"""A gate in shards: each runner or GPU measures its share of the processes, and the verdict is computed of all of them.

Shares are of processes, not of rows: every shard measures every row with the controls of its own GPU, and pairs of merge-base and HEAD
stay on one GPU. So shards take as long as each other, and no row is held against the controls of another GPU.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from rich.console import Console

from ci import case as cases
from ci import gate as gating
from ci import lost_rows, run
from ci.case import CaseFile, Sha
from ci.errors import InputError, UsageError
from ci.jsonio import read_json, strict_dumps, write_atomic
from ci.merge import load_kept, merge_runs
from ci.model import GateResult
from ci.repo import Commit, Repository
from ci.rows import now_text
from ci.run import RunPlan

SCHEMA_ID: Literal["rapid_llm/shard/1"] = "rapid_llm/shard/1"
FILE_NAME = "shard.json"
_RUNS = 2
"""Runs of a commit that is held against a stored baseline: a shard cannot know whether the others saw something suspicious."""


@dataclass(frozen=True)
class Share:
    """The `index`-th of `count` shards, from 1."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Share:
        """Reads ``2/3``.

        Raises:
            ValueError: It is no part of a whole.
        """
        found = re.fullmatch(r"([0-9]{1,3})/([0-9]{1,3})", text)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"{text!r} is no part of a whole: write 1/2 for the first of two shards")
        return cls(int(found[1]), int(found[2]))

    def of(self, total: int) -> int:
        """How many of `total` processes this shard measures: all shards together measure exactly `total`."""
        return total // self.count + (self.index <= total % self.count)


class ShardFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a shard's folder says of itself; all but `index` is the same in every shard of a gate."""

    schema: Literal["rapid_llm/shard/1"]
    index: Annotated[int, msgspec.Meta(ge=1, le=999)]
    count: Annotated[int, msgspec.Meta(ge=1, le=999)]
    mode: Literal["baseline", "ab", "aa"]
    device: str
    tip: Sha
    base: Sha
    head: Sha
    processes: Annotated[int, msgspec.Meta(ge=1)]
    """Pairs of processes of all shards, or processes of each run."""
    select: str | None
    notices: list[str]


def measure(root: Path, options: gating.Options, share: Share, console: Console) -> Path:
    """Measures a shard's share of the gate and leaves it in ``options.directory``; decides nothing.

    Raises:
        UsageError: The processes cannot be dealt out to so many shards.
        GateError: As `ci.gate.gate`.
    """
    directory = options.directory
    if directory.exists():
        if directory.is_dir() and any(directory.iterdir()) and not (directory / FILE_NAME).is_file():
            raise UsageError(f"{directory} is not empty and no shard: name a new folder with --report.")
        shutil.rmtree(directory / "runs", ignore_errors=True)
        (directory / FILE_NAME).unlink(missing_ok=True)
    situation = gating.look(root, options)
    places, device, head = situation.places, situation.device, situation.head
    base = situation.base
    mode: Literal["baseline", "ab", "aa"] = "baseline"
    total = options.rounds
    if situation.baseline is None:
        mode, total = ("aa" if base.sha == head.sha else "ab"), options.pairs
        base, head = situation.pair()
    console.print(f"{device.name}: shard {share.index} of {share.count}, {mode}, {head.label} ({head.short})", highlight=False)
    if mode == "baseline":
        for number, rounds in _runs_of(share, total).items():
            run.forget(places, device, [head])
            run.run_asv(places, RunPlan((head,), rounds, select=options.select), console)
            run.keep(places, device, [head], directory / "runs" / str(number))
    else:
        if share.of(total) == 0:
            raise UsageError(f"{total} pairs cannot be dealt out to {share.count} shards: use fewer shards or more pairs.")
        own = replace(options, pairs=share.of(total))
        gating.measure_pairs(places, device, (base, head), own, console)
        run.keep(places, device, (base, head), directory / "runs" / "pairs")
    told = ShardFile(
        SCHEMA_ID,
        share.index,
        share.count,
        mode,
        device.name,
        situation.tip.sha,
        base.sha,
        head.sha,
        total,
        options.select,
        situation.notices,
    )
    write_atomic(directory / FILE_NAME, strict_dumps(msgspec.to_builtins(told)))
    return directory


def _runs_of(share: Share, rounds: int) -> dict[int, int]:
    """Which of the two runs a shard measures, and in how many processes."""
    if share.count == 1:
        return dict.fromkeys(range(1, _RUNS + 1), rounds)
    per_run = share.count // _RUNS
    if share.count % _RUNS or rounds % per_run:
        raise UsageError(
            f"{_RUNS} runs of {rounds} processes cannot be dealt out to {share.count} shards: use {_RUNS} or {_RUNS * rounds} shards."
        )
    return {1 + (share.index - 1) // per_run: rounds // per_run}


def read(folder: Path) -> ShardFile:
    """What a shard's folder says of itself.

    Raises:
        InputError: It is no shard.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise InputError(f"{folder} is no shard of a gate: its runner left no {FILE_NAME}, run it again.")
    try:
        shard = msgspec.convert(read_json(path), ShardFile)
        re.compile(shard.select or "")
        return shard
    except re.error as error:
        raise InputError(f"{path} selects rows by what is no regular expression ({error}); measure the shard again.") from error
    except msgspec.ValidationError as error:
        raise InputError(f"{path} does not follow {SCHEMA_ID}: {error}; measure the shard with this version of the gate.") from error


def verdict(root: Path, folders: Sequence[Path], directory: Path) -> GateResult:
    """Merges the shards of one gate and judges them; the merged runs lie in ``directory/runs``.

    Raises:
        InputError: A shard is missing, twice there, or of another gate; the message says which.
        GateError: As `ci.gate.gate`.
    """
    shards = sorted(((read(folder), folder) for folder in folders), key=lambda shard: shard[0].index)
    if not shards:
        raise UsageError("There are no shards to merge: name the folders that `python -m ci gate --shard` made.")
    first, origin = shards[0]
    for shard, folder in shards[1:]:
        for field in ShardFile.__struct_fields__:
            here, there = getattr(first, field), getattr(shard, field)
            if field not in ("index", "notices") and here != there:
                raise InputError(f"{origin} and {folder} are no shards of one gate: {field} is {here!r} and {there!r}.")
    found = [shard.index for shard, _ in shards]
    if found != list(range(1, first.count + 1)):
        raise InputError(
            f"The gate has shards 1 to {first.count}, and {', '.join(map(str, found))} came: run what is missing, give each once."
        )
    gating.clear(directory)
    names = sorted({path.name for _, folder in shards for path in (folder / "runs").iterdir()})
    for name in names:
        shutil.rmtree(directory / "runs" / name, ignore_errors=True)
        merge_runs([folder / "runs" / name for _, folder in shards if (folder / "runs" / name).is_dir()], directory / "runs" / name)
    case = CaseFile(
        mode=first.mode,
        confirm="runs",
        device=first.device,
        base=first.base,
        head=first.head,
        select=first.select,
        notices=list(dict.fromkeys(notice for shard, _ in shards for notice in shard.notices)),
        suites=None if first.mode == "aa" else lost_rows.suites(Repository(root), Commit(first.base, first.base[:12])),
        shards=first.count,
        created_at=now_text(),
    )
    if first.mode == "baseline":
        _check_runs(root, first, directory, names)
    elif names != ["pairs"]:
        raise InputError(f"The shards hold {', '.join(names) or 'nothing'} and not one comparison in pairs: measure them again.")
    cases.write(case, directory)
    return cases.judge(directory)


def _check_runs(root: Path, shard: ShardFile, directory: Path, names: Sequence[str]) -> None:
    """Refuses shards that lack a run, and puts the stored baseline beside the others."""
    if names != [str(number) for number in range(1, _RUNS + 1)]:
        raise InputError(f"The shards hold {len(names)} runs, and {_RUNS} are needed: measure the missing shards.")
    repository = Repository(root)
    machine = load_kept(directory / "runs" / "1").machine
    content = repository.read(Commit(repository.commit(shard.tip).sha, shard.tip[:12]), f"baselines/{machine}.json")
    if content is None:
        raise InputError(f"The shards were measured for a stored baseline, and {shard.tip[:12]} has none of {machine}.")
    write_atomic(directory / cases.BASELINE_NAME, content.decode("utf-8"))
