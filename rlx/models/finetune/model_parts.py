"""A model in parts: graphs that are built once, and added to the trace of each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from rlx.errors import InputError, OptionError, UnsupportedError
from rlx.ir.binding import bind_op
from rlx.ir.dim import Dim
from rlx.ir.graph import Graph
from rlx.ir.hir import FusionPolicy
from rlx.ir.module import GraphModule
from rlx.ir.node import Value
from rlx.models.builder import Tensor
from rlx.models.encoder_model import EncoderModel
from rlx.models.finetune.trained_weights import LoraConfig, TrainedWeights, TrainingBuilder
from rlx.models.language_model import LanguageModel
from rlx.models.model_file import ModelFile
from rlx.nn.functional.operands import fixed
from rlx.numpy.array import Array, Tracer
from rlx.numpy.derivative_rules import checkpoint
from rlx.numpy.trace import Trace, recording_trace
from rlx.numpy.traced_body import as_leaf, value_in
from rlx.support.gc_pause import without_gc

Batch = Mapping[str, Any]
_POLICIES = ("none", "nothing", "matmuls")


class Part(NamedTuple):
    """A part of a model: a graph, and the names of its inputs."""

    graph: Graph
    inputs: tuple[str, ...]


class Form(NamedTuple):
    """What the graphs of a model depend on beside the model."""

    is_packed: bool = False  # rows have several documents
    drops: bool = False  # with dropout


PLAIN = Form()


class PartedModel:
    """What language models and encoders share: parts and parameters."""

    def __init__(
        self, model: Any, lora: LoraConfig | None, context: int | None, remat: str
    ) -> None:
        if remat not in _POLICIES:
            raise OptionError(
                "unknown policy", where="remat", got=repr(remat), expected=", ".join(_POLICIES)
            )
        loaded = isinstance(model, (LanguageModel, EncoderModel))
        self.file: ModelFile = model.model if loaded else model
        self.config, self.lora, self.remat = self.file.config, lora, remat
        self.context = self.config.context_length(context)
        self.store = TrainedWeights(self.file.weights(), lora)
        self._parts: dict[Form, dict[str, Part]] = {}
        self.parts(PLAIN)
        if lora is not None:  # now it is known which matrices there are
            known = self.store
            adapted = lora.targeted(known.linear, self.config.arch)
            self.store = TrainedWeights(known.weights, lora, adapted, frozen=known.frozen)
            self._parts.clear()
            self.parts(PLAIN)
        if not self.store.trained:
            raise UnsupportedError(
                "nothing to train", where=self.config.arch,
                expected="float weights, or matrices of layers to adapt",
            )  # fmt: skip

    def init(self, seed: int = 0) -> dict[str, Any]:
        """The first parameters, f32. LoRA: {weight: {"a": [rank, in], "b": [out, rank]}} by the
        names of weights (`blk.0.attn_q.weight`), A uniform and B zero as in PEFT; DoRA has
        "magnitude" [out] too. Without LoRA: {weight: array}."""
        return self.store.init(seed)

    @property
    def frozen_bytes(self) -> int:
        """The size of the weights that are not trained."""
        return sum(a.data.nbytes for a in self.store.frozen.values())

    def check_length(self, tokens: Array) -> None:
        if int(tokens.shape[1]) > self.context:
            raise InputError(
                "rows are longer than the context", where="tokens", got=int(tokens.shape[1]),
                expected=f"{self.context} at most", hint="context= of the model, or shorter rows",
            )  # fmt: skip

    def layer_names(self) -> list[str]:
        return [f"blk.{i}" for i in range(self.config.layers)]

    def parts(self, form: Form) -> dict[str, Part]:
        """The parts in this form, built when a call first needs them."""
        if form not in self._parts:
            with without_gc():
                self._parts[form] = self._build(form)
        return self._parts[form]

    def run_layers(self, x: Array, call: PartCall) -> Array:
        parts = self.parts(call.form)
        for name in self.layer_names():
            layer: Callable[..., Array] = partial(call.run, parts[name])
            x = layer(x) if self.remat == "none" else checkpoint(layer, self.remat)(x)
        return x

    def _build(self, form: Form) -> dict[str, Part]:
        raise NotImplementedError


def finished_part(
    g: GraphModule, net: TrainingBuilder, form: Form, build: Callable[[], Tensor]
) -> Part:
    """The part that `build` makes in g."""
    if form.drops:
        net.key = g.input("key", [2], "u32")
    g.finish_hir({"y": build()})
    graph = g.with_fusion_policy(FusionPolicy.DIRECT).into_graph()
    return Part(graph, tuple([n.name for n in graph.nodes if n.op.name == "input"]))


class PartCall:
    """One call of a model in a trace: what its parts take beside their input x, and its sizes."""

    def __init__(self, store: TrainedWeights, params: Any, key: Any) -> None:
        self.store, self.params = store, params
        self.sizes: dict[str, Dim] = {}  # of the symbols of graphs
        self.given: dict[str, Array] = {}  # arrays by the names of inputs
        if key is not None:
            self.given["key"] = as_leaf(key, "key")

    @property
    def form(self) -> Form:
        lora = self.store.lora
        return Form("mask" in self.given, "key" in self.given and bool(lora and lora.dropout))

    def run(self, part: Part, x: Array) -> Array:
        """The result of a part on x."""
        trace = current_trace()
        values: dict[Value, Value] = {}
        names = iter(part.inputs)
        for node in part.graph.nodes:
            if node.op.name == "input":
                values[node.output] = self._operand(trace, next(names), x, node.output)
                continue
            op = bind_op(node.op, self.sizes)
            made = trace.graph.append_node(op, [values[v] for v in node.inputs])
            values.update(zip(node.outputs, made.outputs, strict=True))
        return Tracer(trace, values[part.graph.outputs[0]])

    def _operand(self, trace: Trace, name: str, x: Array, like: Value) -> Value:
        if name == "x":
            return value_in(trace, x)
        if name in self.given:
            return value_in(trace, self.given[name])
        if name not in self.store.trained:
            return trace.capture(self.store.frozen[name])
        value = value_in(trace, as_leaf(self.store.leaf(self.params, name), name))
        if value.shape.rank != like.shape.rank:
            raise InputError(
                "a parameter of another shape", where=name, got=value.shape, expected=like.shape
            )
        return fixed(trace.graph, value, like.shape.static_dims)

    def share_sizes(self, batch: Batch, names: Sequence[str]) -> None:
        """The arrays of a batch have one size."""
        trace = current_trace()
        first = value_in(trace, batch_array(batch, "tokens"))
        for name in names:
            if batch.get(name) is None:
                continue
            rank = 1 if name == "lengths" else 2
            other = value_in(trace, batch_array(batch, name, rank))
            for a, b in zip(first.shape.dims, other.shape.dims, strict=False):
                if not trace.same_size(b, a, "a size of the batch"):
                    raise InputError(
                        "arrays of a batch differ in size", where=f"batch[{name!r}]",
                        got=other.shape, expected=first.shape,
                    )  # fmt: skip
        self.sizes["batch"], self.sizes["seq"] = map(trace.resolve, first.shape.dims)


def current_trace() -> Trace:
    """The trace that records now: `run_traced` made one."""
    trace = recording_trace()
    assert trace is not None
    return trace


def batch_array(batch: Batch, name: str, rank: int = 2) -> Array:
    """An array of a batch, checked."""
    found = batch.get(name)
    made = None if found is None else as_leaf(found, f"batch[{name!r}]")
    if made is None or made.ndim != rank or not made.dtype.is_integer:
        raise InputError(
            "not a batch", where=f"batch[{name!r}]",
            got="nothing" if made is None else f"{made.dtype} {list(made.shape)}",
            expected="integers [batch, seq]" if rank == 2 else "integers [n]",
        )  # fmt: skip
    return made
