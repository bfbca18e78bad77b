"""Quantised matrices as other tools write them, and what those tools read back.

Needs torch, transformers and compressed-tensors: `python tests/goldens/make_hf_quant.py`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

OUT = Path(__file__).parent / "hf_quant.npz"
ROWS, COLUMNS = 24, 96
# name → format of compressed-tensors, its weight args
CASES = {
    "int4_group": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "int4_zero": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "int3_channel": ("pack-quantized", {"num_bits": 3, "strategy": "channel"}),
    "int8_channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "fp8_tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8_channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8_block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 32]},
    ),
}


def compressed(kind: str, given: dict, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a matrix, and under "read" what the library makes of them."""
    args = QuantizationArgs(**given)
    groups = {
        "tensor": (1, 1),
        "channel": (ROWS, 1),
        "group": (ROWS, COLUMNS // (args.group_size or COLUMNS)),
        "block": (ROWS // 8, COLUMNS // 32),
    }[args.strategy]
    tiles = weight.reshape(groups[0], ROWS // groups[0], groups[1], COLUMNS // groups[1])
    low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
    scale, zero = calculate_qparams(low, high, args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": weight, "weight_scale": scale.reshape(groups)}
    state["weight_zero_point"] = zero.reshape(groups)
    if args.strategy == "tensor":
        state = {k: v.reshape(1) if k != "weight" else v for k, v in state.items()}
    tool = BaseCompressor.get_value_from_registry(kind)
    stored = tool.compress(state, scheme)
    read = tool.decompress(dict(stored), scheme)["weight"]
    return {**stored, "read": read}


def four_bit_floats(kind: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """NVFP4: scales of 16 under a global one; MXFP4: powers of two for 32."""
    size, strategy = (16, "tensor_group") if kind.startswith("nv") else (32, "group")
    args = QuantizationArgs(num_bits=4, type="float", strategy=strategy, group_size=size)
    highest = weight.reshape(ROWS, -1, size).abs().amax(-1)
    state = {"weight": weight}
    if strategy == "group":
        state["weight_scale"] = torch.exp2(torch.floor(torch.log2(highest / 6)) + 1)
    else:
        whole = (448 * 6 / weight.abs().max()).reshape(1)
        state["weight_global_scale"] = whole
        state["weight_scale"] = (whole * highest / 6).to(torch.float8_e4m3fn).to(torch.float32)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    tool = BaseCompressor.get_value_from_registry(kind)
    stored = tool.compress(state, scheme)
    return {**stored, "read": tool.decompress(dict(stored), scheme)["weight"]}


def main() -> None:
    torch.manual_seed(7)
    found: dict[str, np.ndarray] = {}
    for name in ("nvfp4", "mxfp4"):
        for part, tensor in four_bit_floats(
            f"{name}-pack-quantized", torch.randn(ROWS, COLUMNS)
        ).items():
            found[f"{name}.{part}"] = _array(tensor)
    for name, (kind, given) in CASES.items():
        weight = torch.randn(ROWS, COLUMNS)
        for part, tensor in compressed(kind, given, weight).items():
            found[f"{name}.{part}"] = _array(tensor)
    weight = torch.randn(40, COLUMNS).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 3) + 0.5
    found["fine.weight"], found["fine.weight_scale_inv"] = _array(weight), _array(scale)
    read = _dequantize_fp8_weight(weight, scale, [16, 32], torch.float32)
    found["fine.read"] = _array(read)
    np.savez_compressed(OUT, **found)


def _array(tensor: torch.Tensor) -> np.ndarray:
    """E4M3 as its bytes."""
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy()
    return (
        tensor.detach().to(torch.float32).numpy() if tensor.is_floating_point() else tensor.numpy()
    )


if __name__ == "__main__":
    main()
