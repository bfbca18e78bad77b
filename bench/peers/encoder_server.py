"""ONNX Runtime, OpenVINO and sentence-transformers behind a pipe, on one model folder.

Run by the peer's Python with the folder, the number of threads and a folder for what is exported.
Commands: {"do": "time", "engine": name, "batch": b, "seq": s, "repeat": r, "seed": n},
{"do": "vectors", …}, {"do": "cold", "engine": name}, {"do": "new_shape", …},
{"do": "texts", "path": file, "batch": b}. Engines: onnxruntime, onnxruntime-int8, openvino.
BENCH_PEER_ISA=avx2 in the environment holds ONNX Runtime to AVX2; others have their own switches.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

FOLDER, THREADS, WORK = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
PLAIN, FUSED, INT8 = (WORK / f"{n}.onnx" for n in ("plain", "fused", "int8"))
Run = Callable[[dict[str, Any]], Any]


def export() -> None:
    """The encoder with mean pooling, as plain ONNX, fused, and fused with int8 weights."""
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers import optimizer
    from transformers import AutoModel

    class Embedder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(FOLDER, attn_implementation="eager").eval()

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
            keep = mask.unsqueeze(-1).float()
            return (hidden * keep).sum(1) / keep.sum(1)

    module = Embedder()
    c = module.model.config
    ids = torch.randint(5, c.vocab_size, (2, 16))
    sizes = {0: "batch", 1: "seq"}
    torch.onnx.export(
        module, (ids, torch.ones_like(ids)), str(PLAIN), input_names=["ids", "mask"],
        output_names=["vectors"], dynamo=False, opset_version=17,
        dynamic_axes={"ids": sizes, "mask": sizes, "vectors": {0: "batch"}},
    )  # fmt: skip
    heads, hidden = c.num_attention_heads, c.hidden_size
    fused = optimizer.optimize_model(
        str(PLAIN), model_type="bert", num_heads=heads, hidden_size=hidden, opt_level=0
    )
    fused.save_model_to_file(str(FUSED))
    # DefaultTensorType: shapes cannot be inferred through the fused operators
    quantize_dynamic(
        FUSED, INT8, weight_type=QuantType.QInt8, extra_options={"DefaultTensorType": 1}
    )


def onnxruntime(path: Path) -> Run:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda feed: session.run(None, feed)[0]


def openvino(batch: int, seq: int) -> Run:
    """Compiled for one shape, in f32: by default it would take bf16 where the CPU has it."""
    import openvino as ov

    core = ov.Core()
    model = core.read_model(str(PLAIN))
    model.reshape({"ids": [batch, seq], "mask": [batch, seq]})
    settings = {
        "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": THREADS,
        "INFERENCE_PRECISION_HINT": "f32",
    }  # fmt: skip
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    return lambda feed: request.infer(feed, share_inputs=True, share_outputs=True)[0]


_made: dict[tuple[Any, ...], Run] = {}


def engine(name: str, batch: int, seq: int) -> Run:
    key = (name, batch, seq) if name == "openvino" else (name,)
    if key not in _made:
        paths = {"onnxruntime": FUSED, "onnxruntime-int8": INT8}
        _made[key] = openvino(batch, seq) if name == "openvino" else onnxruntime(paths[name])
    return _made[key]


def feed(batch: int, seq: int, seed: int) -> dict[str, Any]:
    ids = np.random.default_rng(seed).integers(1000, 20000, (batch, seq))
    return {"ids": ids.astype(np.int64), "mask": np.ones((batch, seq), np.int64)}


def do_time(engine_name: str, batch: int, seq: int, repeat: int, seed: int) -> dict[str, object]:
    run, given = engine(engine_name, batch, seq), feed(batch, seq, seed)
    run(given)
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run(given)
        times.append(time.perf_counter() - start)
    return {"seconds": statistics.median(times)}


def do_vectors(engine_name: str, batch: int, seq: int, seed: int) -> dict[str, object]:
    found = engine(engine_name, batch, seq)(feed(batch, seq, seed))
    return {"vectors": np.asarray(found).tolist()}


def do_new_shape(engine_name: str, batch: int, seq: int) -> dict[str, object]:
    """Seconds of the first run of a shape, and of later ones."""
    given = feed(batch, seq, 0)
    start = time.perf_counter()
    run = engine(engine_name, batch, seq)
    run(given)
    first = time.perf_counter() - start
    return {"first": first, "later": do_time(engine_name, batch, seq, 5, 0)["seconds"]}


def do_cold(engine_name: str) -> dict[str, object]:
    """A process of its own: import, load, compile, one text of 16 tokens."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, __file__, FOLDER, str(THREADS), str(WORK), "--cold", engine_name],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return {"seconds": time.perf_counter() - start}


@cache
def transformer() -> Any:
    """sentence-transformers on torch."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(THREADS)
    return SentenceTransformer(FOLDER, device="cpu")


def do_texts(path: str, batch: int) -> dict[str, object]:
    """sentence-transformers, tokenising included; vectors of the first texts too."""
    texts = json.loads(Path(path).read_text(encoding="utf-8"))
    model = transformer()
    model.encode(texts[:batch], batch_size=batch)
    start = time.perf_counter()
    vectors = model.encode(texts, batch_size=batch)
    return {"seconds": time.perf_counter() - start, "vectors": vectors[:64].tolist()}


def do_memory() -> dict[str, object]:
    with open(f"/proc/{os.getpid()}/statm") as f:
        return {"bytes": int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")}


def say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


def versions() -> dict[str, str]:
    import onnxruntime as ort
    import openvino as ov

    return {"onnxruntime": ort.__version__, "openvino": ov.__version__.split("-")[0]}


def main() -> None:
    if os.environ.get("BENCH_PEER_ISA") == "avx2":
        from hold_avx2 import hold_onnxruntime

        hold_onnxruntime(WORK)
    if sys.argv[4:5] == ["--cold"]:
        engine(sys.argv[5], 1, 16)(feed(1, 16, 0))
        return
    # what libraries print while they export must not mix with the answers
    answers, quiet = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    if not INT8.is_file():
        export()
    found = versions()
    os.dup2(answers, 1)
    say({"ready": True, "versions": found})
    for line in sys.stdin:
        command = json.loads(line)
        say(globals()["do_" + command.pop("do")](**command))


if __name__ == "__main__":
    main()
