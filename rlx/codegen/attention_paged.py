"""Attention of single tokens, or of a few consecutive ones, over keys that lie in pages.

Tokens of one sequence that follow each other are taken together, `tokens` at a time, so that keys
and values are read once for them; others alone. Both kinds of kernel walk along all tokens and cut
them in the same way; each does its own. An item is one or several tokens and a key head; workers
take items in turn.
"""

from __future__ import annotations

from rlx.codegen.attention import ARGS, POINTERS, Args, Rows
from rlx.codegen.attention_decode import MOST_ROWS, Decode, Part, emit_part
from rlx.codegen.attention_finish import emit_finish, sums_of
from rlx.codegen.emit import Function, Module, Value, i32, i64
from rlx.support.records import dataclass

PAGED_ARGS = (*ARGS, "table", "rows", "positions", "status", "node", "sequences", "pages", "most")


class PagedArgs(Args):
    """`table` is i32 [sequences, pages], `rows` and `positions` are i32 [queries]; keys are in
    `most` pages. `node` is left in `status` when a row, a position or a page is none."""

    names = PAGED_ARGS
    pointers = (*POINTERS, "table", "rows", "positions", "status")

    def number(self, name: str, at: Value) -> Value:
        """An element of an integer operand."""
        return self.f.load(self.f.gep(self[name], at, i32), i32).to(i64, signed=True)


@dataclass(frozen=True)
class Paged(Decode):
    """args: PAGED_ARGS. For runs of `tokens` tokens (1: for those that are left)."""

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
        args, heads = PagedArgs(f), self.problem.kv_heads
        count, nth, tid = args["queries"], f["nth"].to(i64), f["tid"].to(i64)

        def walk(token: Value, item: Value) -> list[Value]:
            whole = self._follow(f, args, token, count)
            taken = f.select(whole, f.i64(self.run), f.i64(1))
            mine = whole if self.tokens > 1 else ~whole if self.run > 1 else f.i64(1).eq(1)
            f.if_(mine, lambda: self._item(f, args, part, finish, token, (item, nth, tid)))
            return [token + taken, item + f.select(mine, f.i64(heads), f.i64(0))]

        f.while_([f.i64(0), f.i64(0)], lambda token, _: token < count, walk)

    def _follow(self, f: Function, args: PagedArgs, token: Value, count: Value) -> Value:
        """Whether a whole run of consecutive tokens of one sequence begins here."""
        if self.run == 1:
            return f.i64(0).ne(0)
        fits = token + self.run <= count

        def look() -> list[Value]:
            row, position = args.number("rows", token), args.number("positions", token)
            good = f.i64(0).eq(0)
            for i in range(1, self.run):
                good = good & args.number("rows", token + i).eq(row)
                good = good & args.number("positions", token + i).eq(position + i)
            return [good]

        return f.if_(fits, look, lambda: [f.i64(0).ne(0)])[0]

    def _item(
        self, f: Function, args: PagedArgs, part: Function, finish: Function, token: Value,
        turn: tuple[Value, Value, Value],
    ) -> None:  # fmt: skip
        """This worker's heads of a run."""
        item, nth, tid = turn
        row, position = args.number("rows", token), args.number("positions", token)
        end = position + self.tokens
        known = row.ult(args["sequences"]) & position.ult(args["pages"] * self.page)
        known = known & (end <= args["pages"] * self.page)
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
                    f.call(part, f["args"], space, sums, *place, first, end, args["k"])
                    f.call(finish, f["args"], *place, sums)

                f.if_((item + head).urem(nth).eq(tid), one)

        f.if_(known, work, lambda: f.store(args["node"], args["status"]))


class PagedRows(Rows):
    """Rows of a run of tokens that follow each other in a sequence."""

    def __init__(self, f: Function, kernel: Paged) -> None:
        super().__init__(f, kernel.problem)
        token = f["row"].udiv(kernel.problem.group)
        args = PagedArgs(f)
        self.past = args.number("positions", token) - token  # position of query 0, were it one

    def end(self, row: Value) -> Value:
        return self.past + self.place(row)[0] + 1


class PagedPart(Part):
    kernel: Paged

    def __init__(self, f: Function, kernel: Paged) -> None:
        super().__init__(f, kernel)
        self.args = args = PagedArgs(f)
        self.where = PagedRows(f, kernel)
        row = args.number("rows", f["row"].udiv(kernel.problem.group))
        self.table = f.gep(args["table"], row * args["pages"], i32)

    def first_row(self, name: str, key: Value) -> Value:
        f, page = self.f, self.kernel.page
        number = f.load(f.gep(self.table, key.udiv(page), i32), i32).to(i64, signed=True)
        good = number.ult(self.args["most"])
        f.if_(good, lambda: None, lambda: f.store(self.args["node"], self.args["status"]))
        slot = f.select(good, number, f.i64(0)) * page + key.urem(page)
        return f.gep(self.bases[name], slot * self.row_bytes[name])

    def look_ahead(self, key: Value, v: Value) -> None:
        f, after = self.f, key + self.block
        self.ahead = [("v", v), ("k", self.first_row("k", f.select(after < f["last"], after, key)))]


__all__ = ["PAGED_ARGS", "Paged"]
