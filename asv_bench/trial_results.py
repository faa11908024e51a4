"""What a trial of kernels found: a file that is written anew after each result, a line a result, and the best of each cell at the end."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asv_bench.lazy import LazyModule
from asv_bench.peaks import measured_ceilings

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

environment: Any = LazyModule("asv_bench.environment")

SCHEMA = "rapid_llm/trial/1"


class Results:
    """The results so far."""

    def __init__(self, path: Path, device: torch.device, *, quick: bool, schema: str = SCHEMA) -> None:
        """Measures the device's ceilings, and begins the file.

        Args:
            path: Of the file; its folder is made.
            device: Where it is measured.
            quick: Whether the shapes are tiny, so that the figures say nothing.
            schema: Of the file.
        """
        self._path = path
        self.read_gb_per_s = measured_ceilings(device).read
        known = environment.collect_environment(device)
        self._head = {
            "schema": schema,
            "quick": quick,
            "interpreted": device.type != "cuda",
            "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
            "environment": known,
            "read_ceiling_gb_per_s": self.read_gb_per_s,
        }
        self.rows: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    def add(
        self,
        told: dict[str, Any],
        *,
        latency_us: float | None = None,
        moved: float | None = None,
        max_abs_diff: float | None = None,
        reason: str | None = None,
    ) -> None:
        """Adds a result.

        Args:
            told: What it is of: what, cell, block_size, config.
            latency_us: Microseconds a call; None where it failed.
            moved: Bytes that a call moves, None where that says nothing.
            max_abs_diff: Of the verification.
            reason: Why there is no time.
        """
        share = None if latency_us is None or moved is None else moved / latency_us / 1e3 / self.read_gb_per_s
        row = {**told, "latency_us": latency_us, "share_of_read_ceiling": share, "max_abs_diff": max_abs_diff, "reason": reason}
        self.rows.append(row)
        self._write()
        print(line(row), flush=True)

    def note(self, **more: Any) -> None:
        """Writes more beside the results, by name."""
        self._head |= more
        self._write()

    def best(self, cell: str, what: str, block_size: int | None) -> dict[str, Any] | None:
        """The result with the smallest median time; of a config that was read several times the times are put together."""
        return min(self._medians(cell, what, block_size), key=lambda row: row["latency_us"], default=None)

    def summary(self) -> str:
        """The best of each cell, with its share of the read ceiling and its ratios to the peers and to the cell's other dtype."""
        lines = [f"read ceiling {self.read_gb_per_s:.0f} GB/s; best config of each cell:"]
        for cell in dict.fromkeys(row["cell"] for row in self.rows if row["what"] == "ours"):
            found = self.best(cell, "ours", 1)
            if found is None:
                lines.append(f"{cell}: nothing was measured")
                continue
            parts = [line(found)]
            others = {"first config": self._medians(cell, "ours", 1)[0], "blocks of 16": self.best(cell, "ours", 16)}
            others |= {what: self.best(cell, what, None) for what in sorted({row["what"] for row in self.rows}) if what.startswith("sdpa")}
            if cell.endswith(" e4m3"):
                others["float16"] = self.best(cell.replace(" e4m3", " float16"), "ours", 1)
            for name, other in others.items():
                if other is not None and other["latency_us"]:
                    parts.append(f"{found['latency_us'] / other['latency_us']:.3f}x {name}")
            lines.append("; ".join(parts))
        return "\n".join(lines)

    def _medians(self, cell: str, what: str, block_size: int | None) -> list[dict[str, Any]]:
        """Of each config the result with its median time, in the order in which they were first measured."""
        by_config: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows:
            if (row["cell"], row["what"], row["block_size"]) == (cell, what, block_size) and row["latency_us"] is not None:
                by_config.setdefault(json.dumps(row["config"], sort_keys=True), []).append(row)
        return [sorted(rows, key=lambda row: row["latency_us"])[len(rows) // 2] for rows in by_config.values()]

    def _write(self) -> None:
        write_strictly(self._path, {**self._head, "results": self.rows})


def write_strictly(path: Path, data: dict[str, Any]) -> None:
    """Replaces a file by strict JSON of `data`, at once: a process that dies leaves the file as it was.

    Raises:
        ValueError: A number is NaN or infinite.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(data, allow_nan=False, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def line(row: dict[str, Any]) -> str:
    """A result as text."""
    config = row["config"]
    told = {} if config is None else {name: value for name, value in config.items() if name not in ("block_m", "block_d")}
    shown = "".join(f" {name}={value}" for name, value in told.items())
    head = f"{row['cell']} {row['what']}{'' if row['block_size'] in (1, None) else ' blocks of ' + str(row['block_size'])}{shown}"
    if row["latency_us"] is None:
        return f"{head}: {row['reason'] or 'no time'}"
    share = "" if row["share_of_read_ceiling"] is None else f", {row['share_of_read_ceiling']:.1%} of the read ceiling"
    return f"{head}: {row['latency_us']:.2f} us{share}"
