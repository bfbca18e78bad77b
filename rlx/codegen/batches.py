"""Batches of products: axes over which x, w or both move, each with a size and two strides."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.codegen.emit import Function, Value


def batch_args(axes: int) -> list[str]:
    """Names of the args of `axes` axes, outermost first; strides are bytes, 0 where shared."""
    return [name for i in range(axes) for name in (f"size{i}", f"x_batch{i}", f"w_batch{i}")]


def batch_count(f: Function, given: Mapping[str, Value], axes: int) -> Value:
    count = f.i64(1)
    for i in range(axes):
        count = count * given[f"size{i}"]
    return count


def batch_start(
    f: Function, given: Mapping[str, Value], axes: int, batch: Value
) -> tuple[Value, Value]:
    """Where x and w of a batch begin."""
    x, w = given["x"], given["w"]
    for i in reversed(range(axes)):
        outer = batch.udiv(given[f"size{i}"]) if i else f.i64(0)
        index = batch - outer * given[f"size{i}"]
        x = f.gep(x, index * given[f"x_batch{i}"])
        w = f.gep(w, index * given[f"w_batch{i}"])
        batch = outer
    return x, w
