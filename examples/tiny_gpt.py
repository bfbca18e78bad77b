"""A tiny GPT with a KV cache sorts digits, token by token.

python examples/tiny_gpt.py [DIGITS]

One jitted function serves the prompt and the steps behind it. The cache is donated: it is written
in place. `examples/weights/train.py` made the weights, with PyTorch.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

import rlx
import rlx.numpy as rnp
from rlx import nn
from rlx.nn import functional as F

WEIGHTS = Path(__file__).parent / "weights" / "sorter.safetensors"
WIDTH, HEADS, LAYERS, CONTEXT, SEPARATOR = 48, 4, 2, 32, 10
Cache = list[tuple[rlx.Array, rlx.Array]]  # keys and values of each layer


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and beside a residual."""

    def __init__(self) -> None:
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def __call__(
        self, x: rlx.Array, cache: tuple[rlx.Array, rlx.Array], start: rlx.Array
    ) -> tuple[rlx.Array, tuple[rlx.Array, rlx.Array]]:
        batch, length, _ = x.shape
        rows = rnp.reshape(self.qkv(self.norm1(x)), (batch, length, 3, HEADS, -1))
        q, k, v = rnp.unstack(rnp.permute_dims(rows, (2, 0, 3, 1, 4)))
        keys = F.update_cache(cache[0], k, start)
        values = F.update_cache(cache[1], v, start)
        mask = F.cache_mask(q, keys, start)  # each token sees those before it, and itself
        mixed = F.scaled_dot_product_attention(q, keys, values, mask)
        mixed = rnp.reshape(rnp.permute_dims(mixed, (0, 2, 1, 3)), (batch, length, WIDTH))
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x)))), (keys, values)


class Sorter(nn.Module):
    """Reads digits and a separator, then says the digits in order."""

    def __init__(self) -> None:
        self.tokens, self.positions = nn.Embedding(11, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11, bias=False)

    def __call__(self, ids: rlx.Array, cache: Cache, start: rlx.Array) -> tuple[rlx.Array, Cache]:
        """The logits behind the last of some tokens [batch, length], and the new cache."""
        x = self.tokens(ids) + self.positions(start + rnp.arange(ids.shape[1]))
        kept = []
        for block, own in zip(self.blocks, cache, strict=True):
            x, own = block(x, own, start)
            kept.append(own)
        return self.head(self.norm(x[:, -1])), kept


@rlx.jit(donate=["cache"])
def step(model: Sorter, ids: rlx.Array, cache: Cache, start: rlx.Array) -> tuple[rlx.Array, Cache]:
    """The likeliest next token of each row [batch, 1], and the cache with these tokens in it."""
    logits, cache = model(ids, cache, start)
    return rnp.argmax(logits, axis=-1, keepdims=True), cache


def empty(batch: int) -> Cache:
    shape = (batch, HEADS, CONTEXT, WIDTH // HEADS)
    return [(rnp.zeros(shape), rnp.zeros(shape)) for _ in range(LAYERS)]


def sort(model: Sorter, lists: np.ndarray) -> np.ndarray:
    """Lists of digits [batch, length] in order, as the network says them."""
    batch, length = lists.shape
    ids = rnp.asarray(np.pad(lists, ((0, 0), (0, 1)), constant_values=SEPARATOR))
    cache, said, position = empty(batch), [], 0
    for _ in range(length):
        token, cache = step(model, ids, cache, rnp.asarray(position))
        position += ids.shape[1]
        said.append(np.asarray(token))
        ids = token
    return np.concatenate(said, axis=1)


def main() -> None:
    text = sys.argv[1] if len(sys.argv) > 1 else "31415926535"
    if not text.isdigit() or not 2 <= len(text) <= 14:
        raise SystemExit(f"{text}: expected 2 to 14 digits, such as 314159")
    model = Sorter()
    model.load(WEIGHTS)
    print(f"{text} -> {''.join(map(str, sort(model, np.array([[int(c) for c in text]]))[0]))}")
    rng = np.random.default_rng(0)
    right, tokens, began = [], 0, time.perf_counter()
    for length in (5, 8, 12):
        lists = rng.integers(0, 10, (64, length))
        right.append(np.mean(np.all(sort(model, lists) == np.sort(lists, axis=1), axis=1)))
        tokens += lists.size
    spent = time.perf_counter() - began
    print(f"{100 * np.mean(right):.1f} % of 192 lists sorted; {tokens / spent:.0f} tokens/s")
    print(f"traces: {len(step.variants())}")


if __name__ == "__main__":
    main()
