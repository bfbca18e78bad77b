"""Rendering generated text: the stream, timings, JSON."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from rlx.cli import console

if TYPE_CHECKING:
    from rlx.models.generation import Generation
    from rlx.models.sampling import GenerationSettings


def show(pieces: Iterable[str], waiting: str) -> None:
    """Write text as it is generated; a spinner until the first token. Words wrap on a terminal."""
    stream = iter(pieces)
    with console.working(waiting):
        first = next(stream, "")
    if not sys.stdout.isatty():
        console.write(first)
        for piece in stream:
            console.write(piece)
        return
    wrap = WordWrap(lambda: shutil.get_terminal_size().columns)
    try:
        for piece in chain((first,), stream):
            console.write(wrap.push(console.plain(piece)))
    finally:
        console.write(wrap.flush())


class WordWrap:
    """Breaks lines between words as text arrives: a word is held back while it fits the line.

    Code between fences is left to the terminal, and so is the rest of a word that is too long.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        self._held = ""  # spaces and a word that fit the line so far
        self._open = False  # whether the word goes on, on a new line
        self._start = ""  # of the line, for fences
        self._in_code = False

    def push(self, text: str) -> str:
        """The text that can be shown now."""
        return "".join(map(self._character, text))

    def flush(self) -> str:
        """What was held back."""
        shown, self._held, self._open = self._held, "", False
        self._column += cell_len(shown)
        return shown

    def _character(self, c: str) -> str:
        if len(self._start) < len(_FENCE):
            self._start += c
        if c == "\n":
            shown = self.flush().rstrip(" ") + c
            self._in_code ^= self._start.startswith(_FENCE)
            self._column, self._start = 0, ""
            return shown
        if self._in_code:
            return c
        # words end before a space; characters of two columns are words of their own
        ends = (c.isspace() and not self._held.isspace()) or cell_len(c) > 1
        shown = self.flush() if ends else ""
        self._held += c
        if self._open:
            return shown + self._part()
        if not c.isspace() and self._column + cell_len(self._held) > self._width():
            self._held, self._open = self._held.lstrip(), True
            broken = "\n" if self._column else ""
            self._column = 0
            return shown + broken + self._part()
        return shown

    def _part(self) -> str:
        """A part of a word that goes on."""
        shown, self._held = self._held, ""
        self._column += cell_len(shown)
        return shown


_FENCE = "```"


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
