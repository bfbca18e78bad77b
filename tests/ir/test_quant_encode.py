"""Packing weights: the bytes of `gguf` where it has an encoder, error bounds elsewhere."""

from __future__ import annotations

import struct

import gguf
import gguf.quants as gq
import ml_dtypes
import numpy as np
import pytest

from rlx.errors import NumericsError, OptionError
from rlx.ir.quant.scheme import QuantScheme, decode, encode

ENCODED = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


def weights(n: int = 8, k: int = 512, seed: int = 5) -> np.ndarray:
    w = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)
    w[0] = 0
    w[1] = np.abs(w[1])
    w[2, :32] = -0.25
    w[3] *= np.float32(1e-30)  # scales that vanish in f16
    w[4] *= np.float32(1e4)
    return w


@pytest.mark.parametrize("name", ENCODED)
def test_encoders_write_the_bytes_of_gguf(name: str) -> None:
    scheme, w = QuantScheme.parse(name), weights()
    packed, scale, zp = encode(scheme, w)
    want = gq.quantize(w, gguf.GGMLQuantizationType(scheme.ggml_type)).view(np.uint8)
    assert scale is None and zp is None
    assert packed.shape == scheme.packed_shape(*w.shape)
    np.testing.assert_array_equal(packed, want)


def test_bf16_keeps_what_is_not_finite() -> None:
    scheme = QuantScheme.parse("BF16")
    bits = np.array([0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFF800001, 0x7F7FFFFF, 0x3F808000, 1])
    w = bits.astype(np.uint32).view(np.float32)
    got = encode(scheme, w).data.view(np.uint16)
    assert [hex(v) for v in got] == [
        "0x7f80",
        "0xff80",
        "0x7fff",
        "0xffc0",
        "0x7f80",
        "0x3f80",
        "0x0",
    ]


def test_float_schemes_are_lossless_for_their_values() -> None:
    halves = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    for name, values in (
        ("F16", halves.view(np.float16).astype(np.float32)),
        ("BF16", halves.view(ml_dtypes.bfloat16).astype(np.float32)),
        ("F32", weights()),
    ):
        scheme = QuantScheme.parse(name)
        back = decode(scheme, *encode(scheme, values))
        np.testing.assert_array_equal(back, values)
        np.testing.assert_array_equal(np.signbit(back), np.signbit(values))


def test_q8_k_encoder() -> None:
    """The peak of a block becomes -127; sums of 16 quants stand behind them."""
    scheme, w = QuantScheme.parse("Q8_K"), weights()
    packed = encode(scheme, w).data
    for row, block in zip(packed.reshape(-1, 292), w.reshape(-1, 256), strict=True):
        d, *rest = struct.unpack("<f256b16h", row.tobytes())
        q, sums = np.array(rest[:256]), rest[256:]
        assert sums == q.reshape(16, 16).sum(axis=1).tolist()
        assert (q[np.abs(block).argmax()] == -127) if block.any() else not q.any()
        # Half a step, plus the roundings of f32 (2^-24 of up to 127 steps, a few times).
        assert np.all(np.abs(q * np.float64(d) - block) <= abs(d) * (0.5 + 127 * 2**-22))


@pytest.mark.parametrize("name", ["int8", "int8_b32", "int4", "int4_b32", "int8_b64", "int4_b64"])
@pytest.mark.parametrize("suffix", ["", "_asym"])
def test_integer_encoders(name: str, suffix: str) -> None:
    scheme, w = QuantScheme.parse(name + suffix), weights()
    part = encode(scheme, w)
    assert part.data.shape == scheme.packed_shape(*w.shape)
    assert part.scale is not None and part.scale.shape == scheme.scale_shape(*w.shape)
    groups = w.astype(np.float64).reshape(*part.scale.shape, -1)
    levels = 2 ** int(scheme.bits_per_element)
    if suffix:
        span = groups.max(-1).clip(0) - groups.min(-1).clip(None, 0)
        step = span / (levels - 1)
    else:
        step = np.abs(groups).max(-1) / (levels // 2 - 1)
    if scheme.name.startswith("int8") and scheme.block == 64 and not suffix:
        step = np.maximum(step, lane_sums(groups) / 254)
    np.testing.assert_array_equal(part.scale, step.astype(np.float32))
    error = np.abs(decode(scheme, *part).reshape(groups.shape) - groups)
    # Half a step; a rounded zero point can push the end of the range out by another half.
    assert np.all(error <= step[..., None] * ((1.0 if suffix else 0.5) + 1e-5))
    assert np.all(decode(scheme, *part)[w == 0] == 0)


def lane_sums(blocks: np.ndarray) -> np.ndarray:
    """The largest sum of weights of one sign among k, k + 1, k + 4, k + 5, ... of 16."""
    found = []
    for start in range(0, blocks.shape[-1], 16):
        for first in (start, start + 2):
            lane = [blocks[..., first + 4 * j + i] for j in range(4) for i in range(2)]
            found += [np.clip(lane, 0, None).sum(0), -np.clip(lane, None, 0).sum(0)]
    return np.max(found, axis=0)


@pytest.mark.parametrize("name", ["int8_b64", "int8_b128"])
def test_products_of_int8_blocks_fit_sixteen_bits(name: str) -> None:
    """Codes up to 127 times eight weights: the sum of those of one sign stays below 2^15."""
    w = weights(128)
    w[5], w[6, ::2] = 1.0, -3.0
    part = encode(QuantScheme.parse(name), w)
    codes = part.data.astype(np.int64)
    assert lane_sums(codes).max() * 127 <= 32767
    assert np.abs(codes[7:]).max() == 127  # other blocks keep their range


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3_b128", "fp8_e5m2", "fp8_e5m2_b64"])
def test_fp8_encoder(name: str) -> None:
    scheme, w = QuantScheme.parse(name), weights()
    part = encode(scheme, w)
    assert part.scale is not None and part.scale.shape == scheme.scale_shape(*w.shape)
    limit, mantissa = (448, 3) if "e4m3" in name else (57344, 2)
    groups = w.astype(np.float64).reshape(*part.scale.shape, -1)
    peak = np.abs(groups).max(-1)
    np.testing.assert_array_equal(part.scale, (peak / limit).astype(np.float32))
    back = decode(scheme, *part).reshape(groups.shape)
    # Half a unit in the last place, or half the smallest subnormal (2^-9 and 2^-16).
    floor = part.scale[..., None] * (2.0**-10 if mantissa == 3 else 2.0**-17)
    bound = np.maximum(np.abs(groups) * 2.0 ** -(mantissa + 1), floor) * (1 + 1e-5)
    assert np.all(np.abs(back - groups) <= bound)
    assert np.isfinite(back).all()


def test_raw_fp8_saturates() -> None:
    scheme = QuantScheme.fp8("e4m3", scaled=False)
    part = encode(scheme, np.array([[1e9, -1e9, 1.0, 0.0]], np.float32))
    assert part.scale is None
    assert decode(scheme, part.data).tolist() == [[448.0, -448.0, 1.0, 0.0]]


@pytest.mark.parametrize("name", [*ENCODED[2:], "Q8_K", "int8", "int4_b32_asym", "fp8_e4m3"])
def test_extreme_weights(name: str) -> None:
    scheme = QuantScheme.parse(name)
    for small in (1e-45, 2e-38):  # a subnormal, and one whose inverse times 127 overflows
        tiny = np.full((1, 256), small, np.float32)
        tiny[0, ::2] = 0
        # What f16 scales and Q8_K give up is far below the smallest f16.
        np.testing.assert_allclose(decode(scheme, *encode(scheme, tiny)), tiny, rtol=0, atol=2e-36)
    for bad in (np.nan, np.inf):
        w = np.ones((1, 256), np.float32)
        w[0, 3] = bad
        with pytest.raises(NumericsError, match="1 such weights of 256"):
            encode(scheme, w)
    huge = np.full((1, 256), 3e38, np.float32)
    huge[0, ::2] *= -1
    if name.startswith("Q") and name != "Q8_K":
        with pytest.raises(NumericsError, match="does not fit f16"):
            encode(scheme, huge)
    else:
        np.testing.assert_allclose(decode(scheme, *encode(scheme, huge)), huge, rtol=0.07)


def test_encode_takes_other_floats_and_axes() -> None:
    scheme, w = QuantScheme.parse("Q4_0"), weights()
    want = encode(scheme, w).data
    np.testing.assert_array_equal(encode(scheme, w.astype(np.float64)).data, want)
    np.testing.assert_array_equal(encode(scheme, w.reshape(2, 4, -1)).data, want.reshape(2, 4, -1))
    np.testing.assert_array_equal(encode(scheme, w[::2]).data, want[::2])
    half = w.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(
        encode(scheme, half).data, encode(scheme, half.astype(np.float32)).data
    )


def test_no_encoder() -> None:
    with pytest.raises(OptionError, match=r"no encoder for Q8_1.*Q4_0.*Q8_K"):
        encode(QuantScheme.parse("Q8_1"), np.zeros((1, 256), np.float32))
