"""Chat templates: Jinja that comes with a model, run in a sandbox.

text = ChatTemplate(source).render([{"role": "user", "content": "Hi"}])
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, NoReturn

from rlx.errors import FormatError, InputError, RlxError
from rlx.formats.template_sandbox import Budget, make_sandbox, measured_filter, spending
from rlx.support.optional import library

_LONGEST = 1 << 20  # characters of a template


class ChatTemplate:
    """A compiled template."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        where: str = "chat template",
    ) -> None:
        self.source, self.where = source, where
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        jinja = library("jinja2", "chat")
        if len(source) > _LONGEST:
            raise FormatError(
                "a chat template that is too long", where=where, got=len(source), expected=_LONGEST
            )
        try:
            with spending(Budget()):  # what is constant is computed now
                self._template = _environment().from_string(source)
        except jinja.TemplateSyntaxError as e:
            raise FormatError(
                f"the chat template is not valid Jinja: {e.message}",
                where=f"{where}, line {e.lineno} of the template",
                got=_line(source, e.lineno),
            ) from e
        except Exception as e:  # templates beyond what Jinja or Python can compile
            raise FormatError(f"the chat template cannot be used: {e}"[:200], where=where) from e

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as a prompt, ending where the model continues."""
        _check(messages, self.where)
        jinja = library("jinja2", "chat")
        given: dict[str, Any] = {
            "messages": [_message(m, i, self.where) for i, m in enumerate(messages)],
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "documents": documents,
        }
        try:
            with spending(Budget(given)):
                text: str = self._template.render(self._tokens | given | variables)
            return text
        except RlxError as e:
            raise e.located(self.where) from e.__cause__
        except jinja.sandbox.SecurityError as e:
            raise FormatError(
                f"the chat template does what the sandbox forbids: {e}", where=self.where
            ) from e
        except Exception as e:  # a template is a program: what its faults raise is not known
            raise self._fault(e) from e

    def _fault(self, e: Exception) -> InputError:
        return InputError(
            f"the chat template failed on these messages: {type(e).__name__}: {e}"[:300],
            where=self.where,
            hint="see the messages and variables that the model's template asks for",
        )


def _check(messages: object, where: str) -> None:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InputError(
            "messages are not a list",
            where=where,
            got=type(messages).__name__,
            expected='[{"role": "user", "content": "…"}, …]',
        )
    for i, m in enumerate(messages):
        if not isinstance(m, Mapping) or not isinstance(m.get("role"), str):
            raise InputError(
                f"message {i} has no role",
                where=where,
                got=repr(m)[:80],
                expected='{"role": "user", "content": "…"}',
            )


def _message(message: Mapping[str, Any], number: int, where: str) -> dict[str, Any]:
    """The message with its content as one text: parts of text are lines of it."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    parts = content if isinstance(content, list | tuple) else [content]
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind not in ("text", "input_text", "output_text", "str") or not isinstance(text, str):
            raise InputError(
                f"message {number} has content that is not text", where=where,
                got=f"a part of type {kind!r}"[:80],
                expected='a text, or parts {"type": "text", "text": "…"}',
                hint="images, audio and files need a model that takes them; this one reads text",
            )  # fmt: skip
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


def _line(source: str, number: int) -> str | None:
    lines = source.splitlines()
    return lines[number - 1].strip()[:100] if 0 < number <= len(lines) else None


@cache
def _environment() -> Any:
    """What templates of models expect: Hugging Face's settings and helpers, in a sandbox."""
    jinja = library("jinja2", "chat")
    environment = make_sandbox([_generation_tag(jinja), "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = measured_filter(tojson)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _generation_tag(jinja: Any) -> Any:
    """`{% generation %}` marks what the assistant wrote, for training: it prints as it is."""
    library("jinja2.ext", "chat")

    class Generation(jinja.ext.Extension):  # type: ignore[misc]
        tags = frozenset(["generation"])

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja.nodes.Scope(body, lineno=line)

    return Generation


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes what HTML does not like, which models never saw
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    # private characters stay: they may mark what is no special token
    escaped = partial(
        re.sub, r"[^\x00-\x7f\U000F0000-\U000FFFFD]", lambda c: json.dumps(c[0])[1:-1]
    )
    return escaped(text) if ensure_ascii else text


def _raise(message: object) -> NoReturn:
    raise InputError(f"the chat template refuses these messages: {message}")


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
