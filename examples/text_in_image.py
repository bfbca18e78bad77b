"""Text in an image, found and read: three ONNX models of PP-OCR on RLX.

    python examples/text_in_image.py [IMAGE]

Needs Pillow. Without an image it draws one. The detector marks the pixels of lines, each line is
cut out and turned if it is upside down, and the recogniser reads it; lines of any length are the
same compiled code.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

import rlx
from rlx.formats.fetch import fetch

MARKED, HEIGHT = 0.3, 48  # probability of a pixel of text; rows of a line


def drawn() -> Image.Image:
    image = Image.new("RGB", (640, 260), "white")
    draw = ImageDraw.Draw(image)
    for y, text in ((40, "Any model, any size"), (150, "native code in milliseconds")):
        draw.text((40, y), text, "black", ImageFont.load_default(42))
    return image


def scaled(image: Image.Image, width: int, height: int, mean: Any, spread: Any) -> np.ndarray:
    """[1, 3, height, width] in the order that the models were trained with: blue first."""
    pixels = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR), np.float32)
    made = (pixels[:, :, ::-1] / 255 - np.array(mean, "f4")) / np.array(spread, "f4")
    return np.ascontiguousarray(made.transpose(2, 0, 1)[None])


def boxes(marked: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Left, top, right and bottom of each group of neighbours, from top to bottom."""
    left = marked.copy()
    found = []
    for y, x in np.argwhere(marked):
        if not left[y, x]:
            continue
        left[y, x] = False
        group, at = [(y, x)], 0
        while at < len(group):
            row, column = group[at]
            at += 1
            for r, c in ((row - 1, column), (row + 1, column), (row, column - 1),
                         (row, column + 1)):  # fmt: skip
                if 0 <= r < left.shape[0] and 0 <= c < left.shape[1] and left[r, c]:
                    left[r, c] = False
                    group.append((r, c))
        rows, columns = np.array(group).T
        if len(group) > 30:
            found.append((columns.min(), rows.min(), columns.max() + 1, rows.max() + 1))
    return [tuple(int(n) for n in box) for box in found]  # type: ignore[misc]


def lines(detector: rlx.OnnxModel, image: Image.Image) -> list[Image.Image]:
    """The lines of text. Marks are narrower than letters: boxes grow by a share of their height."""
    width, height = (max(32, round(n / 32) * 32) for n in image.size)
    x = scaled(image, width, height, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    (found,) = detector.run(x=x)
    across, down = image.width / width, image.height / height
    parts = []
    for left, top, right, bottom in boxes(found[0, 0] > MARKED):
        more = 0.4 * (bottom - top)
        box = (left - more, top - more, right + more, bottom + more)
        scale = (across, down, across, down)
        parts.append(image.crop(tuple(round(b * s) for b, s in zip(box, scale, strict=True))))  # type: ignore[arg-type]
    return parts


def upright(classifier: rlx.OnnxModel, line: Image.Image) -> Image.Image:
    (p,) = classifier.run(x=scaled(line, 192, 48, (0.5,) * 3, (0.5,) * 3))
    return line.rotate(180) if p[0, 1] > 0.9 else line


def text_of(recogniser: rlx.OnnxModel, line: Image.Image) -> str:
    """The likeliest letter of each column; a letter twice in a row is one, 0 is none."""
    width = max(HEIGHT, round(line.width * HEIGHT / line.height))
    (p,) = recogniser.run(x=scaled(line, width, HEIGHT, (0.5,) * 3, (0.5,) * 3))
    letters = ["", *recogniser.file.metadata["character"].split("\n"), " "]
    best = p[0].argmax(-1)
    kept = best[np.flatnonzero(np.diff(best, prepend=-1))]
    return "".join(letters[i] for i in kept)


def main() -> None:
    image = Image.open(sys.argv[1]).convert("RGB") if len(sys.argv) > 1 else drawn()
    folder = fetch("rapidocr")
    models = [rlx.load(folder / f"{name}.onnx") for name in ("det", "cls", "rec")]
    detector, classifier, recogniser = (m for m in models if isinstance(m, rlx.OnnxModel))
    for line in lines(detector, image):
        print(text_of(recogniser, upright(classifier, line)))


if __name__ == "__main__":
    main()
