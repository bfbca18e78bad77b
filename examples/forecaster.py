"""An LSTM continues a signal: it reads the past at once, then feeds itself value by value.

python examples/forecaster.py [STEPS]

`examples/weights/train.py` made the weights, with PyTorch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import rlx
import rlx.numpy as rnp
from rlx import nn

WEIGHTS = Path(__file__).parent / "weights" / "forecaster.safetensors"
State = tuple[rlx.Array, rlx.Array]


class Forecaster(nn.Module):
    """The next value of a signal, from all values so far."""

    def __init__(self, width: int = 48) -> None:
        self.lstm = nn.LSTM(1, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def __call__(self, x: rlx.Array, state: State | None = None) -> tuple[rlx.Array, State]:
        y, state = self.lstm(x, state)
        return self.head(y), state


@rlx.jit(static=["steps"])
def forecast(model: Forecaster, past: rlx.Array, steps: int) -> rlx.Array:
    """The next `steps` values behind `past` [batch, length, 1]: one native call."""
    known, state = model(past)

    def step(carry: tuple[rlx.Array, State], _: None) -> tuple[tuple[rlx.Array, State], rlx.Array]:
        value, state = carry
        following, state = model(value, state)
        return (following, state), value[:, 0, 0]

    _, values = rlx.scan(step, (known[:, -1:], state), None, length=steps)
    return values.mT


def signal(length: int) -> np.ndarray:
    time = np.arange(length)
    return 0.8 * np.sin(2 * np.pi * time / 23 + 1)


def plot(values: np.ndarray, guessed: np.ndarray, height: int = 12) -> str:
    """The true values as dots and the forecast as stars, one column each."""
    rows = [[" "] * len(values) for _ in range(height)]
    for series, mark in ((values, "."), (guessed, "*")):
        for column, value in enumerate(series):
            row = round((1.1 - value) / 2.2 * (height - 1))
            rows[min(max(row, 0), height - 1)][column] = mark
    return "\n".join("".join(row) for row in rows)


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    model = Forecaster()
    model.load(WEIGHTS)
    for known in (80, 160):  # the past may be of any length: one trace
        whole = signal(known + steps)
        past = rnp.asarray(whole[None, :known, None].astype(np.float32))
        values = np.asarray(forecast(model, past, steps))[0]
        error = np.sqrt(np.mean((values - whole[known:]) ** 2))
        spread = np.sqrt(np.mean((whole[known:] - whole[known:].mean()) ** 2))
        print(f"{known} values known: error of the next {steps} {error:.3f}; spread {spread:.3f}")
    print(plot(whole[known:], values))
    print(f"traces: {len(forecast.variants())}")


if __name__ == "__main__":
    main()
