"""The commands inside a chat: a table from the word to what it does."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rlx.cli import answers, console
from rlx.cli.conversation import Conversation
from rlx.errors import InputError, OptionError


class Leave(Exception):
    """The person wants to go."""


class Slash(NamedTuple):
    argument: str
    meaning: str
    do: Callable[[Conversation, str], None]


def _help(_: Conversation, __: str) -> None:
    rows = [(f"{name} {s.argument}".strip(), s.meaning) for name, s in COMMANDS.items()]
    console.facts(rows)
    print(
        "\nEnd a line with a backslash to go on in the next, or write several between "
        '""" and """.\nCtrl-C stops an answer, Ctrl-D leaves. // sends a line that begins with /.'
    )


def _reset(chat: Conversation, _: str) -> None:
    chat.reset()
    console.note("the conversation is empty")


def _system(chat: Conversation, text: str) -> None:
    if text:
        chat.system = "" if text.lower() == "none" else text
    print(chat.system or "no system message")


def _save(chat: Conversation, name: str) -> None:
    chat.save(_path(name))
    console.note(f"saved {len(chat.messages)} messages")


def _load(chat: Conversation, name: str) -> None:
    chat.load(_path(name))
    console.note(f"loaded {len(chat.messages)} messages")


def _path(name: str) -> Path:
    if not name:
        raise InputError("no file named", expected="/save FILE or /load FILE")
    return Path(name).expanduser()


def _set(chat: Conversation, text: str) -> None:
    name, _, value = text.partition(" ")
    name = name.replace("-", "_")
    found = chat.known_settings()
    if name and name not in found:
        raise OptionError("unknown setting", got=name, expected=", ".join(found))
    if value.strip():
        chat.change(name, value.strip())
        found = chat.known_settings()
    console.facts([(n, _shown(v)) for n, v in found.items() if not name or n == name])


def _shown(value: object) -> str:
    if isinstance(value, tuple | frozenset):
        return " ".join(map(repr, value)) or "none"
    return str(value) if value not in (None, {}) else "none"


def _stats(chat: Conversation, _: str) -> None:
    engine = chat.model.runner
    console.facts(
        [
            ("last answer", answers.timings(chat.last) if chat.last else "none yet"),
            ("messages", len(chat.messages)),
            ("context", f"{len(engine.tokens)} of {engine.context} tokens"),
        ]
    )


def _exit(_: Conversation, __: str) -> None:
    raise Leave


COMMANDS = {
    "/help": Slash("", "show this", _help),
    "/reset": Slash("", "forget the conversation", _reset),
    "/system": Slash("[TEXT]", "show or set how the model should behave; none clears it", _system),
    "/save": Slash("FILE", "write the conversation to a file", _save),
    "/load": Slash("FILE", "go on with one from a file", _load),
    "/set": Slash("[NAME [VALUE]]", "show or change a setting, such as temperature", _set),
    "/stats": Slash("", "show what the last answer took", _stats),
    "/exit": Slash("", "leave", _exit),
}


def obey(chat: Conversation, line: str) -> None:
    """Do what a line that begins with a slash says."""
    name, _, rest = line.partition(" ")
    found = COMMANDS.get(name)
    if found is None:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        raise OptionError(
            "unknown command", got=name, expected=" ".join(COMMANDS),
            hint=f"did you mean {near[0]}?" if near else "",
        )  # fmt: skip
    found.do(chat, rest.strip())
