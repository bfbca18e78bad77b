"""PyTorch's element types by name, and ours: neither side needs the other to be imported."""

from __future__ import annotations

from rlx.ir import dtype as dt
from rlx.ir.dtype import DType

ELEMENTS: dict[str, DType] = {
    "torch.float32": dt.f32,
    "torch.float16": dt.f16,
    "torch.bfloat16": dt.bf16,
    "torch.float64": dt.f64,
    "torch.int8": dt.i8,
    "torch.int16": dt.i16,
    "torch.int32": dt.i32,
    "torch.int64": dt.i64,
    "torch.uint8": dt.u8,
    "torch.bool": dt.bool_,
    "torch.complex64": dt.c64,
    "torch.complex128": dt.c128,
}
NAMES = {element: name for name, element in ELEMENTS.items()}


def element_of(dtype: object) -> DType:
    """The element type of a `torch.dtype`."""
    return ELEMENTS[str(dtype)]
