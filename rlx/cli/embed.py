"""`rlx embed`: texts to vectors, or texts in order of how well they answer a question."""

from __future__ import annotations

import json as jsonlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlx.cli import console
from rlx.cli.opening import is_model, load_encoder
from rlx.cli.options import Json, model_names

if TYPE_CHECKING:
    from rlx.models.encoders.embed import EncoderModel

DEFAULT_ENCODER = "all-minilm-l6-v2"


def embed(
    first: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="An encoder: a file, a folder or a name; what is none of them is a text.",
            autocompletion=model_names,
            show_default=DEFAULT_ENCODER,
        ),
    ] = None,
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="Texts; without any, the lines of standard input."),
    ] = None,
    *,
    query: Annotated[
        str | None,
        typer.Option("--query", "-q", help="Rank the texts by how well they answer this."),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", help="A text to put before each, or the name of one."),
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option("--dimensions", help="Keep the first numbers of each vector.")
    ] = None,
    device: Annotated[str, typer.Option("--device", "-d", help="Where it runs.")] = "cpu",
    threads: Annotated[int | None, typer.Option("--threads", "-t", help="Workers.")] = None,
    json: Json = False,
) -> None:
    """Turn texts into vectors, or rank them.

    Prints a vector per line as JSON numbers; with --query, the texts with their scores, the best
    first.
    """
    model, given = _arguments([] if first is None else [first, *(texts or [])])
    with load_encoder(model, device, threads) as encoder:
        with console.working("embedding"):
            if query is not None:
                found = [(r.score, given[r.index]) for r in encoder.rerank(query, given)]
            else:
                rows = encoder.embed(given, prompt=prompt, truncate_dim=dimensions).tolist()
        if query is not None:
            _print_ranked(found, json)
        else:
            _print_vectors(encoder, given, rows, json)


def _arguments(words: list[str]) -> tuple[str, list[str]]:
    """Model and texts out of what was given."""
    model = DEFAULT_ENCODER
    if words and is_model(words[0]):
        model, *words = words
    return model, words or _lines()


def _lines() -> list[str]:
    if sys.stdin.isatty():
        raise typer.BadParameter("no texts")
    found = sys.stdin.read().splitlines()
    if not found:
        raise typer.BadParameter("no texts on standard input")
    return found


def _print_ranked(found: list[tuple[float, str]], json: bool) -> None:
    if json:
        console.write_json([{"score": score, "text": text} for score, text in found])
        return
    for score, text in found:
        console.write(f"{score:8.4f}  {text}\n")


def _print_vectors(
    encoder: EncoderModel, texts: list[str], rows: list[list[float]], json: bool
) -> None:
    if json:
        made: Any = [{"text": t, "vector": r} for t, r in zip(texts, rows, strict=True)]
        console.write_json({"model": str(encoder.model.path), "embeddings": made})
        return
    for row in rows:
        print(jsonlib.dumps(row))
