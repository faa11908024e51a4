"""What the fuzzer feeds the product itself: the files that `dispatch()` reads, of tuned configs and of what was measured."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from rapid_llm.errors import EvidenceError
from rapid_llm.kernels.autotune import ConfigStore, StoredConfig, config_store
from rapid_llm.kernels.configs import WriteConfig
from rapid_llm.kernels.ops import registry, tuned
from rapid_llm.kernels.ops.evidence import load_evidence, record_goldens
from rapid_llm.kernels.ops.spec import Request

KERNEL = "triton_kv_write"
REQUEST = Request(
    "kv_write", "cuda", (9, 0), "float16", "float16", frozenset({"kv:paged", "kv:combined"}),
    Request.sorted_shape({"num_tokens": 64, "num_kv_heads": 8, "head_dim": 128, "num_rows": 4096}),
)  # fmt: skip
STORED = StoredConfig({"tokens": 2, "block": 512, "num_warps": 4}, 11.5, 0.25, {"device": "a device", "commit": "c" * 40})


def config_file(folder: Path) -> tuple[Path, bytes]:
    """A file of two tuned configs; the first is that of `REQUEST` on this machine."""
    key = tuned.config_key(registry.get(KERNEL), REQUEST)
    path = folder / config_store.file_name(key.device)
    for one in (key, dataclasses.replace(key, op="another")):
        ConfigStore(path).put(one, STORED)
    return path, path.read_bytes()


def read_configs(path: Path, finding: Callable[[str], Exception]) -> Callable[[bytes], None]:
    """Asks for the config of `REQUEST`, then stores another one beside it: a damaged file costs one warning, and never the new entry.

    What the warning says is raised as a refusal, to be judged as one.
    """
    spec = registry.get(KERNEL)
    new = dataclasses.replace(tuned.config_key(spec, REQUEST), op="new")

    def constant(token: str) -> None:
        raise finding(f"the file has the bare constant {token}")

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with (
            mock.patch.object(config_store, "_warned", set()),
            mock.patch.dict(os.environ, {config_store.CONFIG_DIR_VARIABLE: str(path.parent)}),
            warnings.catch_warnings(record=True) as told,
        ):
            warnings.simplefilter("always")
            found, _ = tuned.chosen_config(spec, REQUEST)
            if found is not None and (not isinstance(found, WriteConfig) or found.problem(dict(REQUEST.shape), "float16") is not None):
                raise finding(f"a config that does not fit is handed out: {found}")
            if len(told) > 1:
                raise finding(f"{len(told)} warnings about one file")
            if not ConfigStore(path).put(new, STORED) or ConfigStore(path).get(new) != STORED:
                raise finding("what is stored in a damaged file is not found again")
        json.loads(path.read_text(encoding="utf-8"), parse_constant=constant)
        path.with_name(f"{path.name}.malformed").unlink(missing_ok=True)
        if told:
            raise EvidenceError(str(told[0].message))

    return read


def read_evidence(path: Path) -> Callable[[bytes], None]:
    """Reads a baseline as `install_evidence` does."""

    def read(data: bytes) -> None:
        path.write_bytes(data)
        load_evidence(path)

    return read


def read_goldens(path: Path) -> Callable[[bytes], None]:
    """Reads a process record as `record_goldens` does, without keeping what it says."""

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with mock.patch.object(registry, "record_golden"):
            record_goldens(path)

    return read
