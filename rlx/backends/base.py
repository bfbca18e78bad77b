"""What a device must answer to run graphs: the protocol that every backend implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from rlx.backends.timing import Profile
from rlx.errors import NumericsError
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.ir.node import Node
from rlx.ir.op import Array
from rlx.specialize.manifest import BindingManifest
from rlx.specialize.options import CompileOptions


class Executable(ABC):
    """A planned graph that can run. It owns an arena; parameters and states are attached."""

    lir: Lir
    manifest: BindingManifest
    arena: Array  # bytes; inputs and outputs lie in it at the manifest's offsets

    @abstractmethod
    def attach(self, params: Mapping[str, Array], states: Mapping[str, Array]) -> None:
        """Take the arrays of every parameter and state; they are used in place, not copied."""

    @abstractmethod
    def run(
        self,
        inputs: Sequence[Array | None],
        outputs: Sequence[Array | None],
        sizes: Mapping[str, int],
    ) -> None:
        """Run once. An input that is None is read from its arena slot, where the caller wrote it;
        an output that is None stays in its slot. `sizes` gives the live dimensions."""

    @abstractmethod
    def profile(
        self,
        inputs: Sequence[Array | None],
        outputs: Sequence[Array | None],
        sizes: Mapping[str, int],
    ) -> Profile:
        """Run once as `run` does, and say where the time went."""

    @abstractmethod
    def run_checked(
        self,
        inputs: Sequence[Array | None],
        outputs: Sequence[Array | None],
        sizes: Mapping[str, int],
    ) -> None:
        """Run node by node; NumericsError names the first whose result has a NaN."""


def check_numbers(node: Node, results: Sequence[Array]) -> None:
    """Raise when a result has a NaN. Infinities pass: masks are made of them."""
    if node.op.is_source:
        return
    for result in results:
        if result.dtype.kind in "biu":
            continue
        bad = np.isnan(result.astype(np.complex128))
        if not bad.any():
            continue
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        raise NumericsError(
            "a result is not a number", where=node.op.name,
            got=f"{result[place]} at {list(place)}, {int(bad.sum())} of {result.size} elements",
            origin=f"{node!r} {node.origin}",
            hint="no earlier result had one: look at this op, its parameters and inputs",
        )  # fmt: skip


class Backend(ABC):
    """A device. Stateless where possible: one instance serves all sessions."""

    name: str

    @abstractmethod
    def has_native(self, node: Node) -> bool:
        """Whether the device runs this node itself, without a common body."""

    def lower(self, graph: Graph) -> Graph:
        """Device-specific rewriting of a template, before work on parameters is split off."""
        return graph

    def lower_bound(self, graph: Graph) -> Graph:
        """Device-specific rewriting of a variant, after its sizes are known."""
        return graph

    def scratch(self, node: Node) -> int:
        """Bytes of working memory the node's kernel wants in the arena."""
        return 0

    @abstractmethod
    def prepare(self, graph: Graph, params: Mapping[str, Array]) -> dict[str, Array]:
        """Run a prepare graph: its outputs by name."""

    @abstractmethod
    def compile(self, lir: Lir, options: CompileOptions) -> Executable:
        """Machine code, or whatever the device runs, for a planned graph."""
