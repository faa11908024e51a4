"""The front page: by bottleneck class, every device, what changed and at which commit, and the latest gate reports."""

from __future__ import annotations

import datetime
import math
import re
import shutil
import urllib.parse
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ci import plots
from ci.history.assets import APP
from ci.history.frontend import graph_params
from ci.history.series import Change, Series
from ci.history.store import History
from ci.keys import param_text
from ci.records import read_process_records
from ci.rows import section_of
from ci.templates.figures import change, number, percent, short_commit, throughput, visible
from ci.templates.sections import SECTIONS, tones
from ci.verdict_file import load as load_verdict

MAX_CHANGES = 60
MAX_TRACES = 24
"""Rows of a class and device that are drawn, those that changed last first; all are in the table."""

Sections = Mapping[tuple[str, tuple[str, ...]], str]


@dataclass(frozen=True)
class ChangeLine:
    """A change point as the page tells it."""

    row: str
    device: str
    speed: float
    before: str
    after: str
    commit: str
    date: str
    commit_link: str
    graph_link: str
    revision: int

    @property
    def tone(self) -> str:
        return "bad" if self.speed < 0 else "good"


@dataclass(frozen=True)
class RowLine:
    """A row's latest level, and its last change if there was one."""

    row: str
    graph_link: str
    level: str
    points: int
    last: ChangeLine | None


@dataclass(frozen=True)
class DevicePart:
    """The rows of one class on one device."""

    device: str
    versions: str
    rows: list[RowLine]
    picture: Markup
    num_drawn: int


@dataclass(frozen=True)
class ReportLine:
    """A gate report that the site has a copy of."""

    link: str
    verdict: str
    reason: str
    device: str
    head: str
    created_at: str


def sections_of(record_folders: Iterable[Path]) -> dict[tuple[str, tuple[str, ...]], str]:
    """The bottleneck class of each row that a process has recorded."""
    found: dict[tuple[str, tuple[str, ...]], str] = {}
    for folder in record_folders:
        for process in read_process_records(folder):
            for row in process.rows:
                found[row.key.benchmark, row.key.params] = section_of(row, row.key)
    return found


def copy_reports(folders: Sequence[Path], target: Path) -> list[ReportLine]:
    """Copies gate reports into ``target/reports``; the newest first. A folder without a verdict is left out."""
    lines = []
    for number_, folder in enumerate(folder for folder in folders if (folder / "verdict.json").is_file()):
        result = load_verdict((folder / "verdict.json").read_bytes(), name=str(folder / "verdict.json"))
        plain = re.sub(r"[^A-Za-z0-9._-]+", "_", f"{result.device}-{result.head[:12]}")[:80]
        name = f"reports/{number_ + 1}-{plain}"
        (target / name).mkdir(parents=True, exist_ok=True)
        for file in ("index.html", "verdict.json", "summary.md", "junit.xml"):
            if (folder / file).is_file():
                shutil.copyfile(folder / file, target / name / file)
        lines.append(
            ReportLine(
                f"{name}/index.html", result.verdict.value, result.reason, result.device, short_commit(result.head), result.created_at
            )
        )
    return sorted(lines, key=lambda line: line.created_at, reverse=True)


def graph_link(series: Series, several: set[str], commits: str = "") -> str:
    """Address of a series in asv's graphs."""
    query = [(name, value) for name, value in graph_params(series.line).items() if name in several]
    query += [(f"p-{name}", text) for name, text in zip(series.benchmark.entry["param_names"], series.params, strict=False)]
    query += [("commits", commits)] if commits else []
    return f"{APP}#{urllib.parse.quote(series.benchmark.name, safe='')}?{urllib.parse.urlencode(query, quote_via=urllib.parse.quote)}"


def _row_name(series: Series) -> str:
    params = ", ".join(param_text(text) for text in series.params)
    return f"{series.benchmark.name}({params})" if params else series.benchmark.name


class Front:
    """Collects what the front page shows."""

    def __init__(self, history: History, found: Sequence[Series], sections: Sections, commit_url: str) -> None:
        self.history, self.found, self.sections, self.commit_url = history, found, sections, commit_url
        self._commits = {revision: commit for commit, revision in history.revisions.items()}
        values: dict[str, set[str]] = defaultdict(set)
        for line in history.lines:
            for name, value in graph_params(line).items():
                values[name].add(value)
        self._several = {name for name, several in values.items() if len(several) > 1}

    def told(self, changed: Change) -> ChangeLine:
        """A change in words and links."""
        series = changed.series
        commit = self._commits[changed.first]
        when = datetime.datetime.fromtimestamp(self.history.dates_ms[commit] / 1000, datetime.timezone.utc)
        last = self._commits[changed.last]
        adjacent = changed.first - changed.last == 1
        return ChangeLine(
            row=_row_name(series),
            device=series.line.machine,
            speed=changed.speed,
            before=throughput(changed.before, series.benchmark.unit),
            after=throughput(changed.after, series.benchmark.unit),
            commit=commit[:12] if adjacent else f"{last[:12]}..{commit[:12]}",
            date=f"{when:%Y-%m-%d}",
            commit_link=f"{self.commit_url}{commit}" if self.commit_url else "",
            graph_link=graph_link(series, self._several, commit if adjacent else f"{last}-{commit}"),
            revision=changed.first,
        )

    def changes(self) -> list[ChangeLine]:
        """All change points, the newest first; of one commit the losses first, the largest at their head."""
        lines = [self.told(changed) for series in self.found for changed in series.changes()]
        return sorted(lines, key=lambda line: (-line.revision, line.speed > 0, -abs(line.speed)))

    def parts(self) -> list[tuple[str, str, list[DevicePart]]]:
        """Section id, title, and its devices."""
        grouped: dict[str, dict[int, list[Series]]] = defaultdict(lambda: defaultdict(list))
        for series in self.found:
            key = (series.benchmark.name, tuple(param_text(text) for text in series.params))
            grouped[self.sections.get(key, "other")][id(series.line)].append(series)
        made = []
        for name, title in SECTIONS.items():
            if name in grouped:
                made.append((name, title, [self._part(title, rows) for rows in grouped[name].values()]))
        return made

    def _part(self, title: str, rows: Sequence[Series]) -> DevicePart:
        lines = []
        for series in rows:
            changed = list(series.changes())
            lines.append((changed[-1].first if changed else -1, series, self.told(changed[-1]) if changed else None))
        lines.sort(key=lambda line: (-line[0], line[1].name))
        drawn = [series for _, series, _ in lines[:MAX_TRACES]]
        line = rows[0].line
        picture = plots.traces(
            [
                plots.Trace(visible(_row_name(s)), s.revisions.tolist(), s.values.tolist(), [(c.first, c.worse) for c in s.changes()])
                for s in drawn
            ],
            f"{title} on {line.machine}: {len(drawn)} rows over the commits; levels and changes are in the table.",
        )
        versions = ", ".join(f"{name} {value}" for name, value in line.params if name != "machine" and value)
        told = [
            RowLine(_row_name(s), graph_link(s, self._several), throughput(s.levels[-1].value, s.benchmark.unit), int(s.values.size), last)
            for _, s, last in lines
        ]
        return DevicePart(line.machine, versions, told, picture, len(drawn))


def render(
    front: Front, *, project: str, reports: Sequence[ReportLine], num_regressions: int, now: datetime.datetime, problems: Sequence[str]
) -> str:
    """Renders index.html: no script, no request but for links."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent.parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update({figure.__name__: figure for figure in (number, percent, change)})
    history = front.history
    changes = front.changes()
    dates = sorted(history.dates_ms.values())
    text = environment.get_template("site.html.j2").render(
        project=project,
        app=APP,
        devices=sorted({line.machine for line in history.lines}),
        machines=history.machines,
        num_commits=len(history.revisions),
        num_rows=len(front.found),
        span=[f"{datetime.datetime.fromtimestamp(date / 1000, datetime.timezone.utc):%Y-%m-%d}" for date in (dates[0], dates[-1])],
        changes=changes[:MAX_CHANGES],
        num_changes=len(changes),
        num_regressions=num_regressions,
        parts=front.parts(),
        reports=reports,
        problems=problems,
        tones=tones(),
        made=f"{now:%Y-%m-%d %H:%M} UTC",
        finite=math.isfinite,
    )
    return visible(text)
