"""Jinja's sandbox for chat templates, with every loop, call and value on a budget.

The sandbox keeps templates from reaching anything. Here the parsed template is changed as well:
loops count their rounds, and what makes or reads long values goes through functions that measure
them first.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, NoReturn

from rlx.errors import FormatError
from rlx.support.optional import library

_VALUE = 1 << 22  # size of one value
_TOTAL = 1 << 25  # of all values made, and of the text
_STEPS = 1 << 19  # loops, calls, filters, operators
_SECONDS = 2.0  # of CPU time
_PER_STEP = 1 << 10  # characters that are read in about the time of a step
_BITS = 1 << 12  # of a whole number
_ITEM = 4  # what an item of a list adds to its own size
_OTHER = 8  # the size of what is neither text nor a container


class Budget:
    """What one rendering may still spend. What it is given adds to it.

    The size of a value is about the number of characters it has when it is printed. Whatever a
    template makes is measured when it is made, so no value outgrows the bound, not even one that
    holds others many times.
    """

    def __init__(self, given: object = ()) -> None:
        # by id: the container, which does not change in the sandbox, its size and depth
        self._known: dict[int, tuple[object, int, int]] = {}
        more = self.size(given)
        self._value, self._total = _VALUE + 4 * more, _TOTAL + 64 * more
        self._steps = _STEPS + more
        self._until = time.thread_time() + _SECONDS + more * 1e-6
        self._next_look = self._steps

    def step(self, count: int = 1) -> None:
        """Something was done that takes a microsecond, or `count` of them."""
        self._steps -= count
        if self._steps <= self._next_look:
            self._next_look = self._steps - 64
            if self._steps < 0 or time.thread_time() > self._until:
                _refuse("time")

    def read(self, *values: object) -> None:
        """The values are read from one end to the other."""
        self.step(1 + sum(map(self.size, values)) // _PER_STEP)

    def allow(self, size: int) -> None:
        """A value of this size may be made."""
        if size > self._value:
            _refuse("memory")

    def write(self, size: int) -> None:
        """Text of this size joins the output."""
        self._total -= size
        if self._total < 0:
            _refuse("memory")

    def made(self, value: Any) -> Any:
        """The value, which was made just now."""
        if isinstance(value, int) and value.bit_length() > _BITS:
            _refuse("memory")
        size = self.size(value)
        self.allow(size)
        self.write(size)
        self.step(1 + size // _PER_STEP)
        return self.each(value) if isinstance(value, Iterator) else value

    def each(self, values: Iterable[Any], written: int = 0) -> Iterator[Any]:
        """The values, each a step; a loop's body may write that much of the template's text."""
        for value in values:
            self.step()
            self.write(written)
            yield value

    def size(self, value: object) -> int:
        return self.measure(value)[0]

    def measure(self, value: Any) -> tuple[int, int]:
        """The size of a value, and how deep it nests."""
        if isinstance(value, str | bytes | range):
            return len(value), 0
        known = self._known.get(id(value))
        if known is not None:
            return known[1:]
        if isinstance(value, Mapping):
            parts = [part for pair in value.items() for part in pair]
        elif isinstance(value, list | tuple | ItemsView | KeysView | ValuesView):
            parts = list(value)
        else:
            return _OTHER, 0
        found = [self.measure(part) for part in parts]
        size = sum(size for size, _ in found) + _ITEM * len(found)
        depth = 1 + max((depth for _, depth in found), default=0)
        self._known[id(value)] = (value, size, depth)
        return size, depth

    def joined(self, left: Any, right: Any, value: Any) -> Any:
        """The list `value`, which was made of two others: only its items are new, not theirs."""
        (size, depth), (more, deeper) = self.measure(left), self.measure(right)
        self._known[id(value)] = (value, size + more, max(depth, deeper))
        self.write(len(value))
        self.step(1 + len(value) // _PER_STEP)
        return value


def _refuse(what: str) -> NoReturn:
    raise FormatError(
        f"the chat template takes too much {what}",
        expected=f"{_STEPS} steps" if what == "time" else f"values of {_VALUE} characters",
        hint="templates that models come with take a thousandth of that",
    )


_current: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextmanager
def spending(budget: Budget) -> Iterator[None]:
    """Templates spend from this budget meanwhile."""
    token = _current.set(budget)
    try:
        yield
    finally:
        _current.reset(token)


def budget() -> Budget:
    """The budget of the rendering that runs."""
    return _current.get() or Budget()


# -- how large results will be ----------------------------------------------------------------

_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?")


def percent_size(text: str, values: object) -> int:
    """At most the size of `text % values`."""
    return _filled(text, values, [n for pair in _PERCENT.findall(text) for n in pair])


def format_size(text: str, values: object) -> int:
    """At most the size of `text.format(values)`."""
    nested = re.search(r"\{[^{}]*\{", text.replace("{{", ""))
    return _filled(text, values, ["*"] if nested else re.findall(r"\d+", text))


def _filled(text: str, values: object, widths: list[str]) -> int:
    if any(w == "*" or len(w) > 9 for w in widths):  # a width that is a value, or a huge one
        _refuse("memory")
    fields = text.count("%") + text.count("{")
    return len(text) + sum(int(w) for w in widths if w) + fields * budget().size(values)


def repeat_size(value: object, times: object) -> int:
    """The size of `value * times`, where that repeats."""
    repeats = isinstance(value, str | list | tuple) and isinstance(times, int)
    return budget().size(value) * max(times, 0) if repeats else 0  # type: ignore[call-overload]


def number(value: object) -> int:
    """A width or count as a whole number; 0 for what is none."""
    return value if isinstance(value, int) else 0


# filters that take long for what they are given, or for which chat templates have no use
_DROPPED = ("urlize", "striptags", "wordwrap", "xmlattr", "pprint")
_REFUSED = ("translate", "maketrans", "encode", "to_bytes", "from_bytes")  # methods
_EACH, _STEP, _CONCAT, _MADE, _READ = ("\0each", "\0step", "\0concat", "\0made", "\0read")


def make_sandbox(extensions: list[Any]) -> Any:
    """An environment for templates: they may reach nothing, and spend what the budget has."""
    jinja: Any = library("jinja2", "chat")
    sandbox: Any = library("jinja2.sandbox", "chat")

    class Sandbox(sandbox.ImmutableSandboxedEnvironment):  # type: ignore[misc]
        intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

        def _parse(self, *source: Any) -> Any:
            return _bounded(jinja, self, super()._parse(*source))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**":
                raise sandbox.SecurityError("** may make too much")
            _check_operator(budget(), operator, left, right)
            found = super().call_binop(context, operator, left, right)
            joins = operator == "+" and isinstance(found, list)
            return budget().joined(left, right, found) if joins else budget().made(found)

        def call(self, context: Any, called: Any, *args: Any, **named: Any) -> Any:
            owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
            if name in _REFUSED:
                raise sandbox.SecurityError(f"{name}() in a chat template")
            check = _METHODS.get(name) if isinstance(owner, str) else None
            if check is not None:
                args = check(budget(), owner, *args, **named) or args
            budget().read(*args)
            return budget().made(super().call(context, called, *args, **named))

        def wrap_str_format(self, value: Any) -> Any:
            wrapped = super().wrap_str_format(value)
            if wrapped is None:
                return None

            @wraps(wrapped)
            def bounded(*args: Any, **named: Any) -> str:
                budget().allow(format_size(value.__self__, (args, named)))
                return str(wrapped(*args, **named))

            return bounded

    class Namespace(jinja.utils.Namespace):  # type: ignore[misc]
        def __repr__(self) -> str:  # not what it holds: namespaces may hold others twice
            return "<Namespace>"

    made = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_shown
    )  # fmt: skip
    for name in _DROPPED:
        del made.filters[name]
    del made.globals["lipsum"]
    made.globals["namespace"] = Namespace
    made.filters |= {n: _measured(f, _FILTERS.get(n)) for n, f in made.filters.items()}
    made.tests |= {n: _counted(f) for n, f in made.tests.items()}
    _add_own(jinja, made.filters)
    return made


def measured_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of ours, on the budget as Jinja's are."""
    made: Callable[..., Any] = _measured(function, _FILTERS.get(function.__name__))
    return made


# -- what values become -------------------------------------------------------------------------


def _shown(value: Any) -> Any:
    """What `{{ value }}` writes."""
    now = budget()
    now.step()
    now.write(now.size(value))
    return value


def _add_own(jinja: Any, filters: dict[str, Any]) -> None:
    """The functions that `_bounded` puts into templates. They have the context passed so that
    nothing is done once when a template is compiled, but whenever it runs."""

    def each(_: Any, values: Any, written: int) -> Iterator[Any]:
        return budget().each(values, written)

    def step(_: Any, written: int) -> None:
        budget().step()
        budget().write(written)

    def concat(_: Any, values: list[Any]) -> str:
        now = budget()
        now.allow(now.size(values))
        return str(now.made("".join(map(str, values))))

    def made(_: Any, value: Any) -> Any:
        return budget().made(value)

    def read(_: Any, value: Any) -> Any:
        budget().read(value)
        return value

    own = {_EACH: each, _STEP: step, _CONCAT: concat, _MADE: made, _READ: read}
    filters |= {name: jinja.pass_context(function) for name, function in own.items()}


def _bounded(jinja: Any, environment: Any, tree: Any) -> Any:
    """The parsed template with these functions in it."""
    nodes = jinja.nodes

    def own(node: Any) -> Any:
        node.environment = environment
        return node

    def through(name: str, node: Any, *args: Any) -> Any:
        given = [own(nodes.Const(a)) for a in args]
        return own(nodes.Filter(node, name, given, [], None, None, lineno=node.lineno))

    def step(node: Any) -> Any:
        size = own(nodes.Const(_written(nodes, node.body), lineno=node.lineno))
        return own(nodes.ExprStmt(through(_STEP, size), lineno=node.lineno))

    class Bounding(jinja.visitor.NodeTransformer):  # type: ignore[misc]
        def visit_For(self, node: Any) -> Any:
            size = _written(nodes, node.body)
            node = self.generic_visit(node)
            if node.recursive:  # `loop(…)` has a sequence of its own
                node.body.insert(0, step(node))
            node.iter = through(_EACH, node.iter, size)
            return node

        def visit_Macro(self, node: Any) -> Any:
            node = self.generic_visit(node)
            node.body.insert(0, step(node))
            return node

        visit_CallBlock = visit_Macro

        def visit_Concat(self, node: Any) -> Any:
            node = self.generic_visit(node)
            return through(_CONCAT, own(nodes.List(node.nodes, lineno=node.lineno)))

        def visit_List(self, node: Any) -> Any:
            node = self.generic_visit(node)
            if getattr(node, "ctx", "load") != "load":
                return node
            if all(isinstance(child, nodes.Const) for child in node.iter_child_nodes()):
                return node
            return through(_MADE, node)

        visit_Tuple = visit_Dict = visit_List

        def visit_Getitem(self, node: Any) -> Any:
            node = self.generic_visit(node)
            sliced = isinstance(node.arg, nodes.Slice) and node.ctx == "load"
            return through(_MADE, node) if sliced else node

        def visit_Compare(self, node: Any) -> Any:
            node = self.generic_visit(node)
            for part in (node, *node.ops):
                if not isinstance(part.expr, nodes.Const):
                    part.expr = through(_READ, part.expr)
            return node

    return Bounding().visit(tree)


def _written(nodes: Any, body: list[Any]) -> int:
    """How many characters of the template are in a body."""
    return sum(len(d.data) for n in body for d in n.find_all(nodes.TemplateData))


def _measured(function: Callable[..., Any], check: Callable[..., Any] | None) -> Any:
    """A filter that looks at what it is given, and measures its result."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded(*args: Any, **named: Any) -> Any:
        values = args[skip:]
        budget().read(*values, *named.values())
        if check is not None:
            values = check(budget(), *values, **named) or values
        return budget().made(function(*args[:skip], *values, **named))

    return bounded


def _counted(function: Callable[..., Any]) -> Any:
    """A test that looks at what it is given."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded(*args: Any, **named: Any) -> Any:
        budget().read(*args[skip:])
        return function(*args, **named)

    return bounded


# -- what would be too much -----------------------------------------------------------------------
# Each check gets the arguments, and may return others to go on with.


def _check_operator(now: Budget, operator: str, left: Any, right: Any) -> None:
    if operator == "+" and not isinstance(left, int | float):
        now.allow(now.size(left) + now.size(right))
    elif operator == "*":
        now.allow(max(repeat_size(left, right), repeat_size(right, left)))
    elif operator == "%" and isinstance(left, str):
        now.allow(percent_size(left, right))


def _pad(now: Budget, text: Any, width: Any = 80, *_: Any) -> None:
    now.allow(number(width))


def _replace(now: Budget, text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    now.allow(len(text) + (text.count(old)) * len(new))


def _join(now: Budget, separator: Any, values: Any) -> tuple[Any, ...]:
    values = list(now.each(values))
    now.allow(now.size(values) + len(separator) * len(values))
    return (values,)


def _join_filter(now: Budget, values: Any, d: Any = "", attribute: Any = None) -> tuple[Any, ...]:
    return (*_join(now, str(d), values), d, attribute)


def _expand_tabs(now: Budget, text: str, tabsize: Any = 8) -> None:
    now.allow(len(text) + text.count("\t") * number(tabsize))


def _indent(now: Budget, text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    each = len(width) if isinstance(width, str) else number(width)
    now.allow(len(str(text)) + (1 + str(text).count("\n")) * each)


def _to_json(now: Budget, value: Any, *args: Any, indent: Any = 0, **_: Any) -> None:
    each = max([number(indent), *map(number, args), len(indent) if isinstance(indent, str) else 0])
    size, depth = now.measure(value)
    now.allow(size + size * depth * each // 4)  # an item, of size 4 or more, is a line at most


def _batch(now: Budget, value: Any, linecount: Any, *_: Any, **__: Any) -> None:
    now.allow(number(linecount))


def _round(now: Budget, value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    now.allow(0 if abs(number(precision)) <= 100 else 1 << 62)


def _sum(now: Budget, value: Any, attribute: Any = None, start: Any = 0) -> None:
    now.allow(0 if isinstance(start, int | float) else 1 << 62)  # lists would be copied each time


def _format(now: Budget, text: Any, *args: Any, **named: Any) -> None:
    now.allow(percent_size(str(text), (args, named)))


_METHODS: dict[str, Callable[..., Any]] = {
    "ljust": _pad, "rjust": _pad, "center": _pad, "zfill": _pad, "expandtabs": _expand_tabs,
    "replace": _replace, "join": _join,
}  # fmt: skip
_FILTERS: dict[str, Callable[..., Any]] = {
    "center": _pad, "replace": _replace, "join": _join_filter, "indent": _indent, "batch": _batch,
    "slice": _batch, "round": _round, "sum": _sum, "format": _format, "tojson": _to_json,
}  # fmt: skip
