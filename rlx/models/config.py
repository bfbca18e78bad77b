"""Sizes and settings of a model, and the element type of its KV cache.

`config_hf` and `config_gguf` read them from files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, field, replace
from numbers import Integral

from rlx.errors import FormatError, InputError, OptionError
from rlx.ir.dtype import DType
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme
from rlx.models.rope_tables import RopeConfig
from rlx.support.records import dataclass

UNNORMALIZED_ROUTERS = ("deepseek_v2", "olmoe", "qwen2_moe")  # unless a GGUF file says otherwise
DEFAULT_CONTEXT = 4096  # tokens
KV_TYPES = ("f16", "bf16", "f32", "q8_0")
MOST_LAYERS = 1 << 16  # more would be a mistake, and a long loop
_BIG = 1 << 31


@dataclass(frozen=True)
class ExpertConfig:
    """A mixture of experts."""

    count: int
    active: int  # experts per token
    normalize: bool = True  # scores of the chosen experts sum to 1
    scale: float = 1.0  # of that sum
    width: int = 0  # of an expert's FFN; 0: a file that does not say
    shared_width: int = 0  # of the shared expert's


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention: one compressed key-value vector per token for all heads."""

    rank: int  # of the compressed vector
    nope_dim: int  # dimensions of a query head without rotary embedding
    rope_dim: int  # and with
    value: int  # dimensions of a value head
    query_rank: int = 0  # of compressed queries; 0: they are not
    eps: float | None = None  # of the norms of compressed vectors, where it differs


@dataclass(frozen=True)
class RecurrentConfig:
    """Layers with a recurrent state, beside or instead of attention."""

    taps: int  # of the causal convolution
    groups: int  # key heads; each is shared by several value heads
    heads: int
    state: int  # dimensions of a key
    inner: int  # dimensions of all values together
    step_limits: tuple[float, float] = (0.0, math.inf)  # of Mamba's time steps

    @property
    def value(self) -> int:
        """Dimensions of one value."""
        return self.inner // self.heads


@dataclass(frozen=True)
class EncoderConfig:
    """What an encoder has besides."""

    rotary: bool = False  # rotary position embedding
    types: int = 0  # of tokens; 0: a file that does not say
    embedding: int = 0  # width of the embedding tables, where it is not that of the layers
    groups: int = 0  # of layers that share weights
    first_position: int = 0  # row of the position table for the first token
    window: int = 0  # tokens to either side that local layers see
    local_layers: frozenset[int] = frozenset()
    distance_buckets: int = 0  # of relative positions
    farthest: int = 128  # tokens; relative positions beyond share a bucket
    labels: int = 0  # outputs of the classifier; 0: there is none
    classifier_activation: str = "tanh"
    classifier_pooling: str = "cls"


@dataclass(frozen=True)
class ModelConfig:
    """A language model, or with `encoder` an encoder."""

    arch: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int
    eps: float = 1e-5
    activation: str = "silu"
    rope: RopeConfig = field(default_factory=RopeConfig)
    local_rope: RopeConfig | None = None  # of sliding-window layers, where it differs
    sliding_window: int = 0
    window_layers: frozenset[int] | None = None  # those with the window; None: all
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    attention_scale: float | None = None
    deeper_is_flatter: bool = False  # scores of layer i are divided by i + 1
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of a layer's output before it is added
    logit_scale: float = 1.0
    norm_offset: float = 0.0  # added to norm weights that are stored minus one
    parallel: bool = True  # attention and FFN in parallel, where an architecture has both ways
    centred_norms: bool = False  # layer norm, also where the file has no bias for it
    swiglu: tuple[float, float] = (1.702, 7.0)  # α and limit of clamped gates
    tied: bool = True  # whether the head may be the embedding
    without: frozenset[str] = frozenset()  # weights that the configuration says are not there
    experts: ExpertConfig | None = None
    latent: LatentConfig | None = None
    recurrent: RecurrentConfig | None = None
    encoder: EncoderConfig | None = None

    def slides(self, layer: int) -> bool:
        """Whether a layer has sliding-window attention."""
        if not self.sliding_window:
            return False
        return self.window_layers is None or layer in self.window_layers

    def with_activation(self, name: str) -> ModelConfig:
        return replace(self, activation=name)

    def windows_or_every(self, nth: int) -> frozenset[int]:
        """The layers with a window; where the file does not say, all but every n-th."""
        if self.window_layers is not None:
            return self.window_layers
        return frozenset(i for i in range(self.layers) if (i + 1) % nth)

    def check(self, where: str) -> ModelConfig:
        """Raise unless the sizes can be those of a model."""
        positive = ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "context")
        for name in positive:
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 < value < _BIG:
                raise FormatError(
                    f"{name} is not a size", where=where, got=value, expected="a positive number"
                )
        if self.layers > MOST_LAYERS:
            raise FormatError(
                "too many layers", where=where, got=self.layers, expected=f"at most {MOST_LAYERS}"
            )
        if not 0 <= self.eps < math.inf:
            raise FormatError("not an epsilon of norms", where=where, got=self.eps)
        if self.heads % self.kv_heads:
            raise FormatError(
                "query heads do not share key heads evenly", where=where,
                got=f"{self.heads} and {self.kv_heads}",
            )  # fmt: skip
        if self.recurrent is not None:
            _check_recurrent(self.recurrent, where)
        if self.encoder is not None:
            _check_encoder(self, self.encoder, where)
        return self

    def context_length(self, asked: int | None) -> int:
        """The context to plan for: 4096 unless asked, at most what the model was trained for."""
        if asked is None:
            return min(self.context, DEFAULT_CONTEXT)
        if not isinstance(asked, Integral) or not 1 <= asked <= self.context:
            raise InputError(
                "context out of range", where="context", got=asked, expected=f"1 … {self.context}",
                hint="the model was not trained for longer ones",
            )  # fmt: skip
        return int(asked)

    def check_tokens(self, tokens: Sequence[int], most: int | None, hint: str) -> None:
        """Raise for unknown token ids, for none, or for more than `most`."""
        if not len(tokens):
            raise InputError("no tokens to run", hint="a prompt has at least one token")
        try:
            wrong = [t for t in tokens if not 0 <= t < self.vocab]
        except TypeError:
            raise InputError(
                "not token ids", got=f"{tokens!r:.60}", expected="whole numbers, as in [1, 2, 3]",
                hint="model.tokenize(text) makes them; rlx.Engine(…).generate takes several texts",
            ) from None  # fmt: skip
        if wrong:
            raise InputError("no such token", got=wrong[0], expected=f"0 … {self.vocab - 1}")
        if most is not None and len(tokens) > most:
            raise InputError(
                "the prompt is longer than the context", got=len(tokens), expected=most, hint=hint
            )


def _check_recurrent(c: RecurrentConfig, where: str) -> None:
    fits = all(isinstance(n, int) and 0 < n < _BIG for n in astuple(c)[:5])
    if not fits or c.inner % c.heads or c.heads % c.groups:
        raise FormatError(
            "sizes of recurrent layers do not fit together", where=where, got=c,
            expected="inner a multiple of heads, heads of groups",
        )  # fmt: skip


def _check_encoder(c: ModelConfig, e: EncoderConfig, where: str) -> None:
    if e.first_position < 0 or e.embedding < 0 or e.window < 0:
        raise FormatError(
            "a negative number", where=where,
            got=f"first position {e.first_position}, width of the tables {e.embedding}, "
            f"window {e.window}",
        )  # fmt: skip
    if c.hidden % c.heads:
        raise FormatError(
            "the width is not divided evenly among the heads", where=where,
            got=f"{c.hidden} and {c.heads}",
        )  # fmt: skip


@dataclass(frozen=True)
class KVCacheType:
    """The element type of the KV cache: floats, or bytes where a scheme packs each head."""

    dtype: DType
    scheme: QuantScheme | None = None

    @staticmethod
    def of(name: str, head_dim: int) -> KVCacheType:
        """The type `name`, for heads of this size."""
        if name not in KV_TYPES:
            known = ", ".join(KV_TYPES)
            raise OptionError("unknown type of the KV cache", where="kv", got=name, expected=known)
        if name != "q8_0":
            return KVCacheType(DType.of(name))
        scheme = GGUF_SCHEMES["Q8_0"]
        if head_dim % scheme.block_size:
            raise OptionError(
                "the model's heads are not whole blocks", where="kv", got=f"heads of {head_dim}",
                expected=f"a multiple of {scheme.block_size} for q8_0", hint="use kv=\"f16\"",
            )  # fmt: skip
        return KVCacheType(DType.of("u8"), scheme)

    def width(self, elements: int) -> int:
        """Stored elements of a row of this many numbers."""
        return elements if self.scheme is None else self.scheme.row_bytes(elements)

    def row_bytes(self, elements: int) -> int:
        return self.width(elements) * self.dtype.bytes
