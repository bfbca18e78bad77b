"""Granite: Llama with multipliers on embeddings, scores, residuals and logits."""

from __future__ import annotations

from rlx.models.arch.llama import FIELDS as _LLAMA
from rlx.models.arch.llama import HF_NAMES, SWITCHES, embed, finish
from rlx.models.config import ModelConfig
from rlx.models.config_fields import read
from rlx.models.config_hf import HfSettings
from rlx.models.decoder_builder import DecoderBuilder, Tensor

FIELDS = {
    **_LLAMA,
    **read(
        embedding_multiplier=1.0, logits_scaling=1.0, residual_multiplier=1.0,
        attention_multiplier=1.0,
    ),
}  # fmt: skip


def read_config(s: HfSettings) -> ModelConfig:
    s.require("logits_scaling", s.get("logits_scaling") != 0, "a number other than 0")
    return s.decoder(
        "granite", SWITCHES,
        embedding_scale=s.get("embedding_multiplier"),
        residual_scale=s.get("residual_multiplier"),
        attention_scale=s.get("attention_multiplier"),
        logit_scale=1 / s.get("logits_scaling"),
    )  # fmt: skip


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    scale = net.config.residual_scale
    q, k, v = net.qkv(net.norm(x, f"blk.{i}.attn_norm"), i)
    x = x + net.linear(net.attend(q, k, v, i), f"blk.{i}.attn_output") * scale
    return x + net.ffn(net.norm(x, f"blk.{i}.ffn_norm"), i) * scale


__all__ = ["FIELDS", "HF_NAMES", "SWITCHES", "embed", "finish", "layer", "read_config"]
