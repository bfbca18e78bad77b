"""Attention of single tokens, or of a few consecutive ones, over keys that lie in pages.

Tokens of one sequence that follow each other are taken together, `tokens` at a time, so that keys
and values are read once for them; others alone. Both kinds of kernel walk along all tokens and cut
them in the same way; each does its own. An item is one or several tokens and a key head; workers
take items in turn.

Attention over pages as steps: runs of tokens, then those that stand alone.
"""

from __future__ import annotations

from rlx.backends.cpu.kernels.attention.combine import emit_finish, sums_of
from rlx.backends.cpu.kernels.attention.decode import MOST_ROWS, Decode, Part, emit_part
from rlx.backends.cpu.kernels.attention.problem import POINTERS, WORDS, Problem, Rows, Words
from rlx.backends.cpu.lowering import Context, Number, Pointer, Scratch, Status, Step, Word, lowers
from rlx.ir.attrs import MaskKind
from rlx.ir.node import Node
from rlx.ir.ops.paged import PagedAttention
from rlx.llvm.builder import Function, Module, Value, i32, i64
from rlx.llvm.target import Target
from rlx.records import dataclass

PAGED_WORDS = (*WORDS, "table", "rows", "positions", "status", "node", "sequences", "pages", "most")


class PagedWords(Words):
    """`table` is i32 [sequences, pages], `rows` and `positions` are i32 [queries]; keys are in
    `most` pages. `node` is left in `status` when a row, a position or a page is none."""

    names = PAGED_WORDS
    pointers = (*POINTERS, "table", "rows", "positions", "status")

    def number(self, name: str, at: Value) -> Value:
        """An element of an integer operand."""
        return self.f.load(self.f.gep(self[name], at, i32), i32).to(i64, signed=True)


@dataclass(frozen=True)
class Paged(Decode):
    """words: PAGED_WORDS. For runs of `tokens` tokens (1: for those that are left)."""

    page: int = 64
    tokens: int = 1

    @property
    def run(self) -> int:
        """How many tokens are taken together where they follow each other."""
        return max(MOST_ROWS // self.problem.group, 1)

    @property
    def label(self) -> str:
        return "paged"

    def emit(self, m: Module) -> None:
        part = emit_part(m, self, PagedPart)
        finish = emit_finish(m, self)
        f = m.kernel()
        words, heads = PagedWords(f), self.problem.kv_heads
        count, nth, tid = words["queries"], f["nth"].to(i64), f["tid"].to(i64)

        def walk(token: Value, item: Value) -> list[Value]:
            whole = self._follow(f, words, token, count)
            taken = f.select(whole, f.i64(self.run), f.i64(1))
            mine = whole if self.tokens > 1 else ~whole if self.run > 1 else f.i64(1).eq(1)
            f.if_(mine, lambda: self._item(f, words, part, finish, token, (item, nth, tid)))
            return [token + taken, item + f.select(mine, f.i64(heads), f.i64(0))]

        f.while_([f.i64(0), f.i64(0)], lambda token, _: token < count, walk)

    def _follow(self, f: Function, words: PagedWords, token: Value, count: Value) -> Value:
        """Whether a whole run of consecutive tokens of one sequence begins here."""
        if self.run == 1:
            return f.i64(0).ne(0)
        fits = token + self.run <= count

        def look() -> list[Value]:
            row, position = words.number("rows", token), words.number("positions", token)
            good = f.i64(0).eq(0)
            for i in range(1, self.run):
                good = good & words.number("rows", token + i).eq(row)
                good = good & words.number("positions", token + i).eq(position + i)
            return [good]

        return f.if_(fits, look, lambda: [f.i64(0).ne(0)])[0]

    def _item(
        self, f: Function, words: PagedWords, part: Function, finish: Function, token: Value,
        turn: tuple[Value, Value, Value],
    ) -> None:  # fmt: skip
        """This worker's heads of a run."""
        item, nth, tid = turn
        row, position = words.number("rows", token), words.number("positions", token)
        end = position + self.tokens
        known = row.ult(words["sequences"]) & position.ult(words["pages"] * self.page)
        known = known & (end <= words["pages"] * self.page)
        first = f.i64(0)
        if self.problem.kind.behind is not None:
            first = f.max(position - self.problem.kind.behind, 0)
            first = first - first.urem(self.block)
        sums, space = (sums_of(f, self, tid, number) for number in (0, 3))
        batch, line = f.i64(0), token * self.problem.group

        def work() -> None:
            for head in f.range(0, self.problem.kv_heads):

                def one(head: Value = head) -> None:
                    place = (batch, head, line)
                    f.call(part, f["words"], space, sums, *place, first, end, words["k"])
                    f.call(finish, f["words"], *place, sums)

                f.if_((item + head).urem(nth).eq(tid), one)

        f.if_(known, work, lambda: f.store(words["node"], words["status"]))


class PagedRows(Rows):
    """Rows of a run of tokens that follow each other in a sequence."""

    def __init__(self, f: Function, kernel: Paged) -> None:
        super().__init__(f, kernel.problem)
        token = f["row"].udiv(kernel.problem.group)
        words = PagedWords(f)
        self.past = words.number("positions", token) - token  # position of query 0, were it one

    def end(self, row: Value) -> Value:
        return self.past + self.place(row)[0] + 1


class PagedPart(Part):
    kernel: Paged

    def __init__(self, f: Function, kernel: Paged) -> None:
        super().__init__(f, kernel)
        self.words = words = PagedWords(f)
        self.where = PagedRows(f, kernel)
        row = words.number("rows", f["row"].udiv(kernel.problem.group))
        self.table = f.gep(words["table"], row * words["pages"], i32)

    def first_row(self, name: str, key: Value) -> Value:
        f, page = self.f, self.kernel.page
        number = f.load(f.gep(self.table, key.udiv(page), i32), i32).to(i64, signed=True)
        good = number.ult(self.words["most"])
        f.if_(good, lambda: None, lambda: f.store(self.words["node"], self.words["status"]))
        slot = f.select(good, number, f.i64(0)) * page + key.urem(page)
        return f.gep(self.bases[name], slot * self.row_bytes[name])

    def look_ahead(self, key: Value, v: Value) -> None:
        f, after = self.f, key + self.block
        self.ahead = [("v", v), ("k", self.first_row("k", f.select(after < f["last"], after, key)))]


_BLOCK = 64  # keys that a kernel takes at once: no page may end inside


def _kernels(node: Node) -> list[Paged]:
    op = node.op
    assert isinstance(op, PagedAttention)
    q, k, v = (value.dtype for value in node.inputs[:3])
    group = op.num_heads // op.num_kv_heads
    kind = MaskKind.SLIDING_WINDOW(op.window) if op.window else MaskKind.CAUSAL
    sinks = node.inputs[6].dtype if len(node.inputs) > 6 else None
    problem = Problem(
        q, k, v, op.head_dim, op.num_kv_heads, group, op.score_scale, kind, op.softcap, sinks=sinks
    )
    run = max(MOST_ROWS // group, 1)
    sizes = [run, 1] if run > 1 else [1]
    return [Paged(problem, rows=n * group, page=op.page, tokens=n) for n in sizes]


def _can(node: Node) -> bool:
    op = node.op
    assert isinstance(op, PagedAttention)
    few = op.num_heads // op.num_kv_heads <= 2 * MOST_ROWS
    plain = all(v.dtype.bits <= 32 for v in node.inputs[:3])
    plain = plain and all(v.dtype.name == "i32" for v in node.inputs[3:6])
    return few and plain and op.page % _BLOCK == 0


def _scratch(node: Node, target: Target, threads: int) -> int:
    return threads * max(kernel.worker_bytes(target) for kernel in _kernels(node))


@lowers("paged_attention", when=_can, scratch=_scratch)
def lower_paged(node: Node, ctx: Context) -> list[Step]:
    op = node.op
    assert isinstance(op, PagedAttention)
    words = _words(node, op)
    cost = op.cost([v.shape for v in node.inputs], [node.output.shape])
    steps = [
        Step(kernel, words, node.inputs, node.outputs, uses_scratch=True)
        for kernel in _kernels(node)
    ]
    steps[0].flops, steps[0].bytes = cost.flops, cost.bytes
    return steps


def _words(node: Node, op: PagedAttention) -> list[Word]:
    q, k, v, table, rows, positions, *sinks = node.inputs
    slots, dim = k.shape.dims[2], op.head_dim
    found: dict[str, Word] = {
        "q": Pointer(q), "k": Pointer(k), "v": Pointer(v), "mask": 0,
        "sinks": Pointer(sinks[0]) if sinks else 0, "out": Pointer(node.output),
        "scratch": Scratch(node), "batch": 1, "queries": q.shape.dims[1], "keys": slots,
        "table": Pointer(table), "rows": Pointer(rows), "positions": Pointer(positions),
        "status": Status(), "node": Number(node), "sequences": table.shape.dims[0],
        "pages": table.shape.dims[1], "most": slots // op.page,
    }  # fmt: skip
    token, key = (0, op.num_heads * dim, dim, 1), (0, dim, slots * dim, 1)
    for name, strides in (("q", token), ("k", key), ("v", key), ("out", token)):
        axes = zip(("batch", "row", "head", "step"), strides, strict=True)
        found |= {f"{name}_{axis}": stride for axis, stride in axes}
    return [found.get(name, 0) for name in PAGED_WORDS]


__all__ = ["PAGED_WORDS", "Paged"]
