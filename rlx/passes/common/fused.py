"""Fused ops taken apart again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.attrs import MaskKind
from rlx.ir.blocks._parts import activate, cast, wide
from rlx.ir.dtype import promote
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.passes.common.registry import common


@common("fused_matmul_bias_act")
def fused_matmul_bias_act(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    x, w, *rest = (wide(g, v) for v in inputs)
    bias, residual = op.extras(*rest)
    y = g.matmul(x, w)
    if bias is not None:
        y = g.add(y, bias)
    y = activate(g, y, op.activation)
    if residual is not None:
        y = g.add(y, residual)
    return cast(g, y, promote(*[v.shape.dtype for v in inputs]))


@common("fused_swiglu")
def fused_swiglu(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    x, gate, up = (wide(g, v) for v in inputs)
    y = g.mul(activate(g, g.matmul(x, gate), op.activation), g.matmul(x, up))
    return cast(g, y, promote(*[v.shape.dtype for v in inputs]))


@common("fused_gated_act")
def fused_gated_act(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    (joined,) = inputs
    axis = joined.shape.rank - 1
    half = joined.shape.dims[axis] // 2
    parts = [g.narrow(joined, axis=axis, start=s, length=half) for s in (0, half)]
    gate, up = (wide(g, p) for p in parts)
    return cast(g, g.mul(activate(g, gate, op.activation), up), joined.shape.dtype)


@common("elementwise_region")
def elementwise_region(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    """The nodes of the region, one by one."""
    given = iter(inputs)
    values: dict[Value, Value] = {}
    for node in op.body.graph.nodes:
        if node.op.name == "input":
            values[node.output] = next(given)
            continue
        new = g.append_node(node.op, [values[v] for v in node.inputs])
        values.update(zip(node.outputs, new.outputs, strict=True))
    return tuple([values[v] for v in op.body.graph.outputs])


# -- sub-layers ------------------------------------------------------------------------------


@common("fused_attention_block")
def fused_attention_block(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    parts = _parts(g, op, inputs)
    return cast(g, _attended(g, op, parts), _result(op, inputs))


@common("fused_transformer_layer")
def fused_transformer_layer(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    parts = _parts(g, op, inputs)
    h = _attended(g, op, parts)
    normed = _normed(g, op, h, parts["ffn_gamma"], parts.get("ffn_beta"))
    plain = "none" if op.gated else op.activation
    hidden = _dense(g, normed, parts["w_up"], parts.get("up_bias"), plain)
    if op.gated:
        gate = _dense(g, normed, parts["w_gate"], parts.get("gate_bias"), op.activation)
        hidden = g.mul(gate, hidden)
    y = g.add(h, _dense(g, hidden, parts["w_down"], parts.get("down_bias")))
    return cast(g, y, _result(op, inputs))


def _result(op: Any, inputs: Sequence[Value]) -> Any:
    """The promoted type of what takes part in it: tables and masks do not."""
    pairs = zip(op.operand_names(), inputs, strict=True)
    return promote(*[v.shape.dtype for n, v in pairs if n not in ("cos", "sin", "mask")])


def _parts(g: Graph, op: Any, inputs: Sequence[Value]) -> dict[str, Value]:
    """Operands by name, in the type everything is computed in."""
    names = op.operand_names()
    result = _result(op, inputs)
    found = {}
    for name, v in zip(names, inputs, strict=True):
        flags = name == "mask" and op.mask_kind == MaskKind.CUSTOM
        found[name] = v if flags else wide(g, v) if result.bytes < 4 else cast(g, v, result)
    return found


def _normed(g: Graph, op: Any, x: Value, gamma: Value, beta: Value | None) -> Any:
    kind = "rms_norm" if op.norm == "rms" else "layer_norm"
    return g.apply(kind, x, gamma, beta, eps=op.eps)


def _dense(g: Graph, x: Value, w: Value, bias: Value | None, activation: str = "none") -> Any:
    y = g.matmul(x, w)
    return activate(g, y if bias is None else g.add(y, bias), activation)


def _attended(g: Graph, op: Any, parts: dict[str, Value]) -> Any:
    """x + attention of the normed x."""
    x = parts["x"]
    normed = _normed(g, op, x, parts["gamma"], parts.get("beta"))
    joined = _dense(g, normed, parts["wqkv"], parts.get("qkv_bias"))
    inner, kv = op.num_heads * op.head_dim, op.num_kv_heads * op.head_dim
    q, k, v = (
        g.narrow(joined, axis=2, start=start, length=length)
        for start, length in ((0, inner), (inner, kv), (inner + kv, kv))
    )
    q = _turned(g, op, q, parts, "q_gamma")
    k = _turned(g, op, k, parts, "k_gamma")
    mask = [parts["mask"]] if "mask" in parts else []
    mixed = g.append(op.attention(), [q, k, v, *mask])
    return g.add(x, _dense(g, mixed, parts["wo"], parts.get("out_bias")))


def _turned(g: Graph, op: Any, x: Value, parts: dict[str, Value], gamma: str) -> Value:
    """Queries or keys, each head normed and rotated where the op says so."""
    batch, length, width = x.shape.dims
    if gamma in parts:
        heads = g.reshape(x, shape=(batch, length, width // op.head_dim, op.head_dim))
        x = g.reshape(g.rms_norm(heads, parts[gamma], eps=op.eps), shape=x.shape.dims)
    rope = op.rope()
    return x if rope is None else g.append(rope, [x, parts["cos"], parts["sin"]])
