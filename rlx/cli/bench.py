"""`rlx bench`: tokens per second, and how fast the weights go by."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlx.cli import console
from rlx.cli.opening import load_any
from rlx.cli.options import Json, Loading, ModelName, spread
from rlx.cli.run import DEFAULT_MODEL
from rlx.errors import UnsupportedError

if TYPE_CHECKING:
    from rlx.cli.peers.pipe import Peer
    from rlx.cli.trials import Measured
    from rlx.models.encoders.embed import EncoderModel
    from rlx.models.language import LanguageModel

_PEERS = ("llama.cpp",)


@spread
def bench(
    name: ModelName = DEFAULT_MODEL,
    *,
    prompt: Annotated[
        list[int] | None,
        typer.Option(
            "--prompt", "-p", min=1,
            help="Tokens of the prompt, or of each text. May be repeated.",
            show_default="128 and 512",
        ),
    ] = None,
    new: Annotated[
        int, typer.Option("--new", "-n", min=1, help="Tokens generated after each prompt.")
    ] = 64,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            "--batch", "-b", min=1,
            help="Texts that an encoder reads at once. May be repeated.", show_default="1 and 8",
        ),
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", "-r", min=1, help="Runs of each test.")] = 3,
    peer: Annotated[
        str | None,
        typer.Option(
            "--peer", help="Measure in turn with llama.cpp.", autocompletion=lambda: [*_PEERS]
        ),
    ] = None,
    peer_python: Annotated[
        str,
        typer.Option(
            "--peer-python", metavar="PYTHON",
            help="A Python that has the peer installed.", show_default="this one",
        ),
    ] = sys.executable,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the figures as SVG.")
    ] = None,
    json: Json = False,
    loading: Loading,
) -> None:  # fmt: skip
    """Measure a model, medians of several runs.

    Of a language model prompts (prefill) and token by token after them (decode), of an encoder
    batches of texts. GB/s is the size of the weights that a run reads, times runs per second.
    """
    if peer is not None and peer not in _PEERS:
        raise typer.BadParameter(f"no peer {peer!r}; there is {', '.join(_PEERS)}")
    begin = time.perf_counter()
    with load_any(name, loading) as model:
        about = _about(name, model, time.perf_counter() - begin, loading)
        with _start_peer(peer, peer_python, name, model, loading.threads) as other:
            rows = _measure(model, prompt, new, batch, repeat, about["weight_bytes"], other)
    if plot is not None:
        plot.write_text(_drawn(rows, peer), encoding="utf-8")
        console.note(f"wrote {plot}")
    if json:
        console.write_json(about | {"peer": peer, "tests": [asdict(row) for row in rows]})
    else:
        _print(about, rows, peer)


def _about(
    name: str, model: LanguageModel | EncoderModel, loaded: float, loading: Loading
) -> dict[str, Any]:
    from rlx.cli.weights import bytes_per_run
    from rlx.models.language import LanguageModel

    found: dict[str, Any] = {"model": name, "device": loading.device}
    if isinstance(model, LanguageModel):
        found |= {"kv": loading.kv, "context": model.engine.context}
    return found | {"load_seconds": loaded, "weight_bytes": bytes_per_run(model.model)}


def _start_peer(
    peer: str | None,
    python: str,
    name: str,
    model: LanguageModel | EncoderModel,
    threads: int | None,
) -> AbstractContextManager[Peer | None]:
    from rlx.backends.cpu.cores import worker_count
    from rlx.cli.peers.llama import start_llama_cpp
    from rlx.models.language import LanguageModel

    if peer is None:
        return nullcontext()
    path = model.model.path
    if not isinstance(model, LanguageModel) or path.suffix != ".gguf":
        raise UnsupportedError(
            "llama.cpp runs language models in GGUF files", where="--peer", got=name
        )
    with console.working(f"starting {peer}"):
        return start_llama_cpp(python, path, worker_count(threads), model.engine.context)


def _measure(
    model: LanguageModel | EncoderModel,
    prompt: list[int] | None,
    new: int,
    batch: list[int] | None,
    repeat: int,
    read: int,
    peer: Peer | None,
) -> list[Measured]:
    from rlx.cli.trials import Trials
    from rlx.models.language import LanguageModel
    from rlx.models.measuring import EncoderRuns, LanguageRuns

    if isinstance(model, LanguageModel):
        if batch:
            raise typer.BadParameter("a language model runs one sequence; --batch is for encoders")
        lengths = prompt or _usual(model.engine.context - new)
        with console.counted("measuring", len(lengths) * (repeat + 1)) as done:
            trials, language = Trials(repeat, read, peer, done), LanguageRuns(model)
            return [row for n in lengths for row in trials.language(language, n, new)]
    sizes = [(texts, n) for n in prompt or _usual(model.max_tokens) for texts in batch or (1, 8)]
    with console.counted("measuring", len(sizes) * (repeat + 1)) as done:
        trials, encoder = Trials(repeat, read, peer, done), EncoderRuns(model)
        return [trials.encoder(encoder, texts, n) for texts, n in sizes]


def _usual(most: int) -> list[int]:
    """The usual lengths that fit."""
    return [n for n in (128, 512) if n <= most] or [max(1, most)]


def _drawn(rows: list[Measured], peer: str | None) -> str:
    """Tokens per second: of language models by the length before, of encoders by the batch."""
    from rlx.viz.plot import Chart, draw

    charts = []
    for test in dict.fromkeys(row.test for row in rows):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in (r for r in rows if r.test == test):
            at = {"prefill": row.tokens, "decode": row.past, "encode": row.batch}[test]
            named = f"{row.tokens} tokens" if test == "encode" else "rlx"
            lines.setdefault(named, []).append((at, row.tokens_per_second))
            if peer is not None and row.peer_tokens_per_second is not None:
                lines.setdefault(peer, []).append((at, row.peer_tokens_per_second))
        label = {"prefill": "tokens of the prompt", "decode": "tokens before", "encode": "texts"}
        charts.append(Chart(test, label[test], "tokens/s", lines))
    return draw(charts)


def _print(about: dict[str, Any], rows: list[Measured], peer: str | None) -> None:
    console.facts(
        [
            ("model", about["model"]),
            ("weights", console.size(about["weight_bytes"])),
            ("loaded in", f"{about['load_seconds']:.2f} s"),
        ]
    )
    encodes = rows[0].test == "encode"
    header = ["test", "tokens", "texts" if encodes else "past", "tokens/s", "ms/token", "GB/s"]
    columns = [_columns(row, encodes) for row in rows]
    if peer is not None:
        header += [peer, "ratio"]
        columns = [
            (*c, f"{r.peer_tokens_per_second:.1f}", f"{r.ratio:.2f}")
            for c, r in zip(columns, rows, strict=True)
        ]
    console.table(header, columns, right=" ".join(header[1:]))


def _columns(row: Measured, encodes: bool) -> tuple[object, ...]:
    speed = row.weights_gb_per_second
    return (
        row.test,
        row.tokens,
        row.batch if encodes else row.past,
        f"{row.tokens_per_second:.1f}",
        f"{1e3 / row.tokens_per_second:.3f}",
        "" if speed is None else f"{speed:.2f}",
    )
