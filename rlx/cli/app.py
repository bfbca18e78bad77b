"""The `rlx` application: its commands, and how errors become messages and exit codes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rlx.cli import (
    bench,
    cache,
    chat,
    compile,
    console,
    doctor,
    embed,
    finetune,
    inspect,
    profile,
    pull,
    quantize_model,
    run,
    serve,
    tune,
)
from rlx.errors import OptionError, RlxError
from rlx.support.settings import setting, warn_of_unknown

_EPILOG = (
    "Exit codes: 0 done, 1 the task failed, 2 wrong usage, 130 interrupted. "
    "RLX_DEBUG=1 shows where an error came from; docs/settings.md lists all variables."
)


class Commands(TyperGroup):
    """Errors as their message and an exit code, without a traceback unless RLX_DEBUG is set."""

    def invoke(self, ctx: Any) -> Any:
        _replace_unencodable()
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                warn_of_unknown()
                return super().invoke(ctx)
            except KeyboardInterrupt:
                console.note("\ninterrupted")
                raise typer.Exit(130) from None
            except BrokenPipeError:
                raise  # the reader closed the pipe: typer exits quietly
            except (RlxError, OSError, MemoryError) as e:
                if setting("RLX_DEBUG") not in ("", "0"):
                    raise
                console.error(_message(e))
                raise typer.Exit(2 if isinstance(e, OptionError) else 1) from None


def _message(e: Exception) -> str:
    if isinstance(e, OSError) and e.strerror:
        return f"[{e.filename}] {e.strerror}" if e.filename else e.strerror
    if isinstance(e, MemoryError):
        return "not enough memory\n  hint: `rlx doctor MODEL` says what fits"
    if isinstance(e, RlxError) and not e.hint:
        return f"{e}\n  see {e.page}"
    return str(e)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    console.note(f"warning: {message}")


def _replace_unencodable() -> None:
    """Write a replacement for characters that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"rlx {version('rlx')}")
        raise typer.Exit


app = typer.Typer(
    name="rlx",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_EPILOG,
)


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Run and compile language models, and inspect what the compiler does.

    Try: rlx run "Why is the sky blue?"
    """


def _add(name: str, panel: str, command: Callable[..., None]) -> None:
    """Add a command; its docstring is the help, paragraph by paragraph."""
    paragraphs = cleandoc(command.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(p.split()) for p in paragraphs)
    app.command(name, rich_help_panel=panel, help=text)(command)


_add("run", "Models", run.run)
_add("chat", "Models", chat.chat)
_add("embed", "Models", embed.embed)
_add("serve", "Models", serve.serve)
_add("pull", "Models", pull.pull)
_add("list", "Models", pull.list_models)
_add("rm", "Models", pull.remove_models)
_add("quantize", "Models", quantize_model.quantize)
_add("finetune", "Models", finetune.finetune)
_add("compile", "Models", compile.compile_)
_add("inspect", "See inside", inspect.inspect)
_add("profile", "See inside", profile.profile)
_add("tune", "This machine", tune.tune)
_add("bench", "See inside", bench.bench)
_add("doctor", "This machine", doctor.doctor)
app.add_typer(cache.app, name="cache", rich_help_panel="This machine")
