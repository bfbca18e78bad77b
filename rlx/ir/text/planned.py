"""LIR as text that parses back: the graph, the prepare graph, and the plan, a line per value.

    lir 4096 {
      graph mlp { … }
      prepare graph prepare { … }
      plan {
        %0 input 96 at 0 life [0, 3] in prologue
        %1 param 2048 life [1, 2] in prologue
        %2 arena 48 at 128 life [2, 4] in steady_state
        %3 alias 48 of %2 offset 0 strides [4, 1] life [3, 4] in steady_state
        %2 scratch 64 at 192
      }
    }

The number after `lir` is the size of the arena. Sizes and offsets (`at`) are in bytes; offset and
strides of an alias are in elements. `life` is the live range: first and last schedule position.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rlx.ir.lir import Lir, Slot, View, works_in_place
from rlx.ir.node import Node, Value
from rlx.ir.phase import Phase, PhaseSchedule
from rlx.ir.text.parser import GraphParser
from rlx.ir.text.printer import print_graph
from rlx.ir.text.reader import Source, Token

_IN_ARENA = ("arena", "input", "output")  # slots with an arena offset
_WITHIN = ("arena", "alias")  # slots of what is neither a source nor an output
_KINDS = (*_IN_ARENA, "param", "state", "constant", "alias")


def print_lir(lir: Lir) -> str:
    """Text that `parse_lir` parses back to the same program."""
    prepare = [] if lir.prepare is None else [f"prepare {print_graph(lir.prepare)}"]
    parts = [print_graph(lir.graph), *prepare, "plan {"]
    lines = [line for part in parts for line in part.splitlines()]
    lines += [f"  {line}" for node in lir.graph.nodes for line in _plan_lines(lir, node)]
    inner = "\n".join(f"  {line}" for line in [*lines, "}"])
    return f"lir {lir.arena_size} {{\n{inner}\n}}\n"


def _plan_lines(lir: Lir, node: Node) -> Iterator[str]:
    phase = lir.phases.get(node.id)
    tail = "" if phase is None else f" in {phase.name.lower()}"
    for value in node.outputs:
        slot = lir.slots.get(value)
        if slot is not None:
            yield f"{_label(value)} {_slot_text(slot)} life [{slot.first}, {slot.last}]{tail}"
    if node.id in lir.scratch:
        offset, size = lir.scratch[node.id]
        yield f"{_label(node.outputs[0])} scratch {size} at {offset}"


def _slot_text(slot: Slot) -> str:
    text = f"{slot.kind} {slot.size}"
    if slot.offset is not None:
        text += f" at {slot.offset}"
    if slot.root is not None and slot.view is not None:
        strides = ", ".join(map(str, slot.view.strides))
        text += f" of {_label(slot.root)} offset ({slot.view.offset}) strides [{strides}]"
    return text


def _label(value: Value) -> str:
    many = len(value.node.outputs) > 1
    return f"%{value.node.id}.{value.index}" if many else f"%{value.node.id}"


def is_lir(text: str) -> bool:
    return text.startswith("lir ")


def parse_lir(text: str, name: str = "text") -> Lir:
    """The program written in `text`; `name` is the file it came from, for messages."""
    return _PlanParser(Source(text, name)).lir()


class _PlanParser(GraphParser):
    def lir(self) -> Lir:
        self.expect("lir")
        arena = self.integer("bytes of the arena")
        self.expect("{")
        graph = self.graph()
        self.skip_comments()
        prepare = self.graph() if self.take("prepare") else None
        self.skip_comments()
        self.found = Lir(graph, {}, arena, PhaseSchedule(), prepare)
        labels = {_label(v): v for node in graph.nodes for v in node.outputs}
        self.expect("plan")
        self.expect("{")
        self.skip_comments()
        while not self.take("}"):
            self._line(labels)
            self.skip_comments()
        self.expect("}")
        self.skip_comments()
        self.expect_kind("end", "the end of the text")
        self._check(labels)
        return self.found

    def _line(self, labels: dict[str, Value]) -> None:
        start = self.expect_kind("value", "a value or '}'")
        if self.take("scratch"):
            size = self.integer("bytes")
            node = self._known(start, labels).node
            self.found.scratch[node.id] = self._offset(start, size), size
            return
        value = self._known(start, labels)
        self.found.slots[value] = slot = self._slot(start, value, labels)
        self.expect("life")
        slot.first, slot.last = self._life()
        if self.take("in"):
            self.found.phases.set(value.node, Phase.of(self.name("a phase")))

    def _life(self) -> tuple[int, int]:
        start = self.expect("[")
        life = self.sequence(self.integer, "]")
        if len(life) != 2 or not 0 <= life[0] <= life[1] <= len(self.found.graph):
            self.fail(start, "not a live range", got=life, expected="[first, last] of the schedule")
        return life[0], life[1]

    def _known(self, token: Token, labels: dict[str, Value]) -> Value:
        if token.text not in labels:
            self.fail(token, "no such value")
        return labels[token.text]

    def _slot(self, start: Token, value: Value, labels: dict[str, Value]) -> Slot:
        kind = self.name("the kind of slot")
        if kind not in _KINDS:
            self.fail(start, "unknown kind of slot", got=kind, expected=", ".join(_KINDS))
        slot = Slot(kind, self.integer("bytes"))
        if kind == "alias":
            self.expect("of")
            slot.root = self._known(self.expect_kind("value", "a value"), labels)
            self.expect("offset")
            offset = self.dim()
            self.expect("strides")
            self.expect("[")
            slot.view = View(offset, tuple(self.sequence(self.dim, "]")))
            return slot
        needed = value.shape.upper_bytes(self.found.graph.dynamic)
        if slot.size < needed:
            self.fail(start, "too few bytes", got=slot.size, expected=needed)
        if kind in _IN_ARENA:
            slot.offset = self._offset(start, slot.size)
        return slot

    def _offset(self, start: Token, size: int) -> int:
        self.expect("at")
        offset, arena = self.integer("an offset"), self.found.arena_size
        if offset < 0 or offset + size > arena:
            self.fail(
                start, "a slot outside the arena", got=f"{offset} … {offset + size}",
                expected=f"0 … {arena}",
            )  # fmt: skip
        return offset

    def _check(self, labels: dict[str, Value]) -> None:
        """Every value has a slot of its kind, lives as long as it is read, and shares no bytes."""
        end = self.token
        missing = [label for label, value in labels.items() if value not in self.found.slots]
        if missing:
            self.fail(end, "values without a slot", got=", ".join(missing[:5]))
        for label, value in labels.items():
            wrong = _fault(self.found, value)
            if wrong:
                self.fail(end, wrong, got=f"{label} {_slot_text(self.found.slots[value])}")
        last = _last_reads(self.found)
        for label, value in labels.items():
            slot = self.found.slots[value]
            if slot.root is None and slot.last < last.get(value, 0):
                self.fail(end, "a value is read after its life", got=label, expected=last[value])
        shared = _shared_bytes(self.found)
        if shared:
            self.fail(end, "two live values share bytes", got=shared)


def _fault(lir: Lir, value: Value) -> str:
    """What is wrong with the slot of a value by itself, or an empty string."""
    node, slot, nodes = value.node, lir.slots[value], len(lir.graph)
    is_output = any(v is value for v in lir.outputs)
    kinds = (node.op.name,) if node.op.is_source else ("output",) if is_output else _WITHIN
    if slot.kind not in kinds:
        return f"not a slot of kind {' or '.join(kinds)}"
    if slot.first != (0 if slot.kind == "input" else node.id):
        return f"its life begins with node {node.id}"
    if slot.kind in ("input", "output") and slot.last != nodes:
        return f"inputs and outputs live to the end, {nodes}"
    if slot.root is None or slot.view is None:
        return ""
    if not node.op.is_view and node.op.name != "state_update":
        return "neither a view nor an update"
    if lir.slots[slot.root].root is not None:
        return "an alias of an alias"
    if len(slot.view.strides) != value.shape.rank:
        return "not a stride for each axis"
    return "a view beyond its root" if _is_beyond(value, slot.view, slot.root) else ""


def _is_beyond(value: Value, view: View, root: Value) -> bool:
    """Whether a view of known size reaches elements that its root does not have."""
    known: Any = (view.offset, root.shape.num_elements, *value.shape.dims, *view.strides)
    if not all(isinstance(d, int) for d in known) or not value.shape.num_elements:
        return False
    offset, count, *rest = known
    dims, strides = rest[: value.shape.rank], rest[value.shape.rank :]
    steps = [(d - 1) * s for d, s in zip(dims, strides, strict=True)]
    low, high = (offset + sum(pick(n, 0) for n in steps) for pick in (min, max))
    return bool(low < 0 or high >= count)


def _last_reads(lir: Lir) -> dict[Value, int]:
    """The last position that reads each root, itself or a view of it."""
    last: dict[Value, int] = {}
    for node in lir.graph.nodes:
        for v in node.inputs:
            last[lir.home(v)[0]] = node.id
    return last


class _Interval(NamedTuple):
    first: int
    last: int
    start: int
    stop: int
    label: str
    value: Value | None  # None: scratch memory


def _shared_bytes(lir: Lir) -> str:
    """Two values, or scratch memory and a value, that share bytes while both are live."""
    intervals = [
        _Interval(s.first, s.last, s.offset, s.offset + s.size, _label(v), v)
        for v, s in lir.slots.items()
        if s.offset is not None and s.size
    ]
    for number, (offset, size) in lir.scratch.items():
        label = f"the scratch memory of %{number}"
        intervals.append(_Interval(number, number, offset, offset + size, label, None))
    active: list[_Interval] = []
    for new in sorted(intervals, key=lambda i: i[:4]):
        active = [old for old in active if old.last >= new.first]
        for old in active:
            overlap = old.start < new.stop and new.start < old.stop
            if overlap and not _in_place(lir, old, new):
                return f"{old.label} and {new.label}"
        active.append(new)
    return ""


def _in_place(lir: Lir, old: _Interval, new: _Interval) -> bool:
    """Whether a node writes its result over an operand that it reads last."""
    if old.value is None or new.value is None or (old.last, old.start) != (new.first, new.start):
        return False
    node = new.value.node
    read = any(lir.home(v)[0] is old.value for v in node.inputs)
    same = lir.slots[old.value].kind == "arena" and old.stop == new.stop
    return read and same and works_in_place(node.op)
