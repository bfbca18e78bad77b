"""Speculative decoding on text that repeats itself, against one token per run.

A greedy answer that copies a piece of code with small changes: the case for prompt lookup.
Both sides decode the same tokens.
"""

from __future__ import annotations

import statistics
from typing import Any

from bench.common import Bar, arguments, finish
from rlx import LanguageModel, load

TOKENS = 160
GOAL = 1.2
CODE = """class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def add(self, other):
        return Point(self.x + other.x, self.y + other.y)

    def sub(self, other):
        return Point(self.x - other.x, self.y - other.y)
"""


def answer(model: LanguageModel, **settings: Any) -> Any:
    prompt = model.tokenize(f"{CODE}\n# the same once more\n{CODE}\n# the same once more\n")
    return model.generate(prompt, stream=False, max_tokens=TOKENS, temperature=0, **settings)


def main(argv: list[str]) -> int:
    parser = arguments("speculative", __doc__ or "")
    parser.add_argument("--model", default="smollm2-135m", help="a name, GGUF file or folder")
    parser.add_argument("--draft", help="a draft model")
    parser.add_argument("--count", type=int, default=4, help="draft tokens per run")
    options = parser.parse_args(argv)
    model = load(options.model, context=1024, draft=options.draft)
    assert isinstance(model, LanguageModel)
    rates: tuple[list[float], list[float]] = ([], [])
    with model:
        plain, drafted = answer(model, speculate=0), answer(model, speculate=options.count)
        for _ in range(5 if options.quick else 15):
            for samples, count in zip(rates, (0, options.count), strict=True):
                samples.append(answer(model, speculate=count).tokens_per_second)
    one, many = (statistics.median(samples) for samples in rates)
    same = next((i for i, (a, b) in enumerate(zip(plain.tokens, drafted.tokens, strict=True))
                 if a != b), TOKENS)  # fmt: skip
    print(f"the first {same} of {TOKENS} tokens are equal")
    bars = [Bar("speculative", many, "tok/s", "one token per run", one, GOAL)]
    return finish(bars, options.json)
