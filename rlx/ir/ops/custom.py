"""Ops that users define: a name, inference, a reference, and perhaps a kernel and a gradient.

def shape(x, *, alpha=1.0):
    return x

scaled = custom_op("mine.scaled", infer=shape, reference=lambda x, *, alpha: x * alpha)
y = scaled(g, x, alpha=2.0)
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from rlx.errors import AttributeValueError, NameConflictError, OptionError, ShapeError
from rlx.ir.attrs import Body, Data, MaskKind
from rlx.ir.dim import Expr
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.op import REGISTRY, Array, Op, op
from rlx.ir.quant.scheme import QuantScheme
from rlx.ir.shape import Shape


class CustomOp:
    """A registered definition; calling it on a graph and values builds a node."""

    def __init__(
        self,
        name: str,
        infer: Callable[..., Any],
        reference: Callable[..., Any],
        kernel: object = None,
        gradient: Callable[..., Any] | None = None,
        batching: Callable[..., Any] | None = None,
    ) -> None:
        self.name, self.infer, self.reference = name, infer, reference
        self.kernel, self.gradient, self.batching = kernel, gradient, batching
        parameters = list(inspect.signature(infer).parameters.values())
        plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.least = sum(p.default is p.empty for p in plain)
        variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        self.most = None if variadic else len(plain)
        keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        self.attributes = tuple(p.name for p in keywords)
        self.defaults = {p.name: p.default for p in keywords if p.default is not p.empty}
        self.open = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def __call__(self, graph: Graph, *operands: Any, name: str = "", **attributes: Any) -> Any:
        return graph.append(Custom(self.name, attributes), operands, name)

    def complete(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """`given` with the defaults of `infer`; an unknown or missing attribute is an error."""
        unknown = [] if self.open else [k for k in given if k not in self.attributes]
        missing = [k for k in self.attributes if k not in given and k not in self.defaults]
        if unknown or missing:
            raise AttributeValueError(
                "unknown attribute" if unknown else "missing attribute",
                where=self.name,
                got=", ".join(unknown or given) or None,
                expected=", ".join(self.attributes) or "no attributes",
            )
        return {**self.defaults, **given}

    def __repr__(self) -> str:
        return f"<custom op {self.name}>"


_DEFINED: dict[str, CustomOp] = {}


def custom_op(
    name: str,
    *,
    infer: Callable[..., Any],
    reference: Callable[..., Any],
    kernel: object = None,
    gradient: Callable[..., Any] | None = None,
    batching: Callable[..., Any] | None = None,
) -> CustomOp:
    """As `rlx.custom_op`, for graphs alone."""
    return register(CustomOp(name, infer, reference, kernel, gradient, batching))


Defined = TypeVar("Defined", bound=CustomOp)


def register(made: Defined) -> Defined:
    """Make an op known by its name."""
    name = made.name
    if not isinstance(name, str) or not name:
        raise OptionError("a custom op needs a name", got=repr(name))
    if name in _DEFINED or name in REGISTRY:
        raise NameConflictError(
            "an op of that name exists", where="custom_op", got=name,
            hint="choose another name, for example with the name of your package before it",
        )  # fmt: skip
    _DEFINED[name] = made
    return made


def definition(name: str) -> CustomOp:
    """The custom op registered under `name`."""
    found = _DEFINED.get(name)
    if found is None:
        near = difflib.get_close_matches(name, _DEFINED, 3)
        raise OptionError(
            "unknown custom op",
            where="custom",
            got=name,
            expected=", ".join(near or sorted(_DEFINED)) or None,
            hint="import the module that defines it before the graph is built or loaded",
        )
    return found


@op("custom")
class Custom(Op):
    """The op registered with `custom_op` under the name `op`; `options` are its attributes.

    Options are given as a mapping or as (name, value) pairs, and kept as pairs sorted by name,
    complete with the defaults of the definition.
    """

    op: str
    options: object = ()

    def check(self) -> None:
        complete = definition(self.op).complete(_mapping(self.op, self.options))
        pairs = tuple([(k, _exact(complete[k], f"{self.op}.{k}")) for k in sorted(complete)])
        object.__setattr__(self, "options", pairs)

    @property
    def definition(self) -> CustomOp:
        return definition(self.op)

    @property
    def keywords(self) -> dict[str, Any]:
        """The options as keyword arguments."""
        return _mapping(self.op, self.options)

    def infer(self, *operands: Shape) -> tuple[Shape, ...]:
        made = self.definition
        if len(operands) < made.least or (made.most is not None and len(operands) > made.most):
            expected = made.least if made.most == made.least else f"{made.least} to {made.most}"
            raise ShapeError(
                "wrong number of operands", where=self.op, got=len(operands), expected=expected
            )
        results = made.infer(*operands, **self.keywords)
        shapes = results if isinstance(results, tuple) else (results,)
        if not shapes or not all(isinstance(s, Shape) for s in shapes):
            raise ShapeError(
                "inference of a custom op gives shapes", where=self.op, got=repr(results),
                expected="a Shape or a tuple of them",
            )  # fmt: skip
        return shapes

    def reference(self, *operands: Array) -> Any:
        return self.definition.reference(*operands, **self.keywords)


def _mapping(name: str, options: Any) -> dict[str, Any]:
    if isinstance(options, Mapping):
        return dict(options)
    try:
        pairs = tuple(options)
        found = dict(pairs)
    except (TypeError, ValueError):
        pairs, found = (None,), {}
    if len(found) != len(pairs) or not all(isinstance(k, str) for k in found):
        raise AttributeValueError(
            "not a set of named values", where=name, got=repr(options),
            expected="a mapping, or pairs of different names and values",
        )  # fmt: skip
    return found


_KINDS = (bool, int, float, str, Expr, DType, Shape, MaskKind, QuantScheme, Data, Body)


def _exact(value: Any, where: str) -> Any:
    """`value` as an attribute that can be compared, hashed, printed and stored."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (list, tuple)):
        return tuple([_exact(item, where) for item in value])
    if value is None or isinstance(value, _KINDS):
        return value
    raise AttributeValueError(
        "not an attribute value", where=where, got=f"{value!r} ({type(value).__name__})",
        expected="a number, string, dimension, element type, shape, data, graph, or tuple of them",
    )  # fmt: skip
