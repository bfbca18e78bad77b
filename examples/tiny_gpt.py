"""A tiny GPT learns to write like Python's manual, byte by byte, from nothing.

python examples/tiny_gpt.py [STEPS] [--folder run] [--text FILE] [--say "The "]

With `--folder` it keeps checkpoints: stop it when you like, and the same command goes on with the
same bits. With more STEPS it learns on.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

import rlx
import rlx.numpy as rnp
from rlx import data, nn, optim, random
from rlx.nn import functional as F

OPTIMIZER = optim.AdamW(
    optim.schedules.inverse_sqrt(3e-3, warmup=50),  # needs no last step
    beta2=0.95, weight_decay=0.1, mask=optim.matrices_only,
)  # fmt: skip


Batch = dict[str, rlx.Array]  # inputs, and targets: the inputs one byte further


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and beside a residual."""

    def __init__(self, width: int, key: rlx.Array) -> None:
        a, b, c = random.split(key, 3)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = nn.MultiHeadAttention(
            width, width // 32, bias=False, causal=True, rope_base=10000.0, key=a
        )
        self.up = nn.Linear(width, 4 * width, key=b)
        self.down = nn.Linear(4 * width, width, key=c)
        self.dropout = nn.Dropout(0.1)

    def __call__(self, x: rlx.Array, *, key: rlx.Array | None = None) -> rlx.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.forward(x), key=key)

    def step(self, x: rlx.Array, cache: nn.KVCache) -> tuple[rlx.Array, nn.KVCache]:
        """As a call, behind the tokens of a cache."""
        mixed, cache = self.attention.step(self.norm1(x), cache)
        x = x + mixed
        return x + self.forward(x), cache

    def forward(self, x: rlx.Array) -> rlx.Array:
        return self.down(F.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    def __init__(self, width: int, layers: int, key: rlx.Array) -> None:
        own, *keys = random.split(key, 1 + layers)
        self.bytes = nn.Embedding(256, width, key=own)
        self.blocks = nn.ModuleList([Block(width, k) for k in keys])
        self.norm = nn.RMSNorm(width)

    def __call__(self, ids: rlx.Array, *, key: rlx.Array | None = None) -> rlx.Array:
        """The logits of the next byte behind each of some bytes [batch, length]."""
        x = self.bytes(ids)
        for i, block in enumerate(self.blocks):
            x = block(x, key=None if key is None else random.fold_in(key, i))
        return self.logits(x)

    def step(self, ids: rlx.Array, caches: list[nn.KVCache]) -> tuple[rlx.Array, list[nn.KVCache]]:
        """The logits behind the last of some bytes that follow those in the caches."""
        x, kept = self.bytes(ids), []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block.step(x, cache)
            kept.append(cache)
        return self.logits(x[:, -1]), kept

    def logits(self, x: rlx.Array) -> rlx.Array:
        """The embedding is the head too: one array, used twice."""
        return F.linear(self.norm(x), self.bytes.weight) / math.sqrt(x.shape[-1])


# -- training -------------------------------------------------------------------------------------


def loss(model: TinyGPT, batch: Batch, key: rlx.Array | None = None) -> rlx.Array:
    return F.cross_entropy(model(batch["inputs"], key=key), batch["targets"])


@rlx.jit(donate=["model", "state"])
def train_step(
    model: TinyGPT, state: optim.State, batch: Batch, key: rlx.Array, number: int
) -> tuple[TinyGPT, optim.State, rlx.Array]:
    """Forward, backward and update: one program, and the weights are updated in place."""
    value, grads = rlx.value_and_grad(loss)(model, batch, random.fold_in(key, number))
    grads, _ = optim.clip_by_global_norm(grads, 1.0)
    model, state = OPTIMIZER.update(grads, state, model)
    return model, state, value


evaluate = rlx.jit(loss)


def train(now: dict[str, Any], batches: data.Loader, steps: int, folder: str | None) -> list[float]:
    """Bring `now` to so many steps; gives the losses on the way."""
    checkpoints = rlx.CheckpointManager(folder) if folder else None
    if checkpoints:
        now.update(checkpoints.restore(now))
        batches.load_state_dict(now["data"])
    if now["step"]:
        print(f"going on at step {now['step']}")
    losses, began, before = [], time.perf_counter(), now["step"]
    for batch in batches.repeat():
        if now["step"] >= steps:
            break
        given = now["model"], now["state"], batch, now["key"], now["step"]
        now["model"], now["state"], value = train_step(*given)
        losses.append(float(value))
        now |= {"step": now["step"] + 1, "data": batches.state_dict()}
        if now["step"] % max(1, steps // 10) == 0:
            done = (now["step"] - before) * batch["inputs"].size
            speed = done / (time.perf_counter() - began)
            print(f"step {now['step']:5d}  loss {losses[-1]:.3f}  {speed:6.0f} bytes/s", flush=True)
            if checkpoints:
                checkpoints.save(now["step"], now)
    return losses


def curve(losses: list[float], width: int = 60) -> str:
    """The losses as a line of bars."""
    parts = [float(np.mean(part)) for part in np.array_split(losses, min(width, len(losses)))]
    low, high = min(parts), max(parts)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (x - low) / (high - low or 1))] for x in parts)


# -- writing --------------------------------------------------------------------------------------


@rlx.jit(donate=["caches"])
def next_byte(
    model: TinyGPT, ids: rlx.Array, caches: list[nn.KVCache], key: rlx.Array
) -> tuple[rlx.Array, list[nn.KVCache]]:
    """A byte drawn behind some others, and the caches with these in it, written in place."""
    logits, caches = model.step(ids, caches)
    return random.categorical(key, logits / 0.7)[:, None], caches


def write(model: TinyGPT, text: str, count: int, key: rlx.Array) -> str:
    """The text, and so many bytes that the model writes behind it."""
    said = list(text.encode())
    caches = [b.attention.make_cache(1, len(said) + count) for b in model.blocks]
    ids = rnp.asarray([said])
    for i in range(count):
        ids, caches = next_byte(model, ids, caches, random.fold_in(key, i))
        said.append(int(ids[0, 0]))
    return bytes(said).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", type=int, nargs="?", default=600)
    parser.add_argument("--folder", help="where checkpoints are")
    parser.add_argument("--text", type=Path, help="a file to learn (default: Python's manual)")
    parser.add_argument("--say", default="The ", help="how its own text begins")
    for name, default in (("width", 128), ("layers", 4), ("context", 128), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    manual = "\n".join(topics.values()).encode()
    text = data.read_tokens(given.text) if given.text else np.frombuffer(manual, np.uint8)
    known, new = np.split(text, [len(text) * 19 // 20])
    batches = data.Loader(data.TokenWindows(known, given.context), given.batch, seed=0)
    model = TinyGPT(given.width, given.layers, random.key(0))
    now: dict[str, Any] = {
        "model": model, "state": OPTIMIZER.init(model), "key": random.key(1),
        "data": batches.state_dict(), "step": 0,
    }  # fmt: skip
    print(f"{model.num_parameters()} parameters, {len(known)} bytes of text")
    losses = train(now, batches, given.steps, given.folder)
    if losses:
        print(curve(losses))
    model = now["model"].eval()
    windows = data.TokenWindows(new, given.context)
    rest = windows.batch(np.arange(min(len(windows), 64)))
    value = evaluate(model, {name: rnp.asarray(x) for name, x in rest.items()})
    print(f"loss of text it has not seen {float(value):.3f}")
    print(write(model, given.say, 200, random.key(2)))
    digest = hashlib.sha256(b"".join(np.asarray(p).tobytes() for p in model.parameters()))
    print(f"weights {digest.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
