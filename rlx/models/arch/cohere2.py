"""Cohere 2 (Command R7B): attention and FFN in parallel, full attention in one layer of four.

Layers with sliding-window attention have rotary positions, the others none.
"""

from __future__ import annotations

from dataclasses import replace

from rlx.models.arch.llama import HF_NAMES, embed, finish
from rlx.models.config import ModelConfig
from rlx.models.decoder_builder import DecoderBuilder, Tensor


def configure(config: ModelConfig) -> ModelConfig:
    rope = replace(config.rope, interleaved=True)
    return replace(config, rope=rope, centred_norms=True, window_pattern=4)


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    h = net.norm(x, f"blk.{i}.attn_norm")
    y = net.attend(*net.qkv(h, i), i, rope=net.config.slides(i))
    return x + net.linear(y, f"blk.{i}.attn_output") + net.ffn(h, i)


__all__ = ["HF_NAMES", "configure", "embed", "finish", "layer"]
