"""Models of files as differentiable functions: against inference, transformers' logits, central
differences, and the laws of packing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "finetune"))
import tiny
from finetune_models import write_llama

import rlx
from rlx.formats.gguf import write_gguf
from rlx.ir.quant.scheme import decode
from rlx.models.finetune.training_model import LoraConfig, TrainingModel
from rlx.models.model_file import ModelFile
from rlx.models.to_gguf import gguf_of, quantize_model
from rlx.numpy.tree import flatten

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, tiny.VOCAB, (3, 14)).astype(np.int32)
LABELS = np.roll(TOKENS, -1, axis=1)
LABELS[:, -1] = -100
BATCH = {"tokens": TOKENS, "labels": LABELS}
SMALL = LoraConfig(rank=4, alpha=8)
STEP = 1e-3  # of differences


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


def value_and_gradient(model: TrainingModel, params: Any, batch: Any = BATCH) -> tuple[float, Any]:
    (value, _), grads = rlx.value_and_grad(model.loss, has_aux=True)(params, batch)
    return float(value), rlx.tree_map(np.asarray, grads)


def leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in flatten(tree)[0]]


@pytest.mark.parametrize("lora", [SMALL, LoraConfig(rank=2, use_dora=True), None])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3_moe"])
def test_gradients_are_differences(name: str, lora: LoraConfig | None, tmp_path: Path) -> None:
    """Along the gradient itself the loss grows by the gradient's length: the median of the slopes
    of short intervals around, as in some of them a token changes its experts. An f32 loss near 5
    has 5e-7 of rounding, over a step of 1e-3. DoRA takes the lengths of rows as constants for A
    and B, as PEFT does, so only what it learns besides is compared."""
    model = TrainingModel(opened(name, tmp_path), lora, context=40)
    params = moved(model.init(0)) if lora is not None else model.init(0)
    _, grads = value_and_gradient(model, params)
    if lora is not None and lora.use_dora:
        grads = {k: {n: g * (n == "magnitude") for n, g in x.items()} for k, x in grads.items()}
    length = float(np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in leaves(grads))))

    def at(steps: int) -> float:
        by = steps * STEP / length
        there = rlx.tree_map(lambda p, g: np.asarray(p) + np.float32(by) * g, params, grads)
        return float(model.loss(there, BATCH)[0])

    slopes = np.diff([at(i) for i in range(-4, 5)]) / STEP
    assert length > 0.1 and abs(np.median(slopes) - length) < 5e-3 * length, (slopes, length)


def test_documents_of_a_row_do_not_see_each_other(tmp_path: Path) -> None:
    """The loss and the gradients of a packed row are the mean over its documents alone."""
    model = TrainingModel(opened("llama", tmp_path), SMALL, context=40)
    params, lengths = moved(model.init(0)), (5, 9)
    row, labels = TOKENS[:1], LABELS[:1].copy()
    labels[0, [4, 13]] = -100
    segments = np.repeat(np.int32([1, 2]), lengths)[None]
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])[None]
    batch = {"tokens": row, "labels": labels, "segments": segments, "positions": positions}
    whole, grads = value_and_gradient(model, params, batch)
    parts = []
    for begin, end in ((0, 5), (5, 14)):
        alone = {"tokens": row[:, begin:end], "labels": labels[:, begin:end]}
        parts.append((end - begin - 1, *value_and_gradient(model, params, alone)))
    assert abs(whole - sum(n * x for n, x, _ in parts) / 12) < 1e-5 * whole
    mean = rlx.tree_map(lambda a, b: (4 * a + 8 * b) / 12, parts[0][2], parts[1][2])
    for got, wanted in zip(leaves(grads), leaves(mean), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("remat", ["nothing", "matmuls"])
def test_rematerialisation_changes_no_gradient(remat: str, tmp_path: Path) -> None:
    file = opened("llama", tmp_path)
    params = moved(TrainingModel(file, SMALL, context=40).init(0))
    wanted = value_and_gradient(TrainingModel(file, SMALL, context=40), params)
    got = value_and_gradient(TrainingModel(file, SMALL, context=40, remat=remat), params)
    assert got[0] == wanted[0]
    for a, b in zip(leaves(got[1]), leaves(wanted[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0"])
def test_packed_weights_are_multiplied_as_they_lie(quant: str, tmp_path: Path) -> None:
    """Loss and gradients are those of the same weights unpacked into floats: sums in another order,
    nothing is rounded besides."""
    write_llama(tmp_path)
    metadata, sources = gguf_of(ModelFile.open(tmp_path))
    arrays = {name: source.array() for name, source in sources.items()}
    write_gguf(tmp_path / "floats.gguf", metadata, arrays)
    quantize_model(tmp_path / "floats.gguf", tmp_path / "packed.gguf", quant)
    packed = ModelFile.open(tmp_path / "packed.gguf")
    stored = {name: packed.weights().get(name) for name in arrays}
    assert sum(w.scheme is not None for w in stored.values()) >= 21  # the layers' matrices
    decoded = {
        name: w.array if w.scheme is None else decode(w.scheme, w.array).astype(np.float32)
        for name, w in stored.items()
    }
    write_gguf(tmp_path / "decoded.gguf", metadata, decoded)
    model = TrainingModel(packed, SMALL, context=40)
    params = moved(model.init(0))
    value, grads = value_and_gradient(model, params)
    floats = TrainingModel(ModelFile.open(tmp_path / "decoded.gguf"), SMALL, context=40)
    wanted, others = value_and_gradient(floats, params)
    assert abs(value - wanted) < 1e-5 * wanted
    for a, b in zip(leaves(grads), leaves(others), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max())
