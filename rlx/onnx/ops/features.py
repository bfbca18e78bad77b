"""Features made ready for classic models (`ai.onnx.ml`): encoders, scalers, tables of labels."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.onnx.call import Call
from rlx.onnx.ops.class_scores import text_array
from rlx.onnx.table import op
from rlx.onnx.values import Data

DOMAIN = "ai.onnx.ml"


@op("ArrayFeatureExtractor", domain=DOMAIN, on_host=True)
def array_feature_extractor(node: Call, x: Data, indices: Data) -> Data:
    at = indices.reshape(-1)
    size = x.shape[-1] if x.ndim else 0
    if len(at) and not 0 <= at.min() <= at.max() < size:
        raise node.fault("a feature that is not there", got=int(at.max()), expected=size)
    found = np.take(x, at, axis=-1)
    return found[None] if x.ndim == 1 else found


@op("Binarizer", domain=DOMAIN, on_host=True)
def binarizer(node: Call, x: Data) -> Any:
    return (x > node.float("threshold", 0.0)).astype(x.dtype)


@op("CastMap", domain=DOMAIN, raw=True)
def cast_map(node: Call, x: Any) -> Any:
    if not isinstance(x, dict):
        raise node.fault("not a map", got=type(x).__name__)
    to = {"TO_FLOAT": np.float32, "TO_INT64": np.int64}.get(node.text("cast_to", "TO_FLOAT"))
    if node.text("map_form", "DENSE") == "DENSE":
        values = [x[k] for k in sorted(x)]
    else:
        size = node.int("max_map", 1)
        if not 0 < size < 2**24:
            raise node.fault("not a number of values", got=size)
        values = [x.get(i, 0) for i in range(size)]
    if to is None:
        return text_array([str(v) for v in values])[None]
    return np.array([float(v) for v in values]).astype(to)[None]


@op("CategoryMapper", domain=DOMAIN, on_host=True)
def category_mapper(node: Call, x: Data) -> Data:
    strings, numbers = node.texts("cats_strings"), node.ints("cats_int64s")
    if len(strings) != len(numbers):
        raise node.fault("not as many strings as numbers", got=len(strings))
    if x.dtype == object:
        known = dict(zip(strings, numbers, strict=True))
        default = node.int("default_int64", -1)
        return np.array([known.get(t, default) for t in x.reshape(-1)], np.int64).reshape(x.shape)
    names = dict(zip(numbers, strings, strict=True))
    other = node.text("default_string", "_Unused")
    return text_array([names.get(int(n), other) for n in x.reshape(-1)]).reshape(x.shape)


@op("DictVectorizer", domain=DOMAIN, raw=True)
def dict_vectorizer(node: Call, x: Any) -> Data:
    if not isinstance(x, dict):
        raise node.fault("not a map", got=type(x).__name__)
    keys = node.texts("string_vocabulary", None) or list(node.ints("int64_vocabulary"))
    values = [x.get(k) for k in keys]
    if any(isinstance(v, str) for v in x.values()):
        return text_array([v or "" for v in values])[None]
    kind = np.asarray(next(iter(x.values()), np.float32(0))).dtype
    return np.array([0 if v is None else v for v in values], kind)[None]


@op("FeatureVectorizer", domain=DOMAIN, on_host=True)
def feature_vectorizer(node: Call, *columns: Data) -> Data:
    sizes = node.ints("inputdimensions", None) or [c.shape[-1] for c in columns]
    if len(sizes) != len(columns):
        raise node.fault("not as many sizes as inputs", got=len(sizes), expected=len(columns))
    parts = []
    for column, size in zip(columns, sizes, strict=True):
        rows = column.reshape(1, -1) if column.ndim < 2 else column.reshape(len(column), -1)
        part = np.zeros((len(rows), size), np.float32)
        part[:, : min(size, rows.shape[1])] = rows[:, :size]
        parts.append(part)
    return np.concatenate(parts, axis=1)


@op("Imputer", domain=DOMAIN, on_host=True)
def imputer(node: Call, x: Data) -> Data:
    floats = node.floats("imputed_value_floats", None)
    values = floats if floats else node.ints("imputed_value_int64s")
    if len(values) not in (1, x.shape[-1]):
        raise node.fault("values do not fit the features", got=len(values))
    wanted = node.float("replaced_value_float", 0.0) if floats else node.int(
        "replaced_value_int64", 0)  # fmt: skip
    missing = np.isnan(x) if wanted != wanted else x == wanted
    return np.where(missing, np.asarray(values, x.dtype), x)


_KEYS = ("strings", "int64s", "floats")


@op("LabelEncoder", domain=DOMAIN, since=2, on_host=True)
def label_encoder(node: Call, x: Data) -> Data:
    keys, values = _table(node, "keys"), _table(node, "values")
    if len(keys) != len(values):
        raise node.fault("not as many keys as values", got=len(keys), expected=len(values))
    default = _default(node, values)
    table = {_plain(k): v for k, v in zip(keys, values, strict=True)}
    found = [table.get(_plain(k), default) for k in x.reshape(-1)]
    if values.dtype == object:
        return text_array(found).reshape(x.shape)
    return np.array(found, values.dtype).reshape(x.shape)


@op("LabelEncoder", domain=DOMAIN, since=1, on_host=True)
def label_encoder_1(node: Call, x: Data) -> Data:
    classes = node.texts("classes_strings")
    if x.dtype == object:
        known = {t: i for i, t in enumerate(classes)}
        default = node.int("default_int64", -1)
        return np.array([known.get(t, default) for t in x.reshape(-1)], np.int64).reshape(x.shape)
    other = node.text("default_string", "_Unused")
    found = [classes[n] if 0 <= n < len(classes) else other for n in x.reshape(-1).tolist()]
    return text_array(found).reshape(x.shape)


def _plain(key: Any) -> Any:
    """A key that compares as it should: any NaN is the same."""
    if isinstance(key, str):
        return key
    number = key.item() if isinstance(key, np.generic) else key
    return "nan" if number != number else number


def _table(node: Call, name: str) -> Data:
    tensor = node.tensor(f"{name}_tensor", None)
    if tensor is not None:
        return tensor.reshape(-1)  # type: ignore[no-any-return]
    if node.has(f"{name}_strings"):
        return text_array(node.texts(f"{name}_strings"))
    if node.has(f"{name}_int64s"):
        return np.asarray(node.ints(f"{name}_int64s"), np.int64)
    return np.asarray(node.floats(f"{name}_floats"), np.float32)


def _default(node: Call, values: Data) -> Any:
    tensor = node.tensor("default_tensor", None)
    if tensor is not None:
        return tensor.reshape(-1)[0]
    if values.dtype == object:
        return node.text("default_string", "_Unused")
    if values.dtype.kind in "iu":
        return node.int("default_int64", -1)
    return node.float("default_float", -0.0)


@op("Normalizer", domain=DOMAIN, on_host=True)
def normalizer(node: Call, x: Data) -> Data:
    how, wide = node.text("norm", "MAX"), x.astype(np.float64)
    axis = 0 if x.ndim == 1 else 1
    if how == "MAX":
        size = np.abs(wide).max(axis=axis, keepdims=True)
    elif how == "L1":
        size = np.abs(wide).sum(axis=axis, keepdims=True)
    elif how == "L2":
        size = np.sqrt((wide**2).sum(axis=axis, keepdims=True))
    else:
        raise node.fault("unknown norm", got=how, expected="MAX, L1, L2")
    return (wide / np.where(size == 0, 1, size)).astype(np.float32)


@op("OneHotEncoder", domain=DOMAIN, on_host=True)
def one_hot_encoder(node: Call, x: Data) -> Data:
    texts = node.texts("cats_strings", None)
    known = text_array(texts) if texts else np.asarray(node.ints("cats_int64s"), np.int64)
    values = x if x.dtype == object else x.astype(np.int64)
    made = values[..., None] == known
    if not node.int("zeros", 1) and not made.any(axis=-1).all():
        raise node.fault("a category that is not known")
    return np.asarray(made, np.float32)


@op("Scaler", domain=DOMAIN, on_host=True)
def scaler(node: Call, x: Data) -> Data:
    offset = np.asarray(node.floats("offset", (0.0,)), np.float32)
    scale = np.asarray(node.floats("scale", (1.0,)), np.float32)
    if any(len(a) not in (1, x.shape[-1]) for a in (offset, scale)):
        raise node.fault("offset and scale do not fit the features", got=[len(offset), len(scale)])
    return ((x.astype(np.float32) - offset) * scale).astype(np.float32)


@op("ZipMap", domain=DOMAIN, on_host=True)
def zip_map(node: Call, x: Data) -> Any:
    """A list of maps from label to score."""
    texts = node.texts("classlabels_strings", None)
    labels = texts if texts else list(node.ints("classlabels_int64s"))
    rows = x.reshape(1, -1) if x.ndim == 1 else x
    if rows.shape[1] != len(labels):
        raise node.fault("not as many labels as scores", got=len(labels), expected=rows.shape[1])
    return [dict(zip(labels, row.tolist(), strict=True)) for row in rows]
