"""The models of `bench train` in RLX: one jitted step, updated in place."""

from __future__ import annotations

import functools
from typing import Any

import train_models as models

import rlx
import rlx.numpy as rnp
from rlx import nn, optim
from rlx.nn import functional as F

VERSION = rlx.__version__


class Block(nn.Module):
    def __init__(self, sizes: models.Gpt) -> None:
        w = sizes.width
        self.heads = sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(w), nn.LayerNorm(w)
        self.qkv, self.out = nn.Linear(w, 3 * w), nn.Linear(w, w)
        self.up, self.down = nn.Linear(w, 4 * w), nn.Linear(4 * w, w)

    def __call__(self, x: rlx.Array) -> rlx.Array:
        batch, length, width = x.shape
        rows = rnp.reshape(self.qkv(self.norm1(x)), (batch, length, 3, self.heads, -1))
        q, k, v = rnp.unstack(rnp.permute_dims(rows, (2, 0, 3, 1, 4)))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = rnp.reshape(rnp.permute_dims(mixed, (0, 2, 1, 3)), (batch, length, width))
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, sizes: models.Gpt) -> None:
        self.tokens = nn.Embedding(sizes.vocab, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.ModuleList([Block(sizes) for _ in range(sizes.layers)])
        self.norm = nn.LayerNorm(sizes.width)

    def __call__(self, ids: rlx.Array, targets: rlx.Array) -> rlx.Array:
        x = self.tokens(ids) + self.positions(rnp.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(self.norm(x), self.tokens.weight), targets)


class Cnn(nn.Module):
    def __init__(self, sizes: models.Cnn) -> None:
        pairs = list(zip(sizes.channels, sizes.channels[1:], strict=False))
        self.convs = nn.ModuleList([nn.Conv2d(a, b, 3, padding=1) for a, b in pairs])
        self.norms = nn.ModuleList([nn.BatchNorm2d(b, track_running_stats=False) for _, b in pairs])
        last = sizes.channels[-1] * (sizes.size // 4) ** 2
        self.head = nn.Linear(last, sizes.classes)

    def __call__(self, x: rlx.Array, targets: rlx.Array) -> rlx.Array:
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = F.relu(norm(conv(x)))
            if i:
                x = F.max_pool2d(x, 2)
        return F.cross_entropy(self.head(rnp.reshape(x, (x.shape[0], -1))), targets)


def update(optimizer: optim.Optimizer, model: Any, params: Any, state: Any, x: Any, y: Any) -> Any:
    def loss(params: Any) -> rlx.Array:
        return nn.functional_call(model, params, x, y)

    value, grads = rlx.value_and_grad(loss)(params)
    grads, _ = optim.clip_by_global_norm(grads, models.CLIP)
    return *optimizer.update(grads, state, params), value


class Trainer:
    def __init__(self, model: str, sizes: Any, weights: models.Weights, library: str,
                 threads: int) -> None:  # fmt: skip
        network = (Gpt if model == "gpt" else Cnn)(sizes)
        optimizer = optim.AdamW(
            models.RATE, *models.BETAS, weight_decay=models.DECAY, mask=optim.matrices_only
        )
        step = functools.partial(update, optimizer, network)
        self.update = rlx.jit(lambda params, state, x, y: step(params, state, x, y),
                              donate=["params", "state"])  # fmt: skip
        self.params: Any = {k: rnp.asarray(x, copy=True) for k, x in weights.items()}
        self.state: Any = optimizer.init(self.params)

    def step(self, x: Any, y: Any) -> float:
        self.params, self.state, loss = self.update(self.params, self.state, x, y)
        return float(loss)
