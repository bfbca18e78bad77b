"""Functions whose derivatives are compared with those of JAX and PyTorch, over drawn shapes.

An expression means the same in both libraries: `np` is jax.numpy where goldens are made, and
rlx.numpy in the tests; `F` is the other's functions of networks. Where they spell it differently,
`peer` is the other's way.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
DRAWS = 2


@dataclass(frozen=True)
class Case:
    name: str
    expression: str
    inputs: Mapping[str, Any]  # dims such as "n 3 m", a function of a generator, or values
    peer: str = ""
    is_smooth: bool = True  # has second derivatives to compare
    is_complex: bool = False

    def arrays(self, draw: int) -> dict[str, Array]:
        """The inputs, n, m and k being drawn."""
        rng = np.random.default_rng(zlib.crc32(f"{self.name}{draw}".encode()))
        sizes = dict(zip("nmk", rng.integers(1, 6, 3), strict=True))
        made = {}
        for name, given in self.inputs.items():
            if callable(given):
                made[name] = given(rng, sizes["n"])
            elif isinstance(given, str):
                dims = [int(sizes.get(d, d)) for d in given.split()]
                made[name] = rng.standard_normal(dims)
                if self.is_complex:
                    made[name] = made[name] + 1j * rng.standard_normal(dims)
            else:
                made[name] = np.asarray(given)
        return made

    def draws(self, first: int = 0, count: int = DRAWS) -> range:
        """The numbers of draws; given values are one alone."""
        is_drawn = any(callable(v) or isinstance(v, str) for v in self.inputs.values())
        return range(first, first + count) if is_drawn else range(1)


def directions(case: Case, draw: int, like: Mapping[str, Array], what: str) -> dict[str, Array]:
    """Cotangents of results, or directions of inputs, for each that is not an integer."""
    rng = np.random.default_rng(zlib.crc32(f"{case.name}{draw} {what}".encode()))
    made = {}
    for name, x in like.items():
        if x.dtype.kind in "fc":
            made[name] = rng.standard_normal(x.shape)
            if x.dtype.kind == "c":
                made[name] = made[name] + 1j * rng.standard_normal(x.shape)
    return made


def _case(name: str, expression: str, peer: str = "", **inputs: Any) -> Case:
    options = {k: inputs.pop(k) for k in ("is_smooth", "is_complex") if k in inputs}
    return Case(name, expression, inputs, peer, **options)


def within(low: float, high: float) -> Callable[..., Array]:
    return lambda rng, n: rng.uniform(low, high, (int(n), 3))


def square(spread: float = 1.0) -> Callable[..., Array]:
    """A matrix with eigenvalues and singular values far from each other, and far from 0."""

    def drawn(rng: Any, n: int) -> Array:
        x = rng.standard_normal((2, n, n)) * 0.3
        return x + spread * np.diag(np.arange(2.0, n + 2))

    return drawn


def _elementwise() -> Iterator[Case]:
    unit = dict.fromkeys(("asin", "acos", "atanh"), (-0.9, 0.9))
    positive = dict.fromkeys(("log", "log2", "log10", "sqrt", "reciprocal"), (0.2, 4.0))
    ranges = {**unit, **positive, "acosh": (1.1, 4.0), "log1p": (-0.8, 4.0), "tan": (-1.4, 1.4)}
    for name in (
        "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh",
        "atanh", "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sqrt", "square",
        "reciprocal", "abs", "negative",
    ):  # fmt: skip
        yield _case(name, f"np.{name}(a)", a=within(*ranges.get(name, (-3, 3))))
    for name in ("sigmoid", "softplus", "relu", "silu"):
        yield _case(name, f"np.{name}(a)", f"jax.nn.{name}(a)", a="n m")
    yield _case("gelu", "np.gelu(a)", "jax.nn.gelu(a, approximate=False)", a="n m")
    yield _case("gelu_tanh", "np.gelu_tanh(a)", "jax.nn.gelu(a)", a="n m")
    yield _case("erf", "np.erf(a)", "jax.scipy.special.erf(a)", a="n m")
    for name in ("add", "subtract", "multiply", "maximum", "minimum", "atan2", "logaddexp"):
        yield _case(name, f"np.{name}(a, b)", a="n 1 k", b="m k")
    yield _case("hypot", "np.hypot(a, b)", a="n 1", b="m")
    yield _case("divide", "np.divide(a, b)", a="n 3", b=within(0.3, 2))
    yield _case("remainder", "np.remainder(a, b)", a="n 3", b=within(0.3, 2))
    yield _case("pow", "np.pow(a, b)", a=within(0.3, 2), b="n 3")
    yield _case("copysign", "np.copysign(a, b)", a="n m", b="n m")
    yield _case("floor", "np.floor(a) * a + np.round(a) * np.trunc(a) + np.sign(a) * a", a="n m")
    yield _case("floor_divide", "np.floor_divide(a, b) * b", a="n 3", b=within(0.3, 2))
    yield _case("where", "np.where(a > 0, a * b, b)", a="n m", b="m")
    yield _case("guarded", "np.where(a > 0, np.log(np.where(a > 0, a, 1)), 0.0)", a="n m")
    yield _case("powers", "a ** 3 + a ** 2 + a ** 0 + a ** -1 + 2.0 ** a", a=within(0.4, 2))


_TIES = [[-1.0, 0.0, 0.0], [2.0, 2.0, -1.0]]
TIES = [
    _case("maximum at ties", "np.maximum(a, b)", a=_TIES, b=[[-1.0, 0.0, 1.0]]),
    _case("minimum at ties", "np.minimum(a, b)", a=_TIES, b=[[-1.0, 0.0, 1.0]]),
    _case("max at ties", "np.max(a, axis=1)", a=_TIES),
    _case("min at ties", "np.min(a)", a=_TIES),
    _case("clip at its bounds", "np.clip(a, min=0.0, max=2.0)", a=_TIES),
    _case("relu at 0", "np.relu(a)", "jax.nn.relu(a)", a=_TIES),
    _case("sort at ties", "np.sort(a, axis=1)", a=_TIES),
    _case("prod with zeros", "np.prod(a, axis=1)", a=[*_TIES, [0.0, 2.0, 3.0]]),
    _case("cumprod with zeros", "np.cumulative_prod(a, axis=1)", "np.cumprod(a, axis=1)",
          a=[*_TIES, [0.0, 2.0, 3.0]]),
    _case("square root at 0", "np.sqrt(a)", a=[0.0, 1.0]),
    _case("power at 0", "a ** 2 + a ** 1 + a ** 0", a=[0.0, 1.0]),
    _case("0 to a power", "np.pow(a, b)", a=[0.0, 0.0, 1.0, 2.0], b=[2.0, 1.0, 0.0, 0.0],
          is_smooth=False),
    _case("sinc-like", "np.where(a == 0, 1.0, np.sin(a) / np.where(a == 0, 1.0, a))", a=_TIES),
    _case("logaddexp far apart", "np.logaddexp(a, b)", a=[800.0, -800.0, 0.0], b=[0.0, 0.0, 0.0]),
    _case("logaddexp of nothing", "np.logaddexp(a, b)", a=[-np.inf, 1.0], b=[1.0, -np.inf]),
    _case("softplus far", "np.softplus(a)", "jax.nn.softplus(a)", a=[-900.0, 900.0, 0.0]),
    _case("log sum exp of nothing", "np.logaddexp(a[0], a[1])", a=[-np.inf, 0.5]),
]  # fmt: skip


def _reductions() -> Iterator[Case]:
    for name in ("sum", "mean", "max", "min", "prod", "var", "std"):
        extra = ", correction=1" if name in ("var", "std") else ""
        theirs = f"np.{name}(a, axis=1{', ddof=1' if extra else ''})"
        yield _case(name, f"np.{name}(a, axis=1{extra})", theirs, a="n 4 m")
        yield _case(f"{name} of all", f"np.{name}(a)", a="3 n m")
    yield _case("softmax", "np.softmax(a, axis=0)", "jax.nn.softmax(a, axis=0)", a="n m")
    yield _case("log_softmax", "np.log_softmax(a)", "jax.nn.log_softmax(a)", a="n m")
    for name, theirs in (("cumulative_sum", "cumsum"), ("cumulative_prod", "cumprod")):
        yield _case(name, f"np.{name}(a, axis=0)", f"np.{theirs}(a, axis=0)", a="n m")
        yield _case(f"{name} of the last", f"np.{name}(a, axis=-1)", f"np.{theirs}(a, axis=-1)",
                    a="n 1 m")  # fmt: skip
    yield _case("diff", "np.diff(a, axis=0)", a="4 n")


def _layouts() -> Iterator[Case]:
    yield _case("sort", "np.sort(a, axis=0)", a="n m")
    yield _case("sort down", "np.sort(a, axis=-1, descending=True)", a="n m")
    yield _case("index", "a[np.asarray([1, 0, 1, -1])]", a="3 n", is_smooth=False)
    yield _case("mixed index", "a[1:, ::2][:, np.asarray([0, 1, 0])]", a="4 3 n", is_smooth=False)
    yield _case("step", "a[::-1, 1::2]", a="n 5", is_smooth=False)
    yield _case("take", "np.take(a, b, axis=1)", a="n 4 m", b=[3, 0, 3])
    yield _case("take_along_axis", "np.take_along_axis(a, b, axis=1)", a="2 4", b=[[3, 3], [0, 1]])
    yield _case("set", "a.at[np.asarray([2, 0])].set(b)", a="4 n", b="2 n", is_smooth=False)
    yield _case("add at", "a.at[np.asarray([2, 0, 2])].add(b)", a="4 n", b="3 n", is_smooth=False)
    yield _case("multiply at", "a.at[1].multiply(b)", a="4 n", b="n")
    for name, expression in {
        "concat": "np.concat([a, b, a], axis=1)", "stack": "np.stack([a, a * 2], axis=1)",
        "flip": "np.flip(a, axis=0)", "roll": "np.roll(a, 2, axis=0)", "tile": "np.tile(a, (2, 3))",
        "repeat": "np.repeat(a, 3, axis=1)", "tril": "np.tril(a)", "triu": "np.triu(a, k=1)",
        "broadcast_to": "np.broadcast_to(a, (2, *a.shape))", "moveaxis": "np.moveaxis(a, 0, -1)",
        "reshape": "np.reshape(a, (-1,))", "squeeze": "np.squeeze(a[:, :1], axis=1)",
    }.items():  # fmt: skip
        more = {"b": "n m"} if name == "concat" else {}
        yield _case(name, f"np.square({expression})", a="n m", **more)


def _products() -> Iterator[Case]:
    yield _case("matmul", "a @ b", a="n m k", b="k 2")
    yield _case("matmul of vectors", "a @ b", a="n", b="n")
    yield _case("matmul of batches", "a @ b", a="2 1 m k", b="n k m")
    yield _case("vector by matrices", "a @ b", a="k", b="n k m")
    yield _case("tensordot", "np.tensordot(a, b, axes=2)", a="n m k", b="m k 2")
    yield _case("vecdot", "np.vecdot(a, b)", a="n m k", b="k")
    yield _case("outer", "np.linalg.outer(a, b)", "np.outer(a, b)", a="n", b="m")
    yield _case("cross", "np.linalg.cross(a, b)", "np.cross(a, b)", a="n 3", b="n 3")
    yield _case("einsum", "np.einsum('bij,bjk,bk->bi', a, b, c)", a="n m k", b="n k 2", c="n 2")
    yield _case("diagonals", "np.einsum('iij->ij', a)", a="3 3 n")


def _linalg() -> Iterator[Case]:
    for name, expression in {
        "inv": "np.linalg.inv(a)", "det": "np.linalg.det(a)",
        "slogdet": "np.linalg.slogdet(a)[1]", "matrix_power": "np.linalg.matrix_power(a, 3)",
        "inverse power": "np.linalg.matrix_power(a, -2)", "trace": "np.linalg.trace(a)",
        "svdvals": "np.linalg.svdvals(a)", "nuclear norm": "np.linalg.matrix_norm(a, ord='nuc')",
        "spectral norm": "np.linalg.matrix_norm(a, ord=2)",
        "Frobenius norm": "np.linalg.matrix_norm(a)", "pinv": "np.linalg.pinv(a)",
        "vector norm": "np.linalg.vector_norm(a, axis=-1, ord=3)",
        "cholesky": "np.linalg.cholesky(a @ np.matrix_transpose(a))",
        "eigvalsh": "np.linalg.eigvalsh(a + np.matrix_transpose(a))",
        "projector": "np.linalg.eigh(a + np.matrix_transpose(a))[1][..., :1] ** 2",
        "qr": "np.linalg.qr(a)[1] ** 2",
        "svd": "np.abs(np.linalg.svd(a)[0]) * np.linalg.svd(a)[1][:, None, :]",
    }.items():  # fmt: skip
        yield _case(name, expression, a=square())
    yield _case(
        "solve", "np.linalg.solve(a, b)", a=square(), b=lambda rng, n: rng.normal(size=(n, 2))
    )
    yield _case("pinv of tall", "np.linalg.pinv(a)", a="5 3")
    yield _case("eigvals", "np.linalg.eigvals(a)[..., :1] * 0 + np.sum(np.linalg.eigvals(a) ** 3)",
                a=square(3.0), is_smooth=False)  # fmt: skip


def _spectra() -> Iterator[Case]:
    for name, expression in {
        "rfft": "np.fft.rfft(a, axis=0)", "irfft": "np.fft.irfft(np.fft.rfft(a) * (1 + 2j))",
        "odd irfft": "np.fft.irfft(np.fft.rfft(a), n=5)", "ihfft": "np.fft.ihfft(a)",
        "rfftn": "np.fft.rfftn(a)", "padded rfft": "np.fft.rfft(a, n=8)",
        "power": "np.abs(np.fft.rfft(a)) ** 2",
    }.items():  # fmt: skip
        yield _case(name, expression, a="n 6")
    for name, expression in {
        "fft": "np.fft.fft(a)", "ifft": "np.fft.ifft(a, axis=0)", "fftn": "np.fft.fftn(a)",
        "ortho fft": "np.fft.fft(a, norm='ortho')", "hfft": "np.fft.hfft(a)",
        "irfft of complex": "np.fft.irfft(a, n=6)", "fftshift": "np.fft.fftshift(a) ** 2",
        "complex abs": "np.abs(a)", "complex product": "a * np.conj(a) * a",
        "complex quotient": "a / (a * a + 3)", "complex parts": "np.real(a) * np.imag(a ** 2)",
        "complex exp": "np.exp(a)", "complex tanh": "np.tanh(a)",
        "complex log": "np.log(a + 5.0)", "complex sqrt": "np.sqrt(a + 5.0)",
        "complex matmul": "a @ np.conj(np.matrix_transpose(a))",
        "complex sum": "np.sum(a, axis=0) * np.prod(a, axis=0)",
    }.items():  # fmt: skip
        yield _case(name, expression, a="n 4", is_complex=True)
    # JAX gives the sign of a complex number no derivative
    yield _case("complex sign", "np.sign(a)", "a / np.abs(a)", a="n 4", is_complex=True)
    yield _case("complex solve", "np.linalg.solve(a, b)", a="3 3", b="3 n", is_complex=True)
    yield _case("complex inv", "np.linalg.inv(a)", a="n 3 3", is_complex=True)


ARRAYS = [
    *_elementwise(), *TIES, *_reductions(), *_layouts(), *_products(), *_linalg(), *_spectra(),
]  # fmt: skip

_EDGES = [[-3.0, -1.0, -0.5, -0.4, 0.0, 0.1], [0.4, 0.5, 0.8, 1.0, 3.0, 6.0]]
EDGES = [
    *[_case(f"{name} at its edges", f"F.{name}(a{options})", a=_EDGES, is_smooth=False)
      for name, options in {
          "relu": "", "relu6": "", "elu": ", 0.7", "leaky_relu": ", 0.2", "selu": "",
          "celu": ", 1.3", "hardtanh": ", -0.5, 0.8", "hardsigmoid": "", "hardswish": "",
          "softshrink": ", 0.4", "hardshrink": ", 0.4", "threshold": ", 0.1, -3.0",
          "softplus": ", 2.0, 1.5", "logsigmoid": "", "softsign": "",
      }.items()],
    _case("prelu at 0", "F.prelu(a, b)", a=[[0.0, -1.0, 1.0]], b=[0.3, 0.3, 0.3],
          is_smooth=False),
    _case("abs at 0", "np.abs(a)", "torch.abs(a)", a=_TIES),  # in JAX it has a slope of 1
    _case("l1 at 0", "F.l1_loss(a, b, reduction='none')", a=[0.0, 1.0], b=[0.0, 2.0]),
    _case("huber at delta", "F.huber_loss(a, b, reduction='none')", a=[1.0, -1.0, 0.0, 2.0],
          b=[0.0, 0.0, 0.0, 0.0]),
    _case("smooth l1 at beta", "F.smooth_l1_loss(a, b, reduction='none')", a=[1.0, -1.0, 0.0, 2.0],
          b=[0.0, 0.0, 0.0, 0.0]),
    _case("norm at 0", "F.normalize(a, 2.0, 1, 0.1)", a=[[3.0, 4.0], [0.0, 0.0]], is_smooth=False),
    _case("3-norm at 0", "F.normalize(a, 3.0, 1, 0.1)", a=[[3.0, 4.0], [0.0, 0.0]],
          is_smooth=False),
    _case("cosine at 0", "F.cosine_similarity(a, b, 1, 0.1)", a=[[3.0, 4.0], [0.0, 0.0]],
          b=[[1.0, 4.0], [2.0, 1.0]], is_smooth=False),
    _case("all ignored but one", "F.cross_entropy(a, b)", a=np.eye(3), b=np.array([-100, -100, 1])),
    _case("fully masked row", "np.sum(F.scaled_dot_product_attention(a, b, b, c))",
          "F.scaled_dot_product_attention(a, b, b, c).nan_to_num().sum()",
          a="1 1 2 4", b="1 1 3 4", c=np.array([[True, False, True], [True, True, True]])),
    _case("causal with more keys", "F.scaled_dot_product_attention(a, b, b, c)",
          a="2 2 n 4", b="2 2 n 4", c="n n"),
]  # fmt: skip
