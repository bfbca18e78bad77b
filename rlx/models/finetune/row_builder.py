"""The builders of training graphs: rows of tokens [batch, seq], without a KV cache or states.

The pages of architectures are those of inference. A language model runs all tokens flat,
[1, batch · seq], which is what matmuls like best; attention and recurrences see rows.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from rlx.ir.attrs import MaskKind
from rlx.ir.dim import Dim, sym
from rlx.models.decoder_builder import DecoderBuilder, Tensor
from rlx.models.encoder_builder import EncoderBuilder
from rlx.models.finetune.trained_weights import TrainingBuilder
from rlx.support.records import dataclass

BATCH, SEQ = sym("batch"), sym("seq")


@dataclass
class RowBuilder(TrainingBuilder, DecoderBuilder):
    """Builds a part of a language model for training.

    With `is_packed` a row has several documents: tokens attend to their own alone, by the inputs
    `mask` and `window_mask` [batch, 1, seq, seq].
    """

    is_packed: bool = field(default=False, kw_only=True)

    def gamma(self, name: str) -> Tensor:
        """Trained as it is stored."""
        offset = self.config.norm_offset
        if not offset or self.store.lora is not None:
            return super().gamma(name)
        return self.param(name) + offset

    def once(self, name: str, shape: list[Any], dtype: str) -> Tensor:
        """An input of the graph, declared where it is first used."""
        if name not in self._values:
            self._values[name] = self.g.input(name, shape, dtype)
        return self._values[name]

    # -- positions ----------------------------------------------------------------------------

    def position_args(self, seq: Dim) -> dict[str, Any]:
        at = self.once("positions", [BATCH * SEQ], "i32")
        longest = self.config.rope.switches_at(self.context)
        if not longest:
            return {"positions": at}
        is_long = (at.max() >= longest).astype("i32")  # rows with long factors follow the short
        return {"positions": at + is_long * self.context}

    def position_rows(self, table: Tensor, seq: Dim) -> Tensor:
        return table.gather(self.once("positions", [BATCH * SEQ], "i32"), axis=0)

    # -- attention ----------------------------------------------------------------------------

    def append_to_cache(self, x: Tensor, name: str) -> Tensor:
        return x.reshape(BATCH, SEQ, x.shape.dims[-1])

    def attend_to_cache(
        self, q: Tensor, keys: Tensor, values: Tensor, window: int, sinks: Tensor | None = None
    ) -> Tensor:
        c, mask = self.config, None
        kind = MaskKind.SLIDING_WINDOW(window) if window else MaskKind.CAUSAL
        if self.is_packed:
            name = "window_mask" if window else "mask"
            mask, kind = self.once(name, [BATCH, 1, SEQ, SEQ], "bool"), MaskKind.CUSTOM
        y = self.g.attention(
            q.reshape(BATCH, SEQ, q.shape.dims[-1]), keys, values, mask, sinks=sinks,
            num_heads=c.heads, num_kv_heads=c.kv_heads, head_dim=c.head_dim, mask_kind=kind,
            scale=c.attention_scale, softcap=c.attention_softcap,
        )  # fmt: skip
        return y.reshape(*q.shape.dims)

    # -- recurrent states: zeros at the start of a row ----------------------------------------

    def carried(self, name: str, dims: tuple[int, ...]) -> Tensor:
        return self.g.constant(0.0).expand(BATCH, *dims)

    def carry(self, name: str, state: Tensor, last: Tensor) -> None:
        """Nothing follows a row."""

    def by_sequence(self, x: Tensor) -> Tensor:
        return x.reshape(BATCH, SEQ, *x.shape.dims[2:])


@dataclass
class RowEncoderBuilder(TrainingBuilder, EncoderBuilder):
    """Builds an encoder for training."""
