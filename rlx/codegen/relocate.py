"""How each machine writes an address into its instructions."""

from __future__ import annotations

import struct
from collections.abc import Callable

from rlx.support.records import dataclass

Patch = Callable[[bytearray, int, int, int], None]
"""(image, position in it, value S + A, address of the position)"""


@dataclass(frozen=True)
class Machine:
    """One architecture: its relocation types, and the code that jumps far away."""

    arch: str
    patches: dict[int, Patch]
    calls: frozenset[int]
    got: frozenset[int]
    stub_size: int
    stub: Callable[[int], bytes]

    def apply(
        self, image: bytearray, at: int, kind: int, symbol: int, addend: int, place: int
    ) -> None:
        """Raises KeyError for an unknown type, struct.error for a value out of reach."""
        self.patches[kind](image, at, symbol + addend, place)


def _absolute64(image: bytearray, at: int, value: int, place: int) -> None:
    struct.pack_into("<Q", image, at, value & (1 << 64) - 1)


def _relative64(image: bytearray, at: int, value: int, place: int) -> None:
    struct.pack_into("<q", image, at, value - place)


def _relative32(image: bytearray, at: int, value: int, place: int) -> None:
    struct.pack_into("<i", image, at, value - place)


def _x86_stub(address: int) -> bytes:
    return b"\xff\x25\x00\x00\x00\x00" + struct.pack("<Q", address) + b"\xcc\xcc"


def _field(shift: int, bits: int, scale: int) -> Patch:
    """A signed, PC-relative instruction field."""

    def patch(image: bytearray, at: int, value: int, place: int) -> None:
        distance = value - place
        limit = 1 << bits - 1 + scale
        if distance % (1 << scale) or not -limit <= distance < limit:
            raise struct.error("branch out of reach")
        _merge(image, at, shift, bits, distance >> scale)

    return patch


def _low12(scale: int) -> Patch:
    """The low 12 bits of an address, as an instruction that accesses 2^scale bytes counts them."""

    def patch(image: bytearray, at: int, value: int, place: int) -> None:
        low = value & 0xFFF
        if low % (1 << scale):
            raise struct.error("address not aligned for the access")
        _merge(image, at, 10, 12, low >> scale)

    return patch


def _page(image: bytearray, at: int, value: int, place: int) -> None:
    _adr(image, at, (value >> 12) - (place >> 12))


def _near(image: bytearray, at: int, value: int, place: int) -> None:
    _adr(image, at, value - place)


def _adr(image: bytearray, at: int, distance: int) -> None:
    if not -(1 << 20) <= distance < 1 << 20:
        raise struct.error("address out of reach")
    _merge(image, at, 29, 2, distance)
    _merge(image, at, 5, 19, distance >> 2)


def _merge(image: bytearray, at: int, shift: int, bits: int, value: int) -> None:
    """Replace a bit field of the 32-bit instruction."""
    mask = (1 << bits) - 1
    (word,) = struct.unpack_from("<I", image, at)
    struct.pack_into("<I", image, at, word & ~(mask << shift) | (value & mask) << shift)


def _arm_stub(address: int) -> bytes:
    return struct.pack("<IIQ", 0x58000050, 0xD61F0200, address)  # ldr x16, #8; br x16


_X86_64 = Machine(
    "x86_64",
    {
        1: _absolute64,
        2: _relative32,
        4: _relative32,  # PLT32
        9: _relative32,  # GOTPCREL
        24: _relative64,
        41: _relative32,  # GOTPCRELX
        42: _relative32,  # REX_GOTPCRELX
    },
    calls=frozenset({2, 4}),
    got=frozenset({9, 41, 42}),
    stub_size=16,
    stub=_x86_stub,
)

_AARCH64 = Machine(
    "aarch64",
    {
        257: _absolute64,
        260: _relative64,
        261: _relative32,
        274: _near,
        275: _page,
        277: _low12(0),
        278: _low12(0),
        279: _field(5, 14, 2),  # TSTBR14
        280: _field(5, 19, 2),  # CONDBR19
        282: _field(0, 26, 2),  # JUMP26
        283: _field(0, 26, 2),  # CALL26
        284: _low12(1),
        285: _low12(2),
        286: _low12(3),
        299: _low12(4),
        311: _page,  # of the GOT slot
        312: _low12(3),
    },
    calls=frozenset({282, 283}),
    got=frozenset({311, 312}),
    stub_size=16,
    stub=_arm_stub,
)

MACHINES = {62: _X86_64, 183: _AARCH64}
