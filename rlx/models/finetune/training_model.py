"""A language model of a file as a differentiable function of its trainable parameters.

    model = TrainingModel(rlx.load("model.gguf"), lora=LoraConfig(rank=8))
    params = model.init(seed=0)
    state = optimizer.init(params)

    @rlx.jit(donate=["params", "state"])
    def step(params, state, batch, key):
        (loss, count), grads = rlx.value_and_grad(model.loss, has_aux=True)(params, batch, key)
        return *optimizer.update(grads, state, params), loss

The page of the architecture builds each part of the model once: the embedding, each layer, the
head. A call adds these graphs to the trace around it, so that forward part, backward part and
update are one program. Sizes of batches and rows stay symbolic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import rlx.numpy as rnp
from rlx.errors import InputError
from rlx.ir.module import GraphModule
from rlx.models.builder import Tensor
from rlx.models.config import KVCacheType
from rlx.models.finetune.model_parts import (
    Batch,
    Form,
    Part,
    PartCall,
    PartedModel,
    batch_array,
    current_trace,
    finished_part,
)
from rlx.models.finetune.row_builder import BATCH, SEQ, RowBuilder
from rlx.models.finetune.trained_weights import LoraConfig
from rlx.models.language_model import LanguageModel
from rlx.models.model_file import ModelFile
from rlx.numpy.array import Array, Tracer
from rlx.numpy.retraced import run_traced
from rlx.numpy.traced_body import value_in

IGNORED = -100  # the label of a token whose loss does not count


class TrainingModel(PartedModel):
    """A language model for training: `loss(params, batch, key)`.

    `lora` says which adapters are trained beside frozen weights, float or packed; None trains all
    float weights, packed ones dequantised. `context` limits positions (4096 at most unless given).
    `remat` saves memory: "nothing" computes the values of each layer again in the backward part,
    "matmuls" all but the results of matmuls.
    """

    def __init__(
        self, model: LanguageModel | ModelFile, lora: LoraConfig | None = None,
        context: int | None = None, remat: str = "none",
    ) -> None:  # fmt: skip
        super().__init__(model, lora, context, remat)

    # -- the parts ----------------------------------------------------------------------------

    def _build(self, form: Form) -> dict[str, Part]:
        part, arch = partial(self._part, form), self.file.arch
        parts = {"embed": part("embed", lambda net, x: arch.embed(net, x), "ids")}
        for i, name in enumerate(self.layer_names()):
            parts[name] = part(name, partial(_layer, arch, i))
        parts["finish"] = part("finish", arch.finish)
        parts["head"] = part("head", lambda net, x: net.head(x, last_only=False), "rows")
        return parts

    def _part(
        self, form: Form, name: str, build: Callable[[RowBuilder, Tensor], Tensor],
        x: str = "tokens",
    ) -> Part:  # fmt: skip
        g, c = GraphModule.hir(name), self.config
        net = RowBuilder(
            g, c, self.store.weights, self.context, KVCacheType.of("f32", c.head_dim),
            store=self.store, is_packed=form.is_packed,
        )  # fmt: skip
        if x == "ids":
            made = g.input("x", [1, BATCH * SEQ], "i32")
        else:
            made = g.input("x", [1, "rows" if x == "rows" else BATCH * SEQ, c.hidden], "f32")
        return finished_part(g, net, form, lambda: net.as_f32(build(net, made)))

    # -- calls --------------------------------------------------------------------------------

    def loss(self, params: Any, batch: Batch, key: Any = None) -> tuple[Array, Array]:
        """The mean loss of the labelled tokens, and their number, both f32.

        `batch` has "tokens" [b, s] and "labels" [b, s], integers: labels[i, j] is the token that
        should follow tokens[i, j], or −100. Optional: "positions" [b, s], 0, 1, … of each row
        unless given; "segments" [b, s], the numbers of the documents in a row, which do not see
        each other; "rows" [n], indices into the flat tokens b · s: only these run through the head
        (−1 pads). Padding goes to the end of a row, with label −100. `key` is for dropout; without
        one there is none.
        """
        value: tuple[Array, Array] = run_traced("loss", self._loss, (params, batch, key), {})
        return value

    def _loss(self, params: Any, batch: Batch, key: Any) -> tuple[Array, Array]:
        hidden, call = self._hidden(params, batch, key)
        labels = rnp.reshape(batch_array(batch, "labels"), (-1,))
        if batch.get("rows") is not None:
            rows = batch_array(batch, "rows", 1)
            at = rnp.maximum(rows, 0)
            labels = rnp.where(rows < 0, IGNORED, rnp.take(labels, at))
            hidden = rnp.take(hidden, at, axis=1)
        scores = self._head(hidden, call)
        trace = current_trace()
        found, ids = (value_in(trace, x) for x in (scores, labels))
        found = trace.graph.reshape(found, shape=found.shape.dims[1:])
        losses = trace.graph.softmax_cross_entropy(found, ids, ignore_index=IGNORED)[0]
        count = rnp.sum((labels != IGNORED).astype(rnp.float32))
        return rnp.sum(Tracer(trace, losses)) / rnp.maximum(count, 1.0), count

    def logits(self, params: Any, batch: Batch, key: Any = None) -> Array:
        """The logits [b, s, vocab]; `batch` as in `loss`, without labels."""

        def run(params: Any, batch: Batch, key: Any) -> Array:
            hidden, call = self._hidden(params, batch, key)
            tokens = batch_array(batch, "tokens")
            return rnp.reshape(self._head(hidden, call), (*tokens.shape, -1))

        made: Array = run_traced("logits", run, (params, batch, key), {})
        return made

    def _head(self, hidden: Array, call: PartCall) -> Array:
        call.sizes["rows"] = value_in(current_trace(), hidden).shape.dims[1]
        return call.run(self.parts(call.form)["head"], hidden)

    def _hidden(self, params: Any, batch: Batch, key: Any) -> tuple[Array, PartCall]:
        """The states after the last norm, [1, b · s, hidden]."""
        tokens = batch_array(batch, "tokens")
        call = PartCall(self.store, params, key)
        call.share_sizes(batch, ("labels", "positions", "segments"))
        self.check_length(tokens)
        batches, length = tokens.shape
        if batch.get("positions") is None:
            row = rnp.arange(length, dtype=rnp.int32)
            positions = rnp.broadcast_to(row, (batches, length))
        else:
            positions = batch_array(batch, "positions")
        call.given["positions"] = rnp.reshape(positions, (-1,)).astype(rnp.int32)
        self._give_masks(call, batch, length)
        ids = rnp.reshape(tokens, (1, -1)).astype(rnp.int32)
        parts = self.parts(call.form)
        x = self.run_layers(call.run(parts["embed"], ids), call)
        return call.run(parts["finish"], x), call

    def _give_masks(self, call: PartCall, batch: Batch, length: Any) -> None:
        """Which keys a query sees: those of its document up to itself, and those in the window."""
        if batch.get("segments") is None:
            return
        if self.config.recurrent is not None:
            raise InputError(
                "recurrent layers carry a state from one document to the next",
                where="batch['segments']", got=f"{self.config.arch}, several documents in a row",
                expected="one document a row", hint="leave out segments, and pack nothing",
            )  # fmt: skip
        segments = batch_array(batch, "segments")
        same = segments[:, None, :, None] == segments[:, None, None, :]
        at = rnp.arange(length, dtype=rnp.int32)
        behind = at[:, None] - at[None, :]
        call.given["mask"] = rnp.logical_and(same, behind >= 0)
        window = self.config.sliding_window
        if window:
            call.given["window_mask"] = rnp.logical_and(call.given["mask"], behind < window)


def _layer(arch: Any, i: int, net: Any, x: Tensor) -> Tensor:
    return arch.layer(net, x, i)


__all__ = ["IGNORED", "LoraConfig", "TrainingModel"]
