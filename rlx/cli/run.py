"""`rlx run`: one prompt, one generation."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlx.cli import console, render
from rlx.cli.load_model import is_model, load_model, refuse_near_miss
from rlx.cli.options import Json, Running, Sampling, model_names, spread

if TYPE_CHECKING:
    from rlx.models.language_model import LanguageModel

DEFAULT_MODEL = "smollm2-135m"


@spread
def run(
    first: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF file, a Hugging Face folder, a name that `rlx list` shows, or owner/name.",
            autocompletion=model_names,
            show_default=DEFAULT_MODEL,
        ),
    ] = None,
    second: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The prompt; - reads it from standard input."),
    ] = None,
    *,
    system: Annotated[
        str | None, typer.Option("--system", "-s", help="The system message.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as text; no chat template.")
    ] = False,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            "-w",
            metavar="MODEL",
            help="The weights for an edited file of `rlx inspect -o`, which is given as MODEL.",
        ),
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print timings.")] = False,
    json: Json = False,
    loading: Running,
    sampling: Sampling,
) -> None:
    """Generate the answer to a prompt.

    A model with a chat template answers the prompt; another one continues it. A single argument is
    the prompt, for the default model, unless it names a model. A prompt that is left out is read
    from standard input.
    """
    name, prompt = _arguments(first, second)
    if weights is not None and not Path(name).is_file():
        raise typer.BadParameter("--weights needs an override file before the prompt")
    if weights is not None and loading.artifact is not None:
        raise typer.BadParameter("--artifact goes with a model, not with an override")
    if raw and system is not None:
        raise typer.BadParameter("--system needs a chat template; --raw uses none")
    settings = sampling.settings()
    begin = time.perf_counter()
    with _load(name, weights, loading) as model:
        loaded = time.perf_counter() - begin
        stream = _start(model, prompt, system, raw, settings)
        if json:
            with console.working("answering"):
                for _ in stream:
                    pass
            taken = {"model": str(model.model.path), "load_seconds": loaded}
            console.write_json(taken | render.as_json(stream.result))
        else:
            _print(stream)
        if stats:
            console.note(f"loaded in {loaded:.2f} s, {render.timings(stream.result)}")
            console.note(f"sampling: {render.sampling(model.settings(**settings))}")


def _load(name: str, weights: str | None, loading: Running) -> LanguageModel:
    if weights is None:
        return load_model(name, loading)
    from rlx.cli.override import load_with_override

    return load_with_override(Path(name), weights, loading)


def _arguments(first: str | None, second: str | None) -> tuple[str, str]:
    """Model and prompt from the arguments."""
    if second is None and (first is None or is_model(first)):
        if sys.stdin.isatty():
            raise typer.BadParameter('no prompt; try: rlx run "Why is the sky blue?"')
        first, second = first or DEFAULT_MODEL, "-"
    elif second is None:
        assert first is not None
        refuse_near_miss(first, "rlx run", DEFAULT_MODEL)
        first, second = DEFAULT_MODEL, first
    assert first is not None and second is not None
    prompt = sys.stdin.read() if second == "-" else second
    if not prompt.strip():
        raise typer.BadParameter("the prompt is empty")
    return first, prompt


def _start(model: Any, prompt: str, system: str | None, raw: bool, settings: Any) -> Any:
    if raw or (system is None and not model.tokenizer.vocabulary.templates):
        return model.generate(prompt, **settings)
    messages = [] if system is None else [{"role": "system", "content": system}]
    return model.chat([*messages, {"role": "user", "content": prompt}], **settings)


def _print(stream: Any) -> None:
    try:
        render.show(stream, "reading the prompt")
    finally:
        if stream.result.text and not stream.result.text.endswith("\n"):
            console.write("\n")
