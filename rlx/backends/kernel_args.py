"""Kernel args that every device's lowerings use, before memory has addresses.

A launch names values, scratch memory and sizes; a program turns them into addresses and integers.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.dim import Dim
from rlx.ir.node import Node, Value
from rlx.loops.schedule import NODE, REPORT, Address, ArgSource
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Pointer:
    """The address of a value's first element, view offset included, plus `shift` elements."""

    value: Value
    shift: Dim = 0


@dataclass(frozen=True)
class Scratch:
    """An address inside the node's scratch memory, `offset` + `shift` bytes from its start."""

    node: Node
    offset: int = 0
    shift: Dim = 0


@dataclass(frozen=True)
class Status:
    """The address of the status word, an i64. A kernel that meets bad data, such as an index out of
    range, stores the node's error number there; the run then raises an error that names it."""


@dataclass(frozen=True)
class NodeNumber:
    """The error number of a node, for `Status`."""

    node: Node


# A Dim becomes an i64: a constant, or evaluated with each run.
NodeArg = Pointer | Scratch | Status | NodeNumber | Dim


def nest_arg(node: Node, source: ArgSource, offsets: Sequence[int]) -> NodeArg:
    """An arg of a scheduled nest; `offsets` are those of temporaries in scratch memory."""
    if source == REPORT:
        return Status()
    if source == NODE:
        return NodeNumber(node)
    if not isinstance(source, Address):
        assert not isinstance(source, str)
        return source
    buffer = source.buffer
    if buffer.kind == "temporary":
        return Scratch(node, offsets[buffer.number], source.offset * source.bytes)
    values = node.inputs if buffer.kind == "operand" else node.outputs
    return Pointer(values[buffer.number], source.offset)
