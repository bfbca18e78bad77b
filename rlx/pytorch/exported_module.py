"""`rlx.from_torch`: a module exported by `torch.export`, as a model of its own.

Parameters become params of one graph, read where PyTorch has them. Buffers that the module writes,
such as a KV cache, become states: they stay on the device and are written in place.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlx.errors import InputError, UnsupportedError
from rlx.ir.dim import Dim, evaluate
from rlx.ir.module import GraphModule
from rlx.ir.node import Value
from rlx.ir.op import Array
from rlx.numpy.array import Array as RlxArray
from rlx.pytorch.dlpack_views import as_array, as_tensor
from rlx.pytorch.dynamo_backend import decompositions
from rlx.pytorch.lower_aten import Lowering, Source, require_known
from rlx.pytorch.sizes import FixedSizeError, SizeTable
from rlx.runtime.params import ParamStore
from rlx.runtime.session import Session
from rlx.runtime.stages import Stages
from rlx.specialize.options import CompileOptions

if TYPE_CHECKING:
    from rlx.backends.timing import Profile

_AUTO = torch.export.Dim.AUTO


def from_torch(
    module: Any, *examples: Any, dynamic: Any = True, named: Mapping[str, Any] | None = None,
    device: str = "cpu", threads: int | None = None,
) -> TorchModel:  # fmt: skip
    """A module of PyTorch, compiled for any sizes. `examples` are inputs that it is traced with,
    `named` those given by name.

    `dynamic` leaves all sizes open that the module does not fix; False fixes all; else it is what
    `torch.export.export` takes as `dynamic_shapes`.
    """
    if not isinstance(module, torch.nn.Module):
        raise InputError(
            "not a module", where="from_torch", got=type(module).__name__,
            expected="a torch.nn.Module",
        )  # fmt: skip
    given = dict(named or {})
    shapes: Any = dynamic
    if dynamic is True:
        shapes = _open([*examples, *given.values()])
    elif dynamic is False:
        shapes = None
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            program = torch.export.export(
                module, tuple(examples), given, dynamic_shapes=shapes, strict=False
            )
            program = program.run_decompositions(decompositions())
    except Exception as error:  # whatever the module or the exporter raises
        raise UnsupportedError(
            "torch.export does not take this module", where=type(module).__name__,
            got=f"{type(error).__name__}: {error!s:.400}",
            hint="torch.compile(module, backend='rlx') takes parts of it",
        ) from error  # fmt: skip
    finally:
        module.train(training)
    return TorchModel(program, type(module).__name__, device, threads)


def _open(examples: Sequence[Any]) -> tuple[Any, ...]:
    """All sizes of all tensors left to the exporter; 0 and 1 stay what they are."""
    return tuple([torch.utils._pytree.tree_map(_open_sizes, x) for x in examples])


def _open_sizes(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return None
    return {i: _AUTO for i, n in enumerate(x.shape) if n > 1}


class TorchModel:
    """An exported module on RLX. Call it with tensors or arrays; results are tensors."""

    def __init__(self, program: Any, name: str, device: str, threads: int | None) -> None:
        self.name, self.program = name, program
        self._signature = program.graph_signature
        nodes = list(program.graph_module.graph.nodes)
        require_known([n for n in nodes if n.op == "call_function"], name)
        self.session, self.params = Session(device), ParamStore()
        self._options = CompileOptions(threads=threads)
        sources, self._inputs = self._sources(nodes)
        lowering, found = self._lowered(nodes, sources, {})
        self._symbols = {name: _declared(node, lowering.sizes) for name, node in self._inputs}
        if lowering.is_random:
            raise UnsupportedError(
                "random numbers in an exported module", where=name,
                hint="torch.compile(module, backend='rlx') draws from PyTorch's generator",
            )  # fmt: skip
        self._results = self._returned(lowering, found)
        values = [v for kind, v in self._results if kind == "output"]
        unique = list(dict.fromkeys(values))
        self._order = {v: i for i, v in enumerate(unique)}
        graph = lowering.graph
        graph.set_outputs(*unique, names=[f"y{i}" for i in range(len(unique))])
        self.module = GraphModule.from_mir(graph)
        self.compiled = self.session.compile(graph, self._options, params=self.params)
        self._set_weights()

    # -- lowering -----------------------------------------------------------------------------

    def _lowered(
        self, nodes: Sequence[Any], sources: dict[Any, Source], fixed: dict[str, int]
    ) -> tuple[Lowering, Any]:
        """The graph and what it returns. Open sizes that turn out to be numbers are added to
        `fixed`."""
        lowering = Lowering(self.name, SizeTable(fixed=fixed))
        lowering.in_place = self._writers(nodes)
        try:
            return lowering, lowering.run(nodes, sources, self.program.graph_module)
        except FixedSizeError as error:
            if error.symbol in fixed:
                raise
            return self._lowered(nodes, sources, {**fixed, error.symbol: error.size})

    def _sources(self, nodes: Sequence[Any]) -> tuple[dict[Any, Source], list[tuple[str, Any]]]:
        """What each placeholder becomes, and the inputs by name, in order."""
        signature = self._signature
        written = set(signature.buffers_to_mutate.values())
        sources: dict[Any, Source] = {}
        inputs = []
        for node in nodes:
            if node.op != "placeholder":
                continue
            target = (
                signature.inputs_to_parameters.get(node.name)
                or signature.inputs_to_buffers.get(node.name)
                or signature.inputs_to_lifted_tensor_constants.get(node.name)
            )
            if target is not None:
                sources[node] = Source("state" if target in written else "param", target)
            elif node.name in signature.user_inputs:
                if isinstance(node.meta.get("val"), torch.Tensor):
                    sources[node] = Source("input", node.name)
                inputs.append((node.name, node))
        return sources, inputs

    def _writers(self, nodes: Sequence[Any]) -> set[Any]:
        """Nodes that may write a state where it is: the results that a buffer takes in the end,
        and what they are made of, where nothing else reads it."""
        wanted = set(self._signature.buffers_to_mutate)
        found: set[Any] = set()
        by_name = {n.name: n for n in nodes}
        for name in wanted:
            node = by_name.get(name)
            while node is not None and node.op == "call_function" and node.args:
                found.add(node)
                before = node.args[0]
                if not isinstance(before, torch.fx.Node) or len(before.users) > 1:
                    break
                node = before
        return found

    def _returned(self, lowering: Lowering, found: Sequence[Any]) -> list[tuple[str, Any]]:
        """What a call returns, after buffers that were not written in place are stored."""
        results: list[tuple[str, Any]] = []
        nodes = {n.name: n for n in self.program.graph_module.graph.nodes}
        for spec, value in zip(self._signature.output_specs, found, strict=True):
            kind = spec.kind.name
            if kind == "BUFFER_MUTATION":
                buffer = next(
                    n
                    for n, target in self._signature.inputs_to_buffers.items()
                    if target == spec.target
                )
                state = lowering.env[nodes[buffer]]
                if isinstance(value, Value) and value not in lowering.current_states():
                    lowering.update_state(state, value, 0)
            elif isinstance(value, Value):
                results.append(("output", value))
            else:
                results.append(("size" if not isinstance(value, (int, float, type(None)))
                                else "value", value))  # fmt: skip
        return results

    def _set_weights(self) -> None:
        program = self.program
        for name in self.compiled.template.signature.params:
            tensor = program.state_dict.get(name, program.constants.get(name))
            self.compiled.set_param(name, as_array(tensor.detach().contiguous()))
        for name in self.compiled.template.signature.states:
            tensor = program.state_dict.get(name, program.constants.get(name))
            self.compiled.bind_state(name, np.array(as_array(tensor.detach().contiguous())))

    # -- calling ------------------------------------------------------------------------------

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run on tensors, or on arrays of NumPy or RLX; returns what the module returns."""
        spec = self.program.call_spec
        leaves, given_spec = torch.utils._pytree.tree_flatten((arguments, named))
        if given_spec != spec.in_spec:
            raise InputError(
                "not the arguments that the module was exported with", where=self.name,
                got=str(given_spec)[:200], expected=str(spec.in_spec)[:200],
            )  # fmt: skip
        arrays, numbers = {}, dict[str, int]()
        for (name, node), leaf in zip(self._inputs, leaves, strict=True):
            if isinstance(node.meta.get("val"), torch.Tensor):
                arrays[name] = _checked(name, leaf, node.meta["val"])
                self._measure(name, arrays[name], numbers)
            elif isinstance(node.meta.get("val"), torch.SymInt):
                numbers[str(node.meta["val"].node.expr)] = operator.index(leaf)
        outputs: Sequence[Array] = self.compiled.run(arrays, sizes=self._explicit(numbers))
        results = []
        for kind, what in self._results:
            if kind == "output":
                results.append(as_tensor(outputs[self._order[what]]))
            else:
                results.append(evaluate(what, numbers) if kind == "size" else what)
        return torch.utils._pytree.tree_unflatten(results, spec.out_spec)

    def _measure(self, name: str, array: Array, numbers: dict[str, int]) -> None:
        for dim, n in zip(self._symbols[name], array.shape, strict=True):
            if not isinstance(dim, int) and str(dim).isidentifier():
                numbers[str(dim)] = n

    def _explicit(self, numbers: Mapping[str, int]) -> dict[str, int] | None:
        """Sizes that no input shows."""
        shown = {s for shape in self.compiled.template.signature.inputs.values()
                 for s in shape.symbols}  # fmt: skip
        wanted = set(self.compiled.template.open_symbols) - shown
        return {s: numbers[s] for s in wanted} or None

    # -- seeing inside ------------------------------------------------------------------------

    def inspect(self, stage: str = "mir", **sizes: int) -> str:
        """The module at a stage of the compiler: "mir", or for sizes "lir", "program", …"""
        if stage == "mir":
            return self.module.inspect()
        options = CompileOptions.of({"binding": sizes, "threads": self._options.threads})
        return Stages(self.module, self.session.device.backend, options).text(stage)

    def profile(self, *arguments: Any) -> Profile:
        """Time, GB/s and GFLOP/s of every kernel of a call."""
        leaves = torch.utils._pytree.tree_leaves(arguments)
        named = {
            name: _checked(name, leaf, node.meta["val"])
            for (name, node), leaf in zip(self._inputs, leaves, strict=True)
            if isinstance(node.meta.get("val"), torch.Tensor)
        }
        return self.compiled.profile(named)

    def state(self, name: str) -> Any:
        """A copy of a buffer that the module writes."""
        return as_tensor(np.array(self.compiled.read_state(name)))

    def __repr__(self) -> str:
        inputs = ", ".join(name for name, _ in self._inputs)
        return f"<TorchModel {self.name}({inputs})>"


def _declared(node: Any, sizes: SizeTable) -> tuple[Dim, ...]:
    """The sizes of an input, as dims."""
    value = node.meta.get("val")
    return sizes.shape(value).dims if isinstance(value, torch.Tensor) else ()


def _checked(name: str, value: Any, fake: Any) -> Array:
    if isinstance(value, torch.Tensor):
        if value.dtype != fake.dtype:
            raise InputError("wrong element type", where=name, got=value.dtype, expected=fake.dtype)
        return as_array(value.detach().contiguous())
    if isinstance(value, RlxArray):
        value = value.data
    return np.ascontiguousarray(np.asarray(value))
