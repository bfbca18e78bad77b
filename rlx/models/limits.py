"""What a model can be asked to run: its context, and tokens that it knows."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.errors import InputError
from rlx.models.config import ModelConfig

USUAL = 4096  # tokens, where nobody asks for another context


def context_length(config: ModelConfig, asked: int | None) -> int:
    """The context to plan for, at most what the model was trained for."""
    longest = config.context
    if asked is None:
        return min(longest, USUAL)
    if not 1 <= asked <= longest:
        raise InputError(
            "context out of range", where="context", got=asked, expected=f"1 … {longest}",
            hint="the model was not trained for longer ones",
        )  # fmt: skip
    return asked


def check_tokens(config: ModelConfig, tokens: Sequence[int], most: int | None, hint: str) -> None:
    """Raise for tokens that cannot be run, or more than `most` of them."""
    if not len(tokens):
        raise InputError("no tokens to run", hint="a prompt has at least one token")
    wrong = [t for t in tokens if not 0 <= t < config.vocab]
    if wrong:
        raise InputError("no such token", got=wrong[0], expected=f"0 … {config.vocab - 1}")
    if most is not None and len(tokens) > most:
        raise InputError(
            "the prompt is longer than the context", got=len(tokens), expected=most, hint=hint
        )
