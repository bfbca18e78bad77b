"""What a device must answer to run graphs: the protocol that every backend implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np

from rlx.backends.chain import Chain, Links
from rlx.backends.timing import Recording
from rlx.errors import NumericsError, OptionError, UnsupportedError
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.ir.node import Node
from rlx.ir.op import Array
from rlx.ir.phase import Phase
from rlx.specialize.manifest import BindingManifest, ManifestEntry
from rlx.specialize.options import CompileOptions
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.backends.inspection import Inspection

Span = tuple[Phase, Phase]  # from this phase on, up to and with that one
Parts = Mapping[str, bytes]  # of a program on disk, by name


@dataclass
class Stored:
    """What an executable keeps of its plan; the plan itself may still be on disk."""

    manifest: BindingManifest
    output_phases: Sequence[Phase]
    lir: Callable[[], Lir]

    @staticmethod
    def of(lir: Lir) -> Stored:
        return Stored(BindingManifest.of(lir), lir.output_phases, lambda: lir)


class Executable(ABC):
    """A planned graph that can run. It owns an arena; parameters and states are attached."""

    manifest: BindingManifest
    arena: Array  # bytes; inputs and outputs lie in it at the manifest's offsets
    output_phases: Sequence[Phase]  # which phase computes each output

    @property
    @abstractmethod
    def lir(self) -> Lir:
        """What it was made from; read from disk when first asked for, if it came from there."""

    @abstractmethod
    def attach(self, params: Mapping[str, Array], states: Mapping[str, Array]) -> None:
        """Take the arrays of every parameter and state; they are used in place, not copied."""

    @abstractmethod
    def run(
        self,
        inputs: Sequence[Array | None],
        outputs: Sequence[Array | None],
        sizes: Mapping[str, int],
        span: Span | None = None,
    ) -> None:
        """Run once. An input that is None is read from its arena slot, where the caller wrote it;
        an output that is None stays in its slot. `sizes` gives the live dimensions.

        A `span` of phases runs that part alone; what earlier phases computed must be there still.
        """

    def chain(self, links: Links) -> Chain:
        """Runs that feed each other."""
        return Chain(self, links)

    def slot(self, entry: ManifestEntry, sizes: Mapping[str, int] | None = None) -> Array:
        """The arena memory of an input or output, as an array."""
        shape, start = entry.shape.bind(sizes or {}), entry.arena_offset or 0
        size = int(np.prod(shape.static_dims, dtype=np.int64)) * shape.dtype.bytes
        return self.arena[start : start + size].view(shape.dtype.numpy).reshape(shape.static_dims)

    @abstractmethod
    def recording(self) -> AbstractContextManager[Recording]:
        """Runs inside it are timed, step by step and worker by worker."""

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
        """Whether the device runs this node itself, without its decomposition."""

    def lower(self, graph: Graph) -> Graph:
        """Device-specific rewriting of a template, before work on parameters is split off."""
        return graph

    def rewrite_variant(self, graph: Graph) -> Graph:
        """Device-specific rewriting of a variant, after its sizes are bound."""
        return graph

    def scratch(self, node: Node) -> int:
        """Bytes of working memory the node's kernel wants in the arena."""
        return 0

    def for_target(self, name: str) -> Backend:
        """The same device making code for another machine; "host" is this one."""
        if name != "host":
            raise OptionError("a device without named targets", where=self.name, got=repr(name))
        return self

    @property
    def target_key(self) -> str:
        """Everything about the machine that programs depend on."""
        return self.name

    def workers(self, options: CompileOptions) -> int:
        """How many workers programs are made for."""
        return 1

    @abstractmethod
    def prepare(self, graph: Graph, params: Mapping[str, Array]) -> dict[str, Array]:
        """Run a prepare graph: its outputs by name."""

    @abstractmethod
    def compile(self, lir: Lir, options: CompileOptions) -> Executable:
        """Machine code, or whatever the device runs, for a planned graph."""

    def export(self, lir: Lir, options: CompileOptions) -> Parts:
        """The program as parts of an artifact."""
        raise UnsupportedError("programs of this device are not stored", where=self.name)

    def restore(self, parts: Parts, stored: Stored, options: CompileOptions) -> Executable:
        """The executable of an artifact's parts, without passes and without a compiler."""
        raise UnsupportedError("programs of this device are not stored", where=self.name)

    def inspection(self) -> Inspection:
        """What the device shows of its machine, its native code and its caches."""
        from rlx.backends.inspection import Inspection

        return Inspection(self)
