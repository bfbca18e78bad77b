"""Many requests at once: tokens of all of them in each run, new ones admitted between runs.

    with rlx.Engine("model.gguf", requests=8) as engine:
        replies = [engine.submit(prompt, max_tokens=64) for prompt in prompts]
        for reply in replies:
            print(reply.wait().text)

One thread runs the model. A step takes one token of every request that generates and, for those
whose prompt is not in the cache yet, as much of it as fits. All tokens go through the products
together, so weights are read once for all requests.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlx.errors import InputError, OptionError
from rlx.formats.fetch import resolve
from rlx.models.adapter_files import add_adapter
from rlx.models.adapters import Adapter, find_adapter
from rlx.models.batch.batch_runner import BatchModel, Share
from rlx.models.batch.draw import Sampler
from rlx.models.batch.kv_pool import BETWEEN, CHUNK, Pool
from rlx.models.batch.page_allocator import Pages
from rlx.models.batch.paged_builder import PAGE
from rlx.models.batch.request import Reply, Request
from rlx.models.build_graph import ModelFile
from rlx.models.bundle import Shipped
from rlx.models.generation import Generation
from rlx.models.sampling import GenerationSettings
from rlx.runtime.machine import free_memory


class Engine:
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
        one, `cache_tokens` of all together (prompt and answer). `kv` ("f16"), `quant` and
        `artifact` are those of `rlx.load`; the artifact is made for a number of requests. Each
        request may ask for one of the `adapters` by name; tokens of all run together."""
        if waiting < 1:
            raise OptionError("must be positive", where="waiting", got=waiting)
        shipped = None if artifact is None else Shipped.open(Path(artifact))
        asked: dict[str, Any] = {"requests": requests, "context": context}
        asked |= {"cache_tokens": cache_tokens, "kv": kv}
        if shipped is not None:
            quant = _require_requests(shipped).setting("quant", quant)
            asked = {name: shipped.setting(name, value) for name, value in asked.items()}
        file = ModelFile.open(resolve(path_or_name), quant)
        self.adapters: dict[str, Adapter] = {}
        for path in adapters:
            add_adapter(self.adapters, path, file)
        asked["adapters"] = [*self.adapters.values()]
        pool = Pool.of(file, **asked, memory=free_memory() // 2)
        self.model = BatchModel(pool, device, threads, shipped)
        self.tokenizer = file.tokenizer()
        self.pages = Pages(pool.slots // PAGE, PAGE)
        self._most_waiting = waiting
        self._sampler = Sampler(file.config.vocab, self.model.executables)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._rows = list(range(pool.requests))  # of the table, that nobody uses
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="rlx-engine", daemon=True)
        self._thread.start()

    # -- what callers do --------------------------------------------------------------------------

    def submit(self, prompt: str | Sequence[int], **settings: Any) -> Reply:
        """Continue a prompt; the reply gives pieces of text as they are made."""
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return self._submit(tokens, GenerationSettings.of(settings))

    def chat(self, messages: Sequence[Any], **settings: Any) -> Reply:
        """Answer a conversation of {"role": …, "content": …}."""
        return self._submit(self.tokenizer.encode_chat(messages), GenerationSettings.of(settings))

    def generate(self, prompts: Sequence[str], **settings: Any) -> list[Generation]:
        """All answers, in the order of the prompts."""
        replies = [self.submit(prompt, **settings) for prompt in prompts]
        return [reply.wait() for reply in replies]

    def _submit(self, tokens: list[int], settings: GenerationSettings) -> Reply:
        adapter = find_adapter(self.adapters, settings.adapter)
        number = 0 if adapter is None else 1 + [*self.adapters.values()].index(adapter)
        vocab, context = self.model.config.vocab, self.model.pool.context
        request = Request(tokens, settings, self.tokenizer, vocab, context, number)
        self._check(request)
        with self._wake:
            if self._closed:
                raise InputError("the engine is closed", where=str(self.model.file.path))
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
        self.model.check(request.tokens)
        if request.settings.speculate:
            raise OptionError(
                "tokens are guessed for one request at a time", where="speculate",
                got=request.settings.speculate, hint="load the model with rlx.load",
            )  # fmt: skip
        if request.settings.overflow != "error":
            raise OptionError(
                "pages of several requests cannot shift", where="overflow",
                got=request.settings.overflow, expected="error",
            )  # fmt: skip
        if self.pages.needed(request.most) > self.pages.count:
            raise InputError(
                "the cache would not suffice for this request alone",
                got=f"{request.most} tokens", expected=f"at most {self.pages.count * PAGE}",
                hint="lower max_tokens, or make the engine with more cache_tokens=",
            )  # fmt: skip

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def close(self) -> None:
        """Cancel what runs, end the thread, free memory. A second call does nothing."""
        with self._wake:
            again, self._closed = self._closed, True
            self._wake.notify()
        self._thread.join()
        if not again:
            self._sampler.close()
            self.model.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        running, waiting = len(self._running), len(self._waiting)
        return f"<Engine {self.model.config.arch}, {running} running, {waiting} waiting>"

    # -- what the thread does ---------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not (self._closed or self._waiting or self._running):
                    self._wake.wait()
                self._admit()
                if self._closed:
                    break
            try:
                self._step()
            except BaseException as error:  # it belongs to those who wait for an answer
                for request in list(self._running):
                    self._leave(request)
                    request.fail(error)
        for request in [*self._running, *self._waiting]:
            request.finish("cancelled")

    def _admit(self) -> None:
        """Requests leave the queue in order, as pages and rows allow."""
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
        self.model.table[request.row, : len(pages)] = pages
        self._running.append(request)

    def _leave(self, request: Request) -> None:
        self.pages.end(request.pages)
        self._rows.append(request.row)
        self._running.remove(request)

    def _step(self) -> None:
        for request in [r for r in self._running if r.cancelled]:
            self._leave(request)
            request.finish("cancelled")
        shares = self._shares()
        if not shares:
            return
        picked = [share.request for share in shares if share.completes]
        rows = self.model.run(shares)
        for share in shares:
            self._learn(share)
        for number, request in enumerate(picked):
            token = self._sampler.draw(request, rows[number : number + 1])
            if request.receive(token, rows[number]):
                self._leave(request)

    def _shares(self) -> list[Share]:
        """What of each request runs now: single tokens first, then prompts as far as they fit."""
        single = [r for r in self._running if r.pending == 1]
        room = (BETWEEN if single else CHUNK) + len(single)
        shares = [Share(r, 1) for r in single]
        for request in self._running:
            left = room - sum(s.count for s in shares)
            if request.pending > 1 and left > 0:
                shares.append(Share(request, min(request.pending, left)))
        return shares

    def _learn(self, share: Share) -> None:
        """The cache holds the share now; pages that it filled may serve other requests."""
        request = share.request
        first, request.done = request.done // PAGE, request.done + share.count
        for number in range(first, request.done // PAGE):
            part = request.tokens[number * PAGE : (number + 1) * PAGE]
            self.pages.learn(request.pages, number, part, request.adapter)


def _require_requests(shipped: Shipped) -> Shipped:
    if "requests" not in shipped.require_kind("language").facts:
        raise OptionError(
            "the artifact was not made for many requests", where="artifact", got=shipped.path.name,
            hint="make another: rlx compile MODEL --out FILE --requests N",
        )  # fmt: skip
    return shipped
