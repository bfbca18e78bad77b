"""Modules and functions: the scope of emitted code, its control flow, and the kernel's signature.

Control flow is loops with carried values, branches with results, and switches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rlx.errors import CodegenError
from rlx.llvm.builder.core import Value, mismatch
from rlx.llvm.builder.memory import ConvertOps
from rlx.llvm.builder.types import Type, i1, i32, i64, ptr, void
from rlx.llvm.target import Target
from rlx.support.records import dataclass

Results = Value | Sequence[Value] | None


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
    """Control-flow methods of a function. Bodies are Python functions that emit into it."""

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


class Function(FlowOps):
    """One function under construction. `f["name"]` is a parameter."""

    def __init__(
        self,
        module: Module,
        name: str,
        params: Sequence[tuple[str, Type]],
        result: Type,
        internal: bool,
        noalias: bool,
    ) -> None:
        super().__init__(module)
        self.name, self.result, self.internal = name, result, internal
        self.params = {n: Value(f"%{n}", t, self) for n, t in params}
        self._noalias = noalias

    def __getitem__(self, name: str) -> Value:
        return self.params[name]

    @property
    def target(self) -> Target:
        return self.module.target

    def ret(self, value: Value | None = None) -> None:
        """Return from the function. A void function needs none at its end."""
        got = value.type if value is not None else void
        if got is not self.result:
            mismatch(f"ret of {self.name}", got, self.result)
        self.effect("ret void" if value is None else f"ret {value.type.name} {value.name}")
        self.closed = True

    def call(self, callee: Function, *args: Value) -> Value:
        """Call another function of the module."""
        wanted = [p.type for p in callee.params.values()]
        self._check_args(callee.name, args, wanted)
        return self._call(f"@{callee.name}", callee.result, args)

    def call_pointer(self, address: Value, result: Type, *args: Value) -> Value:
        """Call through a pointer; parameter types are not checked."""
        if address.type is not ptr:
            mismatch("call_pointer", address.type, ptr)
        return self._call(address.name, result, args)

    def _call(self, name: str, result: Type, args: Sequence[Value]) -> Value:
        text = f"call {result.name} {name}({', '.join(f'{a.type.name} {a.name}' for a in args)})"
        if result is void:
            self.effect(text)
            return Value("", void, self)
        return self.instr(text, result)

    def _check_args(self, name: str, args: Sequence[Value], wanted: Sequence[Type]) -> None:
        if [a.type for a in args] != list(wanted):
            raise CodegenError(
                "arguments do not fit",
                where=f"call {name}",
                got=[a.type.name for a in args],
                expected=[t.name for t in wanted],
            )

    @contextmanager
    def exact(self) -> Iterator[None]:
        """No multiply and add written inside is joined into an fma."""
        saved, self.fast = self.fast, ""
        yield
        self.fast = saved

    def split(self, total: Value | int, grain: int = 1) -> tuple[Value, Value]:
        """[lo, hi) of `total` items for this worker, in a kernel with `tid` and `nth`.

        Ranges begin at multiples of `grain` and differ by at most one grain; late workers may get
        nothing (lo == hi).
        """
        tid, nth = self["tid"].to(i64), self["nth"].to(i64)
        count = self.const(total, i64)
        chunks = self.ceil_div(count, grain)
        each = chunks.udiv(nth)
        rest = chunks - each * nth
        first = tid * each + self.min(tid, rest)
        size = each + (tid < rest).to(i64)
        lo = self.min(first * grain, count)
        return lo, self.min((first + size) * grain, count)

    def clock(self) -> Value:
        """A 64-bit counter of constant rate: the time stamp counter or the system counter."""
        name = "llvm.readcyclecounter" if self.target.is_x86 else "llvm.readsteadycounter"
        return self.intrinsic(name, i64)

    def relax(self) -> None:
        """The spin-loop hint (pause, yield)."""
        if self.target.is_x86:
            self.intrinsic("llvm.x86.sse2.pause", void)
        else:
            self.intrinsic("llvm.aarch64.hint", void, self.i32(1))

    def text(self) -> str:
        if self.open_loops:
            raise CodegenError("a `for ... in f.range` was left early", where=self.name)
        if not self.closed:
            if self.result is not void:
                raise CodegenError("the function ends without ret", where=self.name)
            self.ret()
        params = ", ".join(
            f"ptr noalias {p.name}"
            if p.type is ptr and self._noalias
            else f"{p.type.name} {p.name}"
            for p in self.params.values()
        )
        linkage = "internal " if self.internal else ""
        head = f"define {linkage}{self.result.name} @{self.name}({params}) nounwind {{"
        return "\n".join([head, "entry:", *self.allocas, *self.lines, "}", ""])


class Module:
    """A unit of compilation for one target."""

    function_class: type[Function] = Function  # what `function` makes; other machines have more

    def __init__(self, target: Target | None = None) -> None:
        self.target = target or Target.host()
        self.functions: dict[str, Function] = {}
        self.metadata: dict[str, str] = {}
        self._declared: dict[str, str] = {}
        self._globals: list[str] = []

    def function(
        self,
        name: str,
        params: Sequence[tuple[str, Type]],
        result: Type = void,
        internal: bool = False,
        noalias: bool = False,
    ) -> Function:
        """Begin a function. `noalias`: pointers given to it never overlap what others write."""
        if name in self.functions:
            raise CodegenError("two functions of one name", where="module", got=name)
        made = self.function_class(self, name, params, result, internal, noalias)
        self.functions[name] = made
        return made

    def kernel(self, name: str = "kernel", result: Type = void) -> Function:
        """Begin a function that a program can run: (ptr args, i32 tid, i32 nth).

        It returns void, or an i64 if it is a jump: the distance to the next step.
        """
        return self.function(name, [("args", ptr), ("tid", i32), ("nth", i32)], result)

    def declare(self, name: str, result: Type, params: Sequence[Type]) -> None:
        """Declare an intrinsic or an external function."""
        if name not in self._declared and name not in self.functions:
            types = ", ".join(t.name for t in params)
            self._declared[name] = f"declare {result.name} @{name}({types})"

    def declare_text(self, name: str, text: str) -> None:
        """As `declare`, for signatures that types cannot say (variadic ones)."""
        self._declared.setdefault(name, text)

    def table(self, fn: Function, data: bytes, align: int = 64) -> Value:
        """Constant bytes in the object, as a pointer for `fn`."""
        name = f"@table{len(self._globals)}"
        body = "\\" + data.hex("\\") if data else ""  # a backslash before every byte
        self._globals.append(
            f'{name} = private unnamed_addr constant [{len(data)} x i8] c"{body}", align {align}'
        )
        return Value(name, ptr, fn)

    def text(self) -> str:
        """LLVM IR of the whole module; the same calls give the same text."""
        bodies = [f.text() for f in self.functions.values()]
        return "\n".join(
            [*self._globals, *bodies, *self._declared.values(), *self.metadata.values(), ""]
        )
