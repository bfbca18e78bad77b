"""GPT-2: learned positions, layer norms, a GELU FFN."""

from __future__ import annotations

from rlx.models.decoder_builder import DecoderBuilder, Tensor

_PARTS = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
HF_NAMES = {
    "token_embd.weight": "transformer.wte.weight",
    "position_embd.weight": "transformer.wpe.weight",
    "output_norm.weight": "transformer.ln_f.weight",
    "output_norm.bias": "transformer.ln_f.bias",
    **{
        f"blk.{{i}}.{ours}.{part}": f"transformer.h.{{i}}.{theirs}.{part}"
        for ours, theirs in _PARTS.items()
        for part in ("weight", "bias")
    },
}
# Hugging Face stores these weights as [in, out]
HF_TRANSPOSED = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")


def embed(net: DecoderBuilder, ids: Tensor) -> Tensor:
    seq = ids.shape.dims[1]
    table = net.param("position_embd.weight")
    return net.embed(ids) + net.as_f32(net.position_rows(table, seq))


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    q, k, v = net.split_qkv(net.norm(x, f"blk.{i}.attn_norm"), i)
    x = x + net.linear(net.attend(q, k, v, i, rope=False), f"blk.{i}.attn_output")
    return x + net.plain_ffn(net.norm(x, f"blk.{i}.ffn_norm"), i, "gelu_tanh")


def finish(net: DecoderBuilder, x: Tensor) -> Tensor:
    return net.norm(x, "output_norm")
