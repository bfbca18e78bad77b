"""Tokenizers: text to token ids and back, from a GGUF file or a Hugging Face `tokenizer.json`."""

from __future__ import annotations

from rlx.formats.tokenizer.tokenizer import Tokenizer, Vocabulary

__all__ = ["Tokenizer", "Vocabulary"]
