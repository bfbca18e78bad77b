"""How the weights of layers are kept in memory: as in the file, cast, or quantised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlx.errors import OptionError
from rlx.formats.gguf import GgufFile
from rlx.formats.hf import HfFolder
from rlx.ir.dtype import DType
from rlx.ir.quant import QuantScheme, encode
from rlx.models.weights import Names, Weight, Weights

_TYPES = ("f32", "f16", "bf16")
# "int8" stands for the first of these that divides the columns: a scale for the whole row costs
# too much accuracy where a few activations are far larger than the others
_INT8 = (QuantScheme.int8(64), QuantScheme.int8(32), QuantScheme.int8())


@dataclass(frozen=True)
class Keeping:
    """`element`: floats of another type; `scheme`: packed. Neither: as the file has them."""

    element: DType | None = None
    scheme: QuantScheme | None = None

    @staticmethod
    def of(dtype: str | None, quant: str | None) -> Keeping:
        if dtype is not None and dtype not in _TYPES:
            raise OptionError(
                "unknown type", where="dtype", got=dtype, expected=", ".join(_TYPES),
                hint="integers are a matter of quant=",
            )  # fmt: skip
        scheme = None if quant is None else QuantScheme.parse(quant)
        if scheme is not None and dtype is not None:
            raise OptionError("give dtype or quant, not both", got=f"{dtype} and {quant}")
        return Keeping(None if dtype is None else DType.of(dtype), scheme)


class KeptWeights(Weights):
    """Matrices of layers are converted when first asked for; tables and norms stay as they are,
    and so do weights that the file has packed."""

    def __init__(self, file: GgufFile | HfFolder, names: Names, keep: Keeping) -> None:
        super().__init__(file, names)
        self._keep = keep

    def get(self, name: str) -> Weight:
        known = name in self.used
        weight = super().get(name)
        if known or weight.packed or len(weight.shape) != 2 or not name.startswith("blk."):
            return weight
        if self._keep.scheme is not None:
            scheme = _fitting(self._keep.scheme, weight.shape[1])
            packed = encode(scheme, np.asarray(weight.array, np.float32))
            weight = Weight(name, packed.data, weight.shape, scheme, packed.scale, packed.zp)
        elif self._keep.element is not None:
            weight = Weight(name, weight.array.astype(self._keep.element.numpy), weight.shape, None)
        self.used[name] = weight
        return weight


def _fitting(scheme: QuantScheme, columns: int) -> QuantScheme:
    if scheme != _INT8[-1]:
        return scheme
    return next(s for s in _INT8 if columns % s.block_size == 0)
