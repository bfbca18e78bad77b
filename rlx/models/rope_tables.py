"""Rotary position embedding: tables of cosines and sines, with every kind of context scaling."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlx.errors import UnsupportedError
from rlx.ir.op import Array
from rlx.support.records import dataclass

LONG_ROPE = "rope.long"  # state: 1 where a sequence has the long factors of longrope, else 0
Table = Any  # f32 [positions, n_rot / 2]


@dataclass(frozen=True)
class RopeConfig:
    """Base, number of rotated dimensions, and context scaling."""

    theta: float = 10000.0
    n_rot: int = 0  # 0: the whole head
    interleaved: bool = False
    scaling: str = "none"  # none, linear, ntk, llama3, yarn, longrope, proportional
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0  # 0: what the scaling's own formula says
    whole_steps: bool = True  # yarn rounds the bounds of its ramp to whole dimensions
    log_factor: float = 0.0  # of log(factor) / 10 in the scale of latent attention with yarn
    long_factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    proportion: float = 1.0  # of the dimensions of each head that proportional scaling rotates

    def switches_at(self, context: int) -> int:
        """The longest sequence with short factors of longrope, where a context goes beyond it; a
        longer one has long factors throughout. 0: there is one set of frequencies."""
        beyond = self.scaling == "longrope" and context > self.original_context
        return self.original_context if beyond else 0


def rope_tables(
    rope: RopeConfig, head_dim: int, context: int, factors: Any = None
) -> tuple[Table, Table]:
    """cos and sin for positions below `context`; `factors` divide the frequencies.

    Where longrope switches in this context, those with long factors follow those with short ones.
    """
    n_rot = rope.n_rot or head_dim
    frequencies, parts = _frequencies(rope, n_rot), []
    for length in (0, context) if rope.switches_at(context) else (0,):
        scaled, scale = _scaled(rope, frequencies, n_rot, length, factors)
        angles = np.arange(context, dtype=np.float64)[:, None] * scaled
        parts.append((np.cos(angles) * scale, np.sin(angles) * scale))
    cos, sin = (np.concatenate(part).astype(np.float32) for part in zip(*parts, strict=True))
    return cos, sin


def frequency_factors(rope: RopeConfig, head_dim: int) -> Any:
    """The factor that divides each frequency, within the original context."""
    n_rot = rope.n_rot or head_dim
    frequencies = _frequencies(rope, n_rot)
    return frequencies / _scaled(rope, frequencies, n_rot, rope.original_context, None)[0]


def _frequencies(rope: RopeConfig, n_rot: int) -> Any:
    return rope.theta ** (-np.arange(0, n_rot, 2, dtype=np.float64) / n_rot)


def _scaled(
    rope: RopeConfig, frequencies: Any, n_rot: int, length: int, factors: Any
) -> tuple[Any, float]:
    if factors is not None:
        return frequencies / np.asarray(factors, np.float64), 1.0
    if rope.scaling == "none":
        return frequencies, 1.0
    if rope.scaling == "linear":
        return frequencies / rope.factor, 1.0
    if rope.scaling == "ntk":  # a larger base
        steps = np.arange(2, n_rot + 2, 2, dtype=np.float64) / n_rot
        return frequencies / rope.factor**steps, 1.0
    if rope.scaling == "llama3":
        return _llama3(rope, frequencies), 1.0
    if rope.scaling == "yarn":
        return _yarn(rope, frequencies, n_rot)
    if rope.scaling == "longrope":
        return _longrope(rope, frequencies, length)
    if rope.scaling == "proportional":
        turned = np.arange(n_rot // 2) < int(rope.proportion * n_rot // 2)
        return np.where(turned, frequencies / rope.factor, 0.0), 1.0
    known = "none, linear, ntk, llama3, yarn, longrope, proportional"
    raise UnsupportedError("unknown rope scaling", got=rope.scaling, expected=known)


def _llama3(rope: RopeConfig, frequencies: Any) -> Any:
    """Low frequencies are divided, high ones kept, those between interpolated."""
    waves = 2 * math.pi / frequencies
    low = rope.original_context / rope.low_freq_factor
    high = rope.original_context / rope.high_freq_factor
    blend = (rope.original_context / waves - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - blend) * frequencies / rope.factor + blend * frequencies
    stretched = np.where(waves > low, frequencies / rope.factor, frequencies)
    return np.where((waves <= low) & (waves >= high), between, stretched)


def _yarn(rope: RopeConfig, frequencies: Any, n_rot: int) -> tuple[Any, float]:
    """High frequencies are kept, low ones divided, with a ramp between."""

    def dimension(turns: float) -> float:
        wave = rope.original_context / (turns * 2 * math.pi)
        return n_rot * math.log(wave) / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.whole_steps:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, n_rot - 1)
    ramp = (np.arange(n_rot // 2) - first) / (0.001 if first == last else last - first)
    kept = 1 - np.clip(ramp, 0, 1)
    scale = rope.attention_factor or 0.1 * math.log(rope.factor) + 1.0
    return frequencies / rope.factor * (1 - kept) + frequencies * kept, scale


def _longrope(rope: RopeConfig, frequencies: Any, length: int) -> tuple[Any, float]:
    """One set of factors for sequences within the original context, another for longer ones."""
    factors = rope.long_factors if length > rope.original_context else rope.short_factors
    return frequencies / np.asarray(factors, np.float64), rope.attention_factor or 1.0


def pairs_together(rows: Array, heads: int) -> Array:
    """Rows from half-split to interleaved pairs."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def pairs_apart(rows: Array, heads: int) -> Array:
    """Rows from interleaved to half-split pairs."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
