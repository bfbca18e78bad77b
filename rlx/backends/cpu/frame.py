"""The program of a variant by kinds of nodes: steps stay where they are, numbers are filled in.

Variants of one mould whose kinds have steps of the same layout share a frame: what calls what,
where each word stands and what it is made of. A new variant then costs a few array operations,
however many layers there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

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
from rlx.backends.cpu.lowering import Step
from rlx.backends.cpu.schedule import (
    Span,
    Touched,
    barriers_between,
    scratch_span,
    value_spans,
)
from rlx.backends.cpu.told import Sort, Special, ToldKind
from rlx.ir.dim import Dim, expand
from rlx.ir.node import Node
from rlx.ir.op import Array
from rlx.passes.mould import Variant

_LATE, _BROUGHT = ("param", "state"), ("input", "output")


class _Live(NamedTuple):
    """A word of each run: what it is relative to, besides its own number."""

    word: int
    anchor: int
    base: Base | None
    value: int = -1  # whose place in the arena counts
    node: int = -1  # whose working memory counts


class _Uses(NamedTuple):
    """Memory that a step touches: roots by number, and the node whose scratch it uses."""

    reads: list[int]
    writes: list[int]
    scratch: int
    solo: bool  # by one worker


class Frame:
    """What variants of one mould and layout have in common."""

    def __init__(self, lir: Variant, kinds: Sequence[ToldKind]) -> None:
        self.mould, self.kinds = lir.mould, lir.lives.kinds
        self.roots, self.numbers = lir.lives.roots, lir.lives.numbers
        self.bases: dict[int, Base] = {n: (role, name) for role, name, n in lir.mould.arguments}
        self.steps: list[int] = []  # for each step, its number among those of the kinds
        self.nodes: list[int] = []
        self.uses: list[_Uses] = []
        self.starts = [0]
        self.constants: list[Array] = []
        self.reported: dict[int, None] = {}
        self._words: list[int] = []  # for each word, its number among those of the kinds
        self._anchors: list[int] = []
        self._exact: list[tuple[int, int]] = []
        self._arena: list[tuple[int, int]] = []
        self._scratch: list[tuple[int, int]] = []
        self._late: list[tuple[int, Base]] = []
        self._live: list[_Live] = []
        self._constants: dict[int, int] = {}
        first_step = [0, *accumulate(len(kind.steps) for kind in kinds)]
        first_word = [0, *accumulate(len(kind.words) for kind in kinds)]
        for node, k in zip(self.mould.graph.nodes, self.mould.kinds.of_node, strict=True):
            self._add(node, kinds[k], first_step[k], first_word[k])
        self._close()

    def _add(self, node: Node, kind: ToldKind, row: int, number: int) -> None:
        values = [self.roots[self.numbers[v]] for v in (*node.inputs, *node.outputs)]
        first = len(self.steps)
        for i, step in enumerate(kind.steps):
            start, count = self.starts[-1], len(step.words)
            self.steps.append(row + i)
            self.nodes.append(node.id)
            self.starts.append(start + count)
            self._words += range(number, number + count)
            self._anchors += [NUMBER] * count
            number += count
            for special in step.special:
                self._add_word(node, special, start + special.at, values, first)
            p = step.pattern
            scratch = node.id if p.step.uses_scratch else -1
            reads, writes = [values[n] for n in p.reads], [values[n] for n in p.writes]
            self.uses.append(_Uses(reads, writes, scratch, p.step.solo))

    def _add_word(
        self, node: Node, special: Special, word: int, values: list[int], first: int
    ) -> None:
        sort = special.sort
        if sort is Sort.POINTER:
            self._add_pointer(word, values[special.value], special.live)
        elif sort is Sort.SCRATCH and special.live:
            self._live.append(_Live(word, ARENA, None, node=node.id))
        elif sort is Sort.SCRATCH:
            self._anchors[word] = ARENA
            self._scratch.append((word, node.id))
        elif sort is Sort.STATUS:
            self._anchors[word] = STATUS
        elif sort is Sort.SIZE:
            self._live.append(_Live(word, NUMBER, None))
        elif sort is Sort.NODE:
            self._exact.append((word, node.id + 1))
            self.reported[node.id] = None
        else:
            self._anchors[word] = WORDS
            self._exact.append((word, 8 * (self.starts[first + special.value] + special.word)))

    def _add_pointer(self, word: int, root: int, live: bool) -> None:
        kind, base = self.kinds[root], self.bases.get(root)
        if kind in _BROUGHT or (kind in _LATE and live):
            self._live.append(_Live(word, NUMBER, base))
        elif kind in _LATE:
            assert base is not None
            self._late.append((word, base))
        elif kind == "constant":
            anchor = self._constant(root)
            if live:
                self._live.append(_Live(word, anchor, None))
            else:
                self._anchors[word] = anchor
        elif live:
            self._live.append(_Live(word, ARENA, None, value=root))
        else:
            self._anchors[word] = ARENA
            self._arena.append((word, root))

    def _constant(self, root: int) -> int:
        op: Any = self.mould.values[root].node.op
        number = self._constants.setdefault(id(op.data), len(self.constants))
        if number == len(self.constants):
            self.constants.append(op.data.array)
        return CONSTANT + number

    def _close(self) -> None:
        """Lists become arrays, and what follows from the order of steps is found."""
        self.step_starts = np.array(self.starts, np.int64)
        self.anchors = np.array(self._anchors, np.int32)
        self._sources = np.array(self._words, np.int64)
        later = [word for word, *_ in (*self._live, *self._late)]
        self._zero = np.array(later, np.int64)
        self._exact_at = _columns(self._exact)
        self._arena_at, self._scratch_at = _columns(self._arena), _columns(self._scratch)
        self._late_numbers = [self._words[word] for word, _ in self._late]
        self._late_known: tuple[list[Any], list[Late]] = [], []
        first = {row: i for i, row in reversed(list(enumerate(self.steps)))}
        self.first = sorted(first, key=first.__getitem__)  # steps of kinds as they first come
        self.rows = np.array(self.steps, np.int64)
        self.phases = self._phases()
        self._certain = self._certain_waits()

    def _phases(self) -> npt.NDArray[np.int32]:
        orders = [phase.order if phase else 0 for phase in map(self.mould.phases.get, self.nodes)]
        return ascending(orders)

    # -- filling it in ----------------------------------------------------------------------------

    def words(self, lir: Variant, kinds: Sequence[ToldKind]) -> FilledWords:
        numbers = [word for kind in kinds for word in kind.words]
        exact = np.array([n if type(n) is int else 0 for n in numbers], np.int64)
        offsets = exact[self._sources]
        offsets[self._zero] = 0
        words, values = self._arena_at
        offsets[words] += np.array([o or 0 for o in lir.offsets], np.int64)[values]
        words, nodes = self._scratch_at
        offsets[words] += np.array([lir.scratch[n][0] for n in nodes.tolist()], np.int64)
        words, known = self._exact_at
        offsets[words] = known
        return FilledWords(offsets, self._late_words(numbers), *self._live_words(lir, numbers))

    def _late_words(self, numbers: Sequence[Any]) -> list[Late]:
        """Sizes seldom move parameters and states in their own memory: then the list is shared."""
        distances = [numbers[i] for i in self._late_numbers]
        known, made = self._late_known
        if distances != known:
            rows = zip(self._late, distances, strict=True)
            made = [Late(word, base, distance) for (word, base), distance in rows]
            self._late_known = distances, made
        return made

    def _live_words(
        self, lir: Variant, numbers: Sequence[Dim]
    ) -> tuple[list[Source], npt.NDArray[np.int32]]:
        """As `number_sources` does; layers share sources, so each is made once."""
        sources: dict[Source, int] = {}
        known: dict[tuple[Any, ...], int] = {}
        pairs = []
        for word, anchor, base, value, node in self._live:
            place = 0
            if value >= 0:
                place = lir.offsets[value] or 0
            elif node >= 0:
                place = lir.scratch[node][0]
            key = (self._words[word], base, place)
            number = known.get(key)
            if number is None:
                source = Source(anchor, base, expand(numbers[key[0]] + place))
                number = known[key] = sources.setdefault(source, len(sources))
            pairs.append((word, number))
        return list(sources), np.array(pairs, np.int32).reshape(-1, 2)

    def reports(self, lir: Variant) -> dict[int, Report]:
        """The nodes that may find bad data, as their messages name them."""
        found = {}
        shapes, of_value = lir.sized.shapes, self.mould.kinds.of_value
        for number in self.reported:
            node = self.mould.graph.nodes[number]
            shown = [f"{v.name} {shapes[of_value[self.numbers[v]]]}" for v in node.inputs]
            found[number + 1] = Report(node.op.name, ", ".join(shown), str(node.origin))
        return found

    # -- barriers ---------------------------------------------------------------------------------

    def barriers(self, lir: Variant, steps: Sequence[Step]) -> list[bool]:
        """`steps` are those of the kinds."""
        known: dict[int, list[Span]] = {}
        found: dict[int, Touched] = {}

        def spans(roots: list[int]) -> list[Span]:
            made: list[Span] = []
            for root in roots:
                if root not in known:
                    size = lir.sizes[root]
                    known[root] = value_spans(root, self.kinds[root], lir.offsets[root], size)
                made += known[root]
            return made

        def touched(step: int) -> Touched:
            if step not in found:
                reads, writes, node, _ = self.uses[step]
                made = found[step] = Touched(spans(reads), spans(writes))
                if node in lir.scratch:
                    made.writes.append(scratch_span(*lir.scratch[node]))
            return found[step]

        # values without elements share no memory, not even with themselves
        certain = self._certain if all(lir.sizes) else [-1] * len(self.steps)
        return barriers_between(touched, [steps[row] for row in self.steps], certain)

    def _certain_waits(self) -> list[int]:
        """For each step, the last before it that wrote what it touches or read what it writes; for
        a step of one worker alone, the last that was not."""
        read: list[dict[int, int]] = [{}, {}]  # by all workers, by one alone
        written: list[dict[int, int]] = [{}, {}]
        waits = []
        for i, (reads, writes, _, solo) in enumerate(self.uses):
            last = -1
            for alone in range(1 if solo else 2):
                for root in (*reads, *writes):
                    last = max(last, written[alone].get(root, -1))
                for root in writes:
                    last = max(last, read[alone].get(root, -1))
            waits.append(last)
            read[solo] |= dict.fromkeys(reads, i)
            written[solo] |= dict.fromkeys(writes, i)
        return waits


class FilledWords(NamedTuple):
    offsets: npt.NDArray[np.int64]
    late: list[Late]
    live: list[Source]
    patches: npt.NDArray[np.int32]


def ascending(phases: Sequence[int]) -> npt.NDArray[np.int32]:
    """The phase of every step: one that stands before an earlier phase belongs to it."""
    return np.minimum.accumulate(np.array(phases[::-1], np.int32))[::-1]


def _columns(pairs: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    return np.array(pairs, np.int64).reshape(-1, 2).T
