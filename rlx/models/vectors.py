"""Vectors of texts: the states of a language model, pooled; lengths made one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import OptionError

if TYPE_CHECKING:
    from rlx.models.decoder_runner import Engine

POOLING = ("mean", "last")


def pooled(engine: Engine, texts: Sequence[Sequence[int]], pooling: str) -> Any:
    """A vector for each text of tokens, f32 [texts, hidden]; zeros for one without any.

    It is the state after the last norm: the mean over a text's tokens, or that of the last one,
    which has seen all others.
    """
    if pooling not in POOLING:
        raise OptionError(
            "unknown pooling", where="pooling", got=pooling, expected=" or ".join(POOLING)
        )
    found = np.zeros((len(texts), engine.model.config.hidden), np.float32)
    for row, tokens in zip(found, texts, strict=True):
        if len(tokens):
            with engine.lock:
                engine.adapt(None)
                states = engine.rows(tokens, "hidden")
            row[:] = states[-1] if pooling == "last" else states.mean(0)
    return found


def normalized(rows: Any) -> Any:
    """Rows of length 1; one of zeros stays."""
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
    return rows / np.maximum(norms, np.float32(1e-12))
