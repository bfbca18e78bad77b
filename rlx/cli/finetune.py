"""`rlx finetune`: LoRA adapters, or whole models, from examples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlx.cli import console
from rlx.cli.load_model import find_model
from rlx.cli.options import Json, RequiredModel, spread
from rlx.errors import OptionError
from rlx.support.progress import reporting
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.models.finetune.finetune import FineTuned
    from rlx.models.finetune.history import TrainingProgress

_LINES = 20  # of progress, where there is no terminal
_WIDTH, _HEIGHT = 72, 10  # characters of a live chart
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of braille, by row and column


def _weights(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel="What is trained", **more)


def _examples(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Examples", **more)


def _training(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Training", **more)


def _result(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Result", **more)


@dataclass(frozen=True)
class Weights:
    """What is trained."""

    rank: Annotated[
        int | None, _weights("--rank", "-r", min=1, help="Rank of LoRA adapters.", show_default="8")
    ] = None
    alpha: Annotated[
        float | None, _weights(help="Scale of LoRA adapters, over the rank.", show_default="16")
    ] = None
    dropout: Annotated[
        float | None, _weights(help="Dropout before LoRA adapters.", show_default="0")
    ] = None
    targets: Annotated[
        str | None,
        _weights(
            help="What gets adapters: all-linear, or names such as q_proj,v_proj.",
            show_default="all-linear",
        ),
    ] = None
    dora: Annotated[
        bool, _weights("--dora", help="DoRA: adapters that train the lengths of rows too.")
    ] = False
    full: Annotated[
        bool,
        _weights(
            "--full",
            help="Train all weights: for small models. Encoders are, unless LoRA is asked for.",
        ),
    ] = False

    def lora(self) -> dict[str, Any] | None:
        """The settings of adapters that were given."""
        names = tuple(self.targets.split(",")) if self.targets else None
        targets = self.targets if names is None or len(names) == 1 else names
        asked = {"rank": self.rank, "alpha": self.alpha, "dropout": self.dropout,
                 "targets": targets, "use_dora": self.dora or None}  # fmt: skip
        return {name: value for name, value in asked.items() if value is not None} or None


@dataclass(frozen=True)
class Examples:
    """Which examples, and how they are read; the fields are arguments of `rlx.finetune`."""

    evaluation: Annotated[
        str | None,
        _examples(
            "--eval",
            metavar="SHARE_OR_FILE",
            help="Evaluate on a share of the examples (0.1), or on a file.",
        ),
    ] = None
    pack: Annotated[
        bool,
        _examples("--pack/--no-pack", help="Put several examples into one row, or one."),
    ] = True
    overlong: Annotated[
        str, _examples(help="Examples that are too long: cut, split (texts), drop, or error.")
    ] = "cut"
    answers: Annotated[
        str, _examples(help="Which answers of a conversation are learned: all, or the last.")
    ] = "all"
    template: Annotated[
        str, _examples(metavar="NAME", help="Which chat template of the model to use.")
    ] = "default"
    temperature: Annotated[
        float, _examples(help="Of the softmax over similarities, for encoders.")
    ] = 0.05

    def given(self) -> dict[str, Any]:
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        with suppress(ValueError):  # a path, or nothing
            found["evaluation"] = float(self.evaluation or "")
        return found


@dataclass(frozen=True)
class Training:
    """How to train; the fields are those of the settings of `rlx.finetune`."""

    epochs: Annotated[
        float | None,
        _training("--epochs", "-e", help="How often each example is seen.", show_default="3"),
    ] = None
    steps: Annotated[int | None, _training("--steps", min=1, help="Steps, instead of epochs.")] = (
        None
    )
    batch: Annotated[
        int | None,
        _training("--batch", "-b", min=1, help="Rows, or pairs, of a step.", show_default="4"),
    ] = None
    accumulate: Annotated[
        int | None,
        _training(min=1, help="Batches whose gradients make one step.", show_default="1"),
    ] = None
    context: Annotated[
        int | None,
        _training(
            "--context", "-c", min=8, help="Tokens of the longest example.",
            show_default="2048, or 512 for encoders",
        ),
    ] = None  # fmt: skip
    optimizer: Annotated[
        str | None,
        _training(help="adamw, adam, lion, muon, adafactor or sgd.", show_default="adamw"),
    ] = None
    learning_rate: Annotated[
        float | None,
        _training(
            "--learning-rate", "--lr", help="The highest learning rate.",
            show_default="2e-4, or 2e-5 for all weights",
        ),
    ] = None  # fmt: skip
    schedule: Annotated[
        str | None,
        _training(help="Learning rate: cosine, linear or constant.", show_default="cosine"),
    ] = None
    warmup: Annotated[
        float | None,
        _training(help="Steps of warm-up; below 1, a share of all.", show_default="0.03"),
    ] = None
    weight_decay: Annotated[
        float | None, _training(help="Decoupled weight decay of matrices.", show_default="0")
    ] = None
    clip: Annotated[
        float | None, _training(help="The highest norm of a gradient.", show_default="1")
    ] = None
    seed: Annotated[
        int | None, _training(help="Seed: the same seed gives the same bits.", show_default="0")
    ] = None
    eval_every: Annotated[
        int | None,
        _training(min=1, help="Steps between evaluations.", show_default="5 times, or each epoch"),
    ] = None
    patience: Annotated[
        int | None,
        _training(
            min=1,
            help="Stop after so many evaluations without a better one, and keep the best.",
        ),
    ] = None
    save_every: Annotated[
        int | None,
        _training(min=1, help="Steps between checkpoints.", show_default="a tenth, at most 100"),
    ] = None
    keep: Annotated[
        int | None, _training(min=1, help="How many checkpoints stay.", show_default="2")
    ] = None
    remat: Annotated[
        str | None,
        _training(
            help="Save memory: compute again in the backward pass all but matmuls, or nothing "
            "is kept.",
            metavar="none|matmuls|nothing",
            show_default="none",
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in found.items() if value is not None}


@spread
def finetune(
    name: RequiredModel,
    data: Annotated[
        Path,
        typer.Argument(metavar="DATA", help="Examples as JSON lines."),
    ],
    *,
    out: Annotated[
        Path | None,
        _result(
            "--out",
            "-o",
            metavar="FOLDER",
            help="Where the result and the checkpoints go.",
            show_default="DATA's name with -tuned",
        ),
    ] = None,
    merge: Annotated[
        Path | None,
        _result(metavar="FILE", help="Write a GGUF file too, with the adapter in its weights."),
    ] = None,
    type: Annotated[
        str | None,
        _result(
            "--type",
            "-q",
            help="The quant preset of that file: Q8_0, F16, Q4_K_M, …",
            show_default="the model's types",
        ),
    ] = None,
    plot: Annotated[
        Path | None, _result(metavar="FILE", help="Draw the losses: .svg or .html.")
    ] = None,
    live: Annotated[bool, _result("--live", help="Draw the losses in the terminal.")] = False,
    resume: Annotated[
        bool,
        _result(
            "--resume/--no-resume",
            help="Go on from the checkpoints in FOLDER, or delete them and begin anew.",
        ),
    ] = True,
    json: Json = False,
    weights: Weights,
    examples: Examples,
    training: Training,
) -> None:
    """Fine-tune a model on examples.

    A language model learns the answers in lines such as {"messages": [{"role": "user", "content":
    …}, {"role": "assistant", "content": …}]}, {"prompt": …, "completion": …} or {"text": …}, as
    LoRA adapters beside its weights, float or packed. An encoder learns from {"query": …,
    "positive": …}, perhaps with "negative". A run that was stopped goes on with the same command.
    """
    from rlx.models.finetune.finetune import finetune as train

    lora = weights.lora()
    find_model(name)  # fetched with a bar, if need be
    folder = out or Path(f"{data.stem}-tuned")
    began = time.perf_counter()
    options = {
        **examples.given(), **training.given(), "lora": lora, "full": weights.full,
        "resume": resume, "merge": merge, "type": type, "plot": plot,
    }  # fmt: skip
    with _shown(live) as show, reporting(console.stages()):
        try:
            found = train(name, data, out=folder, progress=show, **options)
        except KeyboardInterrupt as stopped:
            console.note(f"{stopped or 'interrupted'}; the same command goes on")
            raise typer.Exit(130) from None
    seconds = time.perf_counter() - began
    if json:
        console.write_json(_as_json(name, found, seconds))
        return
    _summary(name, found, seconds, weights.dora)
    print(found.path)


def _summary(name: str, found: FineTuned, seconds: float, dora: bool) -> None:
    losses, history, data = found.history.losses, found.history, found.dataset
    if data is not None:
        odd = [f"{n} {what}" for n, what in ((data.cut, "cut"), (data.dropped, "left out")) if n]
        more = f" ({', '.join(odd)})" if odd else ""
        console.note(
            f"{len(data.examples)} examples{more}, {data.tokens} tokens, {data.learned} learned"
        )
    best = f", evaluation {history.best:.4f}" if history.best is not None else ""
    console.note(
        f"{len(losses)} steps, {_duration(seconds)}: loss {losses[0]:.4f} to "
        f"{history.smoothed():.4f}{best}"
    )
    if found.merged is not None:
        console.note(f"merged: {found.merged}")
    if found.kind == "adapter" and dora:
        if found.merged is None:
            console.note("an adapter with DoRA runs merged: --merge FILE writes such a model")
    elif found.kind == "adapter":
        option = f"--load-adapter {found.path} --adapter {found.path.resolve().name}"
        console.note(f'try: rlx run {name} "…" {option}')


def _as_json(name: str, found: FineTuned, seconds: float) -> dict[str, Any]:
    history = found.history
    return {
        "model": name, "path": str(found.path), "kind": found.kind,
        "merged": None if found.merged is None else str(found.merged), "seconds": seconds,
        "steps": len(history.losses), "losses": history.losses,
        "evaluations": [{"step": s, "loss": x} for s, x in history.evaluations],
    }  # fmt: skip


# -- progress -------------------------------------------------------------------------------------


@contextmanager
def _shown(live: bool) -> Iterator[Callable[[TrainingProgress], None]]:
    """A bar on a terminal, with a chart if asked for; some lines elsewhere."""
    out = console.screen(stderr=True)
    if not out.is_terminal:
        if live:
            raise OptionError("no terminal to draw in", where="--live", expected="--plot FILE")
        yield _lines
        return
    from rich import progress as rp
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    columns = (
        rp.TextColumn("{task.description}"), rp.BarColumn(), rp.MofNCompleteColumn(),
        rp.TextColumn("{task.fields[numbers]}"),
    )  # fmt: skip
    bar = rp.Progress(*columns, console=out)
    task = bar.add_task("preparing", total=None, numbers="")
    losses: list[float] = []
    with Live(bar, console=out, transient=True, refresh_per_second=4) as view:

        def show(now: TrainingProgress) -> None:
            bar.update(
                task, description="training", completed=now.step, total=now.steps,
                numbers=_numbers(now),
            )  # fmt: skip
            losses.append(now.loss)
            if live:
                view.update(Group(Text(chart(losses, out.width)), bar))

        def stage(text: str) -> None:
            bar.update(task, description=console.plain(text))

        with console.shows_stages("training", stage):
            yield show


def _lines(now: TrainingProgress) -> None:
    every = max(1, now.steps // _LINES)
    if now.step in (1, now.steps) or now.step % every == 0 or now.evaluated:
        console.note(f"step {now.step} of {now.steps}: {_numbers(now)}")


def _numbers(now: TrainingProgress) -> str:
    parts = [f"loss {now.mean_loss:.4f}"]
    if now.eval_loss is not None:
        parts.append(f"evaluation {now.eval_loss:.4f}")
    parts.append(f"{now.tokens_per_second:.0f} tokens/s")
    if now.step < now.steps and math.isfinite(now.seconds_left):
        parts.append(f"{_duration(now.seconds_left)} left")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {whole % 60:02} s"


def chart(losses: Sequence[float], width: int) -> str:
    """The losses as a line of braille dots, with its highest and lowest value."""
    across = 2 * max(8, min(_WIDTH, width - 12))
    count = min(len(losses), across)
    bounds = [len(losses) * i // count for i in range(count + 1)] if count else []
    means = [sum(losses[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means, default=0.0), max(means, default=1.0)
    cells = [[0] * (across // 2) for _ in range(_HEIGHT)]
    for i, value in enumerate(means):
        x = i * (across - 1) // max(count - 1, 1)
        share = (value - low) / (high - low) if high > low else 0.0
        y = round((1 - share) * (4 * _HEIGHT - 1))
        cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    rows = ["".join(chr(0x2800 + dots) for dots in row) for row in cells]
    labels = {0: f"{high:8.4f} ", _HEIGHT - 1: f"{low:8.4f} "}
    return "\n".join(labels.get(i, " " * 9) + row for i, row in enumerate(rows))
