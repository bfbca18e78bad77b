"""What a run showed: its losses by step, as text in a checkpoint and as a chart; its progress."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import field
from html import escape
from pathlib import Path
from typing import NamedTuple

from rlx.errors import FormatError, OptionError
from rlx.support.files import atomic_file
from rlx.support.records import dataclass

CHARTS = (".svg", ".html")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 400, 64, 24, 40, 48
_MOST_POINTS = 1000
_STYLE = """
svg { font: 12px system-ui, sans-serif; }
.paper { fill: #ffffff; } text { fill: #30343b; } .title { font-size: 14px; font-weight: 600; }
.grid { stroke: #e3e5e9; } polyline { fill: none; stroke-width: 2; }
.loss { stroke: #a9c4f0; stroke-width: 1; } .mean { stroke: #2a6fdb; } .eval { stroke: #e0702b; }
circle { fill: #e0702b; }
@media (prefers-color-scheme: dark) {
  .paper { fill: #16181d; } text { fill: #d5d8de; } .grid { stroke: #31353d; }
  .loss { stroke: #2c4468; }
}
"""
Point = tuple[float, float]


class TrainingProgress(NamedTuple):
    """How far a run is, behind a step."""

    step: int
    steps: int
    epoch: float
    loss: float
    mean_loss: float  # of the last steps
    eval_loss: float | None  # of the last evaluation
    learning_rate: float
    tokens_per_second: float
    seconds_left: float
    evaluated: bool  # in this step


@dataclass
class History:
    """The numbers of each step, from 1, and of evaluations by step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of gradients, before they are clipped
    rates: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)

    def add(self, step: int, loss: float, norm: float, rate: float) -> None:
        assert step == len(self.losses) + 1
        self.losses.append(loss)
        self.norms.append(norm)
        self.rates.append(rate)

    def add_evaluation(self, step: int, loss: float) -> None:
        self.evaluations.append((step, loss))

    @property
    def best(self) -> float | None:
        """The lowest loss of an evaluation."""
        return min((loss for _, loss in self.evaluations), default=None)

    @property
    def last_evaluation(self) -> float | None:
        return self.evaluations[-1][1] if self.evaluations else None

    def without_better(self) -> int:
        """How many evaluations there were since the best one."""
        losses = [loss for _, loss in self.evaluations]
        return len(losses) - 1 - losses.index(min(losses)) if losses else 0

    def smoothed(self, last: int = 20) -> float:
        """The mean of the last losses: that of one step depends on its batch."""
        recent = self.losses[-last:]
        return sum(recent) / max(len(recent), 1)

    # -- text ---------------------------------------------------------------------------------

    def as_text(self) -> str:
        """JSON, with every bit of the numbers."""
        return json.dumps(
            {"losses": self.losses, "norms": self.norms, "rates": self.rates,
             "evaluations": self.evaluations}
        )  # fmt: skip

    def write(self, path: Path) -> None:
        """Write `as_text` to a file."""
        with atomic_file(path, durable=True) as file:
            file.write(self.as_text().encode())

    @staticmethod
    def of(text: str) -> History:
        found = json.loads(text)
        try:
            evaluations = [(int(step), float(loss)) for step, loss in found["evaluations"]]
            return History(found["losses"], found["norms"], found["rates"], evaluations)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError("not the history of a run", where="checkpoint") from error

    # -- chart --------------------------------------------------------------------------------

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write the losses as a chart, .svg or .html."""
        kind = check_chart(path)
        text = self.svg()
        if kind == ".html":
            text = f'<!doctype html>\n<meta charset="utf-8">\n<title>Training</title>\n{text}'
        with atomic_file(Path(path)) as file:
            file.write(text.encode())

    def _repr_html_(self) -> str:
        return self.svg()

    def svg(self) -> str:
        """The losses of steps, their running mean, and evaluations."""
        steps = [(float(i + 1), loss) for i, loss in enumerate(self.losses)]
        mean, means = math.nan, list[Point]()
        for step, loss in steps:
            mean = loss if math.isnan(mean) else mean + (loss - mean) * 0.1
            means.append((step, mean))
        evaluated = [(float(step), loss) for step, loss in self.evaluations]
        frame = _Frame([p for line in (steps, evaluated) for p in line])
        lines = [frame.line(steps, "loss"), frame.line(means, "mean")]
        if evaluated:
            lines.append(frame.line(evaluated, "eval"))
            lines += [
                f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3">'
                f"<title>step {x:g}: {y:.4f}</title></circle>"
                for x, y in evaluated
            ]
        names = [("mean", "loss"), *([("eval", "evaluation")] if evaluated else [])]
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            f'width="{_WIDTH}" height="{_HEIGHT}">\n<style>{_STYLE}</style>\n'
            f'<rect class="paper" width="{_WIDTH}" height="{_HEIGHT}"/>'
        )
        return "\n".join([head, *frame.axes(), *_legend(names), *lines, "</svg>"]) + "\n"


def check_chart(path: str | os.PathLike[str]) -> str:
    """The kind of a chart's file; OptionError for one that cannot be written."""
    kind = Path(path).suffix.lower()
    if kind not in CHARTS:
        raise OptionError(
            "unknown kind of chart", where="plot", got=os.fspath(path), expected=", ".join(CHARTS)
        )
    if not Path(path).absolute().parent.is_dir():
        raise OptionError("no such folder", where="plot", got=Path(path).absolute().parent)
    return kind


class _Frame:
    """The axes of a chart: steps to the right, losses up."""

    def __init__(self, points: Sequence[Point]) -> None:
        losses = [y for _, y in points if math.isfinite(y)] or [0.0, 1.0]
        self.last = max([x for x, _ in points], default=1.0)
        self.unit = _nice((max(losses) - min(losses)) / 5 or abs(max(losses)) / 5 or 1.0)
        self.low = math.floor(min(losses) / self.unit) * self.unit
        self.high = max(math.ceil(max(losses) / self.unit) * self.unit, self.low + self.unit)

    def x(self, step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - 1) / max(self.last - 1, 1.0)

    def y(self, loss: float) -> float:
        share = (min(max(loss, self.low), self.high) - self.low) / (self.high - self.low)
        return _TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM)

    def line(self, points: Sequence[Point], kind: str) -> str:
        every = -(-len(points) // _MOST_POINTS) or 1
        shown = [p for i, p in enumerate(points) if i % every == 0 or i == len(points) - 1]
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in shown if math.isfinite(y))
        return f'<polyline class="{kind}" points="{path}"/>'

    def axes(self) -> list[str]:
        marks = [_text(_LEFT, 22, "loss", "start", "title")]
        for i in range(round((self.high - self.low) / self.unit) + 1):
            value = self.low + i * self.unit
            y = self.y(value)
            marks.append(
                f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" '
                f'y2="{y:.1f}"/>'
            )
            marks.append(_text(_LEFT - 8, y + 4, f"{value:.6g}", "end"))
        unit = max(1.0, _nice(self.last / 6))
        for i in range(int(self.last // unit) + 1):
            step = max(i * unit, 1.0)
            marks.append(_text(self.x(step), _HEIGHT - 28, f"{step:g}", "middle"))
        return [*marks, _text(_WIDTH / 2, _HEIGHT - 8, "step", "middle")]


def _legend(names: Sequence[tuple[str, str]]) -> list[str]:
    marks, at = list[str](), _WIDTH - _RIGHT - 100 * len(names)
    for kind, name in names:
        marks.append(f'<polyline class="{kind}" points="{at},18 {at + 20},18"/>')
        marks.append(_text(at + 26, 22, name, "start"))
        at += 100
    return marks


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _nice(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= value * 0.999)
