"""Benchmarks of models: prefill, decode, batches and encoders, timed as a whole or by kernel."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rlx.backends.timing import Profile, Recording, Slice
from rlx.errors import InputError
from rlx.models.batch.engine import Engine
from rlx.models.builder import SAMPLE, EntryPoint
from rlx.models.encoder_inputs import Tokens
from rlx.models.encoder_model import EncoderModel
from rlx.models.encoder_runner import Batch
from rlx.models.language_model import LanguageModel
from rlx.models.sampling import GenerationSettings
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Recorded:
    """The profile of several equal runs."""

    tokens: int  # of each run
    profile: Profile
    slices: list[Slice]

    @staticmethod
    def of(tokens: int, recording: Recording) -> Recorded:
        return Recorded(tokens, recording.profile(), recording.slices())


class LanguageRuns:
    """Prefill into an empty KV cache, and decode after it."""

    def __init__(self, model: LanguageModel) -> None:
        self.runner, self._vocab = model.runner, model.config.vocab
        settings = GenerationSettings(temperature=0.0, seed=0)
        self._rng, self._row = settings.rng(), settings.row()

    def check(self, prompt: int, new: int) -> None:
        """Raise if the context has no room for both."""
        self.runner.check([0] * (prompt + new))

    def prefill(self, count: int) -> float:
        """Seconds to prefill a prompt of `count` tokens."""
        tokens = _tokens(count, self._vocab)
        with self.runner.lock:
            self.runner.tokens.clear()
            return self._timed([tokens])

    def decode(self, count: int) -> float:
        """Seconds to decode `count` tokens after what the KV cache holds."""
        with self.runner.lock:
            return self._timed([token] for token in _tokens(count, self._vocab))

    def _timed(self, parts: Any) -> float:
        start = time.perf_counter()
        for part in parts:
            self.runner.step(part, self._rng, self._row)
        return time.perf_counter() - start

    def record(self, prompt: int, new: int, repeat: int) -> dict[str, Recorded]:
        """Profiles of prefill and decode. A prompt of several chunks is several runs."""
        self.check(prompt, new)
        if prompt < 2:
            raise InputError("a prompt of one token is a decode", got=prompt, expected="2 or more")
        self.prefill(prompt)
        self.decode(1)
        graphs = self.runner.executables(SAMPLE)
        with graphs.prefill.recording() as prefill:
            for _ in range(repeat):
                self.prefill(prompt)
        with graphs.decode.recording() as decode:
            self.decode(new)
        return {"prefill": Recorded.of(prompt, prefill), "decode": Recorded.of(1, decode)}


class BatchRuns:
    """Continuous batching: several requests, each with a prompt of its own."""

    def __init__(self, model: LanguageModel, requests: int, **loading: Any) -> None:
        """`loading` is how the model was loaded."""
        self._requests = requests
        self.engine = Engine(
            model.model.path, requests=requests, context=model.runner.context, kv=model.runner.kv,
            **loading,
        )  # fmt: skip
        self._vocab = model.config.vocab
        ends = self.engine.tokenizer.end_ids
        # no request may stop early; the bias is added to the logits in place
        self._settings: dict[str, Any] = {
            "temperature": 0.0,
            "logit_bias": dict.fromkeys(ends, -1e9),
        }

    def decode(self, past: int, new: int) -> float:
        """Seconds to decode `new` tokens of every request, after prompts of `past` tokens. The KV
        cache keeps the prompts, so that all but their last page are prefilled once."""
        return self._answered(past, new + 1) - self._answered(past, 1)

    def _answered(self, past: int, new: int) -> float:
        prompts = [
            [i % self._vocab, *_tokens(past - 1, self._vocab)] for i in range(self._requests)
        ]
        start = time.perf_counter()
        replies = [self.engine.submit(p, max_tokens=new, **self._settings) for p in prompts]
        for reply in replies:
            reply.wait()
        return time.perf_counter() - start

    def __enter__(self) -> BatchRuns:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()


class EncoderRuns:
    """Batches of texts, all of one length."""

    def __init__(self, model: EncoderModel) -> None:
        self.runner, self._vocab, self._most = model.runner, model.config.vocab, model.max_tokens

    def encode(self, texts: int, tokens: int) -> float:
        """Seconds of a batch."""
        batch = self._batch(texts, tokens)
        start = time.perf_counter()
        self.runner.run(batch, self.runner.output)
        return time.perf_counter() - start

    def _batch(self, texts: int, tokens: int) -> Batch:
        if tokens > self._most:
            raise InputError("longer than the model reads", got=tokens, expected=self._most)
        most = self.runner.most_texts(self.runner.bucket(tokens))
        if texts > most:
            raise InputError(
                "more texts than run at once", got=texts, expected=f"{most} of {tokens} tokens"
            )
        return Batch([*range(texts)], [Tokens(_tokens(tokens, self._vocab))] * texts, False)

    def record(self, texts: int, tokens: int, repeat: int) -> dict[str, Recorded]:
        self.encode(texts, tokens)
        graph = self.runner.graph(EntryPoint(self.runner.output), tokens)
        with graph.recording() as recording:
            for _ in range(repeat):
                self.encode(texts, tokens)
        return {"encode": Recorded.of(texts * tokens, recording)}


USUAL_PROMPT = 128  # tokens, where nobody says


def profile_model(
    model: LanguageModel | EncoderModel,
    *,
    prompt: int | None = None,
    new: int = 16,
    batch: int = 8,
    repeat: int = 5,
) -> Mapping[str, Recorded]:
    """Profile a model: "prefill" of `prompt` tokens (128) and "decode" of `new` after them; of an
    encoder, "encode" of `batch` texts of `prompt` tokens each (at most its longest)."""
    if isinstance(model, LanguageModel):
        return LanguageRuns(model).record(prompt or USUAL_PROMPT, new, repeat)
    return EncoderRuns(model).record(batch, prompt or min(USUAL_PROMPT, model.max_tokens), repeat)


def _tokens(count: int, vocab: int) -> list[int]:
    """Some tokens; which ones does not matter for the time."""
    return [(7 * i + 1) % vocab for i in range(count)]
