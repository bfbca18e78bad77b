"""Fusion of matmuls with what is around them, and the activations that are part of it.

- Decomposed activations are recognised: one pattern is the decomposition of the op itself, other
  common forms are listed here.
- Epilogues: matmul + bias + activation + residual -> fused_matmul_bias_act, in stages.
- Horizontal fusion: matmuls of one input with several weights become one matmul. The concatenated
  weight is param-only, so `prepare` makes it once; the results are views.
- Gated linear units, act(x·gate) * (x·up): SwiGLU, GeGLU and their like.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from rlx.ir.blocks.linear import dense
from rlx.ir.dim import same
from rlx.ir.dtype import f32
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.op import REGISTRY, Op, on_register
from rlx.ir.ops.activation import activation_ops, is_default
from rlx.ir.ops.composite import decomposed
from rlx.ir.ops.fused import FusedMatMulBiasAct
from rlx.ir.shape import Shape
from rlx.passes.pattern import Match, OpPattern, Part, const, number, op
from rlx.passes.report import FusionReport
from rlx.passes.rewrite import Editor, OnFire, Result, Rule


def _becomes(name: str) -> Callable[[Match], Result]:
    def result(m: Match) -> Result:
        if not m.x.shape.dtype.is_float or m.if_same(m.x) is None:
            return None
        return m.g.apply(name, m.x)

    return result


def _scaled(factor: float) -> list[OpPattern]:
    """x · factor, also written as x / (1/factor)."""
    return [op("mul", "x", factor), op("div", "x", 1 / factor)]


_ROOT = math.sqrt(2 / math.pi)
_CUBES: list[Any] = [op("mul", "x", op("square", "x")), op("pow", "x", 3)]

# the part of gelu_tanh inside tanh: √(2/π)·(x + 0.044715·x³)
_TANH_ARGUMENTS: list[OpPattern] = [
    *(op("mul", op("add", "x", op("mul", cube, 0.044715)), _ROOT) for cube in _CUBES),
    # √(2/π)·x·(1 + 0.044715·x²)
    op("mul", op("mul", "x", _ROOT), op("add", op("mul", op("square", "x"), 0.044715), 1)),
    op("mul", op("mul", "x", op("add", op("mul", op("square", "x"), 0.044715), 1)), _ROOT),
]


def _half_of_x_times(gate: OpPattern) -> list[OpPattern]:
    """0.5 · x · gate, in any order."""
    return [
        op("mul", op("mul", "x", 0.5), gate),
        op("mul", op("mul", "x", gate), 0.5),
        op("mul", "x", op("mul", gate, 0.5)),
    ]


_ERF_GATES = [op("add", op("erf", arg), 1) for arg in _scaled(math.sqrt(0.5))]
_TANH_GATES = [op("add", op("tanh", arg), 1) for arg in _TANH_ARGUMENTS]
_ONE_PLUS_EXP = op("add", op("exp", op("neg", "x")), 1)


def _rules(name: str, patterns: list[OpPattern]) -> list[Rule]:
    return [Rule(f"decomposed {name}", p, _becomes(name), owns=True) for p in patterns]


_OTHERS: dict[str, list[OpPattern]] = {
    "sigmoid": [op("reciprocal", _ONE_PLUS_EXP), op("div", 1, _ONE_PLUS_EXP)],
    "silu": [op("div", "x", _ONE_PLUS_EXP)],
    "gelu": [p for gate in _ERF_GATES for p in _half_of_x_times(gate)],
    "gelu_tanh": [p for gate in _TANH_GATES for p in _half_of_x_times(gate)],
}


def formula_pattern(record: Op) -> OpPattern:
    """The decomposition of an elementwise op of one real tensor, as a pattern of `x`."""
    graph = decomposed(record, (Shape([1], f32),))
    assert graph is not None

    def part(value: Value) -> Part:
        node = value.node
        if node.op.name == "input":
            return "x"
        known = number(value)
        if known is not None:
            return known
        same = node.op.__eq__ if node.op.fields else None  # attributes must match too
        return op(node.op.name, *map(part, node.inputs), when=same)

    pattern = part(graph.outputs[0])
    assert isinstance(pattern, OpPattern)
    return pattern


def _rules_for(name: str) -> list[Rule]:
    own = [formula_pattern(REGISTRY[name]())] if REGISTRY[name].fuses_formula else []
    return _rules(name, own + _OTHERS.get(name, []))


# A list, since ops registered later add their rules.
ACTIVATION: list[Rule] = [rule for name in _OTHERS for rule in _rules_for(name)]


def _add_rules(cls: type[Op]) -> None:
    if cls.fuses_formula and cls.name not in _OTHERS:
        ACTIVATION.extend(_rules_for(cls.name))


on_register(_add_rules)


# -- epilogues -------------------------------------------------------------------------------------

FUSED = "fused_matmul_bias_act"


def _fused(matmul: Value) -> tuple[FusedMatMulBiasAct, list[Value]]:
    """The fused op and the operands of a matmul, fused already or not."""
    record = matmul.node.op
    known = record if isinstance(record, FusedMatMulBiasAct) else FusedMatMulBiasAct()
    return known, list(matmul.node.inputs)


def is_linear(matmul: Value) -> bool:
    """Whether a matmul is rows times one float matrix, as the fused op requires."""
    x, w = matmul.node.inputs[:2]
    floats = x.shape.dtype.is_float and w.shape.dtype.is_float
    return w.shape.rank == 2 and x.shape.rank >= 2 and floats


def as_vector(m: Match, value: Value, size: Any) -> Value | None:
    """`value` as [size], when its other axes are 1."""
    dims = value.shape.dims
    if not dims or not same(dims[-1], size) or any(not same(d, 1) for d in dims[:-1]):
        return None
    return value if len(dims) == 1 else m.g.reshape(value, shape=(size,))


def _bias(m: Match) -> Result:
    record, operands = _fused(m.p)
    out = m.root.output.shape
    if not is_linear(m.p) or record.activation != "none" or record.has_bias or record.has_residual:
        return None
    if not m.same_precision(m.p):
        return m.miss(f"{m.bias.shape.dtype} is wider than the matmul, which is rounded first")
    if m.bias.shape.same_dims(m.p.shape) and not same(m.bias.shape.num_elements, out.dims[-1]):
        return None  # that is a residual
    bias = as_vector(m, m.bias, out.dims[-1])
    if bias is None or not bias.shape.dtype.is_float:
        return None
    return _build(m, [*operands, bias], record, has_bias=True)


def _activation(m: Match) -> Result:
    record, operands = _fused(m.p)
    if not is_linear(m.p) or record.activation != "none" or record.has_residual:
        return None
    if not is_default(m.op()):
        return m.miss(f"{m.op()} is not the default {m.op().name}")
    return _build(m, operands, record, activation=m.op().name)


def _residual(m: Match) -> Result:
    record, operands = _fused(m.p)
    if not is_linear(m.p) or record.has_residual:
        return None
    if not m.residual.shape.same_dims(m.p.shape):
        return m.miss(f"{m.residual.shape} is neither a bias nor a residual of {m.p.shape}")
    if not m.residual.shape.dtype.is_float or not m.same_precision(m.p):
        return None
    return _build(m, [*operands, m.residual], record, has_residual=True)


def _build(m: Match, operands: list[Value], record: FusedMatMulBiasAct, **more: Any) -> Result:
    return m.if_same(m.g.append(record.replace(**more), operands))


def _lora(m: Match) -> Result:
    scale = m.number("scale")
    parts = (m.x, m.w, m.a, m.b)
    if scale is None or any(v.shape.rank != 2 for v in parts[1:]):
        return None
    if not all(v.shape.dtype.is_float for v in parts) or not m.same_precision(*parts):
        return None
    return m.if_same(m.g.lora_matmul(*parts, scale=scale))


def _conv_bias(m: Match) -> Result:
    """conv + bias [O, 1, ...] -> conv with a bias"""
    x, w = m.p.node.inputs[:2]
    channels, spatial = w.shape.dims[0], w.shape.rank - 2
    dims = m.bias.shape.dims
    if len(m.p.node.inputs) != 2 or not m.same_precision(m.p) or not m.bias.shape.dtype.is_float:
        return None
    if m.bias.shape.rank > spatial + 2 or len(dims) <= spatial:
        return None
    *before, size = dims[: len(dims) - spatial]
    after = dims[len(dims) - spatial :]
    if not same(size, channels) or any(not same(d, 1) for d in (*before, *after)):
        return None
    bias = m.g.reshape(m.bias, shape=(channels,))
    return m.if_same(m.g.append(m.op("p"), [x, w, bias]))


_MATMULS = ("matmul", FUSED)

_LORA = op(
    "add",
    op("matmul", "x", "w"),
    op("mul", op("matmul", op("matmul", "x", "a"), "b"), const("scale")),
)

LINEAR: tuple[Rule, ...] = (
    Rule("decomposed lora", _LORA, _lora, owns=True),
    Rule("matmul + bias", op("add", op("matmul", name="p"), "bias"), _bias, owns=True),
    Rule("matmul + activation", op(activation_ops, op(_MATMULS, name="p")), _activation, True),
    Rule("matmul + residual", op("add", op(_MATMULS, name="p"), "residual"), _residual, True),
    Rule("conv + bias", op("add", op("conv", name="p"), "bias"), _conv_bias, owns=True),
)


# -- horizontal fusion -----------------------------------------------------------------------------

NAME = "matmuls sharing their input"
_OPS = ("matmul", "fused_matmul_bias_act", "dequant_matmul")
_RULE = Rule(NAME, op(_OPS), lambda m: None)


def share_inputs(
    graph: Graph, report: FusionReport | None = None, on_fire: OnFire | None = None
) -> Graph:
    """Merge matmuls of the same x that differ in their param-only weights alone."""
    matmuls: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        if node.op.name in _OPS:
            matmuls.setdefault(node.inputs[0], []).append(node)
    shared = [nodes for nodes in matmuls.values() if len(nodes) > 1]
    if not shared:
        return graph
    editor = Editor(graph, "fuse")
    for nodes in shared:
        for group in _groups(editor, nodes, report):
            new = _merge(editor, group)
            if report is not None:
                report.add(NAME, group[0].node.origin)
            if on_fire is not None:
                on_fire("fuse", _RULE, group[0].node, new)
    return editor.finish()


class _MatMul(NamedTuple):
    node: Node
    weights: tuple[Value, ...]  # to concatenate: w, or packed w, scale, zp
    bias: Value | None
    activation: str
    strassen: bool = False

    @property
    def size(self) -> Any:
        """Columns of the result."""
        return self.node.output.shape.dims[-1]


def _matmul(node: Node) -> _MatMul | None:
    record: Any = node.op
    if record.name == "dequant_matmul":
        return _MatMul(node, node.inputs[1:], None, "none")
    w = node.inputs[1]
    if w.shape.rank != 2 or node.inputs[0].shape.rank < 2:
        return None
    if record.name == "matmul":
        return _MatMul(node, (w,), None, "none")
    if record.has_residual:
        return None
    bias = node.inputs[2] if record.has_bias else None
    return _MatMul(node, (w,), bias, record.activation, record.strassen)


def concat_obstacle(editor: Editor, value: Value) -> str:
    """Why a weight should not be concatenated with others; empty when it may."""
    if not editor.is_param_only(value):
        return "a weight is not a parameter"
    while True:
        if editor.uses(value) != 1:
            return "a weight is used elsewhere and would be kept twice"
        if not value.node.op.is_view:
            return ""
        value = value.node.inputs[0]


def _groups(editor: Editor, nodes: list[Node], report: FusionReport | None) -> list[list[_MatMul]]:
    """Groups of matmuls that can be merged."""
    groups: dict[Any, list[_MatMul]] = {}
    for node in nodes:
        matmul = _matmul(node)
        if matmul is None:
            continue
        tensors = [*matmul.weights, *([] if matmul.bias is None else [matmul.bias])]
        why = next((w for v in tensors if (w := concat_obstacle(editor, v))), "")
        if why:
            if report is not None:
                report.miss(NAME, why, node.origin)
            continue
        scheme = node.op if node.op.name == "dequant_matmul" else None
        types = tuple([v.shape.dtype for v in matmul.weights])
        key = (scheme, types, matmul.activation, matmul.strassen, node.output.shape.dtype)
        groups.setdefault(key, []).append(matmul)
    return [g for g in groups.values() if len(g) > 1]


def _merge(editor: Editor, group: list[_MatMul]) -> list[Node]:
    first = min((p.node for p in group), key=lambda n: n.id)
    with editor.building(first) as new:
        slices = _build_merged(editor.graph, group)
    for matmul, part in zip(group, slices, strict=True):
        editor.replace(matmul.node.output, part)
    return new


def _build_merged(g: Graph, group: list[_MatMul]) -> list[Value]:
    node = group[0].node
    x = node.inputs[0]
    packed = node.op.name == "dequant_matmul"
    columns = zip(*[p.weights for p in group], strict=True)
    weights = [g.concat(*part, axis=0 if packed else 1) for part in columns]
    merged = g.append(node.op, [x, *weights]) if packed else _merged(g, x, weights[0], group)
    axis = merged.shape.rank - 1
    slices, start = [], 0
    for p in group:
        slices.append(g.narrow(merged, axis=axis, start=start, length=p.size))
        start = start + p.size
    return slices


def _merged(g: Graph, x: Value, w: Value, group: list[_MatMul]) -> Any:
    activation, strassen = group[0].activation, group[0].strassen
    given = [p.bias for p in group if p.bias is not None]
    if not given:
        return dense(g, x, w, None, activation, strassen)
    # a matmul without a bias gets a zero bias
    biases = [
        p.bias if p.bias is not None
        else g.expand(g.constant(0.0, given[0].shape.dtype), shape=(p.size,))
        for p in group
    ]  # fmt: skip
    bias = g.concat(*biases, axis=0)
    return dense(g, x, w, bias, activation, strassen)


# -- gated linear units ----------------------------------------------------------------------------


def _gate_activation(m: Match) -> str | None:
    """The name of the activation; "none" where there is none."""
    if not m.has("act"):
        return "none"
    return m.op("act").name if is_default(m.op("act")) else None


def _plain(m: Match) -> Result:
    """Two matmuls of one x, no bias -> fused_swiglu"""
    activation = _gate_activation(m)
    if activation is None or not is_linear(m.gate) or not is_linear(m.up):
        return None
    if not m.same_precision(m.gate, m.up):
        return m.miss(f"gate is {m.gate.shape.dtype}, up {m.up.shape.dtype}")
    if not m.g_w.shape.same_dims(m.u_w.shape):
        return m.miss(f"gate {m.g_w.shape} and up {m.u_w.shape} differ")
    return m.if_same(m.g.fused_swiglu(m.x, m.g_w, m.u_w, activation=activation))


def _biased(m: Match) -> Result:
    """With biases -> one matmul with the weights concatenated, then fused_gated_act"""
    activation = _gate_activation(m)
    if activation is None or not is_linear(m.gate) or not is_linear(m.up):
        return None
    if not m.same_precision(m.gate, m.up):
        return m.miss(f"gate is {m.gate.shape.dtype}, up {m.up.shape.dtype}")
    if not m.g_w.shape.same_dims(m.u_w.shape) or m.g_w.shape.dtype is not m.u_w.shape.dtype:
        return m.miss(f"gate {m.g_w.shape} and up {m.u_w.shape} differ")
    size = m.g_w.shape.dims[1]
    biases = [as_vector(m, b, size) for b in (m.g_b, m.u_b)]
    if None in biases or m.g_b.shape.dtype is not m.u_b.shape.dtype:
        return None
    why = _obstacle(m, [m.g_w, m.u_w, m.g_b, m.u_b])
    if why:
        return m.miss(why)
    joined = m.g.matmul(m.x, m.g.concat(m.g_w, m.u_w, axis=1))
    joined = m.g.add(joined, m.g.concat(*biases, axis=0))
    return m.if_same(m.g.fused_gated_act(joined, activation=activation))


def _packed(m: Match) -> Result:
    """Quantised weights of one scheme -> their rows concatenated, then fused_gated_act"""
    activation = _gate_activation(m)
    gate, up = m.gate.node, m.up.node
    if activation is None or gate.inputs[0] is not up.inputs[0]:
        return None
    if gate.op != up.op:
        return m.miss(f"gate is {gate.op}, up is {up.op}")
    if not gate.inputs[1].shape.same_dims(up.inputs[1].shape):
        return m.miss(f"gate {gate.inputs[1].shape} and up {up.inputs[1].shape} differ")
    why = _obstacle(m, [*gate.inputs[1:], *up.inputs[1:]])
    if why:
        return m.miss(why)
    pairs = zip(gate.inputs[1:], up.inputs[1:], strict=True)
    weights = [m.g.concat(a, b, axis=0) for a, b in pairs]
    joined = m.g.append(gate.op, [gate.inputs[0], *weights])
    return m.if_same(m.g.fused_gated_act(joined, activation=activation))


def _obstacle(m: Match, weights: list[Value]) -> str:
    """Why the weights should not be concatenated; empty when they may."""
    return next((why for w in weights if (why := concat_obstacle(m.editor, w))), "")


def _halves(m: Match) -> Result:
    """The two halves of one tensor -> fused_gated_act"""
    activation = _gate_activation(m)
    x: Value = m.x
    rank = x.shape.rank
    gate, up = m.op("gate"), m.op("up")
    half = x.shape.dims[-1] // 2
    fits = (
        gate.axis % rank == up.axis % rank == rank - 1
        and same(gate.start, 0)
        and same(up.start, half)
        and same(gate.length, half)
        and same(half * 2, x.shape.dims[-1])
        and x.shape.dtype.is_float
    )
    if activation is None or not fits:
        return None
    return m.if_same(m.g.fused_gated_act(x, activation=activation))


def _table(name: str, gate: Any, up: Any, result: Any, bare: bool) -> list[Rule]:
    """The rule with an activation on the gate; with `bare` also the one without."""
    rules = [Rule(name, op("mul", op(activation_ops, gate, name="act"), up), result, owns=True)]
    if bare:
        rules.append(Rule(name, op("mul", gate, up), result, owns=True))
    return rules


_GATE, _UP = op("matmul", "x", "g_w", name="gate"), op("matmul", "x", "u_w", name="up")
_Q_GATE, _Q_UP = op("dequant_matmul", name="gate"), op("dequant_matmul", name="up")

GLU: tuple[Rule, ...] = (
    *_table("gated linear unit", _GATE, _UP, _plain, bare=True),
    *_table(
        "gated linear unit with biases",
        op("add", _GATE, "g_b"),
        op("add", _UP, "u_b"),
        _biased,
        bare=False,
    ),
    *_table("gated linear unit, quantised", _Q_GATE, _Q_UP, _packed, bare=False),
    *_table(
        "gated halves",
        op("narrow", "x", name="gate"),
        op("narrow", "x", name="up"),
        _halves,
        bare=True,
    ),
)
