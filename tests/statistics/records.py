"""Process records of one code as arrays: what each process read of each row, by boot and run."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ci import baseline as baselines
from ci import noise
from ci.errors import InputError
from ci.host_floor import TIMER, at_level
from ci.model import ProcessRecord, RowRecord
from ci.pairs import DEVICE_FLOOR, WALL_CLOCK_FLOOR
from ci.records import read_process_records
from ci.results import direction_of
from tests.statistics import compact
from tests.statistics.ours import Layout

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Processes:
    """Fresh processes of one code on one device.

    Attributes:
        layout: Of the rows, those that every process measured.
        y: [processes, rows], ln latency, of host rows less the deviation of their floors where all have them: what the gate compares.
        boot: [processes], boot and GPU of each, as one text.
        run: [processes], the folder that each came from.
        commit: What was measured.
        device: As the records name it.
        left_out: Rows that not every process measured.
        versions: [rows], of the measurement.
        floors: [processes, rows], the deviation of ln floor that `y` is less by, 0 for rows that are held against none.
        levels_us: [rows], the level that the deviation is from, NaN likewise.
    """

    layout: Layout
    y: Array
    boot: tuple[str, ...]
    run: tuple[str, ...]
    commit: str
    device: str
    left_out: tuple[str, ...]
    versions: tuple[str, ...] = ()
    floors: Array | None = None
    levels_us: Array | None = None

    def as_measured(self) -> Processes:
        """The same processes with no floor taken off."""
        return self if self.floors is None else replace(self, y=self.y + self.floors, floors=None, levels_us=None)

    def take(self, rows: Sequence[int]) -> Processes:
        """The same processes with some rows alone; the others are left out."""
        names, kept = self.layout.names, set(rows)
        gone = tuple(name for i, name in enumerate(names) if i not in kept)
        versions = tuple(self.versions[row] for row in rows)
        left_out = tuple(sorted({*self.left_out, *gone}))
        made = replace(self, layout=self.layout.take(rows), y=self.y[:, list(rows)], left_out=left_out, versions=versions)
        if self.floors is None or self.levels_us is None:
            return made
        return replace(made, floors=self.floors[:, list(rows)], levels_us=self.levels_us[list(rows)])

    def runs(self) -> list[Array]:
        """One [rows, processes] a folder, in the folders' order."""
        return [self.y[[i for i, run in enumerate(self.run) if run == name]].T for name in dict.fromkeys(self.run)]

    def run_boots(self) -> list[str]:
        """The boot of each run, in the order of `runs`.

        Raises:
            InputError: A run has processes of several boots.
        """
        found: dict[str, set[str]] = defaultdict(set)
        for run, boot in zip(self.run, self.boot, strict=True):
            found[run].add(boot)
        for run, boots in found.items():
            if len(boots) > 1:
                raise InputError(
                    f"run {run.partition(' ')[2]} has processes of {len(boots)} boots; keep each boot's in a folder of its own"
                )
        return [boots.pop() for boots in found.values()]

    def boots(self) -> dict[str, list[int]]:
        """Indices of the processes of each boot."""
        found: dict[str, list[int]] = defaultdict(list)
        for i, boot in enumerate(self.boot):
            found[boot].append(i)
        return dict(found)


def kept_runs(folder: Path) -> list[Path]:
    """The runs that a folder keeps, by name."""
    return sorted(folder.iterdir())


def ln_latency(row: RowRecord) -> float:
    """The ln of what the row's value says of its latency, up to a constant."""
    assert row.value is not None
    direction = direction_of(row.unit, "", None)
    if direction is None:
        raise InputError(f"{row.key} has the unit {row.unit!r}, of which nobody knows which way is better; leave the row out")
    return -math.log(row.value) if direction == "higher" else math.log(row.value)


def _place(record: ProcessRecord) -> str:
    device = record.environment.get("device")
    uuid = device.get("uuid") if isinstance(device, dict) else None
    return f"{record.environment.get('boot_id')} {uuid}"


def _device(record: ProcessRecord) -> str:
    device = record.environment.get("device")
    return str(device.get("name")) if isinstance(device, dict) else "unknown"


def read_processes(folders: Sequence[Path], *, one_code: bool = False) -> Processes:
    """Reads the records under each folder: kept runs of `python -m ci run --keep`, `runs/pairs` of a gate, or compact files in it.

    Args:
        folders: Each with a folder `records/`, or with files of `tests.statistics.compact`.
        one_code: The folders' commits differ by nothing that runs (a gate that compared a commit with itself makes an empty commit on it).
    Raises:
        InputError: Records are missing, of several commits or devices, or have no row in common; the message says what to do.
    """
    found: list[tuple[str, ProcessRecord]] = []
    for number, folder in enumerate(folders):
        inner = folder / "records"
        records = compact.read_folder(folder) or read_process_records(inner if inner.is_dir() else folder)
        found += [(f"{number} {folder.name}", record) for record in records]
    if not found:
        raise InputError(f"no process records under {', '.join(str(folder) for folder in folders)}; name folders of kept runs")
    commits, devices = {record.commit for _, record in found}, {_device(record) for _, record in found}
    if len(devices) > 1:
        raise InputError(f"the records are of {', '.join(sorted(devices))}; resample one device at a time")
    if len(commits) > 1 and not one_code:
        names = ", ".join(sorted(commit[:12] for commit in commits))
        raise InputError(
            f"the records are of the commits {names}; name folders of one commit, or say --one-code where they run the same code"
        )
    protocols = {record.protocol for _, record in found}
    if len(protocols) > 1:
        raise InputError(f"the records are of {len(protocols)} protocols; name folders that one protocol measured")
    tables = [{str(row.key): row for row in record.rows if row.status == "ok" and row.value is not None} for _, record in found]
    counts = Counter((name, row.version, row.unit, row.input_hash) for table in tables for name, row in table.items())
    whole = sorted(name for (name, *_), count in counts.items() if count == len(tables))
    if not whole:
        raise InputError("no row was measured alike by every process; name folders of one suite on one device")
    rows = [tables[-1][name] for name in whole]
    latencies = np.array([[table[name].latency_us or math.nan for name in whole] for table in tables])
    ticks = [
        2 * row.tick_us / latency if row.tick_us and latency > 0 else 0.0
        for row, latency in zip(rows, np.median(latencies, 0), strict=True)
    ]
    layout = Layout(
        names=tuple(whole),
        bottlenecks=tuple(row.bottleneck for row in rows),
        timers=tuple(row.timer for row in rows),
        control=np.array([row.control for row in rows], dtype=np.bool_),
        ticks=np.array(ticks),
        least=np.array([DEVICE_FLOOR if row.instrument == "device" else WALL_CLOCK_FLOOR for row in rows]),
    )
    y = np.array([[ln_latency(table[name]) for name in whole] for table in tables])
    left_out = tuple(sorted({name for table in tables for name in table} - set(whole)))
    boots, runs = tuple(_place(record) for _, record in found), tuple(run for run, _ in found)
    versions = tuple(row.version for row in rows)
    made = Processes(layout, y, boots, runs, sorted(commits)[0], devices.pop(), left_out, versions)
    return over_floors(made, np.array([[table[name].host_floor_us or math.nan for name in whole] for table in tables]))


def over_floors(measured: Processes, floors_us: Array) -> Processes:
    """The processes with all host rows held against their floors, or as measured where one of them lacks a floor.

    Args:
        measured: As measured.
        floors_us: [processes, rows], NaN where there is none.
    """
    host = np.array([timer == TIMER for timer in measured.layout.timers])
    if not host.any() or np.isnan(floors_us[:, host]).any():
        return measured
    levels = np.where(host, np.median(np.where(host, floors_us, 1.0), axis=0), math.nan)
    moved = np.where(host, np.log(np.where(host, floors_us / levels, 1.0)), 0.0)
    return replace(measured, y=measured.y - moved, floors=moved, levels_us=levels)


def against(processes: Processes, path: Path) -> tuple[Processes, Array]:
    """The rows that a stored baseline measured alike, and its runs of them: [rows, B, K], ln latency.

    Raises:
        InputError: No row is in both, or the baseline was recorded from these very processes.
    """
    stored = baselines.load(path)
    names = processes.layout.names
    rows = [i for i, name in enumerate(names) if name in stored.rows and stored.rows[name].version == processes.versions[i]]
    if not rows:
        raise InputError(f"{path} has no row of these processes in the same version; name a baseline of this device and suite")
    kept = processes.take(rows)
    known = [stored.rows[name] for name in kept.layout.names]
    runs = np.array([[noise.log_latency(run, row.direction) for run in row.values] for row in known])
    as_measured = kept.as_measured().y.T
    same = np.isclose(runs.reshape(len(rows), -1)[:, None, :], as_measured[:, :, None], rtol=0, atol=1e-12).any(axis=2).all(axis=0)
    if same.any():
        told = f"{int(same.sum())} of the {len(same)} processes are in {path} itself"
        raise InputError(f"{told}, so that they would be held against themselves; name later runs, or leave --baseline out")
    if kept.levels_us is None or any(row.timer == TIMER and row.host_floors_us is None for row in known):
        return kept.as_measured(), runs
    for i, row in enumerate(known):
        if row.host_floors_us is not None:
            pairs = zip(row.values, row.host_floors_us, strict=True)
            brought = [at_level(values, floors, float(kept.levels_us[i]), row.direction) for values, floors in pairs]
            runs[i] = [noise.log_latency(run, row.direction) for run in brought]
    return kept, runs
