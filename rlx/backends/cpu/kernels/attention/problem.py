"""The attention problem that all kernels share: constants, kernel args, rows and visible keys.

With grouped-query attention (GQA) the query heads of one KV head are processed together: row r of a
KV head is query r // gqa_group and head r % gqa_group of its group. A work item is a query block
(consecutive rows) of one KV head in one batch entry. The keys it can see are a range,
because rows are in the order of positions.

A Q8_0 KV cache has blocks of an f16 scale and 32 codes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import field
from math import gcd
from typing import ClassVar

from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.ir.attrs import MaskKind
from rlx.ir.dtype import DType
from rlx.ir.quant.scheme import GGUF_SCHEMES
from rlx.llvm import math
from rlx.llvm.builder import (
    Function,
    Module,
    Type,
    Value,
    f16,
    f32,
    f64,
    i8,
    i16,
    i32,
    i64,
    ptr,
    vec,
)
from rlx.llvm.storage import load, memory_type
from rlx.llvm.target import Target
from rlx.support.records import dataclass

KV_BLOCK = 128  # keys of a KV block: blocks begin at multiples of it
RUN = 2 * KV_BLOCK  # keys that are read one after the other: runs too begin at multiples
SPLITS = 4  # run r belongs to split r % SPLITS
"""They fix the order of sums over keys: it is the same for one query and for many."""


@dataclass(frozen=True)
class Problem:
    """What is constant in the code. The result has the element type of q."""

    q: DType
    k: DType
    v: DType
    head_dim: int
    kv_heads: int
    gqa_group: int
    scale: float
    kind: MaskKind = MaskKind.NONE
    softcap: float = 0.0
    mask: DType | None = None
    mask_rows: bool = False
    """Whether the mask tensor differs between queries or heads."""
    sinks: DType | None = None
    strided: str = ""
    """The operands (of "qkv") whose last axis is not contiguous."""
    q8_kv: bool = False
    """Keys and values are Q8_0 blocks."""
    bf16_pairs: bool = False
    """Operands are rounded to bf16 and multiplied in pairs (see `tiles`)."""
    lse: bool = False
    """The log-sum-exp of each row is a result too."""

    @property
    def acc(self) -> Type:
        """The accumulator type."""
        return f64 if any(t.bits == 64 for t in (self.q, self.k, self.v)) else f32

    @property
    def right_bounded(self) -> bool:
        """Whether each row has a last visible key (causal or windowed)."""
        return self.kind.ahead is not None

    @property
    def left_bounded(self) -> bool:
        """Whether each row has a first visible key (sliding window)."""
        return self.kind.behind is not None

    @property
    def query_factor(self) -> float:
        """What queries are multiplied with: the scale, divided by the softcap."""
        return self.scale / self.softcap if self.softcap else self.scale

    @property
    def pair(self) -> int:
        """Elements that a lane multiplies at once: 2 with the bf16 dot product."""
        return 2 if self.bf16_pairs else 1

    def dtype(self, name: str) -> DType:
        """Element type of an operand: q, k, v or out."""
        return {"q": self.q, "k": self.k, "v": self.v, "out": self.q}[name]

    def lanes(self, target: Target) -> int:
        return target.lanes(self.acc.bits)

    def score_parts(self, target: Target) -> int:
        """Chains of multiply-adds that make up a score: chain i has the dimensions (or pairs of
        them) d with d % parts = i. Their sums are added in order."""
        chunk = min(8, self.lanes(target)) if self.acc.bits == 32 else 1
        return gcd(self.head_dim // self.pair, chunk)

    def vector_width(self, name: str, target: Target) -> int:
        """Elements of a head per vector: no vector reaches beyond its head."""
        return 1 if name in self.strided else gcd(self.head_dim, self.lanes(target))


POINTERS = ("q", "k", "v", "mask", "sinks", "out", "scratch", "lse")
SIZES = ("batch", "queries", "keys")
STRIDES = (
    *(f"{x}_{axis}" for x in "qkv" for axis in ("batch", "row", "head", "step")),
    *(f"mask_{axis}" for axis in ("batch", "head", "row", "step")),
    *(f"out_{axis}" for axis in ("batch", "row", "head")),
)
ARGS = (*POINTERS[:-1], *SIZES, *STRIDES, "lse")
"""The args of every attention kernel. Strides count elements; `step` is that of the last axis;
`mask` and `lse` are any address where there are none."""


class Args:
    """A kernel's args, read where they are used."""

    names: ClassVar[tuple[str, ...]] = ARGS
    pointers: ClassVar[tuple[str, ...]] = POINTERS

    def __init__(self, f: Function) -> None:
        self.f = f

    def __getitem__(self, name: str) -> Value:
        kind = ptr if name in self.pointers else i64
        return self.f.arg(self.f["args"], self.names.index(name), kind)

    def row_bytes(self, name: str, problem: Problem, axis: str = "row") -> Value:
        """Bytes from one row (or step) of an operand to the next."""
        return self[f"{name}_{axis}"] * memory_type(problem.dtype(name)).bytes

    def head(self, name: str, problem: Problem, batch: Value, head: Value) -> Value:
        """The first row of a head."""
        at = batch * self[f"{name}_batch"] + head * self[f"{name}_head"]
        return self.f.gep(self[name], at, memory_type(problem.dtype(name)))


@dataclass(frozen=True)
class PartialLayout:
    """Work items of a kernel, and how their partial results lie in scratch memory.

    `queries`: where their number is dynamic, a kernel for "one" and another for "more" are both
    launched, and one of them has nothing to do.
    """

    problem: Problem
    queries: str
    block_rows: int  # rows of a query block of one KV head; the last block may have fewer
    value_columns: int  # columns of an accumulator row, with padding
    workspace_bytes: int  # workspace of one worker, beside its partial results

    @property
    def partial_bytes(self) -> int:
        """The partial result of a split: [rows][columns] weighted values, then the running max and
        the running sum of each row."""
        return _to_cache_lines(self.block_rows * (self.value_columns + 2) * self.problem.acc.bytes)

    @property
    def max_offset(self) -> int:
        """Byte offset of the running maxima in a partial result; the running sums follow."""
        return self.block_rows * self.value_columns * self.problem.acc.bytes

    @property
    def sum_offset(self) -> int:
        return self.max_offset + self.block_rows * self.problem.acc.bytes

    @property
    def item_bytes(self) -> int:
        """The partial results of all splits of an item."""
        return SPLITS * self.partial_bytes

    @property
    def worker_bytes(self) -> int:
        """Scratch of one worker: partial results of three items (one of its own, one that an
        earlier worker began, one that a later worker continues), then its workspace."""
        return 3 * self.item_bytes + _to_cache_lines(self.workspace_bytes)


@dataclass(frozen=True)
class AttentionKernel(KernelSpec):
    """A kernel over work items."""

    problem: Problem
    queries: str = field(default="any", kw_only=True)

    @property
    def flushes_denormals(self) -> bool:
        return True

    @abstractmethod
    def layout(self, target: Target) -> PartialLayout:
        """Its work items and their partial results."""


def _to_cache_lines(size: int) -> int:
    return -(-size // 64) * 64


class Rows:
    """Addresses of a query block's rows and the keys they see, in a function with `args`."""

    def __init__(self, f: Function, problem: Problem) -> None:
        self.f, self.problem, self.args = f, problem, Args(f)
        self.count = self.args["queries"] * problem.gqa_group
        self.past = self.args["keys"] - self.args["queries"]

    def place(self, row: Value) -> tuple[Value, Value]:
        """(query, head within the GQA group) of a row of a KV head."""
        if self.problem.gqa_group == 1:
            return row, self.f.i64(0)
        query = row.udiv(self.problem.gqa_group)
        return query, row - query * self.problem.gqa_group

    def address(self, name: str, batch: Value, head: Value, row: Value) -> Value:
        """Where a row of q or out begins."""
        return self.addresses(name, batch, head)(row)

    def addresses(self, name: str, batch: Value, head: Value) -> Callable[[Value], Value]:
        """`address` for several rows of a KV head."""
        first = self.args.head(name, self.problem, batch, head * self.problem.gqa_group)
        row_bytes, head_bytes = (
            self.args.row_bytes(name, self.problem, axis) for axis in ("row", "head")
        )

        def address(row: Value) -> Value:
            query, member = self.place(row)
            at = query * row_bytes
            return self.f.gep(
                first, at if self.problem.gqa_group == 1 else at + member * head_bytes
            )

        return address

    def mask_offset(self, batch: Value, head: Value, row: Value) -> Value:
        """The mask element of a row and key 0."""
        query, member = self.place(row)
        at = batch * self.args["mask_batch"] + query * self.args["mask_row"]
        return at + (head * self.problem.gqa_group + member) * self.args["mask_head"]

    def kv_end(self, row: Value) -> Value:
        """One past the last key that the row sees."""
        keys = self.args["keys"]
        ahead = self.problem.kind.ahead
        if ahead is None:
            return keys
        return self.f.max(self.f.min(self.past + self.place(row)[0] + (ahead + 1), keys), 0)

    def kv_start(self, row: Value) -> Value:
        """The first key that the row sees."""
        behind = self.problem.kind.behind
        if behind is None:
            return self.f.i64(0)
        return self.f.max(self.past + self.place(row)[0] - behind, 0)


def softmax_exp(difference: Value) -> Value:
    """exp(score - max); 0 for a masked score."""
    return math.exp_down(difference)


GROUP = 16
"""Keys whose probabilities are added as a tree; the running sum grows by such sums, in order."""


def halve(p: Sequence[Value]) -> list[Value]:
    """One level of that tree: numbers, or vectors of them, half of the list apart."""
    half = len(p) // 2
    with p[0].fn.exact():
        return [a + b for a, b in zip(p[:half], p[half:], strict=True)]


def finite_max(maximum: Value) -> Value:
    """The maximum, or 0 for a row without any key: no infinities are subtracted."""
    f = maximum.fn
    return f.select(maximum.eq(float("-inf")), 0.0, maximum)


Q8_0 = GGUF_SCHEMES["Q8_0"]
_SIZE, _CODES = Q8_0.block_size, 2  # elements of a block; byte offset of its codes
_SMALLEST_NORMAL = 2.0**-126


def load_q8(f: Function, row: Value, at: Value, lanes: int, compute: Type) -> Value:
    """`lanes` elements of a Q8_0 row from element `at` on, all of one block."""
    block = f.gep(row, at.udiv(_SIZE), Q8_0.bytes_per_block)
    codes = f.load(f.gep(block, at.urem(_SIZE)), vec(lanes, i8), _CODES)
    if f.target.f16c and f.target.is_x86 and lanes in (8, 16) and compute.bits == 32:
        # broadcast, then converted: inserting one number would wait for what the register had
        scales = f.splat(f.load(block, i16), lanes).bits(vec(lanes, f16)).to(compute)
        return codes.to(compute) * scales
    scale = f.load(block, f16).to(compute)
    return codes.to(compute) * (scale if lanes == 1 else f.splat(scale, lanes))


@dataclass(frozen=True)
class QuantizeBlocks(KernelSpec):
    """x to Q8_0; its rows are contiguous blocks. args: x, out, blocks."""

    x: DType

    def emit(self, m: Module) -> None:
        f = m.kernel()
        x, out = f.arg(f["args"], 0), f.arg(f["args"], 1)
        lo, hi = f.split(f.arg(f["args"], 2, i64))
        for block in f.range(lo, hi):
            source = f.gep(x, block, _SIZE * memory_type(self.x).bytes)
            self._block(f, source, f.gep(out, block, Q8_0.bytes_per_block))

    def _block(self, f: Function, x: Value, to: Value) -> None:
        """Rounds as `quant.encode` does: by the inverse of the scale before that becomes f16, and
        halves away from zero. The fraction is exact, so halves are recognised."""
        numbers = load(f, x, self.x, _SIZE, f32)
        scale = f.reduce("max", f.abs(numbers)) / 127.0
        inverse = f.select(scale < _SMALLEST_NORMAL, 0.0, 1.0 / scale)
        with f.exact():
            scaled = numbers * f.splat(inverse, _SIZE)
            whole = scaled.to(vec(_SIZE, i32))
            rest = scaled - whole.to(f32)
        up, down = (
            f.select(flag, 1, f.const(0, whole.type)) for flag in (rest >= 0.5, rest <= -0.5)
        )
        f.store(scale.to(f16), to)
        f.store((whole + up - down).to(i8), to, _CODES)


__all__ = ["Q8_0", "QuantizeBlocks", "load_q8"]
