"""The tables of derivative rules, and what rules are written with.

    @vjp("reshape")
    def _(op, g, inputs, outputs, grads):
        return [g.reshape(grads[0], shape=inputs[0].shape.dims)]

A vjp rule takes the cotangents of the results (None: zero) and gives one cotangent, or None, per
operand. A jvp rule takes the tangents of the operands (None: zero) and gives one per result. An op
that is linear in its operands together, or in each of them, needs no jvp rule: it is in `LINEAR` or
in `MULTILINEAR`. Where an op has one of the two rules alone, the other is its transpose.

The product of a cotangent and a value is ct · x, without a conjugate, also for complex numbers, as
in JAX: a pullback is the transpose of the Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, TypeAlias

from rlx.errors import UnsupportedError
from rlx.ir.dim import Dim, same
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Origin, Value
from rlx.ir.op import Op
from rlx.ir.ops._common import cast
from rlx.ir.shape import Shape

Grads: TypeAlias = Sequence[Any]  # values, or None for zero
Rule: TypeAlias = Callable[[Any, Graph, Sequence[Value], Sequence[Value], Grads], Grads]
Pullback: TypeAlias = Callable[[Grads], Grads]
Linearize: TypeAlias = Callable[
    [Any, Graph, Sequence[Value], Sequence[bool]], tuple[Sequence[Value], Pullback]
]

VJP: dict[str, Rule] = {}
JVP: dict[str, Rule] = {}
LINEARIZE: dict[str, Linearize] = {}
"""Ops whose forward computation is another one when they are differentiated: loops save carries."""
LINEAR: set[str] = set()
MULTILINEAR: set[str] = set()
DECOMPOSED_FORWARD: set[str] = set()
"""Ops with a vjp rule that forward mode differentiates through their decomposition."""

NOT_DIFFERENTIABLE = {
    "quantize_weight": (
        "a packed weight has no derivative",
        "train a float weight through fake_quantize, or adapters beside the packed one",
    ),
    "state_update": (
        "a graph that writes a state has no derivative", "make the state an input and an output",
    ),
}  # fmt: skip
"""Ops with float results and no rule: what the error says, and its hint."""

_FILES = (
    "elementwise", "layouts", "indexing", "reductions", "products", "control_flow",
    "linalg", "fused", "convolution", "quantized", "transforms", "wrappers", "collectives",
)  # fmt: skip


@cache
def load_rules() -> None:
    """Import the files of rules; late, because most programs differentiate nothing."""
    for name in _FILES:
        import_module(f"rlx.passes.grad.{name}")


def vjp(*names: str) -> Callable[[Rule], Rule]:
    return _entering(VJP, names)


def jvp(*names: str) -> Callable[[Rule], Rule]:
    return _entering(JVP, names)


def linearized(*names: str) -> Callable[[Linearize], Linearize]:
    return _entering(LINEARIZE, names)


def _entering(table: dict[str, Any], names: Sequence[str]) -> Callable[[Any], Any]:
    def enter(rule: Any) -> Any:
        for name in names:
            table[name] = rule
        return rule

    return enter


def is_differentiable(element: DType) -> bool:
    return element.is_float or element.is_complex


def no_derivative(op: Op, origin: Origin, why: str = "", hint: str = "") -> UnsupportedError:
    """What is raised where an op on the way has no derivative."""
    usual = "stop_gradient keeps it out; custom_vjp gives a function a rule of its own"
    known = NOT_DIFFERENTIABLE.get(op.name, ("no derivative rule", usual))
    return UnsupportedError(
        why or known[0], where=op.name, got=str(op), origin=origin,
        expected="ops with a derivative between the arguments and the result",
        hint=hint or known[1],
    )  # fmt: skip


# -- shapes -----------------------------------------------------------------------------------


def unbroadcast(g: Graph, ct: Value, like: Shape) -> Value:
    """The transpose of broadcasting to the shape of `ct`: summed over repeated axes, in `like`."""
    new = ct.shape.rank - like.rank
    repeated = [
        i for i, d in enumerate(ct.shape.dims)
        if i < new or (like.dims[i - new] == 1 and d != 1)
    ]  # fmt: skip
    if repeated:
        ct = g.sum(ct, axis=tuple(repeated))
    if not ct.shape.same_dims(like):
        ct = g.reshape(ct, shape=like.dims)
    return in_type(g, ct, like.dtype)


def in_type(g: Graph, ct: Value, element: DType) -> Value:
    """A cotangent or tangent in the type of its value: the real part for a real one."""
    if ct.shape.dtype.is_complex and not element.is_complex:
        ct = g.real(ct)
    elif element.is_complex and not ct.shape.dtype.is_complex:
        part = cast(g, ct, element.part)
        return g.complex(part, zeros(g, part.shape))
    return cast(g, ct, element)


def zeros(g: Graph, shape: Shape) -> Value:
    return filled(g, 0, shape)


def filled(g: Graph, number: float, shape: Shape) -> Value:
    """A scalar constant, repeated."""
    made = g.constant(number, shape.dtype)
    return g.expand(made, shape=shape.dims) if shape.rank else made


def instantiated(g: Graph, grads: Grads, values: Sequence[Value]) -> list[Value]:
    """`grads` with zeros where they are None."""
    pairs = zip(grads, values, strict=True)
    return [zeros(g, v.shape) if ct is None else ct for ct, v in pairs]


def add_any(g: Graph, a: Value | None, b: Value | None) -> Value | None:
    """The sum, None being zero."""
    if a is None or b is None:
        return b if a is None else a
    return g.add(a, b)


def swapped(g: Graph, x: Value) -> Value:
    """The last two axes exchanged."""
    rank = x.shape.rank
    return g.transpose(x, axes=(*range(rank - 2), rank - 1, rank - 2))


def conjugate(g: Graph, x: Value) -> Value:
    return g.complex(g.real(x), g.neg(g.imag(x))) if x.shape.dtype.is_complex else x


def adjoint(g: Graph, x: Value) -> Value:
    """xᴴ: the conjugate transpose of matrices."""
    return conjugate(g, swapped(g, x))


def product_of(dims: Sequence[Dim]) -> Dim:
    result: Dim = 1
    for d in dims:
        result = result * d
    return result


def same_dims(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
