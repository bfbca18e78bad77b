"""The variants of a compiled graph: what provides them, and the cache that runs dispatch through.

A provider is a template, which is specialised on demand, or one stored variant. The cache holds
executables by the sizes of open symbols; a run finds its executable by the shapes of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from rlx.backends.base import Backend, Buffers, Executable, Sizes
from rlx.backends.buffer import Allocator, Buffer, HostBuffer
from rlx.backends.recycle import result_maker
from rlx.errors import BindingError, OptionError
from rlx.ir.binding import DimBinding, UpTo, infer_sizes, require_known
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.ir.shape import Shape
from rlx.specialize.manifest import BindingManifest
from rlx.specialize.options import CompileOptions
from rlx.support.records import dataclass
from rlx.support.settings import check_nan, debug, debug_level


@dataclass(frozen=True)
class Signature:
    """The interface of a model: all its arguments, including those that passes removed."""

    name: str
    inputs: Mapping[str, Shape]
    params: Mapping[str, Shape]
    states: Mapping[str, Shape]
    output_names: tuple[str, ...]

    @staticmethod
    def of(source: Graph) -> Signature:
        def shapes(kind: str) -> dict[str, Shape]:
            return {n.name: n.output.shape for n in source.sources(kind)}

        names = tuple(source.output_names)
        return Signature(source.name, shapes("input"), shapes("param"), shapes("state"), names)


class VariantProvider(Protocol):
    """Compiles or loads the executables of a compiled graph."""

    @property
    def signature(self) -> Signature: ...

    @property
    def binding(self) -> DimBinding: ...

    @property
    def dynamic_dims(self) -> dict[str, int]:
        """The dynamic dimensions that the graph uses, and their upper bounds."""

    @property
    def open_symbols(self) -> frozenset[str]:
        """Symbols whose sizes are left to the inputs."""

    @property
    def backend(self) -> Backend: ...

    @property
    def prepare(self) -> Graph | None:
        """The prepare graph: weight prepacking and constant folding of params, run once."""

    def specialize(self, open_sizes: Mapping[str, int]) -> Executable:
        """The executable of the variant whose open symbols have these sizes."""


@dataclass
class PlannedVariant:
    """The provider of a compiled graph that has one variant, given as a plan (LIR)."""

    lir: Lir
    backend: Backend
    options: CompileOptions

    def __post_init__(self) -> None:
        plain = replace(self.options.profile, target="host")
        given = (
            replace(self.options, profile=plain).template_key() != CompileOptions().template_key()
        )
        if given or len(self.options.binding):
            raise OptionError(
                "a plan is bound, fused and packed already", where=self.lir.name,
                got="options of an earlier stage", expected="threads and target alone",
                hint="compile the HIR or MIR it came from",
            )  # fmt: skip

    @cached_property
    def signature(self) -> Signature:
        """The arguments of the plan; params are those that packed ones are prepared from."""
        found = Signature.of(self.lir.graph)
        if self.prepare is None:
            return found
        made = set(self.prepare.output_names)
        params = {n: shape for n, shape in found.params.items() if n not in made}
        params |= {n.name: n.output.shape for n in self.prepare.sources("param")}
        return replace(found, params=params)

    @cached_property
    def binding(self) -> DimBinding:
        return DimBinding({s: UpTo(bound) for s, bound in self.lir.dynamic.items()})

    @property
    def dynamic_dims(self) -> dict[str, int]:
        return self.lir.dynamic

    @property
    def open_symbols(self) -> frozenset[str]:
        return frozenset()

    @property
    def prepare(self) -> Graph | None:
        return self.lir.prepare

    def specialize(self, open_sizes: Mapping[str, int]) -> Executable:
        self.lir.check_phases()
        return self.backend.compile(self.lir, self.options)


def users_manifest(manifest: BindingManifest, provider: VariantProvider) -> BindingManifest:
    """The manifest of an executable with the user's params instead of those packed from them."""
    params, sizes = provider.signature.params, provider.binding.sizes
    return manifest.with_params(params, sizes, provider.dynamic_dims)


_MAX_SHAPES = 1024
_MAX_VARIANTS = 64  # each may have an arena of its own


class DispatchEntry(NamedTuple):
    """What a run needs for inputs of certain shapes."""

    executable: Executable
    sizes: dict[str, int]  # of the dynamic dimensions
    outputs: tuple[Callable[[], Any], ...]  # each makes the array of an output
    inputs: list[int]  # the graph's inputs that the executable reads, in its order
    donated: dict[int, int]  # by output, which of those inputs' memory it has


class VariantCache:
    """Executables, compiled on demand, least recently used evicted. Callers hold a lock."""

    def __init__(
        self, template: VariantProvider, executable: Executable | Callable[[], Executable] | None
    ) -> None:
        """`executable`, or what it returns on first use, is the only variant of a template without
        open symbols."""
        self._template, self._only = template, executable
        self._executables: dict[tuple[tuple[str, int], ...], Executable] = {}
        # by the shapes and sizes of a run
        self.dispatch_cache: dict[tuple[Any, ...], DispatchEntry] = {}
        self.attached: dict[Executable, tuple[int, int]] = {}  # versions of params and states
        self.share_arenas = False  # whether a variant may use the arena of another

    def dispatch(
        self, shapes: Sequence[tuple[int, ...] | None], sizes: Mapping[str, int] | None,
        key: tuple[Any, ...],
    ) -> DispatchEntry:  # fmt: skip
        """Find or compile the variant for inputs of these shapes, None for inputs not given, and
        cache it under `key`."""
        template = self._template
        symbols = {*template.open_symbols, *template.dynamic_dims, *template.binding}
        require_known(sizes or (), symbols, template.signature.name)
        named = zip(template.signature.inputs.items(), shapes, strict=True)
        shown = [(name, shape, dims) for (name, shape), dims in named if dims is not None]
        known = infer_sizes(shown, {**template.binding.sizes, **(sizes or {})})
        dynamic = {s: _size(s, bound, known) for s, bound in template.dynamic_dims.items()}
        missing = template.open_symbols - known.keys()
        if missing:
            raise BindingError(
                "sizes that no input shows", where=template.signature.name,
                got=", ".join(sorted(missing)), hint="pass sizes={…} to run",
            )  # fmt: skip
        executable = self.executable({s: known[s] for s in template.open_symbols})
        results = [e.shape.bind(dynamic) for e in executable.manifest.outputs]
        outputs = tuple([result_maker(s.static_dims, s.dtype.numpy) for s in results])
        if len(self.dispatch_cache) >= _MAX_SHAPES:
            self.dispatch_cache.pop(next(iter(self.dispatch_cache)))
        order = self._input_order(executable)
        names = [e.name for e in executable.manifest.inputs]
        donated = {k: names.index(name) for k, name in executable.donations.items()}
        entry = DispatchEntry(executable, dynamic, outputs, order, donated)
        self.dispatch_cache[key] = entry
        return entry

    def executable(self, sizes: Mapping[str, int]) -> Executable:
        """The executable for these sizes of the open symbols, compiled the first time."""
        key = tuple(sorted(sizes.items()))
        found = self._executables.pop(key, None)
        if found is None and not key:
            found = self._only() if callable(self._only) else self._only
        if found is None:
            found = self._template.specialize(dict(key))
            self._find_arena(found)
        self._executables[key] = found
        if len(self._executables) > _MAX_VARIANTS:
            self._evict(self._executables.pop(next(iter(self._executables))))
        return found

    def _find_arena(self, new: Executable) -> None:
        """Let a new variant use the smallest arena that is large enough, its pages touched."""
        if self.share_arenas:
            large = [e for e in self._executables.values() if e.arena.nbytes >= new.arena.nbytes]
            if large:
                new.share_arena(min(large, key=lambda e: e.arena.nbytes))

    def __len__(self) -> int:
        return len(self._executables)

    def _input_order(self, executable: Executable) -> list[int]:
        """The inputs that the executable reads: passes may have removed unused ones."""
        positions = {name: i for i, name in enumerate(self._template.signature.inputs)}
        return [positions[e.name] for e in executable.manifest.inputs]

    def _evict(self, executable: Executable) -> None:
        self.attached.pop(executable, None)
        for key in [k for k, c in self.dispatch_cache.items() if c.executable is executable]:
            del self.dispatch_cache[key]


def _size(symbol: str, bound: int, known: Mapping[str, int]) -> int:
    """The size of a dynamic dimension in this run."""
    if symbol not in known:
        raise BindingError(
            "the size of a dynamic dimension is missing", where=symbol, expected=f"0 … {bound}",
            hint=f"pass sizes={{{symbol!r}: n}} to run",
        )  # fmt: skip
    if not 0 <= known[symbol] <= bound:
        raise BindingError(
            "a size beyond the bound of its dynamic dimension", where=symbol, got=known[symbol],
            expected=f"0 … {bound}",
        )  # fmt: skip
    return known[symbol]


def dispatch_key(shapes: tuple[Any, ...], sizes: Mapping[str, int]) -> tuple[Any, ...]:
    """What a run is dispatched by."""
    try:
        key = (*shapes, *sorted(sizes.items()))
        hash(key)
        return key
    except (AttributeError, TypeError):
        raise BindingError(
            "not sizes", where="run", got=f"{sizes!r:.60}", expected='a mapping such as {"seq": 8}'
        ) from None


def run_instrumented(
    name: str, allocator: Allocator, executable: Executable, inputs: Buffers, outputs: Buffers,
    sizes: Sizes,
) -> None:  # fmt: skip
    """Run with RLX_DEBUG ≥ 2 (profiled), or with every result checked for NaNs."""
    if check_nan():
        executable.run_checked(inputs, outputs, sizes)
    if debug_level() >= 2:
        with executable.recording() as recording:
            executable.run(inputs, outputs, sizes)
            allocator.synchronize()
        debug(2, f"{name}\n{recording.profile()}")
    elif not check_nan():
        executable.run(inputs, outputs, sizes)


def run_inputs(
    on_host: bool, executable: Executable, arrays: Sequence[Any], dims: Mapping[str, int]
) -> list[Buffer | None]:
    """Inputs for `Executable.run`: arrays in place, or copied to their arena slots."""
    if on_host:
        return [None if a is None else HostBuffer(a) for a in arrays]
    given: list[Buffer | None] = []
    for entry, array in zip(executable.manifest.inputs, arrays, strict=True):
        is_buffer = isinstance(array, Buffer)
        given.append(array if is_buffer else None)
        if array is not None and not is_buffer:
            executable.slot(entry, dims).copy_in(array)
    return given
