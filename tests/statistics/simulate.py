"""`simulate` and `bias`: whole gates on simulated noise, every rule on the same data.

`simulate` draws gates without a regression, gates without a regression whose run is shifted as a whole, and gates in which one row is
slower. `bias` gives every row of HEAD a persistent bias, as a rebuild may, and shows which delta0 holds the level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ci import noise
from ci.pairs import DELTA0
from tests.statistics import ours, rules, tables
from tests.statistics.worlds import Draw, World, shifted

SEED = 20261130
CHUNK = 100
SIZES = (0.01, 0.02, 0.03, 0.05, 0.10)
OURS = "screen, then paired confirm"
LOW_FLOOR = "the same, pairs with the instrument's floor alone (not built)"
"""What the gate would do if the pairs had the floor of the instrument alone, and not three SDs of the row's runs."""
PROCESSES = 3


@dataclass
class Tally:
    """What one rule did."""

    red: int = 0
    gates: int = 0
    red_shifted: int = 0
    unfit: int = 0
    unfit_shifted: int = 0
    shifted: int = 0
    found: dict[float, int] = field(default_factory=dict)
    fit: dict[float, int] = field(default_factory=dict)
    measurements: int = 0

    def row(self, name: str) -> dict[str, Any]:
        """As it is stored."""
        return {
            "rule": name,
            "red": [self.red, self.gates],
            "red_shifted": [self.red_shifted, self.shifted],
            "unfit": [self.unfit, self.gates],
            "unfit_shifted": [self.unfit_shifted, self.shifted],
            "power": {f"{size:g}": [self.found[size], self.fit[size]] for size in sorted(self.found)},
            "measurements": round(self.measurements / self.gates),
        }


@dataclass(frozen=True)
class Batch:
    """Some gates, ready to be judged."""

    draw: Draw
    base: rules.Array
    """[gates, rows, B, K]."""
    head: rules.Array
    """[gates, rows, K]."""
    hit: npt.NDArray[np.intp]
    """The row of each gate that is slower."""
    size: float
    bias: rules.Array
    """[gates, rows], persistent bias of the rebuilt HEAD."""


def batch(
    world: World, rng: np.random.Generator, gates: int, runs: int, size: float, *, shift: float | None = None, bias_sd: float = 0.0
) -> Batch:
    """Draws gates in which one judged row is slower by `size`, or none where it is 0."""
    draw = Draw(world, rng, gates)
    base, head = draw.runs(runs, PROCESSES), draw.runs(1, PROCESSES, shift)[:, :, 0]
    hit = rng.choice(world.layout.judged, gates)
    bias = rng.normal(0, 1, head.shape[:2]) * bias_sd * ~world.layout.control
    head = head + bias[..., None]
    head[np.arange(gates), hit] += np.log1p(size)
    return Batch(draw, base, head, hit, size, bias)


def judge_others(made: Batch) -> dict[str, npt.NDArray[np.bool_]]:
    """[gates, rows] of each of the eight rules; controls are not judged."""
    judged = ~made.draw.world.layout.control
    return {name: np.logical_and(rule(made.base, made.head), judged) for name, rule in rules.RULES.items()}


def screens(made: Batch) -> list[ours.Screened]:
    """The screen of each gate."""
    runs, heads = noise.fast60(made.base), noise.fast60(made.head)
    return [ours.screen(run, head, made.draw.world.layout) for run, head in zip(runs, heads, strict=True)]


def judge_ours(
    made: Batch, delta0: float, *, spread_floor: bool = True, screened: Sequence[ours.Screened] | None = None
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], int]:
    """(regressed [gates, rows], unfit [gates], row-measurements of the pairs of all gates); `screened` saves making `screens` again."""
    layout = made.draw.world.layout
    regressed = np.zeros(made.head.shape[:2], dtype=np.bool_)
    unfit = np.zeros(len(made.head), dtype=np.bool_)
    cost = 0
    for i, screen in enumerate(screened or screens(made)):

        def pairs(rows: ours.Indices, i: int = i) -> rules.Array:
            change = np.where(rows == made.hit[i], np.log1p(made.size), 0.0) + made.bias[i, rows]
            return np.asarray(made.draw.pairs(i, rows, ours.LOOKS[-1]) + change[:, None])

        gate = ours.gate(screen, layout, pairs, delta0=delta0, spread_floor=spread_floor)
        regressed[i, gate.confirmed.regressed], unfit[i] = True, gate.unfit
        cost += gate.confirmed.measurements
    return regressed, unfit, cost


def simulate(
    world: World, *, seed: int, runs: int, gates: int, shifted_gates: int, power_gates: int, delta0: float
) -> list[dict[str, Any]]:
    """Every rule on the same gates of one world."""
    rng = np.random.default_rng(seed)
    tallies = {name: Tally() for name in (*rules.RULES, OURS, LOW_FLOOR)}
    plan = [(0.0, gates, False), (0.0, shifted_gates, True), *((size, power_gates, False) for size in SIZES)]
    for size, count, with_shift in plan:
        for start in range(0, count, CHUNK):
            now = min(CHUNK, count - start)
            made = batch(world, rng, now, runs, size, shift=1.0 if with_shift else None)
            found, none = judge_others(made), np.zeros(now, dtype=np.bool_)
            with ours.shared_flips():
                picked = screens(made)
                staged = {name: judge_ours(made, delta0, spread_floor=name == OURS, screened=picked) for name in (OURS, LOW_FLOOR)}
            for name, tally in tallies.items():
                mask, bad, extra = staged.get(name) or (found[name], none, 0)
                _count(tally, made, mask, bad, with_shift=with_shift)
                if size == 0 and not with_shift:
                    tally.measurements += now * len(world.layout.names) * PROCESSES + extra
    return [tally.row(name) for name, tally in tallies.items()]


def _count(tally: Tally, made: Batch, mask: npt.NDArray[np.bool_], unfit: npt.NDArray[np.bool_], *, with_shift: bool) -> None:
    now = len(mask)
    if made.size:
        hits = mask[np.arange(now), made.hit] & ~unfit
        tally.found[made.size] = tally.found.get(made.size, 0) + int(hits.sum())
        tally.fit[made.size] = tally.fit.get(made.size, 0) + int((~unfit).sum())
    elif with_shift:
        tally.red_shifted += int(mask.any(axis=1).sum())
        tally.unfit_shifted += int(unfit.sum())
        tally.shifted += now
    else:
        tally.red += int(mask.any(axis=1).sum())
        tally.unfit += int(unfit.sum())
        tally.gates += now


def bias_table(
    world: World, *, seed: int, runs: int, gates: int, power_gates: int, sds: Sequence[float], deltas: Sequence[float]
) -> list[dict[str, Any]]:
    """False red and power of our rule where every row of HEAD has a persistent bias; and of the same gates with the low floor."""
    made_rows = []
    for sd in sds:
        for delta0 in deltas:
            rng = np.random.default_rng([seed, round(1e6 * sd), round(1e6 * delta0)])
            rows: dict[str, dict[str, Any]] = {name: {"power": {}} for name in (OURS, LOW_FLOOR)}
            for size, count in ((0.0, gates), *((size, power_gates) for size in (0.01, 0.02, 0.05))):
                red, fit = dict.fromkeys(rows, 0), 0
                for start in range(0, count, CHUNK):
                    now = min(CHUNK, count - start)
                    made = batch(world, rng, now, runs, size, bias_sd=sd)
                    picked = screens(made)
                    fit += sum(not screened.unfit for screened in picked)
                    for name in rows:
                        with ours.shared_flips():
                            regressed, _, _ = judge_ours(made, delta0, spread_floor=name == OURS, screened=picked)
                        red[name] += int((regressed[np.arange(now), made.hit] if size else regressed.any(axis=1)).sum())
                for name, row in rows.items():
                    if size:
                        row["power"][f"{size:g}"] = [red[name], fit]
                    else:
                        row["red"] = [red[name], count]
            made_rows.append({"bias_sd": sd, "delta0": delta0, **rows[OURS], "low_floor": rows[LOW_FLOOR]})
    return made_rows


def render(data: dict[str, Any]) -> str:
    """The tables of `simulate`, as Markdown."""
    parts = []
    for world in data["worlds"]:
        head = ["rule", "false red (95 % interval)", "unfit", "false red, shifted run", "unfit, shifted run"]
        head += [f"{100 * float(size):g} %" for size in world["rows"][0]["power"]] + ["row-measurements"]
        body = []
        for row in world["rows"]:
            powers = [tables.decimal(found / max(of, 1), 2) for found, of in row["power"].values()]
            shares = [tables.decimal(row[name][0] / row[name][1], 2) for name in ("red_shifted", "unfit_shifted")]
            unfit = tables.decimal(row["unfit"][0] / row["unfit"][1], 2)
            body.append([row["rule"], tables.share(*row["red"]), unfit, *shares, *powers, str(row["measurements"])])
        parts.append(f"**{world['title']}**\n\n{tables.markdown(head, body)}")
    return "\n".join(parts)


def render_bias(data: dict[str, Any]) -> str:
    """The table of `bias`, as Markdown."""
    sizes = list(data["rows"][0]["power"])
    columns = ["false red (95 % interval)", *(f"{100 * float(size):g} %" for size in sizes)]
    head = ["SD of the bias", "delta0", *columns, *(f"{column}, low floor" for column in ("false red", *columns[1:]))]
    body = []
    for row in data["rows"]:
        cells = [f"{100 * row['bias_sd']:g} %", f"{100 * row['delta0']:g} %"]
        for counts in (row, row["low_floor"]):
            cells += [
                tables.share(*counts["red"]),
                *(tables.decimal(counts["power"][size][0] / max(counts["power"][size][1], 1), 2) for size in sizes),
            ]
        body.append(cells)
    return tables.markdown(head, body)


__all__ = ["DELTA0", "OURS", "SEED", "batch", "bias_table", "judge_others", "judge_ours", "render", "render_bias", "shifted", "simulate"]
