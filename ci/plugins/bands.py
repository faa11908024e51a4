"""`asv continuous` and `asv compare` judge each row by its own band, from the device's baseline, instead of by one factor for all.

The factor of a row is 1 + the floor between two single runs (`ci.compare.baseline_floors`): the largest of 0.5 %, three SDs of the
difference of two runs, and two ticks of the timer; the SD is the gate's own, normalised by controls and moderated. The baseline is
`baselines/<machine>.json` of the comparison's first commit, so that a change cannot bring its own band.

A row is better or worse where its latency differs by more than its factor and, if both sides have samples enough, asv's rank test says
so too. asv 0.6.6 asks for p < .002 of two sides, which needs 7 samples on each of two equal sides; with 6 its test can never reject, so
that no change would ever count, and with fewer it asks whether the confidence intervals of so few samples overlap. Below 7 the band
decides alone: it was learned from how runs differ, which is what the samples of one run do not show. So a row needs as many samples on
each side as the baseline's runs have processes; with fewer, one sample being no run, asv's rule and factor hold for it.

asv's factor (1.1, or that of the caller) also holds for a row that the baseline does not have as it is measured now, and for all rows
where there is no baseline, where the gate would refuse it (it is of another device, protocol or software than the runs, say), or where
nothing says what measured them.
An explicit `-f` wins for all rows. A line under the table says which of these it was. Figures without noise stay exact.

asv takes no control shift off: runs that `asv compare` finds should have been interleaved, as `asv continuous` does.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asv import commands
from asv.commands import compare, continuous

from ci import baseline as baselines
from ci.baseline import Baseline
from ci.baseline_file import Row
from ci.compare import baseline_floors
from ci.errors import GateError, InputError
from ci.keys import param_text
from ci.model import CommitResult, RowKey
from ci.plugins import direction
from ci.repo import Repository
from ci.results import load_commit
from ci.rows import mismatch

RANK_TEST_P = 0.002
"""Level of asv's rank test (`asv._stats.is_different`)."""


class Lower(float):
    """A result of which less is better, with a place for its band."""

    factor: float | None = None


@dataclass
class _State:
    """What one asv command knows."""

    asked: bool = False
    """Whether the command line names a factor."""
    factors: dict[RowKey, float] = field(default_factory=dict)
    sides: Counter[str] = field(default_factory=Counter)
    """How many sides have a value of a row, by its label."""
    own: dict[str, float] = field(default_factory=dict)
    """Factors that were used, by label."""


_state = _State()


def can_reject(num_a: int, num_b: int) -> bool:
    """Whether asv's two-sided rank test of so many samples can give a p-value under its level at all."""
    return 2 / math.comb(num_a + num_b, num_a) < RANK_TEST_P


def better(a: Any, b: Any, a_stats: Any, b_stats: Any, factor: float, use_stats: bool = True) -> bool:
    """asv's rule with the row's own factor; where its rank test could never reject, the band decides alone."""
    own = getattr(a, "factor", None)
    if own is None:
        return direction.better(a, b, a_stats, b_stats, factor, use_stats=use_stats)
    return direction.better(a, b, a_stats, b_stats, own, use_stats=use_stats and can_reject(_count(a_stats), _count(b_stats)))


def _count(stats: Any) -> int:
    samples = (stats[1] if stats else None) or ()
    return sum(1 for sample in samples if sample == sample)


def _unroll(name: str, params: Any, *values: Any) -> Iterator[tuple[Any, ...]]:
    """Rows of one benchmark on one side, each value marked with its row's factor."""
    rows = direction.unroll(name, params, *values)
    for (label, value, *rest), combination in zip(rows, itertools.product(*params), strict=False):
        if isinstance(value, float | int) and value == value and not isinstance(value, direction.Exact):
            _state.sides[label] += 1
            found = _state.factors.get(RowKey(name, tuple(param_text(text) for text in combination)))
            if found is not None:
                value = value if isinstance(value, direction.Higher) else Lower(value)
                value.factor = found
                _state.own[label] = found
        yield (label, value, *rest)


def _factors(machine: str, base: str, sides: Sequence[CommitResult]) -> tuple[dict[RowKey, float], str]:
    """Factors by row, and where they are from or why there are none.

    Args:
        machine: The device's key.
        base: The commit whose baseline counts.
        sides: Both sides of the comparison, joined with their records.
    """
    repository = Repository(Path.cwd())
    commit, path = repository.commit(base), f"baselines/{machine}.json"
    name = f"{path} of {commit.short}"
    content = repository.read(commit, path)
    if content is None:
        return {}, f"{commit.short} has no {path}"
    baseline = baselines.load(content, name=name)
    stale = _stale(baseline, sides, name)
    if stale is not None:
        return {}, f"not used: {stale}"
    floors = baseline_floors(baseline)
    return {row.key: 1 + floors[row.key] for row in baseline.rows.values() if _measured_alike(row, baseline, sides)}, name


def _stale(baseline: Baseline, sides: Sequence[CommitResult], name: str) -> str | None:
    """Why the baseline says nothing of these runs, None where it does."""
    for side in sides:
        used = {record.process for row in side.rows.values() if row.state == "measured" for record in row.records}
        if not used:
            return f"no process records say which device and software measured {side.commit[:12]}"
        for process in side.processes:
            if process.process in used:
                for problem in baselines.check(baseline, process.environment, process.protocol, name=name):
                    if problem.severity == "error":
                        return str(problem)
    return None


def _measured_alike(row: Row, baseline: Baseline, sides: Sequence[CommitResult]) -> bool:
    for side in sides:
        found = side.rows.get(row.key)
        if found is None or found.state != "measured" or len(found.samples) < baseline.protocol.processes:
            return False
        if found.direction != row.direction or mismatch(found, row.unit, row.version, row.control, row.input_hash) is not None:
            return False
    return True


def _load_sides(conf: Any, hashes: Sequence[str], resultsets: Sequence[Any], machine: str | None, env_names: Any) -> list[CommitResult]:
    """Both sides with their records.

    Raises:
        GateError: They cannot be read, or are of several environments.
    """
    environments = {(row[6], row[7]) for results in resultsets for row in results or ()}
    if not environments and machine is not None:
        environments = {(machine, name) for name in env_names or (None,)}
    if len(environments) != 1:
        raise InputError(f"the results are of {len(environments)} environments; compare those of one with --environment")
    ((name, env_name),) = environments
    records = Path(getattr(conf, "records_dir", ".asv/records"))
    return [load_commit(Path(conf.results_dir), name, commit, env_name, records) for commit in hashes]


def _print_table(cls: Any, /, conf: Any, hash_1: str, hash_2: str, factor: float, split: bool, **kwargs: Any) -> Any:
    asked = _state.asked
    _state.factors, _state.sides, _state.own = {}, Counter(), {}
    told = "-f holds for every row"
    for name in ("resultset_1", "resultset_2"):
        if kwargs.get(name) is not None:
            kwargs[name] = list(kwargs[name])
    if not asked:
        try:
            resultsets = [kwargs.get("resultset_1"), kwargs.get("resultset_2")]
            sides = _load_sides(conf, (hash_1, hash_2), resultsets, kwargs.get("machine"), kwargs.get("env_names"))
            _state.factors, told = _factors(sides[0].machine, hash_1, sides)
        except GateError as error:
            told = f"no baseline can be used: {error}"
    result = direction.print_table(cls, conf, hash_1, hash_2, factor, split, **kwargs)
    compared = {label for label, count in _state.sides.items() if count > 1}
    own = compared & _state.own.keys()
    wide = sum(_state.own[label] > factor for label in own)
    told = f"{told}; {wide} band(s) are wider than that factor" if wide else told
    print(f"Bands: {len(own)} row(s) by their own band, {len(compared) - len(own)} by the factor {factor:g} ({told}).")
    return result


def names_factor(command: str, arguments: Sequence[str]) -> bool:
    """Whether an asv command line names a factor, which asv's parsed options do not tell from the default."""
    parser, subparsers = commands.make_argparser()
    subparsers.choices[command].set_defaults(factor=None)
    return parser.parse_args(list(arguments)).factor is not None


def _noting_factor(command: str, original: Any) -> Any:
    def run_from_conf_args(cls: Any, /, conf: Any, args: Any, **kwargs: Any) -> Any:
        _state.asked = names_factor(command, sys.argv[1:])
        return original(cls, conf, args, **kwargs)

    return classmethod(run_from_conf_args)


def setup() -> None:
    """Goes around what `ci.plugins.direction` has put in place, which has to be loaded before."""
    compare.Compare.print_table = classmethod(_print_table)
    compare.unroll_result = _unroll
    compare._is_result_better = better
    for name, kind in (("compare", compare.Compare), ("continuous", continuous.Continuous)):
        kind.run_from_conf_args = _noting_factor(name, kind.run_from_conf_args.__func__)
