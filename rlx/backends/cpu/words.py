"""Words of a program: where each is relative to, and what is known later still.

A kernel reads 8-byte words. Sizes are numbers; addresses are offsets from anchors or bases, see
`listing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.backends.cpu.listing import (
    ARENA,
    CONSTANT,
    NUMBER,
    STATUS,
    WORDS,
    Base,
    Late,
    Report,
    Source,
)
from rlx.backends.cpu.lowering import Fixed, Number, Pointer, Scratch, Status, Word, WordOf
from rlx.backends.cpu.repeat import Told
from rlx.ir.attrs import Data
from rlx.ir.dim import Dim, Expr, expand
from rlx.ir.lir import Lir
from rlx.ir.node import Node, Value
from rlx.ir.op import Array

_WRAP = 1 << 64
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
_OUTSIDE = ("param", "state")
_Home = tuple[int, Base | None, Dim, int]  # anchor, base, byte offset, bytes of an element


class WordTable:
    """Collects the words of all steps, in order."""

    def __init__(self, lir: Lir) -> None:
        self.lir = lir
        self.anchors: list[int] = []
        self.offsets: list[int] = []
        self.live: list[tuple[int, Source]] = []  # position, what belongs there
        self.late: list[Late] = []
        self.constants: list[Array] = []
        self.reports: dict[int, Report] = {}
        self._numbers: dict[Node, int] = {}
        self._constants: dict[int, int] = {}
        self._homes: dict[Value, _Home] = {}
        self._links: list[tuple[int, WordOf]] = []
        names = zip(lir.graph.output_names, lir.outputs, strict=True)
        self._outputs = {value: name for name, value in names}

    def extend(self, words: Sequence[Word]) -> None:
        """The words of the next step."""
        start = len(self.offsets)
        if type(words) is Told:
            self._tell(words, start)
            return
        self.anchors += [NUMBER] * len(words)
        self.offsets += [0] * len(words)
        for at, word in enumerate(words, start):
            if type(word) is int:
                self.offsets[at] = wrapped(word)
            else:
                _RULES[type(word)](self, at, word)

    def _tell(self, words: Told, start: int) -> None:
        """The same for a step that differs from an earlier one in its values alone."""
        recipe, node = words.recipe, words.node
        self.anchors += [NUMBER] * len(recipe.fixed)
        self.offsets += recipe.fixed
        for at, word in recipe.others:
            _RULES[type(word)](self, start + at, word)
        values, homes = (*node.inputs, *node.outputs), self._homes
        anchors, offsets = self.anchors, self.offsets
        for at, number, shift in recipe.pointers:
            value = values[number]
            home = homes.get(value)
            if home is None:
                home = homes[value] = self._home(value)
            anchor, base, offset, size = home
            if shift:
                offset = offset + shift * size
            if base is None and type(offset) is int:
                anchors[start + at], offsets[start + at] = anchor, offset
            else:
                self._relative(start + at, anchor, base, offset)
        if recipe.scratch:
            begin = self.lir.scratch[node.id][0]
            for at, offset, shift in recipe.scratch:
                self._relative(start + at, ARENA, None, shift + (begin + offset))
        for at in recipe.numbers:
            self.offsets[start + at] = self._number_of(node)
        for at, step, index in recipe.links:
            self._link(start + at, WordOf(words.steps[step], index))

    def _relative(self, at: int, anchor: int, base: Base | None, offset: Dim) -> None:
        if isinstance(offset, int):
            if base is None:
                self.anchors[at], self.offsets[at] = anchor, offset
                return
            if base[0] in _OUTSIDE:
                self.late.append(Late(at, base, offset))
                return
        self.live.append((at, Source(anchor, base, expand(offset))))

    # -- kinds of words ---------------------------------------------------------------------------

    def _dim(self, at: int, word: Expr) -> None:
        self._relative(at, NUMBER, None, word)

    def _pointer(self, at: int, word: Pointer) -> None:
        self._point(at, word.value, word.shift)

    def _point(self, at: int, value: Value, shift: Dim) -> None:
        home = self._homes.get(value)
        if home is None:
            home = self._homes[value] = self._home(value)
        anchor, base, offset, size = home
        self._relative(at, anchor, base, offset + shift * size if shift else offset)

    def _home(self, value: Value) -> _Home:
        root, slot = self.lir.home(value)
        view = self.lir.slots[value].view
        size = root.shape.dtype.bytes
        offset: Dim = 0 if view is None else view.offset * size
        if slot.kind in ("input", "param", "state"):
            return NUMBER, (slot.kind, root.node.name), offset, size
        if slot.kind == "output":
            return NUMBER, ("output", self._outputs[root]), offset, size
        if slot.kind == "constant":
            data: Any = root.node.op
            return self._constant(data.data), None, offset, size
        assert slot.offset is not None, f"{root} has no place"
        return ARENA, None, offset + slot.offset, size

    def _constant(self, data: Data) -> int:
        number = self._constants.get(id(data))
        if number is None:
            number = self._constants[id(data)] = len(self.constants)
            self.constants.append(data.array)
        return CONSTANT + number

    def _scratch(self, at: int, word: Scratch) -> None:
        start, _ = self.lir.scratch[word.node.id]
        self._relative(at, ARENA, None, word.shift + (start + word.offset))

    def _status(self, at: int, word: Status) -> None:
        self.anchors[at] = STATUS

    def _fixed(self, at: int, word: Fixed) -> None:
        self._relative(at, self._constant(word.data), None, word.shift)

    def _number(self, at: int, word: Number) -> None:
        self.offsets[at] = self._number_of(word.node)

    def _number_of(self, node: Node) -> int:
        """The graph's own nodes are numbered from 1 on, then come those of nested graphs."""
        number = self._numbers.get(node)
        if number is None:
            own = node.graph is self.lir.graph
            nested = sum(n.graph is not self.lir.graph for n in self._numbers)
            number = node.id + 1 if own else len(self.lir.graph.nodes) + 1 + nested
            self._numbers[node] = number
            operands = ", ".join(f"{v.name} {v.shape}" for v in node.inputs)
            self.reports[number] = Report(node.op.name, operands, str(node.origin))
        return number

    def _link(self, at: int, word: WordOf) -> None:
        self.anchors[at] = WORDS
        self._links.append((at, word))

    def close(self, starts: Mapping[int, int]) -> None:
        """Fill in the words that hold the address of another, now that each step has its place."""
        for position, word in self._links:
            self.offsets[position] = 8 * (starts[id(word.step)] + word.index)
        self.live.sort(key=itemgetter(0))
        self.late.sort(key=itemgetter(0))


def number_sources(
    live: Iterable[tuple[int, Source]],
) -> tuple[list[Source], npt.NDArray[np.int32]]:
    """The distinct sources of live words in order, and pairs of word and source for the driver."""
    numbers: dict[Source, int] = {}
    pairs = [(at, numbers.setdefault(source, len(numbers))) for at, source in live]
    return list(numbers), np.array(pairs, np.int32).reshape(-1, 2)


def wrapped(number: int) -> int:
    """A word as 64 bits with a sign: masks above 2^63 wrap."""
    return number if _LOWEST <= number <= _HIGHEST else (number + _WRAP // 2) % _WRAP - _WRAP // 2


_RULES: dict[type, Callable[[WordTable, int, Any], None]] = {
    Pointer: WordTable._pointer,
    Scratch: WordTable._scratch,
    Status: WordTable._status,
    Number: WordTable._number,
    Fixed: WordTable._fixed,
    WordOf: WordTable._link,
    Expr: WordTable._dim,
}
