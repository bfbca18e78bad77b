"""`rlx chat`: talk with a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rlx.cli import answers, console, slash
from rlx.cli.conversation import Conversation
from rlx.cli.lines import ReadLine, line_reader, read_message
from rlx.cli.opening import load_model
from rlx.cli.options import ModelName, Running, Sampling, spread
from rlx.cli.run import DEFAULT_MODEL
from rlx.errors import RlxError


@spread
def chat(
    name: ModelName = DEFAULT_MODEL,
    *,
    system: Annotated[
        str, typer.Option("--system", "-s", help="How the model should behave.")
    ] = "",
    keep: Annotated[
        bool,
        typer.Option("--history/--no-history", help="Keep what you type for the next time."),
    ] = True,
    loading: Running,
    sampling: Sampling,
) -> None:
    """Talk with a model.

    The conversation is kept until /reset; each turn runs only what is new. /help lists the
    commands. Ctrl-C stops an answer, Ctrl-D leaves.
    """
    settings = sampling.settings()
    with load_model(name, loading) as model:
        model.tokenizer.chat_template()  # an error now where the model is not made for chat
        talk = Conversation(model, system, settings)
        if sys.stdin.isatty():
            console.note(f"{name}, context {model.runner.context}; /help shows the commands")
        _loop(talk, line_reader([*slash.COMMANDS], _history() if keep else None))


def _history() -> Path:
    from rlx.formats.fetch import models_dir

    return models_dir().parent / "chat-history"


def _loop(talk: Conversation, read: ReadLine) -> None:
    while True:
        try:
            _turn(talk, read_message(read))
        except (EOFError, slash.Leave):
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
        slash.obey(talk, text.strip())
        return
    stream = talk.ask(text[1:] if text.startswith("//") else text)
    try:
        answers.show(stream, "reading")
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
