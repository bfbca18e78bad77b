"""An LSTM learns to continue waves: it reads the past at once, then feeds itself value by value.

python examples/forecaster.py [STEPS]

It is trained as it is used: the loss is of values that the network feeds itself, and the gradient
goes back through that loop.
"""

from __future__ import annotations

import sys

import numpy as np

import rlx
import rlx.numpy as rnp
from rlx import nn, optim, random

State = tuple[rlx.Array, rlx.Array]
PAST, FUTURE = 48, 24  # values known and values to come, in training


class Forecaster(nn.Module):
    """The next value of a signal, from all values so far."""

    def __init__(self, width: int, key: rlx.Array) -> None:
        a, b = random.split(key)
        self.lstm = nn.LSTM(1, width, batch_first=True, key=a)
        self.head = nn.Linear(width, 1, key=b)

    def __call__(self, x: rlx.Array, state: State | None = None) -> tuple[rlx.Array, State]:
        y, state = self.lstm(x, state)
        return self.head(y), state


def continued(model: Forecaster, past: rlx.Array, steps: int) -> tuple[rlx.Array, rlx.Array]:
    """What the model says about each value behind the past [batch, length, 1], and the next `steps`
    values [batch, steps]."""
    said, state = model(past)

    def step(carry: tuple[rlx.Array, State], _: None) -> tuple[tuple[rlx.Array, State], rlx.Array]:
        value, state = carry
        following, state = model(value, state)
        return (following, state), value[:, 0, 0]

    _, values = rlx.scan(step, (said[:, -1:], state), None, length=steps)
    return said, values.mT


@rlx.jit(static=["steps"])
def forecast(model: Forecaster, past: rlx.Array, steps: int) -> rlx.Array:
    """The next values behind the past: one native call."""
    return continued(model, past, steps)[1]


def waves(key: rlx.Array, count: int, length: int) -> rlx.Array:
    """Sines of drawn periods, phases and heights [count, length, 1]."""
    a, b, c = random.split(key, 3)
    period = random.uniform(a, (count, 1), minval=12.0, maxval=32.0)
    phase = random.uniform(b, (count, 1), maxval=2 * np.pi)
    height = random.uniform(c, (count, 1), minval=0.5, maxval=1.0)
    return (height * rnp.sin(2 * np.pi * rnp.arange(length) / period + phase))[..., None]


def loss(model: Forecaster, key: rlx.Array) -> rlx.Array:
    """The error of the next value, where the past is long enough, and of a forecast."""
    x = waves(key, 32, PAST + FUTURE)
    said, values = continued(model, x[:, :PAST], FUTURE)
    following = rnp.mean(rnp.square(said[:, 12:-1] - x[:, 13:PAST]))
    return following + rnp.mean(rnp.square(values - x[:, PAST:, 0]))


def train(model: Forecaster, steps: int) -> Forecaster:
    optimizer = optim.AdamW(optim.schedules.one_cycle(1e-2, steps))

    @rlx.jit(donate=["model", "state"])
    def step(
        model: Forecaster, state: optim.State, key: rlx.Array
    ) -> tuple[Forecaster, optim.State, rlx.Array]:
        value, grads = rlx.value_and_grad(loss)(model, key)
        grads, _ = optim.clip_by_global_norm(grads, 1.0)
        return *optimizer.update(grads, state, model), value

    state, losses = optimizer.init(model), []
    for number in range(steps):
        model, state, value = step(model, state, random.fold_in(random.key(1), number))
        losses.append(float(value))
        if number % max(1, steps // 5) == 0 or number + 1 == steps:
            print(f"step {number + 1:4d}  loss {losses[-1]:.4f}")
    return model


def plot(values: np.ndarray, guessed: np.ndarray, height: int = 12) -> str:
    """The true values as dots and the forecast as stars, one column each."""
    rows = [[" "] * len(values) for _ in range(height)]
    for series, mark in ((values, "."), (guessed, "*")):
        for column, value in enumerate(series):
            row = round((1.1 - value) / 2.2 * (height - 1))
            rows[min(max(row, 0), height - 1)][column] = mark
    return "\n".join("".join(row) for row in rows)


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    model = train(Forecaster(32, random.key(0)), steps)
    for known in (60, 120):  # the past may be of any length: one trace
        whole = 0.8 * np.sin(2 * np.pi * np.arange(known + 60) / 23 + 1)
        past = rnp.asarray(whole[None, :known, None].astype(np.float32))
        values = np.asarray(forecast(model, past, 60))[0]
        error = np.sqrt(np.mean((values - whole[known:]) ** 2))
        spread = np.sqrt(np.mean((whole[known:] - whole[known:].mean()) ** 2))
        print(f"{known} values known: error of the next 60 {error:.3f}; spread {spread:.3f}")
    print(plot(whole[known:], values))
    print(f"traces: {len(forecast.variants())}")


if __name__ == "__main__":
    main()
