"""What a server is told: addresses, limits, keys and models, by options or a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any

from rlx.errors import OptionError, did_you_mean
from rlx.serve.auth import is_loopback, keys_of_file, keys_of_text
from rlx.serve.model_pool import ModelSpec
from rlx.support.records import dataclass
from rlx.support.settings import setting

_MODEL_OPTIONS = ("requests", "context", "cache_tokens", "kv", "quant", "device", "threads",
                  "waiting", "dtype", "batch_invariant")  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """Bounds on what one client can make the server do."""

    body_bytes: int = 8 << 20
    body_seconds: float = 30.0
    request_seconds: float = 600.0
    write_seconds: float = 30.0  # how long a reader may let its stream wait
    header_bytes: int = 64 << 10
    header_seconds: float = 30.0
    connections: int = 1024
    keep_alive_seconds: int = 30
    most_tokens: int | None = None  # of an answer
    default_tokens: int | None = None  # of an answer, where a request does not say
    most_choices: int = 16  # `n`
    most_inputs: int = 2048  # texts of one request for embeddings

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and value > 0):
                raise OptionError("not a number above 0", where=one.name, got=repr(value)[:60])


@dataclass(frozen=True)
class ServerConfig:
    """A server: where it listens, whom it lets in, what it serves."""

    models: tuple[ModelSpec, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = field(default=())
    no_auth: bool = False
    cors_origins: tuple[str, ...] = ()
    limits: Limits = Limits()
    shutdown_seconds: float = 30.0
    idle_seconds: float = 1800.0
    log_prompts: bool = False
    preload: bool = False

    def check(self) -> ServerConfig:
        """Raise where strangers could come in unasked."""
        if not (self.keys or self.no_auth or is_loopback(self.host)):
            raise OptionError(
                "others could use this server without a key", where="--host", got=self.host,
                hint="give --api-key (or RLX_API_KEYS), or --no-auth if everyone may",
            )  # fmt: skip
        return self


def find_keys(given: tuple[str, ...], file: Path | None) -> tuple[str, ...]:
    """Keys of the command line, of RLX_API_KEYS and of a file."""
    named = keys_of_text(setting("RLX_API_KEYS"))
    return (*given, *named, *(keys_of_file(file) if file is not None else ()))


def read_config(path: Path, base: ServerConfig) -> ServerConfig:
    """`base` with what a TOML file says: models, keys, limits."""
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"not TOML: {error}", where=str(path)) from None
    return config_of(told, path, base)


def config_of(told: Mapping[str, Any], path: Path, base: ServerConfig) -> ServerConfig:
    """`base` with the settings of a file at `path`."""
    known = ("models", "api_keys", "api_key_file", "limits")
    _require_known(told, known, path)
    models = tuple(_model(entry, path) for entry in _listed(told, "models", dict, path))
    keys = tuple(_listed(told, "api_keys", str, path))
    if "api_key_file" in told:
        keys += tuple(keys_of_file(path.parent / told["api_key_file"]))
    limits = _table(told, "limits", path)
    _require_known(limits, [f.name for f in fields(Limits)], path)
    return replace(
        base, models=(*base.models, *models), keys=(*base.keys, *keys),
        limits=replace(base.limits, **limits),
    )  # fmt: skip


def _model(entry: Mapping[str, Any], path: Path) -> ModelSpec:
    _require_known(entry, ("name", "path", "adapters", *_MODEL_OPTIONS), path)
    if not isinstance(entry.get("path"), str) or not isinstance(entry.get("name", ""), str):
        raise OptionError("a model without a path", where=str(path), got=entry.get("name"))
    options = {name: entry[name] for name in _MODEL_OPTIONS if name in entry}
    made = ModelSpec.of(entry["path"], **options)
    adapters = tuple((n, str(p)) for n, p in _table(entry, "adapters", path).items())
    return replace(made, name=entry.get("name", made.name), adapters=adapters)


def _listed(told: Mapping[str, Any], name: str, kind: type, path: Path) -> list[Any]:
    found = told.get(name, [])
    if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
        raise OptionError(
            f"{name} is not a list of such things", where=str(path), got=repr(found)[:60]
        )
    return found


def _table(told: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    found = told.get(name, {})
    if not isinstance(found, dict):
        raise OptionError(f"{name} is not a table", where=str(path), got=repr(found))
    return found


def _require_known(told: Mapping[str, Any], known: Any, path: Path) -> None:
    wrong = [name for name in told if name not in known]
    if wrong:
        raise OptionError(
            "unknown setting", where=str(path), got=wrong[0], expected=", ".join(known),
            hint=did_you_mean(wrong[0], known),
        )  # fmt: skip
