"""`rlx bench`: tokens per second and memory bandwidth of a model.

Bench cases: a model at several lengths and batch sizes, and a peer in turn with it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlx.cli import console
from rlx.cli.load_model import load_any
from rlx.cli.onnx_file import Bind, bench_onnx, is_onnx, open_onnx_file, sizes_of
from rlx.cli.options import Json, Measuring, ModelName, spread
from rlx.cli.run import DEFAULT_MODEL
from rlx.errors import UnsupportedError
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.cli.peers import Peer
    from rlx.models.benchmark import BatchRuns, EncoderRuns, LanguageRuns
    from rlx.models.encoder_model import EncoderModel
    from rlx.models.language_model import LanguageModel


_PEERS = ("llama.cpp",)


@dataclass(frozen=True)
class Tests:
    """Lengths, batch sizes and repetitions."""

    prompt: Annotated[
        list[int] | None,
        typer.Option(
            "--prompt", "-p", min=2,
            help="Tokens of the prompt, or of each text. May be repeated.",
            show_default="128 and 512",
        ),
    ] = None  # fmt: skip
    new: Annotated[
        int, typer.Option("--new", "-n", min=1, help="Tokens generated after each prompt.")
    ] = 64
    batch: Annotated[
        list[int] | None,
        typer.Option(
            "--batch", "-b", min=1, help="Requests, or texts, at once. May be repeated.",
            show_default="1; of encoders 1 and 8",
        ),
    ] = None  # fmt: skip
    repeat: Annotated[int, typer.Option("--repeat", "-r", min=1, help="Runs of each test.")] = 3

    def lengths(self, most: int) -> list[int]:
        """Prompt lengths: those given, or the defaults that fit."""
        return self.prompt or [n for n in (128, 512) if n <= most] or [max(2, most)]


@dataclass(frozen=True)
class Against:
    """The peer that is measured in turn."""

    peer: Annotated[
        str | None,
        typer.Option(
            "--peer", help="Measure a peer in turn: llama.cpp.", autocompletion=lambda: [*_PEERS]
        ),
    ] = None
    peer_python: Annotated[
        str,
        typer.Option(
            "--peer-python", metavar="PYTHON",
            help="A Python that has the peer installed.", show_default="this one",
        ),
    ] = sys.executable  # fmt: skip

    def start(
        self, model: LanguageModel | EncoderModel, threads: int | None
    ) -> AbstractContextManager[Peer | None]:
        from rlx.backends.registry import Device
        from rlx.cli.peers import start_llama_cpp
        from rlx.models.language_model import LanguageModel
        from rlx.specialize.options import CompileOptions

        if self.peer is None:
            return nullcontext()
        path = model.model.path
        if not isinstance(model, LanguageModel) or path.suffix != ".gguf":
            raise UnsupportedError(
                "llama.cpp runs language models in GGUF files", where="--peer", got=path.name
            )
        with console.working(f"starting {self.peer}"):
            workers = Device.of("cpu").backend.workers(CompileOptions(threads=threads))
            return start_llama_cpp(self.peer_python, path, workers, model.runner.context)


@spread
def bench(
    name: ModelName = DEFAULT_MODEL,
    *,
    tests: Tests,
    against: Against,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the figures as SVG.")
    ] = None,
    bind: Bind = None,
    json: Json = False,
    loading: Measuring,
) -> None:
    """Measure a model; figures are medians of several runs.

    Language models: prefill and decode, also of several requests with continuous batching.
    Encoders: batches of texts. GB/s is the size of the weights that a run reads, times runs per
    second.
    """
    if is_onnx(name):
        opened = open_onnx_file(name, loading.device or "cpu", loading.threads)
        bench_onnx(opened, name, sizes_of(bind), tests.repeat, json)
        return
    peer = against.peer
    if peer is not None and peer not in _PEERS:
        raise typer.BadParameter(f"no peer {peer!r}; there is {', '.join(_PEERS)}")
    begin = time.perf_counter()
    with load_any(name, loading) as model:
        about = _about(name, model, time.perf_counter() - begin, loading)
        with against.start(model, loading.threads) as other:
            rows = _measure(model, tests, about["weight_bytes"], other, loading)
    if plot is not None:
        plot.write_text(_drawn(rows, peer), encoding="utf-8")
        console.note(f"wrote {plot}")
    if json:
        console.write_json(about | {"peer": peer, "tests": [asdict(row) for row in rows]})
    else:
        _print(about, rows, peer)


def _about(
    name: str, model: LanguageModel | EncoderModel, loaded: float, loading: Measuring
) -> dict[str, Any]:
    from rlx.cli.programs import bytes_per_run
    from rlx.models.language_model import LanguageModel

    found: dict[str, Any] = {"model": name, "device": loading.device}
    if isinstance(model, LanguageModel):
        found |= {"kv": model.runner.kv, "context": model.runner.context}
    return found | {"load_seconds": loaded, "weight_bytes": bytes_per_run(model.model)}


def _measure(
    model: LanguageModel | EncoderModel,
    tests: Tests,
    read: int,
    peer: Peer | None,
    loading: Measuring,
) -> list[Measured]:
    from rlx.models.language_model import LanguageModel

    with console.counted("measuring", None) as done:
        cases = Cases(tests.repeat, read, peer, done)
        if isinstance(model, LanguageModel):
            return _measure_language(model, tests, cases, loading)
        return _measure_encoder(model, tests, cases)


def _measure_language(
    model: LanguageModel, tests: Tests, cases: Cases, loading: Measuring
) -> list[Measured]:
    from rlx.models.benchmark import BatchRuns, LanguageRuns

    lengths = tests.lengths(model.runner.context - tests.new)
    rows: list[Measured] = []
    batches = tests.batch or [1]
    if 1 in batches:
        runs = LanguageRuns(model)
        rows += [row for n in lengths for row in cases.language(runs, n, tests.new)]
    for requests in batches:
        if requests > 1:
            with BatchRuns(
                model, requests, device=loading.device, threads=loading.threads,
                artifact=loading.artifact, quant=loading.quant,
            ) as many:  # fmt: skip
                rows += [cases.requests(many, requests, n, tests.new) for n in lengths]
    return rows


def _measure_encoder(model: EncoderModel, tests: Tests, cases: Cases) -> list[Measured]:
    from rlx.models.benchmark import EncoderRuns

    runs, batches = EncoderRuns(model), tests.batch or [1, 8]
    lengths = tests.lengths(model.max_tokens)
    return [cases.encoder(runs, texts, n) for n in lengths for texts in batches]


def _drawn(rows: list[Measured], peer: str | None) -> str:
    """Tokens per second, by prompt length or by batch size."""
    from rlx.viz.plot import Chart, draw

    charts = []
    for test in dict.fromkeys(row.test for row in rows):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in (r for r in rows if r.test == test):
            at = {"prefill": row.tokens, "decode": row.past, "encode": row.batch}[test]
            named = f"{row.tokens} tokens" if test == "encode" else _name(row.batch)
            lines.setdefault(named, []).append((at, row.tokens_per_second))
            if peer is not None and row.peer_tokens_per_second is not None:
                lines.setdefault(peer, []).append((at, row.peer_tokens_per_second))
        label = {"prefill": "tokens of the prompt", "decode": "tokens before", "encode": "texts"}
        charts.append(Chart(test, label[test], "tokens/s", lines))
    return draw(charts)


def _name(requests: int) -> str:
    return "rlx" if requests == 1 else f"rlx, {requests} at once"


def _print(about: dict[str, Any], rows: list[Measured], peer: str | None) -> None:
    console.facts(
        [
            ("model", about["model"]),
            ("weights", console.size(about["weight_bytes"])),
            ("loaded in", f"{about['load_seconds']:.2f} s"),
        ]
    )
    header = ["test", "batch", "tokens", "past", "tokens/s", "ms/token", "GB/s"]
    columns = [_columns(row) for row in rows]
    if peer is not None:
        header += [peer, "ratio"]
    console.table(header, [c[: len(header)] for c in columns], right=" ".join(header[1:]))


def _columns(row: Measured) -> tuple[object, ...]:
    speed, peer = row.weights_gb_per_second, row.peer_tokens_per_second
    return (
        row.test,
        row.batch,
        row.tokens,
        row.past,
        f"{row.tokens_per_second:.1f}",
        f"{1e3 / row.tokens_per_second:.3f}",
        "" if speed is None else f"{speed:.2f}",
        "" if peer is None else f"{peer:.1f}",
        "" if row.ratio is None else f"{row.ratio:.2f}",
    )


@dataclass(frozen=True)
class Measured:
    """The median of several runs of one test."""

    test: str  # prefill, decode or encode
    batch: int  # sequences at once
    tokens: int  # of each sequence
    past: int  # tokens in the cache before
    seconds: float
    tokens_per_second: float
    weights_gb_per_second: float | None  # None: weights are read once for many tokens
    peer_tokens_per_second: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the peer."""
        peer = self.peer_tokens_per_second
        return self.tokens_per_second / peer if peer else None


@dataclass(frozen=True)
class Cases:
    """Runs the cases: repetitions, bytes that a run reads, the peer, a progress function."""

    repeat: int
    read: int
    peer: Peer | None
    done: Callable[[], object]

    def language(self, runs: LanguageRuns, length: int, new: int) -> list[Measured]:
        """A prompt of `length` tokens and `new` after it."""
        runs.check(length, new)
        prefill, decode = self._rounds(
            lambda: (runs.prefill(length), runs.decode(new)),
            [("prefill", {"tokens": length}), ("decode", {"past": length, "steps": new})],
        )
        speed = self.read * new / decode[0] / 1e9
        return [
            _measured("prefill", 1, length, 0, None, *prefill),
            _measured("decode", 1, new, length, speed, *decode),
        ]

    def requests(self, runs: BatchRuns, requests: int, length: int, new: int) -> Measured:
        """`new` tokens of each of several requests, after prompts of `length` tokens."""
        [decode] = self._rounds(lambda: (runs.decode(length, new),), [])
        speed = self.read * new / decode[0] / 1e9
        return _measured("decode", requests, new, length, speed, *decode)

    def encoder(self, runs: EncoderRuns, texts: int, length: int) -> Measured:
        """A batch of texts of `length` tokens."""
        [encode] = self._rounds(lambda: (runs.encode(texts, length),), [])
        speed = self.read / encode[0] / 1e9
        return _measured("encode", texts, length, 0, speed, *encode)

    def _rounds(
        self, ours: Callable[[], tuple[float, ...]], asked: Sequence[tuple[str, dict[str, int]]]
    ) -> list[tuple[float, float | None]]:
        """Median seconds of each part, ours and the peer's, in turn so that a noisy minute hits
        both. The first round does not count: it compiles and packs."""
        mine, theirs = [], []
        for _ in range(self.repeat + 1):
            mine.append(ours())
            if self.peer is not None and asked:
                theirs.append([self.peer.ask(do, **given)["seconds"] for do, given in asked])
            self.done()
        medians = [statistics.median(part) for part in zip(*mine[1:], strict=True)]
        peers: list[float | None] = [statistics.median(p) for p in zip(*theirs[1:], strict=True)]
        return list(zip(medians, peers or [None] * len(medians), strict=True))


def _measured(
    test: str,
    batch: int,
    tokens: int,
    past: int,
    speed: float | None,
    seconds: float,
    peer: float | None,
) -> Measured:
    count = batch * tokens
    beside = None if peer is None else count / peer
    return Measured(test, batch, tokens, past, seconds, count / seconds, speed, beside)
