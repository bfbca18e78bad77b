"""Gradients and second derivatives against those of JAX and PyTorch, over drawn shapes.

In f64 on the reference device. The goldens have 32 bits, of which one rounding of 6e-8 is off, and
sums of some dozens of terms; second derivatives cancel more.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "nn"))
import nn_cases
from derivative_cases import ARRAYS, EDGES, Case, directions
from own_derivatives import derivatives, distance, wide

import rlx
import rlx.numpy as rnp
from rlx import nn

_GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
GOLDENS = np.load(_GOLDENS / "derivatives.npz")
WEIGHTS = np.load(_GOLDENS / "nn.npz")
KNOWN = set(GOLDENS.files)
Arrays = dict[str, Any]
CLOSE = 1e-6


def close(found: Any, name: str) -> None:
    off = distance(found, GOLDENS[name])
    assert off <= CLOSE, f"{name}: off by {off}\n{found}\n{GOLDENS[name]}"


def compare(name: str, expression: str, case: Any, arrays: Arrays, draw: int = 0) -> None:
    for golden, found in derivatives(name, expression, case, arrays, KNOWN, draw):
        close(found, golden)


@pytest.mark.parametrize("case", [*ARRAYS, *EDGES], ids=lambda c: c.name)
def test_functions(case: Case) -> None:
    with rlx.default_device("reference"):
        for draw in case.draws():
            compare(case.name, case.expression, case, wide(case.arrays(draw)), draw)


DIFFERENTIABLE = [c for c in nn_cases.FUNCTIONS if any(n.startswith(f"F {c.name}/") for n in KNOWN)]


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda c: c.name)
def test_functions_of_networks(case: nn_cases.Case) -> None:
    with rlx.default_device("reference"):
        compare(f"F {case.name}", case.expression, case, wide(case.arrays()))


@pytest.mark.parametrize("case", nn_cases.LAYERS, ids=lambda c: c.name)
def test_layers(case: nn_cases.Case) -> None:
    prefix = f"layer {case.name}/state/"
    state = {n.removeprefix(prefix): WEIGHTS[n] for n in WEIGHTS.files if n.startswith(prefix)}
    layer = eval(case.expression, {"nn": nn}).load_state_dict(state)
    arrays = wide(case.arrays())
    moving = {k: v for k, v in arrays.items() if v.dtype.kind == "f"}
    for mode in ("eval", "train") if "BatchNorm" in case.expression else ("eval",):
        layer.train(mode == "train")
        params = {k: rnp.asarray(v, dtype="f8") for k, v in layer.named_parameters().items()}

        def f(params: Arrays, moving: Arrays, layer: Any) -> Any:
            own = layer.replaced(params)
            found = own(*{**arrays, **moving}.values())
            return found[0] if isinstance(found, tuple) else found, own

        def along(params: Arrays, moving: Arrays, layer: Any, ct: Any) -> Any:
            y, own = f(params, moving, layer)
            return rnp.sum(y * ct), own  # the module: its running statistics move

        with rlx.default_device("reference"):
            y = np.asarray(f(params, moving, layer)[0])
            ct = directions(case, 0, {"y": y}, "ct")["y"]
            (by_param, by_input), _ = rlx.grad(along, argnums=(0, 1), has_aux=True)(
                params, moving, layer, ct
            )
        for k, found in by_input.items():
            close(found, f"layer {case.name}/{mode}/d{k}")
        for k, found in by_param.items():
            v = directions(case, 0, {k: np.asarray(found)}, f"param {k}")[k]
            close(np.sum(np.asarray(found) * v), f"layer {case.name}/{mode}/{k}")


@pytest.mark.nightly
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda c: c.name)
def test_functions_of_networks_on_the_cpu(case: nn_cases.Case) -> None:
    """Compiled, in f64: the kernels of backward graphs."""
    compare(f"F {case.name}", case.expression, case, wide(case.arrays()))


@pytest.mark.nightly
@pytest.mark.parametrize("case", [*ARRAYS, *EDGES], ids=lambda c: c.name)
def test_functions_on_the_cpu(case: Case) -> None:
    compare(case.name, case.expression, case, wide(case.arrays(0)), 0)
