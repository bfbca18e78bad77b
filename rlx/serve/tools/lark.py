"""Lark grammars for llguidance: free text, markers, reasoning, and arguments by their schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rlx.serve.tools.definitions import Tool, spaced

TEXT = "TEXT"  # the name of free text


class Lark:
    """The rules of a grammar. `special` are the markers that are tokens of their own: as such they
    are no part of free text. Other markers are text, and end the free text before them."""

    def __init__(self, special: Mapping[str, int], not_first: str = "") -> None:
        """`not_first`: what free text may not begin with, a regular expression."""
        self._special, self._rules = special, dict[str, str]()
        self._but = f" & ~/{not_first}(?s:.*)/" if not_first else ""
        self._rules[TEXT] = f"/(?s:.*)/{self._but}"

    def marker(self, text: str) -> str:
        token = self._special.get(text)
        return literal(text) if token is None else f"<[{token}]>"

    def sequence(self, text: str) -> str:
        """A text with markers in it."""
        if not text:
            return ""
        known = sorted(self._special, key=len, reverse=True)
        parts = re.split("(" + "|".join(map(re.escape, known)) + ")", text) if known else [text]
        return " ".join(self.marker(part) for part in parts if part)

    def text_then(self, marker: str) -> str:
        """Free text, perhaps none, up to a marker."""
        if marker in self._special:
            return f"{TEXT} {self.marker(marker)}"
        return self.rule("lead", f"/(?s:.*){pattern(marker)}/{self._but}", lazy=True)

    def reasoning(self, opening: str, closing: str) -> str:
        """What stands between the two, with them; `opening` may be empty."""
        if closing in self._special:
            self._rules.setdefault("ANYTHING", "/(?s:.*)/")
            return f"{self.marker(opening) if opening else ''} ANYTHING {self.marker(closing)}"
        begin = rf"\s{{0,4}}{pattern(opening)}" if opening else ""
        return self.rule("think", f"/{begin}(?s:.*){pattern(closing)}/", lazy=True)

    def arguments(self, tool: Tool) -> str:
        return schema(tool.schema, tool.strict)

    def rule(self, name: str, body: str, *, lazy: bool = False) -> str:
        """Add a rule; its name, which is unique."""
        key = f"{name}[lazy]" if lazy else name
        taken = {k.partition("[")[0]: v for k, v in self._rules.items()}
        if name in taken and taken[name] != body:
            name = f"{name}_{len(self._rules)}"
            key = f"{name}[lazy]" if lazy else name
        self._rules[key] = body
        return name

    def build(self, start: str) -> str:
        rules = "\n".join(f"{name}: {body}" for name, body in self._rules.items())
        return f"start: {start}\n{rules}\n"


def schema(value: Mapping[str, Any], strict: bool = False) -> str:
    """JSON that fits a schema."""
    return "%json " + json.dumps(spaced(value, strict))


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def pattern(text: str) -> str:
    """A text as a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/").replace("\n", "\\n")
