"""`quant=` packs the floats of a file when a model is loaded, as `rlx quantize` does in a file."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
from tiny import write_folder

from rlx import Session
from rlx.errors import InputError, OptionError
from rlx.formats.gguf import write_gguf
from rlx.ir.quant.scheme import decode, encode
from rlx.models.builder import LOGITS, build_graph
from rlx.models.load import load
from rlx.models.model_file import ModelFile
from rlx.models.to_gguf import quantize_model
from rlx.models.weights import Weights

TOKENS = [3, 14, 15, 9, 26, 5]
HIDDEN, FFN, VOCAB, LAYERS = 256, 320, 40, 3  # rows of 320 are no whole blocks of 256


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama in f16 whose token table is its head too."""
    rng = np.random.default_rng(0)

    def matrix(out: int, into: int) -> np.ndarray:
        return (rng.standard_normal((out, into)) / np.sqrt(into)).astype(np.float16)

    tensors = {"token_embd.weight": matrix(VOCAB, HIDDEN)}
    for i in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors[f"blk.{i}.{name}.weight"] = matrix(HIDDEN, HIDDEN)
        for name in ("ffn_gate", "ffn_up"):
            tensors[f"blk.{i}.{name}.weight"] = matrix(FFN, HIDDEN)
        tensors[f"blk.{i}.ffn_down.weight"] = matrix(HIDDEN, FFN)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{i}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    tensors["output_norm.weight"] = np.ones(HIDDEN, np.float32)
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 64,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": 4,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [chr(97 + i) for i in range(VOCAB)],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
    }
    path = tmp_path_factory.mktemp("models") / "f16.gguf"
    write_gguf(path, metadata, tensors)
    return path


def logits(path: Path, **options: str) -> np.ndarray:
    with load(path, **options) as model:  # type: ignore[arg-type]
        return np.asarray(model.logits(TOKENS))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K_M", "Q6_K", "Q4_0", "Q2_K"])
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_the_same_numbers_as_from_a_file(
    floats: Path, tmp_path: Path, name: str, device: str
) -> None:
    quantize_model(floats, tmp_path / "packed.gguf", name)
    want = logits(tmp_path / "packed.gguf", device=device)
    np.testing.assert_array_equal(logits(floats, device=device, quant=name), want)


@pytest.mark.parametrize("name, bits", [("int8", 7), ("int8_b32", 8), ("int4_b32", 4), ("Q8_0", 8)])
def test_close_to_floats(floats: Path, name: str, bits: int) -> None:
    """A rounding of half a step of 2^(bits-1) to a peak of some 2.5 deviations is an error of
    2.5 · 2^-(bits-1) / √12 of a weight, and of a product; some twenty products add up. int8 has
    blocks of 64, which keep to sums of 16 bits (`LANE_BLOCK`) for up to a bit of theirs."""
    plain, packed = logits(floats), logits(floats, quant=name)
    one = 2.5 * 2.0 ** -(bits - 1) / np.sqrt(12)
    assert not np.array_equal(plain, packed)
    assert np.sqrt(np.mean((packed - plain) ** 2)) <= np.sqrt(21) * one * plain.std() * 1.5


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "phi3", "qwen3_moe"])
def test_a_folder(tmp_path: Path, name: str) -> None:
    """As if the file had the decoded weights: tables, experts, joined weights, turned ones."""
    write_folder(name, tmp_path)
    packed = ModelFile.open(tmp_path, "Q8_0").weights()
    plain = ModelFile.open(tmp_path)

    def run(weights: Weights, rounded: bool) -> np.ndarray:
        described = build_graph(plain, weights, LOGITS, context=32, kv="f32")
        for each, array in described.params.items() if rounded else ():
            scheme = packed.get(each).wanted if each in packed else None
            if scheme is not None:
                described.params[each] = decode(scheme, *encode(scheme, array.copy()))
        compiled = Session("reference").compile(described.module).set_params(described.params)
        (found,) = compiled.run(ids=np.array([TOKENS], np.int32), sizes={"past_seq": 0})
        return np.asarray(found)

    want = run(plain.weights(), rounded=True)
    assert not np.array_equal(want, run(plain.weights(), rounded=False))
    # sums in another order, in f32: the bar of tests/models/test_goldens.py
    np.testing.assert_allclose(run(packed, False), want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_packed_once(floats: Path) -> None:
    """What was packed is kept on disk: the second load finds it."""
    with load(floats, quant="Q4_K_M") as first:
        want = first.logits(TOKENS)
        assert first.runner.params.preparations
    with load(floats, quant="Q4_K_M") as second:
        np.testing.assert_array_equal(second.logits(TOKENS), want)
        assert not second.runner.params.preparations


def test_refusals(floats: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="a float type is not a quantisation"):
        load(floats, quant="F16")
    with pytest.raises(OptionError, match="unknown quantisation scheme"):
        load(floats, quant="Q9")
    quantize_model(floats, tmp_path / "packed.gguf", "Q8_0")
    with (
        load(tmp_path / "packed.gguf", quant="Q4_K_M") as model,
        pytest.raises(InputError, match=r"quantised already.*Q8_0.*Q4_K_M.*\n.*--requantize"),
    ):
        model.logits(TOKENS)
    # what the file has already is no contradiction
    assert np.isfinite(logits(tmp_path / "packed.gguf", quant="Q8_0")).all()
