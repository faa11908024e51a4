"""What an action keeps: JSON files with what made them, written after each step."""

from __future__ import annotations

import datetime
import json
import platform
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from ci.device import detect
from ci.errors import UsageError
from ci.jsonio import read_json, write_atomic
from tests.live.places import Clone, changed_files

SCHEMA = "rapid_llm/live/1"
_PACKAGES = ("torch", "triton", "numpy", "asv")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def made_with(action: str, command: str, root: Path) -> dict[str, Any]:
    """Action, command, device, versions, commit and date of what is kept."""
    return {
        "action": action,
        "command": command,
        "device": detect().name,
        "device_type": detect().type,
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "commit": Clone(root).head,
        "modified_files": changed_files(root),
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
    }


@dataclass
class Kept:
    """One result file of an action, and what it holds so far.

    Attributes:
        path: `FOLDER/ACTION.json`, or `FOLDER/ACTION-N.json`.
        made: As `made_with` gives it.
        found: The action's own fields.
    """

    path: Path
    made: dict[str, Any]
    found: dict[str, Any] = field(default_factory=dict)

    def take_up(self, *names: str) -> None:
        """Takes over fields of an earlier call that kept this file; nothing where there is none.

        Raises:
            UsageError: It is of another commit, device or versions.
        """
        if not self.path.is_file():
            return
        data = read_json(self.path)
        made = data.get("made") if isinstance(data, dict) else None
        for name in ("action", "device", "commit", "torch", "triton"):
            if not isinstance(data, dict) or not isinstance(made, dict) or made.get(name) != self.made[name]:
                raise UsageError(f"{self.path} is of another {name} than this call, which would go on with it: name another --out.")
        assert isinstance(data, dict)
        self.found |= {name: data[name] for name in names if name in data}

    def write(self, *, complete: bool, elapsed_s: float, why: str | None = None) -> None:
        """Writes the file, whole or not at all.

        Args:
            complete: Whether all that was asked for is in it.
            elapsed_s: Of the action.
            why: What stopped it, where something did.
        """
        data = {"schema": SCHEMA, "made": self.made, "complete": complete, "stopped": why, "elapsed_s": round(elapsed_s, 1), **self.found}
        write_atomic(self.path, json.dumps(data, allow_nan=False, indent=1, sort_keys=True) + "\n")


def results(folders: list[Path]) -> list[dict[str, Any]]:
    """Every result of actions in these folders, by action, date and file."""
    found = []
    for path in sorted({path for folder in folders for path in folder.rglob("*.json")}):
        data = read_json(path)
        if isinstance(data, dict) and data.get("schema") == SCHEMA:
            found.append((data["made"]["action"], data["made"]["date"], path.name, data))
    return [data for *_, data in sorted(found, key=lambda one: one[:3])]
