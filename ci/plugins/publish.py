"""Makes `asv publish` build this project's site: every device, offline, throughputs the right way round, and only what is new read again.

Keys of asv.conf.json: `site_results` (patterns of results folders and kept runs beside `results_dir`), `site_reports` (folders of gate
reports to link). Commits are ordered by the first of `branches`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asv.commands import publish
from asv.console import log


def _folders(conf: Any, root: Path) -> list[Path]:
    """The trees to show: `results_dir` where it holds results, and what `site_results` finds."""
    found = [Path(conf.results_dir)]
    for pattern in getattr(conf, "site_results", ()):
        found += sorted(root.glob(pattern))
    return [folder for folder in found if any((place / "benchmarks.json").is_file() for place in (folder, folder / "results"))]


def _run(cls: Any, /, conf: Any, range_spec: Any = None, pull: bool = True) -> None:
    from ci.history import site  # what draws pictures is heavy, and asv loads its plugins in every process

    root = Path(conf.repo).resolve()
    branch = conf.branches[0] if conf.branches and conf.branches[0] else "HEAD"
    made = site.build(
        _folders(conf, root),
        Path(conf.html_dir),
        project=conf.project,
        commit_url="" if conf.show_commit_url == "#" else conf.show_commit_url,
        repository=root,
        branch=branch,
        reports=[root / folder for folder in getattr(conf, "site_reports", ())],
    )
    log.info(f"{Path(conf.html_dir) / 'index.html'}: {made}")


def setup() -> None:
    publish.Publish.run = classmethod(_run)
