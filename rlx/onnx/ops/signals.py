"""Fourier transforms, windows, mel weights, determinants."""

from __future__ import annotations

from typing import Any

import numpy as np

import rlx.numpy as xp
from rlx.numpy import fft
from rlx.numpy.array import Array
from rlx.onnx.call import Call
from rlx.onnx.table import op


def _complex(x: Array) -> Array:
    """[…, 1] real or […, 2] complex, as complex numbers."""
    if x.shape[-1] == 1:
        return xp.squeeze(x, -1)
    kind = xp.complex128 if x.dtype is xp.float64 else xp.complex64
    return x[..., 0].astype(kind) + x[..., 1].astype(kind) * 1j


def _pairs(x: Array) -> Array:
    return xp.stack([xp.real(x), xp.imag(x)], axis=-1)


def _transformed(
    node: Call, x: Array, length: int | None, axis: int, one_sided: bool, inverse: bool
) -> Array:
    axis = axis + x.ndim if axis < 0 else axis
    if not 0 <= axis < x.ndim - 1:
        raise node.fault("axis out of range", got=axis)
    kind = x.dtype
    given = _complex(x.astype(xp.float64))  # so that zeros of large sums are zeros
    n = length or int(given.shape[axis])
    if one_sided and inverse:
        made = xp.expand_dims(fft.irfft(given, n=length, axis=axis), -1)
    elif one_sided:
        if x.shape[-1] != 1:
            raise node.fault("a one-sided transform of complex numbers")
        made = _pairs(fft.rfft(given, n=n, axis=axis))
    else:
        whole = given if given.dtype.kind == "complex" else given + 0j
        made = _pairs((fft.ifft if inverse else fft.fft)(whole, n=n, axis=axis))
    return made.astype(kind)


@op("DFT", since=20, known=(1, 2))
def dft(node: Call, x: Array, length: Any = None, axis: Any = None) -> Array:
    at = -2 if axis is None else int(np.reshape(axis, -1)[0])
    return _dft(node, x, length, at)


@op("DFT", since=17, known=(1,))
def dft_17(node: Call, x: Array, length: Any = None) -> Array:
    return _dft(node, x, length, node.int("axis", 1))


def _dft(node: Call, x: Array, length: Any, axis: int) -> Array:
    count = None if length is None else int(np.reshape(length, -1)[0])
    one_sided, inverse = bool(node.int("onesided", 0)), bool(node.int("inverse", 0))
    return _transformed(node, x, count, axis, one_sided, inverse)


@op("STFT", since=17, known=(1, 3))
def stft(node: Call, x: Array, step: Any, window: Array | None = None, length: Any = None) -> Array:
    hop = int(np.reshape(step, -1)[0])
    if length is not None:
        size = int(np.reshape(length, -1)[0])
    elif window is not None:
        size = int(window.shape[0])
    else:
        raise node.fault("neither a window nor the length of a frame")
    if hop < 1 or size < 1:
        raise node.fault("not a frame", got=f"step {hop}, length {size}")
    count = (x.shape[1] - size) // hop + 1
    starts = xp.reshape(xp.arange(count) * hop, (-1, 1))
    frames = xp.take(_complex(x), starts + xp.arange(size), axis=1)
    if window is not None:
        width = int(window.shape[0])
        left = (size - width) // 2
        wide = xp.concat([
            xp.zeros((left,), dtype=window.dtype), window,
            xp.zeros((size - width - left,), dtype=window.dtype),
        ]) if size > width else window  # fmt: skip
        frames = frames * wide.astype(x.dtype)
    if node.int("onesided", 1) and frames.dtype.kind != "complex":
        return _pairs(fft.rfft(frames, axis=2)).astype(x.dtype)
    whole = frames if frames.dtype.kind == "complex" else frames + 0j
    made = _pairs(fft.fft(whole, axis=2)).astype(x.dtype)
    return made[:, :, : size // 2 + 1] if node.int("onesided", 1) else made


def _window(name: str, terms: tuple[float, ...]) -> None:
    @op(name, since=17, known=(0,))
    def window(node: Call, size: Any) -> Array:
        """Σ (−1)ᵏ aₖ cos(2πki / n), with n one less for a symmetric window."""
        count = int(np.reshape(size, -1)[0])
        kind = node.dtype("output_datatype", 1)
        span = count if node.int("periodic", 1) else count - 1
        angle = xp.arange(count, dtype=xp.float64) * (2 * np.pi / max(span, 1))
        made: Any = xp.full((count,), terms[0], dtype=xp.float64)
        for k, term in enumerate(terms[1:], 1):
            made = made + (-1) ** k * term * xp.cos(angle * k)
        return made.astype(kind)  # type: ignore[no-any-return]


_window("HannWindow", (0.5, 0.5))
_window("HammingWindow", (25 / 46, 21 / 46))
_window("BlackmanWindow", (0.42, 0.5, 0.08))


@op("MelWeightMatrix", since=17, on_host=True)
def mel_weight_matrix(node: Call, bins: Any, length: Any, rate: Any, low: Any, high: Any) -> Any:
    """Triangles over the terms of a transform, their corners evenly spaced in mel."""
    count, size = int(bins), int(length)
    if not 0 < count < 2**20 or not 0 < size < 2**24:
        raise node.fault("not a size", got=f"{count} bins of {size}")
    step = (_to_mel(float(high)) - _to_mel(float(low))) / (count + 2)
    edges = _to_mel(float(low)) + step * np.arange(count + 2)
    hertz = 700.0 * (np.power(10.0, edges / 2595.0) - 1.0)
    places = ((size + 1) * hertz / float(rate)).astype(np.int64)
    made = np.zeros((size // 2 + 1, count))
    for i in range(count):
        first, middle, last = places[i : i + 3]
        if middle == first:
            made[middle, i] = 1.0
        else:
            made[first : middle + 1, i] = np.arange(middle - first + 1) / (middle - first)
        if last > middle:
            made[middle:last, i] = (last - np.arange(middle, last)) / (last - middle)
    return made.astype(node.element_type("output_datatype", 1))


def _to_mel(hertz: float) -> float:
    return float(2595.0 * np.log10(1.0 + hertz / 700.0))


@op("Det")
def det(node: Call, x: Array) -> Array:
    return xp.linalg.det(x)
