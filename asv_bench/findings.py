"""The tables of docs/findings-h200.md, made of what the demonstrations and the ablations wrote.

    python -m asv_bench.findings FOLDER [--page docs/findings-h200.md]
    python -m asv_bench.findings --keep FILE --date DAY --to FOLDER/NAME.json

The first prints every table, or puts each between its marks in the page; the second keeps a file as `--json` wrote it, without what no
table needs. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asv_bench import finding_tables
from asv_bench.finding_tables import COMMANDS, Sheets

_ROW_FIELDS = (
    "impl", "timer", "l2", "latency_us", "floor_us", "quantiles_us", "samples", "gb_per_s", "peak_fraction", "ceiling_fraction",
    "max_abs_diff", "launch_hash", "version", "flags", "status", "work",
)  # fmt: skip
TABLES: dict[str, Callable[[Sheets], str]] = {
    "synchronised": finding_tables.synchronised,
    "stall": finding_tables.stall,
    "known waits": finding_tables.known_waits,
    "both timers": finding_tables.both_timers,
    "order": finding_tables.order,
    "layout": finding_tables.layout,
    "pool size": finding_tables.pool_size,
    "quantiser": finding_tables.quantiser,
    "e4m3 read": finding_tables.e4m3_read,
    "prefill write": finding_tables.prefill_write,
    "decode write": finding_tables.decode_write,
    "allocators": finding_tables.allocators,
}
"""Each table by the name that its marks in the page have."""


def read(folder: Path) -> Sheets:
    """Reads the files of a folder, each as `kept` makes it.

    Raises:
        ValueError: A file is none of these, there is not one file of ablations and at least one of demonstrations, or two are of
            different devices or versions; the message names the file.
    """
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in COMMANDS}
    for path in sorted(folder.glob("*.json")):
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(stored, dict) or stored.get("kind") not in COMMANDS or not stored.get("date"):
            raise ValueError(f"{path} is no kept file; make it with `python -m asv_bench.findings --keep`")
        found[stored["kind"]].append({**stored, "name": path.stem})
    if len(found["ablations"]) != 1 or not found["demonstrations"]:
        raise ValueError(f"{folder} has to hold one kept file of ablations and at least one of demonstrations; keep what is missing there")
    sheets = Sheets(found["demonstrations"], found["ablations"][0])
    if len({sheet.device for sheet in sheets.all}) != 1:
        raise ValueError(f"the files in {folder} are of different devices or versions; keep those of one in a folder")
    return sheets


def kept(stored: dict[str, Any], date: str) -> str:
    """What `--json` of a demonstration or an ablation wrote, as JSON: a line a row, numbers to six digits.

    Args:
        stored: The file's content.
        date: Day on which it was measured, as YYYY-MM-DD; the file does not say it.
    Raises:
        ValueError: It is neither, a row of it failed, or the day is none.
    """
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        raise ValueError(f"--date is {date}; it has to be the day of the measurement, as 2026-11-30")
    if "rows" in stored:
        failed = [row["params"][0] for row in stored["rows"] if row["status"] != "ok"]
        if failed:
            raise ValueError(f"the ablations have rows that are not ok, as {failed[0]}; measure them again")
        rows = [{"case": row["params"][0], **{name: row[name] for name in _ROW_FIELDS}} for row in stored["rows"]]
        told = {"kind": "ablations", "ceilings": stored["ceilings"], "protocol": stored["protocol"], "rows": rows}
    elif "two_mib" in stored:
        told = {"kind": "demonstrations", **{name: value for name, value in stored.items() if name != "environment"}}
    else:
        raise ValueError(f"this is not what {' or '.join(COMMANDS.values())} writes; name such a file")
    lines = []
    for name, value in {"date": date, "environment": stored["environment"], **told}.items():
        listed = [f" {_compact(row)}" for row in value] if isinstance(value, list) else None
        text = _compact(value) if listed is None else "[\n" + ",\n".join(listed) + "\n]"
        lines.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _compact(value: Any) -> str:
    return json.dumps(_rounded(value), separators=(",", ":"))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list) else value


def block(name: str, sheets: Sheets) -> str:
    """A table with its marks."""
    return f"<!-- {name} -->\n{TABLES[name](sheets)}\n<!-- end of {name} -->"


def filled(page: str, sheets: Sheets) -> str:
    """The page with each table between its marks.

    Raises:
        ValueError: The page lacks the marks of a table.
    """
    for name in TABLES:
        before, begins, rest = page.partition(f"<!-- {name} -->\n")
        _, ends, after = rest.partition(f"<!-- end of {name} -->")
        if not begins or not ends:
            raise ValueError(f"the page has no marks of the table {name!r}; add the lines <!-- {name} --> and <!-- end of {name} -->")
        page = before + block(name, sheets) + after
    return page


def main(arguments: Sequence[str]) -> int:
    """The command; 2 where a file cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m asv_bench.findings", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="folder of kept files")
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="what --json of demonstrations or ablations wrote")
    parser.add_argument("--date", metavar="DAY", help="with --keep: when it was measured")
    parser.add_argument("--to", type=Path, metavar="FILE", help="with --keep: the file to write")
    options = parser.parse_args(arguments)
    try:
        if options.keep is not None:
            if options.date is None or options.to is None:
                raise ValueError("--keep needs --date and --to: the day of the measurement, and the file to write")
            options.to.write_text(kept(json.loads(options.keep.read_text(encoding="utf-8")), options.date), encoding="utf-8")
        elif options.folder is None:
            raise ValueError("name the folder of kept files, or a file with --keep")
        elif options.page is not None:
            page = filled(options.page.read_text(encoding="utf-8"), read(options.folder))
            options.page.write_text(page, encoding="utf-8")
        else:
            sheets = read(options.folder)
            print("\n\n".join(block(name, sheets) for name in TABLES))
    except (OSError, ValueError, KeyError) as error:
        lacks = f"a file lacks {error}; it is of another version of the command that wrote it: measure it again"
        print(lacks if isinstance(error, KeyError) else error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
