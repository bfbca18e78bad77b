"""The models of `bench train` in JAX: one jitted step, with donated parameters and moments."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import train_models as models

VERSION = jax.__version__
Tree = dict[str, Any]


def norm(p: Tree, name: str, x: Any) -> Any:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def linear(p: Tree, name: str, x: Any) -> Any:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def gpt(p: Tree, ids: Any, targets: Any, *, sizes: models.Gpt) -> Any:
    batch, length = ids.shape
    x = p["tokens.weight"][ids] + p["positions.weight"]
    for i in range(sizes.layers):
        at = f"blocks.{i}."
        rows = linear(p, at + "qkv", norm(p, at + "norm1", x))
        q, k, v = jnp.moveaxis(rows.reshape(batch, length, 3, sizes.heads, -1), 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(p, at + "out", mixed.reshape(batch, length, -1))
        hidden = jax.nn.gelu(linear(p, at + "up", norm(p, at + "norm2", x)), approximate=False)
        x = x + linear(p, at + "down", hidden)
    return cross_entropy(norm(p, "norm", x) @ p["tokens.weight"].T, targets)


def cnn(p: Tree, x: Any, targets: Any, *, sizes: models.Cnn) -> Any:
    for i in range(len(sizes.channels) - 1):
        x = jax.lax.conv(x, p[f"convs.{i}.weight"], (1, 1), "SAME")
        x = x + p[f"convs.{i}.bias"][:, None, None]
        mean, var = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
        x = (x - mean) * jax.lax.rsqrt(var + 1e-5)
        x = x * p[f"norms.{i}.weight"][:, None, None] + p[f"norms.{i}.bias"][:, None, None]
        x = jax.nn.relu(x)
        if i:
            window = (1, 1, 2, 2)
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
    return cross_entropy(linear(p, "head", x.reshape(len(x), -1)), targets)


def cross_entropy(logits: Any, targets: Any) -> Any:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
    return -chosen.mean()


def adamw(p: Any, g: Any, m: Any, v: Any, step: Any) -> tuple[Any, Any, Any]:
    one, two = models.BETAS
    p = p * (1 - models.RATE * models.DECAY) if p.ndim > 1 else p
    m, v = m + (g - m) * (1 - one), v * two + g * g * (1 - two)
    root = jnp.sqrt(v) / jnp.sqrt(1 - two**step) + 1e-8
    return p - models.RATE / (1 - one**step) * m / root, m, v


def update(
    params: Tree, means: Tree, squares: Tree, step: Any, x: Any, y: Any, *, loss: Any
) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x, y)
    length = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
    scale = jnp.minimum(models.CLIP / (length + 1e-6), 1.0)
    made = {k: adamw(params[k], g * scale, means[k], squares[k], step) for k, g in grads.items()}
    return (*({k: x[i] for k, x in made.items()} for i in range(3)), step + 1, value)


class Trainer:
    def __init__(self, model: str, sizes: Any, weights: models.Weights, library: str,
                 threads: int) -> None:  # fmt: skip
        loss = functools.partial(gpt if model == "gpt" else cnn, sizes=sizes)
        self.update = jax.jit(functools.partial(update, loss=loss), donate_argnums=(0, 1, 2, 3))
        params = {k: jnp.asarray(x) for k, x in weights.items()}
        zeros = [{k: jnp.zeros_like(x) for k, x in params.items()} for _ in range(2)]
        self.state: Any = params, *zeros, jnp.asarray(1.0)

    def step(self, x: Any, y: Any) -> float:
        *self.state, loss = self.update(*self.state, jnp.asarray(x), jnp.asarray(y))
        return float(loss)
