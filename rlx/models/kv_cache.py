"""What keys and values are kept as: plain elements, or blocks of Q8_0."""

from __future__ import annotations

from rlx.errors import OptionError
from rlx.ir.dtype import DType
from rlx.ir.quant import GGUF_SCHEMES, QuantScheme
from rlx.records import dataclass

NAMES = ("f16", "bf16", "f32", "q8_0")


@dataclass(frozen=True)
class CacheType:
    """The element type of a cache; bytes where a scheme packs each head of a token."""

    dtype: DType
    scheme: QuantScheme | None = None

    @staticmethod
    def of(name: str, head_dim: int) -> CacheType:
        """The type of that name, for heads of this size."""
        if name not in NAMES:
            raise OptionError("unknown cache type", where="kv", got=name, expected=", ".join(NAMES))
        if name != "q8_0":
            return CacheType(DType.of(name))
        scheme = GGUF_SCHEMES["Q8_0"]
        if head_dim % scheme.block_size:
            raise OptionError(
                "the model's heads are not whole blocks", where="kv", got=f"heads of {head_dim}",
                expected=f"a multiple of {scheme.block_size} for q8_0", hint="use kv=\"f16\"",
            )  # fmt: skip
        return CacheType(DType.of("u8"), scheme)

    def width(self, elements: int) -> int:
        """Stored elements of a row of so many numbers."""
        return elements if self.scheme is None else self.scheme.row_bytes(elements)

    def row_bytes(self, elements: int) -> int:
        return self.width(elements) * self.dtype.bytes
