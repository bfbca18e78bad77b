"""A convolutional network learns to read handwritten digits, in seconds.

python examples/digits_cnn.py [EPOCHS] [--save digits.safetensors]

Needs scikit-learn for its 1,797 images of 8 × 8 pixels. A step is one program: images moved at
random, forward, backward, statistics of the batch norms, update.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from sklearn.datasets import load_digits  # type: ignore[import-untyped]

import rlx
import rlx.numpy as rnp
from rlx import data, nn, optim, random
from rlx.nn import functional as F

TRAINED, BATCH = 1200, 60  # images to train on; the others, by other writers, are the test


Batch = dict[str, rlx.Array]  # images [n, 1, 8, 8], from 0 to 1, and digits


def network(key: rlx.Array) -> nn.Sequential:
    """The layers as PyTorch has them: the weights that `--save` writes fit there too."""
    a, b, c = random.split(key, 3)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, key=a), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, key=b), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(512, 10, key=c),
    )  # fmt: skip


def moved(images: rlx.Array, key: rlx.Array) -> rlx.Array:
    """Each image moved by up to a pixel in both directions, by a draw of its own."""
    corners = random.randint(key, (images.shape[0], 2), 0, 3)

    def cut(image: rlx.Array, corner: rlx.Array) -> rlx.Array:
        rows = rnp.take(image, corner[0] + rnp.arange(8), axis=1)
        return rnp.take(rows, corner[1] + rnp.arange(8), axis=2)

    return rlx.vmap(cut)(F.pad(images, (1, 1, 1, 1)), corners)


def loss(model: nn.Sequential, batch: Batch, key: rlx.Array) -> tuple[rlx.Array, nn.Sequential]:
    """The loss, and the model, whose batch norms have new statistics."""
    a, b = random.split(key)
    logits = model(moved(batch["images"], a), key=b)
    return F.cross_entropy(logits, batch["digits"]), model


def train(
    model: nn.Sequential, batches: data.Loader, epochs: int
) -> tuple[nn.Sequential, list[float]]:
    """The model after so many epochs, and the mean loss of each."""
    steps = epochs * len(batches)
    optimizer = optim.AdamW(optim.schedules.one_cycle(1e-2, steps), weight_decay=0.05)

    @rlx.jit(donate=["model", "state"])
    def step(
        model: nn.Sequential, state: optim.State, batch: Batch, key: rlx.Array
    ) -> tuple[nn.Sequential, optim.State, rlx.Array]:
        (value, model), grads = rlx.value_and_grad(loss, has_aux=True)(model, batch, key)
        model, state = optimizer.update(grads, state, model)
        return model, state, value

    state, key, losses = optimizer.init(model), random.key(1), []
    for epoch in range(epochs):
        values = []
        for batch in batches:
            key, own = random.split(key)
            model, state, value = step(model, state, batch, own)
            values.append(value)
        losses.append(float(np.mean(values)))
        if epoch % max(1, epochs // 5) == 0 or epoch + 1 == epochs:
            print(f"epoch {epoch + 1:3d}  loss {losses[-1]:.4f}")
    return model, losses


@rlx.jit
def probabilities(model: nn.Sequential, images: rlx.Array) -> rlx.Array:
    """How likely each digit is for each image [n, 1, 8, 8]."""
    return rnp.softmax(model(images), axis=-1)


def curve(losses: list[float], width: int = 40) -> str:
    """The losses as a line of bars, on a logarithmic scale."""
    parts = [
        float(np.mean(part)) for part in np.array_split(np.log(losses), min(width, len(losses)))
    ]
    low, high = min(parts), max(parts)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (x - low) / (high - low or 1))] for x in parts)


def drawing(image: np.ndarray) -> list[str]:
    return ["".join(" .:-=+*#%@"[int(9 * p)] * 2 for p in row) for row in image]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("epochs", type=int, nargs="?", default=20)
    parser.add_argument("--save", help="where to write the weights, as safetensors")
    given = parser.parse_args()
    pixels, digits = load_digits(return_X_y=True)
    images = (np.asarray(pixels) / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    known = {"images": images[:TRAINED], "digits": digits[:TRAINED]}
    began = time.perf_counter()
    model, losses = train(network(random.key(0)), data.Loader(known, BATCH), given.epochs)
    print(f"{curve(losses)}  {time.perf_counter() - began:.1f} s")
    model.eval()  # no dropout, and the running statistics
    likely = np.asarray(probabilities(model, rnp.asarray(images[TRAINED:])))
    right = np.mean(likely.argmax(1) == digits[TRAINED:])
    print(f"{100 * right:.2f} % of {len(likely)} images of other writers are right")
    unsure = int(likely.max(1).argmin())
    first, second = np.argsort(-likely[unsure])[:2]
    print(f"\nThe hardest: {first} ({likely[unsure, first]:.2f}) or {second}?")
    print("\n".join(drawing(images[TRAINED + unsure, 0])))
    if given.save:
        model.save(given.save)


if __name__ == "__main__":
    main()
