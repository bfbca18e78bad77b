"""Quantised Hugging Face folders: GPTQ, AWQ, fp8 and compressed-tensors.

Each method names the tensors of a matrix its own way; `unquantized` gives a folder that hides the
difference. The numbers are those of the formats: `(q - zero) * scale`. Activations stay as they
are, even where the file asks for rounded ones: that loses nothing. A method that is not here is
refused: its scales would be dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import FormatError, UnsupportedError
from rlx.formats.hf import DequantizedFolder, Floats, HfFolder, spread, unpack_bits, unpack_fp4

Settings = Mapping[str, Any]
# how inputs and the KV cache are rounded where the maker's engine runs the model
_ROUNDINGS = (
    ".input_scale", ".activation_scale", ".input_global_scale", ".input_zero_point", ".k_scale",
    ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point",
)  # fmt: skip
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble


def unquantized(folder: HfFolder) -> HfFolder:
    """The folder with its weights as floats, or as the page of its architecture reads them."""
    text = folder.config.get("text_config")  # of a multimodal model
    places = (folder.config, text if isinstance(text, Mapping) else {})
    settings = next(
        (p["quantization_config"] for p in places if p.get("quantization_config")), None
    )
    if settings is None:
        return folder
    if not isinstance(settings, Mapping):
        raise FormatError(
            "quantization_config is no object", where=folder.name, got=repr(settings)[:40]
        )
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise UnsupportedError(
            "quantization_config has a method that is not supported", where=folder.name,
            got=repr(method)[:40], expected=", ".join(METHODS),
            hint="load the float weights, with quant= if they should be packed",
        )  # fmt: skip
    return METHODS[method](folder, settings)


def _mxfp4(folder: HfFolder, settings: Settings) -> HfFolder:
    """The experts of gpt-oss: its page reads their blocks and scales."""
    kind = folder.config.get("model_type")
    if kind != "gpt_oss":
        raise UnsupportedError(
            "quantization_config: mxfp4 of another architecture", where=folder.name, got=kind,
            expected="gpt_oss",
        )  # fmt: skip
    return folder


def _dequantized(folder: HfFolder, settings: Settings) -> HfFolder:
    found = DequantizedFolder(folder)
    _READERS[settings["quant_method"]](found, settings)
    if not found.computed:
        found.fail(
            "quantization_config names a method, and no matrix is stored that way",
            got=settings["quant_method"], hint="if all are floats, take it out of config.json",
        )  # fmt: skip
    found.drop(*_ROUNDINGS)
    return found


def _gptq(folder: DequantizedFolder, settings: Settings) -> None:
    """qweight [K·bits/32, N], qzeros [groups, N·bits/32], scales [groups, N], g_idx [K]."""
    bits = _one_of(folder, settings, "bits", (2, 3, 4, 8))
    stored = settings.get("checkpoint_format", settings.get("format", "gptq"))
    if stored not in ("gptq", "gptq_v2"):
        _refuse(folder, "checkpoint_format", stored, "gptq, gptq_v2")
    for base in _bases(folder, ".qweight"):
        words = folder.stored(f"{base}.qweight", "i32")
        scales = folder.stored(f"{base}.scales", "f16 bf16 f32")
        if words.ndim != 2 or scales.ndim != 2 or words.shape[0] * 32 % bits:
            folder.fail(f"{base}.qweight has the wrong shape", got=words.shape)
        k, n, groups = words.shape[0] * 32 // bits, words.shape[1], len(scales)
        folder.stored(f"{base}.scales", "f16 bf16 f32", (groups, n))
        folder.stored(f"{base}.qzeros", "i32", (groups, -(-n * bits // 32)))
        if f"{base}.g_idx" in folder.weights.tensors:
            group = np.asarray(folder.stored(f"{base}.g_idx", "i32", (k,)))
        else:
            group = np.arange(k) // _group_size(folder, base, k, groups)
        if k and (group.min() < 0 or group.max() >= groups):
            folder.fail(f"{base}.g_idx names a group that is not there", expected=f"< {groups}")
        make = partial(_gptq_matrix, folder, base, bits, group, stored == "gptq")
        folder.replace(f"{base}.weight", (n, k), _parts(base, "qweight qzeros scales g_idx"), make)


def _gptq_matrix(
    folder: DequantizedFolder, base: str, bits: int, group: npt.NDArray[Any], less_one: bool
) -> Floats:
    words = folder.stored(f"{base}.qweight", "i32")
    scales = folder.stored(f"{base}.scales", "f16 bf16 f32").astype(np.float32)
    zeros = folder.stored(f"{base}.qzeros", "i32")
    if less_one:  # the first form of the format stores zero - 1, subtracted from whole words
        zeros = (zeros.view(np.uint32) + _ones(bits, zeros.shape[1])).astype(np.uint32)
    offsets = unpack_bits(zeros, bits, scales.shape[1]).astype(np.float32)
    codes = unpack_bits(words.T, bits, len(group)).astype(np.float32)
    codes -= offsets.T[:, group]
    codes *= scales.T[:, group]
    return codes


def _ones(bits: int, words: int) -> npt.NDArray[np.uint32]:
    """Words that hold the number 1 in each place of `bits` bits."""
    numbers = words * 32 // bits
    stream = np.zeros(words * 32, np.uint8)
    stream[: numbers * bits : bits] = 1
    return np.packbits(stream, bitorder="little").view(np.uint32)


def _awq(folder: DequantizedFolder, settings: Settings) -> None:
    """qweight [K, N/8], qzeros [groups, N/8], scales [groups, N]; nibbles in `_AWQ_ORDER`."""
    _one_of(folder, settings, "bits", (4,))
    version = str(settings.get("version", settings.get("format", "gemm"))).lower()
    if version != "gemm":
        _refuse(folder, "version", version, "gemm")
    for base in _bases(folder, ".qweight"):
        words = folder.stored(f"{base}.qweight", "i32")
        scales = folder.stored(f"{base}.scales", "f16 bf16 f32")
        if words.ndim != 2 or scales.ndim != 2:
            folder.fail(f"{base}.qweight has the wrong shape", got=words.shape)
        k, n, groups = len(words), words.shape[1] * 8, len(scales)
        folder.stored(f"{base}.scales", "f16 bf16 f32", (groups, n))
        folder.stored(f"{base}.qzeros", "i32", (groups, n // 8))
        make = partial(_awq_matrix, folder, base, _group_size(folder, base, k, groups))
        folder.replace(f"{base}.weight", (n, k), _parts(base, "qweight qzeros scales"), make)


def _awq_matrix(folder: DequantizedFolder, base: str, size: int) -> Floats:
    codes = _awq_columns(folder.stored(f"{base}.qweight", "i32"))
    zeros = _awq_columns(folder.stored(f"{base}.qzeros", "i32"))
    scales = folder.stored(f"{base}.scales", "f16 bf16 f32").astype(np.float32)
    found: Floats = (codes - zeros.repeat(size, axis=0)) * scales.repeat(size, axis=0)
    return np.ascontiguousarray(found.T)


def _awq_columns(words: npt.NDArray[Any]) -> Floats:
    nibbles = unpack_bits(words, 4, words.shape[1] * 8).reshape(len(words), -1, 8)
    columns = np.empty(nibbles.shape, np.float32)
    columns[..., _AWQ_ORDER] = nibbles
    return columns.reshape(len(words), -1)


def _fp8(folder: DequantizedFolder, settings: Settings) -> None:
    """weight [N, K] in E4M3; weight_scale_inv (or weight_scale): one, one a row, or one a block."""
    given = settings.get("weight_block_size")
    for base in _bases(folder, ".weight", "f8e4m3"):
        scale = f"{base}.weight_scale_inv"
        if scale not in folder.weights.tensors:
            scale = f"{base}.weight_scale"
        _scaled(folder, base, f"{base}.weight", scale, _block(folder, given))


def _compressed(folder: DequantizedFolder, settings: Settings) -> None:
    """compressed-tensors: what a matrix is stored as shows in its tensors."""
    for name in ("sparsity_config", "transform_config"):
        said = settings.get(name)
        if said and (not isinstance(said, Mapping) or said.get("format", "") != "dense"):
            _refuse(folder, name, said, "none")
    groups = settings.get("config_groups")
    schemes = [g.get("weights") for g in groups.values()] if isinstance(groups, Mapping) else []
    schemes = [s for s in schemes if isinstance(s, Mapping)]
    blocks = [s["block_structure"] for s in schemes if s.get("block_structure")]
    widths = {s.get("num_bits") for s in schemes if s.get("type", "int") == "int"}
    for base in _bases(folder, ".weight_packed"):
        if folder.weights.tensors[f"{base}.weight_packed"].dtype.name == "u8":
            _packed_fp4(folder, base)
        else:
            _packed_integers(folder, base, widths)
    for base in _bases(folder, ".weight", "i8 f8e4m3"):
        block = _block(folder, blocks[0] if blocks else None)
        _scaled(folder, base, f"{base}.weight", f"{base}.weight_scale", block)


def _packed_integers(folder: DequantizedFolder, base: str, widths: set[Any]) -> None:
    """weight_packed [N, words of K], weight_scale [N, groups], weight_zero_point [words of N,
    groups], weight_g_idx [K]."""
    words = folder.stored(f"{base}.weight_packed", "i32")
    scales = folder.stored(f"{base}.weight_scale", "f16 bf16 f32")
    n, k = (int(d) for d in folder.stored(f"{base}.weight_shape", "i32 i64", (2,)))
    known = [b for b in (2, 3, 4, 5, 6, 7, 8) if b in widths]
    fitting = [b for b in known if _width(b, k) == words.shape[-1]]
    if words.ndim != 2 or len(fitting) != 1 or len(words) != n or scales.ndim != 2:
        folder.fail(
            f"{base}.weight_packed does not fit its shape and bits", got=words.shape,
            expected=f"[{n}, words of {k}], bits {sorted(map(str, widths))}",
        )  # fmt: skip
    folder.stored(f"{base}.weight_scale", "f16 bf16 f32", (n, scales.shape[1]))
    if f"{base}.weight_g_idx" in folder.weights.tensors:
        group = np.asarray(folder.stored(f"{base}.weight_g_idx", "i32", (k,)))
        if k and (group.min() < 0 or group.max() >= scales.shape[1]):
            folder.fail(f"{base}.weight_g_idx names a group that is not there")
    else:
        group = np.arange(k) // _group_size(folder, base, k, scales.shape[1])
    zero = f"{base}.weight_zero_point"
    if zero in folder.weights.tensors:
        folder.stored(zero, "i32", (_width(fitting[0], n), scales.shape[1]))
    parts = _parts(base, "weight_packed weight_shape weight_scale weight_zero_point weight_g_idx")
    make = partial(_integer_matrix, folder, base, fitting[0], group)
    folder.replace(f"{base}.weight", (n, k), parts, make)


def _integer_matrix(
    folder: DequantizedFolder, base: str, bits: int, group: npt.NDArray[Any]
) -> Floats:
    scales = folder.stored(f"{base}.weight_scale", "f16 bf16 f32").astype(np.float32)
    words = folder.stored(f"{base}.weight_packed", "i32")
    codes = unpack_bits(words, bits, len(group)).astype(np.float32)
    if f"{base}.weight_zero_point" in folder.weights.tensors:  # both are stored plus 2^(bits-1)
        zeros = folder.stored(f"{base}.weight_zero_point", "i32")
        offsets = unpack_bits(zeros.T, bits, len(codes)).astype(np.float32).T
        codes -= offsets[:, group]
    else:
        codes -= 1 << (bits - 1)
    codes *= scales[:, group]
    return codes


def _packed_fp4(folder: DequantizedFolder, base: str) -> None:
    """NVFP4 (scales in E4M3 under a global one) and MXFP4 (scales are powers of two)."""
    codes = folder.stored(f"{base}.weight_packed", "u8")
    scales = folder.stored(f"{base}.weight_scale", "u8 f8e4m3")
    shape = (len(codes), codes.shape[-1] * 2)
    if codes.ndim != 2 or scales.ndim != 2 or len(scales) != len(codes):
        folder.fail(f"{base}.weight_packed does not fit its scales", got=codes.shape)
    size = _group_size(folder, base, shape[1], scales.shape[1])
    if scales.dtype != np.uint8:
        folder.stored(f"{base}.weight_global_scale", "f32", (1,))
    parts = _parts(base, "weight_packed weight_scale weight_global_scale")
    folder.replace(f"{base}.weight", shape, parts, partial(_fp4_matrix, folder, base, size))


def _fp4_matrix(folder: DequantizedFolder, base: str, size: int) -> Floats:
    stored = folder.stored(f"{base}.weight_scale", "u8 f8e4m3")
    if stored.dtype == np.uint8:
        scales = np.exp2(stored.astype(np.float32) - 127)
    else:
        whole = folder.stored(f"{base}.weight_global_scale", "f32", (1,))
        scales = stored.astype(np.float32) / whole[0]
    codes = unpack_fp4(folder.stored(f"{base}.weight_packed", "u8"))
    codes *= scales.repeat(size, axis=1)
    return codes


def _scaled(
    folder: DequantizedFolder, base: str, weight: str, scale: str, block: tuple[int, int] | None
) -> None:
    """A matrix of elements, with one scale, one a row, one a group of a row, or one a block."""
    shape = folder.weights.tensors[weight].shape
    scales = folder.stored(scale, "f32 f16 bf16 u8")
    if len(shape) != 2:
        folder.fail(f"{weight} is no matrix", got=shape)
    n, k = shape
    if scales.size == 1:
        size = (n, k)
    elif scales.shape in ((n,), (n, 1)):
        size = (1, k)
    elif block and scales.shape == (-(-n // block[0]), -(-k // block[1])):
        size = block
    elif scales.ndim == 2 and len(scales) == n:
        size = (1, _group_size(folder, base, k, scales.shape[1]))
    else:
        folder.fail(f"{scale} does not fit {weight}", got=scales.shape, expected=f"of {shape}")
    zero = f"{base}.weight_zero_point"
    if zero in folder.weights.tensors:
        folder.stored(zero, "i8", scales.shape)
    parts = _parts(base, "weight_scale weight_scale_inv weight_zero_point")
    make = partial(_scaled_matrix, folder, base, weight, scale, (n, k), size)
    folder.replace(weight, (n, k), parts, make)


def _scaled_matrix(
    folder: DequantizedFolder, base: str, weight: str, scale: str, shape: tuple[int, int],
    size: tuple[int, int],
) -> Floats:  # fmt: skip
    stored = folder.stored(scale, "f32 f16 bf16 u8")
    scales = stored.astype(np.float32)
    if stored.dtype == np.uint8:  # the exponent of a power of two
        scales = np.exp2(scales - 127)
    scales = scales.reshape(-(-shape[0] // size[0]), -1)
    codes: Floats = folder.stored(weight, "f8e4m3 i8", shape).astype(np.float32)
    if f"{base}.weight_zero_point" in folder.weights.tensors:
        zeros = folder.stored(f"{base}.weight_zero_point", "i8").astype(np.float32)
        codes -= spread(zeros.reshape(scales.shape), shape, size)
    codes *= spread(scales, shape, size)
    return codes


def _bases(folder: DequantizedFolder, ending: str, dtypes: str = "i32 u8") -> list[str]:
    """The matrices with a tensor of this ending and type."""
    return [
        name.removesuffix(ending)
        for name, info in folder.weights.tensors.items()
        if name.endswith(ending) and info.dtype.name in dtypes.split()
    ]


def _parts(base: str, names: str) -> list[str]:
    return [f"{base}.{name}" for name in names.split()]


def _group_size(folder: DequantizedFolder, base: str, count: int, groups: int) -> int:
    if groups == 0 or count % groups:
        folder.fail(f"{base}: {groups} groups do not divide {count} columns")
    return max(count // groups, 1)


def _width(bits: int, count: int) -> int:
    return math.ceil(count * bits / 32)


def _block(folder: DequantizedFolder, given: Any) -> tuple[int, int] | None:
    if given is None:
        return None
    fine = isinstance(given, list) and len(given) == 2
    if not fine or not all(type(d) is int and 0 < d < 1 << 31 for d in given):
        folder.fail("quantization_config: not a block size", got=repr(given)[:40])
    return given[0], given[1]


def _one_of(
    folder: DequantizedFolder, settings: Settings, name: str, known: tuple[int, ...]
) -> int:
    value = settings.get(name, settings.get("w_bit") if name == "bits" else None)
    if type(value) is not int or value not in known:
        _refuse(folder, name, value, ", ".join(map(str, known)))
    return int(value)


def _refuse(folder: DequantizedFolder, name: str, got: Any, expected: str) -> None:
    raise UnsupportedError(
        f"quantization_config: {name} is not supported", where=folder.name, got=repr(got)[:40],
        expected=expected,
    )  # fmt: skip


# quant_method → what replaces its tensors by matrices
_READERS: dict[str, Callable[[DequantizedFolder, Settings], None]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed,
}
METHODS: dict[str, Callable[[HfFolder, Settings], HfFolder]] = {
    "mxfp4": _mxfp4,
    **dict.fromkeys(_READERS, _dequantized),
}
