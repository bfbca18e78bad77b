"""The gated delta rule over many tokens, in the chunkwise parallel form.

A chunk of T tokens is computed by small GEMMs. With γ_t = e_1…e_t and
E_ti = e_(i+1)…e_t, all in terms of the state S before the chunk:

    d_t = β_t (v_t − γ_t kᵀ_t S) − Σ_(i<t) β_t E_ti (k_t·k_i) d_i
    o_t = γ_t qᵀ_t S + Σ_(i≤t) E_ti (q_t·k_i) d_i
    S'  = γ_T S + Σ_i E_Ti k_i dᵀ_i

The E are products, never quotients of the γ, so a closed gate (e = 0) is no special case. No sum
over tokens goes beyond its own token, so NaN never propagates backwards.

Products of small matrices that lie in working memory, a few columns wide.
"""

from __future__ import annotations

from math import sqrt

from rlx.backends.cpu.kernels.recurrent.delta_net import Emitter, Rule
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.llvm.builder import Function, Module, Type, Value, i64, ptr, vec
from rlx.llvm.math import exp
from rlx.llvm.storage import memory_type, store
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_ROWS = 4  # of a register tile


class SmallGemm:
    """GEMM functions of one module, for small matrices that are a few vectors wide."""

    def __init__(self, m: Module, sums: Type, lanes: int) -> None:
        self.m, self.sums, self.lanes = m, sums, lanes

    def emit(self, vectors: int, overwrite: bool) -> Function:
        """void gemm(a, b, c, a_row, a_term, b_term, c_row, rows, terms, scale)

        c = a·b with `overwrite`, else c = scale·c + a·b; c has `rows` rows of `vectors` vectors,
        the inner dimension is `terms`. Strides are in bytes.
        """
        name = f"{'gemm' if overwrite else 'gemm_add'}{vectors}"
        if name in self.m.functions:
            return self.m.functions[name]
        numbers = ["a_row", "a_term", "b_term", "c_row", "rows", "terms"]
        params = [("a", ptr), ("b", ptr), ("c", ptr), *((n, i64) for n in numbers)]
        f = self.m.function(name, [*params, ("scale", self.sums)], internal=True)
        whole = f["rows"] - f["rows"].urem(_ROWS)
        for rows, lo, hi in ((_ROWS, f.i64(0), whole), (1, whole, f["rows"])):
            for i in f.range(lo, hi, rows):
                self._rows(f, i, rows, vectors, overwrite)
        return f

    def _rows(self, f: Function, i: Value, rows: int, vectors: int, overwrite: bool) -> None:
        type_ = vec(self.lanes, self.sums)
        starts = [f.gep(f["a"], (i + r) * f["a_row"]) for r in range(rows)]
        targets = [f.gep(f["c"], (i + r) * f["c_row"]) for r in range(rows)]
        sums = [f.const(0, type_)] * (rows * vectors)
        if not overwrite:
            scale = f.splat(f["scale"], self.lanes)
            sums = [
                f.load(c, type_, j * type_.bytes) * scale for c in targets for j in range(vectors)
            ]

        def accumulate(k: Value, *sums: Value) -> list[Value]:
            row_b = f.gep(f["b"], k * f["b_term"])
            b = [f.load(row_b, type_, j * type_.bytes) for j in range(vectors)]
            at, out = k * f["a_term"], []
            for r, start in enumerate(starts):
                a = f.broadcast_load(start, self.sums, self.lanes, at)
                out += [f.fma(a, x, sums[r * vectors + j]) for j, x in enumerate(b)]
            return out

        sums = f.loop(0, f["terms"], 1, sums, accumulate)
        for n, value in enumerate(sums):
            f.store(value, targets[n // vectors], n % vectors * type_.bytes)


TOKENS = 16  # of a chunk: with more, token-by-token products cost too much


@dataclass(frozen=True)
class DeltaChunks(KernelSpec):
    """args: q, k, v, g, beta, state (if any), o, last, scratch, scratch_bytes, batch, seq, heads,
    splits

    Any number of tokens, in chunks. A work item is one of `splits` ranges of column blocks of a
    head; `scratch` holds `scratch_bytes` for each worker.
    """

    rule: Rule

    @property
    def args(self) -> list[str]:
        sizes = ["scratch", "scratch_bytes", "batch", "seq", "heads", "splits"]
        return [*self.rule.operands, *sizes]

    def scratch(self, target: Target) -> int:
        """Bytes each worker needs."""
        size = self.rule.sums.bytes
        return sum(-(-count * size // 64) * 64 for count in self.areas(target).values())

    def areas(self, target: Target) -> dict[str, int]:
        """Elements of each scratch buffer."""
        n, t = self.rule.size, TOKENS
        width = self.rule.lanes(target) * self.rule.vectors(target)
        return {
            "state": n * n,
            "keys": 2 * t * n,  # k of the chunk, then q/√N
            "scaled": 2 * t * n,  # both scaled by γ
            "decayed": t * n,  # k decayed to the end of the chunk
            "keys_t": n * t,  # k transposed
            "scores": 2 * t * t,  # k·k, then q·k, decayed
            "decays": t * t,
            "gates": 3 * t,  # e, β, γ
            "predictions": 2 * t * width,  # γ kᵀS, then γ qᵀS
            "deltas": t * width,
        }

    def emit(self, m: Module) -> None:
        _Chunks(self, m).emit()


class _Chunks(Emitter):
    def __init__(self, spec: DeltaChunks, m: Module) -> None:
        lanes, vectors = spec.rule.lanes(m.target), spec.rule.vectors(m.target)
        self.gemm = SmallGemm(m, spec.rule.sums, lanes)
        self.gemm_block = self.gemm.emit(vectors, overwrite=True)
        self.gemm_accumulate = self.gemm.emit(vectors, overwrite=False)
        self.score_vectors = max(1, min(vectors, TOKENS // lanes))
        self.gemm_scores = self.gemm.emit(self.score_vectors, overwrite=True)
        super().__init__(spec.rule, m.kernel(), spec.args)
        address = self.f.gep(self.o["scratch"], self.f["tid"].to(i64) * self.o["scratch_bytes"])
        self.area: dict[str, Value] = {}
        for name, count in spec.areas(m.target).items():
            self.area[name] = address
            address = self.f.gep(address, -(-count * self.sums.bytes // 64) * 64)

    def at(self, name: str, index: Value | int) -> Value:
        return self.f.gep(self.area[name], index, self.sums)

    def number(self, name: str, index: Value | int) -> Value:
        return self.f.load(self.at(name, index), self.sums)

    def emit(self) -> None:
        f, o = self.f, self.o
        lo, hi = f.split(o["batch"] * o["heads"] * o["splits"])
        for work_item in f.range(lo, hi):
            head, split = work_item.udiv(o["splits"]), work_item.urem(o["splits"])
            first = (split * self.blocks).udiv(o["splits"]) * self.width
            last = ((split + 1) * self.blocks).udiv(o["splits"]) * self.width
            sequence = head.udiv(o["heads"])
            # Token s of this head has index `token` + s·heads, and element N times that of q.
            token = sequence * o["seq"] * o["heads"] + head.urem(o["heads"])
            self._copy_state(head, first, last, into=True)
            for s in f.range(0, o["seq"], TOKENS):
                count = f.min(o["seq"] - s, TOKENS)
                start = token + s * o["heads"]
                self._prepare(start, count)
                for column in f.range(first, last, self.width):
                    self._block(start, count, column)
            self._copy_state(head, first, last, into=False)

    def _copy_state(self, head: Value, first: Value, last: Value, into: bool) -> None:
        """Copy columns [first, last) of the state to scratch, or from scratch to the result."""
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

    # -- per chunk, for all columns ---------------------------------------------------------------

    def _prepare(self, start: Value, count: Value) -> None:
        f, n, t = self.f, self.size, TOKENS
        self._gates(start, count)
        last = (count - 1) * t
        for i in f.range(0, count):
            row = (start + i * self.o["heads"]) * n
            gamma = self.splat(self.number("gates", i + 2 * t))
            decayed = self.splat(self.number("decays", last + i))
            for c in f.range(0, n, self.lanes):
                k = self.load("k", row + c, self.lanes)
                q = self.load("q", row + c, self.lanes) * (1 / sqrt(n))
                at = i * n + c
                f.store(k, self.at("keys", at))
                f.store(q, self.at("keys", at + t * n))
                f.store(k * gamma, self.at("scaled", at))
                f.store(q * gamma, self.at("scaled", at + t * n))
                f.store(k * decayed, self.at("decayed", at))
            for c in f.range(0, n):
                f.store(self.number("keys", i * n + c), self.at("keys_t", c * t + i))
        size = self.sums.bytes
        width = self.score_vectors * self.lanes
        for half in range(2):
            for column in f.range(0, t, width):
                a, b = self.at("keys", half * t * n), self.at("keys_t", column)
                c = f.gep(self.at("scores", half * t * t), column, self.sums)
                strides = [f.i64(s * size) for s in (n, 1, t, t)]
                f.call(self.gemm_scores, a, b, c, *strides, count, f.i64(n), f.const(0, self.sums))
        self._apply_decay(count)

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

    def _apply_decay(self, count: Value) -> None:
        """Multiply the scores by the decay between their tokens; those of keys by −β too."""
        f, t = self.f, TOKENS
        for i in f.range(0, count):
            beta = self.number("gates", i + t)
            for j in f.range(0, i + 1):
                at = i * t + j
                decay = self.number("decays", at)
                f.store(-(self.number("scores", at) * decay * beta), self.at("scores", at))
                q = self.at("scores", at + t * t)
                f.store(f.load(q, self.sums) * decay, q)

    # -- one block of columns ---------------------------------------------------------------------

    def _block(self, start: Value, count: Value, column: Value) -> None:
        f, n, t, size = self.f, self.size, TOKENS, self.sums.bytes
        state = self.at("state", column)
        state_row, block_row = f.i64(n * size), f.i64(self.width * size)
        zero = f.const(0, self.sums)
        for half in range(2):
            a, predictions = (
                self.at("scaled", half * t * n),
                self.at("predictions", half * t * self.width),
            )
            f.call(
                self.gemm_block, a, state, predictions, state_row, f.i64(size), state_row,
                block_row, count, f.i64(n), zero,
            )  # fmt: skip
        for i in f.range(0, count):
            self._token(start + i * self.o["heads"], i, column)
        gamma = self.number("gates", count - 1 + 2 * t)
        f.call(
            self.gemm_accumulate, self.area["decayed"], self.area["deltas"], state, f.i64(size),
            state_row, block_row, state_row, f.i64(n), count, gamma,
        )  # fmt: skip

    def _token(self, at: Value, i: Value, column: Value) -> None:
        """d and o of token i, from the d of the tokens before it."""
        f, t = self.f, TOKENS
        address = at * self.size + column
        beta = self.splat(self.number("gates", i + t))
        first = [
            (v - s) * beta
            for v, s in zip(
                self.row("v", address), self._row_vectors("predictions", i), strict=True
            )
        ]

        def earlier(j: Value, *sums: Value) -> list[Value]:
            deltas = self._row_vectors("deltas", j)
            key = self.splat(self.number("scores", i * t + j))
            query = self.splat(self.number("scores", i * t + j + t * t))
            weights = [key] * self.vectors + [query] * self.vectors
            pairs = zip(weights, deltas * 2, sums, strict=True)
            return [f.fma(w, d, total) for w, d, total in pairs]

        sums = f.loop(0, i, 1, [*first, *self._row_vectors("predictions", i + t)], earlier)
        delta, out = sums[: self.vectors], sums[self.vectors :]
        own = self.splat(self.number("scores", i * t + i + t * t))
        for j, d in enumerate(delta):
            f.store(d, self.at("deltas", i * self.width + j * self.lanes))
        self.store("o", address, [f.fma(own, d, o) for d, o in zip(delta, out, strict=True)])

    def _row_vectors(self, name: str, i: Value) -> list[Value]:
        f = self.f
        base = self.at(name, i * self.width)
        return [f.load(base, self.vector, j * self.vector.bytes) for j in range(self.vectors)]
