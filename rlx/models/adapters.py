"""LoRA adapters: y + (x · A) · B beside the matmul with a weight, chosen for each request.

A and B are states of the graph, bound before a run. Executables are made for the set of adapted
weights and for a rank, rounded up to a power of two: adapters of one shape share them, and a change
of adapter is a change of pointers. Or A · B is added to float weights once: `merged`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path

import numpy as np

from rlx.backends.buffer import Allocator, Buffer
from rlx.errors import OptionError
from rlx.ir.op import Array
from rlx.specialize.variant import make_key
from rlx.support.records import dataclass

_LEAST_RANK = 8


@dataclass(frozen=True)
class LowRank:
    """The low-rank update of a weight [out, in]: b · a. With DoRA the rows of the sum have lengths
    of their own, which only merged weights can have."""

    a: Array  # f32 [rank, in]
    b: Array  # f32 [out, rank], with the adapter's scale in it
    magnitude: Array | None = None  # f32 [out]: the lengths of rows

    def merged(self, weight: Array) -> Array:
        """The f32 weight with the update in it."""
        total: Array = weight + self.b @ self.a
        if self.magnitude is None:
            return total
        return total * (self.magnitude / np.linalg.norm(total, axis=1))[:, None]


@dataclass(frozen=True)
class AdapterShape:
    """What executables depend on: the names of the adapted weights, and a rank."""

    weights: tuple[str, ...]
    rank: int

    @cached_property
    def name(self) -> str:
        return make_key("adapter", {"weights": self.weights, "rank": self.rank})[:16]


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter in memory, for one model."""

    path: Path
    parts: Mapping[str, LowRank]  # by the names of weights

    @cached_property
    def shape(self) -> AdapterShape:
        rank = max(_LEAST_RANK, *(len(part.a) for part in self.parts.values()))
        return AdapterShape(tuple(sorted(self.parts)), 1 << (rank - 1).bit_length())

    @property
    def has_magnitudes(self) -> bool:
        return any(part.magnitude is not None for part in self.parts.values())

    @cached_property
    def digest(self) -> str:
        """A hash of its updates."""
        found = sha256()
        for weight, part in sorted(self.parts.items()):
            found.update(f"{weight} {part.a.shape} {part.b.shape}".encode())
            found.update(part.a.tobytes() + part.b.tobytes())
            found.update(b"" if part.magnitude is None else part.magnitude.tobytes())
        return found.hexdigest()

    @cached_property
    def states(self) -> dict[str, Array]:
        """A [in, rank] and B [rank, out] of each weight, padded to the rank with zeros."""
        found = stacked([self], self.shape)
        return {name: array[1] for name, array in found.items()}

    def buffers(self, allocator: Allocator) -> dict[str, Buffer]:
        """`states` in a device's memory, copied there once."""
        if allocator not in self._buffers:
            put = allocator.put
            self._buffers[allocator] = {name: put(array) for name, array in self.states.items()}
        return self._buffers[allocator]

    @cached_property
    def _buffers(self) -> dict[Allocator, dict[str, Buffer]]:
        return {}


def common_shape(adapters: Sequence[Adapter]) -> AdapterShape:
    """The shape that all of them fit."""
    weights = {name for adapter in adapters for name in adapter.parts}
    return AdapterShape(tuple(sorted(weights)), max(adapter.shape.rank for adapter in adapters))


def stacked(adapters: Sequence[Adapter], shape: AdapterShape) -> dict[str, Array]:
    """A [1 + adapters, in, rank] and B [1 + adapters, rank, out] of each weight of a shape.

    The first of each is zero, and so are weights and ranks that an adapter does not have."""
    found: dict[str, Array] = {}
    for i, adapter in enumerate(adapters):
        for weight, part in adapter.parts.items():
            rank, (out, inner) = len(part.a), (len(part.b), part.a.shape[1])
            first, second = state_names(weight)
            many = 1 + len(adapters)
            a = found.setdefault(first, np.zeros((many, inner, shape.rank), np.float32))
            b = found.setdefault(second, np.zeros((many, shape.rank, out), np.float32))
            a[1 + i, :, :rank], b[1 + i, :rank] = part.a.T, part.b.T
    return found


def find_adapter(adapters: Mapping[str, Adapter], name: str | None) -> Adapter | None:
    """The loaded adapter of this name; None for None."""
    if name is None:
        return None
    if name not in adapters:
        raise OptionError(
            "no such adapter", where="adapter", got=name,
            expected=", ".join(adapters) or "one that was loaded",
        )  # fmt: skip
    return adapters[name]


def state_names(weight: str) -> tuple[str, str]:
    return f"{weight}.lora_a", f"{weight}.lora_b"


def merged(adapters: Sequence[Adapter]) -> dict[str, Callable[[Array], Array]]:
    """Functions that merge adapters into weights, by the name of the weight."""
    names = {name for adapter in adapters for name in adapter.parts}
    parts = {n: [a.parts[n] for a in adapters if n in a.parts] for n in names}
    return {name: partial(_sum, parts[name]) for name in names}


def _sum(parts: Sequence[LowRank], weight: Array) -> Array:
    total = weight.astype(np.float32)
    for part in parts:
        total = part.merged(total)
    return total.astype(weight.dtype)
