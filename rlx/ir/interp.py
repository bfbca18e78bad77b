"""The reference interpreter: runs a MIR graph in NumPy by each op's `reference`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlx.errors import BindingError, InputError, RlxError, StageError, VerifyError
from rlx.ir.binding import bind_op, infer_sizes
from rlx.ir.dim import DERIVED
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.op import Array, Op
from rlx.ir.shape import Shape

Hook = Callable[[Node, Sequence[Array]], None]
Arrays = Sequence[Array] | Mapping[str, Array]
_GIVEN = ("input", "param", "state")


class Run(NamedTuple):
    """The result of a run: outputs, and every state after its last update."""

    outputs: list[Array]
    states: dict[str, Array]


def evaluate(
    graph: Graph,
    inputs: Arrays = (),
    sizes: Mapping[str, int] | None = None,
    *,
    on_node: Hook | None = None,
) -> list[Array]:
    """The outputs of `graph`; see `run`."""
    return run(graph, inputs, sizes, on_node=on_node).outputs


def run(
    graph: Graph,
    inputs: Arrays = (),
    sizes: Mapping[str, int] | None = None,
    *,
    on_node: Hook | None = None,
) -> Run:
    """Run `graph` on arrays.

    A sequence is taken in the order of the `input` nodes; a mapping gives inputs, params and states
    by name. A state that is not given starts as zeros. Symbols get their sizes from the shapes of
    the arrays and from `sizes`. `on_node` sees every node with its results.
    """
    given = _by_name(graph, inputs)
    shapes = {n.name: n.output.shape for n in graph.nodes if n.op.name in _GIVEN}
    known = infer_sizes([(k, shapes[k], a.shape) for k, a in given.items()], sizes)
    _require_bound(graph, known)
    for node in graph.sources("state"):
        if node.name not in given:
            shape = node.output.shape.bind(known)
            given[node.name] = np.zeros(shape.static_dims, shape.dtype.numpy)
    return Program(graph, known).run(given, on_node)


def _by_name(graph: Graph, inputs: Arrays) -> dict[str, Array]:
    nodes = [n for n in graph.nodes if n.op.name in _GIVEN]
    if not isinstance(inputs, Mapping):
        names = [n.name for n in nodes if n.op.name == "input"]
        if len(inputs) != len(names):
            raise InputError(
                "wrong number of inputs", where=graph.name, got=len(inputs), expected=names
            )
        inputs = dict(zip(names, inputs, strict=True))
    declared = {n.name: n for n in nodes}
    for name in inputs:
        if name not in declared:
            raise InputError(
                "unknown input", where=graph.name, got=repr(name), expected=", ".join(declared)
            )
    for node in nodes:
        if node.name not in inputs and node.op.name != "state":
            raise InputError(
                f"missing {node.op.name}", where=node.name, expected=node.output.shape,
                origin=node.origin,
            )  # fmt: skip
    return {k: _array(k, a, declared[k].output.shape) for k, a in inputs.items()}


def _array(name: str, value: Any, shape: Shape) -> Array:
    if not isinstance(value, (np.ndarray, np.generic)):  # Python numbers have no element type yet
        value = np.asarray(value, shape.dtype.numpy)
    if value.dtype != shape.dtype.numpy:
        raise InputError(
            "wrong element type", where=name, got=value.dtype, expected=shape,
            hint=f"convert it with .astype({shape.dtype.numpy.name!r})",
        )  # fmt: skip
    return np.asarray(value)


def _require_bound(graph: Graph, known: Mapping[str, int]) -> None:
    derived = {s for s, product in DERIVED.items() if product.symbols <= known.keys()}
    missing = sorted(graph.symbols() - known.keys() - derived)
    if missing:
        raise BindingError(
            "unbound symbols", where=graph.name, got=", ".join(missing),
            expected="a size for each", hint="no input determines them: pass sizes={...}",
        )  # fmt: skip


class _Instruction(NamedTuple):
    node: Node
    op: Op
    shapes: tuple[Shape, ...]
    dead: tuple[Value, ...]  # values whose last use this is


class Program:
    """A bound graph, ready to run many times; loop bodies run this way."""

    def __init__(self, graph: Graph, sizes: Mapping[str, int] | None = None) -> None:
        self.graph = graph
        self.inputs = [n.name for n in graph.sources("input")]
        self.states = _versions(graph)
        dead = _last_uses(graph, {*graph.outputs, *(v[-1] for v in self.states.values())})
        known = dict(sizes or {})
        self.instructions = [
            _Instruction(
                node,
                bind_op(node.op, known),
                tuple([v.shape.bind(known) for v in node.outputs]),
                tuple(dead[node.id]),
            )
            for node in graph.nodes
        ]

    def call(self, *arrays: Array) -> list[Array]:
        """The outputs, given arrays in the order of the inputs; for subgraphs."""
        return self.run(dict(zip(self.inputs, arrays, strict=True))).outputs

    def run(self, given: Mapping[str, Array], on_node: Hook | None = None) -> Run:
        values: dict[Value, Array] = {}
        self.run_part(values, given, 0, len(self.instructions), on_node)
        return Run([values[v] for v in self.graph.outputs], self.states_in(values))

    def run_part(
        self,
        values: dict[Value, Array],
        given: Mapping[str, Array],
        first: int,
        last: int,
        on_node: Hook | None = None,
        keep: bool = False,
    ) -> None:
        """Run nodes [first, last) on the `values` of earlier ones, with new inputs and states.
        `keep` leaves all values for further runs of later nodes."""
        for instruction in self.instructions[:first]:
            if instruction.node.op.name in ("input", "state"):
                values[instruction.node.output] = given[instruction.node.name]
        with np.errstate(all="ignore"):  # infinities and NaNs are ordinary results
            for instruction in self.instructions[first:last]:
                results = _evaluate_node(instruction, values, given)
                for value, array in zip(instruction.node.outputs, results, strict=True):
                    values[value] = array
                if on_node is not None:
                    on_node(instruction.node, results)
                for value in () if keep else instruction.dead:
                    del values[value]

    def states_in(
        self, values: Mapping[Value, Array], first: int = 0, last: int | None = None
    ) -> dict[str, Array]:
        """Every state after nodes [first, last) have run, that they wrote or read."""
        end = len(self.instructions) if last is None else last
        found = {}
        for name, versions in self.states.items():
            made = [v for v in versions if v in values and first <= v.node.id < end]
            if made:
                found[name] = values[made[-1]]
        return found


def _evaluate_node(
    instruction: _Instruction, values: Mapping[Value, Array], given: Mapping[str, Array]
) -> Sequence[Array]:
    node = instruction.node
    if node.op.is_block:
        raise StageError(
            "an HIR block cannot be evaluated", where=node.op.name, got=_label(node),
            expected="a MIR graph", origin=node.origin, hint="call .lower() first",
        )  # fmt: skip
    if node.op.name in _GIVEN:
        results: Any = given[node.name]
    else:
        try:
            results = instruction.op.reference(*[values[v] for v in node.inputs])
        except RlxError as e:
            raise e.located(node.op.name, f"{_label(node)} {node.origin}".strip()) from None
        except Exception as e:
            raise VerifyError(
                "the reference failed", where=node.op.name, got=f"{type(e).__name__}: {e}",
                origin=f"{_label(node)} {node.origin}",
            ) from e  # fmt: skip
    return _checked(instruction, results if isinstance(results, tuple) else (results,))


def _checked(instruction: _Instruction, results: tuple[Any, ...]) -> tuple[Array, ...]:
    arrays = tuple([np.asarray(a) for a in results])
    fits = len(arrays) == len(instruction.shapes) and all(
        a.dtype == s.dtype.numpy and a.shape == s.static_dims
        for a, s in zip(arrays, instruction.shapes, strict=True)
    )
    if not fits:
        raise VerifyError(
            "the reference does not give the inferred shapes",
            where=instruction.op.name,
            got=", ".join(f"{list(a.shape)} {a.dtype}" for a in arrays),
            expected=", ".join(map(str, instruction.shapes)),
            origin=f"{_label(instruction.node)} {instruction.node.origin}",
        )
    return arrays


def _label(node: Node) -> str:
    return f"{node.name or '%' + str(node.id)} = {node.op}({', '.join(map(str, node.inputs))})"


def _versions(graph: Graph) -> dict[str, list[Value]]:
    """The versions of each state, along its chain of updates."""
    owner: dict[Value, str] = {}
    found: dict[str, list[Value]] = {}
    for node in graph.nodes:
        if node.op.name == "state":
            owner[node.output] = node.name
        elif node.op.name == "state_update" and node.inputs[0] in owner:
            owner[node.output] = owner[node.inputs[0]]
        else:
            continue
        found.setdefault(owner[node.output], []).append(node.output)
    return found


def _last_uses(graph: Graph, kept: set[Value]) -> list[list[Value]]:
    """Per node, the values that die with it."""
    last: dict[Value, int] = {}
    for node in graph.nodes:
        for v in (*node.outputs, *node.inputs):
            last[v] = node.id
    dead: list[list[Value]] = [[] for _ in graph.nodes]
    for value, at in last.items():
        if value not in kept:
            dead[at].append(value)
    return dead
