"""The passes of a nest over each row: a reduction ends a pass, and its result feeds later ones.
Elements that several passes need are spilled by the first or rematerialised, by their cost."""

from __future__ import annotations

from dataclasses import field

from rlx.ir.dtype import DType
from rlx.loops.nest import ROW, Access, Apply, BoundsCheck, Iota, Load, Nest, Reduce, Store
from rlx.support.records import dataclass

# Up to so many instructions an element is computed again: a spill costs a store and a load.
REMATERIALIZE_COST = 6


@dataclass
class Pass:
    """One pass over a space: the instructions it computes, its reductions and stores."""

    stage: int
    space: int
    reductions: list[int] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)  # in order
    reloaded: list[int] = field(default_factory=list)  # spilled by an earlier pass
    spilled: list[int] = field(default_factory=list)  # for a later pass


@dataclass(frozen=True)
class Spill:
    """Where an instruction's elements are spilled: in a result that is not written before the last
    reload (`access`), or in a buffer with `bytes` per element."""

    number: int
    space: int
    access: Access | None
    bytes: int


class Stages:
    """The passes of a nest, in order. `buffers` and `results` say where values may be spilled."""

    def __init__(self, nest: Nest, buffers: bool = True, results: bool = True) -> None:
        self.nest, self.results = nest, results
        self.stage = self._stages()
        self.passes = self._passes()
        self.cost = self._costs()
        self.spills: dict[int, Spill] = {}
        rematerialized: set[int] = set()  # expensive, but there is no place to spill
        while True:
            self._assign(rematerialized)
            self.spills = self._place_spills()
            unplaced = {k.number for k in self.spills.values() if k.access is None}
            if buffers or not unplaced:
                break
            rematerialized |= unplaced

    def _stages(self) -> list[int]:
        """For an element the first pass that can compute it; for a value of the row the pass that
        it is known after, −1 if before all."""
        stage: list[int] = []
        for i in self.nest.code:
            if isinstance(i, Reduce):
                stage.append(max(self._needed(a, stage) for a in i.args))
            elif i.level == ROW:
                stage.append(max((stage[a] for a in i.args), default=-1))
            else:
                stage.append(max((self._needed(a, stage) for a in i.args), default=0))
        return stage

    def _needed(self, arg: int, stage: list[int]) -> int:
        """The first pass that can use an instruction."""
        return stage[arg] + 1 if self.nest.code[arg].level == ROW else stage[arg]

    def _passes(self) -> list[Pass]:
        found: dict[tuple[int, int], Pass] = {}

        def at(stage: int, space: int) -> Pass:
            return found.setdefault((stage, space), Pass(stage, space))

        for number, i in enumerate(self.nest.code):
            if isinstance(i, Reduce):
                at(self.stage[number], i.space).reductions.append(number)
        for store in self.nest.stores:
            if store.level != ROW:
                at(self._needed(store.operand, self.stage), store.level).stores.append(store)
        return [found[key] for key in sorted(found)]

    def _costs(self) -> list[int]:
        """Cost of computing an element from memory and row values, in instructions."""
        total: list[int] = []
        for i in self.nest.code:
            if i.level == ROW:
                total.append(0)
                continue
            own = 1
            if isinstance(i, Apply):
                own = operations(i)
            elif isinstance(i, BoundsCheck) or (isinstance(i, Load) and i.access.gathered):
                own = 5
            total.append(own + sum(total[a] for a in i.args))
        return total

    def _assign(self, rematerialized: set[int]) -> None:
        """Assign to each pass what it computes, reloads and spills."""
        code = self.nest.code
        for at, pass_ in enumerate(self.passes):
            before = {i for p in self.passes[:at] if p.space == pass_.space for i in p.computed}
            demanded = [a for number in pass_.reductions for a in code[number].args]
            demanded += [s.operand for s in pass_.stores]
            computed, reloaded = set[int](), set[int]()
            while demanded:
                number = demanded.pop()
                if number in computed or number in reloaded or code[number].level == ROW:
                    continue
                is_real = not code[number].dtype.is_complex
                expensive = self.cost[number] > REMATERIALIZE_COST and is_real
                if expensive and number in before and number not in rematerialized:
                    reloaded.add(number)
                else:
                    computed.add(number)
                    demanded += code[number].args
            pass_.computed, pass_.reloaded = sorted(computed), sorted(reloaded)
        spilled: set[int] = set()
        for at, pass_ in enumerate(self.passes):
            later = {i for p in self.passes[at + 1 :] if p.space == pass_.space for i in p.reloaded}
            pass_.spilled = [i for i in pass_.computed if i in later and i not in spilled]
            spilled |= set(pass_.spilled)

    def _place_spills(self) -> dict[int, Spill]:
        """A place for every spilled value."""
        made: dict[int, Spill] = {}
        taken: set[Access] = set()
        for pass_ in self.passes:
            for number in pass_.spilled:
                access = self._result_for(number, pass_.stage, taken) if self.results else None
                size = spill_bytes(self.nest.code[number].dtype)
                made[number] = Spill(number, pass_.space, access, size)
                taken |= {access} if access is not None else set()
        return made

    def _result_for(self, number: int, stage: int, taken: set[Access]) -> Access | None:
        """A result of the same type that is first written after the last reload."""
        dtype = self.nest.code[number].dtype
        last = max(p.stage for p in self.passes if number in p.reloaded)
        for p in self.passes:
            for store in p.stores:
                fits = store.access.dtype is dtype and spill_bytes(dtype) == dtype.bytes
                if p.stage >= last > stage and fits and store.access not in taken:
                    return store.access
        return None

    def row_code(self, stage: int) -> list[int]:
        """Row-level instructions, other than reductions, that can run after pass `stage`."""
        return [
            n
            for n, i in enumerate(self.nest.code)
            if i.level == ROW and not isinstance(i, Reduce) and self.stage[n] == stage
        ]

    def row_stores(self, stage: int) -> list[Store]:
        return [s for s in self.nest.stores if s.level == ROW and self.stage[s.operand] == stage]

    @property
    def last(self) -> int:
        """The last stage that has a pass or row values."""
        return max([*self.stage, *(p.stage for p in self.passes), -1])

    def code_size(self, pass_: Pass) -> int:
        """Estimated lines of IR for one vector of a pass."""
        lines = 0
        for number in pass_.computed:
            i = self.nest.code[number]
            if isinstance(i, Apply):
                lines += 2 * operations(i)
            elif not isinstance(i, Iota):
                lines += 2
        return lines + 3 * len(pass_.reductions) + 3 * len(pass_.stores)


def operations(i: Apply) -> int:
    """Operations per element of an elementwise op."""
    found: int = getattr(i.record, "weight", 1)
    return found


def spill_bytes(dtype: DType) -> int:
    """Bytes of a spilled element: it keeps its register type."""
    if dtype.is_float:
        return max(dtype.bytes, 4)  # computed in f32 at least
    return dtype.bytes
