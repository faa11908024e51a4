"""asv's configuration as the gate needs it: a change of it could measure something else, or nothing, and leave old results to be read."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from ci.errors import UsageError
from ci.jsonio import read_json

PLUGINS = frozenset(f".ci.plugins.{name}" for name in ("host_env", "direction", "bands", "rounds", "machine", "publish"))


class Configuration(msgspec.Struct, frozen=True):
    """The keys that the gate relies on; asv checks the others."""

    version: Literal[1]
    repo: Literal["."]
    environment_type: Literal["host"]
    benchmark_dir: Literal["asv_bench"]
    results_dir: Literal[".asv/results"]
    records_dir: Literal[".asv/records"]
    host_versions: list[str]
    host_keep: int
    plugins: list[str]


def check(path: Path) -> Configuration:
    """The configuration in `path`.

    Raises:
        UsageError: It cannot be read, or says something with which the gate would not measure what it judges; the message names both.
    """
    data = read_json(path, error=UsageError)
    try:
        found = msgspec.convert(data, Configuration)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} is no configuration that the gate can measure with: {error}; restore it from the base branch.") from error
    lacking = sorted(PLUGINS - set(found.plugins))
    if lacking:
        raise UsageError(f"{path} leaves out the plugin {lacking[0]}, without which the gate does not measure; restore it.")
    return found
