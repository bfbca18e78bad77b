"""What the classifiers of `ai.onnx.ml` share: labels, scores of classes, transforms of scores."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.onnx.call import Call
from rlx.onnx.values import Data

POST_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


def text_array(items: Any) -> Data:
    """Strings as a tensor of one axis."""
    made = np.empty(len(items), object)
    made[:] = items
    return made


def labels_of(node: Call, strings: str, numbers: str) -> Data:
    """The labels of classes: strings or int64."""
    texts = node.texts(strings, None)
    if texts:
        return text_array(texts)
    found = node.ints(numbers, None)
    if not found:
        raise node.fault("no labels of classes")
    return np.asarray(found, np.int64)


def logistic(x: Data) -> Data:
    half = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + half), half / (1 + half))


def transformed(node: Call, scores: Data, how: str) -> Data:
    """Scores [rows, classes] after a post transform."""
    if how == "NONE":
        return scores
    if how == "LOGISTIC":
        return logistic(scores)
    if how in ("SOFTMAX", "SOFTMAX_ZERO"):
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        if how == "SOFTMAX_ZERO":  # scores of 0 stay 0
            powers = np.where(scores == 0, 0.0, powers)
        total = powers.sum(axis=1, keepdims=True)
        made: Data = powers / np.where(total == 0, 1, total)
        return made
    if how == "PROBIT":
        return _probit(scores)
    raise node.fault("unknown post_transform", got=how, expected=", ".join(POST_TRANSFORMS))


def _probit(p: Data) -> Data:
    """The quantile of the normal distribution."""
    from statistics import NormalDist

    inverse = NormalDist().inv_cdf
    flat = [inverse(x) if 0 < x < 1 else np.inf * np.sign(x - 0.5) for x in p.reshape(-1).tolist()]
    return np.array(flat).reshape(p.shape)


def two_classes(node: Call, score: Data, labels: Data, is_share: bool) -> tuple[Data, Data]:
    """Labels and [rows, 2] scores where a model has one score: that of the second class, a share
    of 1 or a distance from 0."""
    positive = score > (0.5 if is_share else 0.0)
    how = node.text("post_transform", "NONE")
    if how == "NONE":
        both = np.stack([1 - score if is_share else -score, score], axis=1)
    else:
        both = transformed(node, np.stack([-score, score], axis=1), how)
    return labels[positive.astype(np.int64)], both.astype(np.float32)
