"""Simplification: rules on arithmetic, casts and layout ops that change no result, and redundancy
elimination (constant folding, common subexpressions, dead code)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.errors import RlxError
from rlx.ir import dtype as dt
from rlx.ir.attrs import Body, Data
from rlx.ir.dim import Dim, same
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.op import REGISTRY, Op
from rlx.ir.ops.binary import Binary
from rlx.ir.shape import Shape, broadcast_dims, normalize_axis
from rlx.passes.pattern import Match, const, op
from rlx.passes.rewrite import Editor, OnFire, Result, Rule, apply, is_kept, size_of


def _same(m: Match) -> Result:
    """The operand, where the op is a no-op."""
    return m.if_same(m.x)


def _reshape(m: Match) -> Result:
    dims = m.root.output.shape.dims
    unchanged = m.if_same(m.x)
    return m.g.reshape(m.x, shape=dims) if unchanged is None else unchanged


def _identity_transpose(m: Match) -> Result:
    return m.x if m.op().axes == tuple(range(m.x.shape.rank)) else None


def _transpose(m: Match) -> Result:
    inner, outer = m.op("y").axes, m.op().axes
    perm = tuple([inner[p] for p in outer])
    if perm == tuple(range(len(perm))):
        return m.x
    return m.g.transpose(m.x, axes=perm)


def _expand(m: Match) -> Result:
    return m.g.expand(m.x, shape=m.root.output.shape.dims)


def _narrow(m: Match) -> Result:
    outer, inner = m.op(), m.op("y")
    rank = m.x.shape.rank
    if normalize_axis(outer.axis, rank) != normalize_axis(inner.axis, rank):
        return None
    start = inner.start + outer.start
    return m.g.narrow(m.x, axis=inner.axis, start=start, length=outer.length)


def _narrow_of_concat(m: Match) -> Result:
    """narrow(concat(...)) = narrow(part), where the range is inside one part."""
    joined = m.root.inputs[0]
    record, rank = m.op(), joined.shape.rank
    axis = normalize_axis(record.axis, rank)
    if normalize_axis(joined.node.op.axis, rank) != axis:  # type: ignore[attr-defined]
        return None
    offset: Dim = 0
    for part in joined.node.inputs:
        size = part.shape.dims[axis]
        start = record.start - offset
        if _inside(start, record.length, size):
            if part.shape.dtype is not joined.shape.dtype:
                return None
            if same(start, 0) and same(record.length, size):
                return m.if_same(part)
            return m.g.narrow(part, axis=axis, start=start, length=record.length)
        offset = offset + size
    return None


def _inside(start: Dim, length: Dim, size: Dim) -> bool:
    end = size - start - length  # elements after the range
    if isinstance(start, int) and isinstance(end, int):
        return start >= 0 and end >= 0 and not same(length, 0)
    return False


def _concat(m: Match) -> Result:
    """concat of one part, or of adjacent slices of one tensor."""
    parts = m.root.inputs
    if len(parts) == 1:
        return m.if_same(parts[0])
    whole = parts[0].node.inputs[0] if parts[0].node.op.name == "narrow" else None
    if whole is None or any(p.node.op.name != "narrow" for p in parts):
        return None
    if any(p.node.inputs[0] is not whole for p in parts):
        return None
    axis = normalize_axis(m.op().axis, whole.shape.rank)
    first = parts[0].node.op.start  # type: ignore[attr-defined]
    at: Dim = first
    for part in parts:
        narrow: object = part.node.op
        if normalize_axis(narrow.axis, whole.shape.rank) != axis or not same(narrow.start, at):  # type: ignore[attr-defined]
            return None
        at = at + part.shape.dims[axis]
    unchanged = m.if_same(whole)
    if unchanged is not None:
        return unchanged
    return m.g.narrow(whole, axis=axis, start=first, length=at - first)


def _flat_concat(m: Match) -> Result:
    """concat(concat(a, b), c) = concat(a, b, c), where the inner one has no other user."""
    rank = m.root.output.shape.rank
    axis = normalize_axis(m.op().axis, rank)
    parts: list[Value] = []
    for part in m.root.inputs:
        inner = part.node
        flat = (
            inner.op.name == "concat"
            and normalize_axis(inner.op.axis, rank) == axis  # type: ignore[attr-defined]
            and m.editor.uses(part) == 1
        )
        parts.extend(inner.inputs if flat else [part])
    if len(parts) == len(m.root.inputs):
        return None
    return m.g.concat(*parts, axis=axis)


def _reduced_ones(m: Match) -> Result:
    """A sum over axes of size 1 is the element itself."""
    source, result = m.x.shape, m.root.output.shape
    if source.dtype is not result.dtype or source.dtype.kind not in ("float", "int", "uint"):
        return None
    axes = m.op().axis
    reduced = range(source.rank) if axes is None else [a % source.rank for a in axes]
    if not all(same(source.dims[a], 1) for a in reduced):
        return None
    unchanged = m.if_same(m.x)
    return m.g.reshape(m.x, shape=result.dims) if unchanged is None else unchanged


def _no_padding(m: Match) -> Result:
    nothing = not any((*m.op().low, *m.op().high))
    return m.if_same(m.x) if nothing else None


def _joined_pads(m: Match) -> Result:
    """pad(x) + pad(y) = pad(concat(x, y)), where along one axis y begins where x ends and
    everything else is zeros: as cotangents of slices are added up."""
    sides = []
    for name, value in (("a", m.x), ("b", m.y)):
        record = m.op(name)
        axes = {i for ends in (record.low, record.high) for i, n in enumerate(ends) if n}
        if record.mode != "constant" or record.value != 0 or len(axes) != 1:
            return None
        if m.editor.uses(getattr(m, name)) != 1 or value.shape.dtype is not m.x.shape.dtype:
            return None
        sides.append((*axes, record, value))
    (axis, first, x), (other, second, y) = sides
    size = x.shape.dims[axis]
    if axis != other or not isinstance(size, int):
        return None
    if second.low[axis] < first.low[axis]:
        (first, x), (second, y) = (second, y), (first, x)
    if first.low[axis] + x.shape.dims[axis] != second.low[axis]:
        return None
    joined = m.g.concat(x, y, axis=axis)
    ends = first.low, second.high
    return m.g.pad(joined, low=ends[0], high=ends[1]) if any((*ends[0], *ends[1])) else joined


def _transposed_concat(m: Match) -> Result:
    """transpose(concat(a, b)) = concat(transpose(a), transpose(b)): each is copied once.

    Not of elementwise parts, as those of rotary embeddings: a region writes them in any order."""
    joined, axes = m.root.inputs[0], m.op().axes
    if m.editor.uses(joined) != 1 or any(p.node.op.is_elementwise for p in joined.node.inputs):
        return None
    axis = axes.index(normalize_axis(joined.node.op.axis, joined.shape.rank))  # type: ignore[attr-defined]
    parts = [m.g.transpose(part, axes=axes) for part in joined.node.inputs]
    return m.g.concat(*parts, axis=axis)


def _same_axes(m: Match) -> Result:
    rank = m.x.shape.rank
    once, again = ({a % rank for a in record.axis} for record in (m.op("y"), m.op()))
    return m.x if once == again else None


LAYOUT: tuple[Rule, ...] = (
    Rule("reshape to itself", op("reshape", "x"), _same),
    Rule("expand to itself", op("expand", "x"), _same),
    Rule("narrow to all", op("narrow", "x"), _same),
    Rule("slice of all", op("slice", "x", when=lambda o: all(s == 1 for s in o.steps)), _same),
    Rule("transpose to itself", op("transpose", "x"), _identity_transpose),
    Rule("reshape of reshape", op("reshape", op("reshape", "x")), _reshape),
    Rule("transpose of transpose", op("transpose", op("transpose", "x", name="y")), _transpose),
    Rule("expand of expand", op("expand", op("expand", "x")), _expand),
    Rule("narrow of narrow", op("narrow", op("narrow", "x", name="y")), _narrow),
    Rule("narrow of concat", op("narrow", having="concat"), _narrow_of_concat),
    Rule("concat of slices", op("concat"), _concat),
    Rule("concat of concat", op("concat", having="concat"), _flat_concat),
    Rule("reduction of one", op(("sum", "mean", "max", "min", "prod"), "x"), _reduced_ones),
    Rule("pad by nothing", op("pad", "x"), _no_padding),
    Rule(
        "sum of pads that meet",
        op("add", op("pad", "x", name="a"), op("pad", "y", name="b")),
        _joined_pads,
    ),
    Rule("transpose of concat", op("transpose", having="concat"), _transposed_concat),
    Rule("flip of flip", op("flip", op("flip", "x", name="y")), _same_axes),
)


def simplify(graph: Graph, on_fire: OnFire | None = None) -> Graph:
    """Apply all algebraic rules to a fixpoint."""
    return apply(graph, RULES, "simplify", on_fire=on_fire)


def _only(name: str) -> Callable[[Match], Result]:
    """The captured value, where it has the shape and type of the result."""
    return lambda m: m.if_same(getattr(m, name))


def _integer_zero(m: Match) -> Result:
    shape = m.root.output.shape
    if not shape.dtype.is_integer:
        return None  # NaN · 0 is NaN, inf − inf too
    return m.g.expand(m.g.constant(0, shape.dtype), shape=shape.dims)


def _square(m: Match) -> Result:
    if m.x.shape.dtype.kind == "bool" or m.if_same(m.x) is None:
        return None
    return m.g.square(m.x)


def _reciprocal(m: Match) -> Result:
    if not m.x.shape.dtype.is_float or m.if_same(m.x) is None:
        return None
    return m.g.reciprocal(m.x)


def _negated(m: Match) -> Result:
    if m.x.shape.dtype.kind == "uint" or m.if_same(m.x) is None:
        return None
    return m.g.neg(m.x)


def _relu(m: Match) -> Result:
    return None if m.if_same(m.x) is None else m.g.relu(m.x)


def _clamp(m: Match) -> Result:
    low, high = m.number("low"), m.number("high")
    if low is None or high is None or not low <= high or m.if_same(m.x) is None:
        return None
    if m.x.shape.dtype.is_integer and max(-low, high) >= 2**53:
        return None  # the attribute is a float, which cannot represent every large integer
    return m.g.clamp(m.x, low=low, high=high)


def _by_power_of_two(m: Match) -> Result:
    """x / c is x · (1/c) to the last bit when 1/c is exact."""
    shape = m.c.shape
    if not shape.dtype.is_float or shape.dtype is not m.root.output.shape.dtype:
        return None
    divisor = m.array("c").astype(np.float64)
    mantissa, exponent = np.frexp(divisor)
    # within the range of every float type wider than 8 bits, where no reciprocal is subnormal
    if not np.all((np.abs(mantissa) == 0.5) & (np.abs(exponent) <= 12)) or shape.dtype.bytes < 2:
        return None
    return m.g.mul(m.x, m.g.constant(1.0 / divisor, shape.dtype))


def _chosen(m: Match) -> Result:
    flags = m.array("c")
    shape = m.root.output.shape
    value = m.a if flags.all() else m.b if not flags.any() else None
    if value is None or value.shape.dtype is not shape.dtype:
        return None
    unchanged = m.if_same(value)
    return m.g.expand(value, shape=shape.dims) if unchanged is None else unchanged


def _without_expand(m: Match) -> Result:
    """Drop an expand that the op's own broadcasting does anyway."""
    operands = list(m.root.inputs)
    is_shorter = False
    wanted = m.root.output.shape
    for i, value in enumerate(operands):
        if value.node.op.name == "expand":
            shorter = [*operands[:i], value.node.inputs[0], *operands[i + 1 :]]
            dims = broadcast_dims(*[v.shape.dims for v in shorter])
            if Shape(dims, wanted.dtype).same_dims(wanted):
                operands, is_shorter = shorter, True
    return m.g.append(m.root.op, operands) if is_shorter else None


# A cast is exact when every value of the first type is one of the second.
_FLOAT_HOLDS_INT = {dt.f16: 1, dt.bf16: 1, dt.f32: 2, dt.f64: 4}  # ints of up to so many bytes
_FLOAT_HOLDS = {
    dt.f16: (dt.f8e4m3, dt.f8e5m2),
    dt.bf16: (dt.f8e4m3, dt.f8e5m2),
    dt.f32: (dt.f8e4m3, dt.f8e5m2, dt.f16, dt.bf16),
    dt.f64: (dt.f8e4m3, dt.f8e5m2, dt.f16, dt.bf16, dt.f32),
}


def represents(wide: DType, narrow: DType) -> bool:
    """Whether `wide` represents every value of `narrow` exactly."""
    if wide is narrow or narrow is dt.bool_:
        return True
    if wide.is_float:
        if narrow.is_integer:
            return narrow.bytes <= _FLOAT_HOLDS_INT.get(wide, 0)
        return narrow in _FLOAT_HOLDS.get(wide, ())
    if wide.is_integer and narrow.is_integer and wide.bytes > narrow.bytes:
        return narrow.kind == wide.kind or narrow.kind == "uint"
    return False


def _one_cast(m: Match) -> Result:
    source, between, target = m.x.shape.dtype, m.op("y").dtype, m.op().dtype
    if not represents(between, source) or target is dt.bool_:
        return None
    if source is target:
        return m.x
    if source.is_integer and between.is_float and target.is_integer:
        return None  # casts from floats saturate, casts from integers wrap
    return m.g.cast(m.x, dtype=target)


def _plain_matmul(m: Match) -> Result:
    """A dot_general that contracts the last axis of a with the one before the last of b."""
    a, b = m.root.inputs
    (batch, contract, _), (b_batch, b_contract, _) = m.op().axes(a.shape.rank, b.shape.rank)
    rank = a.shape.rank
    leading = tuple(range(rank - 2))
    if b.shape.rank != rank or rank < 2 or batch != leading or b_batch != leading:
        return None
    if contract != (rank - 1,) or b_contract != (rank - 2,):
        return None
    return m.if_same(m.g.matmul(a, b))


def _twice(ops: str) -> list[Rule]:
    """f(f(x)) = f(x)"""
    return [Rule(f"{k} twice", op(k, op(k, "x", name="y")), _only("y")) for k in ops.split()]


def _undone(ops: str) -> list[Rule]:
    """f(f(x)) = x"""
    return [Rule(f"{k} undone", op(k, op(k, "x")), _only("x")) for k in ops.split()]


def _sub(m: Match) -> Result:
    return m.g.sub(m.x, m.y)


def _add(m: Match) -> Result:
    return m.g.add(m.x, m.y)


BROADCASTING = ("where", *(n for n, c in REGISTRY.items() if issubclass(c, Binary)))

ARITHMETIC: tuple[Rule, ...] = (
    Rule("x + 0", op("add", "x", 0), _only("x")),
    Rule("x - 0", op("sub", "x", 0), _only("x")),
    Rule("x * 1", op("mul", "x", 1), _only("x")),
    Rule("x / 1", op("div", "x", 1), _only("x")),
    Rule("x * 0", op("mul", "x", 0), _integer_zero),  # integers only
    Rule("x - x", op("sub", "x", "x"), _integer_zero),  # integers only
    Rule("x * -1", op("mul", "x", -1), _negated),
    Rule("x * x", op("mul", "x", "x"), _square),
    Rule("x ^ 1", op("pow", "x", 1), _only("x")),
    Rule("x ^ 2", op("pow", "x", 2), _square),
    Rule("x ^ -1", op("pow", "x", -1), _reciprocal),
    Rule("x / 2^n", op("div", "x", const("c")), _by_power_of_two),
    Rule("x + -y", op("add", "x", op("neg", "y")), _sub),
    Rule("x - -y", op("sub", "x", op("neg", "y")), _add),
    Rule("max(x, 0)", op("maximum", "x", 0), _relu),
    Rule(
        "min(max(x, c), d)",
        op("minimum", op("maximum", "x", const("low")), const("high")),
        _clamp,
    ),
    Rule(
        "max(min(x, d), c)",
        op("maximum", op("minimum", "x", const("high")), const("low")),
        _clamp,
    ),
    Rule("x and true", op("logical_and", "x", 1), _only("x")),
    Rule("x or false", op("logical_or", "x", 0), _only("x")),
    Rule("where(c, x, x)", op("where", "c", "x", "x"), _only("x")),
    Rule("where(constant, a, b)", op("where", const("c"), "a", "b"), _chosen),
    Rule("cast to itself", op("cast", "x"), _only("x")),
    Rule("cast of exact cast", op("cast", op("cast", "x", name="y")), _one_cast),
    Rule("redundant expand of an operand", op(BROADCASTING, having="expand"), _without_expand),
    Rule("dot_general as matmul", op("dot_general"), _plain_matmul),
    *_twice("abs relu floor ceil round trunc"),
    *_undone("neg logical_not bitwise_not"),
)

RULES: tuple[Rule, ...] = ARITHMETIC + LAYOUT


MOST_BYTES = 1 << 16  # limit of a folded result that is larger than its operands


def fold(graph: Graph, most_bytes: int = MOST_BYTES) -> Graph:
    """Constant folding: evaluate nodes whose operands are constants, by the op's reference."""
    if not any(n.op.name in ("constant", "dim_value") for n in graph.nodes):
        return graph
    editor = Editor(graph, "fold")
    for node in list(graph.nodes):
        if _is_known(node) and _is_small(node, most_bytes):
            _fold(editor, node)
    return editor.finish()


def _is_known(node: Node) -> bool:
    op = node.op
    if op.is_source or op.has_effect or op.is_block:
        return False
    # iotas stay: fusion recognises masks by them
    if not node.inputs and op.name != "dim_value":
        return False
    if any(v.node.op.name != "constant" for v in node.inputs):
        return False
    return all(v.shape.is_static for v in node.outputs) and not op.has_symbols


def _is_small(node: Node, most_bytes: int) -> bool:
    size = sum(size_of(v) for v in node.outputs)
    return size <= most_bytes or size <= sum(size_of(v) for v in node.inputs)


def _fold(editor: Editor, node: Node) -> None:
    arrays = [v.node.op.data.array for v in node.inputs]  # type: ignore[attr-defined]
    try:
        result = node.op.reference(*arrays)
    except RlxError:
        return  # an index out of range, say: the run reports it with the node's origin
    results = result if isinstance(result, tuple) else (result,)
    with editor.building(node):
        pairs = zip(results, node.outputs, strict=True)
        values = [editor.graph.constant(Data(a, v.shape.dtype)) for a, v in pairs]
    for old, new in zip(node.outputs, values, strict=True):
        editor.replace(old, new)


def cse(graph: Graph) -> Graph:
    """Common subexpression elimination; nodes with effects are left alone."""
    editor: Editor | None = None
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        op = node.op
        if op.has_effect or (op.is_source and op.name != "constant") or _has_effect_inside(op):
            continue
        inputs = node.inputs
        if op.is_commutative and id(inputs[0]) > id(inputs[1]):
            key: Any = (op, inputs[1], inputs[0])
        else:
            key = (op, *inputs)
        first = seen.setdefault(key, node)
        if first is node:
            continue
        if editor is None:
            editor = Editor(graph, "cse")
        for old, new in zip(node.outputs, first.outputs, strict=True):
            editor.replace(old, new)
    return graph if editor is None else editor.finish()


def _has_effect_inside(op: Op) -> bool:
    """Whether a subgraph has an effect: such a node is not a common subexpression."""
    for field in op.fields:
        body = getattr(op, field)
        if isinstance(body, Body) and any(n.op.has_effect for n in body.graph.nodes):
            return True
    return False


def dce(graph: Graph) -> Graph:
    """Dead code elimination; inputs, params, states and state updates are never dead."""
    needed: set[Node] = {n for n in graph.nodes if is_kept(n)}
    needed.update(v.node for v in graph.outputs)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update([v.node for v in node.inputs])
    if len(needed) < len(graph.nodes):
        graph.nodes = [n for n in graph.nodes if n in needed]
        for i, node in enumerate(graph.nodes):
            node.id = i
    return graph
