"""Mistral: Llama with a sliding window. GGUF calls it llama."""

from __future__ import annotations

from rlx.models.arch.llama import COMMON, embed, finish, layer
from rlx.models.arch.llama import PLAIN as HF_NAMES
from rlx.models.config import ModelConfig
from rlx.models.config_fields import number, read
from rlx.models.config_hf import HfSettings

FIELDS = {
    **COMMON,
    **read(
        intermediate_size=14336, num_key_value_heads=number(8), max_position_embeddings=131072,
        sliding_window=number(4096),
    ),
}  # fmt: skip


def read_config(s: HfSettings) -> ModelConfig:
    return s.decoder("mistral", {}, sliding_window=s.window())


__all__ = ["FIELDS", "HF_NAMES", "embed", "finish", "layer", "read_config"]
