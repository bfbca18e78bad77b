"""Vocabularies in the sizes and kinds of real models, made up: the same every time.

Tokens are words of syllables, as long as those of real vocabularies are, and every one is made of
two others, by a merge or by scores, as training would have made it.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
SPACE = "\u2581"
_LETTERS = "etaoinshrdlucmfwypvbgkqjxz"
_LONGEST = 12  # characters of a word
_SKEW = 6  # the more, the shorter are the tokens
KEY = "tokenizer.ggml."

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def byte_characters() -> list[str]:
    """GPT-2's character for every byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    extra = iter(range(0x100, 0x200))
    return [chr(b) if b in plain else chr(next(extra)) for b in range(256)]


def grown(alphabet: list[str], space: str, count: int, seed: int) -> list[tuple[str, str]]:
    """`count` pairs of which every one makes a new token of the alphabet or of earlier ones."""
    rng = random.Random(seed)
    letters = [c for c in _LETTERS if c in alphabet]
    inner = [*letters]  # what goes on within a word
    starts = [space + c for c in letters]  # what begins one
    known = {*alphabet, *starts}
    pairs = [(space, c) for c in letters]
    while len(pairs) < count:
        # early ones are short and join often, as in training
        left = starts if rng.random() < 0.6 else inner
        a = left[int(len(left) * rng.random() ** _SKEW)]
        b = inner[int(len(inner) * rng.random() ** _SKEW)]
        token = a + b
        if len(token) <= _LONGEST and token not in known:
            known.add(token)
            left.append(token)
            pairs.append((a, b))
    return pairs


def byte_bpe(size: int, pre: str, special: list[str], more_merges: int = 0) -> dict[str, Any]:
    """Byte-level BPE as in GPT-2; `more_merges` are further ways to make tokens."""
    alphabet = byte_characters()
    pairs = grown(alphabet, "\u0120", size - len(alphabet) - len(special), seed=size)
    tokens = alphabet + [a + b for a, b in pairs] + special
    known, lines = set(tokens), [f"{a} {b}" for a, b in pairs]
    for a, b in pairs:
        if len(lines) - len(pairs) == more_merges:
            break
        token = a + b
        cut = next(
            (i for i in range(1, len(token)) if i != len(a) and token[:i] in known
             and token[i:] in known), 0,
        )  # fmt: skip
        if cut:
            lines.append(f"{token[:cut]} {token[cut:]}")
    types = np.full(size, NORMAL, np.int32)
    types[size - len(special) :] = CONTROL
    return {
        KEY + "model": "gpt2",
        KEY + "pre": pre,
        KEY + "tokens": tokens,
        KEY + "token_type": types,
        KEY + "merges": lines,
        KEY + "bos_token_id": size - len(special),
        KEY + "eos_token_id": size - 1,
        "tokenizer.chat_template": CHATML,
    }


def sentencepiece(
    size: int, special: list[str], user: int = 0, *, space_first: bool = True
) -> dict[str, Any]:
    """SentencePiece BPE; `user` tokens stand for themselves, as Gemma has thousands of them."""
    head = [*special, *(f"<0x{i:02X}>" for i in range(256)), *(f"<unused{i}>" for i in range(user))]
    alphabet = [*_LETTERS, *_LETTERS.upper(), *"0123456789.,!?'\"-()\n", SPACE]
    pairs = grown(alphabet, SPACE, size - len(head) - len(alphabet), seed=size)
    tokens = [*head, *(a + b for a, b in pairs), *alphabet]
    types = np.full(size, NORMAL, np.int32)
    types[: len(special)] = CONTROL
    types[special.index("<unk>")] = UNKNOWN
    types[len(special) : len(special) + 256] = BYTE
    types[len(special) + 256 : len(head)] = USER
    scores = np.zeros(size, np.float32)
    scores[len(head) :] = -np.arange(size - len(head), dtype=np.float32)
    found: dict[str, Any] = {
        KEY + "model": "llama",
        KEY + "tokens": tokens,
        KEY + "scores": scores,
        KEY + "token_type": types,
        KEY + "add_space_prefix": space_first,
        "tokenizer.chat_template": TURNS if "<start_of_turn>" in special else CHATML,
    }
    for key, text in (("bos", "<s>"), ("eos", "</s>"), ("unknown", "<unk>")):
        name = text if text in special else f"<{key}>"
        found[f"{KEY}{key}_token_id"] = special.index(name)
    return found


def qwen() -> dict[str, Any]:
    return byte_bpe(151_936, "qwen2", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])


def llama3() -> dict[str, Any]:
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(252)]
    special = ["<|begin_of_text|>", "<|im_start|>", *reserved, "<|im_end|>", "<|end_of_text|>"]
    return byte_bpe(128_256, "llama-bpe", special, more_merges=152_000)


def llama() -> dict[str, Any]:
    return sentencepiece(32_000, ["<unk>", "<s>", "</s>"])


def gemma() -> dict[str, Any]:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    return sentencepiece(262_144, special, user=6_242, space_first=False)
