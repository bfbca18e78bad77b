"""Attention over a paged KV cache: each token attends to its sequence through a page table.

Consecutive tokens of one sequence are taken together, up to `run_length`, so that keys and values
are read once for them; others alone. A kernel for runs and one for single tokens both walk all
tokens and cut them in the same way; each does its own. A work item is a run (or token) and a KV
head; workers take items round-robin.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.kernels.attention.combine import Combine, kv_runs, partials_of
from rlx.backends.cpu.kernels.attention.decode import MAX_ROWS, Decode, DecodeAttend, emit_attend
from rlx.backends.cpu.kernels.attention.problem import (
    ARGS,
    KV_BLOCK,
    POINTERS,
    SPLITS,
    Args,
    Problem,
    Rows,
)
from rlx.backends.cpu.kernels.attention.tiles import has_bf16_dot
from rlx.backends.cpu.lowering import (
    Context,
    KernelArg,
    KernelLaunch,
    NodeNumber,
    Pointer,
    Scratch,
    Status,
    lowers,
)
from rlx.ir.attrs import MaskKind
from rlx.ir.node import Node
from rlx.ir.ops.paged import PagedAttention
from rlx.llvm.builder import Function, Module, Value, i32, i64
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_AHEAD = 24  # rows from the one that is read to the one that is prefetched, in a block

PAGED_ARGS = (
    *ARGS,
    "table",
    "rows",
    "positions",
    "status",
    "node",
    "sequences",
    "pages",
    "cache_pages",
)


class PagedArgs(Args):
    """`table` is i32 [sequences, pages], `rows` and `positions` are i32 [queries]; the cache has
    `cache_pages` pages. A row, position or page out of range leaves `node` in `status`."""

    names = PAGED_ARGS
    pointers = (*POINTERS, "table", "rows", "positions", "status")

    def number(self, name: str, at: Value) -> Value:
        """An element of an integer operand."""
        return self.f.load(self.f.gep(self[name], at, i32), i32).to(i64, signed=True)


@dataclass(frozen=True)
class Paged(Decode):
    """args: PAGED_ARGS. For runs of `tokens` tokens (1: for single tokens)."""

    page: int = 64
    tokens: int = 1

    @property
    def run_length(self) -> int:
        """Consecutive tokens that are taken together."""
        return max(MAX_ROWS // self.problem.gqa_group, 1)

    @property
    def label(self) -> str:
        return "paged"

    def emit(self, m: Module) -> None:
        attend = emit_attend(m, self, PagedAttend)
        f = m.kernel()
        combine = Combine(f, self.layout(m.target))
        args, heads = PagedArgs(f), self.problem.kv_heads
        count, nth, tid = args["queries"], f["nth"].to(i64), f["tid"].to(i64)

        at = f.carry([f.i64(0), f.i64(0)])
        for _ in at.forever():
            token, item = at.values
            at.break_unless(token < count)
            whole = self._is_run(f, args, token, count)
            taken = f.select(whole, f.i64(self.run_length), f.i64(1))
            mine = whole if self.tokens > 1 else ~whole if self.run_length > 1 else f.i64(1).eq(1)
            for _ in f.when(mine):
                self._item(f, args, attend, combine, token, (item, nth, tid))
            at.values = [token + taken, item + f.select(mine, f.i64(heads), f.i64(0))]

    def _is_run(self, f: Function, args: PagedArgs, token: Value, count: Value) -> Value:
        """Whether `run_length` consecutive tokens of one sequence begin here."""
        if self.run_length == 1:
            return f.i64(0).ne(0)
        is_run = f.carry()
        for fits in f.either(token + self.run_length <= count, is_run):
            if not fits:
                is_run.values = [f.i64(0).ne(0)]
                continue
            row, position = args.number("rows", token), args.number("positions", token)
            good = f.i64(0).eq(0)
            for i in range(1, self.run_length):
                good = good & args.number("rows", token + i).eq(row)
                good = good & args.number("positions", token + i).eq(position + i)
            is_run.values = [good]
        return is_run.values[0]

    def _item(
        self, f: Function, args: PagedArgs, attend: Function, combine: Combine, token: Value,
        share: tuple[Value, Value, Value],
    ) -> None:  # fmt: skip
        """This worker's heads of a run."""
        item, nth, tid = share
        row, position = args.number("rows", token), args.number("positions", token)
        end = position + self.tokens
        known = row.ult(args["sequences"]) & position.ult(args["pages"] * self.page)
        known = known & (end <= args["pages"] * self.page)
        first = f.i64(0)
        if self.problem.kind.behind is not None:
            first = f.max(position - self.problem.kind.behind, 0)
        runs, layout = kv_runs(f, first, end), self.layout(f.target)
        partials, workspace = (partials_of(f, layout, tid, number) for number in (0, 3))
        batch, first_row = f.i64(0), token * self.problem.gqa_group
        for is_known in f.either(known):
            if not is_known:
                f.store(args["node"], args["status"])
                continue
            for head in f.range(0, self.problem.kv_heads):
                for _ in f.when((item + head).urem(nth).eq(tid)):
                    place = (batch, head, first_row)
                    spans = (first, end, f.i64(0), f.min(runs, SPLITS))
                    f.call(attend, f["args"], workspace, partials, *place, *spans)
                    combine.own(place, first, end, partials)


class PagedRows(Rows):
    """Rows of a run of consecutive tokens of a sequence."""

    def __init__(self, f: Function, kernel: Paged) -> None:
        super().__init__(f, kernel.problem)
        token = f["row"].udiv(kernel.problem.gqa_group)
        args = PagedArgs(f)
        self.past = args.number("positions", token) - token  # as if query 0 were in this run

    def kv_end(self, row: Value) -> Value:
        return self.past + self.place(row)[0] + 1


class PagedAttend(DecodeAttend):
    kernel: Paged

    def __init__(self, f: Function, kernel: Paged) -> None:
        super().__init__(f, kernel)
        self.args = args = PagedArgs(f)
        self.row_map = PagedRows(f, kernel)
        row = args.number("rows", f["row"].udiv(kernel.problem.gqa_group))
        self.table = f.gep(args["table"], row * args["pages"], i32)

    def rows_from(self, name: str, key: Value) -> Callable[[Value], Value]:
        f, page = self.f, self.kernel.page
        first, inside = key.udiv(page), key.urem(page)
        bases = [self._page(name, first)]
        if page % KV_BLOCK == 0:  # the block is in one page
            return lambda j: f.gep(bases[0], (inside + j) * self.row_bytes[name])
        # pages of half a block, from its first key on
        last = (f["last"] - 1).udiv(page)
        bases.append(self._page(name, f.min(first + 1, last)))
        size = self.row_bytes[name]
        return lambda j: f.gep(
            f.select(j < page, bases[0], bases[1]), f.select(j < page, j, j - page) * size
        )

    def row_ahead(self, name: str, key: Value, j: Value) -> Value:
        return self.rows_from(name, key)(self.f.min(j + _AHEAD, KV_BLOCK - 1))

    def _page(self, name: str, number: Value) -> Value:
        """Where a page of the sequence lies in k or v."""
        f, page = self.f, self.kernel.page
        slot = f.load(f.gep(self.table, number, i32), i32).to(i64, signed=True)
        good = slot.ult(self.args["cache_pages"])
        for is_good in f.either(good):
            if not is_good:
                f.store(self.args["node"], self.args["status"])
        at = f.select(good, slot, f.i64(0)) * page
        return f.gep(self.bases[name], at * self.row_bytes[name])


def _kernels(node: Node, target: Target) -> list[Paged]:
    op = node.op
    assert isinstance(op, PagedAttention)
    q, k, v = (value.dtype for value in node.inputs[:3])
    group = op.num_heads // op.num_kv_heads
    kind = MaskKind.SLIDING_WINDOW(op.window) if op.window else MaskKind.CAUSAL
    sinks = node.inputs[6].dtype if len(node.inputs) > 6 else None
    problem = Problem(
        q, k, v, op.head_dim, op.num_kv_heads, group, op.score_scale, kind, op.softcap, sinks=sinks,
        q8_kv=op.kv_scheme is not None,
        bf16_pairs=op.coarse and has_bf16_dot(target, op.head_dim),
    )  # fmt: skip
    run_length = max(MAX_ROWS // group, 1)
    sizes = [run_length, 1] if run_length > 1 else [1]
    return [Paged(problem, rows=n * group, page=op.page, tokens=n) for n in sizes]


def _is_supported(node: Node) -> bool:
    op = node.op
    assert isinstance(op, PagedAttention)
    few = op.num_heads // op.num_kv_heads <= 2 * MAX_ROWS
    plain = all(v.dtype.bits <= 32 for v in node.inputs[:3])
    plain = plain and all(v.dtype.name == "i32" for v in node.inputs[3:6])
    return few and plain and (op.page * 2 == KV_BLOCK or op.page % KV_BLOCK == 0)


def _scratch(node: Node, target: Target, threads: int) -> int:
    return threads * max(kernel.layout(target).worker_bytes for kernel in _kernels(node, target))


@lowers("paged_attention", when=_is_supported, scratch=_scratch)
def lower_paged(node: Node, ctx: Context) -> list[KernelLaunch]:
    op = node.op
    assert isinstance(op, PagedAttention)
    args = _args(node, op)
    cost = op.cost([v.shape for v in node.inputs], [node.output.shape])
    steps = [
        KernelLaunch(kernel, args, node.inputs, node.outputs, uses_scratch=True)
        for kernel in _kernels(node, ctx.target)
    ]
    steps[0].flops, steps[0].bytes = cost.flops, cost.bytes
    return steps


def _args(node: Node, op: PagedAttention) -> list[KernelArg]:
    q, k, v, table, rows, positions, *sinks = node.inputs
    slots, dim, width = k.shape.dims[2], op.head_dim, op.row_width()
    found: dict[str, KernelArg] = {
        "q": Pointer(q), "k": Pointer(k), "v": Pointer(v), "mask": 0,
        "sinks": Pointer(sinks[0]) if sinks else 0, "out": Pointer(node.output),
        "scratch": Scratch(node), "batch": 1, "queries": q.shape.dims[1], "keys": slots,
        "table": Pointer(table), "rows": Pointer(rows), "positions": Pointer(positions),
        "status": Status(), "node": NodeNumber(node), "sequences": table.shape.dims[0],
        "pages": table.shape.dims[1], "cache_pages": slots // op.page,
    }  # fmt: skip
    token, key = (0, op.num_heads * dim, dim, 1), (0, width, slots * width, 1)
    for name, strides in (("q", token), ("k", key), ("v", key), ("out", token)):
        axes = zip(("batch", "row", "head", "step"), strides, strict=True)
        found |= {f"{name}_{axis}": stride for axis, stride in axes}
    return [found.get(name, 0) for name in PAGED_ARGS]


__all__ = ["PAGED_ARGS", "Paged"]
