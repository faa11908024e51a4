"""What the fuzzer feeds of a gate's own folder: the file that says what a verdict rests on, and that of a bisect."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ci"))
from gate_builders import BASE_COMMIT, HEAD_COMMIT, a_run
from kept_runs import write_kept

from ci import bisect, case
from ci.bisect import Answer, BisectFile, Step
from ci.lost_rows import Listed, Suites
from ci.model import GateResult


def case_file(folder: Path) -> tuple[Path, bytes]:
    """A report's folder with pairs in it, and its `case.json`."""
    write_kept(folder / "runs" / "pairs", [a_run(3, commit=BASE_COMMIT, processes=12), a_run(4, commit=HEAD_COMMIT, processes=12)])
    row = Listed("decode_a", [], ["cpu", "cuda"], False, "read-bandwidth", "GB/s", "v1")
    case.write(
        case.CaseFile(
            mode="ab", device="NVIDIA H200", base=BASE_COMMIT, head=HEAD_COMMIT, created_at="2026-11-30T00:00:00Z", select="decode",
            skip=["x(y)"], notices=["n"], suites=Suites({"decode_a": row}, {"decode_a": row}),
        ),
        folder,
    )  # fmt: skip
    path = folder / case.FILE_NAME
    return path, path.read_bytes()


def read_case(path: Path, published: Callable[[GateResult], None]) -> Callable[[bytes], None]:
    """Computes the verdict again, as `python -m ci verdict` does."""

    def read(data: bytes) -> None:
        path.write_bytes(data)
        published(case.judge(path.parent))

    return read


def bisect_file() -> bytes:
    """A bisect of which one step is known."""
    step = Step(BASE_COMMIT, HEAD_COMMIT, 12, Answer.BAD, 0.25, "slower")
    file = BisectFile(bisect.SCHEMA_ID, "decode_a", BASE_COMMIT, HEAD_COMMIT, "NVIDIA_H200", [step], [HEAD_COMMIT], True)
    return bisect.dump(file).encode()


def read_bisect(data: bytes) -> None:
    """Reads the file, and writes it again."""
    file = bisect.load(data, name="the-file.json")
    json.dumps(msgspec.to_builtins(file), allow_nan=False).encode()
    assert bisect.load(bisect.dump(file).encode(), name="x") == file
    assert all(step.shown for step in file.steps)
