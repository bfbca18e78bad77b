"""Models under measurement: the same tokens again and again, timed as a whole or by kernel."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rlx.backends.timing import Profile, Recording, Slice
from rlx.errors import InputError
from rlx.models.batch.engine import Engine as BatchEngine
from rlx.models.encoder_graph import Use
from rlx.models.encoder_inputs import Tokens
from rlx.models.encoder_model import EncoderModel
from rlx.models.encoder_runner import Batch
from rlx.models.language_model import LanguageModel
from rlx.models.sampling import GenerationSettings
from rlx.records import dataclass


@dataclass(frozen=True)
class Recorded:
    """What was seen of several runs alike."""

    tokens: int  # of each run
    profile: Profile
    slices: list[Slice]

    @staticmethod
    def of(tokens: int, recording: Recording) -> Recorded:
        return Recorded(tokens, recording.profile(), recording.slices())


class LanguageRuns:
    """Prompts into an empty cache, and tokens one by one after them."""

    def __init__(self, model: LanguageModel) -> None:
        self.engine, self._vocab = model.engine, model.config.vocab
        settings = GenerationSettings(temperature=0.0, seed=0)
        self._rng, self._row = settings.rng(), settings.row()

    def check(self, prompt: int, new: int) -> None:
        """Raise where the context has no room for both."""
        self.engine.check([0] * (prompt + new))

    def prefill(self, count: int) -> float:
        """Seconds of a prompt of so many tokens."""
        tokens = _tokens(count, self._vocab)
        with self.engine.lock:
            self.engine.tokens.clear()
            return self._timed([tokens])

    def decode(self, count: int) -> float:
        """Seconds of so many tokens after what the cache holds."""
        with self.engine.lock:
            return self._timed([token] for token in _tokens(count, self._vocab))

    def _timed(self, parts: Any) -> float:
        start = time.perf_counter()
        for part in parts:
            self.engine.feed(part, self._rng, self._row)
        return time.perf_counter() - start

    def record(self, prompt: int, new: int, repeat: int) -> dict[str, Recorded]:
        """Runs of a prompt, and of a token after it. A prompt of several chunks is so many runs."""
        self.check(prompt, new)
        if prompt < 2:
            raise InputError("a prompt of one token is a decode", got=prompt, expected="2 or more")
        self.prefill(prompt)
        self.decode(1)
        use = self.engine.use("sample")
        with use.prefill.recording() as prefill:
            for _ in range(repeat):
                self.prefill(prompt)
        with use.decode.recording() as decode:
            self.decode(new)
        return {"prefill": Recorded.of(prompt, prefill), "decode": Recorded.of(1, decode)}


class BatchRuns:
    """Several requests at once, each with a prompt of its own."""

    def __init__(self, model: LanguageModel, requests: int, **loading: Any) -> None:
        """`loading` is how the model was loaded."""
        self._requests = requests
        self.engine = BatchEngine(
            model.model.path, requests=requests, context=model.engine.context, kv=model.engine.kv,
            **loading,
        )  # fmt: skip
        self._vocab = model.config.vocab
        ends = self.engine.tokenizer.end_ids
        # full answers: what no request may draw; it is added to logits where they lie
        self._settings = {"temperature": 0.0, "logit_bias": dict.fromkeys(ends, -1e9)}

    def decode(self, past: int, new: int) -> float:
        """Seconds of `new` tokens for every request, one of each in a run, after prompts of `past`
        tokens. The cache keeps the prompts, so that all but their last page are read once."""
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
        self.engine, self._vocab, self._most = model.engine, model.config.vocab, model.max_tokens
        self._result = "scores" if model.is_reranker else "embedding"

    def encode(self, texts: int, tokens: int) -> float:
        """Seconds of a batch."""
        batch = self._batch(texts, tokens)
        start = time.perf_counter()
        self.engine.run(batch, self._result)
        return time.perf_counter() - start

    def _batch(self, texts: int, tokens: int) -> Batch:
        if tokens > self._most:
            raise InputError("longer than the model reads", got=tokens, expected=self._most)
        most = self.engine.most_texts(self.engine.step(tokens))
        if texts > most:
            raise InputError(
                "more texts than run at once", got=texts, expected=f"{most} of {tokens} tokens"
            )
        return Batch([*range(texts)], [Tokens(_tokens(tokens, self._vocab))] * texts, False)

    def record(self, texts: int, tokens: int, repeat: int) -> dict[str, Recorded]:
        self.encode(texts, tokens)
        graph = self.engine.graph(Use(self._result, padded=False), tokens)
        with graph.recording() as recording:
            for _ in range(repeat):
                self.encode(texts, tokens)
        return {"encode": Recorded.of(texts * tokens, recording)}


_USUAL = 128  # tokens, where nobody says


def profile_model(
    model: LanguageModel | EncoderModel,
    *,
    prompt: int | None = None,
    new: int = 16,
    batch: int = 8,
    repeat: int = 5,
) -> Mapping[str, Recorded]:
    """Where the time of a model goes: "prefill" of `prompt` tokens (128) and "decode" of `new`
    after them; of an encoder, "encode" of `batch` texts of `prompt` tokens each, at most what it
    reads unless given."""
    if isinstance(model, LanguageModel):
        return LanguageRuns(model).record(prompt or _USUAL, new, repeat)
    return EncoderRuns(model).record(batch, prompt or min(_USUAL, model.max_tokens), repeat)


def _tokens(count: int, vocab: int) -> list[int]:
    """Some tokens; which ones does not matter for the time."""
    return [(7 * i + 1) % vocab for i in range(count)]
