"""Rendering generated text: the stream, timings, JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rlx.cli import console

if TYPE_CHECKING:
    from rlx.models.generation import Generation
    from rlx.models.sampling import GenerationSettings


def show(pieces: Iterable[str], waiting: str) -> None:
    """Write text as it is generated; a spinner until the first token."""
    stream = iter(pieces)
    with console.working(waiting):
        first = next(stream, "")
    console.write(first)
    for piece in stream:
        console.write(piece)


def timings(result: Generation) -> str:
    """`prompt 31 tokens in 0.12 s (258/s), answer 64 tokens in 0.61 s (103/s), stop`"""
    new = result.prompt_tokens - result.reused_tokens
    parts = [f"prompt {_timed(new, new, result.prefill_seconds)}"]
    if result.reused_tokens:
        parts[0] += f" after {result.reused_tokens} reused"
    # the first token of an answer comes from the prefill
    parts.append(f"answer {_timed(len(result.tokens), 0, result.decode_seconds)}")
    if result.tokens_per_second:
        parts[1] += f" ({result.tokens_per_second:.1f}/s)"
    return ", ".join([*parts, result.finish_reason])


def sampling(settings: GenerationSettings) -> str:
    """`temperature 0.2, top_k 40, top_p 0.9`, or `greedy`"""
    names = ["temperature", "top_k", "top_p", "min_p"] if settings.temperature else []
    shown = [f"{name} {getattr(settings, name):g}" for name in names if getattr(settings, name)]
    if settings.repetition_penalty != 1:
        shown.append(f"repetition_penalty {settings.repetition_penalty:g}")
    return ", ".join(shown if settings.temperature else ["greedy", *shown])


def _timed(count: int, rated: int, seconds: float) -> str:
    noun = "token" if count == 1 else "tokens"
    rate = f" ({rated / seconds:.1f}/s)" if rated and seconds else ""
    return f"{count} {noun} in {seconds:.2f} s{rate}"


def as_json(result: Generation) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "reused_tokens": result.reused_tokens,
        "tokens": result.tokens,
        "prefill_seconds": result.prefill_seconds,
        "decode_seconds": result.decode_seconds,
        "tokens_per_second": result.tokens_per_second,
    }
    if result.logprobs:
        found["logprobs"] = result.logprobs
    return found
