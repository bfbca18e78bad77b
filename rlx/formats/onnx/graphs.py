"""What an ONNX file says, checked: graphs of nodes, their attributes, functions and opsets.

Nothing here computes. Names are defined before they are used, once; subgraphs nest to a limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlx.formats.onnx.tensors import Initializer
from rlx.support.records import dataclass


@dataclass(frozen=True)
class TensorKind:
    """The declared type of an input or output: `dims` has ints, names, and None for unknown."""

    kind: str  # "tensor", "sequence", "optional", "map", or "" where the file does not say
    dtype: str  # as ONNX calls it: "float", "int64", "string", …
    dims: tuple[int | str | None, ...] | None = None

    def __str__(self) -> str:
        if self.dims is None:
            return f"{self.kind} of {self.dtype}" if self.kind != "tensor" else self.dtype
        return f"{self.dtype}[{', '.join('?' if d is None else str(d) for d in self.dims)}]"


@dataclass(frozen=True)
class Argument:
    """A named input or output of a graph."""

    name: str
    type: TensorKind


@dataclass(frozen=True)
class Reference:
    """An attribute of a node in a function that has the value of the call's attribute."""

    name: str


@dataclass(frozen=True, eq=False)
class OnnxNode:
    """One operator call. Empty names are operands that are absent, or results nobody wants."""

    name: str
    domain: str
    op_type: str
    overload: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]  # ints, floats, str, bytes, Initializer, OnnxGraph, lists of them

    def __str__(self) -> str:
        domain = f"{self.domain}." if self.domain else ""
        called = f"{domain}{self.op_type}"
        return f"{called} {self.name!r}" if self.name else called


@dataclass(frozen=True, eq=False)
class OnnxGraph:
    """A graph, or the body of a loop or branch; `outer` names values of the graphs around it."""

    name: str
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    nodes: tuple[OnnxNode, ...]
    initializers: Mapping[str, Initializer]
    outer: frozenset[str]
    types: Mapping[str, TensorKind]  # of the values between, where the file says


@dataclass(frozen=True, eq=False)
class OnnxFunction:
    """A function that the file defines: a call is its nodes."""

    name: str
    domain: str
    overload: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[OnnxNode, ...]
    defaults: Mapping[str, Any]  # attributes that a call may leave out
    opsets: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class OnnxFile:
    """A model: its main graph, opset versions by domain ("" is ai.onnx), and functions."""

    path: str
    graph: OnnxGraph
    opsets: Mapping[str, int]
    functions: Mapping[tuple[str, str, str], OnnxFunction]
    metadata: Mapping[str, str]
    producer: str
    ir_version: int
