"""When each instruction of a nest can run: passes over the elements of a row, with values of the
row between them; and which elements are kept from one pass to a later one."""

from __future__ import annotations

from dataclasses import field

from rlx.codegen.emit import i8
from rlx.codegen.region.nest import ROW, Apply, Checked, Count, Fold, Load, Nest, Store, Walk
from rlx.codegen.region.registers import register_type
from rlx.ir.dtype import DType, bool_, c64
from rlx.support.records import dataclass

# Keeping an element costs a store and a load; computing it again costs so many instructions.
KEEP_ABOVE = 6


@dataclass
class Pass:
    """One sweep over a space: elements to compute, folds that take them, stores."""

    stage: int
    space: int
    folds: list[int] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)  # in order
    recalled: list[int] = field(default_factory=list)  # kept by an earlier pass
    kept: list[int] = field(default_factory=list)  # wanted by a later pass


@dataclass(frozen=True)
class Keep:
    """Where elements of an instruction lie until a later pass wants them: in a result that is
    written then, or in a buffer of so many bytes per element."""

    number: int
    space: int
    walk: Walk | None
    bytes: int


class Stages:
    """The passes of a nest, in order. Without `buffers`, only results hold what is kept; without
    `results`, only buffers do."""

    def __init__(self, nest: Nest, buffers: bool = True, results: bool = True) -> None:
        self.nest, self.results = nest, results
        self.stage = self._stages()
        self.passes = self._passes()
        self.cost = self._costs()
        self.keeps: dict[int, Keep] = {}
        again: set[int] = set()  # what is computed again although it is dear
        while True:
            self._fill(again)
            self.keeps = self._places()
            homeless = {k.number for k in self.keeps.values() if k.walk is None}
            if buffers or not homeless:
                break
            again |= homeless

    def _stages(self) -> list[int]:
        """For an element the first pass that can compute it; for a value of the row the pass after
        which it is known, −1 being before all."""
        stage: list[int] = []
        for i in self.nest.code:
            if isinstance(i, Fold):
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
            if isinstance(i, Fold):
                at(self.stage[number], i.space).folds.append(number)
        for store in self.nest.stores:
            if store.level != ROW:
                at(self._needed(store.operand, self.stage), store.level).stores.append(store)
        return [found[key] for key in sorted(found)]

    def _costs(self) -> list[int]:
        """Instructions it takes to compute an element from memory and the row."""
        total: list[int] = []
        for i in self.nest.code:
            if i.level == ROW:
                total.append(0)
                continue
            own = 1
            if isinstance(i, Apply):
                own = operations(i)
            elif isinstance(i, Checked) or (isinstance(i, Load) and i.walk.terms):
                own = 5
            total.append(own + sum(total[a] for a in i.args))
        return total

    def _fill(self, again: set[int]) -> None:
        """What each pass computes, what it takes over from earlier ones, what it keeps."""
        code = self.nest.code
        for at, this in enumerate(self.passes):
            before = {i for p in self.passes[:at] if p.space == this.space for i in p.computed}
            wanted = [a for number in this.folds for a in code[number].args]
            wanted += [s.operand for s in this.stores]
            computed, recalled = set[int](), set[int]()
            while wanted:
                number = wanted.pop()
                if number in computed or number in recalled or code[number].level == ROW:
                    continue
                dear = self.cost[number] > KEEP_ABOVE and code[number].dtype is not c64
                if dear and number in before and number not in again:
                    recalled.add(number)
                else:
                    computed.add(number)
                    wanted += code[number].args
            this.computed, this.recalled = sorted(computed), sorted(recalled)
        kept: set[int] = set()
        for at, this in enumerate(self.passes):
            later = {i for p in self.passes[at + 1 :] if p.space == this.space for i in p.recalled}
            this.kept = [i for i in this.computed if i in later and i not in kept]
            kept |= set(this.kept)

    def _places(self) -> dict[int, Keep]:
        """A place for all that is kept."""
        made: dict[int, Keep] = {}
        taken: set[Walk] = set()
        for this in self.passes:
            for number in this.kept:
                walk = self._result_for(number, this.stage, taken) if self.results else None
                size = kept_bytes(self.nest.code[number].dtype)
                made[number] = Keep(number, this.space, walk, size)
                taken |= {walk} if walk is not None else set()
        return made

    def _result_for(self, number: int, stage: int, taken: set[Walk]) -> Walk | None:
        """A result of the same type that is written once the elements are wanted no more."""
        dtype = self.nest.code[number].dtype
        last = max(p.stage for p in self.passes if number in p.recalled)
        for p in self.passes:
            for store in p.stores:
                fits = store.walk.dtype is dtype and kept_bytes(dtype) == dtype.bytes
                if p.stage >= last > stage and fits and store.walk not in taken:
                    return store.walk
        return None

    def row_code(self, stage: int) -> list[int]:
        """Values of the row, other than folds, that are known after the pass `stage`."""
        return [
            n
            for n, i in enumerate(self.nest.code)
            if i.level == ROW and not isinstance(i, Fold) and self.stage[n] == stage
        ]

    def row_stores(self, stage: int) -> list[Store]:
        return [s for s in self.nest.stores if s.level == ROW and self.stage[s.operand] == stage]

    @property
    def last(self) -> int:
        """The last stage after which something is known or stored."""
        return max([*self.stage, *(p.stage for p in self.passes), -1])

    def weight(self, this: Pass) -> int:
        """How much code one vector of a pass is, roughly in lines."""
        lines = 0
        for number in this.computed:
            i = self.nest.code[number]
            if isinstance(i, Apply):
                lines += 2 * operations(i)
            elif not isinstance(i, Count):
                lines += 2
        return lines + 3 * len(this.folds) + 3 * len(this.stores)


def operations(i: Apply) -> int:
    """Operations per element of an elementwise op."""
    found: int = getattr(i.record, "weight", 1)
    return found


def kept_bytes(dtype: DType) -> int:
    """Bytes of a kept element: it is stored as it is computed."""
    return i8.bytes if dtype is bool_ else register_type(dtype).bytes
