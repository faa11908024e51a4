"""A round is a fresh process, and what asv writes is written whole.

- Without interleaving asv prepares a commit once and hands the same prepared cache to all its rounds: here that would return one
  process' reading five times. Rounds are therefore always interleaved, which also alternates the commits of a comparison.
- asv writes its JSON in place; an interrupt in the middle leaves half a file. It is written beside and moved.
"""

from __future__ import annotations

import os
from typing import Any

from asv import benchmarks, machine, results, util
from asv.commands import run

_original_run = run.Run.run.__func__
_original_write = util.write_json


def _run_interleaved(cls: Any, /, conf: Any, **kwargs: Any) -> Any:
    if not kwargs.get("dry_run") and conf.environment_type == "host":
        kwargs["interleave_rounds"] = True
    return _original_run(cls, conf, **kwargs)


def _write_whole(path: str, data: Any, api_version: int | None = None, compact: bool = False) -> None:
    beside = f"{path}.writing-{os.getpid()}"
    try:
        _original_write(beside, data, api_version, compact)
        os.replace(beside, path)
    finally:
        if os.path.exists(beside):
            os.unlink(beside)


def setup() -> None:
    run.Run.run = classmethod(_run_interleaved)
    for module in (util, benchmarks, machine, results):
        if getattr(module, "write_json", None) is _original_write:
            module.write_json = _write_whole
    util.write_json = _write_whole
