"""The op record and its registry.

An op is a frozen record of attributes with shape inference (`infer`), a NumPy `reference`, a `cost`
and, unless it is primitive, a decomposition into simpler ops (`decompose`). The
signature of `infer` is the signature of the op: parameters without a default are required tensors,
those with a default optional trailing ones, `*rest` any number.

    @op("rms_norm")
    class RmsNorm(Op):
        '''x * rsqrt(mean(x², -1) + eps) * gamma'''
        eps: float = 1e-6

        def infer(self, x: Shape, gamma: Shape) -> Shape: ...
        def reference(self, x, gamma): ...
        def decompose(self, g: Graph, x: Value, gamma: Value) -> Value: ...

Traits, the class variables of `Op`, tell passes and backends how to treat an op. Ops that are
defined by their decomposition derive everything else from it: `rlx.ir.ops.composite`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import FrozenInstanceError
from functools import cache
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

from rlx.errors import AttributeValueError, OptionError, RlxError
from rlx.ir.attrs import coercer, has_symbols, symbols_in
from rlx.ir.dim import Dim
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.graph import Graph

Array = Any  # a NumPy array; its dtype is known only at run time
Inferred = Shape | tuple[Shape, ...]


class Cost(NamedTuple):
    """Arithmetic and memory traffic of one evaluation; symbolic while the shapes are."""

    flops: Dim
    bytes: Dim


class Op:
    """Base of every op record."""

    name: ClassVar[str] = ""
    group: ClassVar[str] = ""
    is_block: ClassVar[bool] = False  # an HIR block, removed by lowering
    is_source: ClassVar[bool] = False  # input, param, state, constant
    has_effect: ClassVar[bool] = False  # never dead code
    is_elementwise: ClassVar[bool] = False  # out[i] depends on in[i] (after broadcasting) alone
    is_view: ClassVar[bool] = False  # the same elements with another shape or strides
    is_commutative: ClassVar[bool] = False  # f(a, b) = f(b, a)
    is_reduction: ClassVar[bool] = False  # reduces `axes`, in any order
    is_control_flow: ClassVar[bool] = False  # runs nested graphs
    is_anchor: ClassVar[bool] = False  # compute anchor: it and its operands are steady state
    is_choice: ClassVar[bool] = False  # sampling or ranking: epilogue unless an anchor reads it
    fuses_formula: ClassVar[bool] = False  # fusion recognises its decomposition in graphs
    runs_as_region: ClassVar[bool] = False  # its decomposition is one elementwise region
    runs_in_low_precision: ClassVar[bool] = False  # f32 operands may be cast to f16 or bf16
    overwrites_first: ClassVar[bool] = False  # its result may lie over its first operand
    holds_weights: ClassVar[bool] = False  # has matmuls inside: decomposed before quantisation
    runs_in_prepare: ClassVar[bool] = False  # param-only and run by its reference, on any device
    has_zero_derivative: ClassVar[bool] = False  # piecewise constant: no gradient passes
    is_inlined: ClassVar[bool] = False  # replaced by its decomposition before any other pass
    depends_on_neighbours: ClassVar[bool] = False  # its lowering reads the nodes around it
    num_required: ClassVar[int] = 0
    num_optional: ClassVar[int] = 0
    variadic: ClassVar[bool] = False
    fields: ClassVar[tuple[str, ...]] = ()
    input_names: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[dict[str, Any]] = {}
    annotations: ClassVar[dict[str, str]] = {}
    _coerce: ClassVar[tuple[tuple[str, Callable[[Any], Any]], ...]] = ()

    __slots__ = ()

    def __init__(self, *args: Any, **attributes: Any) -> None:
        # One constructor for all ops: one generated per class would double the import time.
        values, fields = self.__dict__, self.fields
        values.update(self.defaults)
        values.update(zip(fields, args, strict=False))
        wrong = attributes.keys() - fields[len(args) :]
        values.update(attributes)
        if wrong or len(args) > len(fields) or len(values) != len(fields):
            raise TypeError(f"{self.name} takes {', '.join(fields) or 'no attributes'}")
        self.__post_init__()

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to {name!r} of an op record")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete {name!r} of an op record")

    def __post_init__(self) -> None:
        for field, exact in self._coerce:
            given = getattr(self, field)
            try:
                value = exact(given)
            except RlxError as e:
                raise e.located(f"{self.name}.{field}") from None
            except (TypeError, ValueError, AttributeError) as e:
                where, got = f"{self.name}.{field}", repr(given)
                raise AttributeValueError("not a fitting value", where=where, got=got) from e
            if value is not given:
                object.__setattr__(self, field, value)
        self.check()

    def check(self) -> None:
        """Raise AttributeValueError when an attribute is out of range; shapes are for `infer`."""

    @classmethod
    def builder(cls, build: Callable[..., Any]) -> Callable[..., Any]:
        """The builder method of the op, made from the usual one; an op may take other forms."""
        return build

    def infer(self, *inputs: Any) -> Inferred:
        raise NotImplementedError(self.name)

    def reference(self, *inputs: Array) -> Any:
        raise NotImplementedError(self.name)

    def decompose(self, g: Graph, /, *inputs: Any) -> Any:
        """Build the op from simpler ops on `g`; returns a value or a tuple of values.

        None when these attributes have no decomposition. Primitive ops do not define it.
        """
        return None

    @classmethod
    def has_decomposition(cls) -> bool:
        """Whether the op is not primitive."""
        return cls.decompose is not Op.decompose

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """Default: one operation per output element, every tensor read or written once."""
        work: Dim = 0
        traffic: Dim = 0
        for shape in outputs:
            work = work + shape.num_elements
            traffic = traffic + shape.size_bytes
        for shape in inputs:
            traffic = traffic + shape.size_bytes
        return Cost(work, traffic)

    def __reduce__(self) -> tuple[Any, ...]:
        return (make_op, (self.name, self.attributes()))

    def attributes(self) -> dict[str, Any]:
        return {f: getattr(self, f) for f in self.fields}

    def replace(self, **changes: Any) -> Op:
        return type(self)(**{**self.attributes(), **changes})

    @property
    def has_symbols(self) -> bool:
        kept: bool | None = self.__dict__.get("_symbolic")
        if kept is None:
            kept = any(has_symbols(getattr(self, f)) for f in self.fields)
            self.__dict__["_symbolic"] = kept
        return kept

    @property
    def symbols(self) -> frozenset[str]:
        """The symbols in attributes and nested graphs."""
        kept: frozenset[str] | None = self.__dict__.get("_symbols")
        if kept is None:
            kept = symbols_in(tuple([getattr(self, f) for f in self.fields]))
            self.__dict__["_symbols"] = kept
        return kept

    def __str__(self) -> str:
        shown = [f"{f}={v!r}" for f, v in self.attributes().items() if v != self.defaults.get(f)]
        return f"{self.name}({', '.join(shown)})" if shown else self.name


REGISTRY: dict[str, type[Op]] = {}
PROVIDERS = [
    "rlx.backends.cpu.layouts",
    "rlx.backends.cuda.round_rows",
    "rlx.backends.cuda.kernels.qgemm.lower_qgemm",
    "rlx.backends.cuda.kernels.conv.conv_act",
]
"""Modules that register the ops of a device, imported for an unknown op; plugins add theirs."""
_listeners: list[Callable[[type[Op]], None]] = []
_registrations = 0
_T = TypeVar("_T", bound=type)


def on_register(listener: Callable[[type[Op]], None]) -> None:
    """Call `listener` for every op, registered already or later."""
    _listeners.append(listener)
    for cls in REGISTRY.values():
        listener(cls)


def registrations() -> int:
    """The number of registrations so far: tables derived from the registry use it as a version."""
    return _registrations


@dataclass_transform(frozen_default=True)
def op(name: str, **traits: Any) -> Callable[[_T], _T]:
    """Class decorator: register an op named `name`; `traits` set its class variables."""

    def wrap(cls: _T) -> _T:
        if name in REGISTRY:
            raise OptionError("an op of that name exists", got=name, hint="choose another name")
        if not all(part.isidentifier() for part in name.split(".")):
            raise OptionError(
                "not a name for an op", got=repr(name), expected="a Python identifier"
            )
        record: Any = cls
        record.name = name
        record.group = record.__dict__.get("group") or cls.__module__.rpartition(".")[2]
        for key, value in traits.items():
            setattr(record, key, value)
        _read_signature(record)
        _read_fields(record)
        REGISTRY[name] = record
        global _registrations
        _registrations += 1
        for listener in _listeners:
            listener(record)
        return record  # type: ignore[no-any-return]

    return wrap


def _read_signature(record: Any) -> None:
    """The op's signature: that of `infer`, or of `decompose` when inference is derived."""
    derived = getattr(record.infer, "is_derived", False)
    parameters = _parameters(record.decompose)[1:] if derived else _parameters(record.infer)
    plain = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    record.num_required = sum(p.default is p.empty for p in plain)
    record.num_optional = len(plain) - record.num_required
    record.variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    record.input_names = tuple(p.name for p in plain)


@cache
def _parameters(infer: Callable[..., Inferred]) -> list[inspect.Parameter]:
    return list(inspect.signature(infer).parameters.values())[1:]


def _read_fields(record: Any) -> None:
    """Fields are annotated names that are not class variables, as in dataclasses; a base
    contributes fields only when it is a record (or a dataclass) itself."""
    found: dict[str, str] = {}
    for base in reversed(record.__mro__):
        if base is record or "_coerce" in base.__dict__ or "__dataclass_fields__" in base.__dict__:
            annotations = inspect.get_annotations(base)
            found.update((f, _annotation(t)) for f, t in annotations.items())
    record.annotations = {f: t for f, t in found.items() if not t.startswith("ClassVar")}
    record.fields = tuple(record.annotations)
    record.defaults = {f: getattr(record, f) for f in record.fields if hasattr(record, f)}
    record._coerce = tuple((f, coercer(t)) for f, t in record.annotations.items())
    record.__init__ = Op.__init__  # not that of a dataclass among the bases
    record.__hash__ = _cached_hash(record.fields)
    record.__eq__ = _field_equality(record.fields)


def _annotation(type: Any) -> str:
    return type if isinstance(type, str) else str(type.__name__)


def _cached_hash(fields: tuple[str, ...]) -> Callable[[Any], int]:
    # Ops are keys of the inference cache, hashed for every node: the hash is cached.
    def __hash__(self: Any) -> int:
        kept: int | None = self.__dict__.get("_hash")
        if kept is None:
            kept = hash((self.name, *[getattr(self, f) for f in fields]))
            self.__dict__["_hash"] = kept
        return kept

    return __hash__


def _field_equality(fields: tuple[str, ...]) -> Callable[[Any, object], bool]:
    def __eq__(self: Any, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other):
            return False
        return all(_same(getattr(self, f), getattr(other, f)) for f in fields)

    return __eq__


def _same(a: Any, b: Any) -> bool:
    # in Python 1, 1.0 and True are equal and NaN is not equal to itself; attributes differ
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) or isinstance(b, float):
        return type(a) is type(b) and repr(a) == repr(b)  # NaN is NaN, and 0.0 is not -0.0
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


# names of NumPy and PyTorch that no op here has, and what to write instead
ELSEWHERE = {
    "arange": "g.iota((n,))",
    "broadcast_to": "x.expand(shape)",
    "cat": "g.concat([x, y], axis)",
    "clip": "x.clamp(low, high)",
    "concatenate": "g.concat([x, y], axis)",
    "divide": "x / y",
    "dot": "x @ y",
    "equal": "x == y",
    "expand_dims": "x[None], x[:, None]",
    "flatten": "x.reshape(-1)",
    "full": "g.constant(number).expand(shape)",
    "greater": "x > y",
    "less": "x < y",
    "mm": "x @ y",
    "multiply": "x * y",
    "negative": "-x",
    "ones": "g.constant(1.0).expand(shape)",
    "permute": "x.transpose(axes)",
    "power": "x ** y",
    "ravel": "x.reshape(-1)",
    "remainder": "x % y",
    "split": "x[:n], x[n:]",
    "squeeze": "x[:, 0], which takes the axis away",
    "stack": "g.concat([x[None], y[None]], axis=0)",
    "std": "(x - x.mean(axis, keepdims=True)).square().mean(axis).sqrt()",
    "subtract": "x - y",
    "take": "x[ids], g.gather(x, ids, axis)",
    "take_along_axis": "g.take_along(x, ids, axis)",
    "to": "x.astype(dtype)",
    "unsqueeze": "x[None], x[:, None]",
    "var": "(x - x.mean(axis, keepdims=True)).square().mean(axis)",
    "view": "x.reshape(shape)",
    "zeros": "g.constant(0.0).expand(shape)",
}


def hint_for(name: str, known: Iterable[str]) -> str:
    """What to write instead of a method that does not exist."""
    if name in ELSEWHERE:
        return f"write {ELSEWHERE[name]}"
    near = difflib.get_close_matches(name, [k for k in known if not k.startswith("_")], 3)
    return f"did you mean {', '.join(near)}?" if near else "see docs/ops.md for the list"


def lookup(name: str) -> type[Op]:
    """The op record of that name, or an error with the nearest names."""
    found = REGISTRY.get(name) or _provided(name)
    if found is None:
        raise OptionError("unknown op", got=name, hint=hint_for(name, REGISTRY))
    return found


def _provided(name: str) -> type[Op] | None:
    """Import the providers of device ops, which only device rewrites create, and look again."""
    for module in PROVIDERS:
        import_module(module)
    return REGISTRY.get(name)


def make_op(name: str, attributes: dict[str, Any]) -> Op:
    """An op record from its name and attributes, as read from text or a file."""
    cls = lookup(name)
    unknown = set(attributes) - set(cls.fields)
    if unknown:
        raise AttributeValueError(
            "unknown attribute", where=name, got=", ".join(sorted(unknown)), expected=cls.fields
        )
    missing = [f for f in cls.fields if f not in attributes and f not in cls.defaults]
    if missing:
        raise AttributeValueError("missing attribute", where=name, got=None, expected=missing)
    return cls(**attributes)


def elements(shape: Shape) -> Dim:
    return prod(shape.dims, start=1)
