"""llama.cpp behind a pipe: one JSON command a line in, one JSON answer a line out.

Run by the peer's Python; needs `llama-cpp-python`. Commands: {"do": "prefill", "tokens": n},
{"do": "decode", "past": n, "steps": k}, {"do": "greedy", "prompt": [ids], "steps": k},
{"do": "logits", "tokens": [ids]}.
"""

from __future__ import annotations

import json
import os
import sys
import time

import llama_cpp
import numpy as np


def main() -> None:
    path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    start = time.perf_counter()
    wants_all = len(sys.argv) > 4 and sys.argv[4] == "all"
    model = llama_cpp.Llama(
        path, n_ctx=context, n_batch=512, n_ubatch=512, n_threads=threads,
        n_threads_batch=threads, verbose=False, logits_all=wants_all,
    )  # fmt: skip
    hello = {"ready": True, "load": time.perf_counter() - start, "version": llama_cpp.__version__}
    say({**hello, "features": llama_cpp.llama_print_system_info().decode()})
    for line in sys.stdin:
        command = json.loads(line)
        say(globals()["do_" + command.pop("do")](model, **command))


def say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


def do_prefill(model: llama_cpp.Llama, tokens: int) -> dict[str, object]:
    ids = [100 + i % 1000 for i in range(tokens)]
    model.reset()
    start = time.perf_counter()
    model.eval(ids)
    return {"seconds": time.perf_counter() - start}


def do_decode(model: llama_cpp.Llama, past: int, steps: int) -> dict[str, object]:
    if model.n_tokens < past or model.n_tokens > past + 4096:
        model.reset()
        model.eval([100 + i % 1000 for i in range(past)])
    model.n_tokens = past
    start = time.perf_counter()
    for i in range(steps):
        model.eval([100 + i % 1000])
    seconds = time.perf_counter() - start
    model.n_tokens = past
    return {"seconds": seconds}


def do_greedy(model: llama_cpp.Llama, prompt: list[int], steps: int) -> dict[str, object]:
    model.reset()
    model.eval(prompt)
    out: list[int] = []
    for _ in range(steps):
        row = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits_ith(model._ctx.ctx, -1), shape=(model.n_vocab(),)
        )
        out.append(int(row.argmax()))
        model.eval([out[-1]])
    return {"tokens": out}


def do_logits(model: llama_cpp.Llama, tokens: list[int]) -> dict[str, object]:
    """Log probabilities of each next token, from the logits of every position."""
    model.reset()
    model.eval(tokens)
    rows = np.array(model.scores[: len(tokens)], np.float64)
    rows -= rows.max(-1, keepdims=True)
    logs = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    return {"logprobs": [float(logs[i, t]) for i, t in enumerate(tokens[1:])]}


def do_memory(model: llama_cpp.Llama) -> dict[str, object]:
    with open(f"/proc/{os.getpid()}/statm") as f:
        return {"bytes": int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")}


if __name__ == "__main__":
    main()
