"""Chats for a long time: memory stays flat, answers stay the same, whatever is cancelled.

Two models are loaded at once and take turns (`--model`, twice; else the default one with two types
of KV cache). A chat has several turns; some are cancelled midway, some come through asyncio. A
fixed prompt is answered greedily again and again, and must be answered the same.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
from typing import Any

from bench.common import Bar, arguments, finish
from rlx import load

TURNS, TOKENS, PROBE = 3, 12, "The answer is"
BUDGET = 1.0  # MB that may come between the second third of the chats and the last
QUESTIONS = ("What is a cache?", "Tell me more about it.", "Now in one word.")


def resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def probe(model: Any) -> list[int]:
    found = model.generate(PROBE, stream=False, temperature=0.0, max_tokens=TOKENS)
    tokens: list[int] = found.tokens
    return tokens


def chat(model: Any, number: int) -> None:
    """One conversation; every fifth loses its second answer midway."""
    messages: list[dict[str, str]] = []
    for turn, question in enumerate(QUESTIONS[:TURNS]):
        messages.append({"role": "user", "content": f"{number}: {question}"})
        stream = model.chat(messages, max_tokens=TOKENS, seed=number)
        if number % 5 == 0 and turn == 1:
            next(stream, None)
            stream.close()
        else:
            for _ in stream:
                pass
        messages.append({"role": "assistant", "content": stream.result.text})


async def ask_both(models: list[Any]) -> None:
    """Answers of all models at once, from one loop; the last is given up after a piece."""

    async def read(model: Any, most: int) -> None:
        count = 0
        pieces = model.agenerate("Once upon a time", max_tokens=TOKENS)
        async for _ in pieces:
            count += 1
            if count == most:
                break
        await pieces.aclose()

    await asyncio.gather(*(read(m, 1 if m is models[-1] else TOKENS) for m in models))


def soak(models: list[Any], chats: int) -> tuple[list[int], int]:
    """Resident bytes after each chat, and how many answers to the probe differed."""
    wanted = [probe(m) for m in models]
    sizes, wrong = [], 0
    for number in range(chats):
        chat(models[number % len(models)], number)
        if number % 10 == 9:
            asyncio.run(ask_both(models))
            wrong += sum(probe(m) != w for m, w in zip(models, wanted, strict=True))
        sizes.append(resident())
    return sizes, wrong


def main(argv: list[str]) -> int:
    parser = arguments("soak", __doc__ or "")
    parser.add_argument("--model", action="append", default=[], metavar="FILE.gguf")
    parser.add_argument("--chats", type=int, default=200)
    parser.add_argument("--context", type=int, default=256)
    options = parser.parse_args(argv)
    kinds = [(name, "f16") for name in options.model]
    kinds = kinds or [("smollm2-135m", "f16"), ("smollm2-135m", "q8_0")]
    models = [load(name, context=options.context, kv=kv) for name, kv in kinds]
    sizes, wrong = soak(models, 60 if options.quick else options.chats)
    for model in models:
        model.close()
    if wrong:
        print(f"soak: {wrong} answers were not what they had been", file=sys.stderr)
        return 1
    third = len(sizes) // 3
    grown = statistics.median(sizes[-third:]) - statistics.median(sizes[third : 2 * third])
    print(f"soak: {len(sizes)} chats, {sizes[0] / 1e6:.1f} … {sizes[-1] / 1e6:.1f} MB resident")
    value = max(grown / 1e6, 1e-3)
    return finish(
        [Bar("soak", value, "MB grown", "budget", BUDGET, 1.0, higher_is_better=False)],
        options.json,
    )
