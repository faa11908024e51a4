"""Files of tuned configs, one a device: strict JSON, replaced whole, read by exact key.

What cannot be read is a miss, with one warning a file and process: a config only makes a call faster, and the rule serves without it.
Writers take turns by a lock beside the file, so that none undoes another's entry.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import math
import os
import re
import reprlib
import stat
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapid_llm.strict_json import read_strict_json

__all__ = [
    "CONFIG_DIR_VARIABLE",
    "SCHEMA",
    "ConfigKey",
    "ConfigStore",
    "StoredConfig",
    "generation",
    "get_best_config",
    "shape_bucket",
    "stores",
]

SCHEMA = "rapid_llm/configs/1"
CONFIG_DIR_VARIABLE = "RAPID_LLM_CONFIG_DIR"
"""Environment variable: folder of config files that are asked before the packaged ones; blank means none."""

_PACKAGED = Path(__file__).parent / "configs"
_EXACT = frozenset({"num_q_heads", "num_kv_heads", "head_dim", "block_size"})
_IGNORED = frozenset({"num_rows"})
_MAX_NAME = 120
_MAX_TEXT = 64

_warned: set[str] = set()
_writes = 0


@dataclass(frozen=True)
class ConfigKey:
    """Everything that a tuned config depends on; another value of any of these is a miss.

    Attributes:
        op, kernel: Operation and KernelSpec name.
        q_dtype, kv_dtype: As of a request.
        layout_tags: Sorted.
        shape: Bucket of the request's shape, see `shape_bucket`.
        device: As the driver names it.
        versions: Sorted (package, version) pairs of what compiles the kernel.
        source_hash: Of the kernel's source.
    """

    op: str
    kernel: str
    q_dtype: str
    kv_dtype: str
    layout_tags: tuple[str, ...]
    shape: tuple[tuple[str, int], ...]
    device: str
    versions: tuple[tuple[str, str], ...]
    source_hash: str

    def text(self) -> str:
        """The key as a line: the name of its entry in the file."""
        shape = ",".join(f"{name}={size}" for name, size in self.shape)
        versions = ",".join(f"{name}={version}" for name, version in self.versions)
        parts = (
            self.op,
            self.kernel,
            self.q_dtype,
            self.kv_dtype,
            ",".join(self.layout_tags),
            shape,
            self.device,
            versions,
            self.source_hash,
        )
        return " | ".join(parts)


@dataclass(frozen=True)
class StoredConfig:
    """A tuned config and how it was found.

    Attributes:
        config: Field names and values of the kernel's config.
        latency_us: Of one call when it was chosen, in microseconds.
        max_abs_diff: Largest difference from the reference when it was verified.
        environment: Device, versions, commit and day of the search.
    """

    config: Mapping[str, int | None]
    latency_us: float
    max_abs_diff: float
    environment: Mapping[str, Any]

    def problem(self) -> str | None:
        """Why this is no entry; None where it is one."""
        if not isinstance(self.config, Mapping) or not self.config:
            return "config is no object with fields"
        if any(not name.isidentifier() or len(name) > _MAX_TEXT for name in self.config):
            return "config has a key that names no field"
        if not all(_small(value) for value in self.config.values()):
            return "config holds what is neither an int of 64 bits, a short text nor null"
        if not _number(self.latency_us) or not 0 < self.latency_us < math.inf:
            return f"latency_us is {reprlib.repr(self.latency_us)} and no positive finite number"
        if not _number(self.max_abs_diff) or not 0 <= self.max_abs_diff < math.inf:
            return f"max_abs_diff is {reprlib.repr(self.max_abs_diff)}, so the config was not verified"
        if not isinstance(self.environment, Mapping) or not self.environment:
            return "the environment block is missing"
        return None


class ConfigStore:
    """One file of tuned configs."""

    def __init__(self, path: str | Path) -> None:
        """Names the file; it need not exist."""
        self.path = Path(path)

    def get(self, key: ConfigKey) -> StoredConfig | None:
        """The entry of exactly that key, None where the file has none that is usable."""
        entry = self._entries().get(key.text())
        if entry is None:
            return None
        found = _parsed(entry)
        if isinstance(found, str):
            _warn(f"{self.path}: {found}", f"the entry of {key.kernel} is passed over; tune it again with python -m asv_bench.tune")
            return None
        return found

    def put(self, key: ConfigKey, stored: StoredConfig) -> bool:
        """Adds or replaces the entry of a key.

        Returns:
            Whether it is in the file now; a file that cannot be written is a warning.

        Raises:
            ValueError: `stored` is no entry: no time of an unverified config, and nothing that is no time, gets in.
        """
        if (problem := stored.problem()) is not None:
            raise ValueError(f"ConfigStore.put expected a verified, timed config for {key.kernel}, but {problem}; search again.")
        global _writes
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                entries = self._entries()
                if self.path.exists() and _loaded(str(self.path), *_stamp(self.path))[1] is not None:
                    # Kept under another name instead of overwritten.
                    os.replace(self.path, self.path.with_name(f"{self.path.name}.malformed"))
                entries[key.text()] = {"key": dataclasses.asdict(key), **dataclasses.asdict(stored)}
                _replace(self.path, {"schema": SCHEMA, "entries": entries})
        except OSError as error:
            _warn(str(self.path), f"cannot be written ({error}), so the tuned config of {key.kernel} is not kept; name a writable file")
            return False
        _writes += 1
        return True

    def _entries(self) -> dict[str, Any]:
        try:
            stamp = _stamp(self.path)
        except FileNotFoundError:
            return {}
        except OSError as error:
            _warn(str(self.path), f"cannot be read ({error}), so its configs are passed over; mend the path")
            return {}
        entries, problem = _loaded(str(self.path), *stamp)
        if problem is not None:
            _warn(str(self.path), f"is no file of configs ({problem}), so it is passed over; delete it and tune again")
        return dict(entries)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self.path.with_name(f".{self.path.name}.lock").open("w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def get_best_config(key: ConfigKey) -> StoredConfig | None:
    """The tuned config of a key: from the user's folder, else from the packaged ones; None where nothing is tuned."""
    return next((found for store in stores(key.device) if (found := store.get(key)) is not None), None)


def stores(device: str) -> tuple[ConfigStore, ...]:
    """The files that are asked for a device, in this order: that of the folder in RAPID_LLM_CONFIG_DIR, the packaged one."""
    folder = os.environ.get(CONFIG_DIR_VARIABLE, "").strip()
    return tuple(ConfigStore(where / file_name(device)) for where in ([Path(folder)] if folder else []) + [_PACKAGED])


def file_name(device: str) -> str:
    """Name of a device's file: its name with other characters than letters, digits, dots and hyphens replaced, of bounded length."""
    return f"{re.sub(r'[^A-Za-z0-9.-]+', '_', device)[:_MAX_NAME]}.json"


def shape_bucket(shape: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """The bucket of a request's shape: head geometry as it is, other sizes rounded up to a power of two, num_rows left out."""
    return tuple((n, s if n in _EXACT else 1 << (s - 1).bit_length() if s > 0 else 0) for n, s in shape if n not in _IGNORED)


def generation() -> int:
    """Number of entries that this process has written; a decision made under another number is stale."""
    return _writes


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _small(value: object) -> bool:
    if type(value) is str:
        return len(value) <= _MAX_TEXT and value.isprintable()
    return value is None or (type(value) is int and -(1 << 63) <= value < 1 << 63)


def _parsed(entry: Any) -> StoredConfig | str:
    names = [field.name for field in dataclasses.fields(StoredConfig)]
    if not isinstance(entry, dict) or not set(names) <= set(entry):
        return f"an entry lacks one of {', '.join(names)}"
    stored = StoredConfig(*(entry[name] for name in names))
    return stored.problem() or stored


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise IsADirectoryError(f"{path} is no regular file")
    return status.st_mtime_ns, status.st_size, status.st_ino


@functools.lru_cache(maxsize=16)
def _loaded(path: str, *stamp: int) -> tuple[dict[str, Any], str | None]:
    """Entries of a file as it was at `stamp`, and what is wrong with it."""
    del stamp
    try:
        data = read_strict_json(Path(path))
    except (OSError, ValueError) as error:
        return {}, str(error)
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("entries"), dict):
        return {}, f"its schema is not {SCHEMA}"
    return data["entries"], None


def _replace(path: Path, data: dict[str, Any]) -> None:
    """Writes a file whole: a reader sees the old one or the new one."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(data, allow_nan=False, indent=1, sort_keys=True) + "\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _warn(where: str, what: str) -> None:
    """Once a place and process."""
    if where not in _warned:
        _warned.add(where)
        warnings.warn(f"{where} {what}.", RuntimeWarning, stacklevel=4)
