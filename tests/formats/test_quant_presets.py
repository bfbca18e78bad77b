"""Quant presets by their rules, and files with packed weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from rlx.errors import InputError, NumericsError, OptionError
from rlx.formats.gguf import GgufFile, PackedTensor, write_gguf
from rlx.formats.gguf.header import ValueType
from rlx.formats.gguf.quantized import QuantizeOptions, quantize_gguf
from rlx.formats.quant_presets import NAMES, QuantPreset
from rlx.ir.quant.scheme import GGUF_SCHEMES, decode, encode

LAYERS = 16


def pick(preset: str, name: str, columns: int = 512, tied: bool = False) -> str | None:
    found = QuantPreset.parse(preset).pick(name, (8, columns), layers=LAYERS, tied=tied)
    return found and found.name


def layers_with(preset: str, part: str, scheme: str) -> list[int]:
    return [i for i in range(LAYERS) if pick(preset, f"blk.{i}.{part}.weight") == scheme]


def test_more_bits_where_they_pay() -> None:
    """Of 16 layers the first and last two, and every third of those between."""
    picked = [0, 1, 4, 7, 10, 13, 14, 15]
    for part in ("attn_v", "ffn_down"):
        assert layers_with("Q4_K_M", part, "Q6_K") == picked
        assert layers_with("Q5_K_M", part, "Q6_K") == picked
        assert len(layers_with("Q4_K_M", part, "Q4_K")) == LAYERS - len(picked)
    assert layers_with("Q4_K_S", "attn_v", "Q5_K") == [0, 1, 2, 3]
    assert layers_with("Q4_K_S", "ffn_down", "Q5_K") == [0, 1]
    assert layers_with("Q3_K_M", "attn_v", "Q5_K") == [0, 1]
    assert layers_with("Q3_K_M", "ffn_down", "Q5_K") == [0]
    assert layers_with("Q4_K_M", "attn_q", "Q4_K") == [*range(LAYERS)]


def test_the_output_matrix() -> None:
    for name in NAMES:
        plain = QuantPreset.parse(name).scheme.name
        want = plain if plain in ("F32", "F16", "BF16", "Q8_0") else "Q6_K"
        want = "Q5_K" if name.startswith(("IQ1", "IQ2", "IQ3_XXS")) else want
        assert pick(name, "output.weight") == want
        assert pick(name, "token_embd.weight", tied=True) == want
        if name[:3] in ("IQ1", "IQ2", "TQ1", "TQ2") or name == "IQ3_XXS":
            # tokens are looked up: no input tells what of the table matters
            table = pick(name, "token_embd.weight")
            assert table is not None and not GGUF_SCHEMES[table].needs_importance
        else:
            assert pick(name, "token_embd.weight") == plain


def test_presets_of_iq_types() -> None:
    """Some tensors by hand, as llama.cpp's mixtures have them for models with grouped queries."""
    assert pick("IQ3_XXS", "blk.5.attn_q.weight") == "IQ2_S"
    assert pick("IQ3_XXS", "blk.5.attn_output.weight") == "IQ3_S"
    assert pick("IQ3_XXS", "token_embd.weight") == "IQ3_S"
    assert pick("IQ2_M", "blk.5.ffn_up.weight") == "IQ2_S"
    assert pick("IQ2_S", "blk.5.ffn_up.weight") == "IQ2_XS"
    assert pick("IQ1_S", "blk.5.attn_output.weight") == "IQ2_XXS"
    assert pick("IQ3_M", "blk.5.attn_v.weight") == "Q4_K"
    assert pick("IQ4_XS", "blk.5.ffn_gate.weight") == "IQ4_XS"
    assert layers_with("IQ2_XXS", "ffn_down", "Q2_K") == [0, 1]
    assert layers_with("IQ2_M", "ffn_down", "IQ3_S") == [0, 1]
    assert layers_with("IQ4_XS", "ffn_down", "Q5_K") == [0, 1]
    assert layers_with("IQ3_XS", "ffn_up", "IQ3_XXS") == [*range(2, 14)]
    assert pick("MXFP4_MOE", "blk.5.ffn_up_exps.weight") == "MXFP4"
    assert pick("MXFP4_MOE", "blk.5.attn_q.weight") == "Q8_0"


def test_numbers_that_files_say_their_type_by() -> None:
    for name in NAMES:
        kind = "ALL_F32" if name == "F32" else f"MOSTLY_{name}"
        assert QuantPreset.parse(name).file_type == gguf.LlamaFileType[kind]


def test_rows_that_are_no_whole_blocks() -> None:
    part = "blk.3.attn_q.weight"
    narrow = {
        "Q2_K": "IQ4_NL",
        "Q3_K_S": "IQ4_NL",
        "IQ2_XXS": "IQ4_NL",
        "TQ2_0": "Q4_0",
        "Q4_K_S": "Q5_0",
        "Q5_K_S": "Q5_1",
        "Q6_K": "Q8_0",
    }
    for name, want in narrow.items():
        assert pick(name, part, 576) == want
        assert pick(name, part, 100) == "F16"
    assert pick("Q8_0", part, 48) == "F16"


@pytest.mark.parametrize(
    "name",
    ["blk.0.attn_norm.weight", "blk.0.attn_q.bias", "position_embd.weight", "rope_freqs.weight",
     "blk.0.ffn_gate_inp.weight"],
)  # fmt: skip
def test_left_alone(name: str) -> None:
    assert pick("Q4_K_M", name) is None
    assert QuantPreset.parse("Q8_0").pick("output.weight", (512,), layers=1, tied=False) is None


def test_types_that_need_calibration_are_not_made_while_loading() -> None:
    for name in ("IQ2_XXS", "IQ1_M", "IQ2_S"):
        with pytest.raises(OptionError, match=r"needs an importance matrix(.|\n)*--calibrate"):
            QuantPreset.of(name)
    assert QuantPreset.of("IQ2_M").scheme.name == "IQ2_S"


def test_names() -> None:
    assert QuantPreset.parse(" q4_k ").name == "Q4_K_M"
    with pytest.raises(OptionError, match=r"no such quant preset.*got 'Q4_M'.*Q4_K_M"):
        QuantPreset.parse("Q4_M")


# -- files ----------------------------------------------------------------------------------------


def write_model(path: Path, scheme: str = "F32", **more: np.ndarray) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    weights = {
        "token_embd.weight": rng.standard_normal((96, 256)).astype(np.float32),
        "blk.0.attn_v.weight": rng.standard_normal((64, 256)).astype(np.float32),
        "blk.0.ffn_down.weight": rng.standard_normal((64, 96)).astype(np.float32),
        "blk.0.attn_norm.weight": np.ones(256, np.float32),
        **more,
    }
    kind = GGUF_SCHEMES[scheme]
    tensors: dict[str, np.ndarray | PackedTensor] = {
        n: PackedTensor(w.shape, kind, encode(kind, w).data)
        if w.ndim > 1 and w.shape[-1] % 256 == 0
        else w
        for n, w in weights.items()
    }
    metadata = {"general.architecture": "llama", "llama.block_count": 1, "note": "kept", "list": []}
    write_gguf(path, metadata, tensors)
    return weights


@pytest.mark.parametrize("scheme", ["F32", "F16", "BF16"])
def test_a_file_of_floats(tmp_path: Path, scheme: str) -> None:
    weights = write_model(tmp_path / "in.gguf", scheme)
    steps: list[tuple[str, int, int]] = []
    options = QuantizeOptions(
        QuantPreset.parse("Q4_K_M"), progress=lambda *step: steps.append(step)
    )
    with GgufFile(tmp_path / "in.gguf") as file:
        report = quantize_gguf(file, tmp_path / "out.gguf", options)
    assert [(w.name, w.before, w.after) for w in report] == [
        ("token_embd.weight", scheme, "Q6_K"),
        ("blk.0.attn_v.weight", scheme, "Q6_K"),  # the last eighth of one layer is that layer
        ("blk.0.ffn_down.weight", "F32", "Q8_0"),
        ("blk.0.attn_norm.weight", "F32", "F32"),
    ]
    with GgufFile(tmp_path / "out.gguf") as out:
        assert out.metadata["note"] == "kept"
        assert out.metadata["general.file_type"] == 15
        assert out.types["general.file_type"] is ValueType.UINT32
        assert out.metadata["general.quantization_version"] == 2
        for row in report:
            info = out.tensors[row.name]
            assert info.shape == weights[row.name].shape and info.nbytes == row.nbytes
            stored = decode(
                GGUF_SCHEMES[row.before], encode(GGUF_SCHEMES[row.before], weights[row.name]).data
            )
            want = encode(GGUF_SCHEMES[row.after], stored).data
            np.testing.assert_array_equal(out.array(row.name).view(np.uint8), want.view(np.uint8))
    total = sum(w.nbytes for w in report)
    assert [s[1] for s in steps] == sorted(s[1] for s in steps)
    assert steps[-1] == ("quantising", total, total)


def test_quantised_weights_are_quantised_again_only_when_asked(tmp_path: Path) -> None:
    write_model(tmp_path / "in.gguf", "Q8_0")
    with GgufFile(tmp_path / "in.gguf") as file:
        with pytest.raises(InputError, match="quantised already; got Q8_0"):
            quantize_gguf(file, tmp_path / "out.gguf", QuantizeOptions(QuantPreset.parse("Q4_K_S")))
        assert not (tmp_path / "out.gguf").exists()
        options = QuantizeOptions(QuantPreset.parse("Q4_K_S"), requantize=True)
        with pytest.warns(UserWarning, match="quantised already"):
            quantize_gguf(file, tmp_path / "out.gguf", options)
        with GgufFile(tmp_path / "out.gguf") as out:
            name = "blk.0.attn_v.weight"
            opened = decode(GGUF_SCHEMES["Q8_0"], file.array(name))
            want = encode(GGUF_SCHEMES["Q5_K"], opened).data
            np.testing.assert_array_equal(out.array(name), want)
        # what is opened, or has its scheme already and is copied, needs no word
        quantize_gguf(file, tmp_path / "f32.gguf", QuantizeOptions(QuantPreset.parse("F32")))
        with GgufFile(tmp_path / "f32.gguf") as plain:
            np.testing.assert_array_equal(plain.array(name), opened)
        quantize_gguf(file, tmp_path / "same.gguf", QuantizeOptions(QuantPreset.parse("Q8_0")))
        with GgufFile(tmp_path / "same.gguf") as same:
            np.testing.assert_array_equal(same.array(name), file.array(name))


def test_nothing_is_overwritten_or_left_half(tmp_path: Path) -> None:
    bad = np.ones((4, 256), np.float32)
    bad[2, 5] = np.inf
    write_model(tmp_path / "in.gguf", "F32", **{"output.weight": bad})
    out = tmp_path / "out.gguf"
    with GgufFile(tmp_path / "in.gguf") as file:
        with pytest.raises(NumericsError, match=r"in\.gguf.*'output.weight'.*inf or NaN"):
            quantize_gguf(file, out, QuantizeOptions(QuantPreset.parse("Q4_0")))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["in.gguf"]
        with pytest.raises(NumericsError, match=r"f16 cannot hold.*\n.*BF16"):
            quantize_gguf(file, out, QuantizeOptions(QuantPreset.parse("F16")))
        out.write_text("mine")
        with pytest.raises(InputError, match=r"out\.gguf.*there already"):
            quantize_gguf(file, out, QuantizeOptions(QuantPreset.parse("BF16")))
        assert out.read_text() == "mine"
        quantize_gguf(file, out, QuantizeOptions(QuantPreset.parse("BF16"), overwrite=True))
        with pytest.raises(InputError, match="no such folder"):
            quantize_gguf(
                file, tmp_path / "no" / "out.gguf", QuantizeOptions(QuantPreset.parse("BF16"))
            )
    with GgufFile(out) as made:
        assert made.tensors["output.weight"].scheme is GGUF_SCHEMES["BF16"]
