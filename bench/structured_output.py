"""What structured output costs: decoding with a mask of allowed tokens against decoding without.

One grammar allows any text, so that both sides decode the same tokens; another is a JSON schema.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from bench.common import Bar, arguments, finish
from rlx import LanguageModel, load

TOKENS = 128
GOAL = 0.95
PROMPT = "Write a long list of European cities as JSON, with what each is known for."
ANY = r"(.|\n)*"
SCHEMA = {
    "type": "array",
    "minItems": 20,
    "items": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "people": {"type": "integer"},
            "known_for": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city", "people", "known_for"],
        "additionalProperties": False,
    },
}


def rate(model: LanguageModel, **settings: Any) -> float:
    """Tokens per second after the first; an answer that ends early is no measurement."""
    messages = [{"role": "user", "content": PROMPT}]
    made = model.chat(messages, stream=False, max_tokens=TOKENS, temperature=0, **settings)
    if len(made.tokens) < TOKENS:
        raise SystemExit(f"bench: the answer ended after {len(made.tokens)} tokens")
    return float(made.tokens_per_second)


def main(argv: list[str]) -> int:
    parser = arguments("structured_output", __doc__ or "")
    parser.add_argument("--model", default="smollm2-135m", help="a name, GGUF file or folder")
    options = parser.parse_args(argv)
    model = load(options.model, context=1024)
    assert isinstance(model, LanguageModel)
    cases: dict[str, dict[str, Any]] = {
        "unconstrained": {},
        "any": {"regex": ANY},
        "json": {"json_schema": json.dumps(SCHEMA)},
    }
    rates: dict[str, list[float]] = {name: [] for name in cases}
    with model:
        for settings in cases.values():
            rate(model, **settings)
        for _ in range(5 if options.quick else 15):
            for name, settings in cases.items():
                rates[name].append(rate(model, **settings))
    found = {name: statistics.median(kept) for name, kept in rates.items()}
    bars = [
        Bar(
            f"structured_{name}",
            found[name],
            "tok/s",
            "unconstrained",
            found["unconstrained"],
            GOAL,
        )
        for name in ("any", "json")
    ]
    return finish(bars, options.json)
