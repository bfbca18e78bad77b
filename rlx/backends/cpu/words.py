"""Words of a program: what is known now, at attach, or only with each run.

A kernel reads 8-byte words. Sizes and addresses in the arena are numbers from the start; addresses
of parameters and states come when they are attached; addresses of inputs and outputs, and anything
that depends on a live dimension, come with each run and are patched in by the native driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.backends.cpu.lowering import Fixed, Number, Pointer, Scratch, Status, Word, WordOf
from rlx.ir.dim import Dim, Expr, expand
from rlx.ir.lir import Lir
from rlx.ir.node import Node, Value
from rlx.ir.op import Array

Base = tuple[str, str]  # ("input", name), ("output", name), ("param", name), ("state", name), …


@dataclass
class WordTable:
    """Collects the words of all steps; `fill` is the function that computes a run's live words."""

    lir: Lir
    arena: Array
    status: Array
    live: list[tuple[Base | None, Dim]] = field(default_factory=list)  # base address + offset
    late: list[tuple[int, Base, int]] = field(default_factory=list)  # word, base, byte offset
    patches: list[tuple[int, int]] = field(default_factory=list)
    nested: list[Node] = field(default_factory=list)  # that may report bad data
    _links: list[tuple[int, WordOf]] = field(default_factory=list)
    _sources: dict[tuple[Base | None, Dim], int] = field(default_factory=dict)

    def resolve(self, word: Word, position: int) -> int:
        """The number that word `position` of the program holds until something patches it."""
        if isinstance(word, Pointer):
            return self._pointer(word, position)
        if isinstance(word, Scratch):
            offset, _ = self.lir.scratch[word.node.id]
            address = word.shift + self._arena_address(offset + word.offset)
            return address if isinstance(address, int) else self._patch(position, None, address)
        if isinstance(word, Status):
            return int(self.status.ctypes.data)
        if isinstance(word, Number):
            return self._number(word.node)
        if isinstance(word, Fixed):
            address = word.shift + int(word.data.array.ctypes.data)
            return address if isinstance(address, int) else self._patch(position, None, address)
        if isinstance(word, WordOf):
            self._links.append((position, word))
            return 0
        if isinstance(word, int):
            return word
        return self._patch(position, None, word)

    def links(self, starts: Mapping[int, int]) -> list[tuple[int, int]]:
        """(word, the word whose address it holds), given where each step's words begin."""
        return [(position, starts[id(w.step)] + w.index) for position, w in self._links]

    def _number(self, node: Node) -> int:
        """The graph's own nodes are numbered from 1 on, then come those of nested graphs."""
        own = len(self.lir.graph.nodes)
        if node.graph is self.lir.graph:
            return node.id + 1
        if node not in self.nested:
            self.nested.append(node)
        return own + self.nested.index(node) + 1

    def node(self, number: int) -> Node:
        return [*self.lir.graph.nodes, *self.nested][number - 1]

    def _pointer(self, word: Pointer, position: int) -> int:
        root, _ = self.lir.home(word.value)
        view = self.lir.slots[word.value].view
        elements = word.shift + (view.offset if view is not None else 0)
        offset: Dim = elements * root.shape.dtype.bytes
        base = self._base(root)
        if base is None:
            offset = offset + self._address(root)
            return offset if isinstance(offset, int) else self._patch(position, None, offset)
        if base[0] in ("param", "state") and isinstance(offset, int):
            self.late.append((position, base, offset))
            return 0
        return self._patch(position, base, offset)

    def _patch(self, position: int, base: Base | None, offset: Dim) -> int:
        key = (base, offset if isinstance(offset, int) else expand(offset))
        source = self._sources.get(key)
        if source is None:
            source = self._sources[key] = len(self.live)
            self.live.append(key)
        self.patches.append((position, source))
        return 0

    def _base(self, root: Value) -> Base | None:
        """Whose address is not known yet; None for what lies in the arena or is a constant."""
        kind = self.lir.slots[root].kind
        if kind == "output":
            names = zip(self.lir.graph.output_names, self.lir.outputs, strict=True)
            return ("output", next(name for name, v in names if v is root))
        if kind in ("input", "param", "state"):
            return (kind, root.node.name)
        return None

    def _address(self, root: Value) -> int:
        slot = self.lir.slots[root]
        if slot.kind == "constant":
            data: Any = root.node.op
            return int(data.data.array.ctypes.data)
        assert slot.offset is not None, f"{root} has no place"
        return self._arena_address(slot.offset)

    def _arena_address(self, offset: int) -> int:
        return int(self.arena.ctypes.data) + offset

    def filler(self, symbols: Sequence[str]) -> Callable[..., None]:
        """`fill(live, bases, *sizes)`: writes every live word. Made as Python source, so that a
        run costs one call and no walking over expressions."""
        bases = {b: i for i, b in enumerate(self.bases())}
        lines = [f"def fill(live, bases{''.join(', ' + s for s in symbols)}):"]
        for i, (base, offset) in enumerate(self.live):
            terms = [] if base is None else [f"bases[{bases[base]}]"]
            if offset != 0 or base is None:
                terms.append(f"({offset})")
            lines.append(f"    live[{i}] = {' + '.join(terms)}")
        lines.append("    return")
        scope: dict[str, Any] = {}
        exec("\n".join(lines), scope)  # names are checked identifiers, the rest integers
        made: Callable[..., None] = scope["fill"]
        return made

    def bases(self) -> list[Base]:
        return list(dict.fromkeys(b for b, _ in self.live if b is not None))


def is_live(dim: Dim) -> bool:
    return isinstance(dim, Expr)
