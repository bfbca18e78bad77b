"""`rlx bench`: tokens per second, and how fast the weights go by."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlx.cli import console
from rlx.cli.opening import load_model
from rlx.cli.options import Json, Loading, ModelName, spread
from rlx.cli.run import DEFAULT_MODEL
from rlx.cli.weights import bytes_per_token

if TYPE_CHECKING:
    from rlx.models.language import LanguageModel


@dataclass(frozen=True)
class Measured:
    """The median of several runs of one test."""

    test: str  # prefill or decode
    tokens: int
    past: int  # tokens in the cache before
    seconds: float
    tokens_per_second: float
    weights_gb_per_second: float | None  # None: weights are read once for many tokens


@spread
def bench(
    name: ModelName = DEFAULT_MODEL,
    *,
    prompt: Annotated[
        list[int] | None,
        typer.Option(
            "--prompt", "-p", min=1,
            help="Tokens of the prompt. May be repeated.", show_default="128 and 512",
        ),
    ] = None,
    new: Annotated[
        int, typer.Option("--new", "-n", min=1, help="Tokens generated after each prompt.")
    ] = 64,
    repeat: Annotated[int, typer.Option("--repeat", "-r", min=1, help="Runs of each test.")] = 3,
    json: Json = False,
    loading: Loading,
) -> None:  # fmt: skip
    """Measure a model: prompts (prefill) and token by token (decode), medians of several runs.

    GB/s is the size of all weights times tokens per second: what decoding reads from memory.
    """
    begin = time.perf_counter()
    with load_model(name, loading) as model:
        loaded = time.perf_counter() - begin
        read = bytes_per_token(model.model)
        lengths = prompt or _usual(model.engine.context - new)
        rows = []
        with console.counted("measuring", len(lengths) * (repeat + 1)) as done:
            for length in lengths:
                runs = [_run(model, length, new, done) for _ in range(repeat + 1)]
                rows += _summary(length, new, runs[1:], read)  # the first one compiles and packs
        about = {
            "model": name,
            "device": loading.device,
            "kv": loading.kv,
            "context": model.engine.context,
            "load_seconds": loaded,
            "weight_bytes": read,
        }
    if json:
        console.write_json(about | {"tests": [asdict(row) for row in rows]})
    else:
        _print(about, rows)


def _usual(most: int) -> list[int]:
    """The usual lengths that leave room for an answer."""
    return [n for n in (128, 512) if n <= most] or [max(1, most)]


def _run(model: LanguageModel, length: int, new: int, done: Any) -> tuple[float, float]:
    """Seconds of one prefill and of the tokens after it."""
    from rlx.models.sampling import GenerationSettings

    settings, engine = GenerationSettings(temperature=0.0, seed=0), model.engine
    tokens = [(7 * i + 1) % model.config.vocab for i in range(length)]
    engine.check([0] * (length + new))
    rng, row = settings.rng(), settings.row()
    with engine.lock:
        engine.tokens.clear()
        start = time.perf_counter()
        token, rng = engine.feed(tokens, rng, row)
        middle = time.perf_counter()
        for _ in range(new):
            token, rng = engine.feed([token], rng, row)
        end = time.perf_counter()
    done()
    return middle - start, end - middle


def _summary(length: int, new: int, runs: list[tuple[float, float]], read: int) -> list[Measured]:
    import statistics

    prefill, decode = (statistics.median(times) for times in zip(*runs, strict=True))
    return [
        Measured("prefill", length, 0, prefill, length / prefill, None),
        Measured("decode", new, length, decode, new / decode, read * new / decode / 1e9),
    ]


def _print(about: dict[str, Any], rows: list[Measured]) -> None:
    console.facts(
        [
            ("model", about["model"]),
            ("weights", console.size(about["weight_bytes"])),
            ("loaded in", f"{about['load_seconds']:.2f} s"),
        ]
    )
    console.table(
        ("test", "tokens", "past", "tokens/s", "ms/token", "GB/s"),
        [
            (
                row.test,
                row.tokens,
                row.past,
                f"{row.tokens_per_second:.1f}",
                f"{1e3 * row.seconds / row.tokens:.2f}",
                "" if row.weights_gb_per_second is None else f"{row.weights_gb_per_second:.2f}",
            )
            for row in rows
        ],
        right="tokens past tokens/s ms/token GB/s",
    )
