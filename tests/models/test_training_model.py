"""Models of files as differentiable functions: against inference, transformers' logits, central
differences, and the laws of packing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
import tiny

import rlx
from rlx.models.finetune.training_model import LoraConfig, TrainingModel
from rlx.models.model_file import ModelFile

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, tiny.VOCAB, (3, 14)).astype(np.int32)
LABELS = np.roll(TOKENS, -1, axis=1)
LABELS[:, -1] = -100
BATCH = {"tokens": TOKENS, "labels": LABELS}
SMALL = LoraConfig(rank=4, alpha=8)


def opened(name: str, folder: Path, quant: str | None = None) -> ModelFile:
    tiny.write_folder(name, folder)
    return ModelFile.open(folder, quant)


def moved(params: Any, seed: int = 1, by: float = 0.05) -> Any:
    """Parameters away from the first ones, where B is zero and so are A's gradients."""
    rng = np.random.default_rng(seed)
    return rlx.tree_map(
        lambda x: np.asarray(x) + by * rng.standard_normal(x.shape).astype(np.float32), params
    )


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """Adapters begin as nothing. f32 all the way, as in test_goldens."""
    golden = np.load(GOLDENS / f"logits_{name}.npz")
    tokens, wanted = golden["tokens"].astype(np.int32), golden["logits"]
    model = TrainingModel(opened(name, tmp_path), SMALL, context=32 if name == "phi3_long" else 40)
    got = model.logits(model.init(0), {"tokens": np.stack([tokens, tokens[::-1]])})
    largest = float(np.abs(wanted).max())
    np.testing.assert_allclose(np.asarray(got)[0], wanted, rtol=0, atol=1e-4 * largest)
