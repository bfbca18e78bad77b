"""Executables for ranges of a size: few of them serve every size, and only live rows are computed.

    f = BucketedCompileCache(model, "seq", [64, 256, 1024])      # 1…64, 65…256, 257…1024
    f = BucketedCompileCache(model, "seq", largest=4096)         # powers of two: 1…16, 17…32, …
    (y,) = f.run(x=x)                                            # any length up to the largest

Memory is planned for the upper end of a range. A run brings its own size and nothing is padded:
kernels compute as many rows as there are, and results have the size that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from rlx.backends.buffer import Buffer
from rlx.backends.registry import Device
from rlx.errors import BindingError, InputError, OptionError
from rlx.ir.bind import infer_sizes
from rlx.ir.binding import UpTo
from rlx.ir.graph import Graph
from rlx.ir.module import GraphModule
from rlx.ir.op import Array
from rlx.ir.shape import Shape
from rlx.runtime.cache import CompileCache
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.params import ParamStore
from rlx.runtime.session import Session
from rlx.specialize.options import CompileOptions

SMALLEST_STEP = 16  # of the ladder: below it executables would differ in nothing


class Bucket(NamedTuple):
    """Sizes from `low` to `high`, both included."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low} … {self.high}"


class BucketedCompileCache:
    """A graph compiled once per range of one symbol. Other symbols may stay open.

    `buckets` are upper ends, or (low, high) pairs; without them the ladder of powers of two up to
    `largest` is used. All executables share parameters, and states of a fixed size.
    """

    def __init__(
        self,
        graph: Graph | GraphModule,
        symbol: str = "seq",
        buckets: Iterable[int | tuple[int, int]] | None = None,
        *,
        largest: int | None = None,
        device: Device | str = "cpu",
        options: CompileOptions | Mapping[str, Any] | None = None,
        params: ParamStore | None = None,
        capacity: int = 64,
        eviction: str = "lru",
    ) -> None:
        if (buckets is None) == (largest is None):
            raise OptionError("either buckets or the largest size", where="BucketedCompileCache")
        self.symbol = symbol
        self.buckets = ladder(largest) if buckets is None else _buckets(buckets)
        self.params = params if params is not None else ParamStore()
        self.cache: CompileCache[CompiledGraph] = CompileCache(capacity, eviction)
        self._template = Session(device).template(graph, options)
        self.signature = self._template.signature
        self._states: dict[str, Buffer] = {}
        if symbol not in self._template.open_symbols:
            raise BindingError(
                "not a symbol that is open", where=self.signature.name, got=symbol,
                expected=", ".join(sorted(self._template.open_symbols)) or "none is",
            )  # fmt: skip

    def bucket(self, size: int) -> Bucket:
        """The range that `size` is in."""
        for bucket in self.buckets:
            if bucket.low <= size <= bucket.high:
                return bucket
        raise BindingError(
            "a size outside every bucket", where=self.symbol, got=size,
            expected=" or ".join(map(str, _joined(self.buckets))),
        )  # fmt: skip

    def get(self, size: int) -> CompiledGraph:
        """The compiled graph for `size`, which serves its whole bucket."""
        bucket = self.bucket(size)
        return self.cache.get_or_make(bucket, lambda: self._compile(bucket))

    def _compile(self, bucket: Bucket) -> CompiledGraph:
        options = self._template.options
        bound = options.binding.with_size(self.symbol, UpTo(bucket.high))
        template = self._template.with_options(replace(options, binding=bound))
        compiled = CompiledGraph(template, self.params)
        for name, shape in self.signature.states.items():
            if shape.is_static:
                compiled.bind_state(name, self._state(name, shape))
        return compiled

    def _state(self, name: str, shape: Shape) -> Buffer:
        made = self._template.backend.allocator.alloc(shape.static_dims, shape.dtype.numpy)
        return self._states.setdefault(name, made)  # buckets may be compiled at the same time

    def run(
        self, inputs: Mapping[str, Any] | None = None, /, *,
        sizes: Mapping[str, int] | None = None, **named: Any,
    ) -> tuple[Array, ...]:  # fmt: skip
        """Run the executable of these sizes; see `CompiledGraph.run`."""
        given = {**(inputs or {}), **named}
        return self.get(self._size(given, sizes)).run(given, sizes=sizes)

    def _size(self, given: Mapping[str, Any], sizes: Mapping[str, int] | None) -> int:
        if sizes and self.symbol in sizes:
            return sizes[self.symbol]
        known = self.signature.inputs
        shown = [
            (n, known[n], a.shape) for n, a in given.items() if n in known and hasattr(a, "shape")
        ]
        found = infer_sizes(shown, {**self._template.binding.sizes, **(sizes or {})})
        if self.symbol not in found:
            raise InputError(
                "no input shows the size", where=self.symbol,
                hint=f"pass sizes={{{self.symbol!r}: n}} to run",
            )  # fmt: skip
        return found[self.symbol]

    def set_param(self, name: str, array: Any) -> BucketedCompileCache:
        """Give one parameter, for all buckets."""
        self.get(self.buckets[0].low).set_param(name, array)
        return self

    def set_params(self, arrays: Mapping[str, Any]) -> BucketedCompileCache:
        self.get(self.buckets[0].low).set_params(arrays)
        return self

    def __len__(self) -> int:
        """How many executables there are."""
        return len(self.cache)


def ladder(largest: int | None, smallest: int = SMALLEST_STEP) -> tuple[Bucket, ...]:
    """Powers of two from `smallest` on, and `largest` itself at the end."""
    if not isinstance(largest, int) or largest < 1:
        raise OptionError("not a largest size", where="largest", got=largest)
    ends = [min(smallest, largest)]
    while ends[-1] < largest:
        ends.append(min(2 * ends[-1], largest))
    return _buckets(ends)


def _buckets(given: Iterable[int | tuple[int, int]]) -> tuple[Bucket, ...]:
    found: list[Bucket] = []
    for item in given:
        low: Any = found[-1].high + 1 if found else 1
        high: Any = item
        if isinstance(item, (tuple, list)) and len(item) == 2:
            low, high = item
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (low, high))
        if not whole or not 0 <= low <= high:
            raise OptionError(
                "not a bucket", got=item, expected="a rising upper end, or (low, high)"
            )
        if found and low <= found[-1].high:
            raise OptionError("buckets overlap", got=f"{found[-1]} and {low} … {high}")
        found.append(Bucket(low, high))
    if not found:
        raise OptionError("no buckets at all", where="buckets")
    return tuple(found)


def _joined(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Neighbouring buckets as one, to be shown."""
    found: list[Bucket] = []
    for bucket in buckets:
        if found and bucket.low == found[-1].high + 1:
            found[-1] = Bucket(found[-1].low, bucket.high)
        else:
            found.append(bucket)
    return found
