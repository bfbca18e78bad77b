"""Signatures of the builder methods, for type checkers and editors.

Generated from the registry of ops by `python tests/ir/make_methods.py`: do not edit by hand.
"""

# mypy: disable-error-code="override"

from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict, Unpack, overload

import numpy as np

from rlx.ir.attrs import Body, MaskKind
from rlx.ir.dim import DimLike
from rlx.ir.dtype import DTypeLike
from rlx.ir.graph import Graph
from rlx.ir.module import GraphModule
from rlx.ir.node import Value
from rlx.ir.operators import Operators
from rlx.ir.quant.scheme import QuantScheme
from rlx.ir.shape import ShapeLike

Tensor: TypeAlias = Operators | float | np.ndarray[Any, Any] | np.generic | list[Any]
BodyLike: TypeAlias = Body | Graph | GraphModule

class Result(TypedDict, total=False):
    """What every builder takes besides."""

    name: str  # of the result
    shape: ShapeLike  # the expected one, which is then checked

class OpMethods:
    """A method for every MIR op."""

    def abs(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """|x|; of a complex number its magnitude, a real number [rlx.ir.ops.elementwise.Abs]"""
    def acos(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """the angle in 0 … π whose cosine is x; NaN beyond 1 [rlx.ir.ops.trigonometry.Acos]"""
    def acosh(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """ln(x + √(x² − 1)); NaN below 1 [rlx.ir.ops.trigonometry.Acosh]"""
    def add(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a + b [rlx.ir.ops.binary.Add]"""
    def all(
        self,
        x: Tensor,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """Whether no element is zero; true of none [rlx.ir.ops.reduce.All]"""
    def all_gather(
        self, x: Tensor, axis_name: str, size: DimLike, axis: int = 0, **result: Unpack[Result]
    ) -> Value:
        """The x of all elements of the mapped axis, whose size is `size`, stacked on a new
        axis [rlx.ir.ops.collectives.AllGather]"""
    def any(
        self,
        x: Tensor,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """Whether one element is not zero; false of none [rlx.ir.ops.reduce.Any_]"""
    def argmax(
        self, x: Tensor, axis: int = -1, keepdims: bool = False, **result: Unpack[Result]
    ) -> Value:
        """The index of the greatest element, or of the first NaN; the lowest of equal ones
        [rlx.ir.ops.reduce.ArgMax]"""
    def argmin(
        self, x: Tensor, axis: int = -1, keepdims: bool = False, **result: Unpack[Result]
    ) -> Value:
        """The index of the least element, or of the first NaN; the lowest of equal ones
        [rlx.ir.ops.reduce.ArgMin]"""
    def argsort(
        self, x: Tensor, axis: int = -1, descending: bool = False, **result: Unpack[Result]
    ) -> Value:
        """The indices (i64) that sort an axis; those of equal elements ascend
        [rlx.ir.ops.sort.ArgSort]"""
    def asin(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """the angle in −π/2 … π/2 whose sine is x; NaN beyond 1 [rlx.ir.ops.trigonometry.Asin]"""
    def asinh(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """ln(x + √(x² + 1)) [rlx.ir.ops.trigonometry.Asinh]"""
    def atan(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """the angle in −π/2 … π/2 whose tangent is x [rlx.ir.ops.trigonometry.Atan]"""
    def atan2(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """the angle of the point (b, a) from the x axis [rlx.ir.ops.binary.Atan2]"""
    def atanh(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """ln((1 + x) / (1 − x)) / 2; ±inf at ±1, NaN beyond [rlx.ir.ops.trigonometry.Atanh]"""
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask_kind: MaskKind | str = ...,
        scale: float | None = None,
        softcap: float = 0.0,
        q_layout: str = "bshd",
        kv_layout: str = "bshd",
        kv_scheme: QuantScheme | str | None = None,
        has_sinks: bool = False,
        coarse: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """softmax(scale · q kᵀ, masked) v per head; query head h uses key head h //
        (heads/kv_heads) [rlx.ir.ops.attention.Attention]"""
    def attention_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        mask: Tensor | None = None,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask_kind: MaskKind | str = ...,
        scale: float | None = None,
        softcap: float = 0.0,
        q_layout: str = "bshd",
        kv_layout: str = "bshd",
        wants_bias: bool = False,
        **result: Unpack[Result],
    ) -> Any:
        """(dq, dk, dv) from out and lse of `attention_with_lse` and the cotangent of out
        [rlx.ir.ops.attention_backward.AttentionBackward]"""
    def attention_with_lse(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask_kind: MaskKind | str = ...,
        scale: float | None = None,
        softcap: float = 0.0,
        q_layout: str = "bshd",
        kv_layout: str = "bshd",
        kv_scheme: QuantScheme | str | None = None,
        has_sinks: bool = False,
        coarse: bool = False,
        **result: Unpack[Result],
    ) -> tuple[Value, Value]:
        """(attention, ln Σ exp(scores) of each row [B, H, Sq]): what backward needs. Masked
        keys do not count, a sink does; −inf for a query without any key
        [rlx.ir.ops.attention_backward.AttentionWithLse]"""
    def avg_pool(
        self,
        x: Tensor,
        kernel: int | Sequence[int],
        stride: int | Sequence[int] = (),
        padding: int | Sequence[int] = (0,),
        count_include_pad: bool = True,
        **result: Unpack[Result],
    ) -> Value:
        """The mean of each window; padding counts as zeros, or not at all
        [rlx.ir.ops.pool.AvgPool]"""
    def axis_index(self, axis_name: str, **result: Unpack[Result]) -> Value:
        """The index of the element along the mapped axis, an i32
        [rlx.ir.ops.collectives.AxisIndex]"""
    def bitwise_and(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a & b [rlx.ir.ops.binary.BitwiseAnd]"""
    def bitwise_not(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """every bit flipped; logical not of a bool [rlx.ir.ops.elementwise.BitwiseNot]"""
    def bitwise_or(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a | b [rlx.ir.ops.binary.BitwiseOr]"""
    def bitwise_xor(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a ^ b [rlx.ir.ops.binary.BitwiseXor]"""
    def cast(self, x: Tensor, dtype: DTypeLike, **result: Unpack[Result]) -> Value:
        """x in another element type [rlx.ir.ops.cast.Cast]"""
    def ceil(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """the next whole number towards +inf [rlx.ir.ops.elementwise.Ceil]"""
    def checkpoint(
        self, *tensors: Any, body: BodyLike, policy: str = "nothing", **result: Unpack[Result]
    ) -> Any:
        """The body, computed again in the backward part instead of keeping its values
        [rlx.ir.ops.derivatives.Checkpoint]"""
    def cholesky(self, x: Tensor, upper: bool = False, **result: Unpack[Result]) -> Value:
        """The lower triangular l with x = l·lᴴ of a positive definite x, or with `upper` u and
        uᴴ·u [rlx.ir.ops.factorizations.Cholesky]"""
    def clamp(
        self, x: Tensor, low: float = ..., high: float = ..., **result: Unpack[Result]
    ) -> Value:
        """x limited to low … high; NaN of NaN. Integers take whole bounds
        [rlx.ir.ops.elementwise.Clamp]"""
    def complex(self, re: Tensor, im: Tensor, **result: Unpack[Result]) -> Value:
        """re + i·im, from f32 or f64 parts [rlx.ir.ops.linalg.Complex]"""
    def concat(self, *tensors: Any, axis: int = 0, **result: Unpack[Result]) -> Value:
        """Tensors one after the other along an axis, in their promoted element type
        [rlx.ir.ops.layout.Concat]"""
    def cond(
        self, *tensors: Any, then: BodyLike, otherwise: BodyLike, **result: Unpack[Result]
    ) -> Any:
        """The results of `then` on the operands where the predicate holds, of `otherwise`
        elsewhere [rlx.ir.ops.control.Cond]"""
    def contiguous(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """A contiguous (row-major) copy of a view [rlx.ir.ops.source.Contiguous]"""
    def conv(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None = None,
        *,
        stride: int | Sequence[int] = (1,),
        padding: int | Sequence[int] = (0,),
        dilation: int | Sequence[int] = (1,),
        groups: int = 1,
        **result: Unpack[Result],
    ) -> Value:
        """`x [B, C, *n]` with `w [O, C/groups, *kernel]`, plus bias `[O]`; 1-D and 2-D
        [rlx.ir.ops.conv.Conv]"""
    def conv_integer(
        self,
        x: Tensor,
        w: Tensor,
        x_zero: Tensor,
        stride: int | Sequence[int] = (1,),
        padding: int | Sequence[int] = (0,),
        dilation: int | Sequence[int] = (1,),
        groups: int = 1,
        **result: Unpack[Result],
    ) -> Value:
        """Sums of (x − x_zero) · w in i32; x `[B, C, *n]` u8 or i8, w `[O, C/groups, *kernel]`
        i8 [rlx.ir.ops.conv_integer.ConvInteger]"""
    def conv_transpose(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None = None,
        *,
        stride: int | Sequence[int] = (1,),
        padding: int | Sequence[int] = (0,),
        dilation: int | Sequence[int] = (1,),
        groups: int = 1,
        output_padding: int | Sequence[int] = (0,),
        **result: Unpack[Result],
    ) -> Value:
        """Transposed convolution: every element of `x [B, C, *n]` adds a scaled kernel to the
        output [rlx.ir.ops.conv.ConvTranspose]"""
    def conv_weight_backward(
        self,
        x: Tensor,
        dy: Tensor,
        kernel: int | Sequence[int],
        stride: int | Sequence[int] = (1,),
        padding: int | Sequence[int] = (0,),
        dilation: int | Sequence[int] = (1,),
        groups: int = 1,
        **result: Unpack[Result],
    ) -> Any:
        """dw `[O, C/groups, *kernel]` of conv(x, w), from x and the cotangent `dy [B, O,
        *windows]` [rlx.ir.ops.conv_backward.ConvWeightBackward]"""
    def copysign(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """|a| with the sign of b, also of −0 [rlx.ir.ops.binary.Copysign]"""
    def cos(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """cos x, x in radians [rlx.ir.ops.elementwise.Cos]"""
    def cosh(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """(e^x + e^−x) / 2 [rlx.ir.ops.trigonometry.Cosh]"""
    def cumprod(
        self,
        x: Tensor,
        axis: int = -1,
        exclusive: bool = False,
        reverse: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """Each element replaced by the product up to it; `exclusive` and `reverse` as in
        cumsum [rlx.ir.ops.reduce.CumProd]"""
    def cumsum(
        self,
        x: Tensor,
        axis: int = -1,
        exclusive: bool = False,
        reverse: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """Each element replaced by the sum up to it [rlx.ir.ops.reduce.CumSum]"""
    def custom(self, *tensors: Any, op: str, options: object = (), **result: Unpack[Result]) -> Any:
        """The op registered with `custom_op` under the name `op`; `options` are its attributes
        [rlx.ir.ops.custom.Custom]"""
    def custom_jvp(
        self, *tensors: Any, body: BodyLike, rule: BodyLike, **result: Unpack[Result]
    ) -> Any:
        """The body, with `rule(operands…, tangents…)` giving the tangents of the results
        [rlx.ir.ops.derivatives.CustomJvp]"""
    def custom_vjp(
        self,
        *tensors: Any,
        body: BodyLike,
        forward: BodyLike,
        backward: BodyLike,
        **result: Unpack[Result],
    ) -> Any:
        """The body, with a rule of its own for the backward part
        [rlx.ir.ops.derivatives.CustomVjp]"""
    def depthwise_conv1d_causal(
        self, x: Tensor, w: Tensor, left_pad: Tensor, **result: Unpack[Result]
    ) -> Value:
        """y[b, s, c] = Σ_j w[c, j] · (left_pad ⧺ x)[b, s + j, c]: no token sees a later one
        [rlx.ir.ops.conv.DepthwiseConv1dCausal]"""
    def dequant_gather(
        self,
        table: Tensor,
        ids: Tensor,
        scale: Tensor | None = None,
        zp: Tensor | None = None,
        *,
        scheme: QuantScheme | str,
        **result: Unpack[Result],
    ) -> Value:
        """Rows `ids` of a packed table [V, row] as f32: ids [...] -> [..., K]
        [rlx.ir.ops.dequant.DequantGather]"""
    def dequant_grouped_matmul(
        self,
        x: Tensor,
        w: Tensor,
        expert: Tensor,
        scale: Tensor | None = None,
        zp: Tensor | None = None,
        *,
        scheme: QuantScheme | str,
        **result: Unpack[Result],
    ) -> Value:
        """Row t of x [T, K] · dequant(w[expert[t]])ᵀ; w packed [E, N, row] -> [T, N]
        [rlx.ir.ops.dequant.DequantGroupedMatMul]"""
    def dequant_matmul(
        self,
        x: Tensor,
        w: Tensor,
        scale: Tensor | None = None,
        zp: Tensor | None = None,
        *,
        scheme: QuantScheme | str,
        **result: Unpack[Result],
    ) -> Value:
        """x [..., K] · dequant(w)ᵀ with w packed [N, row]; the result has the element type of
        x [rlx.ir.ops.dequant.DequantMatMul]"""
    def dequant_matmul_transposed(
        self,
        x: Tensor,
        w: Tensor,
        scale: Tensor | None = None,
        zp: Tensor | None = None,
        *,
        scheme: QuantScheme | str,
        **result: Unpack[Result],
    ) -> Value:
        """x [..., N] · dequant(w) with w packed [N, row]: `dequant_matmul` transposed, as its
        backward part needs it [rlx.ir.ops.dequant.DequantMatMulTransposed]"""
    def dequant_moe_weights(
        self,
        w: Tensor,
        expert: Tensor,
        scale: Tensor | None = None,
        zp: Tensor | None = None,
        *,
        scheme: QuantScheme | str,
        **result: Unpack[Result],
    ) -> Value:
        """The weights of the chosen experts: w packed [E, N, row], expert [T] -> f32 [T, K, N]
        [rlx.ir.ops.dequant.DequantMoeWeights]"""
    def dequantize(
        self,
        x: Tensor,
        scale: Tensor,
        zp: Tensor | None = None,
        *,
        axis: int | None = None,
        **result: Unpack[Result],
    ) -> Value:
        """(x - zp) * scale, in the element type of the scale [rlx.ir.ops.quantize.Dequantize]"""
    def dim_value(self, dim: DimLike, dtype: DTypeLike = ..., **result: Unpack[Result]) -> Value:
        """The size that a dimension has in this run, as a scalar [rlx.ir.ops.index.DimValue]"""
    def div(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a / b; of integers an f32 [rlx.ir.ops.binary.Div]"""
    def dot_general(
        self,
        a: Tensor,
        b: Tensor,
        lhs_contract: int | Sequence[int],
        rhs_contract: int | Sequence[int],
        lhs_batch: int | Sequence[int] = (),
        rhs_batch: int | Sequence[int] = (),
        **result: Unpack[Result],
    ) -> Value:
        """Sums over pairs of contracted axes; batch axes come first, then the free ones of a,
        of b [rlx.ir.ops.matmul.DotGeneral]"""
    def eig(self, x: Tensor, vectors: bool = True, **result: Unpack[Result]) -> Any:
        """Complex eigenvalues of a square x, and eigenvectors as columns
        [rlx.ir.ops.factorizations.Eig]"""
    def eigh(self, x: Tensor, vectors: bool = True, **result: Unpack[Result]) -> Any:
        """Eigenvalues of a symmetric or Hermitian x in ascending order, and eigenvectors as
        columns [rlx.ir.ops.factorizations.Eigh]"""
    def elementwise_region(self, *tensors: Any, body: BodyLike, **result: Unpack[Result]) -> Any:
        """A subgraph of elementwise, broadcast, reduction, layout and gather ops, run as one
        kernel [rlx.ir.ops.fused.ElementwiseRegion]"""
    def elu(self, x: Tensor, alpha: float = 1.0, **result: Unpack[Result]) -> Value:
        """x where x ≥ 0, else alpha · (e^x − 1) [rlx.ir.ops.activation_functions.Elu]"""
    def eq(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a = b; false where either is NaN [rlx.ir.ops.binary.Eq]"""
    def erf(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """the error function, 2/√π ∫₀ˣ e^(−t²) dt [rlx.ir.ops.elementwise.Erf]"""
    def exp(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """e^x [rlx.ir.ops.elementwise.Exp]"""
    def exp2(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """2^x [rlx.ir.ops.elementwise.Exp2]"""
    def expand(self, x: Tensor, shape: DimLike | Sequence[DimLike], *, name: str = "") -> Value:
        """Broadcast to `shape`: new leading axes, and axes of size 1 repeated
        [rlx.ir.ops.layout.Expand]"""
    def expm1(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """e^x − 1, exact near 0 [rlx.ir.ops.elementwise.Expm1]"""
    def fake_quantize(
        self,
        x: Tensor,
        scale: Tensor,
        zp: Tensor | None = None,
        *,
        dtype: DTypeLike = ...,
        axis: int | None = None,
        **result: Unpack[Result],
    ) -> Value:
        """dequantize(quantize(x)): x with the error that storing it as `dtype` would bring
        [rlx.ir.ops.quantize.FakeQuantize]"""
    def fft(
        self, x: Tensor, axis: int = -1, inverse: bool = False, **result: Unpack[Result]
    ) -> Value:
        """X[k] = Σ_j x[j]·exp(−2πi·jk/n) along `axis`; the inverse has +2πi and the factor 1/n
        [rlx.ir.ops.linalg.Fft]"""
    def flip(self, x: Tensor, axis: int | Sequence[int], **result: Unpack[Result]) -> Value:
        """The order of elements reversed along axes [rlx.ir.ops.layout.Flip]"""
    def floor(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """the next whole number towards −inf [rlx.ir.ops.elementwise.Floor]"""
    def floor_div(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """floor(a / b); 0 where an integer b is 0 [rlx.ir.ops.binary.FloorDiv]"""
    def fused_attention_block(
        self,
        *tensors: Any,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norm: str = "rms",
        eps: float = 1e-06,
        mask_kind: MaskKind | str = ...,
        scale: float | None = None,
        softcap: float = 0.0,
        n_rot: int = 0,
        interleaved: bool = False,
        offset: DimLike = 0,
        has_rope: bool = True,
        has_beta: bool = False,
        has_qkv_bias: bool = False,
        has_qk_norm: bool = False,
        has_out_bias: bool = False,
        **result: Unpack[Result],
    ) -> Any:
        """x + attention(norm(x)): norm, joined q/k/v projection, qk-norm, rope, attention,
        output [rlx.ir.ops.fused.FusedAttentionBlock]"""
    def fused_gated_act(
        self, joined: Tensor, activation: str = "silu", **result: Unpack[Result]
    ) -> Value:
        """activation(first half of the last axis) * second half: [..., 2N] -> [..., N]
        [rlx.ir.ops.fused.FusedGatedAct]"""
    def fused_matmul_bias_act(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        activation: str = "none",
        has_bias: bool = False,
        has_residual: bool = False,
        strassen: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """activation(x·w + bias) + residual; bias [N] and residual are there where the flags
        say so [rlx.ir.ops.fused.FusedMatMulBiasAct]"""
    def fused_qk_norm_rope(
        self,
        x: Tensor,
        gamma: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None = None,
        *,
        head_dim: int,
        n_rot: int = 0,
        interleaved: bool = False,
        offset: DimLike = 0,
        eps: float = 1e-06,
        layout: str = "bshd",
        **result: Unpack[Result],
    ) -> Value:
        """rope(rms_norm of each head · gamma [head_dim]); operands and layouts as for rope
        [rlx.ir.ops.fused.FusedQkNormRope]"""
    def fused_residual_layer_norm(
        self,
        x: Tensor,
        residual: Tensor,
        gamma: Tensor,
        beta: Tensor | None = None,
        *,
        eps: float = 1e-05,
        **result: Unpack[Result],
    ) -> tuple[Value, Value]:
        """(layer_norm(x + residual) · gamma (+ beta), x + residual)
        [rlx.ir.ops.fused.FusedResidualLayerNorm]"""
    def fused_residual_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        gamma: Tensor,
        beta: Tensor | None = None,
        *,
        eps: float = 1e-06,
        **result: Unpack[Result],
    ) -> tuple[Value, Value]:
        """(rms_norm(x + residual) · gamma (+ beta), x + residual)
        [rlx.ir.ops.fused.FusedResidualRmsNorm]"""
    def fused_swiglu(
        self,
        x: Tensor,
        w_gate: Tensor,
        w_up: Tensor,
        activation: str = "silu",
        **result: Unpack[Result],
    ) -> Value:
        """activation(x · w_gate) * (x · w_up) [rlx.ir.ops.fused.FusedSwiGlu]"""
    def fused_transformer_layer(
        self,
        *tensors: Any,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norm: str = "rms",
        eps: float = 1e-06,
        mask_kind: MaskKind | str = ...,
        scale: float | None = None,
        softcap: float = 0.0,
        n_rot: int = 0,
        interleaved: bool = False,
        offset: DimLike = 0,
        has_rope: bool = True,
        has_beta: bool = False,
        has_qkv_bias: bool = False,
        has_qk_norm: bool = False,
        has_out_bias: bool = False,
        activation: str = "silu",
        gated: bool = True,
        has_ffn_bias: bool = False,
        **result: Unpack[Result],
    ) -> Any:
        """h + ffn(norm(h)) with h = fused_attention_block(x): a layer of a transformer
        [rlx.ir.ops.fused.FusedTransformerLayer]"""
    def gated_delta_net(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor | None = None,
        *,
        state_size: int = 0,
        **result: Unpack[Result],
    ) -> tuple[Value, Value]:
        """Per token and head: S ← exp(g)·S; d = (v − kᵀS)·beta; S ← S + k dᵀ; o = (q/√N)ᵀS
        [rlx.ir.ops.scan.GatedDeltaNet]"""
    def gather(self, x: Tensor, indices: Tensor, axis: int = 0, **result: Unpack[Result]) -> Value:
        """Slices of x along an axis, at `indices`, whose dims replace the axis
        [rlx.ir.ops.index.Gather]"""
    def gather_backward(
        self, dy: Tensor, indices: Tensor, size: DimLike, axis: int = 0, **result: Unpack[Result]
    ) -> Any:
        """dx of y = gather(x, indices, axis), whose axis has `size`: zeros, and the slices of
        dy added at their indices, in order [rlx.ir.ops.gather_backward.GatherBackward]"""
    def ge(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a ≥ b [rlx.ir.ops.binary.Ge]"""
    def gelu(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """x · (1 + erf(x / √2)) / 2 [rlx.ir.ops.activation_functions.Gelu]"""
    def gelu_quick(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """x · sigmoid(1.702 x) [rlx.ir.ops.activation_functions.GeluQuick]"""
    def gelu_tanh(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """x · (1 + tanh(√(2/π) · (x + 0.044715 x³))) / 2
        [rlx.ir.ops.activation_functions.GeluTanh]"""
    def group_norm(
        self,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        groups: int,
        eps: float = 1e-05,
        **result: Unpack[Result],
    ) -> Value:
        """x [B, C, ...] standardised over C/groups channels and all positions, then gamma,
        beta [C] [rlx.ir.ops.norm.GroupNorm]"""
    def grouped_matmul(
        self, x: Tensor, w: Tensor, expert: Tensor, **result: Unpack[Result]
    ) -> Value:
        """Row t of x [T, K] times the weight of its expert: w [E, K, N], expert [T] -> [T, N]
        [rlx.ir.ops.matmul.GroupedMatMul]"""
    def gru(
        self,
        x_gates: Tensor,
        r: Tensor,
        h: Tensor,
        bias: Tensor | None = None,
        *,
        reverse: bool = False,
        **result: Unpack[Result],
    ) -> tuple[Value, Value]:
        """h ← n + σ(z)·(h - n) with r, z = x_gates[t] + h·r and n = tanh(x_n + σ(r)·(h·r_n +
        bias)) [rlx.ir.ops.recurrent.Gru]"""
    def gt(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a > b [rlx.ir.ops.binary.Gt]"""
    def hard_sigmoid(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """(x + 3) / 6 limited to 0 … 1 [rlx.ir.ops.activation_functions.HardSigmoid]"""
    def hard_swish(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """x · hard_sigmoid(x) [rlx.ir.ops.activation_functions.HardSwish]"""
    def hypot(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """√(a² + b²), without overflow; inf if either is infinite [rlx.ir.ops.binary.Hypot]"""
    def imag(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """The imaginary part of a complex x [rlx.ir.ops.linalg.Imag]"""
    def iota(
        self,
        shape: DimLike | Sequence[DimLike],
        axis: int = 0,
        dtype: DTypeLike = ...,
        start: DimLike = 0,
        *,
        name: str = "",
    ) -> Value:
        """start, start + 1, … along one axis of `shape`, the same on all others
        [rlx.ir.ops.index.Iota]"""
    def irfft(self, x: Tensor, n: DimLike, axis: int = -1, **result: Unpack[Result]) -> Value:
        """The real x of length `n` whose `rfft` is given; the factor 1/n is in here
        [rlx.ir.ops.linalg.Irfft]"""
    def is_finite(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """whether x is neither infinite nor NaN [rlx.ir.ops.elementwise.IsFinite]"""
    def is_inf(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """whether x is +inf or −inf [rlx.ir.ops.elementwise.IsInf]"""
    def is_nan(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """whether x is NaN [rlx.ir.ops.elementwise.IsNan]"""
    def l2_norm(
        self, x: Tensor, axis: int = -1, eps: float = 1e-06, **result: Unpack[Result]
    ) -> Value:
        """x / sqrt(sum(x²) + eps) along `axis` [rlx.ir.ops.norm.L2Norm]"""
    def layer_norm(
        self,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor | None = None,
        *,
        eps: float = 1e-05,
        **result: Unpack[Result],
    ) -> Value:
        """(x - mean) / sqrt(variance + eps) · gamma (+ beta), over the last axis
        [rlx.ir.ops.norm.LayerNorm]"""
    def layer_norm_backward(
        self,
        x: Tensor,
        gamma: Tensor,
        dy: Tensor,
        dsum: Tensor | None = None,
        *,
        eps: float = 1e-05,
        has_beta: bool = False,
        **result: Unpack[Result],
    ) -> Any:
        """(dx, dgamma), and dbeta with `has_beta`, of y = layer_norm(x, gamma); dx + dsum if
        given [rlx.ir.ops.norm_backward.LayerNormBackward]"""
    def le(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a ≤ b [rlx.ir.ops.binary.Le]"""
    def leaky_relu(self, x: Tensor, alpha: float = 0.01, **result: Unpack[Result]) -> Value:
        """x where x ≥ 0, else alpha · x [rlx.ir.ops.activation_functions.LeakyRelu]"""
    def log(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """ln x; −inf at 0, NaN below [rlx.ir.ops.elementwise.Log]"""
    def log10(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """log₁₀ x; −inf at 0, NaN below [rlx.ir.ops.elementwise.Log10]"""
    def log1p(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """ln(1 + x), exact near 0 [rlx.ir.ops.elementwise.Log1P]"""
    def log2(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """log₂ x; −inf at 0, NaN below [rlx.ir.ops.elementwise.Log2]"""
    def log_softmax(self, x: Tensor, axis: int = -1, **result: Unpack[Result]) -> Value:
        """x minus the logarithm of the sum of e^x along the axis
        [rlx.ir.ops.reduce.LogSoftmax]"""
    def logaddexp(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """ln(e^a + e^b), without overflow [rlx.ir.ops.binary.Logaddexp]"""
    def logical_and(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a and b [rlx.ir.ops.binary.LogicalAnd]"""
    def logical_not(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """whether x is zero (NaN is not) [rlx.ir.ops.elementwise.LogicalNot]"""
    def logical_or(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a or b [rlx.ir.ops.binary.LogicalOr]"""
    def logical_xor(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a or b, not both [rlx.ir.ops.binary.LogicalXor]"""
    def lora_matmul(
        self,
        x: Tensor,
        w: Tensor,
        a: Tensor,
        b: Tensor,
        scale: float = 1.0,
        **result: Unpack[Result],
    ) -> Value:
        """x·w + scale · (x·a)·b: a weight [K, N] with a LoRA adapter a [K, R], b [R, N]
        [rlx.ir.ops.matmul.LoraMatMul]"""
    def lstm(
        self,
        x_gates: Tensor,
        r: Tensor,
        h: Tensor,
        c: Tensor,
        reverse: bool = False,
        **result: Unpack[Result],
    ) -> Any:
        """c ← σ(f)·c + σ(i)·tanh(g), h ← σ(o)·tanh(c), with (i, f, g, o) = x_gates[t] + h·r
        [rlx.ir.ops.recurrent.Lstm]"""
    def lt(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a < b [rlx.ir.ops.binary.Lt]"""
    def matmul(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a · b by NumPy's rules: batch axes broadcast, a 1-D operand is a row or a column
        [rlx.ir.ops.matmul.MatMul]"""
    def max(
        self,
        x: Tensor,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """The greatest element; NaN if there is one [rlx.ir.ops.reduce.Max]"""
    def max_pool(
        self,
        x: Tensor,
        kernel: int | Sequence[int],
        stride: int | Sequence[int] = (),
        padding: int | Sequence[int] = (0,),
        **result: Unpack[Result],
    ) -> Value:
        """The largest element of each window; NaN wins, padding never does
        [rlx.ir.ops.pool.MaxPool]"""
    def max_pool_backward(
        self,
        x: Tensor,
        dy: Tensor,
        kernel: int | Sequence[int],
        stride: int | Sequence[int] = (),
        padding: int | Sequence[int] = (0,),
        **result: Unpack[Result],
    ) -> Value:
        """dx of max_pool(x) from x and the cotangent of the result: each goes to the first
        largest element of its window, and where windows share elements they add up
        [rlx.ir.ops.conv_backward.MaxPoolBackward]"""
    def maximum(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """the greater of a and b; NaN if either is [rlx.ir.ops.binary.Maximum]"""
    def mean(
        self,
        x: Tensor,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """The sum over the number of elements; NaN of none. Integers give f32
        [rlx.ir.ops.reduce.Mean]"""
    def min(
        self,
        x: Tensor,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """The least element; NaN if there is one [rlx.ir.ops.reduce.Min]"""
    def minimum(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """the lesser of a and b; NaN if either is [rlx.ir.ops.binary.Minimum]"""
    def mod(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a − b · floor(a / b): the sign is b's; 0 where an integer b is 0
        [rlx.ir.ops.binary.Mod]"""
    def mul(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a · b [rlx.ir.ops.binary.Mul]"""
    def narrow(
        self, x: Tensor, axis: int, start: DimLike, length: DimLike, **result: Unpack[Result]
    ) -> Value:
        """`length` elements along an axis from `start` on; both may be symbolic
        [rlx.ir.ops.layout.Narrow]"""
    def ne(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a ≠ b; true where either is NaN [rlx.ir.ops.binary.Ne]"""
    def neg(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """−x [rlx.ir.ops.elementwise.Neg]"""
    def normal_cdf(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """Φ(x) = (1 + erf(x / √2)) / 2 [rlx.ir.ops.activation_functions.NormalCdf]"""
    def optimization_barrier(self, *tensors: Any, **result: Unpack[Result]) -> Any:
        """The operands. None of the results is ready before all operands are, and passes see
        neither through it nor equal values on its two sides
        [rlx.ir.ops.derivatives.OptimizationBarrier]"""
    def pad(
        self,
        x: Tensor,
        low: int | Sequence[int],
        high: int | Sequence[int],
        value: float = 0.0,
        mode: str = "constant",
        **result: Unpack[Result],
    ) -> Value:
        """low[i] elements before and high[i] after, per axis [rlx.ir.ops.layout.Pad]"""
    def paged_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Tensor,
        rows: Tensor,
        positions: Tensor,
        sinks: Tensor | None = None,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page: int,
        window: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
        coarse: bool = False,
        kv_scheme: QuantScheme | str | None = None,
        **result: Unpack[Result],
    ) -> Value:
        """Each token attends to its own sequence, up to and with itself
        [rlx.ir.ops.paged.PagedAttention]"""
    def philox(
        self,
        c0: Tensor,
        c1: Tensor,
        c2: Tensor,
        c3: Tensor,
        k0: Tensor,
        k1: Tensor,
        **result: Unpack[Result],
    ) -> Any:
        """Four random u32 words for each counter (c0 … c3) under a key (k0, k1); operands
        broadcast [rlx.ir.ops.random.Philox]"""
    def pmax(self, x: Tensor, axis_name: str, **result: Unpack[Result]) -> Value:
        """The greatest x over the mapped axis; NaN if there is one
        [rlx.ir.ops.collectives.PMax]"""
    def pmean(self, x: Tensor, axis_name: str, **result: Unpack[Result]) -> Value:
        """The mean of x over the mapped axis; integers give f32 [rlx.ir.ops.collectives.PMean]"""
    def pmin(self, x: Tensor, axis_name: str, **result: Unpack[Result]) -> Value:
        """The least x over the mapped axis; NaN if there is one [rlx.ir.ops.collectives.PMin]"""
    def pow(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a^b; integers wrap, and towards 0 for a negative b [rlx.ir.ops.binary.Pow]"""
    def prod(
        self,
        x: Tensor,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """The product of the elements; 1 of none [rlx.ir.ops.reduce.Prod]"""
    def psum(self, x: Tensor, axis_name: str, **result: Unpack[Result]) -> Value:
        """The sum of x over the mapped axis, the same for all its elements
        [rlx.ir.ops.collectives.PSum]"""
    def qlinear_conv(
        self,
        x: Tensor,
        w: Tensor,
        x_zero: Tensor,
        scale: Tensor,
        y_zero: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        r_zero: Tensor | None = None,
        factors: Tensor | None = None,
        sum_zero: Tensor | None = None,
        *,
        stride: int | Sequence[int] = (1,),
        padding: int | Sequence[int] = (0,),
        dilation: int | Sequence[int] = (1,),
        groups: int = 1,
        activation: str = "none",
        **result: Unpack[Result],
    ) -> Value:
        """A `conv_integer` whose sums become 8-bit integers again: (sums + bias) · scale,
        rounded half to even, plus `y_zero`, clamped to its type
        [rlx.ir.ops.conv_integer.QLinearConv]"""
    def qr(
        self, x: Tensor, complete: bool = False, tall: bool = True, **result: Unpack[Result]
    ) -> tuple[Value, Value]:
        """x = q·r with orthonormal columns of q and upper triangular r
        [rlx.ir.ops.factorizations.Qr]"""
    def quantize(
        self,
        x: Tensor,
        scale: Tensor,
        zp: Tensor | None = None,
        *,
        dtype: DTypeLike = ...,
        axis: int | None = None,
        **result: Unpack[Result],
    ) -> Value:
        """clamp(round(x / scale) + zp) to `dtype`; ties go to the even neighbour, NaN to zp
        [rlx.ir.ops.quantize.Quantize]"""
    def quantize_blocks(
        self, x: Tensor, scheme: QuantScheme | str = ..., **result: Unpack[Result]
    ) -> Value:
        """Rows x [..., K] packed in blocks with their own scale: bytes [..., row bytes]
        [rlx.ir.ops.quantize.QuantizeBlocks]"""
    def real(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """The real part of a complex x [rlx.ir.ops.linalg.Real]"""
    def reciprocal(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """1 / x; ±inf at ±0 [rlx.ir.ops.elementwise.Reciprocal]"""
    def relu(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """max(x, 0); NaN of NaN [rlx.ir.ops.elementwise.Relu]"""
    def relu6(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """x limited to 0 … 6 [rlx.ir.ops.activation_functions.Relu6]"""
    def reshape(self, x: Tensor, shape: DimLike | Sequence[DimLike], *, name: str = "") -> Value:
        """The elements in the same order under another shape; one size may be −1 (inferred)
        [rlx.ir.ops.layout.Reshape]"""
    def resize(
        self,
        x: Tensor,
        sizes: DimLike | Sequence[DimLike],
        mode: str = "nearest",
        align_corners: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """Spatial axes brought to `sizes` [rlx.ir.ops.pool.Resize]"""
    def rfft(self, x: Tensor, axis: int = -1, **result: Unpack[Result]) -> Value:
        """The first n // 2 + 1 terms of the transform of a real x; the others mirror them
        [rlx.ir.ops.linalg.Rfft]"""
    def rms_norm(
        self,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor | None = None,
        *,
        eps: float = 1e-06,
        **result: Unpack[Result],
    ) -> Value:
        """x / sqrt(mean(x²) + eps) · gamma (+ beta), over the last axis
        [rlx.ir.ops.norm.RmsNorm]"""
    def rms_norm_backward(
        self,
        x: Tensor,
        gamma: Tensor,
        dy: Tensor,
        dsum: Tensor | None = None,
        *,
        eps: float = 1e-06,
        has_beta: bool = False,
        **result: Unpack[Result],
    ) -> Any:
        """(dx, dgamma), and dbeta with `has_beta`, of y = rms_norm(x, gamma); dx + dsum if
        given [rlx.ir.ops.norm_backward.RmsNormBackward]"""
    def rope(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None = None,
        *,
        head_dim: int,
        n_rot: int = 0,
        interleaved: bool = False,
        offset: DimLike = 0,
        layout: str = "bshd",
        **result: Unpack[Result],
    ) -> Value:
        """Rotates pairs of each head by the angle of the token's position
        [rlx.ir.ops.rope.Rope]"""
    def round(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """the nearest whole number, halves to the even one [rlx.ir.ops.elementwise.Round]"""
    def rsqrt(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """1 / √x; inf at 0, NaN below [rlx.ir.ops.elementwise.Rsqrt]"""
    @overload
    def sample(
        self,
        logits: Tensor,
        rng: Tensor,
        settings: Tensor | None = None,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        **result: Unpack[Result],
    ) -> tuple[Value, Value]:
        """Temperature → top-k → softmax → top-p → min-p → draw; returns (tokens, the next rng)
        [rlx.ir.ops.sample.Sample]"""
    @overload
    def sample(
        self,
        logits: Tensor,
        top_k: int = 0,
        top_p: float = 1.0,
        temperature: float = 1.0,
        seed: int = 0,
        *,
        min_p: float = 0.0,
        **result: Unpack[Result],
    ) -> Value:
        """Temperature → top-k → softmax → top-p → min-p → draw; returns (tokens, the next rng)
        [rlx.ir.ops.sample.Sample]"""
    def scan(
        self,
        *tensors: Any,
        body: BodyLike,
        n_carry: int,
        n_xs: int,
        length: DimLike | None = None,
        reverse: bool = False,
        **result: Unpack[Result],
    ) -> Any:
        """Runs `body` for each index of axis 0 of the scanned operands, with loop-carried
        values [rlx.ir.ops.control.Scan]"""
    def scatter(
        self, x: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, **result: Unpack[Result]
    ) -> Value:
        """x with its slices at `indices` [n] replaced by those of `updates`; the last of equal
        ones [rlx.ir.ops.index.Scatter]"""
    def scatter_add(
        self, x: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, **result: Unpack[Result]
    ) -> Value:
        """x with the slices of `updates` added at `indices` [n]; equal indices add up
        [rlx.ir.ops.index.ScatterAdd]"""
    def scatter_reduce(
        self,
        x: Tensor,
        indices: Tensor,
        updates: Tensor,
        axis: int = 0,
        how: str = "mul",
        **result: Unpack[Result],
    ) -> Value:
        """x with its slices at `indices` [n] multiplied by those of `updates`, or the extremum
        of both [rlx.ir.ops.index.ScatterReduce]"""
    def searchsorted(
        self, table: Tensor, x: Tensor, side: str = "left", **result: Unpack[Result]
    ) -> Value:
        """Where each element of x would be inserted to keep the ascending `table` [n] sorted,
        in i64: on the left, before equal ones, or on the right, after them
        [rlx.ir.ops.sort.SearchSorted]"""
    def selective_scan(
        self,
        u: Tensor,
        delta: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None = None,
        state: Tensor | None = None,
        *,
        has_d: bool = False,
        has_state: bool = False,
        **result: Unpack[Result],
    ) -> tuple[Value, Value]:
        """h ← exp(delta·a)·h + delta·b·u; y = Σ_n c·h + d·u; returns (y, the last h)
        [rlx.ir.ops.scan.SelectiveScan]"""
    def shift_left(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a << b; 0 where b is not in 0 … bits − 1 [rlx.ir.ops.binary.ShiftLeft]"""
    def shift_right(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a >> b, arithmetic; all sign where b is too far [rlx.ir.ops.binary.ShiftRight]"""
    def sigmoid(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """1 / (1 + e^−x) [rlx.ir.ops.activation_functions.Sigmoid]"""
    def sign(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """−1, 0 or 1, of a complex x x / |x|; NaN of NaN [rlx.ir.ops.elementwise.Sign]"""
    def signbit(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """whether x is negative, or −0 [rlx.ir.ops.elementwise.Signbit]"""
    def silu(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """x · sigmoid(x) [rlx.ir.ops.activation_functions.Silu]"""
    def sin(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """sin x, x in radians [rlx.ir.ops.elementwise.Sin]"""
    def sinh(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """(e^x − e^−x) / 2 [rlx.ir.ops.trigonometry.Sinh]"""
    def slice(
        self,
        x: Tensor,
        starts: Sequence[int | None],
        stops: Sequence[int | None],
        steps: int | Sequence[int] | None = None,
        **result: Unpack[Result],
    ) -> Value:
        """Every steps[i]-th element from starts[i] to before stops[i], per axis
        [rlx.ir.ops.layout.Slice]"""
    def slogdet(self, x: Tensor, **result: Unpack[Result]) -> tuple[Value, Value]:
        """The sign of the determinant, of a complex x a number of size 1, and ln |det x|
        [rlx.ir.ops.factorizations.SlogDet]"""
    def softmax(self, x: Tensor, axis: int = -1, **result: Unpack[Result]) -> Value:
        """e^x over its sum along the axis; NaN where every element is −inf
        [rlx.ir.ops.reduce.Softmax]"""
    def softmax_cross_entropy(
        self,
        logits: Tensor,
        labels: Tensor,
        ignore_index: int | None = None,
        **result: Unpack[Result],
    ) -> Any:
        """(ln Σ exp(logits) − logits[label], ln Σ exp(logits)) of each row; the loss is 0 for
        a row whose label is `ignore_index` [rlx.ir.ops.losses.SoftmaxCrossEntropy]"""
    def softmax_cross_entropy_backward(
        self,
        logits: Tensor,
        labels: Tensor,
        lse: Tensor,
        dloss: Tensor,
        ignore_index: int | None = None,
        **result: Unpack[Result],
    ) -> Any:
        """dlogits = (exp(logits − lse) − onehot(label)) · dloss, row by row; may overwrite the
        logits. Rows whose label is `ignore_index` get zeros
        [rlx.ir.ops.losses.SoftmaxCrossEntropyBackward]"""
    def softplus(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """ln(1 + e^x) [rlx.ir.ops.activation_functions.Softplus]"""
    def solve(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """x with a·x = b, for `a [..., n, n]` and `b [..., n, m]`; batch axes broadcast
        [rlx.ir.ops.linalg.Solve]"""
    def sort(
        self, x: Tensor, axis: int = -1, descending: bool = False, **result: Unpack[Result]
    ) -> Value:
        """The elements in order along an axis; equal ones keep theirs [rlx.ir.ops.sort.Sort]"""
    def sqrt(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """√x; NaN below 0 [rlx.ir.ops.elementwise.Sqrt]"""
    def square(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """x² [rlx.ir.ops.elementwise.Square]"""
    def state_update(
        self,
        state: Tensor,
        update: Tensor,
        slots: Tensor | None = None,
        *,
        axis: int = 0,
        start: DimLike = 0,
        **result: Unpack[Result],
    ) -> Value:
        """The state with `update` written in place at `start` along `axis`
        [rlx.ir.ops.source.StateUpdate]"""
    def stop_gradient(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """x, with a derivative of zero [rlx.ir.ops.derivatives.StopGradient]"""
    def sub(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a − b [rlx.ir.ops.binary.Sub]"""
    def sum(
        self,
        x: Tensor,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """The sum of the elements; 0 of none. Of bools: how many are true
        [rlx.ir.ops.reduce.Sum]"""
    def svd(
        self,
        x: Tensor,
        full: bool = False,
        tall: bool = True,
        vectors: bool = True,
        **result: Unpack[Result],
    ) -> Any:
        """x = u·diag(s)·vh with orthonormal u and vh, and s ≥ 0 in descending order
        [rlx.ir.ops.factorizations.Svd]"""
    def take_along(
        self, x: Tensor, indices: Tensor, axis: int = -1, **result: Unpack[Result]
    ) -> Value:
        """One element per index along an axis; the other axes of x and `indices` broadcast
        [rlx.ir.ops.index.TakeAlong]"""
    def tan(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """tan x, x in radians [rlx.ir.ops.elementwise.Tan]"""
    def tanh(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """tanh x [rlx.ir.ops.elementwise.Tanh]"""
    def top_k(
        self, x: Tensor, k: int, axis: int = -1, largest: bool = True, **result: Unpack[Result]
    ) -> tuple[Value, Value]:
        """The k greatest (or least) elements along an axis in order, and their indices (i32)
        [rlx.ir.ops.reduce.TopK]"""
    def transpose(self, x: Tensor, axes: int | Sequence[int], **result: Unpack[Result]) -> Value:
        """Axes reordered: axis i of the result is axis axes[i] of x
        [rlx.ir.ops.layout.Transpose]"""
    def trunc(self, x: Tensor, **result: Unpack[Result]) -> Value:
        """the next whole number towards 0 [rlx.ir.ops.elementwise.Trunc]"""
    def where(self, condition: Tensor, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a where the bool `condition` is true, else b; all three broadcast
        [rlx.ir.ops.binary.Where]"""
    def while_loop(
        self,
        *tensors: Any,
        condition: BodyLike,
        body: BodyLike,
        n_carry: int,
        max_iterations: int = 0,
        must_end: bool = False,
        **result: Unpack[Result],
    ) -> Any:
        """Runs `body` on the loop-carried values while `condition` holds; returns the last
        ones [rlx.ir.ops.control.WhileLoop]"""

class BlockMethods(OpMethods):
    """A method for every HIR block."""

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        mask_kind: MaskKind | str | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        q_layout: str = "bshd",
        kv_layout: str = "bshd",
        kv_scheme: QuantScheme | str | None = None,
        coarse: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """softmax(scale · q kᵀ, masked) v per head, key heads shared by groups of query heads
        [rlx.ir.blocks.attention.Attention]"""
    def cache_append(
        self, state: Tensor, update: Tensor, start: DimLike, axis: int = 1, **result: Unpack[Result]
    ) -> Value:
        """Writes `update` into a state at `start` along `axis`; returns the filled part
        [rlx.ir.blocks.attention.CacheAppend]"""
    def conv1d(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None = None,
        *,
        stride: int | Sequence[int] = (1,),
        padding: int | Sequence[int] = (0,),
        dilation: int | Sequence[int] = (1,),
        groups: int = 1,
        activation: str | None = None,
        **result: Unpack[Result],
    ) -> Value:
        """activation(conv(x [B, C, n], w [O, C/groups, k]) + bias [O])
        [rlx.ir.blocks.layers.Conv1d]"""
    def conv2d(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None = None,
        *,
        stride: int | Sequence[int] = (1,),
        padding: int | Sequence[int] = (0,),
        dilation: int | Sequence[int] = (1,),
        groups: int = 1,
        activation: str | None = None,
        **result: Unpack[Result],
    ) -> Value:
        """activation(conv(x [B, C, h, w], w [O, C/groups, kh, kw]) + bias [O])
        [rlx.ir.blocks.layers.Conv2d]"""
    def depthwise_conv1d_causal(
        self,
        x: Tensor,
        weight: Tensor,
        left_pad: Tensor,
        kernel_size: int = 0,
        **result: Unpack[Result],
    ) -> Value:
        """Each channel of x [B, S, C] convolved with its K taps of weight [C, K], seeing the
        past only [rlx.ir.blocks.layers.DepthwiseConv1dCausal]"""
    def dequant_matmul(
        self,
        x: Tensor,
        w: Tensor,
        scale: Tensor | None = None,
        zp: Tensor | None = None,
        *,
        scheme: QuantScheme | str,
        **result: Unpack[Result],
    ) -> Value:
        """x · dequant(W), W packed [N, row bytes] and never unpacked as a whole
        [rlx.ir.blocks.linear.DequantMatmul]"""
    def embedding(
        self, ids: Tensor, table: Tensor, scale: float = 1.0, **result: Unpack[Result]
    ) -> Value:
        """Rows `ids` of the table [V, K], times `scale`: [...] -> [..., K]
        [rlx.ir.blocks.linear.Embedding]"""
    def gated_delta_net(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state_size: int = 0,
        **result: Unpack[Result],
    ) -> Value:
        """Per token: S ← exp(g)·S; d = (v − kᵀS)·beta; S ← S + k dᵀ; o = (q/√N)ᵀS, from S = 0
        [rlx.ir.blocks.layers.GatedDeltaNet]"""
    def gated_delta_net_carry(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        state_size: int = 0,
        **result: Unpack[Result],
    ) -> tuple[Value, Value]:
        """The gated delta rule from a given state [B, H, N, N]; returns (o, the last state)
        [rlx.ir.blocks.layers.GatedDeltaNetCarry]"""
    def geglu_ffn(
        self,
        x: Tensor,
        up_w: Tensor,
        gate_w: Tensor,
        down_w: Tensor,
        activation: str = "gelu",
        **result: Unpack[Result],
    ) -> Value:
        """(gelu(x·gate) * (x·up))·down [rlx.ir.blocks.linear.GegluFfn]"""
    def gelu_ffn(
        self,
        x: Tensor,
        up_w: Tensor,
        down_w: Tensor,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        *,
        activation: str = "gelu",
        **result: Unpack[Result],
    ) -> Value:
        """gelu(x·up + up_bias)·down + down_bias [rlx.ir.blocks.linear.GeluFfn]"""
    def layer_norm(
        self,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor | None = None,
        *,
        eps: float = 1e-05,
        **result: Unpack[Result],
    ) -> Value:
        """(x - mean) · rsqrt(variance + eps) · gamma (+ beta) [rlx.ir.blocks.layers.LayerNorm]"""
    def linear(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None = None,
        *,
        activation: str | None = None,
        transposed: bool = False,
        strassen: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """activation(x·W + bias), W [K, N], or [N, K] when transposed
        [rlx.ir.blocks.linear.Linear]"""
    def linear_fused(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor,
        activation: str | None = None,
        **result: Unpack[Result],
    ) -> Value:
        """activation(x·W + bias) as one fused node, whatever the policy
        [rlx.ir.blocks.linear.LinearFused]"""
    def lm_head(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None = None,
        *,
        transposed: bool = False,
        softcap: float = 0.0,
        last_only: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """Logits x·W (+ bias): W [K, V], or the embedding table [V, K] when transposed
        [rlx.ir.blocks.linear.LmHead]"""
    def lora_linear(
        self,
        x: Tensor,
        w: Tensor,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None = None,
        *,
        scale: float = 1.0,
        activation: str | None = None,
        **result: Unpack[Result],
    ) -> Value:
        """activation(x·W + scale · (x·A)·B + bias): a weight [K, N] with a LoRA adapter
        [rlx.ir.blocks.linear.LoraLinear]"""
    def moe_ffn(
        self,
        x: Tensor,
        router_w: Tensor,
        up_w: Tensor,
        gate_w: Tensor,
        down_w: Tensor,
        top_k: int,
        normalize: bool = True,
        activation: str = "silu",
        scoring: str = "softmax",
        scale: float = 1.0,
        **result: Unpack[Result],
    ) -> Value:
        """Each token through the `top_k` experts its router prefers, weighted by their scores
        [rlx.ir.blocks.linear.MoeFfn]"""
    def qk_norm_rope(
        self,
        x: Tensor,
        gamma: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None = None,
        *,
        head_dim: int,
        n_rot: int = 0,
        interleaved: bool = False,
        offset: DimLike = 0,
        eps: float = 1e-06,
        layout: str = "bshd",
        **result: Unpack[Result],
    ) -> Value:
        """rope(rms_norm of each head · gamma [head_dim]); tensors and attributes as for rope
        [rlx.ir.blocks.attention.QkNormRope]"""
    def residual_layer_norm(
        self,
        x: Tensor,
        residual: Tensor,
        gamma: Tensor,
        beta: Tensor | None = None,
        *,
        eps: float = 1e-05,
        **result: Unpack[Result],
    ) -> tuple[Value, Value]:
        """(layer_norm(x + residual), x + residual) [rlx.ir.blocks.layers.ResidualLayerNorm]"""
    def residual_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        gamma: Tensor,
        beta: Tensor | None = None,
        *,
        eps: float = 1e-06,
        **result: Unpack[Result],
    ) -> tuple[Value, Value]:
        """(rms_norm(x + residual), x + residual) [rlx.ir.blocks.layers.ResidualRmsNorm]"""
    def rms_norm(
        self,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor | None = None,
        *,
        eps: float = 1e-06,
        **result: Unpack[Result],
    ) -> Value:
        """x · rsqrt(mean(x²) + eps) · gamma (+ beta) [rlx.ir.blocks.layers.RmsNorm]"""
    def rope(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None = None,
        *,
        head_dim: int,
        n_rot: int = 0,
        interleaved: bool = False,
        offset: DimLike = 0,
        layout: str = "bshd",
        **result: Unpack[Result],
    ) -> Value:
        """Rotates pairs (i, i + n_rot/2) of each head by the angle of the token's position
        [rlx.ir.blocks.attention.Rope]"""
    def shared_linear_pair(
        self, x: Tensor, w1: Tensor, w2: Tensor, **result: Unpack[Result]
    ) -> tuple[Value, Value]:
        """(x·W1, x·W2) as one matmul [rlx.ir.blocks.linear.SharedLinearPair]"""
    def swiglu_ffn(
        self,
        x: Tensor,
        up_w: Tensor,
        gate_w: Tensor,
        down_w: Tensor,
        activation: str = "silu",
        **result: Unpack[Result],
    ) -> Value:
        """(silu(x·gate) * (x·up))·down [rlx.ir.blocks.linear.SwigluFfn]"""

class ValueMethods:
    """Every op and block, its first tensor the value."""

    def abs(self, **result: Unpack[Result]) -> Value:
        """|x|; of a complex number its magnitude, a real number [rlx.ir.ops.elementwise.Abs]"""
    def acos(self, **result: Unpack[Result]) -> Value:
        """the angle in 0 … π whose cosine is x; NaN beyond 1 [rlx.ir.ops.trigonometry.Acos]"""
    def acosh(self, **result: Unpack[Result]) -> Value:
        """ln(x + √(x² − 1)); NaN below 1 [rlx.ir.ops.trigonometry.Acosh]"""
    def add(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """a + b [rlx.ir.ops.binary.Add]"""
    def all(
        self,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """Whether no element is zero; true of none [rlx.ir.ops.reduce.All]"""
    def all_gather(
        self, axis_name: str, size: DimLike, axis: int = 0, **result: Unpack[Result]
    ) -> Value:
        """The x of all elements of the mapped axis, whose size is `size`, stacked on a new
        axis [rlx.ir.ops.collectives.AllGather]"""
    def any(
        self,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """Whether one element is not zero; false of none [rlx.ir.ops.reduce.Any_]"""
    def argmax(self, axis: int = -1, keepdims: bool = False, **result: Unpack[Result]) -> Value:
        """The index of the greatest element, or of the first NaN; the lowest of equal ones
        [rlx.ir.ops.reduce.ArgMax]"""
    def argmin(self, axis: int = -1, keepdims: bool = False, **result: Unpack[Result]) -> Value:
        """The index of the least element, or of the first NaN; the lowest of equal ones
        [rlx.ir.ops.reduce.ArgMin]"""
    def argsort(self, axis: int = -1, descending: bool = False, **result: Unpack[Result]) -> Value:
        """The indices (i64) that sort an axis; those of equal elements ascend
        [rlx.ir.ops.sort.ArgSort]"""
    def asin(self, **result: Unpack[Result]) -> Value:
        """the angle in −π/2 … π/2 whose sine is x; NaN beyond 1 [rlx.ir.ops.trigonometry.Asin]"""
    def asinh(self, **result: Unpack[Result]) -> Value:
        """ln(x + √(x² + 1)) [rlx.ir.ops.trigonometry.Asinh]"""
    def atan(self, **result: Unpack[Result]) -> Value:
        """the angle in −π/2 … π/2 whose tangent is x [rlx.ir.ops.trigonometry.Atan]"""
    def atan2(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """the angle of the point (b, a) from the x axis [rlx.ir.ops.binary.Atan2]"""
    def atanh(self, **result: Unpack[Result]) -> Value:
        """ln((1 + x) / (1 − x)) / 2; ±inf at ±1, NaN beyond [rlx.ir.ops.trigonometry.Atanh]"""
    def attention(
        self,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        mask_kind: MaskKind | str | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        q_layout: str = "bshd",
        kv_layout: str = "bshd",
        kv_scheme: QuantScheme | str | None = None,
        coarse: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """softmax(scale · q kᵀ, masked) v per head, key heads shared by groups of query heads
        [rlx.ir.blocks.attention.Attention]"""
    def attention_backward(
        self,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        mask: Tensor | None = None,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask_kind: MaskKind | str = ...,
        scale: float | None = None,
        softcap: float = 0.0,
        q_layout: str = "bshd",
        kv_layout: str = "bshd",
        wants_bias: bool = False,
        **result: Unpack[Result],
    ) -> Any:
        """(dq, dk, dv) from out and lse of `attention_with_lse` and the cotangent of out
        [rlx.ir.ops.attention_backward.AttentionBackward]"""
    def attention_with_lse(
        self,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask_kind: MaskKind | str = ...,
        scale: float | None = None,
        softcap: float = 0.0,
        q_layout: str = "bshd",
        kv_layout: str = "bshd",
        kv_scheme: QuantScheme | str | None = None,
        has_sinks: bool = False,
        coarse: bool = False,
        **result: Unpack[Result],
    ) -> tuple[Value, Value]:
        """(attention, ln Σ exp(scores) of each row [B, H, Sq]): what backward needs. Masked
        keys do not count, a sink does; −inf for a query without any key
        [rlx.ir.ops.attention_backward.AttentionWithLse]"""
    def avg_pool(
        self,
        kernel: int | Sequence[int],
        stride: int | Sequence[int] = (),
        padding: int | Sequence[int] = (0,),
        count_include_pad: bool = True,
        **result: Unpack[Result],
    ) -> Value:
        """The mean of each window; padding counts as zeros, or not at all
        [rlx.ir.ops.pool.AvgPool]"""
    def bitwise_and(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """a & b [rlx.ir.ops.binary.BitwiseAnd]"""
    def bitwise_not(self, **result: Unpack[Result]) -> Value:
        """every bit flipped; logical not of a bool [rlx.ir.ops.elementwise.BitwiseNot]"""
    def bitwise_or(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """a | b [rlx.ir.ops.binary.BitwiseOr]"""
    def bitwise_xor(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """a ^ b [rlx.ir.ops.binary.BitwiseXor]"""
    def cache_append(
        self, update: Tensor, start: DimLike, axis: int = 1, **result: Unpack[Result]
    ) -> Value:
        """Writes `update` into a state at `start` along `axis`; returns the filled part
        [rlx.ir.blocks.attention.CacheAppend]"""
    def cast(self, dtype: DTypeLike, **result: Unpack[Result]) -> Value:
        """x in another element type [rlx.ir.ops.cast.Cast]"""
    def ceil(self, **result: Unpack[Result]) -> Value:
        """the next whole number towards +inf [rlx.ir.ops.elementwise.Ceil]"""
    def cholesky(self, upper: bool = False, **result: Unpack[Result]) -> Value:
        """The lower triangular l with x = l·lᴴ of a positive definite x, or with `upper` u and
        uᴴ·u [rlx.ir.ops.factorizations.Cholesky]"""
    def clamp(self, low: float = ..., high: float = ..., **result: Unpack[Result]) -> Value:
        """x limited to low … high; NaN of NaN. Integers take whole bounds
        [rlx.ir.ops.elementwise.Clamp]"""
    def complex(self, im: Tensor, **result: Unpack[Result]) -> Value:
        """re + i·im, from f32 or f64 parts [rlx.ir.ops.linalg.Complex]"""
    def concat(self, *tensors: Any, axis: int = 0, **result: Unpack[Result]) -> Value:
        """Tensors one after the other along an axis, in their promoted element type
        [rlx.ir.ops.layout.Concat]"""
    def cond(
        self, *tensors: Any, then: BodyLike, otherwise: BodyLike, **result: Unpack[Result]
    ) -> Any:
        """The results of `then` on the operands where the predicate holds, of `otherwise`
        elsewhere [rlx.ir.ops.control.Cond]"""
    def contiguous(self, **result: Unpack[Result]) -> Value:
        """A contiguous (row-major) copy of a view [rlx.ir.ops.source.Contiguous]"""
    def conv(
        self,
        w: Tensor,
        bias: Tensor | None = None,
        *,
        stride: int | Sequence[int] = (1,),
        padding: int | Sequence[int] = (0,),
        dilation: int | Sequence[int] = (1,),
        groups: int = 1,
        **result: Unpack[Result],
    ) -> Value:
        """`x [B, C, *n]` with `w [O, C/groups, *kernel]`, plus bias `[O]`; 1-D and 2-D
        [rlx.ir.ops.conv.Conv]"""
    def conv1d(
        self,
        w: Tensor,
        bias: Tensor | None = None,
        *,
        stride: int | Sequence[int] = (1,),
        padding: int | Sequence[int] = (0,),
        dilation: int | Sequence[int] = (1,),
        groups: int = 1,
        activation: str | None = None,
        **result: Unpack[Result],
    ) -> Value:
        """activation(conv(x [B, C, n], w [O, C/groups, k]) + bias [O])
        [rlx.ir.blocks.layers.Conv1d]"""
    def conv2d(
        self,
        w: Tensor,
        bias: Tensor | None = None,
        *,
        stride: int | Sequence[int] = (1,),
        padding: int | Sequence[int] = (0,),
        dilation: int | Sequence[int] = (1,),
        groups: int = 1,
        activation: str | None = None,
        **result: Unpack[Result],
    ) -> Value:
        """activation(conv(x [B, C, h, w], w [O, C/groups, kh, kw]) + bias [O])
        [rlx.ir.blocks.layers.Conv2d]"""
    def conv_integer(
        self,
        w: Tensor,
        x_zero: Tensor,
        stride: int | Sequence[int] = (1,),
        padding: int | Sequence[int] = (0,),
        dilation: int | Sequence[int] = (1,),
        groups: int = 1,
        **result: Unpack[Result],
    ) -> Value:
        """Sums of (x − x_zero) · w in i32; x `[B, C, *n]` u8 or i8, w `[O, C/groups, *kernel]`
        i8 [rlx.ir.ops.conv_integer.ConvInteger]"""
    def conv_transpose(
        self,
        w: Tensor,
        bias: Tensor | None = None,
        *,
        stride: int | Sequence[int] = (1,),
        padding: int | Sequence[int] = (0,),
        dilation: int | Sequence[int] = (1,),
        groups: int = 1,
        output_padding: int | Sequence[int] = (0,),
        **result: Unpack[Result],
    ) -> Value:
        """Transposed convolution: every element of `x [B, C, *n]` adds a scaled kernel to the
        output [rlx.ir.ops.conv.ConvTranspose]"""
    def conv_weight_backward(
        self,
        dy: Tensor,
        kernel: int | Sequence[int],
        stride: int | Sequence[int] = (1,),
        padding: int | Sequence[int] = (0,),
        dilation: int | Sequence[int] = (1,),
        groups: int = 1,
        **result: Unpack[Result],
    ) -> Any:
        """dw `[O, C/groups, *kernel]` of conv(x, w), from x and the cotangent `dy [B, O,
        *windows]` [rlx.ir.ops.conv_backward.ConvWeightBackward]"""
    def copysign(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """|a| with the sign of b, also of −0 [rlx.ir.ops.binary.Copysign]"""
    def cos(self, **result: Unpack[Result]) -> Value:
        """cos x, x in radians [rlx.ir.ops.elementwise.Cos]"""
    def cosh(self, **result: Unpack[Result]) -> Value:
        """(e^x + e^−x) / 2 [rlx.ir.ops.trigonometry.Cosh]"""
    def cumprod(
        self,
        axis: int = -1,
        exclusive: bool = False,
        reverse: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """Each element replaced by the product up to it; `exclusive` and `reverse` as in
        cumsum [rlx.ir.ops.reduce.CumProd]"""
    def cumsum(
        self,
        axis: int = -1,
        exclusive: bool = False,
        reverse: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """Each element replaced by the sum up to it [rlx.ir.ops.reduce.CumSum]"""
    def depthwise_conv1d_causal(
        self, weight: Tensor, left_pad: Tensor, kernel_size: int = 0, **result: Unpack[Result]
    ) -> Value:
        """Each channel of x [B, S, C] convolved with its K taps of weight [C, K], seeing the
        past only [rlx.ir.blocks.layers.DepthwiseConv1dCausal]"""
    def dequant_gather(
        self,
        ids: Tensor,
        scale: Tensor | None = None,
        zp: Tensor | None = None,
        *,
        scheme: QuantScheme | str,
        **result: Unpack[Result],
    ) -> Value:
        """Rows `ids` of a packed table [V, row] as f32: ids [...] -> [..., K]
        [rlx.ir.ops.dequant.DequantGather]"""
    def dequant_grouped_matmul(
        self,
        w: Tensor,
        expert: Tensor,
        scale: Tensor | None = None,
        zp: Tensor | None = None,
        *,
        scheme: QuantScheme | str,
        **result: Unpack[Result],
    ) -> Value:
        """Row t of x [T, K] · dequant(w[expert[t]])ᵀ; w packed [E, N, row] -> [T, N]
        [rlx.ir.ops.dequant.DequantGroupedMatMul]"""
    def dequant_matmul(
        self,
        w: Tensor,
        scale: Tensor | None = None,
        zp: Tensor | None = None,
        *,
        scheme: QuantScheme | str,
        **result: Unpack[Result],
    ) -> Value:
        """x · dequant(W), W packed [N, row bytes] and never unpacked as a whole
        [rlx.ir.blocks.linear.DequantMatmul]"""
    def dequant_matmul_transposed(
        self,
        w: Tensor,
        scale: Tensor | None = None,
        zp: Tensor | None = None,
        *,
        scheme: QuantScheme | str,
        **result: Unpack[Result],
    ) -> Value:
        """x [..., N] · dequant(w) with w packed [N, row]: `dequant_matmul` transposed, as its
        backward part needs it [rlx.ir.ops.dequant.DequantMatMulTransposed]"""
    def dequant_moe_weights(
        self,
        expert: Tensor,
        scale: Tensor | None = None,
        zp: Tensor | None = None,
        *,
        scheme: QuantScheme | str,
        **result: Unpack[Result],
    ) -> Value:
        """The weights of the chosen experts: w packed [E, N, row], expert [T] -> f32 [T, K, N]
        [rlx.ir.ops.dequant.DequantMoeWeights]"""
    def dequantize(
        self,
        scale: Tensor,
        zp: Tensor | None = None,
        *,
        axis: int | None = None,
        **result: Unpack[Result],
    ) -> Value:
        """(x - zp) * scale, in the element type of the scale [rlx.ir.ops.quantize.Dequantize]"""
    def div(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """a / b; of integers an f32 [rlx.ir.ops.binary.Div]"""
    def dot_general(
        self,
        b: Tensor,
        lhs_contract: int | Sequence[int],
        rhs_contract: int | Sequence[int],
        lhs_batch: int | Sequence[int] = (),
        rhs_batch: int | Sequence[int] = (),
        **result: Unpack[Result],
    ) -> Value:
        """Sums over pairs of contracted axes; batch axes come first, then the free ones of a,
        of b [rlx.ir.ops.matmul.DotGeneral]"""
    def eig(self, vectors: bool = True, **result: Unpack[Result]) -> Any:
        """Complex eigenvalues of a square x, and eigenvectors as columns
        [rlx.ir.ops.factorizations.Eig]"""
    def eigh(self, vectors: bool = True, **result: Unpack[Result]) -> Any:
        """Eigenvalues of a symmetric or Hermitian x in ascending order, and eigenvectors as
        columns [rlx.ir.ops.factorizations.Eigh]"""
    def elu(self, alpha: float = 1.0, **result: Unpack[Result]) -> Value:
        """x where x ≥ 0, else alpha · (e^x − 1) [rlx.ir.ops.activation_functions.Elu]"""
    def embedding(self, table: Tensor, scale: float = 1.0, **result: Unpack[Result]) -> Value:
        """Rows `ids` of the table [V, K], times `scale`: [...] -> [..., K]
        [rlx.ir.blocks.linear.Embedding]"""
    def eq(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """a = b; false where either is NaN [rlx.ir.ops.binary.Eq]"""
    def erf(self, **result: Unpack[Result]) -> Value:
        """the error function, 2/√π ∫₀ˣ e^(−t²) dt [rlx.ir.ops.elementwise.Erf]"""
    def exp(self, **result: Unpack[Result]) -> Value:
        """e^x [rlx.ir.ops.elementwise.Exp]"""
    def exp2(self, **result: Unpack[Result]) -> Value:
        """2^x [rlx.ir.ops.elementwise.Exp2]"""
    def expm1(self, **result: Unpack[Result]) -> Value:
        """e^x − 1, exact near 0 [rlx.ir.ops.elementwise.Expm1]"""
    def fake_quantize(
        self,
        scale: Tensor,
        zp: Tensor | None = None,
        *,
        dtype: DTypeLike = ...,
        axis: int | None = None,
        **result: Unpack[Result],
    ) -> Value:
        """dequantize(quantize(x)): x with the error that storing it as `dtype` would bring
        [rlx.ir.ops.quantize.FakeQuantize]"""
    def fft(self, axis: int = -1, inverse: bool = False, **result: Unpack[Result]) -> Value:
        """X[k] = Σ_j x[j]·exp(−2πi·jk/n) along `axis`; the inverse has +2πi and the factor 1/n
        [rlx.ir.ops.linalg.Fft]"""
    def flip(self, axis: int | Sequence[int], **result: Unpack[Result]) -> Value:
        """The order of elements reversed along axes [rlx.ir.ops.layout.Flip]"""
    def floor(self, **result: Unpack[Result]) -> Value:
        """the next whole number towards −inf [rlx.ir.ops.elementwise.Floor]"""
    def floor_div(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """floor(a / b); 0 where an integer b is 0 [rlx.ir.ops.binary.FloorDiv]"""
    def fused_attention_block(
        self,
        *tensors: Any,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norm: str = "rms",
        eps: float = 1e-06,
        mask_kind: MaskKind | str = ...,
        scale: float | None = None,
        softcap: float = 0.0,
        n_rot: int = 0,
        interleaved: bool = False,
        offset: DimLike = 0,
        has_rope: bool = True,
        has_beta: bool = False,
        has_qkv_bias: bool = False,
        has_qk_norm: bool = False,
        has_out_bias: bool = False,
        **result: Unpack[Result],
    ) -> Any:
        """x + attention(norm(x)): norm, joined q/k/v projection, qk-norm, rope, attention,
        output [rlx.ir.ops.fused.FusedAttentionBlock]"""
    def fused_gated_act(self, activation: str = "silu", **result: Unpack[Result]) -> Value:
        """activation(first half of the last axis) * second half: [..., 2N] -> [..., N]
        [rlx.ir.ops.fused.FusedGatedAct]"""
    def fused_matmul_bias_act(
        self,
        w: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        activation: str = "none",
        has_bias: bool = False,
        has_residual: bool = False,
        strassen: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """activation(x·w + bias) + residual; bias [N] and residual are there where the flags
        say so [rlx.ir.ops.fused.FusedMatMulBiasAct]"""
    def fused_qk_norm_rope(
        self,
        gamma: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None = None,
        *,
        head_dim: int,
        n_rot: int = 0,
        interleaved: bool = False,
        offset: DimLike = 0,
        eps: float = 1e-06,
        layout: str = "bshd",
        **result: Unpack[Result],
    ) -> Value:
        """rope(rms_norm of each head · gamma [head_dim]); operands and layouts as for rope
        [rlx.ir.ops.fused.FusedQkNormRope]"""
    def fused_residual_layer_norm(
        self,
        residual: Tensor,
        gamma: Tensor,
        beta: Tensor | None = None,
        *,
        eps: float = 1e-05,
        **result: Unpack[Result],
    ) -> tuple[Value, Value]:
        """(layer_norm(x + residual) · gamma (+ beta), x + residual)
        [rlx.ir.ops.fused.FusedResidualLayerNorm]"""
    def fused_residual_rms_norm(
        self,
        residual: Tensor,
        gamma: Tensor,
        beta: Tensor | None = None,
        *,
        eps: float = 1e-06,
        **result: Unpack[Result],
    ) -> tuple[Value, Value]:
        """(rms_norm(x + residual) · gamma (+ beta), x + residual)
        [rlx.ir.ops.fused.FusedResidualRmsNorm]"""
    def fused_swiglu(
        self, w_gate: Tensor, w_up: Tensor, activation: str = "silu", **result: Unpack[Result]
    ) -> Value:
        """activation(x · w_gate) * (x · w_up) [rlx.ir.ops.fused.FusedSwiGlu]"""
    def fused_transformer_layer(
        self,
        *tensors: Any,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norm: str = "rms",
        eps: float = 1e-06,
        mask_kind: MaskKind | str = ...,
        scale: float | None = None,
        softcap: float = 0.0,
        n_rot: int = 0,
        interleaved: bool = False,
        offset: DimLike = 0,
        has_rope: bool = True,
        has_beta: bool = False,
        has_qkv_bias: bool = False,
        has_qk_norm: bool = False,
        has_out_bias: bool = False,
        activation: str = "silu",
        gated: bool = True,
        has_ffn_bias: bool = False,
        **result: Unpack[Result],
    ) -> Any:
        """h + ffn(norm(h)) with h = fused_attention_block(x): a layer of a transformer
        [rlx.ir.ops.fused.FusedTransformerLayer]"""
    def gated_delta_net(
        self,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state_size: int = 0,
        **result: Unpack[Result],
    ) -> Value:
        """Per token: S ← exp(g)·S; d = (v − kᵀS)·beta; S ← S + k dᵀ; o = (q/√N)ᵀS, from S = 0
        [rlx.ir.blocks.layers.GatedDeltaNet]"""
    def gated_delta_net_carry(
        self,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        state_size: int = 0,
        **result: Unpack[Result],
    ) -> tuple[Value, Value]:
        """The gated delta rule from a given state [B, H, N, N]; returns (o, the last state)
        [rlx.ir.blocks.layers.GatedDeltaNetCarry]"""
    def gather(self, indices: Tensor, axis: int = 0, **result: Unpack[Result]) -> Value:
        """Slices of x along an axis, at `indices`, whose dims replace the axis
        [rlx.ir.ops.index.Gather]"""
    def gather_backward(
        self, indices: Tensor, size: DimLike, axis: int = 0, **result: Unpack[Result]
    ) -> Any:
        """dx of y = gather(x, indices, axis), whose axis has `size`: zeros, and the slices of
        dy added at their indices, in order [rlx.ir.ops.gather_backward.GatherBackward]"""
    def ge(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """a ≥ b [rlx.ir.ops.binary.Ge]"""
    def geglu_ffn(
        self,
        up_w: Tensor,
        gate_w: Tensor,
        down_w: Tensor,
        activation: str = "gelu",
        **result: Unpack[Result],
    ) -> Value:
        """(gelu(x·gate) * (x·up))·down [rlx.ir.blocks.linear.GegluFfn]"""
    def gelu(self, **result: Unpack[Result]) -> Value:
        """x · (1 + erf(x / √2)) / 2 [rlx.ir.ops.activation_functions.Gelu]"""
    def gelu_ffn(
        self,
        up_w: Tensor,
        down_w: Tensor,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        *,
        activation: str = "gelu",
        **result: Unpack[Result],
    ) -> Value:
        """gelu(x·up + up_bias)·down + down_bias [rlx.ir.blocks.linear.GeluFfn]"""
    def gelu_quick(self, **result: Unpack[Result]) -> Value:
        """x · sigmoid(1.702 x) [rlx.ir.ops.activation_functions.GeluQuick]"""
    def gelu_tanh(self, **result: Unpack[Result]) -> Value:
        """x · (1 + tanh(√(2/π) · (x + 0.044715 x³))) / 2
        [rlx.ir.ops.activation_functions.GeluTanh]"""
    def group_norm(
        self, gamma: Tensor, beta: Tensor, groups: int, eps: float = 1e-05, **result: Unpack[Result]
    ) -> Value:
        """x [B, C, ...] standardised over C/groups channels and all positions, then gamma,
        beta [C] [rlx.ir.ops.norm.GroupNorm]"""
    def grouped_matmul(self, w: Tensor, expert: Tensor, **result: Unpack[Result]) -> Value:
        """Row t of x [T, K] times the weight of its expert: w [E, K, N], expert [T] -> [T, N]
        [rlx.ir.ops.matmul.GroupedMatMul]"""
    def gru(
        self,
        r: Tensor,
        h: Tensor,
        bias: Tensor | None = None,
        *,
        reverse: bool = False,
        **result: Unpack[Result],
    ) -> tuple[Value, Value]:
        """h ← n + σ(z)·(h - n) with r, z = x_gates[t] + h·r and n = tanh(x_n + σ(r)·(h·r_n +
        bias)) [rlx.ir.ops.recurrent.Gru]"""
    def gt(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """a > b [rlx.ir.ops.binary.Gt]"""
    def hard_sigmoid(self, **result: Unpack[Result]) -> Value:
        """(x + 3) / 6 limited to 0 … 1 [rlx.ir.ops.activation_functions.HardSigmoid]"""
    def hard_swish(self, **result: Unpack[Result]) -> Value:
        """x · hard_sigmoid(x) [rlx.ir.ops.activation_functions.HardSwish]"""
    def hypot(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """√(a² + b²), without overflow; inf if either is infinite [rlx.ir.ops.binary.Hypot]"""
    def imag(self, **result: Unpack[Result]) -> Value:
        """The imaginary part of a complex x [rlx.ir.ops.linalg.Imag]"""
    def irfft(self, n: DimLike, axis: int = -1, **result: Unpack[Result]) -> Value:
        """The real x of length `n` whose `rfft` is given; the factor 1/n is in here
        [rlx.ir.ops.linalg.Irfft]"""
    def is_finite(self, **result: Unpack[Result]) -> Value:
        """whether x is neither infinite nor NaN [rlx.ir.ops.elementwise.IsFinite]"""
    def is_inf(self, **result: Unpack[Result]) -> Value:
        """whether x is +inf or −inf [rlx.ir.ops.elementwise.IsInf]"""
    def is_nan(self, **result: Unpack[Result]) -> Value:
        """whether x is NaN [rlx.ir.ops.elementwise.IsNan]"""
    def l2_norm(self, axis: int = -1, eps: float = 1e-06, **result: Unpack[Result]) -> Value:
        """x / sqrt(sum(x²) + eps) along `axis` [rlx.ir.ops.norm.L2Norm]"""
    def layer_norm(
        self,
        gamma: Tensor,
        beta: Tensor | None = None,
        *,
        eps: float = 1e-05,
        **result: Unpack[Result],
    ) -> Value:
        """(x - mean) · rsqrt(variance + eps) · gamma (+ beta) [rlx.ir.blocks.layers.LayerNorm]"""
    def layer_norm_backward(
        self,
        gamma: Tensor,
        dy: Tensor,
        dsum: Tensor | None = None,
        *,
        eps: float = 1e-05,
        has_beta: bool = False,
        **result: Unpack[Result],
    ) -> Any:
        """(dx, dgamma), and dbeta with `has_beta`, of y = layer_norm(x, gamma); dx + dsum if
        given [rlx.ir.ops.norm_backward.LayerNormBackward]"""
    def le(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """a ≤ b [rlx.ir.ops.binary.Le]"""
    def leaky_relu(self, alpha: float = 0.01, **result: Unpack[Result]) -> Value:
        """x where x ≥ 0, else alpha · x [rlx.ir.ops.activation_functions.LeakyRelu]"""
    def linear(
        self,
        w: Tensor,
        bias: Tensor | None = None,
        *,
        activation: str | None = None,
        transposed: bool = False,
        strassen: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """activation(x·W + bias), W [K, N], or [N, K] when transposed
        [rlx.ir.blocks.linear.Linear]"""
    def linear_fused(
        self, w: Tensor, bias: Tensor, activation: str | None = None, **result: Unpack[Result]
    ) -> Value:
        """activation(x·W + bias) as one fused node, whatever the policy
        [rlx.ir.blocks.linear.LinearFused]"""
    def lm_head(
        self,
        w: Tensor,
        bias: Tensor | None = None,
        *,
        transposed: bool = False,
        softcap: float = 0.0,
        last_only: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """Logits x·W (+ bias): W [K, V], or the embedding table [V, K] when transposed
        [rlx.ir.blocks.linear.LmHead]"""
    def log(self, **result: Unpack[Result]) -> Value:
        """ln x; −inf at 0, NaN below [rlx.ir.ops.elementwise.Log]"""
    def log10(self, **result: Unpack[Result]) -> Value:
        """log₁₀ x; −inf at 0, NaN below [rlx.ir.ops.elementwise.Log10]"""
    def log1p(self, **result: Unpack[Result]) -> Value:
        """ln(1 + x), exact near 0 [rlx.ir.ops.elementwise.Log1P]"""
    def log2(self, **result: Unpack[Result]) -> Value:
        """log₂ x; −inf at 0, NaN below [rlx.ir.ops.elementwise.Log2]"""
    def log_softmax(self, axis: int = -1, **result: Unpack[Result]) -> Value:
        """x minus the logarithm of the sum of e^x along the axis
        [rlx.ir.ops.reduce.LogSoftmax]"""
    def logaddexp(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """ln(e^a + e^b), without overflow [rlx.ir.ops.binary.Logaddexp]"""
    def logical_and(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """a and b [rlx.ir.ops.binary.LogicalAnd]"""
    def logical_not(self, **result: Unpack[Result]) -> Value:
        """whether x is zero (NaN is not) [rlx.ir.ops.elementwise.LogicalNot]"""
    def logical_or(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """a or b [rlx.ir.ops.binary.LogicalOr]"""
    def logical_xor(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """a or b, not both [rlx.ir.ops.binary.LogicalXor]"""
    def lora_linear(
        self,
        w: Tensor,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None = None,
        *,
        scale: float = 1.0,
        activation: str | None = None,
        **result: Unpack[Result],
    ) -> Value:
        """activation(x·W + scale · (x·A)·B + bias): a weight [K, N] with a LoRA adapter
        [rlx.ir.blocks.linear.LoraLinear]"""
    def lora_matmul(
        self, w: Tensor, a: Tensor, b: Tensor, scale: float = 1.0, **result: Unpack[Result]
    ) -> Value:
        """x·w + scale · (x·a)·b: a weight [K, N] with a LoRA adapter a [K, R], b [R, N]
        [rlx.ir.ops.matmul.LoraMatMul]"""
    def lstm(
        self, r: Tensor, h: Tensor, c: Tensor, reverse: bool = False, **result: Unpack[Result]
    ) -> Any:
        """c ← σ(f)·c + σ(i)·tanh(g), h ← σ(o)·tanh(c), with (i, f, g, o) = x_gates[t] + h·r
        [rlx.ir.ops.recurrent.Lstm]"""
    def lt(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """a < b [rlx.ir.ops.binary.Lt]"""
    def matmul(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """a · b by NumPy's rules: batch axes broadcast, a 1-D operand is a row or a column
        [rlx.ir.ops.matmul.MatMul]"""
    def max(
        self,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """The greatest element; NaN if there is one [rlx.ir.ops.reduce.Max]"""
    def max_pool(
        self,
        kernel: int | Sequence[int],
        stride: int | Sequence[int] = (),
        padding: int | Sequence[int] = (0,),
        **result: Unpack[Result],
    ) -> Value:
        """The largest element of each window; NaN wins, padding never does
        [rlx.ir.ops.pool.MaxPool]"""
    def max_pool_backward(
        self,
        dy: Tensor,
        kernel: int | Sequence[int],
        stride: int | Sequence[int] = (),
        padding: int | Sequence[int] = (0,),
        **result: Unpack[Result],
    ) -> Value:
        """dx of max_pool(x) from x and the cotangent of the result: each goes to the first
        largest element of its window, and where windows share elements they add up
        [rlx.ir.ops.conv_backward.MaxPoolBackward]"""
    def maximum(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """the greater of a and b; NaN if either is [rlx.ir.ops.binary.Maximum]"""
    def mean(
        self,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """The sum over the number of elements; NaN of none. Integers give f32
        [rlx.ir.ops.reduce.Mean]"""
    def min(
        self,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """The least element; NaN if there is one [rlx.ir.ops.reduce.Min]"""
    def minimum(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """the lesser of a and b; NaN if either is [rlx.ir.ops.binary.Minimum]"""
    def mod(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """a − b · floor(a / b): the sign is b's; 0 where an integer b is 0
        [rlx.ir.ops.binary.Mod]"""
    def moe_ffn(
        self,
        router_w: Tensor,
        up_w: Tensor,
        gate_w: Tensor,
        down_w: Tensor,
        top_k: int,
        normalize: bool = True,
        activation: str = "silu",
        scoring: str = "softmax",
        scale: float = 1.0,
        **result: Unpack[Result],
    ) -> Value:
        """Each token through the `top_k` experts its router prefers, weighted by their scores
        [rlx.ir.blocks.linear.MoeFfn]"""
    def mul(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """a · b [rlx.ir.ops.binary.Mul]"""
    def narrow(self, axis: int, start: DimLike, length: DimLike, **result: Unpack[Result]) -> Value:
        """`length` elements along an axis from `start` on; both may be symbolic
        [rlx.ir.ops.layout.Narrow]"""
    def ne(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """a ≠ b; true where either is NaN [rlx.ir.ops.binary.Ne]"""
    def neg(self, **result: Unpack[Result]) -> Value:
        """−x [rlx.ir.ops.elementwise.Neg]"""
    def normal_cdf(self, **result: Unpack[Result]) -> Value:
        """Φ(x) = (1 + erf(x / √2)) / 2 [rlx.ir.ops.activation_functions.NormalCdf]"""
    def pad(
        self,
        low: int | Sequence[int],
        high: int | Sequence[int],
        value: float = 0.0,
        mode: str = "constant",
        **result: Unpack[Result],
    ) -> Value:
        """low[i] elements before and high[i] after, per axis [rlx.ir.ops.layout.Pad]"""
    def paged_attention(
        self,
        k: Tensor,
        v: Tensor,
        table: Tensor,
        rows: Tensor,
        positions: Tensor,
        sinks: Tensor | None = None,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page: int,
        window: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
        coarse: bool = False,
        kv_scheme: QuantScheme | str | None = None,
        **result: Unpack[Result],
    ) -> Value:
        """Each token attends to its own sequence, up to and with itself
        [rlx.ir.ops.paged.PagedAttention]"""
    def philox(
        self, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor, **result: Unpack[Result]
    ) -> Any:
        """Four random u32 words for each counter (c0 … c3) under a key (k0, k1); operands
        broadcast [rlx.ir.ops.random.Philox]"""
    def pmax(self, axis_name: str, **result: Unpack[Result]) -> Value:
        """The greatest x over the mapped axis; NaN if there is one
        [rlx.ir.ops.collectives.PMax]"""
    def pmean(self, axis_name: str, **result: Unpack[Result]) -> Value:
        """The mean of x over the mapped axis; integers give f32 [rlx.ir.ops.collectives.PMean]"""
    def pmin(self, axis_name: str, **result: Unpack[Result]) -> Value:
        """The least x over the mapped axis; NaN if there is one [rlx.ir.ops.collectives.PMin]"""
    def pow(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """a^b; integers wrap, and towards 0 for a negative b [rlx.ir.ops.binary.Pow]"""
    def prod(
        self,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """The product of the elements; 1 of none [rlx.ir.ops.reduce.Prod]"""
    def psum(self, axis_name: str, **result: Unpack[Result]) -> Value:
        """The sum of x over the mapped axis, the same for all its elements
        [rlx.ir.ops.collectives.PSum]"""
    def qk_norm_rope(
        self,
        gamma: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None = None,
        *,
        head_dim: int,
        n_rot: int = 0,
        interleaved: bool = False,
        offset: DimLike = 0,
        eps: float = 1e-06,
        layout: str = "bshd",
        **result: Unpack[Result],
    ) -> Value:
        """rope(rms_norm of each head · gamma [head_dim]); tensors and attributes as for rope
        [rlx.ir.blocks.attention.QkNormRope]"""
    def qlinear_conv(
        self,
        w: Tensor,
        x_zero: Tensor,
        scale: Tensor,
        y_zero: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        r_zero: Tensor | None = None,
        factors: Tensor | None = None,
        sum_zero: Tensor | None = None,
        *,
        stride: int | Sequence[int] = (1,),
        padding: int | Sequence[int] = (0,),
        dilation: int | Sequence[int] = (1,),
        groups: int = 1,
        activation: str = "none",
        **result: Unpack[Result],
    ) -> Value:
        """A `conv_integer` whose sums become 8-bit integers again: (sums + bias) · scale,
        rounded half to even, plus `y_zero`, clamped to its type
        [rlx.ir.ops.conv_integer.QLinearConv]"""
    def qr(
        self, complete: bool = False, tall: bool = True, **result: Unpack[Result]
    ) -> tuple[Value, Value]:
        """x = q·r with orthonormal columns of q and upper triangular r
        [rlx.ir.ops.factorizations.Qr]"""
    def quantize(
        self,
        scale: Tensor,
        zp: Tensor | None = None,
        *,
        dtype: DTypeLike = ...,
        axis: int | None = None,
        **result: Unpack[Result],
    ) -> Value:
        """clamp(round(x / scale) + zp) to `dtype`; ties go to the even neighbour, NaN to zp
        [rlx.ir.ops.quantize.Quantize]"""
    def quantize_blocks(self, scheme: QuantScheme | str = ..., **result: Unpack[Result]) -> Value:
        """Rows x [..., K] packed in blocks with their own scale: bytes [..., row bytes]
        [rlx.ir.ops.quantize.QuantizeBlocks]"""
    def real(self, **result: Unpack[Result]) -> Value:
        """The real part of a complex x [rlx.ir.ops.linalg.Real]"""
    def reciprocal(self, **result: Unpack[Result]) -> Value:
        """1 / x; ±inf at ±0 [rlx.ir.ops.elementwise.Reciprocal]"""
    def relu(self, **result: Unpack[Result]) -> Value:
        """max(x, 0); NaN of NaN [rlx.ir.ops.elementwise.Relu]"""
    def relu6(self, **result: Unpack[Result]) -> Value:
        """x limited to 0 … 6 [rlx.ir.ops.activation_functions.Relu6]"""
    def residual_layer_norm(
        self,
        residual: Tensor,
        gamma: Tensor,
        beta: Tensor | None = None,
        *,
        eps: float = 1e-05,
        **result: Unpack[Result],
    ) -> tuple[Value, Value]:
        """(layer_norm(x + residual), x + residual) [rlx.ir.blocks.layers.ResidualLayerNorm]"""
    def residual_rms_norm(
        self,
        residual: Tensor,
        gamma: Tensor,
        beta: Tensor | None = None,
        *,
        eps: float = 1e-06,
        **result: Unpack[Result],
    ) -> tuple[Value, Value]:
        """(rms_norm(x + residual), x + residual) [rlx.ir.blocks.layers.ResidualRmsNorm]"""
    def resize(
        self,
        sizes: DimLike | Sequence[DimLike],
        mode: str = "nearest",
        align_corners: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """Spatial axes brought to `sizes` [rlx.ir.ops.pool.Resize]"""
    def rfft(self, axis: int = -1, **result: Unpack[Result]) -> Value:
        """The first n // 2 + 1 terms of the transform of a real x; the others mirror them
        [rlx.ir.ops.linalg.Rfft]"""
    def rms_norm(
        self,
        gamma: Tensor,
        beta: Tensor | None = None,
        *,
        eps: float = 1e-06,
        **result: Unpack[Result],
    ) -> Value:
        """x · rsqrt(mean(x²) + eps) · gamma (+ beta) [rlx.ir.blocks.layers.RmsNorm]"""
    def rms_norm_backward(
        self,
        gamma: Tensor,
        dy: Tensor,
        dsum: Tensor | None = None,
        *,
        eps: float = 1e-06,
        has_beta: bool = False,
        **result: Unpack[Result],
    ) -> Any:
        """(dx, dgamma), and dbeta with `has_beta`, of y = rms_norm(x, gamma); dx + dsum if
        given [rlx.ir.ops.norm_backward.RmsNormBackward]"""
    def rope(
        self,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None = None,
        *,
        head_dim: int,
        n_rot: int = 0,
        interleaved: bool = False,
        offset: DimLike = 0,
        layout: str = "bshd",
        **result: Unpack[Result],
    ) -> Value:
        """Rotates pairs (i, i + n_rot/2) of each head by the angle of the token's position
        [rlx.ir.blocks.attention.Rope]"""
    def round(self, **result: Unpack[Result]) -> Value:
        """the nearest whole number, halves to the even one [rlx.ir.ops.elementwise.Round]"""
    def rsqrt(self, **result: Unpack[Result]) -> Value:
        """1 / √x; inf at 0, NaN below [rlx.ir.ops.elementwise.Rsqrt]"""
    @overload
    def sample(
        self,
        rng: Tensor,
        settings: Tensor | None = None,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        **result: Unpack[Result],
    ) -> tuple[Value, Value]:
        """Temperature → top-k → softmax → top-p → min-p → draw; returns (tokens, the next rng)
        [rlx.ir.ops.sample.Sample]"""
    @overload
    def sample(
        self,
        top_k: int = 0,
        top_p: float = 1.0,
        temperature: float = 1.0,
        seed: int = 0,
        *,
        min_p: float = 0.0,
        **result: Unpack[Result],
    ) -> Value:
        """Temperature → top-k → softmax → top-p → min-p → draw; returns (tokens, the next rng)
        [rlx.ir.ops.sample.Sample]"""
    def scatter(
        self, indices: Tensor, updates: Tensor, axis: int = 0, **result: Unpack[Result]
    ) -> Value:
        """x with its slices at `indices` [n] replaced by those of `updates`; the last of equal
        ones [rlx.ir.ops.index.Scatter]"""
    def scatter_add(
        self, indices: Tensor, updates: Tensor, axis: int = 0, **result: Unpack[Result]
    ) -> Value:
        """x with the slices of `updates` added at `indices` [n]; equal indices add up
        [rlx.ir.ops.index.ScatterAdd]"""
    def scatter_reduce(
        self,
        indices: Tensor,
        updates: Tensor,
        axis: int = 0,
        how: str = "mul",
        **result: Unpack[Result],
    ) -> Value:
        """x with its slices at `indices` [n] multiplied by those of `updates`, or the extremum
        of both [rlx.ir.ops.index.ScatterReduce]"""
    def searchsorted(self, x: Tensor, side: str = "left", **result: Unpack[Result]) -> Value:
        """Where each element of x would be inserted to keep the ascending `table` [n] sorted,
        in i64: on the left, before equal ones, or on the right, after them
        [rlx.ir.ops.sort.SearchSorted]"""
    def selective_scan(
        self,
        delta: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None = None,
        state: Tensor | None = None,
        *,
        has_d: bool = False,
        has_state: bool = False,
        **result: Unpack[Result],
    ) -> tuple[Value, Value]:
        """h ← exp(delta·a)·h + delta·b·u; y = Σ_n c·h + d·u; returns (y, the last h)
        [rlx.ir.ops.scan.SelectiveScan]"""
    def shared_linear_pair(
        self, w1: Tensor, w2: Tensor, **result: Unpack[Result]
    ) -> tuple[Value, Value]:
        """(x·W1, x·W2) as one matmul [rlx.ir.blocks.linear.SharedLinearPair]"""
    def shift_left(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """a << b; 0 where b is not in 0 … bits − 1 [rlx.ir.ops.binary.ShiftLeft]"""
    def shift_right(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """a >> b, arithmetic; all sign where b is too far [rlx.ir.ops.binary.ShiftRight]"""
    def sigmoid(self, **result: Unpack[Result]) -> Value:
        """1 / (1 + e^−x) [rlx.ir.ops.activation_functions.Sigmoid]"""
    def sign(self, **result: Unpack[Result]) -> Value:
        """−1, 0 or 1, of a complex x x / |x|; NaN of NaN [rlx.ir.ops.elementwise.Sign]"""
    def signbit(self, **result: Unpack[Result]) -> Value:
        """whether x is negative, or −0 [rlx.ir.ops.elementwise.Signbit]"""
    def silu(self, **result: Unpack[Result]) -> Value:
        """x · sigmoid(x) [rlx.ir.ops.activation_functions.Silu]"""
    def sin(self, **result: Unpack[Result]) -> Value:
        """sin x, x in radians [rlx.ir.ops.elementwise.Sin]"""
    def sinh(self, **result: Unpack[Result]) -> Value:
        """(e^x − e^−x) / 2 [rlx.ir.ops.trigonometry.Sinh]"""
    def slice(
        self,
        starts: Sequence[int | None],
        stops: Sequence[int | None],
        steps: int | Sequence[int] | None = None,
        **result: Unpack[Result],
    ) -> Value:
        """Every steps[i]-th element from starts[i] to before stops[i], per axis
        [rlx.ir.ops.layout.Slice]"""
    def slogdet(self, **result: Unpack[Result]) -> tuple[Value, Value]:
        """The sign of the determinant, of a complex x a number of size 1, and ln |det x|
        [rlx.ir.ops.factorizations.SlogDet]"""
    def softmax(self, axis: int = -1, **result: Unpack[Result]) -> Value:
        """e^x over its sum along the axis; NaN where every element is −inf
        [rlx.ir.ops.reduce.Softmax]"""
    def softmax_cross_entropy(
        self, labels: Tensor, ignore_index: int | None = None, **result: Unpack[Result]
    ) -> Any:
        """(ln Σ exp(logits) − logits[label], ln Σ exp(logits)) of each row; the loss is 0 for
        a row whose label is `ignore_index` [rlx.ir.ops.losses.SoftmaxCrossEntropy]"""
    def softmax_cross_entropy_backward(
        self,
        labels: Tensor,
        lse: Tensor,
        dloss: Tensor,
        ignore_index: int | None = None,
        **result: Unpack[Result],
    ) -> Any:
        """dlogits = (exp(logits − lse) − onehot(label)) · dloss, row by row; may overwrite the
        logits. Rows whose label is `ignore_index` get zeros
        [rlx.ir.ops.losses.SoftmaxCrossEntropyBackward]"""
    def softplus(self, **result: Unpack[Result]) -> Value:
        """ln(1 + e^x) [rlx.ir.ops.activation_functions.Softplus]"""
    def solve(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """x with a·x = b, for `a [..., n, n]` and `b [..., n, m]`; batch axes broadcast
        [rlx.ir.ops.linalg.Solve]"""
    def sort(self, axis: int = -1, descending: bool = False, **result: Unpack[Result]) -> Value:
        """The elements in order along an axis; equal ones keep theirs [rlx.ir.ops.sort.Sort]"""
    def sqrt(self, **result: Unpack[Result]) -> Value:
        """√x; NaN below 0 [rlx.ir.ops.elementwise.Sqrt]"""
    def square(self, **result: Unpack[Result]) -> Value:
        """x² [rlx.ir.ops.elementwise.Square]"""
    def state_update(
        self,
        update: Tensor,
        slots: Tensor | None = None,
        *,
        axis: int = 0,
        start: DimLike = 0,
        **result: Unpack[Result],
    ) -> Value:
        """The state with `update` written in place at `start` along `axis`
        [rlx.ir.ops.source.StateUpdate]"""
    def stop_gradient(self, **result: Unpack[Result]) -> Value:
        """x, with a derivative of zero [rlx.ir.ops.derivatives.StopGradient]"""
    def sub(self, b: Tensor, **result: Unpack[Result]) -> Value:
        """a − b [rlx.ir.ops.binary.Sub]"""
    def sum(
        self,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
        **result: Unpack[Result],
    ) -> Value:
        """The sum of the elements; 0 of none. Of bools: how many are true
        [rlx.ir.ops.reduce.Sum]"""
    def svd(
        self, full: bool = False, tall: bool = True, vectors: bool = True, **result: Unpack[Result]
    ) -> Any:
        """x = u·diag(s)·vh with orthonormal u and vh, and s ≥ 0 in descending order
        [rlx.ir.ops.factorizations.Svd]"""
    def swiglu_ffn(
        self,
        up_w: Tensor,
        gate_w: Tensor,
        down_w: Tensor,
        activation: str = "silu",
        **result: Unpack[Result],
    ) -> Value:
        """(silu(x·gate) * (x·up))·down [rlx.ir.blocks.linear.SwigluFfn]"""
    def take_along(self, indices: Tensor, axis: int = -1, **result: Unpack[Result]) -> Value:
        """One element per index along an axis; the other axes of x and `indices` broadcast
        [rlx.ir.ops.index.TakeAlong]"""
    def tan(self, **result: Unpack[Result]) -> Value:
        """tan x, x in radians [rlx.ir.ops.elementwise.Tan]"""
    def tanh(self, **result: Unpack[Result]) -> Value:
        """tanh x [rlx.ir.ops.elementwise.Tanh]"""
    def top_k(
        self, k: int, axis: int = -1, largest: bool = True, **result: Unpack[Result]
    ) -> tuple[Value, Value]:
        """The k greatest (or least) elements along an axis in order, and their indices (i32)
        [rlx.ir.ops.reduce.TopK]"""
    def trunc(self, **result: Unpack[Result]) -> Value:
        """the next whole number towards 0 [rlx.ir.ops.elementwise.Trunc]"""
    def where(self, a: Tensor, b: Tensor, **result: Unpack[Result]) -> Value:
        """a where the bool `condition` is true, else b; all three broadcast
        [rlx.ir.ops.binary.Where]"""
