"""SSA values, and the instructions that their operators emit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from rlx.errors import CodegenError
from rlx.llvm.builder.types import Number, Type, i64, literal, ptr, void

if TYPE_CHECKING:
    from rlx.llvm.builder.module import Function, Module


class Value:
    """An SSA value. Operators emit instructions into the function the value belongs to.

    Integers are signed where it matters: `<`, `//` and `%` (both truncate, as in C). `>>` shifts in
    zeros; `ashr` keeps the sign. Comparisons of floats are ordered: false with a NaN.
    """

    __slots__ = ("const", "fn", "name", "type")

    def __init__(self, name: str, type_: Type, fn: Function, const: int | None = None) -> None:
        self.name, self.type, self.fn, self.const = name, type_, fn, const

    def __repr__(self) -> str:
        return f"{self.type.name} {self.name}"

    def __bool__(self) -> NoReturn:
        raise CodegenError(
            "a value has no truth while code is being generated",
            where="bool",
            got=repr(self),
            hint="use f.if_(...) or f.select(...)",
        )

    def __add__(self, other: Value | Number) -> Value:
        return self.fn.binary("add", self, other)

    def __radd__(self, other: Number) -> Value:
        return self.fn.binary("add", self.fn.const(other, self.type), self)

    def __sub__(self, other: Value | Number) -> Value:
        return self.fn.binary("sub", self, other)

    def __rsub__(self, other: Number) -> Value:
        return self.fn.binary("sub", self.fn.const(other, self.type), self)

    def __mul__(self, other: Value | Number) -> Value:
        return self.fn.binary("mul", self, other)

    def __rmul__(self, other: Number) -> Value:
        return self.fn.binary("mul", self.fn.const(other, self.type), self)

    def __truediv__(self, other: Value | Number) -> Value:
        if self.type.is_int:
            raise CodegenError("integers divide with //", where="/", got=repr(self))
        return self.fn.binary("div", self, other)

    def __rtruediv__(self, other: Number) -> Value:
        return self.fn.const(other, self.type) / self

    def __floordiv__(self, other: Value | Number) -> Value:
        return self.fn.binary("sdiv", self, other)

    def __mod__(self, other: Value | Number) -> Value:
        return self.fn.binary("srem", self, other)

    def __and__(self, other: Value | Number) -> Value:
        return self.fn.binary("and", self, other)

    def __or__(self, other: Value | Number) -> Value:
        return self.fn.binary("or", self, other)

    def __xor__(self, other: Value | Number) -> Value:
        return self.fn.binary("xor", self, other)

    def __invert__(self) -> Value:
        return self.fn.binary("xor", self, -1 if self.type.scalar.bits > 1 else 1)

    def __lshift__(self, other: Value | Number) -> Value:
        return self.fn.binary("shl", self, other)

    def __rshift__(self, other: Value | Number) -> Value:
        return self.fn.binary("lshr", self, other)

    def ashr(self, other: Value | Number) -> Value:
        return self.fn.binary("ashr", self, other)

    def udiv(self, other: Value | Number) -> Value:
        return self.fn.binary("udiv", self, other)

    def urem(self, other: Value | Number) -> Value:
        return self.fn.binary("urem", self, other)

    def __neg__(self) -> Value:
        if self.type.is_float:
            return self.fn.instr(f"fneg {self.type.name} {self.name}", self.type)
        return self.fn.binary("sub", self.fn.const(0, self.type), self)

    def __lt__(self, other: Value | Number) -> Value:
        return self.fn.compare("lt", self, other)

    def __le__(self, other: Value | Number) -> Value:
        return self.fn.compare("le", self, other)

    def __gt__(self, other: Value | Number) -> Value:
        return self.fn.compare("gt", self, other)

    def __ge__(self, other: Value | Number) -> Value:
        return self.fn.compare("ge", self, other)

    def eq(self, other: Value | Number) -> Value:
        return self.fn.compare("eq", self, other)

    def ne(self, other: Value | Number) -> Value:
        """Not equal; for floats true when either is NaN."""
        return self.fn.compare("ne", self, other)

    def ult(self, other: Value | Number) -> Value:
        return self.fn.compare("ult", self, other)

    def ule(self, other: Value | Number) -> Value:
        return self.fn.compare("ule", self, other)

    def is_nan(self) -> Value:
        return self.fn.compare("uno", self, self)

    def to(self, type_: Type, signed: bool = True) -> Value:
        """The same number in another type; a scalar type keeps the lanes."""
        return self.fn.convert(self, type_, signed)

    def bits(self, type_: Type | None = None) -> Value:
        """Reinterpret the bits as another type (by default the integer one)."""
        return self.fn.bitcast(self, type_ or self.type.as_int)


_FLOAT_OPS = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}
_INT_OPS = frozenset(
    ["add", "sub", "mul", "sdiv", "udiv", "srem", "urem", "and", "or", "xor", "shl", "lshr", "ashr"]
)
_INT_PREDICATES = {"lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge"} | {
    p: p for p in ("eq", "ne", "ult", "ule", "ugt", "uge", "slt", "sle", "sgt", "sge")
}
_FLOAT_PREDICATES = {
    "lt": "olt",
    "le": "ole",
    "gt": "ogt",
    "ge": "oge",
    "eq": "oeq",
    "ne": "une",
} | {p: p for p in ("uno", "ord", "olt", "ole", "ogt", "oge", "oeq", "une", "ult", "ule", "one")}
_FOLD: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}
_FOLD_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}
# Operations that leave the left operand as it is when the right one is this number.
_RIGHT_UNIT = {"add": 0, "sub": 0, "or": 0, "xor": 0, "shl": 0, "lshr": 0, "ashr": 0}
_RIGHT_UNIT |= {"mul": 1, "sdiv": 1, "udiv": 1}


class Core:
    """Appends instructions as LLVM IR text; all other methods of a function build on this."""

    module: Module
    fast: str
    """Fast-math flags of float arithmetic; `contract` lets a multiply and an add become one fma."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.fast = "contract "
        self.lines: list[str] = []
        self.allocas: list[str] = []
        self.block = "entry"
        self.closed = False
        self._count = 0

    def instr(self, text: str, type_: Type) -> Value:
        """Append one instruction and name its result."""
        self._count += 1
        name = f"%v{self._count}"
        self.lines.append(f"  {name} = {text}")
        return Value(name, type_, self)  # type: ignore[arg-type]

    def effect(self, text: str) -> None:
        """Append an instruction that has no result."""
        self.lines.append("  " + text)

    def comment(self, text: str) -> None:
        self.lines.append("  ; " + text.replace("\n", " "))

    def const(self, value: Value | Number | Sequence[Number], type_: Type = i64) -> Value:
        """A constant; one number fills all lanes of a vector."""
        if value.__class__ is Value:
            assert isinstance(value, Value)
            if value.type is not type_:
                mismatch("const", value.type, type_)
            return value
        assert not isinstance(value, Value)
        text = literal(value, type_)
        known = int(text) if type_.is_int and type_.lanes == 1 else None
        return Value(text, type_, self, known)  # type: ignore[arg-type]

    def binary(self, op: str, a: Value, b: Value | Number) -> Value:
        """Arithmetic or a bitwise operation on two equal types."""
        type_ = a.type
        if b.__class__ is not Value:
            b = self.const(b, type_)
        assert isinstance(b, Value)
        if b.type is not type_:
            mismatch(op, type_, b.type)
        if type_.is_float:
            name = _FLOAT_OPS.get(op)
            if name is None:
                unsuited(op, type_)
            return self.instr(f"{name} {self.fast}{type_.name} {a.name}, {b.name}", type_)
        if not type_.is_int or op not in _INT_OPS:
            unsuited(op, type_)
        if b.const is not None:
            folded = self._fold(op, a, b.const)
            if folded is not None:
                return folded
        elif a.const == 0 and op == "add":
            return b
        return self.instr(f"{op} {type_.name} {a.name}, {b.name}", type_)

    def _fold(self, op: str, a: Value, b: int) -> Value | None:
        """Constant folding, as index arithmetic is full of constants: a line costs LLVM 25 µs."""
        if _RIGHT_UNIT.get(op) == b:
            return a
        if op == "mul" and b == 0:
            return self.const(0, a.type)
        if a.const is None or op not in _FOLD:
            return None
        result = _FOLD[op](a.const, b) & (1 << a.type.bits) - 1
        return self.const(result, a.type)

    def compare(self, predicate: str, a: Value, b: Value | Number) -> Value:
        """i1, or a vector of i1. Float predicates are ordered, except `ne` and `uno`."""
        type_ = a.type
        if b.__class__ is not Value:
            b = self.const(b, type_)
        assert isinstance(b, Value)
        if b.type is not type_:
            mismatch(predicate, type_, b.type)
        if type_.is_float:
            name, kind = _FLOAT_PREDICATES.get(predicate), "fcmp"
        else:
            name, kind = _INT_PREDICATES.get(predicate), "icmp"
        if name is None:
            unsuited(predicate, type_)
        if a.const is not None and b.const is not None and predicate in _FOLD_COMPARE:
            return self.const(int(_FOLD_COMPARE[predicate](a.const, b.const)), type_.mask)
        return self.instr(f"{kind} {name} {type_.name} {a.name}, {b.name}", type_.mask)

    def select(self, mask: Value, a: Value | Number, b: Value | Number) -> Value:
        """a where the mask is set, else b; at least one of them must be a Value."""
        type_ = a.type if isinstance(a, Value) else b.type if isinstance(b, Value) else None
        if type_ is None:
            raise CodegenError("two constants; their type is unknown", where="select", got=(a, b))
        x, y = self.const(a, type_), self.const(b, type_)
        if mask.type.scalar.bits != 1 or mask.type.lanes not in (1, type_.lanes):
            mismatch("select", mask.type, type_.mask)
        if mask.const is not None:
            return x if mask.const else y
        return self.instr(
            f"select {mask.type.name} {mask.name}, {type_.name} {x.name}, {type_.name} {y.name}",
            type_,
        )

    def intrinsic(self, name: str, result: Type, *args: Value) -> Value:
        """Call an LLVM intrinsic (or any external function) by name, declaring it once."""
        self.module.declare(name, result, [a.type for a in args])
        text = f"call {result.name} @{name}({', '.join(f'{a.type.name} {a.name}' for a in args)})"
        if result is void:
            self.effect(text)
            return Value("", void, self)  # type: ignore[arg-type]
        return self.instr(text, result)

    def null(self) -> Value:
        return self.const(0, ptr)


def mismatch(op: str, got: Type, expected: Type) -> NoReturn:
    raise CodegenError(
        "operand types differ", where=op, got=f"{got.name} and {expected.name}", expected="one type"
    )


def unsuited(op: str, type_: Type) -> NoReturn:
    raise CodegenError("operation does not exist for this type", where=op, got=type_.name)
