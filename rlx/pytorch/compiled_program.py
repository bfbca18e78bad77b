"""A graph of ATen ops compiled: what PyTorch calls with tensors, and gets tensors from.

Sizes stay symbolic, so one template serves all of them. Where a size has no form in our dims, the
graph is lowered again with numbers, once for each combination.

A call passes addresses: inputs are read where they are, results are new tensors of PyTorch's. What
does not change between calls (the parameters of inference) is packed once; a write to it is noticed
by its version and address, and packs anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from rlx.backends.base import OtherArrays
from rlx.errors import RlxError
from rlx.ir.dim import Expr, evaluate
from rlx.ir.node import Value
from rlx.ir.shape import Shape
from rlx.numpy.device import current_device
from rlx.pytorch.dlpack_views import as_array, as_tensor, torch_type
from rlx.pytorch.lower_aten import Lowering, Source
from rlx.pytorch.sizes import SizeTable
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.session import Session


def _maker(shape: Shape) -> Callable[[], Any]:
    return partial(torch.empty, shape.static_dims, dtype=torch_type(shape.dtype))


TENSORS = OtherArrays(_maker, torch.Tensor.data_ptr, as_array, as_tensor)


class Kept(NamedTuple):
    """An argument that stays: where its memory is, and which write to it was the last."""

    position: int
    name: str


class Lowered(NamedTuple):
    """A graph, compiled, and how the results of PyTorch's graph come from its outputs."""

    compiled: CompiledGraph | None  # None where nothing is computed
    results: list[tuple[str, Any]]  # ("output", number), ("argument", position), ("size", dim), …
    is_random: bool


class Program:
    """An FX graph of ATen ops as a function of the list of its arguments."""

    def __init__(self, module: Any, name: str, kept: Sequence[int] = ()) -> None:
        """`kept` are the positions of arguments that do not change between calls."""
        self.module, self.name = module, name
        self._boxed_call = True  # the caller gives the list away; copied by those who wrap this
        self.placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        values = [n.meta.get("val") for n in self.placeholders]
        self._tensors = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor)]
        self._sizes = [
            (i, v.node.expr) for i, v in enumerate(values)
            if isinstance(v, torch.SymInt) and v.node.expr.is_Symbol
        ]  # fmt: skip
        self._kept = [Kept(i, f"w{i}") for i in self._tensors if i in set(kept)]
        frozen = {k.position for k in self._kept}
        self._inputs = [i for i in self._tensors if i not in frozen]
        self._marks: list[tuple[int, int]] | None = None
        self._symbols: set[str] = set()
        self._symbolic = self._lower_symbolic()
        self._by_numbers: dict[tuple[int, ...], Lowered] = {}
        self._runs: dict[Any, Callable[[list[Any]], list[Any]]] = {}

    # -- lowering -----------------------------------------------------------------------------

    def _lower_symbolic(self) -> Lowered | None:
        """The graph for all sizes; None where it needs numbers."""
        try:
            return self._lower(SizeTable())
        except RlxError:
            if not self._has_symbols():
                raise
            return None

    def _has_symbols(self) -> bool:
        return any(
            not isinstance(d, int)
            for i in self._tensors
            for d in self.placeholders[i].meta["val"].shape
        ) or bool(self._sizes)

    def _lower(self, sizes: SizeTable) -> Lowered:
        names = {k.position: Source("param", k.name) for k in self._kept}
        names |= {i: Source("input", f"x{i}") for i in self._inputs}
        sources = {self.placeholders[i]: source for i, source in names.items()}
        lowering = Lowering(self.name, sizes)
        found = lowering.run(self.module.graph.nodes, sources, self.module)
        positions = {lowering.env.get(n): i for i, n in enumerate(self.placeholders)
                     if isinstance(lowering.env.get(n), Value)}  # fmt: skip
        outputs: dict[Value, int] = {}
        results: list[tuple[str, Any]] = []
        for each in found:
            if isinstance(each, Value) and each in positions:
                results.append(("argument", positions[each]))
            elif isinstance(each, Value):
                results.append(("output", outputs.setdefault(each, len(outputs))))
            else:
                results.append(("size" if isinstance(each, Expr) else "value", each))
        if not outputs:
            return Lowered(None, results, False)
        graph = lowering.graph
        graph.set_outputs(*outputs, names=[f"y{i}" for i in range(len(outputs))])
        compiled = Session(current_device()).compile(graph).share_arenas()
        return Lowered(compiled, results, lowering.is_random)

    # -- calling ------------------------------------------------------------------------------

    def __call__(self, *arguments: Any) -> list[Any]:
        """Run on tensors and sizes, or on a list of them, which is emptied: they may be freed."""
        if len(arguments) == 1 and isinstance(arguments[0], list):
            given = list(arguments[0])
            arguments[0].clear()
        else:
            given = list(arguments)
        key = tuple([given[i].shape for i in self._inputs])
        if self._sizes:
            key = (*key, *[given[i] for i, _ in self._sizes])
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = self._bind(given)
        return run(given)

    def _numbers(self, given: Sequence[Any]) -> dict[str, int]:
        """The size of each symbol in this call."""
        found = {str(expr): int(given[i]) for i, expr in self._sizes}
        for i in self._tensors:
            shape = self.placeholders[i].meta["val"].shape
            for dim, n in zip(shape, given[i].shape, strict=True):
                if isinstance(dim, torch.SymInt) and dim.node.expr.is_Symbol:
                    found[str(dim.node.expr)] = int(n)
        return found

    def _lowered(self, numbers: Mapping[str, int]) -> Lowered:
        if self._symbolic is not None:
            return self._symbolic
        key = tuple(numbers.values())
        found = self._by_numbers.get(key)
        if found is None:
            found = self._by_numbers[key] = self._lower(SizeTable(numbers))
            self._marks = None
        return found

    def _bind(self, given: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        """A function for arguments of these sizes alone."""
        numbers = self._numbers(given)
        lowered = self._lowered(numbers)
        picks: list[Any] = []
        for kind, what in lowered.results:
            value = evaluate(what, numbers) if kind == "size" else what
            picks.append((kind, value))
        if lowered.compiled is None:
            return lambda arguments: [
                arguments[v] if kind == "argument" else v for kind, v in picks
            ]
        return self._runner(lowered, picks, given, numbers)

    def _runner(
        self, lowered: Lowered, picks: list[Any], given: Sequence[Any], numbers: Mapping[str, int]
    ) -> Callable[[list[Any]], list[Any]]:
        compiled, inputs = lowered.compiled, self._inputs
        assert compiled is not None
        self._refresh(compiled, given)
        shapes = [tuple(given[i].shape) for i in inputs]
        if lowered.is_random:
            shapes.append((2,))
        sizes = {s: n for s, n in numbers.items() if s in compiled.template.open_symbols}
        run = compiled.caller(tuple(shapes), sizes, TENSORS)
        whole = [kind == "output" for kind, _ in picks]
        ordered = all(whole) and [v for _, v in picks] == list(range(len(picks)))
        kept, refresh, is_random = self._kept, self._refresh, lowered.is_random

        def call(arguments: list[Any]) -> list[Any]:
            if kept:
                refresh(compiled, arguments)
            tensors = [arguments[i] for i in inputs]
            for i, x in enumerate(tensors):
                if not x.is_contiguous():
                    tensors[i] = x.contiguous()
            if is_random:
                tensors.append(_seed())
            made = run(tensors)
            if ordered:
                return list(made)
            return [
                made[v] if kind == "output" else arguments[v] if kind == "argument" else v
                for kind, v in picks
            ]

        return call

    def _refresh(self, compiled: CompiledGraph, arguments: Sequence[Any]) -> None:
        """Set the params that were written to, or that are other tensors, since the last call."""
        marks = [(arguments[k.position].data_ptr(), _version(arguments[k.position]))
                 for k in self._kept]  # fmt: skip
        if marks == self._marks:
            return
        for at, each in enumerate(self._kept):
            if self._marks is None or marks[at] != self._marks[at]:
                tensor = arguments[each.position].detach()
                compiled.set_param(each.name, as_array(tensor.contiguous()))
        self._marks = marks


def _version(tensor: Any) -> int:
    """How often a tensor was written to; tensors of inference mode do not count."""
    return -1 if tensor.is_inference() else int(tensor._version)


def _seed() -> Any:
    """Two words from PyTorch's generator."""
    return torch.randint(0, 2**32, (2,), dtype=torch.int64).to(torch.uint32)
