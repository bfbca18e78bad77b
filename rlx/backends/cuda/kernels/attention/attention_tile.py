"""What kernels of many queries share: which keys a tile sees, masks, a running softmax, sinks.

A warp has 16 queries. Scores of 8 keys are 4 numbers of a thread: two neighbouring keys of query
`row`, then of query `row` + 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

from rlx.backends.cuda.builder import BlockFunction
from rlx.backends.cuda.kernels.attention.attention_problem import LOG2_E, LOWEST, AttentionForm
from rlx.backends.cuda.kernels.attention.query_emitter import merge
from rlx.ir.dtype import DType
from rlx.llvm.builder import Value, f32, i8, i32, i64
from rlx.llvm.storage import load, memory_type
from rlx.support.records import dataclass

Scores = list[list[Value]]  # 4 numbers of each 8 keys


@dataclass
class Softmax:
    """Of two queries of a thread: the largest score so far, to the base 2, and sums of weights."""

    tops: list[Value]
    sums: list[Value]

    @property
    def values(self) -> list[Value]:
        return [*self.tops, *self.sums]


class AttentionTile:
    """The queries of a block. Args: q, k, v, result, mask, sinks, batch · heads, queries, keys,
    strides of q, k, v and the result (batch, head, token), of the mask (batch, head, query, key)"""

    own: Value  # the first query of this warp

    def __init__(self, f: BlockFunction, form: AttentionForm, queries: int) -> None:
        self.f, self.form, self.queries = f, form, queries
        self.element = memory_type(form.kv)
        self.row = f.lane32() >> 2  # and row + 8, in this warp's queries
        self.column = (f.lane32() & 3) << 1
        self.find_queries()

    def find_queries(self) -> None:
        """Which queries and keys the block has."""
        f, form = self.f, self.form
        args = f["args"]
        self.q, self.k, self.v, self.out, self.mask, self.sinks = (f.arg(args, i) for i in range(6))
        heads, self.rows, self.keys = (f.arg(args, i, i32) for i in (6, 7, 8))
        numbers = [f.arg(args, i, i64) for i in range(9, 25)]
        self.strides = {
            name: numbers[3 * i : 3 * i + 3] for i, name in enumerate(("q", "k", "v", "out"))
        }
        self.mask_strides = numbers[12:16]
        block = f.block_number()
        tile = block.udiv(heads)
        number = block - tile * heads
        tiles = f.ceil_div(self.rows, self.queries)
        self.first = (tiles - 1 - tile) * self.queries  # the last queries see most keys
        self.has_work = tile < tiles
        self.sequence = number.udiv(form.heads)
        self.head = number - self.sequence * form.heads

    def at(self, name: str, head: Value, token: Value) -> Value:
        batch, by_head, by_token = self.strides[name]
        return self._offset((self.sequence, batch), (head, by_head), (token, by_token))

    def _offset(self, *terms: tuple[Value, Value]) -> Value:
        """The sum of numbers (i32) times strides (i64)."""
        products = [number.to(i64) * stride for number, stride in terms]
        return sum(products[1:], products[0])

    # -- keys -------------------------------------------------------------------------------------

    def range(self) -> tuple[Value, Value]:
        """The keys that any query of the block sees."""
        f, form = self.f, self.form
        before = self.keys - self.rows
        low, high = f.i32(0), self.keys
        if form.behind is not None:
            low = f.max(before + self.first - form.behind, 0)
        if form.ahead is not None:
            last = f.min(self.first + self.queries, self.rows)
            high = f.max(f.min(before + last + form.ahead, self.keys), 0)
        return low, f.max(high, low)

    def _limits(self, key: Value, high: Value) -> list[tuple[Value, Value | None]]:
        """For both queries the numbers of keys in a tile that they see: below the first, and from
        the second on."""
        f, form, found = self.f, self.form, list[tuple[Value, Value | None]]()
        start = key + self.column
        for half in range(2):
            place = self.place(self.own + self.row + (8 * half))
            end, first = high, None
            if form.ahead is not None:
                end = f.min(high, place + (form.ahead + 1))
            if form.behind is not None:
                first = place - form.behind - start
            found.append((end - start, first))
        return found

    def place(self, query: Value) -> Value:
        """The key that is the query's own."""
        return query + (self.keys - self.rows)

    # -- scores -----------------------------------------------------------------------------------

    @property
    def factor(self) -> float:
        """What scores are multiplied with, to the base 2, when weights are computed."""
        form = self.form
        return 1.0 if form.softcap or form.mask or form.scale <= 0 else form.scale * LOG2_E

    def finished(self, scores: Scores, key: Value, high: Value, hides: bool = True) -> Scores:
        """Scores to be multiplied with the factor; those that a query does not see are less than
        LOWEST. Without `hides` both queries see all keys."""
        f, limits = self.f, self._limits(key, high) if hides else []
        made = []
        for j, four in enumerate(scores):
            new = []
            for i, s in enumerate(four):
                number, half = 8 * j + i % 2, i // 2
                if self.factor == 1.0:
                    s = self._computed(s, key + self.column + number, half)
                if hides:
                    end, first = limits[half]
                    keeps = end > number
                    if first is not None:
                        keeps = keeps & (first <= number)
                    s = f.select(keeps, s, float("-inf"))
                new.append(s)
            made.append(new)
        return made

    def _computed(self, s: Value, key: Value, half: int) -> Value:
        """A score with all that is done to it."""
        f, form = self.f, self.form
        s = s * form.scale
        if form.softcap:
            s = f.activate("tanh", s * (1 / form.softcap)) * form.softcap
        s = s * LOG2_E
        if form.mask:
            query = f.min(self.own + self.row + 8 * half, self.rows - 1)
            s = self._with_mask(s, query, f.min(key, self.keys - 1))
        return s

    def _with_mask(self, score: Value, query: Value, key: Value) -> Value:
        f, form = self.f, self.form
        batch, head, row, column = self.mask_strides
        at = self._offset((self.sequence, batch), (self.head, head), (query, row), (key, column))
        if form.mask == "bool":
            keeps = f.load(f.gep(self.mask, at), i8).ne(0)
            return f.select(keeps, score, float("-inf"))
        dtype = DType.of(form.mask)
        added = load(f, f.gep(self.mask, at, memory_type(dtype).bytes), dtype, 1, f32)
        return score + added * LOG2_E

    # -- weights ----------------------------------------------------------------------------------

    def begin(self) -> Softmax:
        f = self.f
        return Softmax([f.const(LOWEST, f32)] * 2, [f.const(0.0, f32)] * 2)

    def weigh(self, scores: Scores, known: Softmax) -> tuple[Scores, Softmax, list[Value]]:
        """Weights of a tile, the softmax after it, and what sums before it are multiplied with."""
        f, new, shrinks = self.f, Softmax([], []), list[Value]()
        for half in range(2):
            own = [v for s in scores for v in s[2 * half : 2 * half + 2]]
            most = f.warp_max(_folded(own, f.larger), 4)
            top = f.larger(known.tops[half], most * self.factor if self.factor != 1.0 else most)
            shrinks.append(f.exp2_fast(known.tops[half] - top))
            new.tops.append(top)
        down = [-top for top in new.tops]
        weights = [
            [f.exp2_fast(f.fma(v, self.factor, down[i // 2])) for i, v in enumerate(s)]
            for s in scores
        ]
        for half in range(2):
            own = [v for w in weights for v in w[2 * half : 2 * half + 2]]
            total = _folded(own, lambda a, b: a + b)
            new.sums.append(f.fma(known.sums[half], shrinks[half], total))
        return weights, new, shrinks

    def head_of(self, query: Value) -> Value:
        """The head of a query."""
        return self.head

    # -- the result -------------------------------------------------------------------------------

    def results(self, softmax: Softmax, out: Sequence[Value]) -> list[list[Value]]:
        """The numbers of both queries: sums of values [8 columns at a time] with sinks, divided by
        those of the weights."""
        f, form, found = self.f, self.form, list[list[Value]]()
        for half in range(2):
            mine = [v for i, v in enumerate(out) if i // 2 % 2 == half]
            total = f.warp_sum(softmax.sums[half], 4)
            if form.sinks is not None:
                head = self.head_of(self.own + self.row + 8 * half).to(i64)
                there = f.gep(self.sinks, head, memory_type(form.sinks).bytes)
                sink = load(f, there, form.sinks, 1, f32) * LOG2_E
                zero = f.const(0.0, f32)
                given = [sink, zero + 1.0, *[zero] * len(mine)]
                _, total, *mine = merge(f, [softmax.tops[half], total, *mine], given)
            some = total > 0.0
            factor = f.select(some, 1.0 / f.select(some, total, 1.0), 0.0)
            found.append([v * factor for v in mine])
        return found


def merge_queries(f: BlockFunction, state: list[Value], others: list[Value]) -> list[Value]:
    """Two softmaxes of the same queries with their sums of values, as one."""
    made = list(state)
    for half in range(2):
        numbers = [i for i in range(4, len(state)) if (i - 4) // 2 % 2 == half]
        at = [half, 2 + half, *numbers]
        for i, v in zip(at, merge(f, [state[i] for i in at], [others[i] for i in at]), strict=True):
            made[i] = v
    return made


def _folded(values: Sequence[Value], join: Callable[[Value, Value], Value]) -> Value:
    """All values joined, in two chains that do not wait for each other."""
    chains = [list(values[i::2]) for i in range(2)]
    ends: list[Value] = []
    for chain in chains:
        total = chain[0]
        for v in chain[1:]:
            total = join(total, v)
        ends.append(total)
    return reduce(join, ends)
