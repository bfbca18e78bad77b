"""Models compiled ahead of time: one file with code and weights that runs without a compiler, and
without the `onnx` package.

    rlx.load("model.onnx").compile("model.rlx", {"batch": 1}, {"batch": 8})
    model = rlx.onnx.load_compiled("model.rlx")
    (logits,) = model.run(x=x)
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import FormatError, InputError, UnsupportedError
from rlx.ir.binding import DimBinding
from rlx.ir.module import GraphModule
from rlx.ir.serial.reader import Reader
from rlx.ir.serial.writer import Writer
from rlx.onnx.run_parts import Part, parts_of
from rlx.onnx.segment import OutputAt, Sizes
from rlx.onnx.values import Data, Known, evaluated_sizes
from rlx.runtime.bundle import Bundle, BundleBuilder, load_bundle
from rlx.specialize.options import CompileOptions

if TYPE_CHECKING:
    from rlx.onnx.onnx_model import OnnxModel

_TABLE, _FORMAT = "onnx", 1


def write_compiled(
    model: OnnxModel, path: str | os.PathLike[str], calls: Sequence[Mapping[str, Any]]
) -> Path:
    """Write code for these calls, and the weights."""
    names = [a.name for a in model.inputs]
    builder = BundleBuilder(
        device=model.device, options=CompileOptions(threads=model.threads), params=model.params
    )
    rows, extras = [], dict[str, bytes]()
    for number, given in enumerate(calls):
        part = _only(model, given)
        traced = part.traced
        assert traced is not None and traced.graph is not None
        graph, sizes = traced.graph, part.sizes or {}
        for name, array in traced.params.items():
            model.params.set(name, array)
        used = {s: n for s, n in sizes.items() if s in graph.symbols()}
        builder.add(
            lambda graph=graph: GraphModule.from_mir(graph), {f"call{number}": DimBinding(used)}
        )
        results: list[Any] = []
        for name in model.program.outputs:
            result = traced.results.get(name, model.program.constants.get(name))
            results.append(_result_row(extras, f"{number}.{len(results)}", result, sizes))
        order = [n for n in names if n in given]
        shapes = tuple([(n, given[n].dtype.str, tuple(given[n].shape)) for n in order])
        rows.append((f"call{number}", shapes, tuple(traced.names), tuple(results)))
    table = (_FORMAT, tuple(names), tuple(model.program.outputs), tuple(rows))
    return builder.write(path, {_TABLE: Writer().value(table), **extras})


def _only(model: OnnxModel, given: Mapping[str, Any]) -> Part:
    """The one segment that a run with these inputs consists of."""
    parts = parts_of(model.program, given)
    if len(parts) != 1 or not parts[0].is_compiled:
        raise UnsupportedError(
            "a model whose parts run on the host is not compiled to a file", where=model.file.path,
            got=", ".join(p.title for p in parts if not p.is_compiled) or f"{len(parts)} segments",
            hint="rlx.load(path) runs it",
        )  # fmt: skip
    return parts[0]


def _result_row(extras: dict[str, bytes], key: str, result: Any, sizes: Mapping[str, int]) -> Any:
    if isinstance(result, OutputAt):
        return result.number
    if isinstance(result, Sizes):
        result = evaluated_sizes(result.dims, result.shape, result.dtype, sizes)
    data = result.data if isinstance(result, Known) else result
    if not isinstance(data, np.ndarray) or data.dtype.kind == "O":
        raise UnsupportedError("a result that a file does not hold", got=type(result).__name__)
    buffer = io.BytesIO()
    np.save(buffer, data, allow_pickle=False)
    extras[f"constant/{key}"] = buffer.getvalue()
    return key


# -- reading --------------------------------------------------------------------------------------


class CompiledOnnxModel:
    """A model that `OnnxModel.compile` wrote. It runs the sizes that it was compiled for."""

    def __init__(self, bundle: Bundle, table: Any) -> None:
        version, inputs, outputs, rows = table
        if version != _FORMAT:
            raise FormatError("another version of the format", got=version, expected=_FORMAT)
        self.bundle = bundle
        self.inputs, self.outputs = tuple(map(str, inputs)), tuple(map(str, outputs))
        self._calls = {_shapes_key(shapes): row for row in rows for shapes in (row[1],)}

    def __repr__(self) -> str:
        return f"<CompiledOnnxModel {self.bundle.path.name}({', '.join(self.inputs)})>"

    def run(self, inputs: Mapping[str, Any] | None = None, /, **named: Any) -> tuple[Any, ...]:
        """The outputs in order, for inputs by name."""
        given = {n: np.asarray(x) for n, x in {**(inputs or {}), **named}.items()}
        rows = tuple(
            [(n, given[n].dtype.str, tuple(given[n].shape)) for n in self.inputs if n in given]
        )
        found = self._calls.get(_shapes_key(rows))
        if found is None or given.keys() - set(self.inputs):
            raise InputError(
                "not inputs that this file was compiled for", where=self.bundle.path.name,
                got=_shown(rows), expected=" or ".join(_shown(key) for key in self._calls),
                hint="compile the model for these sizes too, or load the .onnx file",
            )  # fmt: skip
        name, _, sources, results = found
        compiled = self.bundle[name]
        arrays = [given[n] for n in sources]
        outputs = compiled.run_in_order(arrays)
        return tuple([self._result(r, outputs) for r in results])

    def __call__(self, *arrays: Any, **named: Any) -> Any:
        """Run on inputs in order or by name; the output, or a tuple of several."""
        results = self.run({**dict(zip(self.inputs, arrays, strict=False)), **named})
        return results[0] if len(results) == 1 else results

    def _result(self, row: Any, outputs: Sequence[Data]) -> Data:
        if isinstance(row, int):
            return outputs[row]
        data = self.bundle.extras[f"constant/{row}"]
        found: Data = np.load(io.BytesIO(data), allow_pickle=False)
        return found


def _shapes_key(rows: Any) -> tuple[Any, ...]:
    return tuple([(str(n), str(t), tuple([int(i) for i in shape])) for n, t, shape in rows])


def _shown(rows: Any) -> str:
    return ", ".join(f"{n}: {np.dtype(t).name}{list(shape)}" for n, t, shape in rows)


def load_compiled(path: str | os.PathLike[str]) -> CompiledOnnxModel:
    """Load a model that `OnnxModel.compile` wrote. It is code: load only files that you trust."""
    bundle = load_bundle(path)
    where = Path(path).name
    if _TABLE not in bundle.extras:
        raise FormatError("not a compiled ONNX model", where=where, expected="OnnxModel.compile")
    try:
        reader = Reader(bundle.extras[_TABLE])
        table = reader.value()
        reader.finish()
        return CompiledOnnxModel(bundle, table)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise FormatError("a damaged table of calls", where=where, got=str(error)) from error
