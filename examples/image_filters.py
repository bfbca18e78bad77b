"""Image filters as jitted functions: blur, edges, sharpening, contrast, for images of any size.

python examples/image_filters.py [IMAGE.ppm] [--out SHEET.png]

Without an image it draws one. All results go side by side into one PNG file.
"""

from __future__ import annotations

import argparse
import struct
import zlib
from pathlib import Path

import numpy as np

import rlx
import rlx.numpy as rnp


@rlx.jit
def grey(image: rlx.Array) -> rlx.Array:
    """Luma of an RGB image [height, width, 3] in 0 … 1."""
    return image @ rnp.asarray([0.299, 0.587, 0.114])


def shifted(image: rlx.Array, down: int, right: int) -> rlx.Array:
    """The image moved by some pixels; pixels from outside repeat the border."""
    height, width = image.shape
    rows = rnp.clip(rnp.arange(height) - down, 0, height - 1)
    columns = rnp.clip(rnp.arange(width) - right, 0, width - 1)
    return rnp.take(rnp.take(image, rows, axis=0), columns, axis=1)


@rlx.jit(static=["sigma"])
def blur(image: rlx.Array, sigma: float) -> rlx.Array:
    """A Gaussian blur: first along the columns, then along the rows."""
    radius = int(3 * sigma + 0.5)
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    weights /= weights.sum()
    for down, right in ((1, 0), (0, 1)):
        image = sum(
            (float(w) * shifted(image, down * i, right * i)
             for i, w in enumerate(weights, -radius)),
            rnp.zeros_like(image),
        )  # fmt: skip
    return image


@rlx.jit
def edges(image: rlx.Array) -> rlx.Array:
    """The length of the gradient by Sobel's operator."""
    across = shifted(image, 0, -1) - shifted(image, 0, 1)
    along = shifted(image, -1, 0) - shifted(image, 1, 0)
    dx = shifted(across, -1, 0) + 2 * across + shifted(across, 1, 0)
    dy = shifted(along, 0, -1) + 2 * along + shifted(along, 0, 1)
    return rnp.clip(rnp.hypot(dx, dy), max=1.0)


@rlx.jit
def stretch(image: rlx.Array) -> rlx.Array:
    """The contrast stretched to 0 … 1."""
    low, high = rnp.min(image), rnp.max(image)
    return (image - low) / rnp.maximum(high - low, 1e-6)


def sharpen(image: rlx.Array, amount: float = 1.5) -> rlx.Array:
    """Unsharp masking: what a blur takes away is added."""
    return rnp.clip(image + amount * (image - blur(image, 2.0)), 0.0, 1.0)


def drawn(height: int = 240, width: int = 320) -> np.ndarray:
    """A picture to filter: a sky, a sun, hills and some noise."""
    y, x = np.mgrid[0:height, 0:width] / height
    sky = np.stack([0.4 + 0.3 * y, 0.5 + 0.3 * y, 0.9 - 0.1 * y], -1)
    sun = ((x - 1.0) ** 2 + (y - 0.25) ** 2 < 0.01)[..., None]
    sky = np.where(sun, [1.0, 0.9, 0.5], sky)
    for depth, (frequency, base) in enumerate(((5, 0.55), (3, 0.7), (7, 0.85))):
        hill = (y > base + 0.07 * np.sin(frequency * x + depth))[..., None]
        sky = np.where(hill, np.array([0.2, 0.5, 0.25]) * (1 - 0.25 * depth), sky)
    noise = np.random.default_rng(0).normal(0, 0.02, sky.shape)
    return np.clip(sky + noise, 0, 1).astype(np.float32)


def read_ppm(path: Path) -> np.ndarray:
    """A binary PPM file (P6) as [height, width, 3] in 0 … 1."""
    magic, size, top, pixels = path.read_bytes().split(b"\n", 3)
    width, height = (int(n) for n in size.split())
    if magic != b"P6" or top != b"255" or len(pixels) < width * height * 3:
        raise SystemExit(f"{path}: expected a binary PPM file (P6, 8 bits, no comments)")
    data = np.frombuffer(pixels, np.uint8, width * height * 3)
    return data.reshape(height, width, 3).astype(np.float32) / 255


def write_png(path: Path, image: np.ndarray) -> None:
    """A grey image in 0 … 1 as an 8-bit PNG file."""
    data = (np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8)
    rows = b"".join(b"\0" + row.tobytes() for row in data)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", data.shape[1], data.shape[0], 8, 0, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("image", nargs="?", type=Path, help="a binary PPM file")
    parser.add_argument("--out", type=Path, default=Path("filters.png"), help="the sheet to write")
    given = parser.parse_args()
    image = grey(rnp.asarray(drawn() if given.image is None else read_ppm(given.image)))
    results = {
        "grey": image, "blur": blur(image, 3.0), "edges": edges(image),
        "sharpen": sharpen(image), "stretch": stretch(blur(image, 8.0)),
    }  # fmt: skip
    for name, result in results.items():
        values = np.asarray(result)
        print(f"{name:8s} mean {values.mean():.3f}  spread {values.std():.3f}")
    write_png(given.out, np.concatenate([np.asarray(r) for r in results.values()], axis=1))
    print(f"{image.shape[1]} x {image.shape[0]} pixels; wrote {given.out}")


if __name__ == "__main__":
    main()
