"""Addresses for a listing: its memory, its code, and the table that the native driver reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.backends.buffer import HOST
from rlx.backends.cpu.listing import ARENA, CONSTANT, NUMBER, STATUS, WORDS, Base, Late, Listing
from rlx.backends.cpu.sources import compiled
from rlx.codegen.jit import Kernel
from rlx.codegen.program import Program, StepTable
from rlx.ir.op import Array
from rlx.records import dataclass


@dataclass
class PlacedWords:
    """The words of a listing that are filled in later, once their anchors have addresses."""

    listing: Listing
    addresses: list[int]  # of the anchors

    @property
    def late(self) -> list[Late]:
        return self.listing.late

    def bases(self) -> list[Base]:
        return list(dict.fromkeys(s.base for s in self.listing.live if s.base is not None))

    def filler(self, symbols: Sequence[str]) -> Callable[..., None]:
        """`fill(live, bases, *sizes)`: writes every live word. Made as Python source, so that a
        run costs one call and no walking over expressions."""
        bases = {b: i for i, b in enumerate(self.bases())}
        lines = [f"def fill(live, bases{''.join(', ' + s for s in symbols)}):"]
        for i, (anchor, base, offset) in enumerate(self.listing.live):
            terms = [] if base is None else [f"bases[{bases[base]}]"]
            if anchor != NUMBER:
                terms.append(f"anchors[{anchor}]")
            if offset != 0 or not terms:
                terms.append(f"({offset})")
            lines.append(f"    live[{i}] = {' + '.join(terms)}")
        lines.append("    return")
        scope: dict[str, Any] = {"anchors": self.addresses}
        exec(compiled("\n".join(lines)), scope)  # names are checked identifiers, the rest integers
        made: Callable[..., None] = scope["fill"]
        return made


@dataclass
class Placed:
    """Everything a run needs but parameters, states and inputs."""

    listing: Listing
    program: Program
    words: PlacedWords
    arena: Array
    status: Array


def place(listing: Listing, kernels: Mapping[str, Kernel]) -> Placed:
    arena, status = HOST.alloc_arena(listing.arena_size).array, np.zeros(1, np.int64)
    code = np.array([*(kernels[k].address() for k in listing.kernels), 0], np.uint64)
    # a step of Python's has the number −1, that of the zero at the end
    table = StepTable(code[listing.calls], listing.starts, listing.flags, listing.phases)
    keep = (kernels, listing.constants)
    program = Program(table, listing.patches, len(listing.live), listing.workers, keep)
    addresses = np.zeros(CONSTANT + len(listing.constants), np.int64)
    addresses[ARENA], addresses[STATUS] = address_of(arena), address_of(status)
    addresses[WORDS] = program.word_address(0)
    addresses[CONSTANT:] = [address_of(c) for c in listing.constants]
    count = len(listing.offsets)
    program.words[:count] = addresses[listing.anchors] + listing.offsets
    words = PlacedWords(listing, [int(a) for a in addresses])
    return Placed(listing, program, words, arena, status)


def address_of(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
