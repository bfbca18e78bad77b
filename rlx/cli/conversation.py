"""A conversation with a model: messages, generation settings, saving and loading."""

from __future__ import annotations

import json
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.errors import FormatError, OptionError
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.models.generation import Generation
    from rlx.models.language_model import LanguageModel, Stream

Message = dict[str, str]
_ROLES = ("user", "assistant")


@dataclass
class Conversation:
    """The model sees `system` and `messages`; only tokens that are not in the KV cache are run."""

    model: LanguageModel
    system: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    last: Generation | None = None

    def ask(self, text: str) -> Stream:
        """The answer to a message, as a stream; `answered` or `dropped` follows it."""
        asked = {"role": "user", "content": text}
        first = [{"role": "system", "content": self.system}] if self.system else []
        stream: Stream = self.model.chat([*first, *self.messages, asked], **self.settings)
        self.messages.append(asked)
        return stream

    def answered(self, result: Generation) -> None:
        """Append an answer, also an interrupted one: the model continues from there."""
        self.last = result
        self.messages.append({"role": "assistant", "content": result.text})

    def dropped(self) -> None:
        """Drop a message that got no answer."""
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()

    def reset(self) -> None:
        self.messages.clear()
        self.last = None

    def save(self, path: Path) -> None:
        held = {"system": self.system, "messages": self.messages}
        path.write_text(json.dumps(held, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")

    def load(self, path: Path) -> None:
        """Load a conversation that `save` wrote."""
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            system, messages = held["system"], held["messages"]
            whole = isinstance(system, str) and all(
                set(m) == {"role", "content"}
                and m["role"] in _ROLES
                and isinstance(m["content"], str)
                for m in messages
            )
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            raise FormatError(
                "not a conversation", where=str(path), expected="a file that /save wrote"
            )
        self.reset()
        self.system, self.messages = system, messages

    # -- settings -----------------------------------------------------------------------------

    def known_settings(self) -> dict[str, Any]:
        """Every generation setting and its value."""
        from rlx.models.sampling import GenerationSettings

        made = GenerationSettings(**self.settings)
        return {name: getattr(made, name) for name in GenerationSettings.__dataclass_fields__}

    def change(self, name: str, text: str) -> None:
        """Set a known setting from its text; the value is checked."""
        from rlx.models.sampling import GenerationSettings

        changed = {**self.settings, name: _value(name, text, self.known_settings()[name])}
        GenerationSettings(**changed)
        self.settings = changed


def _value(name: str, text: str, now: Any) -> Any:
    """`text` as the type the setting has; none is nothing."""
    from rlx.cli.options import parse_bias

    words = [] if text.lower() == "none" else text.split()
    try:
        if name == "seed":
            return int(text) if words else None
        if name == "logit_bias":
            return parse_bias(words)
        if name == "stop":
            return (text,) if words else ()
        if name == "stop_tokens":
            return frozenset(map(int, words))
        return type(now)(text)
    except ValueError:
        raise OptionError(
            "not a value of this setting", where=name, got=repr(text), expected=type(now).__name__
        ) from None
