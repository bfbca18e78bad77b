"""A convolutional network reads handwritten digits, with weights from PyTorch.

python examples/digits_cnn.py

Needs scikit-learn for its 1,797 images of 8 × 8 pixels. `examples/weights/train.py` made the
weights.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits  # type: ignore[import-untyped]

import rlx
import rlx.numpy as rnp
from rlx import nn

WEIGHTS = Path(__file__).parent / "weights" / "digits.safetensors"


def network() -> nn.Sequential:
    """The layers as PyTorch has them, so that the names of its weights fit."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10),
    )  # fmt: skip
    model.load(WEIGHTS)
    return model.eval()


@rlx.jit
def probabilities(model: nn.Sequential, images: rlx.Array) -> rlx.Array:
    """How likely each digit is for each image [n, 1, 8, 8]."""
    return rnp.softmax(model(images), axis=-1)


def drawing(image: np.ndarray) -> list[str]:
    return ["".join(" .:-=+*#%@"[int(9 * p)] * 2 for p in row) for row in image]


def main() -> None:
    pixels, digits = load_digits(return_X_y=True)
    images = (np.asarray(pixels) / 16).astype(np.float32).reshape(-1, 8, 8)
    model = network()
    print(model)
    start = 1200  # the network was trained on the images before
    for count in (1, 10, len(images) - start):  # one trace and one set of kernels for any batch
        began = time.perf_counter()
        likely = np.asarray(probabilities(model, rnp.asarray(images[start : start + count, None])))
        spent = 1e3 * (time.perf_counter() - began)
        said = likely.argmax(1)
        right = np.mean(said == digits[start : start + count])
        print(f"{count:4d} images in {spent:6.1f} ms: {100 * right:.1f} % right")
    print(f"traces: {len(probabilities.variants())}")
    unsure = int(likely.max(1).argmin())
    first, second = np.argsort(-likely[unsure])[:2]
    print(f"\nThe hardest: {first} ({likely[unsure, first]:.2f}) or {second}?")
    print("\n".join(drawing(images[start + unsure])))


if __name__ == "__main__":
    main()
