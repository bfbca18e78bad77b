"""The op that makes random words: Philox4x32-10."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx import DTypeError, Graph, Session, Shape
from rlx.ir.philox import philox4x32

# the known-answer vectors of the authors' Random123 library (kat_vectors): counter, key, words
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def _graph() -> Graph:
    g = Graph("philox")
    words = [g.input(f"c{i}", Shape(["n"], "u32")) for i in range(4)]
    words += [g.input(f"k{i}", Shape(["n"], "u32")) for i in range(2)]
    return g.set_outputs(g.philox(*words))


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_the_op_gives_the_published_words(device: str) -> None:
    rows = np.array([[*c, *k] for c, k, _ in KNOWN], np.uint32)
    results = Session(device).compile(_graph()).run_in_order(list(rows.T.copy()))
    assert np.stack(results, -1).tolist() == [words for _, _, words in KNOWN]


def test_operands_broadcast() -> None:
    g = Graph("philox")
    row = g.input("row", Shape(["n", 1], "u32"))
    column = g.input("column", Shape([3], "u32"))
    zero = g.constant(np.uint32(0))
    g.set_outputs(g.philox(row, column, zero, zero, zero, zero))
    data = {"row": np.arange(5, dtype=np.uint32)[:, None], "column": np.arange(3, dtype=np.uint32)}
    counter = np.zeros((5, 3, 4), np.uint32)
    counter[..., 0], counter[..., 1] = data["row"], data["column"]
    expected = philox4x32(counter, np.zeros((5, 3, 2), np.uint32))
    for found in (rlx.evaluate(g, data), Session("cpu").compile(g).run(**data)):
        assert np.array_equal(np.stack(found, -1), expected)


def test_words_are_u32() -> None:
    g = Graph("philox")
    x = g.input("x", Shape([], "i32"))
    with pytest.raises(DTypeError, match="c0: words of another type"):
        g.philox(x, x, x, x, x, x)
