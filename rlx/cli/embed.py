"""`rlx embed`: embeddings of texts, their similarity, or a ranking."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from rlx.cli import console
from rlx.cli.load_model import is_model, load_embedder, refuse_near_miss
from rlx.cli.options import Artifact, DeviceName, Json, Quant, Threads, model_names
from rlx.errors import InputError, OptionError

if TYPE_CHECKING:
    from rlx.cli.load_model import LanguageEmbedder
    from rlx.models.encoder_model import EncoderModel

    Embedder = EncoderModel | LanguageEmbedder


DEFAULT_ENCODER = "all-minilm-l6-v2"
_WINDOW = 512  # texts that are ranked together
_MOST_COMPARED = 20  # texts whose similarities a screen can show


def embed(
    first: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A model file, folder or name. An argument that is no model is a text.",
            autocompletion=model_names,
            show_default=DEFAULT_ENCODER,
        ),
    ] = None,
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="Texts; without any, the lines of standard input."),
    ] = None,
    *,
    source: Annotated[
        Path | None,
        typer.Option(
            "--input", "-i", metavar="FILE", help="Embed the lines of a file; - is stdin."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write a .npy or .jsonl file."),
    ] = None,
    query: Annotated[
        str | None,
        typer.Option("--query", help="Rank the texts by relevance to this query."),
    ] = None,
    similarity: Annotated[
        bool, typer.Option("--similarity", help="Cosine similarity of all pairs of texts.")
    ] = False,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", help="A prompt put before each text, or the name of one of the model's."
        ),
    ] = None,
    dimensions: Annotated[
        int | None,
        typer.Option("--dimensions", help="Truncate each vector to this many dimensions."),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            help="Scale vectors to length 1, or leave them as they are.",
            show_default="as the model says",
        ),
    ] = None,
    pooling: Annotated[
        str | None,
        typer.Option(
            "--pooling",
            help="For language models: mean of the hidden states, or the last one.",
            show_default="mean",
        ),
    ] = None,
    overlong: Annotated[
        str,
        typer.Option(
            "--overlong", help="Texts that are too long: warn and truncate, cut silently, or error."
        ),
    ] = "warn",
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch", help="Most texts that run at once.", show_default="what fits their length"
        ),
    ] = None,
    quant: Quant = None,
    device: DeviceName = "cpu",
    threads: Threads = None,
    artifact: Artifact = None,
    json: Json = False,
) -> None:
    """Compute embeddings of texts, or rank them.

    Prints one vector per line, as a JSON array. With --query, prints scores and texts instead, the
    best first. Lines are read as they are needed, so there may be any number of them.
    """
    if output is not None:
        _check_output(output)
    if query is not None and similarity:
        raise typer.BadParameter("--query and --similarity; give one of them")
    model, given = _arguments([] if first is None else [first, *(texts or [])], source)
    options: dict[str, Any] = {"overlong": overlong, "batch": batch}
    wanted = {"prompt": prompt, "truncate_dim": dimensions, "normalize": normalize}
    if query is not None:
        _require_none("--query", output, **wanted)
    elif similarity:
        _require_none("--similarity", output, normalize=normalize)
    elif json:
        _require_none("--json", output)
    with load_embedder(model, device, threads, quant, pooling, artifact) as encoder:
        if query is not None:
            _rank(encoder, query, list(given), json, options)
        elif similarity:
            _compare(encoder, list(given), json, options | wanted)
        elif json:
            _print_object(encoder, list(given), options | wanted)
        else:
            _stream(encoder, given, output, options | wanted)


def _require_none(option: str, output: Path | None, **others: object) -> None:
    """Refuse options that have no meaning together."""
    given = {"output": output, **others}
    for name, value in given.items():
        if value is not None:
            flag = "--dimensions" if name == "truncate_dim" else f"--{name}"
            raise typer.BadParameter(f"{flag} and {option}; give one of them")


def _arguments(words: list[str], source: Path | None) -> tuple[str, Iterable[str]]:
    """Model and texts from the arguments."""
    model = DEFAULT_ENCODER
    if words and is_model(words[0]):
        model, *words = words
    elif words:
        refuse_near_miss(words[0], "rlx embed", DEFAULT_ENCODER)
    if source is not None:
        if words:
            raise typer.BadParameter("texts and --input; give one of them")
        return model, _lines() if str(source) == "-" else _Lines(source)
    return model, words or _lines()


def _lines() -> Iterator[str]:
    """Standard input line by line, at least one."""
    if sys.stdin.isatty():
        raise typer.BadParameter("no texts")
    lines = _decoded(sys.stdin.buffer, "standard input")
    first = next(lines, None)
    if first is None:
        raise typer.BadParameter("no texts on standard input")
    return _chained(first, lines)


class _Lines:
    """The lines of a file, counted before they are embedded."""

    def __init__(self, source: Path) -> None:
        self._source, self._count = source, 0
        if source.is_file():  # a FIFO can be read once only
            with open(source, "rb") as file:
                self._count = sum(1 for _ in file)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        with open(self._source, "rb") as file:
            yield from _decoded(file, str(self._source))


def _chained(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _decoded(lines: Iterable[bytes], name: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        try:
            yield line.rstrip(b"\r\n").decode("utf-8")
        except UnicodeDecodeError as e:
            raise InputError(
                f"not UTF-8: {e.reason}", where=f"{name}, line {number}",
                got=repr(line[e.start : e.start + 20]),
                hint="`iconv -c -f utf-8 -t utf-8` leaves out what is not",
            ) from None  # fmt: skip


def _stream(
    encoder: Embedder, texts: Iterable[str], output: Path | None, options: dict[str, Any]
) -> None:
    total = len(texts) if isinstance(texts, list | _Lines) else None
    with console.counted("embedding", total, "texts") as done:
        rows = _each(encoder.embed_stream(texts, **options), done)
        if output is None:
            _print_lines(rows)
        else:
            width = options["truncate_dim"] or encoder.width
            count = _write_file(output, rows, width)
    if output is not None:
        console.note(f"wrote {count} vectors to {output}")


def _each(rows: Iterable[Any], done: Any) -> Iterator[Any]:
    for row in rows:
        yield row
        done()


def _rank(
    encoder: Embedder, query: str, texts: list[str], json: bool, options: dict[str, Any]
) -> None:
    scores: list[tuple[float, int]] = []
    with console.counted("ranking", len(texts), "texts") as done:
        for first in range(0, len(texts), _WINDOW):
            window = texts[first : first + _WINDOW]
            ranked = encoder.rerank(query, window, **options)
            scores += [(-r.score, first + r.index) for r in ranked]
            done(len(window))
    found = [(-score, texts[i]) for score, i in sorted(scores)]
    if json:
        console.write_json([{"score": score, "text": text} for score, text in found])
        return
    for score, text in found:
        console.write(f"{score:8.4f}  {_line(text)}\n")


def _line(text: str) -> str:
    """A text as one line."""
    return " ".join(text.splitlines())


def _compare(encoder: Embedder, texts: list[str], json: bool, options: dict[str, Any]) -> None:
    if len(texts) > _MOST_COMPARED:
        raise typer.BadParameter(f"--similarity is for at most {_MOST_COMPARED} texts")
    with console.working("embedding"):
        rows = encoder.embed(texts, **options | {"normalize": True})
        found = (rows @ rows.T).tolist()
    if json:
        console.write_json({"texts": texts, "similarity": found})
        return
    numbers = [str(i + 1) for i in range(len(texts))]
    shown = [
        [number, *(f"{value:.3f}" for value in row), _line(text)]
        for number, row, text in zip(numbers, found, texts, strict=True)
    ]
    console.table(["", *numbers, "text"], shown, right=" ".join(numbers))


def _print_object(encoder: Embedder, texts: list[str], options: dict[str, Any]) -> None:
    with console.counted("embedding", len(texts), "texts") as done:
        rows = [row.tolist() for row in _each(encoder.embed_stream(texts, **options), done)]
    made = [{"text": t, "vector": r} for t, r in zip(texts, rows, strict=True)]
    console.write_json({"model": str(encoder.model.path), "embeddings": made})


_HEADER = 128  # bytes of a .npy file before its numbers
SUFFIXES = (".npy", ".jsonl")


def _check_output(path: Path) -> None:
    """Raise where the output file cannot be written, before anything is computed."""
    if path.suffix.lower() not in SUFFIXES:
        raise OptionError(
            "unknown kind of file", where="--output", got=path.name, expected=", ".join(SUFFIXES)
        )
    if not path.parent.is_dir():
        raise OptionError("no such folder", where="--output", got=path.parent)
    if path.is_dir():
        raise OptionError("a folder, not a file", where="--output", got=path)


def _print_lines(rows: Iterable[Any]) -> None:
    """A vector per line, as they are computed."""
    for row in rows:
        sys.stdout.write(json.dumps(row.tolist()) + "\n")


def _write_file(path: Path, rows: Iterable[Any], width: int) -> int:
    """Write the vectors of `width` numbers atomically. Returns how many there were."""
    from rlx.support.files import atomic_file

    with atomic_file(path.resolve()) as file:  # keep symbolic links
        if path.suffix.lower() == ".npy":
            return _write_npy(file, rows, width)
        return _write_lines(file, rows)


def _write_lines(file: BinaryIO, rows: Iterable[Any]) -> int:
    count = 0
    for count, row in enumerate(rows, 1):  # noqa: B007
        file.write(json.dumps(row.tolist()).encode() + b"\n")
    return count


def _write_npy(file: BinaryIO, rows: Iterable[Any], width: int) -> int:
    """The header has the number of rows, so it is written last."""
    file.write(b"\0" * _HEADER)
    count = 0
    for count, row in enumerate(rows, 1):  # noqa: B007
        file.write(row.astype("<f4").tobytes())
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({count}, {width}), }}"
    head = b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little")
    file.seek(0)
    file.write(head + text.encode().ljust(_HEADER - 11) + b"\n")
    return count
