"""Quantisation schemes: how weights are packed, and reference decoders and encoders in NumPy.

A packed weight is out-major: one row per output channel, blocks along the inputs.

    GGUF types   packed u8 [N, row_bytes], scales inside the blocks
    int8         packed i8 [N, K], scale f32 [N, K/block], zero point i8 [N, K/block]
    int4         packed u8 [N, K/2], even column in the low nibble; scale as above, zero point u8.
                 Symmetric values are stored with 8 added.
    fp8          packed f8e4m3 or f8e5m2 [N, K], scale f32 [N, K/block]

Without a block the scale is per output channel: [N, 1]. A value is `(q - zero_point) * scale`.
Symmetric int8 weights are quantised by blocks such that CPUs may sum products in 16 bits: see
LANE_LIMIT.
"""

from __future__ import annotations

import difflib
import math
import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rlx.errors import DTypeError, NumericsError, OptionError, ShapeError
from rlx.support.records import dataclass

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Weights per task: fewer are limited by the interpreter, more by memory.
_WEIGHTS_PER_TASK = 1 << 18

LANE_WORDS = 4
"""Words of four weights whose products a CPU without four-way dot products sums in 16 bits: the
first two weights of each word in one lane, the others in another."""
LANE_LIMIT = 32767 // 127
"""What the weights of one sign in a lane add up to at most: they are multiplied by up to 127."""
LANE_BLOCK = 64
"""Symmetric int8 whose blocks are multiples of it keeps to the limit; that takes up to a bit of
some blocks."""

_NUMPY_NAMES = {
    "u8": "uint8",
    "i8": "int8",
    "f32": "float32",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """One way to pack weights. Get one from `parse`, `from_ggml`, `int8`, `int4` or `fp8`."""

    name: str
    block_size: int  # the number of columns must be a multiple of it
    bytes_per_block: int  # of the packed tensor; separate scales are not counted
    ggml_type: int | None = None
    packed_dtype: str = "u8"
    block: int | None = None  # columns per separate scale; None: the whole row
    has_scale: bool = False
    has_zero_point: bool = False

    @property
    def bits_per_element(self) -> float:
        """Bits of the packed tensor per weight; separate scales are not counted."""
        return 8 * self.bytes_per_block / self.block_size

    @property
    def is_float(self) -> bool:
        """Whether it is a plain float format, not quantised."""
        return self.name in ("F32", "F16", "BF16")

    @property
    def needs_importance(self) -> bool:
        """Whether so few bits are left that codes nearest to the weights make a model useless."""
        return self.name in ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS")

    @property
    def zero_point_dtype(self) -> str | None:
        return self.packed_dtype if self.has_zero_point else None

    def row_bytes(self, k: int) -> int:
        """Bytes of one packed row of `k` weights."""
        if k < 0 or k % self.block_size:
            raise ShapeError(
                f"{self.name} rows hold whole blocks",
                where="quant",
                got=f"{k} columns",
                expected=f"a multiple of {self.block_size}",
                hint="pad the columns, or take a scheme with a smaller block",
            )
        return k // self.block_size * self.bytes_per_block

    def row_elements(self, width: int) -> int:
        """Weights in a packed row of `width` bytes: the inverse of `row_bytes`."""
        blocks, rest = divmod(width, self.bytes_per_block)
        k = blocks * self.block_size
        if width < 0 or rest or (self.block and k % self.block):
            raise ShapeError(
                f"{self.name} rows hold whole blocks",
                where="quant",
                got=f"{width} bytes a row",
                expected=f"a multiple of {self.bytes_per_block}",
                hint="pack rows of [out, in]; see QuantScheme.packed_shape",
            )
        return k

    def packed_shape(self, n: int, k: int) -> tuple[int, int]:
        return (n, self.row_bytes(k))

    def scale_shape(self, n: int, k: int) -> tuple[int, int] | None:
        """Shape of the separate scale, and of the zero point where there is one."""
        self.row_bytes(k)
        if not self.has_scale:
            return None
        return (n, k // self.block if self.block else 1)

    def stored_bytes(self, n: int, k: int) -> int:
        """Everything a weight of [n, k] takes: packed rows, scales and zero points."""
        groups = self.scale_shape(n, k)
        entry = 4 * self.has_scale + self.has_zero_point
        return n * self.row_bytes(k) + (groups[0] * groups[1] * entry if groups else 0)

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def parse(name: str) -> QuantScheme:
        """The scheme that `str(scheme)` names; case does not matter."""
        text = name.strip()
        found = GGUF_SCHEMES.get(text.upper())
        if found is not None:
            return found
        if match := re.fullmatch(_INT_NAME, text.lower()):
            bits, block, asym = match.groups()
            make = QuantScheme.int8 if bits == "8" else QuantScheme.int4
            return make(int(block) if block else None, symmetric=not asym)
        if match := re.fullmatch(_FP8_NAME, text.lower()):
            format, block, raw = match.groups()
            return _fp8(format, int(block) if block else None, scaled=not raw)
        raise _unknown(name)

    @staticmethod
    def from_ggml(number: int) -> QuantScheme:
        """The scheme with this type number in a GGUF file."""
        for scheme in GGUF_SCHEMES.values():
            if scheme.ggml_type == number:
                return scheme
        raise OptionError(
            "no quantisation scheme has this GGML type number",
            where="quant",
            got=number,
            expected=", ".join(f"{s.ggml_type} ({s})" for s in GGUF_SCHEMES.values()),
            hint="24-28 are plain integer and f64 tensors; the other gaps left the format",
        )

    @staticmethod
    def int8(block: int | None = None, symmetric: bool = True) -> QuantScheme:
        """8-bit integers with one scale per `block` columns, or per output channel."""
        return _integer(8, block, symmetric)

    @staticmethod
    def int4(block: int | None = None, symmetric: bool = True) -> QuantScheme:
        """4-bit integers, two to a byte, with one scale per `block` columns or output channel."""
        return _integer(4, block, symmetric)

    @staticmethod
    def fp8(
        format: Literal["e4m3", "e5m2"], block: int | None = None, scaled: bool = True
    ) -> QuantScheme:
        """8-bit floats with one scale per `block` columns or output channel, or with none."""
        return _fp8(format, block, scaled)


def _integer(bits: int, block: int | None, symmetric: bool) -> QuantScheme:
    per_byte = 8 // bits
    _check_block(f"int{bits}", block, per_byte)
    size = block or per_byte
    return QuantScheme(
        name=f"int{bits}" + (f"_b{block}" if block else "") + ("" if symmetric else "_asym"),
        block_size=size,
        bytes_per_block=size // per_byte,
        packed_dtype="i8" if bits == 8 else "u8",
        block=block,
        has_scale=True,
        has_zero_point=not symmetric,
    )


def _fp8(format: str, block: int | None, scaled: bool) -> QuantScheme:
    if format not in ("e4m3", "e5m2"):
        raise OptionError("unknown fp8 format", where="quant", got=format, expected="e4m3 or e5m2")
    _check_block("fp8", block, 1)
    if block and not scaled:
        raise OptionError(
            "fp8 without a scale has no block",
            where="quant",
            got=f"block={block}, scaled=False",
            expected="block=None or scaled=True",
        )
    return QuantScheme(
        name=f"fp8_{format}" + (f"_b{block}" if block else "") + ("" if scaled else "_raw"),
        block_size=block or 1,
        bytes_per_block=block or 1,
        packed_dtype=f"f8{format}",
        block=block,
        has_scale=scaled,
    )


def _check_block(name: str, block: int | None, multiple: int) -> None:
    if block is not None and (block <= 0 or block % multiple):
        raise OptionError(
            f"{name} cannot have this block",
            where="quant",
            got=block,
            expected="None (per output channel) or a positive multiple of " + str(multiple),
        )


_INT_NAME = r"int(8|4)(?:_b([1-9]\d*))?(_asym)?"
_FP8_NAME = r"fp8_(e4m3|e5m2)(?:_b([1-9]\d*)|(_raw))?"

# name, GGML type number, weights per block, bytes per block.
# Q8_1 follows ggml's current struct (two f16, 32 i8); the form with f32 fields is of 2023.
_GGUF_TABLE = (
    ("F32", 0, 1, 4),
    ("F16", 1, 1, 2),
    ("Q4_0", 2, 32, 18),
    ("Q4_1", 3, 32, 20),
    ("Q5_0", 6, 32, 22),
    ("Q5_1", 7, 32, 24),
    ("Q8_0", 8, 32, 34),
    ("Q8_1", 9, 32, 36),
    ("Q2_K", 10, 256, 84),
    ("Q3_K", 11, 256, 110),
    ("Q4_K", 12, 256, 144),
    ("Q5_K", 13, 256, 176),
    ("Q6_K", 14, 256, 210),
    ("Q8_K", 15, 256, 292),
    ("IQ2_XXS", 16, 256, 66),
    ("IQ2_XS", 17, 256, 74),
    ("IQ3_XXS", 18, 256, 98),
    ("IQ1_S", 19, 256, 50),
    ("IQ4_NL", 20, 32, 18),
    ("IQ3_S", 21, 256, 110),
    ("IQ2_S", 22, 256, 82),
    ("IQ4_XS", 23, 256, 136),
    ("IQ1_M", 29, 256, 56),
    ("BF16", 30, 1, 2),
    ("TQ1_0", 34, 256, 54),
    ("TQ2_0", 35, 256, 66),
    ("MXFP4", 39, 32, 17),
    ("NVFP4", 40, 64, 36),
    ("Q1_0", 41, 128, 18),
)

GGUF_SCHEMES = {
    name: QuantScheme(name, block, size, ggml_type=number)
    for name, number, block, size in _GGUF_TABLE
}

_SAMPLES = ("int8", "int8_b32", "int8_b32_asym", "int4_b32", "int4_b32_asym", "fp8_e4m3")


def _unknown(name: str) -> OptionError:
    known = [*GGUF_SCHEMES, *_SAMPLES, "fp8_e5m2", "fp8_e4m3_b128"]
    folded = {n.lower(): n for n in known}
    close = difflib.get_close_matches(name.strip().lower(), folded, n=4, cutoff=0.5)
    return OptionError(
        "unknown quantisation scheme",
        where="quant",
        got=repr(name),
        expected="one of " + ", ".join(known),
        hint="close names: " + ", ".join(folded[n] for n in close) if close else "",
    )


class Packed(NamedTuple):
    """A packed weight, in the order `decode` takes its parts."""

    data: npt.NDArray[Any]
    scale: npt.NDArray[np.float32] | None = None
    zp: npt.NDArray[Any] | None = None


def decode(
    scheme: QuantScheme,
    packed: npt.ArrayLike,
    scale: npt.ArrayLike | None = None,
    zp: npt.ArrayLike | None = None,
) -> npt.NDArray[np.float32]:
    """The weights of `packed` as f32. Axes before the last are free: [..., row] -> [..., K]."""
    import numpy as np

    from rlx.ir.quant import plain

    # imported late: layouts and tables take some milliseconds
    from rlx.ir.quant.codecs import blocks

    data = np.asarray(packed)
    _check_dtype(scheme, "packed", data, scheme.packed_dtype)
    if data.ndim == 0:
        raise ShapeError(
            f"{scheme} weights have rows", where="quant", got="a scalar", expected="[..., row]"
        )
    k = scheme.row_elements(data.shape[-1])
    groups = (*data.shape[:-1], k // scheme.block if scheme.block else 1)
    scale_array = _side(scheme, "scale", scale, "f32" if scheme.has_scale else None, groups)
    zp_array = _side(scheme, "zp", zp, scheme.zero_point_dtype, groups)
    if scheme.ggml_type is None:
        return plain.decode_rows(scheme, data, scale_array, zp_array)
    return blocks.decode_rows(scheme, data, k)


def encode(
    scheme: QuantScheme,
    weights: npt.ArrayLike,
    *,
    importance: npt.ArrayLike | None = None,
    threads: int = 1,
) -> Packed:
    """Pack weights [..., K]. K, IQ and FP4 types search for the scales with the least squared
    error; other schemes map the largest weight of a block to the last code, as in ggml.

    `importance` [K], or [..., K] with leading axes of the weights, weighs the squared error of
    each column: mean squares of the inputs it is multiplied with. All GGUF schemes with a
    scale of their own choice use it.
    """
    import numpy as np

    from rlx.ir.quant import plain
    from rlx.ir.quant.codecs import blocks

    values = np.asarray(weights)
    if values.dtype.name not in ("float32", "float16", "float64", "bfloat16"):
        raise DTypeError(
            f"{scheme} packs floats", where="quant", got=values.dtype, expected="f32, f16 or bf16"
        )
    if values.ndim == 0:
        raise ShapeError(
            f"{scheme} weights have rows", where="quant", got="a scalar", expected="[..., K]"
        )
    *outer, k = values.shape
    rows = values.reshape(math.prod(outer), k)
    made = _allocate(scheme, len(rows), k)
    weighed = None if importance is None else _importance(scheme, importance, values.shape)

    def pack(task: slice) -> None:
        part = np.ascontiguousarray(rows[task], dtype=np.float32)
        if scheme.ggml_type is not None:
            weigh = None if weighed is None else np.ascontiguousarray(weighed[task])
            made[0][task] = blocks.encode_rows(scheme, part, weigh)
            return
        parts = (p for p in plain.encode_rows(scheme, part) if p is not None)
        for out, found in zip(made, parts, strict=True):
            out[task] = found

    from concurrent.futures import ThreadPoolExecutor  # 10 ms that `import rlx` need not take

    count = max(1, _WEIGHTS_PER_TASK // max(k, 1))
    tasks = [slice(i, i + count) for i in range(0, len(rows), count)]
    with ThreadPoolExecutor(max(1, threads)) as pool:
        for _ in pool.map(pack, tasks):  # re-raises errors of a task
            pass
    return Packed(*[a.reshape(*outer, a.shape[-1]) for a in made])


def _importance(
    scheme: QuantScheme, given: npt.ArrayLike, shape: tuple[int, ...]
) -> npt.NDArray[np.float32]:
    """The importance of each weight, [rows, K]: a mean of 1 over the columns, and never quite 0."""
    import numpy as np

    found = np.asarray(given, np.float64)
    outer, k = found.shape[:-1], shape[-1]
    if (
        found.ndim == 0
        or found.shape[-1] != k
        or outer != shape[: len(outer)]
        or found.ndim > len(shape)
    ):
        raise ShapeError(
            f"an importance matrix does not fit the {scheme} weights",
            where="quant",
            got=list(found.shape),
            expected=f"[{k}], or leading axes of {list(shape)}",
            hint="it was made with another model",
        )
    if not np.isfinite(found).all() or (found < 0).any():
        raise NumericsError(
            "an importance matrix holds mean squares",
            where="quant",
            got=f"{int((~np.isfinite(found) | (found < 0)).sum())} values that are none",
            expected="finite, 0 or more",
        )
    mean = found.mean(axis=-1, keepdims=True)
    scaled = np.where(mean > 0, found / np.where(mean > 0, mean, 1), 1).astype(np.float32)
    scaled = np.maximum(scaled, np.float32(1e-5))
    middle = scaled.reshape(*outer, *(1,) * (len(shape) - found.ndim), k)
    spread = np.broadcast_to(middle, shape)
    return spread.reshape(-1, k)


def _allocate(scheme: QuantScheme, n: int, k: int) -> list[npt.NDArray[Any]]:
    """Arrays for packed rows, and for scale and zero point if the scheme has them."""
    import numpy as np

    room = [np.empty(scheme.packed_shape(n, k), _NUMPY_NAMES[scheme.packed_dtype])]
    for dtype in ("f32" if scheme.has_scale else None, scheme.zero_point_dtype):
        groups = scheme.scale_shape(n, k)
        if dtype is not None and groups is not None:
            room.append(np.empty(groups, _NUMPY_NAMES[dtype]))
    return room


def _side(
    scheme: QuantScheme,
    what: str,
    given: npt.ArrayLike | None,
    dtype: str | None,
    shape: tuple[int, ...],
) -> npt.NDArray[Any] | None:
    """A scale or zero point, checked against what the scheme has."""
    import numpy as np

    if dtype is None or given is None:
        if dtype is None and given is None:
            return None
        raise OptionError(
            f"{scheme} {'has no' if dtype is None else 'needs a'} separate {what}",
            where="quant",
            got="None" if given is None else f"an array of shape {np.shape(given)}",
            expected="None" if dtype is None else f"{dtype} {list(shape)}",
        )
    array = np.asarray(given)
    _check_dtype(scheme, what, array, dtype)
    if array.shape != shape:
        raise ShapeError(
            f"{what} does not fit the packed {scheme} weight",
            where="quant",
            got=list(array.shape),
            expected=list(shape),
            hint=f"one entry per {f'{scheme.block} columns' if scheme.block else 'row'}",
        )
    return array


def _check_dtype(scheme: QuantScheme, what: str, array: npt.NDArray[Any], dtype: str) -> None:
    if array.dtype.name != _NUMPY_NAMES[dtype]:
        raise DTypeError(
            f"{what} of a {scheme} weight has the wrong element type",
            where="quant",
            got=array.dtype,
            expected=dtype,
            hint="look at the same bytes with array.view(...)" if array.itemsize == 1 else "",
        )
