"""Jinja's sandbox for chat templates, with every loop, call and value on a budget.

The sandbox keeps templates from reaching anything. Here the parsed template is changed as well:
loops count their rounds, and what makes or reads long values goes through functions that measure
them first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from rlx.formats.template_budget import (
    Budget,
    budget,
    format_size,
    number,
    percent_size,
    repeat_size,
)
from rlx.support.optional import library

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
