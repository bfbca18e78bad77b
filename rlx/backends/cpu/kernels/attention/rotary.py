"""Rotary position embedding (RoPE), alone or fused with the RMS norm of each head; its lowering."""

from __future__ import annotations

from math import gcd

from rlx.backends.cpu.kernels.attention.lower_attention import by_axis
from rlx.backends.cpu.kernels.loops.rows import outgrows_caches
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.backends.cpu.lowering import (
    Context,
    KernelArg,
    KernelLaunch,
    NodeNumber,
    Pointer,
    Status,
    lowers,
)
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.ir.node import Node
from rlx.ir.node import Value as Tensor
from rlx.ir.ops.attention import head_sizes
from rlx.ir.ops.fused import FusedQkNormRope
from rlx.ir.ops.rope import Rope
from rlx.llvm.builder import Function, Module, Type, Value, f32, f64, i64, ptr, vec
from rlx.llvm.storage import LINE, is_aligned, load, memory_type, store
from rlx.llvm.target import Target
from rlx.support.records import dataclass

POINTERS = ("x", "gamma", "cos", "sin", "positions", "out", "status")
ARGS = (
    *POINTERS,
    *("node", "batch", "length", "heads", "offset", "table_rows"),
    *("x_batch", "x_row", "x_head", "x_stride", "gamma_stride"),
    *("cos_row", "cos_stride", "sin_row", "sin_stride", "positions_batch", "positions_row"),
)

# Software prefetch distance in bytes, where nothing is cached: halves of heads and tables are too
# many short streams for the hardware prefetcher.
PREFETCH_DISTANCE = 1024


@dataclass(frozen=True)
class RotaryEmbedding(KernelSpec):
    """args: ARGS. Strides are in elements. Pointers of absent operands are arbitrary. `node` is
    stored to `status` if a position has no row in the tables.

    `strided`: some operand is not contiguous along its last axis. `heads_first`: the result is
    [B, H, S, D]. `streaming`: the result outgrows the caches and uses streaming stores.
    """

    x: DType
    cos: DType
    sin: DType
    out: DType
    head_dim: int
    rotary_dim: int
    interleaved: bool = False
    heads_first: bool = False
    positions: DType | None = None
    gamma: DType | None = None
    eps: float = 0.0
    strided: bool = False
    streaming: bool = False

    @property
    def type(self) -> Type:
        """The compute type."""
        dtypes = (self.x, self.cos, self.sin, self.out)
        return f64 if any(k.bits == 64 for k in dtypes) else f32

    def lanes(self, target: Target, *counts: int) -> int:
        """The widest vector that divides the counts."""
        return 1 if self.strided else gcd(target.lanes(self.type.bits), *counts)

    def emit(self, m: Module) -> None:
        _RotaryEmbedding(m.kernel(), self).emit()


class _RotaryEmbedding:
    def __init__(self, f: Function, spec: RotaryEmbedding) -> None:
        self.f, self.spec, self.type = f, spec, spec.type
        self.args = {
            name: f.arg(f["args"], i, ptr if name in POINTERS else i64)
            for i, name in enumerate(ARGS)
        }
        self.streaming = False  # whether streaming stores are in use

    def emit(self) -> None:
        f = self.f
        if self.spec.streaming and self.spec.head_dim * self.spec.out.bytes % LINE == 0:
            for fits in f.either(is_aligned(f, [self.args["out"]])):
                if fits:
                    self._emit_streaming()
                else:
                    self._rows()
        else:
            self._rows()

    def _emit_streaming(self) -> None:
        self.streaming = True
        self._rows()
        self.streaming = False
        self.f.fence()  # streaming stores are weakly ordered

    def _rows(self) -> None:
        f, w = self.f, self.args
        lo, hi = f.split(w["batch"] * w["length"] * w["heads"])
        for row in f.range(lo, hi):
            batch, token, head = self._row_indices(row)
            at = batch * w["x_batch"] + token * w["x_row"] + head * w["x_head"]
            x = f.gep(w["x"], at, memory_type(self.spec.x))
            out = f.gep(w["out"], row, self.spec.head_dim * memory_type(self.spec.out).bytes)
            position = self._position(batch, token)
            for is_valid in f.either(position.ult(w["table_rows"])):
                if is_valid:
                    self._row(x, out, position)
                else:
                    f.store(w["node"], w["status"])

    def _row_indices(self, row: Value) -> tuple[Value, Value, Value]:
        """(batch, token, head) of a row of the result."""
        w = self.args
        inner = w["length"] if self.spec.heads_first else w["heads"]
        outer = row.udiv(inner)
        last = row - outer * inner
        middle = w["heads"] if self.spec.heads_first else w["length"]
        batch = outer.udiv(middle)
        second = outer - batch * middle
        return (batch, last, second) if self.spec.heads_first else (batch, second, last)

    def _position(self, batch: Value, token: Value) -> Value:
        f, w, dtype = self.f, self.args, self.spec.positions
        if dtype is None:
            return w["offset"] + token
        at = batch * w["positions_batch"] + token * w["positions_row"]
        element = memory_type(dtype)
        return f.load(f.gep(w["positions"], at, element), element).to(i64, dtype.kind == "int")

    def _row(self, x: Value, out: Value, position: Value) -> None:
        f, s, w = self.f, self.spec, self.args
        scale = self._norm(x) if s.gamma is not None else None
        half = s.rotary_dim // 2
        cos, sin = (
            f.gep(w[n], position * w[f"{n}_row"], memory_type(getattr(s, n)))
            for n in ("cos", "sin")
        )
        lanes = s.lanes(f.target, half)
        for i in f.range(0, half, lanes):
            c = self._read(cos, "cos", i, lanes)
            d = self._read(sin, "sin", i, lanes)
            if s.interleaved:
                self._rotate_interleaved(x, out, i, lanes, (c, d), scale)
            else:
                self._rotate_halves(x, out, i, lanes, (c, d), scale)
        if s.rotary_dim < s.head_dim:
            lanes = s.lanes(f.target, s.rotary_dim, s.head_dim)
            for i in f.range(s.rotary_dim, s.head_dim, lanes):
                self._write(self._element(x, i, lanes, scale), out, i)

    def _read(self, base: Value, name: str, at: Value, lanes: int) -> Value:
        f, dtype = self.f, getattr(self.spec, name)
        index = at * self.args[f"{name}_stride"] if self.spec.strided else at
        address = f.gep(base, index, memory_type(dtype))
        if self.streaming:
            f.prefetch(address, PREFETCH_DISTANCE, locality=2)
        return load(f, address, dtype, lanes, self.type)

    def _write(self, value: Value, out: Value, at: Value) -> None:
        f, dtype = self.f, self.spec.out
        store(f, value, f.gep(out, at, memory_type(dtype)), dtype, streams=self.streaming)

    def _element(self, x: Value, at: Value, lanes: int, scale: Value | None) -> Value:
        """Elements of a head, normalised if `scale` is given."""
        value = self._read(x, "x", at, lanes)
        if scale is None:
            return value
        gamma = self._read(self.args["gamma"], "gamma", at, lanes)
        return value * self.f.splat(scale, lanes) * gamma

    def _norm(self, x: Value) -> Value:
        """1 / √(mean of squares + eps)"""
        f, s = self.f, self.spec
        lanes = s.lanes(f.target, s.head_dim)

        squares = f.carry([f.const(0.0, vec(lanes, self.type))])
        for i in squares.range(0, s.head_dim, lanes):
            value = self._read(x, "x", i, lanes)
            squares.values = [f.fma(value, value, squares.values[0])]
        total = f.reduce("add", squares.values[0])
        return 1.0 / f.sqrt(total / float(s.head_dim) + s.eps)

    def _rotated(self, a: Value, b: Value, angle: tuple[Value, Value]) -> tuple[Value, Value]:
        """The rotated pair (a, b); products are rounded before the sum, as in the reference."""
        cos, sin = angle
        with self.f.exact():
            return a * cos - b * sin, b * cos + a * sin

    def _rotate_halves(
        self,
        x: Value,
        out: Value,
        i: Value,
        lanes: int,
        angle: tuple[Value, Value],
        scale: Value | None,
    ) -> None:
        """Pairs (i, i + half)."""
        far = i + self.spec.rotary_dim // 2
        a, b = (self._element(x, at, lanes, scale) for at in (i, far))
        a, b = self._rotated(a, b, angle)
        self._write(a, out, i)
        self._write(b, out, far)

    def _rotate_interleaved(
        self,
        x: Value,
        out: Value,
        i: Value,
        lanes: int,
        angle: tuple[Value, Value],
        scale: Value | None,
    ) -> None:
        """Pairs (2i, 2i + 1)."""
        f, at = self.f, i * 2
        if lanes == 1:
            a, b = (self._element(x, at + n, 1, scale) for n in (0, 1))
            for n, value in enumerate(self._rotated(a, b, angle)):
                self._write(value, out, at + n)
            return
        first, second = (self._element(x, at + n, lanes, scale) for n in (0, lanes))
        a, b = (f.shuffle(first, second, range(n, 2 * lanes, 2)) for n in (0, 1))
        both = f.interleave(*self._rotated(a, b, angle))
        self._write(f.slice(both, 0, lanes), out, at)
        self._write(f.slice(both, lanes, lanes), out, at + lanes)


@lowers("rope", "fused_qk_norm_rope", strided=True)
def lower_rope(node: Node, ctx: Context) -> list[KernelLaunch]:
    op = node.op
    assert isinstance(op, Rope | FusedQkNormRope)
    rope = op.rotation() if isinstance(op, FusedQkNormRope) else op
    operands = _operands(node)
    strides = _strides(operands, rope, ctx)
    x, cos, sin = (operands[name] for name in ("x", "cos", "sin"))
    positions, gamma = operands.get("positions"), operands.get("gamma")
    spec = RotaryEmbedding(
        x.dtype,
        cos.dtype,
        sin.dtype,
        node.output.dtype,
        rope.head_dim,
        rope.rotated,
        rope.interleaved,
        heads_first=rope.layout == "bhsd",
        positions=positions.dtype if positions is not None else None,
        gamma=gamma.dtype if gamma is not None else None,
        eps=op.eps if isinstance(op, FusedQkNormRope) else 0.0,
        strided=any(name.endswith("_stride") and s != 1 for name, s in strides.items()),
        streaming=outgrows_caches(node.output, ctx.lir.live),
    )
    sizes = head_sizes(x.shape, rope.head_dim, rope.layout, "x")
    args: dict[str, KernelArg] = {name: Pointer(value) for name, value in operands.items()}
    args |= {"out": Pointer(node.output), "status": Status()}
    args["node"] = (
        0 if positions is None else NodeNumber(node)
    )  # only given positions can be out of range
    args |= {"batch": sizes.batch, "length": sizes.length, "heads": sizes.heads}
    args |= {"offset": rope.offset, "table_rows": cos.shape.dims[0], **strides}
    cost = op.cost([v.shape for v in node.inputs], [node.output.shape])
    listed = [args.get(name, 0) for name in ARGS]
    return [
        KernelLaunch(spec, listed, node.inputs, node.outputs, flops=cost.flops, bytes=cost.bytes)
    ]


def _operands(node: Node) -> dict[str, Tensor]:
    names = ["x", "cos", "sin", "positions"]
    if node.op.name != "rope":
        names.insert(1, "gamma")
    return dict(zip(names, node.inputs, strict=False))


def _strides(operands: dict[str, Tensor], rope: Rope, ctx: Context) -> dict[str, Dim]:
    batch, row, head, step = by_axis(ctx.strides(operands["x"]), rope.layout, rope.head_dim)
    found: dict[str, Dim] = {"x_batch": batch, "x_row": row, "x_head": head}
    found["x_stride"] = step if rope.head_dim > 1 else 1
    for name in ("cos", "sin"):
        found[f"{name}_row"], step = ctx.strides(operands[name])
        found[f"{name}_stride"] = step if rope.rotated > 2 else 1
    if "gamma" in operands:
        found["gamma_stride"] = ctx.strides(operands["gamma"])[0]
    if "positions" in operands:
        *batches, found["positions_row"] = ctx.strides(operands["positions"])
        found["positions_batch"] = batches[0] if batches else 0
    return found
