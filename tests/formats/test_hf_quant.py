"""Quantised Hugging Face folders read as floats. Oracles: what the tools' own libraries read
(tests/goldens/make_hf_quant.py), and for GPTQ and AWQ matrices packed here bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_safetensors import packed

from rlx.errors import FormatError, UnsupportedError
from rlx.formats.hf import HfFolder
from rlx.formats.hf_quant import unquantized

GOLDENS = np.load(Path(__file__).parents[1] / "goldens" / "hf_quant.npz")
COMPRESSED = {  # golden → weight args of its group in quantization_config
    "int4_group": {"num_bits": 4, "type": "int"},
    "int4_zero": {"num_bits": 4, "type": "int", "symmetric": False},
    "int3_channel": {"num_bits": 3, "type": "int"},
    "int8_channel": {"num_bits": 8, "type": "int"},
    "fp8_tensor": {"num_bits": 8, "type": "float"},
    "fp8_channel": {"num_bits": 8, "type": "float"},
    "fp8_block": {"num_bits": 8, "type": "float", "block_structure": [8, 32]},
    "nvfp4": {"num_bits": 4, "type": "float"},
    "mxfp4": {"num_bits": 4, "type": "float"},
}
NAMES = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64", "int8": "I8"}


def folder(path: Path, settings: dict[str, Any], arrays: dict[str, Any], **config: Any) -> HfFolder:
    given = {"dtype": "float32", "quantization_config": settings, **config}
    (path / "config.json").write_text(json.dumps(given))
    named = {n: (NAMES.get(str(a.dtype)) or _other(a), a) for n, a in arrays.items()}
    (path / "model.safetensors").write_bytes(packed(named))
    return HfFolder(path)


def _other(array: Any) -> str:
    return "F8_E4M3" if array.dtype == ml_dtypes.float8_e4m3fn else "U8"


def golden(name: str) -> dict[str, Any]:
    found = {k.partition(".")[2]: GOLDENS[k] for k in GOLDENS if k.startswith(f"{name}.")}
    for part in ("weight", "weight_scale"):  # E4M3 was stored as bytes
        if part in found and found[part].dtype == np.uint8 and name != "mxfp4":
            found[part] = found[part].view(ml_dtypes.float8_e4m3fn)
    return found


def matrix(path: Path, settings: dict[str, Any], parts: dict[str, Any]) -> np.ndarray:
    """The matrix `m.weight` of a folder that holds these parts and a float tensor."""
    arrays = {f"m.{n}": a for n, a in parts.items()} | {"n.weight": np.ones(3, np.float32)}
    with unquantized(folder(path, settings, arrays)) as found:
        assert set(found.tensors) == {"m.weight", "n.weight"}
        assert found.tensors["m.weight"].dtype.name == "f32"
        got = found.array("m.weight")
        assert got.shape == found.tensors["m.weight"].shape
        np.testing.assert_array_equal(found.array("n.weight"), np.ones(3))
    return got


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors(name: str, tmp_path: Path) -> None:
    parts = golden(name)
    wanted = parts.pop("read")
    settings = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": COMPRESSED[name]}},
        "ignore": ["lm_head"],
    }
    got = matrix(tmp_path, settings, {**parts, "input_scale": np.ones(1, np.float32)})
    # the library computes NVFP4 in bf16: its scale and its product are rounded to 8 bits
    np.testing.assert_allclose(got, wanted, rtol=2**-7 if name == "nvfp4" else 1e-6)
    assert np.abs(wanted).max() > 1


def test_fp8_in_blocks(tmp_path: Path) -> None:
    parts = golden("fine")
    wanted = parts.pop("read")
    settings = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    np.testing.assert_allclose(matrix(tmp_path, settings, parts), wanted, rtol=1e-6)


def bits_to_words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Rows of numbers as 32-bit words, number by number, bit by bit."""
    rows = []
    for row in numbers:
        stream = "".join(f"{int(v):0{bits}b}"[::-1] for v in row)
        words = [stream[i : i + 32].ljust(32, "0")[::-1] for i in range(0, len(stream), 32)]
        rows.append([int(w, 2) for w in words])
    return np.array(rows, np.uint32).view(np.int32)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_gptq(bits: int, version: str, shuffled: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(bits)
    n, k, groups = 32, 64, 4
    codes = rng.integers(0, 1 << bits, (k, n))
    zeros = rng.integers(1, 1 << bits, (groups, n))
    scales = rng.random((groups, n)).astype(np.float16)
    group = np.arange(k) // (k // groups)
    if shuffled:
        group = rng.permutation(group)
    parts = {
        "qweight": np.ascontiguousarray(bits_to_words(codes.T, bits).T),
        "qzeros": bits_to_words(zeros - (version == "gptq"), bits),
        "scales": scales,
        "g_idx": group.astype(np.int32),
    }
    settings = {"quant_method": "gptq", "bits": bits, "checkpoint_format": version}
    wanted = (codes - zeros[group]) * scales[group].astype(np.float64)
    np.testing.assert_allclose(matrix(tmp_path, settings, parts), wanted.T, rtol=1e-6)
    if not shuffled:
        del parts["g_idx"]  # groups follow each other
        np.testing.assert_allclose(matrix(tmp_path, settings, parts), wanted.T, rtol=1e-6)


def test_gptq_zero_points_of_zero(tmp_path: Path) -> None:
    """A stored zero - 1 of a zero borrows from the number above it, and gets it back."""
    words = np.array([[0x4A3F_0210]], np.uint32)
    zeros = [(0x4A3F_0210 >> (4 * i)) & 15 for i in range(8)]
    parts = {
        "qweight": np.zeros((1, 8), np.int32),
        "qzeros": (words - np.uint32(0x1111_1111)).view(np.int32),
        "scales": np.ones((1, 8), np.float16),
    }
    got = matrix(tmp_path, {"quant_method": "gptq", "bits": 4}, parts)
    np.testing.assert_array_equal(got, -np.repeat(np.array(zeros)[:, None], 8, axis=1))


def test_awq(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    k, n, groups = 32, 24, 2
    codes, zeros = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (groups, n))
    scales = rng.random((groups, n)).astype(np.float16)

    def words(numbers: np.ndarray) -> np.ndarray:  # even columns in the low half, odd in the high
        found = np.zeros((len(numbers), n // 8), np.uint32)
        for column in range(n):
            place = column % 8 // 2 + 4 * (column % 2)
            found[:, column // 8] |= (numbers[:, column] << (4 * place)).astype(np.uint32)
        return found.view(np.int32)

    parts = {"qweight": words(codes), "qzeros": words(zeros), "scales": scales}
    settings = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}
    group = np.arange(k) // 16
    wanted = (codes - zeros[group]) * scales[group].astype(np.float64)
    np.testing.assert_allclose(matrix(tmp_path, settings, parts), wanted.T, rtol=1e-6)


WORDS = np.zeros((4, 8), np.int32)
SCALES = np.ones((2, 8), np.float16)
ZEROS = np.zeros((2, 1), np.int32)
GPTQ = {"quant_method": "gptq", "bits": 4}
PACKED = {
    "weight_packed": np.zeros((8, 4), np.int32),
    "weight_shape": np.array([8, 32]),
    "weight_scale": np.ones((8, 2), np.float16),
}
INT4 = {"g": {"weights": {"num_bits": 4, "type": "int"}}}


@pytest.mark.parametrize(
    ("settings", "parts", "said"),
    [
        (GPTQ, {"qweight": WORDS}, "m.scales"),
        (GPTQ, {"qweight": WORDS, "scales": SCALES}, "m.qzeros"),
        (GPTQ, {"qweight": WORDS, "scales": SCALES, "qzeros": ZEROS[:1]}, "m.qzeros has the wrong"),
        (GPTQ, {"qweight": WORDS, "scales": SCALES[:, :7], "qzeros": ZEROS}, "m.scales has the"),
        (GPTQ, {"qweight": WORDS, "scales": WORDS, "qzeros": ZEROS}, "m.scales has the wrong type"),
        (
            GPTQ,
            {
                "qweight": WORDS,
                "scales": SCALES,
                "qzeros": ZEROS,
                "g_idx": np.full(32, 2, np.int32),
            },
            "m.g_idx names a group",
        ),
        ({"quant_method": "fp8"}, {"weight": golden("fine")["weight"]}, "m.weight_scale"),
        (
            {"quant_method": "fp8", "weight_block_size": [0, 1]},
            {"weight": golden("fine")["weight"]},
            "not a block size",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": INT4},
            {**PACKED, "weight_shape": np.array([8, -32])},
            "does not fit its shape",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {}},
            PACKED,
            "does not fit its shape",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": INT4},
            {**PACKED, "weight_scale": np.ones((8, 3), np.float16)},
            "3 groups do not divide 32",
        ),
    ],
)
def test_damaged_matrices_are_refused(
    settings: dict[str, Any], parts: dict[str, Any], said: str, tmp_path: Path
) -> None:
    arrays = {f"m.{n}": a for n, a in parts.items()}
    with pytest.raises(FormatError, match=said):
        unquantized(folder(tmp_path, settings, arrays))


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": None},
        {"quant_method": ["gptq"]},
        {"quant_method": "gptq", "bits": 5},
        {"quant_method": "gptq", "bits": True},
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}},
        {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}},
    ],
)
def test_what_is_not_supported_is_named(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="quantization_config"):
        unquantized(folder(tmp_path, settings, {"m.qweight": WORDS}))


def test_the_matrix_has_the_type_of_the_model(tmp_path: Path) -> None:
    parts = {"m.qweight": WORDS, "m.scales": SCALES, "m.qzeros": ZEROS}
    found = unquantized(folder(tmp_path, GPTQ, parts, dtype="float16"))
    assert found.array("m.weight").dtype == np.float16
    with pytest.raises(UnsupportedError, match="dtype of a quantised model"):
        unquantized(folder(tmp_path, GPTQ, parts, dtype="float64"))
