"""Sizes and settings of a model, and the element type of its KV cache.

`config_hf` and `config_gguf` read them from files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, field
from numbers import Integral

from rlx.errors import FormatError, InputError, OptionError, UnsupportedError
from rlx.ir.dtype import DType
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme
from rlx.models.rope_tables import RopeConfig
from rlx.support.records import dataclass

UNNORMALIZED_ROUTERS = ("deepseek_v2", "olmoe", "qwen2_moe")  # unless the file says otherwise
DEFAULT_CONTEXT = 4096  # tokens
KV_TYPES = ("f16", "bf16", "f32", "q8_0")
_BIG = 1 << 31
# an activation in config files → the op
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "swiglu": "silu",
    "geglu": "gelu",
    "tanh": "tanh",
}


@dataclass(frozen=True)
class ExpertConfig:
    """A mixture of experts."""

    count: int
    active: int  # experts per token
    normalize: bool = True  # scores of the chosen experts sum to 1
    scale: float = 1.0  # of that sum


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention: one compressed key-value vector per token for all heads."""

    rank: int  # of the compressed vector
    nope_dim: int  # dimensions of a query head without rotary embedding
    rope_dim: int  # and with
    value: int  # dimensions of a value head


@dataclass(frozen=True)
class RecurrentConfig:
    """Layers with a recurrent state, beside or instead of attention."""

    taps: int  # of the causal convolution
    groups: int  # key heads; each is shared by several value heads
    heads: int
    state: int  # dimensions of a key
    inner: int  # dimensions of all values together

    @property
    def value(self) -> int:
        """Dimensions of one value."""
        return self.inner // self.heads


@dataclass(frozen=True)
class EncoderConfig:
    """What an encoder has besides."""

    rotary: bool = False  # rotary position embedding
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
    window_pattern: int = 0  # n: every n-th layer has full attention; 0: none has
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of a layer's output before it is added
    logit_scale: float = 1.0
    norm_offset: float = 0.0  # added to norm weights that are stored minus one
    parallel: bool = True  # attention and FFN in parallel, where an architecture has both ways
    centred_norms: bool = False  # layer norm, also where the file has no bias for it
    experts: ExpertConfig | None = None
    latent: LatentConfig | None = None
    recurrent: RecurrentConfig | None = None
    encoder: EncoderConfig | None = None

    def slides(self, layer: int) -> bool:
        """Whether a layer has sliding-window attention."""
        if not self.sliding_window:
            return False
        return not self.window_pattern or (layer + 1) % self.window_pattern != 0

    def check(self, where: str) -> ModelConfig:
        """Raise unless the sizes can be those of a model."""
        positive = ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "context")
        for name in positive:
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 < value < _BIG:
                raise FormatError(
                    f"{name} is not a size", where=where, got=value, expected="a positive number"
                )
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
    fits = all(isinstance(n, int) and 0 < n < _BIG for n in astuple(c))
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
    if not 0 <= c.eps < 1:
        raise FormatError("not an epsilon of norms", where=where, got=c.eps)
    if c.hidden % c.heads:
        raise FormatError(
            "the width is not divided evenly among the heads", where=where,
            got=f"{c.hidden} and {c.heads}",
        )  # fmt: skip


def activation_named(name: str, where: str) -> str:
    """The op for what a file calls an activation."""
    found = _ACTIVATIONS.get(name.lower())
    if found is None:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedError("unknown activation", where=where, got=name, expected=known)
    return found


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
