"""What a compiled graph is made from: a template in memory, or one variant that came from disk.

The executables of a compiled graph: by the sizes of open symbols, and by the shapes of runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rlx.backends.base import Backend, Executable
from rlx.errors import BindingError
from rlx.ir.binding import DimBinding, infer_sizes
from rlx.ir.graph import Graph
from rlx.ir.shape import Shape
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Signature:
    """A model as its callers see it: every argument, also those that passes did without."""

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


class Variants(Protocol):
    """Gives executables for sizes."""

    @property
    def signature(self) -> Signature: ...

    @property
    def binding(self) -> DimBinding: ...

    @property
    def live(self) -> dict[str, int]:
        """Live symbols that the graph uses, and their bounds."""

    @property
    def open_symbols(self) -> frozenset[str]:
        """Symbols whose sizes are left to the inputs."""

    @property
    def backend(self) -> Backend: ...

    @property
    def prepare(self) -> Graph | None:
        """Work on parameters, to be done once."""

    def specialize(self, open_sizes: Mapping[str, int]) -> Executable:
        """The executable of the variant whose open symbols have these sizes."""


_MAX_SHAPES = 1024
_MAX_VARIANTS = 64  # each has an arena of its own


class Choice(NamedTuple):
    """What a run with known shapes needs."""

    executable: Executable
    sizes: dict[str, int]  # of the dynamic dimensions
    outputs: tuple[tuple[tuple[int, ...], Any], ...]  # dims and element type of each
    inputs: list[int]  # which of the graph's inputs the executable reads, in its order


class VariantCache:
    """Makes executables on demand and keeps the newest; the callers' lock guards it."""

    def __init__(
        self, template: Variants, executable: Executable | Callable[[], Executable] | None
    ) -> None:
        """`executable` is that of a template without open symbols, or makes it on first use."""
        self._template, self._first = template, executable
        self._executables: dict[tuple[tuple[str, int], ...], Executable] = {}
        self.choices: dict[tuple[Any, ...], Choice] = {}  # by the shapes and sizes of a run
        self.attached: dict[Executable, tuple[int, int]] = {}  # versions of params and states

    def choose(
        self, shapes: Sequence[tuple[int, ...]], sizes: Mapping[str, int] | None,
        key: tuple[Any, ...],
    ) -> Choice:  # fmt: skip
        """The variant for inputs of these shapes; remembered for later runs."""
        template = self._template
        named = zip(template.signature.inputs.items(), shapes, strict=True)
        shown = [(name, shape, dims) for (name, shape), dims in named]
        known = infer_sizes(shown, {**template.binding.sizes, **(sizes or {})})
        dynamic = {s: _size(s, bound, known) for s, bound in template.live.items()}
        missing = template.open_symbols - known.keys()
        if missing:
            raise BindingError(
                "sizes that no input shows", where=template.signature.name,
                got=", ".join(sorted(missing)), hint="pass sizes={…} to run",
            )  # fmt: skip
        executable = self.executable({s: known[s] for s in template.open_symbols})
        outputs = tuple(
            (e.shape.bind(dynamic).static_dims, e.shape.dtype.numpy)
            for e in executable.manifest.outputs
        )
        if len(self.choices) >= _MAX_SHAPES:
            self.choices.pop(next(iter(self.choices)))
        order = self._order(executable)
        self.choices[key] = choice = Choice(executable, dynamic, outputs, order)
        return choice

    def executable(self, sizes: Mapping[str, int]) -> Executable:
        """The executable for these sizes of the open symbols, compiled the first time."""
        key = tuple(sorted(sizes.items()))
        found = self._executables.pop(key, None)
        if found is None and not key:
            found = self._first() if callable(self._first) else self._first
        if found is None:
            found = self._template.specialize(dict(key))
        self._executables[key] = found
        if len(self._executables) > _MAX_VARIANTS:
            self._evict(self._executables.pop(next(iter(self._executables))))
        return found

    def __len__(self) -> int:
        return len(self._executables)

    def _order(self, executable: Executable) -> list[int]:
        """Passes may have dropped inputs that nothing reads."""
        places = {name: i for i, name in enumerate(self._template.signature.inputs)}
        return [places[e.name] for e in executable.manifest.inputs]

    def _evict(self, executable: Executable) -> None:
        self.attached.pop(executable, None)
        for key in [k for k, c in self.choices.items() if c.executable is executable]:
            del self.choices[key]


def _size(symbol: str, bound: int, known: Mapping[str, int]) -> int:
    """The size of a dynamic dimension in this run."""
    if symbol not in known:
        raise BindingError(
            "the size of a dynamic dimension is missing", where=symbol, expected=f"0 … {bound}",
            hint=f"pass sizes={{{symbol!r}: n}} to run",
        )  # fmt: skip
    if not 0 <= known[symbol] <= bound:
        raise BindingError(
            "a size above the bound of a dynamic dimension", where=symbol, got=known[symbol],
            expected=f"0 … {bound}",
        )  # fmt: skip
    return known[symbol]
