"""A row of a matmul has the same bits whatever rows run beside it, wherever it lies among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from gemm_support import draw
from program_support import EMULATED, TARGETS, TILED, Native
from qgemm_support import SCHEMES, columns, random_weight

from rlx.backends.cpu.kernels.gemm.pack_weights import pack_weights
from rlx.backends.cpu.kernels.qgemm.pack_quantised import pack_quantised
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.ir.node import Value
from rlx.ir.quant.scheme import QuantScheme
from rlx.llvm.target import Target
from rlx.passes.prepare import split_prepare

MOST = 512
# (rows, first row): all tile heights and remainders, at several places
PIECES = (
    (1, 0), (1, 511), (1, 200), (2, 5), (3, 17), (4, 64), (5, 123), (7, 301), (8, 8), (9, 400),
    (13, 300), (16, 31), (33, 250), (64, 100), (100, 7), (200, 300),
)  # fmt: skip
KNOWN = {(1, 200), (2, 5), (7, 301), (64, 100)}  # run also as code for this number of rows

Build = Callable[[Graph, list[Value], list[Value]], Value]
Arrays = Mapping[str, np.ndarray]


class Rows:
    """A graph of rows, run on pieces of them. `rows` are inputs whose first axis is rows."""

    def __init__(
        self, build: Build, rows: Arrays, params: Arrays, others: Arrays | None = None
    ) -> None:
        self.build, self.rows, self.params, self.others = build, rows, params, others or {}
        self.prepared: dict[Target, Arrays] = {}

    def graph(self, count: int | str, target: Target) -> Graph:
        g = Graph()
        rows = [g.input(k, [count, *a.shape[1:]], DType.of(a.dtype)) for k, a in self.rows.items()]
        rest = [g.param(k, a.shape, DType.of(a.dtype)) for k, a in self.params.items()]
        rest += [g.input(k, a.shape, DType.of(a.dtype)) for k, a in self.others.items()]
        g.set_outputs(self.build(g, rows, rest))
        return pack_weights(pack_quantised(g, target), target)

    def program(self, count: int | str, target: Target, workers: int) -> Callable[..., np.ndarray]:
        main, prepare = split_prepare(self.graph(count, target))
        if target not in self.prepared:  # packed weights do not depend on the number of rows
            names = {n.name for n in prepare.sources("param")}
            made = evaluate(prepare, {k: v for k, v in self.params.items() if k in names})
            self.prepared[target] = dict(zip(prepare.output_names, made, strict=True))
        given = {**self.params, **self.others, **self.prepared[target]}
        live = {} if isinstance(count, int) else {count: MOST}
        program = Native(main, target, workers, live)

        def run(first: int, size: int) -> np.ndarray:
            rows = {k: a[first : first + size] for k, a in self.rows.items()}
            sizes = dict.fromkeys(live, size)
            [out] = program.run({**given, **rows}, sizes)
            return out

        return run

    def check(self, targets: Sequence[Target] = tuple(TARGETS), workers: Sequence[int] = (1, 2)):
        for target in targets:
            whole = self.program(MOST, target, 1)(0, MOST)
            assert not np.isnan(whole.astype(np.complex128)).any()
            for nth in workers:
                dynamic = self.program("m", target, nth)
                for size, first in (*PIECES, (MOST, 0)):
                    want = whole[first : first + size].tobytes()
                    where = f"{target.cpu}, {nth} workers, {size} rows from {first}"
                    assert dynamic(first, size).tobytes() == want, where
                    if (size, first) in KNOWN and nth == workers[-1]:
                        fixed = self.program(size, target, nth)(first, size)
                        assert fixed.tobytes() == want, where + ", known when compiled"


# -- dense ------------------------------------------------------------------------------------

DENSE = [("f32", w) for w in ("f32", "f16", "bf16")]
SLOW_DENSE = [("f32", "f8e4m3"), ("f32", "f8e5m2"), ("f32", "i8"), ("f16", "f16")]
SLOW_DENSE += [("bf16", "bf16"), ("f64", "f64"), ("f16", "f32"), ("c64", "c64")]


def dense(x: str, w: str, k: int, n: int, build: Build, **extra: np.ndarray) -> Rows:
    rows = {"x": draw(1, MOST, k, dtype=x)}
    rows |= {name: a for name, a in extra.items() if len(a) == MOST and a.ndim > 1}
    rest = {name: a for name, a in extra.items() if name not in rows}
    return Rows(build, rows, {"w": draw(2, k, n, dtype=w), **rest})


def plain(g: Graph, rows: list[Value], params: list[Value]) -> Value:
    return g.matmul(rows[0], params[0])


@pytest.mark.parametrize(("k", "n"), [(40, 33), (1000, 130)])
@pytest.mark.parametrize(("x", "w"), DENSE)
def test_matmul_with_constant_weights(x, w, k, n):
    dense(x, w, k, n, plain).check()


def test_matmul_in_tile_registers():
    """AMX's tiles of bf16."""
    case = dense("bf16", "bf16", 200, 70, plain)
    case.check(TILED, [2])


@pytest.mark.slow
@pytest.mark.parametrize(("x", "w"), SLOW_DENSE)
def test_matmul_of_other_types(x, w):
    dense(x, w, 1000, 130, plain).check()


@pytest.mark.parametrize("w", ["f32", "f16"])
def test_epilogues(w):
    k, n = 800, 70

    def build(g, rows, params):
        return g.fused_matmul_bias_act(
            rows[0], params[0], params[1], rows[1], activation="gelu", has_bias=True,
            has_residual=True,
        )  # fmt: skip

    dense("f32", w, k, n, build, r=draw(3, MOST, n), b=draw(4, n)).check()


def test_gate_and_up():
    def build(g, rows, params):
        return g.fused_swiglu(rows[0], *params)

    dense("f32", "f32", 500, 70, build, up=draw(5, 500, 70)).check()


def test_lora():
    def build(g, rows, params):
        return g.lora_matmul(rows[0], *params, scale=0.5)

    dense("f32", "bf16", 500, 70, build, a=draw(5, 500, 8), b=draw(6, 8, 70)).check()


@pytest.mark.parametrize("w", ["f32", "f16"])
def test_weights_given_at_each_run(w):
    k, n = 800, 130
    for transposed in (False, True):

        def build(g, rows, rest, transposed=transposed):
            return g.matmul(rows[0], g.transpose(rest[0], (1, 0)) if transposed else rest[0])

        shape = (n, k) if transposed else (k, n)
        Rows(build, {"x": draw(1, MOST, k)}, {}, {"w": draw(2, *shape, dtype=w)}).check()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("k", [384, 5000])
def test_narrow_weights(k, n):
    dense("f32", "f32", k, n, plain).check()


@pytest.mark.parametrize("w", ["f32", "bf16"])
def test_experts(w):
    k, n, experts = 500, 70, 4
    expert = np.random.default_rng(3).integers(0, experts, MOST).astype(np.int32)

    def build(g, rows, params):
        return g.grouped_matmul(rows[0], params[0], rows[1])

    rows = {"x": draw(1, MOST, k), "e": expert}
    Rows(build, rows, {"w": draw(2, experts, k, n, dtype=w)}).check()


# -- quantised --------------------------------------------------------------------------------


def quantised(
    scheme: QuantScheme, build: Build, dims: tuple[int, ...] = (37,), **rows: np.ndarray
) -> Rows:
    k = columns(scheme)
    parts = random_weight(scheme, dims, k, np.random.default_rng(7))
    x = np.random.default_rng(8).standard_normal((MOST, k)).astype(np.float32)
    return Rows(build, {"x": x, **rows}, {f"w{i}": a for i, a in enumerate(parts)})


QUICK = {"Q8_0", "Q4_K", "Q6_K", "F16", "int8"}
QUICK_AND_SLOW = [
    pytest.param(s, id=str(s), marks=() if str(s) in QUICK else pytest.mark.slow) for s in SCHEMES
]


@pytest.mark.parametrize("scheme", QUICK_AND_SLOW)
def test_quantised_matmul(scheme):
    quantised(scheme, lambda g, rows, w: g.dequant_matmul(rows[0], *w, scheme=scheme)).check()


@pytest.mark.skipif(not (EMULATED.avx512 and EMULATED.vnni), reason="one row: vpdpbusd, zmm")
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "int8"])
def test_tile_registers(name):
    """A single row takes vectors, others AMX's tiles."""
    scheme = QuantScheme.parse(name)

    def build(g, rows, w):
        return g.dequant_matmul(rows[0], *w, scheme=scheme)

    quantised(scheme, build).check(TILED, [2])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_quantised_experts(scheme):
    expert = np.random.default_rng(3).integers(0, 4, MOST).astype(np.int32)

    def build(g, rows, w):
        return g.dequant_grouped_matmul(rows[0], w[0], rows[1], *w[1:], scheme=scheme)

    quantised(scheme, build, (4, 37), e=expert).check()


FUSED = [
    QuantScheme.parse(name) for name in ("Q8_0", "Q4_K", "Q6_K", "Q4_0", "MXFP4", "IQ3_XXS", "int8")
]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", FUSED, ids=str)
def test_quantised_epilogues(scheme):
    n = 38
    extras = {"b": draw(3, n)}

    def build(g, rows, params):
        *w, bias = params
        y = g.gelu(g.add(g.dequant_matmul(rows[0], *w, scheme=scheme), bias))
        return g.add(y, rows[1])

    case = quantised(scheme, build, (n,), r=draw(4, MOST, n))
    case.params = {**case.params, **extras}
    [gemm] = [m for m in case.graph(MOST, TARGETS[0]).nodes if m.op.name == "packed_dequant_matmul"]
    assert gemm.op.has_bias and gemm.op.has_residual and gemm.op.activation == "gelu"
    case.check()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", FUSED, ids=str)
def test_quantised_gate_and_up(scheme):
    def build(g, rows, w):
        return g.fused_gated_act(g.dequant_matmul(rows[0], *w, scheme=scheme), activation="silu")

    case = quantised(scheme, build, (76,))
    [gemm] = [m for m in case.graph(MOST, TARGETS[0]).nodes if m.op.name == "packed_dequant_matmul"]
    assert gemm.op.pair
    case.check()


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_quantised_matmul_of_narrow_rows(dtype):
    scheme = QuantScheme.parse("Q4_K")

    def build(g, rows, w):
        return g.dequant_matmul(rows[0], *w, scheme=scheme)

    case = quantised(scheme, build)
    Rows(build, {"x": case.rows["x"].astype(DType.of(dtype).numpy)}, case.params).check()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.ggml_type is not None], ids=str)
def test_embedding_and_tied_head(scheme):
    """Rows of a table, and products with the same table: packed, it serves both."""
    ids = np.random.default_rng(3).integers(0, 37, MOST).astype(np.int32)

    def build(g, rows, w):
        found = g.dequant_gather(w[0], rows[1], scheme=scheme)
        return g.dequant_matmul(g.add(found, rows[0]), w[0], scheme=scheme)

    quantised(scheme, build, i=ids).check(workers=(2,))
