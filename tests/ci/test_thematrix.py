"""A real results tree of a GPU suite, read as a foreign history (R94; cases 1, 9, 10, 21, 43)."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping

import pytest

from ci.compare import compare_history
from ci.model import CommitResult, GateResult, RowVerdict, RunVerdict
from ci.results import ResultsTree, drop_params, read_tree, without_mappings

ACC = "gpu00-Standard-NC6-Promo_1x1-acc"
OMP = "gpu00-Standard-NC6-Promo_1x1-omp"
MULTI = "gpu01-Standard-NC24-Promo_1x4-mpi-acc"
LAST_GOOD = "bd92e5a7"
LATER = ("27cd702a", "34663d7d", "46cd3b99", "1ee45cee", "6d7bbfea")

DROPPED = {
    "IsotropicAcousticForward": 0.78,
    "IsotropicAcousticAdjoint": 0.80,
    "IsotropicAcousticJacobian": 0.57,
    "IsotropicSSAForward": 0.53,
    "IsotropicSSAAdjoint": 0.60,
    "IsotropicSSAJacobian": 0.68,
    "TTIAcousticForward": 0.80,
    "Elastic": 0.67,
    "Viscoelastic": 0.56,
}
"""The nine rows that fell on the multi-GPU machine, with the share that was left (27cd702a against bd92e5a7)."""

FLAT = ("IsotropicAcousticJacobianAdjoint", "IsotropicSSAJacobianAdjoint")
MOVED_BEFORE = "TTIAcousticForward"
"""Its own history moved from 187 to 140 gflop/s on that machine, so that 113 is not beyond what it has shown."""


@pytest.fixture(scope="module")
def tree(request: pytest.FixtureRequest) -> ResultsTree:
    return read_tree(request.getfixturevalue("shared_data") / "thematrix_gpu_asv" / "results")


def commits(tree: ResultsTree, machine: str) -> dict[str, CommitResult]:
    """Commits by date, rows without the measured norm in their parameters."""
    return {result.commit[:8]: drop_params(result, without_mappings) for result in tree.commits(machine)}


def against_history(tree: ResultsTree, machine: str, *heads: str) -> GateResult:
    """`heads` against all commits up to the last good one."""
    known = commits(tree, machine)
    names = list(known)
    return compare_history([known[name] for name in names[: names.index(LAST_GOOD) + 1]], [known[head] for head in heads])


def by_kernel(result: GateResult, metric: str) -> Mapping[str, RowVerdict]:
    return {row.key.benchmark.split(".")[1]: row.verdict for row in result.rows if row.key.benchmark.endswith(metric)}


def effects(result: GateResult, metric: str) -> Mapping[str, float]:
    rows = [row for row in result.rows if row.key.benchmark.endswith(metric) and row.effect is not None]
    return {row.key.benchmark.split(".")[1]: row.effect for row in rows if row.effect is not None}


def test_the_whole_tree_is_read(tree: ResultsTree) -> None:
    """266 files of 11 machines, one of them without results; 24 names that are declared no more; 660 rows of another version."""
    results = [result for machine in tree.machines for result in tree.commits(machine)]
    rows = [row for result in results for row in result.rows.values()]
    assert (len(tree.machines), len(results), len(rows), tree.problems) == (11, 266, 5652, ())
    assert tree.commits("gpu03-DUG-V100x4_1x4-mpi-acc") == []
    assert len(tree.orphans) == 24
    assert sum(row.version != row.declared_version for row in rows) == 660
    assert Counter(row.state for row in rows) == {"measured": 5652}
    directions = {(row.unit, row.direction) for row in rows}
    assert directions == {("gflopss", "higher"), ("gpointss", "higher"), ("runtime (s)", "lower")}


def test_a_norm_in_the_parameters_would_part_equal_rows(tree: ResultsTree) -> None:
    """Case 43: the keys of one benchmark differ between commits until the measured value is taken out."""
    name = "acoustic_iso.IsotropicAcousticForward.track_gflopss"
    raw = {key for machine in tree.machines for result in tree.commits(machine) for key in result.rows if key.benchmark == name}
    plain = {key for machine in tree.machines for result in commits(tree, machine).values() for key in result.rows if key.benchmark == name}
    assert len(raw) > len(plain) == 1


@pytest.mark.parametrize("machine", [ACC])
@pytest.mark.parametrize(("base", "head", "word"), [("4f7b31a9", "c3eaad27", "slower"), ("c3eaad27", "6ab2c036", "faster")])
def test_a_bad_runner_is_unfit_both_ways(tree: ResultsTree, machine: str, base: str, head: str, word: str) -> None:
    """Finding 1, case 9: 27.0 -> 2.28 -> 27.2 gflop/s; exit 5, no list of regressions, and no tenfold improvement afterwards."""
    known = commits(tree, machine)
    result = compare_history([known[base]], [known[head]])
    assert (result.verdict, result.exit_code) == (RunVerdict.RUNNER_UNFIT, 5)
    assert "all rows moved together, suspect the machine" in result.reason
    assert f"were {word}" in result.reason
    assert not {row.verdict for row in result.rows} & {RowVerdict.REGRESSED, RowVerdict.IMPROVED, RowVerdict.PASS}


@pytest.mark.parametrize("machine", [ACC, OMP])
def test_a_bad_runner_is_no_part_of_a_history(tree: ResultsTree, machine: str) -> None:
    """Finding 1: the bad run is left out by name, and a run like it is not excused by it."""
    result = against_history(tree, machine, "27cd702a")
    assert any("c3eaad27 is left out of the history" in notice for notice in result.notices)
    known = commits(tree, machine)
    later = [known[name] for name in list(known) if name != "c3eaad27"]
    again = compare_history(later, [known["c3eaad27"]])
    assert again.exit_code in (1, 5)
    assert again.verdict is not RunVerdict.PASS


@pytest.mark.parametrize("head", LATER)
def test_a_lasting_regression_of_one_machine_is_found_at_every_later_commit(tree: ResultsTree, head: str) -> None:
    """Finding 2, case 10: one run each; the flat rows never regress, all nine are beyond the screen, and at most two stay unconfirmed."""
    result = against_history(tree, MULTI, head)
    found = by_kernel(result, "track_gflopss")
    assert (result.verdict, result.exit_code) == (RunVerdict.REGRESSION, 1)
    assert {found[name] for name in FLAT} <= {RowVerdict.PASS, RowVerdict.UNCONFIRMED}
    assert {found[name] for name in DROPPED} <= {RowVerdict.REGRESSED, RowVerdict.UNCONFIRMED}
    open_rows = {name for name in DROPPED if found[name] is RowVerdict.UNCONFIRMED}
    assert open_rows <= {MOVED_BEFORE, "IsotropicAcousticAdjoint"}


def test_two_runs_confirm_eight_of_the_nine_rows(tree: ResultsTree) -> None:
    """Finding 2: 27cd702a and 34663d7d as two runs of one state; the ninth row moved as far before, and is listed."""
    found = by_kernel(against_history(tree, MULTI, "27cd702a", "34663d7d"), "track_gflopss")
    regressed = {name for name, verdict in found.items() if verdict is RowVerdict.REGRESSED}
    assert regressed == set(DROPPED) - {MOVED_BEFORE}
    assert found[MOVED_BEFORE] is RowVerdict.UNCONFIRMED
    assert {found[name] for name in FLAT} == {RowVerdict.PASS}


def test_sizes_are_those_of_the_last_good_commit(tree: ResultsTree) -> None:
    """The shares that are left, against the commit before."""
    known = commits(tree, MULTI)
    found = effects(compare_history([known[LAST_GOOD]], [known["27cd702a"]]), "track_gflopss")
    assert {name: 1 / (1 + found[name]) for name in DROPPED} == pytest.approx(DROPPED, abs=0.006)
    assert 1 / (1 + found["TTIAcousticAdjoint"]) == pytest.approx(0.94, abs=0.005)
    assert [found[name] for name in FLAT] == pytest.approx([0, 0], abs=0.01)


@pytest.mark.parametrize("machine", [ACC, OMP])
@pytest.mark.parametrize("head", LATER)
def test_the_single_gpu_machines_are_flat(tree: ResultsTree, machine: str, head: str) -> None:
    """Finding 2: no false alarm at the same commits, on rows whose noise differs thirtyfold."""
    result = against_history(tree, machine, head)
    assert (result.verdict, result.exit_code) == (RunVerdict.PASS, 0)
    assert RowVerdict.REGRESSED not in {row.verdict for row in result.rows}


@pytest.mark.parametrize("machine", [ACC, OMP])
@pytest.mark.parametrize("head", ["1ee45cee", "6d7bbfea"])
def test_the_improved_row_improves(tree: ResultsTree, machine: str, head: str) -> None:
    """Finding 3: tti-adjoint, by its runtime and points; its flop count changed as well."""
    result = against_history(tree, machine, head)
    for metric in ("track_runtime", "track_gpointss"):
        improved = {name for name, verdict in by_kernel(result, metric).items() if verdict is RowVerdict.IMPROVED}
        assert improved == {"TTIAcousticAdjoint"}


@pytest.mark.parametrize("machine", [ACC, OMP, MULTI])
def test_throughput_and_runtime_give_opposite_signs_and_one_verdict(tree: ResultsTree, machine: str) -> None:
    """Finding 4, case 1: where throughput falls runtime rises, and both are slower by the same share."""
    known = commits(tree, machine)
    result = against_history(tree, machine, "27cd702a", "34663d7d")
    points, runtime = by_kernel(result, "track_gpointss"), by_kernel(result, "track_runtime")
    assert points.keys() == runtime.keys()
    assert len(points) == 12
    for kernel in points:
        assert (points[kernel] is RowVerdict.REGRESSED) == (runtime[kernel] is RowVerdict.REGRESSED)
    before, after = known[LAST_GOOD], known["27cd702a"]
    single = compare_history([before], [after])
    slower = {metric: effects(single, metric) for metric in ("track_gpointss", "track_runtime")}
    for kernel, change in slower["track_gpointss"].items():
        assert slower["track_runtime"][kernel] == pytest.approx(change, abs=0.002)
        values = {
            metric: [
                next(row.samples[0] for key, row in side.rows.items() if f".{kernel}.{metric}" in key.benchmark) for side in (before, after)
            ]
            for metric in slower
        }
        assert (values["track_gpointss"][1] < values["track_gpointss"][0]) == (values["track_runtime"][1] > values["track_runtime"][0])


def value(commit: CommitResult, kernel: str, metric: str) -> float:
    """The one value of a kernel's metric."""
    (found,) = [row.samples[0] for key, row in commit.rows.items() if f".{kernel}.{metric}" in key.benchmark]
    return found


def test_the_bad_runner_takes_every_throughput_row_down_and_they_come_back(tree: ResultsTree) -> None:
    """Finding 1, in numbers: jacobian-adjoint 27.0 -> 2.28 -> 27.2 gflop/s; the rows fall to .08 to .70 of the commit before.

    Of the commit after them tti-adjoint counts fewer flops, and reads .87.
    """
    known = commits(tree, ACC)
    before, bad, after = (known[name] for name in ("4f7b31a9", "c3eaad27", "6ab2c036"))
    kernel = "IsotropicAcousticJacobianAdjoint"
    assert [value(side, kernel, "track_gflopss") for side in (before, bad, after)] == pytest.approx([27.0, 2.28, 27.2], abs=0.05)
    kernels = {key.benchmark.split(".")[1] for key in bad.rows if key.benchmark.endswith("track_gflopss")}
    shares = [value(bad, name, "track_gflopss") / value(before, name, "track_gflopss") for name in kernels if has(before, name)]
    back = [value(after, name, "track_gflopss") / value(before, name, "track_gflopss") for name in kernels if has(before, name)]
    assert len(shares) == 11
    assert (min(shares), max(shares)) == pytest.approx((0.085, 0.696), abs=0.002)
    assert all(0.87 < share < 1.17 for share in back)


def has(commit: CommitResult, kernel: str) -> bool:
    return any(f".{kernel}.track_gflopss" in key.benchmark for key in commit.rows)


@pytest.mark.parametrize(("machine", "low", "high"), [(ACC, 1.16, 1.195), (OMP, 1.9, 1.97)])
@pytest.mark.parametrize("head", ["1ee45cee", "6d7bbfea"])
def test_the_improvement_has_its_size(tree: ResultsTree, machine: str, head: str, low: float, high: float) -> None:
    """Finding 3: tti-adjoint in gflop/s against bd92e5a7, 1.17 to 1.19 times on acc, about 1.9 times on omp."""
    known = commits(tree, machine)
    ratio = value(known[head], "TTIAcousticAdjoint", "track_gflopss") / value(known[LAST_GOOD], "TTIAcousticAdjoint", "track_gflopss")
    assert low < ratio < high


@pytest.mark.parametrize("machine", [ACC, OMP])
def test_no_row_of_a_flat_machine_is_under_its_share(tree: ResultsTree, machine: str) -> None:
    """Finding 2, case 10: at the commits of the regression no row of either single-GPU configuration is under .94 of bd92e5a7."""
    known = commits(tree, machine)
    kernels = {key.benchmark.split(".")[1] for key in known[LAST_GOOD].rows if key.benchmark.endswith("track_gflopss")}
    assert len(kernels) == 12
    shares = [
        value(known[head], kernel, "track_gflopss") / value(known[LAST_GOOD], kernel, "track_gflopss")
        for kernel in kernels
        for head in LATER
    ]
    assert min(shares) > 0.94


def test_throughput_and_runtime_of_neighbouring_commits_agree_but_where_the_work_changed(tree: ResultsTree) -> None:
    """Finding 4, over the whole tree: slower, faster or within 10 % by either metric, but for two commits that changed the flop count."""
    found: Counter[tuple[str, str] | None] = Counter()

    def side(ratio: float) -> int:
        return int(ratio > 1.1) - int(ratio < 0.9)

    for machine in tree.machines:
        known = list(commits(tree, machine).values())
        for before, after in itertools.pairwise(known):
            tables = [{(key.benchmark, key.params): row.samples[0] for key, row in commit.rows.items()} for commit in (before, after)]
            for name, params in set(tables[0]) & set(tables[1]):
                clock = (name.replace("track_gflopss", "track_runtime"), params)
                if name.endswith("track_gflopss") and all(clock in table for table in tables):
                    flops = tables[1][name, params] / tables[0][name, params]
                    runtime = tables[0][clock] / tables[1][clock]
                    found[None if side(flops) == side(runtime) else (before.commit[:8], after.commit[:8])] += 1
    assert found == {None: 1737, ("c3eaad27", "6ab2c036"): 24, ("46cd3b99", "1ee45cee"): 3}
    changed = commits(tree, MULTI)
    old, new = changed["46cd3b99"], changed["1ee45cee"]
    assert value(new, "TTIAcousticAdjoint", "track_runtime") / value(old, "TTIAcousticAdjoint", "track_runtime") == pytest.approx(
        0.73, abs=0.01
    )
    assert value(new, "TTIAcousticAdjoint", "track_gflopss") / value(old, "TTIAcousticAdjoint", "track_gflopss") == pytest.approx(
        1.05, abs=0.01
    )


@pytest.mark.parametrize(("machine", "low", "high"), [(ACC, 1.74, 5.24), (OMP, 2.92, 9.43), (MULTI, 0.42, 45.8)])
def test_the_noise_of_the_rows_differs_by_machine(tree: ResultsTree, machine: str, low: float, high: float) -> None:
    """Case 10: 1.4826 MAD of a row's commits up to bd92e5a7, in per cent of their median; no band serves a hundredfold range."""
    known = commits(tree, machine)
    names = list(known)
    history = [known[name] for name in names[: names.index(LAST_GOOD) + 1]]
    spreads = []
    for kernel in {key.benchmark.split(".")[1] for key in known[LAST_GOOD].rows if key.benchmark.endswith("track_gflopss")}:
        values = [value(commit, kernel, "track_gflopss") for commit in history if has(commit, kernel)]
        middle = statistics.median(values)
        spreads.append(148.26 * statistics.median(abs(v - middle) for v in values) / middle)
    assert (min(spreads), max(spreads)) == pytest.approx((low, high), rel=0.01)


def test_a_history_says_what_it_does_not_know(tree: ResultsTree) -> None:
    result = against_history(tree, ACC, "27cd702a")
    assert (result.mode, result.device, result.base) == ("history", ACC, f"18 commits up to {LAST_GOOD}")
    assert any("no records, no control rows, nothing verified" in notice for notice in result.notices)
