"""Line charts as SVG: a few lines over a few sizes, side by side, light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from rlx.support.records import dataclass

Point = tuple[float, float]

_WIDTH, _HEIGHT = 420, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 84, 44, 52  # margins; the names of lines stand on the right
_COLOURS = 4
_STYLE = """
svg { font: 12px system-ui, sans-serif; }
.paper, circle { fill: #ffffff; }
text { fill: #30343b; }
.title { font-size: 14px; font-weight: 600; }
.grid { stroke: #e3e5e9; }
polyline { fill: none; stroke-width: 2; }
circle { stroke-width: 2; }
.c0 { stroke: #2a6fdb; } .c1 { stroke: #e0702b; } .c2 { stroke: #2f9e6e; } .c3 { stroke: #a855c9; }
@media (prefers-color-scheme: dark) {
  .paper, circle { fill: #16181d; }
  text { fill: #d5d8de; }
  .grid { stroke: #31353d; }
}
"""


@dataclass(frozen=True)
class Chart:
    """Lines by name. Positions on the x axis are equidistant: sizes usually grow by factors."""

    title: str
    x_label: str
    y_label: str
    lines: dict[str, list[Point]]


def draw(charts: Sequence[Chart]) -> str:
    """The charts from left to right, as a document of its own."""
    width = _WIDTH * max(1, len(charts))
    panels = [
        f'<g transform="translate({_WIDTH * i} 0)">\n{_panel(chart)}\n</g>'
        for i, chart in enumerate(charts)
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" '
        f'width="{width}" height="{_HEIGHT}">\n<style>{_STYLE}</style>\n'
        f'<rect class="paper" width="{width}" height="{_HEIGHT}"/>'
    )
    return "\n".join([head, *panels, "</svg>"]) + "\n"


def _panel(chart: Chart) -> str:
    sizes = sorted({x for line in chart.lines.values() for x, _ in line})
    top = _round_up(max((y for line in chart.lines.values() for _, y in line), default=0.0))
    across = _WIDTH - _LEFT - _RIGHT
    columns = {x: _LEFT + across * (i + 0.5) / len(sizes) for i, x in enumerate(sizes)}

    def height(y: float) -> float:
        return _TOP + (1 - y / top) * (_HEIGHT - _TOP - _BOTTOM)

    marks = [
        _text(_LEFT, 20, chart.title, "start", "title"),
        _text(_LEFT, _TOP - 6, chart.y_label, "start"),
        _text(_LEFT + across / 2, _HEIGHT - 12, chart.x_label, "middle"),
        *(_text(at, _HEIGHT - 32, f"{x:g}", "middle") for x, at in columns.items()),
    ]
    for value in (0.0, top / 4, top / 2, top * 3 / 4, top):
        y = f"{height(value):.1f}"
        marks.append(f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + across}" y1="{y}" y2="{y}"/>')
        marks.append(_text(_LEFT - 8, height(value) + 4, f"{value:g}", "end"))
    for i, (name, line) in enumerate(chart.lines.items()):
        places = [(columns[x], height(y), f"{name}: {y:.1f}") for x, y in sorted(line)]
        marks += _line(name, places, f"c{i % _COLOURS}")
    return "\n".join(marks)


def _line(name: str, places: Sequence[tuple[float, float, str]], colour: str) -> list[str]:
    """Places with what they show when pointed at."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
    marks = [f'<polyline class="{colour}" points="{path}"/>']
    for x, y, said in places:
        circle = f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">'
        marks.append(f"{circle}<title>{escape(said)}</title></circle>")
    return [*marks, *(_text(x + 9, y + 4, name, "start") for x, y, _ in places[-1:])]


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 5, 8 times a power of ten, so that a quarter of it reads well."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= value * 0.999)
