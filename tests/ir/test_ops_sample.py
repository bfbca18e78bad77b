"""Philox against its published answers; sample against its definition and its distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from applied import apply, inferred, normal

import rlx
from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.philox import draw_words, philox4x32, uniform
from rlx.ir.shape import Shape

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([ONES] * 4, [ONES] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: list[int], key: list[int], expected: str
) -> None:
    words = philox4x32(np.array(counter, np.uint32), np.array(key, np.uint32))
    assert " ".join(f"{w:08x}" for w in words) == expected


def test_draw_words_are_philox_at_counter_and_row() -> None:
    seed, counter = 0x0123456789ABCDEF, 0xFEDCBA9876543210
    words = draw_words(seed, counter, 3)
    for row in range(3):
        position = np.array([0x76543210, 0xFEDCBA98, row, 0], np.uint32)
        key = np.array([0x89ABCDEF, 0x01234567], np.uint32)
        assert words[row] == philox4x32(position, key)[0]


def test_uniform_is_exact_and_below_one() -> None:
    assert uniform(np.uint32([0, 1, ONES])).tolist() == [0.0, 2.0**-32, 1 - 2.0**-32]


def rng(seed: int, counter: int = 0) -> np.ndarray:
    return np.array([seed, counter], np.uint64)


def draw(logits: Any, seed: int = 1, counter: int = 0, **attributes: Any) -> np.ndarray:
    tokens, _ = apply("sample", [np.asarray(logits, np.float32), rng(seed, counter)], **attributes)
    return tokens


def definition(x: np.ndarray, u: float, t: float, k: int, p: float, m: float) -> int:
    """The rule in float64, step by step and token by token, on logits without ties."""
    tokens = sorted(range(len(x)), key=lambda i: -x[i])
    kept = tokens[:k] if k else tokens
    probability = {i: float(np.exp(x[i] / t)) for i in kept}
    total = sum(probability.values())
    probability = {i: v / total for i, v in probability.items()}
    nucleus, mass = [], 0.0
    for i in kept:
        if nucleus and p < 1 and mass >= p:
            break
        nucleus.append(i)
        mass += probability[i]
    nucleus = [i for i in nucleus if probability[i] >= m * probability[tokens[0]]]
    target, mass = u * sum(probability[i] for i in nucleus), 0.0
    for i in sorted(nucleus):
        mass += probability[i]
        if mass > target:
            return i
    raise AssertionError("the point lies inside the kept mass")


@pytest.mark.parametrize(
    ("t", "k", "p", "m"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.3, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.2),
        (0.9, 12, 0.9, 0.05),
        (1.0, 0, 0.0, 0.0),
    ],
)
def test_sample_follows_its_definition(t: float, k: int, p: float, m: float) -> None:
    logits = normal(3, 200, 30) * 2
    tokens = draw(logits, 7, 5, temperature=t, top_k=k, top_p=p, min_p=m)
    # f32 weights move the boundaries by about 1e-7; no point of these seeds lies that near to one
    points = uniform(draw_words(7, 5, 200))
    wide = logits.astype(np.float64)
    settings = (np.float64(np.float32(v)) for v in (t, p, m))
    t32, p32, m32 = settings
    expected = [definition(wide[i], points[i], t32, k, p32, m32) for i in range(200)]
    assert tokens.tolist() == expected


def chi_square(tokens: np.ndarray, probability: np.ndarray) -> float:
    expected = probability * tokens.size
    seen = np.bincount(tokens.ravel(), minlength=probability.size)
    return float(((seen - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "seed", [11, pytest.param(12, marks=pytest.mark.slow), pytest.param(13, marks=pytest.mark.slow)]
)
def test_the_distribution_is_the_softmax(seed: int) -> None:
    x = np.float32([0.0, 1.0, -1.0, 0.5, 2.0, -0.5, 0.1, 1.5])
    p = np.exp(x.astype(np.float64))
    p /= p.sum()
    rows = draw(np.tile(x, (20_000, 1)), seed)
    assert chi_square(rows, p) < 24.3  # 7 degrees of freedom: exceeded once in 1,000
    steps = np.array([int(draw(x, seed, counter=c)) for c in range(4_000)])
    assert chi_square(steps, p) < 24.3  # one row, many steps: the counter is as good as the row


def test_top_k_and_top_p_leave_only_the_kept_tokens_renormalised() -> None:
    x = np.log(np.float32([0.05, 0.4, 0.3, 0.15, 0.1]))
    many = np.tile(x, (20_000, 1))
    top_two = draw(many, top_k=2)
    assert set(top_two.tolist()) == {1, 2}
    assert chi_square(top_two - 1, np.array([4, 3]) / 7) < 10.8  # 1 degree of freedom, 1 in 1,000
    nucleus = draw(many, top_p=0.75)  # 0.4 + 0.3 is short of 0.75, so 0.15 comes along
    assert set(nucleus.tolist()) == {1, 2, 3}
    assert chi_square(nucleus - 1, np.array([0.4, 0.3, 0.15]) / 0.85) < 13.8
    assert set(draw(many, min_p=0.3).tolist()) == {1, 2, 3}  # at least 0.12


def test_temperature_zero_takes_the_first_largest() -> None:
    assert draw([[1.0, 3.0, 3.0], [0.0, -1.0, -2.0]], temperature=0.0).tolist() == [1, 0]


def test_ties_at_the_edge_of_top_k_go_to_the_lower_index() -> None:
    assert set(draw(np.zeros((500, 6)), top_k=3).tolist()) == {0, 1, 2}


def test_nan_infinities_and_underflow() -> None:
    nan, inf = np.nan, np.inf
    assert draw([nan, nan]) == 0
    assert draw([-inf, -inf, -inf]) == 0
    assert draw([nan, nan], temperature=0.0) == 0
    assert set(draw(np.tile(np.float32([nan, 0.0, -inf, 0.0]), (200, 1))).tolist()) == {1, 3}
    assert draw([nan, -5.0, nan], temperature=0.0) == 1
    assert set(draw(np.tile(np.float32([inf, 0.0, inf]), (200, 1))).tolist()) == {0, 2}
    assert set(draw(np.tile(np.float32([-1e30, 0.0, 1e30]), (50, 1))).tolist()) == {2}
    huge = np.float32([inf, 0, 1, 0])  # a temperature that only run-time settings can give
    masked = np.tile(np.float32([0.0, -inf, 3.0]), (200, 1))
    assert set(apply("sample", [masked, rng(1), huge])[0].tolist()) == {0, 2}


def test_the_same_rng_gives_the_same_tokens_and_comes_back_advanced() -> None:
    logits = normal(4, 2, 3, 50)
    first, following = apply("sample", [logits, rng(9, 41)])
    again, _ = apply("sample", [logits, rng(9, 41)])
    other, _ = apply("sample", [logits, rng(10, 41)])
    assert first.shape == (2, 3)
    assert first.dtype == np.int32
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert following.tolist() == [9, 42]
    assert apply("sample", [logits, rng(9, 2**64 - 1)])[1].tolist() == [9, 0]
    _, after = apply("sample", [logits, rng(9, 41)], temperature=0.0)
    assert after.tolist() == [9, 42]  # greedy steps count too


def test_no_two_steps_or_rows_share_a_draw() -> None:
    words = np.concatenate([draw_words(5, c, 100) for c in range(100)])
    # 10,000 random 32-bit words collide 0.012 times on average; reuse would give hundreds
    assert len(set(words.tolist())) >= len(words) - 1
    assert len(set(draw_words(5, 0, 10).tolist()) & set(draw_words(5, 1, 10).tolist())) == 0


def test_run_time_settings_replace_the_attributes() -> None:
    logits = normal(5, 100, 40)
    settings = np.float32([0.8, 7, 0.9, 0.02])
    by_tensor, _ = apply("sample", [logits, rng(3), settings], temperature=0.0, top_k=1)
    by_attribute = draw(logits, 3, temperature=0.8, top_k=7, top_p=0.9, min_p=0.02)
    assert np.array_equal(by_tensor, by_attribute)
    greedy, _ = apply("sample", [logits, rng(3), np.float32([0, 0, 1, 0])])
    assert np.array_equal(greedy, logits.argmax(-1))


def test_half_precision_logits_are_widened() -> None:
    logits = normal(6, 50, 20, dtype=np.float16)
    tokens, _ = apply("sample", [logits, rng(2)])
    assert np.array_equal(tokens, draw(logits.astype(np.float32), 2))


def test_inference() -> None:
    token, state = inferred("sample", Shape(["batch", 100]), Shape([2], "u64"))
    assert str(token) == "[batch] i32"
    assert str(state) == "[2] u64"
    with pytest.raises(DTypeError, match="logits must be of a float type"):
        inferred("sample", Shape([5], "i32"), Shape([2], "u64"))
    with pytest.raises(DTypeError, match="element type of rng"):
        inferred("sample", Shape([5]), Shape([2], "i64"))
    with pytest.raises(ShapeError, match="shape of rng"):
        inferred("sample", Shape([5]), Shape([4], "u64"))
    with pytest.raises(ShapeError, match="shape of settings"):
        inferred("sample", Shape([5]), Shape([2], "u64"), Shape([3]))
    with pytest.raises(ShapeError, match="vocabulary axis"):
        inferred("sample", Shape([3, 0]), Shape([2], "u64"))


@pytest.mark.parametrize(
    "bad", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 1.5}, {"min_p": float("nan")}]
)
def test_attributes_out_of_range(bad: dict[str, Any]) -> None:
    with pytest.raises(AttributeValueError, match=rf"\[sample.{next(iter(bad))}\] out of range"):
        inferred("sample", Shape([5]), Shape([2], "u64"), **bad)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_a_seed_instead_of_an_rng(device: str) -> None:
    """Draws are those of the form with an operand, at counters 0, 1, 2, …"""
    x = np.random.default_rng(3).normal(size=(2, 32)).astype(np.float32)

    def seeded(g: rlx.GraphModule) -> rlx.Value:
        return g.sample(g.input("x", x.shape), 5, 0.9, 0.7, 42)

    def with_rng(g: rlx.GraphModule) -> rlx.Value:
        rng = g.input("rng", [2], "u64")
        return g.sample(g.input("x", x.shape), rng, temperature=0.7, top_k=5, top_p=0.9)[0]

    f = rlx.Session(device).compile(rlx.GraphModule.define("seeded", seeded))
    other = rlx.Session(device).compile(rlx.GraphModule.define("rng", with_rng))
    drawn = [f.run(x=x)[0].tolist() for _ in range(8)]
    wanted = [other.run(x=x, rng=np.array([42, i], np.uint64))[0].tolist() for i in range(8)]
    assert drawn == wanted and len({tuple(d) for d in drawn}) > 1


def test_sample_takes_logits_alone_and_refuses_other_seeds() -> None:
    g = rlx.Graph("alone")
    logits = g.input("x", [1, 8])
    tokens = g.sample(logits)
    again = logits.sample(seed=7, temperature=0.5)
    assert [v.shape.dtype.name for v in (tokens, again)] == ["i32", "i32"]
    assert [n.name for n in g.sources("state")] == ["sample.draws", "sample.draws.1"]
    for seed in (-1, 2**64, 1.5, True, "7"):
        with pytest.raises(rlx.AttributeValueError, match="not a seed"):
            g.sample(logits, 5, 0.9, 0.7, seed)
