"""GraphModule: the handle on a program at any stage: HIR, MIR or LIR.

m = GraphModule.define("mlp", lambda g: g.linear(g.input("x", ["batch", 64]), w))
m.stage            # GraphStage.HIR
m.lower().stage    # GraphStage.MIR
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

from rlx.errors import InputError, OptionError, StageError
from rlx.ir.dtype import DTypeLike
from rlx.ir.graph import Graph
from rlx.ir.hir import REGISTERED, FusionPolicy, HirModule, lower
from rlx.ir.html import card
from rlx.ir.lir import Lir
from rlx.ir.node import Value
from rlx.ir.op import REGISTRY, Op
from rlx.ir.shape import ShapeLike
from rlx.ir.text import inspect_graph, print_graph
from rlx.ir.text.printer import inspect_lir
from rlx.ir.verify import require_results, verify
from rlx.support.gc_pause import without_gc

if TYPE_CHECKING:
    from rlx.ir.methods import BlockMethods
else:
    BlockMethods = object  # builder methods are delegated to the graph

__all__ = ["FusionPolicy", "GraphModule", "GraphStage", "as_module"]


class GraphStage(Enum):
    """The stage of a module: HIR, MIR or LIR."""

    HIR = "hir"
    MIR = "mir"
    LIR = "lir"

    def __str__(self) -> str:
        return self.name


_BUILDERS = frozenset({"append", "apply"})
_TO_BUILD = "build before planning: start with GraphModule.define, .hir or .mir, then compile"
_TO_HIR = "blocks are built before lower(): start with GraphModule.hir(name) or .define(name, …)"


class GraphModule(BlockMethods):
    """Holds exactly one of HIR (`HirModule`), MIR (`Graph`) and LIR (`Lir`).

    Every op and block is a method: `g.linear(x, w)`, `g.reshape(x, (2, -1))`. They reach the graph
    inside: blocks and ops at HIR, ops at MIR. Methods that lead to another stage or policy give a
    new module and leave this one as it is.
    """

    def __init__(
        self, held: HirModule | Graph | Lir, policy: FusionPolicy | str | None = None
    ) -> None:
        self._held: Any = held
        own = FusionPolicy.DIRECT
        if isinstance(held, HirModule):
            self._stage, own = GraphStage.HIR, held.fusion_policy
        else:
            self._stage = GraphStage.MIR if isinstance(held, Graph) else GraphStage.LIR
        self._policy = own if policy is None else FusionPolicy.of(policy)

    # -- ways in ------------------------------------------------------------------------------

    @staticmethod
    def hir(name: str = "module") -> GraphModule:
        """An empty module to build blocks on."""
        return GraphModule(HirModule(name))

    @staticmethod
    def mir(name: str = "module") -> GraphModule:
        """An empty module to build MIR ops on."""
        return GraphModule(Graph(name))

    @staticmethod
    def define(
        name: str,
        build: Callable[[GraphModule], Any],
        fusion_policy: FusionPolicy | str = FusionPolicy.DIRECT,
    ) -> GraphModule:
        """Build an HIR module with `build`, whose return values become the outputs."""
        if not callable(build):
            raise InputError(
                "not a function that builds a graph", where=f"define({name!r})",
                got=f"{type(build).__name__} {build!r:.40}", expected="a function of the module",
            )  # fmt: skip
        module = GraphModule(HirModule(name, fusion_policy))
        with without_gc():
            result = build(module)
        if result is not None:
            return module.finish_hir(result)
        if not module._held.outputs:
            raise InputError(
                "the function returned nothing", where=f"define({name!r})",
                expected="a value, several, or a mapping of names to values",
            )  # fmt: skip
        verify(module._held, after="define")
        return module

    @staticmethod
    def from_hir(graph: Graph) -> GraphModule:
        """A module at HIR from a graph that may contain blocks."""
        return GraphModule(HirModule.of(_require_graph(graph, "from_hir")))

    @staticmethod
    def from_mir(graph: Graph) -> GraphModule:
        """A module at MIR from a graph without blocks."""
        for node in _require_graph(graph, "from_mir").nodes:
            if node.op.is_block:
                raise StageError(
                    "the graph contains an HIR block", where="from_mir", got=str(node.op),
                    expected="MIR ops only", origin=node.origin,
                    hint="call GraphModule.from_hir(graph), then .lower()",
                )  # fmt: skip
        return GraphModule(lower(graph) if isinstance(graph, HirModule) else graph)

    from_graph = from_mir

    @staticmethod
    def from_lir(lir: Lir) -> GraphModule:
        """A module at LIR."""
        if not isinstance(lir, Lir):
            raise InputError("not a planned graph", where="from_lir", got=repr(lir), expected="Lir")
        return GraphModule(lir)

    # -- properties ---------------------------------------------------------------------------

    @property
    def stage(self) -> GraphStage:
        return self._stage

    @property
    def name(self) -> str:
        return str(self._held.name)

    @property
    def fusion_policy(self) -> FusionPolicy:
        """What `lower` makes of blocks; after that, what it made of them."""
        return self._policy

    def with_fusion_policy(self, policy: FusionPolicy | str) -> GraphModule:
        """The same HIR under another policy; both handles build on one graph."""
        return GraphModule(self._require("with_fusion_policy", GraphStage.HIR), policy)

    def copy(self) -> GraphModule:
        """The same program at the same stage and under the same policy, to change on its own."""
        return GraphModule(self._held.copy(), self._policy)

    # -- stages -------------------------------------------------------------------------------

    def lower(self) -> GraphModule:
        """HIR to MIR; a module at another stage is given back unchanged."""
        if self._stage is not GraphStage.HIR:
            return self
        graph = lower(self._held, self._policy)
        verify(graph, after="lower_hir")
        return GraphModule(graph, self._policy)

    def as_hir(self) -> HirModule | None:
        """The HIR, or None at another stage. A handle of another policy than its graph's gives a
        copy of that policy."""
        if self._stage is not GraphStage.HIR or self._policy is self._held.fusion_policy:
            return self._held if self._stage is GraphStage.HIR else None
        other: HirModule = self._held.copy()
        other.fusion_policy = self._policy
        return other

    def as_mir(self) -> Graph | None:
        """The MIR, at LIR that of the plan; None at HIR."""
        if self._stage is GraphStage.HIR:
            return None
        graph: Graph = self._held if self._stage is GraphStage.MIR else self._held.graph
        return graph

    def as_lir(self) -> Lir | None:
        """The LIR, or None at another stage."""
        return self._held if self._stage is GraphStage.LIR else None

    def into_mir(self) -> Graph:
        """The MIR, lowered when needed."""
        graph = self.lower().as_mir()
        assert graph is not None  # nothing is at HIR after lower()
        return graph

    as_graph = as_mir
    into_hir = as_hir
    into_lir = as_lir
    into_graph = into_mir

    # -- building -----------------------------------------------------------------------------

    def _require(self, where: str, *stages: GraphStage) -> Any:
        if self._stage in stages:
            return self._held
        raise StageError(
            f"{self.name} is at stage {self._stage}", where=where, got=self._stage,
            expected=" or ".join(map(str, stages)),
            hint=_TO_HIR if GraphStage.MIR not in stages else _TO_BUILD,
        )  # fmt: skip

    def input(self, name: str, shape: ShapeLike, dtype: DTypeLike | None = None) -> Value:
        """A tensor given with every run."""
        return self._building("input").input(name, shape, dtype)

    def param(self, name: str, shape: ShapeLike, dtype: DTypeLike | None = None) -> Value:
        """A weight: given once, shared by all variants."""
        return self._building("param").param(name, shape, dtype)

    def state(self, name: str, shape: ShapeLike, dtype: DTypeLike | None = None) -> Value:
        """A named buffer that survives runs and is updated in place by `state_update`."""
        return self._building("state").state(name, shape, dtype)

    def constant(self, value: Any, dtype: DTypeLike | None = None, name: str = "") -> Value:
        """A tensor known now. Python floats are f32, ints i32, unless a dtype is given."""
        return self._building("constant").constant(value, dtype, name)

    def _building(self, where: str) -> Graph:
        graph: Graph = self._require(where, GraphStage.HIR, GraphStage.MIR)
        return graph

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._held)})

    def __getattr__(self, name: str) -> Any:
        # builder methods of the graph inside; everything else of a module is an attribute above
        if name.startswith("_"):
            raise AttributeError(name)
        is_builder = name in REGISTRY or name in REGISTERED or name in _BUILDERS
        if self._stage is GraphStage.LIR and is_builder:
            self._require(name, GraphStage.HIR, GraphStage.MIR)
        if self._stage is GraphStage.MIR and name in REGISTERED and name not in REGISTRY:
            self._require(name, GraphStage.HIR)
        return getattr(self._held, name)

    def hir_mir(self, op: str | Op, inputs: Any = (), **attributes: Any) -> Any:
        """Any MIR op among the blocks of an HIR module."""
        return self._require("hir_mir", GraphStage.HIR).mir(op, inputs, **attributes)

    @contextmanager
    def block(self, name: str) -> Iterator[GraphModule]:
        """Nodes built inside belong to the block `name`, nested in the blocks around it."""
        with self._require("block", GraphStage.HIR, GraphStage.MIR).block(name):
            yield self

    def named(self, name: str, build: Callable[[GraphModule], Any]) -> Any:
        """The result of `build`; the nodes it builds belong to the block `name`."""
        with self.block(name):
            return build(self)

    def set_outputs(self, *values: Any, names: Sequence[str] = ()) -> GraphModule:
        """What a run returns: values, one list of values, or a mapping of names to values."""
        graph = self._require("set_outputs", GraphStage.HIR, GraphStage.MIR)
        graph.set_outputs(*values, names=names)
        return self

    def finish_hir(self, out: Any) -> GraphModule:
        """The finished HIR module: `out` (a value, several, or a mapping) are its outputs."""
        graph = self._require("finish_hir", GraphStage.HIR)
        graph.set_outputs(*(out if isinstance(out, (list, tuple)) else (out,)))
        require_results(graph)
        verify(graph, after="finish_hir")
        return self

    # -- to read ------------------------------------------------------------------------------

    def inspect(self) -> str:
        """A readable view of the current stage."""
        if self._stage is GraphStage.LIR:
            return inspect_lir(self._held)
        return inspect_graph(self._held)

    def __str__(self) -> str:
        return self.inspect() if self._stage is GraphStage.LIR else print_graph(self._held)

    def __repr__(self) -> str:
        return f"<GraphModule {self.name}: {self._stage}, {len(self)} nodes>"

    def _repr_html_(self) -> str:
        """What a notebook shows: inputs, outputs, and the program to unfold."""
        held = self._held
        graph: Graph = held.graph if isinstance(held, Lir) else held
        rows: dict[str, object] = {"nodes": len(self)}
        for source in ("input", "state"):
            rows |= {f"{source} {n.name}": n.output.shape for n in graph.sources(source)}
        params = graph.sources("param")
        if params:
            rows["params"] = len(params)
        outputs = zip(graph.output_names, graph.outputs, strict=True)
        rows |= {f"output {name}": value.shape for name, value in outputs}
        return card(f"{self.name}: {self._stage}", rows, str(self), "program")

    def __len__(self) -> int:
        """Nodes; blocks count as one at HIR."""
        return len(self._held)

    def __bool__(self) -> bool:
        return True  # also while it is empty


def as_module(graph: Graph | GraphModule) -> GraphModule:
    """A graph of any stage as a module."""
    if isinstance(graph, GraphModule):
        return graph
    if not isinstance(graph, Graph):
        raise OptionError(
            "not a graph", got=type(graph).__name__, expected="Graph or GraphModule",
            hint='rlx.GraphModule.define("name", build) makes one of a function',
        )  # fmt: skip
    is_hir = isinstance(graph, HirModule) or any(n.op.is_block for n in graph.nodes)
    return GraphModule.from_hir(graph) if is_hir else GraphModule.from_graph(graph)


def _require_graph(graph: object, where: str) -> Graph:
    if not isinstance(graph, Graph):
        raise InputError("not a graph", where=where, got=repr(graph), expected="a Graph")
    return graph


Graph.define = staticmethod(GraphModule.define)
Graph.hir = staticmethod(GraphModule.hir)
