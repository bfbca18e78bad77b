"""llama.cpp behind a pipe: one JSON command a line in, one JSON answer a line out.

Run by the peer's Python with a file, the number of threads, the context and words of `WORDS`; needs
`llama-cpp-python`. Commands: {"do": "prefill", "tokens": n, "past": n}, {"do": "fill", "past": n},
{"do": "decode", "past": n, "steps": k}, {"do": "greedy", "prompt": [ids], "steps": k},
{"do": "logits", "tokens": [ids]}, {"do": "memory"}.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time

import llama_cpp
import numpy as np

CHUNK = 512
WORDS: dict[str, dict[str, object]] = {  # logits of every position, flash attention, KV types
    "all": {"logits_all": True},
    "flash": {"flash_attn": True},
    "f16": {"type_k": 1, "type_v": 1},
    "q8_0": {"type_k": 8, "type_v": 8},
}


def main() -> None:
    path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    given: dict[str, object] = {}
    for word in sys.argv[4:]:
        given |= WORDS[word]
    if given:
        allow_fill()
    start = time.perf_counter()
    model = llama_cpp.Llama(
        path, n_ctx=context, n_batch=CHUNK, n_ubatch=CHUNK, n_threads=threads,
        n_threads_batch=threads, verbose=False, **given,
    )  # fmt: skip
    about = {"version": llama_cpp.__version__, "instructions": instructions()}
    say({"ready": True, "load": time.perf_counter() - start, **about})
    for line in sys.stdin:
        command = json.loads(line)
        say(globals()["do_" + command.pop("do")](model, **command))


def say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


def instructions() -> str:
    """The instruction set that the library was built for, and uses on this machine."""
    tell = getattr(llama_cpp, "llama_print_system_info", None)
    said = tell().decode() if tell else ""
    return next((name for name in ("AVX512", "AVX2", "NEON") if f"{name} = 1" in said), "unknown")


def allow_fill() -> None:
    """Have two sequences share a KV cache: see `do_fill`."""
    library = getattr(llama_cpp, "llama_cpp", llama_cpp)
    default = library.llama_context_default_params

    def shared() -> object:
        params = default()
        params.n_seq_max, params.kv_unified = 2, True
        return params

    library.llama_context_default_params = shared


def do_prefill(model: llama_cpp.Llama, tokens: int, past: int = 0) -> dict[str, object]:
    """Run a prompt, or a part of one behind `past` tokens, which the KV cache keeps."""
    ids = [100 + i % 1000 for i in range(tokens)]
    if past:
        model.n_tokens = past
    else:
        model.reset()
    start = time.perf_counter()
    model.eval(ids)
    seconds = time.perf_counter() - start
    if past:
        model.n_tokens = past
    return {"seconds": seconds}


def do_fill(model: llama_cpp.Llama, past: int) -> dict[str, object]:
    """Fill the KV cache up to `past` tokens in little time: one chunk runs, and its keys and values
    are repeated, moved to their places."""
    context, library = model._ctx, llama_cpp.llama_cpp
    context.kv_cache_clear()
    model.reset()
    model.eval([100 + i % 1000 for i in range(CHUNK)])
    size = library.llama_state_seq_get_size(context.ctx, 0)
    saved = (ctypes.c_uint8 * size)()
    library.llama_state_seq_get_data(context.ctx, saved, size, 0)
    for start in range(CHUNK, past, CHUNK):
        if not library.llama_state_seq_set_data(context.ctx, saved, size, 1):
            raise RuntimeError(f"no room for tokens {start} to {start + CHUNK}")
        context.kv_cache_seq_shift(1, 0, -1, start)
        context.kv_cache_seq_cp(1, 0, -1, -1)
        context.kv_cache_seq_rm(1, -1, -1)
    model.n_tokens = past
    return {"tokens": past}


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
