"""What an encoder is, in numbers: from a Hugging Face config.json or GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlx.errors import FormatError, UnsupportedError
from rlx.formats.gguf import GgufFile
from rlx.formats.hf import HfFolder
from rlx.models.rope_tables import RopeConfig
from rlx.records import dataclass

# model_type and general.architecture → the page that describes it
HF_TYPES = {
    "bert": "bert",
    "roberta": "roberta",
    "xlm-roberta": "roberta",
    "camembert": "roberta",
    "mpnet": "mpnet",
    "distilbert": "distilbert",
    "nomic_bert": "nomic_bert",
    "modernbert": "modernbert",
    "electra": "electra",
    "albert": "albert",
    "gte": "gte",
    "new": "gte",
    "jina_embeddings_v3": "jina_embeddings_v3",
    "deberta-v2": "deberta_v2",
}
GGUF_TYPES = {"bert": "bert", "nomic-bert": "nomic_bert", "modern-bert": "modernbert"}

_RANK = 4  # pooling_type of rerankers in GGUF
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
class EncoderConfig:
    arch: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    ffn: int
    context: int  # tokens of a text, what surrounds it included
    embedding: int = 0  # width of the tables, where it is not that of the layers
    groups: int = 0  # of layers that share their weights
    eps: float = 1e-12
    activation: str = "gelu"
    first_position: int = 0  # row of the position table for the first token
    rope: RopeConfig | None = None
    local_rope: RopeConfig | None = None  # of layers that see a window only
    window: int = 0  # tokens to either side that local layers see
    local_layers: frozenset[int] = frozenset()
    distance_buckets: int = 0  # of relative positions
    farthest: int = 128  # tokens; relative positions beyond share a bucket
    labels: int = 0  # results of the classifier; 0: there is none
    classifier_activation: str = "tanh"
    classifier_pooling: str = "cls"

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def check(self, where: str) -> EncoderConfig:
        """Raise unless the numbers can be those of an encoder."""
        for name in ("vocab", "hidden", "layers", "heads", "ffn", "context"):
            value = getattr(self, name)
            if not 0 < value < 1 << 31:
                raise FormatError(
                    f"{name} is not a size", where=where, got=value, expected="a positive number"
                )
        if self.first_position < 0 or self.embedding < 0 or self.window < 0:
            raise FormatError(
                "a negative number", where=where,
                got=f"first position {self.first_position}, width of the tables {self.embedding}, "
                f"window {self.window}",
            )  # fmt: skip
        if not 0 <= self.eps < 1:
            raise FormatError("not an epsilon of norms", where=where, got=self.eps)
        if self.hidden % self.heads:
            raise FormatError(
                "the width is not divided evenly among the heads", where=where,
                got=f"{self.hidden} and {self.heads}",
            )  # fmt: skip
        return self


class Settings:
    """A config.json, read by whichever of several names it uses."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def get(self, *names: str, default: Any) -> Any:
        for name in names:
            value = self.values.get(name)
            if value is not None:
                if isinstance(default, float) and type(value) is int and abs(value) < 1 << 62:
                    value = float(value)
                # true is no number, though Python says so
                if not isinstance(value, type(default)) or (
                    isinstance(value, bool) and not isinstance(default, bool)
                ):
                    raise FormatError(
                        f"{name} of config.json has the wrong type", where=self.where,
                        got=repr(value)[:40], expected=type(default).__name__,
                    )  # fmt: skip
                return value
        return default

    def need(self, *names: str) -> int:
        found: int = self.get(*names, default=-1)
        if found < 0:
            raise FormatError(
                "config.json lacks a size", where=self.where, expected=" or ".join(names)
            )
        return found

    def inside(self, name: str) -> Settings:
        """The settings of a part; empty where there are none."""
        return Settings(self.get(name, default={}), self.where)


def activation_named(name: str, where: str) -> str:
    found = _ACTIVATIONS.get(name.lower())
    if found is None:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedError("unknown activation", where=where, got=name, expected=known)
    return found


def from_hf(folder: HfFolder) -> EncoderConfig:
    """The configuration in a Hugging Face folder."""
    s = Settings(folder.config, folder.name)
    config = _HF_READERS[HF_TYPES[folder.config["model_type"]]](s)
    return config.check(folder.name)


def _plain(s: Settings, arch: str, **changes: Any) -> EncoderConfig:
    """What all of them have."""
    values: dict[str, Any] = {
        "vocab": s.need("vocab_size"),
        "hidden": s.need("hidden_size", "dim", "n_embd"),
        "layers": s.need("num_hidden_layers", "n_layers", "n_layer"),
        "heads": s.need("num_attention_heads", "n_heads", "n_head"),
        "ffn": s.need("intermediate_size", "hidden_dim", "n_inner"),
        "context": s.need("max_position_embeddings", "n_positions"),
        "eps": s.get("layer_norm_eps", "norm_eps", "layer_norm_epsilon", default=1e-12),
        "activation": activation_named(
            s.get(
                "hidden_act", "hidden_activation", "activation", "activation_function",
                default="gelu",
            ), s.where,
        ),
        "labels": _labels(s),
    }  # fmt: skip
    return EncoderConfig(arch, **(values | changes))


def _labels(s: Settings) -> int:
    kinds = s.get("architectures", default=[])
    if not any(str(k).endswith("ForSequenceClassification") for k in kinds):
        return 0
    names = s.get("id2label", default={})
    return len(names) or s.get("num_labels", default=2)


def _bert(s: Settings) -> EncoderConfig:
    _require(s, "position_embedding_type", "absolute", "absolute")
    return _plain(s, "bert")


def _roberta(s: Settings) -> EncoderConfig:
    _require(s, "position_embedding_type", "absolute", "absolute")
    # positions are counted from behind the padding token's
    first = s.get("pad_token_id", default=1) + 1
    positions = s.need("max_position_embeddings")
    return _plain(s, "roberta", first_position=first, context=positions - first)


def _mpnet(s: Settings) -> EncoderConfig:
    positions = s.need("max_position_embeddings")
    buckets = s.get("relative_attention_num_buckets", default=32)
    return _plain(
        s, "mpnet", first_position=2, context=positions - 2, distance_buckets=buckets
    )  # fmt: skip


def _electra(s: Settings) -> EncoderConfig:
    _require(s, "position_embedding_type", "absolute", "absolute")
    size = s.need("embedding_size")
    return _plain(s, "electra", embedding=size, classifier_activation="gelu")


def _albert(s: Settings) -> EncoderConfig:
    _require(s, "position_embedding_type", "absolute", "absolute")
    _require(s, "inner_group_num", 1, 1)
    groups = s.get("num_hidden_groups", default=1)
    activation = activation_named(s.get("hidden_act", default="gelu_new"), s.where)
    size = s.need("embedding_size")
    return _plain(s, "albert", embedding=size, groups=groups, activation=activation)


def _gte(s: Settings) -> EncoderConfig:
    _require(s, "position_embedding_type", "rope", "rope")
    _require(s, "layer_norm_type", "layer_norm", "layer_norm")
    _require(s, "logn_attention_scale", False, False)
    return _plain(s, "gte", rope=_rope(s, 160_000.0))


def _jina_v3(s: Settings) -> EncoderConfig:
    return _plain(s, "jina_embeddings_v3", rope=_rope(s, 20_000.0))


def _deberta_v2(s: Settings) -> EncoderConfig:
    for name in ("relative_attention", "share_att_key"):
        _require(s, name, False, True)
    _require(s, "position_biased_input", True, False)
    _require(s, "norm_rel_ebd", "none", "layer_norm")
    _require(s, "conv_kernel_size", 0, 0)
    kinds = s.values.get("pos_att_type") or []
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    if sorted(map(str, kinds)) != ["c2p", "p2c"]:
        raise UnsupportedError(
            "pos_att_type of this kind is not known here", where=s.where, got=kinds,
            expected="c2p, p2c",
        )  # fmt: skip
    farthest = s.get("max_relative_positions", default=-1)
    classifier = activation_named(s.get("pooler_hidden_act", default="gelu"), s.where)
    return _plain(
        s, "deberta_v2",
        distance_buckets=2 * s.need("position_buckets"),
        farthest=farthest if farthest > 0 else s.need("max_position_embeddings"),
        eps=s.get("layer_norm_eps", default=1e-7),
        classifier_activation=classifier,
    )  # fmt: skip


def _rope(s: Settings, theta: float) -> RopeConfig:
    """Rotation as newer files say it, or as older ones do; only GTE stretches it."""
    new, old = s.inside("rope_parameters"), s.inside("rope_scaling")
    theta = new.get("rope_theta", default=s.get("rope_theta", default=theta))
    kind = new.get("rope_type", default=old.get("rope_type", "type", default="default"))
    if kind not in ("default", "ntk") or theta <= 0 or old.values.get("mixed_b") is not None:
        raise UnsupportedError(
            "a rotation that is not known here", where=s.where, got=f"{kind}, theta {theta}",
            expected="default, ntk",
        )  # fmt: skip
    if kind == "default":
        return RopeConfig(theta)
    return RopeConfig(theta, scaling="ntk", factor=old.get("factor", default=1.0))


def _distilbert(s: Settings) -> EncoderConfig:
    return _plain(s, "distilbert", eps=1e-12, classifier_activation="relu")


def _nomic(s: Settings) -> EncoderConfig:
    _require(s, "prenorm", False, False)
    _require(s, "rotary_emb_interleaved", False, False)
    _require(s, "rotary_emb_fraction", 1.0, 1.0)
    _require(s, "moe_every_n_layers", 0, 0)
    rope = s.inside("rope_parameters")
    base = s.get("rotary_emb_base", "rope_theta", default=1000.0)
    longest = s.need("max_position_embeddings", "n_positions")
    # the first release says 8192 positions, and was trained on fewer; beyond those it would rotate
    # differently for every length
    trained = s.get("max_trained_positions", default=longest)
    trained = rope.get("original_max_position_embeddings", default=trained)
    activation = s.get("hidden_act", "activation_function", default="silu")
    return _plain(
        s, "nomic_bert", rope=RopeConfig(rope.get("rope_theta", default=base)),
        context=min(longest, trained), activation=activation_named(activation, s.where),
    )  # fmt: skip


def _modernbert(s: Settings) -> EncoderConfig:
    layers = s.need("num_hidden_layers")
    rope = s.inside("rope_parameters")
    wide, near = (rope.inside(f"{k}_attention") for k in ("full", "sliding"))
    for part in (wide, near):
        _require(part, "rope_type", "default", "default")
    theta = wide.get("rope_theta", default=s.get("global_rope_theta", default=160_000.0))
    near_theta = near.get("rope_theta", default=s.get("local_rope_theta", default=10_000.0))
    classifier = s.get("classifier_activation", default="gelu")
    pooling = s.get("classifier_pooling", default="cls")
    if pooling not in ("cls", "mean"):
        raise UnsupportedError(
            "unknown pooling of the classifier", where=s.where, got=pooling, expected="cls, mean"
        )
    return _plain(
        s, "modernbert",
        eps=s.get("norm_eps", default=1e-5),
        rope=RopeConfig(theta),
        local_rope=RopeConfig(near_theta),
        window=s.get("local_attention", default=128) // 2,
        local_layers=_local_layers(s, layers),
        classifier_activation=activation_named(classifier, s.where),
        classifier_pooling=pooling,
    )  # fmt: skip


def _local_layers(s: Settings, layers: int) -> frozenset[int]:
    kinds = s.get("layer_types", default=[])
    if not kinds:
        every = max(s.get("global_attn_every_n_layers", default=3), 1)
        return frozenset(i for i in range(layers) if i % every)
    if len(kinds) != layers or not {*map(str, kinds)} <= {"sliding_attention", "full_attention"}:
        raise FormatError(
            "layer_types of config.json does not fit the layers", where=s.where,
            got=repr(kinds)[:80], expected=f"{layers} × full_attention or sliding_attention",
        )  # fmt: skip
    return frozenset(i for i, kind in enumerate(kinds) if kind == "sliding_attention")


def _require(s: Settings, name: str, default: Any, expected: Any) -> None:
    got = s.get(name, default=default)
    if got != expected:
        raise UnsupportedError(
            f"{name} of this kind is not known here", where=s.where, got=got, expected=expected
        )


_HF_READERS: dict[str, Callable[[Settings], EncoderConfig]] = {
    "bert": _bert,
    "roberta": _roberta,
    "mpnet": _mpnet,
    "distilbert": _distilbert,
    "nomic_bert": _nomic,
    "modernbert": _modernbert,
    "electra": _electra,
    "albert": _albert,
    "gte": _gte,
    "jina_embeddings_v3": _jina_v3,
    "deberta_v2": _deberta_v2,
}


def from_gguf(file: GgufFile) -> EncoderConfig:
    """The configuration in a GGUF file's metadata."""
    kind = file.need("general.architecture", str)

    def need(name: str) -> int:
        return file.need(f"{kind}.{name}", int)

    def get(name: str, default: Any) -> Any:
        return file.get(f"{kind}.{name}", type(default), default)

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise FormatError("no token embedding", where=file.name, expected="token_embd.weight")
    layers, arch = need("block_count"), GGUF_TYPES[kind]
    classifier = file.tensors.get("cls.output.weight")
    if classifier is None and get("pooling_type", 1) == _RANK:
        raise UnsupportedError(
            "a reranker without the last layer of its classifier", where=file.name,
            expected="cls.output.weight", hint="load the folder that the file was made of",
        )  # fmt: skip
    changes: dict[str, Any] = {}
    if arch != "bert":
        changes["rope"] = RopeConfig(theta=get("rope.freq_base", 10000.0))
    if arch == "modernbert":
        every = get("attention.sliding_window_pattern", 3)
        changes |= {
            "local_rope": RopeConfig(theta=get("rope.freq_base_swa", 10000.0)),
            "window": get("attention.sliding_window", 128) // 2,
            "local_layers": frozenset(i for i in range(layers) if i % max(every, 1)),
            "classifier_activation": "gelu",
            "classifier_pooling": "cls" if get("classifier.pooling_type", 1) == 2 else "mean",
        }
    positions = file.tensors.get("position_embd.weight")
    context = need("context_length")
    act = get("hidden_activation", {"nomic_bert": "silu"}.get(arch, "gelu"))
    config = EncoderConfig(
        arch=arch,
        vocab=embedding.shape[0],
        hidden=need("embedding_length"),
        layers=layers,
        heads=need("attention.head_count"),
        ffn=need("feed_forward_length"),
        context=context if positions is None else min(context, positions.shape[0]),
        eps=get("attention.layer_norm_epsilon", 1e-12),
        activation=activation_named(act, file.name),
        labels=0 if classifier is None else classifier.shape[0],
        **changes,
    )
    return config.check(file.name)
