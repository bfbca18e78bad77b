"""An encoder of a file as a differentiable function: vectors of texts, for contrastive training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import rlx.numpy as rnp
from rlx.ir.module import GraphModule
from rlx.models import pooling
from rlx.models.builder import Tensor
from rlx.models.encoder_model import EncoderModel
from rlx.models.finetune.model_parts import (
    Batch,
    Form,
    Part,
    PartCall,
    PartedModel,
    batch_array,
    finished_part,
)
from rlx.models.finetune.row_builder import BATCH, SEQ, RowEncoderBuilder
from rlx.models.finetune.trained_weights import LoraConfig
from rlx.models.model_file import ModelFile
from rlx.numpy.array import Array
from rlx.numpy.retraced import run_traced


class EncoderTrainingModel(PartedModel):
    """An encoder for training: `embed(params, batch, key)` gives vectors [b, dim].

    Parameters and options are those of `TrainingModel`. The dense modules that some models have
    after pooling stay frozen.
    """

    def __init__(
        self, model: EncoderModel | ModelFile, lora: LoraConfig | None = None,
        context: int | None = None, remat: str = "none",
    ) -> None:  # fmt: skip
        super().__init__(model, lora, context, remat)

    def _build(self, form: Form) -> dict[str, Part]:
        part, arch = partial(self._part, form), self.file.arch
        parts = {"embed": part("embed", lambda net, x: arch.embed(net, x, None), ids=True)}
        for i, name in enumerate(self.layer_names()):
            parts[name] = part(name, partial(_layer, arch, i))
        parts["pool"] = part("pool", lambda net, x: self._pooled(net, arch.finish(net, x)))
        return parts

    def _pooled(self, net: RowEncoderBuilder, x: Tensor) -> Tensor:
        return pooling.embedding(net, x, self.file.sentence, self.file.module_weights())

    def _part(
        self, form: Form, name: str, build: Callable[[RowEncoderBuilder, Tensor], Tensor],
        ids: bool = False,
    ) -> Part:  # fmt: skip
        g = GraphModule.hir(name)
        if ids:
            x = g.input("x", [BATCH, SEQ], "i32")
        else:
            x = g.input("x", [BATCH, SEQ, self.config.hidden], "f32")
        lengths = g.input("lengths", [BATCH], "i32")
        net = RowEncoderBuilder(g, self.config, self.store.weights, lengths, store=self.store)
        net.begin(x)
        return finished_part(g, net, form, lambda: net.as_f32(build(net, x)))

    def embed(self, params: Any, batch: Batch, key: Any = None) -> Array:
        """The pooled vectors [b, dim], before the last normalisation.

        `batch` has "tokens" [b, s], and "lengths" [b], how many of a row are real. `key` is for
        dropout; without one there is none.
        """
        made: Array = run_traced("embed", self._embed, (params, batch, key), {})
        return made

    def _embed(self, params: Any, batch: Batch, key: Any) -> Array:
        tokens = batch_array(batch, "tokens")
        call = PartCall(self.store, params, key)
        call.share_sizes(batch, ("lengths",))
        self.check_length(tokens)
        call.given["lengths"] = batch_array(batch, "lengths", 1).astype(rnp.int32)
        parts = self.parts(call.form)
        x = call.run(parts["embed"], tokens.astype(rnp.int32))
        return call.run(parts["pool"], self.run_layers(x, call))


def _layer(arch: Any, i: int, net: Any, x: Tensor) -> Tensor:
    return arch.layer(net, x, i)


__all__ = ["EncoderTrainingModel", "LoraConfig"]
