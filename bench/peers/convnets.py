"""Convolutional networks with random weights, written once for every engine.

A network is a function of a builder `b`, which has a method per layer; `b.conv` takes the sizes
and draws the weights, the same for each builder. Layers are those of the exported files: batch
norm is folded, hard-swish and squeeze-and-excitation are ops of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class Weights:
    """Random weights by the order in which layers ask for them."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.known: list[np.ndarray] = []
        self.next = 0

    def restart(self) -> None:
        self.next = 0

    def draw(self, *shape: int) -> np.ndarray:
        """Activations keep their scale through a layer with such weights."""
        if self.next == len(self.known):
            fan = int(np.prod(shape[1:])) if len(shape) > 1 else 400
            w = self.rng.normal(size=shape) * (1.4 / np.sqrt(fan))
            self.known.append(w.astype(np.float32))
        self.next += 1
        return self.known[self.next - 1]


def resnet50(b: Any, x: Any) -> Any:
    x = b.pool(b.conv(x, 3, 64, 7, 2, act="relu"), 3, 2)
    channels = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            y = b.conv(x, channels, width, 1, act="relu")
            y = b.conv(y, width, width, 3, stride, act="relu")
            y = b.conv(y, width, width * 4, 1, gain=0.3)
            if not block:
                x = b.conv(x, channels, width * 4, 1, stride)
            x = b.act(b.add(y, x), "relu")
            channels = width * 4
    return b.linear(b.mean(x), 2048, 1000)


# kernel, expanded, out, squeeze, activation, stride
_LARGE = (
    (3, 16, 16, False, "relu", 1), (3, 64, 24, False, "relu", 2), (3, 72, 24, False, "relu", 1),
    (5, 72, 40, True, "relu", 2), (5, 120, 40, True, "relu", 1), (5, 120, 40, True, "relu", 1),
    (3, 240, 80, False, "hardswish", 2), (3, 200, 80, False, "hardswish", 1),
    (3, 184, 80, False, "hardswish", 1), (3, 184, 80, False, "hardswish", 1),
    (3, 480, 112, True, "hardswish", 1), (3, 672, 112, True, "hardswish", 1),
    (5, 672, 160, True, "hardswish", 2), (5, 960, 160, True, "hardswish", 1),
    (5, 960, 160, True, "hardswish", 1),
)  # fmt: skip


def _squeeze(b: Any, x: Any, channels: int, between: int) -> Any:
    s = b.conv(b.mean(x, keep=True), channels, between, 1, act="relu")
    return b.mul(x, b.conv(s, between, channels, 1, act="hardsigmoid"))


def _inverted(
    b: Any, x: Any, given: int, k: int, wide: int, out: int, se: bool, act: str, stride: Any
) -> Any:
    y = x if wide == given else b.conv(x, given, wide, 1, act=act)
    y = b.conv(y, wide, wide, k, stride, groups=wide, act=act)
    if se:
        y = _squeeze(b, y, wide, -(-wide // 32) * 8)
    y = b.conv(y, wide, out, 1)
    return b.add(y, x) if given == out and stride == 1 else y


def mobilenet_v3(b: Any, x: Any) -> Any:
    x, channels = b.conv(x, 3, 16, 3, 2, act="hardswish"), 16
    for k, wide, out, se, act, stride in _LARGE:
        x, channels = _inverted(b, x, channels, k, wide, out, se, act, stride), out
    x = b.mean(b.conv(x, 160, 960, 1, act="hardswish"))
    return b.linear(b.act(b.linear(x, 960, 1280), "hardswish"), 1280, 1000)


def text_detector(b: Any, x: Any) -> Any:
    """Like PP-OCR's: a small MobileNetV3, a feature pyramid, transposed convolutions."""
    x, channels, levels = b.conv(x, 3, 8, 3, 2, act="hardswish"), 8, []
    scaled = [(k, w // 2, max(8, o // 2), se, a, s) for k, w, o, se, a, s in _LARGE]
    for i, (k, wide, out, se, act, stride) in enumerate(scaled):
        if stride == 2 and i:
            levels.append((x, channels))
        x, channels = _inverted(b, x, channels, k, wide, out, se, act, stride), out
    levels = [*levels[1:], (b.conv(x, channels, 480, 1, act="hardswish"), 480)]
    tops = [b.conv(v, c, 96, 1) for v, c in levels]
    merged = [tops[-1]]
    for top in tops[-2::-1]:
        merged.append(b.add(top, b.upsample(merged[-1], 2)))
    smooth = [b.conv(v, 96, 24, 3) for v in merged]
    smooth = [b.upsample(v, 2 ** (len(smooth) - 1 - i)) for i, v in enumerate(smooth)]
    y = b.conv(b.concat(smooth), 24 * len(smooth), 24, 3, act="relu")
    y = b.act(b.conv_transpose(y, 24, 24, 2), "relu")
    return b.act(b.conv_transpose(y, 24, 1, 2), "sigmoid")


def text_recogniser(b: Any, x: Any) -> Any:
    """Like PP-OCR's: the height is folded away, then an LSTM in both directions."""
    x, channels = b.conv(x, 3, 16, 3, 2, act="hardswish"), 16
    for i, (k, wide, out, se, act, stride) in enumerate(_LARGE):
        down: Any = (2, 1) if stride == 2 and i else 1
        x, channels = _inverted(b, x, channels, k, wide, out, se, act, down), out
    x = b.conv(x, 160, 480, 1, act="hardswish")
    x = b.sequence(b.pool(x, (2, 2), (2, 2), padding=0))
    x = b.lstm(b.lstm(x, 480, 96), 192, 96)
    return b.linear(x, 192, 6625)


NETS: dict[str, tuple[Callable[[Any, Any], Any], tuple[int, int, int]]] = {
    "resnet50": (resnet50, (3, 224, 224)),
    "mobilenet_v3": (mobilenet_v3, (3, 224, 224)),
    "text_detector": (text_detector, (3, 480, 640)),
    "text_recogniser": (text_recogniser, (3, 48, 320)),
}
