"""`rlx serve`: models over HTTP."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlx.cli.options import BatchInvariant, DeviceName, Quant, Threads, model_names
from rlx.errors import OptionError, UnsupportedError

if TYPE_CHECKING:
    from rlx.serve.server_config import ServerConfig

_ADDRESS, _LIMITS, _LOADING = "Address and access", "Limits", "Loading"


def _option(panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **more)


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Files, folders, names that `rlx list` shows, or owner/name; NAME=MODEL has "
            "clients call it NAME.",
            autocompletion=model_names,
            show_default="smollm2-135m",
        ),
    ] = None,
    host: Annotated[
        str, _option(_ADDRESS, help="Address; others than loopback need a key or --no-auth.")
    ] = "127.0.0.1",
    port: Annotated[int, _option(_ADDRESS, help="0 takes a free one.", min=0, max=65535)] = 8000,
    api_keys: Annotated[
        list[str] | None,
        _option(_ADDRESS, "--api-key", help="A key that clients send. May be repeated; also "
                "RLX_API_KEYS, separated by commas."),
    ] = None,
    api_key_file: Annotated[
        Path | None, _option(_ADDRESS, metavar="FILE", help="A file with a key on each line.")
    ] = None,
    no_auth: Annotated[
        bool, _option(_ADDRESS, "--no-auth", help="Let everyone in who can reach the address.")
    ] = False,
    cors_origins: Annotated[
        list[str] | None,
        _option(_ADDRESS, "--cors-origin", metavar="ORIGIN",
                help="Let pages of this origin use the server. May be repeated."),
    ] = None,
    config: Annotated[
        Path | None,
        _option(_ADDRESS, metavar="FILE",
                help="Models, keys and limits as TOML; read again on SIGHUP."),
    ] = None,
    log_prompts: Annotated[
        bool, _option(_ADDRESS, "--log-prompts", help="Log the bodies of requests too.")
    ] = False,
    shutdown_seconds: Annotated[
        float, _option(_LIMITS, help="How long SIGTERM lets running requests finish.", min=0)
    ] = 30.0,
    request_seconds: Annotated[float, _option(_LIMITS, help="Longest time of an answer.")] = 600.0,
    write_seconds: Annotated[
        float, _option(_LIMITS, help="How long a client may not read its stream.")
    ] = 30.0,
    body_bytes: Annotated[int, _option(_LIMITS, help="Largest body of a request.")] = 8 << 20,
    connections: Annotated[int, _option(_LIMITS, help="Most connections at once.")] = 1024,
    most_tokens: Annotated[
        int | None, _option(_LIMITS, help="Most tokens of an answer.", show_default="the context")
    ] = None,
    default_tokens: Annotated[
        int | None,
        _option(_LIMITS, help="Most tokens of an answer where a request does not say.",
                show_default="the context"),
    ] = None,
    adapters: Annotated[
        list[str] | None,
        _option(_LOADING, "--load-adapter", metavar="[NAME=]PATH",
                help="A LoRA adapter of the first model; its name is a model for clients. May be "
                "repeated."),
    ] = None,
    idle_seconds: Annotated[
        float, _option(_LOADING, help="Unload a model that nobody used for so long; 0: never.")
    ] = 1800.0,
    preload: Annotated[
        bool, _option(_LOADING, "--preload", help="Load models at the start, not on first use.")
    ] = False,
    requests: Annotated[
        int | None, _option(_LOADING, help="Requests that run at once.", show_default="8")
    ] = None,
    waiting: Annotated[int, _option(_LOADING, help="Requests that may queue.", min=1)] = 1024,
    context: Annotated[
        int | None,
        _option(_LOADING, "--context", "-c", help="Most tokens of prompt and answer together.",
                show_default="4096, or what the model was trained for if that is less"),
    ] = None,
    cache_tokens: Annotated[
        int | None, _option(_LOADING, help="Tokens in the KV cache, of all requests together.")
    ] = None,
    kv: Annotated[
        str | None, _option(_LOADING, help="Type of the KV cache: f16, bf16 or f32.")
    ] = None,
    device: DeviceName = "cpu",
    threads: Threads = None,
    quant: Quant = None,
    batch_invariant: BatchInvariant = False,
) -> None:  # fmt: skip
    """Serve models over HTTP, with OpenAI's interface.

    Try: rlx serve smollm2-135m, then
    curl http://127.0.0.1:8000/v1/models
    """
    _require_libraries()
    from rlx.serve.model_pool import ModelSpec
    from rlx.serve.server import serve as run
    from rlx.serve.server_config import Limits, ServerConfig, find_keys, read_config

    options = {"requests": requests, "waiting": waiting, "context": context, "kv": kv,
               "cache_tokens": cache_tokens, "device": device, "threads": threads,
               "quant": quant, "batch_invariant": batch_invariant}  # fmt: skip
    named = models or ([] if config is not None else ["smollm2-135m"])
    specs = [ModelSpec.of(text, **options) for text in named]
    if adapters:
        if not specs:
            raise OptionError("an adapter without a model", where="--load-adapter")
        pairs = [ModelSpec.of(text) for text in adapters]
        told = tuple((p.name.removesuffix(".safetensors"), p.path) for p in pairs)
        specs[0] = replace(specs[0], adapters=told)
    limits = Limits(
        body_bytes=body_bytes, request_seconds=request_seconds, write_seconds=write_seconds,
        connections=connections, most_tokens=most_tokens, default_tokens=default_tokens,
    )  # fmt: skip

    def told_now() -> ServerConfig:
        base = ServerConfig(
            models=tuple(specs), host=host, port=port, no_auth=no_auth, limits=limits,
            keys=find_keys(tuple(api_keys or ()), api_key_file),
            cors_origins=tuple(cors_origins or ()), shutdown_seconds=shutdown_seconds,
            idle_seconds=idle_seconds, log_prompts=log_prompts, preload=preload,
        )  # fmt: skip
        return (base if config is None else read_config(config, base)).check()

    run(told_now(), told_now)


def _require_libraries() -> None:
    for name in ("starlette", "uvicorn", "prometheus_client"):
        try:
            __import__(name)
        except ImportError:
            raise UnsupportedError(
                f"serving needs the library {name!r}, which is not installed", where="rlx serve",
                hint="pip install starlette uvicorn prometheus_client",
            ) from None  # fmt: skip
