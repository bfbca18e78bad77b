"""An elementwise op that a user registers works wherever ours do: one row, five places, two orders.

Every place is compiled for the CPU and compared with the formula written here in f64. The op is
registered before anything was compiled, or after: each order has a process of its own.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys

import numpy as np

from rlx import CompileOptions, CompileProfile, GraphModule, QuantScheme, Session, Shape
from rlx.errors import UnsupportedError
from rlx.ir.op import Op, op
from rlx.ir.ops.elementwise import unary

B, S, K, N = 2, 3, 64, 96
rng = np.random.default_rng(5)


def weight(*dims):
    return (rng.standard_normal(dims) / 8).astype(np.float32)


X = rng.standard_normal((B, S, K)).astype(np.float32)
PARAMS = {"w": weight(K, N), "u": weight(K, N), "b": weight(N), "d": weight(N, K)}
IMAGE, FILTER = rng.standard_normal((1, 3, 9, 8)).astype(np.float32), weight(8, 3, 3, 3)


def define(build):
    def graph(g):
        values = {n: g.param(n, a.shape) for n, a in PARAMS.items()}
        return build(g, g.input("x", ["batch", "seq", K]), **values)

    return GraphModule.define("places", graph)


def run(build, options=None):
    compiled = Session("cpu").compile(define(build), options)
    compiled.set_params(PARAMS)
    return compiled.run(x=X)[0]


def compile_something():
    run(lambda g, x, w, u, b, d: g.linear(x, w, b, activation="gelu"))


def register():
    unary(
        "test_mish",
        lambda x: x * np.tanh(np.logaddexp(x, 0)),
        "x · tanh(softplus(x))",
        lambda g, x: x * g.tanh(g.softplus(x)),
        fuses_formula=True,
    )
    # of another op of the user's, and of an op with attributes of ours
    unary(
        "test_twice",
        lambda x: 2 * x * np.tanh(np.logaddexp(x, 0)),
        "2 · mish(x)",
        lambda g, x: g.test_cap(g.mul(g.test_mish(g.leaky_relu(x, alpha=1.0)), 2.0), 1e30),
    )


    # as a record, of two operands
    @op("test_cap", is_elementwise=True)
    class Cap(Op):
        def infer(self, a: Shape, b: Shape) -> Shape:
            return a

        def reference(self, a, b):
            return np.minimum(a, b)

        def decompose(self, g, a, b):
            return g.where(g.lt(a, b), a, b)

    # as a record, used as an activation
    @op("test_half", is_elementwise=True)
    class Half(Op):
        def infer(self, x: Shape) -> Shape:
            return x

        def reference(self, x):
            return x / 2

        def decompose(self, g, x):
            return g.mul(x, 0.5)

    unary("test_bare", np.cbrt, "the cube root, which no kernel computes")


def mish(x):
    return x * np.tanh(np.logaddexp(x, 0))


def wide(**more):
    return {n: a.astype(np.float64) for n, a in {"x": X, **PARAMS, **more}.items()}


def places(kind, act):
    A = wide()
    x, w, u, b, d = (A[n] for n in "xwubd")

    def alone(g, x, **p):
        return g.hir_mir(kind, [x])

    def after_linear(g, x, w, b, **p):
        return g.linear(x, w, b, activation=kind)

    def linear_then_op(g, x, w, b, **p):
        return g.hir_mir(kind, [g.linear(x, w, b)])

    def in_a_region(g, x, **p):
        return g.hir_mir("exp", [g.hir_mir(kind, [g.hir_mir("mul", [x, 0.5])])]) + x

    def gate(g, x, w, u, d, **p):
        return g.swiglu_ffn(x, u, w, d, activation=kind)

    def gate_with_biases(g, x, w, u, b, **p):
        return g.hir_mir(kind, [g.linear(x, w, b)]) * g.linear(x, u, b)

    def before_a_sum(g, x, **p):
        return g.hir_mir("sum", [g.hir_mir(kind, [x])], axis=(-1,))

    return [
        (alone, act(x)),
        (after_linear, act(x @ w + b)),
        (linear_then_op, act(x @ w + b)),
        (in_a_region, np.exp(act(x * 0.5)) + x),
        (gate, (act(x @ w) * (x @ u)) @ d),
        (gate_with_biases, act(x @ w + b) * (x @ u + b)),
        (before_a_sum, act(x).sum(-1)),
    ]


def check_places(kind, act):
    for build, expected in places(kind, act):
        found = run(build)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5, err_msg=build.__name__)
        fusable = run(build, CompileOptions(profile=CompileProfile(fusion="fusable")))
        np.testing.assert_allclose(fusable, expected, rtol=2e-5, atol=2e-5, err_msg=build.__name__)


def check_quantised(kind, act):
    options = CompileOptions(quant=QuantScheme.parse("Q8_0"))
    for build, expected in places(kind, act):
        if build.__name__ in ("after_linear", "linear_then_op", "gate"):
            off = np.abs(run(build, options) - expected).max()
            assert off < 0.03 * np.abs(expected).max(), (build.__name__, off)


def check_conv(kind, act):
    def build(g):
        y = g.conv2d(g.input("x", IMAGE.shape), g.param("f", FILTER.shape), padding=(1,))
        return g.hir_mir(kind, [y])

    compiled = Session("cpu").compile(GraphModule.define("conv", build))
    compiled.set_params({"f": FILTER})
    padded = np.pad(IMAGE.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    plain = np.zeros((1, 8, 9, 8))
    for i in range(3):
        for j in range(3):
            part = padded[:, :, i : i + 9, j : j + 8]
            plain += np.einsum("oc,bchw->bohw", FILTER[:, :, i, j].astype(np.float64), part)
    np.testing.assert_allclose(compiled.run(x=IMAGE)[0], act(plain), rtol=2e-5, atol=2e-5)


def check_fused():
    def nodes(build):
        return [n.op for n in Session("cpu").compile(define(build)).template.result.graph.nodes]

    def written(g, x, w, **p):
        y = g.linear(x, w)
        return y * g.hir_mir("tanh", [g.hir_mir("softplus", [y])])

    # the op is part of the matmul, also where its formula is written out
    for build in (places("test_mish", mish)[2][0], written):
        found = [op for op in nodes(build) if "matmul" in op.name]
        assert [op.activation for op in found] == ["test_mish"], found


def check_records():
    def capped(g, x, w, u, **p):
        return g.hir_mir("test_cap", [g.linear(x, w), g.linear(x, u)]) * 2.0

    A = wide()
    x, w, u = (A[n] for n in "xwu")
    expected = np.minimum(x @ w, x @ u) * 2
    np.testing.assert_allclose(run(capped), expected, rtol=2e-5, atol=2e-5)
    check_places("test_half", lambda x: x / 2)


def check_primitive():
    for build, _ in places("test_bare", np.cbrt):
        try:
            run(build)
        except UnsupportedError as e:
            assert "test_bare" in str(e), e
        else:
            raise AssertionError(build.__name__)


if sys.argv[1] == "after":
    compile_something()
register()
check_places("test_mish", mish)
check_quantised("test_mish", mish)
check_conv("test_mish", mish)
check_places("test_twice", lambda x: 2 * mish(x))
check_conv("test_twice", lambda x: 2 * mish(x))
check_fused()
check_records()
check_primitive()
"""


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_row_works_in_every_place(order: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, order], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
