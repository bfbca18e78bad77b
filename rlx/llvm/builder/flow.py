"""Control flow of a function: loops with carried values, branches with results, and switches.

Bodies are those of Python's `for`: they run once, while the code is written, and must not `break`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TypeVar

from rlx.errors import CodegenError
from rlx.llvm.builder.core import Value, mismatch
from rlx.llvm.builder.memory import ConvertOps
from rlx.llvm.builder.types import Type, i1, i64
from rlx.support.records import dataclass

Results = Value | Sequence[Value] | None
K = TypeVar("K")


@dataclass
class _Loop:
    """A loop whose body is being emitted."""

    start: Value
    stop: Value
    step: Value
    carry: Sequence[Value]
    guard: bool
    before: str
    inside: str
    after: str
    hole: int
    index: Value
    carried: list[Value]


class FlowOps(ConvertOps):
    """Control-flow methods of a function. Bodies are those of Python's `for` (`range`, `when`,
    `either`, `cases`, with `carry` for values), or Python functions that emit into it."""

    open_loops = 0

    def _label(self) -> str:
        self._count += 1
        return f"b{self._count}"

    def _place(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.block, self.closed = label, False

    def _jump(self, label: str) -> None:
        if not self.closed:
            self.effect(f"br label %{label}")

    def _fork(self, condition: Value, yes: str, no: str) -> None:
        if condition.type is not i1:
            mismatch("branch", condition.type, i1)
        self.effect(f"br i1 {condition.name}, label %{yes}, label %{no}")

    def _hole(self) -> int:
        """A placeholder for phis, filled once the block's other predecessor is known."""
        self.lines.append("")
        return len(self.lines) - 1

    def _fresh(self, type_: Type) -> Value:
        self._count += 1
        return Value(f"%v{self._count}", type_, self)  # type: ignore[arg-type]

    def loop(
        self,
        lo: Value | int,
        hi: Value | int,
        step: Value | int,
        carry: Sequence[Value],
        body: Callable[..., Results],
        guard: bool = True,
    ) -> list[Value]:
        """for i in range(lo, hi, step): carry = body(i, *carry). Returns the final carried values.

        Without the guard the body runs at least once. A loop of one known pass is no loop.
        """
        trips, bounds = self._bounds(lo, hi, step)
        if trips == 0:
            return list(carry)
        if trips == 1:
            return _matched("loop", body(bounds[0], *carry), carry)
        loop = self._open(bounds, carry, guard and trips is None)
        return self._close(loop, _matched("loop", body(loop.index, *loop.carried), carry))

    def range(
        self, lo: Value | int, hi: Value | int, step: Value | int = 1, guard: bool = True
    ) -> Iterator[Value]:
        """A loop without carried values, written `for i in f.range(0, n):`.

        The body is Python code that runs once, while the loop is written; it must not `break`.
        """
        trips, bounds = self._bounds(lo, hi, step)
        if trips == 0:
            return
        if trips == 1:
            yield bounds[0]
            return
        loop = self._open(bounds, (), guard and trips is None)
        self.open_loops += 1
        yield loop.index
        self.open_loops -= 1
        self._close(loop, [])

    def _bounds(
        self, lo: Value | int, hi: Value | int, step: Value | int
    ) -> tuple[int | None, tuple[Value, Value, Value]]:
        """(trip count if known: 0, 1 or 2 for more; the bounds as values of one type)."""
        index = next((v.type for v in (lo, hi, step) if isinstance(v, Value)), i64)
        bounds = self.const(lo, index), self.const(hi, index), self.const(step, index)
        start, stop, stride = (b.const for b in bounds)
        if stride is not None and stride <= 0:
            raise CodegenError("step must be positive", where="loop", got=stride)
        if start is None or stop is None:
            return None, bounds
        if start >= stop:
            return 0, bounds
        return 1 if stride is not None and start + stride >= stop else 2, bounds

    def _open(
        self, bounds: tuple[Value, Value, Value], carry: Sequence[Value], guard: bool
    ) -> _Loop:
        start, stop, step = bounds
        before, inside, after = self.block, self._label(), self._label()
        if guard:
            self._fork(start < stop, inside, after)
        else:
            self._jump(inside)
        self._place(inside)
        hole, index = self._hole(), self._fresh(start.type)
        carried = [self._fresh(c.type) for c in carry]
        return _Loop(start, stop, step, carry, guard, before, inside, after, hole, index, carried)

    def _close(self, loop: _Loop, out: list[Value]) -> list[Value]:
        if self.closed:
            raise CodegenError("a loop body must not return", where="loop")
        type_ = loop.index.type.name
        following = self.instr(
            f"add nuw nsw {type_} {loop.index.name}, {loop.step.name}", loop.index.type
        )
        again, end = following < loop.stop, self.block
        self._fork(again, loop.inside, loop.after)
        phis = [loop.index, *loop.carried]
        first, then = [loop.start, *loop.carry], [following, *out]
        self.lines[loop.hole] = "\n".join(
            f"  {p.name} = phi {p.type.name} [ {a.name}, %{loop.before} ], [ {b.name}, %{end} ]"
            for p, a, b in zip(phis, first, then, strict=True)
        )
        self._place(loop.after)
        if not loop.guard:
            return out
        return self._merge("loop", [(list(loop.carry), loop.before), (out, end)])

    def carry(self, values: Sequence[Value] = ()) -> Carry:
        """Values that a loop updates, or that the arms of a branch set."""
        return Carry(self, values)

    def when(self, condition: Value) -> Iterator[None]:
        """A branch without results, written `for _ in f.when(condition):`."""
        if condition.const is not None:
            if condition.const:
                yield
            return
        yes, _, after = self._label(), self._label(), self._label()
        self._fork(condition, yes, after)
        yield from self._arms([(None, yes)], after, None)
        self._place(after)

    def either(self, condition: Value, out: Carry | None = None) -> Iterator[bool]:
        """Both arms of a branch, written `for holds in f.either(condition): if holds: ...`.

        `out` has the values that the arm which runs gave it.
        """
        if condition.const is not None:
            yield bool(condition.const)
            return
        yes, no, after = self._label(), self._label(), self._label()
        self._fork(condition, yes, no)
        arms = yield from self._arms([(True, yes), (False, no)], after, out)
        self._join_into("if", arms, after, out)

    def cases(self, value: Value, numbers: Sequence[int]) -> Iterator[int]:
        """A switch without results, written `for number in f.cases(value, (1, 2, 4)):`."""
        other, after = self._label(), self._label()
        labels = [(number, self._label()) for number in numbers]
        table = " ".join(f"{value.type.name} {n}, label %{l}" for n, l in labels)
        self.effect(f"switch {value.type.name} {value.name}, label %{other} [ {table} ]")
        self._place(other)
        self._jump(after)
        yield from self._arms(labels, after, None)
        self._place(after)

    def _arms(
        self, labels: Sequence[tuple[K, str]], after: str, out: Carry | None
    ) -> Generator[K, None, list[tuple[list[Value], str]]]:
        """Arms as passes of a `for`; those that returned from the function have no results."""
        arms = []
        for key, label in labels:
            self._place(label)
            self.open_loops += 1
            yield key
            self.open_loops -= 1
            if not self.closed:
                arms.append(([] if out is None else out.values, self.block))
                self._jump(after)
        return arms

    def _join_into(
        self, op: str, arms: list[tuple[list[Value], str]], after: str, out: Carry | None
    ) -> None:
        results = self._join(op, arms, after)
        if out is not None:
            out.values = results

    def while_(
        self,
        carry: Sequence[Value],
        condition: Callable[..., Value],
        body: Callable[..., Results],
    ) -> list[Value]:
        """while condition(*carry): carry = body(*carry). Returns the final carried values."""
        before, head = self.block, self._label()
        inside, after = self._label(), self._label()
        self._jump(head)
        self._place(head)
        hole, carried = self._hole(), [self._fresh(c.type) for c in carry]
        self._fork(condition(*carried), inside, after)
        self._place(inside)
        out = _matched("while", body(*carried), carry)
        end = self.block
        self._jump(head)
        self.lines[hole] = "\n".join(
            f"  {p.name} = phi {p.type.name} [ {a.name}, %{before} ], [ {b.name}, %{end} ]"
            for p, a, b in zip(carried, carry, out, strict=True)
        )
        self._place(after)
        return carried

    def if_(
        self,
        condition: Value,
        then: Callable[[], Results],
        orelse: Callable[[], Results] | None = None,
    ) -> list[Value]:
        """Emit a branch; returns the results of the body that runs (both return the same types)."""
        if condition.const is not None:
            chosen = then if condition.const else orelse
            return _listed(chosen()) if chosen else []
        yes, no, after = self._label(), self._label(), self._label()
        self._fork(condition, yes, no if orelse else after)
        arms = self._arm(yes, then, after)
        arms += self._arm(no, orelse, after) if orelse else [([], self.block)]
        return self._join("if", arms, after)

    def switch(
        self,
        value: Value,
        cases: Mapping[int, Callable[[], Results]],
        default: Callable[[], Results] | None = None,
    ) -> list[Value]:
        """Emit a switch; returns the results of the body that runs (all return the same types)."""
        other, after = self._label(), self._label()
        labels = {number: self._label() for number in cases}
        table = " ".join(f"{value.type.name} {n}, label %{l}" for n, l in labels.items())
        self.effect(f"switch {value.type.name} {value.name}, label %{other} [ {table} ]")
        arms = self._arm(other, default or (lambda: None), after)
        for number, body in cases.items():
            arms += self._arm(labels[number], body, after)
        return self._join("switch", arms, after)

    def _arm(
        self, label: str, body: Callable[[], Results], after: str
    ) -> list[tuple[list[Value], str]]:
        """Emit one arm; it has no results if it returned from the function."""
        self._place(label)
        out = _listed(body())
        if self.closed:
            return []
        end = self.block
        self._jump(after)
        return [(out, end)]

    def _join(self, op: str, arms: list[tuple[list[Value], str]], after: str) -> list[Value]:
        if not arms:
            self.closed = True
            return []
        self._place(after)
        return self._merge(op, arms)

    def _merge(self, op: str, arms: list[tuple[list[Value], str]]) -> list[Value]:
        """Phis that merge the results of the arms."""
        first = arms[0][0]
        for values, _ in arms[1:]:
            _matched(op, values, first)
        if len(arms) == 1:
            return first
        merged = []
        for position, value in enumerate(first):
            incoming = ", ".join(f"[ {values[position].name}, %{b} ]" for values, b in arms)
            merged.append(self.instr(f"phi {value.type.name} {incoming}", value.type))
        return merged


class Carry:
    """Values that a loop carries from one pass to the next; afterwards the final ones.

    total = f.carry([zero])
    for i in total.range(0, n):
        total.values = [total.values[0] + f.load(f.gep(x, i, f32), f32)]
    """

    def __init__(self, f: FlowOps, values: Sequence[Value]) -> None:
        self._f, self.values = f, list(values)
        self._inside = self._after = ""  # labels of the loop `forever`

    def range(
        self, lo: Value | int, hi: Value | int, step: Value | int = 1, guard: bool = True
    ) -> Iterator[Value]:
        """As `Function.range`, with these values carried."""
        f, first = self._f, self.values
        trips, bounds = f._bounds(lo, hi, step)
        if trips == 0:
            return
        if trips == 1:
            yield bounds[0]
            self.values = _matched("loop", self.values, first)
            return
        loop = f._open(bounds, first, guard and trips is None)
        self.values = loop.carried
        f.open_loops += 1
        yield loop.index
        f.open_loops -= 1
        self.values = f._close(loop, _matched("loop", self.values, first))

    def forever(self) -> Iterator[None]:
        """A loop of any number of passes, written `for _ in carry.forever():`. Its body begins with
        `break_unless(condition)`: the values at that point are the final ones."""
        f, first, before = self._f, self.values, self._f.block
        head, self._inside, self._after = f._label(), f._label(), f._label()
        f._jump(head)
        f._place(head)
        hole, carried = f._hole(), [f._fresh(c.type) for c in first]
        after, self.values = self._after, list(carried)
        f.open_loops += 1
        yield
        f.open_loops -= 1
        out, end = _matched("while", self.values, first), f.block
        f._jump(head)
        f.lines[hole] = "\n".join(
            f"  {p.name} = phi {p.type.name} [ {a.name}, %{before} ], [ {b.name}, %{end} ]"
            for p, a, b in zip(carried, first, out, strict=True)
        )
        f._place(after)
        self.values = carried

    def break_unless(self, condition: Value) -> None:
        """Leave the loop `forever` that has just begun, unless the condition holds."""
        self._f._fork(condition, self._inside, self._after)
        self._f._place(self._inside)


def _listed(results: Results) -> list[Value]:
    if results is None:
        return []
    return [results] if isinstance(results, Value) else list(results)


def _matched(op: str, results: Results, expected: Sequence[Value]) -> list[Value]:
    """The results, checked to be as many and of the same types as `expected`."""
    listed = _listed(results)
    if [v.type for v in listed] != [v.type for v in expected]:
        raise CodegenError(
            "bodies and carried values differ",
            where=op,
            got=[v.type.name for v in listed],
            expected=[v.type.name for v in expected],
        )
    return listed
