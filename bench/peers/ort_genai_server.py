"""ONNX Runtime GenAI behind a pipe: `python ort_genai_server.py FOLDER THREADS CONTEXT`.

Run by the peer's Python; needs `onnxruntime-genai`. FOLDER is what `make_ort_genai.py` made.
Commands: {"do": "prefill", "tokens": n}, {"do": "decode", "past": n, "steps": k}.
"""

from __future__ import annotations

import json
import sys
import time

import onnxruntime_genai
from serving import ids, serve


class Server:
    def __init__(self, folder: str, threads: int, context: int) -> None:
        start = time.perf_counter()
        config = onnxruntime_genai.Config(folder)
        decoder = {"session_options": {"intra_op_num_threads": threads}}
        config.overlay(json.dumps({"model": {"decoder": decoder}}))
        self.model = onnxruntime_genai.Model(config)
        settings = onnxruntime_genai.GeneratorParams(self.model)
        settings.set_search_options(max_length=context, do_sample=False)
        self.generator = onnxruntime_genai.Generator(self.model, settings)
        self.load = time.perf_counter() - start

    def prefill(self, tokens: int) -> dict[str, object]:
        self.generator.rewind_to(0)
        start = time.perf_counter()
        self.generator.append_tokens(ids(tokens))
        return {"seconds": time.perf_counter() - start}

    def decode(self, past: int, steps: int) -> dict[str, object]:
        self.prefill(past)
        start = time.perf_counter()
        for token in ids(steps):
            self.generator.append_tokens([token])
        return {"seconds": time.perf_counter() - start}


if __name__ == "__main__":
    server = Server(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    serve(server, version=onnxruntime_genai.__version__)
