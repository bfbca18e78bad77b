"""Modules and functions: the scope of emitted code, calls, and the kernel's signature."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rlx.errors import CodegenError
from rlx.llvm.builder.core import Value, mismatch
from rlx.llvm.builder.flow import FlowOps
from rlx.llvm.builder.types import Type, i32, i64, ptr, void
from rlx.llvm.target import Target


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

    def __init__(
        self, target: Target | None = None, tuned: Mapping[str, int] | None = None
    ) -> None:
        """`tuned` has measured values of some tunables."""
        self.target = target or Target.host()
        self.tunables: dict[str, tuple[int, ...]] = {}  # those met: the default, then other values
        self._tuned = tuned or {}
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

    def tunable(self, name: str, default: int, *others: int) -> int:
        """A number that changes the speed of the code and not its results, such as a prefetch
        distance: the measured value if there is one, else the default."""
        self.tunables[name] = values = tuple(dict.fromkeys((default, *others)))
        found = self._tuned.get(name, default)
        return found if found in values else default

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
