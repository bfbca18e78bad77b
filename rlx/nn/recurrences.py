"""Recurrent layers with PyTorch's parameters: RNN, LSTM, GRU."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import rlx.numpy as rnp
from rlx import random
from rlx.errors import ShapeError
from rlx.nn import functional as F
from rlx.nn.dense import drawn
from rlx.nn.functional.operands import ArrayLike
from rlx.nn.functional.sequences import GATES
from rlx.nn.module import Module
from rlx.numpy.array import Array
from rlx.numpy.dispatch import as_array

Weights = tuple[Any, Any, Any, Any]


class _Recurrent(Module):
    """Layers of a recurrent network over x [length, batch, in], or [batch, length, in] where
    `batch_first`.

    Parameters are named weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0, and so on by layer,
    with "_reverse" behind for the second direction, and start uniform in ±1/√hidden.
    """

    kind: ClassVar[str]

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False, *,
        key: Array | None = None, dtype: Any = rnp.float32,
    ) -> None:  # fmt: skip
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first = bias, batch_first
        self.dropout, self.bidirectional = float(dropout), bidirectional
        rows, bound = GATES[self._gates()] * hidden_size, 1 / math.sqrt(hidden_size)
        index = 0
        for layer in range(num_layers):
            width = input_size if layer == 0 else hidden_size * self._directions
            for direction in range(self._directions):
                shapes = {"weight_ih": (rows, width), "weight_hh": (rows, hidden_size)}
                if bias:
                    shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}  # type: ignore[dict-item]
                for name, shape in shapes.items():
                    made = drawn(key, index, shape, bound, dtype)
                    setattr(self, name + _suffix(layer, direction), made)
                    index += 1

    def _gates(self) -> str:
        return self.kind

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    def _weights(self, layer: int, direction: int) -> Weights:
        end = _suffix(layer, direction)
        w_ih, w_hh = getattr(self, f"weight_ih{end}"), getattr(self, f"weight_hh{end}")
        return (
            w_ih,
            w_hh,
            getattr(self, f"bias_ih{end}", None),
            getattr(self, f"bias_hh{end}", None),
        )

    def _forward(
        self, x: ArrayLike, states: list[Array | None], key: Array | None
    ) -> tuple[Array, list[Array]]:
        """The outputs of the last layer, and the last states of all, [layers·directions, B, H]."""
        made = as_array(x)
        if made.ndim != 3:
            raise ShapeError(
                "wrong number of axes", where=type(self).__name__, got=str(list(made.shape)),
                expected="[batch, length, in]" if self.batch_first else "[length, batch, in]",
            )  # fmt: skip
        y = rnp.permute_dims(made, (1, 0, 2)) if self.batch_first else made
        last: list[list[Array]] = [[] for _ in states]
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(self._directions):
                at = layer * self._directions + direction
                given = [None if s is None else s[at] for s in states]
                out, *after = self._cell(y, given, self._weights(layer, direction), direction == 1)
                outputs.append(out)
                for kept, state in zip(last, after, strict=True):
                    kept.append(state)
            y = outputs[0] if len(outputs) == 1 else rnp.concat(outputs, axis=-1)
            if self.dropout and layer < self.num_layers - 1:
                own = None if key is None else random.fold_in(key, layer)
                y = F.dropout(y, self.dropout, own, self.training)
        y = rnp.permute_dims(y, (1, 0, 2)) if self.batch_first else y
        return y, [rnp.stack(kept) for kept in last]

    def _cell(
        self, x: Array, states: list[Array | None], weights: Weights, reverse: bool
    ) -> tuple[Array, ...]:
        raise NotImplementedError(self.kind)

    def extra_repr(self) -> str:
        parts = [f"{self.input_size}, {self.hidden_size}"]
        defaults = {"num_layers": 1, "batch_first": False, "dropout": 0.0, "bidirectional": False}
        parts += [f"{n}={getattr(self, n)}" for n, d in defaults.items() if getattr(self, n) != d]
        return ", ".join(parts)


def _suffix(layer: int, direction: int) -> str:
    return f"_l{layer}" + ("_reverse" if direction else "")


class RNN(_Recurrent):
    """An Elman network: h ← tanh(W_ih x + b_ih + W_hh h + b_hh). Returns (all h, the last ones)."""

    kind = "tanh"

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False,
        nonlinearity: str = "tanh", *, key: Array | None = None, dtype: Any = rnp.float32,
    ) -> None:  # fmt: skip
        self.nonlinearity = nonlinearity
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            key=key, dtype=dtype,
        )  # fmt: skip

    def __call__(
        self, x: ArrayLike, h: Array | None = None, *, key: Array | None = None
    ) -> tuple[Array, Array]:
        y, states = self._forward(x, [h], key)
        return y, states[0]

    def _cell(
        self, x: Array, states: list[Array | None], weights: Weights, reverse: bool
    ) -> tuple[Array, ...]:
        return F.rnn(x, states[0], *weights, self.nonlinearity, reverse)


class GRU(_Recurrent):
    """Gated recurrent units. Returns (all h, the last ones)."""

    kind = "gru"

    def __call__(
        self, x: ArrayLike, h: Array | None = None, *, key: Array | None = None
    ) -> tuple[Array, Array]:
        y, states = self._forward(x, [h], key)
        return y, states[0]

    def _cell(
        self, x: Array, states: list[Array | None], weights: Weights, reverse: bool
    ) -> tuple[Array, ...]:
        return F.gru(x, states[0], *weights, reverse)


class LSTM(_Recurrent):
    """Long short-term memory. Returns (all h, (the last h, the last c))."""

    kind = "lstm"

    def __call__(
        self, x: ArrayLike, state: tuple[Array, Array] | None = None, *, key: Array | None = None
    ) -> tuple[Array, tuple[Array, Array]]:
        given: list[Array | None] = [None, None] if state is None else [*state]
        y, states = self._forward(x, given, key)
        return y, (states[0], states[1])

    def _cell(
        self, x: Array, states: list[Array | None], weights: Weights, reverse: bool
    ) -> tuple[Array, ...]:
        h, c = states
        y, last = F.lstm(x, None if h is None or c is None else (h, c), *weights, reverse)
        return y, *last
