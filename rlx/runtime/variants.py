"""What a compiled graph is made from: a template in memory, or one variant that came from disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rlx.backends.base import Backend, Executable
from rlx.ir.binding import DimBinding
from rlx.ir.graph import Graph
from rlx.ir.shape import Shape
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Signature:
    """A model as its callers see it: every argument, also those that passes did without."""

    name: str
    inputs: Mapping[str, Shape]
    params: Mapping[str, Shape]
    states: Mapping[str, Shape]
    output_names: tuple[str, ...]

    @staticmethod
    def of(source: Graph) -> Signature:
        def shapes(kind: str) -> dict[str, Shape]:
            return {n.name: n.output.shape for n in source.sources(kind)}

        names = tuple(source.output_names)
        return Signature(source.name, shapes("input"), shapes("param"), shapes("state"), names)


class Variants(Protocol):
    """Gives executables for sizes."""

    @property
    def signature(self) -> Signature: ...

    @property
    def binding(self) -> DimBinding: ...

    @property
    def live(self) -> dict[str, int]:
        """Live symbols that the graph uses, and their bounds."""

    @property
    def open_symbols(self) -> frozenset[str]:
        """Symbols whose sizes are left to the inputs."""

    @property
    def backend(self) -> Backend: ...

    @property
    def prepare(self) -> Graph | None:
        """Work on parameters, to be done once."""

    def specialize(self, open_sizes: Mapping[str, int]) -> Executable:
        """The executable of the variant whose open symbols have these sizes."""
