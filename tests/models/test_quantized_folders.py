"""Models from quantised Hugging Face folders: the same logits as from a folder of floats that holds
the numbers which the integers and scales stand for, computed here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_goldens import compiled

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "formats"))
from test_hf_quant import bits_to_words
from test_safetensors import packed
from tiny import PROMPT, weights, write_config

import rlx
from rlx.models.model_file import ModelFile

F8 = ml_dtypes.float8_e4m3fn


def fp8(matrix: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    """Blocks of 32 × 16: stored parts, and the numbers."""
    n, k = matrix.shape
    scale = np.full((-(-n // 32), -(-k // 16)), 0.01, np.float32)
    scale *= np.arange(1, scale.size + 1, dtype=np.float32).reshape(scale.shape)
    wide = np.kron(scale, np.ones((32, 16), np.float32))[:n, :k]
    codes = (matrix / wide).clip(-448, 448).astype(F8)
    parts = {"weight": ("F8_E4M3", codes), "weight_scale_inv": ("F32", scale)}
    return parts, codes.astype(np.float32) * wide


def gptq(matrix: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    """4 bits, groups of 32 input columns."""
    n, k = matrix.shape
    groups = matrix.reshape(n, k // 32, 32)
    scale = (np.abs(groups).max(-1) / 7).astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint(groups / scale[..., None]) + 8, 0, 15).astype(int)
    parts = {
        "qweight": ("I32", np.ascontiguousarray(bits_to_words(codes.reshape(n, k), 4).T)),
        "qzeros": ("I32", bits_to_words(np.full((k // 32, n), 7), 4)),
        "scales": ("F16", np.ascontiguousarray(scale.T.astype(np.float16))),
    }
    return parts, ((codes - 8) * scale[..., None]).reshape(n, k).astype(np.float32)


def write(name: str, pack: Any, settings: dict[str, Any], quant: Path, plain: Path) -> None:
    """The model twice: with packed matrices of layers, and as the floats that they stand for."""
    stored: dict[str, Any] = {}
    floats: dict[str, Any] = {}
    for tensor, array in weights(name).items():
        if array.ndim == 2 and ".layers." in tensor and "gate.weight" not in tensor:
            parts, numbers = pack(array)
            base = tensor.removesuffix(".weight")
            stored |= {f"{base}.{part}": given for part, given in parts.items()}
            floats[tensor] = ("F32", numbers)
        else:
            stored[tensor] = floats[tensor] = ("F32", array)
    for folder, arrays in ((quant, stored), (plain, floats)):
        folder.mkdir()
        write_config(name, folder)
        (folder / "model.safetensors").write_bytes(packed(arrays))
    config = json.loads((quant / "config.json").read_text())
    (quant / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def logits(folder: Path, quant: str | None = None) -> np.ndarray:
    f = compiled(ModelFile.open(folder, quant), 40, "cpu")
    ids = np.array([PROMPT], np.int32)
    found: np.ndarray = f.run(ids=ids, sizes={"past_seq": 0})[0]
    return found


@pytest.mark.parametrize(
    ("name", "pack", "settings"),
    [
        ("llama", gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
        ("qwen3_moe", fp8, {"quant_method": "fp8", "weight_block_size": [32, 16]}),
    ],
)
def test_the_model_is_that_of_its_numbers(
    name: str, pack: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    quant, plain = tmp_path / "quant", tmp_path / "plain"
    write(name, pack, settings, quant, plain)
    wanted = logits(plain)
    assert np.array_equal(logits(quant), wanted)
    # packed again on request: from the same floats, so the same bits
    assert np.array_equal(logits(quant, "Q8_0"), logits(plain, "Q8_0"))


def test_a_scale_that_is_missing_is_named_before_anything_is_built(tmp_path: Path) -> None:
    quant, plain = tmp_path / "quant", tmp_path / "plain"
    write("llama", fp8, {"quant_method": "fp8", "weight_block_size": [16, 16]}, quant, plain)
    with pytest.raises(rlx.FormatError, match=r"weight_scale_inv does not fit .*\.weight"):
        rlx.load(quant)
