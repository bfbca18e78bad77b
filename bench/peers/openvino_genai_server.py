"""OpenVINO GenAI behind a pipe: `python openvino_genai_server.py FILE.gguf THREADS`.

Run by the peer's Python; needs `openvino-genai`, which reads GGUF files of some architectures and
types. Commands: {"do": "prefill", "tokens": n}, {"do": "decode", "past": n, "steps": k}.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import openvino
import openvino_genai
from serving import serve


class Server:
    def __init__(self, path: str, threads: int) -> None:
        start = time.perf_counter()
        self.pipeline = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)
        self.load = time.perf_counter() - start
        self._asked = 0

    def _generate(self, tokens: int, new: int) -> openvino_genai.PerfMetrics:
        """A prompt that begins as none before it did: the pipeline reuses common beginnings."""
        self._asked += 1
        ids = [self._asked, *(100 + i % 1000 for i in range(tokens - 1))]
        given = openvino_genai.TokenizedInputs(
            openvino.Tensor(np.array([ids], np.int64)),
            openvino.Tensor(np.ones((1, tokens), np.int64)),
        )
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, False
        return self.pipeline.generate(given, config).perf_metrics

    def prefill(self, tokens: int) -> dict[str, object]:
        return {"seconds": self._generate(tokens, 1).get_ttft().mean / 1e3}

    def decode(self, past: int, steps: int) -> dict[str, object]:
        return {"seconds": self._generate(past, steps + 1).get_tpot().mean * steps / 1e3}


if __name__ == "__main__":
    serve(Server(sys.argv[1], int(sys.argv[2])), version=openvino_genai.__version__)
