"""GGUF blocks as NumPy records, and the loops that decode and encode rows of them.

A family of formats declares each layout once, with its decoder and encoder:

    @decoder("Q8_0", ("d", "<f2"), ("qs", "i1", 32))
    def q8_0(b, out):
        fill(out, b["qs"], f32(b["d"]))

`b` is an array of records, `out` the f32 values [blocks, block_size] to fill. Products of f16
scales and short integers are exact in f32, so a weight is rounded at most once, by its last
operation: any order of multiplication, and FMA, gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx.errors import NumericsError, OptionError

if TYPE_CHECKING:
    from rlx.ir.quant.scheme import QuantScheme

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
Decoder = Callable[[Array, F32], None]
Encoder = Callable[[F32, Array, F32 | None], None]  # weights, records, importance

LAYOUTS: dict[str, np.dtype[Any]] = {}
DECODERS: dict[str, Decoder] = {}
ENCODERS: dict[str, Encoder] = {}

# Temporaries of this many weights fit a core's private cache.
_CHUNK = 1 << 16
_TINY = np.finfo(np.float32).tiny


def decoder(name: str, *layout: Any) -> Callable[[Decoder], Decoder]:
    """Register the record layout of a scheme and its decoder."""

    def register(function: Decoder) -> Decoder:
        LAYOUTS[name] = np.dtype(list(layout))
        DECODERS[name] = function
        return function

    return register


def encoder(name: str) -> Callable[[Encoder], Encoder]:
    def register(function: Encoder) -> Encoder:
        ENCODERS[name] = function
        return function

    return register


def decode_rows(scheme: QuantScheme, packed: Array, k: int) -> F32:
    records = np.ascontiguousarray(packed).reshape(-1).view(LAYOUTS[scheme.name])
    out = np.empty((len(records), scheme.block_size), np.float32)
    step = _CHUNK // scheme.block_size
    # inf and NaN scales decode by plain arithmetic, without warnings.
    with np.errstate(invalid="ignore", over="ignore"):
        for i in range(0, len(records), step):
            DECODERS[scheme.name](records[i : i + step], out[i : i + step])
    return out.reshape(*packed.shape[:-1], k)


def encode_rows(scheme: QuantScheme, values: F32, importance: F32 | None = None) -> Array:
    """Pack rows; `importance`, of the same shape, weighs the squared error of each weight."""
    if scheme.name not in ENCODERS:
        raise OptionError(
            f"no encoder for {scheme}",
            where="quant",
            got=scheme.name,
            expected=", ".join(sorted(ENCODERS)) + ", int8, int4 or fp8",
        )
    if values.size and importance is None and scheme.needs_importance:
        raise OptionError(
            f"{scheme} needs an importance matrix",
            where="quant",
            got="weights alone",
            expected="the mean squares of the inputs that the weights are multiplied with",
            hint="rlx quantize --calibrate TEXT makes one, --imatrix FILE takes one of llama.cpp; "
            "without one the type loses too much: take IQ2_S, IQ3_XXS or Q2_K",
        )
    if scheme.block_size > 1:
        require_finite(scheme, values)
    blocks = values.reshape(-1, scheme.block_size)
    records = np.zeros(len(blocks), LAYOUTS[scheme.name])
    weighed = None if importance is None else importance.reshape(blocks.shape)
    if len(blocks):
        # scales are checked below
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            ENCODERS[scheme.name](blocks, records, weighed)
    _require_scales(scheme, records)
    return records.view(np.uint8).reshape(*values.shape[:-1], scheme.row_bytes(values.shape[-1]))


def require_finite(scheme: QuantScheme, values: F32) -> None:
    if not np.isfinite(values).all():
        raise NumericsError(
            f"{scheme} cannot hold inf or NaN",
            where="quant",
            got=f"{int((~np.isfinite(values)).sum())} such weights of {values.size}",
            expected="finite weights",
        )


def _require_scales(scheme: QuantScheme, records: Array) -> None:
    for field in ("d", "m", "dmin"):
        if field in (records.dtype.names or ()):
            require_f16(scheme, records[field])


def require_f16(scheme: object, scales: Array) -> None:
    if np.isinf(scales).any():
        raise NumericsError(
            f"a block scale of {scheme} does not fit f16",
            where="quant",
            expected="scales of at most 65504",
            hint="scale the weights down",
        )


def f32(field: Array) -> F32:
    """A per-block field as a column of f32."""
    return field.astype(np.float32)[:, None]


def as_f16(d: F32) -> F32:
    """f32 values as f16 will hold them."""
    return d.astype(np.float16).astype(np.float32)


def reciprocal(d: F32) -> F32:
    """1 / d, and 0 where that would overflow: f16 holds such a scale as 0."""
    return np.where(np.abs(d) >= _TINY, np.float32(1) / d, np.float32(0))


class BestScale:
    """Of the codes tried for each run, a column of x, the scale of those with the least error."""

    def __init__(self, x: F32, w: F32 | None) -> None:
        self._x, self._w = x, w
        self._room = None if w is None else np.empty_like(x)
        self.scale: F32 = np.zeros(x.shape[1], np.float32)
        self._most: F32 = np.zeros(x.shape[1], np.float32)

    def try_codes(self, q: F32) -> None:
        wq = q if self._w is None else np.multiply(q, self._w, out=self._room)
        xq, qq = dots(self._x, wq), dots(q, wq)
        fitted = xq * reciprocal(qq)
        gain = xq * fitted  # reduction of the (weighted) squared error
        better = gain > self._most
        np.copyto(self._most, gain, where=better)
        np.copyto(self.scale, fitted, where=better)


def dots(a: F32, b: F32) -> F32:
    """The dot products of columns."""
    found: F32 = np.einsum("ij,ij->j", a, b)
    return found


class Parts:
    """Takes the place of the values that a decoder fills: keeps quants and scales apart."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape, self.size = shape, shape[0] * shape[1]
        self.quants: Array = np.empty(0)
        self.scale: Array = np.empty(0)
        self.minimum: Array | None = None


def split_rows(scheme: QuantScheme, packed: Array) -> tuple[Array, F32, F32 | None]:
    """Rows of blocks as quants (i8) [rows, k], and what runs of them are multiplied with, and have
    subtracted then; of block formats but plain floats."""
    records = np.ascontiguousarray(packed).reshape(-1).view(LAYOUTS[scheme.name])
    found: Any = Parts((len(records), scheme.block_size))
    DECODERS[scheme.name](records, found)
    rows = len(packed)

    def flat(part: Array, dtype: Any) -> Array:
        whole: Array = np.ascontiguousarray(part).astype(dtype).reshape(rows, -1)
        return whole

    minimum = None if found.minimum is None else flat(found.minimum, np.float32)
    return flat(found.quants, np.int8), flat(found.scale, np.float32), minimum


def fill(out: F32 | Parts, q: Array, scale: Array, minimum: Array | None = None) -> None:
    """out = q * scale - minimum, where each scale and minimum holds for a run of weights.

    Whole-array operations: broadcasting over runs of 16 takes twice as long.
    """
    if isinstance(out, Parts):
        out.quants, out.scale, out.minimum = q, scale, minimum
        return
    run = out.size // scale.size
    np.copyto(out, q.reshape(out.shape))
    out *= np.repeat(scale.reshape(-1), run).reshape(out.shape)
    if minimum is not None:
        out -= np.repeat(minimum.reshape(-1), run).reshape(out.shape)


def planes(source: Array, bits: int, at: int = 0) -> npt.NDArray[np.uint8]:
    """Bit fields of bytes [..., w], lowest bits first, shifted left by `at`: [..., 8 / bits, w].

    GGUF stores the first w weights in the lowest bits of w bytes, the next w above them. Eight
    bytes are handled as one word; the mask drops what crosses from byte to byte.
    """
    word = np.dtype(np.uint64 if source.shape[-1] % 8 == 0 else np.uint8)
    words: Array = np.ascontiguousarray(source).view(word)
    found: Array = words[..., None, :] >> np.arange(0, 8, bits, dtype=word)[:, None]
    found &= word.type((256**word.itemsize - 1) // 255 * ((1 << bits) - 1))
    if at:
        found <<= word.type(at)
    return found.view(np.uint8)


def fields(source: Array, bits: int) -> npt.NDArray[np.uint8]:
    """Bit fields of bytes [n, w] in order of the bytes: [n, w * 8 / bits]."""
    found = np.empty((*source.shape, 8 // bits), np.uint8)
    for i in range(8 // bits):
        np.right_shift(source, np.uint8(i * bits), out=found[..., i])
    found &= np.uint8((1 << bits) - 1)
    return found.reshape(len(source), -1)


class CodeTable:
    """What 4-bit codes stand for, as i8."""

    def __init__(self, values: Array) -> None:
        self._bytes = np.resize(values.astype(np.int8), 256).tobytes()

    def take(self, codes: Array) -> Array:
        """By a translation of bytes: several times as fast as an index."""
        found = np.frombuffer(codes.tobytes().translate(self._bytes), np.int8)
        return found.reshape(codes.shape)


def bits_of(source: Array) -> npt.NDArray[np.uint8]:
    """The bits of bytes [n, w], lowest first: [n, 8 * w]."""
    return np.unpackbits(source, axis=-1, bitorder="little")
