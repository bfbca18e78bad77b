"""Types of arguments: `ArrayLike`, `DTypeLike`, `Axis`, `Sizes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from rlx.ir.dtype import DType, DTypeLike

if TYPE_CHECKING:
    from rlx.numpy.array import Array

__all__ = ["ArrayLike", "Axis", "DType", "DTypeLike", "Nested", "Number", "Sizes"]


class SupportsDLPack(Protocol):
    """An array of another library."""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, int]: ...


class SupportsArray(Protocol):
    """What converts itself to a NumPy array."""

    def __array__(self) -> np.ndarray[Any, Any]: ...


Number: TypeAlias = bool | int | float | complex
Nested: TypeAlias = "Sequence[Number | Array | np.ndarray[Any, Any] | np.generic | Nested]"
ArrayLike: TypeAlias = (
    "Array | np.ndarray[Any, Any] | np.generic | Number | Nested | SupportsDLPack | SupportsArray"
)
Axis: TypeAlias = int | Sequence[int] | None
Sizes: TypeAlias = int | Sequence[int]
