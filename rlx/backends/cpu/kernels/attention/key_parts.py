"""Keys read for decode: the dimensions of one step of the chains of a score, of several keys."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cpu.kernels.attention.problem import Problem
from rlx.backends.cpu.kernels.attention.q8_cache import load_q8
from rlx.backends.cpu.kernels.attention.tiles import to_bf16
from rlx.llvm.builder import Function, Value, i16, vec
from rlx.llvm.storage import load, memory_type, widen


class KeyParts:
    """Reads parts of keys in a function; `step` is the stride of elements in bytes."""

    def __init__(self, f: Function, problem: Problem, step: Value) -> None:
        self.f, self.problem, self.step = f, problem, step
        self.dims = problem.score_parts(f.target) * problem.pair

    def read(self, keys: Sequence[Value], d: Value) -> Value:
        """Dimensions d … d + dims of each key, as one vector of numbers or of bf16 pairs."""
        f, p = self.f, self.problem
        if p.bf16_pairs and p.k.name == "bf16":
            halves = [f.load(f.gep(key, d, 2), vec(self.dims, i16)) for key in keys]
            return joined(f, halves).bits(vec(self.dims, p.acc))
        if p.bf16_pairs:
            return to_bf16(f, *(self._wide(key, d) for key in keys)).bits(vec(self.dims, p.acc))
        if p.q8_kv:
            return joined(f, [self._wide(key, d) for key in keys])
        element = memory_type(p.k)
        if "k" in p.strided:
            at = [(d + i) * self.step for i in range(self.dims)]
            raw = [f.load(f.gep(key, i), element) for key in keys for i in at]
        else:
            raw = [f.load(f.gep(key, d, element), vec(self.dims, element)) for key in keys]
        return widen(f, joined(f, raw), p.k, p.acc)

    def _wide(self, key: Value, d: Value) -> Value:
        f, p = self.f, self.problem
        if p.q8_kv:
            return load_q8(f, key, d, self.dims, p.acc)
        return load(f, f.gep(key, d, memory_type(p.k)), p.k, self.dims, p.acc)


def joined(f: Function, vectors: Sequence[Value]) -> Value:
    """Vectors, a power of two in number, one after the other."""
    found = list(vectors)
    while len(found) > 1:
        found = [f.concat(a, b) for a, b in zip(found[::2], found[1::2], strict=True)]
    return found[0]
