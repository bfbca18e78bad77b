"""Launch templates: what a node class lowers to, cached for all its nodes and variants.

A lowering depends on a node's op, on the shapes and strides of its operands, on the target and on
the number of workers. Its result is cached as launch templates: the args are numbers and addends,
with a fixup for every arg that is an address or depends on the program. A node that depends on its
neighbours is lowered in its graph each time, into templates of the same form.
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
from rlx.backends.cpu.relocatable import ErrorSite, HostCall
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
    """What an arg is relative to, where it is more than a number."""

    VALUE = "value"  # the address of a value
    SCRATCH = "scratch"  # an address in the node's scratch memory
    CONSTANT = "constant"  # the address of constant data
    STATUS = "status"  # the address of the status word
    ARG = "arg"  # the address of another launch's arg
    NODE = "node"  # the error number of a node
    DIM = "dim"  # a dynamic size


class Fixup(NamedTuple):
    """An arg of a launch template that the program layout resolves."""

    arg: int
    kind: FixupKind
    dynamic: bool = False  # it depends on dynamic dimensions
    number: int = 0  # VALUE: which of the node's values; ARG: which of its launches' args
    data: Data | None = None  # CONSTANT
    site: ErrorSite | None = None  # NODE: in a subgraph


@dataclass
class LaunchTemplate:
    """A kernel launch of any node of a class. Values are numbered: operands, then results."""

    launch: KernelLaunch
    args: list[Dim]  # numbers, and addends of fixups
    fixups: tuple[Fixup, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    host: HostCall | None

    @property
    def layout(self) -> tuple[Any, ...]:
        """Everything that a program layout depends on: all but args and kernel."""
        s = self.launch
        flags = (s.spec is None, s.solo, s.jump, s.fence, s.uses_scratch)
        return (len(self.args), self.fixups, self.reads, self.writes, flags)


@dataclass
class LoweredClass:
    """The launch templates of a node class."""

    launches: list[LaunchTemplate]
    args: list[Dim]  # of all launches
    neighbours: tuple[int, ...]  # values of other nodes, numbered after the node's own
    layout: int  # equal for equal layouts


_NO_LAUNCHES = LoweredClass([], [], (), 0)


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
                found.append(_NO_LAUNCHES)
            elif c.depends_on_neighbours:
                node = variant.graph.nodes[c.first]
                found.append(self._lower(node, Context(variant, self.target, threads), variant))
            else:
                found.append(self._lower_class(variant, number, threads))
        return found

    def _lower_class(self, variant: Variant, number: int, threads: int) -> LoweredClass:
        entry = TABLE.get(variant.bound.classes.nodes[number].op.name)
        key = (threads, entry, *variant.bound.key(number))  # a lowering may be replaced
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MAX_TEMPLATES:
                self._known.clear()
            node, lir = _isolated(variant, number)
            found = self._known[key] = self._lower(node, Context(lir, self.target, threads))
        return found

    def _lower(self, node: Node, ctx: Context, graph: Variant | None = None) -> LoweredClass:
        """The templates of a node; `graph` is given if it depends on its neighbours."""
        launches = lower_node(node, ctx)
        values = _ValueNumbers(node, graph)
        templates = [_template(node, launch, launches, ctx, values) for launch in launches]
        layout = (tuple([template.layout for template in templates]), tuple(values.neighbours))
        known = self._layouts.get(layout)
        if known is None:
            known = self._layouts.setdefault(layout, next(self._layout_numbers))
        args = [arg for template in templates for arg in template.args]
        return LoweredClass(templates, args, tuple(values.neighbours), known)


def _isolated(variant: Variant, number: int) -> tuple[Node, Lir]:
    """A node of the class alone, and a plan with the strides of its operands."""
    bound = variant.bound
    node, c = bound.node(number), bound.classes.nodes[number]
    values = zip((*node.inputs, *node.outputs), (*c.operands, *c.results), strict=True)
    slots = {value: Slot("arena", 0, view=bound.views[k]) for value, k in values}
    return node, Lir(node.graph, slots, 0, PhaseSchedule())


class _ValueNumbers:
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
        "a lowering uses values of other nodes", where=node.op.name, got=str(what),
        origin=str(node.origin), hint="the op needs the trait depends_on_neighbours",
    )  # fmt: skip


def _template(
    node: Node,
    launch: KernelLaunch,
    launches: Sequence[KernelLaunch],
    ctx: Context,
    values: _ValueNumbers,
) -> LaunchTemplate:
    args: list[Dim] = []
    fixups: list[Fixup] = []
    for i, arg in enumerate(launch.args):
        if isinstance(arg, int):
            args.append(as_int64(arg))
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
    values: _ValueNumbers,
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
        site = None if arg.node is node else ErrorSite.of(arg.node)
        return 0, Fixup(i, FixupKind.NODE, site=site)
    if isinstance(arg, ArgAddress):
        return 0, Fixup(i, FixupKind.ARG, number=_arg_number(arg, launches))
    return arg, Fixup(i, FixupKind.DIM, True)


def _arg_number(arg: ArgAddress, launches: Sequence[KernelLaunch]) -> int:
    """The index of an arg among the args of all launches of a node."""
    position = next(k for k, launch in enumerate(launches) if launch is arg.launch)
    return sum(len(launch.args) for launch in launches[:position]) + arg.index


def as_int64(number: int) -> int:
    """A number as signed 64 bits: masks above 2^63 wrap."""
    return number if _LOWEST <= number <= _HIGHEST else (number + _WRAP // 2) % _WRAP - _WRAP // 2
