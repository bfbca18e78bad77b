"""`rlx chat`: a conversation in the terminal, and its slash commands.

A conversation with a model: messages, generation settings, saving and loading.

The prompt of `rlx chat`: line editing, history, completion, multi-line messages.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from rlx.cli import console, render
from rlx.cli.load_model import load_model
from rlx.cli.options import ModelName, Running, Sampling, spread
from rlx.cli.run import DEFAULT_MODEL
from rlx.errors import FormatError, InputError, OptionError, RlxError, did_you_mean
from rlx.support.files import write_atomic
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.models.generation import Generation
    from rlx.models.language_model import LanguageModel, Stream


_FENCE = '"""'
_KEPT = 1000  # lines of history
ReadLine = Callable[[str], str]


def read_message(read: ReadLine) -> str:
    """One message. A line that ends in a backslash goes on with the next; between three quotes
    stands any number of lines. EOFError at the end of the input."""
    line = read("> ")
    if line.lstrip().startswith(_FENCE):
        return _fenced(read, line.lstrip()[len(_FENCE) :])
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = read("… ")
    return "\n".join([*lines, line])


def _fenced(read: ReadLine, line: str) -> str:
    lines = []
    while not line.rstrip().endswith(_FENCE):
        lines.append(line)
        line = read("… ")
    lines.append(line.rstrip()[: -len(_FENCE)])
    return "\n".join(lines).strip("\n")


def line_reader(words: Sequence[str], history: Path | None) -> ReadLine:
    """How to read a line: with editing on a terminal, plainly otherwise. `words` are completed;
    `history` keeps the lines for the next time."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _plain
    with contextlib.suppress(ImportError):  # where Python has no readline, lines are still read
        _prepare_readline(words, history)
    return input


def _plain(_: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _prepare_readline(words: Sequence[str], history: Path | None) -> None:
    import readline

    def complete(text: str, state: int) -> str | None:
        found = [w for w in words if w.startswith(text)] if text.startswith("/") else []
        return found[state] if state < len(found) else None

    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
    if history is None:
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(_KEPT)
    atexit.register(_keep_history, history)


def _keep_history(path: Path) -> None:
    """Write the lines to a file that only its owner reads; failing is no reason to complain."""
    import readline

    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        readline.write_history_file(path)


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
        text = json.dumps(held, ensure_ascii=False, indent=2) + "\n"
        write_atomic(path.resolve(), text.encode())  # for its owner alone; links stay

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
        made = self.model.settings(**self.settings)
        return {name: getattr(made, name) for name in made.__dataclass_fields__}

    def change(self, name: str, text: str) -> None:
        """Set a known setting from its text; the value is checked."""
        changed = {**self.settings, name: _value(name, text, self.known_settings()[name])}
        self.model.settings(**changed)
        self.settings = changed


def _value(name: str, text: str, now: Any) -> Any:
    """`text` as the type the setting has; none is nothing."""
    from rlx.cli.options import parse_bias

    words = [] if text.lower() == "none" else text.split()
    try:
        if name in ("seed", "keep", "speculate"):
            return int(text) if words else None
        if name in ("adapter", "json_schema", "regex", "grammar"):
            return text if words else None
        if name == "logit_bias":
            return parse_bias(words)
        if name == "stop":
            return (text,) if words else ()
        if name in ("stop_tokens", "shown_special"):
            return frozenset(map(int, words))
        return type(now)(text)
    except ValueError:
        raise OptionError(
            "not a value of this setting", where=name, got=repr(text), expected=type(now).__name__
        ) from None


@spread
def chat(
    name: ModelName = DEFAULT_MODEL,
    *,
    system: Annotated[str, typer.Option("--system", "-s", help="The system message.")] = "",
    history: Annotated[
        bool,
        typer.Option("--history/--no-history", help="Keep a history of what you type."),
    ] = True,
    loading: Running,
    sampling: Sampling,
) -> None:
    """Talk with a model.

    Type a message, or /help for the commands. Ctrl-C stops an answer, Ctrl-D leaves. Earlier turns
    stay in the KV cache, so that each turn runs only its new tokens.
    """
    settings = sampling.settings()
    with load_model(name, loading) as model:
        model.tokenizer.chat_template()  # raises where the model has no chat template
        talk = Conversation(model, system, settings)
        if sys.stdin.isatty():
            console.note(f"{name}, context {model.runner.context}; /help shows the commands")
        _loop(talk, line_reader([*COMMANDS], _history() if history else None))


def _history() -> Path:
    from rlx.formats.fetch import models_dir

    return models_dir().parent / "chat-history"


def _loop(talk: Conversation, read: ReadLine) -> None:
    while True:
        try:
            _turn(talk, read_message(read))
        except (EOFError, _Exit):
            break
        except KeyboardInterrupt:
            print()
            console.note("Ctrl-D or /exit leaves")
        except (RlxError, OSError) as e:
            talk.dropped()
            console.error(str(e))
    if sys.stdin.isatty():
        print()


def _turn(talk: Conversation, text: str) -> None:
    if not text.strip():
        return
    if text.startswith("/") and not text.startswith("//"):
        run_command(talk, text.strip())
        return
    stream = talk.ask(text[1:] if text.startswith("//") else text)
    try:
        render.show(stream, "reading")
        print()
    except KeyboardInterrupt:
        stream.close()
        print()
        console.note("stopped")
    talk.answered(stream.result)
    if stream.result.finish_reason == "length":
        console.note(_why_cut(talk))


def _why_cut(talk: Conversation) -> str:
    engine, settings = talk.model.runner, talk.known_settings()
    if talk.last is not None and len(talk.last.tokens) >= settings["max_tokens"]:
        return f"cut at {settings['max_tokens']} tokens; /set max_tokens N for more"
    return f"the context of {engine.context} tokens is full; /reset, or /set overflow shift"


class _Exit(Exception):
    """The user leaves the chat."""


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
            ("last answer", render.timings(chat.last) if chat.last else "none yet"),
            ("messages", len(chat.messages)),
            ("context", f"{len(engine.tokens)} of {engine.context} tokens"),
        ]
    )


def _exit(_: Conversation, __: str) -> None:
    raise _Exit


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


def run_command(chat: Conversation, line: str) -> None:
    """Run a slash command."""
    name, _, rest = line.partition(" ")
    found = COMMANDS.get(name)
    if found is None:
        raise OptionError(
            "unknown command", got=name, expected=" ".join(COMMANDS),
            hint=did_you_mean(name, COMMANDS),
        )  # fmt: skip
    found.do(chat, rest.strip())
