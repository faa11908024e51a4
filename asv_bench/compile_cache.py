"""What was compiled before, as files by hash: records of checkouts, and the figures of each machine code.

A machine code's registers and spills are known when it is assembled; its instructions are counted later, of all codes at a time.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asv_bench import machine_code, sass


def cached(path: Path) -> dict[str, Any] | None:
    """What a file of the cache holds, None where there is none; a damaged one is told, and made again."""
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        print(f"asv_bench.compiled: {path} is damaged ({error}); compiling again", file=sys.stderr)
        return None
    if not isinstance(made, dict):
        print(f"asv_bench.compiled: {path} holds no table; compiling again", file=sys.stderr)
        return None
    return made


def write(path: Path, content: bytes | str | dict[str, Any]) -> None:
    """Writes a file whole or not at all; a table as JSON."""
    text = json.dumps(content, allow_nan=False, indent=1, sort_keys=True) + "\n" if isinstance(content, dict) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(text.encode() if isinstance(text, str) else text)
    os.replace(beside, path)


def assembled(cache: Path, code: str) -> dict[str, int] | None:
    """What ptxas said of a machine code that was kept with its cubin, None where it was not."""
    return cached(_file(cache, code, "json")) if _file(cache, code, "cubin").is_file() else None


def keep(cache: Path, code: str, cubin: bytes, figures: dict[str, int]) -> None:
    """Keeps a machine code and what ptxas said of it."""
    write(_file(cache, code, "cubin"), cubin)
    write(_file(cache, code, "json"), figures)


def figures(cache: Path, codes: Iterable[str], cuobjdump: Path) -> dict[str, dict[str, int]]:
    """All figures of machine codes that were kept; those that were not counted before are disassembled, and their listings written.

    Raises:
        ToolError: cuobjdump failed or said something else than expected.
    """
    found = {code: cached(cache / "codes" / f"{code}.json") for code in codes}
    new = [code for code, made in found.items() if made is None]
    texts = sass.disassemble({code: _file(cache, code, "cubin").read_bytes() for code in new}, cuobjdump)
    made = {code: json.loads(_file(cache, code, "json").read_bytes()) | machine_code.counted(texts[code]) for code in new}
    for code in new:
        write(cache / "sass" / f"{code}.txt", machine_code.listing(texts[code]))
        write(cache / "codes" / f"{code}.json", made[code])
    return {code: known for code, known in {**found, **made}.items() if known is not None}


def _file(cache: Path, code: str, kind: str) -> Path:
    return cache / "assembled" / f"{code}.{kind}"
