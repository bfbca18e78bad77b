"""A compiled graph: parameters and states bound by name, any sizes run, variants made on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from rlx.backends.base import Executable, Span
from rlx.backends.chain import Chain, Links
from rlx.backends.timing import Profile, Recording
from rlx.errors import BindingError, InputError, OptionError
from rlx.ir.bind import infer_sizes
from rlx.ir.dim import upper_bound
from rlx.ir.html import card
from rlx.ir.op import Array
from rlx.ir.phase import Phase
from rlx.ir.shape import Shape
from rlx.runtime.params import Deferred, ParamStore, as_array
from rlx.runtime.variants import Variants
from rlx.specialize.manifest import BindingManifest
from rlx.support.settings import check_nan, debug, debug_level

Sizes = tuple[tuple[str, int], ...]
# an executable, the live sizes of the run, and dims and element type of each output
_Chosen = tuple[Executable, dict[str, int], tuple[tuple[tuple[int, ...], Any], ...]]
_REMEMBERED = 1024
_MOST_VARIANTS = 64  # each has an arena of its own


class CompiledGraph:
    """What `Session.compile` gives. Safe to call from several threads; runs of one take turns.

    Symbols that the options bound are fixed, live ones arrive with each run, and those left open
    follow the inputs: the first run with new sizes specialises the template, which takes
    milliseconds, later ones find it.
    """

    def __init__(
        self,
        template: Variants,
        params: ParamStore | None = None,
        executable: Executable | Callable[[], Executable] | None = None,
        manifest: BindingManifest | None = None,
    ) -> None:
        """`executable` is that of a template without open symbols, or makes it when it is needed;
        where it is left out, such a template is compiled now. `manifest` is that of an executable
        not made yet."""
        self.template = template
        self.params = params if params is not None else ParamStore()
        self._signature = template.signature
        self._inputs, self._params = self._signature.inputs, self._signature.params
        self._states = self._signature.states
        self._made, self._manifest = executable, manifest
        self._arrays: dict[str, Array] = {}
        self._executables: dict[Sizes, Executable] = {}
        self._attached: dict[Executable, tuple[int, int]] = {}
        self._states_version = 0
        self._watched = debug_level() >= 2 or check_nan()
        self._chosen: dict[tuple[Any, ...], _Chosen] = {}
        self._orders: dict[Executable, list[int]] = {}
        self._lock = threading.RLock()
        self._current: tuple[Executable, dict[str, int]] | None = None
        if not callable(executable) and not template.open_symbols:
            self._selected()

    # -- parameters and states ----------------------------------------------------------------

    def set_param(self, name: str, array: Any) -> CompiledGraph:
        """Give one parameter; it is used in place and shared by every variant."""
        shape = self._known(self._params, name, "parameter")
        checked = array if isinstance(array, Deferred) else as_array(name, array, shape)
        infer_sizes([(name, shape, checked.shape)], self.template.binding.sizes)
        with self._lock:
            self.params.set(name, checked)
        return self

    def set_params(self, arrays: Mapping[str, Any]) -> CompiledGraph:
        for name in arrays:
            self._known(self._params, name, "parameter")
        for name, array in arrays.items():
            self.set_param(name, array)
        return self

    def prepare(self) -> CompiledGraph:
        """Compute now what the current variant needs of its parameters, not with the first run."""
        with self._lock:
            self._prepare(self._selected()[0])
        return self

    def bind_state(self, name: str, array: Any) -> CompiledGraph:
        """Use `array` itself as the buffer of a state, to share it or to begin from it."""
        shape = self._known(self._states, name, "state")
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
            raise InputError(
                "a state is a C-ordered NumPy array", where=name, got=type(array).__name__
            )
        if not array.flags.writeable:
            raise InputError("a state must be writeable", where=name)
        as_array(name, array, shape)
        infer_sizes([(name, shape, array.shape)], self.template.binding.sizes)
        with self._lock:
            self._arrays[name] = array
            self._states_version += 1
        return self

    def read_state(self, name: str) -> Array:
        """The state as it is now; writing to the array changes it."""
        shape = self._known(self._states, name, "state")
        if name not in self._arrays:
            if not shape.is_static and self._current is None:
                raise InputError("state has no size yet", where=name, expected="a run before")
            self._allocate_states(self._current[0] if self._current else None)
        return self._arrays[name]

    # -- running ------------------------------------------------------------------------------

    def run(
        self, inputs: Mapping[str, Any] | None = None, /, *,
        sizes: Mapping[str, int] | None = None,
        phase: Phase | str | None = None, until: Phase | str | None = None, **named: Any,
    ) -> tuple[Array, ...]:  # fmt: skip
        """Run once; arrays by name, outputs in order. `sizes` gives sizes no input shows.

        `until` stops after that phase: a chunk of a prefill that is not the last needs no epilogue.
        `phase` runs one phase alone, on what the phases before it left; nothing else may run in
        between. Outputs that such a run does not compute are None.
        """
        span = _span(phase, until)
        arrays = self._take({**inputs, **named} if inputs else named)
        seen = (
            (*[a.shape for a in arrays], *sorted(sizes.items()))
            if sizes
            else tuple([a.shape for a in arrays])
        )
        with self._lock:
            chosen = self._chosen.get(seen)
            if chosen is None:
                chosen = self._choose(arrays, sizes, seen)
            executable, live, shapes = chosen
            self._current = (executable, live)
            self._attach(executable)
            results = tuple([np.empty(dims, element) for dims, element in shapes])
            given = [arrays[i] for i in self._order(executable)]
            if span is not None:
                return self._run_part(executable, given, live, span)
            if self._watched:
                self._run_watched(executable, given, results, live)
            else:
                executable.run(given, results, live)
        return results

    def __call__(
        self, *arrays: Any, sizes: Mapping[str, int] | None = None, **named: Any
    ) -> Array | tuple[Array, ...]:
        """Run once: inputs in their order, by name, or as one mapping of names.

        Gives the array itself where there is one output, a tuple in order where there are more.
        """
        if len(arrays) == 1 and isinstance(arrays[0], Mapping):
            given = dict(arrays[0])
        else:
            if len(arrays) > len(self._inputs):
                raise InputError(
                    "too many inputs", where=self._signature.name, got=len(arrays),
                    expected=", ".join(self._inputs) or "none",
                )  # fmt: skip
            given = dict(zip(self._inputs, arrays, strict=False))
        twice = given.keys() & named.keys()
        if twice:
            raise InputError("given twice", where=self._signature.name, got=", ".join(twice))
        results = self.run({**given, **named}, sizes=sizes)
        return results[0] if len(results) == 1 else results

    def _run_watched(
        self,
        executable: Executable,
        inputs: Sequence[Array | None],
        results: Sequence[Array | None],
        live: Mapping[str, int],
    ) -> None:
        """A run under RLX_DEBUG ≥ 2 (times of every kernel) or RLX_CHECK_NAN."""
        if check_nan():
            executable.run_checked(inputs, results, live)
        if debug_level() >= 2:
            with executable.recording() as recording:
                executable.run(inputs, results, live)
            debug(2, f"{self._signature.name}\n{recording.profile()}")
        elif not check_nan():
            executable.run(inputs, results, live)

    def _run_part(
        self,
        executable: Executable,
        inputs: Sequence[Array],
        live: Mapping[str, int],
        span: Span,
    ) -> tuple[Any, ...]:
        """Outputs stay in the arena, where later phases may read them; the caller gets copies."""
        outputs = executable.manifest.outputs
        executable.run(inputs, (None,) * len(outputs), live, span)
        phases = zip(outputs, executable.output_phases, strict=True)
        inside = [entry if span[0] <= phase <= span[1] else None for entry, phase in phases]
        return tuple([None if e is None else executable.slot(e, live).copy() for e in inside])

    def run_slots(self, *inputs: Array | None, sizes: Mapping[str, int] | None = None) -> None:
        """The fastest way: arrays by position, or None for what lies in the arena already.

        Nothing is returned: outputs are in the arena, at the offsets of `manifest`; see `slot`.
        Element types and shapes are taken on trust.
        """
        with self._lock:
            executable, live = self._selected()
            self._attach(executable)
            given = inputs or (None,) * len(self._inputs)
            results = (None,) * len(self._signature.output_names)
            if self._watched:
                self._run_watched(executable, given, results, sizes or live)
            else:
                executable.run(given, results, sizes or live)

    def chain(self, links: Links) -> Chain:
        """For `run_chain`: runs of the current variant that feed each other."""
        executable, _ = self._selected()
        if not self._watched:
            return executable.chain(links)
        given = (None,) * len(executable.manifest.inputs)
        results = (None,) * len(executable.manifest.outputs)
        return Chain(
            executable, links, lambda live: self._run_watched(executable, given, results, live)
        )

    def run_chain(
        self, chain: Chain, sizes: Mapping[str, int], count: int, ends: Collection[int]
    ) -> list[int]:
        """Several runs for the price of one call; see `Chain.run`."""
        with self._lock:
            self._attach(chain.executable)
            return chain.run(sizes, count, ends)

    def profile(
        self, inputs: Mapping[str, Any] | None = None, /, *,
        sizes: Mapping[str, int] | None = None, repeat: int = 5, **named: Any,
    ) -> Profile:  # fmt: skip
        """Run several times and say where the time goes, kernel by kernel (medians)."""
        self.run(inputs, sizes=sizes, **named)  # chooses the variant, attaches, warms up
        arrays = self._take({**(inputs or {}), **named})
        with self._lock:
            executable, live = self._selected()
            given = [arrays[i] for i in self._order(executable)]
            results = [None] * len(executable.manifest.outputs)
            with executable.recording() as recording:
                for _ in range(max(1, repeat)):
                    executable.run(given, results, live)
        return recording.profile()

    def recording(self) -> AbstractContextManager[Recording]:
        """Watch the runs of the current variant, made by whomever: its `profile()` is their
        median, its `slices()` what each worker did when."""
        return self.executable.recording()

    def slot(self, name: str) -> Array:
        """The arena memory of an input or output of the current variant, as an array."""
        executable, live = self._selected()
        entry = executable.manifest.find(name)
        if entry.arena_offset is None:
            raise InputError("no arena slot", where=name, got=entry.role)
        return executable.slot(entry, live)

    @property
    def manifest(self) -> BindingManifest:
        """Of the current variant: the one bound by the options, or the last one run."""
        if self._current is None and self._manifest is not None:
            return self._manifest
        return self._selected()[0].manifest

    @property
    def executable(self) -> Executable:
        return self._selected()[0]

    @property
    def input_names(self) -> list[str]:
        return list(self._inputs)

    @property
    def output_names(self) -> list[str]:
        return list(self._signature.output_names)

    # -- choosing a variant -------------------------------------------------------------------

    def _selected(self) -> tuple[Executable, dict[str, int]]:
        if self._current is None and not self.template.open_symbols:
            with self._lock:
                self._current = (self._executable({}), {})
        if self._current is None:
            raise InputError(
                "sizes are still open", where=self._signature.name,
                got=", ".join(sorted(self.template.open_symbols)),
                hint="give them in the options' binding, or run once",
            )  # fmt: skip
        return self._current

    def _take(self, given: Mapping[str, Any]) -> list[Array]:
        """The arrays in the order of the inputs, checked."""
        if len(given) != len(self._inputs) or given.keys() != self._inputs.keys():
            for name in given:
                self._known(self._inputs, name, "input")
            missing = [n for n in self._inputs if n not in given]
            shapes = ", ".join(f"{n} {self._inputs[n]}" for n in missing)
            raise InputError("missing inputs", where=self._signature.name, expected=shapes)
        return [as_array(n, given[n], shape) for n, shape in self._inputs.items()]

    def _known(self, table: Mapping[str, Shape], name: str, what: str) -> Shape:
        if name not in table:
            known = ", ".join(table) or "none"
            raise InputError(
                f"unknown {what}", where=self._signature.name, got=name, expected=known
            )
        return table[name]

    def _choose(
        self, arrays: Sequence[Array], sizes: Mapping[str, int] | None, seen: tuple[Any, ...]
    ) -> _Chosen:
        """The variant for these shapes; remembered, so that a repeated run pays for a lookup."""
        named = zip(self._inputs.items(), arrays, strict=True)
        shown = [(n, shape, a.shape) for (n, shape), a in named]
        fixed = self.template.binding.sizes
        known = infer_sizes(shown, {**fixed, **(sizes or {})})
        live = {s: self._live(s, bound, known) for s, bound in self.template.live.items()}
        missing = self.template.open_symbols - known.keys()
        if missing:
            raise BindingError(
                "sizes that no input shows", where=self._signature.name,
                got=", ".join(sorted(missing)), hint="pass sizes={…} to run",
            )  # fmt: skip
        executable = self._executable({s: known[s] for s in sorted(self.template.open_symbols)})
        shapes = tuple(
            (e.shape.bind(live).static_dims, e.shape.dtype.numpy)
            for e in executable.manifest.outputs
        )
        if len(self._chosen) >= _REMEMBERED:
            self._chosen.pop(next(iter(self._chosen)))
        self._chosen[seen] = chosen = (executable, live, shapes)
        return chosen

    def _order(self, executable: Executable) -> list[int]:
        """Which of the inputs the executable still reads: passes may have dropped some."""
        found = self._orders.get(executable)
        if found is None:
            places = {name: i for i, name in enumerate(self._inputs)}
            found = [places[e.name] for e in executable.manifest.inputs]
            self._orders[executable] = found
        return found

    def _live(self, symbol: str, bound: int, known: Mapping[str, int]) -> int:
        if symbol not in known:
            raise BindingError(
                "a live size is missing", where=symbol, expected=f"0 … {bound}",
                hint=f"pass sizes={{{symbol!r}: n}} to run",
            )  # fmt: skip
        if not 0 <= known[symbol] <= bound:
            raise BindingError(
                "a value beyond its live bound", where=symbol, got=known[symbol],
                expected=f"0 … {bound}",
            )  # fmt: skip
        return known[symbol]

    def _executable(self, open_sizes: Mapping[str, int]) -> Executable:
        key = tuple(sorted(open_sizes.items()))
        executable = self._executables.pop(key, None)
        if executable is None:
            made = None if key else self._made
            executable = made() if callable(made) else made
        if executable is None:
            executable = self.template.specialize(open_sizes)
        self._executables[key] = executable
        if len(self._executables) > _MOST_VARIANTS:
            self._forget(self._executables.pop(next(iter(self._executables))))
        return executable

    def _forget(self, executable: Executable) -> None:
        self._attached.pop(executable, None)
        self._orders.pop(executable, None)
        self._chosen = {k: c for k, c in self._chosen.items() if c[0] is not executable}

    def _attach(self, executable: Executable) -> None:
        """Hand over parameters and states, unless the executable has the latest already."""
        latest = (self.params.version, self._states_version)
        if self._attached.get(executable) == latest:
            return
        names = self._prepare(executable)
        self._allocate_states(executable)
        executable.attach({n: self.params.get(n) for n in names}, self._arrays)
        self._attached[executable] = latest

    def _prepare(self, executable: Executable) -> list[str]:
        """See that all parameters are there, those computed from others included; their names."""
        names = executable.manifest.param_names
        if any(n not in self.params for n in names):  # an artifact's plan is read for this alone
            self.params.ensure(names, self.template.prepare, self.template.backend)
        return names

    def _allocate_states(self, executable: Executable | None) -> None:
        shapes: Mapping[str, Shape] = self._states
        if executable is not None:
            shapes = {e.name: e.shape for e in executable.manifest.states}
        for name, shape in shapes.items():
            if name not in self._arrays:
                dims = [upper_bound(d, self.template.live) for d in shape.dims]
                self._arrays[name] = np.zeros(dims, shape.dtype.numpy)

    def __repr__(self) -> str:
        return f"<CompiledGraph {self._signature.name} on {self.template.backend.name}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: inputs and outputs, params, states and variants."""
        rows: dict[str, object] = {f"input {n}": shape for n, shape in self._inputs.items()}
        rows |= {f"state {n}": shape for n, shape in self._states.items()}
        rows |= {"params": len(self._params), "outputs": ", ".join(self.output_names)}
        title = f"{self._signature.name} on {self.template.backend.name}"
        return card(title, rows | {"variants": len(self._executables)})


def _span(phase: Phase | str | None, until: Phase | str | None) -> Span | None:
    if phase is None and until is None:
        return None
    if phase is not None and until is not None:
        raise OptionError("one phase or an end, not both", where="run", got=f"{phase} and {until}")
    if until is not None:
        return Phase.PROLOGUE, Phase.of(until)
    return Phase.of(phase), Phase.of(phase)
