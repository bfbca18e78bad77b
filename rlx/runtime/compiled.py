"""A compiled graph: binds parameters and states by name, and runs any sizes.

A run dispatches by the shapes of its inputs to a variant, which is compiled on first use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from rlx.backends.base import Executable, OtherArrays, Span
from rlx.backends.buffer import Allocator, Buffer, HostBuffer
from rlx.backends.decode_loop import DecodeLoop, LoopSpec
from rlx.backends.timing import Profile, Recording
from rlx.errors import BindingError, InputError
from rlx.ir.binding import infer_sizes
from rlx.ir.html import card
from rlx.ir.op import Array
from rlx.ir.phase import Phase
from rlx.ir.shape import Shape
from rlx.runtime.params import (
    Deferred,
    ParamStore,
    SharedStates,
    StateStore,
    as_argument,
    as_array,
    contiguous,
    named_inputs,
)
from rlx.runtime.phase_runs import PhaseRuns, phase_span, sizes_needed
from rlx.runtime.variants import (
    VariantCache,
    VariantProvider,
    dispatch_key,
    run_inputs,
    run_instrumented,
    users_manifest,
)
from rlx.specialize.manifest import BindingManifest
from rlx.support.pickling import COMPILE_AGAIN, Unpicklable
from rlx.support.settings import NAN_CHECKS, check_nan, debug_level


class CompiledGraph(Unpicklable):
    """What `Session.compile` returns. Threads may share it; a lock makes their runs exclusive.

    Symbols that the options bind are fixed. Dynamic dims are given with each run, below a bound.
    Open symbols follow the inputs: each combination of their sizes is a variant. A variant is
    compiled once its sizes are known: now, if no symbol is open, else by `warm` or by the first run
    with these sizes, which takes milliseconds.

    Arrays are NumPy's. On a device with memory of its own, `run` copies inputs to the device and
    outputs back; on the host nothing is copied.
    """

    instead = COMPILE_AGAIN

    def __init__(
        self, template: VariantProvider, params: ParamStore | None = None,
        executable: Executable | Callable[[], Executable] | None = None,
        manifest: BindingManifest | None = None, states: SharedStates | None = None,
    ) -> None:  # fmt: skip
        """`executable`, or a function that returns it on first use, is for templates without open
        symbols; if it is None, such a template is compiled now. `manifest` is for an executable
        that is not compiled yet. `states` are shared with other compiled graphs."""
        self.template = template
        self.params = params if params is not None else ParamStore()
        self._signature = template.signature
        self._inputs, self._manifest = self._signature.inputs, manifest
        self.allocator: Allocator = template.backend.allocator
        self._on_host = self.allocator.is_host
        self._states = StateStore(self.allocator, states)
        self._variants = VariantCache(template, executable)
        self._instrumented = debug_level() >= 2 or check_nan()
        self._lock = threading.RLock()
        self._current: tuple[Executable, dict[str, int]] | None = None
        self._phase_runs: PhaseRuns | None = None
        self._users_manifest: tuple[Executable, BindingManifest] | None = None
        if not callable(executable) and not template.open_symbols:
            self._current_variant()

    # -- parameters and states ----------------------------------------------------------------

    def set_param(self, name: str, array: Any) -> CompiledGraph:
        """Set one parameter to an array or a buffer of the device. It is used in place and shared
        by all variants."""
        shape = self._find(self._signature.params, name, "parameter")
        checked = array
        if not isinstance(array, Deferred):
            checked = as_argument(name, array, shape, self.allocator)
        infer_sizes([(name, shape, checked.shape)], self.template.binding.sizes)
        with self._lock:
            self.params.set(name, checked)
        return self

    def set_params(self, arrays: Mapping[str, Any]) -> CompiledGraph:
        for name in arrays:
            self._find(self._signature.params, name, "parameter")
        for name, array in arrays.items():
            self.set_param(name, array)
        return self

    def prepare(self) -> CompiledGraph:
        """Prepack the parameters of the current variant and copy them to the device now, not with
        the first run."""
        with self._lock:
            for name in self._prepare(self._current_variant()[0]):
                self.params.buffer(name, self.allocator)
        return self

    def bind_state(self, name: str, array: Any) -> CompiledGraph:
        """Use a buffer as the memory of a state, to share it or to set its first value. An array is
        used in place on the host, and copied to a device with memory of its own."""
        shape = self._find(self._signature.states, name, "state")
        with self._lock:
            self._states.bind(name, array, shape, self.template.binding.sizes)
        return self

    def read_state(self, name: str) -> Array:
        """The current value of a state. On the host it is the memory itself: writing to the array
        changes the state. On a device with memory of its own it is a copy."""
        self.state_buffer(name)
        return self._states.read(name)

    def state_buffer(self, name: str) -> Buffer:
        """The memory of a state, to share it with another graph, to clear or to write it."""
        shape = self._find(self._signature.states, name, "state")
        if name not in self._states.buffers:
            if not shape.is_static and self._current is None:
                raise InputError("state has no size yet", where=name, expected="a run before")
            self._allocate_states(self._current[0] if self._current else None)
        return self._states.buffers[name]

    def share_arenas(self) -> CompiledGraph:
        """Let a new variant use memory that an earlier one has touched. What slots hold is lost by
        other variants' runs, and so is what phases left."""
        self._variants.share_arenas = True
        return self

    def warm(self, sizes: Mapping[str, int] | None = None, /, **named: int) -> CompiledGraph:
        """Compile the variant of these open sizes now, not with the first run."""
        given = {**(sizes or {}), **named}
        unknown = given.keys() - self.template.open_symbols
        missing = self.template.open_symbols - given.keys()
        if unknown or missing:
            raise BindingError(
                "sizes to warm are those of the open symbols", where=self._signature.name,
                got=", ".join(sorted(map(str, given))) or "none",
                expected=", ".join(sorted(self.template.open_symbols)) or "none",
            )  # fmt: skip
        with self._lock:
            self._current = (self._variants.executable(given), {})
        return self

    # -- running ------------------------------------------------------------------------------

    def run(
        self, inputs: Mapping[str, Any] | None = None, /, *,
        sizes: Mapping[str, int] | None = None,
        phase: Phase | str | None = None, until: Phase | str | None = None, **named: Any,
    ) -> tuple[Array, ...]:  # fmt: skip
        """Run once on arrays by name; returns the outputs in order. `sizes` gives dimensions that
        cannot be inferred from the inputs.

        `until` stops after a phase: all chunks of a prefill but the last need no epilogue. `phase`
        runs one phase alone, on what earlier ones left. Both need only the inputs that these phases
        read. An earlier phase that has not run on the same inputs runs first, if its inputs are
        given. Outputs that such a run does not compute are None.
        """
        span = phase_span(phase, until)
        if span is not None:
            return self._run_phases(
                named if inputs is None else self._join(inputs, named), sizes, span
            )
        arrays = self._input_arrays(named if inputs is None else self._join(inputs, named))
        return self._run_arrays(arrays, sizes)

    def _run_arrays(self, arrays: Sequence[Any], sizes: Any) -> tuple[Array, ...]:
        shapes = tuple([a.shape for a in arrays])
        key = dispatch_key(shapes, sizes) if sizes else shapes
        with self._lock:
            entry = self._variants.dispatch_cache.get(key)
            if entry is None:
                entry = self._variants.dispatch(shapes, sizes, key)
            executable, dims, makers, order, donated = entry
            self._current = (executable, dims)
            self._attach(executable)
            given = [arrays[i] for i in order]
            self._phase_runs = None
            if not self._on_host:
                return self._run_copied(executable, given, dims)
            made = enumerate(makers)
            results = tuple([given[donated[i]] if i in donated else make() for i, make in made])
            given, outputs = [HostBuffer(a) for a in given], [HostBuffer(a) for a in results]
            if self._instrumented or NAN_CHECKS.wanted:
                self._run_instrumented(executable, given, outputs, dims)
            else:
                executable.run(given, outputs, dims)
        return results

    def run_in_order(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Run once on NumPy arrays in the order of the inputs. Element types are not checked."""
        return self._run_arrays([contiguous(a) for a in arrays], None)

    def caller(
        self, shapes: tuple[tuple[int, ...], ...], sizes: Mapping[str, int] | None = None,
        other: OtherArrays | None = None,
    ) -> Callable[..., Sequence[Any]]:  # fmt: skip
        """`run_in_order` for inputs of these shapes alone; it looks nothing up.

        With `other` arrays are those of another library: contiguous ones in the host's memory."""
        key = dispatch_key(shapes, sizes) if sizes else shapes
        with self._lock:
            entry = self._variants.dispatch_cache.get(key)
            if entry is None:
                entry = self._variants.dispatch(shapes, sizes, key)
            executable, dims, makers, order, donated = entry
            self._attach(executable)
            plain = self._on_host and not (self._instrumented or donated)
            if other is not None:
                shapes_out = [e.shape.bind(dims) for e in executable.manifest.outputs]
                makers = tuple([other.maker(shape) for shape in shapes_out])
            run = executable.caller(order, makers, dims, other) if plain else None
        if run is None:
            return partial(self._run_other, sizes, other)
        lock, current, attached = self._lock, (executable, dims), self._variants.attached
        params, states = self.params, self._states

        def call(arrays: Sequence[Any]) -> Sequence[Any]:
            if NAN_CHECKS.wanted:
                return self._run_other(sizes, other, arrays)
            with lock:
                if attached.get(executable) != (params.version, states.version):
                    self._attach(executable)
                self._current, self._phase_runs = current, None
                return run(arrays)

        return call

    def _run_other(
        self, sizes: Mapping[str, int] | None, other: OtherArrays | None, arrays: Sequence[Any]
    ) -> Sequence[Any]:
        """A run the long way, of arrays that may be another library's."""
        if other is None:
            return self._run_arrays([contiguous(a) for a in arrays], sizes)
        given = [contiguous(other.to_numpy(a)) for a in arrays]
        return [other.from_numpy(a) for a in self._run_arrays(given, sizes)]

    def __call__(
        self, *arrays: Any, sizes: Mapping[str, int] | None = None, **named: Any
    ) -> Array | tuple[Array, ...]:
        """Run once: inputs in order, by name, or as one mapping.

        Returns the array if there is one output, else a tuple.
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

    def _run_copied(
        self, executable: Executable, arrays: Sequence[Any], dims: Mapping[str, int]
    ) -> tuple[Array, ...]:
        """Copy inputs to their arena slots, run, and copy outputs to the host."""
        outputs = executable.manifest.outputs
        given = run_inputs(self._on_host, executable, arrays, dims)
        if self._instrumented:
            self._run_instrumented(executable, given, (None,) * len(outputs), dims)
        else:
            executable.run(given, (None,) * len(outputs), dims)
        return tuple([executable.slot(entry, dims).copy_out() for entry in outputs])

    def _run_instrumented(self, executable: Executable, *run: Any) -> None:
        run_instrumented(self._signature.name, self.allocator, executable, *run)

    def _run_phases(
        self, inputs: Mapping[str, Any], sizes: Mapping[str, int] | None, span: Span
    ) -> tuple[Any, ...]:
        """Run some phases. Outputs stay in the arena for later phases; returns copies."""
        given = {
            n: self._checked(n, a, self._find(self._inputs, n, "input")) for n, a in inputs.items()
        }
        with self._lock:
            runs = self._phase_runs
            shapes, known = ({}, {}) if runs is None else runs.known(span[0])
            shown = tuple([given[n].shape if n in given else shapes.get(n) for n in self._inputs])
            known |= sizes or {}
            key = (span, *shown, *sorted(known.items()))
            entry = self._variants.dispatch_cache.get(key)
            if entry is None:
                with sizes_needed(span[0], self._inputs.keys() - given.keys(), runs is None):
                    entry = self._variants.dispatch(shown, known, key)
            executable, dims = entry.executable, entry.sizes
            self._current = (executable, dims)
            self._attach(executable)
            version = self._variants.attached[executable]
            if runs is None or runs.executable is not executable or runs.version != version:
                runs = PhaseRuns(executable, version)
            if span[0] > Phase.PROLOGUE or len(given) < len(self._inputs):
                span = (runs.first_to_run(span, given, dims, self._signature.name), span[1])
            ordered = [given.get(e.name) for e in executable.manifest.inputs]
            outputs = executable.manifest.outputs
            self._phase_runs = None  # a run that fails leaves nothing to go on from
            buffers = run_inputs(self._on_host, executable, ordered, dims)
            executable.run(buffers, (None,) * len(outputs), dims, span)
            runs.add(span, given, dims)
            self._phase_runs = runs
            phases = zip(outputs, executable.output_phases, strict=True)
            inside = [entry if span[0] <= phase <= span[1] else None for entry, phase in phases]
            return tuple([e and executable.slot(e, dims).copy_out() for e in inside])

    def run_slots(self, *inputs: Array | None, sizes: Mapping[str, int] | None = None) -> None:
        """Run with the least overhead: inputs by position, None for one already in its arena slot.
        Nothing is returned: outputs are in the arena, at the offsets of `manifest`; see `slot`.
        Element types and shapes are not checked."""
        with self._lock:
            self._phase_runs = None
            executable, dims = self._current_variant()
            self._attach(executable)
            given: Sequence[Buffer | None] = (None,) * len(self._inputs)
            if inputs:
                given = run_inputs(self._on_host, executable, inputs, sizes or dims)
            results = (None,) * len(self._signature.output_names)
            if self._instrumented:
                self._run_instrumented(executable, given, results, sizes or dims)
            else:
                executable.run(given, results, sizes or dims)

    def decode_loop(self, spec: LoopSpec) -> DecodeLoop:
        """A decode loop over the current variant, for `run_loop`."""
        executable, _ = self._current_variant()
        if not self._instrumented:
            return executable.decode_loop(spec)
        given = (None,) * len(executable.manifest.inputs)
        results = (None,) * len(executable.manifest.outputs)
        return DecodeLoop(
            executable, spec, lambda dims: self._run_instrumented(executable, given, results, dims)
        )

    def run_loop(
        self, loop: DecodeLoop, sizes: Mapping[str, int], count: int, stop: Collection[int]
    ) -> list[int]:
        """Decode several tokens in one call; see `DecodeLoop.run`."""
        with self._lock:
            self._phase_runs = None
            self._attach(loop.executable)
            return loop.run(sizes, count, stop)

    def synchronize(self) -> None:
        """Wait for queued runs: `run_slots` may return before a device is done."""
        self.allocator.synchronize()

    def profile(
        self, inputs: Mapping[str, Any] | None = None, /, *,
        sizes: Mapping[str, int] | None = None, repeat: int = 5, **named: Any,
    ) -> Profile:  # fmt: skip
        """Run several times and profile every kernel (medians)."""
        given = named if inputs is None else self._join(inputs, named)
        self.run(given, sizes=sizes)  # dispatches, attaches, warms up
        arrays = dict(zip(self._inputs, self._input_arrays(given), strict=True))
        with self._lock:
            executable, dims = self._current_variant()
            ordered = [arrays[entry.name] for entry in executable.manifest.inputs]
            buffers = run_inputs(self._on_host, executable, ordered, dims)
            results = [None] * len(executable.manifest.outputs)
            with executable.recording() as recording:
                for _ in range(max(1, repeat)):
                    executable.run(buffers, results, dims)
                self.allocator.synchronize()
        return recording.profile()

    def recording(self) -> AbstractContextManager[Recording]:
        """Record all runs of the current variant inside the context: `profile()` is their median,
        `slices()` the timeline of every worker."""
        return self.executable.recording()

    def slot(self, name: str) -> Array:
        """The arena slot of an input or output of the current variant as an array; host only."""
        return self.slot_buffer(name).array

    def slot_buffer(self, name: str) -> Buffer:
        """The arena slot of an input or output of the current variant."""
        executable, dims = self._current_variant()
        entry = executable.manifest.find(name)
        if entry.arena_offset is None:
            raise InputError("no arena slot", where=name, got=entry.role)
        return executable.slot(entry, dims)

    @property
    def manifest(self) -> BindingManifest:
        """The manifest of the current variant: the one bound by the options, or the last run."""
        if self._current is None and self._manifest is not None:
            return self._manifest
        executable = self._current_variant()[0]
        if self._users_manifest is None or self._users_manifest[0] is not executable:
            self._users_manifest = executable, users_manifest(executable.manifest, self.template)
        return self._users_manifest[1]

    @property
    def executable(self) -> Executable:
        return self._current_variant()[0]

    @property
    def input_names(self) -> list[str]:
        return list(self._inputs)

    @property
    def output_names(self) -> list[str]:
        return list(self._signature.output_names)

    # -- arguments and variants ---------------------------------------------------------------

    def _current_variant(self) -> tuple[Executable, dict[str, int]]:
        if self._current is None and not self.template.open_symbols:
            with self._lock:
                self._current = (self._variants.executable({}), {})
        if self._current is None:
            raise InputError(
                "symbols are still open", where=self._signature.name,
                got=", ".join(sorted(self.template.open_symbols)),
                hint="give them in the options' binding, or run once",
            )  # fmt: skip
        return self._current

    def _join(self, inputs: Any, named: Mapping[str, Any]) -> Mapping[str, Any]:
        return named_inputs(self._signature.name, self._inputs, inputs, named)

    def _input_arrays(self, given: Mapping[str, Any]) -> list[Any]:
        """The inputs in order, checked."""
        if len(given) != len(self._inputs) or given.keys() != self._inputs.keys():
            for name in given:
                self._find(self._inputs, name, "input")
            missing = [n for n in self._inputs if n not in given]
            shapes = ", ".join(f"{n} {self._inputs[n]}" for n in missing)
            raise InputError("missing inputs", where=self._signature.name, expected=shapes)
        if self._on_host:
            return [as_array(n, given[n], shape) for n, shape in self._inputs.items()]
        return [self._checked(n, given[n], shape) for n, shape in self._inputs.items()]

    def _checked(self, name: str, value: Any, shape: Shape) -> Any:
        if self._on_host:
            return as_array(name, value, shape)
        return as_argument(name, value, shape, self.allocator)

    def _find(self, table: Mapping[str, Shape], name: str, what: str) -> Shape:
        if name not in table:
            known = ", ".join(table) or "none"
            raise InputError(
                f"unknown {what}", where=self._signature.name, got=name, expected=known
            )
        return table[name]

    def _attach(self, executable: Executable) -> None:
        """Attach parameters and states, unless the executable has the latest already."""
        latest = (self.params.version, self._states.version)
        if self._variants.attached.get(executable) == latest:
            return
        names = self._prepare(executable)
        self._allocate_states(executable)
        buffer, allocator = self.params.buffer, self.allocator
        executable.attach({n: buffer(n, allocator) for n in names}, self._states.buffers)
        self._variants.attached[executable] = latest

    def _prepare(self, executable: Executable) -> list[str]:
        """Prepare missing parameters of an executable; returns the names of all."""
        names = executable.manifest.param_names
        if any(n not in self.params for n in names):  # an artifact reads its plan only for this
            self.params.ensure(names, self.template.prepare, self.template.backend)
        return names

    def _allocate_states(self, executable: Executable | None) -> None:
        shapes = self._signature.states
        if executable is not None:
            shapes = {e.name: e.shape for e in executable.manifest.states}
        self._states.allocate(shapes, self.template.dynamic_dims)

    def __repr__(self) -> str:
        return f"<CompiledGraph {self._signature.name} on {self.template.backend.name}>"

    def _repr_html_(self) -> str:
        """HTML for notebooks: inputs and outputs, params, states and variants."""
        rows: dict[str, object] = {f"input {n}": shape for n, shape in self._inputs.items()}
        rows |= {f"state {n}": shape for n, shape in self._signature.states.items()}
        rows |= {"params": len(self._signature.params), "outputs": ", ".join(self.output_names)}
        title = f"{self._signature.name} on {self.template.backend.name}"
        return card(title, rows | {"variants": len(self._variants)})
