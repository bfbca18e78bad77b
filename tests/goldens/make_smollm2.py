"""Makes smollm2.json, the golden of tests/models/test_smollm2.py, with llama.cpp.

    pip install llama-cpp-python numpy
    python tests/goldens/make_smollm2.py SMOLLM2.gguf

For every prompt: its token ids, the tokens that follow greedily, and for each of those the token
that came second and by how much. Then the log probability of every token of a fixed text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from smollm2_prompts import PROMPTS, STEPS, TEXT


def tokens_of(model: llama_cpp.Llama, text: str) -> list[int]:
    return list(model.tokenize(text.encode(), add_bos=False, special=True))


def greedy(model: llama_cpp.Llama, prompt: list[int]) -> dict[str, Any]:
    model.reset()
    pending, found = prompt, {"tokens": [], "second": [], "margin": []}
    for _ in range(STEPS):
        model.eval(pending)
        row = np.array(model.scores[model.n_tokens - 1], np.float32)
        first, second = np.argsort(-row)[:2]
        found["tokens"].append(int(first))
        found["second"].append(int(second))
        found["margin"].append(round(float(row[first] - row[second]), 4))
        pending = [int(first)]
    return {"prompt": prompt, **found}


def perplexity(model: llama_cpp.Llama, tokens: list[int]) -> float:
    model.reset()
    model.eval(tokens)
    rows = np.array(model.scores[: len(tokens) - 1], np.float64)
    rows -= rows.max(-1, keepdims=True)
    picked = rows[np.arange(len(rows)), tokens[1:]]
    return float(np.exp(np.mean(np.log(np.exp(rows).sum(-1)) - picked)))


def main() -> None:
    model = llama_cpp.Llama(
        sys.argv[1], n_ctx=2048, n_batch=512, n_threads=2, n_threads_batch=2, logits_all=True,
        verbose=False,
    )  # fmt: skip
    text = tokens_of(model, TEXT)
    golden = {
        "made_with": f"llama-cpp-python {llama_cpp.__version__}",
        "answers": [greedy(model, tokens_of(model, p)) for p in PROMPTS],
        "text": text,
        "perplexity": perplexity(model, text),
    }
    path = Path(__file__).resolve().parent / "smollm2.json"
    path.write_text(json.dumps(golden, separators=(",", ":")) + "\n", encoding="utf-8")
    print(len(text), golden["perplexity"], min(min(a["margin"]) for a in golden["answers"]))


if __name__ == "__main__":
    main()
