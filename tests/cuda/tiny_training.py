"""A tiny GPT that learns to repeat what it was given, for the checks of a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import rlx
import rlx.numpy as rnp
from rlx import nn, optim
from rlx.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        # no bias: that of keys has no gradient but rounding
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def __call__(self, x: rlx.Array) -> rlx.Array:
        batch, length, width = x.shape
        rows = rnp.reshape(self.qkv(self.norm1(x)), (batch, length, 3, self.heads, -1))
        q, k, v = rnp.unstack(rnp.permute_dims(rows, (2, 0, 3, 1, 4)))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(rnp.reshape(rnp.permute_dims(mixed, (0, 2, 1, 3)), (batch, length, width)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, vocab: int, context: int, width: int, heads: int, layers: int) -> None:
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def __call__(self, ids: rlx.Array, targets: rlx.Array) -> rlx.Array:
        x = self.tokens(ids) + self.positions(rnp.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(self.norm(x), self.tokens.weight), targets)


def weights_of(model: nn.Module) -> dict[str, rlx.Array]:
    """Fresh weights, the same in every process."""
    rng = np.random.default_rng(7)
    found = {}
    for name, p in model.named_parameters().items():
        values = rng.normal(size=p.shape) / np.sqrt(p.shape[-1])
        found[name] = rnp.asarray((values if len(p.shape) > 1 else 1 + values / 8).astype("f4"))
    return found


def batches(vocab: int, context: int, count: int, size: int = 4) -> Iterator[Any]:
    """Rows of numbers, each a few above the one before: what comes next can be learned."""
    rng = np.random.default_rng(1)
    for _ in range(count):
        first, step = rng.integers(0, vocab, (size, 1)), rng.integers(1, 3, (size, 1))
        rows = ((first + step * np.arange(context + 1)) % vocab).astype(np.int32)
        yield rnp.asarray(rows[:, :-1].copy()), rnp.asarray(rows[:, 1:].copy())


def make_step(model: nn.Module, params: Any, device: str) -> tuple[Any, Any]:
    """A jitted step, and the state of its optimiser."""
    optimizer = optim.AdamW(0.01, mask=optim.matrices_only)

    def step(params: Any, state: Any, ids: rlx.Array, targets: rlx.Array) -> Any:
        def loss(params: Any) -> rlx.Array:
            return nn.functional_call(model, params, ids, targets)

        value, grads = rlx.value_and_grad(loss)(params)
        return *optimizer.update(grads, state, params), value

    with rlx.default_device("reference"):
        state = optimizer.init(params)
    return rlx.jit(step, device=device), state
