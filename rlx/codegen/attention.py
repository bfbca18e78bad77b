"""What the attention kernels share: the constants of a problem, their args, and how items are cut.

Query heads that use one key head are treated together: row r of a key head is query r // group and
head r % group of its group. An item of work is a block of consecutive rows of one key head (or of
all key heads) in one batch entry; the keys it can see are a range, because rows are in the order of
positions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import field
from math import gcd
from typing import ClassVar

from rlx.codegen import math
from rlx.codegen.emit import Function, Type, Value, f32, f64, i64, ptr
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.storage import memory_type
from rlx.codegen.target import Target
from rlx.ir.attrs import MaskKind
from rlx.ir.dtype import DType
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Problem:
    """What is constant in the code. The result has the element type of q.

    `gaps` names the operands (of "qkv") whose elements of one head do not lie side by side;
    `mask_rows` says that a mask tensor differs from query to query or from head to head; `packed`
    that keys and values are bytes, blocks of Q8_0; `pairs` that numbers are rounded to bf16 and
    multiplied two at a time where there are many rows (see `attention_pairs`).
    """

    q: DType
    k: DType
    v: DType
    head_dim: int
    kv_heads: int
    group: int
    scale: float
    kind: MaskKind = MaskKind.NONE
    softcap: float = 0.0
    mask: DType | None = None
    mask_rows: bool = False
    sinks: DType | None = None
    gaps: str = ""
    packed: bool = False
    pairs: bool = False

    @property
    def sums(self) -> Type:
        """The type everything is computed in."""
        return f64 if any(t.bits == 64 for t in (self.q, self.k, self.v)) else f32

    @property
    def ends(self) -> bool:
        """Whether rows see keys up to one of their own."""
        return self.kind.ahead is not None

    @property
    def starts(self) -> bool:
        """Whether rows see keys from one of their own on."""
        return self.kind.behind is not None

    @property
    def query_factor(self) -> float:
        """What queries are multiplied with: the scale, and the first part of a softcap."""
        return self.scale / self.softcap if self.softcap else self.scale

    def dtype(self, name: str) -> DType:
        """Element type of an operand: q, k, v or out."""
        return {"q": self.q, "k": self.k, "v": self.v, "out": self.q}[name]

    def lanes(self, target: Target) -> int:
        return target.lanes(self.sums.bits)

    def chunk(self, name: str, target: Target) -> int:
        """How many elements of a head are moved at once: no vector reaches beyond its head."""
        return 1 if name in self.gaps else gcd(self.head_dim, self.lanes(target))


POINTERS = ("q", "k", "v", "mask", "sinks", "out", "scratch")
SIZES = ("batch", "queries", "keys")
STRIDES = (
    *(f"{x}_{axis}" for x in "qkv" for axis in ("batch", "row", "head", "step")),
    *(f"mask_{axis}" for axis in ("batch", "head", "row", "step")),
    *(f"out_{axis}" for axis in ("batch", "row", "head")),
)
ARGS = (*POINTERS, *SIZES, *STRIDES)
"""The args of every attention kernel. Strides count elements; `mask` is any address when there is
no mask; `step` is the stride of the last axis."""


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
class AttentionKernel(KernelSpec):
    """A kernel that works on items: what its schedule and its results have in common.

    `queries`: where their number arrives with a run, a kernel for "one" and another for "more" are
    both run, and one of them finds nothing to do.
    """

    problem: Problem
    queries: str = field(default="any", kw_only=True)

    @property
    def together(self) -> int:
        """How many key heads an item has."""
        return 1

    @property
    def unit(self) -> int:
        """Keys: borders between workers inside an item are multiples of it."""
        return 16

    @abstractmethod
    def block_rows(self, target: Target) -> int:
        """Rows of a block of one key head; the last block may have fewer."""

    @abstractmethod
    def value_columns(self, target: Target) -> int:
        """Columns of a row of sums, with padding."""

    @abstractmethod
    def working_bytes(self, target: Target) -> int:
        """What one worker needs beside its sums."""

    def sums_bytes(self, target: Target) -> int:
        """Sums of an item: [heads][rows][columns] weighted values, then the maximum and the total
        of each row's weights."""
        rows = self.sums_rows(target)
        return _whole_lines(rows * (self.value_columns(target) + 2) * self.problem.sums.bytes)

    def sums_rows(self, target: Target) -> int:
        return self.together * self.block_rows(target)

    def maxima(self, target: Target) -> int:
        """Byte offset of the rows' maxima in the sums; the totals follow them."""
        columns = self.value_columns(target)
        return self.sums_rows(target) * columns * self.problem.sums.bytes

    def totals(self, target: Target) -> int:
        return self.maxima(target) + self.sums_rows(target) * self.problem.sums.bytes

    def worker_bytes(self, target: Target) -> int:
        """Scratch of one worker: three sums (of an item that is all its own, of one that others
        began, of one that others go on with), then its working memory."""
        return 3 * self.sums_bytes(target) + _whole_lines(self.working_bytes(target))


def _whole_lines(size: int) -> int:
    return -(-size // 64) * 64


class Rows:
    """Where the rows of a block lie and what they see. Inside a function that has `args`."""

    def __init__(self, f: Function, problem: Problem) -> None:
        self.f, self.problem, self.args = f, problem, Args(f)
        self.count = self.args["queries"] * problem.group
        self.past = self.args["keys"] - self.args["queries"]

    def place(self, row: Value) -> tuple[Value, Value]:
        """(query, head within the group) of a row of a key head."""
        if self.problem.group == 1:
            return row, self.f.i64(0)
        query = row.udiv(self.problem.group)
        return query, row - query * self.problem.group

    def address(self, name: str, batch: Value, head: Value, row: Value) -> Value:
        """Where a row of q or out begins."""
        return self.addresses(name, batch, head)(row)

    def addresses(self, name: str, batch: Value, head: Value) -> Callable[[Value], Value]:
        """The same for several rows of a key head."""
        first = self.args.head(name, self.problem, batch, head * self.problem.group)
        line, step = (self.args.row_bytes(name, self.problem, axis) for axis in ("row", "head"))

        def address(row: Value) -> Value:
            query, member = self.place(row)
            at = query * line
            return self.f.gep(first, at if self.problem.group == 1 else at + member * step)

        return address

    def mask_offset(self, batch: Value, head: Value, row: Value) -> Value:
        """Element of the mask that belongs to the row and to key 0."""
        query, member = self.place(row)
        at = batch * self.args["mask_batch"] + query * self.args["mask_row"]
        return at + (head * self.problem.group + member) * self.args["mask_head"]

    def end(self, row: Value) -> Value:
        """The first key behind those that the row sees."""
        keys = self.args["keys"]
        ahead = self.problem.kind.ahead
        if ahead is None:
            return keys
        return self.f.max(self.f.min(self.past + self.place(row)[0] + (ahead + 1), keys), 0)

    def start(self, row: Value) -> Value:
        """The first key that the row sees."""
        behind = self.problem.kind.behind
        if behind is None:
            return self.f.i64(0)
        return self.f.max(self.past + self.place(row)[0] - behind, 0)


def weight(difference: Value) -> Value:
    """exp of a score less the row's maximum; 0 for a masked one."""
    return math.exp_down(difference)


def or_zero(maximum: Value) -> Value:
    """The maximum, or 0 for a row without any key, so that no infinities are subtracted."""
    f = maximum.fn
    return f.select(maximum.eq(float("-inf")), 0.0, maximum)
