"""The binding manifest: shape, size and arena offset of every argument of an executable.

Params are the user's, by their own names and shapes: what `set_param` takes. Kernels may read
others that are packed from them; those are in the manifest of the device's executable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from rlx.errors import InputError
from rlx.ir.lir import Argument, Lir
from rlx.ir.shape import Shape
from rlx.support.records import dataclass

Amount: TypeAlias = Any  # an int; a symbolic Dim as long as a symbol of the shape is open


class ManifestEntry(NamedTuple):
    """One input, param, state or output. Dynamic dims count at their bounds."""

    role: str  # input, param, state, output
    name: str
    shape: Shape
    num_elements: Amount
    num_bytes: Amount
    arena_offset: int | None  # None: it has no arena slot
    arena_size: int | None
    is_view: bool

    @property
    def dtype(self) -> str:
        return self.shape.dtype.name


@dataclass(frozen=True)
class BindingManifest:
    entries: tuple[ManifestEntry, ...]
    arena_size: int  # 0 for a symbolic manifest: nothing is planned yet

    @staticmethod
    def of(lir: Lir) -> BindingManifest:
        entries = tuple([_entry(argument) for argument in lir.arguments()])
        return BindingManifest(entries, lir.arena_size)

    @staticmethod
    def symbolic(arguments: Mapping[str, Mapping[str, Shape]]) -> BindingManifest:
        """The manifest before sizes are bound, of the names and shapes of each role."""
        rows = [(role, *item) for role, table in arguments.items() for item in table.items()]
        return BindingManifest(tuple([_outside(*row, {}) for row in rows]), 0)

    def with_params(
        self, params: Mapping[str, Shape], sizes: Mapping[str, int], bounds: Mapping[str, int]
    ) -> BindingManifest:
        """The same with these params, the user's; `sizes` and `bounds` are those of symbols."""
        users = [_outside("param", n, s.bind(sizes), bounds) for n, s in params.items()]
        own = [*self.inputs, *users, *self.states, *self.outputs]
        return BindingManifest(tuple(own), self.arena_size)

    def role(self, role: str) -> list[ManifestEntry]:
        return [e for e in self.entries if e.role == role]

    @property
    def inputs(self) -> list[ManifestEntry]:
        return self.role("input")

    @property
    def params(self) -> list[ManifestEntry]:
        return self.role("param")

    @property
    def states(self) -> list[ManifestEntry]:
        return self.role("state")

    @property
    def outputs(self) -> list[ManifestEntry]:
        return self.role("output")

    @property
    def param_names(self) -> list[str]:
        return [e.name for e in self.params]

    @property
    def total_param_bytes(self) -> Amount:
        return sum(e.num_bytes for e in self.params)

    def weight_blocks(self) -> dict[str, list[ManifestEntry]]:
        """Parameters grouped by the text before the first dot of their names."""
        blocks: dict[str, list[ManifestEntry]] = {}
        for entry in self.params:
            blocks.setdefault(entry.name.partition(".")[0], []).append(entry)
        return blocks

    def find(self, name: str, role: str | None = None) -> ManifestEntry:
        for entry in self.entries:
            if entry.name == name and role in (None, entry.role):
                return entry
        known = ", ".join(e.name for e in self.entries if role in (None, e.role))
        raise InputError(f"no such {role or 'entry'}", got=name, expected=known)

    def __iter__(self) -> Iterator[ManifestEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        lines = [f"arena {self.arena_size:,} bytes"]
        for e in self.entries:
            slot = "no slot" if e.arena_offset is None else f"@{e.arena_offset}"
            view = " view" if e.is_view else ""
            size = f"{e.num_bytes:,}" if isinstance(e.num_bytes, int) else f"{e.num_bytes}"
            lines.append(f"{e.role:6} {e.name}: {e.shape}, {size} bytes, {slot}{view}")
        return "\n".join(lines)


def _entry(argument: Argument) -> ManifestEntry:
    role, name, shape, size, offset, is_view = argument
    return ManifestEntry(
        role, name, shape, size // shape.dtype.bytes, size, offset,
        None if offset is None else size, is_view,
    )  # fmt: skip


def _outside(role: str, name: str, shape: Shape, bounds: Mapping[str, int]) -> ManifestEntry:
    """An entry without an arena slot."""
    if shape.symbols <= bounds.keys():
        size = shape.upper_bytes(bounds)
        return ManifestEntry(role, name, shape, size // shape.dtype.bytes, size, None, None, False)
    amounts = shape.num_elements, shape.size_bytes
    return ManifestEntry(role, name, shape, *amounts, None, None, False)
