"""`torch.compile(model, backend="rlx")`: what Dynamo calls with each graph it captures.

AOTAutograd makes ATen ops of it, without mutation, and the backward part where gradients are
wanted. Ops that RLX has not run in PyTorch, between the parts that RLX compiles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from rlx.errors import RlxError
from rlx.pytorch.aten.table import table
from rlx.pytorch.compiled_program import Program
from rlx.pytorch.lower_aten import is_known, missing_ops

log = logging.getLogger("rlx.pytorch")


def decompositions() -> dict[Any, Any]:
    """PyTorch's own decompositions, but for the ops that RLX builds whole."""
    found = dict(torch._decomp.core_aten_decompositions())
    for op in list(found):
        if str(op).removeprefix("aten.") in table():
            del found[op]
    return found


class _Support(OperatorSupportBase):  # type: ignore[misc]
    def is_node_supported(self, submodules: Any, node: Any) -> bool:
        return node.op == "call_function" and is_known(node) and not _has_unbacked(node)


def _has_unbacked(node: Any) -> bool:
    """Whether a size of the result depends on data."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return any(
        free_unbacked_symbols(n.meta["val"]) for n in (node, *node.all_input_nodes)
        if isinstance(n.meta.get("val"), (torch.Tensor, torch.SymInt))
    )  # fmt: skip


class _Part(torch.nn.Module):  # type: ignore[misc]
    """A compiled part of a graph that PyTorch runs."""

    def __init__(self, program: Program, is_single: bool) -> None:
        super().__init__()
        self.program, self.is_single = program, is_single

    def forward(self, *arguments: Any) -> Any:
        made = self.program(list(arguments))
        return made[0] if self.is_single else tuple(made)


def compile_graph(module: Any, name: str, kept: Sequence[int] = ()) -> Callable[..., Any]:
    """A graph of ATen ops as a function of the list of its arguments: whole where RLX has all of
    its ops, else in parts with PyTorch's between them."""
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    supported = _Support()
    if all(supported.is_node_supported({}, n) for n in calls):
        try:
            return Program(module, name, kept)
        except RlxError as error:
            log.warning("%s runs in PyTorch: %s", name, error)
            return _boxed(module)
    log.warning("%s: these ops run in PyTorch: %s", name, ", ".join(missing_ops(calls)) or "sizes")
    return _boxed(_partitioned(module, name, kept))


def _boxed(module: Any) -> Callable[..., Any]:
    def run(arguments: list[Any]) -> Any:
        given = list(arguments)
        arguments.clear()
        with torch.no_grad():
            return module(*given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _partitioned(module: Any, name: str, kept: Sequence[int]) -> Any:
    """The module with a compiled part in place of each run of ops that RLX has."""
    frozen = {n for i, n in enumerate(n for n in module.graph.nodes if n.op == "placeholder")
              if i in set(kept)}  # fmt: skip
    partitioner = CapabilityBasedPartitioner(module, _Support())
    made = partitioner.fuse_partitions(partitioner.propose_partitions())
    for node in made.graph.nodes:
        if node.op != "call_module":
            continue
        inner = getattr(made, node.target)
        stay = [i for i, a in enumerate(node.args) if a in frozen]
        output = next(n for n in inner.graph.nodes if n.op == "output").args[0]
        is_single = not isinstance(output, (tuple, list))
        if is_single:
            next(n for n in inner.graph.nodes if n.op == "output").args = ((output,),)
        try:
            program = Program(inner, f"{name}_{node.target}", stay)
        except RlxError as error:
            log.warning("%s of %s runs in PyTorch: %s", node.target, name, error)
            if is_single:
                next(n for n in inner.graph.nodes if n.op == "output").args = (output,)
            continue
        setattr(made, node.target, _Part(program, is_single))
    return made


def _inference(module: Any, examples: Sequence[Any]) -> Callable[..., Any]:
    """A graph that nothing is derived from: its parameters are packed once."""
    return compile_graph(module, "inference", _unchanged())


def _unchanged() -> list[int]:
    """The arguments that are parameters or buffers of a module and that the graph only reads."""
    context = TracingContext.try_get()
    known = None if context is None else context.fw_metadata
    if known is None:
        return []
    static = known.static_input_indices or []
    return [i for i in static if not known.input_info[i].mutates_data]


def _forward(module: Any, examples: Sequence[Any]) -> Callable[..., Any]:
    return compile_graph(module, "forward")


def _backward(module: Any, examples: Sequence[Any]) -> Callable[..., Any]:
    return compile_graph(module, "backward")


def backend(module: Any, examples: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The backend that `torch.compile(model, backend="rlx")` finds by its entry point."""
    compiler = aot_autograd(
        fw_compiler=_forward, bw_compiler=_backward, inference_compiler=_inference,
        decompositions=decompositions(),
    )  # fmt: skip
    made: Callable[..., Any] = compiler(module, examples)
    return made
