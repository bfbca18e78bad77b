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
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlx.backends.registry import get_backend
from rlx.errors import EngineClosedError, InputError, OptionError, UnsupportedError
from rlx.formats.fetch import resolve
from rlx.models.adapter_files import add_adapter
from rlx.models.adapters import Adapter, find_adapter
from rlx.models.arguments import (
    Messages,
    check_paths,
    check_progress,
    prompt_tokens,
    require_count,
    require_seconds,
    several_texts,
)
from rlx.models.batch.batch_runner import BatchRunner
from rlx.models.batch.engine_stats import EngineCounts, EngineStats
from rlx.models.batch.kv_pool import MIXED_CHUNK, KVPool
from rlx.models.batch.page_allocator import PageAllocator
from rlx.models.batch.paged_builder import PAGE
from rlx.models.batch.reply import Reply, wake
from rlx.models.batch.request import Request, Terms
from rlx.models.batch.scheduler import ScheduledTokens, Scheduler, tokens_of
from rlx.models.batch.step_result import StepResult, on_host
from rlx.models.batch.step_timer import SECONDS, StepTimer
from rlx.models.bundle import ModelBundle
from rlx.models.generation import Generation
from rlx.models.model_file import ModelFile
from rlx.models.sampling import GenerationSettings, recommended_sampling
from rlx.support.machine import free_memory
from rlx.support.pickling import Unpicklable
from rlx.support.progress import Progress, silent


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
        token_seconds: float = SECONDS,
        batch_invariant: bool = False,
        artifact: str | os.PathLike[str] | None = None,
        adapters: Sequence[str | os.PathLike[str]] = (),
        progress: Progress | None = None,
    ) -> None:
        """`requests` (8) run at once, `waiting` more may queue; `context` is the most tokens of
        one, as in `rlx.load`, `cache_tokens` of all together (prompt and output). `kv` ("f16"),
        `quant` and `artifact` are those of `rlx.load`; the artifact is made for a number of
        requests. Each request may name one of the `adapters`; tokens of all run together. Prompts
        are prefilled in chunks so that others get a token every `token_seconds`, if they can.
        `batch_invariant` makes GPUs give each request the bits that it has alone, as CPUs do.
        `progress` is that of `rlx.load`."""
        require_count("waiting", waiting)
        require_seconds("token_seconds", token_seconds)
        check_paths(adapters, artifact=artifact)
        check_progress(progress)
        bundle = None if artifact is None else ModelBundle.open(Path(artifact))
        if bundle is not None and batch_invariant:
            raise OptionError(
                "an artifact has code of its own", where="batch_invariant", got=batch_invariant
            )
        asked: dict[str, Any] = {"requests": requests, "context": context}
        asked |= {"cache_tokens": cache_tokens, "kv": kv}
        if bundle is not None:
            quant = _require_requests(bundle).setting("quant", quant)
            asked = {name: bundle.setting(name, value) for name, value in asked.items()}
        file = ModelFile.open(resolve(path_or_name, progress=progress or silent), quant)
        self.adapters: dict[str, Adapter] = {}
        for path in adapters:
            add_adapter(self.adapters, path, file)
        asked["adapters"] = [*self.adapters.values()]
        on_device = get_backend(device).allocator.free_bytes()
        memory = (free_memory() if on_device is None else on_device) // 2
        pool = KVPool.of(file, **asked, memory=memory, device=device)
        self.runner = BatchRunner(pool, device, threads, bundle, progress, batch_invariant)
        self.tokenizer, self.sampling = file.tokenizer(), recommended_sampling(file)
        is_recurrent = file.config.recurrent is not None  # then a prefix has a state beside pages
        self.pages = PageAllocator(pool.slots // PAGE, PAGE, share=not is_recurrent)
        timer = StepTimer(pool.most_tokens, MIXED_CHUNK, token_seconds)
        self._scheduler = Scheduler(self.pages, pool.requests, waiting, timer, pool.drafts)
        self._counts = EngineCounts()
        self._cancelled: deque[Request] = deque()
        self._wake = threading.Condition()
        self._closed = self._draining = False
        self._thread = threading.Thread(target=self._serve, name="rlx-engine", daemon=True)
        self._thread.start()

    # -- called by users ----------------------------------------------------------------------

    def submit(
        self, prompt: str | Sequence[int], *, priority: int = 0, deadline: float | None = None,
        user: str | None = None, prompt_logprobs: int | None = None, **settings: Any,
    ) -> Reply:  # fmt: skip
        """Continue a prompt; the reply streams its text.

        A higher `priority` goes first, users get equal shares, and a request that is not ready
        after `deadline` seconds ends with the finish reason "timeout". A full queue raises
        `QueueFullError`, which says when to try again. `prompt_logprobs` has log probabilities of
        the prompt's tokens computed, and of so many of the likeliest in place of each."""
        terms = Terms(priority, deadline, user)
        if prompt_logprobs is not None:
            require_count("prompt_logprobs", prompt_logprobs, 0, 1000)
        tokens = prompt_tokens(self.tokenizer, prompt)
        return self._submit(tokens, self.settings(**settings), terms, prompt_logprobs)

    def chat(
        self, messages: Messages, *, tools: Sequence[Any] | None = None,
        template_options: Mapping[str, Any] | None = None, parse_special: bool = False,
        priority: int = 0, deadline: float | None = None, user: str | None = None, **settings: Any,
    ) -> Reply:  # fmt: skip
        """Answer a conversation of {"role": …, "content": …}. Special tokens written out in
        messages are text, unless `parse_special`; `tools` and `template_options` are given to the
        chat template. The rest is as in `submit`."""
        terms = Terms(priority, deadline, user)
        tokens = self.tokenizer.encode_chat(
            messages, tools=tools, parse_special=parse_special, **(template_options or {})
        )
        return self._submit(tokens, self.settings(**settings), terms)

    def settings(self, **options: Any) -> GenerationSettings:
        """The settings of a call with these options: what is not given is what the model
        recommends (`sampling`), else a default."""
        return GenerationSettings.of(self.sampling | options)

    def generate(self, prompts: Sequence[str], **settings: Any) -> list[Generation]:
        """All generations, in the order of the prompts."""
        replies = [self.submit(prompt, **settings) for prompt in several_texts(prompts)]
        return [reply.wait() for reply in replies]

    def _submit(
        self, tokens: list[int], settings: GenerationSettings, terms: Terms,
        prompt_logprobs: int | None = None,
    ) -> Reply:  # fmt: skip
        adapter = find_adapter(self.adapters, settings.adapter)
        number = 0 if adapter is None else 1 + [*self.adapters.values()].index(adapter)
        vocab, context = self.runner.config.vocab, self.runner.pool.context
        self.runner.check(tokens)
        request = Request(
            tokens, settings, self.tokenizer, vocab, context, number, terms, prompt_logprobs
        )
        self._check(request)
        self._require_open()
        self.runner.sampler.prepare(request)
        with self._wake:
            self._require_open()
            self._sweep_queue()
            if not request.settings.max_tokens and request.scores is None:
                request.finish("length")
                self._counts.ended("length")
            else:
                self._scheduler.add(request)
            self._wake.notify_all()
        cancel = partial(self._cancelled.append, request)
        return Reply(request.outlet, bool(settings.logprobs), cancel)

    def _require_open(self) -> None:
        if self._closed or self._draining:
            what = "the engine is closed" if self._closed else "the engine finishes and closes"
            raise EngineClosedError(what, where=str(self.runner.model.path))

    def _check(self, request: Request) -> None:
        if request.settings.speculate and not self.runner.pool.drafts:
            raise UnsupportedError(
                "speculative decoding needs a KV cache; a recurrent state cannot be rewound",
                where=self.runner.config.arch, hint="generate without speculate=",
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

    def stats(self) -> EngineStats:
        """What the engine does now, and what it has done so far."""
        with self._wake:
            return EngineStats.of(self._scheduler, self._counts)

    def drain(self, seconds: float | None = None) -> bool:
        """Refuse new requests and finish those that run and wait; cancel what is left after some
        seconds. Whether all were finished. `close()` then frees the memory."""
        with self._wake:
            self._draining = True
            done = self._wake.wait_for(lambda: self._closed or not self._scheduler.is_busy, seconds)
            self._cancelled.extend([*self._scheduler.running, *self._scheduler.queue])
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._closed or not self._scheduler.is_busy)
        return done

    def close(self) -> None:
        """Cancel all requests, end the thread, free memory. A second call does nothing."""
        with self._wake:
            again, self._closed = self._closed, True
            self._wake.notify_all()
        self._thread.join()
        if not again:
            self.runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        running, waiting = len(self._scheduler.running), len(self._scheduler.queue)
        return f"<Engine {self.runner.config.arch}, {running} running, {waiting} waiting>"

    # -- its own thread -----------------------------------------------------------------------

    def _serve(self) -> None:
        reason, found = "cancelled", None
        try:
            self._loop()
        except BaseException as error:  # nobody may wait for ever
            reason, found = "error", error
        with self._wake:
            self._closed = True
            self._end([*self._scheduler.running, *self._scheduler.queue], reason, found)
            self._wake.notify_all()  # who drains

    def _loop(self) -> None:
        """Run until the engine is closed."""
        scheduler = self._scheduler
        while True:
            with self._wake:
                self._sweep()
                while not (self._closed or scheduler.is_busy):
                    self._wake.notify_all()  # who drains
                    self._wake.wait()
                if self._closed:
                    return
                self._sweep()
                for request in scheduler.admit():
                    self._counts.admitted(request)
                    self.runner.page_table[request.row, : len(request.pages)] = request.pages
                scheduled = scheduler.next_tokens()
            try:
                self._run(scheduled)
            except BaseException as error:  # it belongs to those who wait for a reply
                with self._wake:
                    self._end([part.request for part in scheduled], "error", error)

    def _sweep(self) -> None:
        """Let go of requests that were cancelled, or whose time is over."""
        while self._cancelled:
            self._end([self._cancelled.popleft()], "cancelled")
        self._end(self._scheduler.expired(), "timeout")

    def _sweep_queue(self) -> None:
        """Let go of requests that were cancelled while they waited; others may be in a run."""
        cancelled = [self._cancelled.popleft() for _ in range(len(self._cancelled))]
        self._cancelled.extend(r for r in cancelled if r.row >= 0)
        self._end([r for r in cancelled if r.row < 0], "cancelled")

    def _end(
        self, requests: Sequence[Request], reason: str, error: BaseException | None = None
    ) -> None:
        live = [request for request in requests if not request.ended]
        for request in live:
            self._scheduler.remove(request)
            request.finish(reason, error)
            self._counts.ended(reason)
        wake(request.outlet for request in live)

    def _run(self, scheduled: Sequence[ScheduledTokens]) -> None:
        if not scheduled:
            return
        start = time.perf_counter()
        if self.runner.can_follow(scheduled):
            self._run_queued(scheduled, start)
        else:
            self._take_in(scheduled, self.runner.run(scheduled), start)

    def _run_queued(self, scheduled: Sequence[ScheduledTokens], start: float) -> None:
        """Runs of the same requests, each queued before the tokens of the one before are read, so
        that the device goes on while the host is at them. A request that ends has a token too many
        in the run that is queued then: nobody looks at it, and its place in the KV cache is behind
        the tokens that others may share."""
        run = self.runner.queue(scheduled)
        parts = scheduled
        while True:
            goes_on = len(parts) == len(scheduled) and self._goes_on(parts)
            following = self.runner.queue_next(run) if goes_on else None
            result = run.result()
            if len(parts) < len(scheduled):
                pairs = zip(scheduled, result.tokens or (), strict=True)
                result = StepResult(result.logits, [t for p, t in pairs if p in parts])
            self._take_in(parts, result, start)
            parts = [part for part in parts if part.request.row >= 0]
            if following is None or not parts:
                return
            run, start = following, time.perf_counter()

    def _goes_on(self, parts: Sequence[ScheduledTokens]) -> bool:
        """Whether the run behind the next one has the same requests, as far as can be told before
        tokens are known: nobody comes or goes, and each has room for two tokens more."""
        with self._wake:
            scheduler = self._scheduler
            return (
                not (self._closed or self._cancelled)
                and len(scheduler.running) == len(parts)
                and not scheduler.can_admit
                and not scheduler.is_late
                and all(part.request.goes_on(2) for part in parts)
            )

    def _take_in(
        self, scheduled: Sequence[ScheduledTokens], result: StepResult, start: float
    ) -> None:
        """Give the tokens of a run to their requests."""
        wanted = [part for part in scheduled if part.rows]
        rows = result.logits
        accepted, errors = dict[Request, int](), dict[Request, Exception]()
        drawing: list[tuple[ScheduledTokens, int]] = []  # with the first of their rows
        at = 0
        for part in wanted:
            end = at + part.rows
            try:
                if self._score(part, rows[at:end]):
                    drawing.append((part, end - 1 - len(part.draft)))
            except Exception as error:  # of this request alone
                errors[part.request] = error
            at = end
        sampler = self.runner.sampler
        tokens = sampler.draw(drawing, result)
        scored = sampler.logprobs(drawing, tokens, rows)
        for (part, at), drawn in zip(drawing, tokens, strict=True):
            try:
                own = rows[at : at + 1 + len(part.draft)]
                known = scored.get(part.request)
                accepted[part.request] = self._receive(part, own, drawn, known)
            except Exception as error:
                errors[part.request] = error
        with self._wake:
            for part in scheduled:
                self._scheduler.ran(part, accepted.get(part.request, 0))
            for request in [part.request for part in wanted]:
                if request in errors or request.finished:
                    self._scheduler.leave(request)
                    reason = request.result.finish_reason
                    self._counts.ended("error" if request in errors else reason)
        for part in wanted:
            part.request.publish(errors.get(part.request))
        seconds = time.perf_counter() - start
        self._scheduler.timer.observe(*tokens_of(scheduled), seconds)
        self._counts.ran(scheduled, accepted.values(), seconds)
        wake(part.request.outlet for part in wanted)

    def _score(self, part: ScheduledTokens, rows: Any) -> bool:
        """Score tokens of a prompt, if that is asked for. Whether a token is to be drawn."""
        request = part.request
        if request.scores is not None and request.scores.is_due:
            request.scores.add(on_host(rows[: part.count]))
        if part.completes and not request.settings.max_tokens:
            request.end("length")
        return part.completes and not request.finished

    def _receive(
        self, part: ScheduledTokens, rows: Any, drawn: Sequence[int] | None,
        scored: Sequence[dict[int, float]] | None,
    ) -> int:  # fmt: skip
        """Add the next token of a request, and more while they are those of its draft, each drawn
        from the logits it would have without one. Returns how many draft tokens were right."""
        request = part.request
        for number, expected in enumerate([*part.draft, -1]):
            row = rows[number : number + 1]
            if drawn is None:
                token = self.runner.sampler.draw_one(request, row)
            else:
                token = drawn[number]
                request.rng[1] += 1
            if scored is not None:
                request.receive(token, None, scored[number])
            else:
                request.receive(token, on_host(row)[0] if request.settings.logprobs else None)
            if request.finished or token != expected:
                break
        return number


def _require_requests(bundle: ModelBundle) -> ModelBundle:
    if "requests" not in bundle.require_kind("language").settings:
        raise OptionError(
            "the artifact was not made for batching", where="artifact", got=bundle.path.name,
            hint="make another: rlx compile MODEL --out FILE --requests N",
        )  # fmt: skip
    return bundle
