"""Fused transformer sublayers: the attention block, and the whole layer.

Both take the full sequence (no KV cache). Optional operands have a flag; operands are in the order
of `operand_names`, and absent ones leave no gap. Both are composite ops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.attrs import MaskKind
from rlx.ir.dim import Dim, same
from rlx.ir.dtype import DType
from rlx.ir.op import op
from rlx.ir.ops._common import activate, cast, require_float, require_rank, result_type, wide
from rlx.ir.ops.attention import Attention
from rlx.ir.ops.composite import Composite
from rlx.ir.ops.elementwise import require_activation
from rlx.ir.ops.norm import require_eps
from rlx.ir.ops.rope import Rope
from rlx.ir.shape import Shape
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value

_T = TypeVar("_T")
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
