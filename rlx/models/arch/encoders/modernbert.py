"""ModernBERT: norms before the layers, rotary positions, windows in two layers of three."""

from __future__ import annotations

from rlx.models.encoder_builder import EncoderNet, Tensor

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


def embed(net: EncoderNet, ids: Tensor, types: Tensor | None) -> Tensor:
    return net.norm(net.embed(ids), "token_embd_norm")


def layer(net: EncoderNet, x: Tensor, i: int) -> Tensor:
    name = f"blk.{i}."
    # the first layer follows the norm of the embeddings
    h = net.norm(x, f"{name}attn_norm") if f"{name}attn_norm.weight" in net.weights else x
    x = x + net.linear(net.attend(net.qkv(h, i), i), f"{name}attn_output")
    return x + net.joined_ffn(net.norm(x, f"{name}ffn_norm"), i)


def finish(net: EncoderNet, x: Tensor) -> Tensor:
    return net.norm(x, "output_norm")
