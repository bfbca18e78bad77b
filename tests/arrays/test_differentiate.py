"""`grad`, `vjp`, `jvp` and custom rules, on functions: outside `rlx.jit` and inside it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import pytest

import rlx
import rlx.numpy as rnp
from rlx import nn, random

rng = np.random.default_rng(3)
# f32: values of order 1 through some ten operations
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def draw(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), expected, **CLOSE)


def wave(x: Any) -> Any:
    return rnp.sum(rnp.sin(x) * x)


def slope(x: np.ndarray) -> np.ndarray:
    return np.cos(x) * x + np.sin(x)


def curve(x: np.ndarray) -> np.ndarray:
    return 2 * np.cos(x) - x * np.sin(x)


@pytest.mark.parametrize("wrap", [lambda f: f, rlx.jit], ids=["eager", "jit"])
def test_grad_and_its_gradient(wrap: Any) -> None:
    x = draw(7)
    close(wrap(rlx.grad(wave))(x), slope(x))
    value, gradient = wrap(rlx.value_and_grad(wave))(x)
    close(value, np.sum(np.sin(x) * x))
    close(gradient, slope(x))
    close(wrap(rlx.grad(lambda x: rnp.sum(rlx.grad(wave)(x))))(x), curve(x))


def test_one_trace_serves_all_sizes() -> None:
    f = rlx.jit(rlx.grad(wave))
    for n in (5, 8, 1000):
        x = draw(n)
        close(f(x), slope(x))
    assert len(f.variants()) == 1


def test_trees_auxiliary_results_and_argument_numbers() -> None:
    def loss(p: Any, x: Any, scale: float) -> Any:
        y = x @ p["w"] + p["b"]
        return rnp.sum(y * y) * scale, {"y": y}

    w, b, x = draw(3, 2), draw(2), draw(4, 3)
    params = {"w": rnp.asarray(w), "b": rnp.asarray(b)}
    (value, aux), found = rlx.value_and_grad(loss, has_aux=True)(params, x, 0.5)
    y = x @ w + b
    close(value, np.sum(y * y) / 2)
    close(aux["y"], y)
    close(found["w"], x.T @ y)
    close(found["b"], y.sum(0))
    by_both, _ = rlx.grad(loss, (1, -1), has_aux=True)(params, x, 0.5)
    close(by_both[0], y @ w.T)
    close(by_both[1], np.sum(y * y))


class Point(NamedTuple):
    at: Any
    count: Any


def test_integers_have_no_gradient() -> None:
    point = Point(rnp.asarray(draw(3)), rnp.asarray(np.arange(3)))
    found = rlx.grad(lambda p: rnp.sum(p.at * p.count))(point)
    close(found.at, [0, 1, 2])
    assert found.count.dtype == point.count.dtype
    assert not np.asarray(found.count).any()
    with pytest.raises(rlx.DTypeError, match="no derivative by integers"):
        rlx.grad(lambda n: n * 2.0)(rnp.asarray(np.arange(3)))


def test_what_a_function_closes_over_is_not_differentiated() -> None:
    x = draw(4)

    def outer(x: Any) -> Any:
        return rnp.sum(rlx.grad(lambda y: rnp.sum(y * y * x))(x))  # 2 x², of which x is one

    close(rlx.grad(outer)(x), 4 * x)
    close(rlx.jit(rlx.grad(outer))(x), 4 * x)
    scale = 2.0
    f = rlx.grad(lambda y: y * scale)
    close(f(1.0), 2)
    scale = 5.0  # outside jit a function is traced at every call
    close(f(1.0), 5)


def test_vjp_and_jvp_are_transposes() -> None:
    a, b = draw(3, 4), draw(4, 2)
    (product, same), pullback = rlx.vjp(lambda a, b: (a @ b, a), a, b)
    close(product, a @ b)
    close(same, a)
    ct, ca = draw(3, 2), draw(3, 4)
    da, db = pullback((ct, ca))
    close(da, ct @ b.T + ca)
    close(db, a.T @ ct)
    ta, tb = draw(3, 4), draw(4, 2)
    _, (moved, kept) = rlx.jvp(lambda a, b: (a @ b, a), (a, b), (ta, tb))
    close(moved, ta @ b + a @ tb)
    close(kept, ta)

    @rlx.jit
    def inside(a: Any, b: Any, ct: Any) -> Any:
        _, pull = rlx.vjp(rnp.matmul, a, b)
        return pull(ct)

    close(inside(a, b, ct)[0], ct @ b.T)


def test_hessian_vector_product() -> None:
    x, v = draw(5), draw(5)
    close(rlx.hvp(wave, (x,), (v,)), curve(x) * v)


def test_through_loops_and_branches() -> None:
    w, xs = draw(3, 3) / 2, draw(6, 3)

    def last(w: Any, xs: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            h = rlx.cond(rnp.sum(x) > 0, lambda h: rnp.tanh(w @ h + x), lambda h: h - x, h)
            return h, h

        h, ys = rlx.scan(step, rnp.zeros(3), xs)
        return rnp.sum(h * h) + rnp.sum(ys)

    def reference(w: np.ndarray, xs: np.ndarray) -> float:
        h, total = np.zeros(3), 0.0
        for x in xs:
            h = np.tanh(w @ h + x) if x.sum() > 0 else h - x
            total += h.sum()
        return float(total + h @ h)

    for i, found in enumerate(rlx.jit(rlx.grad(last, (0, 1)))(w, xs)):
        at = [w.astype(np.float64), xs.astype(np.float64)]
        expected = np.zeros_like(at[i])
        for index in np.ndindex(*expected.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [a.copy() for a in at]
                moved[i][index] += step
                ends.append(reference(*moved))
            expected[index] = (ends[0] - ends[1]) / 2e-5
        close(found, expected)
    with pytest.raises(rlx.UnsupportedError, match="while_loop has no reverse-mode"):
        rlx.grad(lambda x: rlx.while_loop(lambda c: c < 9, lambda c: c * 2, x))(1.5)
    _, moved = rlx.jvp(
        lambda x: rlx.while_loop(lambda c: c < 9, lambda c: c * c, x), (1.5,), (1.0,)
    )
    close(moved, 8 * 1.5**7)  # x⁸


def test_checkpoint_computes_again_and_gives_the_same() -> None:
    w, x = draw(5, 5), draw(2, 5)

    def net(w: Any, x: Any) -> Any:
        return rnp.tanh(rnp.tanh(x @ w) @ w)

    def loss(f: Any) -> Any:
        return lambda w: rnp.sum(f(w, x))

    plain = rlx.jit(rlx.grad(loss(net)))
    expected = np.asarray(plain(w))
    counts = {"plain": plain.lower(w).inspect().count("matmul(")}
    for policy in ("nothing", "matmuls"):
        f = rlx.jit(rlx.grad(loss(rlx.checkpoint(net, policy=policy))))
        np.testing.assert_array_equal(np.asarray(f(w)), expected)
        counts[policy] = f.lower(w).inspect().count("matmul(")
        program = f.inspect(w, stage="lir")
        assert ("tanh" in program) == ("tanh" in plain.inspect(w, stage="lir"))
    # two forward, and the backward part: with one by the inputs x, which is dead; two again
    assert counts["nothing"] == counts["plain"] + 2 == counts["matmuls"] + 2
    with pytest.raises(rlx.OptionError, match="unknown policy"):
        rlx.checkpoint(net, policy="everything")


def test_a_checkpoint_keeps_a_sum_and_not_its_terms() -> None:
    """A product beside an adapter costs no more memory than one alone: 16 layers of 128 x 256."""
    w, a, x = draw(256, 256) / 16, draw(256, 4) / 16, draw(128, 256)

    def arena(layer: Any) -> float:
        @functools.partial(rlx.checkpoint, policy="matmuls")
        def block(a: Any, x: Any) -> Any:
            return rnp.tanh(layer(a, x))

        def loss(a: Any, x: Any) -> Any:
            for _ in range(16):
                x = block(a, x)
            return rnp.sum(x)

        text = rlx.jit(rlx.grad(loss)).inspect(a, x, stage="lir")
        size, unit = text.split("arena ", 1)[1].split()[:2]
        return float(size) * {"KiB": 1, "MiB": 1024}[unit]

    alone = arena(lambda a, x: x @ (w * rnp.sum(a)))
    adapted = arena(lambda a, x: x @ w + x @ a @ a.T)
    # the terms kept beside the sum would be 16 times 128 KiB more
    assert adapted < alone + 5 * 128


def test_stop_gradient() -> None:
    x = draw(4)
    close(rlx.grad(lambda x: rnp.sum(rlx.stop_gradient(x) * x))(x), x)
    assert rlx.stop_gradient({"x": 1}) == {"x": 1}


def test_custom_vjp() -> None:
    @rlx.custom_vjp
    def clipped(x: Any) -> Any:
        return x * 1.0

    clipped.defvjp(lambda x: (x * 1.0, None), lambda kept, ct: (rnp.clip(ct, min=-0.5, max=0.5),))
    x = draw(5)
    close(clipped(rnp.asarray(x)), x)
    close(rlx.grad(lambda x: rnp.sum(clipped(x) * 3))(x), np.full(5, 0.5))
    with pytest.raises(rlx.UnsupportedError, match="no forward-mode derivative"):
        rlx.jvp(clipped, (x,), (x,))

    @rlx.jit
    def closure(x: Any, y: Any) -> Any:
        @rlx.custom_vjp
        def scaled(a: Any) -> Any:
            return a * y

        scaled.defvjp(lambda a: (a * y, (a,)), lambda kept, ct: (ct * kept[0] * y * 100,))
        return rlx.grad(lambda x: rnp.sum(scaled(x)))(x)

    y = draw(5)
    close(closure(x, y), x * y * 100)
    with pytest.raises(rlx.InputError, match="no derivative was given"):
        rlx.grad(lambda x: rnp.sum(rlx.custom_vjp(lambda x: x)(x)))(x)


def test_custom_jvp_serves_both_modes() -> None:
    @rlx.custom_jvp
    def f(x: Any) -> Any:
        return rnp.log1p(rnp.exp(x))

    @f.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return f(primals[0]), tangents[0] * 2

    x, t = draw(5), draw(5)
    value, moved = rlx.jvp(f, (x,), (t,))
    close(value, np.log1p(np.exp(x)))
    close(moved, 2 * t)
    close(rlx.grad(lambda x: rnp.sum(f(x)))(x), np.full(5, 2))


def test_a_graph_module_is_differentiated() -> None:
    def mlp(g: Any) -> Any:
        x = g.input("x", ["batch", 3])
        h = g.linear(x, g.param("w", [3, 4]), g.param("b", [4]), activation="tanh")
        return g.sum(h)

    module = rlx.grad(rlx.GraphModule.define("mlp", mlp))
    f = rlx.Session("cpu").compile(module)
    w, b, x = draw(3, 4), draw(4), draw(5, 3)
    f.set_params({"w": w, "b": b})
    value, dw, db = f.run(x=x)
    h = np.tanh(x @ w + b)
    close(value, h.sum())
    close(dw, x.T @ (1 - h * h))
    close(db, (1 - h * h).sum(0))
    assert "via grad" in module.inspect()
    with pytest.raises(rlx.InputError, match="no such source"):
        rlx.grad(rlx.GraphModule.define("mlp", mlp), wrt=["v"])


def test_a_step_of_training_is_one_program_that_updates_in_place() -> None:
    net = nn.Sequential(
        nn.Linear(4, 8, key=random.key(0)), nn.GELU(), nn.Linear(8, 1, key=random.key(1))
    )

    @rlx.jit(donate=["net"])
    def step(net: Any, x: Any, y: Any) -> Any:
        def loss(net: Any) -> Any:
            return rnp.mean(rnp.square(net(x) - y))

        value, gradient = rlx.value_and_grad(loss)(net)
        return rlx.tree_map(lambda p, g: p - 0.1 * g, net, gradient), value

    x = rnp.asarray(draw(16, 4))
    y = rnp.sin(x[:, :1]) + x[:, 1:2]
    losses = []
    for _ in range(100):
        net, value = step(net, x, y)
        losses.append(float(value))
    assert losses[-1] < 0.2 * losses[0]
    assert len(step.variants()) == 1


def test_errors_say_what_was_expected() -> None:
    x = draw(3)
    with pytest.raises(rlx.ShapeError, match="the gradient of an array"):
        rlx.grad(lambda x: x * 2)(x)
    with pytest.raises(rlx.InputError, match="no such positional argument"):
        rlx.grad(wave, 1)(x)
    with pytest.raises(rlx.InputError, match="cotangents have another tree"):
        rlx.vjp(lambda x: x, x)[1]((x, x))
    with pytest.raises(rlx.InputError, match="not a function"):
        rlx.grad(3)  # type: ignore[call-overload]
    with pytest.raises(rlx.UnsupportedError, match="no gradient"):
        made = rlx.custom_op("test.opaque", infer=lambda x: x, reference=lambda x: x)
        g = rlx.Graph("opaque")
        g.set_outputs(g.sum(made(g, g.input("x", [3]))))
        rlx.grad(rlx.GraphModule.from_graph(g))


@pytest.mark.parametrize("shapes", [((5, 3), (3, 4)), ((3,), (3, 4)), ((2, 5, 3), (3, 4)),
                                    ((2, 5, 3), (2, 3, 4))], ids=str)  # fmt: skip
@pytest.mark.parametrize("narrow", [0, 1])
def test_products_of_two_float_types(shapes: Any, narrow: int) -> None:
    """Gradients have the types of their operands, and those of operands that are all f32."""
    rng = np.random.default_rng(3)
    given = [rnp.asarray(rng.normal(size=s).astype("f4")) for s in shapes]
    given[narrow] = given[narrow].astype("bf16")

    def loss(a: Any, b: Any) -> Any:
        return rnp.sum(rnp.sin(a @ b))

    wide = [x.astype("f32") for x in given]
    for f in (loss, lambda a, b: sum(rnp.sum(g * g) for g in rlx.grad(loss, (0, 1))(a, b))):
        found, expected = rlx.grad(f, (0, 1))(*given), rlx.grad(f, (0, 1))(*wide)
        for g, x, exact in zip(found, given, expected, strict=True):
            assert g.dtype == x.dtype
            # bf16 rounds by 2^-9; second derivatives pass through two such roundings
            off = np.abs(np.asarray(g.astype("f32")) - np.asarray(exact))
            assert off.max() <= 2**-6 * np.abs(np.asarray(exact)).max()


def test_custom_ops_are_functions_of_arrays() -> None:
    cube = rlx.custom_op(
        "test.cube", infer=lambda x, *, scale=1.0: x,
        reference=lambda x, *, scale=1.0: scale * x**3,
        gradient=lambda g, inputs, outputs, grads, *, scale=1.0: g.mul(
            grads[0], g.mul(g.square(inputs[0]), 3.0 * scale)
        ),
    )  # fmt: skip
    ends = rlx.custom_op("test.ends", infer=lambda x: (x, x), reference=lambda x: (x + 1, x - 1))
    x = draw(2, 3)
    close(cube(x, scale=2.0), 2 * x**3)
    close(rlx.jit(lambda x: cube(rnp.sin(x)))(x), np.sin(x) ** 3)
    close(rlx.grad(lambda x: rnp.sum(cube(x, scale=2.0)))(x), 6 * x**2)
    close(rlx.vmap(rlx.grad(lambda x: rnp.sum(cube(x))))(x), 3 * x**2)
    for found, expected in zip(ends(rnp.asarray(x)), (x + 1, x - 1), strict=True):
        close(found, expected)
    with pytest.raises(rlx.UnsupportedError, match=r"test\.ends has no gradient"):
        rlx.grad(lambda x: rnp.sum(ends(x)[0]))(x)
    with pytest.raises(rlx.AttributeValueError, match="unknown attribute; got size"):
        cube(x, size=1)
