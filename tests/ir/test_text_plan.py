"""LIR as text: printed, parsed back exactly, and refused where the plan is wrong."""

from __future__ import annotations

import re

import pytest

import rlx
from rlx.errors import ParseError
from rlx.ir import serial
from rlx.ir.text import is_lir, parse_lir, print_lir


def planned(device: str = "cpu") -> rlx.Lir:
    """Views, a state, two results of one node, work on parameters and a dynamic dim."""
    g = rlx.Graph("t")
    x = g.input("x", ["n", 8])
    with g.block("top"):
        h = g.matmul(x, g.param("w", [8, 6]))
        left, right = g.narrow(h, axis=1, start=0, length=2), g.narrow(h, 1, 2, 4)
        values, places = g.top_k(right, k=2)
        kept = g.state_update(g.state("s", [16, 2]), g.add(left, values), axis=0, start=0)
    g.set_outputs([values, places, g.narrow(kept, 0, 0, "n")], names=["v", "p", "s"])
    binding = rlx.DimBinding().set_dynamic("n", 16)
    lir = rlx.Session(device).compile(g, {"binding": binding}).executable.lir
    assert isinstance(lir, rlx.Lir)
    return lir


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_what_was_printed_is_read_back(device: str) -> None:
    lir = planned(device)
    text = print_lir(lir)
    assert is_lir(text)
    again = parse_lir(text)
    assert print_lir(again) == text
    assert serial.to_bytes(again) == serial.to_bytes(lir)
    kinds = {slot.kind for slot in again.slots.values()}
    assert {"arena", "input", "output", "param", "state", "alias"} <= kinds


def test_an_offset_may_be_changed() -> None:
    lir = planned()
    text = print_lir(lir)
    size = lir.arena_size
    wider = text.replace(f"lir {size} ", f"lir {size + 4096} ", 1)
    moved = re.sub(r"(%\d+ arena \d+) at \d+", rf"\1 at {size}", wider, count=1)
    assert moved != wider
    again = parse_lir(moved)
    assert again.arena_size == size + 4096
    assert sum(slot.offset == size for slot in again.slots.values()) == 1


@pytest.mark.parametrize(
    ("pattern", "by", "message"),
    [
        (r"(%\d+ input \d+) at \d+", r"\1 at 99999999", "a slot outside the arena"),
        (r"(%\d+ input) \d+", r"\1 1", "too few bytes; got 1"),
        (r"(%\d+) input", r"\1 heap", "unknown kind of slot; got heap"),
        (r"life \[(\d+), (\d+)\]", r"life [\2, 99999]", "not a live range"),
        (r"%(\d+) input", r"%x input", "no such value"),
        (r"\n *%\d+ input [^\n]*", "", "values without a slot; got %0"),
        (
            r"(%\d+ scratch|%\d+ arena) (\d+)",
            r"\1 at \2",
            "expected bytes|expected an int|unexpected",
        ),
        (r"\}\n\}\n$", "}\n}\nmore", "expected the end of the text"),
    ],
)
def test_plans_that_are_wrong(pattern: str, by: str, message: str) -> None:
    text = print_lir(planned())
    head, plan = text.split("plan {")
    wrong = re.sub(pattern, by, plan, count=1)
    assert wrong != plan
    with pytest.raises(ParseError, match=message):
        parse_lir(f"{head}plan {{{wrong}", "edited.lir")


def test_two_live_values_share_no_bytes() -> None:
    lir = planned()
    text = print_lir(lir)
    outputs = [lir.slots[v] for v in lir.outputs]
    first, second = outputs[0], outputs[1]
    one = f"output {second.size} at {second.offset} "
    assert text.count(one) == 1
    with pytest.raises(ParseError, match="two live values share bytes"):
        parse_lir(text.replace(one, f"output {second.size} at {first.offset} "))


def chain() -> rlx.Lir:
    """x → a matmul → its square root, in place → a matmul with scratch memory → the output."""
    g = rlx.Graph("chain")
    h = g.matmul(g.input("x", [64, 96]), g.param("w", [96, 96]))
    y = g.matmul(g.softmax(h), g.param("v", [96, 64]))
    g.set_outputs({"y": g.sum(y, 1)})
    lir = rlx.Session("reference").compile(g).executable.lir
    assert isinstance(lir, rlx.Lir)
    return lir


def arena(lir: rlx.Lir) -> list[tuple[str, int, int, int, int]]:
    """Label, size, offset and life of the values in the arena, in order."""
    found = []
    for value, slot in lir.slots.items():
        if slot.kind == "arena":
            assert slot.offset is not None
            found.append((f"{value}", slot.size, slot.offset, slot.first, slot.last))
    return found


def test_lives_that_overlap_are_refused_whatever_the_plan_says_of_them() -> None:
    lir = chain()
    text = print_lir(lir)
    parse_lir(text)
    (one, size, offset, first, last), (two, size_two, offset_two, second, _) = arena(lir)[:2]
    assert last == second  # the second reads the first
    line = f"{two} arena {size_two} at {offset_two} "
    # a result over its operand, by an op that reads other elements while it writes
    over = text.replace(line, f"{two} arena {size_two} at {offset} ")
    assert offset_two != offset and over != text
    with pytest.raises(ParseError, match=f"two live values share bytes; got {one} and {two}"):
        parse_lir(over)
    # a life that ends before its last reader
    shown = f"{one} arena {size} at {offset} life [{first}, {last}]"
    assert shown in text
    with pytest.raises(ParseError, match="a value is read after its life"):
        parse_lir(over.replace(shown, f"{one} arena {size} at {offset} life [{first}, {first}]"))
    # a life that begins before its node
    with pytest.raises(ParseError, match=f"its life begins with node {first}"):
        parse_lir(text.replace(shown, shown.replace(f"[{first},", "[0,")))
    # scratch memory over a live value
    scratch = f"    {two} scratch 64 at {offset}\n  }}\n}}\n"
    with pytest.raises(ParseError, match="the scratch memory of"):
        parse_lir(text.removesuffix("  }\n}\n") + scratch)


def test_an_alias_stays_inside_its_root() -> None:
    text = print_lir(planned("reference"))
    line = re.search(r"alias \d+ of %\d+ offset \(2\) strides \[6, 1\]", text)
    assert line is not None
    static = rlx.Graph("v")
    x = static.exp(static.input("x", [4, 6]))
    static.set_outputs({"y": static.exp(static.narrow(x, 1, 2, 4))})
    shown = print_lir(rlx.Session("reference").compile(static, _PLAIN).executable.lir)
    parse_lir(shown)
    assert "offset (2) strides [6, 1]" in shown
    for wrong in ("offset (3) strides [6, 1]", "offset (2) strides [7, 1]"):
        with pytest.raises(ParseError, match="a view beyond its root"):
            parse_lir(shown.replace("offset (2) strides [6, 1]", wrong))
    with pytest.raises(ParseError, match="not a stride for each axis"):
        parse_lir(shown.replace("strides [6, 1]", "strides [6]"))


_PLAIN = {"profile": rlx.CompileProfile.preset("debug")}


def test_a_plan_without_scratch_memory_that_a_kernel_needs_is_refused() -> None:
    g = rlx.Graph("t")
    g.set_outputs(g.top_k(g.matmul(g.input("x", [64, 300]), g.param("w", [300, 500])), k=3)[0])
    backend = rlx.Device("cpu").backend
    text = print_lir(rlx.Session("cpu").compile(g).executable.lir)
    backend.compile(parse_lir(text), rlx.CompileOptions())
    without = re.sub(r"\n *%\d+(\.\d+)? scratch [^\n]*", "", text)
    assert without != text
    with pytest.raises(rlx.VerifyError, match=r"too little scratch memory.*got 0 bytes"):
        backend.compile(parse_lir(without), rlx.CompileOptions())


def test_the_text_of_plans_is_public() -> None:
    assert rlx.parse_lir is parse_lir and rlx.print_lir is print_lir
