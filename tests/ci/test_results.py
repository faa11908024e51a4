"""asv results trees and their join with records (R94; cases 1, 2, 20, 21, 23, 25, 39, 43)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from asv_rows import GB, NAME, entry_of, row_of
from gate_builders import HEAD_COMMIT, write_tree

from ci.errors import InputError
from ci.keys import param_text, without_mappings
from ci.model import RowKey
from ci.results import direction_of, drop_params, load_commit, read_tree

# ---------------------------------------------------------------- direction


@pytest.mark.parametrize(
    ("unit", "kind", "declared", "expected"),
    [
        ("GB/s", "track", None, "higher"),
        ("TFLOP/s", "track", None, "higher"),
        ("gflopss", "track", None, "higher"),
        ("gpointss", "track", None, "higher"),
        ("us", "track", None, "lower"),
        ("ms", "track", None, "lower"),
        ("seconds", "time", None, "lower"),
        ("runtime (s)", "track", None, "lower"),
        ("GB/s", "track", False, "lower"),
        ("registers", "track", False, "lower"),
        ("us", "track", True, "higher"),
        ("unit", "track", None, None),
        ("bytes", "track", None, None),
        ("", "track", None, None),
    ],
)
def test_direction_is_declared_or_unambiguous(unit: str, kind: str, declared: object, expected: str | None) -> None:
    """Case 1: a benchmark's own direction counts before its unit, and an unknown one is not guessed."""
    assert direction_of(unit, kind, declared) == expected


def test_unknown_direction_makes_the_row_invalid(tmp_path: Path) -> None:
    """Case 1: no number is compared when nobody said which way is better."""
    row = row_of(tmp_path, entry_of([3.0]), unit="unit")
    assert (row.state, row.samples) == ("invalid", ())
    assert "set higher_is_better" in str(row.reason)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("entry", "state", "samples"),
    [
        (entry_of([3.0], samples=[[2.0, 3.0, 4.0]]), "measured", (2.0, 3.0, 4.0)),
        (entry_of([3.0]), "measured", (3.0,)),
        (entry_of(3.0), "measured", (3.0,)),
        (3.0, "measured", (3.0,)),
        ([[3.0]], "measured", (3.0,)),
        (entry_of(None), "failed", ()),
        (entry_of([None]), "failed", ()),
        (entry_of([float("nan")]), "skipped", ()),
        (entry_of([float("inf")]), "invalid", ()),
        (entry_of([-1.0]), "invalid", ()),
        (entry_of([0.0]), "invalid", ()),
        (entry_of(["3"]), "invalid", ()),
        (entry_of([True]), "invalid", ()),
        (entry_of([3.0], samples=[[]]), "invalid", ()),
        (entry_of([3.0], samples=[[3.0, float("nan")]]), "invalid", ()),
        (entry_of([3.0], samples=[[3.0, None]]), "invalid", ()),
    ],
)
def test_states_of_stored_values(tmp_path: Path, entry: object, state: str, samples: tuple[float, ...]) -> None:
    """Cases 2 and 23: null is a failure, NaN a skip, and what is no positive finite number is INVALID; none of them is a value."""
    row = row_of(tmp_path, entry)
    assert (row.state, row.samples) == (state, samples)
    assert (row.reason is None) == (state == "measured")


def test_null_as_a_whole_fails_every_parameter(tmp_path: Path) -> None:
    write_tree(tmp_path, {NAME: GB}, {NAME: entry_of(None, [["1", "2"], ["'a'"]])})
    rows = load_commit(tmp_path, "box", HEAD_COMMIT).rows
    assert {key.params: row.state for key, row in rows.items()} == {("1", "a"): "failed", ("2", "a"): "failed"}


def test_reordered_and_fewer_columns_are_read(tmp_path: Path) -> None:
    """Case 25: columns are found by their names, and what is dropped at the end of a row is null."""
    results = {NAME: [[["1", "2"]], "v7", [5.0, 6.0]]}
    write_tree(tmp_path, {NAME: GB}, results, result_columns=["params", "version", "result", "samples"])
    rows = load_commit(tmp_path, "box", HEAD_COMMIT).rows
    assert {key.params: row.samples for key, row in rows.items()} == {("1",): (5.0,), ("2",): (6.0,)}
    assert {(row.version, row.declared_version) for row in rows.values()} == {("v7", "v1")}


def test_parameters_are_row_major(tmp_path: Path) -> None:
    write_tree(tmp_path, {NAME: GB}, {NAME: entry_of([1.0, 2.0, 3.0, 4.0], [["1", "2"], ["'a'", "'b'"]])})
    rows = load_commit(tmp_path, "box", HEAD_COMMIT).rows
    assert [rows[RowKey(NAME, p)].samples for p in (("1", "a"), ("1", "b"), ("2", "a"), ("2", "b"))] == [(1.0,), (2.0,), (3.0,), (4.0,)]


def test_a_name_that_is_no_longer_declared_is_an_orphan(tmp_path: Path) -> None:
    """Case 21."""
    write_tree(tmp_path, {NAME: GB}, {NAME: entry_of([1.0]), "gone.track_x": entry_of([2.0])})
    result = load_commit(tmp_path, "box", HEAD_COMMIT)
    assert result.orphans == ("gone.track_x",)
    assert list(result.rows) == [RowKey(NAME)]


def test_a_declared_benchmark_without_result_is_absent(tmp_path: Path) -> None:
    write_tree(tmp_path, {NAME: GB, "bench.B.track_y": GB}, {NAME: entry_of([1.0])})
    assert list(load_commit(tmp_path, "box", HEAD_COMMIT).rows) == [RowKey(NAME)]


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("'a b'", "a b"),
        ("'1'", "'1'"),
        ("1", "1"),
        (1, "1"),
        (1.5, "1.5"),
        (True, "True"),
        ("True", "True"),
        ("'True'", "'True'"),
        ("'None'", "'None'"),
        ("'nan'", "'nan'"),
        ("None", "None"),
        ("(1, 2)", "(1, 2)"),
        ("torch.float16", "torch.float16"),
        ("'é'", "é"),
        ("''", "''"),
        ("decode B=1 S=1024", "decode B=1 S=1024"),
    ],
)
def test_parameter_texts(value: object, text: str) -> None:
    """Case 43: a string and the number that it spells stay two keys, and a record's plain value meets asv's repr."""
    assert param_text(value) == text
    assert param_text(text) == text


@pytest.mark.parametrize("text", ["<object object at 0x7f00>", "'a\\nb'", "nan", "inf"])
def test_keys_that_cannot_last_are_refused(tmp_path: Path, text: str) -> None:
    """Case 43: an address, a line break or NaN never identifies a row."""
    write_tree(tmp_path, {NAME: GB}, {NAME: entry_of([1.0], [[text]])})
    (row,) = load_commit(tmp_path, "box", HEAD_COMMIT).rows.values()
    assert row.state == "invalid"
    assert "use a plain string" in str(row.reason)


def test_the_same_row_twice_is_an_error(tmp_path: Path) -> None:
    """Case 21: never the first, never the last."""
    write_tree(tmp_path, {NAME: GB}, {NAME: entry_of([1.0, 2.0], [["1", "1"]])})
    with pytest.raises(InputError, match="twice"):
        load_commit(tmp_path, "box", HEAD_COMMIT)


def test_measured_values_can_be_dropped_from_foreign_keys(tmp_path: Path) -> None:
    """Case 43: a norm within the parameters changes from run to run; the row is the same."""
    for folder, norm in (("one", 144.055939), ("two", 151.545837)):
        write_tree(tmp_path / folder, {NAME: GB}, {NAME: entry_of([1.0], [["(1, 2)"], [f"{{'u': {norm}}}"]])})
    keys = [list(drop_params(load_commit(tmp_path / f, "box", HEAD_COMMIT), without_mappings).rows) for f in ("one", "two")]
    assert keys == [[RowKey(NAME, ("(1, 2)",))]] * 2


def test_dropping_that_merges_rows_is_an_error(tmp_path: Path) -> None:
    write_tree(tmp_path, {NAME: GB}, {NAME: entry_of([1.0, 2.0], [["{'u': 1}", "{'u': 2}"]])})
    with pytest.raises(InputError, match="two rows"):
        drop_params(load_commit(tmp_path, "box", HEAD_COMMIT), without_mappings)


# ---------------------------------------------------------------- broken files


def _text(change: Callable[[str], str]) -> Callable[[bytes], bytes]:
    return lambda data: change(data.decode()).encode()


BROKEN: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("truncated", lambda data: data[: len(data) // 2], "is not valid JSON"),
    ("empty", lambda data: b"", "is empty"),
    ("list", lambda data: b"[]", "holds a list"),
    ("null", lambda data: b"null", "holds a NoneType"),
    ("utf-16", lambda data: data.decode().encode("utf-16"), "UTF-16"),
    ("latin-1", lambda data: data.replace(b"3.12", b"3.12\xe9"), "not UTF-8"),
    ("semicolon", lambda data: data + b";", "is not valid JSON"),
    ("duplicate key", _text(lambda text: text.replace('"env_name"', '"date": 1, "env_name"', 1)), "twice"),
    ("version 1", _text(lambda text: text.replace('"version": 2', '"version": 1')), "version 1"),
    ("version 99", _text(lambda text: text.replace('"version": 2', '"version": 99')), "version 99"),
    ("no params", _text(lambda text: text.replace('"params"', '"parms"', 1)), "'params'"),
    ("no results", _text(lambda text: text.replace('"results"', '"result"', 1)), "no asv result"),
    ("no time", _text(lambda text: json.dumps({**json.loads(text), "date": 1e308})), "contents of another kind"),
    ("results a list", _text(lambda text: json.dumps({**json.loads(text), "results": []})), "contents of another kind"),
    ("row a dict", _text(lambda text: json.dumps({**json.loads(text), "results": {NAME: {"result": 1}}})), "does not fit the columns"),
    ("too long a row", _text(lambda text: json.dumps({**json.loads(text), "results": {NAME: [1] * 9}})), "does not fit the columns"),
    ("too few values", _text(lambda text: json.dumps({**json.loads(text), "results": {NAME: [[1.0], [["1", "2"]]]}})), "1 entries"),
    ("params no texts", _text(lambda text: json.dumps({**json.loads(text), "results": {NAME: [[1.0], [[1]]]}})), "no lists of texts"),
    ("other machine", _text(lambda text: text.replace('"machine": "box"', '"machine": "bus"')), "of machine 'bus'"),
]


@pytest.mark.parametrize(("spoil", "reason"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_broken_subject_fails_closed_and_a_broken_history_is_skipped(
    tmp_path: Path, spoil: Callable[[bytes], bytes], reason: str
) -> None:
    """Case 25: file and reason are named; one bad file among many is listed, and no file is rewritten."""
    path = write_tree(tmp_path, {NAME: GB}, {NAME: entry_of([1.0])})
    whole = path.read_bytes()
    spoilt = spoil(whole)
    assert spoilt != whole
    path.write_bytes(spoilt)
    (path.parent / "cccccccc-host.json").write_bytes(whole.replace(b"b" * 40, b"c" * 40))
    with pytest.raises(InputError) as caught:
        load_commit(tmp_path, "box", HEAD_COMMIT)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)
    tree = read_tree(tmp_path)
    assert [result.commit for result in tree.commits("box")] == ["c" * 40]
    assert len(tree.problems) == 1
    assert str(path) in tree.problems[0]
    assert path.read_bytes() == spoilt


def test_a_byte_order_mark_and_bare_infinity_are_read(tmp_path: Path) -> None:
    """Cases 25 and 39: asv's dialect."""
    path = write_tree(tmp_path, {NAME: GB}, {NAME: [[2.0], [], "v1", None, None, [float("-inf")]]})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert b"-Infinity" in path.read_bytes()
    (row,) = load_commit(tmp_path, "box", HEAD_COMMIT).rows.values()
    assert row.samples == (2.0,)


@pytest.mark.parametrize("content", ["[]", '{"a": 1}', "{", ""])
def test_a_broken_benchmarks_file_is_named(tmp_path: Path, content: str) -> None:
    write_tree(tmp_path, {NAME: GB}, {})
    (tmp_path / "benchmarks.json").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=r"benchmarks\.json"):
        load_commit(tmp_path, "box", HEAD_COMMIT)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    """Case 2: an absent file, machine, commit or environment is an error and no empty result."""
    write_tree(tmp_path, {NAME: GB}, {NAME: entry_of([1.0])})
    with pytest.raises(InputError, match="no results of machine 'bus'; it has box"):
        load_commit(tmp_path, "bus", HEAD_COMMIT)
    with pytest.raises(InputError, match="no result of commit ccccccc"):
        load_commit(tmp_path, "box", "c" * 40)
    with pytest.raises(InputError, match="in environment other"):
        load_commit(tmp_path, "box", HEAD_COMMIT, "other")
    with pytest.raises(InputError, match="too short"):
        load_commit(tmp_path, "box", "bbb")
    with pytest.raises(InputError, match="no folder of asv results"):
        read_tree(tmp_path / "absent")
    with pytest.raises(InputError, match="no machine 'bus'"):
        read_tree(tmp_path).commits("bus")


def test_two_environments_have_to_be_told_apart(tmp_path: Path) -> None:
    write_tree(tmp_path, {NAME: GB}, {NAME: entry_of([1.0])})
    write_tree(tmp_path, {NAME: GB}, {NAME: entry_of([2.0])}, env_name="other")
    with pytest.raises(InputError, match="more than one result"):
        load_commit(tmp_path, "box", HEAD_COMMIT)
    (row,) = load_commit(tmp_path, "box", HEAD_COMMIT[:7], "other").rows.values()
    assert row.samples == (2.0,)


def test_commits_are_ordered_by_date(tmp_path: Path) -> None:
    for commit, date in (("c" * 40, 3), ("d" * 40, 1), ("e" * 40, 2)):
        write_tree(tmp_path, {NAME: GB}, {NAME: entry_of([1.0])}, commit=commit, date=date)
    assert [result.commit[0] for result in read_tree(tmp_path).commits("box")] == ["d", "e", "c"]


# ---------------------------------------------------------------- real files


def test_asvs_own_fixtures_name_each_file(shared_data: Path) -> None:
    """Case 25: all are of version 1 or broken, and each is named with its reason."""
    tree = read_tree(shared_data / "asv_example_results" / "test" / "example_results")
    assert (tree.machines, tree.commits("cheetah")) == (("cheetah",), [])
    assert len(tree.problems) == 41
    reasons = {name: next(p for p in tree.problems if f"/{name}" in p) for name in ("aaaaaaaa", "bbbbbbbb", "cccccccc")}
    assert "is not valid JSON" in reasons["aaaaaaaa"]
    assert "no asv result" in reasons["bbbbbbbb"]
    assert "version 1" in reasons["cccccccc"]


def test_django_reads_with_its_failed_rows(shared_data: Path) -> None:
    """Case 2: 53 rows are null, and stay failures."""
    tree = read_tree(shared_data / "django_asv" / "results")
    rows = [row for machine in tree.machines for result in tree.commits(machine) for row in result.rows.values()]
    assert tree.problems == ()
    assert Counter(row.state for row in rows) == {"measured": 758, "failed": 53}
