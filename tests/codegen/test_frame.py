"""Variants by kinds of nodes are the variants by nodes: the same plan, the same program."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from random_graphs import graphs

from rlx import CompileOptions, DimBinding, GraphModule, Session, UpTo
from rlx.backends.cpu.assemble import list_program
from rlx.backends.cpu.listing import Listing
from rlx.codegen.driver_layout import ALONE, BARRIER
from rlx.codegen.target import Target
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.ir.serial import to_bytes
from rlx.passes.bind import bind_graph
from rlx.passes.mould import Variant
from rlx.passes.plan import plan
from rlx.runtime.template import Template
from rlx.specialize.manifest import BindingManifest

HOST = Target.host()


def by_node(template: Template, binding: DimBinding) -> Lir:
    """The same variant, every node bound and planned by itself."""
    bound = template.backend.rewrite_variant(bind_graph(template.result.graph, binding))
    return plan(bound, prepare=template.prepare, scratch=template.backend.scratch)


def rows(listing: Listing) -> dict[str, object]:
    found = {name: getattr(listing, name) for name in listing.__dataclass_fields__}
    found["marks"] = [listing.marks[i] for i in range(len(listing))]
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in found.items()}


def check(template: Template, binding: DimBinding) -> Lir:
    options = CompileOptions(binding=binding)
    lir, wanted = template.with_options(options).plan({}), by_node(template, binding)
    told, listed = list_program(lir, HOST, 2), list_program(wanted, HOST, 2)
    assert BindingManifest.of(lir) == BindingManifest.of(wanted)
    assert lir.output_phases == wanted.output_phases
    new, old = rows(told.listing), rows(listed.listing)
    for name, column in old.items():
        if name != "constants":
            assert new[name] == column, name
    pairs = zip(told.listing.constants, listed.listing.constants, strict=True)
    assert all(a.tobytes() == b.tobytes() for a, b in pairs)
    assert list(told.kernels) == list(listed.kernels)
    assert to_bytes(lir) == to_bytes(wanted)
    return lir


def decoder(layers: int = 3) -> GraphModule:
    """A cache, rope, views of a fused product, and an output that is a view."""

    def layer(g: GraphModule, x: object, i: int) -> object:
        def w(part: str, *dims: int) -> object:
            return g.param(f"{part}.{i}", list(dims))

        cos, sin = g.as_hir().find("cos"), g.as_hir().find("sin")
        h = g.rms_norm(x, w("norm", 64))
        parts = [g.linear(h, w(p, 64, 64), transposed=True) for p in "qkv"]
        q, k = (g.qk_norm_rope(y, w(n, 16), cos, sin, head_dim=16, offset="past_seq")
                for y, n in zip(parts, ("qn", "kn"), strict=False))  # fmt: skip
        kept = [
            g.cache_append(g.state(f"{n}.{i}", [1, 128, 64], "f16"), y, start="past_seq", axis=1)
            for n, y in (("keys", k), ("values", parts[2]))
        ]
        h = g.attention(q, *kept, num_heads=4, num_kv_heads=4, head_dim=16, mask_kind="causal")
        return x + g.linear(h, w("o", 64, 64), transposed=True)

    def build(g: GraphModule) -> object:
        x = g.embedding(g.input("ids", [1, "seq"], "i32"), g.param("embed", [50, 64]))
        g.param("cos", [128, 8])
        g.param("sin", [128, 8])
        for i in range(layers):
            x = g.named(f"blk.{i}", lambda b, x=x, i=i: layer(b, x, i))
        last = g.hir_mir("narrow", [x], axis=1, start=x.shape.dims[1] - 1, length=1)
        return {"logits": g.linear(last, g.param("head", [50, 64]), transposed=True), "last": last}

    return GraphModule.define("decoder", build)


SIZES = [
    {"seq": 1, "past_seq": UpTo(20)},
    {"seq": 1, "past_seq": UpTo(90)},
    {"seq": 1, "past_seq": 0},
    {"seq": 1, "past_seq": 17},
    {"seq": UpTo(8), "past_seq": UpTo(64)},
    {"seq": UpTo(64), "past_seq": UpTo(64)},
    {"seq": 5, "past_seq": 3},
    {"seq": 6, "past_seq": 4},
    {"seq": 48, "past_seq": UpTo(50)},
    {"seq": 49, "past_seq": UpTo(51)},
]


def test_variants_of_a_decoder_are_those_made_node_by_node() -> None:
    template = Session("cpu").template(decoder())
    made = [check(template, DimBinding({"batch": 1, **sizes})) for sizes in SIZES]
    assert all(isinstance(lir, Variant) for lir in made)
    moulds = {id(lir.mould) for lir in made if isinstance(lir, Variant)}
    assert len(moulds) < len(made), "sizes alone must not need another structure"


def test_a_new_variant_makes_no_graph_and_no_code() -> None:
    from rlx.codegen.jit import counters

    template = Session("cpu").template(decoder())

    def compiled(past: int) -> Variant:
        binding = DimBinding({"batch": 1, "seq": 1, "past_seq": UpTo(past)})
        made = template.with_options(CompileOptions(binding=binding))
        executable = made.backend.compile(lir := made.plan({}), made.options)
        assert executable.manifest == BindingManifest.of(lir)
        assert isinstance(lir, Variant)
        return lir

    compiled(20)
    before = counters.compilations
    later = compiled(30)
    assert "graph" not in vars(later) and "slots" not in vars(later)
    assert counters.compilations == before


def test_threads_may_ask_for_variants_at_once() -> None:
    template = Session("cpu").template(decoder())

    def listed(past: int) -> dict[str, object]:
        binding = DimBinding({"batch": 1, "seq": 1 + past % 2, "past_seq": UpTo(past)})
        lir = template.with_options(CompileOptions(binding=binding)).plan({})
        return rows(list_program(lir, HOST, 2).listing)

    pasts = list(range(20, 60))
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(listed, pasts))
    assert together == [listed(past) for past in pasts]


def test_more_layers_have_no_more_kinds() -> None:
    few, many = (Session("cpu").template(decoder(n))._moulds.kinds for n in (3, 9))
    assert len(few.nodes) == len(many.nodes)
    assert len(few.of_node) < len(many.of_node)


def test_values_without_elements() -> None:
    g = Graph("empty")
    x = g.input("x", ["n", 8])
    for _ in range(3):
        x = g.softmax(g.relu(x) + x)
    g.set_outputs(x)
    template = Session("cpu").template(g)
    for n in (4, 0, 1, 0, 7):
        check(template, DimBinding(n=n))


def test_copies_stand_where_a_variant_needs_them() -> None:
    """A transposed operand of size 1 is row-major: its variant has no copy, and another mould."""
    g = Graph("copies")
    x = g.input("x", ["n", "m", 8])
    turned = g.reshape(g.transpose(x, (1, 0, 2)), ["m * n", 8])
    g.set_outputs(g.softmax(turned), g.transpose(x, (1, 0, 2)), names=["y", "z"])
    template = Session("cpu").template(g)
    sizes = [(3, 2), (1, 4), (3, 1), (5, 4), (1, 1), (1, 6), (2, 2)]
    made = [check(template, DimBinding(n=n, m=m)) for n, m in sizes]
    assert len({len(lir.graph) for lir in made}) > 1


def test_a_symbol_left_open_is_an_error() -> None:
    from rlx.errors import BindingError

    template = Session("cpu").template(decoder())
    with pytest.raises(BindingError, match="past_seq"):
        template.with_options(CompileOptions(binding=DimBinding(batch=1, seq=1))).plan({})


@given(graphs(max_ops=8), st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), max_size=3))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_graphs(graph: Graph, sizes: list[tuple[int, int]]) -> None:
    template = Session("cpu").template(graph)
    for n, m in sizes:
        check(template, DimBinding(n=n, m=m))
        check(template, DimBinding().set_live("n", n).set_live("m", m))


@pytest.mark.parametrize(("rows", "alone"), [(1, True), (512, False)])
def test_small_steps_are_left_to_one_worker_without_barriers(rows, alone):
    g = Graph("steps")
    g.set_outputs(g.cumsum(g.softmax(g.input("x", [rows, 1024]))))
    f = Session("cpu").compile(g, {"threads": 2})
    flags = f.executable.listing.flags
    assert len(flags) == 2
    assert ((flags & ALONE) != 0).tolist() == [alone] * 2
    assert ((flags & BARRIER) != 0).tolist() == [not alone, False]
