"""Constant folding, CSE and DCE; effects stay."""

from __future__ import annotations

import numpy as np
from pass_support import assert_becomes, assert_same_results, assert_stays, op_names, parsed

from rlx.ir.attrs import Body
from rlx.ir.graph import Graph
from rlx.ir.verify import verify
from rlx.passes.pipeline import recursive
from rlx.passes.simplify import cse, dce, fold, simplify

X = '%x "x": [n, 4] f32 = input\n'


# -- fold ------------------------------------------------------------------------------------


def test_constants_go_through_ops_in_one_pass() -> None:
    assert_becomes(
        fold,
        X + "%a: [2] f32 = constant([1.0, 2.0])\n%b = exp(%a)\n%c = sum(%b)\n%d = neg(%c)\n"
        "%y = mul(%x, %d)\nreturn %y",
        X + f"%d: [] f32 = constant({-float(np.float32(np.exp(1.0)) + np.float32(np.exp(2.0)))})\n"
        "%y = mul(%x, %d)\nreturn %y",
    )


def test_every_result_of_an_op_is_folded() -> None:
    g = Graph("top")
    values, indices = g.top_k(g.constant([3.0, 1.0, 2.0]), k=2)
    g.set_outputs(values, indices)
    before = g.copy()
    after = fold(g)
    verify(after, after="fold")
    assert op_names(after) == []
    assert_same_results(before, after, exact=True)


def test_known_sizes_fold_and_symbolic_ones_stay() -> None:
    assert_becomes(
        fold, "%a = dim_value(; dim=12)\nreturn %a", "%a: [] i32 = constant(12)\nreturn %a"
    )
    assert_stays(fold, X + "%a = dim_value(; dim=n)\nreturn %a, %x")


def test_a_result_beyond_the_bound_is_not_stored() -> None:
    text = "%a: [] f32 = constant(1.0)\n%b = expand(%a; shape=[512, 512])\nreturn %b"
    assert_stays(fold, text)
    assert op_names(fold(parsed(text), most_bytes=1 << 20)) == []


def test_a_result_no_larger_than_its_operands_is_stored_whatever_its_size() -> None:
    g = Graph("large")
    g.set_outputs(g.neg(g.constant(np.ones((512, 512), np.float32))))
    assert op_names(fold(g)) == []


def test_iotas_stay_for_masks_to_be_recognised() -> None:
    assert_stays(
        fold, "%a = iota(; shape=[4])\n%b: [] i32 = constant(1)\n%c = le(%a, %b)\nreturn %c"
    )


def test_what_fails_is_left_for_the_run_to_report() -> None:
    text = "%a: [2] f32 = constant([1.0, 2.0])\n%i: [1] i32 = constant([7])\n"
    text += "%b = gather(%a, %i)\nreturn %b"
    g = parsed(text)
    assert fold(g.copy()).same_as(g)


# -- cse -------------------------------------------------------------------------------------


def test_equal_ops_on_equal_operands_are_one() -> None:
    assert_becomes(
        cse,
        X + "%a = exp(%x)\n%b = exp(%x)\n%c = neg(%a)\n%d = neg(%b)\n%y = add(%c, %d)\nreturn %y",
        X + "%a = exp(%x)\n%c = neg(%a)\n%y = add(%c, %c)\nreturn %y",
    )


def test_the_order_of_commutative_operands_does_not_matter() -> None:
    assert_becomes(
        cse,
        X + "%z = exp(%x)\n%a = mul(%x, %z)\n%b = mul(%z, %x)\n%y = sub(%a, %b)\nreturn %y",
        X + "%z = exp(%x)\n%a = mul(%x, %z)\n%y = sub(%a, %a)\nreturn %y",
    )
    assert_stays(cse, X + "%z = exp(%x)\n%a = sub(%x, %z)\n%b = sub(%z, %x)\nreturn %a, %b")


def test_constants_are_one_by_content_and_type() -> None:
    assert_becomes(
        cse,
        X + "%a: [] f32 = constant(2.0)\n%b: [] f32 = constant(2.0)\n%c = add(%x, %a)\n"
        "%y = mul(%c, %b)\nreturn %y",
        X + "%a: [] f32 = constant(2.0)\n%c = add(%x, %a)\n%y = mul(%c, %a)\nreturn %y",
    )
    assert_stays(
        cse,
        X + "%a: [] f32 = constant(2.0)\n%b: [] f64 = constant(2.0)\n%c = add(%x, %a)\n"
        "%y = mul(%c, %b)\nreturn %y",
    )


def test_attributes_tell_ops_apart() -> None:
    assert_stays(cse, X + "%a = sum(%x; axis=[0])\n%b = sum(%x; axis=[1])\nreturn %a, %b")


def test_sources_of_equal_shape_are_not_one() -> None:
    assert_stays(
        cse, '%a "a": [4] f32 = param\n%b "b": [4] f32 = param\n%y = add(%a, %b)\nreturn %y'
    )


def test_writes_and_the_versions_they_make_are_not_one() -> None:
    text = """
      %s "s": [8] f32 = state
      %x "x": [4] f32 = input
      %a = state_update(%s, %x)
      %u = neg(%a)
      %b = state_update(%a, %x)
      %v = neg(%b)
      return %u, %v
    """
    assert_stays(cse, text)


# -- dce -------------------------------------------------------------------------------------


def test_dead_nodes_go_named_sources_stay() -> None:
    assert_becomes(
        dce,
        X + '%w "w": [4] f32 = param\n%c: [] f32 = constant(1.0)\n%a = exp(%w)\n%b = add(%a, %c)\n'
        "%y = neg(%x)\nreturn %y",
        X + '%w "w": [4] f32 = param\n%y = neg(%x)\nreturn %y',
    )


def test_a_write_is_never_dead_nor_what_it_needs() -> None:
    assert_stays(
        dce,
        '%s "s": [8] f32 = state\n%x "x": [4] f32 = input\n%a = neg(%x)\n'
        "%b = state_update(%s, %a)\nreturn %x",
    )


def test_an_op_with_one_result_in_use_stays() -> None:
    assert_stays(dce, X + "%a:2 = top_k(%x; k=2)\nreturn %a.1")


# -- nested graphs ---------------------------------------------------------------------------


def test_passes_reach_into_loops() -> None:
    body = Graph("step")
    total, x = body.input("total", [4]), body.input("x", [4])
    body.set_outputs(body.add(total, body.neg(body.neg(x))), body.mul(x, 1.0), names=["a", "b"])
    g = Graph("loop")
    start, xs = g.input("start", [4]), g.input("xs", [3, 4])
    g.set_outputs(*g.scan(start, xs, body=Body(body), n_carry=1, n_xs=1))
    before = g.copy()
    after = recursive(lambda h: dce(simplify(h)))(g)
    verify(after, after="test")
    inner = after.nodes[2].op.body.graph  # type: ignore[attr-defined]
    assert op_names(inner) == ["add"]
    assert [n.name for n in inner.sources("input")] == ["total", "x"]
    assert len(body.nodes) == 7  # the user's graph is as it was
    assert_same_results(before, after, exact=True)
