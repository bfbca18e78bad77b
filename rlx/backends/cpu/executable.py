"""A program with its memory: attached parameters and states, and runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.backends.base import Executable
from rlx.backends.cpu.assemble import Assembled, Segment, address_of
from rlx.backends.cpu.checks import checker, limits_of, raise_broken
from rlx.backends.cpu.pool import Pool
from rlx.errors import InputError
from rlx.ir.bind import bind_op
from rlx.ir.node import Node, Value
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
        self._live = memoryview(made.program.live)
        self._bases = made.words.bases()
        self._addresses: dict[tuple[str, str], int] = {}
        self._kept: tuple[Any, ...] = ()
        self._given: dict[str, Array] = {}
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
        self._kept = (needed,)
        self._given = needed

    def run(
        self,
        inputs: Sequence[Array | None],
        outputs: Sequence[Array | None],
        sizes: Mapping[str, int],
    ) -> None:
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
        self._fill(self._live, [addresses[b] for b in self._bases], *live)
        if len(self.made.segments) == 1:
            self.pool.run(self.made.program)
        else:
            arrays = (dict(zip(self._inputs, inputs, strict=True)), outputs, sizes)
            for segment in self.made.segments:
                self._run_segment(segment, *arrays)
        if self.made.status[0]:
            self._raise_status()

    def _run_segment(
        self,
        segment: Segment,
        inputs: Mapping[str, Array | None],
        outputs: Sequence[Array | None],
        sizes: Mapping[str, int],
    ) -> None:
        self.pool.run(self.made.program, segment.first, segment.last)
        node = segment.host
        if node is None:
            return
        results = bind_op(node.op, sizes).reference(
            *[self.array(v, inputs, outputs, sizes) for v in node.inputs]
        )
        for value, result in zip(
            node.outputs, results if isinstance(results, tuple) else (results,), strict=True
        ):
            self.array(value, inputs, outputs, sizes)[...] = result

    def array(
        self,
        value: Value,
        inputs: Mapping[str, Array | None],
        outputs: Sequence[Array | None],
        sizes: Mapping[str, int],
    ) -> Array:
        """The memory of a value as an array, as the current run sees it."""
        root, slot = self.lir.home(value)
        base = self._memory(root, inputs, outputs)
        view = self.lir.slots[value].view
        shape = value.shape.bind(sizes)
        flat = base.reshape(-1).view(np.uint8)[slot.offset or 0 :] if base is self.arena else base
        flat = flat.reshape(-1)
        flat = flat[: flat.nbytes // shape.dtype.bytes * shape.dtype.bytes]
        if base is self.arena:
            usable = flat.nbytes // shape.dtype.bytes * shape.dtype.bytes
            flat = flat[:usable].view(shape.dtype.numpy)
        if view is None:
            count = int(np.prod(shape.static_dims, dtype=np.int64))
            return flat[:count].reshape(shape.static_dims)
        from rlx.ir.dim import evaluate

        offset = evaluate(view.offset, sizes)
        strides = [evaluate(s, sizes) * shape.dtype.bytes for s in view.strides]
        return np.lib.stride_tricks.as_strided(flat[offset:], shape.static_dims, strides)

    def _memory(
        self, root: Value, inputs: Mapping[str, Array | None], outputs: Sequence[Array | None]
    ) -> Array:
        node: Node = root.node
        kind = self.lir.slots[root].kind
        if kind in ("param", "state"):
            return self._given[node.name]
        if kind == "constant":
            data: Any = node.op
            return data.data.array
        found = None
        if kind == "input":
            found = inputs[node.name]
        elif kind == "output":
            found = next(o for o, v in zip(outputs, self.lir.outputs, strict=True) if v is root)
        return self.arena if found is None else found

    def _raise_status(self) -> None:
        node = self.lir.graph.nodes[int(self.made.status[0]) - 1]
        self.made.status[0] = 0
        raise InputError(
            "an index is out of range",
            where=node.op.name,
            got=f"operands {', '.join(f'{v.name} {v.shape}' for v in node.inputs)}",
            origin=node.origin,
            hint="check the ids or indices given to this run",
        )
