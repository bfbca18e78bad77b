"""A loaded model as the server uses it: an engine for text, or an encoder."""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlx.models.batch.embed_batcher import EmbedBatcher
from rlx.serve.answer_format import AnswerFormat
from rlx.serve.api_errors import bad_request

if TYPE_CHECKING:
    from rlx.serve.model_pool import ModelSpec

_USES = {"chat": False, "completions": False, "embeddings": True, "rerank": True}
_CHARACTERS = 64  # of a token, at most, on the average of a prompt
_LANGUAGE = ("requests", "context", "cache_tokens", "kv", "quant", "device", "threads", "waiting",
             "batch_invariant")  # fmt: skip
_ENCODER = ("context", "quant", "device", "threads", "dtype")


class ServedModel:
    """A model in memory. `engine` runs a language model, `encoder` computes vectors."""

    def __init__(
        self, name: str, engine: Any, encoder: Any, most_tokens: int | None,
        default_tokens: int | None,
    ) -> None:  # fmt: skip
        self.name, self.engine, self.encoder = name, engine, encoder
        self._most, self._default = most_tokens, default_tokens
        self.tokenizer = (encoder or engine).tokenizer
        self.batcher: Any = None if encoder is None else EmbedBatcher(encoder)
        self.adapters: dict[str, str] = {}  # what clients call them, and the engine

    @property
    def is_encoder(self) -> bool:
        return self.encoder is not None

    def is_for(self, use: str) -> bool:
        """Whether the model can do what an endpoint is for."""
        return _USES.get(use, self.is_encoder) == self.is_encoder

    @property
    def context(self) -> int:
        """Most tokens of prompt and answer together, or of a text."""
        if self.encoder is not None:
            return int(self.encoder.max_tokens)
        pages, pool = self.engine.pages, self.engine.runner.pool
        return int(min(pool.context, pages.count * pages.size))

    def most_tokens(self, prompt: int, asked: int | None) -> int:
        """How many tokens an answer may have."""
        room = self.context - prompt
        if room < 0 or (room < 1 and asked != 0):
            raise bad_request(
                f"This model's maximum context length is {self.context} tokens, but the prompt "
                f"has {prompt}. Please shorten it.", "messages", "context_length_exceeded",
            )  # fmt: skip
        if asked is None:
            return min(room, self._default or room, self._most or room)
        if self._most is not None and asked > self._most:
            raise bad_request(
                f"max_tokens is too large: {asked}. This server generates at most {self._most}.",
                "max_tokens", "invalid_value",
            )  # fmt: skip
        return min(asked, room)

    def check_length(self, characters: int) -> None:
        """Refuse a text that is too long before it is tokenised."""
        if characters > _CHARACTERS * self.context:
            raise bad_request(
                f"This model's maximum context length is {self.context} tokens, but the prompt "
                f"has {characters} characters. Please shorten it.", None, "context_length_exceeded",
            )  # fmt: skip

    @cached_property
    def answer_format(self) -> AnswerFormat:
        """How the model is asked, and how its answers are read."""
        return AnswerFormat(self.tokenizer)

    def stats(self) -> dict[str, float]:
        """Statistics of the engine by name; none of an encoder."""
        return {} if self.engine is None else asdict(self.engine.stats())

    def close(self) -> None:
        """Cancel what runs, free memory."""
        if self.batcher is not None:
            self.batcher.close()
        (self.engine or self.encoder).close()


def load_served(
    spec: ModelSpec, most_tokens: int | None, default_tokens: int | None
) -> ServedModel:
    """Load a model of either kind; runs in a thread."""
    from rlx.formats import open_model
    from rlx.formats.fetch import resolve
    from rlx.models.batch.engine import Engine
    from rlx.models.load import load_text_model
    from rlx.models.model_file import is_encoder

    path = resolve(spec.path)
    options = {name: value for name, value in spec.options.items() if value is not None}
    limits = (most_tokens, default_tokens)
    if is_encoder(open_model(path)):
        asked = {name: options[name] for name in _ENCODER if name in options}
        return ServedModel(spec.name, None, load_text_model(path, **asked), *limits)
    asked = {name: options[name] for name in _LANGUAGE if name in options}
    engine = Engine(path, adapters=[p for _, p in spec.adapters], **asked)
    made = ServedModel(spec.name, engine, None, *limits)
    made.adapters = dict(zip((n for n, _ in spec.adapters), engine.adapters, strict=True))
    return made
