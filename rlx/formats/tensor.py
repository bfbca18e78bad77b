"""What a file says about one of its tensors, the same for every format."""

from __future__ import annotations

from rlx.ir.dtype import DType
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme
from rlx.records import dataclass

_PLAIN = {"f32": GGUF_SCHEMES["F32"], "f16": GGUF_SCHEMES["F16"], "bf16": GGUF_SCHEMES["BF16"]}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, logical shape (last axis contiguous), packing, and where the bytes are."""

    name: str
    shape: tuple[int, ...]
    dtype: DType  # of the stored array: u8 where `scheme` packs blocks
    scheme: QuantScheme | None  # None: plain integers, booleans, f64, fp8
    offset: int  # from the start of the file
    nbytes: int
    part: int = 0  # which file of a split or sharded model

    @property
    def packed(self) -> bool:
        """Whether the stored array holds blocks, not elements."""
        return self.scheme is not None and not self.scheme.is_float

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the stored array: [..., row_bytes] where packed, else `shape`."""
        if self.scheme is None or not self.packed:
            return self.shape
        return (*self.shape[:-1], self.scheme.row_bytes(self.shape[-1]))


def scheme_of(dtype: DType) -> QuantScheme | None:
    """The scheme of plain float weights."""
    return _PLAIN.get(dtype.name)
