"""How figures and texts are written, in one place for the page, the summary and the terminal."""

from __future__ import annotations

import json
import math
import re

_MINUS = "\N{MINUS SIGN}"
_CONTROL_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def number(value: float | None, digits: int = 3) -> str:
    """Writes a number with `digits` significant digits and thousands separators: ``3,480``, ``53.2``, ``0.123``."""
    if value is None or not math.isfinite(value):
        return "unknown"
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:.{digits - 1}e}"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(places, 0)}f}".replace("-", _MINUS)


def throughput(value: float | None, unit: str) -> str:
    """Writes a throughput with its unit: ``3,480 GB/s``."""
    return f"{number(value)} {unit}".rstrip() if value is not None else "not recorded"


def latency(value_us: float | None) -> str:
    """Writes a latency in µs, from 10,000 µs in ms: ``53.2 µs``, ``12.5 ms``."""
    if value_us is None or not math.isfinite(value_us):
        return "not recorded" if value_us is None else "unknown"
    return f"{number(value_us)} µs" if value_us < 1e4 else f"{number(value_us / 1e3)} ms"


def between(band: tuple[float | None, float | None], unit: str) -> str:
    """Writes a band: ``between 3,400 GB/s and 3,600 GB/s``, or ``from 3,400 GB/s on``; an infinite end is none."""
    low, high = (end if end is not None and math.isfinite(end) and end > 0 else None for end in band)
    if low is not None and high is not None:
        return f"between {throughput(low, unit)} and {throughput(high, unit)}"
    if low is None and high is None:
        return "at any value"
    return f"from {throughput(low, unit)} on" if high is None else f"up to {throughput(high, unit)}"


def percent(fraction: float | None) -> str:
    """Writes a fraction as a percentage: ``73.1 %``, under 1 % with two decimals."""
    if fraction is None or not math.isfinite(fraction):
        return "unknown"
    return f"{fraction * 100:,.{2 if abs(fraction) < 0.00995 else 1}f} %".replace("-", _MINUS)


def change(effect: float | None) -> str:
    """Writes a relative change of latency with its sign: ``+3.0 %`` is slower."""
    return f"+{percent(effect)}" if effect is not None and effect >= 0 and math.isfinite(effect) else percent(effect)


def odds(p_value: float | None) -> str:
    """Writes how often chance alone would give as much: ``1 in 4,200``."""
    if p_value is None or not math.isfinite(p_value):
        return "unknown"
    if p_value < 1e-6:
        return "under 1 in a million"
    return f"1 in {number(1 / p_value, 2)}" if p_value < 0.5 else "as often as not"


def difference(value: float | None) -> str:
    """Writes a max_abs_diff: ``2.4e-04``."""
    if value is None:
        return "not recorded"
    return "0" if value == 0 else f"{value:.1e}"


def visible(text: str) -> str:
    """Spells out control and text-direction characters (``\\x1b``); keeps tab and newline."""
    return _CONTROL_TEXT.sub(lambda hit: f"\\x{ord(hit[0]):02x}" if ord(hit[0]) < 256 else f"\\u{ord(hit[0]):04x}", text)


def short_commit(commit: str) -> str:
    """Shortens a 40-digit hash to 12 digits and leaves every other text as it is; an empty one is ``unknown``."""
    return commit[:12] if re.fullmatch(r"[0-9a-f]{40}", commit) else commit or "unknown"


def environment_items(values: dict[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Flattens the environment to dotted names and texts, sorted."""
    items: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict) and value:
            items += environment_items(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            items.append((f"{prefix}{name}", text))
    return sorted(items)


_PASSING = ("state", "state_at_start", "boot_id", "device.uuid", "started_at", "pid")
"""Entries of an environment that differ between any two processes, or are told elsewhere."""


def environment_changes(base: dict[str, object], head: dict[str, object]) -> list[tuple[str, str, str]]:
    """Name, the base's text and this run's, of each entry that both have and that differs."""
    known = dict(environment_items(head))
    return [
        (name, text, known[name])
        for name, text in environment_items(base)
        if known.get(name, text) != text and (name == "state.power_limit_w" or not name.startswith(_PASSING))
    ]


def ceiling_items(ceilings: dict[str, float]) -> list[tuple[str, str]]:
    """Turns ``copy_gb_per_s`` and its number into ``copy`` and ``4,250 GB/s``."""
    units = {"_gb_per_s": "GB/s", "_tflop_per_s": "TFLOP/s", "_us": "µs"}
    items = []
    for name, value in sorted(ceilings.items()):
        suffix = next((suffix for suffix in units if name.endswith(suffix)), "")
        items.append((name.removesuffix(suffix).replace("_", " "), f"{number(value)} {units.get(suffix, '')}".strip()))
    return items
