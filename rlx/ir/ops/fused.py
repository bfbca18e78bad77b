"""Fused ops. Intermediate values stay in f32 (f64 for f64).

Each op checks its operands and has a decomposition; reference and cost derive from that.

Two are whole transformer sublayers: the attention block, and the layer. Both take the full sequence
(no KV cache). Optional operands have a flag; operands are in the order of `operand_names`, and
absent ones leave no gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.attrs import Body, MaskKind
from rlx.ir.dim import Dim, same
from rlx.ir.dtype import DType
from rlx.ir.op import Cost, Inferred, op
from rlx.ir.ops._common import (
    activate,
    cast,
    require_float,
    require_rank,
    require_vector,
    result_type,
    traffic,
    wide,
)
from rlx.ir.ops.activation import require_activation
from rlx.ir.ops.attention import Attention, by_head
from rlx.ir.ops.composite import Composite, graph_flops
from rlx.ir.ops.control import body_results
from rlx.ir.ops.matmul import matmul_shape
from rlx.ir.ops.norm import (
    LayerNorm,
    RmsNorm,
    RowNorm,
    affine,
    elementwise_cost,
    require_eps,
    rms_scaled,
    row_norm_shape,
)
from rlx.ir.ops.rope import Rope, check_rotation
from rlx.ir.shape import Shape
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value

_T = TypeVar("_T")


@op("fused_matmul_bias_act", is_anchor=True, runs_in_low_precision=True, holds_weights=True)
class FusedMatMulBiasAct(Composite):
    """activation(x·w + bias) + residual; bias [N] and residual are there where the flags say so.

    `strassen` lets a device use Strassen's algorithm. The error of a result is then relative to the
    largest values of several rows, not of its own row.
    """

    activation: str = "none"
    has_bias: bool = False
    has_residual: bool = False
    strassen: bool = False

    def check(self) -> None:
        require_activation(self.activation, self.name)

    def extras(self, *given: _T | None) -> tuple[_T | None, _T | None]:
        """The operands after w as (bias, residual): absent ones leave no gap."""
        there = [t for t in given if t is not None]
        if len(there) != self.has_bias + self.has_residual:
            raise ShapeError(
                "operands and flags disagree", where=self.name, got=f"{len(there)} after w",
                expected=f"has_bias={self.has_bias}, has_residual={self.has_residual}",
                hint="set has_bias / has_residual for the operands that are given",
            )  # fmt: skip
        bias = there[0] if self.has_bias else None
        return bias, there[-1] if self.has_residual else None

    def infer(
        self, x: Shape, w: Shape, bias: Shape | None = None, residual: Shape | None = None
    ) -> Shape:
        bias, residual = self.extras(bias, residual)
        require_float(x, "x")
        require_float(w, "w")
        out = matmul_shape(x, w)
        if bias is not None:
            if w.rank < 2:
                raise ShapeError("w has no output channels", got=w, expected="[..., K, N]")
            require_vector(bias, w.dims[-1], "bias")
        if residual is not None:
            require_float(residual, "residual")
            if not residual.same_dims(out):
                raise ShapeError("residual does not fit the matmul", got=residual, expected=out)
        return out.with_dtype(result_type(out, bias, residual))

    def decompose(self, g: Graph, x: Value, w: Value, *rest: Value) -> Any:
        bias, residual = self.extras(*rest)
        result = result_type(x, w, *rest)
        y = g.matmul(wide(g, x), wide(g, w))
        if bias is not None:
            y = g.add(y, wide(g, bias))
        y = activate(g, y, self.activation)
        if residual is not None:
            y = g.add(y, wide(g, residual))
        return cast(g, y, result)


def _sum_shape(x: Shape, residual: Shape) -> Shape:
    require_float(x, "x")
    require_float(residual, "residual")
    if not x.same_dims(residual):
        raise ShapeError("x and residual differ in shape", got=residual, expected=x)
    return x.with_dtype(result_type(x, residual))


class _ResidualNorm(Composite):
    """(norm(x + residual), x + residual)"""

    runs_as_region = True
    eps: float
    norm: ClassVar[type[RowNorm]]

    def check(self) -> None:
        require_eps(self.eps, self.name)

    def infer(
        self, x: Shape, residual: Shape, gamma: Shape, beta: Shape | None = None
    ) -> tuple[Shape, Shape]:
        total = _sum_shape(x, residual)
        return row_norm_shape(total, gamma, beta), total

    def decompose(
        self, g: Graph, x: Value, residual: Value, gamma: Value, beta: Value | None = None
    ) -> Any:
        total = g.add(wide(g, x), wide(g, residual))
        y = affine(g, self.norm.scaled(g, total, self.eps), gamma, beta)
        summed = result_type(x, residual)
        return cast(g, y, result_type(x, residual, gamma, beta)), cast(g, total, summed)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return elementwise_cost(inputs, outputs, self.norm.work + 1)


@op("fused_residual_rms_norm")
class FusedResidualRmsNorm(_ResidualNorm):
    """(rms_norm(x + residual) · gamma (+ beta), x + residual)"""

    eps: float = 1e-6
    norm = RmsNorm


@op("fused_residual_layer_norm")
class FusedResidualLayerNorm(_ResidualNorm):
    """(layer_norm(x + residual) · gamma (+ beta), x + residual)"""

    eps: float = 1e-5
    norm = LayerNorm


@op("fused_swiglu", runs_in_low_precision=True, holds_weights=True)
class FusedSwiGlu(Composite):
    """activation(x · w_gate) * (x · w_up)"""

    activation: str = "silu"

    def check(self) -> None:
        require_activation(self.activation, self.name)

    def infer(self, x: Shape, w_gate: Shape, w_up: Shape) -> Shape:
        for shape, what in ((x, "x"), (w_gate, "w_gate"), (w_up, "w_up")):
            require_float(shape, what)
        if not w_gate.same_dims(w_up):
            raise ShapeError("w_gate and w_up differ in shape", got=w_gate, expected=w_up)
        return matmul_shape(x, w_up).with_dtype(result_type(x, w_gate, w_up))

    def decompose(self, g: Graph, x: Value, w_gate: Value, w_up: Value) -> Any:
        result = result_type(x, w_gate, w_up)
        x, w_gate, w_up = (wide(g, v) for v in (x, w_gate, w_up))
        gate = activate(g, g.matmul(x, w_gate), self.activation)
        return cast(g, g.mul(gate, g.matmul(x, w_up)), result)


@op("fused_gated_act", runs_as_region=True)
class FusedGatedAct(Composite):
    """activation(first half of the last axis) * second half: [..., 2N] -> [..., N]"""

    activation: str = "silu"

    def check(self) -> None:
        require_activation(self.activation, self.name)

    def infer(self, joined: Shape) -> Shape:
        require_float(joined, "joined")
        half: Dim = joined.dims[-1] // 2 if joined.rank else 0
        if not joined.rank or not same(half * 2, joined.dims[-1]):
            raise ShapeError("the last axis has no two halves", got=joined, expected="[..., 2*N]")
        return joined.with_dims((*joined.dims[:-1], half))

    def decompose(self, g: Graph, joined: Value) -> Any:
        axis = joined.shape.rank - 1
        half = joined.shape.dims[axis] // 2
        gate, up = (g.narrow(joined, axis=axis, start=s, length=half) for s in (0, half))
        y = g.mul(activate(g, wide(g, gate), self.activation), wide(g, up))
        return cast(g, y, joined.shape.dtype)


@op("fused_qk_norm_rope")
class FusedQkNormRope(Composite):
    """rope(rms_norm of each head · gamma [head_dim]); operands and layouts as for rope."""

    head_dim: int
    n_rot: int = 0
    interleaved: bool = False
    offset: Dim = 0
    eps: float = 1e-6
    layout: str = "bshd"

    def check(self) -> None:
        require_eps(self.eps, self.name)
        check_rotation(self.head_dim, self.n_rot, self.offset, self.layout, self.name)

    def rotation(self) -> Rope:
        return Rope(self.head_dim, self.n_rot, self.interleaved, self.offset, self.layout)

    def infer(
        self, x: Shape, gamma: Shape, cos: Shape, sin: Shape, positions: Shape | None = None
    ) -> Shape:
        require_vector(gamma, self.head_dim, "gamma")
        rotated = self.rotation().infer(x, cos, sin, positions)
        return rotated.with_dtype(result_type(x, gamma))

    def decompose(
        self, g: Graph, x: Value, gamma: Value, cos: Value, sin: Value,
        positions: Value | None = None,
    ) -> Any:  # fmt: skip
        heads = by_head(g, wide(g, x), self.head_dim)
        normed = affine(g, rms_scaled(g, heads, self.eps), gamma, None)
        y = self.rotation().rotate(g, normed, cos, sin, positions)
        return cast(g, g.reshape(y, shape=x.shape.dims), result_type(x, gamma))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        x, gamma, *tables = inputs
        rotation = self.rotation().cost([x, *tables], outputs)
        return Cost(rotation.flops + x.num_elements * 4, rotation.bytes + gamma.size_bytes)


@op("elementwise_region")
class ElementwiseRegion(Composite):
    """A subgraph of elementwise, broadcast, reduction, layout and gather ops, run as one kernel."""

    body: Body

    def infer(self, *xs: Shape) -> Inferred:
        results = body_results(self.body, xs, "body")
        if not results:
            raise ShapeError("a region has at least one result", got=0)
        return results

    def decompose(self, g: Graph, *xs: Value) -> Any:
        """The nodes of the region, one by one."""
        given = iter(xs)
        values: dict[Value, Value] = {}
        for node in self.body.graph.nodes:
            if node.op.name == "input":
                values[node.output] = next(given)
                continue
            new = g.append_node(node.op, [values[v] for v in node.inputs])
            values.update(zip(node.outputs, new.outputs, strict=True))
        return tuple([values[v] for v in self.body.graph.outputs])

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """The FLOPs of the nodes, casts included; only operands and results touch memory."""
        return Cost(graph_flops(self.body.graph), traffic(inputs, outputs))


# -- transformer sublayers ------------------------------------------------------------------------

_UNPROMOTED = ("cos", "sin", "mask")  # do not take part in promotion, as in rope and attention


def _dense(g: Graph, x: Value, w: Value, bias: Value | None, activation: str = "none") -> Any:
    y = g.matmul(x, w)
    return activate(g, y if bias is None else g.add(y, bias), activation)


@dataclass(frozen=True, repr=False)
class _Sublayer(Composite):
    """Shared by the attention block and the layer: everything up to the first residual."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: str = "rms"
    eps: float = 1e-6
    mask_kind: MaskKind = MaskKind.NONE
    scale: float | None = None
    softcap: float = 0.0
    n_rot: int = 0
    interleaved: bool = False
    offset: Dim = 0
    has_rope: bool = True
    has_beta: bool = False
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_out_bias: bool = False

    def check(self) -> None:
        if self.norm not in ("rms", "layer"):
            raise AttributeValueError(
                "unknown norm", where=f"{self.name}.norm", got=repr(self.norm),
                expected="rms or layer",
            )  # fmt: skip
        require_eps(self.eps, self.name)
        try:
            self.attention()
            self.rope()
        except AttributeValueError as e:
            field = e.where.rpartition(".")[2]
            raise AttributeValueError(
                e.what, where=f"{self.name}.{field}", got=e.got, expected=e.expected, hint=e.hint
            ) from None

    def attention(self) -> Attention:
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        return Attention(*heads, self.mask_kind, self.scale, self.softcap)

    def rope(self) -> Rope | None:
        if not self.has_rope:
            return None
        return Rope(self.head_dim, self.n_rot, self.interleaved, self.offset)

    def operand_names(self) -> tuple[str, ...]:
        """The operands, in order."""
        flags = (
            (self.has_rope, ("cos", "sin")),
            (self.has_beta, ("beta",)),
            (self.has_qkv_bias, ("qkv_bias",)),
            (self.has_qk_norm, ("q_gamma", "k_gamma")),
            (self.has_out_bias, ("out_bias",)),
            (self.mask_kind.needs_mask, ("mask",)),
        )
        optional = [name for there, names in flags if there for name in names]
        return ("x", "wqkv", "wo", "gamma", *optional)

    def _named(self, *given: _T) -> dict[str, _T]:
        names = self.operand_names()
        if len(names) != len(given):
            raise ShapeError(
                "wrong number of operands", where=self.name, got=len(given),
                expected=", ".join(names), hint="the has_… flags say which operands there are",
            )  # fmt: skip
        return dict(zip(names, given, strict=True))

    def _widths(self, parts: dict[str, Shape]) -> dict[str, tuple[Dim, ...]]:
        """The dims of each weight."""
        width = parts["x"].dims[-1]
        inner = self.num_heads * self.head_dim
        joined = inner + 2 * self.num_kv_heads * self.head_dim
        return {
            "wqkv": (width, joined), "wo": (inner, width), "gamma": (width,), "beta": (width,),
            "qkv_bias": (joined,), "q_gamma": (self.head_dim,), "k_gamma": (self.head_dim,),
            "out_bias": (width,),
        }  # fmt: skip

    def check_operands(self, *given: Shape) -> None:
        parts = self._named(*given)
        require_rank(parts["x"], 3, "x")
        for name, dims in {"x": parts["x"].dims, **self._widths(parts)}.items():
            if name not in parts:
                continue
            shape = parts[name]
            require_float(shape, name)
            if shape.rank != len(dims) or not all(map(same, shape.dims, dims)):
                expected = f"[{', '.join(map(str, dims))}]"
                raise ShapeError(f"{name} does not fit", got=shape, expected=expected)

    def _wide(self, g: Graph, given: tuple[Value, ...]) -> tuple[DType, dict[str, Value]]:
        """The result type, and the operands in the precision everything is computed in."""
        parts = self._named(*given)
        result = result_type(*[v for name, v in parts.items() if name not in _UNPROMOTED])
        for name, v in parts.items():
            if name != "mask" or self.mask_kind != MaskKind.CUSTOM:
                parts[name] = wide(g, v) if result.bytes < 4 else cast(g, v, result)
        return result, parts

    def _normed(self, g: Graph, x: Value, gamma: Value, beta: Value | None) -> Any:
        name = "rms_norm" if self.norm == "rms" else "layer_norm"
        return g.apply(name, x, gamma, beta, eps=self.eps)

    def _attended(self, g: Graph, parts: dict[str, Value]) -> Any:
        """x + attention of the normed x."""
        x = parts["x"]
        normed = self._normed(g, x, parts["gamma"], parts.get("beta"))
        joined = _dense(g, normed, parts["wqkv"], parts.get("qkv_bias"))
        inner, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q, k, v = (
            g.narrow(joined, axis=2, start=start, length=length)
            for start, length in ((0, inner), (inner, kv), (inner + kv, kv))
        )
        q, k = self._rotated(g, q, parts, "q_gamma"), self._rotated(g, k, parts, "k_gamma")
        mask = [parts["mask"]] if "mask" in parts else []
        mixed = g.append(self.attention(), [q, k, v, *mask])
        return g.add(x, _dense(g, mixed, parts["wo"], parts.get("out_bias")))

    def _rotated(self, g: Graph, x: Value, parts: dict[str, Value], gamma: str) -> Any:
        """Queries or keys with per-head norm and rope, if enabled."""
        batch, length, width = x.shape.dims
        if gamma in parts:
            heads = g.reshape(x, shape=(batch, length, width // self.head_dim, self.head_dim))
            x = g.reshape(g.rms_norm(heads, parts[gamma], eps=self.eps), shape=x.shape.dims)
        rope = self.rope()
        return x if rope is None else g.append(rope, [x, parts["cos"], parts["sin"]])


_TRAITS = {"is_anchor": True, "runs_in_low_precision": True, "holds_weights": True}


@op("fused_attention_block", group="fused", **_TRAITS)
class FusedAttentionBlock(_Sublayer):
    """x + attention(norm(x)): norm, joined q/k/v projection, qk-norm, rope, attention, output.

    Operands, those in brackets by flag: x [B, S, E], wqkv [E, (H + 2·KV)·D] (q, then k, then v),
    wo [H·D, E], gamma [E], [cos, sin], [beta], [qkv_bias], [q_gamma, k_gamma: per-head rms_norm
    over D], [out_bias], [mask, where mask_kind takes one].
    """

    def decompose(
        self, g: Graph, x: Value, wqkv: Value, wo: Value, gamma: Value, *rest: Value
    ) -> Any:
        result, parts = self._wide(g, (x, wqkv, wo, gamma, *rest))
        return cast(g, self._attended(g, parts), result)


@op("fused_transformer_layer", group="fused", **_TRAITS)
class FusedTransformerLayer(_Sublayer):
    """h + ffn(norm(h)) with h = fused_attention_block(x): a layer of a transformer.

    Operands: those of the attention block, then ffn_gamma [E], [ffn_beta, with has_beta],
    [w_gate [E, F], when gated], w_up [E, F], w_down [F, E], [gate_bias when gated, up_bias,
    down_bias, with has_ffn_bias]. Gated: (act(x·gate) * (x·up))·down, so silu is SwiGLU and gelu
    GeGLU; else act(x·up)·down.
    """

    activation: str = "silu"
    gated: bool = True
    has_ffn_bias: bool = False

    def check(self) -> None:
        super().check()
        require_activation(self.activation, self.name)

    def operand_names(self) -> tuple[str, ...]:
        gate = (("w_gate",), ("gate_bias",)) if self.gated else ((), ())
        biases = (*gate[1], "up_bias", "down_bias") if self.has_ffn_bias else ()
        beta = ("ffn_beta",) if self.has_beta else ()
        ffn = ("ffn_gamma", *beta, *gate[0], "w_up", "w_down", *biases)
        return (*super().operand_names(), *ffn)

    def _widths(self, parts: dict[str, Shape]) -> dict[str, tuple[Dim, ...]]:
        width, up = parts["x"].dims[-1], parts["w_up"]
        require_rank(up, 2, "w_up")
        hidden = up.dims[1]
        return {
            **super()._widths(parts),
            "ffn_gamma": (width,), "ffn_beta": (width,), "w_gate": (width, hidden),
            "w_up": (width, hidden), "w_down": (hidden, width), "gate_bias": (hidden,),
            "up_bias": (hidden,), "down_bias": (width,),
        }  # fmt: skip

    def decompose(
        self, g: Graph, x: Value, wqkv: Value, wo: Value, gamma: Value, *rest: Value
    ) -> Any:
        result, parts = self._wide(g, (x, wqkv, wo, gamma, *rest))
        h = self._attended(g, parts)
        normed = self._normed(g, h, parts["ffn_gamma"], parts.get("ffn_beta"))
        plain = "none" if self.gated else self.activation
        hidden = _dense(g, normed, parts["w_up"], parts.get("up_bias"), plain)
        if self.gated:
            gate = _dense(g, normed, parts["w_gate"], parts.get("gate_bias"), self.activation)
            hidden = g.mul(gate, hidden)
        return cast(g, g.add(h, _dense(g, hidden, parts["w_down"], parts.get("down_bias"))), result)
