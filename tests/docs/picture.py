"""Draws docs/architecture.svg, the road from a model file to a run: python tests/docs/picture.py"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "architecture.svg"


class Stop(NamedTuple):
    name: str
    about: str
    folder: str
    seen: str  # with which command


STOPS = (
    Stop("model file", "GGUF, safetensors, or Python", "formats · models", "rlx doctor MODEL"),
    Stop("HIR", "blocks: linear, attention, swiglu_ffn", "ir/hir · ir/blocks", "--stage hir"),
    Stop("MIR", "a graph of tensor ops, open sizes", "ir/graph · ir/ops", "--stage mir"),
    Stop("passes", "simplify, fuse, legalize, prepare", "passes/pipeline", "--after · --diff"),
    Stop("LIR", "sizes bound, every value has its place", "ir/binding, plan", "--stage lir"),
    Stop("kernels", "each distinct one compiled once", "llvm", "--stage llvm · asm"),
    Stop("program", "a table of kernel calls and barriers", "backends/cpu", "--stage program"),
    Stop("run", "workers walk the table over one arena", "runtime", "rlx profile"),
)
# which stops happen how often
SPANS = ((0, 3, "once per model"), (4, 6, "once per set of sizes"), (7, 7, "each time"))
HEIGHT, GAP, TOP, LEFT, WIDTH = 46, 20, 34, 60, 310
FOLDER, SEEN = LEFT + WIDTH + 24, LEFT + WIDTH + 196

STYLE = """
svg { --ink: #1f2933; --soft: #5b6773; --line: #b6c0ca; --box: #f4f7fa; --mark: #1d63b8; --back: #fff }
@media (prefers-color-scheme: dark) { svg {
  --ink: #e6eaee; --soft: #a3afba; --line: #55616d; --box: #262d35; --mark: #7cb4f2; --back: #1b2027 } }
text { font: 13px system-ui, sans-serif; fill: var(--ink) }
.soft { fill: var(--soft); font-size: 12px }
.mono { font: 12px ui-monospace, monospace }
.name { font-weight: 600; fill: var(--mark) }
rect { fill: var(--box); stroke: var(--line) }
.back { fill: var(--back); stroke: none }
path { fill: none; stroke: var(--line); stroke-width: 1.5 }
.arrow { stroke: var(--soft) }
"""  # noqa: E501


def top(number: int) -> int:
    return TOP + number * (HEIGHT + GAP)


def text(x: int, y: int, words: str, kind: str = "", turn: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}"{turn}>{escape(words)}</text>'


def draw() -> str:
    width, height = SEEN + 150, top(len(STOPS)) - GAP + 14
    parts = [f'<rect class="back" width="{width}" height="{height}" rx="6"/>']
    parts += [text(FOLDER, 20, "in rlx/", "soft"), text(SEEN, 20, "seen with rlx inspect", "soft")]
    for number, stop in enumerate(STOPS):
        y = top(number)
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>')
        parts += [text(LEFT + 14, y + 19, stop.name, "name"), text(LEFT + 14, y + 36, stop.about)]
        parts.append(text(FOLDER, y + 28, stop.folder, "mono"))
        parts.append(text(SEEN, y + 28, stop.seen, "mono"))
        if number:
            x, tip = LEFT + 40, y - 3
            parts.append(f'<path class="arrow" d="M{x} {y - GAP + 2}V{tip}m-4 -5l4 5l4 -5"/>')
    for first, last, often in SPANS:
        a, b = top(first), top(last) + HEIGHT
        parts.append(f'<path d="M{LEFT - 14} {a}h-8V{b}h8"/>')
        if first == last:
            parts += [text(6, a + 20 + 15 * i, w, "soft") for i, w in enumerate(often.split())]
            continue
        middle = (a + b) // 2
        turn = f' transform="rotate(-90 24 {middle})" text-anchor="middle"'
        parts.append(text(24, middle + 4, often, "soft", turn))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{" → ".join(s.name for s in STOPS)}">'
    )
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
