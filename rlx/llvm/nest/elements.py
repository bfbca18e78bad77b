"""Vector code of elementwise ops: one table, read by regions and by fused activations alike.

It is the arithmetic of each op's reference. In regions, sums and products are rounded each by
itself, as the reference does, so never joined into an fma. An op without a row here gets its code
from its decomposition.
"""

from __future__ import annotations

import math as numbers
from collections.abc import Callable, Sequence
from typing import Any

from rlx.errors import CodegenError
from rlx.ir.dtype import DType, bool_, f32, f64, promote
from rlx.ir.op import Op, lookup
from rlx.ir.ops.composite import decomposed
from rlx.ir.shape import Shape
from rlx.llvm import math
from rlx.llvm.builder import Function, Value
from rlx.llvm.nest import arithmetic
from rlx.llvm.nest.registers import (
    Complex,
    Element,
    constant,
    convert,
    joined,
    lanes_of,
    parts,
    register_type,
    rounded,
    spread,
)

Operand = tuple[Element, DType]


def apply(f: Function, record: Op, operands: Sequence[Operand], result: DType) -> Element:
    """The element of `result`'s type that the op gives; operands of one lane fill all lanes."""
    lanes = max((lanes_of(x) for x, _ in operands), default=1)
    wide = [(spread(f, x, lanes), dtype) for x, dtype in operands]
    with f.exact():
        made = _apply(f, record, wide, result)
    if isinstance(made, Value) and result.is_float and (result.bits == 8 or record.name == "cast"):
        return rounded(f, made, result)
    return made


def has_vector_code(record: Op | type[Op]) -> bool:
    """Whether the op has a row in the table; else its decomposition is emitted."""
    return record.name in NAMES


def can_activate(name: str) -> bool:
    """Whether kernels can apply the activation: by vector code, or by its decomposition."""
    return name == "none" or name in NAMES or lookup(name).has_decomposition()


def activate(name: str, x: Value) -> Value:
    """The activation called `name` of a float vector, with its default attributes."""
    if name == "none":
        return x
    record: Any = lookup(name)()
    dtype = f64 if x.type.scalar.bits == 64 else f32
    if has_vector_code(record):
        made = _unary(x.fn, record, x, dtype, dtype)
    else:
        made = _decomposed(x.fn, record, [(x, dtype)])
    assert isinstance(made, Value)
    return made


def _decomposed(f: Function, record: Op, operands: Sequence[Operand]) -> Element:
    """An op by its decomposition, which is elementwise too."""
    graph = decomposed(record, tuple([Shape([1], dtype) for _, dtype in operands]))
    if graph is None:
        raise CodegenError("no code and no decomposition", where=record.name)
    given = iter([x for x, _ in operands])
    known: dict[Any, Element] = {}
    for node in graph.nodes:
        op: Any = node.op
        args = [(known[v], v.dtype) for v in node.inputs]
        if op.name == "input":
            made = next(given)
        elif op.name == "constant" and op.data.array.size == 1:
            made = constant(f, op.data.array.reshape(()).item(), node.output.dtype)
        elif has_vector_code(op):
            made = apply(f, op, args, node.output.dtype)
        elif op.is_elementwise:
            made = _decomposed(f, op, args)
        else:
            raise CodegenError(
                "the decomposition is not elementwise", where=record.name, got=str(op),
                expected="elementwise ops and numbers",
            )  # fmt: skip
        known[node.output] = made
    return known[graph.outputs[0]]


def _apply(f: Function, record: Op, operands: Sequence[Operand], result: DType) -> Element:
    name = record.name
    if name == "where":
        return _where(f, operands, result)
    if name == "cast":
        return convert(f, *operands[0], result)
    if name == "complex":
        re, im = (convert(f, x, d, result.part) for x, d in operands)
        assert isinstance(re, Value) and isinstance(im, Value)
        return Complex(re, im)
    if len(operands) == 2:
        return _binary(f, record, operands)
    return _unary(f, record, *operands[0], result)


# -- two operands -----------------------------------------------------------------------------


def _binary(f: Function, record: Any, operands: Sequence[Operand]) -> Element:
    (a, a_type), (b, b_type) = operands
    met: DType = record.common_type(a_type, b_type)
    x, y = convert(f, a, a_type, met), convert(f, b, b_type, met)
    if isinstance(x, Complex) and isinstance(y, Complex):
        if record.name not in arithmetic.BINARY:
            return _decomposed(f, record, operands)
        return arithmetic.BINARY[record.name](f, x, y)
    assert isinstance(x, Value) and isinstance(y, Value)
    function = _BINARY.get(record.name)
    if function is None:
        raise CodegenError("no code for this op", where="region", got=record.name)
    return function(f, x, y, met)


def _extremum(largest: bool) -> Callable[[Function, Value, Value, DType], Value]:
    def apply(f: Function, a: Value, b: Value, met: DType) -> Value:
        if met.kind == "uint":
            return f.umax(a, b) if largest else f.umin(a, b)
        return f.max(a, b) if largest else f.min(a, b)

    return apply


def _compare(predicate: str) -> Callable[[Function, Value, Value, DType], Value]:
    unsigned = predicate if predicate in ("eq", "ne") else "u" + predicate

    def apply(f: Function, a: Value, b: Value, met: DType) -> Value:
        if met is bool_ and unsigned != predicate:
            a, b = (
                a.to(register_type(DType.of("i8")), False),
                b.to(register_type(DType.of("i8")), False),
            )
        return f.compare(unsigned if met.kind in ("uint", "bool") else predicate, a, b)

    return apply


def _of_kind(
    real: Callable[[Value, Value], Value],
    whole: Callable[[Function, Value, Value, DType], Value],
) -> Callable[[Function, Value, Value, DType], Value]:
    """One function for floats, another for integers."""

    def apply(f: Function, a: Value, b: Value, met: DType) -> Value:
        return real(a, b) if met.is_float else whole(f, a, b, met)

    return apply


_BINARY: dict[str, Callable[[Function, Value, Value, DType], Value]] = {
    "add": lambda f, a, b, met: a + b,
    "sub": lambda f, a, b, met: a - b,
    "mul": lambda f, a, b, met: a * b,
    "div": lambda f, a, b, met: a / b,
    "maximum": _extremum(True),
    "minimum": _extremum(False),
    "mod": _of_kind(math.mod, arithmetic.mod),
    "floor_div": _of_kind(math.floor_div, arithmetic.floor_div),
    "pow": _of_kind(math.pow, arithmetic.power),
    "atan2": lambda f, a, b, met: math.atan2(a, b),
    "copysign": lambda f, a, b, met: f.copysign(a, b),
    "bitwise_and": lambda f, a, b, met: a & b,
    "bitwise_or": lambda f, a, b, met: a | b,
    "bitwise_xor": lambda f, a, b, met: a ^ b,
    "logical_and": lambda f, a, b, met: a & b,
    "logical_or": lambda f, a, b, met: a | b,
    "logical_xor": lambda f, a, b, met: a ^ b,
    "shift_left": arithmetic.shift_left,
    "shift_right": arithmetic.shift_right,
    **{p: _compare(p) for p in ("eq", "ne", "lt", "le", "gt", "ge")},
}


def _where(f: Function, operands: Sequence[Operand], result: DType) -> Element:
    (condition, _), (a, a_type), (b, b_type) = operands
    met = promote(a_type, b_type)
    x, y = convert(f, a, a_type, met), convert(f, b, b_type, met)
    assert isinstance(condition, Value)
    pairs = zip(parts(x), parts(y), strict=True)
    return joined([f.select(condition, u, v) for u, v in pairs])


# -- one operand ------------------------------------------------------------------------------


def _unary(f: Function, record: Any, x: Element, source: DType, result: DType) -> Element:
    name = record.name
    if isinstance(x, Complex):
        if name == "abs" and source.part is f64:  # f64 squares may overflow
            return _decomposed(f, lookup("hypot")(), [(v, f64) for v in x])
        if name not in arithmetic.UNARY:
            return _decomposed(f, record, [(x, source)])
        return arithmetic.UNARY[name](f, x)
    if name in ("real", "imag"):
        return x if name == "real" else f.const(0, x.type)
    if name in _ANY:
        return _ANY[name](f, x, source)
    if name in _KEEPING:
        return _KEEPING[name](f, record, x, source)
    function = _REAL.get(name)
    if function is None:
        raise CodegenError("no code for this op", where="region", got=name)
    real = convert(f, x, source, result)
    assert isinstance(real, Value)
    return function(f, record, real)


def _leaky_relu(f: Function, record: Any, x: Value) -> Value:
    return f.select(x >= 0.0, x, x * record.alpha)


def _elu(f: Function, record: Any, x: Value) -> Value:
    return f.select(x >= 0.0, x, math.expm1(x) * record.alpha)


def _gelu_quick(f: Function, record: Any, x: Value) -> Value:
    return x * math.sigmoid(x * 1.702)


def _hard_sigmoid(f: Function, record: Any, x: Value) -> Value:
    """Times a sixth, since vectors divide slowly: a last bit may differ from the reference."""
    return f.min(f.max(x + 3.0, 0.0), 6.0) * (1 / 6)


def _hard_swish(f: Function, record: Any, x: Value) -> Value:
    return x * _hard_sigmoid(f, record, x)


def _library(name: str) -> Callable[[Function, Any, Value], Value]:
    return lambda f, record, x: math.UNARY[name](x)


_REAL: dict[str, Callable[[Function, Any, Value], Value]] = {
    **{name: _library(name) for name in math.UNARY},
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "gelu_quick": _gelu_quick,
    "hard_sigmoid": _hard_sigmoid,
    "hard_swish": _hard_swish,
}


def _sign(f: Function, record: Any, x: Value, dtype: DType) -> Value:
    if dtype.is_float:
        return f.select(f.compare("one", x, 0.0), f.copysign(f.const(1.0, x.type), x), f.abs(x))
    if dtype.kind == "uint":
        return x.ne(0).to(x.type, signed=False)
    return (x > 0).to(x.type, signed=False) - (x < 0).to(x.type, signed=False)


def _relu(f: Function, record: Any, x: Value, dtype: DType) -> Value:
    return x if dtype.kind == "uint" else f.max(x, 0)


def _clamp(f: Function, record: Any, x: Value, dtype: DType) -> Value:
    low, high = record.bounds(dtype)
    if dtype.is_float:
        return f.min(f.max(x, low), high)
    return arithmetic.clamp(f, x, low, high, dtype)


def _whole(name: str) -> Callable[[Function, Any, Value, DType], Value]:
    return lambda f, record, x, dtype: math.UNARY[name](x) if dtype.is_float else x


_KEEPING: dict[str, Callable[[Function, Any, Value, DType], Value]] = {
    "neg": lambda f, record, x, dtype: -x,
    "square": lambda f, record, x, dtype: x * x,
    "abs": lambda f, record, x, dtype: x if dtype.kind == "uint" else f.abs(x),
    "sign": _sign,
    "relu": _relu,
    "clamp": _clamp,
    "bitwise_not": lambda f, record, x, dtype: ~x,
    **{name: _whole(name) for name in ("floor", "ceil", "round", "trunc")},
}


def _is_nan(f: Function, x: Value, dtype: DType) -> Value:
    return x.is_nan() if dtype.is_float else f.const(0, x.type.mask)


def _is_inf(f: Function, x: Value, dtype: DType) -> Value:
    return f.abs(x).eq(numbers.inf) if dtype.is_float else f.const(0, x.type.mask)


def _is_finite(f: Function, x: Value, dtype: DType) -> Value:
    return f.abs(x) < numbers.inf if dtype.is_float else f.const(-1, x.type.mask)


def _signbit(f: Function, x: Value, dtype: DType) -> Value:
    if dtype.is_float:
        return x.bits() < 0
    return f.const(0, x.type.mask) if dtype.kind == "uint" else x < 0


_ANY: dict[str, Callable[[Function, Value, DType], Value]] = {
    "is_nan": _is_nan,
    "is_inf": _is_inf,
    "is_finite": _is_finite,
    "signbit": _signbit,
    "logical_not": lambda f, x, dtype: x.eq(0),
}

NAMES = frozenset([*_BINARY, *_REAL, *_KEEPING, *_ANY, "where", "cast", "complex", "real", "imag"])
"""The elementwise ops with a row in the table."""
