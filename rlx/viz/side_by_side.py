"""The kernels of one graph for two targets beside each other: LLVM IR above, assembly below.

Devices fuse differently and rewrite some ops, so kernels are matched by what their nodes compute:
shapes and element types of results, in the order of the program.
"""

from __future__ import annotations

import difflib
import html
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from rlx.backends.inspection import KernelCode, LaunchInfo
from rlx.errors import OptionError
from rlx.runtime.stages import Stages

LANGUAGES = {"llvm": "LLVM IR", "asm": "assembly"}
_TAB = 4


class Listing(NamedTuple):
    """The code of a node for one target."""

    title: str
    text: str


class Pair(NamedTuple):
    """What one node became for both targets; None where it is part of another kernel."""

    language: str
    left: Listing | None
    right: Listing | None


class _Node(NamedTuple):
    """The kernels of a node."""

    title: str
    results: str
    codes: tuple[KernelCode, ...]

    def listing(self, language: str) -> Listing:
        texts = [code.assembly() if language == "asm" else _body(code.text) for code in self.codes]
        return Listing(self.title, "\n".join(texts).expandtabs(_TAB))


def pairs(left: Stages, right: Stages, stage: str | None) -> list[Pair]:
    """Every distinct pair of kernels; `stage` is `llvm`, `asm`, or None for both."""
    if stage is not None and stage not in LANGUAGES:
        raise OptionError(
            "no code to compare", where="--beside", got=f"--stage {stage}",
            expected=" or ".join(f"--stage {name}" for name in LANGUAGES),
        )  # fmt: skip
    found: list[Pair] = []
    seen: set[tuple[tuple[str, ...], ...]] = set()
    for a, b in _matched(_nodes(left), _nodes(right)):
        keys = tuple(tuple(code.key for code in node.codes) if node else () for node in (a, b))
        if keys not in seen:
            seen.add(keys)
            found += [
                Pair(name, a and a.listing(name), b and b.listing(name))
                for name in LANGUAGES
                if stage in (None, name)
            ]
    return found


def _nodes(stages: Stages) -> list[_Node]:
    """The nodes with kernels, in the order of the program."""
    launches: dict[int, list[LaunchInfo]] = {}
    for kernel, uses in stages.program.kernels(stages.wanted).items():
        assert kernel is not None
        for use in uses:
            if use.node is not None:
                launches.setdefault(use.node.id, []).append(use)
    found = []
    for number in sorted(launches):
        uses = launches[number]
        codes = {use.kernel: use.kernel.emit() for use in uses if use.kernel is not None}
        node = uses[0].node
        assert node is not None
        results = ", ".join(str(value.shape) for value in node.outputs)
        labels = ", ".join(dict.fromkeys(use.label for use in uses))
        title = f"{stages.program.target}: {labels} for {node.op.name} {results}"
        found.append(_Node(title, results, tuple(codes.values())))
    return found


def _matched(
    left: Sequence[_Node], right: Sequence[_Node]
) -> list[tuple[_Node | None, _Node | None]]:
    a_results, b_results = ([node.results for node in side] for side in (left, right))
    matcher = difflib.SequenceMatcher(None, a_results, b_results, autojunk=False)
    found: list[tuple[_Node | None, _Node | None]] = []
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            found += zip(left[a:b], right[c:d], strict=True)
        else:
            found += [(node, None) for node in left[a:b]] + [(None, node) for node in right[c:d]]
    return found


def _body(module: str) -> str:
    """The functions of a module, without what declares their surroundings."""
    start = module.find("define ")
    return module[start:] if start >= 0 else module


# -- text and page --------------------------------------------------------------------------------


def as_text(found: Sequence[Pair], width: int | None = None) -> str:
    """Two columns; lines are cut to fit into `width`, None leaves them whole."""
    blocks = []
    for pair in found:
        columns = [_lines(pair.left), _lines(pair.right)]
        room = max(map(len, columns[0]), default=0) if width is None else max(20, width // 2 - 2)
        rows = [f"# {LANGUAGES[pair.language]}"]
        for a, b in zip_longest(*columns, fillvalue=""):
            if width is not None:
                a, b = _cut(a, room), _cut(b, room)
            rows.append(f"{a.ljust(room)} | {b}".rstrip())
        blocks.append("\n".join(rows))
    return "\n\n".join(blocks) + "\n"


def _lines(listing: Listing | None) -> list[str]:
    if listing is None:
        return ["(part of another kernel)"]
    return [listing.title, *listing.text.rstrip().splitlines()]


def _cut(line: str, room: int) -> str:
    return line if len(line) <= room else line[: room - 1] + "…"


def as_page(name: str, found: Sequence[Pair]) -> str:
    """The same as HTML: columns that scroll by themselves, nothing that runs or is fetched."""
    shown = html.escape(name)
    rows = [f"<section><h2>{LANGUAGES[p.language]}</h2>{_cells(p)}</section>" for p in found]
    return _PAGE.replace("{name}", shown).replace("{rows}", "\n".join(rows))


def _cells(pair: Pair) -> str:
    cells = []
    for side in (pair.left, pair.right):
        title, *text = _lines(side)
        code = html.escape("\n".join(text))
        cells.append(f"<div><h3>{html.escape(title)}</h3><pre>{code}</pre></div>")
    return f'<div class="pair">{"".join(cells)}</div>'


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{name}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body { font: 14px/1.4 system-ui, sans-serif; margin: 1rem; color-scheme: light dark; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
.pair > div { min-width: 0; }
h2 { font-size: 1rem; margin: 1.5rem 0 0; } h3 { font-size: .85rem; margin: .3rem 0; }
pre { font-size: 12px; overflow: auto; max-height: 40rem; margin: 0; padding: .6rem;
  border: 1px solid #8885; border-radius: 4px; }
</style></head><body><h1>{name}</h1>
{rows}
</body></html>
"""
