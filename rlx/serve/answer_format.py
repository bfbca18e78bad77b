"""How a model is asked and how its answers are read: template, tools, reasoning, grammar, parser.

form = AnswerFormat(tokenizer)
chat = form.prepare(messages, tools=tools, choice="auto")
reply = engine.submit(chat.prompt, **chat.settings)
parser = chat.parser()
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlx.errors import OptionError
from rlx.formats.tokenizer import Tokenizer
from rlx.serve.reasoning import (
    Parser,
    ReasoningSplitter,
    ReasoningStyle,
    count_reasoning,
    find_reasoning,
    grammar_with_reasoning,
    not_first,
)
from rlx.serve.tools.definitions import Tool, choose, read_tools
from rlx.serve.tools.families import find_family
from rlx.serve.tools.harmony import Harmony
from rlx.serve.tools.json_calls import PlainScanner
from rlx.serve.tools.lark import Lark, schema
from rlx.serve.tools.template_messages import MessageWriter
from rlx.support.records import dataclass

_PROMPT_END = 24  # tokens of a prompt in which reasoning may have been opened


@dataclass(frozen=True)
class PreparedChat:
    """A conversation ready to be generated from. `parser` makes a parser for one answer."""

    prompt: list[int]
    settings: dict[str, Any]
    parser: Callable[[], Parser | None]
    reasoning_tokens: Callable[[Sequence[int]], int]


class AnswerFormat:
    """What the chat template and the vocabulary of a model say about its answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """InputError where the model has no chat template."""
        template = tokenizer.chat_template()
        self.tokenizer, self.tools = tokenizer, find_family(template.source)
        is_harmony = isinstance(self.tools, Harmony)
        self.reasoning = None if is_harmony else find_reasoning(template.source)
        self._writer = MessageWriter(template, self.tools)
        self._is_harmony = is_harmony
        markers = (*self.tools.markers, *(self.reasoning.markers if self.reasoning else ()))
        ids = {m: tokenizer.id_of(m) for m in markers}
        special = tokenizer.vocabulary.special | tokenizer.end_ids
        self.special = {m: i for m, i in ids.items() if i is not None and i in special}

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] = (),
        choice: Any = "auto", parallel: bool = True, settings: Mapping[str, Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> PreparedChat:  # fmt: skip
        """Tools are those of OpenAI's chat completions. A schema among the `settings` is that of
        answers without calls."""
        known = read_tools(tools)
        callable_tools, required = choose(known, choice)
        written, variables = self._writer.write(messages, callable_tools)
        prompt = self.tokenizer.encode_chat(written, **{**(template_options or {}), **variables})
        opened = self._opened(prompt)
        made = dict(settings or {})
        thinks = opened or (template_options or {}).get("enable_thinking") is not False
        style = self.reasoning if thinks else None
        grammar = self._grammar(callable_tools, required, parallel, made, style, opened)
        if grammar is not None:
            made["grammar"] = grammar
        if self.special:
            made["shown_special"] = frozenset(self.special.values())

        def parser() -> Parser | None:
            return self._parser(callable_tools, opened)

        def counted(tokens: Sequence[int]) -> int:
            reader = parser()
            shown = frozenset(self.special.values())
            stream = self.tokenizer.stream(shown=shown)
            return 0 if reader is None else count_reasoning(tokens, stream, reader)

        return PreparedChat(prompt, made, parser, counted)

    def _opened(self, prompt: list[int]) -> bool:
        """Whether the prompt ends inside of reasoning."""
        if self.reasoning is None:
            return False
        end = self.tokenizer.decode(prompt[-_PROMPT_END:], skip_special=False)
        return end.rstrip().endswith(self.reasoning.opening)

    def _grammar(
        self, tools: list[Tool], required: bool, parallel: bool, settings: dict[str, Any],
        style: ReasoningStyle | None, opened: bool,
    ) -> str | None:  # fmt: skip
        """The grammar of an answer; a schema is taken out of the settings if it is part of it."""
        plain = style is None and not self._is_harmony
        wanted = settings.get("json_schema")
        if not tools and (wanted is None or plain):
            return None
        given = [n for n in ("regex", "grammar") if settings.get(n) is not None]
        if given:
            raise OptionError(
                "a call of a tool has a grammar of its own", where=given[0],
                hint=f"leave out {given[0]}, or the tools",
            )  # fmt: skip
        settings.pop("json_schema", None)
        answer = None
        if wanted is not None:
            try:
                answer = schema(json.loads(wanted) if isinstance(wanted, str) else wanted)
            except (ValueError, TypeError, RecursionError) as error:
                raise OptionError("not a JSON schema", where="json_schema", got=error) from error
        first = [not_first(style, opened, self.special)]
        first += [self.tools.text_begins_not] if tools else []
        lark = Lark(self.special, "|".join(f for f in first if f))
        if tools or self._is_harmony:
            body = self.tools.body(lark, tools, required=required, parallel=parallel, answer=answer)
        else:
            body = str(answer)
        return grammar_with_reasoning(lark, body, style, opened=opened)

    def _parser(self, tools: list[Tool], opened: bool) -> Parser | None:
        if not tools and not self._is_harmony and self.reasoning is None:
            return None
        inner = self.tools.scanner(tools) if tools or self._is_harmony else PlainScanner()
        if self.reasoning is None:
            return inner
        return ReasoningSplitter(self.reasoning, inner, opened=opened)
