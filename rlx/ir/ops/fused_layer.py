"""Whole sub-layers of a transformer as one op: attention with what surrounds it, and the layer.

Both see the full sequence at once (no cached keys). What is optional has a flag; operands come in
the order of `operand_names`, absent ones leaving no gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.attrs import MaskKind
from rlx.ir.dim import Dim, same
from rlx.ir.dtype import DType, promote
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import quiet, require_float, require_rank, rounded
from rlx.ir.ops.activation import require_activation
from rlx.ir.ops.attention import Attention
from rlx.ir.ops.fused import FusedMatMulBiasAct, head_norm
from rlx.ir.ops.matmul import widened
from rlx.ir.ops.norm import LayerNorm, RmsNorm, elementwise_cost, require_eps
from rlx.ir.ops.rope import Rope
from rlx.ir.shape import Shape
from rlx.support.records import dataclass

_T = TypeVar("_T")
_UNPROMOTED = ("cos", "sin", "mask")  # as in rope and attention, they leave the type alone


def _dense(x: Array, w: Array, bias: Array | None, activation: str = "none") -> Array:
    rest = () if bias is None else (bias,)
    return FusedMatMulBiasAct(activation, has_bias=bias is not None).reference(x, w, *rest)


@dataclass(frozen=True, repr=False)
class _Sublayer(Op):
    """What the attention block and the whole layer share: everything up to the first residual."""

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

    def _checked(self, *given: Shape) -> Shape:
        parts = self._named(*given)
        x = parts["x"]
        require_rank(x, 3, "x")
        for name, dims in {"x": x.dims, **self._widths(parts)}.items():
            if name not in parts:
                continue
            shape = parts[name]
            require_float(shape, name)
            if shape.rank != len(dims) or not all(map(same, shape.dims, dims)):
                expected = f"[{', '.join(map(str, dims))}]"
                raise ShapeError(f"{name} does not fit", got=shape, expected=expected)
        q, k = (
            x.with_dims((*x.dims[:2], heads * self.head_dim))
            for heads in (self.num_heads, self.num_kv_heads)
        )
        if rope := self.rope():
            rope.infer(q, parts["cos"], parts["sin"])
        self.attention().infer(q, k, k, parts.get("mask"))
        return x.with_dtype(_result_type({n: s.dtype for n, s in parts.items()}))

    def _wide(self, *given: Array) -> tuple[DType, dict[str, Array]]:
        """The result type, and the operands in the precision everything is computed in."""
        parts = self._named(*given)
        dtype = _result_type({n: DType.of(a.dtype) for n, a in parts.items()})
        mask = {"mask": parts.pop("mask")} if self.mask_kind == MaskKind.CUSTOM else {}
        wide = widened(dtype, *parts.values())
        return dtype, {**dict(zip(parts, wide, strict=True)), **mask}

    def _normed(self, x: Array, gamma: Array, beta: Array | None) -> Array:
        norm = RmsNorm(self.eps) if self.norm == "rms" else LayerNorm(self.eps)
        return norm.reference(x, gamma, beta)

    def _attended(self, parts: dict[str, Array]) -> Array:
        """x + attention of the normed x."""
        x = parts["x"]
        normed = self._normed(x, parts["gamma"], parts.get("beta"))
        joined = _dense(normed, parts["wqkv"], parts.get("qkv_bias"))
        inner, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q, k, v = np.split(joined, [inner, inner + kv], axis=-1)
        if self.has_qk_norm:
            q = head_norm(q, parts["q_gamma"], self.head_dim, self.eps)
            k = head_norm(k, parts["k_gamma"], self.head_dim, self.eps)
        if rope := self.rope():
            q, k = (rope.reference(t, parts["cos"], parts["sin"]) for t in (q, k))
        mixed = self.attention().reference(q, k, v, parts.get("mask"))
        return x + _dense(mixed, parts["wo"], parts.get("out_bias"))

    def _weights(self) -> tuple[str, ...]:
        return ("wqkv", "wo")

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """The products and the attention; every operand touched once."""
        parts = self._named(*inputs)
        x = parts["x"]
        work: Dim = 0
        for name in self._weights():
            work = work + x.dims[0] * x.dims[1] * parts[name].num_elements * 2
        q, k = (
            x.with_dims((*x.dims[:2], heads * self.head_dim))
            for heads in (self.num_heads, self.num_kv_heads)
        )
        attention = self.attention().cost([q, k, k], [q])
        return Cost(work + attention.flops, elementwise_cost(inputs, outputs, 0).bytes)


def _result_type(types: dict[str, DType]) -> DType:
    return promote(*[t for name, t in types.items() if name not in _UNPROMOTED])


@op("fused_attention_block", group="fused")
class FusedAttentionBlock(_Sublayer):
    """x + attention(norm(x)): norm, joined q/k/v projection, qk-norm, rope, attention, output.

    Operands, those in brackets by flag: x [B, S, E], wqkv [E, (H + 2·KV)·D] (q, then k, then v),
    wo [H·D, E], gamma [E], [cos, sin], [beta], [qkv_bias], [q_gamma, k_gamma: per-head rms_norm
    over D], [out_bias], [mask, where mask_kind takes one].
    """

    def infer(self, x: Shape, wqkv: Shape, wo: Shape, gamma: Shape, *rest: Shape) -> Shape:
        return self._checked(x, wqkv, wo, gamma, *rest)

    def reference(self, x: Array, wqkv: Array, wo: Array, gamma: Array, *rest: Array) -> Array:
        dtype, parts = self._wide(x, wqkv, wo, gamma, *rest)
        with quiet():
            return rounded(self._attended(parts), dtype)


@op("fused_transformer_layer", group="fused")
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

    def _weights(self) -> tuple[str, ...]:
        gate = ("w_gate",) if self.gated else ()
        return (*super()._weights(), *gate, "w_up", "w_down")

    def infer(self, x: Shape, wqkv: Shape, wo: Shape, gamma: Shape, *rest: Shape) -> Shape:
        return self._checked(x, wqkv, wo, gamma, *rest)

    def reference(self, x: Array, wqkv: Array, wo: Array, gamma: Array, *rest: Array) -> Array:
        dtype, parts = self._wide(x, wqkv, wo, gamma, *rest)
        with quiet():
            h = self._attended(parts)
            return rounded(h + self._fed_forward(h, parts), dtype)

    def _fed_forward(self, h: Array, parts: dict[str, Array]) -> Array:
        normed = self._normed(h, parts["ffn_gamma"], parts.get("ffn_beta"))
        plain = "none" if self.gated else self.activation
        hidden = _dense(normed, parts["w_up"], parts.get("up_bias"), plain)
        if self.gated:
            gate = _dense(normed, parts["w_gate"], parts.get("gate_bias"), self.activation)
            hidden = gate * hidden
        return _dense(hidden, parts["w_down"], parts.get("down_bias"))
