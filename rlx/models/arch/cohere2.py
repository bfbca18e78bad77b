"""Cohere 2 (Command R7B): attention and FFN in parallel, full attention in one layer of four.

Layers with sliding-window attention have rotary positions, the others none.
"""

from __future__ import annotations

from dataclasses import replace

from rlx.models.arch.llama import (
    ATTENTION_BIAS,
    ATTENTION_BIASES,
    COMMON,
    PLAIN,
    embed,
    finish,
)
from rlx.models.config import ModelConfig
from rlx.models.config_fields import WINDOWS, only, read, without
from rlx.models.config_hf import HfSettings
from rlx.models.decoder_builder import DecoderBuilder, Tensor

HF_NAMES = {
    **{ours: theirs for ours, theirs in PLAIN.items() if "ffn_norm" not in ours},
    **ATTENTION_BIASES,
}
SWITCHES = {"attention_bias": ATTENTION_BIAS}
FIELDS = {
    **without(COMMON, "rms_norm_eps"),
    **WINDOWS,
    **read(
        vocab_size=256000, hidden_size=8192, intermediate_size=22528, num_hidden_layers=40,
        num_attention_heads=64, max_position_embeddings=8192, layer_norm_eps=1e-5,
        logit_scale=0.0625, tie_word_embeddings=True, attention_bias=False,
        sliding_window_pattern=4, order_of_interleaved_layers=only("local_attn_first"),
        position_embedding_type=only("rope_gptj"), rotary_pct=only(1.0),
        use_gated_activation=only(True), use_parallel_block=only(True), use_qk_norm=only(False),
    ),
}  # fmt: skip
HARMLESS = ("use_embedding_sharing", "use_parallel_embedding")  # the former is a tied head


def read_config(s: HfSettings) -> ModelConfig:
    every, layers = s.get("sliding_window_pattern"), s.get("num_hidden_layers")
    s.require("sliding_window_pattern", every > 0, "a positive number")
    full = ((i + 1) % every == 0 for i in range(layers))
    config = s.decoder("cohere2", SWITCHES, logit_scale=s.get("logit_scale"), **s.windows(full))
    return _always(config)


def configure(config: ModelConfig) -> ModelConfig:
    return replace(_always(config), window_layers=config.windows_or_every(4))


def _always(config: ModelConfig) -> ModelConfig:
    return replace(config, rope=replace(config.rope, interleaved=True), centred_norms=True)


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    h = net.norm(x, f"blk.{i}.attn_norm")
    y = net.attend(*net.qkv(h, i), i, rope=net.config.slides(i))
    return x + net.linear(y, f"blk.{i}.attn_output") + net.ffn(h, i)


__all__ = ["FIELDS", "HF_NAMES", "configure", "embed", "finish", "layer", "read_config"]
