"""BERT: learned positions and kinds of text, norms after the sums, a plain network."""

from __future__ import annotations

from rlx.models.encoder_builder import EncoderNet, Tensor

PREFIXES = ("bert.", "")
_PARTS = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
BODY = {
    "token_embd.weight": "embeddings.word_embeddings.weight",
    "position_embd.weight": "embeddings.position_embeddings.weight",
    "token_types.weight": "embeddings.token_type_embeddings.weight",
    "token_embd_norm.weight": "embeddings.LayerNorm.weight",
    "token_embd_norm.bias": "embeddings.LayerNorm.bias",
    "cls.weight": "pooler.dense.weight",
    "cls.bias": "pooler.dense.bias",
    **{
        f"blk.{{i}}.{ours}.{part}": f"encoder.layer.{{i}}.{theirs}.{part}"
        for ours, theirs in _PARTS.items()
        for part in ("weight", "bias")
    },
}
HEAD = {"cls.output.weight": "classifier.weight", "cls.output.bias": "classifier.bias"}


def embed(net: EncoderNet, ids: Tensor, types: Tensor | None) -> Tensor:
    return net.norm(net.embed(ids) + net.positions(ids, types), "token_embd_norm")


def layer(net: EncoderNet, x: Tensor, i: int) -> Tensor:
    return net.post_norm_layer(x, i)


def finish(net: EncoderNet, x: Tensor) -> Tensor:
    return x
