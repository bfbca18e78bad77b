"""Op attributes: their types, and coercion of Python values to them.

Attributes are ints, floats, bools, strings, None, dims, dtypes, masks, quantisation schemes,
constant data, subgraphs, and tuples of those. `coercer(annotation)` returns the coercion of a
field.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import AttributeValueError
from rlx.ir.dim import Expr, as_dim
from rlx.ir.dtype import DType
from rlx.ir.quant.scheme import QuantScheme
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.graph import Graph


MAX_NESTING = 24
"""Levels of control flow: far above any model, and few enough for recursion."""
MAX_NESTED_NODES = 1 << 18


class Data:
    """An immutable array with a content hash: the value of a constant."""

    __slots__ = ("_hash", "array", "shape")

    def __init__(self, array: Any, dtype: object = None) -> None:
        element = None if dtype is None else DType.of(dtype).numpy
        value = np.array(array, dtype=element, order="C")
        if element is None and value.dtype == np.float64 and not isinstance(array, np.ndarray):
            value = value.astype(np.float32)  # Python floats are f32 unless a dtype says otherwise
        value.setflags(write=False)
        self.array = value
        self.shape = Shape(value.shape, value.dtype)
        digest = hashlib.blake2b(value.tobytes(), digest_size=8).digest()
        self._hash = hash((self.shape, int.from_bytes(digest, "little")))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Data):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.shape is other.shape
            and self.array.tobytes() == other.array.tobytes()
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        if self.array.size <= 8:
            return f"Data({self.array.tolist()}, {self.shape.dtype})"
        return f"Data({self.shape})"


class Body:
    """A subgraph as an attribute: frozen, equal to another of the same structure."""

    __slots__ = ("_hash", "depth", "graph", "key", "weight")

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.depth, self.weight = _nesting(graph)
        self.key = graph.structure()
        self._hash = hash(self.key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Body):
            return NotImplemented
        return self._hash == other._hash and self.key == other.key

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Body({self.graph.name})"


def _nesting(graph: Graph) -> tuple[int, int]:
    """How deep control flow nests in a graph, and its nodes with those of all subgraphs, counted
    where they are used: each use is compiled by itself."""
    depth, weight = 1, len(graph.nodes)
    for node in graph.nodes:
        if node.op.is_control_flow:
            for body in node.op.attributes().values():
                if isinstance(body, Body):
                    depth, weight = max(depth, body.depth + 1), weight + body.weight
    if depth > MAX_NESTING or weight > MAX_NESTED_NODES:
        raise AttributeValueError(
            "graphs nested too deep", where=graph.name,
            got=f"{depth} levels with {weight:,} nodes",
            expected=f"at most {MAX_NESTING} levels with {MAX_NESTED_NODES:,} nodes",
            hint="a scan or while_loop repeats its body without nesting it",
        )  # fmt: skip
    return depth, weight


class MaskKind:
    """Which keys a query attends to: NONE, CAUSAL, SLIDING_WINDOW(w), LOCAL(w), CUSTOM (a bool
    mask) or BIAS (added to the scores)."""

    __slots__ = ("kind", "window")

    NONE: MaskKind
    CAUSAL: MaskKind
    CUSTOM: MaskKind
    BIAS: MaskKind

    def __init__(self, kind: str, window: int = 0) -> None:
        if kind not in ("none", "causal", "sliding_window", "local", "custom", "bias"):
            raise AttributeValueError("unknown mask kind", got=kind, expected=_MASKS)
        if (kind == "sliding_window") != (window > 0) and kind != "local":
            raise AttributeValueError("a sliding window needs a positive width", got=window)
        if window < 0:
            raise AttributeValueError("a local mask needs a distance", got=f"{kind}({window})")
        self.kind, self.window = kind, window

    @staticmethod
    def SLIDING_WINDOW(window: int) -> MaskKind:
        """Key position in (query position − window, query position]."""
        return MaskKind("sliding_window", window)

    @staticmethod
    def LOCAL(distance: int) -> MaskKind:
        """Key position at most `distance` away from the query's, on either side."""
        return MaskKind("local", distance)

    @staticmethod
    def of(value: object) -> MaskKind:
        if isinstance(value, MaskKind):
            return value
        if isinstance(value, str):
            kind, _, width = value.lower().rstrip(")").partition("(")
            return MaskKind(kind, int(width) if width.isdigit() else -(kind == "local"))
        raise AttributeValueError("not a mask kind", got=repr(value), expected=_MASKS)

    @property
    def needs_mask(self) -> bool:
        """Whether the attention op must have a mask tensor."""
        return self.kind in ("custom", "bias")

    @property
    def behind(self) -> int | None:
        """The largest distance of a visible key before the query; None if unlimited."""
        return {"sliding_window": self.window - 1, "local": self.window}.get(self.kind)

    @property
    def ahead(self) -> int | None:
        """The largest distance of a visible key after the query; None if unlimited."""
        return {"causal": 0, "sliding_window": 0, "local": self.window}.get(self.kind)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaskKind):
            return NotImplemented
        return (self.kind, self.window) == (other.kind, other.window)

    def __hash__(self) -> int:
        return hash((self.kind, self.window))

    def __repr__(self) -> str:
        return f"{self.kind}({self.window})" if self.behind is not None else self.kind


_MASKS = "none, causal, sliding_window(w), local(w), custom or bias"
MaskKind.NONE, MaskKind.CAUSAL = MaskKind("none"), MaskKind("causal")
MaskKind.CUSTOM, MaskKind.BIAS = MaskKind("custom"), MaskKind("bias")


def _int(value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise AttributeValueError("not an int", got=repr(value))
    return int(value.__index__())


def _float(value: object) -> float:
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise AttributeValueError("not a number", got=repr(value))
    return float(value)


def _bool(value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise AttributeValueError("not a bool", got=repr(value))
    return bool(value)


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise AttributeValueError("not a string", got=repr(value))
    return value


def _body(value: Any) -> Body:
    if isinstance(value, Body):
        return value
    if hasattr(type(value), "as_graph"):  # a GraphModule; blocks inside are lowered with the rest
        value = value.as_hir() if value.as_graph() is None else value.as_graph()
    if not hasattr(type(value), "structure"):
        raise AttributeValueError("not a graph", got=repr(value))
    return Body(value)


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": _int,
    "float": _float,
    "bool": _bool,
    "str": _str,
    "Dim": as_dim,
    "DType": DType.of,
    "Shape": Shape.of,
    "MaskKind": MaskKind.of,
    "QuantScheme": lambda v: v if isinstance(v, QuantScheme) else QuantScheme.parse(v),
    "Data": lambda v: v if isinstance(v, Data) else Data(v),
    "Body": _body,
    "object": lambda v: v,
}


def coercer(annotation: str) -> Callable[[Any], Any]:
    """The coercion for an attribute with this annotation."""
    text = annotation.replace(" ", "")
    if text.endswith("|None"):
        inner = coercer(text[: -len("|None")])
        return lambda v: None if v is None else inner(v)
    if text.startswith("tuple[") and text.endswith(",...]"):
        item = coercer(text[len("tuple[") : -len(",...]")])
        return lambda v: tuple(map(item, _sequence(v)))
    return _SCALARS[text]


def _sequence(value: object) -> Any:
    if isinstance(value, (str, Expr)) or not hasattr(value, "__iter__"):
        return (value,)  # one axis written without brackets
    return value


def has_symbols(value: object) -> bool:
    """Whether an attribute mentions a symbolic dimension."""
    if isinstance(value, Expr):
        return True
    if isinstance(value, tuple):
        return any(map(has_symbols, value))
    if isinstance(value, Shape):
        return not value.is_static
    return isinstance(value, Body) and bool(value.graph.symbols())


def symbols_in(value: object) -> frozenset[str]:
    """The symbols that an attribute mentions."""
    if isinstance(value, (Expr, Shape)):
        return value.symbols
    if isinstance(value, tuple):
        return frozenset[str]().union(*map(symbols_in, value))
    return value.graph.symbols() if isinstance(value, Body) else frozenset()


def to_bytes(array: Any) -> bytes:
    """The bytes of a constant: little-endian on every machine, bit-exact."""
    return bytes((array if sys.byteorder == "little" else array.byteswap()).tobytes())


def from_bytes(data: bytes | memoryview, shape: Shape) -> Any:
    """The array of `shape` from little-endian bytes; ValueError when the length differs."""
    dims = shape.static_dims
    wanted = prod(dims) * shape.dtype.bytes
    if len(data) != wanted:
        raise ValueError(f"{len(data)} bytes where {shape} has {wanted}")
    array = np.frombuffer(data, dtype=shape.dtype.numpy)
    if shape.dtype.kind == "bool" and array.view(np.uint8).max(initial=0) > 1:
        raise ValueError("a bool that is neither 0 nor 1")
    return (array if sys.byteorder == "little" else array.byteswap()).reshape(dims)
