"""Makes variants.npz, the golden of the configurations in variants.py, with transformers.

    pip install torch==2.13.0 transformers numpy
    python tests/goldens/make_variants.py [NAME …]

Of each variant: the tensors that transformers saves for it, its config.json where transformers
writes that too, and logits or hidden states and scores of the same tokens, in f32.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tiny import write_safetensors
from variants import DECODERS, ENCODERS, TOKENS, VARIANTS, config, values

HERE = Path(__file__).resolve().parent


def make(name: str) -> dict[str, Any]:
    kind, found = VARIANTS[name][0], dict[str, Any]()
    head = "AutoModelForSequenceClassification" if kind in ENCODERS else "AutoModelForCausalLM"
    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(config(name)))
        made = transformers.AutoConfig.from_pretrained(folder)
        model = getattr(transformers, head).from_config(made, attn_implementation="eager")
        model.float().save_pretrained(folder)
        saved = (folder / "config.json").read_bytes()
        if name.endswith("_saved"):
            found["config"] = np.frombuffer(saved, np.uint8)
        else:
            (folder / "config.json").write_text(json.dumps(config(name)))
        shapes = _shapes(folder / "model.safetensors")
        arrays = {tensor: values(name, tensor, shape) for tensor, shape in shapes.items()}
        write_safetensors(folder / "model.safetensors", arrays)
        found["tensors"] = np.frombuffer(json.dumps(shapes).encode(), np.uint8)
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        ids = torch.tensor([TOKENS])
        scores, told = getattr(transformers, head).from_pretrained(
            folder, output_loading_info=True, **options
        )
        assert not told["missing_keys"] and not told["unexpected_keys"], (name, told)
        found["logits"] = scores.eval()(input_ids=ids).logits[0].numpy()
        if kind in ENCODERS:
            plain = transformers.AutoModel.from_pretrained(folder, **options)
            found["hidden"] = plain.eval()(input_ids=ids).last_hidden_state[0].numpy()
    return {f"{name}/{part}": array for part, array in found.items()}


def defaults(kind: str) -> dict[str, Any]:
    """What the configuration class of transformers takes for absent fields."""
    made = transformers.CONFIG_MAPPING[kind]
    found = {f.name: f.default for f in dataclasses.fields(made)}
    found["rope_theta"] = made.default_theta
    return {n: v for n, v in found.items() if v is None or isinstance(v, (int, float, str))}


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return {n: tuple(t["shape"]) for n, t in sorted(header.items()) if n != "__metadata__"}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    golden: dict[str, Any] = dict(np.load(HERE / "variants.npz")) if sys.argv[1:] else {}
    for each in sys.argv[1:] or VARIANTS:
        golden |= make(each)
    for each in (*DECODERS, *ENCODERS):
        golden[f"{each}/defaults"] = np.frombuffer(json.dumps(defaults(each)).encode(), np.uint8)
    np.savez_compressed(HERE / "variants.npz", **golden)
