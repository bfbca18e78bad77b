"""Models of a server: loaded on first use, unloaded when idle or when memory runs short.

Everything but loading and closing happens in the event loop. One model is loaded at a time, in a
thread of its own; all who wait for it get it, or its error.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

from rlx.errors import OptionError, RlxError
from rlx.serve.api_errors import ApiError, shown
from rlx.serve.served_model import ServedModel, load_served
from rlx.support.machine import free_memory
from rlx.support.progress import Progress, reporting
from rlx.support.records import dataclass

_SPARE = 1.25  # how much more memory than its files a model takes
_PAUSE = 1.0  # seconds between two events of one load


@dataclass(frozen=True)
class ModelSpec:
    """A model to serve: what clients call it, where it is, how it is loaded."""

    name: str
    path: str
    aliases: tuple[str, ...] = ()
    adapters: tuple[tuple[str, str], ...] = ()  # names and paths
    options: Mapping[str, Any] = field(default_factory=dict)  # of rlx.Engine and rlx.load

    @staticmethod
    def of(text: str, **options: Any) -> ModelSpec:
        """From `MODEL` or `NAME=MODEL`, as the command line has it."""
        name, equals, path = text.partition("=")
        if not equals or not name or os.sep in name:
            name, path = "", text
        return ModelSpec(name or plain_name(path), path, (path,), options=options)

    def needed_bytes(self) -> int:
        """About how much memory the weights take; 0 where that is not known."""
        from rlx.formats.catalogue import find

        known = find(self.path)
        path = Path(self.path).expanduser()
        if known is not None:
            return sum(f.size for f in known.files)
        if path.is_dir():
            return sum(f.stat().st_size for f in path.glob("*.safetensors"))
        return path.stat().st_size if path.is_file() else 0


def plain_name(path: str) -> str:
    """What a model is called unless told: the name of its file or folder."""
    name = Path(path).name or path
    return name.removesuffix(".gguf")


class _Entry:
    """A model that may be loaded."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.model: ServedModel | None = None
        self.loading: asyncio.Future[ServedModel] | None = None
        self.users = 0
        self.used_at = time.monotonic()
        self.created = int(time.time())
        self.retired = False  # it is no longer served


class Lease:
    """The right to use a model: it is not unloaded before `release()`."""

    def __init__(self, entry: _Entry, model: ServedModel, adapter: str | None) -> None:
        self.model, self.adapter = model, adapter
        self._entry: _Entry | None = entry
        entry.users += 1

    def release(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            entry.users -= 1
            entry.used_at = time.monotonic()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(frozen=True)
class ModelInfo:
    """A name that clients may ask for."""

    name: str
    created: int
    loaded: bool
    parent: str | None = None  # of an adapter


class ModelPool:
    """Models by name. Its methods are called in the event loop."""

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        *,
        idle_seconds: float = 0.0,
        most_tokens: int | None = None,
        default_tokens: int | None = None,
        on_event: Callable[..., None] = lambda event, **_: None,
    ) -> None:
        """Models without users for `idle_seconds` are unloaded; 0: never. Answers have at most
        `most_tokens`, and `default_tokens` where a request does not say."""
        self.idle_seconds, self._on_event = idle_seconds, on_event
        self._limits = (most_tokens, default_tokens)
        self._entries: dict[str, _Entry] = {}
        self._retired: list[_Entry] = []
        self._names: dict[str, tuple[_Entry, str | None]] = {}
        self._loader = ThreadPoolExecutor(1, "rlx-load")
        self._turn = asyncio.Lock()
        self._closed = False
        self.configure(specs)

    # -- names --------------------------------------------------------------------------------

    def configure(self, specs: Sequence[ModelSpec]) -> None:
        """Serve these from now on. Models that stay as they are stay loaded."""
        names = [name for spec in specs for name in (spec.name, *dict(spec.adapters))]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise OptionError("two models or adapters of one name", where="models", got=twice)
        before, self._entries = self._entries, {}
        for spec in specs:
            kept = before.get(spec.name)
            if kept is not None and kept.spec == spec:
                self._entries[spec.name] = before.pop(spec.name)
            else:
                self._entries[spec.name] = _Entry(spec)
        for entry in before.values():
            entry.retired = True
            self._retired.append(entry)
        self._names = {}
        for entry in self._entries.values():
            for name, _ in entry.spec.adapters:
                self._names.setdefault(f"{entry.spec.name}:{name}", (entry, name))
                self._names.setdefault(name, (entry, name))
            for alias in entry.spec.aliases:
                self._names.setdefault(alias, (entry, None))
        self._names |= {name: (entry, None) for name, entry in self._entries.items()}

    def models(self) -> list[ModelInfo]:
        """All names that are listed, adapters after their model."""
        found = []
        for name, entry in self._entries.items():
            loaded = entry.model is not None
            found.append(ModelInfo(name, entry.created, loaded))
            found += [ModelInfo(a, entry.created, loaded, name) for a, _ in entry.spec.adapters]
        return found

    def loaded(self) -> list[ServedModel]:
        return [e.model for e in self._entries.values() if e.model is not None]

    def _find(self, name: str) -> tuple[_Entry, str | None]:
        found = self._names.get(name)
        if found is None:
            served = ", ".join(self._entries)
            raise ApiError(
                404, f"The model '{name[:200]}' does not exist; this server has {served}.",
                param="model", code="model_not_found",
            )  # fmt: skip
        return found

    # -- use ----------------------------------------------------------------------------------

    async def acquire(self, name: str, use: str) -> Lease:
        """A model for `use` (chat, completions, embeddings, rerank, tokens), loaded if need be."""
        entry, adapter = self._find(name)
        if self._closed:
            raise ApiError(503, "The server is shutting down.", code="shutting_down")
        entry.used_at = time.monotonic()
        model = entry.model
        if model is None:
            if entry.loading is None:
                entry.loading = asyncio.ensure_future(self._load(entry))
                entry.loading.add_done_callback(_retrieve)
            model = await asyncio.shield(entry.loading)
        if not model.is_for(use):
            kind = "an encoder" if model.is_encoder else "a language model"
            raise ApiError(
                400, f"The model '{name[:200]}' is {kind}: it is not for {use}.", param="model",
                code="unsupported_model",
            )  # fmt: skip
        return Lease(entry, model, adapter)

    async def _load(self, entry: _Entry) -> ServedModel:
        spec, began = entry.spec, time.monotonic()
        work = partial(_loaded, spec, self._limits, self._stages(spec))
        try:
            async with self._turn:
                await self._make_room(spec)
                try:
                    entry.model = await self._in_loader(work)
                except MemoryError:
                    await self._unload([e for e in self._idle() if e is not entry])
                    entry.model = await self._in_loader(work)
        except (RlxError, OSError, MemoryError, ValueError) as error:
            self._on_event("model_load_failed", model=spec.name, error=str(error))
            status = 503 if isinstance(error, MemoryError) else 500
            why = shown(error) if isinstance(error, RlxError) else type(error).__name__
            raise ApiError(
                status, f"The model '{spec.name}' could not be loaded: {why}", param="model",
                code="model_load_failed",
            ) from error  # fmt: skip
        finally:
            entry.loading = None
        seconds = time.monotonic() - began
        entry.used_at = time.monotonic()
        self._on_event("model_loaded", model=spec.name, seconds=round(seconds, 3))
        return entry.model

    def _stages(self, spec: ModelSpec) -> Progress:
        """Makes events of what a load is doing, one a second; a quick load makes none."""
        loop, due = asyncio.get_running_loop(), time.monotonic() + _PAUSE

        def tell(stage: str, done: int, total: int) -> None:
            nonlocal due
            if time.monotonic() >= due:
                due = time.monotonic() + _PAUSE
                fields = {"model": spec.name, "stage": stage, "done": done, "total": total}
                loop.call_soon_threadsafe(partial(self._on_event, "model_loading", **fields))

        return tell

    async def _in_loader(self, work: Callable[..., Any], *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._loader, work, *given)

    # -- memory -------------------------------------------------------------------------------

    def _idle(self) -> list[_Entry]:
        """Loaded models without users, the least recently used first."""
        entries = [*self._entries.values(), *self._retired]
        found = [e for e in entries if e.model is not None and not e.users]
        return sorted(found, key=lambda e: (not e.retired, e.used_at))

    async def _make_room(self, spec: ModelSpec) -> None:
        needed = int(spec.needed_bytes() * _SPARE)
        while needed > free_memory() and (idle := self._idle()):
            await self._unload(idle[:1])

    async def unload_idle(self) -> None:
        """Unload what nobody has used for long, and what is no longer served."""
        now, seconds = time.monotonic(), self.idle_seconds
        due = [e for e in self._idle() if e.retired or (seconds and now - e.used_at >= seconds)]
        if due:
            async with self._turn:
                await self._unload([e for e in due if not e.users])
        self._retired = [e for e in self._retired if e.model is not None or e.loading is not None]

    async def watch(self, seconds: float = 1.0) -> None:
        """Unload idle models for ever."""
        while True:
            await asyncio.sleep(seconds)
            await self.unload_idle()

    async def _unload(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            model, entry.model = entry.model, None
            if model is not None:
                await self._in_loader(model.close)
                self._on_event("model_unloaded", model=entry.spec.name)

    async def close(self) -> None:
        """Cancel all that runs and free all models."""
        self._closed = True
        async with self._turn:
            every = [*self._entries.values(), *self._retired]
            await self._unload([e for e in every if e.model is not None])
        self._loader.shutdown(wait=False)


def _loaded(
    spec: ModelSpec, limits: tuple[int | None, int | None], progress: Progress
) -> ServedModel:
    """Load a model, in the loader's thread."""
    with reporting(progress):
        return load_served(spec, *limits)


def _retrieve(done: asyncio.Future[ServedModel]) -> None:
    """Whoever waited may be gone: its error is no fault of the loop."""
    if not done.cancelled():
        done.exception()
