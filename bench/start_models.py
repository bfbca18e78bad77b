"""The models that `bench start` starts: random weights in the shapes of small models, with
vocabularies of four sizes and kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import vocabularies
from bench.random_model import random_blocks
from rlx.formats.gguf.writer import PackedTensor, write_gguf
from rlx.ir.quant.scheme import GGUF_SCHEMES


@dataclass(frozen=True)
class StartModel:
    """The shape of a model. The embedding is the head too."""

    name: str
    arch: str
    vocabulary: Callable[[], dict[str, Any]]
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    kind: str  # of the weights

    def write(self, path: Path) -> None:
        metadata = self.vocabulary()
        vocab = len(metadata["tokenizer.ggml.tokens"])
        rng, scheme = np.random.default_rng(0), GGUF_SCHEMES[self.kind]

        def matrix(n: int, k: int) -> PackedTensor:
            return PackedTensor((n, k), scheme, lambda: random_blocks(rng, scheme, n, k))

        tensors: dict[str, Any] = {"token_embd.weight": matrix(vocab, self.hidden)}
        for i in range(self.layers):
            for name, n, k in self._matrices():
                tensors[f"blk.{i}.{name}.weight"] = matrix(n, k)
            for name, n in self._norms():
                tensors[f"blk.{i}.{name}.weight"] = np.ones(n, np.float32)
        tensors["output_norm.weight"] = np.ones(self.hidden, np.float32)
        write_gguf(path, self._settings() | metadata, tensors)

    def _matrices(self) -> list[tuple[str, int, int]]:
        own, kv = self.heads * self.head, self.kv_heads * self.head
        return [
            ("attn_q", own, self.hidden), ("attn_k", kv, self.hidden),
            ("attn_v", kv, self.hidden), ("attn_output", self.hidden, own),
            ("ffn_gate", self.ffn, self.hidden), ("ffn_up", self.ffn, self.hidden),
            ("ffn_down", self.hidden, self.ffn),
        ]  # fmt: skip

    def _norms(self) -> list[tuple[str, int]]:
        found = [("attn_norm", self.hidden), ("ffn_norm", self.hidden)]
        if self.arch != "llama":
            found += [("attn_q_norm", self.head), ("attn_k_norm", self.head)]
        if self.arch == "gemma3":
            found += [("post_attention_norm", self.hidden), ("post_ffw_norm", self.hidden)]
        return found

    def _settings(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "block_count": self.layers,
            "context_length": 8192,
            "embedding_length": self.hidden,
            "feed_forward_length": self.ffn,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head,
            "attention.value_length": self.head,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e6,
        }
        if self.arch == "llama":
            found["rope.dimension_count"] = self.head
        if self.arch == "gemma3":
            found["attention.sliding_window"] = 512
        named = {f"{self.arch}.{key}": value for key, value in found.items()}
        return {"general.architecture": self.arch, "general.name": self.name, **named}


MODELS = (
    StartModel("qwen3-0.6b", "qwen3", vocabularies.qwen, 1024, 28, 16, 8, 128, 3072, "Q8_0"),
    StartModel("llama3-0.5b", "llama", vocabularies.llama3, 1024, 24, 16, 8, 64, 4096, "Q4_0"),
    StartModel("llama2-0.3b", "llama", vocabularies.llama, 1024, 22, 16, 4, 64, 2816, "Q4_0"),
    StartModel("gemma3-270m", "gemma3", vocabularies.gemma, 640, 18, 4, 1, 256, 2048, "Q8_0"),
)
