"""Makes the goldens of tests/models with Hugging Face transformers.

    pip install torch==2.13.0 transformers numpy
    python tests/goldens/make.py [NAME …]

Writes logits_<name>.npz: greedy tokens and the logits of prompt and steps, in f32.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from tiny import CONFIGS, PROMPT, STEPS, write_folder
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent


def make(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_folder(name, Path(folder))
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    model.eval()
    tokens = list(PROMPT)
    with torch.no_grad():
        rows = model(torch.tensor([tokens])).logits[0].numpy()
        for _ in range(STEPS):  # the whole sequence anew each time: no cache to trust
            tokens.append(int(rows[-1].argmax()))
            rows = model(torch.tensor([tokens])).logits[0].numpy()
    np.savez_compressed(HERE / f"logits_{name}.npz", tokens=np.array(tokens), logits=rows)
    print(name, rows.shape, float(np.abs(rows).max()))


if __name__ == "__main__":
    for each in sys.argv[1:] or CONFIGS:
        make(each)
