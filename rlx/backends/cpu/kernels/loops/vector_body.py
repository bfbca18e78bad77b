"""What one pass does with one vector of elements."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cpu.kernels.loops.instructions import Body, Spot
from rlx.backends.cpu.kernels.loops.reductions import Accumulator, State
from rlx.backends.cpu.kernels.loops.registers import Element, register_type, spread
from rlx.backends.cpu.kernels.loops.softmax_weights import may_lose_nan
from rlx.ir.dtype import bool_
from rlx.llvm.builder import Value, i8, vec
from rlx.loops.nest import Apply, Fold
from rlx.loops.stages import Pass, Stages

Slots = list[list[State]]  # for each vector that is worked on at a time, the state of each fold


class Sweep:
    """`buffers` are addresses of kept elements, by instruction; a kept element that has none is in
    a result. `wide` sums of f32 are made in f64."""

    def __init__(
        self,
        body: Body,
        stages: Stages,
        this: Pass,
        buffers: dict[int, Value],
        keeps: bool,
        wide: bool = False,
    ) -> None:
        self.f, self.body, self.nest = body.f, body, body.nest
        self.stages, self.this, self.buffers, self.keeps = stages, this, buffers, keeps
        self.folds = [self.accumulator(n, wide) for n in this.folds]

    def accumulator(self, number: int, wide: bool = False) -> Accumulator:
        fold = self._fold(number)
        skips_nan = fold.kind == "max" and may_lose_nan(self.nest, number)
        dtype = self.nest.code[fold.operand].dtype
        return Accumulator(self.f, fold.kind, dtype, wide, skips_nan)

    def _fold(self, number: int) -> Fold:
        found = self.nest.code[number]
        assert isinstance(found, Fold)
        return found

    def start(self, lanes: int) -> list[State]:
        return [a.start(lanes) for a in self.folds]

    def element(self, spot: Spot, states: Sequence[State]) -> list[State]:
        """Folds, stores and keeps one vector; gives the folds' new states."""
        for number in self.this.recalled:
            if number not in spot.values:
                spot.values[number] = self._recall(number, spot)
        pairs = zip(self.this.folds, self.folds, states, strict=True)
        new = [self._take(self._fold(n), a, state, spot) for n, a, state in pairs]
        for store in self.this.stores:
            self.body.store(store.walk, self.body.value(store.operand, spot), spot)
        for number in self.this.kept if self.keeps else ():
            self._keep(number, spot)
        return new

    def _take(self, fold: Fold, a: Accumulator, state: State, spot: Spot) -> State:
        lanes = state[0].type.lanes
        joined = self._multiply_add(fold, state, spot) if spot.mask is None else None
        if joined is not None:
            return joined
        x = spread(self.f, self.body.value(fold.operand, spot), lanes)
        place: Element | None = None
        if fold.place is not None:
            place = spread(self.f, self.body.value(fold.place, spot), lanes)
        assert place is None or isinstance(place, Value)
        return a.take(state, x, place, spot.mask)

    def _multiply_add(self, fold: Fold, state: State, spot: Spot) -> State | None:
        """A sum of products takes each product unrounded, which is one instruction."""
        product = self.nest.code[fold.operand]
        if fold.kind != "sum" or not isinstance(product, Apply) or fold.operand in spot.values:
            return None
        types = {self.nest.code[a].dtype for a in product.args} | {product.dtype}
        if product.record.name not in ("mul", "square") or len(types) > 1:
            return None
        [dtype] = types
        if dtype.bits == 8 or state[0].type.scalar is not register_type(dtype):
            return None
        if not dtype.is_float:
            return None
        x, y = (
            spread(self.f, self.body.value(a, spot), state[0].type.lanes)
            for a in (product.args[0], product.args[-1])
        )
        assert isinstance(x, Value) and isinstance(y, Value)
        return [self.f.fma(x, y, state[0])]

    # -- from one pass to another ---------------------------------------------------------------

    def _keep(self, number: int, spot: Spot) -> None:
        keep = self.stages.keeps[number]
        x = self.body.value(number, spot)
        if keep.walk is not None:
            self.body.store(keep.walk, x, spot)
            return
        x = spread(self.f, x, spot.lanes)
        assert isinstance(x, Value)
        raw = x.to(i8, signed=False) if self.nest.code[number].dtype is bool_ else x
        at = self._kept_at(number, spot)
        if spot.mask is None:
            self.f.store(raw, at)
        else:
            self.f.masked_store(raw, at, spot.mask)

    def _recall(self, number: int, spot: Spot) -> Element:
        keep, dtype = self.stages.keeps[number], self.nest.code[number].dtype
        if keep.walk is not None:
            return self.body.load(keep.walk, spot)
        type_ = vec(spot.lanes, i8 if dtype is bool_ else register_type(dtype))
        at = self._kept_at(number, spot)
        raw = (
            self.f.load(at, type_)
            if spot.mask is None
            else self.f.masked_load(at, type_, spot.mask)
        )
        return raw.ne(0) if dtype is bool_ else raw

    def _kept_at(self, number: int, spot: Spot) -> Value:
        """Elements of the row lie in the buffer in the order of the loops."""
        position = self.f.i64(0)
        sizes = self.nest.spaces[self.this.space]
        for index, size in zip([*spot.frame.inner, spot.index], sizes, strict=True):
            position = position * self.body.number(size) + index
        return self.f.gep(self.buffers[number], position, self.stages.keeps[number].bytes)


def flatten(slots: Slots) -> list[Value]:
    return [v for states in slots for state in states for v in state]


def shaped(values: Sequence[Value], like: Slots) -> Slots:
    """The values again in the shape of `like`."""
    rest = iter(values)
    return [[[next(rest) for _ in state] for state in states] for states in like]
