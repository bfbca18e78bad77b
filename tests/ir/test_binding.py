"""Bindings: static sizes, dynamic dims, and what cannot be."""

from __future__ import annotations

import pytest

import rlx.ir.ops  # noqa: F401
from rlx.errors import BindingError
from rlx.ir.binding import DimBinding, UpTo, bind_graph, require_bound
from rlx.ir.dim import sym
from rlx.ir.graph import Graph


def test_sizes_and_the_product_they_imply() -> None:
    b = DimBinding.batch_seq(2, 128)
    assert b.get("rows") == 256
    assert b.get(sym.BATCH) == 2
    assert b.get("past_seq") is None
    assert DimBinding.batch_past_seq(1, 64).get("past_seq") == 64


def test_order_does_not_matter() -> None:
    a = DimBinding().set("x", 1).set("a", 2)
    b = DimBinding(a=2, x=1)
    assert a == b
    assert hash(a) == hash(b)
    assert list(a) == ["a", "x"]


def test_a_symbol_has_one_size() -> None:
    b = DimBinding(batch=2)
    b.set("batch", 2)
    with pytest.raises(BindingError, match="two sizes"):
        b.set("batch", 3)
    with pytest.raises(BindingError, match="two sizes"):
        DimBinding(batch=2, seq=4).set("rows", 9)
    with pytest.raises(BindingError, match="two sizes"):
        DimBinding(rows=9, batch=2).set("seq", 4)
    assert b.with_size("batch", 3).get("batch") == 3
    assert b.get("batch") == 2


@pytest.mark.parametrize("size", [-1, True, "4", None, UpTo(0), UpTo(-3)])
def test_sizes_that_are_none(size: object) -> None:
    with pytest.raises(BindingError):
        DimBinding().set("n", size)  # type: ignore[arg-type]
    with pytest.raises(BindingError, match="plain symbol"):
        DimBinding().set(sym.BATCH * 2, 4)  # type: ignore[arg-type]


def model() -> Graph:
    g = Graph("m")
    x = g.input("x", ["batch", "seq", 8])
    cache = g.state("cache", ["batch", 32, 8])
    kept = g.state_update(cache, x, axis=1, start="past_seq")
    seen = g.narrow(kept, 1, 0, "past_seq + seq")
    flat = g.reshape(x, ["rows", 8])
    g.set_outputs({"seen": g.sum(seen, 1), "flat": flat})
    return g


def test_binding_keeps_ids_edges_names_and_outputs() -> None:
    g = model()
    h = bind_graph(g, DimBinding(batch=1, seq=4).set_dynamic("past_seq", 28))
    assert [n.id for n in h.nodes] == [n.id for n in g.nodes]
    edges = [[(v.node.id, v.index) for v in n.inputs] for n in g.nodes]
    assert [[(v.node.id, v.index) for v in n.inputs] for n in h.nodes] == edges
    assert h.output_names == g.output_names
    assert str(h.outputs[1].shape) == "[4, 8] f32"
    assert h.dynamic == {"past_seq": 28}
    assert h.nodes[3].op.length == sym.PAST_SEQ + 4  # type: ignore[attr-defined]
    assert g.dynamic == {}
    require_bound(h)


def test_symbols_neither_bound_nor_dynamic_are_listed() -> None:
    with pytest.raises(BindingError) as caught:
        require_bound(bind_graph(model(), DimBinding(batch=1)))
    assert "past_seq, seq" in str(caught.value)
    assert "x (seq)" in str(caught.value)


def test_dynamic_has_the_alias_live() -> None:
    binding = DimBinding(batch=1).set_dynamic("past_seq", 28)
    assert binding == DimBinding(batch=1).set_live("past_seq", 28)
    assert binding.dynamic == binding.live == {"past_seq": 28}
    assert binding.sizes == {"batch": 1} and binding.get("past_seq") == UpTo(28)
    g = Graph("g")
    g.live = {"seq": 8}
    assert g.dynamic == g.live == {"seq": 8}
    with pytest.raises(BindingError, match="an upper bound is a positive int"):
        DimBinding().set_dynamic("seq", 0)
