"""Binding: symbols become static sizes, or stay dynamic with an upper bound."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.errors import BindingError
from rlx.ir.binding import DimBinding, bind_op, require_known
from rlx.ir.dim import DERIVED
from rlx.ir.graph import Graph
from rlx.ir.op import Op
from rlx.ir.shape import Shape


def bind_graph(
    graph: Graph,
    binding: DimBinding | Mapping[str, int],
    symbols: frozenset[str] | None = None,
) -> Graph:
    """A copy with symbols replaced by sizes: ids, edges, names and outputs unchanged.

    Attributes and subgraphs are bound too. Dynamic symbols stay, and the graph records their upper
    bounds; unbound symbols stay as they are, unknown ones are an error. `symbols` are those of the
    graph, if already known; then the binding is not checked.
    """
    if not isinstance(binding, DimBinding):
        binding = DimBinding(binding)
    found = graph.symbols() if symbols is None else symbols
    used = {f for s in found for f in (DERIVED[s].symbols if s in DERIVED else {s})}
    if symbols is None:
        require_known(binding, used, graph.name)
    sizes = binding.sizes
    done: dict[tuple[int, tuple[Shape, ...]], tuple[Op, tuple[Shape, ...]]] = {}

    def bind(op: Op, shapes: tuple[Shape, ...]) -> tuple[Op, tuple[Shape, ...]]:
        key = (id(op), shapes)  # the graph keeps its ops alive, so ids are unique
        found = done.get(key)
        if found is None:
            bound = tuple([s.bind(sizes) for s in shapes])
            # a −1 cannot be inferred again once other dims are 0
            exact = op.replace(shape=shapes[0].dims) if op.name == "reshape" else op
            found = done[key] = bind_op(exact, sizes), bound
        return found

    new = graph.rebuild(bind)
    new.dynamic |= {s: bound for s, bound in binding.dynamic.items() if s in used}
    return new


def require_bound(graph: Graph) -> None:
    """Raise unless every symbol is dynamic; the error lists the symbols and their nodes."""
    free = {
        s
        for s in graph.symbols()
        if not (s in graph.dynamic or (s in DERIVED and DERIVED[s].symbols <= graph.dynamic.keys()))
    }
    if not free:
        return
    users = []
    for node in graph.nodes:
        used = set().union(*(v.shape.symbols for v in node.outputs)) & free
        if used:
            users.append(f"{node.name or '%' + str(node.id)} ({', '.join(sorted(used))})")
    shown = ", ".join(users[:5]) + (f" and {len(users) - 5} more" if len(users) > 5 else "")
    raise BindingError(
        "unbound symbols", where=graph.name, got=", ".join(sorted(free)),
        expected="a size, or an upper bound to leave them dynamic", origin=f"nodes {shown}",
        hint='DimBinding(batch=1, seq=128), or .set_dynamic("past_seq", 4096)',
    )  # fmt: skip
