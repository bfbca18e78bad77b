"""`rlx.load("model.onnx")`: an ONNX file, ready to run on any device.

The first run traces the graph with symbolic sizes and compiles it; another batch or length is
another variant of the same template. What depends on data in its shape runs between segments.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.buffer import allocation_limit
from rlx.errors import InputError, OptionError, UnsupportedError
from rlx.formats.onnx import (
    NUMPY_BY_NAME,
    Argument,
    OnnxFunction,
    OnnxGraph,
    OnnxNode,
    bodies_of,
    open_onnx,
)
from rlx.ir.graph import Graph
from rlx.numpy.array import Array
from rlx.onnx.compiled_file import write_compiled
from rlx.onnx.example_inputs import example_inputs
from rlx.onnx.interpreter import Scope
from rlx.onnx.program import Program
from rlx.onnx.run_parts import profiles_of, stage_text
from rlx.onnx.schema_functions import has_body
from rlx.onnx.table import find
from rlx.onnx.values import Data, constant_name
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.params import ParamStore
from rlx.runtime.session import Session
from rlx.specialize.options import CompileOptions

if TYPE_CHECKING:
    from rlx.backends.timing import Profile

MAX_ITERATIONS = 10_000_000


class OnnxModel:
    """A model of an ONNX file. `inputs` and `outputs` say what it takes and gives. Threads may
    share it; their runs take turns.

    A `Loop` that goes on for longer than `max_iterations` is an error, and so is a tensor, or the
    memory of a run, larger than `max_bytes`: for files that are not trusted.
    """

    def __init__(
        self, model: str | os.PathLike[str] | bytes, *, device: str = "cpu",
        threads: int | None = None, max_iterations: int = MAX_ITERATIONS,
        max_bytes: int | None = None,
    ) -> None:  # fmt: skip
        for name, limit in (("max_iterations", max_iterations), ("max_bytes", max_bytes)):
            if limit is not None and limit < 1:
                raise OptionError("not a limit", where=name, got=limit, expected="at least 1")
        self.file = open_onnx(model)
        self.device, self.threads = device, threads
        self.max_iterations, self.max_bytes = max_iterations, max_bytes
        self._lock = threading.RLock()
        self.session, self.params = Session(device), ParamStore()
        self._names: dict[int, tuple[Array, str]] = {}
        self._taken: set[str] = set()
        self._programs: dict[Any, tuple[Any, Program]] = {}
        missing = missing_operators(self)
        if missing:
            raise UnsupportedError(
                "operators that are not supported", where=self.file.path, got="; ".join(missing),
                hint="docs/onnx.md says how to add one",
            )  # fmt: skip
        self.program = Program.of(self, self.file.graph, self.file.opsets)

    def __repr__(self) -> str:
        given = ", ".join(f"{a.name}: {a.type}" for a in self.inputs)
        made = ", ".join(f"{a.name}: {a.type}" for a in self.outputs)
        return f"<OnnxModel {self.file.graph.name}({given}) -> {made}>"

    @property
    def inputs(self) -> tuple[Argument, ...]:
        """Name, element type and declared shape of each input."""
        return self.file.graph.inputs

    @property
    def outputs(self) -> tuple[Argument, ...]:
        """The same of each output."""
        return self.file.graph.outputs

    # -- running ------------------------------------------------------------------------------

    def run(self, inputs: Mapping[str, Any] | None = None, /, **named: Any) -> tuple[Any, ...]:
        """The outputs in order, for inputs by name: NumPy arrays, lists for sequences."""
        given = {**(inputs or {}), **named}
        values = self._checked(given)
        with self._alone():
            return tuple(self.program.run(values))

    def __call__(self, *arrays: Any, **named: Any) -> Any:
        """Run on inputs in order or by name; the output, or a tuple of several."""
        if len(arrays) > len(self.inputs):
            raise InputError(
                "too many inputs", where=self.file.path, got=len(arrays), expected=len(self.inputs)
            )
        by_order = zip([a.name for a in self.inputs], arrays, strict=False)
        results = self.run({**dict(by_order), **named})
        return results[0] if len(results) == 1 else results

    def _alone(self) -> AbstractContextManager[Any]:
        """One run at a time, within the limits of the model."""
        if self.max_bytes is None:
            return self._lock
        stack = ExitStack()
        stack.enter_context(self._lock)
        stack.enter_context(allocation_limit(self.max_bytes))
        return stack

    def _checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        expected = {a.name: a for a in self.inputs}
        unknown = [n for n in given if n not in expected and n not in self.program.constants]
        missing = [n for n, a in expected.items() if n not in given and a.type.kind != "optional"]
        if unknown or missing:
            raise InputError(
                "not the inputs of this model", where=self.file.path,
                got=f"{', '.join(map(str, unknown)) or 'none'} unknown, "
                f"{', '.join(missing) or 'none'} missing",
                expected=", ".join(expected),
            )  # fmt: skip
        values = {n: _given(expected[n], given.get(n)) for n in expected}
        for name in given:
            if name not in expected:  # an initializer, which a run may replace
                raise InputError("a constant of the file", where=name, got="an input")
        return values

    # -- seeing inside ------------------------------------------------------------------------

    def example_inputs(self, **sizes: int) -> dict[str, Data]:
        """Drawn inputs of the declared types. Dimensions that the file leaves open are 1, or what
        `sizes` says by their names, or as "input:axis"."""
        return example_inputs(self.inputs, sizes)

    def inspect(
        self, stage: str = "mir", inputs: Mapping[str, Any] | None = None, **sizes: int
    ) -> str:
        """The model at a stage of the compiler, for inputs or sizes: "mir" (the graph, sizes
        symbolic), "lir" (optimised, with its memory plan), "program", "llvm" or "asm"."""
        with self._alone():
            return stage_text(self, self._examples(inputs, sizes), stage)

    def profile(self, inputs: Mapping[str, Any] | None = None, **sizes: int) -> dict[str, Profile]:
        """Time, GB/s and GFLOP/s of every kernel, by segment; most models are one."""
        with self._alone():
            return profiles_of(self, self._examples(inputs, sizes))

    def compile(self, path: str | os.PathLike[str], *calls: Mapping[str, Any]) -> Path:
        """Write code and weights for `rlx.onnx.load_compiled`, which needs no compiler. Each call
        has inputs by name, or sizes: `compile("m.rlx", {"batch": 1}, {"batch": 8})`."""
        given = [
            self._examples({}, call) if all(isinstance(n, int) for n in call.values())
            else self._examples(call, {}) for call in calls or [{}]
        ]  # fmt: skip
        with self._alone():
            return write_compiled(self, path, given)

    def _examples(
        self, inputs: Mapping[str, Any] | None, sizes: Mapping[str, int]
    ) -> dict[str, Any]:
        return self._checked(inputs or example_inputs(self.inputs, sizes))

    # -- what programs need ---------------------------------------------------------------------

    def compile_graph(self, graph: Graph, params: Mapping[str, Data]) -> CompiledGraph:
        options = CompileOptions(threads=self.threads)
        compiled = self.session.compile(graph, options, params=self.params).share_arenas()
        for name, array in params.items():
            if name in compiled.template.signature.params:
                compiled.set_param(name, array)
        return compiled

    def param_name(self, array: Array) -> str:
        """The name of a constant as a param; the array stays alive."""
        found = self._names.get(id(array))
        if found is None:
            name = constant_name(array) or f"p{len(self._names)}"
            if name in self._taken:
                name = f"{name}.{len(self._names)}"
            self._taken.add(name)
            found = self._names[id(array)] = array, name
        return found[1]

    def program_of(self, body: OnnxGraph, scope: Scope) -> Program:
        found = self._programs.get(id(body))
        if found is None:
            made = Program.of(self, body, scope.opsets, scope.attributes, scope.depth + 1)
            found = self._programs[id(body)] = body, made
        return found[1]

    def program_of_function(
        self, function: OnnxFunction, attributes: Mapping[str, Any], scope: Scope
    ) -> Program:
        given = {**function.defaults, **attributes}
        key = (id(function), tuple(sorted((k, repr(v)) for k, v in given.items())))
        found = self._programs.get(key)
        if found is None:
            made = Program(
                self, function.name, function.nodes, function.outputs, {},
                {**scope.opsets, **function.opsets}, given, (), scope.depth + 1,
            )  # fmt: skip
            found = self._programs[key] = function, made
        return found[1]


def _given(expected: Argument, value: Any) -> Any:
    kind = expected.type
    if isinstance(value, (list, tuple)) and kind.kind in ("sequence", "optional"):
        return [_given_tensor(expected, x) for x in value]
    if value is None and kind.kind == "optional":
        return None
    return _given_tensor(expected, value)


def _given_tensor(expected: Argument, value: Any) -> Any:
    wanted = NUMPY_BY_NAME.get(expected.type.dtype)
    if isinstance(value, Array):
        value = value.data
    if not isinstance(value, (np.ndarray, np.generic)):
        value = np.asarray(value, wanted)
    array: Data = np.asarray(value)
    if wanted == np.dtype(object) and array.dtype.kind in "US":
        array = array.astype(object)
    if wanted is not None and array.dtype != wanted:
        raise InputError(
            "wrong element type", where=expected.name, got=array.dtype, expected=expected.type,
        )  # fmt: skip
    dims = expected.type.dims
    if dims is not None and expected.type.kind == "tensor":
        fits = len(dims) == array.ndim and all(
            not isinstance(d, int) or d == n for d, n in zip(dims, array.shape, strict=True)
        )
        if not fits:
            raise InputError(
                "wrong shape", where=expected.name, got=list(array.shape), expected=expected.type
            )
    return array


def missing_operators(model: OnnxModel) -> list[str]:
    """Every operator of the file that has neither a row nor a body."""
    file = model.file
    found: dict[str, None] = {}

    def look(nodes: Sequence[OnnxNode], opsets: Mapping[str, int]) -> None:
        for node in nodes:
            opset = opsets.get(node.domain, 1)
            known = (
                (node.domain, node.op_type, node.overload) in file.functions
                or find(node.domain, node.op_type, opset) is not None
                or has_body(node, opset)
            )
            if not known:
                found[f"{node.domain or 'ai.onnx'}.{node.op_type} (opset {opset})"] = None
            for body in bodies_of(node):
                look(body.nodes, opsets)

    look(file.graph.nodes, file.opsets)
    for function in file.functions.values():
        look(function.nodes, {**file.opsets, **function.opsets})
    return sorted(found)
