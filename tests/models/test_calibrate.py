"""Calibration: sums of squares against those of a plain forward pass, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cli"))
from cli_support import FFN, HIDDEN, LAYERS, write_tiny

from rlx.errors import InputError, OptionError
from rlx.formats.gguf import GgufFile
from rlx.models.calibrate import calibrate

pytestmark = pytest.mark.slow
TEXT = "The quick brown fox jumps over the lazy dog. " * 5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("calibrate") / "tiny.gguf")


def test_sums_of_squares(tiny: Path) -> None:
    """The input of the first layer's q, k and v is the normed embedding of each byte."""
    found = calibrate(tiny, TEXT, chunk=64, dataset="fox.txt")
    count = len(TEXT) // 64 * 64
    assert found.chunks == count // 64 and found.chunk_size == 64
    with GgufFile(tiny) as file:
        rows = file.array("token_embd.weight")[list(TEXT.encode())[:count]].astype(np.float64)
        gamma = file.array("blk.0.attn_norm.weight").astype(np.float64)
    normed = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + 1e-5) * gamma
    for part in "qkv":
        entry = found.entries[f"blk.0.attn_{part}.weight"]
        assert entry.counts.tolist() == [count]
        # f32 sums of 64 squares at a time
        np.testing.assert_allclose(entry.sums[0], (normed**2).sum(axis=0), rtol=2e-5)
    shapes = {name: entry.sums.shape for name, entry in found.entries.items()}
    for layer in range(LAYERS):
        assert shapes[f"blk.{layer}.ffn_down.weight"] == (1, FFN)
        assert shapes[f"blk.{layer}.attn_output.weight"] == (1, HIDDEN)
    assert shapes["output.weight"] == (1, HIDDEN) and len(shapes) == 7 * LAYERS + 1


def test_chunks(tiny: Path) -> None:
    one = calibrate(tiny, TEXT, chunk=64, chunks=1)
    same = calibrate(tiny, TEXT[:64], chunk=64)
    short = calibrate(tiny, TEXT[:20], chunk=64)
    for name, entry in one.entries.items():
        np.testing.assert_array_equal(entry.sums, same.entries[name].sums)
    assert short.entries["output.weight"].counts.tolist() == [20]


def test_refusals(tiny: Path) -> None:
    with pytest.raises(InputError, match="no text to calibrate with"):
        calibrate(tiny, "")
    with pytest.raises(OptionError, match="not a count"):
        calibrate(tiny, TEXT, chunks=0)


def test_experts_have_counts_of_their_own(tmp_path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
    from tiny import VOCAB, write_folder

    from rlx.models.calibrate import SQUARES
    from rlx.models.decoder_runner import DecoderRunner
    from rlx.models.model_file import ModelFile

    write_folder("mixtral", tmp_path)
    model = ModelFile.open(tmp_path)
    assert model.config.experts is not None
    runner = DecoderRunner(model, context=32, kv="f32", chunk=32)
    found = runner.outputs(SQUARES, [i % VOCAB for i in range(24)])
    runner.close()
    experts, active = model.config.experts.count, model.config.experts.active
    for part in ("gate", "up", "down"):
        counts = found[f"blk.0.ffn_{part}_exps.weight.counts"]
        assert counts.shape == (experts,) and counts.sum() == 24 * active
        sums = found[f"blk.0.ffn_{part}_exps.weight.in_sum2"]
        assert sums.shape[0] == experts and not sums[counts == 0].any()
    # each token reaches `active` experts with the same input as the router has
    router = found["blk.0.ffn_gate_inp.weight.in_sum2"]
    np.testing.assert_allclose(
        found["blk.0.ffn_up_exps.weight.in_sum2"].sum(axis=0), active * router, rtol=1e-5
    )
