"""The data files that asv's pages load: index, graphs, summaries, list, regressions and their feed."""

from __future__ import annotations

import datetime
import html
import itertools
import urllib.parse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from asv import feed, step_detect
from asv.graph import Graph

from ci.history.assets import APP
from ci.history.series import Change, Series
from ci.history.store import Array, History, Line
from ci.templates.figures import percent, throughput

THRESHOLD = 0.01
"""Relative loss from which asv's rule lists a regression; its own default of 5 % would hide what the detector finds."""
_SUMMARY_POINTS = 384
_BRANCH = "main"


@dataclass(frozen=True)
class Regression:
    """A series that is slower than it was, and the changes that made it so."""

    series: Series
    last: float
    best: float
    jumps: tuple[tuple[int | None, int, float, float], ...]
    """Revision before (None where it is the commit before), first revision, level before, level after."""


def graph_params(line: Line) -> dict[str, str]:
    """The parameters of a line as asv's pages know them."""
    return {**dict(line.params), "branch": _BRANCH}


def _path(params: Mapping[str, Any], name: str) -> str:
    """Path of a graph's file without suffix, as asv names it."""
    return str(Graph.get_file_path(dict(params), name))


def _write(target: Path, name: str, data: object) -> None:
    path = target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(data))


def rounded(values: Array) -> Array:
    """Six significant digits, so that files stay small; NaN stays."""
    with np.errstate(divide="ignore", invalid="ignore"):
        power = np.power(10.0, 5 - np.floor(np.log10(np.abs(values))))
        made: Array = np.round(values * power) / power
    return np.where(values == 0, 0.0, made)


def write_graphs(history: History, target: Path) -> None:
    """One file for each benchmark of each line, and the summary of each benchmark over all lines."""
    for line in history.lines:
        params = graph_params(line)
        for name, table in line.values.items():
            known = np.flatnonzero(np.isfinite(table).any(axis=1))
            part = rounded(table[known[0] : known[-1] + 1])
            revisions = line.revisions[known[0] : known[-1] + 1].tolist()
            has_params = bool(history.benchmarks[name].entry["params"])
            data = list(zip(revisions, part.tolist() if has_params else part[:, 0].tolist(), strict=True))
            _write(target, f"{_path(params, name)}.json", data)
    for name in history.benchmarks:
        _write(target, f"{_path({'summary': ''}, name)}.json", _summary(history, name))


def _summary(history: History, name: str) -> list[tuple[int, float | None]]:
    """Geometric mean of all series of a benchmark, at most `_SUMMARY_POINTS` points."""
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for line in history.lines:
        table = line.values.get(name)
        if table is None:
            continue
        filled = _filled(table)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.where(filled > 0, np.log(filled), np.nan)
        found = np.isfinite(logs)
        totals, counts = np.where(found, logs, 0.0).sum(axis=1), found.sum(axis=1)
        for revision, total, count in zip(line.revisions.tolist(), totals.tolist(), counts.tolist(), strict=True):
            if count:
                sums[revision][0] += total
                sums[revision][1] += count
    points = [(revision, float(np.exp(total / count))) for revision, (total, count) in sorted(sums.items())]
    size = max(1, -(-len(points) // _SUMMARY_POINTS))
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return [(chunk[-1][0], float(f"{sum(value for _, value in chunk) / len(chunk):.6g}")) for chunk in chunks]


def _filled(table: Array) -> Array:
    """Gaps take the last value before them, so that a missing row does not move the mean."""
    index = np.where(np.isfinite(table), np.arange(table.shape[0])[:, None], 0)
    np.maximum.accumulate(index, axis=0, out=index)
    made: Array = np.take_along_axis(table, index, axis=0)
    return made


def write_list(history: History, found: Sequence[Series], target: Path) -> None:
    """What asv's list shows of each line: the latest level and the last change."""
    by_line: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for series in found:
        last = series.levels[-1]
        before = series.levels[-2] if len(series.levels) > 1 else None
        change = next(iter(reversed(list(series.changes()))), None)
        by_line[id(series.line)].append(
            {
                "name": series.benchmark.name,
                "idx": series.index if series.params else None,
                "pretty_name": series.name,
                "last_rev": int(series.revisions[last.end - 1]),
                "last_value": last.value,
                "last_err": last.error,
                "prev_value": None if before is None else before.value,
                "change_rev": None if change is None else _revisions(change),
            }
        )
    for line in history.lines:
        rows = sorted(by_line[id(line)], key=lambda row: (row["name"], row["idx"] or 0))
        _write(target, f"{_path(graph_params(line), 'summary')}.json", rows)


def _revisions(change: Change) -> tuple[int | None, int]:
    return (None if change.first - change.last == 1 else change.last), change.first


def regressions(found: Sequence[Series]) -> list[Regression]:
    """Series that are now slower than at their best, by asv's own rule on levels of which less is better."""
    made = []
    for series in found:
        if len(series.levels) < 2:
            continue
        up = series.benchmark.higher_is_better
        pieces = []
        for level in series.levels:
            value, error = (1 / level.value, level.error / level.value**2) if up and level.value else (level.value, level.error)
            left, right = int(series.revisions[level.start]), int(series.revisions[level.end - 1]) + 1
            pieces.append((left, right, value, value, min(error, 0.5 * THRESHOLD * value)))
        last, best, jumps = step_detect.detect_regressions(pieces, THRESHOLD)
        if last is None:
            continue

        def told(value: float, up: bool = up) -> float:
            return 1 / value if up else value

        steps = tuple((None if b - a == 1 else a, b, told(before), told(after)) for a, b, before, after in jumps)
        made.append(Regression(series, told(last), told(best), steps))
    return made


def write_regressions(history: History, found: Sequence[Regression], target: Path, project: str, commit_url: str) -> None:
    """regressions.json, and the Atom feed with what is slower and where it began."""
    several = _several(history)
    commits = {revision: commit for commit, revision in history.revisions.items()}
    entries, items = [], []
    for regression in found:
        series = regression.series
        params = {name: value for name, value in graph_params(series.line).items() if name in several}
        path = urllib.parse.quote(f"{_path(graph_params(series.line), series.benchmark.name)}.json")
        index = series.index if series.params else None
        items.append([series.name, path, params, index, regression.last, regression.best, regression.jumps, series.benchmark.name])
        entries += [_entry(history, commits, regression, jump, params, commit_url) for jump in regression.jumps]
    _write(target, "regressions.json", {"regressions": items})
    entries.sort(key=lambda entry: entry.updated, reverse=True)
    feed.write_atom(
        str(target / "regressions.xml"),
        entries,
        title=f"{project}: what became slower",
        author=project,
        address=f"{urllib.parse.quote(project, safe='')}.asv",
    )


def _several(history: History) -> set[str]:
    """Parameters with more than one value."""
    seen: dict[str, set[str]] = defaultdict(set)
    for line in history.lines:
        for name, value in graph_params(line).items():
            seen[name].add(value)
    return {name for name, values in seen.items() if len(values) > 1}


def _entry(
    history: History,
    commits: Mapping[int, str],
    regression: Regression,
    jump: tuple[int | None, int, float, float],
    params: Mapping[str, str],
    commit_url: str,
) -> feed.FeedEntry:
    series = regression.series
    before, first, old, new = jump
    commit = commits[first]
    when = datetime.datetime.fromtimestamp(history.dates_ms[commit] / 1000, datetime.timezone.utc)
    speed = (new / old if series.benchmark.higher_is_better else old / new) - 1
    query = {**params, "commits": commit if before is None else f"{commits[before]}-{commit}"}
    query.update({f"p-{name}": text for name, text in zip(series.benchmark.entry["param_names"], series.params, strict=False)})
    link = f"{APP}#{urllib.parse.quote(series.benchmark.name, safe='')}?{urllib.parse.urlencode(query)}"
    shown = html.escape(commit[:12])
    told = f'<a href="{html.escape(commit_url + commit)}">{shown}</a>' if commit_url else shown
    unit = series.benchmark.unit
    text = (
        f"{html.escape(series.name)} on {html.escape(series.line.machine)}: {percent(speed)} speed at {told}.<br>"
        f"{html.escape(throughput(old, unit))} before, {html.escape(throughput(new, unit))} after, "
        f"now {html.escape(throughput(regression.last, unit))}."
    )
    title = f"{percent(speed)} speed: {series.name} on {series.line.machine}"
    context = [series.name, series.line.machine, str(before and commits[before]), commit]
    return feed.FeedEntry(title, when, link, text, context, when)


def write_index(history: History, target: Path, project: str, commit_url: str, now: datetime.datetime) -> None:
    """index.json and info.json, by which asv's pages find everything else."""
    params: dict[str, list[str]] = defaultdict(list)
    for line in history.lines:
        for name, value in graph_params(line).items():
            if value not in params[name]:
                params[name].append(value)
    benchmarks = {
        name: {**b.entry, "code": f"<pre>{html.escape(str(b.entry.get('code', '')))}</pre>"} for name, b in history.benchmarks.items()
    }
    used = set(itertools.chain.from_iterable(line.values for line in history.lines))
    index = {
        "project": project,
        "project_url": "index.html",
        "show_commit_url": commit_url or "index.html#",
        "hash_length": 8,
        "revision_to_hash": {str(revision): commit for commit, revision in history.revisions.items()},
        "revision_to_date": {str(history.revisions[commit]): date for commit, date in history.dates_ms.items()},
        "params": {name: sorted(values) for name, values in params.items()},
        "graph_param_list": [graph_params(line) for line in history.lines],
        "benchmarks": {name: entry for name, entry in benchmarks.items() if name in used},
        "machines": history.machines,
        "tags": {},
        "pages": [],
    }
    _write(target, "index.json", index)
    _write(target, "info.json", {"asv-version": metadata.version("asv"), "timestamp": int(now.timestamp() * 1000)})
