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
    binding = rlx.DimBinding().set_live("n", 16)
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


def test_a_place_may_be_changed() -> None:
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
        (r"(%\d+ input \d+) at \d+", r"\1 at 99999999", "a place outside the arena"),
        (r"(%\d+ input) \d+", r"\1 1", "too few bytes; got 1"),
        (r"(%\d+) input", r"\1 heap", "unknown kind of place; got heap"),
        (r"life \[(\d+), (\d+)\]", r"life [\2, 99999]", "not a life"),
        (r"%(\d+) input", r"%x input", "no such value"),
        (r"\n *%\d+ input [^\n]*", "", "values without a place; got %0"),
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


def test_two_values_in_one_place() -> None:
    lir = planned()
    text = print_lir(lir)
    outputs = [lir.slots[v] for v in lir.outputs]
    first, second = outputs[0], outputs[1]
    one = f"output {second.size} at {second.offset} "
    assert text.count(one) == 1
    with pytest.raises(ParseError, match="two values in one place"):
        parse_lir(text.replace(one, f"output {second.size} at {first.offset} "))
