"""Checks of batch invariance on cuda: a request's tokens and log probabilities are bit for bit the
same alone and beside others. Added to those of `checks_on_gpu`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tiny
from checks_on_gpu import CHECKS, Letters
from tiny import CONFIGS, VOCAB, shapes, write_folder, write_safetensors

import rlx
from rlx.ir.dtype import DType
from rlx.models.model_file import ModelFile

_SIZES = {
    "HIDDEN": "hidden_size", "HEADS": "num_attention_heads", "KV": "num_key_value_heads",
    "HEAD": "head_dim", "FFN": "intermediate_size",
}  # fmt: skip
_WIDE = {
    **CONFIGS["qwen3"], "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 128, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
}  # fmt: skip


@contextmanager
def sizes_of(config: dict[str, Any]) -> Iterator[None]:
    """The tables of `tiny` with the sizes of another model."""
    before = {name: getattr(tiny, name) for name in _SIZES}
    for name, field in _SIZES.items():
        setattr(tiny, name, config[field])
    try:
        yield
    finally:
        for name, size in before.items():
            setattr(tiny, name, size)


def write_model(folder: Path, config: dict[str, Any], dtype: str) -> None:
    """A model of random weights, matrices in this type."""
    rng, tensors = np.random.default_rng(5), dict[str, np.ndarray]()
    with sizes_of(config):
        found = shapes(config)
    for name, shape in found.items():
        x = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            tensors[name] = (1 + 0.2 * x).astype(np.float32)
        else:
            tensors[name] = (x / np.sqrt(shape[-1])).astype(DType.of(dtype).numpy)
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def prompt_of(number: int, length: int) -> str:
    return "".join(chr(256 + (7 * number + 3 * j * j + j) % 150) for j in range(length))


def same_bits(
    dtype: str = "bf16", quant: str | None = None, kv: str = "f16", groups: Any = (1, 3, 8),
    tokens: int = 12, longest: int = 300, config: dict[str, Any] = _WIDE,
) -> None:  # fmt: skip
    """The requests one after another, some at a time, and all together, with prompts of many
    lengths: chunks of them run beside the tokens of others."""
    ModelFile.tokenizer = lambda self: Letters()  # type: ignore[method-assign,assignment,return-value]
    count = max(groups)
    prompts = [prompt_of(i, 1 + (i * 97 + 40) % longest) for i in range(count)]
    settings: list[dict[str, Any]] = [
        {"temperature": 0.8 if i % 2 else 0.0, "seed": i, "logprobs": 3} for i in range(count)
    ]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), config, dtype)
        known: list[Any] = []
        for together in groups:
            with rlx.Engine(
                folder, requests=max(together, 3), context=longest + 2 * tokens, device="cuda",
                kv=kv, quant=quant, batch_invariant=True,
            ) as engine:  # fmt: skip
                found = []
                for first in range(0, count, together):
                    replies = [
                        engine.submit(
                            prompts[i], max_tokens=tokens, prompt_logprobs=1, **settings[i]
                        )
                        for i in range(first, min(first + together, count))
                    ]
                    found += [reply.wait() for reply in replies]
            rows = [(r.tokens, r.logprobs, r.prompt_logprobs) for r in found]
            known = known or rows
            for number, (row, want) in enumerate(zip(rows, known, strict=True)):
                assert row == want, (together, number, len(prompts[number]), difference(row, want))


def difference(row: Any, want: Any) -> str:
    """Where two requests begin to differ."""
    for what, a, b in zip(("tokens", "logprobs", "prompt"), row, want, strict=True):
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            if x != y:
                return f"{what} {i}: {x} {y}"
    return "lengths"


def same_chunks(dtype: str = "bf16", longest: int = 700, tokens: int = 8) -> None:
    """`rlx.load`: a prompt at once, and behind a prefix that was there already."""
    ModelFile.tokenizer = lambda self: Letters()  # type: ignore[method-assign,assignment,return-value]
    prompt, found = prompt_of(1, longest), []
    how: dict[str, Any] = {"stream": False, "max_tokens": tokens, "logprobs": 2, "seed": 3}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), _WIDE, dtype)
        for cut in (0, 1, longest // 3, longest - 1):
            with rlx.load(
                folder, device="cuda", context=longest + 40, batch_invariant=True
            ) as model:
                if cut:
                    model.generate(prompt[:cut], stream=False, max_tokens=1, seed=1)
                made = model.generate(prompt, **how)
                found.append((made.tokens, made.logprobs))
    assert all(each == found[0] for each in found), found


CHECKS["same bits of two tiny requests"] = lambda: same_bits(
    "f32", groups=(1, 2), tokens=2, longest=30, config=CONFIGS["llama"]
)
CHECKS["same bits bf16"] = same_bits
CHECKS["same bits f16"] = lambda: same_bits("f16")
CHECKS["same bits f32"] = lambda: same_bits("f32", kv="f32", longest=100)
CHECKS["same bits Q8_0"] = lambda: same_bits("f32", "Q8_0", longest=100)
CHECKS["same bits Q4_K"] = lambda: same_bits("f32", "Q4_K_M", longest=100)
CHECKS["same bits q8_0 cache"] = lambda: same_bits(kv="q8_0")
CHECKS["same bits in chunks"] = same_chunks


def constrained(name: str = "llama", kv: str = "f32", tokens: int = 5) -> None:
    """`rlx.load`: penalties, a bias and log probabilities, of prompts and of what is decoded."""
    ModelFile.tokenizer = lambda self: Letters()  # type: ignore[method-assign,assignment,return-value]
    ways: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5, "temperature": 0.0, "logprobs": 3},
        {"presence_penalty": 2.0, "logit_bias": {7: 4.0, 9: -50.0}, "seed": 4, "logprobs": 25},
    ]
    with tempfile.TemporaryDirectory() as folder:
        write_folder(name, Path(folder))
        models = [rlx.load(folder, device=d, context=64, kv=kv) for d in ("cuda", "reference")]
        for how in ways:
            got, want = (
                m.generate(prompt_of(2, 20), stream=False, max_tokens=tokens, **how) for m in models
            )
            assert got.tokens == want.tokens, (how, got.tokens, want.tokens)
            for row, other in zip(got.logprobs, want.logprobs, strict=True):
                assert row.keys() == other.keys()
                assert all(abs(row[t] - other[t]) < 1e-3 for t in row)
        for model in models:
            model.close()


CHECKS["constrained answers"] = constrained
