"""If, Loop and Scan: native control flow where shapes allow, else Python's between segments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import rlx.numpy as xp
from rlx.errors import RlxError
from rlx.formats.onnx import OnnxGraph
from rlx.numpy import control_flow
from rlx.numpy.array import Array, Tracer
from rlx.numpy.trace import Size
from rlx.onnx.call import Call
from rlx.onnx.interpreter import as_array
from rlx.onnx.table import op
from rlx.onnx.values import Known, NeedsValueError, elements_of, shape_of

MOST_UNROLLED = 64
MOST_NUMBERED = 2**20  # iterations whose numbers are an array


class _NotNativeError(Exception):
    """A body that the ops of graphs cannot run: another shape or kind of value comes out."""


def _native(node: Call, attempt: Callable[[], Any], value: Any = None) -> Any:
    """What `attempt` builds; where it cannot, the node runs between segments."""
    try:
        return attempt()
    except (RlxError, NeedsValueError, _NotNativeError, RecursionError) as error:
        raise NeedsValueError(value, on_host=True) from error


def _arrays(values: list[Any]) -> tuple[Array, ...]:
    """Results of a body as arrays; others cannot leave one."""
    if any(not isinstance(x, (Array, Known)) for x in values):
        raise _NotNativeError
    return tuple([as_array(x) for x in values])


@op("If", raw=True)
def if_(node: Call, condition: Any) -> Any:
    then, otherwise = node.graph("then_branch"), node.graph("else_branch")
    if isinstance(condition, Tracer):
        flag = xp.reshape(condition, ()) if condition.ndim else condition

        def attempt() -> Any:
            return control_flow.cond(
                flag, lambda: _arrays(node.run(then)), lambda: _arrays(node.run(otherwise))
            )

        return tuple(_native(node, attempt, condition))
    chosen = bool(np.reshape(elements_of(condition), -1)[0])
    return tuple(node.run(then if chosen else otherwise))


@op("Loop", raw=True)
def loop(node: Call, most: Any | None, condition: Any | None, *state: Any) -> Any:
    body = node.graph("body")
    count, limit = _count(most), node.interpreter.max_iterations
    if _begins(condition) and _goes_on(body) and (
        most is None or (type(count) is int and count > limit)
    ):  # fmt: skip
        raise _endless(node)
    if node.traced:
        return _native(node, lambda: _traced_loop(node, body, most, condition, list(state)))
    most_rounds = limit + 1 if most is None else int(elements_of(most).reshape(-1)[0])
    going = condition is None or bool(elements_of(condition).reshape(-1)[0])
    carry, rows, i = list(state), [list[Any]() for _ in body.outputs[1 + len(state) :]], 0
    while going and i < most_rounds:
        if i == limit:
            raise _endless(node)
        found = node.run(body, np.asarray(i, np.int64), np.asarray(going), *carry)
        condition = np.reshape(elements_of(found[0]), -1)
        if condition.dtype != bool or condition.size != 1:
            raise node.fault("not a condition", got=f"{condition.size} of {condition.dtype}")
        going = bool(condition[0])
        carry = found[1 : 1 + len(carry)]
        for row, x in zip(rows, found[1 + len(carry) :], strict=True):
            row.append(elements_of(x))
        i += 1
    return (*carry, *[_stacked(body, len(carry), j, row) for j, row in enumerate(rows)])


def _begins(condition: Any) -> bool:
    """Whether the condition of a loop is known to hold at first."""
    return condition is None or (
        isinstance(condition, Known) and bool(condition.data.reshape(-1)[0])
    )


def _endless(node: Call) -> RlxError:
    limit = f"at most {node.interpreter.max_iterations} iterations"
    hint = "OnnxModel(…, max_iterations=…) allows more"
    return node.fault("a loop that does not end", expected=limit, hint=hint)


def _stacked(body: OnnxGraph, carried: int, number: int, rows: list[Any]) -> Any:
    if rows:
        return np.stack(rows)
    from rlx.formats.onnx import NUMPY_BY_NAME

    kind = body.outputs[1 + carried + number].type
    dims = [n if isinstance(n, int) else 0 for n in kind.dims or ()]
    return np.zeros((0, *dims), NUMPY_BY_NAME.get(kind.dtype, np.dtype(np.float32)))


def _traced_loop(node: Call, body: OnnxGraph, most: Any, condition: Any, state: list[Any]) -> Any:
    always = _begins(condition)
    if isinstance(condition, Known) and not always and not body.outputs[1 + len(state) :]:
        return tuple(state)
    count = _count(most)
    if always and type(count) is int and count <= MOST_UNROLLED and _is_dynamic(state):
        return _unrolled(node, body, count, state)
    plain = count is not None and (isinstance(count, Size) or count <= MOST_NUMBERED)
    if always and plain:
        try:
            return _counted(node, body, count, state)
        except _NotNativeError:
            if body.outputs[1 + len(state) :]:
                raise
    if body.outputs[1 + len(state) :]:
        raise _NotNativeError
    return _while(node, body, most, condition, state)


def _goes_on(body: OnnxGraph) -> bool:
    """Whether the condition that a body gives is the one it got."""
    makers = {name: node for node in body.nodes for name in node.outputs}
    name = body.outputs[0].name
    for _ in body.nodes:
        node = makers.get(name)
        if node is None or node.op_type != "Identity":
            break
        name = node.inputs[0]
    return len(body.inputs) > 1 and name == body.inputs[1].name


def _count(most: Any) -> Any:
    """The number of iterations as an int or a size, where it is known."""
    if not isinstance(most, Known):
        return None
    found = most.data.reshape(-1)[0]
    return found if isinstance(found, Size) else max(int(found), 0)


def _is_dynamic(state: list[Any]) -> bool:
    return any(x is None or isinstance(x, list) for x in state)


def _unrolled(node: Call, body: OnnxGraph, count: int, state: list[Any]) -> Any:
    """Iterations one after the other, for sequences and known values."""
    rows: list[list[Any]] = [[] for _ in body.outputs[1 + len(state) :]]
    for i in range(count):
        found = node.run(body, np.asarray(i, np.int64), np.asarray(True), *state)
        if not _is_true(found[0]):
            raise _NotNativeError
        state = found[1 : 1 + len(state)]
        for row, x in zip(rows, found[1 + len(state) :], strict=True):
            row.append(as_array(x))
    if rows and not count:
        raise _NotNativeError
    return (*state, *[xp.stack(row) for row in rows])


def _is_true(value: Any) -> bool:
    return isinstance(value, Known) and bool(value.data.reshape(-1)[0])


def _counted(node: Call, body: OnnxGraph, count: Any, state: list[Any]) -> Any:
    """A loop whose condition always holds: a scan over the iterations' numbers."""

    def step(carry: Any, i: Any) -> Any:
        found = node.run(body, i, np.asarray(True), *carry)
        if not _is_true(found[0]):
            raise _NotNativeError
        results = _arrays(found[1:])
        return results[: len(state)], results[len(state) :]

    numbers = xp.arange(count, dtype=xp.int64)
    if not isinstance(numbers, Tracer) and count == 0:
        raise _NotNativeError
    carry, rows = control_flow.scan(step, _arrays(state), numbers)
    return (*carry, *rows)


def _while(node: Call, body: OnnxGraph, most: Any, condition: Any, state: list[Any]) -> Any:
    limit = None if most is None else xp.reshape(as_array(most), ())
    first = xp.asarray(True) if condition is None else xp.reshape(as_array(condition), ())

    def going(carry: Any) -> Any:
        i, keep, _ = carry
        return keep if limit is None else xp.logical_and(keep, xp.less(i, limit))

    def step(carry: Any) -> Any:
        i, keep, values = carry
        found = _arrays(node.run(body, i, keep, *values))
        if found[0].dtype.kind != "bool":
            raise _NotNativeError
        return i + 1, xp.reshape(found[0], ()), tuple(found[1:])

    start = (xp.asarray(np.asarray(0, np.int64)), first, _arrays(state))
    return control_flow.while_loop(going, step, start, node.interpreter.max_iterations)[2]


# -- Scan -----------------------------------------------------------------------------------------


@op("Scan", since=9, raw=True)
def scan(node: Call, *operands: Any) -> Any:
    body, count = node.graph("body"), node.int("num_scan_inputs")
    if not 0 < count <= len(operands):
        raise node.fault("not a number of scanned inputs", got=count)
    state, scanned = list(operands[: len(operands) - count]), list(operands[-count:])
    outputs = len(body.outputs) - len(state)
    axes_in = node.ints("scan_input_axes", (0,) * count)
    axes_out = node.ints("scan_output_axes", (0,) * outputs)
    ways_in = node.ints("scan_input_directions", (0,) * count)
    ways_out = node.ints("scan_output_directions", (0,) * outputs)
    xs = [_arranged(as_array(x), a, w) for x, a, w in zip(scanned, axes_in, ways_in, strict=True)]
    if node.traced:
        carry, rows = _native(node, lambda: _traced_scan(node, body, state, xs))
    else:
        carry, rows = _host_scan(node, body, state, [np.asarray(elements_of(x)) for x in xs])
    made = []
    for row, axis, way in zip(rows, axes_out, ways_out, strict=True):
        array = as_array(Known(row) if isinstance(row, np.ndarray) else row)
        array = xp.flip(array, axis=0) if way else array
        made.append(xp.moveaxis(array, 0, axis) if axis else array)
    return (*carry, *made)


def _arranged(x: Array, axis: int, backwards: int) -> Array:
    x = xp.moveaxis(x, axis, 0) if axis else x
    return xp.flip(x, axis=0) if backwards else x


def _traced_scan(node: Call, body: OnnxGraph, state: list[Any], xs: list[Array]) -> Any:
    def step(carry: Any, x: Any) -> Any:
        results = _arrays(node.run(body, *carry, *x))
        return results[: len(state)], results[len(state) :]

    return control_flow.scan(step, _arrays(state), tuple(xs))


def _host_scan(node: Call, body: OnnxGraph, state: list[Any], xs: list[Any]) -> Any:
    rows: list[list[Any]] = [[] for _ in range(len(body.outputs) - len(state))]
    for i in range(shape_of(xs[0])[0]):
        found = node.run(body, *state, *[x[i] for x in xs])
        state = found[: len(state)]
        for row, x in zip(rows, found[len(state) :], strict=True):
            row.append(elements_of(x))
    return state, [np.stack(row) if row else np.zeros((0,), np.float32) for row in rows]


@op("Scan", since=8, raw=True)
def scan_8(node: Call, lengths: Any | None, *operands: Any) -> Any:
    """The first version: every operand has a batch axis before the scanned one."""
    body, count = node.graph("body"), node.int("num_scan_inputs")
    if lengths is not None:
        raise node.unsupported("lengths of sequences in Scan of opset 8")
    arrays = [as_array(x) for x in operands]
    state_count = len(arrays) - count
    results = []
    for b in range(int(arrays[0].shape[0])):
        state = [x[b] for x in arrays[:state_count]]
        xs = [x[b] for x in arrays[state_count:]]
        if node.traced:
            carry, rows = _native(node, partial(_traced_scan, node, body, state, xs))
        else:
            carry, rows = _host_scan(node, body, state, [elements_of(x) for x in xs])
        made = [as_array(Known(r) if isinstance(r, np.ndarray) else r) for r in (*carry, *rows)]
        results.append(made)
    return tuple([xp.stack(list(column)) for column in zip(*results, strict=True)])
