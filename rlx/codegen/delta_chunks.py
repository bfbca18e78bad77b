"""The gated delta rule over many tokens, a chunk at a time.

A chunk of T tokens is made of products of small matrices. With γ_t = e_1…e_t and
E_ti = e_(i+1)…e_t, all in terms of the state S before the chunk:

    d_t = β_t (v_t − γ_t kᵀ_t S) − Σ_(i<t) β_t E_ti (k_t·k_i) d_i
    o_t = γ_t qᵀ_t S + Σ_(i≤t) E_ti (q_t·k_i) d_i
    S'  = γ_T S + Σ_i E_Ti k_i dᵀ_i

The E are products, never quotients of the γ, so a gate that shuts (e = 0) is no special case. No
sum over tokens goes beyond the token it is for, so neither does a NaN.
"""

from __future__ import annotations

from math import sqrt

from rlx.codegen.delta_net import Emitter, Rule
from rlx.codegen.delta_parts import Products
from rlx.codegen.emit import Module, Value, i64
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.math import exp
from rlx.codegen.storage import memory_type, store
from rlx.codegen.target import Target
from rlx.support.records import dataclass

TOKENS = 16  # of a chunk: more would spend too much on products of tokens with tokens


@dataclass(frozen=True)
class DeltaChunks(KernelSpec):
    """args: q, k, v, g, beta, state where there is one, o, last, scratch, stride, batch, seq,
    heads, parts

    Any number of tokens, a chunk at a time. A unit of work is one of `parts` runs of column blocks
    of a head; `scratch` holds `stride` bytes for each worker.
    """

    rule: Rule

    @property
    def args(self) -> list[str]:
        sizes = ["scratch", "stride", "batch", "seq", "heads", "parts"]
        return [*self.rule.operands, *sizes]

    def scratch(self, target: Target) -> int:
        """Bytes each worker needs."""
        size = self.rule.sums.bytes
        return sum(-(-count * size // 64) * 64 for count in self.areas(target).values())

    def areas(self, target: Target) -> dict[str, int]:
        """Elements of each piece of working memory."""
        n, t = self.rule.size, TOKENS
        width = self.rule.lanes(target) * self.rule.vectors(target)
        return {
            "state": n * n,
            "keys": 2 * t * n,  # k of the chunk, then q/√N
            "scaled": 2 * t * n,  # both times γ
            "late": t * n,  # k times its decay until the chunk ends
            "turned": n * t,  # k transposed
            "meets": 2 * t * t,  # k·k, then q·k, each with its decay
            "decays": t * t,
            "gates": 3 * t,  # e, β, γ
            "seen": 2 * t * width,  # γ kᵀS, then γ qᵀS
            "changes": t * width,
        }

    def emit(self, m: Module) -> None:
        _Chunks(self, m).emit()


class _Chunks(Emitter):
    def __init__(self, spec: DeltaChunks, m: Module) -> None:
        lanes, vectors = spec.rule.lanes(m.target), spec.rule.vectors(m.target)
        self.products = Products(m, spec.rule.sums, lanes)
        self.into_block = self.products.emit(vectors, fresh=True)
        self.onto_block = self.products.emit(vectors, fresh=False)
        self.turned_vectors = max(1, min(vectors, TOKENS // lanes))
        self.into_meets = self.products.emit(self.turned_vectors, fresh=True)
        super().__init__(spec.rule, m.kernel(), spec.args)
        place = self.f.gep(self.o["scratch"], self.f["tid"].to(i64) * self.o["stride"])
        self.area: dict[str, Value] = {}
        for name, count in spec.areas(m.target).items():
            self.area[name] = place
            place = self.f.gep(place, -(-count * self.sums.bytes // 64) * 64)

    def at(self, name: str, index: Value | int) -> Value:
        return self.f.gep(self.area[name], index, self.sums)

    def number(self, name: str, index: Value | int) -> Value:
        return self.f.load(self.at(name, index), self.sums)

    def emit(self) -> None:
        f, o = self.f, self.o
        lo, hi = f.split(o["batch"] * o["heads"] * o["parts"])
        for unit in f.range(lo, hi):
            head, part = unit.udiv(o["parts"]), unit.urem(o["parts"])
            first = (part * self.blocks).udiv(o["parts"]) * self.width
            last = ((part + 1) * self.blocks).udiv(o["parts"]) * self.width
            image = head.udiv(o["heads"])
            # Token s of this head is number `token` + s·heads, and N times that an element of q.
            token = image * o["seq"] * o["heads"] + head.urem(o["heads"])
            self._copy_state(head, first, last, into=True)
            for s in f.range(0, o["seq"], TOKENS):
                count = f.min(o["seq"] - s, TOKENS)
                start = token + s * o["heads"]
                self._prepare(start, count)
                for column in f.range(first, last, self.width):
                    self._block(start, count, column)
            self._copy_state(head, first, last, into=False)

    def _copy_state(self, head: Value, first: Value, last: Value, into: bool) -> None:
        """Columns [first, last) of the state: from where it is given, or to where it goes."""
        f, n = self.f, self.size
        for i in f.range(0, n):
            for column in f.range(first, last, self.lanes):
                at = i * n + column
                own, outer = self.at("state", at), head * (n * n) + at
                if not into:
                    dtype = self.rule.last
                    to = f.gep(self.o["last"], outer, memory_type(dtype))
                    store(f, f.load(own, self.vector), to, dtype)
                elif self.rule.state is not None:
                    f.store(self.load("state", outer, self.lanes), own)
                else:
                    f.store(f.const(0, self.vector), own)

    # -- what all columns share -------------------------------------------------------------------

    def _prepare(self, start: Value, count: Value) -> None:
        f, n, t = self.f, self.size, TOKENS
        self._gates(start, count)
        last = (count - 1) * t
        for i in f.range(0, count):
            row = (start + i * self.o["heads"]) * n
            gamma = self.splat(self.number("gates", i + 2 * t))
            late = self.splat(self.number("decays", last + i))
            for c in f.range(0, n, self.lanes):
                k = self.load("k", row + c, self.lanes)
                q = self.load("q", row + c, self.lanes) * (1 / sqrt(n))
                at = i * n + c
                f.store(k, self.at("keys", at))
                f.store(q, self.at("keys", at + t * n))
                f.store(k * gamma, self.at("scaled", at))
                f.store(q * gamma, self.at("scaled", at + t * n))
                f.store(k * late, self.at("late", at))
            for c in f.range(0, n):
                f.store(self.number("keys", i * n + c), self.at("turned", c * t + i))
        size = self.sums.bytes
        width = self.turned_vectors * self.lanes
        for half in range(2):
            for column in f.range(0, t, width):
                a, b = self.at("keys", half * t * n), self.at("turned", column)
                c = f.gep(self.at("meets", half * t * t), column, self.sums)
                strides = [f.i64(s * size) for s in (n, 1, t, t)]
                f.call(self.into_meets, a, b, c, *strides, count, f.i64(n), f.const(0, self.sums))
        self._weigh(count)

    def _gates(self, start: Value, count: Value) -> None:
        """e, β and γ of every token, and the decays E between tokens."""
        f, t = self.f, TOKENS

        def token(i: Value, gamma: Value) -> Value:
            at = start + i * self.o["heads"]
            e = exp(self.load("g", at))
            gamma = gamma * e
            f.store(self.load("beta", at), self.at("gates", i + t))
            f.store(gamma, self.at("gates", i + 2 * t))
            for j in f.range(0, i):
                f.store(self.number("decays", (i - 1) * t + j) * e, self.at("decays", i * t + j))
            f.store(f.const(1.0, self.sums), self.at("decays", i * t + i))
            return gamma

        f.loop(0, count, 1, [f.const(1.0, self.sums)], token)

    def _weigh(self, count: Value) -> None:
        """Products of tokens with tokens times the decay between them; those of keys times −β."""
        f, t = self.f, TOKENS
        for i in f.range(0, count):
            beta = self.number("gates", i + t)
            for j in f.range(0, i + 1):
                at = i * t + j
                decay = self.number("decays", at)
                f.store(-(self.number("meets", at) * decay * beta), self.at("meets", at))
                q = self.at("meets", at + t * t)
                f.store(f.load(q, self.sums) * decay, q)

    # -- one block of columns ---------------------------------------------------------------------

    def _block(self, start: Value, count: Value, column: Value) -> None:
        f, n, t, size = self.f, self.size, TOKENS, self.sums.bytes
        state = self.at("state", column)
        term, line = f.i64(n * size), f.i64(self.width * size)
        nothing = f.const(0, self.sums)
        for half in range(2):
            a, seen = self.at("scaled", half * t * n), self.at("seen", half * t * self.width)
            f.call(
                self.into_block, a, state, seen, term, f.i64(size), term, line, count, f.i64(n),
                nothing,
            )  # fmt: skip
        for i in f.range(0, count):
            self._token(start + i * self.o["heads"], i, column)
        gamma = self.number("gates", count - 1 + 2 * t)
        f.call(
            self.onto_block, self.area["late"], self.area["changes"], state, f.i64(size), term,
            line, term, f.i64(n), count, gamma,
        )  # fmt: skip

    def _token(self, at: Value, i: Value, column: Value) -> None:
        """d and o of token i, from those of the tokens before it."""
        f, t = self.f, TOKENS
        place = at * self.size + column
        beta = self.splat(self.number("gates", i + t))
        first = [
            (v - s) * beta for v, s in zip(self.row("v", place), self._line("seen", i), strict=True)
        ]

        def earlier(j: Value, *sums: Value) -> list[Value]:
            changes = self._line("changes", j)
            key = self.splat(self.number("meets", i * t + j))
            query = self.splat(self.number("meets", i * t + j + t * t))
            weights = [key] * self.vectors + [query] * self.vectors
            pairs = zip(weights, changes * 2, sums, strict=True)
            return [f.fma(w, d, total) for w, d, total in pairs]

        sums = f.loop(0, i, 1, [*first, *self._line("seen", i + t)], earlier)
        change, out = sums[: self.vectors], sums[self.vectors :]
        own = self.splat(self.number("meets", i * t + i + t * t))
        for j, d in enumerate(change):
            f.store(d, self.at("changes", i * self.width + j * self.lanes))
        self.put("o", place, [f.fma(own, d, o) for d, o in zip(change, out, strict=True)])

    def _line(self, name: str, i: Value) -> list[Value]:
        f = self.f
        base = self.at(name, i * self.width)
        return [f.load(base, self.vector, j * self.vector.bytes) for j in range(self.vectors)]
