"""The vector body of a pass: reductions, stores and spills of one vector of elements."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.dtype import bool_
from rlx.llvm.builder import Value, i8, vec
from rlx.llvm.nest.instructions import NestBody, VectorPoint, may_drop_nan
from rlx.llvm.nest.reductions import Accumulator, State
from rlx.llvm.nest.registers import Element, register_type, spread
from rlx.loops.nest import Apply, Reduce
from rlx.loops.stages import Pass, Stages

CarriedStates = list[list[State]]  # per unrolled vector, per reduction


class VectorBody:
    """`buffers` are the addresses of spilled values, by instruction; those without one are spilled
    to a result. `wide`: f32 sums accumulate in f64."""

    def __init__(
        self,
        body: NestBody,
        stages: Stages,
        pass_: Pass,
        buffers: dict[int, Value],
        spills: bool,
        wide: bool = False,
    ) -> None:
        self.f, self.body, self.nest = body.f, body, body.nest
        self.stages, self.pass_, self.buffers, self.spills = stages, pass_, buffers, spills
        self.accumulators = [self.accumulator(n, wide) for n in pass_.reductions]

    def accumulator(self, number: int, wide: bool = False) -> Accumulator:
        reduction = self._reduction(number)
        skips_nan = reduction.kind == "max" and may_drop_nan(self.nest, number)
        dtype = self.nest.code[reduction.operand].dtype
        return Accumulator(self.f, reduction.kind, dtype, wide, skips_nan)

    def _reduction(self, number: int) -> Reduce:
        found = self.nest.code[number]
        assert isinstance(found, Reduce)
        return found

    def start(self, lanes: int) -> list[State]:
        return [a.start(lanes) for a in self.accumulators]

    def emit(self, vpoint: VectorPoint, states: Sequence[State]) -> list[State]:
        """Reduce, store and spill one vector. Returns the new accumulator states."""
        for number in self.pass_.reloaded:
            if number not in vpoint.values:
                vpoint.values[number] = self._reload(number, vpoint)
        pairs = zip(self.pass_.reductions, self.accumulators, states, strict=True)
        new = []
        for n, a, state in pairs:
            new.append(self._accumulate(self._reduction(n), a, state, vpoint))
        for store in self.pass_.stores:
            self.body.store(store.access, self.body.value(store.operand, vpoint), vpoint)
        for number in self.pass_.spilled if self.spills else ():
            self._spill(number, vpoint)
        return new

    def _accumulate(
        self, reduction: Reduce, a: Accumulator, state: State, vpoint: VectorPoint
    ) -> State:
        lanes = state[0].type.lanes
        fused = self._multiply_add(reduction, state, vpoint) if vpoint.mask is None else None
        if fused is not None:
            return fused
        x = spread(self.f, self.body.value(reduction.operand, vpoint), lanes)
        position: Element | None = None
        if reduction.position is not None:
            position = spread(self.f, self.body.value(reduction.position, vpoint), lanes)
        assert position is None or isinstance(position, Value)
        return a.update(state, x, position, vpoint.mask)

    def _multiply_add(self, reduction: Reduce, state: State, vpoint: VectorPoint) -> State | None:
        """The new state of a sum of products, as a fused multiply-add (None if it is none)."""
        product = self.nest.code[reduction.operand]
        if (
            reduction.kind != "sum"
            or not isinstance(product, Apply)
            or reduction.operand in vpoint.values
        ):
            return None
        types = {self.nest.code[a].dtype for a in product.args} | {product.dtype}
        if product.record.name not in ("mul", "square") or len(types) > 1:
            return None
        [dtype] = types
        if dtype.bits == 8 or state[0].type.scalar is not register_type(dtype):
            return None
        if not dtype.is_float:
            return None
        lanes, first, last = state[0].type.lanes, product.args[0], product.args[-1]
        x = spread(self.f, self.body.value(first, vpoint), lanes)
        y = spread(self.f, self.body.value(last, vpoint), lanes)
        assert isinstance(x, Value) and isinstance(y, Value)
        return [self.f.fma(x, y, state[0])]

    # -- spills ---------------------------------------------------------------------------------

    def _spill(self, number: int, vpoint: VectorPoint) -> None:
        spill = self.stages.spills[number]
        x = self.body.value(number, vpoint)
        if spill.access is not None:
            self.body.store(spill.access, x, vpoint)
            return
        x = spread(self.f, x, vpoint.lanes)
        assert isinstance(x, Value)
        raw = x.to(i8, signed=False) if self.nest.code[number].dtype is bool_ else x
        at = self._spill_address(number, vpoint)
        if vpoint.mask is None:
            self.f.store(raw, at)
        else:
            self.f.masked_store(raw, at, vpoint.mask)

    def _reload(self, number: int, vpoint: VectorPoint) -> Element:
        spill, dtype = self.stages.spills[number], self.nest.code[number].dtype
        if spill.access is not None:
            return self.body.load(spill.access, vpoint)
        type_ = vec(vpoint.lanes, i8 if dtype is bool_ else register_type(dtype))
        at = self._spill_address(number, vpoint)
        raw = (
            self.f.load(at, type_)
            if vpoint.mask is None
            else self.f.masked_load(at, type_, vpoint.mask)
        )
        return raw.ne(0) if dtype is bool_ else raw

    def _spill_address(self, number: int, vpoint: VectorPoint) -> Value:
        """Spilled elements of a row are stored in loop order."""
        position = self.f.i64(0)
        sizes = self.nest.spaces[self.pass_.space]
        for index, size in zip([*vpoint.point.inner, vpoint.index], sizes, strict=True):
            position = position * self.body.number(size) + index
        return self.f.gep(self.buffers[number], position, self.stages.spills[number].bytes)


def flatten(carried: CarriedStates) -> list[Value]:
    return [v for states in carried for state in states for v in state]


def unflatten(values: Sequence[Value], like: CarriedStates) -> CarriedStates:
    """The flat list of loop-carried values in the structure of `like`."""
    rest = iter(values)
    return [[[next(rest) for _ in state] for state in states] for states in like]
