"""One call of an operator: its attributes, what the function of an op may ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import FormatError, UnsupportedError
from rlx.formats.onnx import NUMPY_TYPES, Initializer, OnnxGraph, OnnxNode
from rlx.ir.dtype import DType
from rlx.onnx.values import Data, Known, Value, is_number_type

if TYPE_CHECKING:
    from rlx.onnx.interpreter import Interpreter, Scope

_MISSING: Any = object()


class Call:
    """A node with its attributes resolved, in the scope where it is computed."""

    __slots__ = ("attributes", "interpreter", "node", "opset", "scope")

    def __init__(
        self, node: OnnxNode, attributes: Mapping[str, Any], scope: Scope, interpreter: Interpreter
    ) -> None:
        self.node, self.attributes = node, attributes
        self.scope, self.interpreter = scope, interpreter
        self.opset = scope.opset(node.domain)

    @property
    def traced(self) -> bool:
        """Whether a segment is being traced; else values are concrete."""
        return self.interpreter.traced

    def wants(self, output: int) -> bool:
        """Whether anyone uses a result."""
        return output < len(self.node.outputs) and bool(self.node.outputs[output])

    @property
    def num_outputs(self) -> int:
        return len(self.node.outputs)

    def fault(self, what: str, **more: Any) -> FormatError:
        return FormatError(what, where=str(self.node), **more)

    def unsupported(self, what: str, got: object = None) -> UnsupportedError:
        return UnsupportedError(what, where=str(self.node), got=got)

    # -- attributes ---------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        return name in self.attributes

    def _get(self, name: str, default: Any, kind: type | tuple[type, ...]) -> Any:
        value = self.attributes.get(name, default)
        if value is _MISSING:
            raise self.fault(f"no attribute {name}")
        if value is not default and not isinstance(value, kind):
            raise self.fault(f"attribute {name} has another type", got=f"{value!r:.60}")
        return value

    def int(self, name: str, default: Any = _MISSING) -> Any:
        return self._get(name, default, int)

    def float(self, name: str, default: Any = _MISSING) -> Any:
        return self._get(name, default, (float, int))

    def ints(self, name: str, default: Any = _MISSING) -> Any:
        found = self._get(name, default, tuple)
        if found is not default and not all(isinstance(x, int) for x in found):
            raise self.fault(f"attribute {name} has another type", got=f"{found!r:.60}")
        return found

    def floats(self, name: str, default: Any = _MISSING) -> Any:
        return self._get(name, default, tuple)

    def text(self, name: str, default: Any = _MISSING) -> Any:
        found = self._get(name, default, (bytes, str))
        return found.decode("utf-8", "replace") if isinstance(found, bytes) else found

    def texts(self, name: str, default: Any = _MISSING) -> Any:
        found = self._get(name, default, tuple)
        if found is default:
            return default
        return [x.decode("utf-8", "replace") if isinstance(x, bytes) else x for x in found]

    def tensor(self, name: str, default: Any = _MISSING) -> Any:
        """The elements of a tensor attribute, as a NumPy array."""
        found = self._get(name, default, Initializer)
        return found.array() if isinstance(found, Initializer) else found

    def graph(self, name: str) -> OnnxGraph:
        found: OnnxGraph = self._get(name, _MISSING, OnnxGraph)
        return found

    def element_type(self, name: str, default: Any = _MISSING) -> np.dtype[Any]:
        """An attribute that is the number of an element type, as a NumPy type."""
        number = self.int(name, default)
        if number not in NUMPY_TYPES:
            raise self.fault("not an element type", got=number)
        found: np.dtype[Any] = NUMPY_TYPES[number]
        return found

    def dtype(self, name: str, default: Any = _MISSING) -> DType:
        """The same as a type of arrays."""
        found = self.element_type(name, default)
        if not is_number_type(found):
            raise self.unsupported("an element type that arrays do not have", found)
        return DType.of(found)

    # -- bodies -------------------------------------------------------------------------------

    def run(self, body: OnnxGraph, *given: Value | Data) -> list[Value]:
        """The results of a subgraph on these inputs: part of the trace, or run at once."""
        return self.interpreter.run_body(body, self.scope, [as_value(x) for x in given])

    def apply(self, op_type: str, *operands: Value, **attributes: Any) -> Any:
        """The result of another operator of the same domain and opset."""
        node = OnnxNode(
            self.node.name, self.node.domain, op_type, "", tuple(f"{i}" if x is not None else ""
            for i, x in enumerate(operands)), ("y",), attributes,
        )  # fmt: skip
        return self.interpreter.call(node, list(operands), self.scope)[0]


def as_value(result: Any) -> Any:
    """What a function of the table returned as a value: NumPy's arrays are known."""
    if isinstance(result, np.ndarray):
        if result.dtype == object and result.size and not isinstance(result.flat[0], str):
            return Known(result, np.dtype(np.int64))
        return Known(result)
    if isinstance(result, np.generic):
        return Known(np.asarray(result))
    if isinstance(result, list):
        return [as_value(x) for x in result]
    return result


def as_results(result: Any, count: int) -> Sequence[Any]:
    results = result if isinstance(result, tuple) else (result,)
    return [as_value(x) for x in results][:count]
