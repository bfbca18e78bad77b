"""Continuous batching: each run has tokens of all requests; new ones are admitted between runs.

    with rlx.Engine("model.gguf", requests=8) as engine:
        replies = [engine.submit(prompt, max_tokens=64) for prompt in prompts]
        for reply in replies:
            print(reply.wait().text)

One thread runs the model. A run takes one token of every request that decodes and, of prompts that
are not in the KV cache yet, as much as fits (chunked prefill). All tokens go through the matmuls
together, so weights are read once for all requests.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlx.backends.registry import get_backend
from rlx.errors import InputError, OptionError
from rlx.formats.fetch import resolve
from rlx.models.adapter_files import add_adapter
from rlx.models.adapters import Adapter, find_adapter
from rlx.models.arguments import Messages, check_paths, prompt_tokens, require_count, several_texts
from rlx.models.batch.batch_runner import BatchRunner, ScheduledTokens
from rlx.models.batch.kv_pool import CHUNK, MIXED_CHUNK, KVPool
from rlx.models.batch.page_allocator import PageAllocator
from rlx.models.batch.paged_builder import PAGE
from rlx.models.batch.request import Reply, Request
from rlx.models.bundle import ModelBundle
from rlx.models.generation import Generation
from rlx.models.model_file import ModelFile
from rlx.models.sampling import GenerationSettings, recommended_sampling
from rlx.support.machine import free_memory
from rlx.support.pickling import Unpicklable


class Engine(Unpicklable):
    """Admits requests and runs them together. Safe to call from several threads."""

    def __init__(
        self,
        path_or_name: str | os.PathLike[str] = "smollm2-135m",
        *,
        requests: int | None = None,
        context: int | None = None,
        cache_tokens: int | None = None,
        kv: str | None = None,
        quant: str | None = None,
        device: str = "cpu",
        threads: int | None = None,
        waiting: int = 1024,
        artifact: str | os.PathLike[str] | None = None,
        adapters: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        """`requests` (8) run at once, `waiting` more may queue; `context` is the most tokens of
        one, as in `rlx.load`, `cache_tokens` of all together (prompt and output). `kv` ("f16"),
        `quant` and `artifact` are those of `rlx.load`; the artifact is made for a number of
        requests. Each request may name one of the `adapters`; tokens of all run together."""
        require_count("waiting", waiting)
        check_paths(adapters, artifact=artifact)
        bundle = None if artifact is None else ModelBundle.open(Path(artifact))
        asked: dict[str, Any] = {"requests": requests, "context": context}
        asked |= {"cache_tokens": cache_tokens, "kv": kv}
        if bundle is not None:
            quant = _require_requests(bundle).setting("quant", quant)
            asked = {name: bundle.setting(name, value) for name, value in asked.items()}
        file = ModelFile.open(resolve(path_or_name), quant)
        self.adapters: dict[str, Adapter] = {}
        for path in adapters:
            add_adapter(self.adapters, path, file)
        asked["adapters"] = [*self.adapters.values()]
        on_device = get_backend(device).allocator.free_bytes()
        memory = (free_memory() if on_device is None else on_device) // 2
        pool = KVPool.of(file, **asked, memory=memory)
        self.runner = BatchRunner(pool, device, threads, bundle)
        self.tokenizer, self.sampling = file.tokenizer(), recommended_sampling(file)
        self.pages = PageAllocator(pool.slots // PAGE, PAGE)
        self._most_waiting = waiting
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._rows = list(range(pool.requests))  # of the page table, that are free
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="rlx-engine", daemon=True)
        self._thread.start()

    # -- called by users ----------------------------------------------------------------------

    def submit(self, prompt: str | Sequence[int], **settings: Any) -> Reply:
        """Continue a prompt; the reply streams its text."""
        return self._submit(prompt_tokens(self.tokenizer, prompt), self.settings(**settings))

    def chat(self, messages: Messages, *, parse_special: bool = False, **settings: Any) -> Reply:
        """Answer a conversation of {"role": …, "content": …}. Special tokens written out in
        messages are text, unless `parse_special`."""
        tokens = self.tokenizer.encode_chat(messages, parse_special=parse_special)
        return self._submit(tokens, self.settings(**settings))

    def settings(self, **options: Any) -> GenerationSettings:
        """The settings of a call with these options: what is not given is what the model
        recommends (`sampling`), else a default."""
        return GenerationSettings.of(self.sampling | options)

    def generate(self, prompts: Sequence[str], **settings: Any) -> list[Generation]:
        """All generations, in the order of the prompts."""
        replies = [self.submit(prompt, **settings) for prompt in several_texts(prompts)]
        return [reply.wait() for reply in replies]

    def _submit(self, tokens: list[int], settings: GenerationSettings) -> Reply:
        adapter = find_adapter(self.adapters, settings.adapter)
        number = 0 if adapter is None else 1 + [*self.adapters.values()].index(adapter)
        vocab, context = self.runner.config.vocab, self.runner.pool.context
        request = Request(tokens, settings, self.tokenizer, vocab, context, number)
        self._check(request)
        with self._wake:
            if self._closed:
                raise InputError("the engine is closed", where=str(self.runner.model.path))
            if len(self._waiting) >= self._most_waiting:
                raise InputError(
                    "too many requests wait already", got=len(self._waiting),
                    expected=f"below {self._most_waiting}", hint="try later, or raise waiting=",
                )  # fmt: skip
            if not request.settings.max_tokens:
                request.finish("length")
            else:
                self._waiting.append(request)
            self._wake.notify()
        return Reply(request, self._notify)

    def _check(self, request: Request) -> None:
        self.runner.check(request.tokens)
        if request.settings.speculate:
            raise OptionError(
                "speculative decoding is for one request at a time", where="speculate",
                got=request.settings.speculate, hint="load the model with rlx.load",
            )  # fmt: skip
        if request.settings.overflow != "error":
            raise OptionError(
                "pages of a shared KV cache cannot shift", where="overflow",
                got=request.settings.overflow, expected="error",
            )  # fmt: skip
        if self.pages.needed(request.most) > self.pages.count:
            raise InputError(
                "the KV cache would not suffice for this request alone",
                got=f"{request.most} tokens", expected=f"at most {self.pages.count * PAGE}",
                hint="lower max_tokens, or make the engine with more cache_tokens=",
            )  # fmt: skip

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def close(self) -> None:
        """Cancel all requests, end the thread, free memory. A second call does nothing."""
        with self._wake:
            again, self._closed = self._closed, True
            self._wake.notify()
        self._thread.join()
        if not again:
            self.runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        running, waiting = len(self._running), len(self._waiting)
        return f"<Engine {self.runner.config.arch}, {running} running, {waiting} waiting>"

    # -- the scheduler: its own thread --------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not (self._closed or self._waiting or self._running):
                    self._wake.wait()
                self._admit()
                if self._closed:
                    break
            try:
                self._run_once()
            except BaseException as error:  # it belongs to those who wait for a reply
                for request in list(self._running):
                    self._leave(request)
                    request.fail(error)
        for request in [*self._running, *self._waiting]:
            request.finish("cancelled")

    def _admit(self) -> None:
        """Admit requests from the queue in order, as pages and rows allow."""
        while self._waiting and self._rows:
            request = self._waiting[0]
            if not request.cancelled:
                pages = self.pages.begin(request.tokens, request.most, request.adapter)
                if pages is None:
                    return
                self._enter(request, pages)
            else:
                request.finish("cancelled")
            self._waiting.popleft()

    def _enter(self, request: Request, pages: list[int]) -> None:
        shared = len(self.pages.shared(request.tokens, request.adapter)) * PAGE
        request.pages, request.row, request.done = pages, self._rows.pop(), shared
        request.result.reused_tokens = shared
        self.runner.page_table[request.row, : len(pages)] = pages
        self._running.append(request)

    def _leave(self, request: Request) -> None:
        self.pages.end(request.pages)
        self._rows.append(request.row)
        self._running.remove(request)

    def _run_once(self) -> None:
        for request in [r for r in self._running if r.cancelled]:
            self._leave(request)
            request.finish("cancelled")
        scheduled = self._schedule()
        if not scheduled:
            return
        picked = [part.request for part in scheduled if part.completes]
        rows = self.runner.run(scheduled)
        for part in scheduled:
            self._cache_pages(part)
        for number, request in enumerate(picked):
            token = self.runner.sample(request, rows[number : number + 1])
            if request.receive(token, rows[number]):
                self._leave(request)

    def _schedule(self) -> list[ScheduledTokens]:
        """The tokens of the next run: decodes first, then prompts as far as they fit."""
        decodes = [r for r in self._running if r.pending == 1]
        room = (MIXED_CHUNK if decodes else CHUNK) + len(decodes)
        scheduled = [ScheduledTokens(r, 1) for r in decodes]
        for request in self._running:
            left = room - sum(s.count for s in scheduled)
            if request.pending > 1 and left > 0:
                scheduled.append(ScheduledTokens(request, min(request.pending, left)))
        return scheduled

    def _cache_pages(self, part: ScheduledTokens) -> None:
        """The KV cache holds these tokens now; pages that they filled may serve other requests."""
        request = part.request
        first, request.done = request.done // PAGE, request.done + part.count
        for number in range(first, request.done // PAGE):
            tokens = request.tokens[number * PAGE : (number + 1) * PAGE]
            self.pages.learn(request.pages, number, tokens, request.adapter)


def _require_requests(bundle: ModelBundle) -> ModelBundle:
    if "requests" not in bundle.require_kind("language").settings:
        raise OptionError(
            "the artifact was not made for batching", where="artifact", got=bundle.path.name,
            hint="make another: rlx compile MODEL --out FILE --requests N",
        )  # fmt: skip
    return bundle
