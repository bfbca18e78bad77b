"""ModernBERT: pre-norm, rotary positions, local attention in two layers of three."""

from __future__ import annotations

from rlx.errors import FormatError, UnsupportedError
from rlx.models.config import ModelConfig
from rlx.models.config_hf import HfSettings
from rlx.models.encoder_builder import EncoderBuilder, Tensor
from rlx.models.rope_tables import RopeConfig

PREFIXES = ("model.", "")
_PARTS = {
    "attn_norm": "attn_norm",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.Wo",
    "ffn_norm": "mlp_norm",
    "ffn_up": "mlp.Wi",
    "ffn_down": "mlp.Wo",
}
BODY = {
    "token_embd.weight": "embeddings.tok_embeddings.weight",
    "token_embd_norm.weight": "embeddings.norm.weight",
    "token_embd_norm.bias": "embeddings.norm.bias",
    "output_norm.weight": "final_norm.weight",
    "output_norm.bias": "final_norm.bias",
    **{
        f"blk.{{i}}.{ours}.{part}": f"layers.{{i}}.{theirs}.{part}"
        for ours, theirs in _PARTS.items()
        for part in ("weight", "bias")
    },
}
HEAD = {
    "cls.weight": "head.dense.weight",
    "cls.bias": "head.dense.bias",
    "cls.norm.weight": "head.norm.weight",
    "cls.norm.bias": "head.norm.bias",
    "cls.output.weight": "classifier.weight",
    "cls.output.bias": "classifier.bias",
}


def read_config(s: HfSettings) -> ModelConfig:
    layers = s.need("num_hidden_layers")
    rope = s.inside("rope_parameters")
    full, local = (rope.inside(f"{kind}_attention") for kind in ("full", "sliding"))
    for part in (full, local):
        part.require("rope_type", "default", "default")
    theta = full.get("rope_theta", default=s.get("global_rope_theta", default=160_000.0))
    local_theta = local.get("rope_theta", default=s.get("local_rope_theta", default=10_000.0))
    pooling = s.get("classifier_pooling", default="cls")
    if pooling not in ("cls", "mean"):
        raise UnsupportedError(
            "unknown pooling of the classifier", where=s.where, got=pooling, expected="cls, mean"
        )
    parts = {
        "window": s.get("local_attention", default=128) // 2,
        "local_layers": _local_layers(s, layers),
        "classifier_activation": s.activation("classifier_activation", default="gelu"),
        "classifier_pooling": pooling,
    }
    return s.encoder(
        "modernbert", parts,
        eps=s.get("norm_eps", default=1e-5),
        rope=RopeConfig(theta),
        local_rope=RopeConfig(local_theta),
    )  # fmt: skip


def _local_layers(s: HfSettings, layers: int) -> frozenset[int]:
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


def embed(net: EncoderBuilder, ids: Tensor, types: Tensor | None) -> Tensor:
    return net.norm(net.embed(ids), "token_embd_norm")


def layer(net: EncoderBuilder, x: Tensor, i: int) -> Tensor:
    name = f"blk.{i}."
    # the first layer follows the norm of the embeddings
    h = net.norm(x, f"{name}attn_norm") if f"{name}attn_norm.weight" in net.weights else x
    x = x + net.linear(net.attend(net.qkv(h, i), i), f"{name}attn_output")
    return x + net.joined_ffn(net.norm(x, f"{name}ffn_norm"), i)


def finish(net: EncoderBuilder, x: Tensor) -> Tensor:
    return net.norm(x, "output_norm")
