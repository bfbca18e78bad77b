"""Continuous batching: tokens per second of several requests together against one.

Prompts differ in length. Rounds of all numbers of requests alternate, and the decode rate counts
from the end of the last prefill. Greedy answers must be those of one request at a time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np

from bench.common import Bar, arguments, finish
from rlx import Engine

COUNTS = (1, 2, 4, 8)
TOKENS = 64
GOAL = 3.0


def prompts(count: int, vocab: int) -> list[list[int]]:
    """Tokens that mean nothing, 16 to 100 of them."""
    rng = np.random.default_rng(1)
    return [[int(t) for t in rng.integers(1, vocab // 2, 16 + 12 * i)] for i in range(count)]


def rate(engine: Engine, given: Sequence[Sequence[int]]) -> float:
    """Tokens per second of all requests, from the last first token on."""
    replies = [engine.submit(p, max_tokens=TOKENS, temperature=0) for p in given]
    for reply in replies:
        next(reply, None)
    already = sum(len(reply.result.tokens) for reply in replies)
    start = time.perf_counter()
    made = sum(len(reply.wait().tokens) for reply in replies) - already
    return made / (time.perf_counter() - start)


def main(argv: list[str]) -> int:
    parser = arguments("batch", __doc__ or "")
    parser.add_argument("--model", default="smollm2-135m", help="a name, GGUF file or folder")
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args(argv)
    engine = Engine(options.model, requests=max(COUNTS), context=512, threads=options.threads)
    with engine:
        given = prompts(max(COUNTS), engine.runner.config.vocab)
        alone = [engine.submit(p, max_tokens=TOKENS, temperature=0).wait().tokens for p in given]
        together = [
            r.wait().tokens
            for r in [engine.submit(p, max_tokens=TOKENS, temperature=0) for p in given]
        ]
        same = sum(a == b for a, b in zip(alone, together, strict=True))
        rates: dict[int, list[float]] = {count: [] for count in COUNTS}
        for _ in range(3 if options.quick else 7):
            for count in COUNTS:
                rates[count].append(rate(engine, given[:count]))
    found = {count: statistics.median(kept) for count, kept in rates.items()}
    for count, speed in found.items():
        print(f"{count} at once: {speed:.1f} tok/s, {speed / found[1]:.2f} × one")
    most = max(COUNTS)
    bars = [
        Bar("same_answers", same, "requests", "one by one", len(given), 1.0),
        Bar(f"batch_{most}", found[most], "tok/s", "one request", found[1], GOAL),
    ]
    return finish(bars, options.json)
