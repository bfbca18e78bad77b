"""Convolutions, pooling and resizing as layers; images are [batch, channels, …]."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import rlx.numpy as rnp
from rlx.errors import AttributeValueError
from rlx.nn import functional as F
from rlx.nn.dense import drawn
from rlx.nn.functional.operands import ArrayLike, per_axis
from rlx.nn.module import Module
from rlx.numpy.array import Array

Axes = int | Sequence[int]


class _Convolution(Module):
    """A weight [out, in / groups, *kernel] that starts uniform in ±1/√fan_in, as in PyTorch."""

    rank: ClassVar[int]
    transposed: ClassVar[bool] = False
    function: ClassVar[Callable[..., Array]]
    weight: Array
    bias: Array | None

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Axes, stride: Axes = 1,
        padding: Axes | str = 0, dilation: Axes = 1, groups: int = 1, bias: bool = True, *,
        key: Array | None = None, dtype: Any = rnp.float32,
    ) -> None:  # fmt: skip
        name, rank = type(self).__name__, self.rank
        if in_channels % groups or out_channels % groups:
            raise AttributeValueError(
                "channels do not split into groups", where=name, expected=f"multiples of {groups}",
                got=f"{in_channels} and {out_channels}",
            )  # fmt: skip
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = per_axis(kernel_size, rank, name)
        self.stride = per_axis(stride, rank, name)
        self.padding = padding if isinstance(padding, str) else per_axis(padding, rank, name)
        self.dilation = per_axis(dilation, rank, name)
        outer = (out_channels, in_channels // groups)
        if self.transposed:
            outer = (in_channels, out_channels // groups)
        bound = 1 / math.sqrt(outer[1] * math.prod(self.kernel_size))
        self.weight = drawn(key, 0, (*outer, *self.kernel_size), bound, dtype)
        self.bias = drawn(key, 1, (out_channels,), bound, dtype) if bias else None

    def __call__(self, x: ArrayLike) -> Array:
        return type(self).function(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )

    def extra_repr(self) -> str:
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        parts.append(f"stride={self.stride}")
        if isinstance(self.padding, str) or any(self.padding):
            parts.append(f"padding={self.padding}")
        if set(self.dilation) != {1}:
            parts.append(f"dilation={self.dilation}")
        if self.groups != 1:
            parts.append(f"groups={self.groups}")
        return ", ".join(parts if self.bias is not None else [*parts, "bias=False"])


class Conv1d(_Convolution):
    """`functional.conv1d`."""

    rank, function = 1, staticmethod(F.conv1d)


class Conv2d(_Convolution):
    """`functional.conv2d`."""

    rank, function = 2, staticmethod(F.conv2d)


class Conv3d(_Convolution):
    """`functional.conv3d`."""

    rank, function = 3, staticmethod(F.conv3d)


class _Transposed(_Convolution):
    """A weight [in, out / groups, *kernel]."""

    transposed = True

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Axes, stride: Axes = 1,
        padding: Axes = 0, output_padding: Axes = 0, groups: int = 1, bias: bool = True,
        dilation: Axes = 1, *, key: Array | None = None, dtype: Any = rnp.float32,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            key=key, dtype=dtype,
        )  # fmt: skip
        self.output_padding = per_axis(output_padding, self.rank, type(self).__name__)

    def __call__(self, x: ArrayLike) -> Array:
        return type(self).function(
            x, self.weight, self.bias, self.stride, self.padding, self.output_padding, self.groups,
            self.dilation,
        )  # fmt: skip


class ConvTranspose1d(_Transposed):
    """`functional.conv_transpose1d`."""

    rank, function = 1, staticmethod(F.conv_transpose1d)


class ConvTranspose2d(_Transposed):
    """`functional.conv_transpose2d`."""

    rank, function = 2, staticmethod(F.conv_transpose2d)


class ConvTranspose3d(_Transposed):
    """`functional.conv_transpose3d`."""

    rank, function = 3, staticmethod(F.conv_transpose3d)


# -- pooling ----------------------------------------------------------------------------------


class _Pool(Module):
    function: ClassVar[Callable[..., Array]]

    def __init__(self, kernel_size: Axes, stride: Axes | None = None, padding: Axes = 0) -> None:
        self.kernel_size = _static(kernel_size)
        self.stride = self.kernel_size if stride is None else _static(stride)
        self.padding = _static(padding)

    def __call__(self, x: ArrayLike) -> Array:
        return type(self).function(x, self.kernel_size, self.stride, self.padding)

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


def _static(axes: Any) -> Any:
    """Numbers that are hashable."""
    return tuple(axes) if isinstance(axes, (list, tuple)) else axes


class MaxPool1d(_Pool):
    """`functional.max_pool1d`."""

    function = staticmethod(F.max_pool1d)


class MaxPool2d(_Pool):
    """`functional.max_pool2d`."""

    function = staticmethod(F.max_pool2d)


class MaxPool3d(_Pool):
    """`functional.max_pool3d`."""

    function = staticmethod(F.max_pool3d)


class _AvgPool(_Pool):
    def __init__(
        self, kernel_size: Axes, stride: Axes | None = None, padding: Axes = 0,
        count_include_pad: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(kernel_size, stride, padding)
        self.count_include_pad = count_include_pad

    def __call__(self, x: ArrayLike) -> Array:
        return type(self).function(
            x, self.kernel_size, self.stride, self.padding, self.count_include_pad
        )


class AvgPool1d(_AvgPool):
    """`functional.avg_pool1d`."""

    function = staticmethod(F.avg_pool1d)


class AvgPool2d(_AvgPool):
    """`functional.avg_pool2d`."""

    function = staticmethod(F.avg_pool2d)


class AvgPool3d(_AvgPool):
    """`functional.avg_pool3d`."""

    function = staticmethod(F.avg_pool3d)


class _Adaptive(Module):
    function: ClassVar[Callable[..., Array]]

    def __init__(self, output_size: Any) -> None:
        self.output_size = _static(output_size)

    def __call__(self, x: ArrayLike) -> Array:
        return type(self).function(x, self.output_size)

    def extra_repr(self) -> str:
        return f"output_size={self.output_size}"


class AdaptiveAvgPool1d(_Adaptive):
    """`functional.adaptive_avg_pool1d`."""

    function = staticmethod(F.adaptive_avg_pool1d)


class AdaptiveAvgPool2d(_Adaptive):
    """`functional.adaptive_avg_pool2d`."""

    function = staticmethod(F.adaptive_avg_pool2d)


class AdaptiveAvgPool3d(_Adaptive):
    """`functional.adaptive_avg_pool3d`."""

    function = staticmethod(F.adaptive_avg_pool3d)


class AdaptiveMaxPool1d(_Adaptive):
    """`functional.adaptive_max_pool1d`."""

    function = staticmethod(F.adaptive_max_pool1d)


class AdaptiveMaxPool2d(_Adaptive):
    """`functional.adaptive_max_pool2d`."""

    function = staticmethod(F.adaptive_max_pool2d)


# -- sizes ------------------------------------------------------------------------------------


class Upsample(Module):
    """`functional.interpolate`."""

    def __init__(
        self, size: Axes | None = None, scale_factor: int | None = None, mode: str = "nearest",
        align_corners: bool = False,
    ) -> None:  # fmt: skip
        self.size, self.scale_factor = _static(size), scale_factor
        self.mode, self.align_corners = mode, align_corners

    def __call__(self, x: ArrayLike) -> Array:
        return F.interpolate(x, self.size, self.scale_factor, self.mode, self.align_corners)

    def extra_repr(self) -> str:
        size = f"scale_factor={self.scale_factor}" if self.size is None else f"size={self.size}"
        return f"{size}, mode={self.mode!r}"


class PixelShuffle(Module):
    """`functional.pixel_shuffle`."""

    def __init__(self, upscale_factor: int) -> None:
        self.upscale_factor = upscale_factor

    def __call__(self, x: ArrayLike) -> Array:
        return F.pixel_shuffle(x, self.upscale_factor)

    def extra_repr(self) -> str:
        return f"upscale_factor={self.upscale_factor}"


class ZeroPad2d(Module):
    """Zeros around images: one number, or (left, right, top, bottom)."""

    def __init__(self, padding: Axes) -> None:
        self.padding = per_axis(padding, 4, "ZeroPad2d")

    def __call__(self, x: ArrayLike) -> Array:
        return F.pad(x, self.padding)

    def extra_repr(self) -> str:
        return f"{self.padding}"
