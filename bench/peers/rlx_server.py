"""RLX behind a pipe, asked the same things as its peers: see `rlx/cli/peers/llama_cpp_server.py`.

Commands: {"do": "prefill", "tokens": n, "past": n}, {"do": "decode", "past": n, "steps": k},
{"do": "fill", "past": n}, {"do": "overhead", "steps": k}, {"do": "memory"}.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from serving import ids, serve

from rlx import load
from rlx.models.builder import SAMPLE

SETTINGS, RNG = np.array([0, 0, 1, 0], np.float32), np.array([1, 0], np.uint64)
TOKENS_PER_CALL = 4
CHUNK = 512
Answer = dict[str, object]


class Server:
    def __init__(self, path: str, threads: int, context: int, kv: str = "f16") -> None:
        start = time.perf_counter()
        self.model: Any = load(path, context=context, threads=threads, kv=kv)
        self.runner = self.model.runner
        self.load = time.perf_counter() - start

    def _feed(self, tokens: list[int]) -> None:
        self.runner.step(tokens, RNG, SETTINGS)

    def prefill(self, tokens: int, past: int = 0) -> Answer:
        """Run a prompt, or a part of one behind `past` tokens, which the KV cache keeps."""
        del self.runner.tokens[past:]
        start = time.perf_counter()
        self._feed(ids(tokens))
        seconds = time.perf_counter() - start
        if past:
            del self.runner.tokens[past:]
        return {"seconds": seconds}

    def fill(self, past: int) -> Answer:
        """Fill the KV cache up to `past` tokens in little time: one chunk runs, and its keys and
        values are repeated."""
        self.runner.tokens = []
        self._feed(ids(CHUNK))
        for name, state in self.runner._states.items():
            assert name.startswith(("k.", "v.")), f"{name}: not a KV cache"
            rows = state.array
            for start in range(CHUNK, past, CHUNK):
                part = rows[:, :, start : min(start + CHUNK, past)]
                part[...] = rows[:, :, : part.shape[2]]
        self.runner.tokens = ids(past)
        return {"tokens": past}

    def decode(self, past: int, steps: int) -> Answer:
        if len(self.runner.tokens) < past:
            self.runner.tokens = []
            self._feed(ids(past))
        del self.runner.tokens[past:]
        token, after, done = 100, RNG, 0
        start = time.perf_counter()
        while done < steps:  # as many at once as an answer draws at this speed
            drawn, after = self.runner.decode_n(
                token, after, SETTINGS, min(TOKENS_PER_CALL, steps - done), ()
            )
            token, done = drawn[-1], done + len(drawn)
        seconds = time.perf_counter() - start
        del self.runner.tokens[past:]
        return {"seconds": seconds}

    def overhead(self, steps: int) -> Answer:
        """What a token costs outside native code: `next` of a stream less the time in the executor,
        averaged over the tokens of a native call. The median of calls, because others may take the
        core."""
        pool, inside = self.runner.executables(SAMPLE).decode.executable.pool, Inside()
        native = pool.native
        plain, native.decode_loop = native.decode_loop, inside.timed(native.decode_loop)
        taken: list[list[float]] = []
        try:
            stream = self.model.generate(ids(64), temperature=0.0, max_tokens=steps)
            next(stream)
            while True:
                runs, before, start = inside.runs, inside.seconds, time.perf_counter()
                if next(stream, None) is None:
                    break
                spent = time.perf_counter() - start - (inside.seconds - before)
                if inside.runs > runs:
                    taken.append([])
                taken[-1].append(spent)
        finally:
            native.decode_loop = plain
        means = [statistics.mean(call) for call in taken if call]
        return {"seconds": statistics.median(means), "samples": len(means)}

    def memory(self) -> Answer:
        with open("/proc/self/statm") as f:
            size = int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        return {"bytes": size, "cache": self.runner.cache_bytes}


class Inside:
    """Time spent in native calls, and their number."""

    seconds, runs = 0.0, 0

    def timed(self, run: Callable[..., int]) -> Callable[..., int]:
        def timed(*arguments: object) -> int:
            start = time.perf_counter()
            result = run(*arguments)
            self.seconds += time.perf_counter() - start
            self.runs += 1
            return result

        return timed


if __name__ == "__main__":
    serve(Server(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]))
