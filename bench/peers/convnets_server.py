"""ONNX Runtime, OpenVINO and torch.compile on the networks of `convnets`, behind a pipe.

Run by the peer's Python with the number of threads and a folder for the ONNX files. Commands:
{"do": "time", "engine": name, "net": name, "batch": b, "repeat": r}, {"do": "result", …}.
BENCH_PEER_ISA=avx2 in the environment holds ONNX Runtime to AVX2; others have their own switches.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from convnets import NETS, Weights

THREADS, WORK = int(sys.argv[1]), Path(sys.argv[2])


def _pair(n: Any) -> list[int]:
    return [n, n] if isinstance(n, int) else list(n)


class OnnxBuilder:
    """Layers as nodes of an ONNX graph."""

    def __init__(self) -> None:
        import onnx

        self.onnx, self.weights = onnx, Weights()
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def node(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        made = self.onnx.helper.make_node(op, list(inputs), names, **attributes)
        self.nodes.append(made)
        return names[0]

    def constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def conv(
        self, x: str, given: int, out: int, k: int, stride: Any = 1, groups: int = 1,
        act: str = "", gain: float = 1.0,
    ) -> str:  # fmt: skip
        w, bias = (
            self.weights.draw(out, given // groups, k, k) * np.float32(gain),
            self.weights.draw(out),
        )
        y = self.node(
            "Conv", x, self.constant(w), self.constant(bias), group=groups, strides=_pair(stride),
            pads=[k // 2] * 4, kernel_shape=[k, k],
        )  # fmt: skip
        return self.act(y, act)

    def conv_transpose(self, x: str, given: int, out: int, k: int) -> str:
        w, bias = self.weights.draw(given, out, k, k), self.weights.draw(out)
        return self.node("ConvTranspose", x, self.constant(w), self.constant(bias), strides=[k, k])

    def act(self, x: str, act: str) -> str:
        if act == "hardsigmoid":
            return self.node("HardSigmoid", x, alpha=1 / 6, beta=0.5)
        name = {"relu": "Relu", "hardswish": "HardSwish", "sigmoid": "Sigmoid"}.get(act)
        return self.node(name, x) if name else x

    def add(self, x: str, y: str) -> str:
        return self.node("Add", x, y)

    def mul(self, x: str, y: str) -> str:
        return self.node("Mul", x, y)

    def mean(self, x: str, keep: bool = False) -> str:
        y = self.node("GlobalAveragePool", x)
        return y if keep else self.node("Flatten", y)

    def pool(self, x: str, k: Any, stride: Any, padding: int = 1) -> str:
        return self.node(
            "MaxPool", x, kernel_shape=_pair(k), strides=_pair(stride), pads=[padding] * 4
        )

    def upsample(self, x: str, factor: int) -> str:
        if factor == 1:
            return x
        scales = self.constant(np.array([1, 1, factor, factor], np.float32))
        return self.node(
            "Resize", x, "", scales, mode="nearest", nearest_mode="floor",
            coordinate_transformation_mode="asymmetric",
        )  # fmt: skip

    def concat(self, parts: list[str]) -> str:
        return self.node("Concat", *parts, axis=1)

    def linear(self, x: str, given: int, out: int) -> str:
        w, bias = self.weights.draw(out, given), self.weights.draw(out)
        y = self.node("MatMul", x, self.constant(np.ascontiguousarray(w.T)))
        return self.node("Add", y, self.constant(bias))

    def sequence(self, x: str) -> str:
        y = self.node("Squeeze", x, self.constant(np.array([2], np.int64)))
        return self.node("Transpose", y, perm=[0, 2, 1])

    def lstm(self, x: str, given: int, hidden: int) -> str:
        w, r = self.weights.draw(2, 4 * hidden, given), self.weights.draw(2, 4 * hidden, hidden)
        bias = self.weights.draw(2, 8 * hidden)
        y = self.node("Transpose", x, perm=[1, 0, 2])
        y = self.node(
            "LSTM", y, *map(self.constant, (w, r, bias)), outputs=3, hidden_size=hidden,
            direction="bidirectional",
        )  # fmt: skip
        y = self.node("Transpose", y, perm=[2, 0, 1, 3])
        return self.node("Reshape", y, self.constant(np.array([0, 0, -1], np.int64)))


def write(net: str) -> Path:
    path = WORK / f"{net}.onnx"
    if not path.exists():
        b = OnnxBuilder()
        function, dims = NETS[net]
        y = function(b, "x")
        info, f32 = b.onnx.helper.make_tensor_value_info, b.onnx.TensorProto.FLOAT
        graph = b.onnx.helper.make_graph(
            b.nodes, net, [info("x", f32, ["batch", *dims])], [info(y, f32, None)], b.constants
        )
        opset = [b.onnx.helper.make_opsetid("", 17)]
        b.onnx.save(b.onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return path


class TorchBuilder:
    """Layers as calls of PyTorch; weights are drawn once."""

    def __init__(self, torch: Any) -> None:
        self.torch, self.f = torch, torch.nn.functional
        self.weights, self.kept, self.at = Weights(), [], 0

    def made(self, make: Callable[[], list[np.ndarray]]) -> Any:
        if self.at == len(self.kept):
            self.kept.append([self.torch.from_numpy(np.ascontiguousarray(w)) for w in make()])
        self.at += 1
        return self.kept[self.at - 1]

    def conv(
        self, x: Any, given: int, out: int, k: int, stride: Any = 1, groups: int = 1,
        act: str = "", gain: float = 1.0,
    ) -> Any:  # fmt: skip
        draw = self.weights.draw
        w, bias = self.made(
            lambda: [draw(out, given // groups, k, k) * np.float32(gain), draw(out)]
        )
        return self.act(self.f.conv2d(x, w, bias, stride, k // 2, 1, groups), act)

    def conv_transpose(self, x: Any, given: int, out: int, k: int) -> Any:
        draw = self.weights.draw
        w, bias = self.made(lambda: [draw(given, out, k, k), draw(out)])
        return self.f.conv_transpose2d(x, w, bias, k)

    def act(self, x: Any, act: str) -> Any:
        if act == "sigmoid":
            return self.torch.sigmoid(x)
        return getattr(self.f, act)(x) if act else x

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def mul(self, x: Any, y: Any) -> Any:
        return x * y

    def mean(self, x: Any, keep: bool = False) -> Any:
        return x.mean((2, 3), keepdim=keep)

    def pool(self, x: Any, k: Any, stride: Any, padding: int = 1) -> Any:
        return self.f.max_pool2d(x, k, stride, padding)

    def upsample(self, x: Any, factor: int) -> Any:
        return x if factor == 1 else self.f.interpolate(x, scale_factor=factor, mode="nearest")

    def concat(self, parts: list[Any]) -> Any:
        return self.torch.cat(parts, 1)

    def linear(self, x: Any, given: int, out: int) -> Any:
        draw = self.weights.draw
        w, bias = self.made(lambda: [draw(out, given), draw(out)])
        return self.f.linear(x, w, bias)

    def sequence(self, x: Any) -> Any:
        return x.squeeze(2).transpose(1, 2)

    def lstm(self, x: Any, given: int, hidden: int) -> Any:
        draw = self.weights.draw

        def make() -> list[np.ndarray]:
            w, r = draw(2, 4 * hidden, given), draw(2, 4 * hidden, hidden)
            bias = draw(2, 8 * hidden)
            # ONNX has gates i, o, f, c; PyTorch i, f, c, o
            order = [0, 2, 3, 1]
            found = []
            for d in range(2):
                for part in (w[d], r[d], *np.split(bias[d], 2)):
                    gates = part.reshape(4, hidden, *part.shape[1:])[order]
                    found.append(gates.reshape(part.shape))
            return found

        weights = self.made(make)
        start = self.torch.zeros(2, x.shape[0], hidden)
        return self.torch.lstm(x, (start, start), weights, True, 1, 0.0, False, True, True)[0]


def _input(net: str, batch: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(batch, *NETS[net][1])).astype(np.float32)


def onnxruntime(net: str, batch: int) -> Callable[[], Any]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = ort.InferenceSession(str(write(net)), options, providers=["CPUExecutionProvider"])
    x = _input(net, batch)
    return lambda: session.run(None, {"x": x})[0]


def openvino(net: str, batch: int) -> Callable[[], Any]:
    """Compiled for one shape, in f32: by default it would take bf16 where the CPU has it."""
    import openvino as ov

    core = ov.Core()
    model = core.read_model(str(write(net)))
    model.reshape([batch, *NETS[net][1]])
    config = {
        "INFERENCE_NUM_THREADS": THREADS, "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }  # fmt: skip
    request = core.compile_model(model, "CPU", config).create_infer_request()
    x = _input(net, batch)
    return lambda: request.infer({0: x})[0]


def torch(net: str, batch: int) -> Callable[[], Any]:
    import torch as pt

    pt.set_num_threads(THREADS)
    b, x = TorchBuilder(pt), pt.from_numpy(_input(net, batch))

    def forward(x: Any) -> Any:
        b.at = 0
        return NETS[net][0](b, x)

    with pt.inference_mode():
        forward(x)
    compiled = pt.compile(forward)

    def run() -> Any:
        with pt.inference_mode():
            return compiled(x).numpy()

    return run


ENGINES = {"onnxruntime": onnxruntime, "openvino": openvino, "torch": torch}


@cache
def runner(engine: str, net: str, batch: int) -> Callable[[], Any]:
    made = ENGINES[engine](net, batch)
    made()
    return made


def seconds(run: Callable[[], Any], repeat: int) -> float:
    run()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    run = runner(asked["engine"], asked["net"], asked["batch"])
    if asked["do"] == "time":
        return {"seconds": seconds(run, asked["repeat"])}
    return {"result": np.asarray(run(), np.float64).ravel()[:: asked["step"]].tolist()}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
