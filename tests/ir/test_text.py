"""Graphs printed, parsed back exactly, written by hand, and wrong in every way text can be."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_graphs import SAMPLES, all_nodes, attentions, control, mlp, tagged

from rlx.errors import ParseError
from rlx.ir.attrs import Data
from rlx.ir.dim import Dim, parse_dim, sym
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.node import UNKNOWN, Origin
from rlx.ir.op import REGISTRY
from rlx.ir.shape import Shape
from rlx.ir.text import inspect_graph, parse_graph, print_graph


@pytest.mark.parametrize("build", SAMPLES, ids=lambda b: b.__name__)
def test_text_comes_back_equal(build: Callable[[], Graph]) -> None:
    graph = build()
    text = print_graph(graph)
    again = parse_graph(text)
    assert again.same_as(graph)
    assert all_nodes(again) == all_nodes(graph)  # origins, names and nested graphs too
    assert print_graph(again) == text


def test_the_samples_use_every_group_of_ops() -> None:
    def groups(graph: Graph) -> set[str]:
        return {n.op.group for n in graph.nodes}

    used = set().union(*(groups(build()) for build in SAMPLES))
    known = {op.group for op in REGISTRY.values() if op.__module__.startswith("rlx.ir.ops.")}
    made = {"memory"} | {g for g in known if "pack" in g}  # by the planner and by devices
    assert known - used <= made


def test_constants_come_back_bit_by_bit() -> None:
    bits = np.array([0x7FC00001, 0xFF800001, 0x80000000, 0x00000001, 0x3DCCCCCD], np.uint32)
    g = Graph()
    g.set_outputs(g.constant(Data(bits.view(np.float32))), g.constant(Data(np.float32(0.1))))
    again = parse_graph(print_graph(g))
    array = again.nodes[0].op.data.array  # type: ignore[attr-defined]
    assert (array.view(np.uint32) == bits).all()
    assert "constant(0.1)" in print_graph(g)


FIGURE = """\
graph mlp {
  %0 "x": [batch, 64] f32 = input  // mlp.py:12
  %1 "w": [64, 10] f32 = param
  %2: [batch, 10] f32 = matmul(%0, %1)  // block layers.0, mlp.py:14, via fuse
  %3:2: [batch, 3] f32, [batch, 3] i32 = top_k(%2; k=3)
  return %3.0 as "y", %3.1 as "index"
}
"""


def test_the_figure_prints_as_written() -> None:
    g = parse_graph(FIGURE)
    assert print_graph(g) == FIGURE
    assert g.nodes[0].origin == Origin("", "mlp.py", 12)
    assert g.nodes[1].origin == UNKNOWN
    assert g.nodes[2].origin == Origin("layers.0", "mlp.py", 14, ("fuse",))
    assert g.output_names == ["y", "index"]


def test_hand_written_text_needs_no_shapes_and_no_numbers() -> None:
    g = parse_graph("""
    // a comment on its own, then one beside a node that is no origin
    graph {
      %x "x": [seq, 4] f32 = input  // tokens, one per row
      %half: [] f32 = constant(0.5)
      %y = mul(%x, %half)
      %y2 = softmax(%y; axis=0,)
      return %y2, %y
    }
    """)
    expected = Graph()
    x = expected.input("x", ["seq", 4])
    y = expected.mul(x, expected.constant(0.5))
    expected.set_outputs(expected.softmax(y, axis=0), y)
    assert g.same_as(expected)
    assert all(n.origin == UNKNOWN for n in g.nodes)


def test_origins_can_be_left_out() -> None:
    text = print_graph(mlp(), origins=False)
    assert "//" not in text
    assert parse_graph(text).same_as(mlp())


def test_attributes_at_their_defaults_are_not_printed() -> None:
    g = Graph()
    x = g.input("x", [4])
    g.set_outputs(g.softmax(x, axis=-1), g.clamp(x, low=0.0), g.clamp(x))
    text = print_graph(g, origins=False)
    assert "= softmax(%0)\n" in text
    assert "= clamp(%0; low=0.0)\n" in text
    assert "= clamp(%0)\n" in text


def test_written_shapes_in_another_form_are_kept() -> None:
    g = parse_graph("""graph {
      %0 "x": [batch * seq, 2] f32 = input
      %1: [rows, 2] f32 = neg(%0)
      return %1
    }""")
    assert g.nodes[1].output.shape == Shape(["rows", 2])


# -- random values -------------------------------------------------------------------------------

symbols = st.sampled_from(["batch", "seq", "true", "f32", "nan", "mask", "data", "sym", "graph"])


def _dims() -> st.SearchStrategy[Dim]:
    def grow(inner: st.SearchStrategy[Dim]) -> st.SearchStrategy[Dim]:
        small = st.integers(-3, 9)
        return st.one_of(
            st.builds(lambda a, b: a + b, inner, inner),
            st.builds(lambda a, b: a * b, inner, small),
            st.builds(lambda a, b: a // b, inner, st.integers(1, 7)),
        )

    return st.recursive(st.one_of(st.integers(-(2**70), 2**70), symbols.map(sym)), grow)


leaves = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans(),
    st.text(),
    st.none(),
    _dims(),
    st.sampled_from(["f32", "bool", "f8e5m2"]).map(DType.of),
    st.lists(st.one_of(st.integers(0, 9), symbols.map(sym)), max_size=3).map(Shape),
)
values = st.recursive(leaves, lambda v: st.lists(v, max_size=4).map(tuple), max_leaves=12)


@settings(max_examples=150, deadline=None)
@given(value=values, name=st.text(max_size=6), graph_name=st.text(max_size=6))
def test_any_attribute_value_comes_back(value: object, name: str, graph_name: str) -> None:
    g = Graph(graph_name)
    g.set_outputs(tagged(g, g.input("x", [2]), name=name, tag=value))
    again = parse_graph(print_graph(g))
    # repr tells 1 from 1.0 from True, and takes one NaN for another
    assert repr(again.nodes[1].op.attributes()) == repr(g.nodes[1].op.attributes())
    assert (again.nodes[1].name, again.name) == (name, graph_name)
    assert print_graph(again) == print_graph(g)


@settings(max_examples=100, deadline=None)
@given(dim=_dims())
def test_printed_dimensions_parse_to_themselves(dim: Dim) -> None:
    assert parse_dim(str(dim)) == dim


# -- faults --------------------------------------------------------------------------------------

NODES = '%0 "x": [4] f32 = input\n  '

FAULTS = {
    "no graph": ("mlp {}", "got 'mlp'; expected 'graph'", (1, 1)),
    "after the end": ("graph g { return } 3", "text after the graph; got '3'", (1, 20)),
    "unclosed": ("graph g {", "expected a node, 'live', 'return' or '}'", (1, 10)),
    "stray character": ("graph g {\n  ? }", "not a token; got '?'", (2, 3)),
    "open quote": ('graph g {\n  %0 "x: [4] f32 = input\n}', "a closing quote", (2, 6)),
    "bad escape": ('graph g {\n  %0 "\\q": [4] f32 = input\n}', "not a string", (2, 6)),
    "unknown op": (
        f"graph g {{\n  {NODES}%1 = sofmax(%0) }}", "unknown op; got sofmax", (3, 8),
    ),
    "unknown attribute": (
        f"graph g {{\n  {NODES}%1 = softmax(%0; axes=1) }}",
        "softmax: unknown attribute; got axes", (3, 8),
    ),
    "missing attribute": (
        f"graph g {{\n  {NODES}%1 = cast(%0) }}", "cast: missing attribute", (3, 8),
    ),
    "attribute twice": (
        f"graph g {{\n  {NODES}%1 = softmax(%0; axis=0, axis=0) }}", "given twice", (3, 28),
    ),
    "attribute of another type": (
        f'graph g {{\n  {NODES}%1 = softmax(%0; axis="0") }}',
        "softmax.axis: not an int; got '0'", (3, 8),
    ),
    "no value": (f"graph g {{\n  {NODES}%1 = softmax(%0; axis=) }}", "expected a value", (3, 25)),
    "undefined operand": (
        f"graph g {{\n  {NODES}%1 = neg(%7) }}", "not defined before its use; got '%7'", (3, 12),
    ),
    "forward reference": (
        f"graph g {{\n  {NODES}%1 = neg(%1) }}", "not defined before its use", (3, 12),
    ),
    "defined twice": (f"graph g {{\n  {NODES}%0 = neg(%0) }}", "defined twice", (3, 3)),
    "several results": (
        f"graph g {{\n  {NODES}%1:2 = top_k(%0; k=1)\n  %2 = neg(%1) }}",
        "a node of several results; got '%1'; expected %1.0 or another", (4, 12),
    ),
    "no such result": (
        f"graph g {{\n  {NODES}%1:2 = top_k(%0; k=1)\n  %2 = neg(%1.2) }}", "not defined", (4, 12),
    ),
    "wrong count": (
        f"graph g {{\n  {NODES}%1:3 = top_k(%0; k=1) }}", "got 3; expected 2", (3, 3),
    ),
    "wrong shape": (
        f"graph g {{\n  {NODES}%1: [5] f32 = neg(%0) }}",
        "the written shape is not the inferred one; got [5] f32; expected [4] f32", (3, 3),
    ),
    "operands that do not fit": (
        f'graph g {{\n  {NODES}%1 "y": [3] f32 = input\n  %2 = add(%0, %1) }}', "4", (4, 8),
    ),
    "too many operands": (
        f"graph g {{\n  {NODES}%1 = neg(%0, %0) }}", "wrong number of operands; got 2", (3, 8),
    ),
    "input without shape": ('graph g {\n  %0 "x" = input }', "input without a shape", (2, 12)),
    "negative size": ('graph g {\n  %0 "x": [-4] f32 = input }', "negative dimension", (2, 11)),
    "unknown type": ('graph g {\n  %0 "x": [4] f31 = input }', "unknown element type", (2, 15)),
    "bad divisor": ('graph g {\n  %0 "x": [n // 0] f32 = input }', "not a divisor", (2, 17)),
    "ragged constant": (
        "graph g {\n  %0: [2, 2] f32 = constant([[1, 2], [3]]) }",
        "rows of different lengths", (2, 29),
    ),
    "constant of another shape": (
        "graph g {\n  %0: [3] f32 = constant([1, 2]) }",
        "elements of another shape; got [2]; expected [3] f32", (2, 26),
    ),
    "constant out of range": (
        "graph g {\n  %0: [1] u8 = constant([300]) }", "not the elements of [1] u8", (2, 25),
    ),
    "float in ints": ("graph g {\n  %0: [1] i8 = constant([1.5]) }", "not an int", (2, 26)),
    "base64 of another length": (
        'graph g {\n  %0: [2] f32 = constant(base64 "AAAA") }', "3 bytes where [2] f32", (2, 26),
    ),
    "not base64": (
        'graph g {\n  %0: [2] f32 = constant(base64 "A?") }', "not the elements", (2, 26),
    ),
    "symbolic constant": (
        "graph g {\n  %0: [n] f32 = constant([1]) }", "a constant of unknown size", (2, 26),
    ),
    "unknown mask": (
        f"graph g {{\n  {NODES}%1 = attention(%0, %0, %0; mask_kind=mask.diagonal) }}",
        "unknown mask kind", (3, 45),
    ),
    "unknown scheme": (
        f"graph g {{\n  {NODES}%1 = dequant_matmul(%0, %0; scheme=quant.Q9) }}",
        "unknown quantisation scheme", (3, 44),
    ),
    "names used twice": (
        'graph g {\n  %0 "x": [4] f32 = input\n  %1 "x": [4] f32 = param }',
        "a source name used twice", (1, 1),
    ),
    "outputs of one name": (
        f'graph g {{\n  {NODES}return %0 as "y", %0 as "y" }}', "two outputs of one name", (1, 1),
    ),
    "bound of zero": ("graph g {\n  live seq <= 0\n}", "dynamic symbol seq; got 0", (1, 1)),
    "nodes after return": (f"graph g {{\n  {NODES}return %0\n  %1 = neg(%0)\n}}", "'}'", (4, 3)),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS, ids=lambda c: c.replace(" ", "_"))
def test_faults_say_where_and_what(case: str) -> None:
    text, message, place = FAULTS[case]
    with pytest.raises(ParseError) as caught:
        parse_graph(text, "net.rlx")
    error = caught.value
    assert message in str(error)
    assert (error.line, error.column) == place
    assert error.where == f"net.rlx:{place[0]}:{place[1]}"
    *_, line, caret = [part for part in str(error).split("\n") if not part.startswith("  hint")]
    assert line == "    " + text.split("\n")[place[0] - 1]
    assert caret == "    " + " " * (place[1] - 1) + "^"


def test_long_lines_are_cut_around_the_caret() -> None:
    text = f"graph g {{ %0: [400] f32 = constant([{'1, ' * 399} oops]) }}"
    with pytest.raises(ParseError) as caught:
        parse_graph(text)
    line, caret = str(caught.value).split("\n")[-2:]
    assert len(line) <= 104
    assert line[caret.index("^") :].startswith("oops")


@pytest.mark.parametrize(
    "text",
    [
        "graph g { %0 \"x\": [" + "(" * 5000 + "n" + ")" * 5000 + "] f32 = input }",
        "graph g { %0 \"x\": [" + "-" * 5000 + "n] f32 = input }",
        "graph g { %0 = custom(; op=" + "[" * 5000 + "]" * 5000 + ") }",
        "graph g { %0: [1] f32 = constant(" + "[" * 5000 + "1" + "]" * 5000 + ") }",
        "graph g { %0 = cond(; then=" * 2000,
    ],
    ids=["parentheses", "signs", "tuples", "elements", "graphs"],
)  # fmt: skip
def test_nesting_has_a_limit(text: str) -> None:
    with pytest.raises(ParseError, match="nested too deep"):
        parse_graph(text)


def test_expressions_have_a_limit() -> None:
    power = " * ".join(["(a + b + c + d + e + f)"] * 30)
    with pytest.raises(ParseError, match="grew too large"):
        parse_graph(f'graph g {{ %0 "x": [{power}] f32 = input }}')
    with pytest.raises(ParseError, match="not a number"):
        parse_graph(f'graph g {{ %0 "x": [{"9" * 5000}] f32 = input }}')


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_text_gives_a_parse_error_or_a_graph(data: st.DataObject) -> None:
    text = print_graph(data.draw(st.sampled_from([mlp, attentions, control]))())
    text = text if len(text) < 5000 else text[:4000] + text[-400:]
    at = data.draw(st.integers(0, len(text)))
    cut = data.draw(st.integers(0, 12))
    piece = data.draw(st.sampled_from(["", "%", "[", "}", "-", "1e999", "nan", '"', "sym(", "//"]))
    try:
        graph = parse_graph(text[:at] + piece + text[at + cut :])
    except ParseError as error:
        assert error.line >= 1
    else:
        assert parse_graph(print_graph(graph)).same_as(graph)


# -- for people ----------------------------------------------------------------------------------


def test_inspect_shows_a_summary_and_columns() -> None:
    text = inspect_graph(attentions())
    lines = text.split("\n")
    assert lines[0] == (
        "graph attentions: 10 nodes, 2 inputs, 1 param (128 B), 1 state (262656 * batch bytes), "
        "symbols batch, past_seq, seq"
    )
    assert lines[1] == "  dynamic: past_seq ≤ 4096, seq ≤ 8"
    assert lines[8].split("  ")[1].startswith("%6")
    assert "constant(0 … 1)" in lines[8]
    # long calls push only their own comment out of the column
    columns = [line.index("//") for line in lines[2:12]]
    assert columns.count(min(columns)) == 6
    assert all("sample_graphs.py:" in line for line in lines[2:12])
    assert lines[12] == '  return %9.0 as "normed", %9.1 as "sum", %3 as "cache"'


def test_inspect_shows_nested_graphs_indented() -> None:
    text = inspect_graph(control())
    assert "scan(%1, %0; body=graph step, n_carry=1, n_xs=1, reverse=true)" in text
    assert '\n    graph step:\n      %0 "in0"' in text
    assert "\n        graph then:\n          %0" in text


def test_inspect_dims_origins_when_asked() -> None:
    text = inspect_graph(mlp(), color=True)
    assert text.count("\x1b[2m//") == 4
    assert "\x1b" not in inspect_graph(mlp())
