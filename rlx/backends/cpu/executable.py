"""A program with its memory: attached parameters and states, and runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlx.backends.base import Executable, check_numbers
from rlx.backends.cpu.assemble import Assembled, address_of
from rlx.backends.cpu.checks import checker, limits_of, raise_broken
from rlx.backends.cpu.host import call_host
from rlx.backends.cpu.memory import RunMemory
from rlx.backends.cpu.pool import Pool
from rlx.backends.cpu.profile import profile_run
from rlx.backends.timing import Profile
from rlx.errors import InputError
from rlx.ir.op import Array
from rlx.specialize.manifest import BindingManifest


class CpuExecutable(Executable):
    def __init__(self, made: Assembled, pool: Pool) -> None:
        self.made, self.pool, self.lir = made, pool, made.lir
        self.manifest = BindingManifest.of(made.lir)
        self.arena = made.arena
        self._symbols = sorted(made.lir.live)
        self._fill = made.words.filler(self._symbols)
        self._limits = limits_of(made.lir.graph)
        self._check = checker(self._limits, self._symbols)
        self._live = memoryview(made.program.live.data)
        self._bases = made.words.bases()
        self._addresses: dict[tuple[str, str], int] = {}
        self._attached: dict[str, Array] = {}
        self._sizes: Mapping[str, int] = {}
        self._inputs = [n.name for n in made.lir.inputs]
        self._outputs = list(made.lir.graph.output_names)
        self._place_slots()

    def _place_slots(self) -> None:
        """Inputs and outputs that a run does not bring lie in the arena."""
        start = address_of(self.arena)
        for entry in [*self.manifest.inputs, *self.manifest.outputs]:
            self._addresses[entry.role, entry.name] = start + (entry.arena_offset or 0)
        self._slots = dict(self._addresses)

    def attach(self, params: Mapping[str, Array], states: Mapping[str, Array]) -> None:
        needed = {n.name: params[n.name] for n in self.lir.params}
        needed |= {n.name: states[n.name] for n in self.lir.states}
        for node in [*self.lir.params, *self.lir.states]:
            self._addresses[node.op.name, node.name] = address_of(needed[node.name])
        words = self.made.program.words
        for word, base, offset in self.made.words.late:
            words[word] = self._addresses[base] + offset
        self._attached = needed

    def run(
        self,
        inputs: Sequence[Array | None],
        outputs: Sequence[Array | None],
        sizes: Mapping[str, int],
    ) -> None:
        self._begin(inputs, outputs, sizes)
        self.pool.run(self.made.program, on_host=self._on_host)
        if self.made.status[0]:
            self._raise_status()

    def _begin(
        self,
        inputs: Sequence[Array | None],
        outputs: Sequence[Array | None],
        sizes: Mapping[str, int],
    ) -> None:
        """Check the sizes and fill in the words that belong to this run."""
        addresses = self._addresses
        for name, array in zip(self._inputs, inputs, strict=True):
            key = ("input", name)
            addresses[key] = self._slots[key] if array is None else address_of(array)
        for name, array in zip(self._outputs, outputs, strict=True):
            key = ("output", name)
            addresses[key] = self._slots[key] if array is None else address_of(array)
        live = [sizes[s] for s in self._symbols]
        broken = self._check(*live)
        if broken >= 0:
            raise_broken(self._limits[broken], sizes)
        self._sizes = sizes
        self._fill(self._live, [addresses[b] for b in self._bases], *live)

    def _memory(
        self,
        inputs: Sequence[Array | None],
        outputs: Sequence[Array | None],
        sizes: Mapping[str, int],
    ) -> RunMemory:
        given = dict(zip(self._inputs, inputs, strict=True))
        return RunMemory(self.lir, self.arena, self._attached, given, outputs, sizes)

    def run_checked(
        self,
        inputs: Sequence[Array | None],
        outputs: Sequence[Array | None],
        sizes: Mapping[str, int],
    ) -> None:
        self._begin(inputs, outputs, sizes)
        memory = self._memory(inputs, outputs, sizes)
        steps, done = self.made.steps, 0
        while done < len(steps):
            node, first = steps[done].node, done
            while done < len(steps) and steps[done].node is node:
                done += 1
            self.pool.run(self.made.program, first, done, self._on_host)
            if node is not None:
                check_numbers(node, [memory.array(v) for v in node.outputs])
        if self.made.status[0]:
            self._raise_status()

    def _on_host(self, index: int) -> None:
        program, step = self.made.program, self.made.steps[index]
        first = program.word_of(index, 0)
        addresses = program.words[first : first + len(step.words)]
        call_host(step, addresses.tolist(), self._sizes)

    def profile(
        self,
        inputs: Sequence[Array | None],
        outputs: Sequence[Array | None],
        sizes: Mapping[str, int],
    ) -> Profile:
        return profile_run(self, inputs, outputs, sizes)

    def _raise_status(self) -> None:
        node = self.made.words.node(int(self.made.status[0]))
        self.made.status[0] = 0
        raise InputError(
            "an index is out of range",
            where=node.op.name,
            got=f"operands {', '.join(f'{v.name} {v.shape}' for v in node.inputs)}",
            origin=node.origin,
            hint="check the ids or indices given to this run",
        )
