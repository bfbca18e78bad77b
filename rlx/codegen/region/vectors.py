"""How wide the vectors of a nest are, and how the last, incomplete one is done."""

from __future__ import annotations

from rlx.codegen.region.nest import ROW, Apply, Load, Nest, Walk
from rlx.codegen.region.registers import raw_type, register_type
from rlx.codegen.target import Target
from rlx.ir.dtype import DType, bool_, c64


def lanes_for(nest: Nest, target: Target, columns: bool) -> int:
    """Elements of the widest type that is computed with, in one register; fewer for short rows."""
    bits = [
        _bits(i.dtype)
        for i in nest.code
        if isinstance(i, (Load, Apply)) and (columns or i.level != ROW)
    ]
    bits += [_bits(s.walk.dtype) for s in nest.stores if columns or s.level != ROW]
    lanes = target.lanes(max(bits, default=32))
    sizes = [space[-1] for space in nest.spaces if space]
    longest = max((s if isinstance(s, int) else lanes for s in sizes), default=1)
    while not columns and lanes > max(longest, 1):
        lanes //= 2
    return lanes


def _bits(dtype: DType) -> int:
    return 32 if dtype is c64 else 8 if dtype is bool_ else register_type(dtype).bits


def masks_tail(nest: Nest, target: Target, columns: bool) -> bool:
    """Whether the last vector is masked; where masks are dear or tensors lie apart, what is left is
    done element by element instead."""
    for walk in nest.walks():
        step = walk.steps.between_lanes(columns)
        if walk.dtype is c64 or (step not in (0, 1)) or _data_per_lane(nest, walk, columns):
            return False
        if step == 1 and not _has_masks(target, raw_type(walk.dtype).bits):
            return False
    return True


def _data_per_lane(nest: Nest, walk: Walk, columns: bool) -> bool:
    """Whether an index that is data differs from lane to lane (taken to be so in columns)."""
    return any(columns or nest.code[number].level != ROW for number, _ in walk.terms)


def _has_masks(target: Target, bits: int) -> bool:
    return target.avx512 or (target.has("avx2") and bits >= 32)
