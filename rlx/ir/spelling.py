"""How attribute values are written. Each kind has a spelling of its own, so text needs no types.

3  1.5  inf  true  none  "text"  past_seq + seq  f32  [batch, 64] f32  mask.causal  quant.Q4_K
[1, 2]  data([2] f32, [1.0, 2.0])  graph body { … }
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.errors import AttributeValueError
from rlx.ir import elements
from rlx.ir.attrs import Body, Data, MaskKind
from rlx.ir.dim import Dim, Expr, FloorDiv
from rlx.ir.dtype import BY_NAME, DType
from rlx.ir.quant import QuantScheme
from rlx.ir.shape import Shape

INLINE = 32  # constants of more elements are written as base64
WORDS = frozenset(["true", "false", "none", "inf", "nan", *BY_NAME])  # never symbols unless quoted
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_PLAIN_NAN = 0x7FF8000000000000


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=not text.isprintable())


def word(text: str) -> str:
    """An identifier as it is, anything else quoted."""
    return text if _WORD.match(text) else quote(text)


def write_float(value: float) -> str:
    if value == value:
        return repr(value)
    bits = struct.unpack("<Q", struct.pack("<d", value))[0]
    return "nan" if bits == _PLAIN_NAN else f"nan({bits:#x})"


def write_dim(dim: Dim) -> str:
    if isinstance(dim, int) or WORDS.isdisjoint(dim.symbols):
        return str(dim)
    return " + ".join(
        " * ".join([str(factor) if factor >= 0 else f"({factor})", *map(_write_atom, monomial)])
        for monomial, factor in dim.terms
    )


def _write_atom(atom: str | FloorDiv) -> str:
    if isinstance(atom, FloorDiv):
        return f"(({write_dim(atom.numerator)}) // {atom.divisor})"
    return f'sym("{atom}")' if atom in WORDS else atom


def write_shape(shape: Shape) -> str:
    if shape.is_static:
        return str(shape)
    return f"[{', '.join(map(write_dim, shape.dims))}] {shape.dtype.name}"


def write_array(data: Data) -> str:
    """The elements: nested lists when few, base64 of the little-endian bytes otherwise."""
    array = data.array
    if 0 < array.size <= INLINE:
        items = array.ravel().tolist()
        texts = [_element(x, data.shape.dtype) for x in items]
        if _reads_back(texts, array):
            return _nest(texts, array.shape)
    return f'base64 "{base64.b64encode(elements.to_bytes(array)).decode()}"'


def _element(value: Any, dtype: DType) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, complex):
        return f"({write_float(value.real)}, {write_float(value.imag)})"
    if isinstance(value, int):
        return str(value)
    # f32 and f16 have a shorter exact text than the double that holds the same number
    return str(dtype.numpy.type(value)) if dtype.name in ("f32", "f16") else repr(float(value))


def _reads_back(texts: list[str], array: Any) -> bool:
    """Whether the texts give the same bits: not for NaNs with a payload."""
    if array.dtype.kind == "c":
        return bool(np.isfinite(array).all())
    if array.dtype.kind in "biu":
        return True
    again = np.array([float(t) for t in texts], dtype=array.dtype)
    return bool(again.tobytes() == array.tobytes())


def _nest(texts: Sequence[str], dims: tuple[int, ...]) -> str:
    if not dims:
        return texts[0]
    step = len(texts) // dims[0]
    rows = [_nest(texts[i : i + step], dims[1:]) for i in range(0, len(texts), step)]
    return f"[{', '.join(rows)}]"


def write_value(value: Any, write_body: Callable[[Body], str]) -> str:
    """The text of an attribute; `write_body` gives that of a nested graph."""
    if isinstance(value, tuple):
        return f"[{', '.join([write_value(item, write_body) for item in value])}]"
    if isinstance(value, Body):
        return write_body(value)
    writer = _WRITERS.get(type(value))
    if writer is None:
        raise AttributeValueError(
            "an attribute that has no text", got=f"{value!r} ({type(value).__name__})"
        )
    return writer(value)


_WRITERS: dict[type, Callable[[Any], str]] = {
    type(None): lambda v: "none",
    bool: lambda v: "true" if v else "false",
    int: str,
    float: write_float,
    str: quote,
    Expr: write_dim,
    DType: lambda v: v.name,
    Shape: write_shape,
    MaskKind: lambda v: f"mask.{v}",
    QuantScheme: lambda v: f"quant.{v}",
    Data: lambda v: f"data({v.shape}, {write_array(v)})",
}


def is_default(value: Any, default: Any) -> bool:
    """Whether an attribute need not be written: the very same value, sign of zero included."""
    if type(value) is not type(default):
        return False
    if type(value) is tuple:
        return len(value) == len(default) and all(map(is_default, value, default))
    return repr(value) == repr(default) if type(value) is float else bool(value == default)
