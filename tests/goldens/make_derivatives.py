"""Makes derivatives.npz: derivatives by JAX and PyTorch, for tests/arrays. Needs both.

python tests/goldens/make_derivatives.py

With other draws and another file (--first N --draws N --out FILE) it is the peer of
`python -m bench gradients`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "arrays"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "nn"))
from derivative_cases import ARRAYS, DRAWS, EDGES, Case, directions
from make_nn import Attention, Decoder
from nn_cases import FUNCTIONS, LAYERS

jax.config.update("jax_enable_x64", True)
KEPT: dict[str, np.ndarray] = {}
NN_GOLDENS = np.load(Path(__file__).with_name("nn.npz"))


FIXED = {"batch norm": "bc", "smoothed": "c", "weighted none": "c", "bce logits": "cd",
         "kl": "b"}  # fmt: skip
"""Inputs by which torch does not differentiate: running statistics, weights; and the target of the
Kullback-Leibler divergence, where it has NaN at a target of 0."""


def keep(name: str, x: Any) -> None:
    """In 32 bits: seven digits tell a right derivative from a wrong one."""
    x = x.numpy(force=True) if isinstance(x, torch.Tensor) else np.asarray(x)
    KEPT[name] = x.astype(np.complex64 if x.dtype.kind == "c" else np.float32)


def by_jax(case: Case, draws: range) -> None:
    for draw in draws:
        arrays = case.arrays(draw)
        moving = {k: jnp.asarray(v) for k, v in arrays.items() if v.dtype.kind in "fc"}
        fixed = {k: jnp.asarray(v) for k, v in arrays.items() if k not in moving}

        def f(moving: Any, fixed: Any = fixed) -> Any:
            names = {"np": jnp, "jax": jax, **fixed, **moving}
            return eval(case.peer or case.expression, names)

        like = jax.eval_shape(f, moving)
        ct = directions(case, draw, {"y": np.empty(like.shape, like.dtype)}, "ct")["y"]
        vs = directions(case, draw, moving, "v")

        def pulled(moving: Any, f: Any = f, ct: Any = ct) -> Any:
            return jax.vjp(f, moving)[1](jnp.asarray(ct))[0]

        def along(moving: Any, pulled: Any = pulled, vs: Any = vs) -> Any:
            cts = pulled(moving)
            return sum(jnp.sum(jnp.real(cts[k] * v)) for k, v in vs.items())

        both = jax.grad(along) if case.is_smooth else lambda moving: {}
        cts, second = jax.jit(lambda x, a=pulled, b=both: (a(x), b(x)))(moving)
        for k in moving:
            keep(f"{case.name}/{draw}/d{k}", cts[k])
            if case.is_smooth:
                keep(f"{case.name}/{draw}/dd{k}", second[k])


NAMES = {"torch": torch, "F": F, "nn": nn, "Attention": Attention, "Decoder": Decoder}


def _tensor(x: Any) -> torch.Tensor:
    x = torch.from_numpy(np.array(x))
    return x.double().requires_grad_() if x.dtype.is_floating_point else x


def by_torch(name: str, f: Any, arrays: dict[str, Any], case: Any, draw: int = 0) -> None:
    tensors = {k: _tensor(v) for k, v in arrays.items()}
    for k in FIXED.get(case.name, ""):
        tensors[k].requires_grad_(False)
    moving = {k: v for k, v in tensors.items() if v.requires_grad}
    y = f(tensors)
    if not y.requires_grad:
        return
    ct = directions(case, draw, {"y": y.detach().numpy()}, "ct")["y"]
    vs = directions(case, draw, arrays, "v")
    found = torch.autograd.grad(
        y, list(moving.values()), torch.tensor(ct), create_graph=True, allow_unused=True
    )
    for k, x in zip(moving, found, strict=True):
        if x is not None:
            keep(f"{name}/{draw}/d{k}", x.detach())
    if not getattr(case, "is_smooth", True):
        return
    along = [(x * torch.tensor(vs[k])).sum() for k, x in zip(moving, found, strict=True)
             if x is not None and x.requires_grad]  # fmt: skip
    if not along:
        return
    try:
        second = torch.autograd.grad(sum(along), list(moving.values()), allow_unused=True)
    except RuntimeError as error:  # of some functions torch has first derivatives alone
        if "is not implemented" not in str(error):
            raise
        return
    for k, x in zip(moving, second, strict=True):
        if x is not None:
            keep(f"{name}/{draw}/dd{k}", x)


def of_layer(case: Any) -> None:
    layer = eval(case.torch or case.expression, NAMES)
    state = layer.state_dict()
    for k in state:
        state[k] = torch.from_numpy(NN_GOLDENS[f"layer {case.name}/state/{k}"].copy())
    inner = getattr(layer, "layer", layer)  # without the wrappers of make_nn.py
    inner.load_state_dict(state)
    for mode in ("eval", "train") if "BatchNorm" in case.expression else ("eval",):
        layer.double().train(mode == "train")
        arrays = case.arrays()
        tensors = {k: _tensor(v) for k, v in arrays.items()}
        y = layer(*tensors.values())
        y = y[0] if isinstance(y, tuple) else y
        ct = directions(case, 0, {"y": y.detach().numpy()}, "ct")["y"]
        params = dict(inner.named_parameters())
        wanted = {**{k: v for k, v in tensors.items() if v.requires_grad}, **params}
        found = torch.autograd.grad(y, list(wanted.values()), torch.tensor(ct), allow_unused=True)
        for (k, x), ours in zip(wanted.items(), found, strict=True):
            if k in params:  # the whole of it would be many numbers
                v = directions(case, 0, {k: x.detach().numpy()}, f"param {k}")[k]
                keep(f"layer {case.name}/{mode}/{k}", (ours * torch.tensor(v)).sum())
            else:
                keep(f"layer {case.name}/{mode}/d{k}", ours)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--out", default=str(Path(__file__).with_name("derivatives.npz")))
    given = parser.parse_args()
    with sdpa_kernel(SDPBackend.MATH):  # the one that has second derivatives
        all_of_torch(given.first, given.draws)
    for case in ARRAYS:
        by_jax(case, case.draws(given.first, given.draws))
    np.savez_compressed(given.out, **KEPT)


def all_of_torch(first: int, draws: int) -> None:
    for case in EDGES:
        for draw in case.draws(first, draws):

            def f(tensors: Any, case: Case = case) -> Any:
                return eval(case.peer or case.expression, {**NAMES, **tensors})

            by_torch(case.name, f, case.arrays(draw), case, draw)
    for case in FUNCTIONS:

        def g(tensors: Any, case: Any = case) -> Any:
            return eval(case.torch or case.expression, {**NAMES, **tensors})

        by_torch(f"F {case.name}", g, case.arrays(), case)
    for case in LAYERS:
        of_layer(case)


if __name__ == "__main__":
    main()
