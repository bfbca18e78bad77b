"""Backward of attention, FlashAttention's way: probabilities again by blocks, from the log-sum-exp.

A work item is a KV head of a batch entry. Its keys and values are copied once: transposed by KV
blocks for the scores and for dout·vᵀ, keys plain for dq. Blocks of query rows pass by; for each KV
block that a row block sees there are five products:

    s = q·kᵀ    p = exp(scale·s − lse)    dp = dout·vᵀ    ds = scale · p · (dp − Σ dout·out)
    dq += ds·k    dk += dsᵀ·q    dv += pᵀ·dout

dk and dv of the head are sums over row blocks in order, in scratch memory, so that the number of
workers does not show in the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.backends.cpu.kernels.attention.lower_attention import by_axis
from rlx.backends.cpu.kernels.attention.tile_products import emit_product, tile_vectors
from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.backends.cpu.lowering import Context, KernelArg, KernelLaunch, Pointer, Scratch, lowers
from rlx.ir.attrs import MaskKind
from rlx.ir.dim import same, upper_bound
from rlx.ir.dtype import DType
from rlx.ir.lir import aligned, contiguous_strides
from rlx.ir.node import Node
from rlx.ir.ops.attention import head_sizes
from rlx.llvm import math
from rlx.llvm.builder import Module, Type, Value, f32, f64, i32, i64, vec
from rlx.llvm.storage import load, memory_type, store
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_QUERIES = 32  # of a row block
_KEYS = 64  # of a KV block
_OPERANDS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
_STRIDED = (0, 1, 2, 3, 5)  # operands that may be strided: all but the log-sum-exp
_AXES = ("batch", "row", "head", "step")
_ARGS = (
    *_OPERANDS, "lse", "scratch", "worker_bytes", "batch", "queries", "keys",
    *(f"{name}_{axis}" for name in _OPERANDS for axis in _AXES),
)  # fmt: skip


@dataclass(frozen=True)
class AttentionBackwardBlocks(KernelSpec):
    """args: `_ARGS`. Strides count elements; `step` is that of the last axis."""

    types: tuple[DType, ...]  # of q, k, v, out, dout
    head_dim: int
    kv_heads: int
    group: int  # query heads of a KV head
    scale: float
    kind: MaskKind
    strided: str  # names of operands whose last axis is not contiguous, each followed by a space

    @property
    def flushes_denormals(self) -> bool:
        return True

    @property
    def acc(self) -> Type:
        return f64 if any(t.bits == 64 for t in self.types[:3]) else f32

    def dtype(self, name: str) -> DType:
        """Element type of an operand or a result."""
        return self.types[("q", "k", "v", "out", "dout").index(name)]

    def columns(self, target: Target) -> int:
        """The head's width, as tiles need it."""
        step = tile_vectors(target) * target.lanes(self.acc.bits)
        return -(-self.head_dim // step) * step

    def worker_bytes(self, target: Target, keys: int) -> int:
        """Five matrices of all keys; q, dout and dq of a row block; its scores and dp."""
        width = self.columns(target)
        keys = -(-keys // _KEYS) * _KEYS
        size = 5 * keys * width + 3 * _QUERIES * width + 2 * _QUERIES * _KEYS
        return aligned((size + 2 * _QUERIES) * self.acc.bytes)

    def emit(self, m: Module) -> None:
        _Emitter(self, m).emit()


class _Emitter:
    def __init__(self, spec: AttentionBackwardBlocks, m: Module) -> None:
        self.spec = spec
        acc = self.acc = spec.acc
        self.scores_of = emit_product(m, "scores", acc, by_rows=True, adds=False)
        self.add_rows = emit_product(m, "add_rows", acc, by_rows=True, adds=True)
        self.add_columns = emit_product(m, "add_columns", acc, by_rows=False, adds=True)
        self.width = spec.columns(m.target)
        self.lanes = m.target.lanes(acc.bits)
        self.wide = vec(self.lanes, acc)
        f = self.f = m.kernel()
        o = self.o = Operands(f, _ARGS, (*_OPERANDS, "lse", "scratch"))
        self.blocks = f.ceil_div(o["keys"], _KEYS)
        self.past = o["keys"] - o["queries"]
        self.row_bytes = self.width * acc.bytes
        at = f.gep(o["scratch"], f["tid"].to(i64) * o["worker_bytes"])
        whole = self.blocks * (_KEYS * self.row_bytes)
        self.places: dict[str, Value] = {}
        for name in ("keys", "turned_keys", "turned_values", "dk", "dv"):
            self.places[name], at = at, f.gep(at, whole)
        rows, scores = _QUERIES * self.row_bytes, _QUERIES * _KEYS * acc.bytes
        for name, size in (("q", rows), ("dout", rows), ("dq", rows), ("p", scores),
                           ("ds", scores), ("lse", 0)):  # fmt: skip
            self.places[name], at = at, f.gep(at, size)
        self.places["weight"] = f.gep(self.places["lse"], _QUERIES, acc)

    def emit(self) -> None:
        f, o, spec = self.f, self.o, self.spec
        lo, hi = f.split(o["batch"] * spec.kv_heads)
        for item in f.range(lo, hi):
            batch = item.udiv(spec.kv_heads)
            head = item - batch * spec.kv_heads
            self._copy_keys(batch, head)
            for member in f.range(0, spec.group):
                for row in f.range(0, o["queries"], _QUERIES):
                    self._row_block(batch, head * spec.group + member, row)
            for name in ("dk", "dv"):
                self._write(name, batch, head, f.i64(0), o["keys"])

    # -- operands -----------------------------------------------------------------------------

    def _row(self, name: str, batch: Value, head: Value, row: Value) -> Value:
        """Where a row of an operand begins."""
        o, dtype = self.o, self.spec.dtype(name.removeprefix("d") if name != "dout" else name)
        at = batch * o[f"{name}_batch"] + head * o[f"{name}_head"] + row * o[f"{name}_row"]
        return self.f.gep(o[name], at, memory_type(dtype))

    def _pieces(self) -> list[tuple[int, range]]:
        """(lanes, first elements) of whole vectors of a head, and of what is left."""
        whole = self.spec.head_dim // self.lanes * self.lanes
        return [(self.lanes, range(0, whole, self.lanes)), (1, range(whole, self.spec.head_dim))]

    def _elements(self, name: str, row: Value, at: int, lanes: int) -> Value:
        f, dtype = self.f, self.spec.dtype(name)
        if f"{name} " not in self.spec.strided:
            return load(f, row, dtype, lanes, self.acc, at * dtype.bytes)
        step = self.o[f"{name}_step"] * dtype.bytes
        values = [load(f, f.gep(row, step * (at + i)), dtype, 1, self.acc) for i in range(lanes)]
        if lanes == 1:
            return values[0]
        made = f.const(0, self.wide)
        for i, value in enumerate(values):
            made = f.insert(made, value, i)
        return made

    def _copy(self, name: str, row: Value, to: Value) -> None:
        """A head's row to scratch memory, with zeros behind it."""
        f = self.f
        for at in range(self.spec.head_dim // self.lanes * self.lanes, self.width, self.lanes):
            f.store(f.const(0, self.wide), to, at * self.acc.bytes)
        for lanes, starts in self._pieces():
            for at in starts:
                f.store(self._elements(name, row, at, lanes), to, at * self.acc.bytes)

    def _clear(self, to: Value, vectors: Value | int) -> None:
        for i in self.f.range(0, vectors):
            self.f.store(self.f.const(0, self.wide), self.f.gep(to, i, self.wide))

    def _copy_keys(self, batch: Value, head: Value) -> None:
        """Keys as rows, keys and values transposed; zeros behind the last, and for dk and dv."""
        f, o = self.f, self.o
        whole = self.blocks * (_KEYS * self.width // self.lanes)
        for name in ("dk", "dv"):
            self._clear(self.places[name], whole)
        temporary = self.places["q"]
        for key in f.range(0, self.blocks * _KEYS):
            to = f.gep(self.places["keys"], key * self.row_bytes)
            for exists in f.either(key < o["keys"]):
                if exists:
                    self._copy("k", self._row("k", batch, head, key), to)
                    self._copy("v", self._row("v", batch, head, key), temporary)
                else:
                    self._clear(to, self.width // self.lanes)
                    self._clear(temporary, self.width // self.lanes)
            block = key.udiv(_KEYS)
            at = block * (_KEYS * self.width) + (key - block * _KEYS)
            for source, turned in ((to, "turned_keys"), (temporary, "turned_values")):
                column = f.gep(self.places[turned], at, self.acc)
                for d in f.range(0, self.width):
                    element = f.load(f.gep(source, d, self.acc), self.acc)
                    f.store(element, f.gep(column, d * _KEYS, self.acc))

    def _copy_rows(self, batch: Value, head: Value, row: Value) -> None:
        """q and dout of a row block, and of each row the log-sum-exp and Σ dout · out. A row that
        does not exist has zeros, and an infinite log-sum-exp: its probabilities are 0."""
        f, o = self.f, self.o
        first = (batch * (self.spec.kv_heads * self.spec.group) + head) * o["queries"] + row
        for r in f.range(0, _QUERIES):
            to = [f.gep(self.places[n], r * self.row_bytes) for n in ("q", "dout")]
            lse, weight = (f.gep(self.places[n], r, self.acc) for n in ("lse", "weight"))
            for exists in f.either(row + r < o["queries"]):
                if not exists:
                    for place in to:
                        self._clear(place, self.width // self.lanes)
                    f.store(f.const(float("inf"), self.acc), lse)
                    f.store(f.const(0, self.acc), weight)
                    continue
                for name, place in zip(("q", "dout"), to, strict=True):
                    self._copy(name, self._row(name, batch, head, row + r), place)
                f.store(f.load(f.gep(o["lse"], first + r, self.acc), self.acc), lse)
                f.store(self._weight(to[1], self._row("out", batch, head, row + r)), weight)

    def _weight(self, dout: Value, out: Value) -> Value:
        f, total, rest = self.f, self.f.const(0, self.wide), self.f.const(0, self.acc)
        for lanes, starts in self._pieces():
            for at in starts:
                y = self._elements("out", out, at, lanes)
                ct = f.load(dout, y.type, at * self.acc.bytes)
                if lanes == 1:
                    rest = f.fma(ct, y, rest)
                else:
                    total = f.fma(ct, y, total)
        return f.reduce("add", total) + rest

    # -- products -----------------------------------------------------------------------------

    def _row_block(self, batch: Value, head: Value, row: Value) -> None:
        f, o, places = self.f, self.o, self.places
        self._copy_rows(batch, head, row)
        self._clear(places["dq"], _QUERIES * self.width // self.lanes)
        first, last = self._seen(row, f.min(o["queries"] - row, _QUERIES))
        for block in f.range(first.udiv(_KEYS), f.ceil_div(last, _KEYS)):
            self._kv_block(row, block)
        self._write("dq", batch, head, row, f.min(o["queries"] - row, _QUERIES))

    def _bounds(self, row: Value) -> tuple[Value, Value]:
        """The keys [first, last) that a row sees."""
        f, kind, keys = self.f, self.spec.kind, self.o["keys"]
        first, last = f.i64(0), keys
        if kind.ahead is not None:
            last = f.max(f.min(self.past + row + (kind.ahead + 1), keys), 0)
        if kind.behind is not None:
            first = f.max(self.past + row - kind.behind, 0)
        return first, last

    def _seen(self, row: Value, count: Value) -> tuple[Value, Value]:
        """The keys that some row of a block sees."""
        first, last = self._bounds(row)[0], self._bounds(row + count - 1)[1]
        return self.f.min(first, last), last

    def _kv_block(self, row: Value, block: Value) -> None:
        f, places, size = self.f, self.places, self.acc.bytes
        at = block * (_KEYS * self.row_bytes)
        here = {n: f.gep(places[n], at)
                for n in ("keys", "turned_keys", "turned_values", "dk", "dv")}  # fmt: skip
        wide, short = f.i64(self.row_bytes), f.i64(_KEYS * size)
        rows, keys, width = f.i64(_QUERIES), f.i64(_KEYS), f.i64(self.width)
        depth = f.i64(self.spec.head_dim)
        for source, turned, to in (("q", "turned_keys", "p"), ("dout", "turned_values", "ds")):
            f.call(self.scores_of, places[source], wide, here[turned], short, places[to], short,
                   rows, keys, depth)  # fmt: skip
        self._derive(row, block * _KEYS)
        f.call(self.add_rows, places["ds"], short, here["keys"], wide, places["dq"], wide, rows,
               width, keys)  # fmt: skip
        for scores, factor, to in (("ds", "q", "dk"), ("p", "dout", "dv")):
            f.call(self.add_columns, places[scores], short, places[factor], wide, here[to], wide,
                   keys, width, rows)  # fmt: skip

    def _derive(self, row: Value, key: Value) -> None:
        """Scores and dp of a block become p and ds, in place."""
        f = self.f
        numbers = f.iota(vec(self.lanes, i32))
        for r in f.range(0, _QUERIES):
            lse, weight = (
                f.broadcast_load(f.gep(self.places[n], r, self.acc), self.acc, self.lanes)
                for n in ("lse", "weight")
            )
            first, last = ((n - key).to(i32) for n in self._bounds(row + r))
            for whole in f.either((first <= 0) & (last >= _KEYS)):
                for column in f.range(0, _KEYS, self.lanes):
                    at = r * _KEYS + column
                    p_at, ds_at = (f.gep(self.places[n], at, self.acc) for n in ("p", "ds"))
                    shifted = f.fma(f.load(p_at, self.wide), self.spec.scale, -lse)
                    p = math.exp_down(f.min_fast(shifted, 0.0))
                    if not whole:
                        number = numbers + f.splat(column.to(i32), self.lanes)
                        keep = number < f.splat(last, self.lanes)
                        keep = keep & (number >= f.splat(first, self.lanes))
                        p = f.select(keep, p, 0.0)
                    ds = p * (f.load(ds_at, self.wide) - weight) * self.spec.scale
                    f.store(p, p_at)
                    f.store(ds if whole else f.select(keep, ds, 0.0), ds_at)

    def _write(self, name: str, batch: Value, head: Value, row: Value, count: Value) -> None:
        """Rows of a result, which is contiguous along its heads."""
        f, dtype = self.f, self.spec.dtype(name[1:])
        for r in f.range(0, count):
            source = f.gep(self.places[name], r * self.row_bytes)
            to = self._row(name, batch, head, row + r)
            for lanes, starts in self._pieces():
                for at in starts:
                    value = f.load(source, vec(lanes, self.acc), at * self.acc.bytes)
                    store(f, value, to, dtype, at * dtype.bytes)


# -- lowering -------------------------------------------------------------------------------------


def _is_native(node: Node) -> bool:
    """No softcap and no mask tensor; those keep the decomposition."""
    op: Any = node.op
    return not op.softcap and len(node.inputs) == 6 and not op.mask_kind.needs_mask


def _spec(node: Node, strided: Sequence[str] = ()) -> AttentionBackwardBlocks:
    op: Any = node.op
    q, k, v, out, _, dout = (x.dtype for x in node.inputs)
    return AttentionBackwardBlocks(
        (q, k, v, out, dout), op.head_dim, op.num_kv_heads, op.num_heads // op.num_kv_heads,
        op.forward.score_scale, op.mask_kind, "".join(f"{n} " for n in strided),
    )  # fmt: skip


def _worker_bytes(node: Node, target: Target) -> int:
    op: Any = node.op
    keys = head_sizes(node.inputs[1].shape, op.head_dim, op.kv_layout, "k").length
    return _spec(node).worker_bytes(target, upper_bound(keys, node.graph.live))


def _scratch(node: Node, target: Target, threads: int) -> int:
    return _worker_bytes(node, target) * threads


@lowers("attention_backward", when=_is_native, scratch=_scratch, strided=lambda node: _STRIDED)
def lower_attention_backward(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    q, k, v, out, lse, dout = node.inputs
    sizes = head_sizes(q.shape, op.head_dim, op.q_layout, "q")
    args: dict[str, KernelArg] = {
        "lse": Pointer(lse), "scratch": Scratch(node),
        "worker_bytes": _worker_bytes(node, ctx.target), "batch": sizes.batch,
        "queries": sizes.length,
        "keys": head_sizes(k.shape, op.head_dim, op.kv_layout, "k").length,
    }  # fmt: skip
    strided = []
    for name, value in zip(_OPERANDS, (q, k, v, out, dout, *node.outputs), strict=True):
        layout = op.kv_layout if name.removeprefix("d") in ("k", "v") else op.q_layout
        is_result = name in ("dq", "dk", "dv")
        given = contiguous_strides(value.shape) if is_result else ctx.strides(value)
        steps = by_axis(given, layout, op.head_dim)
        args[name] = Pointer(value)
        args |= {f"{name}_{axis}": step for axis, step in zip(_AXES, steps, strict=True)}
        if not same(steps[3], 1) and op.head_dim > 1:
            strided.append(name)
    cost = op.cost([x.shape for x in node.inputs], [x.shape for x in node.outputs])
    return [
        KernelLaunch(
            _spec(node, strided),
            [args[name] for name in _ARGS],
            node.inputs,
            node.outputs,
            uses_scratch=True,
            flops=cost.flops,
            bytes=cost.bytes,
        )
    ]
