"""Runs of single phases: what each phase reads, and what earlier ones left in the arena.

A phase can run alone if the phases before it have run on the same inputs, sizes and parameters. If
one has not, it runs first, provided that its inputs are given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from rlx.backends.base import Executable, Span
from rlx.backends.buffer import Buffer
from rlx.errors import BindingError, InputError, OptionError
from rlx.ir.lir import Lir, Slot
from rlx.ir.node import Node
from rlx.ir.phase import Phase

_PHASES = tuple(Phase)


class _Record(NamedTuple):
    """What a phase ran on."""

    inputs: dict[str, Any]  # copies
    sizes: dict[str, int]  # of dynamic dims


class PhaseRuns:
    """The phases whose results are in the arena of an executable. `version` is that of the
    parameters and states it was attached to."""

    def __init__(self, executable: Executable, version: object) -> None:
        self.executable, self.version = executable, version
        self._records: dict[Phase, _Record] = {}
        self._spent: dict[Phase, _Record] = {}  # those whose results a later phase wrote over

    @cached_property
    def _needs(self) -> _Needs:
        return _Needs(self.executable.lir)

    def known(self, first: Phase) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
        """Shapes of inputs and sizes that phases before `first` ran on."""
        shapes: dict[str, tuple[int, ...]] = {}
        sizes: dict[str, int] = {}
        for phase, record in self._records.items():
            if phase < first:
                needed = self._needs.symbols[phase]
                shapes |= {n: tuple(a.shape) for n, a in record.inputs.items()}
                sizes |= {s: n for s, n in record.sizes.items() if s in needed}
        return shapes, sizes

    def first_to_run(
        self, span: Span, given: Mapping[str, Any], sizes: Mapping[str, int], name: str
    ) -> Phase:
        """The phase to start with: the first of the span, or an earlier one whose results are
        missing. InputError if the inputs for that are missing."""
        first = span[0]
        for phase in _PHASES[: first.order]:
            if not self._is_done(phase, given, sizes):
                self._require_unspent(span[0], phase, given, sizes, name)
                first = phase
                break
        for phase in _PHASES[first.order : span[1].order + 1]:
            missing = sorted(self._needs.inputs[phase] - given.keys())
            if missing and phase < span[0]:
                why = (
                    "has not run" if phase not in self._records else "ran on other inputs or sizes"
                )
                raise InputError(
                    f"{span[0]} needs {phase}, which {why}", where=name, got=_names(given),
                    expected=f"{', '.join(missing)} too",
                    hint=f'run(…, phase="{phase}") before, or give its inputs here',
                )  # fmt: skip
            if missing:
                raise InputError(
                    f"missing inputs of {phase}", where=name, got=_names(given),
                    expected=", ".join(missing),
                )  # fmt: skip
        return first

    def _require_unspent(
        self, wanted: Phase, phase: Phase, given: Mapping[str, Any], sizes: Mapping[str, int],
        name: str,
    ) -> None:  # fmt: skip
        """Raise where a phase that updates states would run again on the same inputs."""
        spent = self._spent.get(phase)
        if phase in self._needs.writes and self._ran_on(phase, spent, given, sizes):
            raise InputError(
                f"{wanted} has used up what {phase} left, which updates states", where=name,
                expected=f'run(…, phase="{phase}") before, if it is to update them again',
            )  # fmt: skip

    def _is_done(self, phase: Phase, given: Mapping[str, Any], sizes: Mapping[str, int]) -> bool:
        record = self._records.get(phase)
        return not self._needs.has_work[phase] or self._ran_on(phase, record, given, sizes)

    def _ran_on(
        self,
        phase: Phase,
        record: _Record | None,
        given: Mapping[str, Any],
        sizes: Mapping[str, int],
    ) -> bool:
        """Whether a phase ran on these inputs, as far as it reads them, and sizes."""
        if record is None:
            return False
        read = [n for n in self._needs.inputs[phase] if n in given]
        return all(n in record.inputs and _same(given[n], record.inputs[n]) for n in read) and all(
            record.sizes[s] == sizes[s] for s in self._needs.symbols[phase] if s in record.sizes
        )

    def add(self, span: Span, given: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Record a run of these phases."""
        copies = {n: a if isinstance(a, Buffer) else a.copy() for n, a in given.items()}
        for phase in _PHASES:
            if span[0] <= phase <= span[1]:
                self._records[phase] = _Record(copies, dict(sizes))
            elif phase > span[1]:
                self._records.pop(phase, None)  # of older inputs
        steady = Phase.STEADY_STATE
        if span[0] <= steady <= span[1]:
            self._spent.clear()
        if span[1] is Phase.EPILOGUE and steady in self._records and not self._needs.epilogue_keeps:
            self._spent[steady] = self._records.pop(steady)


@contextmanager
def sizes_needed(phase: Phase, missing: Collection[str], nothing_ran: bool) -> Iterator[None]:
    """Sizes that a phase cannot know are those of earlier ones, which have not run."""
    try:
        yield
    except BindingError as error:
        if not nothing_ran or not missing or phase is Phase.PROLOGUE:
            raise
        raise InputError(
            f"{phase} needs the phases before it, which have not run", where=error.where,
            expected=f"{', '.join(sorted(missing))} and their sizes",
            hint='run(…, until="steady_state") before, or give all inputs here',
        ) from error  # fmt: skip


def _names(given: Mapping[str, Any]) -> str:
    return ", ".join(given) or "no input"


def _same(a: Any, b: Any) -> bool:
    """Whether two arrays have the same bytes; buffers of a device must be the same."""
    if isinstance(a, Buffer) or isinstance(b, Buffer):
        return a is b
    return a.shape == b.shape and np.array_equal(_bytes(a), _bytes(b))


def _bytes(array: Any) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class _Needs:
    """What each phase of a plan reads."""

    def __init__(self, lir: Lir) -> None:
        self.inputs: dict[Phase, set[str]] = {p: set() for p in Phase}
        self.symbols: dict[Phase, set[str]] = {p: set() for p in Phase}
        self.has_work = dict.fromkeys(Phase, False)
        self.writes: set[Phase] = set()  # phases that update states
        self._lir = lir
        nodes = zip(lir.graph.nodes, lir.phase_orders(), strict=True)
        self._work = [(node, _PHASES[order]) for node, order in nodes if lir.has_work(node)]
        for node, phase in self._work:
            self._add(node, phase)

    def _add(self, node: Node, phase: Phase) -> None:
        self.has_work[phase] = True
        if node.op.has_effect:
            self.writes.add(phase)
        for value in (*node.inputs, *node.outputs):
            self.symbols[phase] |= value.shape.symbols
        for value in node.inputs:
            root = self._lir.home(value)[0].node
            if root.op.name == "input":
                self.inputs[phase].add(root.name)
        if node.op.fields and node.op.has_symbols:
            self.symbols[phase] |= self._lir.graph.symbols()

    @cached_property
    def epilogue_keeps(self) -> bool:
        """Whether the epilogue leaves what it reads of the steady state as it is."""
        slots, late = self._lir.slots, Phase.EPILOGUE
        made = {n for n, phase in self._work if phase < late}
        read: list[Slot] = []
        wrote: list[tuple[int, int]] = []
        for node, phase in self._work:
            if phase < late:
                continue
            roots = [self._lir.home(v) for v in node.inputs]
            read += [slot for value, slot in roots if value.node in made]
            wrote += [_span(slots[v]) for v in node.outputs]
            if node.id in self._lir.scratch:
                offset, size = self._lir.scratch[node.id]
                wrote.append((offset, offset + size))
        return not any(
            low < stop and start < high for low, high in map(_span, read) for start, stop in wrote
        )


def _span(slot: Slot) -> tuple[int, int]:
    """The bytes of a slot in the arena; empty for one that is elsewhere."""
    return (0, 0) if slot.offset is None else (slot.offset, slot.offset + slot.size)


def phase_span(phase: Phase | str | None, until: Phase | str | None) -> Span | None:
    """The phases that `phase=` or `until=` of a run names."""
    if phase is None and until is None:
        return None
    if phase is not None and until is not None:
        raise OptionError("give phase or until, not both", where="run", got=f"{phase} and {until}")
    if until is not None:
        return Phase.PROLOGUE, Phase.of(until)
    return Phase.of(phase), Phase.of(phase)
