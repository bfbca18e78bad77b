"""What a model file holds, in numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.models.model_file import ModelFile


def parameters(model: ModelFile) -> int:
    """How many numbers the weights are."""
    return sum(math.prod(info.shape) for info in model.file.tensors.values())


def weight_types(model: ModelFile) -> dict[str, int]:
    """Bytes by storage type, the largest first."""
    found: dict[str, int] = {}
    for info in model.file.tensors.values():
        kind = info.scheme.name if info.scheme is not None else info.dtype.name
        found[kind] = found.get(kind, 0) + info.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def bytes_per_run(model: ModelFile) -> int:
    """What a token reads: every weight, but of experts those it is sent to, and of a table rows."""
    total = sum(info.nbytes for info in model.file.tensors.values())
    experts = model.config.experts
    if experts is not None:
        named = ((n, t.nbytes) for n, t in model.file.tensors.items())
        routed = sum(size for n, size in named if "_exps." in n or ".experts." in n)
        total -= routed - routed * experts.active // experts.count
    weights = model.weights()
    tied = not model.is_encoder and "output.weight" not in weights
    if tied:  # the table is the last matrix too
        return total
    return total - int(weights.get("token_embd.weight").array.nbytes)
