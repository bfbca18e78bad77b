"""Packed weights: geometry, names and decoders.

The `gguf` package is the reference for the GGUF types. What it cannot decode is checked against
scalar decoders below, written from the definition of the format.
"""

from __future__ import annotations

import itertools
import pickle
import struct
import subprocess
import sys

import gguf
import gguf.quants as gq
import ml_dtypes
import numpy as np
import pytest

from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ir.quant import blocks, iq
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme, decode, encode

# gguf has no decoder for these, and for Q8_1 the size of an older struct.
ALONE = ("Q8_1", "Q8_K", "Q1_0")
PEERED = [n for n in GGUF_SCHEMES if n not in ALONE]
SAMPLES = [
    *GGUF_SCHEMES.values(),
    *(
        make(block, symmetric)
        for make, block, symmetric in itertools.product(
            (QuantScheme.int8, QuantScheme.int4), (None, 32, 128), (True, False)
        )
    ),
    *(QuantScheme.fp8(f, b) for f in ("e4m3", "e5m2") for b in (None, 128)),
    QuantScheme.fp8("e4m3", scaled=False),
]
# f16 patterns that matter as scales: zeros, subnormals, one, largest, infinities, NaNs.
HALVES = (
    0,
    0x8000,
    1,
    0x8001,
    0x3FF,
    0x400,
    0x3C00,
    0xBC00,
    0x7BFF,
    0x7C00,
    0xFC00,
    0x7E00,
    0xFE01,
)


def same_bits(got: np.ndarray, want: np.ndarray) -> None:
    """Equal to the bit, signs of zeros included; NaNs must match in place, not in payload."""
    assert got.dtype == np.float32 and got.shape == want.shape
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(
        got[~nan].view(np.uint32), want.astype(np.float32)[~nan].view(np.uint32)
    )


def random_rows(scheme: QuantScheme, n: int, count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, count * scheme.bytes_per_block), dtype=np.uint8)


def edge_rows(scheme: QuantScheme) -> np.ndarray:
    """Blocks of one repeated byte, and random blocks with every special f16 at every offset."""
    size = scheme.bytes_per_block
    flat = np.repeat(np.array([0, 0xFF, 0x80, 0x7F, 0x55, 0xAA, 0x01], np.uint8), size)
    rows = [flat.reshape(-1, size)]
    for half in HALVES:
        block = random_rows(scheme, size - 1, 1, seed=half)
        for offset in range(size - 1):
            block[offset, offset : offset + 2] = [half & 0xFF, half >> 8]
        rows.append(block)
    return np.concatenate(rows)


def peer(scheme: QuantScheme, packed: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gq.dequantize(packed, gguf.GGMLQuantizationType(scheme.ggml_type))


# --- names and geometry ---


def test_registry_has_every_type_of_the_format() -> None:
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        if kind.name in ("I8", "I16", "I32", "I64", "F64"):
            assert kind.name not in GGUF_SCHEMES  # plain tensors, not schemes
            continue
        scheme = QuantScheme.parse(kind.name)
        assert (scheme.name, scheme.ggml_type) == (kind.name, kind.value)
        assert QuantScheme.from_ggml(kind.value) is scheme
        if kind.name != "Q8_1":
            assert (scheme.block_size, scheme.bytes_per_block) == (block, size)
    # ggml: two f16 and 32 i8.
    assert QuantScheme.parse("Q8_1").bytes_per_block == 2 * 2 + 32


def test_layouts_are_as_long_as_their_blocks() -> None:
    for name, scheme in GGUF_SCHEMES.items():
        decode(scheme, np.zeros((1, scheme.bytes_per_block), np.uint8))
        assert blocks.LAYOUTS[name].itemsize == scheme.bytes_per_block


@pytest.mark.parametrize("scheme", SAMPLES, ids=str)
def test_name_parses_back(scheme: QuantScheme) -> None:
    assert QuantScheme.parse(str(scheme)) == scheme
    assert QuantScheme.parse(f" {str(scheme).lower()} ") == scheme
    assert hash(QuantScheme.parse(str(scheme))) == hash(scheme)
    assert pickle.loads(pickle.dumps(scheme)) == scheme


def test_names_are_distinct() -> None:
    assert len({str(s) for s in SAMPLES}) == len(set(SAMPLES)) == len(SAMPLES)


def test_bits_per_element() -> None:
    want = {"Q4_0": 4.5, "Q4_K": 4.5, "Q6_K": 6.5625, "IQ1_S": 1.5625, "MXFP4": 4.25, "BF16": 16}
    got = {name: QuantScheme.parse(name).bits_per_element for name in want}
    assert got == want
    assert QuantScheme.int8(32).bits_per_element == 8
    assert QuantScheme.int4(32).bits_per_element == QuantScheme.int4().bits_per_element == 4


def test_shapes() -> None:
    q4_k = QuantScheme.parse("Q4_K")
    assert q4_k.row_bytes(1024) == 4 * 144
    assert q4_k.packed_shape(7, 512) == (7, 288)
    assert q4_k.scale_shape(7, 512) is None
    assert q4_k.stored_bytes(7, 512) == 7 * 288
    assert (q4_k.packed_dtype, q4_k.has_scale, q4_k.has_zero_point) == ("u8", False, False)
    int8 = QuantScheme.int8(block=32, symmetric=False)
    assert int8.packed_shape(5, 64) == (5, 64)
    assert int8.scale_shape(5, 64) == (5, 2)
    assert int8.stored_bytes(5, 64) == 5 * 64 + 5 * 2 * (4 + 1)
    assert (int8.packed_dtype, int8.zero_point_dtype) == ("i8", "i8")
    int4 = QuantScheme.int4()
    assert int4.packed_shape(5, 64) == (5, 32)
    assert int4.scale_shape(5, 64) == (5, 1)
    assert (int4.packed_dtype, int4.has_scale, int4.zero_point_dtype) == ("u8", True, None)
    assert QuantScheme.fp8("e5m2").packed_dtype == "f8e5m2"
    assert QuantScheme.fp8("e4m3", scaled=False).scale_shape(2, 3) is None


@pytest.mark.parametrize("scheme", SAMPLES, ids=str)
def test_row_elements_inverts_row_bytes(scheme: QuantScheme) -> None:
    for count in (0, 1, 5):
        k = count * scheme.block_size
        assert scheme.row_elements(scheme.row_bytes(k)) == k


@pytest.mark.parametrize("name", ["Q4_KK", "Q4_K_M", "int4_32", "fp8"])
def test_unknown_name_lists_close_ones(name: str) -> None:
    with pytest.raises(OptionError) as error:
        QuantScheme.parse(name)
    closest = {"Q4_KK": "Q4_K", "Q4_K_M": "Q4_K", "int4_32": "int4_b32", "fp8": "fp8_e4m3"}[name]
    assert closest in error.value.hint
    assert error.value.got == repr(name)


@pytest.mark.parametrize("name", ["", "zzzzzz", "int8_b0", "int4_b33", "fp8_e4m3_b128_raw"])
def test_bad_names(name: str) -> None:
    with pytest.raises(OptionError):
        QuantScheme.parse(name)


def test_bad_parameters() -> None:
    for make in (
        lambda: QuantScheme.int8(0),
        lambda: QuantScheme.int8(-4),
        lambda: QuantScheme.int4(7),
        lambda: QuantScheme.fp8("e3m4"),  # type: ignore[arg-type]
        lambda: QuantScheme.fp8("e4m3", block=8, scaled=False),
        lambda: QuantScheme.from_ggml(4),
    ):
        with pytest.raises(OptionError):
            make()


# --- decoders against gguf ---


@pytest.mark.parametrize("name", PEERED)
def test_random_blocks_decode_as_gguf(name: str) -> None:
    scheme = QuantScheme.parse(name)
    packed = random_rows(scheme, 6, 16 * 256 // scheme.block_size, seed=scheme.ggml_type)
    same_bits(decode(scheme, packed), peer(scheme, packed))


@pytest.mark.parametrize("name", PEERED)
def test_edge_blocks_decode_as_gguf(name: str) -> None:
    scheme = QuantScheme.parse(name)
    packed = edge_rows(scheme)
    same_bits(decode(scheme, packed), peer(scheme, packed))


def test_more_than_one_chunk() -> None:
    scheme = QuantScheme.parse("Q6_K")
    packed = random_rows(scheme, 3, 2 * blocks._CHUNK // 256 + 5)
    same_bits(decode(scheme, packed), peer(scheme, packed))


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_every_scale_byte(name: str) -> None:
    scheme = QuantScheme.parse(name)
    packed = random_rows(scheme, 256, 1)
    scales = 1 if name == "MXFP4" else 4
    packed[:, :scales] = np.arange(256, dtype=np.uint8)[:, None]
    same_bits(decode(scheme, packed), peer(scheme, packed))


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"])
def test_grids_equal_those_of_gguf(name: str) -> None:
    peer_class = getattr(gq, name)
    peer_class.init_grid()
    want = peer_class.grid.reshape(peer_class.grid_shape) * (8 if name == "IQ1_S" else 1)
    got = iq.grid(name)
    np.testing.assert_array_equal(got.view(np.int8).reshape(want.shape), want)


def test_even_signs_equal_those_of_gguf() -> None:
    from rlx.ir.quant import iq

    assert iq._EVEN_SIGNS.tobytes() == gq.IQ2_XXS.ksigns


# --- decoders against scalar ones ---


def scalar_q8_1(block: bytes) -> list[float]:
    d, _sum, *q = struct.unpack("<ee32b", block)
    return [d * v for v in q]


def scalar_q8_k(block: bytes) -> list[float]:
    d, *rest = struct.unpack("<f256b16h", block)
    return [d * v for v in rest[:256]]


def scalar_q1_0(block: bytes) -> list[float]:
    (d,) = struct.unpack("<e", block[:2])
    return [d if block[2 + i // 8] >> i % 8 & 1 else -d for i in range(128)]


@pytest.mark.parametrize("name", ALONE)
def test_types_without_a_peer(name: str) -> None:
    scheme = QuantScheme.parse(name)
    scalar = {"Q8_1": scalar_q8_1, "Q8_K": scalar_q8_k, "Q1_0": scalar_q1_0}[name]
    packed = np.concatenate([random_rows(scheme, 40, 1), edge_rows(scheme)[::7]])
    with np.errstate(all="ignore"):
        want = np.array([scalar(row.tobytes()) for row in packed]).astype(np.float32)
    same_bits(decode(scheme, packed), want)


@pytest.mark.parametrize("block", [None, 16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_and_int4_decode(block: int | None, symmetric: bool) -> None:
    rng = np.random.default_rng(3)
    n, k = 3, 48
    groups = k // block if block else 1
    scale = rng.standard_normal((n, groups)).astype(np.float32)
    q8 = rng.integers(-128, 128, (n, k), dtype=np.int8)
    zp8 = None if symmetric else rng.integers(-128, 128, (n, groups), dtype=np.int8)
    q4 = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    zp4 = None if symmetric else rng.integers(0, 16, (n, groups), dtype=np.uint8)
    got8 = decode(QuantScheme.int8(block, symmetric), q8, scale, zp8)
    got4 = decode(QuantScheme.int4(block, symmetric), q4, scale, zp4)
    for i, j in itertools.product(range(n), range(k)):
        g = j // block if block else 0
        zero8 = 0 if zp8 is None else int(zp8[i, g])
        zero4 = 8 if zp4 is None else int(zp4[i, g])
        nibble = int(q4[i, j // 2]) >> 4 * (j % 2) & 15
        # The product of an f32 and a small integer is exact in f64: one rounding, as in decode.
        assert got8[i, j] == np.float32(float(scale[i, g]) * (int(q8[i, j]) - zero8))
        assert got4[i, j] == np.float32(float(scale[i, g]) * (nibble - zero4))


def scalar_fp8(code: int, exponent_bits: int) -> float:
    mantissa_bits = 7 - exponent_bits
    sign = -1.0 if code >> 7 else 1.0
    exponent, mantissa = code >> mantissa_bits & (2**exponent_bits - 1), code % 2**mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    top = exponent == 2**exponent_bits - 1
    if exponent_bits == 4 and top and mantissa == 7:
        return float("nan")
    if exponent_bits == 5 and top:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


@pytest.mark.parametrize(("kind", "bits"), [("e4m3", 4), ("e5m2", 5)])
def test_fp8_decodes_every_code(kind: str, bits: int) -> None:
    dtype = ml_dtypes.float8_e4m3fn if kind == "e4m3" else ml_dtypes.float8_e5m2
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    want = np.array([scalar_fp8(c, bits) for c in range(256)], np.float32).reshape(2, 128)
    same_bits(decode(QuantScheme.parse(f"fp8_{kind}_raw"), codes.view(dtype)), want)
    scale = np.array([[0.5, 3.0], [-2.0, 0.0]], np.float32)
    with np.errstate(invalid="ignore"):
        scaled = want * np.repeat(scale, 64, axis=1)
    same_bits(decode(QuantScheme.parse(f"fp8_{kind}_b64"), codes.view(dtype), scale), scaled)


# --- shapes and memory of the arguments ---


def test_leading_axes_strides_and_views() -> None:
    scheme = QuantScheme.parse("Q5_K")
    packed = random_rows(scheme, 8, 3)
    want = decode(scheme, packed)
    same_bits(decode(scheme, packed.reshape(2, 4, -1)), want.reshape(2, 4, -1))
    same_bits(decode(scheme, packed[0]), want[0])
    same_bits(decode(scheme, packed[::2]), want[::2])
    same_bits(decode(scheme, np.asfortranarray(packed)), want)
    offset = np.empty(packed.size + 1, np.uint8)[1:].reshape(packed.shape)
    offset[...] = packed
    offset.flags.writeable = False
    same_bits(decode(scheme, offset), want)


@pytest.mark.parametrize("scheme", SAMPLES, ids=str)
def test_empty(scheme: QuantScheme) -> None:
    dtype = {
        "u8": np.uint8,
        "i8": np.int8,
        "f8e4m3": ml_dtypes.float8_e4m3fn,
        "f8e5m2": ml_dtypes.float8_e5m2,
    }[scheme.packed_dtype]
    for n, k in ((0, 256), (3, 0)):
        packed = np.zeros(scheme.packed_shape(n, k), dtype)
        shape = scheme.scale_shape(n, k)
        scale = None if shape is None else np.ones(shape, np.float32)
        zp = None
        if shape is not None and scheme.has_zero_point:
            zp = np.zeros(shape, packed.dtype)
        assert decode(scheme, packed, scale, zp).shape == (n, k)
        if scheme.ggml_type is None or scheme.name in blocks.ENCODERS:
            part = encode(scheme, np.zeros((n, k), np.float32))
            assert part.data.shape == packed.shape and part.data.dtype == packed.dtype
            assert decode(scheme, *part).shape == (n, k)


def test_wrong_sizes() -> None:
    q4_k, int8 = QuantScheme.parse("Q4_K"), QuantScheme.int8(block=32)
    with pytest.raises(ShapeError, match="got 300 columns; expected a multiple of 256"):
        q4_k.row_bytes(300)
    with pytest.raises(ShapeError):
        q4_k.row_bytes(-256)
    with pytest.raises(ShapeError):
        QuantScheme.int4().packed_shape(2, 5)
    with pytest.raises(ShapeError, match="got 145 bytes a row; expected a multiple of 144"):
        decode(q4_k, np.zeros((2, 145), np.uint8))
    with pytest.raises(ShapeError):
        decode(q4_k, np.uint8(0))
    with pytest.raises(ShapeError):
        encode(q4_k, np.zeros((2, 255), np.float32))
    q = np.zeros((2, 64), np.int8)
    with pytest.raises(ShapeError, match=r"got \[2, 1\]; expected \[2, 2\]") as error:
        decode(int8, q, np.ones((2, 1), np.float32))
    assert error.value.got == [2, 1] and "32 columns" in error.value.hint
    with pytest.raises(ShapeError):
        decode(int8, q[:, :40], np.ones((2, 1), np.float32))


def test_wrong_element_types() -> None:
    q4_0, int8 = QuantScheme.parse("Q4_0"), QuantScheme.int8(block=32, symmetric=False)
    with pytest.raises(DTypeError, match="expected u8"):
        decode(q4_0, np.zeros((2, 18), np.float32))
    with pytest.raises(DTypeError, match="view") as error:
        decode(q4_0, np.zeros((2, 18), np.int8))
    assert error.value.got == np.int8
    q, ones = np.zeros((2, 32), np.int8), np.ones((2, 1), np.float32)
    with pytest.raises(DTypeError, match="scale"):
        decode(int8, q, ones.astype(np.float64), np.zeros((2, 1), np.int8))
    with pytest.raises(DTypeError, match="zp"):
        decode(int8, q, ones, np.zeros((2, 1), np.uint8))
    with pytest.raises(DTypeError):
        decode(QuantScheme.fp8("e4m3"), np.zeros((2, 32), ml_dtypes.float8_e5m2), ones)
    with pytest.raises(DTypeError):
        encode(int8, np.zeros((2, 32), np.int32))


def test_missing_and_needless_parts() -> None:
    q, ones = np.zeros((2, 32), np.int8), np.ones((2, 1), np.float32)
    with pytest.raises(OptionError, match="needs a separate scale"):
        decode(QuantScheme.int8(), q)
    with pytest.raises(OptionError, match="has no separate zp"):
        decode(QuantScheme.int8(), q, ones, np.zeros((2, 1), np.int8))
    with pytest.raises(OptionError, match="needs a separate zp"):
        decode(QuantScheme.int8(symmetric=False), q, ones)
    with pytest.raises(OptionError, match="has no separate scale"):
        decode(QuantScheme.parse("Q8_0"), np.zeros((2, 34), np.uint8), ones)


# --- cost of importing ---


def test_import_is_light() -> None:
    """Layouts and grids load with the first decode, and gguf never."""
    code = (
        "import sys, rlx.ir.quant.scheme as q\n"
        "assert not any(m.startswith('rlx.ir.quant.codecs') for m in sys.modules)\n"
        "q.decode(q.QuantScheme.parse('Q4_0'), __import__('numpy').zeros((1, 18), 'u1'))\n"
        "assert 'gguf' not in sys.modules\n"
        "print('light')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "light\n", done.stderr
