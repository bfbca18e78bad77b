"""Batches of training: examples packed into rows, pairs of texts, and what is kept for evaluation.

A source makes its batches itself and fills the last one of an epoch up, so that all have one shape.
Nothing is learned of what fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from rlx.data.loader import epoch_order
from rlx.data.sequences import pack_rows
from rlx.errors import InputError, OptionError
from rlx.ir.op import Array
from rlx.models.finetune.examples import Example, Pair
from rlx.models.finetune.training_model import IGNORED

_MULTIPLE = 64  # row lengths, so that few kernels serve them
_HEAD_MULTIPLE = 64  # of the tokens that run through the head
T = TypeVar("T")


class TrainingBatch(NamedTuple):
    """The arrays of a step and how many tokens of examples are in them. With several parts for
    gradient accumulation each array has them as its first axis."""

    arrays: dict[str, Array]
    tokens: int


class BatchSource(Protocol):
    """What a loader takes: items by number, and batches of them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...

    def batch(self, indices: Array) -> TrainingBatch: ...

    @property
    def digest(self) -> str: ...


# -- language models ------------------------------------------------------------------------------


def row_length(examples: Sequence[Example], longest: int, pack: bool) -> int:
    """Tokens in a row: room for the longest example; packed, for a few of the others too."""
    most = max(len(e) for e in examples) - 1
    if pack:
        most = max(most, min(512, sum(len(e) - 1 for e in examples)))
    return min(-(-most // _MULTIPLE) * _MULTIPLE, longest)


class Rows:
    """Rows of one example, or packed, of several; `batch` · `parts` rows are a batch."""

    def __init__(
        self, examples: Sequence[Example], length: int, batch: int, *, parts: int = 1,
        pack: bool = True,
    ) -> None:  # fmt: skip
        self.examples, self.length, self.rows_of_part, self.parts = examples, length, batch, parts
        sizes = [len(e) - 1 for e in examples]  # nothing follows the last token
        self.pack = pack and len(examples) > 1
        self.rows = pack_rows(sizes, length) if self.pack else [[i] for i in range(len(sizes))]
        labels = [np.count_nonzero(e.learned[1:]) for e in examples]
        most = sorted(sum(labels[i] for i in row) for row in self.rows)[-batch:]
        self.labelled = -(-sum(most) // _HEAD_MULTIPLE) * _HEAD_MULTIPLE

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> TrainingBatch:
        return self.batch(np.array([index]))

    def batch(self, indices: Array) -> TrainingBatch:
        count = self.rows_of_part * self.parts
        shape = (count, self.length)
        tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
        labels = np.full(shape, IGNORED, np.int32)
        for row, index in enumerate(indices.tolist()):
            at = 0
            for number, chosen in enumerate(self.rows[index], 1):
                example = self.examples[chosen]
                here = slice(at, at + len(example) - 1)
                tokens[row, here] = example.tokens[:-1]
                labels[row, here] = np.where(example.learned[1:], example.tokens[1:], IGNORED)
                segments[row, here] = number
                positions[row, here] = np.arange(len(example) - 1)
                at = here.stop
        made: dict[str, Array] = {"tokens": tokens, "labels": labels}
        if self.pack:
            made |= {"segments": segments, "positions": positions}
        rows = self._labelled(labels)
        if self.parts > 1:
            made = {name: x.reshape(self.parts, -1, self.length) for name, x in made.items()}
        made["rows"] = rows if self.parts > 1 else rows[0]
        return TrainingBatch(made, int(np.count_nonzero(segments)))

    def _labelled(self, labels: Array) -> Array:
        """For each part the places of tokens with a label: the head runs on these alone. There is
        room for those of any batch, so that one program serves all."""
        rows = np.full((self.parts, self.labelled), -1, np.int32)
        for row, part in zip(rows, labels.reshape(self.parts, -1), strict=True):
            places = np.flatnonzero(part != IGNORED)
            row[: len(places)] = places
        return rows

    @property
    def digest(self) -> str:
        found = sha256(f"{self.length} {self.rows_of_part} {self.parts} {self.pack}".encode())
        for example in self.examples:
            found.update(example.tokens.tobytes() + example.learned.tobytes())
        return found.hexdigest()[:16]


# -- encoders -------------------------------------------------------------------------------------


class Pairs:
    """Queries and documents: rows of queries, then of what answers each, then of what does not.

    `known` [queries, documents] says which documents compete for a query: all that are not padding
    and not the text of its own answer once more.
    """

    def __init__(self, pairs: Sequence[Pair], batch: int) -> None:
        self.pairs, self.rows_of_part = pairs, batch
        texts = [t for p in pairs for t in (p.query, p.positive, p.negative or [])]
        self.length = -(-max(map(len, texts)) // 16) * 16

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> TrainingBatch:
        return self.batch(np.array([index]))

    def batch(self, indices: Array) -> TrainingBatch:
        chosen = [self.pairs[i] for i in indices.tolist()]
        columns = [[p.query for p in chosen], [p.positive for p in chosen]]
        if chosen[0].negative is not None:
            columns.append([p.negative or [] for p in chosen])
        count = self.rows_of_part
        tokens = np.zeros((len(columns) * count, self.length), np.int32)
        lengths = np.ones(len(tokens), np.int32)  # also where no text is: a mean is a number
        for i, texts in enumerate(columns):
            for j, text in enumerate(texts):
                tokens[i * count + j, : len(text)] = text
                lengths[i * count + j] = len(text)
        known = np.zeros((count, (len(columns) - 1) * count), bool)
        documents = [text for texts in columns[1:] for text in texts]
        places = [i * count + j for i in range(len(columns) - 1) for j in range(len(chosen))]
        for row, pair in enumerate(chosen):
            for place, text in zip(places, documents, strict=True):
                known[row, place] = place == row or text != pair.positive
        arrays = {
            "tokens": tokens, "lengths": lengths, "known": known,
            "weight": (np.arange(count) < len(chosen)).astype(np.float32),
        }  # fmt: skip
        return TrainingBatch(arrays, sum(len(t) for texts in columns for t in texts))

    @property
    def digest(self) -> str:
        texts = [(p.query, p.positive, p.negative) for p in self.pairs]
        return sha256(repr((self.rows_of_part, texts)).encode()).hexdigest()[:16]


# -- evaluation -----------------------------------------------------------------------------------


def split_off(items: Sequence[T], share: float, seed: int) -> tuple[list[T], list[T]]:
    """What is trained on, and a share of the items, chosen by the seed, for evaluation."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise OptionError(
            "not a share", where="evaluation", got=repr(share), expected="0 < share < 1, or a file"
        )
    count = max(1, round(share * len(items)))
    if count >= len(items):
        raise InputError(
            "nothing is left to train on", where="evaluation",
            got=f"{count} of {len(items)} for evaluation", hint="more examples, or a smaller share",
        )  # fmt: skip
    order = epoch_order(len(items), seed, 1 << 32).tolist()
    chosen = set(order[:count])
    rest = [item for i, item in enumerate(items) if i not in chosen]
    return rest, [items[i] for i in sorted(chosen)]
