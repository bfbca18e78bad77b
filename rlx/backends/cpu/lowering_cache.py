"""Launch templates: what a node class lowers to, cached for all its nodes and variants.

A lowering depends on a node's op, on the shapes and strides of its operands, on the target and on
the number of workers. What it yields is kept as relocatable templates: kernel launches whose args
are numbers and addends, with a fixup for every arg that is an address or depends on the program.
A node that depends on its neighbours is lowered in its graph each time, into the same templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import count
from typing import Any, NamedTuple

from rlx.backends.cpu.lowering import (
    TABLE,
    ArgAddress,
    ConstantPointer,
    Context,
    KernelArg,
    KernelLaunch,
    NodeNumber,
    Pointer,
    Scratch,
    Status,
    lower_node,
)
from rlx.backends.cpu.relocatable import HostCall, Report
from rlx.errors import CodegenError
from rlx.ir.attrs import Data
from rlx.ir.dim import Dim, Expr
from rlx.ir.lir import Lir, Slot
from rlx.ir.node import Node, Value
from rlx.ir.phase import PhaseSchedule
from rlx.llvm.target import Target
from rlx.passes.plan import Variant
from rlx.support.records import dataclass

_MAX_TEMPLATES = 4096
_WRAP = 1 << 64
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


class FixupKind(Enum):
    """What an arg is relative to, where it is not just a number."""

    VALUE = "value"  # the address of a value
    SCRATCH = "scratch"  # an address in the node's scratch memory
    CONSTANT = "constant"  # the address of constant data
    STATUS = "status"  # the address of the status word
    ARG = "arg"  # the address of another launch's arg
    NODE = "node"  # the number of a node, for error reports
    DIM = "dim"  # a dynamic size


class Fixup(NamedTuple):
    """An arg of a launch template that the program layout completes."""

    arg: int
    kind: FixupKind
    dynamic: bool = False  # it depends on sizes that arrive with each run
    number: int = 0  # VALUE: which of the node's values; ARG: which of its launches' args
    data: Data | None = None  # CONSTANT
    report: Report | None = None  # NODE: of a nested graph


@dataclass
class LaunchTemplate:
    """A kernel launch of any node of a class; values are numbered operands first, then results."""

    launch: KernelLaunch
    args: list[Dim]  # numbers, and what is added to addresses
    fixups: tuple[Fixup, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    host: HostCall | None

    @property
    def layout(self) -> tuple[Any, ...]:
        """All but numbers and the kernel."""
        s = self.launch
        flags = (s.spec is None, s.solo, s.jump, s.fence, s.uses_scratch)
        return (len(self.args), self.fixups, self.reads, self.writes, flags)


@dataclass
class LoweredClass:
    """The launch templates of a node class."""

    launches: list[LaunchTemplate]
    args: list[Dim]  # of all launches
    neighbours: tuple[int, ...]  # values of other nodes, numbered behind the node's own
    layout: int  # the same number for equal layouts


_NOTHING = LoweredClass([], [], (), 0)


class LoweringCache:
    """Lowers node classes for one target."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._known: dict[tuple[Any, ...], LoweredClass] = {}
        self._layouts: dict[tuple[Any, ...], int] = {}
        self._layout_numbers = count(1)

    def lower(self, variant: Variant, threads: int) -> list[LoweredClass]:
        """The launch templates of every node class of a variant."""
        bound = variant.bound
        found: list[LoweredClass] = []
        for number, c in enumerate(bound.classes.nodes):
            if c.op.is_source or (c.op.is_view and bound.views[c.results[0]] is not None):
                found.append(_NOTHING)
            elif c.depends_on_neighbours:
                node = variant.graph.nodes[c.first]
                found.append(self._lower(node, Context(variant, self.target, threads), variant))
            else:
                found.append(self._lower_class(variant, number, threads))
        return found

    def _lower_class(self, variant: Variant, number: int, threads: int) -> LoweredClass:
        entry = TABLE.get(variant.bound.classes.nodes[number].op.name)
        key = (threads, entry, *variant.bound.key(number))  # a lowering may be registered anew
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MAX_TEMPLATES:
                self._known.clear()
            node, lir = _detached(variant, number)
            found = self._known[key] = self._lower(node, Context(lir, self.target, threads))
        return found

    def _lower(self, node: Node, ctx: Context, graph: Variant | None = None) -> LoweredClass:
        """The templates of a node; one that depends on its neighbours comes with its `graph`."""
        launches = lower_node(node, ctx)
        values = _Values(node, graph)
        made = [_template(node, launch, launches, ctx, values) for launch in launches]
        layout = (tuple([launch.layout for launch in made]), tuple(values.neighbours))
        known = self._layouts.get(layout)
        if known is None:
            known = self._layouts.setdefault(layout, next(self._layout_numbers))
        args = [arg for launch in made for arg in launch.args]
        return LoweredClass(made, args, tuple(values.neighbours), known)


def _detached(variant: Variant, number: int) -> tuple[Node, Lir]:
    """A node of the class by itself, and a plan that says how its operands lie in memory."""
    bound = variant.bound
    node, c = bound.node(number), bound.classes.nodes[number]
    values = zip((*node.inputs, *node.outputs), (*c.operands, *c.results), strict=True)
    slots = {value: Slot("arena", 0, view=bound.views[k]) for value, k in values}
    return node, Lir(node.graph, slots, 0, PhaseSchedule())


class _Values:
    """Numbers of the values that a node's launches use."""

    def __init__(self, node: Node, graph: Variant | None) -> None:
        self.node, self.graph = node, graph
        self.neighbours: list[int] = []
        self._numbers: dict[Value, int] = {}
        for i, v in enumerate((*node.inputs, *node.outputs)):
            self._numbers.setdefault(v, i)
        self._count = len(node.inputs) + len(node.outputs)

    def number(self, value: Value) -> int:
        found = self._numbers.get(value)
        if found is None:
            if self.graph is None:
                raise _foreign(self.node, value)
            found = self._numbers[value] = self._count + len(self.neighbours)
            self.neighbours.append(self.graph.value_numbers[value])
        return found


def _foreign(node: Node, what: object) -> CodegenError:
    return CodegenError(
        "a lowering uses what is not its node's", where=node.op.name, got=str(what),
        origin=str(node.origin), hint="the op needs the trait depends_on_neighbours",
    )  # fmt: skip


def _template(
    node: Node,
    launch: KernelLaunch,
    launches: Sequence[KernelLaunch],
    ctx: Context,
    values: _Values,
) -> LaunchTemplate:
    args: list[Dim] = []
    fixups: list[Fixup] = []
    for i, arg in enumerate(launch.args):
        if isinstance(arg, int):
            args.append(wrapped(arg))
            continue
        addend, fixup = _fixup(i, arg, node, launches, ctx, values)
        args.append(addend)
        fixups.append(fixup)
    reads, writes = (tuple([values.number(v) for v in vs]) for vs in (launch.reads, launch.writes))
    host = None if launch.host is None else HostCall.of(launch.host)
    return LaunchTemplate(launch, args, tuple(fixups), reads, writes, host)


def _fixup(
    i: int,
    arg: KernelArg,
    node: Node,
    launches: Sequence[KernelLaunch],
    ctx: Context,
    values: _Values,
) -> tuple[Dim, Fixup]:
    """The addend of an arg, and what it is added to."""
    if isinstance(arg, Pointer):
        view = ctx.lir.slots[arg.value].view
        shift = arg.shift if view is None else view.offset + arg.shift
        addend = shift * arg.value.shape.dtype.bytes
        dynamic = isinstance(addend, Expr)
        return addend, Fixup(i, FixupKind.VALUE, dynamic, values.number(arg.value))
    if isinstance(arg, Scratch):
        if arg.node is not node:
            raise _foreign(node, arg)
        dynamic = isinstance(arg.shift, Expr)
        return arg.shift + arg.offset, Fixup(i, FixupKind.SCRATCH, dynamic)
    if isinstance(arg, ConstantPointer):
        dynamic = isinstance(arg.shift, Expr)
        return arg.shift, Fixup(i, FixupKind.CONSTANT, dynamic, data=arg.data)
    if isinstance(arg, Status):
        return 0, Fixup(i, FixupKind.STATUS)
    if isinstance(arg, NodeNumber):
        report = None if arg.node is node else Report.of(arg.node)
        return 0, Fixup(i, FixupKind.NODE, report=report)
    if isinstance(arg, ArgAddress):
        return 0, Fixup(i, FixupKind.ARG, number=_arg_number(arg, launches))
    return arg, Fixup(i, FixupKind.DIM, True)


def _arg_number(arg: ArgAddress, launches: Sequence[KernelLaunch]) -> int:
    """The number of an arg among those of all launches of a node."""
    place = next(k for k, launch in enumerate(launches) if launch is arg.launch)
    return sum(len(launch.args) for launch in launches[:place]) + arg.index


def wrapped(number: int) -> int:
    """A number as 64 bits with a sign: masks above 2^63 wrap."""
    return number if _LOWEST <= number <= _HIGHEST else (number + _WRAP // 2) % _WRAP - _WRAP // 2
