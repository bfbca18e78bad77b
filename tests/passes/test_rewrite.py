"""The engine: users, replacement, order, writes to states, and rules to a fixpoint."""

from __future__ import annotations

import numpy as np
import pytest
from pass_support import assert_same_results, op_names, parsed

from rlx.errors import OptionError, VerifyError
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.verify import verify
from rlx.passes.pattern import Match, const, is_number, matches, number, op
from rlx.passes.report import FusionReport
from rlx.passes.rewrite import Editor, Rule, apply


def chain() -> Graph:
    g = Graph("chain")
    x = g.input("x", [4])
    with g.block("first"):
        a = g.exp(x)
    b = g.neg(a)
    c = g.neg(b, name="last")
    return g.set_outputs(c, a)


def test_outputs_count_as_users() -> None:
    g = chain()
    editor = Editor(g, "test")
    x, a, b, c = (n.output for n in g.nodes)
    assert [editor.uses(v) for v in (x, a, b, c)] == [1, 2, 1, 1]
    assert editor.users[a] == [b.node]
    assert editor.returned[c] == 1


def test_replacing_removes_what_only_it_needed_and_keeps_names() -> None:
    g = chain()
    before = g.copy()
    editor = Editor(g, "test")
    _, a, _, c = (n.output for n in g.nodes)
    editor.replace(c, a)
    after = editor.finish()
    verify(after, after="test")
    assert op_names(after) == ["exp"]
    assert [n.id for n in after.nodes] == [0, 1]
    assert after.output_names == ["last", "output_1"]
    assert_same_results(before, after, exact=True)


def test_a_named_source_is_never_removed() -> None:
    g = Graph("sources")
    x, y = g.input("x", [2]), g.input("y", [2])
    total = g.add(x, y)
    g.set_outputs(total)
    editor = Editor(g, "test")
    editor.replace(total, x)
    assert [n.name for n in editor.finish().nodes] == ["x", "y"]


def test_new_nodes_stand_where_the_old_one_stood_and_say_where_they_come_from() -> None:
    g = chain()
    editor = Editor(g, "mine")
    a = g.nodes[1]
    with editor.building(a) as nodes:
        new = g.tanh(g.input("z", [4]))
    editor.replace(a.output, new)
    after = editor.finish()
    verify(after, after="test")
    assert [n.op.name for n in after.nodes] == ["input", "input", "tanh", "neg", "neg"]
    assert nodes[1].origin.block == "first"
    assert nodes[1].origin.passes == ("mine",)


def test_a_dropped_build_leaves_no_trace() -> None:
    g = chain()
    before = g.copy()
    editor = Editor(g, "test")
    with editor.building(g.nodes[1]) as nodes:
        g.sin(g.cos(g.nodes[0].output))
    editor.drop(nodes)
    assert editor.uses(g.nodes[0].output) == 1
    assert editor.finish().same_as(before)


def test_a_replacement_of_another_shape_or_type_is_an_error_that_shows_both() -> None:
    g = Graph("shapes")
    x = g.input("x", [2, 3])
    y = g.sum(x, axis=(1,))
    z = g.cast(x, "f64")
    g.set_outputs(y, z)
    editor = Editor(g, "test")
    with pytest.raises(VerifyError, match=r"\[test\] a replacement of another shape.*\[2, 3\] f32"):
        editor.replace(y, x)
    with pytest.raises(VerifyError, match="f64"):
        editor.replace(z, x)


def test_depends_follows_operands_and_writes() -> None:
    g = parsed("""
      %s "s": [4] f32 = state
      %x "x": [4] f32 = input
      %old = neg(%s)
      %new = state_update(%s, %x)
      %y = exp(%new)
      return %y, %old
    """)
    editor = Editor(g, "test")
    _, x, old, new, y = g.nodes
    assert editor.depends(y, x)
    assert not editor.depends(old, x)
    assert editor.depends(new, old)  # the write waits for the reader of the old value


def test_a_read_never_moves_behind_the_write() -> None:
    """relu(s * 1) after the write must not become relu(s)."""
    text = """
      %s "s": [4] f32 = state
      %x "x": [4] f32 = input
      %one: [] f32 = constant(1.0)
      %old = mul(%s, %one)
      %new = state_update(%s, %x)
      %y = add(%old, %new)
      return %y
    """
    g = parsed(text)
    rules = [Rule("x * 1", op("mul", "x", 1), lambda m: m.x)]
    after = apply(g.copy(), rules, "test")
    verify(after, after="test")
    assert op_names(after) == ["mul", "state_update", "add"]
    join = [
        Rule(
            "add of product",
            op("add", op("mul", "s", "c"), "y"),
            lambda m: m.g.maximum(m.s, m.y),  # would read s after the write
        )
    ]
    after = apply(g.copy(), join, "test")
    verify(after, after="test")
    assert op_names(after) == ["mul", "state_update", "add"]


def test_a_read_that_can_run_before_the_write_does() -> None:
    g = parsed("""
      %s "s": [4] f32 = state
      %x "x": [4] f32 = input
      %a = neg(%s)
      %new = state_update(%s, %x)
      %b = neg(%a)
      return %b
    """)
    before = g.copy()
    rules = [
        Rule("twice", op("neg", op("neg", "x")), lambda m: m.g.abs(m.g.abs(m.x)), owns=True),
    ]
    after = apply(g, rules, "test")
    verify(after, after="test")
    # the first abs reads the state: it stays before the write although it was built after it
    assert op_names(after) == ["abs", "state_update", "abs"]
    assert_same_results(before, after, given={"s": np.array([1, 2, 3, 4], np.float32)})


def test_rules_apply_until_none_does_and_tell() -> None:
    g = Graph("deep")
    x = g.input("x", [2])
    y = x
    for _ in range(7):
        y = g.neg(y)
    g.set_outputs(y)
    report = FusionReport()
    seen: list[tuple[str, str, Node]] = []
    rules = [Rule("double", op("neg", op("neg", "x")), lambda m: m.x)]
    before = g.copy()
    after = apply(g, rules, "test", report, lambda p, r, n, new: seen.append((p, r.name, n)))
    assert op_names(after) == ["neg"]
    assert report.count("double") == 3
    assert [s[:2] for s in seen] == [("test", "double")] * 3
    assert_same_results(before, after, exact=True)


def test_endless_rules_are_named() -> None:
    g = Graph("endless")
    g.set_outputs(g.add(g.input("x", [2]), g.input("y", [2])))
    rules = [Rule("round and round", op("add", "x", "y"), lambda m: m.g.add(m.y, m.x))]
    with pytest.raises(
        VerifyError, match=r"do not reach a fixpoint; got round and round \(\d+ times\)"
    ):
        apply(g, rules, "test")


def test_a_result_that_cannot_be_built_is_a_miss_and_leaves_the_graph_alone() -> None:
    g = chain()
    before = g.copy()
    report = FusionReport()
    rules = [Rule("wrong", op("exp", "x"), lambda m: m.g.matmul(m.g.neg(m.x), m.g.exp(m.x)(0)))]
    broken = [Rule("wrong", op("exp", "x"), lambda m: m.g.add(m.g.neg(m.x), m.g.iota([7])))]
    assert apply(g, broken, "test", report).same_as(before)
    assert "[add] dimensions cannot be shown equal" in report.missed[0].reason
    with pytest.raises(TypeError):  # a fault of the rule itself is not hidden
        apply(g, rules, "test")


def test_more_values_can_be_replaced_along_with_the_root() -> None:
    g = parsed("""
      %x "x": [4] f32 = input
      %a = exp(%x)
      %b = neg(%a)
      %c = tanh(%a)
      return %b, %c
    """)

    def result(m: Match) -> object:
        both = m.g.top_k(m.x, k=4)
        m.replace_too(m.a, both[0])
        return both[0]

    after = apply(g, [Rule("both", op("neg", op("exp", "x", name="a")), result)], "test")
    verify(after, after="test")
    assert op_names(after) == ["top_k", "tanh"]


def test_inputs_keep_their_order() -> None:
    """A node moved up takes its operands along; the order of inputs is a signature."""
    g = Graph("order")
    a, b = g.input("a", [2]), g.input("b", [2])
    first = g.neg(a)
    user = g.exp(first)
    c = g.input("c", [2])
    d = g.input("d", [2])
    root = g.add(first, d)
    g.set_outputs(user, root, c, b)

    def result(m: Match) -> object:
        joined = m.g.mul(m.x, m.d)
        m.replace_too(m.first, joined)
        return joined

    rule = Rule("up", op("add", op("neg", "x", name="first"), "d"), result)
    after = apply(g, [rule], "test")
    verify(after, after="test")
    assert [n.name for n in after.sources("input")] == ["a", "b", "c", "d"]


# -- patterns --------------------------------------------------------------------------------


def found(pattern: object, g: Graph, at: int = -1) -> list[Match]:
    return list(matches(pattern, Editor(g, "test"), g.nodes[at]))  # type: ignore[arg-type]


def test_commutative_operands_match_in_either_order() -> None:
    g = Graph("c")
    x = g.input("x", [2])
    g.set_outputs(g.mul(g.exp(x), x))
    assert found(op("mul", "x", op("exp", "x")), g)[0].x is x
    g.set_outputs(g.sub(g.exp(x), x))
    assert not found(op("sub", "x", op("exp", "x")), g)


def test_the_same_capture_twice_means_the_same_value() -> None:
    g = Graph("same")
    x, y = g.input("x", [2]), g.input("y", [2])
    g.set_outputs(g.mul(x, g.sigmoid(y)))
    assert not found(op("mul", "x", op("sigmoid", "x")), g)


def test_matching_goes_back_where_the_first_order_fails_later() -> None:
    """add(mul(a, b), mul(a, c)) with a second in both products."""
    g = Graph("back")
    a, b, c = (g.input(n, [2]) for n in "abc")
    g.set_outputs(g.add(g.mul(b, a), g.mul(c, a)))
    (first, *_) = found(op("add", op("mul", "x", "y"), op("mul", "x", "z")), g)
    assert first.x is a


def test_numbers_match_up_to_the_rounding_of_their_type() -> None:
    g = Graph("numbers")
    tenth = g.constant(0.1, "f16")
    assert number(tenth) == 0.1
    assert is_number(tenth, 0.1)
    assert not is_number(tenth, 0.11)
    assert is_number(g.constant(0.7978845608), 0.7978845608028654)
    assert not is_number(g.constant(1.0001), 1)
    assert number(g.constant(3)) == 3
    assert number(g.constant([1.0, 1.0])) is None
    assert number(g.input("x", [1])) is None


def test_conditions_on_attributes_and_ops() -> None:
    g = Graph("when")
    x = g.input("x", [2, 3])
    g.set_outputs(g.sum(x, axis=(1,), keepdims=True))
    assert found(op(("sum", "max"), "x", when=lambda o: o.keepdims), g)
    assert not found(op("sum", "x", when=lambda o: not o.keepdims), g)


def test_owned_matches_have_no_users_outside() -> None:
    g = Graph("owned")
    x = g.input("x", [2])
    s = g.sigmoid(x)
    root = g.mul(x, s)
    g.set_outputs(root)
    pattern = op("mul", "x", op("sigmoid", "x"))
    assert found(pattern, g)[0].owned() is None
    g.set_outputs(root, s)
    (match,) = found(pattern, g)
    assert match.owned() == (s, "is a graph output")
    other = g.exp(s)
    g.set_outputs(root, other)
    match = next(iter(matches(pattern, Editor(g, "test"), root.node)))
    assert match.owned() == (s, "has another user")


def test_a_capture_of_a_constant_gives_its_elements() -> None:
    g = Graph("const")
    x = g.input("x", [2])
    g.set_outputs(g.div(x, [2.0, 4.0]))
    (match,) = found(op("div", "x", const("c")), g)
    assert match.array("c").tolist() == [2.0, 4.0]
    assert match.number("c") is None


def test_what_is_no_pattern_is_an_error() -> None:
    with pytest.raises(OptionError, match="not part of a pattern"):
        op("add", None, "x")


def test_rules_without_a_root_or_its_operands_leave_the_graph_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No editor is made, so the pass costs one look at the nodes."""
    made: list[str] = []
    build = Editor.__init__

    def note(self: Editor, graph: Graph, name: str) -> None:
        made.append(name)
        build(self, graph, name)

    monkeypatch.setattr(Editor, "__init__", note)
    absent = Rule("absent", op("log", "x"), lambda m: m.x)
    half = Rule("half", op("exp", op("log", "x")), lambda m: m.x)
    double = Rule("double", op("neg", op("neg", "x")), lambda m: m.x)
    assert op_names(apply(chain(), [absent, half], "none")) == ["exp", "neg", "neg"]
    assert made == []
    assert op_names(apply(chain(), [absent, half, double], "some")) == ["exp"]
    assert made == ["some"]
