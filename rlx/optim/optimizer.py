"""`Optimizer`: what all optimisers share. Trees, steps, learning rates, masks of weight decay.

An optimiser is a frozen record of numbers. What changes from step to step is its state, a tree of
arrays: `{"step": count, "slots": {path of a parameter: {name: array}}}`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from typing import Any, TypeAlias, TypeVar

import rlx.numpy as rnp
from rlx.errors import InputError, OptionError, ShapeError
from rlx.ir.dtype import DType, f32, f64
from rlx.nn.module import Module
from rlx.numpy.array import Array
from rlx.numpy.dispatch import as_array
from rlx.numpy.tree import children_of, flatten, leaf_names, unflatten
from rlx.support.records import dataclass

Params = TypeVar("Params")  # a tree of arrays
State: TypeAlias = dict[str, Any]
Slots: TypeAlias = dict[str, Array]  # what an optimiser keeps for one parameter
Rate: TypeAlias = float | Array | Callable[[Any], Array]
Mask: TypeAlias = Callable[[str, Array], bool]  # of the path of a parameter, and the parameter


_MAKE = "make the state with init(params) of the same optimiser"


def matrices_only(path: str, param: Array) -> bool:
    """A mask of weight decay: arrays of two axes and more, so no biases and no gains of norms."""
    return param.ndim > 1


@dataclass(frozen=True)
class Moment:
    """Where an update happens: the numbers that are the same for all parameters, as f64."""

    step: Array  # how many updates there will have been, from 1
    rate: Array | float  # a float needs no kernels for what is computed of it
    known: dict[object, Array] = field(default_factory=dict)

    def once(self, key: object, dtype: DType, make: Callable[[Moment], Array | float]) -> Array:
        """A number that parameters of an element type share: a trace has it once."""
        if (key, dtype) not in self.known:
            self.known[key, dtype] = rnp.asarray(make(self), dtype=dtype)
        return self.known[key, dtype]


@dataclass(frozen=True)
class Optimizer(ABC):
    """Base class of optimisers. `learning_rate` is a number, a function of the steps so far, such
    as those of `rlx.optim.schedules`, or an argument of the jitted function around it."""

    learning_rate: Rate

    def __post_init__(self) -> None:
        if not callable(self.learning_rate) and not isinstance(self.learning_rate, Array):
            check(self, learning_rate=(self.learning_rate, 0.0, float("inf")))

    def init(self, params: Any) -> State:
        """The state before the first step."""
        _warn_of_ties(params)
        slots = {path: self.slots(path, p) for path, p in trained(params)}
        return {"step": rnp.zeros((), dtype="i32"), "slots": slots}

    def update(self, grads: Params, state: State, params: Params) -> tuple[Params, State]:
        """The parameters after a step, and the state after it. Arrays that are not trained
        (integers, buffers of modules) stay as they are."""
        leaves, structure = flatten(params)
        given = _gradients(grads, params)
        self._require_own(state)
        step = as_array(state["step"]) + 1
        now = Moment(step.astype(f64), self.rate_of(state["step"]))
        index, slots = {path: i for i, path in enumerate(paths_of(params))}, {}
        for path, p in trained(params):
            i, kept = index[path], state["slots"].get(path)
            if kept is None:
                raise InputError(
                    "a state without this parameter", where="optim", got=path,
                    expected=", ".join(list(state["slots"])[:6]), hint=_MAKE,
                )  # fmt: skip
            try:
                leaves[i], slots[path] = self.leaf(path, p, given[i], kept, now)
            except KeyError as error:
                raise InputError(
                    "the state of another optimiser", where=type(self).__name__,
                    got=f"{path}: {', '.join(kept) or 'nothing kept'}", expected=error.args[0],
                    hint=_MAKE,
                ) from error  # fmt: skip
        return unflatten(structure, leaves), {"step": step, "slots": slots}

    def _require_own(self, state: Any) -> None:
        if not isinstance(state, dict) or not {"step", "slots"} <= state.keys():
            raise InputError(
                "not the state of an optimiser", where=type(self).__name__,
                got=type(state).__name__, expected='a dict with "step" and "slots"',
                hint="update(grads, state, params)",
            )  # fmt: skip

    def rate(self, step: Any) -> Array:
        """The learning rate after so many steps, as f64."""
        return rnp.asarray(self.rate_of(step), dtype=f64)

    def rate_of(self, step: Any) -> Array | float:
        """`rate`, as a float where it is the same number for all steps."""
        if callable(self.learning_rate):
            return as_array(self.learning_rate(step)).astype(f64)
        if isinstance(self.learning_rate, Array):
            return self.learning_rate.astype(f64)
        return float(self.learning_rate)

    @abstractmethod
    def slots(self, path: str, param: Array) -> Slots:
        """What is kept for a parameter, before the first step."""

    @abstractmethod
    def leaf(
        self, path: str, param: Array, grad: Array, slots: Slots, now: Moment
    ) -> tuple[Array, Slots]:
        """A parameter after a step, and what is kept for it."""


# -- numbers --------------------------------------------------------------------------------------


def working(*arrays: Array) -> list[Array]:
    """Arrays in the type that a step computes in: f32 at least."""
    return [x.astype(working_type(x)) for x in arrays]


def working_type(x: Array) -> DType:
    return x.dtype if x.dtype.bits >= 32 else f32


def like(scalar: Array | float, x: Array) -> Array:
    """A number for all parameters in the element type of one."""
    return rnp.asarray(scalar, dtype=x.dtype)


def zeros_like(param: Array) -> Array:
    return rnp.zeros(param.shape, dtype=working_type(param))


def lerp(a: Array, b: Array, weight: float | Array) -> Array:
    return a + (b - a) * weight


def decayed(param: Array, now: Moment, weight_decay: float, applies: bool) -> Array:
    """Decoupled weight decay: the parameter times 1 − rate · decay."""
    if not (weight_decay and applies):
        return param
    return param * now.once(
        ("kept", weight_decay), param.dtype, lambda n: 1 - n.rate * weight_decay
    )


def applies(mask: Mask | None, path: str, param: Array) -> bool:
    return mask is None or mask(path, param)


def check(owner: object, **values: tuple[float, float, float]) -> None:
    """OptionError unless each value is at least its lower and below its upper bound."""
    for name, (value, low, high) in values.items():
        if not isinstance(value, (int, float)) or not low <= value < high:
            raise OptionError(
                f"{name} out of range", where=type(owner).__name__, got=repr(value),
                expected=f"{low:g} <= {name} < {high:g}",
            )  # fmt: skip


# -- trees ----------------------------------------------------------------------------------------


def paths_of(tree: Any) -> list[str]:
    """A name for each leaf, such as `layers.0.weight`; InputError where two have the same."""
    names = leaf_names(tree, separator=".")
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise InputError("two parameters of the same path", where="optim", got=twice)
    return names


def trained(params: Any) -> list[tuple[str, Array]]:
    """The arrays that are trained, by path: floats that are no buffers of a module."""
    leaves = [as_array(x) for x in flatten(params)[0]]
    rows = zip(paths_of(params), leaves, _are_parameters(params), strict=True)
    return [(path, x) for path, x, chosen in rows if chosen and x.dtype.kind == "float"]


def _are_parameters(tree: Any) -> Iterator[bool]:
    """For each leaf whether it is no buffer of a module."""
    if isinstance(tree, Module):
        buffers = tree.named_buffers()
        yield from (name not in buffers for name in leaf_names(tree, separator="."))
        return
    parts = children_of(tree)
    if parts is None:
        yield True
        return
    for child in parts[1]:
        yield from _are_parameters(child)


def _gradients(grads: Any, params: Any) -> list[Array]:
    """The leaves of the gradients; InputError where they are not those of the parameters."""
    given, found = flatten(grads)
    wanted, structure = flatten(params)
    names, expected = leaf_names(grads, separator="."), leaf_names(params, separator=".")
    if names != expected:
        raise InputError(
            "gradients of another structure than the parameters", where="optim",
            got=_outline(names), expected=_outline(expected), hint="update(grads, state, params)",
        )  # fmt: skip
    arrays = [as_array(x) for x in given]
    for name, g, p in zip(names, arrays, wanted, strict=True):
        if tuple(g.shape) != tuple(as_array(p).shape):
            raise ShapeError(
                "a gradient of another shape than its parameter", where=f"optim: {name}",
                got=list(g.shape), expected=list(p.shape),
            )  # fmt: skip
    if found != structure:
        raise InputError(
            "gradients of another structure than the parameters", where="optim",
            got=_types(grads), expected=_types(params),
            hint="the same names and shapes, but other containers, or modules with other settings,"
            " such as eval()",
        )  # fmt: skip
    return arrays


def _types(tree: Any) -> str:
    return type(tree).__name__


def _warn_of_ties(params: Any) -> None:
    """One array at two places is two parameters, which a step makes differ."""
    seen: dict[int, str] = {}
    for path, leaf in zip(leaf_names(params, separator="."), flatten(params)[0], strict=True):
        other = seen.setdefault(id(leaf), path)
        if other != path and isinstance(leaf, Array) and leaf.ndim > 1:
            warnings.warn(
                f"{other} and {path} are one array, but two parameters: they will be trained apart."
                " Use one of them twice where the model computes.",
                stacklevel=3,
            )


def _outline(names: Sequence[str]) -> str:
    return f"{len(names)} leaves: {', '.join(names[:6])}" + (", …" if names[6:] else "")
