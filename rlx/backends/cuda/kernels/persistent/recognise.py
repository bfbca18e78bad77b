"""Which part of a decode step is a dense model: its layers, from their attention, and the head."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rlx.backends.cuda.kernels.persistent.shape import WEIGHTS
from rlx.ir.attrs import MaskKind
from rlx.ir.dim import Dim
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.ir.node import Node, Value
from rlx.support.records import dataclass

PACKED, LOOKUP = "packed_planes_matmul", "packed_planes_gather"


class Unsuited(Exception):
    """Why a program stays a graph of launches."""


@dataclass(frozen=True)
class Weight:
    """A matrix of bf16, or of packed rows; or some rows of one, from `first` on."""

    value: Value
    outputs: int
    inputs: int
    scheme: str = ""
    first: int = 0
    rows: int | None = None


@dataclass(frozen=True)
class Layer:
    """The values of a layer."""

    gain: Value
    qkv: Weight
    other_v: Weight | None  # where v is a product of its own, with weights of another type
    query_gain: Value | None
    key_gain: Value | None
    keys: Value
    values: Value
    out: Weight
    second_gain: Value
    gate: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True)
class Model:
    """What is recognised of a program."""

    x: Value
    layers: tuple[Layer, ...]
    gain: Value
    head: Weight
    logits: Value
    cos: Value
    sin: Value
    position: Dim
    nodes: frozenset[Node]  # those that the kernel does
    eps: float
    head_eps: float
    scale: float
    lookup: Node | None  # the lookup in an embedding that gives x, if the kernel does it


def recognise(graph: Graph, lir: Lir) -> Model:
    attentions = [n for n in graph.nodes if n.op.name == "attention"]
    if not attentions:
        raise Unsuited("there is no attention")
    users = graph.users()
    found = [_Layer(node, users) for node in attentions]
    for before, after in pairwise(found):
        if before.result is not after.x:
            raise Unsuited("layers do not follow each other")
    head = _Head(found[-1].result, users)
    _require_same([part.settings for part in found])
    for sizes in zip(*[[_size(w) for w in part.weights] for part in found], strict=True):
        _require_same(sizes)
    if found[0].eps != head.eps:
        raise Unsuited("norms differ in eps")
    seen = {node for part in (*found, head) for node in part.seen}
    nodes = _between(head.logits, found[0].x)
    _require_alone(nodes, seen, head.logits, users, lir)
    lookup = _lookup(found[0].x, nodes, users, lir)
    if lookup is not None:
        nodes |= {found[0].x.node, lookup}
    return Model(
        found[0].x, tuple([part.layer for part in found]), head.gain, head.matrix, head.logits,
        found[0].cos, found[0].sin, found[0].position, frozenset(nodes), found[0].eps,
        found[0].head_eps, found[0].scale, lookup,
    )  # fmt: skip


def _lookup(x: Value, nodes: set[Node], users: Any, lir: Lir) -> Node | None:
    """The lookup of one token in an embedding of bf16 or packed rows, if it gives x and nothing
    else reads it."""
    node = found = x.node
    if node.op.name == "cast" and node.inputs[0].node.op.name == "gather":
        found = node.inputs[0].node
    elif node.op.name != LOOKUP:
        return None
    op: Any = found.op
    table, ids = found.inputs
    plain = table.node.op.name == "param" and (
        op.scheme.name in WEIGHTS
        if found.op.name == LOOKUP
        else table.dtype.name == "bf16" and op.axis == 0
    )
    one = ids.dtype.name == "i32" and all(d == 1 for d in ids.shape.dims)
    alone = set(users.get(x, [])) <= nodes
    if found is not node:
        alone = alone and set(users.get(found.output, [])) == {node}
    outside = not {found.output, x} & set(lir.outputs)
    same_phase = lir.phases.get(found) is lir.phases.get(node) is lir.phases.get(next(iter(nodes)))
    return found if plain and one and alone and outside and same_phase else None


def _size(weight: Weight | Value) -> Any:
    if isinstance(weight, Weight):
        return weight.outputs, weight.inputs
    return weight.shape


def _require_same(settings: Sequence[Any]) -> None:
    if any(s != settings[0] for s in settings):
        raise Unsuited("layers differ")


def _between(logits: Value, x: Value) -> set[Node]:
    """The nodes that logits depend on, back to x."""
    found: set[Node] = set()
    waiting = [logits]
    while waiting:
        value = waiting.pop()
        if value is not x and value.node not in found and not value.node.op.is_source:
            found.add(value.node)
            waiting += value.node.inputs
    return found


def _require_alone(nodes: set[Node], seen: set[Node], logits: Value, users: Any, lir: Lir) -> None:
    """All nodes are known, and nothing else reads what is between them."""
    for node in nodes - seen:
        if not node.op.is_view and node.op.name != "cast":
            raise Unsuited(f"there is {node.op.name}")
    phases = {lir.phases.get(node) for node in nodes}
    if len(phases) > 1:
        raise Unsuited("the layers are in several phases")
    outputs = set(lir.outputs)
    for node in nodes:
        for value in node.outputs:
            outside = [user for user in users.get(value, []) if user not in nodes]
            if value is not logits and (value in outputs or outside):
                raise Unsuited(f"{value.name} is read elsewhere")


class _Part:
    """A piece of the graph that is recognised; `seen` are its nodes."""

    def __init__(self, users: Any) -> None:
        self.users, self.seen = users, list[Node]()

    def require(self, node: Node, *names: str) -> Node:
        if node.op.name not in names:
            raise Unsuited(f"there is {node.op.name} instead of {' or '.join(names)}")
        self.seen.append(node)
        return node

    def only_user(self, value: Value) -> Node:
        found = self.users.get(value, [])
        if len(found) != 1:
            raise Unsuited(f"{value.node.op.name} is read {len(found)} times")
        node: Node = found[0]
        return node

    def weight(self, value: Value) -> Weight:
        """The matrix [rows, columns] of a transposed one."""
        node = value.node
        if node.op.name != "transpose" or node.inputs[0].node.op.name != "param":
            raise Unsuited("a weight is not stored in rows")
        found = node.inputs[0]
        if found.dtype.name != "bf16" or len(found.shape.dims) != 2:
            raise Unsuited(f"weights are {found.dtype.name}, not bf16")
        rows, columns = found.shape.static_dims
        return Weight(found, rows, columns)

    def packed(self, node: Node) -> Weight:
        """The packed weight of a product."""
        op: Any = node.op
        x, w = node.inputs[:2]
        scheme = str(op.scheme.name)
        if scheme not in WEIGHTS or w.node.op.name != "param":
            raise Unsuited(f"weights are {scheme}")
        if x.shape.dims[-1] % 256:  # type: ignore[operator]
            raise Unsuited("rows of packed weights are no multiples of 256")
        return Weight(w, w.shape.static_dims[0], int(x.shape.dims[-1]), scheme)  # type: ignore[arg-type]

    def product(self, node: Node) -> tuple[Value, Weight]:
        """What a plain product multiplies: rows and weights."""
        self.require(node, "matmul", PACKED)
        op: Any = node.op
        x, w = node.inputs[:2]
        self.require_row(x)
        if node.op.name != PACKED:
            return x, self.weight(w)
        if len(node.inputs) > 2 or op.gate:
            raise Unsuited("a product has a gate or a residual")
        return x, self.packed(node)

    def gated(self, node: Node) -> tuple[Weight, Weight]:
        """Gate and up of a product that applies the gate."""
        self.require(node, "fused_swiglu", PACKED)
        op: Any = node.op
        is_packed = node.op.name == PACKED
        activation, extra = (op.gate, 2) if is_packed else (op.activation, 3)
        if activation != "silu" or len(node.inputs) != extra:
            raise Unsuited("the FFN is not gated by silu")
        if not is_packed:
            gate, up = node.inputs[1:]
            return self.weight(gate), self.weight(up)
        both = self.packed(node)
        half = both.outputs // 2
        first, second = (
            Weight(both.value, half, both.inputs, both.scheme, i * half, half) for i in range(2)
        )
        return first, second

    def norm(self, value: Value) -> tuple[Value, Value, float]:
        """x, gain and eps of a norm."""
        node = self.require(self.unviewed(value), "rms_norm")
        op: Any = node.op
        x, gain = node.inputs
        self.require_gain(gain)
        return x, gain, float(op.eps)

    def require_gain(self, gain: Value) -> None:
        if gain.dtype.name != "f32" or gain.node.op.name != "param":
            raise Unsuited(f"gains are {gain.dtype.name}, not f32")

    def require_row(self, x: Value) -> None:
        """One row of f32."""
        dims = x.shape.dims
        if x.dtype.name != "f32" or any(d != 1 for d in dims[:-1]):
            raise Unsuited(f"{x.shape} instead of one row of f32")

    def unviewed(self, value: Value) -> Node:
        """What a value is a view of that is no smaller."""
        node = value.node
        while node.op.is_view and node.inputs[0].shape.dims[-1] == value.shape.dims[-1]:
            node = node.inputs[0].node
        return node

    def residual(self, node: Node) -> tuple[Value, Weight, Value]:
        """x, weights and residual of a product that adds one."""
        self.require(node, "fused_matmul_bias_act", PACKED)
        op: Any = node.op
        if node.op.name == PACKED:
            if len(node.inputs) != 3 or op.gate:
                raise Unsuited("a product adds nothing")
            self.require_row(node.inputs[0])
            return node.inputs[0], self.packed(node), node.inputs[2]
        if len(node.inputs) != 3 or not op.has_residual or op.activation not in ("none", "", None):
            raise Unsuited("a product has a bias or an activation")
        x, w, residual = node.inputs
        self.require_row(x)
        return x, self.weight(w), residual


class _Layer(_Part):
    """A layer, from its attention."""

    def __init__(self, attention: Node, users: Any) -> None:
        super().__init__(users)
        op: Any = self.require(attention, "attention").op
        plain = (op.softcap, op.kv_scheme, op.has_sinks, op.kv_layout) == (0.0, None, False, "bhsd")
        if (
            not plain
            or len(attention.inputs) != 3
            or op.mask_kind not in (MaskKind.CAUSAL, MaskKind.NONE)
        ):
            raise Unsuited("attention is not plain")
        self.scale = op.scale if op.scale is not None else op.head_dim**-0.5
        heads, kv, dim = op.num_heads, op.num_kv_heads, op.head_dim
        self.position, self.head_eps = 0, 0.0
        q, query_gain = self._rotated(attention.inputs[0], 0, heads * dim, first=True)
        keys, new = self._cache(attention.inputs[1])
        k, key_gain = self._rotated(new, heads * dim, kv * dim)
        values, new = self._cache(attention.inputs[2])
        if q is not k or (query_gain is None) != (key_gain is None):
            raise Unsuited("q and k are not one product")
        normed, qkv = self.product(q)
        other_v = self._values(new, q, normed, (heads + kv) * dim, kv * dim)
        self.x, gain, self.eps = self.norm(normed)
        self.require_row(self.x)
        attended, out, residual = self.residual(self.only_user(attention.output))
        if residual is not self.x or attended is not attention.output:
            raise Unsuited("attention is not added to x")
        self._ffn(attended, gain, (qkv, other_v), query_gain, key_gain, keys, values, out)

    def _values(self, new: Value, q: Node, normed: Value, start: int, length: int) -> Weight | None:
        """The weights of v, if it is a product of its own and not the last columns of another."""
        node = self._uncast(new)
        if node.op.name == "narrow":
            if self._slice(new, start, length) is not q:
                raise Unsuited("q, k and v are not one product")
            return None
        x, weight = self.product(node)
        if x is not normed or q.output.shape.dims[-1] != start or weight.outputs != length:
            raise Unsuited("v is not a product of what q and k are")
        return weight

    def _ffn(
        self, attended: Value, gain: Value, qkv: tuple[Weight, Weight | None], *more: Any
    ) -> None:
        middle = self.only_user(attended).output
        found = [n for n in self.users[middle] if n.op.name == "rms_norm"]
        if len(found) != 1:
            raise Unsuited("no norm follows attention")
        _, second, eps = self.norm(found[0].output)
        gated = self.only_user(found[0].output)
        gate, up = self.gated(gated)
        if eps != self.eps:
            raise Unsuited("norms differ in eps")
        last = self.only_user(gated.output)
        _, down, residual = self.residual(last)
        if residual is not middle:
            raise Unsuited("the FFN is not added to x")
        self.result = last.output
        query_gain, key_gain, keys, values, out = more
        self.layer = Layer(
            gain, *qkv, query_gain, key_gain, keys, values, out, second, gate, up, down
        )
        self.weights = [out, gate, up, down, keys, values]
        self.settings = (
            qkv[0].scheme, qkv[0].inputs, out.scheme, gate.scheme,
            self.scale, self.position, self.eps, self.head_eps, id(self.cos), id(self.sin),
            query_gain is None, keys.dtype,
        )  # fmt: skip

    def _rotated(
        self, value: Value, start: int, length: int, first: bool = False
    ) -> tuple[Node, Value | None]:
        """The product whose columns are rotated, and the gain of their norm."""
        node = self._uncast(value)
        self.require(node, "fused_qk_norm_rope", "rope")
        op: Any = node.op
        if op.interleaved or op.n_rot not in (0, op.head_dim) or op.layout != "bshd":
            raise Unsuited("heads are rotated in another way")
        inputs = list(node.inputs)
        gain = None
        if node.op.name == "fused_qk_norm_rope":
            gain = inputs.pop(1)
            self.require_gain(gain)
        if len(inputs) != 3:
            raise Unsuited("positions are a tensor")
        eps = getattr(op, "eps", 0.0)
        if first:
            self.position, self.cos, self.sin, self.head_eps = op.offset, *inputs[1:], eps
        tables = inputs[1] is self.cos and inputs[2] is self.sin
        if not tables or (op.offset, eps) != (self.position, self.head_eps):
            raise Unsuited("queries and keys are rotated in different ways")
        if self.cos.dtype.name != "f32" or self.sin.dtype.name != "f32":
            raise Unsuited("tables of angles are not f32")
        return self._slice(inputs[0], start, length), gain

    def _slice(self, value: Value, start: int, length: int) -> Node:
        """The product that a value has these columns of."""
        node = self._uncast(value)
        op: Any = node.op
        while node.op.is_view and node.op.name != "narrow":
            node = node.inputs[0].node
            op = node.op
        if node.op.name != "narrow" or (op.start, op.length) != (start, length):
            raise Unsuited("q, k and v are not one product")
        return node.inputs[0].node

    def _uncast(self, value: Value) -> Node:
        node = value.node
        while node.op.name == "cast" or (node.op.is_view and node.op.name != "narrow"):
            node = node.inputs[0].node
        return node

    def _cache(self, value: Value) -> tuple[Value, Value]:
        """The state that attention reads, and what is appended to it."""
        node = value.node
        while node.op.is_view and node.op.name != "state_update":
            node = node.inputs[0].node
        op: Any = self.require(node, "state_update").op
        state = node.inputs[0]
        if len(node.inputs) != 2 or state.node.op.name != "state" or op.axis != 2:
            raise Unsuited("the KV cache is written in another way")
        if op.start != self.position or state.dtype.name not in ("f16", "bf16"):
            raise Unsuited(f"the KV cache is {state.dtype.name}, or written elsewhere")
        if not all(isinstance(d, int) for d in state.shape.dims) or state.shape.dims[0] != 1:
            raise Unsuited("the KV cache has several sequences")
        return state, node.inputs[1]


class _Head(_Part):
    """The last norm and the product that gives logits."""

    def __init__(self, x: Value, users: Any) -> None:
        super().__init__(users)
        norms = [n for n in users.get(x, []) if n.op.name == "rms_norm"]
        if len(norms) != 1:
            raise Unsuited("no norm follows the last layer")
        _, self.gain, self.eps = self.norm(norms[0].output)
        value = norms[0].output
        node = self.only_user(value)
        while node.op.is_view:
            value = node.output
            node = self.only_user(value)
        _, self.matrix = self.product(node)
        self.logits = node.output
        if self.logits.dtype.name != "f32":
            raise Unsuited("logits are not f32")
