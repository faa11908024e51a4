"""`table`: what the actions kept as Markdown, one part an action, computed from the JSON files alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ci.errors import InputError
from tests.live.kept import results
from tests.statistics.page import filled
from tests.statistics.tables import markdown, share

Data = Mapping[str, Any]


def percent(value: float | None, digits: int = 2) -> str:
    """A relative change or a share, signed only where it is told to be one by the caller's heading."""
    return "" if value is None else f"{100 * value:.{digits}f} %"


def short(row: str) -> str:
    """A row's id without the module and the method."""
    benchmark, _, case = row.partition("(")
    return f"{benchmark.split('.')[-2]}: {case.removesuffix(')')}"


def _made(data: Data) -> str:
    made = data["made"]
    versions = ", ".join(f"{name} {made[name]}" for name in ("python", "torch", "triton"))
    text = f"`{made['command']}`, {made['device']}, {versions}, commit {made['commit'][:12]}, {made['date']}, {data['elapsed_s']:.0f} s."
    if made["device_type"] != "cuda":
        text += " **A CPU: not a GPU figure.**"
    if made["modified_files"]:
        text += f" Tracked files of the checkout differed from the commit, which alone was measured: {', '.join(made['modified_files'])}."
    return text if data["complete"] else f"{text} Stopped before all was measured: {data['stopped'] or 'it was ended from outside'}."


def _gates(of_action: Sequence[Data]) -> str:
    gates = [gate for data in of_action for gate in data.get("gates", [])]
    rows = [
        [
            str(number),
            gate["mode"] + (", cold" if gate.get("cold") else "") + (", continued" if gate["resumed"] else ""),
            f"{gate['exit_code']} {gate['verdict']}",
            ", ".join(f"{count} {name}" for name, count in gate["verdicts"].items()),
            ", ".join(f"{name} {count}" for name, count in gate["processes"].items()),
            f"{gate['wall_s']:.0f}",
            ", ".join(f"{name} {seconds:.0f}" for name, seconds in gate["phases_s"]),
        ]
        for number, gate in enumerate(gates, 1)
    ]
    text = markdown(["gate", "mode", "exit", "rows", "processes", "seconds", "seconds by phase"], rows)
    return f"{text}\n{_reds(gates)}\n"


def _reds(gates: Sequence[Data]) -> str:
    counts = {code: sum(gate["exit_code"] == code for gate in gates) for code in (1, 5)}
    notes = [f"- {told}" for gate in gates for told in [*gate["not_passed"], *(f"moved: {row}" for row in gate["moved"])]]
    said = f"Red (exit code 1): {share(counts[1], len(gates))}. Unfit (exit code 5): {share(counts[5], len(gates))}."
    return "\n".join([said, *(["", *notes] if notes else [])])


def _disturbed(of_action: Sequence[Data]) -> str:
    rows = [
        [
            data["disturbance"],
            gate["mode"],
            f"{gate['exit_code']} {gate['verdict']}",
            " or ".join(map(str, data["expected"])),
            "yes" if data["as_expected"] else "**no**",
            gate["reason"],
        ]
        for data in of_action
        for gate in data.get("gates", [])
    ]
    return markdown(["disturbance", "mode", "exit", "expected", "as expected", "reason"], rows)


def _rebuild(of_action: Sequence[Data]) -> str:
    text = ""
    for data in of_action:
        classes = [
            [row["class"], str(row["rows"]), percent(row["within_sd"], 3), percent(row["build_sd"], 3), short(row["largest"])]
            for row in data.get("classes", [])
        ]
        each = [
            [
                short(row["row"]) + (" (control)" if row["control"] else ""),
                f"{percent(row['mean'], 3)} ± {percent(row['mean_error'], 3)}",
                percent(row["within_sd"], 3),
                f"{percent(row['build_sd'], 3)} ({percent(row['low'], 3)} to {percent(row['high'], 3)})",
            ]
            for row in data.get("rows", [])
        ]
        told = f"{data.get('groups', 0)} fresh builds, {data.get('processes_a_group', 0)} processes a group.\n\n"
        told += markdown(["class", "rows", "SD within a build", "SD of the build effect", "largest in"], classes)
        text += f"{told}\n{markdown(['row', 'fresh less old', 'SD within a build', 'SD of the build effect (95 %)'], each)}"
    return text


def _pairs(of_action: Sequence[Data]) -> str:
    rows = [
        [str(data.get(name, "")) for name in ("pairs", "num_rows", "boots", "longest_process_s")] + ["; ".join(data.get("unmeasured", []))]
        for data in of_action
    ]
    return markdown(["pairs", "rows", "boots", "longest process, s", "without a number"], rows)


_CALIBRATED = {"read": "", "loop": " (by the time of the loop alone)", "": " (not calibrated to within .2 %)"}


def _power(of_action: Sequence[Data]) -> str:
    rows = []
    for data in of_action:
        names = {row: name for name, row in data["asked"]["rows"].items()}
        for size, judged in data.get("sizes", {}).items():
            for row, found in judged["rows"].items():
                name = names.get(row, "")
                rows.append(
                    [
                        short(row),
                        data["how"].get(name, ""),
                        f"{size} %{_CALIBRATED[data['calibrated'][size].get(name, '')]}",
                        "" if found["effect"] is None else f"{100 * found['effect']:+.2f} %",
                        percent(found.get("floor")),
                        "" if found.get("p") is None else f"{found['p']:.2g}",
                        str(found.get("pairs", data["pairs"])),
                        f"{data['seconds'][size]:.0f}",
                        found["verdict"] + (f" (unfit: {judged['unfit']})" if judged["unfit"] else ""),
                    ]
                )
    return markdown(["row", "slowed by", "wanted", "effect in the pairs", "floor", "p", "pairs", "seconds", "verdict"], rows)


def _walls(of_action: Sequence[Data]) -> str:
    text = ""
    for data in of_action:
        spent = [[name, f"{seconds:.1f}"] for name, seconds in data.get("parts_s", [])]
        rows = data.get("rows", [])
        if rows:
            timed = sum(row["timed_s"] for row in rows)
            spent += [
                ["rows: building and checking", f"{sum(row['wall_s'] for row in rows) - timed:.1f}"],
                ["rows: timing", f"{timed:.1f}"],
            ]
        if "process_s" in data:
            spent.append(["a whole measuring process", f"{data['process_s']:.1f}"])
        spent += [
            [f"{run['name']}, {run['processes']} processes: `{run['command']}`, exit {run['exit_code']}", f"{run['wall_s']:.1f}"]
            for run in data.get("commands", [])
        ]
        longest = sorted(rows, key=lambda row: -row["wall_s"])[:8]
        text += markdown(["part", "seconds"], spent)
        if longest:
            listed = [[short(row["row"]), f"{row['wall_s']:.2f}", f"{row['timed_s']:.2f}"] for row in longest]
            text += f"\nThe longest rows:\n\n{markdown(['row', 'seconds', 'of these in the timer'], listed)}"
    return text


PARTS: Mapping[str, tuple[str, Callable[[Sequence[Data]], str]]] = {
    "same": ("Gates of a commit that changes nothing", _gates),
    "rebuild": ("The bias of a rebuild", _rebuild),
    "pairs": ("Pairs of one commit", _pairs),
    "power": ("Rows that are really slower", _power),
    "second": ("Beside a busy process", _disturbed),
    "lowered": ("Every row lowered at once", _disturbed),
    "walls": ("Where the seconds go", _walls),
}


def page(found: Sequence[Data]) -> str:
    """All parts as Markdown, in the order of `PARTS`; an action without results is left out."""
    text = []
    for action, (title, render) in PARTS.items():
        of_action = [data for data in found if data["made"]["action"] == action]
        if of_action:
            text.append(f"## {title}\n\n" + "\n\n".join(_made(data) for data in of_action) + f"\n\n{render(of_action)}")
    return "\n".join(text)


def show(folders: Sequence[Path], target: Path | None) -> int:
    """Prints the tables of what the folders hold, or writes them between the marks `live` of a page.

    Raises:
        InputError: The folders hold no result of an action, or the page lacks the marks.
    """
    found = results(list(folders))
    if not found:
        raise InputError(f"no result of an action under {', '.join(map(str, folders))}: run `python -m tests.live ACTION --out FOLDER`")
    if target is None:
        print(page(found), end="")
        return 0
    try:
        target.write_text(filled(target.read_text(encoding="utf-8"), {"live": page(found)}), encoding="utf-8")
    except ValueError as error:
        raise InputError(f"{target}: {error}") from error
    return 0
