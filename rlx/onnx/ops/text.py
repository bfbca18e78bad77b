"""Strings: joined, split, normalised, matched and counted, on the host."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np

from rlx.onnx.call import Call
from rlx.onnx.table import op
from rlx.support.optional import library

MOST_SKIPS = 1024


def texts(items: Any, shape: Any) -> Any:
    """Strings as a tensor of this shape."""
    found = np.empty(len(items), object)
    found[:] = items
    return found.reshape(shape)


@op("StringConcat", since=20, on_host=True)
def string_concat(node: Call, a: Any, b: Any) -> Any:
    left, right = np.broadcast_arrays(a, b)
    joined = [str(x) + str(y) for x, y in zip(left.reshape(-1), right.reshape(-1), strict=True)]
    return texts(joined, left.shape)


@op("StringSplit", since=20, on_host=True)
def string_split(node: Call, x: Any) -> Any:
    separator = node.text("delimiter", "") or None
    most = node.int("maxsplit", -1)
    parts = [str(t).split(separator, most) for t in x.reshape(-1)]
    width = max((len(p) for p in parts), default=0)
    rows = [t for p in parts for t in (*p, *[""] * (width - len(p)))]
    counts = np.array([len(p) for p in parts], np.int64).reshape(x.shape)
    return texts(rows, (*x.shape, width)), counts


@op("StringNormalizer", since=10, on_host=True)
def string_normalizer(node: Call, x: Any) -> Any:
    if x.ndim > 2 or (x.ndim == 2 and x.shape[0] != 1):
        raise node.fault("not a list of strings", got=list(x.shape), expected="[C] or [1, C]")
    stop, exact = node.texts("stopwords", None) or [], bool(node.int("is_case_sensitive", 0))
    change = {"LOWER": str.lower, "UPPER": str.upper}.get(node.text("case_change_action", "NONE"))
    words = [str(t) for t in x.reshape(-1)]
    if exact:
        kept = [w for w in words if w not in set(stop)]
    else:
        folded = {w.lower() for w in stop}
        kept = [w for w in words if w.lower() not in folded]
    made = [change(w) for w in kept] if change else kept
    made = made or [""]
    return texts(made, (1, len(made)) if x.ndim == 2 else (len(made),))


@op("RegexFullMatch", since=20, on_host=True)
def regex_full_match(node: Call, x: Any) -> Any:
    """Where repetition is nested, Python's `re` may take time exponential in the text: such a
    pattern is for short texts only."""
    pattern = node.text("pattern")
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise node.fault("not a regular expression", got=str(error)) from None
    if _is_nested(pattern) and any(len(t) > 64 for t in x.reshape(-1)):
        raise node.unsupported("a pattern with nested repetition on long text", pattern[:60])
    matched = [found.fullmatch(t) is not None for t in x.reshape(-1)]
    return np.array(matched, bool).reshape(x.shape)


def _is_nested(pattern: str) -> bool:
    """Whether a repeated group repeats inside, or has alternatives: backtracking may explode."""
    return re.search(r"[*+|}][^()]*\)+[*+{]", pattern) is not None


@op("TfIdfVectorizer", since=9, on_host=True)
def tf_idf(node: Call, x: Any) -> Any:
    """Counts of n-grams of a pool, with gaps between their items, weighted."""
    grams = _pool(node)
    indexes = node.ints("ngram_indexes")
    if len(indexes) != len(grams) or any(not 0 <= i < 2**24 for i in indexes):
        raise node.fault("n-grams and indexes do not fit", got=len(indexes), expected=len(grams))
    least, most = node.int("min_gram_length"), node.int("max_gram_length")
    skips, mode = node.int("max_skip_count"), node.text("mode")
    if not 0 <= skips <= MOST_SKIPS or not 0 < least <= most:
        raise node.fault("not a range of n-grams", got=f"{least} … {most}, {skips} skipped")
    weights = node.floats("weights", None)
    if mode not in ("TF", "IDF", "TFIDF"):
        raise node.fault("unknown mode", got=mode)
    rows = x.reshape(1, -1) if x.ndim < 2 else x
    counts = np.zeros((len(rows), max(indexes, default=-1) + 1), np.float32)
    factors = np.ones(counts.shape[1], np.float32)
    if weights is not None:
        factors[list(indexes)] = weights
    for row, made in zip(rows.tolist(), counts, strict=True):
        _count(row, made, dict(zip(grams, indexes, strict=True)), least, most, skips)
    if mode == "IDF":
        counts = (counts > 0) * factors
    elif mode == "TFIDF":
        counts = counts * factors
    made = counts.astype(np.float32)
    return made[0] if x.ndim < 2 else made


def _count(
    row: list[Any], counts: Any, grams: dict[Any, int], least: int, most: int, skips: int
) -> None:
    for size in range(least, most + 1):
        for step in range(1, (skips + 1 if size > 1 else 1) + 1):
            for first in range(len(row) - (size - 1) * step):
                gram = tuple(row[first : first + (size - 1) * step + 1 : step])
                at = grams.get(gram)
                if at is not None:
                    counts[at] += 1


def _pool(node: Call) -> list[tuple[Any, ...]]:
    """The n-grams of the pool: `ngram_counts` says where those of each length begin."""
    items = node.texts("pool_strings", None) or list(node.ints("pool_int64s", ()) or ())
    starts = [*node.ints("ngram_counts"), len(items)]
    found: list[tuple[Any, ...]] = []
    for size, (first, last) in enumerate(pairwise(starts), 1):
        if not 0 <= first <= last <= len(items) or (last - first) % size:
            raise node.fault("not a pool of n-grams", got=starts[:-1])
        found += [tuple(items[i : i + size]) for i in range(first, last, size)]
    return found


@op("ImageDecoder", since=20, on_host=True)
def image_decoder(node: Call, data: Any) -> Any:
    """An image file's bytes as [height, width, channels]."""
    import io

    image = library("PIL.Image", "decoding images")
    how = node.text("pixel_format", "RGB")
    if how not in ("RGB", "BGR", "Grayscale"):
        raise node.fault("unknown pixels", got=how)
    try:
        with image.open(io.BytesIO(data.tobytes())) as opened:
            made = np.array(opened.convert("L" if how == "Grayscale" else "RGB"))
    except Exception as error:  # PIL's decoders raise many classes on bad data
        raise node.fault("not an image", got=f"{error!s:.100}") from None
    if how == "Grayscale":
        return made[:, :, None]
    return np.ascontiguousarray(made[:, :, ::-1]) if how == "BGR" else made
