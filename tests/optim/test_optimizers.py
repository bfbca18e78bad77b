"""Optimisers: the numbers of torch and optax, donation, masks, mixed precision, errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optim_cases import CASES, STEPS, gradient, start

import rlx
import rlx.numpy as rnp
from rlx import nn, optim
from rlx.numpy.tree import flatten, tree_map

GOLDEN = np.load(Path(__file__).parents[1] / "goldens" / "optim.npz")
ULP = 2.0**-23


def run(optimizer: Any, case: str, compiled: bool = True) -> dict[str, np.ndarray]:
    """The parameters after each step."""
    update = rlx.jit(optimizer.update) if compiled else optimizer.update
    params: Any = {k: rnp.asarray(x) for k, x in start(case).items()}
    state, found = optimizer.init(params), {k: [] for k in params}
    for i in range(STEPS):
        params, state = update(gradient(case, i), state, params)
        for k, p in params.items():
            found[k].append(np.asarray(p))
    assert int(state["step"]) == STEPS
    return {k: np.stack(x) for k, x in found.items()}


# A step rounds some 10 times, each half an ulp of numbers of the size of the parameter (about 4 at
# most), so n steps differ by at most 4 · 5 · n ulp; the iteration of Muon magnifies what its
# matmuls round by its slope, 3.4445 to the fifth power, over steps of at most rate · 1.2.
def tolerance(case: str, steps: np.ndarray) -> np.ndarray:
    magnified = 3.4445**5 * 0.02 * 12 if case.startswith("muon") else 1.0
    return 4 * 5 * steps * ULP * max(1.0, magnified)


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_torch_and_optax(case: str) -> None:
    optimizer = eval(f"optim.{CASES[case][1]}")
    allowed = tolerance(case, np.arange(1, STEPS + 1))
    for compiled in (True, False) if case in ("adamw", "adafactor") else (True,):
        for name, found in run(optimizer, case, compiled).items():
            expected = GOLDEN[f"{case}/{name}"]
            apart = np.abs(found - expected).reshape(STEPS, -1).max(1)
            assert (apart <= allowed).all(), (name, apart / allowed)


def test_muon_makes_matrices_orthogonal_and_leaves_the_rest_to_adamw() -> None:
    from rlx.optim.muon import orthogonal

    rng = np.random.default_rng(0)
    for shape in ((6, 9), (9, 6)):
        found = np.linalg.svd(np.asarray(orthogonal(rng.standard_normal(shape), 10)))[1]
        assert found.min() > 0.65 and found.max() < 1.25  # what the coefficients promise
    optimizer = optim.Muon(0.02, matrices=lambda path, p: path != "tall", other=optim.Adam(0.01))
    found, alone = run(optimizer, "adam"), run(optim.Adam(0.01), "adam")
    for name in ("tall", "kernel", "bias"):
        assert np.array_equal(found[name], alone[name])
    assert not np.array_equal(found["weight"], alone["weight"])


def test_weight_decay_has_a_mask() -> None:
    zero = {k: np.zeros_like(x) for k, x in start("adam").items()}
    for optimizer in (
        optim.AdamW(0.1, weight_decay=0.5, mask=optim.matrices_only),
        optim.Lion(0.1, weight_decay=0.5, mask=lambda path, p: path != "bias"),
        optim.SGD(0.1, weight_decay=0.5, mask=optim.matrices_only),
    ):
        params: Any = {k: rnp.asarray(x) for k, x in start("adam").items()}
        after, _ = optimizer.update(zero, optimizer.init(params), params)
        assert np.array_equal(np.asarray(after["bias"]), np.asarray(params["bias"]))
        for name in ("weight", "kernel"):
            expected = np.asarray(params[name]) * np.float32(0.95)
            np.testing.assert_allclose(np.asarray(after[name]), expected, rtol=3 * ULP)


def address(x: Any) -> int:
    return int(x.data.__array_interface__["data"][0])


@pytest.mark.parametrize("ours", ["AdamW()", "SGD(0.1, momentum=0.9)", "Lion()", "Adafactor()"])
def test_donated_parameters_and_state_are_updated_in_place(ours: str) -> None:
    optimizer = eval(f"optim.{ours}")
    rng = np.random.default_rng(0)

    def tree() -> Any:
        return {f"{i}": rnp.asarray(rng.standard_normal((30, 20 + i % 2)).astype(np.float32)) + 0
                for i in range(4)}  # fmt: skip

    def addresses(*trees: Any) -> list[int]:
        return [address(x) for t in trees for x in flatten(t)[0]]

    plain, donating = (
        rlx.jit(optimizer.update),
        rlx.jit(optimizer.update, donate=["params", "state"]),
    )
    params, other = tree(), tree()
    state, kept = optimizer.init(params), optimizer.init(params)
    checked = 4 if ours == "Adafactor()" else None  # its means of rows and columns are small
    other = {k: rnp.asarray(x, copy=True) for k, x in params.items()}
    for _ in range(3):
        grads = tree()
        before = addresses(params, state)[:checked]
        params, state = donating(grads, state, params)
        assert addresses(params, state)[:checked] == before
        other, kept = plain(grads, kept, other)
        for a, b in zip(flatten((params, state))[0], flatten((other, kept))[0], strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b))


def test_small_steps_are_kept_in_master_weights() -> None:
    params: Any = {"w": rnp.ones((4,), dtype="bf16")}
    grads = {"w": rnp.ones((4,), dtype="bf16")}
    plain, master = optim.SGD(1e-3), optim.MasterWeights(optim.SGD(1e-3))
    first, second = (plain.init(params), params), (master.init(params), params)
    for _ in range(8):
        first = plain.update(grads, *first)[::-1]
        second = master.update(grads, *second)[::-1]
    assert first[1]["w"].dtype == second[1]["w"].dtype == rlx.bf16
    assert float(first[1]["w"][0]) == 1.0  # 1 - 0.001 rounds to 1 in bf16
    assert float(second[0]["master"]["w"][0]) == pytest.approx(0.992, abs=1e-6)
    assert float(second[1]["w"][0]) == 0.9921875
    low = optim.cast({"w": rnp.ones((3,)), "n": rnp.asarray([1])})
    assert low["w"].dtype == rlx.bf16 and low["n"].dtype == rlx.i64


def test_modules_are_trees_whose_buffers_are_not_trained() -> None:
    key = rlx.random.key(0)
    model = nn.Sequential(nn.Linear(3, 4, key=key), nn.BatchNorm1d(4))
    optimizer = optim.AdamW(0.1, weight_decay=0.5)
    state = optimizer.init(model)
    assert set(state["slots"]) == set(model.named_parameters())
    grads = tree_map(rnp.ones_like, model)
    after, _ = rlx.jit(optimizer.update)(grads, state, model)
    for name, x in model.state_dict().items():
        same = np.array_equal(np.asarray(x), np.asarray(after.state_dict()[name]))
        assert same == (name in model.named_buffers())
    assert np.asarray(after(np.ones((2, 3), np.float32))).shape == (2, 4)


def test_micro_batches_give_the_mean_of_their_gradients() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return rnp.mean(rnp.square(batch["x"] @ params["w"] - batch["y"]))

    rng = np.random.default_rng(0)
    batch = {"x": rng.standard_normal((12, 3)), "y": rng.standard_normal(12)}
    params = {"w": rng.standard_normal(3)}
    expected = rlx.value_and_grad(loss)(params, batch)
    for parts in (1, 3, 12):
        f = optim.accumulate(rlx.value_and_grad(loss), parts)
        for run in (f, rlx.jit(f)):
            value, grads = run(params, batch)
            # means of 12 numbers in another order, in f64
            assert float(value) == pytest.approx(float(expected[0]), rel=1e-14)
            np.testing.assert_allclose(grads["w"], expected[1]["w"], rtol=1e-13, atol=1e-14)
    with pytest.raises(rlx.ShapeError, match=r"does not divide.*multiple of 5"):
        optim.accumulate(rlx.value_and_grad(loss), 5)(params, batch)


def test_micro_batches_have_keys_and_statistics_of_their_own() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))

    def loss(model: Any, batch: Any, *, key: Any) -> Any:
        return rnp.mean(model(batch, key=key)), (model, key)

    x = np.random.default_rng(0).standard_normal((12, 3)).astype(np.float32)
    f = rlx.jit(optim.accumulate(rlx.value_and_grad(loss, has_aux=True), 3))
    key = rlx.random.key(7)
    (value, (after, last)), grads = f(model, x, key=key)
    keys = [rlx.random.fold_in(key, i) for i in range(3)]
    assert np.array_equal(np.asarray(last), np.asarray(keys[2]))
    alone = [rlx.value_and_grad(loss, has_aux=True)(model, x[4 * i : 4 * i + 4], key=k)
             for i, k in enumerate(keys)]  # fmt: skip
    ours = [value, after[0].running_mean, after[0].running_var, grads[0].weight, grads[0].bias]
    theirs = [
        np.mean([np.asarray(x) for x in row], axis=0)
        for row in zip(*[[v, m[0].running_mean, m[0].running_var, g[0].weight, g[0].bias]
                         for (v, (m, _)), g in alone], strict=True)
    ]  # fmt: skip
    for a, b in zip(ours, theirs, strict=True):  # numbers of about 1, of three sums of 12
        np.testing.assert_allclose(a, b, rtol=0, atol=20 * ULP)
    assert int(after[0].num_batches_tracked) == 1  # each part began with the same model
    assert np.array_equal(np.asarray(after[0].weight), np.asarray(model[0].weight))


def test_a_learning_rate_can_be_an_argument() -> None:
    params = {"w": rnp.ones((2,))}
    state = optim.AdamW().init(params)
    step = rlx.jit(lambda p, s, rate: optim.AdamW(rate).update(p, s, p)[0])
    for rate in (0.1, 0.01):
        expected, _ = optim.AdamW(rate).update(params, state, params)
        found = step(params, state, rate)
        # the rate itself is rounded to f32
        np.testing.assert_allclose(found["w"], expected["w"], rtol=2 * ULP)
    assert len(step.variants()) == 1


def test_averages() -> None:
    average = optim.EMA(0.9)
    params: Any = {"w": rnp.ones((2,)), "n": rnp.asarray([3])}
    kept = average.init(params)
    assert kept["w"].data is not params["w"].data
    expected = 1.0
    for i in range(5):
        params = {"w": rnp.full((2,), float(i)), "n": rnp.asarray([i])}
        kept = rlx.jit(average.update)(kept, params)
        expected = 0.9 * expected + 0.1 * i
    assert float(kept["w"][0]) == pytest.approx(expected, rel=1e-6)
    assert int(kept["n"][0]) == 4


def test_clipping() -> None:
    grads = {k: rnp.asarray(x) for k, x in gradient("adam", 1).items()}
    clipped, norm = rlx.jit(lambda g: optim.clip_by_global_norm(g, 0.5))(grads)
    assert float(norm) == pytest.approx(float(GOLDEN["clip/norm"]), rel=4 * ULP)
    for i, name in enumerate(start("adam")):
        np.testing.assert_allclose(clipped[name], GOLDEN[f"clip/{i}"], rtol=8 * ULP)
    assert float(optim.global_norm(clipped)) <= 0.5
    small, _ = optim.clip_by_global_norm(grads, 1e6)
    assert all(np.array_equal(small[k], grads[k]) for k in grads)
    for k, x in optim.clip_by_value(grads, 0.1).items():
        assert np.array_equal(np.asarray(x), np.clip(np.asarray(grads[k]), -0.1, 0.1))
    broken, norm = optim.clip_by_global_norm({"a": np.array([1.0, np.nan])}, 1.0)
    assert np.isnan(float(norm)) and np.isnan(np.asarray(broken["a"])).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.AdamW(-1), "learning_rate out of range"),
        (lambda: optim.Adam(beta1=1.0), "beta1 out of range"),
        (lambda: optim.SGD(0.1, momentum=float("nan")), "momentum out of range"),
        (lambda: optim.Muon(adjust="none"), "no such adjustment"),
        (lambda: optim.EMA(2), "decay out of range"),
        (lambda: optim.clip_by_value({}, 0), "not a limit"),
        (lambda: optim.accumulate(lambda p, b: (p, b), 0), "not a number of parts"),
        (lambda: optim.schedules.linear(1, 0, 0), "not a number of steps"),
    ],
)
def test_settings_are_checked(make: Any, message: str) -> None:
    with pytest.raises(rlx.OptionError, match=message):
        make()


def test_trees_are_checked() -> None:
    optimizer, params = optim.AdamW(), {"w": rnp.ones((2,))}
    state, w = optimizer.init(params), params["w"]
    for given, error, message in (
        (({"v": w}, state, params), rlx.InputError, r"another structure.*v.*w"),
        ((params, params, state), rlx.InputError, r"structure.*hint: update\(grads, state, params"),
        ((params, params, params), rlx.InputError, "not the state of an optimiser"),
        (({"v": w}, state, {"v": w}), rlx.InputError, "without this parameter"),
        (
            ({"w": rnp.ones((1,))}, state, params),
            rlx.ShapeError,
            r"w\] .*got \[1\]; expected \[2\]",
        ),
        ((params, optim.SGD(0.1).init(params), params), rlx.InputError, "another optimiser"),
    ):
        for update in (optimizer.update, rlx.jit(optimizer.update)):
            with pytest.raises(error, match=re.compile(message, re.DOTALL)):
                update(*given)
    model = nn.Dropout(0.5), nn.Linear(2, 2, key=rlx.random.key(0))
    other = nn.Dropout(0.1), model[1]
    with pytest.raises(rlx.InputError, match="the same names and shapes"):
        optimizer.update(other, optimizer.init(model), model)


def test_one_array_at_two_places_is_a_warning() -> None:
    model = nn.ModuleList([nn.Linear(2, 2, key=rlx.random.key(i)) for i in range(2)])
    model[1].weight = model[0].weight
    with pytest.warns(UserWarning, match=r"0.weight and 1.weight are one array.*trained apart"):
        optim.AdamW().init(model)
