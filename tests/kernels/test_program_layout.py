"""Programs by node classes are what lowering every node by itself gives: launch by launch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from random_graphs import graphs

from rlx import CompileOptions, DimBinding, GraphModule, Session, UpTo
from rlx.backends.cpu.compiler import Compiler
from rlx.backends.cpu.executor.control_block import BARRIER, SOLO
from rlx.backends.cpu.lowering import (
    TABLE,
    ArgAddress,
    ConstantPointer,
    Context,
    KernelLaunch,
    NodeNumber,
    OpLowering,
    Pointer,
    Scratch,
    Status,
    lower_graph,
)
from rlx.backends.cpu.relocatable import ABSOLUTE, ARENA, ARGS, CONSTANT, STATUS, RelocatableProgram
from rlx.errors import CodegenError
from rlx.ir.attrs import Body
from rlx.ir.binding import bind_graph
from rlx.ir.dim import Dim, expand
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir, aligned
from rlx.ir.op import lookup
from rlx.ir.serial import to_bytes
from rlx.ir.text import parse_lir, print_lir
from rlx.llvm.target import Target
from rlx.passes.plan import Variant, plan
from rlx.runtime.template import PlanCache, Template
from rlx.specialize.manifest import BindingManifest

HOST = Target.host()


# -- the oracle: every node lowered in its graph, args resolved one by one ------------------------


class ByNode:
    """The launches of a planned graph, and each arg as a tuple that says what it is."""

    def __init__(self, lir: Lir, target: Target, workers: int) -> None:
        self.lir = lir
        self.launches = lower_graph(Context(lir, target, workers))
        self.starts = [0]
        for launch in self.launches:
            self.starts.append(self.starts[-1] + len(launch.args))
        outputs = zip(lir.graph.output_names, lir.outputs, strict=True)
        self.outputs = {value: name for name, value in outputs}

    def args(self) -> Iterator[tuple[Any, ...]]:
        for launch in self.launches:
            for arg in launch.args:
                yield self._arg(arg)

    def _arg(self, arg: Any) -> tuple[Any, ...]:
        if isinstance(arg, int):
            return ("number", arg if arg < 1 << 63 else arg - (1 << 64))
        if isinstance(arg, Status):
            return ("status", 0)
        if isinstance(arg, NodeNumber):
            own = arg.node.graph is self.lir.graph
            return ("number", arg.node.id + 1) if own else ("nested", arg.node.op.name)
        if isinstance(arg, ArgAddress):
            place = next(i for i, s in enumerate(self.launches) if s is arg.launch)
            return ("arg", 8 * (self.starts[place] + arg.index))
        if isinstance(arg, Scratch):
            return ("arena", expand(self.lir.scratch[arg.node.id][0] + arg.offset + arg.shift))
        if isinstance(arg, ConstantPointer):
            return ("constant", arg.data.array.tobytes(), expand(arg.shift))
        if isinstance(arg, Pointer):
            return self._pointer(arg)
        return ("number", expand(arg))

    def _pointer(self, arg: Pointer) -> tuple[Any, ...]:
        root, slot = self.lir.home(arg.value)
        view = self.lir.slots[arg.value].view
        shift: Dim = arg.shift + (0 if view is None else view.offset)
        offset = shift * root.shape.dtype.bytes
        if slot.kind == "constant":
            return ("constant", root.node.op.data.array.tobytes(), expand(offset))
        if slot.kind == "arena":
            assert slot.offset is not None
            return ("arena", expand(slot.offset + offset))
        name = self.outputs[root] if slot.kind == "output" else root.node.name
        return (slot.kind, name, expand(offset))

    def barriers(self) -> list[bool]:
        """A barrier before each launch that meets one since the last barrier."""
        after, since = [False] * len(self.launches), list[int]()
        for i, launch in enumerate(self.launches):
            if any(self._meet(launch, self.launches[k]) for k in since):
                after[i - 1], since = True, []
            since.append(i)
            if launch.fence:
                after[i], since = True, []
        return after

    def _meet(self, one: KernelLaunch, other: KernelLaunch) -> bool:
        if one.solo and other.solo:
            return False
        a, b = self._memory(one), self._memory(other)
        pairs = [(a[0], b[1]), (a[1], b[1]), (a[1], b[0])]
        return any(
            s[0] is t[0] and s[1] < t[2] and t[1] < s[2] for x, y in pairs for s in x for t in y
        )

    def _memory(self, launch: KernelLaunch) -> tuple[list[Any], list[Any]]:
        found: tuple[list[Any], list[Any]] = [], []
        for values, spans in zip((launch.reads, launch.writes), found, strict=True):
            for value in values:
                root, slot = self.lir.home(value)
                if slot.kind in ("param", "constant"):
                    continue
                if slot.offset is not None:
                    spans.append(("arena", slot.offset, slot.offset + aligned(slot.size)))
                if slot.kind != "arena":
                    spans.append((root, 0, 1))
        if launch.uses_scratch and launch.node is not None and launch.node.id in self.lir.scratch:
            offset, size = self.lir.scratch[launch.node.id]
            found[1].append(("arena", offset, offset + size))
        return found


def args_of(program: RelocatableProgram) -> list[tuple[Any, ...]]:
    """Every arg of a program in the oracle's args."""
    names = {ABSOLUTE: "number", ARENA: "arena", STATUS: "status", ARGS: "arg"}

    def based(base: int, offset: Dim) -> tuple[Any, ...]:
        if base >= CONSTANT:
            return ("constant", program.constants[base - CONSTANT].tobytes(), offset)
        return (names[base], offset)

    found = [
        based(int(base), int(offset))
        for base, offset in zip(program.bases, program.addends, strict=True)
    ]
    for arg, external, addend in program.relocations:
        found[arg] = (*external, addend)
    for arg, number in program.patches:
        base, external, offset = program.dynamic_args[number]
        found[arg] = based(base, offset) if external is None else (*external, offset)
    return found


def rows(program: RelocatableProgram) -> dict[str, object]:
    found = {name: getattr(program, name) for name in program.__dataclass_fields__}
    found["metadata"] = [program.metadata[i] for i in range(len(program))]
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in found.items()}


def check_program(
    lir: Lir, compiler: Compiler | None = None, workers: int = 2
) -> RelocatableProgram:
    """The program of a plan against the oracle."""
    program, kernels = (compiler or Compiler(HOST)).compile_program(lir, workers)
    wanted = ByNode(lir, HOST, workers)
    assert program.starts.tolist() == wanted.starts
    nested = {n: r.op for n, r in program.error_sites.items() if n > len(lir.graph)}
    pairs = zip(args_of(program), wanted.args(), strict=True)
    for i, (got, expected) in enumerate(pairs):
        if expected[0] == "nested":
            assert nested[got[1]] == expected[1]
        else:
            assert got == expected, i
    labels = [(s.label, s.node.id, s.flops, s.bytes) for s in wanted.launches if s.node]
    assert [tuple(mark) for mark in program.metadata] == labels
    assert ((program.flags & BARRIER) != 0).tolist() == wanted.barriers()
    assert ((program.flags & SOLO) != 0).tolist() == [s.solo for s in wanted.launches]
    numbers: dict[Any, int] = {}
    for launch in wanted.launches:
        if launch.spec is not None:
            numbers.setdefault(launch.spec, len(numbers))
    calls = [-1 if s.spec is None else numbers[s.spec] for s in wanted.launches]
    if len(set(program.kernels)) == len(numbers):  # else different specs have the same code
        assert program.calls.tolist() == calls
    assert set(program.kernels) == set(kernels)
    hosts = [i for i, s in enumerate(wanted.launches) if s.host is not None]
    assert sorted(program.hosts) == hosts
    return program


def plan_alone(template: Template, binding: DimBinding) -> Variant:
    """The same variant, planned from its own bound graph."""
    bound = template.backend.rewrite_variant(bind_graph(template.result.graph, binding))
    return plan(bound, prepare=template.prepare, scratch=template.backend.scratch)


def check(template: Template, binding: DimBinding) -> Lir:
    options = CompileOptions(binding=binding)
    lir, wanted = template.with_options(options).plan({}), plan_alone(template, binding)
    assert BindingManifest.of(lir) == BindingManifest.of(wanted)
    assert lir.output_phases == wanted.output_phases
    new, old = rows(check_program(lir)), rows(check_program(wanted))
    for name, column in old.items():
        if name != "constants":
            assert new[name] == column, name
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


def test_variants_of_a_decoder() -> None:
    template = Session("cpu").template(decoder())
    made = [check(template, DimBinding({"batch": 1, **sizes})) for sizes in SIZES]
    templates = {id(lir.template) for lir in made if isinstance(lir, Variant)}
    assert len(templates) < len(made), "sizes solo must not need another structure"


def test_a_new_variant_makes_no_graph_and_no_code() -> None:
    from rlx.llvm.jit import counters

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
    template, compiler = Session("cpu").template(decoder()), Compiler(HOST)

    def listed(past: int) -> dict[str, object]:
        binding = DimBinding({"batch": 1, "seq": 1 + past % 2, "past_seq": UpTo(past)})
        lir = template.with_options(CompileOptions(binding=binding)).plan({})
        return rows(compiler.compile_program(lir, 2).program)

    pasts = list(range(20, 60))
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(listed, pasts))
    assert together == [listed(past) for past in pasts]


def test_more_layers_have_no_more_classes() -> None:
    few, many = (Session("cpu").template(decoder(n))._plans.classes for n in (3, 9))
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
    """A transposed operand of size 1 is row-major: no copy, another template."""
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


@pytest.mark.parametrize(("rows", "solo"), [(1, True), (512, False)])
def test_small_steps_are_left_to_one_worker_without_barriers(rows, solo):
    g = Graph("steps")
    g.set_outputs(g.cumsum(g.softmax(g.input("x", [rows, 1024]))))
    f = Session("cpu").compile(g, {"threads": 2})
    flags = f.executable.relocatable.flags
    assert len(flags) == 2
    assert ((flags & SOLO) != 0).tolist() == [solo] * 2
    assert ((flags & BARRIER) != 0).tolist() == [not solo, False]


# -- nodes that a class cannot speak for, and plans from elsewhere --------------------------------


def recurrence(readers: bool) -> Graph:
    """Two recurrences whose last states are kept; with `readers` the old ones are read later."""
    g = Graph("recurrence")
    x = g.input("x", [1, "n", 2, 16])
    gate = g.input("gate", [1, "n", 2])
    for i in range(2):
        state = g.state(f"memory.{i}", [1, 2, 16, 16])
        x, last = g.gated_delta_net(x, x, x, gate, gate, state)
        if readers:
            x = g.add(x, g.sum(state))
        g.state_update(state, last, axis=0, start=0)
    g.set_outputs(x)
    return g


@pytest.mark.parametrize("readers", [False, True])
def test_launches_that_depend_on_neighbours(readers: bool) -> None:
    template = Session("cpu").template(recurrence(readers))
    for binding in (DimBinding(n=1), DimBinding(n=9), DimBinding().set_live("n", 12)):
        lir = check(template, binding)
        names = [lir.graph.nodes[mark.node].op.name for mark in check_program(lir).metadata]
        assert ("state_update" in names) == readers


def test_launches_of_nested_graphs() -> None:
    def cell(g: Graph, h: Any, i: Any, table: Any) -> list[Any]:
        row = g.gather(table, i, axis=0)
        return [g.tanh(g.add(g.add(h, row), g.constant(np.arange(5, dtype=np.float32)))), h]

    body = Graph("cell")
    shapes = [("h", [5], "f32"), ("i", [], "i64"), ("table", [7, 5], "f32")]
    body.set_outputs(cell(body, *[body.input(n, d, t) for n, d, t in shapes]))
    g = Graph("loop")
    h, table = g.input("h", [5]), g.input("table", [7, 5])
    found = []
    for name in ("first", "second"):
        which = g.input(name, ["n"], "i64")
        h, ys = g.scan(h, which, table, body=Body(body), n_carry=1, n_xs=1)
        found.append(ys)
    g.set_outputs([h, *found])
    template = Session("cpu").template(g)
    for binding in (DimBinding(n=3), DimBinding().set_live("n", 8), DimBinding().set_live("n", 9)):
        program = check_program(check(template, binding))
        nested = [r for n, r in program.error_sites.items() if n > len(template.result.graph)]
        assert [r.op for r in nested] == ["gather"] * len(nested) and nested


def test_a_lowering_may_use_its_own_node_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless its op says that it depends on neighbours."""
    first = TABLE["softmax"]

    def foreign(node: Any, ctx: Context) -> list[KernelLaunch]:
        launches = first.lower(node, ctx)
        other = Graph("other").input("x", [1])
        launches[0].args = [*launches[0].args, Pointer(other)]
        ctx.lir.slots[other] = ctx.lir.slots[node.output]
        return launches

    monkeypatch.setitem(
        TABLE, "softmax", OpLowering(foreign, first.when, first.scratch, first.strided)
    )
    g = Graph("g")
    g.set_outputs(g.softmax(g.input("x", [2, 8])))
    with pytest.raises(CodegenError, match="depends_on_neighbours"):
        Compiler(HOST).compile_program(plan(g), 1)


def test_a_plan_read_from_text_gives_the_same_program() -> None:
    for graph in (recurrence(True), recurrence(False)):
        template = Session("cpu").template(graph)
        options = CompileOptions(binding=DimBinding().set_live("n", 12))
        lir = template.with_options(options).plan({})
        again = parse_lir(print_lir(lir))
        assert not isinstance(again, Variant)
        found, wanted = rows(check_program(again)), rows(check_program(lir))
        for name in (
            "calls",
            "starts",
            "flags",
            "bases",
            "addends",
            "dynamic_args",
            "relocations",
            "patches",
        ):
            assert found[name] == wanted[name], name


def test_a_device_that_puts_in_nodes_of_its_own() -> None:
    """The classes are those of the rewritten graph; no plan template is kept for it."""

    def rewrite(graph: Graph) -> Graph:
        value = graph.outputs[0]
        graph.outputs[0] = graph.append(lookup("neg")(), (value,))
        return graph

    g = Graph("g")
    x = g.input("x", ["n", 8])
    for _ in range(4):
        x = g.softmax(x)
    g.set_outputs(x)
    plans = PlanCache(g, frozenset({"n"}), None, rewrite, lambda node: 0)
    for n in (3, 4):
        lir = plans.plan(DimBinding(n=n))
        assert [node.op.name for node in lir.graph.nodes][-2:] == ["softmax", "neg"]
        assert len(lir.template.classes.nodes) == 3, "input, softmax, neg"
        check_program(lir)


def softmaxes(count: int) -> Graph:
    g = Graph("g")
    x = g.input("x", [4, 8])
    for _ in range(count):
        x = g.softmax(x)
    g.set_outputs(x)
    return g


def test_equal_classes_of_two_graphs_are_lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    first = TABLE["softmax"]

    def counted(node: Any, ctx: Context) -> list[KernelLaunch]:
        calls.append(node)
        return first.lower(node, ctx)

    monkeypatch.setitem(
        TABLE, "softmax", OpLowering(counted, first.when, first.scratch, first.strided)
    )
    compiler = Compiler(HOST)
    for count in (2, 5):
        compiler.compile_program(plan(softmaxes(count)), 2)
    assert len(calls) == 1


def test_a_lowering_that_is_registered_anew_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, first = Compiler(HOST), TABLE["softmax"]

    def labelled(node: Any, ctx: Context) -> list[KernelLaunch]:
        launches = first.lower(node, ctx)
        launches[0].label = "mine"
        return launches

    before = compiler.compile_program(plan(softmaxes(2)), 2).program
    monkeypatch.setitem(
        TABLE, "softmax", OpLowering(labelled, first.when, first.scratch, first.strided)
    )
    after = compiler.compile_program(plan(softmaxes(2)), 2).program
    assert {m.label for m in after.metadata} == {"mine"} != {m.label for m in before.metadata}
