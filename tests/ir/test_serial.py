"""Programs stored and read back equal; bytes the same everywhere; damage raises, never believed."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sample_graphs import SAMPLES, all_nodes, attentions, control, hir, mlp

from rlx.errors import FormatError, VerifyError
from rlx.ir.attrs import Body, Data, MaskKind
from rlx.ir.binding import DimBinding, UpTo, bind_graph
from rlx.ir.dim import sym
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.hir import HirModule
from rlx.ir.lir import Lir, Slot
from rlx.ir.module import GraphModule, GraphStage
from rlx.ir.op import lookup
from rlx.ir.phase import Phase
from rlx.ir.quant.scheme import QuantScheme
from rlx.ir.serial import VERSION, canonical, from_bytes, load, save, to_bytes
from rlx.ir.serial.writer import MAX_DEPTH, Writer, integer, ints32, text, uint
from rlx.ir.shape import Shape
from rlx.ir.text import parse_graph
from rlx.passes.plan import plan

HEADER = 52


def sealed(payload: bytes, kind: int = 1, version: int = VERSION) -> bytes:
    """A container around `payload`, built here from the written description of the format."""
    head = b"\x89RLX\r\n\x1a\n" + struct.pack("<HHQ", version, kind, len(payload))
    return head + hashlib.sha256(payload).digest() + payload


# -- round trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize("build", SAMPLES, ids=lambda b: b.__name__)
def test_graphs_come_back_equal(build: Callable[[], Graph]) -> None:
    graph = build()
    data = to_bytes(graph)
    again = from_bytes(data)
    assert type(again) is type(graph)
    assert again.same_as(graph)
    assert all_nodes(again) == all_nodes(graph)
    assert to_bytes(again) == data
    assert canonical(again) == canonical(graph)


def planned() -> Lir:
    binding = DimBinding(batch=2, past_seq=UpTo(4096), seq=UpTo(8))
    return plan(bind_graph(attentions(), binding), prepare=mlp(), scratch=lambda node: node.id * 10)


def slots(lir: Lir) -> list[Any]:
    rows = []
    for node in lir.graph.nodes:
        for v in node.outputs:
            slot = lir.slots[v]
            fields = [getattr(slot, f.name) for f in dataclasses.fields(Slot)]
            rows.append([str(f) if f is slot.root else f for f in fields])
    return rows


def test_plans_come_back_equal() -> None:
    lir = planned()
    assert {s.kind for s in lir.slots.values()} >= {"input", "output", "param", "state", "alias"}
    assert lir.scratch
    data = to_bytes(lir)
    again = from_bytes(data)
    assert isinstance(again, Lir)
    assert all_nodes(again.graph) == all_nodes(lir.graph)
    assert again.dynamic == {"past_seq": 4096, "seq": 8}
    assert slots(again) == slots(lir)
    assert again.phases == lir.phases
    assert Phase.STEADY_STATE in dict(again.phases).values()
    assert (again.arena_size, again.scratch) == (lir.arena_size, lir.scratch)
    assert again.prepare is not None
    assert all_nodes(again.prepare) == all_nodes(mlp())
    assert to_bytes(again) == data


def test_every_part_of_a_plan_is_stored() -> None:
    # a field added to these records must be added to rlx/ir/serial/__init__.py too
    assert [f.name for f in dataclasses.fields(Lir)] == [
        "graph", "slots", "arena_size", "phases", "prepare", "scratch",
    ]  # fmt: skip
    assert [f.name for f in dataclasses.fields(Slot)] == [
        "kind", "size", "offset", "root", "view", "first", "last",
    ]  # fmt: skip


def test_modules_come_back_at_their_stage_with_their_policy() -> None:
    module = GraphModule.from_hir(hir()).with_fusion_policy("fusable")
    for stage, held in [
        (GraphStage.HIR, module),
        (GraphStage.MIR, module.lower()),
        (GraphStage.LIR, GraphModule.from_lir(planned())),
    ]:
        again = from_bytes(to_bytes(held))
        assert isinstance(again, GraphModule)
        assert again.stage is stage
        assert again.fusion_policy is held.fusion_policy
        assert to_bytes(again) == to_bytes(held)
    assert isinstance(from_bytes(to_bytes(module)).as_hir(), HirModule)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "mlp.rlx"
    save(mlp(), path)
    save(control(), path)  # replaces the first
    assert load(path).same_as(control())
    assert [p.name for p in tmp_path.iterdir()] == ["mlp.rlx"]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(FormatError) as caught:
        load(path)
    assert str(caught.value).startswith(f"[{path}] truncated; got ")


def test_other_things_and_unsound_graphs_are_not_stored() -> None:
    with pytest.raises(FormatError, match="cannot be stored; got int"):
        to_bytes(3)  # type: ignore[arg-type]
    graph = mlp()
    graph.nodes[2].id = 5
    with pytest.raises(VerifyError, match="an id that is not the position"):
        to_bytes(graph)


# -- one spelling --------------------------------------------------------------------------------

PINNED = """graph pinned {
  live past_seq <= 64
  %0 "x": [batch, past_seq + seq] f32 = input  // block a, net.py:3, via fuse
  %1: [] f32 = constant(0.1)
  %2: [batch, past_seq + seq] f32 = mul(%0, %1)
  %3: [batch, past_seq + seq] f32 = softmax(%2; axis=0)
  return %3 as "y"
}"""

DIGEST = "fee3637eb488b606305a3259ea6ff8b98668caf98255b6accee282e1e23cd5ff"
CANONICAL = "817d618d2a10027a0902f364ee42a2cf2e47fba5d26d152f8ee37643301c4ecf"


def test_the_format_is_pinned() -> None:
    # These change only with the format: then raise VERSION, and say how old files are read.
    graph = parse_graph(PINNED)
    assert VERSION == 3  # 2 had other names of attributes (perm, axes, dims)
    assert hashlib.sha256(to_bytes(graph)).hexdigest() == DIGEST
    assert hashlib.sha256(canonical(graph)).hexdigest() == CANONICAL


@pytest.mark.slow
def test_bytes_are_the_same_in_every_process() -> None:
    here = Path(__file__).parent
    program = (
        "import hashlib; from sample_graphs import *; from rlx.ir.serial import *;"
        "h = hashlib.sha256();"
        "[h.update(to_bytes(f()) + canonical(f())) for f in SAMPLES];"
        "print(h.hexdigest())"
    )
    seen = set()
    for seed in ("0", "1", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{here}:{here.parents[1]}"}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
        )
        seen.add(done.stdout)
    assert len(seen) == 1


def test_different_contents_never_coincide() -> None:
    inner, other = Graph(), Graph()
    inner.set_outputs(inner.neg(inner.input("x", [2])))
    other.set_outputs(other.abs(other.input("x", [2])))
    zeros = [np.zeros(2, t) for t in (np.float32, np.int32, np.uint32)]
    contents = [
        1, 1.0, True, "1", b"1".decode() + " ", None, False, 0, 0.0, -0.0, "", (), (1,), ((1,),),
        (1, 1), ((), ()), ("", ""), "None", float("nan"), float("inf"), -1, 255, 256, -256, 2**64,
        sym.SEQ, "seq", sym.SEQ * 2, sym.SEQ + 1, sym.SEQ * sym.BATCH, sym.SEQ // 2,
        (sym.SEQ + 1) // 2, sym.SEQ // 3, DType.of("f32"), "f32", DType.of("f16"),
        Shape([1], "f32"), Shape([1], "i32"), Shape([], "f32"), Shape(["seq"], "f32"),
        MaskKind.NONE, MaskKind.CAUSAL, "none", MaskKind.SLIDING_WINDOW(1), MaskKind.BIAS,
        MaskKind.LOCAL(0), MaskKind.LOCAL(1), QuantScheme.parse("Q4_K"), "Q4_K",
        QuantScheme.parse("int8_b32"),
        *(Data(z) for z in zeros), Data(zeros[0].reshape(2, 1)), Data(np.float32([0, -0.0])),
        Body(inner), Body(other), lookup("neg")(), lookup("abs")(),
        lookup("softmax")(axis=0), lookup("softmax")(axis=1), inner, other, mlp(),
    ]  # fmt: skip
    assert len({canonical(c) for c in contents}) == len(contents)


def test_names_of_graphs_and_origins_do_not_enter_the_canonical_form() -> None:
    a, b = parse_graph(PINNED), parse_graph(PINNED.replace("pinned", "x").replace("net.py", "b"))
    assert to_bytes(a) != to_bytes(b)
    assert canonical(a) == canonical(b)
    c = parse_graph(PINNED.replace('"y"', '"z"'))
    d = parse_graph(PINNED.replace("<= 64", "<= 65"))
    assert len({canonical(a), canonical(c), canonical(d)}) == 3


@settings(max_examples=100, deadline=None)
@given(number=st.integers(-(2**80), 2**80))
@example(number=-128)
@example(number=-(2**15))
def test_ints_take_the_fewest_bytes(number: int) -> None:
    size = next(n for n in range(1, 12) if -(2 ** (8 * n - 1)) <= number < 2 ** (8 * n - 1))
    assert len(integer(number)) == 1 + size


# -- damage --------------------------------------------------------------------------------------


def refuse(data: bytes) -> str:
    with pytest.raises(FormatError) as caught:
        from_bytes(data, "net.rlx")
    assert caught.value.where == "net.rlx"
    return str(caught.value)


def test_every_truncation_is_refused() -> None:
    data = to_bytes(mlp())
    for size in range(len(data)):
        assert "truncated" in refuse(data[:size]) or size == 0
    payload = data[HEADER:]
    for size in range(len(payload)):  # also when the frame was made to fit
        refuse(sealed(payload[:size]))


def test_the_frame_is_checked() -> None:
    data = to_bytes(mlp())
    assert sealed(data[HEADER:]) == data
    assert "not an RLX program" in refuse(b"GGUF" + data[4:])
    assert "not an RLX program" in refuse(b"")
    message = refuse(sealed(data[HEADER:], version=7))
    assert "got version 7; expected version 3" in message
    assert "hint: written by a newer RLX" in message
    assert "unknown kind of program; got 9" in refuse(sealed(data[HEADER:], kind=9))
    assert "bytes after the end; got " in refuse(data + b"\0")
    assert "bytes after the end (at byte" in refuse(sealed(data[HEADER:] + b"\0"))
    spoiled = bytearray(data)
    spoiled[-1] ^= 1
    assert "do not match their digest" in refuse(bytes(spoiled))
    huge = data[:12] + struct.pack("<Q", 2**62) + data[20:]
    assert "truncated; got " in refuse(huge)


def op_bytes(name: str, **attributes: bytes) -> bytes:
    fields = b"".join(text(k) + v for k, v in attributes.items())
    return b"O" + text(name) + uint(len(attributes)) + fields


INPUT = op_bytes("input", shape=b"S" + text("f32") + uint(1) + b"i" + integer(4))
NEG = op_bytes("neg")
SHAPE = text("f32") + uint(1) + b"i" + integer(4)


def made(
    ops: list[bytes], rows: list[int], *, nodes: int = 2, tail: bytes = b"\0\0\0",
    shapes: tuple[bytes, ...] = (SHAPE,),
) -> bytes:  # fmt: skip
    """A graph payload from its parts: outputs, dynamic symbols and names are empty in `tail`."""
    tables = [uint(len(ops)) + b"".join(ops), uint(len(shapes)) + b"".join(shapes)]
    names = uint(2) + text("") + text("x")
    return b"".join([*tables, names, uint(nodes), ints32(rows), tail])


# a node is: op, name, number of operands, operands, number of results, their shapes
FIRST = [0, 1, 0, 1, 0]  # an input x
GOOD = [*FIRST, 1, 0, 1, 0, 1, 0]  # and neg of it


def test_a_graph_made_by_hand_is_read() -> None:
    graph = from_bytes(sealed(made([INPUT, NEG], GOOD)))
    assert [n.op.name for n in graph.nodes] == ["input", "neg"]
    assert made([INPUT, NEG], GOOD) == Writer(names=False).graph(graph)


ROWS = {
    "a dangling operand": [*FIRST, 1, 0, 1, 7, 1, 0],
    "a cycle": [*FIRST, 1, 0, 1, 1, 1, 0],
    "a forward reference": [1, 0, 1, 1, 1, 0, *FIRST],
    "an unknown op index": [*FIRST, 9, 0, 1, 0, 1, 0],
    "an unknown name": [0, 9, 0, 1, 0, 1, 0, 1, 0, 1, 0],
    "an unknown shape": [*FIRST, 1, 0, 1, 0, 1, 9],
    "an absurd operand count": [*FIRST, 1, 0, 2**32 - 1, 0, 1, 0],
    "an absurd result count": [*FIRST, 1, 0, 1, 0, 2**32 - 1, 0],
    "no result": [*FIRST, 1, 0, 1, 0, 0],
    "two operands of neg": [*FIRST, 1, 0, 2, 0, 0, 1, 0],
    "a nameless input": [0, 0, 0, 1, 0, 1, 0, 1, 0, 1, 0],
    "rows that end early": GOOD[:-1],
    "rows too many": [*GOOD, 0],
}


@pytest.mark.parametrize("case", ROWS, ids=lambda c: c.replace(" ", "_"))
def test_rows_are_checked(case: str) -> None:
    refuse(sealed(made([INPUT, NEG], ROWS[case])))


def test_shapes_are_inferred_again() -> None:
    other = text("f32") + uint(1) + b"i" + integer(5)
    rows = [*GOOD[:-1], 1]
    message = refuse(sealed(made([INPUT, NEG], rows, shapes=(SHAPE, other))))
    assert "the shape of a result is not the inferred one; got [5] f32; expected [4] f32" in message


BAD_OPS = {
    "unknown op": (op_bytes("sofmax"), "unknown op"),
    "unknown attribute": (op_bytes("neg", axis=b"N"), "unknown attribute"),
    "missing attribute": (op_bytes("cast"), "missing attribute"),
    "attribute of a loose type": (op_bytes("cast", dtype=b"s" + text("f16")), "of another type"),
    "attribute of a wrong type": (op_bytes("softmax", axis=b"f" + b"\0" * 8), "not an int"),
    "attribute out of range": (op_bytes("leaky_relu", alpha=b"s" + text("x")), "not a number"),
    "axis out of range": (op_bytes("softmax", axis=b"i" + integer(9)), "axis out of range"),
    "unknown tag": (op_bytes("softmax", axis=b"?"), "unknown tag of a value"),
    "text not UTF-8": (op_bytes("softmax", axis=b"s" + uint(1) + b"\xff"), "not UTF-8"),
    "name not UTF-8": (b"O" + uint(2) + b"\xc3\x28" + uint(0), "not UTF-8"),
    "absurd length": (op_bytes("softmax", axis=b"s" + uint(2**60)), "a length past the end"),
    "absurd count": (op_bytes("sum", axis=b"(" + uint(2**60)), "a count past the end"),
    "absurd int": (op_bytes("softmax", axis=b"i" + uint(2**40)), "impossible size"),
    "longer int": (op_bytes("softmax", axis=b"i" + uint(2) + b"\1\0"), "not the shortest encoding"),
    "endless number": (b"O" + b"\xff" * 20, "not a number"),
    "unknown type": (op_bytes("cast", dtype=b"t" + text("f31")), "unknown element type"),
    "unknown mask": (op_bytes("neg", mask=b"m" + text("?") + integer(0)), "unknown mask kind"),
    "unknown scheme": (op_bytes("neg", scheme=b"q" + text("Q9")), "unknown quantisation scheme"),
    "constant too long": (
        op_bytes("constant", data=b"D" + text("f32") + uint(1) + b"i" + integer(2**40)),
        "a length past the end",
    ),
    "constant of a symbol": (
        op_bytes("constant", data=b"D" + text("f32") + uint(1) + b"x\1" + integer(1) + b"\1s\1n"),
        "a constant of unknown size",
    ),
    "bool of two": (op_bytes("constant", data=b"D" + text("bool") + b"\0\2"), "neither 0 nor 1"),
    "negative size": (
        op_bytes("input", shape=b"S" + text("f32") + uint(1) + b"i" + integer(-1)),
        "negative dimension",
    ),
    "huge size": (
        op_bytes("input", shape=b"S" + text("f32") + uint(1) + b"i" + integer(2**64)),
        "dimension beyond 63 bits",
    ),
    "size of text": (
        op_bytes("input", shape=b"S" + text("f32") + uint(1) + b"s" + text("n")),
        "not a dimension",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_OPS, ids=lambda c: c.replace(" ", "_"))
def test_ops_are_checked(case: str) -> None:
    op, message = BAD_OPS[case]
    assert message in refuse(sealed(made([INPUT, op], GOOD)))


def term(factor: int, *atoms: bytes) -> bytes:
    return integer(factor) + uint(len(atoms)) + b"".join(atoms)


def symbol(name: str) -> bytes:
    return b"s" + text(name)


EXPRESSIONS = {
    "not sorted": uint(2) + term(1, symbol("b")) + term(1, symbol("a")),
    "factors not sorted": uint(1) + term(1, symbol("b"), symbol("a")),
    "twice": uint(2) + term(1, symbol("a")) + term(1, symbol("a")),
    "zero": uint(1) + term(0, symbol("a")),
    "constant": uint(1) + term(3),
    "empty": uint(0),
    "no symbol": uint(1) + term(1, symbol("1x")),
    "by zero": uint(1) + term(1, b"/" + uint(1) + term(1, symbol("a")) + integer(0)),
    "by one": uint(1) + term(1, b"/" + uint(1) + term(1, symbol("a")) + integer(1)),
    "reducible": uint(1) + term(1, b"/" + uint(1) + term(4, symbol("a")) + integer(2)),
    "of high degree": uint(1) + term(1, *[symbol("a")] * 70),
    "bottomless": b"".join([uint(1) + integer(1) + uint(1) + b"/"] * 5000),
}


@pytest.mark.parametrize("case", EXPRESSIONS, ids=lambda c: c.replace(" ", "_"))
def test_dims_have_one_encoding(case: str) -> None:
    shape = b"S" + text("f32") + uint(1) + b"x" + EXPRESSIONS[case]
    refuse(sealed(made([INPUT, op_bytes("input", shape=shape)], GOOD)))


def test_nesting_has_a_limit() -> None:
    tuples = b"(\1" * 100_000 + b"(\0"
    assert "nested too deep" in refuse(sealed(made([INPUT, op_bytes("sum", axis=tuples)], GOOD)))
    graph = made([INPUT, NEG], GOOD)
    for _ in range(200):
        body = b"B" + uint(len(graph)) + graph
        graph = made([INPUT, op_bytes("elementwise_region", body=body)], GOOD)
    assert "nested too deep" in refuse(sealed(graph))


def test_what_is_nested_too_deep_is_not_written() -> None:
    value: Any = ()
    for _ in range(MAX_DEPTH + 1):
        value = (value,)
    with pytest.raises(FormatError, match="nested too deep to store"):
        canonical(value)


def test_outputs_and_bounds_are_checked() -> None:
    one = uint(1)
    assert "no value of the graph" in refuse(
        sealed(made([INPUT, NEG], GOOD, tail=one + uint(2) + text("y") + b"\0\0"))
    )
    twice = uint(2) + (uint(1) + text("y")) * 2 + b"\0\0"
    assert "two outputs of one name" in refuse(sealed(made([INPUT, NEG], GOOD, tail=twice)))
    bound = b"\0" + one + text("seq") + integer(0) + b"\0"
    assert "dynamic symbol seq; got 0" in refuse(sealed(made([INPUT, NEG], GOOD, tail=bound)))
    assert "not a flag" in refuse(sealed(made([INPUT, NEG], GOOD, tail=b"\0\0\7")))


def test_origins_are_checked() -> None:
    named = b"\0\0\1" + text("g")
    strings = uint(1) + text("a")
    origin = uint(1) + (uint(2) + uint(0) + uint(0) + integer(1))
    good = made([INPUT, NEG], GOOD, tail=named + strings + origin + ints32([0, 0]))
    assert from_bytes(sealed(good)).nodes[1].origin == ("a", "a", 1, ())
    for rows in ([0], [0, 1], [0, 0, 0]):
        bad = made([INPUT, NEG], GOOD, tail=named + strings + origin + ints32(rows))
        assert "origins that do not fit the nodes" in refuse(sealed(bad))
    lost = uint(1) + (uint(2) + uint(0) + uint(1) + integer(1))
    bad = made([INPUT, NEG], GOOD, tail=named + strings + lost + ints32([0, 0]))
    assert "an origin that refers to nothing" in refuse(sealed(bad))


def spoil_plan(change: Callable[[Lir], None]) -> str:
    lir = planned()
    change(lir)
    return refuse(to_bytes(lir))


def test_plans_are_checked() -> None:
    def slot(lir: Lir, kind: str) -> Slot:
        return next(s for s in lir.slots.values() if s.kind == kind)

    def outside(lir: Lir) -> None:
        lir.arena_size = 64

    def too_small(lir: Lir) -> None:
        slot(lir, "output").size -= 1

    def nowhere(lir: Lir) -> None:
        slot(lir, "input").offset = None

    def backwards(lir: Lir) -> None:
        slot(lir, "arena").first = 10**6

    def of_an_alias(lir: Lir) -> None:
        aliases = [v for v, s in lir.slots.items() if s.kind == "alias"]
        lir.slots[aliases[1]].root = aliases[0]

    def other_rank(lir: Lir) -> None:
        alias = slot(lir, "alias")
        assert alias.view is not None
        alias.view = dataclasses.replace(alias.view, strides=(1,))

    def scratch(lir: Lir) -> None:
        lir.scratch[3] = (lir.arena_size, 1)

    assert "outside the arena" in spoil_plan(outside)
    assert "a slot that does not fit" in spoil_plan(too_small)
    assert "a slot that does not fit" in spoil_plan(nowhere)
    assert "a slot that does not fit" in spoil_plan(backwards)
    assert "an alias of something without memory" in spoil_plan(of_an_alias)
    assert "a view of another rank" in spoil_plan(other_rank)
    assert "outside the arena" in spoil_plan(scratch)


@pytest.mark.parametrize("policy", ["direct", "fusable"])
def test_hir_keeps_its_fusion_policy(policy: str) -> None:
    module = GraphModule.define(
        "m", lambda g: g.linear(g.input("x", [2, 4]), g.param("w", [4, 4])), policy
    )
    hir = module.as_hir()
    assert hir is not None
    assert from_bytes(to_bytes(hir)).fusion_policy.value == policy
    assert from_bytes(to_bytes(module)).as_hir().fusion_policy.value == policy
