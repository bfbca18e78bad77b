"""Small ONNX models that tests run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

RNG = np.random.default_rng(11)
OPSET = 20


def drawn(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def value(name: str, dims: Sequence[Any] | None, dtype: Any = np.float32) -> Any:
    kind = TensorProto.STRING if dtype is str else helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_tensor_value_info(name, kind, dims)


def model(
    nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any],
    constants: dict[str, Any] | None = None, functions: Sequence[Any] = (),
    domains: Sequence[str] = (),
) -> Any:  # fmt: skip
    fixed = [numpy_helper.from_array(np.asarray(a), n) for n, a in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "small", list(inputs), list(outputs), fixed)
    opsets = [helper.make_opsetid("", OPSET), *[helper.make_opsetid(d, 1) for d in domains]]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=list(functions))


def network() -> Any:
    """A convolution, pooling and a linear layer, with every dimension but the channels open."""
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1], name="/stem/Conv"),
        helper.make_node("Relu", ["c"], ["r"], name="/stem/Relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "v"], ["y"], transB=1),
    ]
    constants = {"w": drawn(8, 3, 3, 3), "b": drawn(8), "v": drawn(5, 8)}
    return model(
        nodes, [value("x", ["batch", 3, "height", "width"])], [value("y", ["batch", 5])], constants
    )


def expected_of_network(proto: Any, x: Any) -> Any:
    """The same by NumPy, in f64."""
    w, b, v = (numpy_helper.to_array(t).astype(np.float64) for t in proto.graph.initializer)
    wide = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(wide, (3, 3), axis=(2, 3))
    y = np.einsum("bchwij,ocij->bohw", windows, w) + b[:, None, None]
    return np.maximum(y, 0).mean(axis=(2, 3)) @ v.T
