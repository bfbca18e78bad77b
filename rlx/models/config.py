"""What a model is, in numbers: `config_gguf` and `config_hf` read them from files."""

from __future__ import annotations

from dataclasses import astuple, field

from rlx.errors import FormatError
from rlx.models.rope_tables import RopeConfig
from rlx.support.records import dataclass

RAW_SCORES = ("deepseek_v2", "olmoe", "qwen2_moe")  # do not normalise, unless the file says so


@dataclass(frozen=True)
class ExpertConfig:
    """A mixture of experts: how many there are, and how tokens choose among them."""

    count: int
    active: int
    normalize: bool = True  # the scores of the chosen ones sum to 1
    scale: float = 1.0  # of their sum


@dataclass(frozen=True)
class LatentConfig:
    """Keys and values as one short vector per token, common to all heads."""

    rank: int  # of keys and values
    plain: int  # dimensions of a head that do not turn
    turned: int
    value: int


@dataclass(frozen=True)
class RecurrentConfig:
    """Layers that carry a state from token to token, beside or instead of attention."""

    taps: int  # of the convolution
    groups: int  # heads of keys, each shared by several of values
    heads: int
    state: int  # numbers of a key
    inner: int  # numbers of all values together

    @property
    def value(self) -> int:
        """Numbers of one value."""
        return self.inner // self.heads


@dataclass(frozen=True)
class ModelConfig:
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
    window_pattern: int = 0  # n: every n-th layer sees everything; 0: all layers slide
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what a layer adds
    logit_scale: float = 1.0
    norm_offset: float = 0.0  # added to norm weights that are stored less one
    parallel: bool = True  # attention and network side by side, where an architecture may choose
    centred_norms: bool = False  # layer norms, also where the file has no bias for them
    experts: ExpertConfig | None = None
    latent: LatentConfig | None = None
    recurrent: RecurrentConfig | None = None

    def slides(self, layer: int) -> bool:
        """Whether a layer sees a window of the past only."""
        if not self.sliding_window:
            return False
        return not self.window_pattern or (layer + 1) % self.window_pattern != 0

    def check(self, where: str) -> ModelConfig:
        """Raise unless the numbers can be those of a model."""
        positive = ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "context")
        for name in positive:
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 < value < 1 << 31:
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
        return self


def _check_recurrent(c: RecurrentConfig, where: str) -> None:
    sizes = astuple(c)
    fits = all(isinstance(n, int) and 0 < n < 1 << 31 for n in sizes)
    if not fits or c.inner % c.heads or c.heads % c.groups:
        raise FormatError(
            "sizes of recurrent layers do not fit together", where=where, got=c,
            expected="inner a multiple of heads, heads of groups",
        )  # fmt: skip
