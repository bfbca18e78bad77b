"""The gated delta rule, one token at a time and a chunk of tokens at a time.

Per token S ← e·S, d = (v − kᵀS)·β, S ← S + k dᵀ, o = qᵀS/√N with e = exp(g). Columns of S never
meet, so a unit of work is a block of columns of one head.

A chunk of T tokens is made of products of small matrices. With γ_t = e_1…e_t and
E_ti = e_(i+1)…e_t, all in terms of the state S before the chunk:

    d_t = β_t (v_t − γ_t kᵀ_t S) − Σ_(i<t) β_t E_ti (k_t·k_i) d_i
    o_t = γ_t qᵀ_t S + Σ_(i≤t) E_ti (q_t·k_i) d_i
    S'  = γ_T S + Σ_i E_Ti k_i dᵀ_i

The E are products, never quotients of the γ, so a gate that shuts (e = 0) is no special case.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from rlx.codegen.delta_parts import Products
from rlx.codegen.emit import Function, Module, Type, Value, f32, f64, i64, vec
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.math import exp
from rlx.codegen.operands import Operands
from rlx.codegen.selective_scan import dividing_lanes
from rlx.codegen.storage import load, memory_type, store
from rlx.codegen.target import Target
from rlx.ir.dtype import DType

TOKENS = 16  # of a chunk: more would spend too much on products of tokens with tokens
_POINTERS = ("q", "k", "v", "g", "beta", "state", "o", "last", "scratch")


@dataclass(frozen=True)
class Rule:
    """What both kernels know: element types and the size N of a head."""

    q: DType
    k: DType
    v: DType
    g: DType
    beta: DType
    state: DType | None
    o: DType
    last: DType
    size: int

    @property
    def sums(self) -> Type:
        types = (self.q, self.k, self.v, self.g, self.beta, self.state, self.last)
        return f64 if any(t is not None and t.bits == 64 for t in types) else f32

    def lanes(self, target: Target) -> int:
        return dividing_lanes(target, self.sums.bits, self.size)

    def vectors(self, target: Target) -> int:
        """Vectors of a block of columns."""
        most = 4 if target.num_vector_registers >= 32 else 2
        count = self.size // self.lanes(target)
        return max(v for v in range(1, most + 1) if count % v == 0)

    def blocks(self, target: Target) -> int:
        return self.size // (self.lanes(target) * self.vectors(target))

    @property
    def operands(self) -> list[str]:
        given = ["state"] * (self.state is not None)
        return ["q", "k", "v", "g", "beta", *given, "o", "last"]


class _Emitter:
    def __init__(self, rule: Rule, f: Function, words: list[str]) -> None:
        self.rule, self.f, self.size = rule, f, rule.size
        self.sums, self.lanes = rule.sums, rule.lanes(f.target)
        self.vectors, self.blocks = rule.vectors(f.target), rule.blocks(f.target)
        self.width = self.lanes * self.vectors
        self.vector = vec(self.lanes, self.sums)
        self.o = Operands(f, words, _POINTERS)

    def load(self, name: str, at: Value, lanes: int = 1) -> Value:
        dtype: DType = getattr(self.rule, name)
        place = self.f.gep(self.o[name], at, memory_type(dtype))
        return load(self.f, place, dtype, lanes, self.sums)

    def row(self, name: str, at: Value) -> list[Value]:
        """The vectors of a block's columns from element `at` on."""
        return [self.load(name, at + j * self.lanes, self.lanes) for j in range(self.vectors)]

    def put(self, name: str, at: Value, values: list[Value]) -> None:
        dtype: DType = getattr(self.rule, name)
        for j, value in enumerate(values):
            place = self.f.gep(self.o[name], at + j * self.lanes, memory_type(dtype))
            store(self.f, value, place, dtype)

    def splat(self, value: Value) -> Value:
        return self.f.splat(value, self.lanes)


@dataclass(frozen=True)
class DeltaStep(KernelSpec):
    """words: q, k, v, g, beta, state where there is one, o, last, heads

    One token of every head (`heads` counts those of all sequences): reads the state once, as fast
    as memory gives it, and writes it once.
    """

    rule: Rule

    @property
    def words(self) -> list[str]:
        return [*self.rule.operands, "heads"]

    def emit(self, m: Module) -> None:
        _Step(self.rule, m.kernel(), self.words).emit()


class _Step(_Emitter):
    def emit(self) -> None:
        f, o = self.f, self.o
        lo, hi = f.split(o["heads"] * self.blocks)
        for unit in f.range(lo, hi):
            head, column = unit.udiv(self.blocks), unit.urem(self.blocks) * self.width
            self._columns(head, column)

    def _columns(self, head: Value, column: Value) -> None:
        f, n = self.f, self.size
        first = head * (n * n) + column
        decay = self.splat(exp(self.load("g", head)))
        beta = self.splat(self.load("beta", head))
        row = head * n
        seen = self._seen(first, row) if self.rule.state is not None else None
        change = []
        for j, v in enumerate(self.row("v", row + column)):
            known = v if seen is None else v - seen[j] * decay
            change.append(known * beta)

        def update(i: Value, *sums: Value) -> list[Value]:
            k, q = self.splat(self.load("k", row + i)), self.splat(self.load("q", row + i))
            rows = [k * d for d in change]
            if seen is not None:
                old = self.row("state", first + i * n)
                rows = [f.fma(decay, s, r) for s, r in zip(old, rows, strict=True)]
            self.put("last", first + i * n, rows)
            return [f.fma(q, s, total) for s, total in zip(rows, sums, strict=True)]

        zeros = [f.const(0, self.vector)] * self.vectors
        totals = f.loop(0, n, 1, zeros, update)
        self.put("o", row + column, [t * (1 / sqrt(n)) for t in totals])

    def _seen(self, first: Value, row: Value) -> list[Value]:
        """kᵀS: what the state holds for this key, before the decay."""
        f, n = self.f, self.size
        chains = 4 if n % 4 == 0 else 1  # so that a sum does not wait for the one before

        def add(i: Value, *sums: Value) -> list[Value]:
            out = list(sums)
            for c in range(chains):
                k = self.splat(self.load("k", row + i + c))
                for j, s in enumerate(self.row("state", first + (i + c) * n)):
                    at = c * self.vectors + j
                    out[at] = f.fma(k, s, out[at])
            return out

        zeros = [f.const(0, self.vector)] * (chains * self.vectors)
        sums = f.loop(0, n, chains, zeros, add)
        while len(sums) > self.vectors:
            half = len(sums) // 2
            sums = [a + b for a, b in zip(sums[:half], sums[half:], strict=True)]
        return sums


@dataclass(frozen=True)
class DeltaChunks(KernelSpec):
    """words: q, k, v, g, beta, state where there is one, o, last, scratch, stride, batch, seq,
    heads, parts

    Any number of tokens, a chunk at a time. A unit of work is one of `parts` runs of column blocks
    of a head; `scratch` holds `stride` bytes for each worker.
    """

    rule: Rule

    @property
    def words(self) -> list[str]:
        sizes = ["scratch", "stride", "batch", "seq", "heads", "parts"]
        return [*self.rule.operands, *sizes]

    def scratch(self, target: Target) -> int:
        """Bytes each worker needs."""
        size = self.rule.sums.bytes
        return sum(-(-count * size // 64) * 64 for count in self._areas(target).values())

    def _areas(self, target: Target) -> dict[str, int]:
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


class _Chunks(_Emitter):
    def __init__(self, spec: DeltaChunks, m: Module) -> None:
        lanes, vectors = spec.rule.lanes(m.target), spec.rule.vectors(m.target)
        self.products = Products(m, spec.rule.sums, lanes)
        self.into_block = self.products.emit(vectors, fresh=True)
        self.onto_block = self.products.emit(vectors, fresh=False)
        self.turned_vectors = max(1, min(vectors, TOKENS // lanes))
        self.into_meets = self.products.emit(self.turned_vectors, fresh=True)
        super().__init__(spec.rule, m.kernel(), spec.words)
        place = self.f.gep(self.o["scratch"], self.f["tid"].to(i64) * self.o["stride"])
        self.area: dict[str, Value] = {}
        for name, count in spec._areas(m.target).items():
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
