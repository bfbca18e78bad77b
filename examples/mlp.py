"""A multilayer perceptron learns three spirals: forward, backward and update in one program.

python examples/mlp.py [STEPS]

The gradients are written out, as in a textbook. One trace serves every batch size.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

import rlx
import rlx.numpy as rnp


@dataclass
class Layer:
    weight: rlx.Array
    bias: rlx.Array


Network = list[Layer]


def network(sizes: list[int], seed: int = 0) -> Network:
    """Layers of these widths, with He's initialisation."""
    rng = np.random.default_rng(seed)
    return [
        Layer(
            rnp.asarray(rng.normal(0, (2 / a) ** 0.5, (a, b)).astype(np.float32)),
            rnp.zeros(b),
        )
        for a, b in pairwise(sizes)
    ]


def forward(layers: Network, x: rlx.Array) -> list[rlx.Array]:
    """The input of every layer, and the logits."""
    seen = [x]
    for i, layer in enumerate(layers):
        x = x @ layer.weight + layer.bias
        x = rnp.maximum(x, 0.0) if i + 1 < len(layers) else x
        seen.append(x)
    return seen


@rlx.jit
def predict(layers: Network, x: rlx.Array) -> rlx.Array:
    """The likeliest class of each row."""
    return rnp.argmax(forward(layers, x)[-1], axis=-1)


@rlx.jit
def step(
    layers: Network, x: rlx.Array, labels: rlx.Array, rate: float
) -> tuple[Network, rlx.Array]:
    """One step of gradient descent on the cross-entropy; returns the new layers and the loss."""
    *inputs, logits = forward(layers, x)
    rows = x.shape[0]
    wanted = rnp.astype(labels[:, None] == rnp.arange(logits.shape[1]), rnp.float32)
    loss = -rnp.sum(wanted * rnp.log_softmax(logits)) / rows
    slope = (rnp.softmax(logits) - wanted) / rows  # of the loss, by the logits
    updated: Network = []
    for i in range(len(layers) - 1, -1, -1):
        layer, given = layers[i], inputs[i]
        by_weight, by_bias = given.mT @ slope, rnp.sum(slope, axis=0)
        slope = (slope @ layer.weight.mT) * (given > 0)
        updated.insert(0, Layer(layer.weight - rate * by_weight, layer.bias - rate * by_bias))
    return updated, loss


def spirals(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points on three arms of a spiral, with some noise, and the arm of each."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, count)
    radius = np.sqrt(rng.uniform(0.01, 1, count))
    angle = 7 * radius + labels * 2 * np.pi / 3 + rng.normal(0, 0.12, count)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    return points.astype(np.float32), labels


def drawing(layers: Network, width: int = 44, height: int = 20) -> str:
    """The plane, with the class that each place is given."""
    y, x = np.mgrid[1 : -1 : height * 1j, -1 : 1 : width * 1j]
    places = np.stack([x.ravel(), y.ravel()], 1).astype(np.float32)
    classes = np.asarray(predict(layers, rnp.asarray(places))).reshape(height, width)
    return "\n".join("".join(".o#"[c] for c in row) for row in classes)


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    layers = network([2, 64, 64, 3])
    points, labels = spirals(512, seed=1)
    for number in range(steps):
        rate = 0.5 * (1 - number / steps) + 0.01
        layers, loss = step(layers, rnp.asarray(points), rnp.asarray(labels), rate)
        if number % max(1, steps // 5) == 0:
            print(f"step {number:5d}  loss {float(loss):.4f}")
    points, labels = spirals(2000, seed=2)
    right = np.mean(np.asarray(predict(layers, rnp.asarray(points))) == labels)
    print(f"{100 * right:.1f} % of 2000 new points are right\n")
    print(drawing(layers))
    print(f"\ntraces of step: {len(step.variants())}")


if __name__ == "__main__":
    main()
