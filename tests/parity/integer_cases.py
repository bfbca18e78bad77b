"""The part of the table that is about products of 8-bit integers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from cases import Arg, Case

_POINTS = {"u8": np.array(131, np.uint8), "i8": np.array(-7, np.int8)}


def convolutions() -> Iterator[Case]:
    rng = np.random.default_rng(4)

    def filters(*dims: int) -> Any:
        return rng.integers(-128, 128, dims).astype(np.int8)

    for t, other in (("u8", "i8"), ("i8", "u8")):
        row = {"x": Arg(("n", 4, 11), t, -128, 255)}
        yield Case(
            "conv_integer", f"{t}-1d", row,
            lambda g, *v: g.conv_integer(*v, stride=(2,), padding=(1,)),
            consts={"w": filters(6, 4, 3), "z": _POINTS[t]},
        )  # fmt: skip
        image = {"x": Arg(("n", 8, 7, 9), t, -128, 255)}
        consts = {"w": filters(6, 8, 3, 2), "z": _POINTS[t]}
        consts |= {"s": rng.uniform(1e-4, 2e-3, 6).astype(np.float32), "y": _POINTS[other]}
        consts |= {"b": rng.integers(-9999, 9999, 6).astype(np.int32)}
        yield Case(
            "qlinear_conv", f"{t}-{other}", image,
            lambda g, *v: g.qlinear_conv(*v, padding=(1, 0), dilation=(2, 1)), consts=consts,
        )  # fmt: skip
        yield Case(
            "qlinear_conv", f"{t}-relu", image,
            lambda g, *v: g.qlinear_conv(*v[:5], activation="relu"), consts=consts,
        )  # fmt: skip
    depthwise = {"w": filters(8, 1, 3, 3), "z": _POINTS["u8"]}
    yield Case(
        "conv_integer", "u8-depthwise", {"x": Arg(("n", 8, 7, 9), "u8", 0, 255)},
        lambda g, *v: g.conv_integer(*v, groups=8), consts=depthwise,
    )  # fmt: skip


INTEGER = (convolutions,)
