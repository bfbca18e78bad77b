"""Every architecture from GGUF, by llama.cpp's names and keys: the same as from a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
import gguf
from gguf_files import packed_experts, write_model
from test_goldens import GOLDENS, close, compiled
from tiny import CONFIGS, weights, write_config, write_safetensors

from rlx.ir.quant.scheme import GGUF_SCHEMES
from rlx.models.model_file import ModelFile

# GGUF keeps factors of frequencies as tensors, has no key for Gemma's scale of scores, and norms
# each group of Mamba 2 by itself, as its authors do
OTHERWISE = ("llama_llama3", "phi3_long", "gemma2", "gemma3", "mamba2_groups")


@pytest.mark.parametrize("name", [n for n in CONFIGS if n not in OTHERWISE])
def test_same_logits_as_transformers(name: str, tmp_path: Path) -> None:
    golden = np.load(GOLDENS / f"logits_{name}.npz")
    tokens, wanted = golden["tokens"].astype(np.int32), golden["logits"]
    write_model(name, tmp_path / "model.gguf")
    f = compiled(ModelFile.open(tmp_path / "model.gguf"), 40, "cpu")
    for start, stop in ((0, 20), (20, 21), (21, len(tokens))):
        (logits,) = f.run(ids=tokens[None, start:stop], sizes={"past_seq": start})
        close(logits[0], wanted[start:stop])


def _logits(model: ModelFile, tokens: np.ndarray, device: str) -> np.ndarray:
    (logits,) = compiled(model, 40, device).run(ids=tokens[None], sizes={"past_seq": 0})
    return np.asarray(logits[0])


def test_folders_of_mxfp4_are_the_same_as_gguf(tmp_path: Path) -> None:
    """gpt-oss as it is published: blocks with neighbouring codes in a byte, scales beside them."""
    name, scheme = "gpt_oss", GGUF_SCHEMES["MXFP4"]
    tokens = np.load(GOLDENS / f"logits_{name}.npz")["tokens"].astype(np.int32)
    write_model(name, tmp_path / "packed.gguf", packed_experts("MXFP4"))
    wanted = _logits(ModelFile.open(tmp_path / "packed.gguf"), tokens, "reference")
    tensors: dict[str, np.ndarray] = {}
    for tensor, array in weights(name).items():
        if not tensor.endswith(("gate_up_proj", "experts.down_proj")):
            tensors[tensor] = array
            continue
        rows = gguf.quants.quantize(array.swapaxes(1, 2), gguf.GGMLQuantizationType.MXFP4)
        blocks = rows.reshape(*rows.shape[:2], -1, scheme.bytes_per_block)
        codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
        tensors[f"{tensor}_blocks"] = codes[..., 0::2] | codes[..., 1::2] << 4
        tensors[f"{tensor}_scales"] = blocks[..., 0]
    write_config(name, tmp_path)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    got = _logits(ModelFile.open(tmp_path), tokens, "reference")
    np.testing.assert_array_equal(got, wanted)
