"""The one table of cases: every op × element type × shapes, compared with the reference.

`python tests/parity/cases.py` prints `docs/ops.md` from it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import rlx.ir.ops  # noqa: F401
from rlx.ir.attrs import Body
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme, encode

Array = Any
Dims = Sequence[Any]
SIZES = (0, 1, 5, 67)  # of the symbol n: empty, single, odd, more than a vector

FLOATS = ("f32", "f16", "bf16", "f64")
INTS = ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")
FP8 = ("f8e4m3", "f8e5m2")
COMPLEX = ("c64", "c128")


@dataclass(frozen=True)
class Arg:
    """An input: dims (with the symbol n), element type, and the range of its values."""

    dims: tuple[Any, ...]
    dtype: str = "f32"
    low: float = -2.0
    high: float = 2.0
    special: bool = False  # also infinities, NaN, zeros of both signs, denormals
    data: Callable[[tuple[int, ...], np.random.Generator], Array] | None = None


@dataclass(frozen=True)
class Case:
    """One graph of one op.

    A result may differ from the reference by `ulps` units in the last place of the element (mode
    "element") or of the largest result (mode "sum", for what accumulates); 0 means equal bits.
    """

    op: str
    label: str
    args: Mapping[str, Arg]
    build: Callable[..., Any]
    ulps: float = 0.0
    mode: str = "element"
    sizes: tuple[int, ...] = SIZES
    consts: Mapping[str, Array] = field(default_factory=dict)
    reason: str = ""

    @property
    def id(self) -> str:
        return f"{self.op}-{self.label}"

    @property
    def dtype(self) -> str:
        return next(iter(self.args.values())).dtype if self.args else "f32"

    def graph(self) -> Graph:
        g = Graph(self.op)
        values = [g.input(k, list(a.dims), a.dtype) for k, a in self.args.items()]
        values += [g.param(k, list(v.shape), v.dtype) for k, v in self.consts.items()]
        out = self.build(g, *values)
        g.set_outputs(*(out if isinstance(out, (tuple, list)) else [out]))
        return g

    def data(self, n: int) -> dict[str, Array]:
        rng = np.random.default_rng(zlib.crc32(f"{self.id}{n}".encode()))
        return {k: _values(a, n, rng) for k, a in self.args.items()}


def _values(arg: Arg, n: int, rng: np.random.Generator) -> Array:
    dims = tuple(n if d == "n" else d for d in arg.dims)
    element = DType.of(arg.dtype)
    if arg.data is not None:
        return arg.data(dims, rng).astype(element.numpy)
    if element.kind == "bool":
        return rng.integers(0, 2, dims).astype(bool)
    if element.is_integer:
        info = np.iinfo(element.numpy)
        low, high = max(arg.low, info.min), min(arg.high, info.max)
        return rng.integers(int(low), int(high), dims, endpoint=True).astype(element.numpy)
    x = rng.uniform(arg.low, arg.high, dims)
    if element.kind == "complex":
        return (x + 1j * rng.uniform(arg.low, arg.high, dims)).astype(element.numpy)
    x = x.astype(element.numpy)
    if arg.special and x.size >= 8 and arg.dtype not in FP8:
        tiny = float(np.nextafter(np.array(0, x.dtype), np.array(1, x.dtype)))
        odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, tiny, -tiny], x.dtype)
        x.reshape(-1)[: odd.size] = odd
    return x


def eps(array: Array) -> float:
    """Relative size of one unit in the last place of the array's type."""
    kind = array.dtype
    if kind.kind == "c":
        return float(np.finfo(kind).eps)
    if kind.kind in "biu":
        return 0.0
    return float(ml_dtypes.finfo(kind).eps)


def smallest_normal(array: Array) -> float:
    kind = np.finfo(array.dtype).dtype if array.dtype.kind == "c" else array.dtype
    return float(ml_dtypes.finfo(kind).smallest_normal)


# -- elementwise -----------------------------------------------------------

# units in the last place that a float function may be off: the bounds stated in rlx.llvm.math,
# rounded up; references are correctly rounded from f64
UNARY: dict[str, tuple[tuple[str, ...], float, float, float]] = {
    # name: element types, low, high, ulps
    "neg": (FLOATS + INTS + FP8 + COMPLEX, -100, 100, 0),
    "abs": (FLOATS + INTS + FP8, -100, 100, 0),
    "exp": (FLOATS + FP8, -4, 4, 3),
    "expm1": (FLOATS, -2, 2, 4),
    "log": (FLOATS, 0.01, 9, 4),
    "log1p": (FLOATS, -0.9, 9, 4),
    "exp2": (FLOATS, -9, 9, 2),
    "log2": (FLOATS, 0, 9, 3),  # a logarithm (1.5) times a constant, 0.5 each
    "log10": (FLOATS, 0, 9, 3),
    "sqrt": (FLOATS, 0, 9, 1),
    "rsqrt": (FLOATS, 0.1, 9, 2),
    "reciprocal": (FLOATS, 0.1, 9, 1),
    "square": (FLOATS + INTS + COMPLEX, -9, 9, 1),
    "sin": (FLOATS, -20, 20, 4),
    "cos": (FLOATS, -20, 20, 4),
    "tan": (FLOATS, -1, 1, 5),
    "asin": (FLOATS, -1.1, 1.1, 5),  # atan2 (3.5), and a ratio of three roundings
    "acos": (FLOATS, -1.1, 1.1, 5),
    "atan": (FLOATS, -9, 9, 3),
    "sinh": (FLOATS, -9, 9, 4),  # expm1 (2.2) and four roundings; from 20 on exp twice (1.2)
    "cosh": (FLOATS, -9, 9, 4),  # exp twice (1.2) and three roundings
    "asinh": (FLOATS, -9, 9, 4),  # log1p (2) of what has four roundings
    "acosh": (FLOATS, 0.9, 9, 5),  # log1p (2) of what has six
    "atanh": (FLOATS, -1.1, 1.1, 4),  # log1p (2) of what has three
    "tanh": (FLOATS + FP8, -4, 4, 4),
    "erf": (FLOATS, -3, 3, 4),
    "normal_cdf": (FLOATS, -3, 9, 16),
    "sigmoid": (FLOATS, -9, 9, 4),
    "silu": (FLOATS, -9, 9, 5),
    "gelu": (FLOATS, -3, 3, 16),
    "gelu_tanh": (FLOATS, -3, 3, 24),
    "gelu_quick": (FLOATS, -3, 3, 8),
    "relu": (FLOATS + INTS, -9, 9, 0),
    "relu6": (FLOATS, -9, 9, 0),
    "hard_sigmoid": (FLOATS, -9, 9, 4),
    "hard_swish": (FLOATS, -9, 9, 4),
    "softplus": (FLOATS, -9, 9, 5),
    "floor": (FLOATS, -9, 9, 0),
    "ceil": (FLOATS, -9, 9, 0),
    "round": (FLOATS, -9, 9, 0),
    "trunc": (FLOATS, -9, 9, 0),
    "sign": (FLOATS + INTS, -9, 9, 0),
    "is_nan": (FLOATS, -9, 9, 0),
    "is_inf": (FLOATS, -9, 9, 0),
    "is_finite": (FLOATS + INTS, -9, 9, 0),
    "signbit": (FLOATS + INTS + FP8, -9, 9, 0),
    "logical_not": (("bool", "i32"), 0, 1, 0),
    "bitwise_not": (INTS, -100, 100, 0),
}
# Of complex numbers, in ulps of |result|; formulas are evaluated in f64. c64 results are rounded
# once; for c128, exp (1.2), sin (1.8) and log (1.5) meet a few roundings, and NumPy has as many.
COMPLEX_UNARY = {
    "abs": 2, "exp": 4, "expm1": 6, "log": 4, "log1p": 6, "log2": 5, "log10": 5, "sqrt": 3,
    "sin": 5, "cos": 5, "tan": 8, "asin": 6, "acos": 6, "atan": 6, "sinh": 5, "cosh": 5, "tanh": 8,
    "asinh": 6, "acosh": 6, "atanh": 6, "sign": 3, "reciprocal": 3, "round": 0, "is_nan": 0,
    "is_inf": 0, "is_finite": 0, "logical_not": 0,
}  # fmt: skip
_PLAIN_RANGE = {"log", "log1p", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tan", "gelu_tanh"}


def unary() -> Iterator[Case]:
    for name, (types, low, high, ulps) in UNARY.items():
        for t in types:
            special = name not in _PLAIN_RANGE and t in FLOATS
            off = 0.0 if t in INTS else ulps
            arg = Arg(("n", 3), t, low, high, special)
            yield Case(name, t, {"x": arg}, lambda g, x, name=name: g.apply(name, x), off)
    for name, ulps in COMPLEX_UNARY.items():
        for t in COMPLEX:
            arg = Arg(("n", 3), t, -3, 3)
            yield Case(name, t, {"x": arg}, lambda g, x, name=name: g.apply(name, x), ulps)
    for t in FLOATS:
        arg = {"x": Arg(("n", 7), t, -4, 4, True)}
        yield Case("leaky_relu", t, arg, lambda g, x: g.leaky_relu(x, alpha=0.1), 1)
        yield Case("elu", t, arg, lambda g, x: g.elu(x, alpha=0.7), 5)
        yield Case("clamp", t, arg, lambda g, x: g.clamp(x, low=-1.0, high=1.5), 0)


BINARY: dict[str, tuple[tuple[str, ...], float, float, float]] = {
    "add": (FLOATS + INTS + FP8 + COMPLEX, -200, 200, 0),
    "sub": (FLOATS + INTS + COMPLEX, -200, 200, 0),
    "mul": (FLOATS + INTS + FP8 + COMPLEX, -20, 20, 2),
    "div": ((*FLOATS, "i32"), 0.5, 20, 1),
    "pow": (("f32", "f64", "f16"), 0.1, 3, 6),
    "maximum": (FLOATS + INTS, -20, 20, 0),
    "minimum": (FLOATS + INTS, -20, 20, 0),
    "mod": (("f32", "f64", *INTS), -20, 20, 1),
    "floor_div": (("f32", "f64", *INTS), -20, 20, 0),
    "atan2": (("f32", "f64"), -5, 5, 5),
    "hypot": (FLOATS, -20, 20, 2),  # squares and sum: 1, halved by the root, which adds 0.5
    "logaddexp": (FLOATS, 0, 9, 4),  # exp (1.2), log1p (2), a sum; of one sign, so none cancels
    "copysign": (FLOATS, -20, 20, 0),
    "bitwise_and": (INTS, -200, 200, 0),
    "bitwise_or": (INTS, -200, 200, 0),
    "bitwise_xor": (INTS, -200, 200, 0),
    "shift_left": (INTS, 0, 9, 0),
    "shift_right": (INTS, 0, 9, 0),
    "logical_and": (("bool",), 0, 1, 0),
    "logical_or": (("bool",), 0, 1, 0),
    "logical_xor": (("bool",), 0, 1, 0),
    "eq": (FLOATS + INTS, -3, 3, 0),
    "ne": (FLOATS + INTS, -3, 3, 0),
    "lt": (FLOATS + INTS, -3, 3, 0),
    "le": (FLOATS + INTS, -3, 3, 0),
    "gt": (FLOATS + INTS, -3, 3, 0),
    "ge": (FLOATS + INTS, -3, 3, 0),
}
_NO_SPECIAL = {"pow", "mod", "floor_div", "atan2", "div", "mul"}


def binary() -> Iterator[Case]:
    for name, (types, low, high, ulps) in BINARY.items():
        for t in types:
            special = t in FLOATS and name not in _NO_SPECIAL
            off = 0.0 if t in INTS and name != "div" else ulps
            a, b = Arg(("n", 1, 5), t, low, high, special), Arg((3, 1), t, low, high)

            def build(g: Graph, x: Any, y: Any, name: str = name) -> Any:
                return g.apply(name, x, y)

            yield Case(name, t, {"a": a, "b": b}, build, off)
    for t in COMPLEX:
        a, b = Arg(("n", 1, 5), t, 0.5, 3), Arg((3, 1), t, -2, 2)
        # e^(b·ln a): |b·ln a| up to 6 makes as many roundings of the logarithm visible
        for name, ulps in (("div", 4), ("pow", 24), ("eq", 0), ("ne", 0)):
            args = {"a": a, "b": b}
            yield Case(name, t, args, lambda g, a, b, name=name: g.apply(name, a, b), ulps)
    for t in ("f32", "f16", "i32", "c128"):
        args = {"c": Arg(("n", 4), "bool"), "a": Arg(("n", 4), t), "b": Arg((4,), t)}
        yield Case("where", t, args, lambda g, c, a, b: g.where(c, a, b), 0)
    both = [("f32", "f16"), ("f32", "bf16"), ("f16", "f32"), ("bf16", "f32"), ("f32", "i32")]
    both += [("f32", "u8"), ("i32", "f32"), ("i64", "i8"), ("u8", "f16"), ("f64", "f32")]
    both += [("f32", "f8e4m3"), ("f8e5m2", "f32"), ("bool", "f32"), ("f32", "bool")]
    both += [("f32", "c64"), ("f64", "c128"), ("c64", "c128"), ("c128", "c64")]
    for a, b in both:
        arg = {"x": Arg(("n", 9), a, -300, 300, a in FLOATS and b not in FP8)}
        yield Case("cast", f"{a}-to-{b}", arg, lambda g, x, b=b: g.cast(x, b), 0)


# -- reductions and rows ---------------------------------------------------


def reductions() -> Iterator[Case]:
    for kind in ("sum", "mean", "max", "min", "prod"):
        for t in (*FLOATS, "i32", "i8"):
            for axes in ((-1,), (0,), (0, 2), (1,)):
                if kind in ("max", "min") and 0 in axes:
                    sizes: tuple[int, ...] = (1, 5, 67)
                else:
                    sizes = SIZES
                exact = kind in ("max", "min") or (t in INTS and kind != "mean")
                arg = Arg(("n", 3, 40), t, 0.9, 1.1) if kind == "prod" else Arg(("n", 3, 40), t)
                # a sum of 67·40 terms of size 2 in several accumulators: a few units of the total
                yield Case(
                    kind, f"{t}-axes{''.join(map(str, axes))}", {"x": arg},
                    lambda g, x, kind=kind, axes=axes: g.apply(kind, x, axis=axes),
                    0 if exact else 16, "sum", sizes,
                )  # fmt: skip
    for kind in ("sum", "mean", "prod"):
        for t in COMPLEX:
            for axis in (0, 1):
                x = Arg(("n", 40), t, 0.6, 0.8) if kind == "prod" else Arg(("n", 40), t)
                yield Case(
                    kind, f"{t}-axis{axis}", {"x": x},
                    lambda g, x, kind=kind, axis=axis: g.apply(kind, x, axis=(axis,)), 40, "sum",
                )  # fmt: skip
    for kind in ("any", "all"):
        yield Case(
            kind, "bool", {"x": Arg(("n", 40), "bool")},
            lambda g, x, kind=kind: g.apply(kind, x, axis=(-1,)),
        )  # fmt: skip
    for kind in ("argmax", "argmin"):
        for t in ("f32", "f16", "i32"):
            for axis in (0, 1):
                yield Case(
                    kind, f"{t}-axis{axis}", {"x": Arg(("n", 37), t, -9, 9, t != "i32")},
                    lambda g, x, kind=kind, axis=axis: g.apply(kind, x, axis=axis),
                    sizes=(1, 5, 67),
                )  # fmt: skip
    whole = {"x": Arg(("n", 1000), "f32")}
    # 67,000 numbers: with fewer lanes (AVX2) more of them are rounded one after another.
    yield Case("sum", "f32-whole", whole, lambda g, x: g.sum(x), 32, "sum")
    yield Case("max", "f32-whole", whole, lambda g, x: g.max(x), sizes=(1, 5, 67))
    for kind in ("softmax", "log_softmax"):
        for t in FLOATS:
            for axis in (-1, 0):
                yield Case(
                    kind, f"{t}-axis{axis}", {"x": Arg(("n", 65), t, -5, 5)},
                    lambda g, x, kind=kind, axis=axis: g.apply(kind, x, axis=axis), 16, "sum",
                )  # fmt: skip
    for t in ("f32", "f16", "i32", "f64", *COMPLEX):
        for options in ({}, {"exclusive": True}, {"reverse": True}, {"axis": 0}):
            for name, low in (("cumsum", -2), ("cumprod", 0.7)):
                yield Case(
                    name, f"{t}-{'-'.join(options) or 'plain'}", {"x": Arg(("n", 33), t, low, 1.2)},
                    lambda g, x, options=options, name=name: g.apply(name, x, **options),
                    0 if t == "i32" else 16, "sum",
                )  # fmt: skip
    for t in (*FLOATS, *INTS, *FP8, "bool"):
        for axis, descending in ((0, True), (0, False), (1, True), (1, False)):
            for name in ("sort", "argsort"):
                x = Arg(("n", 30), t, -9, 9, t in FLOATS)
                yield Case(
                    name, f"{t}-{axis}-{descending}", {"x": x},
                    lambda g, x, name=name, axis=axis, descending=descending: g.apply(
                        name, x, axis=axis, descending=descending
                    ),
                )  # fmt: skip
    for t in ("f32", "f64", "i64", "u8", "bf16"):
        for side in ("left", "right"):
            table = {
                "table": Arg((9,), t, data=lambda dims, rng: np.sort(rng.integers(0, 9, dims)))
            }
            table |= {"x": Arg(("n", 3), t, 0, 9, t in FLOATS)}
            yield Case(
                "searchsorted", f"{t}-{side}", table,
                lambda g, table, x, side=side: g.searchsorted(table, x, side=side),
            )  # fmt: skip
    for t in ("f32", "f16", "i32"):
        for k, largest in ((1, True), (5, True), (5, False)):
            yield Case(
                "top_k", f"{t}-{k}-{largest}", {"x": Arg(("n", 50), t, -9, 9)},
                lambda g, x, k=k, largest=largest: g.top_k(x, k=k, largest=largest),
            )  # fmt: skip


def norms() -> Iterator[Case]:
    for t in FLOATS:
        rows = {"x": Arg(("n", 3, 48), t), "gamma": Arg((48,), t, 0.5, 1.5)}
        both = rows | {"beta": Arg((48,), t)}
        yield Case("rms_norm", t, rows, lambda g, x, w: g.rms_norm(x, w, eps=1e-5), 16, "sum")
        yield Case("layer_norm", t, both, lambda g, x, w, b: g.layer_norm(x, w, b), 16, "sum")
        yield Case("l2_norm", t, {"x": Arg(("n", 33), t)}, lambda g, x: g.l2_norm(x), 16, "sum")
        more = {"x": rows["x"], "r": rows["x"], "gamma": rows["gamma"]}
        for kind in ("fused_residual_rms_norm", "fused_residual_layer_norm"):
            yield Case(
                kind, t, more, lambda g, x, r, w, kind=kind: g.apply(kind, x, r, w), 16, "sum"
            )
        image = {"x": Arg(("n", 6, 5), t), "gamma": Arg((6,), t), "beta": Arg((6,), t)}
        yield Case(
            "group_norm", t, image, lambda g, x, w, b: g.group_norm(x, w, b, groups=3), 16, "sum"
        )
        yield Case(
            "fused_gated_act", t, {"x": Arg(("n", 34), t)},
            lambda g, x: g.fused_gated_act(x, activation="silu"), 8, "sum",
        )  # fmt: skip


# -- layout ----------------------------------------------------------------


def layout() -> Iterator[Case]:
    cube = ("n", 3, 4)
    for t in ("f32", "f16", "i64", "bool"):
        x = {"x": Arg(cube, t)}
        yield Case("transpose", t, x, lambda g, x: g.transpose(x, (2, 0, 1)))
        yield Case("reshape", t, x, lambda g, x: g.reshape(g.transpose(x, (1, 0, 2)), ["3 * n", 4]))
        yield Case("narrow", t, x, lambda g, x: g.narrow(x, 2, 1, 2))
        yield Case("concat", t, x, lambda g, x: g.concat(x, g.narrow(x, 2, 0, 3), x, axis=2))
        yield Case("concat", f"{t}-outer", x, lambda g, x: g.concat(x, x, axis=0))
        yield Case("flip", t, x, lambda g, x: g.flip(x, (0, 2)))
        yield Case("contiguous", t, x, lambda g, x: g.contiguous(g.transpose(x, (0, 2, 1))))
        if t != "bool":
            yield Case("pad", t, x, lambda g, x: g.pad(x, (1, 0, 2), (0, 3, 1), 1.0))
    x = {"x": Arg(cube)}
    yield Case("pad", "reflect", x, lambda g, x: g.pad(x, (0, 1, 2), (0, 2, 3), mode="reflect"))
    yield Case("pad", "edge", x, lambda g, x: g.pad(x, (0, 1, 2), (0, 2, 3), mode="edge"))
    yield Case(
        "slice", "f32", x, lambda g, x: g.slice(x, (None, 0, 3), (None, 3, None), (1, 2, -1))
    )
    yield Case("expand", "f32", {"x": Arg(("n", 1))}, lambda g, x: g.expand(x, [3, "n", 5]))
    yield Case(
        "iota", "f32", {"x": Arg(("n",))}, lambda g, x: g.iota(["n", 3], axis=0, dtype="i32")
    )
    yield Case("dim_value", "i32", {"x": Arg(("n",))}, lambda g, x: g.dim_value("2 * n + 1"))


def indexing() -> Iterator[Case]:
    def below(high: int) -> Callable[..., Array]:
        return lambda dims, rng: rng.integers(0, high, dims)

    def distinct(high: int) -> Callable[..., Array]:
        return lambda dims, rng: rng.permutation(high)[: dims[0]]

    for t in ("f32", "f16", "i8"):
        table, ids = Arg((9, 5), t), Arg(("n", 2), "i32", data=below(9))
        yield Case("gather", t, {"x": table, "i": ids}, lambda g, x, i: g.gather(x, i))
        inner = {"x": Arg(("n", 9, 2), t), "i": Arg((4,), "i64", data=below(9))}
        yield Case("gather", f"{t}-axis1", inner, lambda g, x, i: g.gather(x, i, axis=1))
        along = {"x": Arg(("n", 9), t), "i": Arg(("n", 4), "i32", data=below(9))}
        yield Case("take_along", t, along, lambda g, x, i: g.take_along(x, i, axis=1))
        rows = {"x": Arg((9, "n"), t), "u": Arg((4, "n"), t)}
        rows |= {"i": Arg((4,), "i32", data=distinct(9))}
        yield Case("scatter", t, rows, lambda g, x, u, i: g.scatter(x, i, u))
        many = rows | {"i": Arg((4,), "i32", data=below(3))}
        off = 0 if t == "i8" else 4
        yield Case("scatter_add", t, many, lambda g, x, u, i: g.scatter_add(x, i, u), off, "sum")
        for how in ("mul", "minimum", "maximum"):
            build = partial(_reduced_scatter, how=how)
            # what is rounded, is rounded alike: each product to the type
            yield Case("scatter_reduce", f"{t}-{how}", many, build)


def _reduced_scatter(g: Any, x: Any, u: Any, i: Any, how: str) -> Any:
    return g.scatter_reduce(x, i, u, how=how)


# -- matmuls ---------------------------------------------------------------


def matmuls() -> Iterator[Case]:
    # K = 48 products of numbers up to 2: the sum is off by a few units of the largest result
    for t in (*FLOATS, "i32", *COMPLEX):
        off = 0 if t == "i32" else 12
        x, w = Arg(("n", 48), t), Arg((48, 33), t)
        yield Case("matmul", t, {"x": x, "w": w}, lambda g, x, w: g.matmul(x, w), off, "sum")
        cube = {"a": Arg((2, "n", 7), t), "b": Arg((2, 7, 5), t)}
        yield Case("matmul", f"{t}-batched", cube, lambda g, a, b: g.matmul(a, b), off, "sum")
        yield Case("matmul", f"{t}-vector", {"a": Arg(("n", 7), t), "b": Arg((7,), t)},
                   lambda g, a, b: g.matmul(a, b), off, "sum")  # fmt: skip
    for t in ("f32", "f16", "bf16"):
        rng = np.random.default_rng(7)
        w = rng.uniform(-1, 1, (48, 34)).astype(DType.of(t).numpy)
        consts = {"w": w}
        x = {"x": Arg(("n", 48), "f32")}
        yield Case(
            "matmul", f"{t}-weight", x, lambda g, x, w: g.matmul(x, w), 12, "sum", consts=consts
        )
        yield Case(
            "fused_swiglu", t, x,
            lambda g, x, a, b: g.fused_swiglu(x, a, b), 16, "sum",
            consts={"a": w, "b": w[:, ::-1].copy()},
        )  # fmt: skip
        extra = {"x": Arg(("n", 48)), "r": Arg(("n", 34))}
        for act in ("none", "relu", "gelu", "silu", "tanh"):
            yield Case(
                "fused_matmul_bias_act", f"{t}-{act}", extra,
                lambda g, x, r, w, b, act=act: g.fused_matmul_bias_act(
                    x, w, b, r, activation=act, has_bias=True, has_residual=True
                ), 16, "sum", consts={"w": w, "b": rng.uniform(-1, 1, 34).astype(np.float32)},
            )  # fmt: skip
    yield Case(
        "dot_general", "f32", {"a": Arg((3, "n", 4)), "b": Arg((4, 3, 5))},
        lambda g, a, b: g.dot_general(
            a, b, lhs_contract=(2,), rhs_contract=(0,), lhs_batch=(0,), rhs_batch=(1,)
        ), 12, "sum",
    )  # fmt: skip
    lora = {"x": Arg(("n", 16)), "w": Arg((16, 12)), "a": Arg((16, 2)), "b": Arg((2, 12))}
    yield Case("lora_matmul", "f32", lora, lambda g, *v: g.lora_matmul(*v, scale=0.5), 12, "sum")
    experts = {
        "x": Arg(("n", 16)), "w": Arg((3, 16, 8)),
        "e": Arg(("n",), "i32", data=lambda dims, rng: rng.integers(0, 3, dims)),
    }  # fmt: skip
    yield Case("grouped_matmul", "f32", experts, lambda g, *v: g.grouped_matmul(*v), 12, "sum")
    rows = {"x": experts["x"], "e": experts["e"]}
    for t in ("f32", "bf16", "f16"):
        weight = np.random.default_rng(2).uniform(-1, 1, (3, 8, 16)).astype(DType.of(t).numpy)
        yield Case(
            "grouped_matmul", f"{t}-rows", rows,
            lambda g, x, e, w: g.grouped_matmul(x, g.transpose(w, (0, 2, 1)), e), 12, "sum",
            consts={"w": weight},
        )  # fmt: skip


def quantised() -> Iterator[Case]:
    rng = np.random.default_rng(11)
    for name in (
        "Q8_0",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "F16",
        "BF16",
        "int8_b32",
        "int4_b32",
        "fp8_e4m3",
    ):
        scheme = QuantScheme.parse(name)
        packed = encode(scheme, rng.uniform(-1, 1, (18, 256)).astype(np.float32))
        consts = {k: v for k, v in zip(("w", "s", "z"), packed, strict=True) if v is not None}
        # 8-bit activations: each of 256 products is off by up to 1/254 of the block's largest
        # activation, at random: √256 · 2/254 · 0.6 ≈ 0.08 of a result of size ≈ 16, which is ≈ 2⁻¹⁰
        yield Case(
            "dequant_matmul", name, {"x": Arg(("n", 256))},
            lambda g, x, *w, scheme=scheme: g.dequant_matmul(x, *w, scheme=scheme),
            60000, "sum", consts=consts, reason="8-bit activations",
        )  # fmt: skip
        # 18 products of numbers below 1, summed in another order
        yield Case(
            "dequant_matmul_transposed", name, {"x": Arg(("n", 18))},
            lambda g, x, *w, scheme=scheme: g.dequant_matmul_transposed(x, *w, scheme=scheme),
            12, "sum", consts=consts,
        )  # fmt: skip
        yield Case(
            "dequant_gather", name,
            {"i": Arg(("n",), "i32", data=lambda dims, r: r.integers(0, 18, dims))},
            lambda g, i, w, *rest, scheme=scheme: g.dequant_gather(w, i, *rest, scheme=scheme),
            0, consts=consts,
        )  # fmt: skip
    for name in sorted(GGUF_SCHEMES):
        scheme = GGUF_SCHEMES[name]
        raw = rng.integers(0, 60, (6, scheme.row_bytes(512)), dtype=np.uint8)
        if scheme.packed_dtype != "u8":
            continue
        yield Case(
            "dequant_gather", f"{name}-raw",
            {"i": Arg(("n",), "i32", data=lambda dims, r: r.integers(0, 6, dims))},
            lambda g, i, w, scheme=scheme: g.dequant_gather(w, i, scheme=scheme),
            0, consts={"w": raw},
        )  # fmt: skip
    for t in ("i8", "u8"):
        yield Case(
            "quantize", t, {"x": Arg(("n", 9), "f32", -20, 20)},
            lambda g, x, t=t: g.quantize(x, g.constant(0.125), dtype=t),
        )  # fmt: skip
        yield Case(
            "dequantize", t, {"x": Arg(("n", 9), t, -20, 20)},
            lambda g, x: g.dequantize(x, g.constant(0.125)),
        )  # fmt: skip
    for t in ("f32", "f16", "bf16"):
        yield Case(
            "quantize_blocks", t, {"x": Arg(("n", 96), t, -20, 20)},
            lambda g, x: g.quantize_blocks(x),
        )  # fmt: skip
    yield Case(
        "fake_quantize", "f32", {"x": Arg(("n", 9), "f32", -20, 20)},
        lambda g, x: g.fake_quantize(x, g.constant(0.125)),
    )  # fmt: skip


# -- attention, convolution, recurrences, transforms -----------------------


def paged() -> Iterator[Case]:
    """Tokens of three sequences: runs of one that a kernel may take together, and single ones."""

    def rows(dims: tuple[int, ...], rng: np.random.Generator) -> Array:
        return (np.arange(dims[0]) // 9 % 3).astype(np.int32)

    def positions(dims: tuple[int, ...], rng: np.random.Generator) -> Array:
        return (np.arange(dims[0]) * (1 + np.arange(dims[0]) // 40) % 190).astype(np.int32)

    def table(dims: tuple[int, ...], rng: np.random.Generator) -> Array:
        return rng.permutation(12)[: dims[0] * dims[1]].reshape(dims).astype(np.int32)

    for cache, kv, dim in (("f32", 2, 16), ("f16", 2, 64), ("bf16", 4, 20), ("f16", 1, 128)):
        args = {
            "q": Arg((1, "n", 4 * dim)),
            **{x: Arg((1, kv, 12 * 64, dim), cache) for x in "kv"},
            "table": Arg((3, 3), "i32", data=table),
            "rows": Arg(("n",), "i32", data=rows),
            "positions": Arg(("n",), "i32", data=positions),
        }
        for window, cap in ((0, 0.0), (70, 5.0)):
            yield Case(
                "paged_attention", f"{cache}-{kv}-{dim}-{window}", args,
                lambda g, *xs, kv=kv, dim=dim, window=window, cap=cap: g.paged_attention(
                    *xs, num_heads=4, num_kv_heads=kv, head_dim=dim, page=64, window=window,
                    softcap=cap,
                ), 24, "sum",
            )  # fmt: skip
            yield Case(
                "paged_attention", f"{cache}-{kv}-{dim}-{window}-sinks",
                args | {"sinks": Arg((4,), "f32", -2, 4)},
                lambda g, *xs, kv=kv, dim=dim, window=window: g.paged_attention(
                    *xs, num_heads=4, num_kv_heads=kv, head_dim=dim, page=64, window=window,
                ), 24, "sum",
            )  # fmt: skip


def _packed(dims: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Rows of numbers in blocks of Q8_0."""
    scheme = GGUF_SCHEMES["Q8_0"]
    numbers = rng.standard_normal((*dims[:-1], scheme.row_elements(dims[-1])))
    return encode(scheme, numbers.astype(np.float32)).data


def attention() -> Iterator[Case]:
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    for t in ("f32", "f16", "bf16"):
        args = {"q": Arg((2, "n", 64), t), "k": Arg((2, "n", 32), t), "v": Arg((2, "n", 32), t)}
        for mask in ("none", "causal", "sliding_window(3)", "local(0)", "local(3)", "local(64)"):
            for cap in (0.0, 5.0):
                yield Case(
                    "attention", f"{t}-{mask}-{cap}", args,
                    lambda g, q, k, v, mask=mask, cap=cap: g.attention(
                        q, k, v, **heads, mask_kind=mask, softcap=cap
                    ), 24, "sum",
                )  # fmt: skip
    past = {"q": Arg((1, 1, 64)), "k": Arg((1, "n", 32), "f16"), "v": Arg((1, "n", 32), "f16")}
    yield Case(
        "attention", "decode-f16-cache", past,
        lambda g, q, k, v: g.attention(q, k, v, **heads, mask_kind="causal"), 24, "sum",
        sizes=(1, 5, 67),
    )  # fmt: skip
    packed = Arg((1, 2, "n", 68), "u8", data=_packed)
    for label, rows in (("decode", 1), ("prefill", "n")):
        yield Case(
            "attention", f"{label}-q8_0-cache",
            {"q": Arg((1, rows, 256)), "k": packed, "v": packed},
            lambda g, q, k, v: g.attention(
                q, k, v, num_heads=4, num_kv_heads=2, head_dim=64, mask_kind="causal",
                kv_layout="bhsd", kv_scheme="Q8_0",
            ), 24, "sum", sizes=(1, 5, 67),
        )  # fmt: skip
    full = {"q": Arg((2, "n", 64)), "k": Arg((2, "n", 32)), "v": Arg((2, "n", 32))}
    for kind, t in (("custom", "bool"), ("local(5)", "bool"), ("bias", "f32")):
        yield Case(
            "attention", f"f32-{kind}", full | {"m": Arg(("n", "n"), t)},
            lambda g, q, k, v, m, kind=kind: g.attention(q, k, v, m, **heads, mask_kind=kind),
            24, "sum",
        )  # fmt: skip
    yield Case(
        "attention", "sinks", full | {"s": Arg((4,), "f32", -2, 4)},
        lambda g, q, k, v, s: g.attention(
            q, k, v, s, **heads, mask_kind="sliding_window(7)", has_sinks=True
        ), 24, "sum",
    )  # fmt: skip
    yield from paged()
    for t in ("f32", "f16"):
        for pairs in (False, True):
            for n_rot in (0, 8):
                width = (n_rot or 16) // 2
                tables = {"c": Arg((80, width)), "s": Arg((80, width))}
                yield Case(
                    "rope", f"{t}-{pairs}-{n_rot}", {"x": Arg((2, "n", 32), t), **tables},
                    lambda g, x, c, s, pairs=pairs, n_rot=n_rot: g.rope(
                        x, c, s, head_dim=16, n_rot=n_rot, interleaved=pairs, offset=3
                    ), 4, "sum",
                )  # fmt: skip
    qk = {"x": Arg((2, "n", 32)), "w": Arg((16,)), "c": Arg((80, 8)), "s": Arg((80, 8))}
    yield Case(
        "fused_qk_norm_rope", "f32", qk,
        lambda g, x, w, c, s: g.fused_qk_norm_rope(x, w, c, s, head_dim=16, offset=2), 16, "sum",
    )  # fmt: skip


def spatial() -> Iterator[Case]:
    for t in ("f32", "f16"):
        one = {"x": Arg(("n", 4, 11), t), "w": Arg((6, 4, 3), t), "b": Arg((6,), t)}
        yield Case(
            "conv", f"{t}-1d", one, lambda g, *v: g.conv(*v, stride=(2,), padding=(1,)), 16, "sum"
        )
        two = {"x": Arg(("n", 4, 7, 9), t), "w": Arg((6, 2, 3, 2), t)}
        yield Case(
            "conv", f"{t}-2d-groups", two,
            lambda g, x, w: g.conv(
                x, w, stride=(1, 2), padding=(1, 0), dilation=(2, 1), groups=2
            ), 16, "sum",
        )  # fmt: skip
        back = {"x": Arg(("n", 4, 5), t), "w": Arg((4, 3, 3), t)}
        yield Case(
            "conv_transpose",
            t,
            back,
            lambda g, x, w: g.conv_transpose(x, w, stride=(2,)),
            16,
            "sum",
        )
        causal = {"x": Arg((2, "n", 5), t), "w": Arg((5, 4), t), "p": Arg((2, 3, 5), t)}
        yield Case(
            "depthwise_conv1d_causal", t, causal,
            lambda g, *v: g.depthwise_conv1d_causal(*v), 8, "sum",
        )  # fmt: skip
        image = {"x": Arg(("n", 3, 8, 9), t)}
        yield Case("max_pool", t, image, lambda g, x: g.max_pool(x, kernel=(2, 3), stride=(2, 1)))
        yield Case(
            "avg_pool", t, image,
            lambda g, x: g.avg_pool(x, kernel=(3, 3), stride=(1, 2), padding=(1, 1)), 8, "sum",
        )  # fmt: skip
        for mode in ("nearest", "linear"):
            yield Case(
                "resize", f"{t}-{mode}", image,
                lambda g, x, mode=mode: g.resize(x, sizes=(5, 13), mode=mode), 8, "sum",
            )  # fmt: skip


def recurrent() -> Iterator[Case]:
    four = (2, "n", 2, 8)
    args = {"q": Arg(four, low=-1, high=1), "k": Arg(four, low=-0.5, high=0.5), "v": Arg(four)}
    args |= {"g": Arg((2, "n", 2), low=-1, high=0), "b": Arg((2, "n", 2), low=0, high=1)}
    # 67 steps, each a few roundings of the state
    yield Case(
        "gated_delta_net",
        "f32",
        args,
        lambda g, *v: g.gated_delta_net(*v, state_size=8),
        400,
        "sum",
    )
    carry = args | {"s": Arg((2, 2, 8, 8))}
    yield Case(
        "gated_delta_net", "f32-carry", carry,
        lambda g, *v: g.gated_delta_net(*v, state_size=8), 400, "sum",
    )  # fmt: skip
    scan = {"u": Arg((2, "n", 6)), "d": Arg((2, "n", 6), low=0.01, high=0.5)}
    scan |= {"a": Arg((6, 4), low=-1, high=-0.1), "b": Arg((2, "n", 4)), "c": Arg((2, "n", 4))}
    yield Case("selective_scan", "f32", scan, lambda g, *v: g.selective_scan(*v), 200, "sum")
    yield from gated_cells()


def gated_cells() -> Iterator[Case]:
    """67 steps, each a few roundings of the state; 16-bit floats are computed in f32 and rounded
    once."""
    for t, ulps in (("f32", 200), ("f64", 200), ("f16", 2)):
        for batch, hidden, reverse in ((3, 20, False), (9, 32, True)):
            state, label = Arg((batch, hidden), t), f"{t}-{batch}x{hidden}"
            r = Arg((hidden, 4 * hidden), t, low=-0.3, high=0.3)
            lstm = {"x": Arg(("n", batch, 4 * hidden), t), "r": r, "h": state, "c": state}
            build = partial(_cell, "lstm", reverse)
            yield Case("lstm", label, lstm, build, ulps, "sum")
            r = replace(r, dims=(hidden, 3 * hidden))
            gru = {"x": Arg(("n", batch, 3 * hidden), t), "r": r, "h": state}
            bias = {"bias": Arg((hidden,), t)} if reverse else {}
            yield Case("gru", label, gru | bias, partial(_cell, "gru", reverse), ulps, "sum")


def _cell(name: str, reverse: bool, g: Graph, *operands: Any) -> Any:
    return getattr(g, name)(*operands, reverse=reverse)


def transforms() -> Iterator[Case]:
    for size in (1, 2, 8, 12, 31, 100):
        for t, part in (("c64", "f32"), ("c128", "f64")):
            x, real = {"x": Arg(("n", size), t)}, {"x": Arg(("n", size), part)}
            half = {"x": Arg(("n", size // 2 + 1), t)}
            yield Case("fft", f"{t}-{size}", x, lambda g, x: g.fft(x), 16, "sum")
            yield Case(
                "fft", f"{t}-{size}-inverse", x, lambda g, x: g.fft(x, inverse=True), 16, "sum"
            )
            yield Case("rfft", f"{part}-{size}", real, lambda g, x: g.rfft(x), 16, "sum")
            yield Case(
                "irfft", f"{t}-{size}", half, lambda g, x, size=size: g.irfft(x, n=size), 16, "sum"
            )
    for t, part in (("c64", "f32"), ("c128", "f64")):
        c = {"x": Arg(("n", 5), t)}
        yield Case("real", t, c, lambda g, x: g.real(x))
        yield Case("imag", t, c, lambda g, x: g.imag(x))
        parts = {"a": Arg(("n", 5), part), "b": Arg(("n", 5), part)}
        yield Case("complex", part, parts, lambda g, a, b: g.complex(a, b))

    def well(dims: tuple[int, ...], rng: np.random.Generator) -> Array:
        return rng.uniform(-1, 1, dims) + 4 * np.eye(dims[-1])

    for t in ("f32", "f64", *COMPLEX):
        args = {"a": Arg(("n", 5, 5), t, data=well), "b": Arg(("n", 5, 2), t)}
        # diagonally dominant, condition below 10: a few dozen roundings
        yield Case("solve", t, args, lambda g, a, b: g.solve(a, b), 100, "sum")


def factorizations() -> Iterator[Case]:
    """What vectors give together: their signs are free, and their order where values are equal."""

    def definite(dims: tuple[int, ...], rng: np.random.Generator) -> Array:
        x = rng.uniform(-1, 1, dims) + 1j * rng.uniform(-1, 1, dims)
        return x @ np.swapaxes(x, -1, -2).conj() + np.eye(dims[-1])

    def general(dims: tuple[int, ...], rng: np.random.Generator) -> Array:
        return rng.uniform(-1, 1, dims) + 1j * rng.uniform(-1, 1, dims)

    def real(data: Any) -> Any:
        return lambda dims, rng: data(dims, rng).real

    def mirrored(g: Graph, x: Any) -> Any:
        turned = g.transpose(x, axes=(0, 2, 1))
        return g.complex(g.real(turned), -g.imag(turned)) if x.shape.dtype.is_complex else turned

    def as_rows(g: Graph, values: Any) -> Any:
        batch, n = values.shape.dims
        return g.reshape(values, (batch, 1, n))

    def qr(g: Graph, x: Any, **how: Any) -> Any:
        q, r = g.qr(x, **how)
        return g.matmul(q, r), g.matmul(mirrored(g, q), q), g.abs(r)

    def eigh(g: Graph, x: Any) -> Any:
        values, v = g.eigh(x)
        scaled = g.mul(v, as_rows(g, values))
        return values, g.matmul(scaled, mirrored(g, v)), g.eigh(x, vectors=False)

    def svd(g: Graph, x: Any, tall: bool) -> Any:
        u, s, vh = g.svd(x, tall=tall)
        whole_u, _, whole_v = g.svd(x, full=True, tall=tall)
        unit = [g.matmul(mirrored(g, m), m) for m in (whole_u, whole_v)]
        product = g.matmul(g.mul(u, as_rows(g, s)), vh)
        return product, s, g.svd(x, tall=tall, vectors=False), *unit

    def eig(g: Graph, x: Any) -> Any:
        values, v = g.eig(x)
        return values, g.abs(v), g.sub(g.matmul(x, v), g.mul(v, as_rows(g, values))) + 1.0

    # backward stable: some n² roundings of the largest element; n is up to 7
    for t in ("f32", "f64", *COMPLEX):
        positive, any_ = (d if t in COMPLEX else real(d) for d in (definite, general))
        square = {"x": Arg(("n", 6, 6), t, data=positive)}
        yield Case("cholesky", t, square, lambda g, x: g.cholesky(x), 60, "sum")
        yield Case(
            "cholesky", f"{t}-upper", square, lambda g, x: g.cholesky(x, upper=True), 60, "sum"
        )
        yield Case("eigh", t, square, eigh, 100, "sum")
        yield Case("slogdet", t, square, lambda g, x: g.slogdet(x), 60, "sum")
        for rows, columns in ((7, 4), (4, 7)):
            x, tall = {"x": Arg(("n", rows, columns), t, data=any_)}, rows > columns
            for complete in (False, True):
                yield Case(
                    "qr", f"{t}-{rows}-{columns}-{complete}", x,
                    lambda g, x, c=complete, tall=tall: qr(g, x, complete=c, tall=tall), 60, "sum",
                )  # fmt: skip
            yield Case(
                "svd", f"{t}-{rows}-{columns}", x,
                lambda g, x, tall=tall: svd(g, x, tall), 100, "sum",
            )  # fmt: skip
        yield Case("eig", t, {"x": Arg(("n", 5, 5), t, data=any_)}, eig, 400, "sum")


def control() -> Iterator[Case]:
    def step() -> Body:
        body = Graph("step")
        carry, x = body.input("carry", [4]), body.input("x", [4])
        total = carry * 0.5 + x
        body.set_outputs(total, body.tanh(total), names=["carry", "y"])
        return Body(body)

    def branch(kind: str) -> Body:
        body = Graph(kind)
        body.set_outputs(body.apply(kind, body.input("x", ["n", 4])))
        return Body(body)

    def count(n: str) -> tuple[Body, Body]:
        test, body = Graph("test"), Graph("body")
        test.set_outputs(test.lt(test.sum(test.input("x", ["n", 4])), 50.0))
        body.set_outputs(body.square(body.input("x", ["n", 4])) + 1.0)
        return Body(test), Body(body)

    x = {"x": Arg(("n", 4))}
    yield Case(
        "scan", "f32", x,
        lambda g, x: g.scan(g.constant(np.zeros(4, np.float32)), x, body=step(), n_carry=1, n_xs=1),
        16, "sum",
    )  # fmt: skip
    for flag in (True, False):
        yield Case(
            "cond", f"f32-{flag}", x,
            lambda g, x, flag=flag: g.cond(
                g.lt(g.dim_value("n"), 1000 if flag else -1), x,
                then=branch("relu"), otherwise=branch("neg"),
            ),
        )  # fmt: skip
    test, body = count("n")
    yield Case(
        "while_loop", "f32", x,
        lambda g, x: g.while_loop(x, condition=test, body=body, n_carry=1), 64, "sum",
        sizes=(1, 5, 67),
    )  # fmt: skip


def sampling() -> Iterator[Case]:
    def state(dims: tuple[int, ...], rng: np.random.Generator) -> Array:
        return rng.integers(0, 2**32, dims)

    args = {"x": Arg(("n", 50), low=-4, high=4), "rng": Arg((2,), "u64", data=state)}
    for options in ({}, {"top_k": 5}, {"top_p": 0.7}, {"temperature": 0.0}, {"min_p": 0.2}):
        yield Case(
            "sample", "-".join(f"{k}{v}" for k, v in options.items()) or "plain", args,
            lambda g, x, rng, options=options: g.sample(x, rng, **options),
        )  # fmt: skip
    settings = np.array([0.8, 10, 0.9, 0.0], np.float32)
    yield Case(
        "sample", "settings", args, lambda g, x, rng, s: g.sample(x, rng, s), consts={"s": settings}
    )
    counter = Arg(("n", 3), "u32", data=state)
    words = {"c0": counter, "c1": counter, "c2": counter, "c3": counter}
    key = {"k0": Arg((), "u32", data=state), "k1": Arg((), "u32", data=state)}
    yield Case("philox", "u32", {**words, **key}, lambda g, *values: g.philox(*values))


GROUPS = (
    unary, binary, reductions, norms, layout, indexing, matmuls, quantised, attention, spatial,
    recurrent, transforms, factorizations, control, sampling,
)  # fmt: skip


def cases() -> list[Case]:
    from backward_cases import BACKWARD  # which are cases too
    from integer_cases import INTEGER

    found = [case for group in (*GROUPS, *BACKWARD, *INTEGER) for case in group()]
    assert len({c.id for c in found}) == len(found), "two cases of one name"
    return found


def covered() -> set[str]:
    return {c.op for c in cases()}


__all__ = ["Case", "cases", "covered", "eps", "smallest_normal"]
