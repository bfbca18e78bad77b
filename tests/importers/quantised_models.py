"""A small network as quantisation tools write it: floats between `DequantizeLinear` and
`QuantizeLinear`."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper
from onnx_models import model, value

SHAPE = (2, 3, 13, 12)


class Writer:
    """Nodes and constants of a network; `quantised` gives a tensor its scale and zero point."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def node(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def fixed(self, name: str, array: Any) -> str:
        self.constants[name] = array
        return name

    def quantised(self, x: str, scale: float, zero: int, kind: type = np.uint8) -> str:
        """x through bytes; its name afterwards."""
        pair = [self.fixed(f"{x}.s", np.float32(scale)), self.fixed(f"{x}.z", kind(zero))]
        self.node("QuantizeLinear", [x, *pair], f"{x}.q")
        return self.node("DequantizeLinear", [f"{x}.q", *pair], f"{x}.d")

    def weights(self, name: str, dims: tuple[int, ...], axis: int, seen: float) -> list[str]:
        """Dequantised weights with a scale for each entry of an axis, and a bias."""
        count, terms = dims[axis], int(np.prod(dims)) // dims[axis]
        scales = self.rng.uniform(0.6, 1.0, count) / (74 * np.sqrt(terms))
        scales = scales.astype(np.float32)
        codes = self.rng.integers(-127, 128, dims).astype(np.int8)
        given = [
            self.fixed(name, codes), self.fixed(f"{name}.s", scales),
            self.fixed(f"{name}.z", np.zeros(count, np.int8)),
        ]  # fmt: skip
        self.node("DequantizeLinear", given, f"{name}.d", axis=axis)
        bias = self.rng.integers(-900, 900, count).astype(np.int32)
        units = (scales * np.float32(seen)).astype(np.float32)
        given = [
            self.fixed(f"{name}.b", bias), self.fixed(f"{name}.bs", units),
            self.fixed(f"{name}.bz", np.zeros(count, np.int32)),
        ]  # fmt: skip
        self.node("DequantizeLinear", given, f"{name}.bd", axis=0)
        return [f"{name}.d", f"{name}.bd"]


def qdq_network() -> Any:
    """Convolutions (plain, depthwise, by groups), pooling, a sum, and a product of matrices."""
    w = Writer(5)
    x = w.quantised("x", 0.02, 128)
    y = w.node("Conv", [x, *w.weights("w0", (16, 3, 3, 3), 0, 0.02)], "c0", pads=[1, 1, 1, 1])
    y = w.quantised(w.node("Relu", [y], "r0"), 0.015, 0)
    short = y = w.quantised(
        w.node("MaxPool", [y], "m0", kernel_shape=[2, 2], strides=[2, 2]), 0.015, 0
    )
    y = w.node("Conv", [y, *w.weights("w1", (16, 1, 3, 3), 0, 0.015)], "c1", group=16, pads=[1] * 4)
    y = w.quantised(w.node("Clip", [y, w.fixed("low", np.float32(0)), ""], "k1"), 0.012, 0)
    y = w.node("Conv", [y, *w.weights("w2", (16, 8, 1, 1), 0, 0.012)], "c2", group=2)
    y = w.quantised(y, 0.02, -3, np.int8)
    y = w.quantised(w.node("Add", [y, short], "a"), 0.03, 100)
    y = w.quantised(w.node("GlobalAveragePool", [y], "p"), 0.01, 60)
    y = w.node("Flatten", [y], "f")
    fully, bias = w.weights("w3", (16, 10), 1, 0.01)
    y = w.quantised(w.node("MatMul", [y, fully], "mm"), 0.02, 120)
    y = w.node("Add", [y, bias], "y")
    dims = ["batch", *SHAPE[1:]]
    return model(w.nodes, [value("x", dims)], [value("y", ["batch", 10])], w.constants)


def qdq_input() -> Any:
    return np.random.default_rng(8).standard_normal(SHAPE).astype(np.float32)
