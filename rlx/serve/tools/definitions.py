"""Tools as a client defines them, and the choice among them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.errors import InputError, OptionError
from rlx.support.optional import library
from rlx.support.records import dataclass

_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_MOST_TOOLS = 256
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # a JSON schema
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The schema that arguments follow while they are generated. Properties that it does not
        name are not made up."""
        schema = dict(self.parameters) or dict(_NOTHING)
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
            schema.setdefault("type", "object")
        return schema

    @property
    def properties(self) -> Mapping[str, Any]:
        found = self.parameters.get("properties")
        return found if isinstance(found, Mapping) else {}

    def as_openai(self) -> dict[str, Any]:
        """As templates of models expect it."""
        made: dict[str, Any] = {"name": self.name, "description": self.description}
        return {"type": "function", "function": made | {"parameters": dict(self.parameters)}}


def read_tools(tools: Sequence[Any] | None) -> list[Tool]:
    """Tools in the form of OpenAI's chat completions, or with the function's fields at the top.
    Schemas are compiled here, so that an error names its tool."""
    found = [_tool(tool, i) for i, tool in enumerate(tools or ())]
    if len(found) > _MOST_TOOLS:
        raise InputError("too many tools", where="tools", got=len(found), expected=_MOST_TOOLS)
    names = [tool.name for tool in found]
    for name in names:
        if names.count(name) > 1:
            raise InputError("two tools of one name", where="tools", got=name)
    return found


def _tool(tool: Any, number: int) -> Tool:
    where = f"tools[{number}]"
    if not isinstance(tool, Mapping):
        raise InputError("not a tool", where=where, got=type(tool).__name__, expected="an object")
    if tool.get("type", "function") != "function":
        raise InputError(
            "only functions can be called", where=f"{where}.type", got=repr(tool["type"])[:80],
            expected="function",
        )  # fmt: skip
    made = tool.get("function", tool)
    name = made.get("name") if isinstance(made, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(
            "a tool needs a name", where=where, got=repr(name)[:80],
            expected="letters, digits, _ and -, at most 128",
        )  # fmt: skip
    description = made.get("description") or ""
    schema = made.get("parameters", made.get("input_schema"))
    schema = {} if schema is None else schema
    if not isinstance(description, str) or not isinstance(schema, Mapping):
        raise InputError(
            "a description is a text, parameters are a JSON schema", where=f"{where} ({name})"
        )
    made_tool = Tool(name, description, schema, made.get("strict") is True)
    _compile(made_tool, f"{where} ({name})")
    return made_tool


def _compile(tool: Tool, where: str) -> None:
    """Compile the schema, to see whether it can be followed."""
    if tool.schema.get("type", "object") != "object":
        raise InputError(
            "arguments of a tool are an object", where=where,
            got=repr(tool.schema.get("type"))[:80], expected='"type": "object"',
        )  # fmt: skip
    matcher = library("llguidance", "tools").LLMatcher
    try:
        text = json.dumps(spaced(tool.schema, tool.strict))
        wrong = matcher.validate_grammar(matcher.grammar_from_json_schema(text), None)
    except (ValueError, RecursionError) as error:
        wrong = str(error)
    if wrong:
        raise InputError("not a JSON schema", where=where, got=wrong.split("\n")[0][:200])


def spaced(schema: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """The schema with the library's options: JSON as json.dumps writes it. What it does not know
    is an error only where the tool is strict."""
    return {**schema, "x-guidance": {**_SPACING, "lenient": not strict}}


def choose(tools: Sequence[Tool], choice: Any) -> tuple[list[Tool], bool]:
    """The tools that may be called, and whether one must be. `choice` is none, auto, required, or
    names a tool as OpenAI's interfaces do."""
    if choice in (None, "auto"):
        return list(tools), False
    if choice == "none":
        return [], False
    if choice == "required":
        if not tools:
            raise OptionError("a call is required, but there are no tools", where="tool_choice")
        return list(tools), True
    if isinstance(choice, Mapping):
        named = choice.get("function", choice)
        name = named.get("name") if isinstance(named, Mapping) else None
        found = [tool for tool in tools if tool.name == name]
        if found:
            return found, True
        raise OptionError(
            "no such tool", where="tool_choice", got=repr(name)[:80],
            expected=", ".join(t.name for t in tools)[:200] or "one of tools",
        )  # fmt: skip
    raise OptionError(
        "unknown choice", where="tool_choice", got=repr(choice)[:80],
        expected='none, auto, required, or {"type": "function", "function": {"name": …}}',
    )  # fmt: skip
