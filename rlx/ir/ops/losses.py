"""Losses with a hand-made backward: what is written has one array of the size of the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlx.errors import ShapeError
from rlx.ir.dtype import i32
from rlx.ir.op import Cost, op
from rlx.ir.ops._common import cast, require_float, require_integer, require_same, traffic, wide
from rlx.ir.ops.composite import Composite
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


def _check_rows(logits: Shape, **rows: Shape) -> None:
    """`rows` have an entry for each row of the logits."""
    require_float(logits, "logits")
    if not logits.rank or logits.dims[-1] == 0:
        raise ShapeError("logits need an axis of classes", got=logits, expected="[..., classes]")
    for what, shape in rows.items():
        if shape.rank != logits.rank - 1:
            expected = f"{logits.with_dims(logits.dims[:-1])}"
            raise ShapeError(f"{what} do not fit the logits", got=shape, expected=expected)
        for found, wanted in zip(shape.dims, logits.dims, strict=False):
            require_same(found, wanted, what)


def _column(g: Graph, row: Value) -> Any:
    """A number for each row, beside the elements of the row."""
    return g.reshape(row, (*row.shape.dims, 1))


def _is_label(g: Graph, logits: Value, ids: Value) -> Any:
    """Whether an element of the logits is that of its row's label."""
    return g.eq(g.iota((logits.shape.dims[-1],)), _column(g, ids))


class _CrossEntropy(Composite):
    runs_as_region = True
    ignore_index: int | None

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """An exponential, a maximum, a sum and a comparison per logit, as of softmax."""
        return Cost(inputs[0].num_elements * 8, traffic(inputs, outputs))


@op("softmax_cross_entropy")
class SoftmaxCrossEntropy(_CrossEntropy):
    """(ln Σ exp(logits) − logits[label], ln Σ exp(logits)) of each row; the loss is 0 for a row
    whose label is `ignore_index`."""

    ignore_index: int | None = None

    def check_operands(self, logits: Shape, labels: Shape) -> None:
        require_integer(labels, "labels")
        _check_rows(logits, labels=labels)

    def decompose(self, g: Graph, logits: Value, labels: Value) -> Any:
        x = wide(g, logits)
        top = g.max(x, axis=-1, keepdims=True)
        # a row of infinities alone: no infinities are subtracted
        top = g.where(g.is_finite(top), top, 0.0)
        lse = g.add(g.log(g.sum(g.exp(g.sub(x, top)), axis=-1, keepdims=True)), top)
        ids = cast(g, labels, i32)
        picked = g.sum(g.where(_is_label(g, logits, ids), x, 0.0), axis=-1)
        lse = g.reshape(lse, labels.shape.dims)
        loss = g.sub(lse, picked)
        if self.ignore_index is not None:
            loss = g.where(g.ne(ids, self.ignore_index), loss, 0.0)
        return loss, lse


@op("softmax_cross_entropy_backward", overwrites_first=True)
class SoftmaxCrossEntropyBackward(_CrossEntropy):
    """dlogits = (exp(logits − lse) − onehot(label)) · dloss, row by row; may overwrite the
    logits. Rows whose label is `ignore_index` get zeros."""

    ignore_index: int | None = None

    def check_operands(self, logits: Shape, labels: Shape, lse: Shape, dloss: Shape) -> None:
        require_integer(labels, "labels")
        require_float(lse, "lse")
        require_float(dloss, "dloss")
        _check_rows(logits, labels=labels, lse=lse, dloss=dloss)

    def decompose(self, g: Graph, logits: Value, labels: Value, lse: Value, dloss: Value) -> Any:
        scale, ids = wide(g, dloss), cast(g, labels, i32)
        if self.ignore_index is not None:
            scale = g.where(g.ne(ids, self.ignore_index), scale, 0.0)
        p = g.exp(g.sub(wide(g, logits), _column(g, wide(g, lse))))
        hot = g.where(_is_label(g, logits, ids), 1.0, 0.0)
        return cast(g, g.mul(g.sub(p, hot), _column(g, scale)), logits.shape.dtype)
