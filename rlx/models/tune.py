"""Autotuning of a model on this machine: its programs, run as they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlx.backends.inspection import TunedProgram
from rlx.backends.registry import get_backend
from rlx.models.benchmark import USUAL_PROMPT, EncoderRuns, LanguageRuns
from rlx.models.builder import SAMPLE, EntryPoint
from rlx.models.encoder_model import EncoderModel
from rlx.models.language_model import LanguageModel
from rlx.runtime.compiled import CompiledGraph

_DECODED = 4  # tokens of a measurement
Progress = Callable[[str, str], None]


def tune_model(
    model: LanguageModel | EncoderModel,
    *,
    prompt: int | None = None,
    batch: int = 8,
    progress: Progress = lambda part, kernel: None,
) -> Mapping[str, TunedProgram]:
    """Measure other tile sizes and prefetch distances of the kernels of a model, and store the
    best. They hold for every model that has the same kernels, from the next start on; this one has
    them at once. Results stay the same, bit for bit.

    Measured are "prefill" of `prompt` tokens (128) and "decode" behind them; of an encoder,
    "encode" of `batch` texts of `prompt` tokens each. `progress` is told part and kernel.
    """
    if isinstance(model, LanguageModel):
        return _tune_language_model(model, prompt or USUAL_PROMPT, progress)
    return _tune_encoder(model, prompt or min(USUAL_PROMPT, model.max_tokens), batch, progress)


def _tune_language_model(
    model: LanguageModel, prompt: int, progress: Progress
) -> dict[str, TunedProgram]:
    runs = LanguageRuns(model)
    runs.check(prompt, _DECODED)
    runs.prefill(prompt)
    graphs = model.runner.executables(SAMPLE)

    def decode() -> None:
        del model.runner.tokens[prompt:]
        runs.decode(_DECODED)

    def prefill() -> None:
        runs.prefill(prompt)

    found = {"prefill": _tune(model, graphs.prefill, prefill, "prefill", progress)}
    prefill()
    return found | {"decode": _tune(model, graphs.decode, decode, "decode", progress)}


def _tune_encoder(
    model: EncoderModel, tokens: int, texts: int, progress: Progress
) -> dict[str, TunedProgram]:
    runs = EncoderRuns(model)

    def encode() -> None:
        runs.encode(texts, tokens)

    encode()
    graph = model.runner.graph(EntryPoint(model.runner.output), tokens)
    return {"encode": _tune(model, graph, encode, "encode", progress)}


def _tune(
    model: LanguageModel | EncoderModel,
    graph: CompiledGraph,
    run: Callable[[], None],
    part: str,
    progress: Progress,
) -> TunedProgram:
    runner = model.runner
    inspection = get_backend(runner.device).inspection()
    return inspection.tune(
        graph.executable, runner.options, run, lambda kernel: progress(part, kernel)
    )


def forget_tuning(device: str = "cpu") -> None:
    """Delete what tuning stored for a device: kernels get their defaults again."""
    get_backend(device).inspection().forget_tuning()
