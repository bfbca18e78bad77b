"""Algebra: text in, text out, the same numbers to the bit; and what must be left alone."""

from __future__ import annotations

import numpy as np
import pytest
from pass_support import assert_becomes, assert_same_results, assert_stays, op_names, parsed

from rlx.ir import dtype as dt
from rlx.ir.graph import Graph
from rlx.ir.verify import verify
from rlx.passes.simplify import represents, simplify

X = '%x "x": [n, 4] f32 = input\n'
I = '%x "x": [n, 4] i32 = input\n'
H = '%x "x": [n, 4] f16 = input\n'

# sources, the lines before, the lines after
RULES: dict[str, tuple[str, str, str]] = {
    "x + 0": (X, "%c: [] f32 = constant(0.0)\n%y = add(%c, %x)\nreturn %y", "return %x"),
    "x - 0": (X, "%c: [] f32 = constant(0.0)\n%y = sub(%x, %c)\nreturn %y", "return %x"),
    "x * 1": (X, "%c: [] f32 = constant(1.0)\n%y = mul(%x, %c)\nreturn %y", "return %x"),
    "x / 1": (X, "%c: [] f32 = constant(1.0)\n%y = div(%x, %c)\nreturn %y", "return %x"),
    "x * 0": (
        I,
        "%c: [] i32 = constant(0)\n%y = mul(%x, %c)\nreturn %y",
        "%c: [] i32 = constant(0)\n%y = expand(%c; shape=[n, 4])\nreturn %y",
    ),
    "x - x": (
        I,
        "%y = sub(%x, %x)\nreturn %y",
        "%c: [] i32 = constant(0)\n%y = expand(%c; shape=[n, 4])\nreturn %y",
    ),
    "x * -1": (
        X,
        "%c: [] f32 = constant(-1.0)\n%y = mul(%x, %c)\nreturn %y",
        "%y = neg(%x)\nreturn %y",
    ),
    "x * x": (X, "%y = mul(%x, %x)\nreturn %y", "%y = square(%x)\nreturn %y"),
    "x ^ 1": (X, "%c: [] f32 = constant(1.0)\n%y = pow(%x, %c)\nreturn %y", "return %x"),
    "x ^ 2": (
        X,
        "%c: [] f32 = constant(2.0)\n%y = pow(%x, %c)\nreturn %y",
        "%y = square(%x)\nreturn %y",
    ),
    "x ^ -1": (
        X,
        "%c: [] f32 = constant(-1.0)\n%y = pow(%x, %c)\nreturn %y",
        "%y = reciprocal(%x)\nreturn %y",
    ),
    "x / 8": (
        X,
        "%c: [] f32 = constant(8.0)\n%y = div(%x, %c)\nreturn %y",
        "%c: [] f32 = constant(0.125)\n%y = mul(%x, %c)\nreturn %y",
    ),
    "x / [2, 4, 1/8, 1]": (
        X,
        "%c: [4] f32 = constant([2.0, 4.0, 0.125, 1.0])\n%y = div(%x, %c)\nreturn %y",
        "%c: [4] f32 = constant([0.5, 0.25, 8.0, 1.0])\n%y = mul(%x, %c)\nreturn %y",
    ),
    "x + -y": (
        X,
        '%z "z": [4] f32 = input\n%a = neg(%z)\n%y = add(%a, %x)\nreturn %y',
        '%z "z": [4] f32 = input\n%y = sub(%x, %z)\nreturn %y',
    ),
    "x - -y": (
        X,
        '%z "z": [4] f32 = input\n%a = neg(%z)\n%y = sub(%x, %a)\nreturn %y',
        '%z "z": [4] f32 = input\n%y = add(%x, %z)\nreturn %y',
    ),
    "max(x, 0)": (
        X,
        "%c: [] f32 = constant(0.0)\n%y = maximum(%c, %x)\nreturn %y",
        "%y = relu(%x)\nreturn %y",
    ),
    "min(max(x, a), b)": (
        X,
        "%a: [] f32 = constant(-0.5)\n%b: [] f32 = constant(0.25)\n"
        "%y = maximum(%x, %a)\n%z = minimum(%y, %b)\nreturn %z",
        "%y = clamp(%x; low=-0.5, high=0.25)\nreturn %y",
    ),
    "max(min(x, b), a)": (
        X,
        "%a: [] f32 = constant(-0.5)\n%b: [] f32 = constant(0.25)\n"
        "%y = minimum(%x, %b)\n%z = maximum(%y, %a)\nreturn %z",
        "%y = clamp(%x; low=-0.5, high=0.25)\nreturn %y",
    ),
    "where(c, x, x)": (
        X,
        '%c "c": [n, 4] bool = input\n%y = where(%c, %x, %x)\nreturn %y',
        '%c "c": [n, 4] bool = input\nreturn %x',
    ),
    "where(true, a, b)": (
        X,
        "%c: [] bool = constant(true)\n%z = neg(%x)\n%y = where(%c, %x, %z)\nreturn %y",
        "return %x",
    ),
    "cast to itself": (X, "%y = cast(%x; dtype=f32)\nreturn %y", "return %x"),
    "cast there and back": (
        H,
        "%a = cast(%x; dtype=f32)\n%y = cast(%a; dtype=f16)\nreturn %y",
        "return %x",
    ),
    "cast of exact cast": (
        H,
        "%a = cast(%x; dtype=f32)\n%y = cast(%a; dtype=f64)\nreturn %y",
        "%y = cast(%x; dtype=f64)\nreturn %y",
    ),
    "redundant expand of an operand": (
        X,
        '%b "b": [4] f32 = input\n%e = expand(%b; shape=[n, 4])\n%y = add(%x, %e)\nreturn %y',
        '%b "b": [4] f32 = input\n%y = add(%x, %b)\nreturn %y',
    ),
    "dot_general as matmul": (
        X,
        '%w "w": [4, 5] f32 = param\n%y = dot_general(%x, %w; '
        "lhs_contract=[1], rhs_contract=[0])\nreturn %y",
        '%w "w": [4, 5] f32 = param\n%y = matmul(%x, %w)\nreturn %y',
    ),
    "relu twice": (X, "%a = relu(%x)\n%y = relu(%a)\nreturn %y", "%a = relu(%x)\nreturn %a"),
    "neg undone": (X, "%a = neg(%x)\n%y = neg(%a)\nreturn %y", "return %x"),
    "reshape to itself": (X, "%y = reshape(%x; shape=[n, 4])\nreturn %y", "return %x"),
    "reshape of reshape": (
        X,
        "%a = reshape(%x; shape=[n, 2, 2])\n%y = reshape(%a; shape=[4 * n])\nreturn %y",
        "%y = reshape(%x; shape=[4 * n])\nreturn %y",
    ),
    "reshape there and back": (
        X,
        "%a = reshape(%x; shape=[n, 2, 2])\n%y = reshape(%a; shape=[n, 4])\nreturn %y",
        "return %x",
    ),
    "transpose of transpose": (
        X,
        "%a = reshape(%x; shape=[n, 2, 2])\n%b = transpose(%a; axes=[1, 2, 0])\n"
        "%y = transpose(%b; axes=[1, 0, 2])\nreturn %y",
        "%a = reshape(%x; shape=[n, 2, 2])\n%y = transpose(%a; axes=[2, 1, 0])\nreturn %y",
    ),
    "transpose there and back": (
        X,
        "%a = transpose(%x; axes=[1, 0])\n%y = transpose(%a; axes=[1, 0])\nreturn %y",
        "return %x",
    ),
    "expand of expand": (
        '%x "x": [1, 4] f32 = input\n',
        "%a = expand(%x; shape=[3, 4])\n%y = expand(%a; shape=[2, 3, 4])\nreturn %y",
        "%y = expand(%x; shape=[2, 3, 4])\nreturn %y",
    ),
    "narrow to all": (X, "%y = narrow(%x; axis=0, start=0, length=n)\nreturn %y", "return %x"),
    "narrow of narrow": (
        X,
        "%a = narrow(%x; axis=1, start=1, length=3)\n"
        "%y = narrow(%a; axis=-1, start=1, length=2)\nreturn %y",
        "%y = narrow(%x; axis=1, start=2, length=2)\nreturn %y",
    ),
    "narrow of concat": (
        X,
        '%z "z": [n, 3] f32 = input\n%a = concat(%x, %z; axis=1)\n'
        "%y = narrow(%a; axis=1, start=5, length=2)\nreturn %y",
        '%z "z": [n, 3] f32 = input\n%y = narrow(%z; axis=1, start=1, length=2)\nreturn %y',
    ),
    "a whole part of a concat": (
        X,
        '%z "z": [m, 4] f32 = input\n%a = concat(%x, %z)\n'
        "%y = narrow(%a; axis=0, start=n, length=m)\nreturn %y",
        '%z "z": [m, 4] f32 = input\nreturn %z',
    ),
    "concat of slices": (
        X,
        "%a = narrow(%x; axis=1, start=0, length=1)\n%b = narrow(%x; axis=1, start=1, length=3)\n"
        "%y = concat(%a, %b; axis=1)\nreturn %y",
        "return %x",
    ),
    "concat of some pieces": (
        X,
        "%a = narrow(%x; axis=1, start=1, length=1)\n%b = narrow(%x; axis=1, start=2, length=2)\n"
        "%y = concat(%a, %b; axis=1)\nreturn %y",
        "%y = narrow(%x; axis=1, start=1, length=3)\nreturn %y",
    ),
    "concat of concat": (
        X,
        '%z "z": [n, 3] f32 = input\n%a = concat(%x, %z; axis=1)\n'
        "%y = concat(%a, %z; axis=1)\nreturn %y",
        '%z "z": [n, 3] f32 = input\n%y = concat(%x, %z, %z; axis=1)\nreturn %y',
    ),
    "concat of one": (X, "%y = concat(%x; axis=1)\nreturn %y", "return %x"),
    "reduction of one": (
        '%x "x": [n, 1, 4] f32 = input\n',
        "%y = mean(%x; axis=[1])\nreturn %y",
        "%y = reshape(%x; shape=[n, 4])\nreturn %y",
    ),
    "sum of pads that meet": (
        '%x "x": [n, 4] f32 = input\n%z "z": [n, 3] f32 = input\n',
        "%a = pad(%x; low=[0, 0], high=[0, 5])\n%b = pad(%z; low=[0, 4], high=[0, 2])\n"
        "%y = add(%b, %a)\nreturn %y",
        "%c = concat(%x, %z; axis=1)\n%y = pad(%c; low=[0, 0], high=[0, 2])\nreturn %y",
    ),
    "transpose of concat": (
        X,
        '%z "z": [n, 3] f32 = input\n%a = concat(%x, %z; axis=1)\n'
        "%y = transpose(%a; axes=[1, 0])\nreturn %y",
        '%z "z": [n, 3] f32 = input\n%a = transpose(%x; axes=[1, 0])\n'
        "%b = transpose(%z; axes=[1, 0])\n%y = concat(%a, %b; axis=0)\nreturn %y",
    ),
    "pad by nothing": (X, "%y = pad(%x; low=[0, 0], high=[0, 0])\nreturn %y", "return %x"),
    "flip of flip": (
        X,
        "%a = flip(%x; axis=[1])\n%y = flip(%a; axis=[-1])\nreturn %y",
        "return %x",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_rule(name: str) -> None:
    sources, before, after = RULES[name]
    assert_becomes(simplify, sources + before, sources + after)


KEPT: dict[str, str] = {
    "x * 0 of floats: NaN and inf": X + "%c: [] f32 = constant(0.0)\n%y = mul(%x, %c)\nreturn %y",
    "x - x of floats": X + "%y = sub(%x, %x)\nreturn %y",
    "x + 0 that widens": H + "%c: [] f32 = constant(0.0)\n%y = add(%x, %c)\nreturn %y",
    "x / 3": X + "%c: [] f32 = constant(3.0)\n%y = div(%x, %c)\nreturn %y",
    "x ^ 0.5: pow(-inf, 0.5) is inf": X + "%c: [] f32 = constant(0.5)\n%y = pow(%x, %c)\nreturn %y",
    "a cast that rounds": X + "%a = cast(%x; dtype=f16)\n%y = cast(%a; dtype=f32)\nreturn %y",
    "an integer cast through a float saturates": '%x "x": [4] i8 = input\n'
    "%a = cast(%x; dtype=f32)\n%y = cast(%a; dtype=u8)\nreturn %y",
    "an expand that is needed": '%x "x": [1, 4] f32 = input\n%b "b": [4] f32 = input\n'
    "%e = expand(%x; shape=[3, 4])\n%y = add(%e, %b)\nreturn %y",
    "pieces in another order": X + "%a = narrow(%x; axis=1, start=2, length=2)\n"
    "%b = narrow(%x; axis=1, start=0, length=2)\n%y = concat(%a, %b; axis=1)\nreturn %y",
    "a narrow across two parts": X + "%a = concat(%x, %x; axis=1)\n"
    "%y = narrow(%a; axis=1, start=2, length=4)\nreturn %y",
    "a part of a concat that was widened": H + '%z "z": [n, 3] f32 = input\n'
    "%a = concat(%x, %z; axis=1)\n%y = narrow(%a; axis=1, start=0, length=4)\nreturn %y",
    "a concat others use": X + "%a = concat(%x, %x; axis=1)\n%b = concat(%a, %x; axis=1)\n"
    "return %a, %b",
    "max(min(x, low), high) with low below high is a constant": X
    + "%a: [] f32 = constant(-0.5)\n%b: [] f32 = constant(0.25)\n"
    "%y = minimum(%x, %a)\n%z = maximum(%y, %b)\nreturn %z",
    "dot_general with another contraction": X
    + '%w "w": [5, 4] f32 = param\n%y = dot_general(%x, %w; '
    "lhs_contract=[1], rhs_contract=[1])\nreturn %y",
    "a sum of bools counts": '%x "x": [n, 1] bool = input\n%y = sum(%x; axis=[1])\nreturn %y',
}


@pytest.mark.parametrize("name", KEPT)
def test_left_alone(name: str) -> None:
    assert_stays(simplify, KEPT[name])


def test_a_zero_of_higher_rank_broadcasts_and_stays() -> None:
    g = Graph("rank")
    g.set_outputs(g.add(g.input("x", [4]), g.constant([[0.0]])))
    assert op_names(simplify(g)) == ["add"]


def test_where_with_a_constant_condition_stretches_the_chosen_side() -> None:
    g = Graph("where")
    x, row = g.input("x", [3, 4]), g.input("row", [4])
    g.set_outputs(g.where(g.constant(False), x, row))
    before = g.copy()
    after = simplify(g)
    verify(after, after="simplify")
    assert op_names(after) == ["expand"]
    assert_same_results(before, after, exact=True)


def test_an_output_that_is_an_input_keeps_its_name() -> None:
    g = parsed('%x "x": [4] f32 = input\n%a = neg(%x)\n%b = neg(%a)\nreturn %b as "y"')
    after = simplify(g)
    assert after.output_names == ["y"]
    assert after.outputs[0].node.name == "x"


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        (dt.f32, dt.f16, True), (dt.f32, dt.bf16, True), (dt.f16, dt.bf16, False),
        (dt.f64, dt.i32, True), (dt.f32, dt.i32, False), (dt.f32, dt.i16, True),
        (dt.f16, dt.i8, True), (dt.bf16, dt.u8, True), (dt.i16, dt.u8, True),
        (dt.u16, dt.i8, False), (dt.i64, dt.u32, True), (dt.u8, dt.bool_, True),
        (dt.f16, dt.f8e5m2, True), (dt.f16, dt.f32, False),
    ],
)  # fmt: skip
def test_holds_is_true_when_no_value_is_lost(
    wide: dt.DType, narrow: dt.DType, expected: bool
) -> None:
    assert represents(wide, narrow) is expected
    if expected and narrow.bytes == 1 and narrow.is_integer:
        every = np.arange(256).astype(np.uint8).view(narrow.numpy)
        assert np.array_equal(every.astype(wide.numpy).astype(narrow.numpy), every)
