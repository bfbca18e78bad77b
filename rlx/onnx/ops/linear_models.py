"""Linear models and support vector machines (`ai.onnx.ml`)."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from rlx.onnx.call import Call
from rlx.onnx.ops.class_scores import labels_of, logistic, transformed, two_classes
from rlx.onnx.table import op
from rlx.onnx.values import Data

DOMAIN = "ai.onnx.ml"


def _floats(node: Call, name: str, default: Any = ()) -> Data:
    return np.asarray(node.floats(name, default), np.float64).reshape(-1)


def _rows(node: Call, x: Data) -> Data:
    if x.ndim == 1:
        x = x[None]
    if x.ndim != 2:
        raise node.fault("not rows of features", got=list(x.shape))
    return x.astype(np.float64)


def _matrix(node: Call, name: str, rows: int, columns: int) -> Data:
    found = _floats(node, name)
    if len(found) != rows * columns:
        raise node.fault(f"{name} do not fit", got=len(found), expected=f"{rows} × {columns}")
    return found.reshape(rows, columns)


@op("LinearRegressor", domain=DOMAIN, on_host=True)
def linear_regressor(node: Call, x: Data) -> Data:
    rows, targets = _rows(node, x), node.int("targets", 1)
    made = rows @ _matrix(node, "coefficients", targets, rows.shape[1]).T
    intercepts = _floats(node, "intercepts")
    made = made + intercepts if len(intercepts) else made
    return transformed(node, made, node.text("post_transform", "NONE")).astype(np.float32)


@op("LinearClassifier", domain=DOMAIN, on_host=True)
def linear_classifier(node: Call, x: Data) -> Any:
    rows = _rows(node, x)
    labels = labels_of(node, "classlabels_strings", "classlabels_ints")
    given = len(_floats(node, "coefficients")) // max(rows.shape[1], 1)
    scores = rows @ _matrix(node, "coefficients", given, rows.shape[1]).T
    intercepts = _floats(node, "intercepts")
    scores = scores + intercepts if len(intercepts) else scores
    if given == 1 and len(labels) == 2:
        return two_classes(node, scores[:, 0], labels, False)
    if given != len(labels):
        raise node.fault("not as many classes as labels", got=given, expected=len(labels))
    after = transformed(node, scores, node.text("post_transform", "NONE"))
    return labels[np.argmax(scores, axis=1)], after.astype(np.float32)


# -- support vectors ------------------------------------------------------------------------------


def _kernel(node: Call, a: Data, b: Data) -> Any:
    kind = node.text("kernel_type", "LINEAR")
    gamma, offset, degree = [*_floats(node, "kernel_params"), 0.0, 0.0, 0.0][:3]
    if kind == "RBF":
        squares = (a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T
        return np.exp(-gamma * squares)
    product = a @ b.T
    if kind == "LINEAR":
        return product
    if kind == "POLY":
        return (gamma * product + offset) ** degree
    if kind == "SIGMOID":
        return np.tanh(gamma * product + offset)
    raise node.fault("unknown kernel", got=kind, expected="LINEAR, POLY, RBF, SIGMOID")


@op("SVMRegressor", domain=DOMAIN, on_host=True)
def svm_regressor(node: Call, x: Data) -> Data:
    rows, count = _rows(node, x), node.int("n_supports", 0)
    rho, coefficients = _floats(node, "rho"), _floats(node, "coefficients")
    if count:
        vectors = _matrix(node, "support_vectors", count, rows.shape[1])
        made = _kernel(node, rows, vectors) @ coefficients[:count]
    else:
        made = _kernel(node, rows, _matrix(node, "coefficients", 1, rows.shape[1]))[:, 0]
    made = (made + (rho[0] if len(rho) else 0.0))[:, None]
    if node.int("one_class", 0):
        made = np.where(made > 0, 1.0, -1.0)
    return transformed(node, made, node.text("post_transform", "NONE")).astype(np.float32)


@op("SVMClassifier", domain=DOMAIN, on_host=True)
def svm_classifier(node: Call, x: Data) -> Any:
    rows = _rows(node, x)
    labels = labels_of(node, "classlabels_strings", "classlabels_ints")
    per = node.ints("vectors_per_class", ())
    rho = _floats(node, "rho")
    if not per:  # a linear model of each class
        scores = rows @ _matrix(node, "coefficients", len(labels), rows.shape[1]).T
        scores = scores + (rho[0] if len(rho) else 0.0)
        after = transformed(node, scores, node.text("post_transform", "NONE"))
        return labels[np.argmax(scores, axis=1)], after.astype(np.float32)
    if len(per) != len(labels) or any(n < 0 for n in per):
        raise node.fault("not as many classes as labels", got=list(per), expected=len(labels))
    distances = _pairs(node, rows, per, rho)
    a, b = _floats(node, "prob_a"), _floats(node, "prob_b")
    if len(a):
        scores = _coupled(logistic(-(distances * a + b)), len(labels))
        return labels[np.argmax(scores, axis=1)], scores.astype(np.float32)
    if len(labels) == 2:
        first = distances[:, 0] > 0
        both = np.stack([distances[:, 0], -distances[:, 0]], axis=1)
        after = transformed(node, both, node.text("post_transform", "NONE"))
        return labels[np.where(first, 0, 1)], after.astype(np.float32)
    votes = np.zeros((len(rows), len(labels)), np.int64)
    for column, (i, j) in enumerate(combinations(range(len(labels)), 2)):
        votes[:, i] += distances[:, column] > 0
        votes[:, j] += distances[:, column] <= 0
    after = transformed(node, distances, node.text("post_transform", "NONE"))
    return labels[np.argmax(votes, axis=1)], after.astype(np.float32)


def _pairs(node: Call, rows: Data, per: tuple[int, ...], rho: Data) -> Data:
    """The distance of each row from the plane between each pair of classes."""
    total, classes = sum(per), len(per)
    vectors = _matrix(node, "support_vectors", total, rows.shape[1])
    coefficients = _matrix(node, "coefficients", classes - 1, total)
    kernel = _kernel(node, rows, vectors)
    starts = np.concatenate([[0], np.cumsum(per)])
    if len(rho) < classes * (classes - 1) // 2:
        raise node.fault("rho do not fit", got=len(rho))
    made = []
    for number, (i, j) in enumerate(combinations(range(classes), 2)):
        own, other = slice(starts[i], starts[i + 1]), slice(starts[j], starts[j + 1])
        value = (
            kernel[:, own] @ coefficients[j - 1, own] + kernel[:, other] @ coefficients[i, other]
        )
        made.append(value + rho[number])
    return np.stack(made, axis=1)


def _coupled(pairs: Data, classes: int) -> Data:
    """Probabilities of classes from those of pairs, by Wu, Lin and Weng's second method."""
    made = np.empty((len(pairs), classes))
    for row, given in zip(made, np.clip(pairs, 1e-7, 1 - 1e-7), strict=True):
        r = np.zeros((classes, classes))
        for number, (i, j) in enumerate(combinations(range(classes), 2)):
            r[i, j], r[j, i] = given[number], 1 - given[number]
        q = -r * r.T
        np.fill_diagonal(q, (r**2).sum(axis=0))
        # minimise pᵀ Q p for Σp = 1
        system = np.block([[q, np.ones((classes, 1))], [np.ones((1, classes)), np.zeros((1, 1))]])
        solved = np.linalg.lstsq(system, np.append(np.zeros(classes), 1.0), rcond=None)[0]
        row[:] = solved[:classes]
    return made
