"""Bounds checks of a run's dynamic dimensions, before a kernel of any device accesses memory.

Offsets of state updates, rope tables and slices depend on dynamic dimensions. Kernels do not check
them, so each run does first, once per distinct condition and not per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

from rlx.errors import BindingError
from rlx.ir.attrs import Body
from rlx.ir.dim import Dim, Expr
from rlx.ir.node import Node
from rlx.ir.shape import normalize_axis

_NESTING = frozenset({"cond", "while_loop", "scan", "elementwise_region"})


class BoundsCheck(NamedTuple):
    """0 ≤ `value` ≤ `most`; `what` is the error message, `op` and `origin` name the node."""

    value: Dim
    most: Dim
    what: str
    op: str
    origin: str


def bounds_checks_of(nodes: Iterable[Node]) -> list[BoundsCheck]:
    """Distinct conditions `value <= most` that depend on dynamic dimensions."""
    found: dict[tuple[Dim, Dim, str], BoundsCheck] = {}
    seen: set[tuple[Any, ...]] = set()
    for node in _all_nodes(nodes):
        rule = _RULES[node.op.name]
        key = (node.op, *[v.shape for v in node.inputs])
        if key in seen:  # the same check in another layer
            continue
        seen.add(key)
        for value, most, what in rule(node, node.op):
            if isinstance(value, Expr) or isinstance(most, Expr):
                check = BoundsCheck(value, most, what, node.op.name, str(node.origin))
                found.setdefault((value, most, what), check)
    return list(found.values())


def _all_nodes(nodes: Iterable[Node]) -> Iterator[Node]:
    """Nodes with a rule, in a graph and its subgraphs."""
    for node in nodes:
        name = node.op.name
        if name in _RULES:
            yield node
        elif name in _NESTING:
            for field in node.op.fields:
                body = getattr(node.op, field)
                if isinstance(body, Body):
                    yield from _all_nodes(body.graph.nodes)


def checker(checks: Sequence[BoundsCheck], symbols: Sequence[str]) -> Callable[..., int]:
    """Generate `check(*sizes)`: the index of the first check that fails, or −1."""
    lines = [f"def check({', '.join(symbols)}):"]
    for i, check in enumerate(checks):
        lines.append(f"    if not 0 <= ({check.value}) <= ({check.most}): return {i}")
    lines.append("    return -1")
    scope: dict[str, Any] = {}
    exec(compiled("\n".join(lines)), scope)  # names are checked identifiers, the rest integers
    check_all: Callable[..., int] = scope["check"]
    return check_all


@lru_cache(maxsize=256)
def compiled(source: str) -> CodeType:
    """The bytecode of a Python source. Variants of one model share most of these, and compiling one
    costs more than the tables of a variant."""
    return compile(source, "<rlx>", "exec")


def raise_failed(check: BoundsCheck, sizes: Mapping[str, int]) -> None:
    shown = ", ".join(f"{k}={v}" for k, v in sizes.items())
    raise BindingError(
        check.what, where=check.op, got=f"{check.value} with {shown}",
        expected=f"0 … {check.most}", origin=check.origin,
        hint="the sizes of this run do not fit what was planned",
    )  # fmt: skip


def _state_update(node: Node, op: Any) -> list[tuple[Dim, Dim, str]]:
    if len(node.inputs) > 2:
        return []  # slots are data: the kernel checks them
    state, update = (v.shape for v in node.inputs)
    axis = normalize_axis(op.axis, state.rank)
    end = op.start + update.dims[axis]
    return [
        (op.start, state.dims[axis], "a state is written before its start"),
        (end, state.dims[axis], "a state is written past its end"),
    ]


def _narrow(node: Node, op: Any) -> list[tuple[Dim, Dim, str]]:
    source = node.inputs[0].shape
    axis = normalize_axis(op.axis, source.rank)
    return [(op.start + op.length, source.dims[axis], "a slice reaches past the end")]


def _rope(node: Node, op: Any) -> list[tuple[Dim, Dim, str]]:
    tables = 1 if op.name == "rope" else 2  # the fused form has the norm's gamma before them
    if len(node.inputs) > tables + 2:
        return []  # positions are data: the kernel checks them
    x, table = node.inputs[0].shape, node.inputs[tables].shape
    seq = x.dims[2] if x.rank == 4 and getattr(op, "layout", "bshd") == "bhsd" else x.dims[1]
    return [(op.offset + seq, table.dims[0], "positions beyond the rope table")]


def _pad(node: Node, op: Any) -> list[tuple[Dim, Dim, str]]:
    found = []
    for low, size, high in zip(op.low, node.inputs[0].shape.dims, op.high, strict=True):
        most = max(low, high)
        if most and op.mode != "constant":
            needed = 1 if op.mode == "edge" else most + 1
            found.append((needed, size, f"an axis is too short for {op.mode} padding"))
    return found


def _top_k(node: Node, op: Any) -> list[tuple[Dim, Dim, str]]:
    source = node.inputs[0].shape
    axis = normalize_axis(op.axis, source.rank)
    return [(op.k, source.dims[axis], "fewer elements than k")]


_RULES: dict[str, Callable[[Node, Any], list[tuple[Dim, Dim, str]]]] = {
    "state_update": _state_update,
    "narrow": _narrow,
    "pad": _pad,
    "rope": _rope,
    "fused_qk_norm_rope": _rope,
    "top_k": _top_k,
}
