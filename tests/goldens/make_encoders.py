"""Makes the goldens of tests/models/test_encoders.py with Hugging Face transformers.

    pip install torch==2.13.0 transformers numpy
    python tests/goldens/make_encoders.py MINILM_FOLDER

Writes encoders.npz (hidden states and logits of every tiny encoder, in f32) and minilm.npz
(normalised vectors of the real default encoder, whose folder is given).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_encoders import CONFIGS, LENGTHS, SENTENCES, batch, write_folder
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

HERE = Path(__file__).resolve().parent


def tiny(name: str) -> dict[str, Any]:
    ids, types = (torch.tensor(a) for a in batch(name))
    mask = torch.tensor([[i < n for i in range(max(LENGTHS))] for n in LENGTHS])
    given = {"input_ids": ids, "attention_mask": mask.long()}
    typed = {"token_type_ids": types} if CONFIGS[name].get("type_vocab_size", 0) > 1 else {}
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        write_folder(name, Path(folder))
        plain = AutoModel.from_pretrained(folder, **options).eval()
        scoring = AutoModelForSequenceClassification.from_pretrained(folder, **options).eval()
        hidden = plain(**given).last_hidden_state * mask[:, :, None]
        logits = scoring(**given, **typed).logits
    print(name, hidden.shape, float(hidden.abs().max()), logits.flatten().tolist())
    return {f"{name}_hidden": hidden.numpy(), f"{name}_logits": logits.numpy()}


def minilm(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    vectors = []
    with torch.no_grad():
        for text in SENTENCES:  # one by one: nothing is padded
            given = tokenizer([text], truncation=True, max_length=256, return_tensors="pt")
            mean = model.eval()(**given).last_hidden_state.mean(1)
            vectors.append(torch.nn.functional.normalize(mean)[0].numpy())
    np.savez_compressed(HERE / "minilm.npz", vectors=np.array(vectors))


if __name__ == "__main__":
    found: dict[str, Any] = {}
    for each in CONFIGS:
        found |= tiny(each)
    np.savez_compressed(HERE / "encoders.npz", **found)
    minilm(sys.argv[1])
