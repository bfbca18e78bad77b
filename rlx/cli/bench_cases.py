"""Bench cases: a model at several lengths and batch sizes, and a peer in turn with it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.cli.peers import Peer
    from rlx.models.benchmark import BatchRuns, EncoderRuns, LanguageRuns


@dataclass(frozen=True)
class Measured:
    """The median of several runs of one test."""

    test: str  # prefill, decode or encode
    batch: int  # sequences at once
    tokens: int  # of each sequence
    past: int  # tokens in the cache before
    seconds: float
    tokens_per_second: float
    weights_gb_per_second: float | None  # None: weights are read once for many tokens
    peer_tokens_per_second: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the peer."""
        peer = self.peer_tokens_per_second
        return self.tokens_per_second / peer if peer else None


@dataclass(frozen=True)
class Cases:
    """Runs the cases: repetitions, bytes that a run reads, the peer, a progress function."""

    repeat: int
    read: int
    peer: Peer | None
    done: Callable[[], object]

    def language(self, runs: LanguageRuns, length: int, new: int) -> list[Measured]:
        """A prompt of `length` tokens and `new` after it."""
        runs.check(length, new)
        prefill, decode = self._rounds(
            lambda: (runs.prefill(length), runs.decode(new)),
            [("prefill", {"tokens": length}), ("decode", {"past": length, "steps": new})],
        )
        speed = self.read * new / decode[0] / 1e9
        return [
            _measured("prefill", 1, length, 0, None, *prefill),
            _measured("decode", 1, new, length, speed, *decode),
        ]

    def requests(self, runs: BatchRuns, requests: int, length: int, new: int) -> Measured:
        """`new` tokens of each of several requests, after prompts of `length` tokens."""
        [decode] = self._rounds(lambda: (runs.decode(length, new),), [])
        speed = self.read * new / decode[0] / 1e9
        return _measured("decode", requests, new, length, speed, *decode)

    def encoder(self, runs: EncoderRuns, texts: int, length: int) -> Measured:
        """A batch of texts of `length` tokens."""
        [encode] = self._rounds(lambda: (runs.encode(texts, length),), [])
        speed = self.read / encode[0] / 1e9
        return _measured("encode", texts, length, 0, speed, *encode)

    def _rounds(
        self, ours: Callable[[], tuple[float, ...]], asked: Sequence[tuple[str, dict[str, int]]]
    ) -> list[tuple[float, float | None]]:
        """Median seconds of each part, ours and the peer's, in turn so that a noisy minute hits
        both. The first round does not count: it compiles and packs."""
        mine, theirs = [], []
        for _ in range(self.repeat + 1):
            mine.append(ours())
            if self.peer is not None and asked:
                theirs.append([self.peer.ask(do, **given)["seconds"] for do, given in asked])
            self.done()
        medians = [statistics.median(part) for part in zip(*mine[1:], strict=True)]
        peers: list[float | None] = [statistics.median(p) for p in zip(*theirs[1:], strict=True)]
        return list(zip(medians, peers or [None] * len(medians), strict=True))


def _measured(
    test: str,
    batch: int,
    tokens: int,
    past: int,
    speed: float | None,
    seconds: float,
    peer: float | None,
) -> Measured:
    count = batch * tokens
    beside = None if peer is None else count / peer
    return Measured(test, batch, tokens, past, seconds, count / seconds, speed, beside)
