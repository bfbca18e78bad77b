"""Options shared by several commands, as dataclasses: `spread` turns their fields into options.

    @spread
    def run(prompt: str, sampling: Sampling) -> None: ...

None means that an option was not given; the models have the defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from rlx.errors import OptionError
from rlx.support.records import dataclass

_LOADING, _SAMPLING = "Loading", "Generation"


def _load(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=_LOADING, **more)


def _sample(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=_SAMPLING, **more)


def _devices() -> list[str]:
    from rlx.backends.registry import available_devices

    return available_devices()


def model_names(incomplete: str = "") -> list[str]:
    """Shell completion: the catalogue, folders and GGUF files."""
    from rlx.formats.catalogue import CATALOGUE

    folder, slash, _ = incomplete.rpartition("/")
    try:
        beside = sorted(Path(folder + slash).expanduser().iterdir())
    except OSError:
        beside = []
    names = [f"{p.name}/" if p.is_dir() else p.name for p in beside]
    files = [folder + slash + n for n in names if n.endswith(("/", ".gguf")) and n[0] != "."]
    return [name for name in (*CATALOGUE, *files) if name.startswith(incomplete)]


Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
PromptTokens = Annotated[
    int | None,
    typer.Option(
        "--prompt",
        "-p",
        min=2,
        help="Tokens of the prompt, or of each text.",
        show_default="128, or as many as an encoder reads",
    ),
]
BatchSize = Annotated[int, typer.Option("--batch", "-b", min=1, help="Batch size, for encoders.")]


def _model(default: str | bool) -> Any:
    return typer.Argument(
        metavar="MODEL",
        help="A GGUF file, a Hugging Face folder, a name that `rlx list` shows, or owner/name.",
        autocompletion=model_names,
        show_default=default,
    )


ModelName = Annotated[str, _model("smollm2-135m")]
RequiredModel = Annotated[str, _model(False)]


Artifact = Annotated[
    Path | None,
    _load(
        "--artifact", "-a",
        metavar="FILE",
        help="Run a bundle that `rlx compile` made of this model. It is code: trust its maker.",
    ),
]  # fmt: skip


DeviceName = Annotated[
    str,
    _load(
        "--device", "-d",
        help="cpu, cuda (an NVIDIA GPU), or reference (NumPy: slow, exact).",
        autocompletion=_devices,
    ),
]  # fmt: skip
Threads = Annotated[
    int | None,
    _load(
        "--threads", "-t",
        help="Worker threads.", show_default="RLX_NUM_THREADS, or every physical core",
    ),
]  # fmt: skip
Quant = Annotated[
    str | None,
    _load("--quant", "-q", help="Quantise float weights: Q8_0, Q4_K_M, int8, …"),
]


BatchInvariant = Annotated[
    bool,
    _load(
        "--batch-invariant",
        help="On GPUs, the same bits alone, beside others and in chunks. CPUs give them anyway.",
    ),
]


@dataclass(frozen=True)
class Loading:
    """How a model is loaded."""

    device: DeviceName = "cpu"
    context: Annotated[
        int | None,
        _load(
            "--context", "-c",
            help="Context length: the most tokens of prompt and answer together.",
            show_default="4096, or what the model was trained for if that is less",
        ),
    ] = None  # fmt: skip
    threads: Threads = None
    kv: Annotated[str, _load("--kv", help="Type of the KV cache: f16, bf16, f32 or q8_0.")] = "f16"


@dataclass(frozen=True)
class Measuring(Loading):
    """How `rlx bench` loads a model."""

    artifact: Artifact = None
    quant: Quant = None


@dataclass(frozen=True)
class Running(Measuring):
    """How a model that generates text is loaded."""

    draft: Annotated[
        str | None,
        _load(
            "--draft",
            metavar="MODEL",
            help="Speculative decoding: a smaller draft model with the same vocabulary.",
            autocompletion=model_names,
        ),
    ] = None
    adapters: Annotated[
        list[Path] | None,
        _load(
            "--load-adapter",
            metavar="PATH",
            help="A LoRA adapter, to be selected with --adapter. May be repeated.",
        ),
    ] = None
    batch_invariant: BatchInvariant = False


@dataclass(frozen=True)
class Sampling:
    """Generation settings; the fields are those of `rlx.GenerationSettings`."""

    max_tokens: Annotated[
        int | None,
        _sample("--max-tokens", "-n", help="Longest answer, in tokens.", show_default="256"),
    ] = None
    temperature: Annotated[
        float | None,
        _sample(help="0 is greedy; higher is more random.", show_default="the model's, or 0.8"),
    ] = None
    top_k: Annotated[
        int | None,
        _sample(
            help="Sample among the K most likely tokens; 0: all.",
            show_default="the model's, or 40",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        _sample(
            help="Nucleus sampling: the smallest set of tokens with this probability.",
            show_default="the model's, or 0.95",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        _sample(
            help="Drop tokens below this fraction of the top probability.",
            show_default="the model's, or 0.0",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _sample(
            help="Above 1: repeated tokens are less likely.", show_default="the model's, or 1.0"
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        _sample(help="Subtracted from the logit of each token in the answer.", show_default="0.0"),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        _sample(help="Subtracted for each time a token is in the answer.", show_default="0.0"),
    ] = None
    seed: Annotated[
        int | None,
        _sample(help="Random seed: the same seed gives the same answer.", show_default="random"),
    ] = None
    stop: Annotated[list[str] | None, _sample(help="Stop before this text. May be repeated.")] = (
        None
    )
    stop_tokens: Annotated[
        list[int] | None,
        _sample("--stop-token", help="Stop at this token id. May be repeated."),
    ] = None
    shown_special: Annotated[
        list[int] | None,
        _sample("--shown-special", help="Print this special token too. May be repeated."),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        _sample(metavar="ID=NUMBER", help="Added to the logit of a token. May be repeated."),
    ] = None
    logprobs: Annotated[
        int | None,
        _sample(
            help="Log probabilities of the N most likely tokens, for --json.", show_default="0"
        ),
    ] = None
    overflow: Annotated[
        str | None,
        _sample(
            help="When the context is full: error, or shift (drop the older half).",
            show_default="error",
        ),
    ] = None
    keep: Annotated[
        int | None,
        _sample(
            metavar="N",
            help="First tokens that a shift keeps, beside BOS: -1 the prompt. The system message "
            "unless given.",
        ),
    ] = None
    speculate: Annotated[
        int | None,
        _sample(help="Speculative decoding: draft tokens per step; with --draft, 4 unless given."),
    ] = None
    adapter: Annotated[str | None, _sample(metavar="NAME", help="A loaded LoRA adapter.")] = None
    json_schema: Annotated[
        str | None,
        _sample(metavar="FILE_OR_TEXT", help="Structured output: JSON of this schema."),
    ] = None
    regex: Annotated[str | None, _sample(help="Structured output: a regular expression.")] = None
    grammar: Annotated[
        str | None,
        _sample(metavar="FILE_OR_TEXT", help="Structured output: a GBNF or Lark grammar."),
    ] = None

    def settings(self) -> dict[str, Any]:
        """The settings that were given, validated."""
        from rlx.models.sampling import GenerationSettings

        asked = {f.name: getattr(self, f.name) for f in fields(self)}
        asked["stop"] = tuple(self.stop) if self.stop else None
        asked["stop_tokens"] = frozenset(self.stop_tokens) if self.stop_tokens else None
        asked["shown_special"] = frozenset(self.shown_special) if self.shown_special else None
        asked["logit_bias"] = parse_bias(self.logit_bias) if self.logit_bias else None
        asked |= {n: file_or_text(getattr(self, n)) for n in ("json_schema", "grammar")}
        given = {name: value for name, value in asked.items() if value is not None}
        GenerationSettings(**given)
        return given


def file_or_text(given: str | None) -> str | None:
    """The content of a file if the argument names one, else the argument itself."""
    try:
        if given is not None and Path(given).is_file():
            return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError):  # too long for a file name, or with a NUL
        pass
    return given


def parse_bias(pairs: list[str]) -> dict[int, float]:
    """`["42=-5", …]` as a mapping."""
    found = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            found[int(token)] = float(value)
        except ValueError:
            raise OptionError(
                "not a bias", where="logit_bias", got=repr(pair), expected="ID=NUMBER"
            ) from None
    return found


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of its dataclass parameters as options."""
    hints = get_type_hints(command, include_extras=True)
    records: dict[str, Any] = {n: kind for n, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = records.get(parameter.name)
        if kind is None:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        types = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            parameters.append(
                parameter.replace(
                    name=field.name, annotation=types[field.name], default=field.default
                )
            )
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]

    @wraps(command)
    def call(**given: Any) -> None:
        made = {
            name: kind(**{f.name: given.pop(f.name) for f in fields(kind)})
            for name, kind in records.items()
        }
        command(**given, **made)

    del call.__wrapped__  # its signature is not what users see
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call
