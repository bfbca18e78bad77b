"""Ensembles of decision trees (`ai.onnx.ml`): all rows go down all trees at once, by levels."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rlx.onnx.call import Call
from rlx.onnx.ops.class_scores import POST_TRANSFORMS, labels_of, transformed, two_classes
from rlx.onnx.table import op
from rlx.onnx.values import Data

DOMAIN = "ai.onnx.ml"
MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")
MEMBER = len(MODES)
MAX_DEPTH = 10_000


class Forest(NamedTuple):
    """Inner nodes come first, then leaves: a child is a number among both."""

    roots: Data
    feature: Data
    mode: Data
    split: Data
    yes: Data
    no: Data
    missing: Data  # whether NaN goes the way of true
    members: list[Data]  # of the nodes that ask for membership, by node
    first_leaf: int

    def leaves(self, node: Call, x: Data) -> Data:
        """The leaf of each row in each tree."""
        at = np.broadcast_to(self.roots, (len(x), len(self.roots))).copy()
        rows = np.arange(len(x))[:, None]
        for _ in range(MAX_DEPTH):
            inner = at < self.first_leaf
            if not inner.any():
                return at - self.first_leaf
            here = np.where(inner, at, 0)
            value = x[rows, self.feature[here]]
            taken = self._answers(here, value) | (np.isnan(value) & self.missing[here])
            at = np.where(inner, np.where(taken, self.yes[here], self.no[here]), at)
        raise node.fault("a tree without an end", got=f"more than {MAX_DEPTH} levels")

    def _answers(self, here: Data, value: Data) -> Any:
        split, mode = self.split[here], self.mode[here]
        with np.errstate(invalid="ignore"):
            answers = [
                value <= split, value < split, value >= split, value > split, value == split,
                value != split,
            ]  # fmt: skip
        found = np.select([mode == i for i in range(len(MODES))], answers, False)
        for number, members in enumerate(self.members):
            if members.size:
                asked = (mode == MEMBER) & (here == number)
                found = np.where(asked, np.isin(value, members), found)
        return found


def _checked(node: Call, forest: Forest, leaves: int, features: int) -> Forest:
    total = forest.first_leaf + leaves
    children = np.concatenate([forest.roots, forest.yes, forest.no])
    if len(children) and not (children.min() >= 0 and children.max() < total):
        raise node.fault("a child that is not there", got=int(children.max()), expected=total)
    if len(forest.feature) and not 0 <= forest.feature.min() <= forest.feature.max() < features:
        raise node.fault(
            "a feature that is not there", got=int(forest.feature.max()), expected=features
        )
    return forest


def _ints(node: Call, name: str, default: Any = ()) -> Data:
    found = node.ints(name, default) if default is not None else node.ints(name)
    return np.asarray(found, np.int64).reshape(-1)


def _numbers(node: Call, name: str, dtype: Any) -> Data:
    """Floats of an attribute, or of the tensor that has its place."""
    tensor = node.tensor(f"{name}_as_tensor", None)
    found = node.floats(name, ()) if tensor is None else tensor
    return np.asarray(found, dtype).reshape(-1)


# -- the newer form -------------------------------------------------------------------------------


@op("TreeEnsemble", domain=DOMAIN, since=5, on_host=True)
def tree_ensemble(node: Call, x: Data) -> Data:
    splits, weights = node.tensor("nodes_splits"), node.tensor("leaf_weights")
    count = len(splits)
    modes = np.asarray(node.tensor("nodes_modes"), np.int64)
    yes, no = _ints(node, "nodes_truenodeids", None), _ints(node, "nodes_falsenodeids", None)
    yes = np.where(_ints(node, "nodes_trueleafs", None) == 1, yes + count, yes)
    no = np.where(_ints(node, "nodes_falseleafs", None) == 1, no + count, no)
    missing = _ints(node, "nodes_missing_value_tracks_true", (0,) * count) == 1
    feature = _ints(node, "nodes_featureids", None)
    if {len(modes), len(yes), len(no), len(missing), len(feature)} != {count}:
        raise node.fault("attributes of different lengths")
    forest = Forest(
        _ints(node, "tree_roots", None), feature, modes, splits, yes, no, missing,
        _member_sets(node, modes), count,
    )  # fmt: skip
    _checked(node, forest, len(weights), x.shape[1])
    targets = _ints(node, "leaf_targetids", None)
    number = node.int("n_targets", 1)
    if len(targets) != len(weights) or (len(targets) and not 0 <= targets.max() < number):
        raise node.fault("leaves and targets do not fit", got=len(targets))
    leaves = forest.leaves(node, x)
    how = ("AVERAGE", "SUM", "MIN", "MAX")[_index(node, "aggregate_function", 1, 4)]
    made = _aggregated(how, weights[leaves], targets[leaves], number, x.dtype)
    after = POST_TRANSFORMS[_index(node, "post_transform", 0, len(POST_TRANSFORMS))]
    return transformed(node, made, after).astype(x.dtype)


def _index(node: Call, name: str, default: int, count: int) -> int:
    found: int = node.int(name, default)
    if not 0 <= found < count:
        raise node.fault(f"unknown {name}", got=found)
    return found


def _member_sets(node: Call, modes: Data) -> list[Data]:
    """For each node the values it asks for; sets are separated by NaN, in the order of nodes."""
    values = node.tensor("membership_values", None)
    empty: Data = np.zeros(0)
    if values is None:
        return []
    ends = np.flatnonzero(np.isnan(values))
    sets = iter(np.split(values, ends))
    return [
        (found := next(sets, empty))[~np.isnan(found)] if mode == MEMBER else empty
        for mode in modes
    ]


def _aggregated(how: str, weights: Data, targets: Data, number: int, dtype: Any) -> Data:
    """One weight a tree and row: [rows, trees] to [rows, targets]."""
    made = []
    for target in range(number):
        own = targets == target
        if how == "SUM" or how == "AVERAGE":
            total = np.where(own, weights, 0).sum(axis=1, dtype=np.float64)
            made.append(total / weights.shape[1] if how == "AVERAGE" else total)
        else:
            empty = np.inf if how == "MIN" else -np.inf
            fold = np.min if how == "MIN" else np.max
            best = fold(np.where(own, weights, empty), axis=1)
            made.append(np.where(own.any(axis=1), best, 0))
    return np.stack(made, axis=1).astype(dtype)


# -- the older forms ------------------------------------------------------------------------------


def _old_forest(node: Call) -> tuple[Forest, dict[tuple[int, int], int]]:
    """The trees of the attributes, and the number of each leaf by tree and node."""
    trees, ids = _ints(node, "nodes_treeids", None), _ints(node, "nodes_nodeids", None)
    modes = node.texts("nodes_modes")
    features, splits = _ints(node, "nodes_featureids", None), _numbers(node, "nodes_values", float)
    yes, no = _ints(node, "nodes_truenodeids", None), _ints(node, "nodes_falsenodeids", None)
    missing = _ints(node, "nodes_missing_value_tracks_true", (0,) * len(ids)) == 1
    lengths = {len(a) for a in (trees, ids, modes, features, splits, yes, no, missing)}
    if lengths != {len(ids)}:
        raise node.fault("attributes of different lengths", got=sorted(lengths))
    unknown = set(modes) - {*MODES, "LEAF"}
    if unknown:
        raise node.fault("unknown modes", got=sorted(unknown))
    is_leaf = np.array([m == "LEAF" for m in modes], bool)
    inner = np.flatnonzero(~is_leaf)
    number = np.empty(len(ids), np.int64)
    number[inner] = np.arange(len(inner))
    number[is_leaf] = len(inner) + np.arange(int(is_leaf.sum()))
    by_id = {(int(t), int(i)): int(n) for t, i, n in zip(trees, ids, number, strict=True)}

    def child(t: int, i: int) -> int:
        found = by_id.get((t, i))
        if found is None:
            raise node.fault("a child that is not there", got=f"node {i} of tree {t}")
        return found

    order = {m: i for i, m in enumerate(MODES)}
    first: dict[int, int] = {}
    for position, tree in enumerate(trees.tolist()):
        first.setdefault(tree, position)
    forest = Forest(
        number[list(first.values())], features[inner], np.array([order[modes[i]] for i in inner]),
        splits[inner], np.array([child(int(trees[i]), int(yes[i])) for i in inner], np.int64),
        np.array([child(int(trees[i]), int(no[i])) for i in inner], np.int64), missing[inner], [],
        len(inner),
    )  # fmt: skip
    leaves = {key: n - len(inner) for key, n in by_id.items() if n >= len(inner)}
    return forest, leaves


def _sums(node: Call, x: Data, prefix: str, number: int, how: str) -> tuple[Data, Data]:
    """[rows, targets] of the weights of the leaves that rows end in, and all weights."""
    forest, leaves = _old_forest(node)
    _checked(node, forest, len(leaves), x.shape[1])
    forest = forest._replace(split=forest.split.astype(np.float64 if x.dtype == float else "f4"))
    trees, ids = _ints(node, f"{prefix}_treeids"), _ints(node, f"{prefix}_nodeids")
    targets, weights = _ints(node, f"{prefix}_ids"), _numbers(node, f"{prefix}_weights", float)
    if not len(trees) == len(ids) == len(targets) == len(weights):
        raise node.fault("attributes of different lengths", got=len(weights))
    if len(targets) and not 0 <= targets.min() <= targets.max() < number:
        raise node.fault("a target that is not there", got=int(targets.max()), expected=number)
    table, given = np.zeros((len(leaves), number)), np.zeros((len(leaves), number), bool)
    for t, i, target, w in zip(trees, ids, targets, weights, strict=True):
        leaf = leaves.get((int(t), int(i)))
        if leaf is None:
            raise node.fault("a weight of a node that is no leaf", got=f"node {i} of tree {t}")
        table[leaf, target] += w
        given[leaf, target] = True
    at = forest.leaves(node, x)
    if how in ("MIN", "MAX"):
        return _extrema(table, given, at, how), weights
    total = np.zeros((len(x), number))
    for column in at.T:
        total += table[column]
    return (total / max(at.shape[1], 1) if how == "AVERAGE" else total), weights


def _extrema(table: Data, given: Data, at: Data, how: str) -> Data:
    empty = np.inf if how == "MIN" else -np.inf
    fold = np.min if how == "MIN" else np.max
    values = np.where(given, table, empty)[at]
    return np.where(given[at].any(axis=1), fold(values, axis=1), 0.0)


@op("TreeEnsembleRegressor", domain=DOMAIN, on_host=True)
def tree_regressor(node: Call, x: Data) -> Data:
    number = node.int("n_targets", 1)
    if not 0 < number < 2**20:
        raise node.fault("not a number of targets", got=number)
    how = node.text("aggregate_function", "SUM")
    if how not in ("SUM", "AVERAGE", "MIN", "MAX"):
        raise node.fault("unknown aggregate_function", got=how)
    made, _ = _sums(node, _floats(x), "target", number, how)
    base = _numbers(node, "base_values", float)
    if len(base):
        made = made + base
    return transformed(node, made, node.text("post_transform", "NONE")).astype(np.float32)


@op("TreeEnsembleClassifier", domain=DOMAIN, on_host=True)
def tree_classifier(node: Call, x: Data) -> Any:
    labels = labels_of(node, "classlabels_strings", "classlabels_int64s")
    scores, weights = _sums(node, _floats(x), "class", len(labels), "SUM")
    base = _numbers(node, "base_values", float)
    used = sorted(set(_ints(node, "class_ids").tolist()))
    if len(labels) == 2 and len(used) <= 1:  # one score for two classes
        column = used[0] if used else 0
        score = scores[:, column] + (base[-1] if len(base) else 0.0)
        return two_classes(node, score, labels, bool((weights >= 0).all()))
    if len(base):
        scores = scores + base
    chosen = labels[np.argmax(scores, axis=1)]
    return chosen, transformed(node, scores, node.text("post_transform", "NONE")).astype("f4")


def _floats(x: Data) -> Data:
    return x if x.dtype.kind == "f" else x.astype(np.float32)
