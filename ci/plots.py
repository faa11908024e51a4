"""Pictures of the report and the site, drawn by Vega (Altair, vl-convert) into SVG that is a part of the page.

Lines and letters take the page's own colour, so that one picture serves light, dark and print; what is coloured is also told by its
shape. Every number in a picture stands in a table beside it.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ci.errors import UsageError


class _Lazy:
    """A module that is imported when it is first used: the gate draws at its end only, and asv loads it in every process."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


if TYPE_CHECKING:
    import altair as alt
    import vl_convert
else:
    alt, vl_convert = _Lazy("altair"), _Lazy("vl_convert")

WORSE, BETTER, NEUTRAL = "#c8323c", "#1f8a46", "#7a8794"
_FONT = "sans-serif"
_MAX_LABEL = 64
_MAX_POINTS = 160

_CONFIG: dict[str, Any] = {
    "background": "transparent",
    "padding": {"left": 14, "right": 10, "top": 6, "bottom": 6},
    "font": _FONT,
    "view": {"stroke": None},
    "axis": {"labelColor": "currentColor", "titleColor": "currentColor", "domainColor": "currentColor", "tickColor": "currentColor"},
    "header": {"labelColor": "currentColor", "titleColor": "currentColor"},
    "legend": {"labelColor": "currentColor", "titleColor": "currentColor"},
    "text": {"color": "currentColor"},
    "rule": {"color": "currentColor"},
}
_GRID = "#8884"
ET.register_namespace("", "http://www.w3.org/2000/svg")


def ready() -> None:
    """Loads what draws.

    Raises:
        UsageError: It is not installed, or not whole.
    """
    try:
        for name in ("altair", "vl_convert"):
            importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"The report cannot be drawn: {error}; install the extra `gate` of rapid-llm for {sys.executable}.") from error


def _spec(chart: alt.TopLevelMixin) -> str:
    """The chart's Vega-Lite specification; `_draw` puts numbers and data in its places."""
    return json.dumps({**chart.to_dict(), "config": _CONFIG})


def _draw(spec: str, label: str, places: Mapping[str, object], data: Mapping[str, Sequence[dict[str, Any]]]) -> Markup:
    """The chart as an SVG element with `label` as its text for those who do not see it.

    Args:
        spec: Of `_spec`, made once for each kind of chart: Altair checks each part of it against a schema, which is slow.
        places: What stands for each text ``"$name"`` of it.
        data: Name to rows, for `_named_data`.
    """
    for name, value in places.items():
        spec = spec.replace(json.dumps(f"${name}"), json.dumps(value))
    filled = f'{spec[:-1]}, "datasets": {json.dumps(data)}}}'
    root = ET.fromstring(vl_convert.vegalite_to_svg(filled))
    for element in root.iter():
        # One picture with one text: roles and labels of single marks would be read out one by one.
        for name in [name for name in element.attrib if name == "role" or name.startswith("aria-")]:
            del element.attrib[name]
    root.attrib.update({"role": "img", "aria-label": label, "focusable": "false"})
    return Markup(ET.tostring(root, encoding="unicode"))


def _named_data(name: str) -> Any:
    return alt.NamedData(name)


def shortened(text: str, limit: int = _MAX_LABEL) -> str:
    """A label of at most `limit` characters: the middle goes."""
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-(limit // 2 - 1) :]}"


def _named(names: Sequence[str]) -> list[str]:
    """Short labels that stay apart."""
    made: list[str] = []
    for name in names:
        label, again = shortened(name), 2
        while label in made:
            label = f"{shortened(name, _MAX_LABEL - 4)} ({again})"
            again += 1
        made.append(label)
    return made


@dataclass(frozen=True)
class BandLine:
    """One row of a picture of bands, as change of latency against the base: 0.03 is 3 % slower."""

    name: str
    point: float
    low: float
    high: float
    earlier: tuple[float, ...]
    look: str
    """``bad``, ``good`` or ``plain``."""


def bands(lines: Sequence[BandLine]) -> Markup:
    """Each row's band, its earlier runs and this run; slower is right."""
    labels = _named([line.name for line in lines])
    reach = max([0.01, *(abs(part) for line in lines for part in (line.point, *line.earlier) if math.isfinite(part))])
    reach = max([reach, *(min(abs(edge), 2 * reach) for line in lines for edge in (line.low, line.high) if math.isfinite(edge))]) * 1.05

    def clip(value: float) -> float:
        return max(-reach, min(reach, value if math.isfinite(value) else math.copysign(reach, value)))

    rows = [
        {"row": label, "point": clip(line.point), "low": clip(line.low), "high": clip(line.high), "look": line.look}
        for label, line in zip(labels, lines, strict=True)
    ]
    earlier = [{"row": label, "point": clip(value)} for label, line in zip(labels, lines, strict=True) for value in line.earlier]
    return _draw(
        _bands_spec(bool(earlier)),
        f"Change of latency of {len(lines)} rows against the base, with the band in which each passes; the same numbers are in the table.",
        {"low": -reach, "high": reach},
        {"rows": rows, "earlier": earlier, "zero": [{"x": 0}]},
    )


@functools.cache
def _bands_spec(has_earlier: bool) -> str:
    scale = alt.Scale(domain=["$low", "$high"])
    axis = alt.Axis(
        format="+.1%",
        tickCount=6,
        gridColor=_GRID,
        title="change of latency against the base: faster is left, slower is right",
        orient="bottom",
    )
    y = alt.Y("row:N", sort=None, title=None, axis=alt.Axis(labelLimit=420, grid=False))
    base = alt.Chart(_named_data("rows"))
    band = base.mark_bar(color=NEUTRAL, opacity=0.35, height=9).encode(x=alt.X("low:Q", scale=scale, axis=axis), x2="high:Q", y=y)
    look = alt.Scale(domain=["bad", "good", "plain"], range=[WORSE, BETTER, "currentColor"])
    shape = alt.Scale(domain=["bad", "good", "plain"], range=["triangle-right", "triangle-left", "circle"])
    point = base.mark_point(filled=True, size=55, opacity=1).encode(
        x=alt.X("point:Q", scale=scale, axis=axis),
        y=y,
        color=alt.Color("look:N", scale=look, legend=None),
        shape=alt.Shape("look:N", scale=shape, legend=None),
    )
    layers: list[Any] = [band]
    if has_earlier:
        layers.append(
            alt.Chart(_named_data("earlier"))
            .mark_tick(color="currentColor", opacity=0.55, size=9, thickness=1)
            .encode(x=alt.X("point:Q", scale=scale, axis=axis), y=y)
        )
    layers.append(point)
    zero = alt.Chart(_named_data("zero")).mark_rule(strokeDash=[3, 2]).encode(x=alt.X("x:Q", scale=scale, axis=axis))
    chart = alt.layer(*layers, zero).properties(width=640, height={"step": 15})
    return _spec(chart)


@dataclass(frozen=True)
class Operation:
    """One row on a roofline."""

    name: str
    section: str
    flops_per_byte: float
    tflop_per_s: float


def roofline(operations: Sequence[Operation], roofs: Sequence[tuple[str, float, float | None]]) -> Markup:
    """Rates over arithmetic intensity, under the roofs.

    Args:
        operations: Rows with FLOPs and bytes.
        roofs: Name, GB/s, and TFLOP/s where the device's compute is bounded by one.
    """
    intensities = [operation.flops_per_byte for operation in operations]
    corners = [tflop * 1e3 / gb for _, gb, tflop in roofs if tflop]
    low, high = min(intensities) / 2, max([*intensities, *(corner for corner in corners if corner < 100 * max(intensities))]) * 2
    lines = []
    for name, gb_per_s, tflop_per_s in roofs:
        for at in (low, *([tflop_per_s * 1e3 / gb_per_s] if tflop_per_s and tflop_per_s * 1e3 / gb_per_s < high else []), high):
            rate = gb_per_s * at / 1e3
            lines.append({"roof": name, "x": at, "y": min(rate, tflop_per_s or rate)})
    points_data = [{"section": o.section, "x": o.flops_per_byte, "y": o.tflop_per_s} for o in operations]
    return _draw(
        _roofline_spec(),
        f"Roofline: {len(operations)} rows under {', '.join(name for name, _, _ in roofs)}; the rates are in the tables.",
        {"low": low, "high": high},
        {"roofs": lines, "points": points_data},
    )


@functools.cache
def _roofline_spec() -> str:
    scale = alt.Scale(type="log", domain=["$low", "$high"], nice=False)
    x = alt.X("x:Q", scale=scale, title="FLOPs a byte moved", axis=alt.Axis(gridColor=_GRID, format="~g", tickCount=6))
    y = alt.Y("y:Q", scale=alt.Scale(type="log", nice=False), title="TFLOP/s", axis=alt.Axis(gridColor=_GRID, format="~g", tickCount=6))
    roof = (
        alt.Chart(_named_data("roofs"))
        .mark_line(color="currentColor")
        .encode(x=x, y=y, strokeDash=alt.StrokeDash("roof:N", title="roof", sort=None))
    )
    points = (
        alt.Chart(_named_data("points"))
        .mark_point(size=60, opacity=0.9, strokeWidth=1.6)
        .encode(
            x=x,
            y=y,
            shape=alt.Shape("section:N", title="rows"),
            color=alt.Color("section:N", title="rows", scale=alt.Scale(scheme="dark2")),
        )
    )
    chart = alt.layer(roof, points).properties(width=420, height=240)
    return _spec(chart)


@dataclass(frozen=True)
class Trace:
    """One small line of a history: points by revision, and (revision, worse) of its change points."""

    name: str
    revisions: Sequence[float]
    values: Sequence[float]
    changes: Sequence[tuple[float, bool]]


def _thinned(trace: Trace) -> list[tuple[float, float]]:
    """At most `_MAX_POINTS` points: medians of neighbours."""
    size = max(1, math.ceil(len(trace.values) / _MAX_POINTS))
    made = []
    for start in range(0, len(trace.values), size):
        part = sorted(trace.values[start : start + size])
        made.append((float(trace.revisions[start + (len(part) - 1) // 2]), float(part[len(part) // 2])))
    return made


def traces(found: Sequence[Trace], label: str) -> Markup:
    """Small lines, one a row, change points marked: slower dashed and red, faster green."""
    labels = _named([trace.name for trace in found])
    data: list[dict[str, Any]] = []
    for order, (name, trace) in enumerate(zip(labels, found, strict=True)):
        data += [{"row": name, "order": order, "x": x, "y": y} for x, y in _thinned(trace)]
        data += [{"row": name, "order": order, "change": x, "look": "slower" if worse else "faster"} for x, worse in trace.changes]
    low, high = min(min(trace.revisions) for trace in found), max(max(trace.revisions) for trace in found)
    dotted = max(len(trace.values) for trace in found) <= 30
    places = {"low": low, "high": high} if high > low else {"low": low - 1, "high": low + 1}
    return _draw(_traces_spec(dotted), label, places, {"traces": data})


@functools.cache
def _traces_spec(dotted: bool) -> str:
    x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=["$low", "$high"], nice=False))
    base = alt.Chart()
    line = base.mark_line(strokeWidth=1.2, color="currentColor").encode(x=x, y=alt.Y("y:Q", axis=None, scale=alt.Scale(zero=False)))
    dots = base.mark_circle(size=9, color="currentColor").encode(x=x, y=alt.Y("y:Q", axis=None, scale=alt.Scale(zero=False)))
    look = alt.Scale(domain=["slower", "faster"], range=[WORSE, BETTER])
    dash = alt.Scale(domain=["slower", "faster"], range=[[3, 2], [1, 0]])
    rule = base.mark_rule(strokeWidth=1.5).encode(
        x=alt.X("change:Q", axis=None),
        color=alt.Color("look:N", scale=look, legend=None),
        strokeDash=alt.StrokeDash("look:N", scale=dash, legend=None),
    )
    layers = [line, dots, rule] if dotted else [line, rule]
    chart = (
        alt.layer(*layers)
        .properties(width=260, height=22)
        .facet(
            row=alt.Row(
                "row:N",
                sort=alt.EncodingSortField(field="order", op="min"),
                title=None,
                header=alt.Header(labelAngle=0, labelAlign="left", labelLimit=420),
            ),
            data=_named_data("traces"),
            spacing=4,
        )
        .resolve_scale(y="independent")
    )
    return _spec(chart)
