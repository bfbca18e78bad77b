"""Calls of Microsoft's operators with drawn operands; ONNX Runtime's results are goldens
(`tests/goldens/make_onnx.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from onnx import ValueInfoProto, helper

DOMAIN = "com.microsoft"


class Case(NamedTuple):
    name: str
    op: str
    inputs: dict[str, Any]  # arrays by name; None for an operand that is left out
    attributes: dict[str, Any]
    outputs: int = 1
    constants: tuple[str, ...] = ()  # inputs that are initialisers
    wanted: tuple[int, ...] = ()  # results that exist, if not the first ones

    def model(self) -> Any:
        given = {n: a for n, a in self.inputs.items() if a is not None}
        inputs = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in given.items() if n not in self.constants
        ]  # fmt: skip
        fixed = [
            helper.make_tensor(
                n, helper.np_dtype_to_tensor_dtype(given[n].dtype), given[n].shape,
                given[n].tobytes(), raw=True,
            ) for n in self.constants
        ]  # fmt: skip
        numbers = self.wanted or range(self.outputs)
        names = [f"y{i}" if i in numbers else "" for i in range(max(numbers) + 1)]
        node = helper.make_node(
            self.op, [n if a is not None else "" for n, a in self.inputs.items()], names,
            domain=DOMAIN, **self.attributes,
        )  # fmt: skip
        made = [ValueInfoProto(name=n) for n in names if n]
        graph = helper.make_graph([node], self.name, inputs, made, initializer=fixed)
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def given(self) -> dict[str, Any]:
        """What a run gets."""
        return {n: a for n, a in self.inputs.items() if a is not None and n not in self.constants}


class _Draw:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def f(self, *shape: int, scale: float = 1.0) -> Any:
        return (self.rng.standard_normal(shape) * scale).astype(np.float32)

    def u8(self, *shape: int, low: int = 0, high: int = 256) -> Any:
        return self.rng.integers(low, high, shape).astype(np.uint8)

    def i8(self, *shape: int) -> Any:
        return self.rng.integers(-127, 128, shape).astype(np.int8)


def cases() -> list[Case]:
    d = _Draw(20)
    return [*_layers(d), *_attention(d), *_quantised(d)]


def _one(x: Any, dtype: Any = np.float32) -> Any:
    return np.asarray(x, dtype)


def _layers(d: _Draw) -> Iterator[Case]:
    x, w = d.f(2, 5, 8), d.f(8)
    yield Case("gelu", "Gelu", {"x": x}, {})
    yield Case("bias_gelu", "BiasGelu", {"x": x, "b": w}, {})
    yield Case("fast_gelu", "FastGelu", {"x": x, "b": w}, {})
    yield Case("quick_gelu", "QuickGelu", {"x": x}, {"alpha": 1.5})
    yield Case(
        "skip_norm", "SkipLayerNormalization",
        {"x": x, "s": d.f(2, 5, 8), "g": w, "b": d.f(8), "more": d.f(8)}, {"epsilon": 1e-5},
        wanted=(0, 3),
    )  # fmt: skip
    yield Case(
        "skip_rms_norm", "SkipSimplifiedLayerNormalization",
        {"x": x, "s": d.f(2, 5, 8), "g": w}, {"epsilon": 1e-5}, wanted=(0, 3),
    )  # fmt: skip
    ids = d.rng.integers(0, 6, (2, 5)).astype(np.int32)
    yield Case(
        "embed_norm", "EmbedLayerNormalization",
        {"ids": ids, "segments": ids % 2, "words": d.f(6, 8), "places": d.f(7, 8),
         "kinds": d.f(2, 8), "g": w, "b": d.f(8),
         "mask": np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], np.int32)},
        {"epsilon": 1e-5}, outputs=2,
    )  # fmt: skip
    a, b = d.f(2, 3, 4, 6), d.f(2, 3, 5, 6)
    yield Case("fused_matmul", "FusedMatMul", {"a": a, "b": b}, {"transB": 1, "alpha": 0.5})
    yield Case(
        "fused_matmul_a", "FusedMatMul", {"a": d.f(3, 6, 4), "b": d.f(3, 6, 5)}, {"transA": 1}
    )
    yield Case(
        "fused_conv", "FusedConv",
        {"x": d.f(1, 3, 7, 7), "w": d.f(4, 3, 3, 3), "b": d.f(4), "z": d.f(1, 4, 7, 7)},
        {"activation": "Relu", "pads": [1, 1, 1, 1], "kernel_shape": [3, 3]},
    )  # fmt: skip
    yield Case(
        "fused_gemm", "FusedGemm", {"a": d.f(3, 4), "b": d.f(5, 4), "c": d.f(5)},
        {"transB": 1, "alpha": 0.5, "beta": 2.0, "activation": "LeakyRelu",
         "activation_alpha": 0.2},
    )  # fmt: skip


def _tables(length: int, half: int) -> tuple[Any, Any]:
    angle = np.arange(length)[:, None] * 10000.0 ** (-np.arange(half) / half)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def _attention(d: _Draw) -> Iterator[Case]:
    heads, width = 2, 4
    hidden = heads * width
    x, w, b = d.f(2, 5, hidden), d.f(hidden, 3 * hidden, scale=0.5), d.f(3 * hidden)
    base = {"num_heads": heads}
    yield Case("attention", "Attention", {"x": x, "w": w, "b": b}, base)
    lengths = np.array([3, 5], np.int32)
    yield Case("attention_lengths", "Attention", {"x": x, "w": w, "b": b, "m": lengths}, base)
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
    yield Case("attention_mask", "Attention", {"x": x, "w": w, "b": b, "m": mask}, base)
    yield Case(
        "attention_causal", "Attention", {"x": x, "w": w, "b": b}, {**base, "unidirectional": 1}
    )
    yield Case(
        "attention_past", "Attention",
        {"x": x, "w": w, "b": b, "m": None, "past": d.f(2, 2, heads, 3, width)},
        {**base, "unidirectional": 1}, outputs=2,
    )  # fmt: skip
    q, k, v = d.f(2, 3, hidden), d.f(2, 6, hidden), d.f(2, 6, hidden)
    yield Case("mha", "MultiHeadAttention", {"q": q, "k": k, "v": v, "b": b}, base)
    yield Case(
        "mha_padding", "MultiHeadAttention",
        {"q": q, "k": k, "v": v, "b": None, "p": np.array([[1] * 4 + [0] * 2, [1] * 6], np.int32),
         "a": d.f(1, heads, 3, 6)}, {**base, "scale": 0.3},
    )  # fmt: skip
    yield Case(
        "mha_past", "MultiHeadAttention",
        {"q": q, "k": d.f(2, 3, hidden), "v": d.f(2, 3, hidden), "b": None, "p": None, "a": None,
         "pk": d.f(2, heads, 4, width), "pv": d.f(2, heads, 4, width)}, base, outputs=3,
    )  # fmt: skip
    cos, sin = _tables(16, 4)
    places = np.array([[3, 4, 5], [0, 1, 2]], np.int64)
    for interleaved in (0, 1):
        yield Case(
            f"rotary_{interleaved}", "RotaryEmbedding",
            {"x": d.f(2, 2, 3, 8), "at": places, "cos": cos, "sin": sin},
            {"interleaved": interleaved},
        )  # fmt: skip
    yield Case(
        "rotary_flat", "RotaryEmbedding",
        {"x": d.f(1, 3, 16), "at": np.array([2], np.int64), "cos": cos, "sin": sin}, {},
    )  # fmt: skip
    yield from _grouped(d, *_tables(16, 8))


def _grouped(d: _Draw, cos: Any, sin: Any) -> Iterator[Case]:
    heads, groups, width = 4, 2, 16
    base = {"num_heads": heads, "kv_num_heads": groups, "do_rotary": 1}

    def operands(batch: int, rows: int, past: int, last: list[int], total: int) -> dict[str, Any]:
        return {
            "q": d.f(batch, rows, heads * width), "k": d.f(batch, rows, groups * width),
            "v": d.f(batch, rows, groups * width), "pk": d.f(batch, groups, past, width),
            "pv": d.f(batch, groups, past, width), "last": np.array(last, np.int32),
            "total": _one(total, np.int32), "cos": cos, "sin": sin,
        }  # fmt: skip

    yield Case("gqa_prompt", "GroupQueryAttention", operands(1, 5, 0, [4], 5), base, outputs=3)
    yield Case("gqa_decode", "GroupQueryAttention", operands(1, 1, 5, [5], 6), base, outputs=3)
    yield Case(
        "gqa_window", "GroupQueryAttention", operands(1, 1, 7, [7], 8),
        {**base, "local_window_size": 3, "rotary_interleaved": 1}, outputs=3,
    )  # fmt: skip
    yield Case("gqa_ragged", "GroupQueryAttention", operands(2, 1, 6, [6, 6], 7), base, outputs=3)
    packed = operands(1, 3, 0, [2], 3)
    packed |= {"q": d.f(1, 3, (heads + 2 * groups) * width), "k": None, "v": None}
    yield Case("gqa_packed", "GroupQueryAttention", packed, {**base, "softcap": 3.0}, outputs=3)


def _quantised(d: _Draw) -> Iterator[Case]:
    x = d.f(3, 64)
    scales = np.abs(d.f(5 * 2, scale=0.1)) + 0.01
    for bits in (4, 8):
        packed = d.u8(5, 2, 32 * bits // 8)
        given = {"x": x, "w": packed, "s": scales}
        attributes = {"N": 5, "K": 64, "bits": bits, "block_size": 32, "accuracy_level": 1}
        yield Case(f"nbits_{bits}", "MatMulNBits", given, attributes, constants=("w", "s"))
        zeros = d.u8(5, 2) if bits == 8 else d.u8(5)
        yield Case(
            f"nbits_{bits}_zeros", "MatMulNBits", {**given, "z": zeros}, attributes,
            constants=("w", "s", "z"),
        )  # fmt: skip
    w, ws, wz = d.u8(64, 6), _one(0.02), _one(120, np.uint8)
    yield Case(
        "dynamic_matmul", "DynamicQuantizeMatMul",
        {"x": x, "w": w, "s": ws, "z": wz, "b": d.f(6)}, {}, constants=("w", "s", "z"),
    )  # fmt: skip
    a, s, z = d.u8(3, 64), _one(0.05), _one(100, np.uint8)
    yield Case(
        "integer_to_float", "MatMulIntegerToFloat",
        {"a": a, "w": w, "as": s, "ws": ws, "az": z, "wz": wz, "b": d.f(6)}, {},
    )  # fmt: skip
    p, q = d.u8(2, 3, 4, 4), d.u8(2, 3, 4, 4)
    ys, yz = _one(0.11), _one(90, np.uint8)
    pair = {"a": p, "as": s, "az": z, "b": q, "bs": ws, "bz": wz, "ys": ys, "yz": yz}
    single = {"a": p, "as": s, "az": z, "ys": ys, "yz": yz}
    yield Case("q_add", "QLinearAdd", pair, {})
    yield Case("q_mul", "QLinearMul", pair, {})
    small = {**single, "ys": _one(1 / 256), "yz": _one(0, np.uint8)}
    yield Case("q_sigmoid", "QLinearSigmoid", small, {})
    yield Case("q_leaky", "QLinearLeakyRelu", single, {"alpha": 0.2})
    yield Case("q_mean", "QLinearGlobalAveragePool", single, {"channels_last": 0})
    yield Case("q_pool", "QLinearAveragePool", single, {"kernel_shape": [2, 2], "strides": [2, 2]})
    yield Case(
        "q_concat", "QLinearConcat",
        {"ys": ys, "yz": yz, "a": p, "as": s, "az": z, "b": q, "bs": ws, "bz": wz}, {"axis": 1},
    )  # fmt: skip
    yield Case(
        "q_gemm", "QGemm",
        {"a": a, "as": s, "az": z, "w": d.i8(6, 64), "ws": _one(0.01), "wz": _one(0, np.int8),
         "c": d.rng.integers(-900, 900, 6).astype(np.int32), "ys": _one(0.2), "yz": yz},
        {"transB": 1}, constants=("w", "ws", "wz", "c"),
    )  # fmt: skip
