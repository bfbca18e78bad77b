"""The backend protocol: what a device implements to run graphs.

A device has an allocator for its memory, says which nodes it has kernels for, and compiles a
planned graph to an executable, which runs on buffers of that memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from rlx.backends.bounds_checks import BoundsCheck, checker, raise_failed
from rlx.backends.buffer import HOST, Allocator, Buffer
from rlx.backends.decode_loop import DecodeLoop, LoopSpec
from rlx.backends.timing import Recording
from rlx.errors import InputError, NumericsError, OptionError, UnsupportedError
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.ir.node import Node
from rlx.ir.op import Array
from rlx.ir.phase import Phase
from rlx.ir.shape import Shape
from rlx.specialize.compile_profile import CompileProfile
from rlx.specialize.manifest import BindingManifest, ManifestEntry
from rlx.specialize.options import CompileOptions
from rlx.support.pickling import COMPILE_AGAIN, Unpicklable
from rlx.support.progress import PACKING, current
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.backends.inspection import Inspection

Span = tuple[Phase, Phase]  # first and last phase, inclusive
Parts = Mapping[str, bytes]  # the parts of a stored program, by name
Buffers = Sequence[Buffer | None]  # of the inputs or outputs of a run; None: the arena slot
Sizes = Mapping[str, int]  # the dynamic dimensions of a run


@dataclass
class PlanInfo:
    """What an executable needs of its plan; `lir` reads the plan itself, perhaps from disk."""

    manifest: BindingManifest
    output_phases: Sequence[Phase]
    lir: Callable[[], Lir]
    donations: Mapping[int, str] = field(default_factory=dict)

    @staticmethod
    def of(lir: Lir) -> PlanInfo:
        manifest = BindingManifest.of(lir)
        return PlanInfo(manifest, lir.output_phases, lambda: lir, lir.donations)


def packing_hook(graph: Graph) -> Callable[[Node, Sequence[Array]], None]:
    """Tells of the progress of a prepare graph, node by node, in bytes of its outputs."""
    reporter, outputs = current(), set(graph.outputs)

    def told(node: Node, results: Sequence[Array]) -> None:
        pairs = zip(node.outputs, results, strict=True)
        reporter.advance(PACKING, sum(a.nbytes for value, a in pairs if value in outputs))

    return told


class OtherArrays(NamedTuple):
    """Arrays of another library, contiguous and in the host's memory, as a run takes and makes
    them."""

    maker: Callable[[Shape], Callable[[], Any]]  # makes functions that return new arrays
    address: Callable[[Any], int]
    to_numpy: Callable[[Any], Array]  # without a copy
    from_numpy: Callable[[Array], Any]


class Executable(Unpicklable, ABC):
    """A compiled plan. It owns an arena; buffers of parameters and states are attached."""

    instead = COMPILE_AGAIN

    manifest: BindingManifest
    arena: Buffer  # bytes; inputs and outputs have slots in it, at the manifest's offsets
    output_phases: Sequence[Phase]  # which phase computes each output
    # by the number of an output, the input whose memory it has: the caller passes that
    donations: Mapping[int, str] = MappingProxyType({})

    def __repr__(self) -> str:
        sides = (self.manifest.inputs, self.manifest.outputs)
        given, made = (", ".join(f"{e.name} {e.shape}" for e in side) for side in sides)
        return f"<{type(self).__name__}: {given} -> {made}>"

    @property
    @abstractmethod
    def lir(self) -> Lir:
        """The plan it was compiled from; read from disk on first use, if it came from there."""

    @abstractmethod
    def attach(self, params: Mapping[str, Buffer], states: Mapping[str, Buffer]) -> None:
        """Attach the buffers of all parameters and states; they are used in place."""

    @abstractmethod
    def run(
        self, inputs: Buffers, outputs: Buffers, sizes: Sizes, span: Span | None = None
    ) -> None:
        """Run once, or queue a run: see `Allocator.synchronize`.

        Inputs and outputs are buffers of this device; None stands for the arena slot. `sizes` gives
        the dynamic dimensions. With a `span` only those phases run, on what earlier phases left in
        the arena.
        """

    def caller(
        self, order: Sequence[int], makers: Sequence[Callable[[], Any]], sizes: Sizes,
        other: OtherArrays | None = None,
    ) -> Callable[[Sequence[Any]], tuple[Any, ...]] | None:  # fmt: skip
        """`call(arrays)`: a run on host arrays with as little overhead as possible, where the
        device has one. Input i is `arrays[order[i]]`; `makers` make the results; `sizes` are those
        of the dynamic dimensions. Arrays are NumPy's, or those that `other` tells of."""
        return None

    def decode_loop(self, spec: LoopSpec) -> DecodeLoop:
        """A decode loop over this executable. This one runs from the host; a device that can loop
        without the host overrides it."""
        return DecodeLoop(self, spec)

    def share_arena(self, other: Executable) -> None:
        """Use the arena of another executable, which is as large and never runs at the same time,
        where the device can: its memory was touched already. What slots hold is lost by its runs.
        Before anything is attached."""

    def slot(self, entry: ManifestEntry, sizes: Mapping[str, int] | None = None) -> Buffer:
        """The arena memory of an input or output."""
        shape = entry.shape.bind(sizes or {})
        return self.arena.view(entry.arena_offset or 0, shape.static_dims, shape.dtype.numpy)

    @abstractmethod
    def recording(self) -> AbstractContextManager[Recording]:
        """Record the runs inside the context: the time of every launch on every worker."""

    @abstractmethod
    def run_checked(self, inputs: Buffers, outputs: Buffers, sizes: Sizes) -> None:
        """Run node by node; NumericsError names the first node whose result has a NaN."""


class KernelExecutable(Executable):
    """An executable whose program is a list of launches: what devices with kernels share.

    Kernels are checked against the sizes of a run before it begins. A device says how a run begins,
    which node a launch belongs to, how launches run, and where results lie.
    """

    def __init__(
        self, info: PlanInfo, checks: Sequence[BoundsCheck], symbols: Sequence[str]
    ) -> None:
        self.manifest, self.output_phases = info.manifest, info.output_phases
        self.donations = info.donations
        self.symbols, self._bounds_checks = symbols, checks
        self._check = checker(checks, symbols)

    def check_sizes(self, *dims: int) -> None:
        """Raise if kernels would access memory out of bounds with these dynamic dimensions."""
        failed = self._check(*dims)
        if failed >= 0:
            raise_failed(self._bounds_checks[failed], dict(zip(self.symbols, dims, strict=True)))

    def attachments_of(
        self, params: Mapping[str, Buffer], states: Mapping[str, Buffer]
    ) -> Iterator[tuple[ManifestEntry, Buffer]]:
        """The parameters and states that the program reads, with their buffers."""
        for entry in (*self.manifest.params, *self.manifest.states):
            yield entry, (params if entry.role == "param" else states)[entry.name]

    @abstractmethod
    def _begin(self, inputs: Buffers, outputs: Buffers, sizes: Sizes) -> None:
        """Check the sizes and write the args that belong to this run."""

    @abstractmethod
    def _launch_nodes(self) -> Sequence[int]:
        """The number of the node of each launch; −1 where it belongs to none."""

    @abstractmethod
    def _run_launches(self, first: int, last: int, sizes: Sizes) -> None:
        """Run some launches of a run that has begun."""

    @abstractmethod
    def _results(
        self, inputs: Buffers, outputs: Buffers, sizes: Sizes
    ) -> Callable[[Node], list[Array]]:
        """A function that reads the results of a node which has run."""

    @abstractmethod
    def check_status_later(self) -> None:
        """Raise what kernels found wrong with their data, once the device is done with the run."""

    def run_checked(self, inputs: Buffers, outputs: Buffers, sizes: Sizes) -> None:
        self._begin(inputs, outputs, sizes)
        results, nodes = self._results(inputs, outputs, sizes), self.lir.graph.nodes
        numbers = self._launch_nodes()
        for number, group in groupby(range(len(numbers)), numbers.__getitem__):
            launches = list(group)
            self._run_launches(launches[0], launches[-1] + 1, sizes)
            if number >= 0:
                check_numbers(nodes[number], results(nodes[number]))
        self.check_status_later()


def raise_bad_index(op: str, operands: str, origin: object) -> NoReturn:
    """Raise the error of a kernel that met an index out of range in its data, or of a loop that
    went on for too long."""
    if op == "while_loop":
        from rlx.ir.ops.control import endless_loop  # a start from an artifact does without ops

        raise endless_loop(origin)
    raise InputError(
        "an index is out of range", where=op, got=f"operands {operands}", origin=origin,
        hint="check the ids or indices given to this run",
    )  # fmt: skip


def check_numbers(node: Node, results: Sequence[Array]) -> None:
    """Raise if a result has a NaN. Infinities pass: masks use them."""
    if node.op.is_source:
        return
    for result in results:
        if result.dtype.kind in "biu":
            continue
        bad = np.isnan(result.astype(np.complex128))
        if not bad.any():
            continue
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        raise NumericsError(
            "a result is not a number", where=node.op.name,
            got=f"{result[index]} at {list(index)}, {int(bad.sum())} of {result.size} elements",
            origin=f"{node!r} {node.origin}",
            hint="no earlier result had one: look at this op, its parameters and inputs",
        )  # fmt: skip


class Backend(ABC):
    """A device. One instance serves all sessions."""

    name: str
    long_chunk = 0  # tokens of a long prompt that run at once, if more than of others

    @property
    def allocator(self) -> Allocator:
        """The device's memory; host memory, unless the device has its own."""
        return HOST

    def synchronize(self) -> None:
        """Wait until all queued runs and copies are done."""
        self.allocator.synchronize()

    # -- lowering ---------------------------------------------------------------------------------

    def expect_graph(self, nodes: int) -> None:  # noqa: B027
        """Passes begin on a graph of so many nodes, and its compilation comes next."""

    @abstractmethod
    def has_native(self, node: Node) -> bool:
        """Whether the device has a kernel for this node; else the node is decomposed."""

    @property
    def updates_in_place(self) -> bool:
        """Whether outputs may have the memory of donated inputs."""
        return False

    def runs_on_host(self, node: Node) -> bool:
        """Whether the host runs the reference of this node, which is native only in name."""
        return False

    def choose_layouts(self, graph: Graph) -> Graph:
        """Rewrite a graph whose values the device would rather have in another order of axes."""
        return graph

    def rewrite_template(self, graph: Graph) -> Graph:
        """Rewrite a template for the device, before the prepare graph is split off."""
        return graph

    def rewrite_variant(self, graph: Graph) -> Graph:
        """Rewrite a variant for the device, after its sizes are bound."""
        return graph

    def scratch(self, node: Node) -> int:
        """Bytes of scratch memory that the node's kernel needs, in the arena."""
        return 0

    def prepare(self, graph: Graph, params: Mapping[str, Array]) -> Mapping[str, Array | Buffer]:
        """Run a prepare graph: weight prepacking and constant folding of params, done once.

        Returns its outputs by name, in host memory or in the device's own. This one runs it on the
        host, in NumPy.
        """
        from rlx.ir.interp import evaluate  # prepared params on disk do without it

        given = {n.name: params[n.name] for n in graph.sources("param")}
        made = evaluate(graph, given, on_node=packing_hook(graph))
        prepared = [np.asarray(a, order="C") for a in made]
        return dict(zip(graph.output_names, prepared, strict=True))

    # -- compilation ------------------------------------------------------------------------------

    @abstractmethod
    def compile(self, lir: Lir, options: CompileOptions) -> Executable:
        """The executable of a planned graph."""

    def export(self, lir: Lir, options: CompileOptions) -> Parts:
        """The program as parts of an artifact."""
        raise UnsupportedError("programs of this device are not stored", where=self.name)

    def restore(self, parts: Parts, info: PlanInfo, options: CompileOptions) -> Executable:
        """The executable of an artifact's parts, without passes and without a compiler."""
        raise UnsupportedError("programs of this device are not stored", where=self.name)

    @property
    def can_export(self) -> bool:
        """Whether `export` and `restore` work."""
        return type(self).export is not Backend.export

    # -- target and process -----------------------------------------------------------------------

    def for_target(self, name: str) -> Backend:
        """The same device compiling for another machine; "host" is this one."""
        if name != "host":
            raise OptionError("this device has no named targets", where=self.name, got=repr(name))
        return self

    def for_profile(self, profile: CompileProfile) -> Backend:
        """The same device compiling as a profile says. Devices that are not batch-invariant anyway
        derive one that is where it asks for that."""
        return self.for_target(profile.target)

    @property
    def target_key(self) -> str:
        """Everything about the machine that programs depend on."""
        return self.name

    @property
    def tuning_key(self) -> str:
        """Identity of what `rlx tune` measured for the device; empty where it measured nothing."""
        return ""

    def workers(self, options: CompileOptions) -> int:
        """How many workers programs are compiled for."""
        return 1

    @property
    def compile_count(self) -> int:
        """How many kernels the device's compiler has compiled in this process."""
        return 0

    def trim_memory(self) -> None:  # noqa: B027
        """Return memory that only the compiler needed to the system."""

    def inspection(self) -> Inspection:
        """What the device shows of its machine, its native code and its caches."""
        from rlx.backends.inspection import Inspection

        return Inspection(self)
