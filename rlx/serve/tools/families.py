"""The formats of well-known families, found by what their chat templates say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.serve.tools.definitions import Tool
from rlx.serve.tools.harmony import Harmony
from rlx.serve.tools.json_calls import JsonCalls, LlamaCalls
from rlx.serve.tools.named_calls import NamedCalls
from rlx.serve.tools.tool_format import ToolFormat
from rlx.serve.tools.xml_calls import XmlCalls


class _SystemTools(JsonCalls):
    """Phi-4-mini: the system message has the tools, as JSON."""

    result_role = "tool_response"

    def template_tools(self, tools: Sequence[Tool]) -> Mapping[str, Any]:
        listed = [tool.as_openai()["function"] for tool in tools]
        return {"system_tools": json.dumps(listed, ensure_ascii=False)}


class _NamedTools(JsonCalls):
    """SmolLM3: templates that have tools under another name."""

    def template_tools(self, tools: Sequence[Tool]) -> Mapping[str, Any]:
        return {"xml_tools": [tool.as_openai()["function"] for tool in tools]}


_DEEPSEEK = {
    "opening": "<｜tool▁call▁begin｜>",
    "outer": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "others": ("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
}


def _hermes(name: str = "hermes") -> JsonCalls:
    return JsonCalls(name, "<tool_call>", "</tool_call>", pad="\n")


def find_family(template: str) -> ToolFormat:
    """The format that a chat template's source speaks of; a generic one where it has no tools."""
    if "<|channel|>" in template and "<|message|>" in template:
        return Harmony()
    if "<function=" in template and "<parameter=" in template:
        return XmlCalls()
    if "[TOOL_CALLS]" in template:
        if "[ARGS]" in template:
            return NamedCalls(
                "mistral-args", "[TOOL_CALLS]", "[ARGS]", others=("[ARGS]", "[CALL_ID]")
            )
        return JsonCalls("mistral", "[TOOL_CALLS]", listed=True, optional_id=True)
    if "tool▁call▁begin" in template:
        end = "<｜tool▁call▁end｜>"
        if "```json" in template:
            return NamedCalls(
                "deepseek", separator="\n```json\n", closing=f"\n```{end}",
                head="function<｜tool▁sep｜>", between="\n", **_DEEPSEEK,  # type: ignore[arg-type]
            )  # fmt: skip
        return NamedCalls(
            "deepseek-v3.1",
            separator="<｜tool▁sep｜>",
            closing=end,
            **_DEEPSEEK,  # type: ignore[arg-type]
        )
    return _json_family(template)


def _json_family(template: str) -> ToolFormat:
    if "<|START_ACTION|>" in template:
        return JsonCalls(
            "cohere", "<|START_ACTION|>", "<|END_ACTION|>", listed=True, numbered=True,
            keys=("tool_name", "parameters"),
        )  # fmt: skip
    if "<|/tool|>" in template:
        return _SystemTools("phi", "<|tool_call|>", "<|/tool_call|>", listed=True)
    if "<|tool_call|>" in template:
        made = JsonCalls("granite", "<|tool_call|>", listed=True)
        made.result_role = "tool_response"
        return made
    if "xml_tools" in template:
        return _NamedTools("smollm3", "<tool_call>", "</tool_call>", pad="\n")
    if "<tool_call>" in template:
        return _hermes()
    if "<|python_tag|>" in template or '"parameters": ' in template:
        return LlamaCalls()
    return _hermes("generic")
