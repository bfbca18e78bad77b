"""Model variants: batch, sequence length and phase of one use of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum

from rlx.errors import OptionError
from rlx.ir.binding import DimBinding, Size, UpTo
from rlx.specialize.key import make_key
from rlx.support.records import dataclass


class ModelPhase(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODER = "encoder"
    INFERENCE = "inference"


@dataclass(frozen=True)
class ModelVariant:
    """Sizes and phase of one use. A size may be a bounded dynamic dimension (`UpTo(4096)`)."""

    batch: Size = 1
    seq: Size = 1
    past_seq: Size = 0
    phase: ModelPhase = ModelPhase.INFERENCE
    extra: tuple[tuple[str, Size], ...] = ()

    @staticmethod
    def prefill(batch: Size, seq: Size) -> ModelVariant:
        return ModelVariant(batch, seq, 0, ModelPhase.PREFILL)

    @staticmethod
    def decode(batch: Size, past_seq: Size, new_tokens: Size = 1) -> ModelVariant:
        return ModelVariant(batch, new_tokens, past_seq, ModelPhase.DECODE)

    @staticmethod
    def encoder(batch: Size, seq: Size) -> ModelVariant:
        return ModelVariant(batch, seq, 0, ModelPhase.ENCODER)

    def with_extra(self, symbol: str, size: Size) -> ModelVariant:
        """The same variant with one more symbol bound."""
        if symbol in dict(self.extra) or symbol in ("batch", "seq", "past_seq"):
            raise OptionError("symbol already bound", where="with_extra", got=symbol)
        return replace(self, extra=(*self.extra, (symbol, size)))

    def dim_binding(self) -> DimBinding:
        """Decode binds batch, past_seq, and seq to the new tokens; other phases batch and seq."""
        binding = DimBinding(batch=self.batch, seq=self.seq)
        if self.phase is ModelPhase.DECODE:
            binding.set("past_seq", self.past_seq)
        for symbol, size in self.extra:
            binding.set(symbol, size)
        return binding

    def key_material(self) -> Mapping[str, object]:
        return {
            "batch": _sized(self.batch),
            "seq": _sized(self.seq),
            "past_seq": _sized(self.past_seq),
            "phase": self.phase.value,
            "extra": {symbol: _sized(size) for symbol, size in self.extra},
        }

    def cache_key(self) -> str:
        return make_key("variant", self)

    def __str__(self) -> str:
        past = f" past {self.past_seq}" if self.phase is ModelPhase.DECODE else ""
        more = "".join(f" {k}={v}" for k, v in self.extra)
        return f"{self.phase.value}:{self.batch}x{self.seq}{past}{more}"


def _sized(size: Size) -> object:
    return ("up to", size.bound) if isinstance(size, UpTo) else size
