"""`resample`: whole A/A gates drawn from recorded processes of one code, and what the gate finds once the recorded values are shifted.

A gate takes K processes of one boot as the run under test, runs of K of the remaining processes as its baseline, and pairs of processes of
one boot for the confirm stage. A pairing takes all processes of a boot at random and none twice; where that gives fewer than 48 pairs,
further random pairings follow, so that pairs repeat: the table says how many different ones there are. All rows keep their processes
together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ci import noise
from ci.errors import InputError
from ci.pairs import DELTA0
from tests.statistics import ours, tables
from tests.statistics.records import Array, Processes

SEED = 20261130
SIZES = (0.005, 0.01, 0.02, 0.03, 0.05, 0.10)
PROCESSES = 3
MOST_RUNS = 10
LEAST_RUNS = 3


@dataclass(frozen=True)
class Drawn:
    """One A/A gate."""

    screened: ours.Screened
    d: Array
    """[rows, 48], differences of pairs of processes of one boot."""
    mde80: Array
    """[rows], as the gate publishes it; NaN for controls."""


def _runs(processes: Processes, left: Sequence[int], rng: np.random.Generator) -> list[list[int]]:
    """Runs of K of these processes, each of one boot, in random order."""
    found, free = [], set(left)
    for of_boot in processes.boots().values():
        order = rng.permutation([i for i in of_boot if i in free]).tolist()
        found += [order[start : start + PROCESSES] for start in range(0, len(order) - PROCESSES + 1, PROCESSES)]
    return [found[i] for i in rng.permutation(len(found))[:MOST_RUNS]]


def _pairs(processes: Processes, rng: np.random.Generator, count: int) -> Array:
    """[rows, count] differences, pairing after pairing."""
    pairs: list[tuple[int, int]] = []
    while len(pairs) < count:
        pairing = []
        for of_boot in processes.boots().values():
            order = rng.permutation(of_boot).tolist()
            pairing += list(zip(order[::2], order[1::2], strict=False))
        pairs += [pairing[i] for i in rng.permutation(len(pairing))]
    first, second = np.array(pairs[:count]).T
    return np.asarray((processes.y[first] - processes.y[second]).T)


def _rest(processes: Processes, head: Sequence[int], rng: np.random.Generator) -> Array:
    """[rows, B, K], runs of the processes that are not the head's."""
    taken = set(head)
    runs = _runs(processes, [i for i in range(len(processes.y)) if i not in taken], rng)
    if len(runs) < LEAST_RUNS:
        told = f"{len(processes.y)} processes leave {len(runs)} runs as a baseline"
        needed = (LEAST_RUNS + 1) * PROCESSES
        raise InputError(f"{told}; record at least {needed}, {PROCESSES} or more a boot, or name a stored --baseline")
    return np.stack([processes.y[run].T for run in runs], axis=1)


def draw(processes: Processes, rng: np.random.Generator, baseline: Array | None = None) -> Drawn:
    """Draws one A/A gate.

    Args:
        processes: Of one code.
        rng: Of the draw.
        baseline: [rows, B, K] of a stored baseline; None makes one of the remaining processes.

    Raises:
        InputError: The processes make no gate; the message says how many are needed.
    """
    boots = [of_boot for of_boot in processes.boots().values() if len(of_boot) >= PROCESSES]
    if not boots:
        raise InputError(f"no boot has {PROCESSES} processes, which one run takes; record more processes")
    sizes = np.array([len(of_boot) for of_boot in boots])
    of_boot = boots[rng.choice(len(boots), p=sizes / sizes.sum())]
    head = rng.permutation(of_boot)[:PROCESSES].tolist()
    values = _rest(processes, head, rng) if baseline is None else baseline
    screened = ours.screen(noise.fast60(values), noise.fast60(processes.y[head].T), processes.layout)
    return Drawn(screened, _pairs(processes, rng, ours.LOOKS[-1]), _mde80(screened, values, processes.layout))


def _mde80(screened: ours.Screened, values: Array, layout: ours.Layout) -> Array:
    floor = np.maximum(screened.floor, layout.least)
    made = np.full(len(layout.names), math.nan)
    for row in layout.judged:
        made[row] = noise.mde80_confirmed(
            float(screened.sd[row]),
            float(screened.nu[row]),
            values.shape[1],
            process_sd=noise.within_run_sd(list(values[row])),
            pairs=ours.LOOKS[-1],
            floor=float(floor[row]),
            delta0=DELTA0,
        )
    return made


def _found(gate: Drawn, layout: ours.Layout, row: int, shift: float, *, spread_floor: bool = True) -> bool:
    """Whether a row shifted by `shift` (ln latency) is REGRESSED, with the floor as `ours.gate` takes it; not for an unfit gate."""
    if not gate.screened.z[row] + shift > gate.screened.edge[row]:
        return False
    shifts = np.zeros(len(layout.names))
    shifts[row] = shift
    made = ours.gate(
        gate.screened, layout, lambda rows: gate.d[rows] + shifts[rows, None], delta0=DELTA0, shift=shifts, spread_floor=spread_floor
    )
    return row in made.confirmed.regressed


def resample(processes: Processes, *, seed: int, gates: int, power_gates: int, baseline: Array | None = None) -> dict[str, Any]:
    """Red A/A gates, and the power of each row by shifting what was recorded.

    Args:
        processes: Of one code on one device.
        seed: Of all draws.
        gates: A/A gates.
        power_gates: Of these, the fit ones on which each row is shifted by each size.
        baseline: As `draw` takes it.
    Returns:
        Counts, as `render` takes them.
    """
    layout = processes.layout
    rng = np.random.default_rng(seed)
    red = low_red = unfit = cost = 0
    fit: list[Drawn] = []
    red_rows: dict[str, int] = defaultdict(int)
    with ours.shared_flips():
        for _ in range(gates):
            drawn = draw(processes, rng, baseline)
            made = ours.gate(drawn.screened, layout, drawn.d.__getitem__, delta0=DELTA0)
            low = ours.gate(drawn.screened, layout, drawn.d.__getitem__, delta0=DELTA0, spread_floor=False)
            low_red += bool(low.confirmed.regressed.size)
            unfit += made.unfit
            red += bool(made.confirmed.regressed.size)
            cost += made.confirmed.measurements
            for row in made.confirmed.regressed:
                red_rows[layout.names[row]] += 1
            if not made.unfit and len(fit) < power_gates:
                fit.append(drawn)
        rows = []
        for row in layout.judged:
            found, low_found = (
                {
                    f"{size:g}": [sum(_found(gate, layout, row, math.log1p(size), spread_floor=own) for gate in fit), len(fit)]
                    for size in SIZES
                }
                for own in (True, False)
            )
            at_mde = sum(_found(gate, layout, row, math.log1p(gate.mde80[row])) for gate in fit)
            published = [float(gate.mde80[row]) for gate in fit]
            rows.append(
                {
                    "row": layout.names[row],
                    "class": layout.bottlenecks[row],
                    "power": found,
                    "low_floor": low_found,
                    "mde80": float(np.median(published)) if published else 0.0,
                    "at_mde80": [at_mde, len(fit)],
                }
            )
    boots = processes.boots()
    return {
        "device": processes.device,
        "commit": processes.commit,
        "processes": len(processes.y),
        "boots": {f"boot {i + 1}": len(of_boot) for i, of_boot in enumerate(boots.values())},
        "pairing": sum(len(of_boot) // 2 for of_boot in boots.values()),
        "different_pairs": sum(math.comb(len(of_boot), 2) for of_boot in boots.values()),
        "num_rows": int(layout.judged.size),
        "controls": int(layout.control.sum()),
        "left_out": list(processes.left_out),
        "red": [red, gates],
        "red_low_floor": [low_red, gates],
        "unfit": [unfit, gates],
        "red_rows": dict(sorted(red_rows.items())),
        "measurements": round(cost / gates) + PROCESSES * len(layout.names),
        "rows": rows,
    }


def by_class(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The counts of each bottleneck class, of all rows but those of class `host`, and of all rows."""
    groups = {name: [row for row in rows if row["class"] == name] for name in sorted({row["class"] for row in rows})}
    if len(groups) > 1 and "host" in groups:
        groups["all but host"] = [row for row in rows if row["class"] != "host"]
    groups["all"] = list(rows)
    made = []
    for name, of_class in groups.items():
        power, low = (
            {size: [sum(row[which][size][i] for row in of_class) for i in (0, 1)] for size in of_class[0][which]}
            for which in ("power", "low_floor")
        )
        at_mde = [sum(row["at_mde80"][i] for row in of_class) for i in (0, 1)]
        mde80 = sorted(row["mde80"] for row in of_class)
        known = {"class": name, "rows": len(of_class), "power": power, "low_floor": low}
        made.append({**known, "at_mde80": at_mde, "mde80": (mde80[0], mde80[-1])})
    return made


def _power(count: Sequence[int]) -> str:
    return tables.decimal(count[0] / max(count[1], 1), 2)


def render(data: dict[str, Any]) -> str:
    """The sentences and tables, as Markdown."""
    boots = ", ".join(str(count) for count in data["boots"].values())
    text = (
        f"{data['device']}, commit {data['commit'][:12]}: {data['processes']} fresh processes over {len(data['boots'])} boots ({boots}), "
        f"{data['num_rows']} judged rows and {data['controls']} controls. One pairing gives {data['pairing']} pairs, and there are "
        f"{data['different_pairs']} different ones; the last look takes {ours.LOOKS[-1]}"
        f"{', so that pairs repeat within a gate' if data['pairing'] < ours.LOOKS[-1] else ''}.\n\n"
        f"A/A gates that end red: {tables.share(*data['red'])}. Unfit: {tables.share(*data['unfit'])}. "
        f"Row-measurements a gate: {data['measurements']}.\n\n"
        "Share found of a recorded row that is shifted (not a kernel that is slower):\n\n"
    )
    sizes = list(data["rows"][0]["power"])
    columns = [*(f"{100 * float(size):g} %" for size in sizes), "MDE80", "found at its MDE80"]
    found = by_class(data["rows"])
    classes = [
        [
            f"{row['class']} ({row['rows']} rows)",
            *(_power(row["power"][size]) for size in sizes),
            f"{100 * row['mde80'][0]:.2f} to {100 * row['mde80'][1]:.2f} %",
            tables.share(*row["at_mde80"]),
        ]
        for row in found
    ]
    low = [[f"{row['class']} ({row['rows']} rows)", *(_power(row["low_floor"][size]) for size in sizes)] for row in found]
    low_text = (
        "\nThe same gates, if the pairs had to reach the instrument's floor alone (not built). A/A gates that end red: "
        f"{tables.share(*data['red_low_floor'])}.\n\n"
    )
    each = [
        [row["row"], *(_power(row["power"][size]) for size in sizes), f"{100 * row['mde80']:.2f} %", _power(row["at_mde80"])]
        for row in data["rows"]
    ]
    by_floor = low_text + tables.markdown(["class", *columns[:-2]], low)
    return text + tables.markdown(["class", *columns], classes) + by_floor + "\n" + tables.markdown(["row", *columns], each)
