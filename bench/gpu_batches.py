"""Many requests at once on a GPU: `rlx.Engine`, beside a batch that `torch.compile` decodes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import Bar
from bench.peers import torch_gpu

NEW = 128  # tokens of each request
_FIRST = (
    "import json, sys, time; sys.path.insert(0, sys.argv[3]);"
    "start = time.perf_counter(); import rlx;"
    "from bench.gpu import Letters; from rlx.models.model_file import ModelFile;"
    "ModelFile.tokenizer = lambda self: Letters();"
    "imported = time.perf_counter();"
    "model = rlx.load(sys.argv[1], device='cuda', artifact=sys.argv[2] or None, context=4096);"
    "loaded = time.perf_counter();"
    "model.generate(''.join(chr(256 + i % 500) for i in range(512)), stream=False, max_tokens=2);"
    "end = time.perf_counter();"
    "print(json.dumps([imported - start, loaded - imported, end - loaded]))"
)


class Batches:
    """Requests of `length` prompt tokens that decode together."""

    def __init__(self, path: Path, length: int) -> None:
        self.path, self.length = path, length
        self._seeds = iter(range(1, 1 << 30))

    def prompts(self, count: int) -> list[str]:
        drawn = [np.random.default_rng(next(self._seeds)).integers(0, 1000, self.length)
                 for _ in range(count)]  # fmt: skip
        return ["".join(chr(256 + int(t)) for t in own) for own in drawn]

    def seconds(self, engine: Any, count: int, tokens: int) -> float:
        prompts = self.prompts(count)
        start = time.perf_counter()
        replies = [
            engine.submit(p, max_tokens=tokens, seed=i, temperature=0.8, top_k=40, top_p=0.95)
            for i, p in enumerate(prompts)
        ]
        for reply in replies:
            assert len(reply.wait().tokens) == tokens
        return time.perf_counter() - start

    def decoding(self, engine: Any, count: int, **more: Any) -> float:
        """Tokens a second of all requests together, once all prompts are in the KV cache."""
        how = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, **more}
        replies = [
            engine.submit(p, max_tokens=4 * NEW, seed=i, **how)
            for i, p in enumerate(self.prompts(count))
        ]
        results = [reply.result for reply in replies]
        while not all(r.tokens for r in results):
            time.sleep(0.002)
        first, start = sum(len(r.tokens) for r in results), time.perf_counter()
        while min(len(r.tokens) for r in results) < NEW:
            time.sleep(0.01)
        last, end = sum(len(r.tokens) for r in results), time.perf_counter()
        for reply in replies:
            reply.close()
        return (last - first) / (end - start)

    def rates(self, count: int, rounds: int, **options: Any) -> tuple[float, float]:
        """Tokens a second of decoding, all requests together, and of prompts."""
        import rlx

        with rlx.Engine(self.path, device="cuda", requests=count, context=2048,
                        cache_tokens=2048 * count, **options) as engine:  # fmt: skip
            self.seconds(engine, count, 4)
            decode = sorted(self.decoding(engine, count) for _ in range(rounds))
            time.sleep(0.1)  # requests that were closed are gone
            short = sorted(self.seconds(engine, count, 1) for _ in range(rounds))
        return decode[rounds // 2], count * self.length / short[rounds // 2]


def batch_bars(
    torch: Any,
    path: Path,
    shape: str,
    kind: str,
    position: int,
    peer: Callable[[int], float] | None,
) -> list[Bar]:
    bars, batches = [], Batches(path, position)
    for count in (8, 64):
        decode, prefill = batches.rates(count, 3)
        print(
            f"engine {shape} {kind} x{count}: decode {decode:.0f}, prompts {prefill:.0f} tokens/s"
        )
        if peer is not None:
            other = count / peer(count)
            name = f"gpu_{shape}_{kind.lower()}_engine_{count}"
            bars.append(Bar(name, decode, "tokens/s", "torch.compile", other, 1.0))
    decode, _ = batches.rates(8, 3, kv="q8_0")
    print(f"engine {shape} {kind} x8, q8_0 cache: decode {decode:.0f} tokens/s")
    return bars


def invariant_rates(path: Path, shape: str, kind: str, length: int) -> None:
    """Engines with and without batch invariance, in turns: tokens a second of 1, 8 and 64 requests,
    and of their prompts."""
    batches = Batches(path, length)
    for count in (1, 8, 64):
        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(2):
            for wanted in (False, True):
                found[wanted].append(batches.rates(count, 1, batch_invariant=wanted))
        plain, same = (np.median(np.array(found[w]), axis=0) for w in (False, True))
        for what, a, b in zip(("decode", "prompts"), plain, same, strict=True):
            print(
                f"batch-invariant {shape} {kind} x{count}, {what}: {b:.0f} of {a:.0f} tokens/s"
                f" ({b / a:.2f})"
            )


def constrained_rates(path: Path, shape: str, kind: str, length: int) -> None:
    """Tokens a second of 8 requests that are plain, and of those whose draws or log probabilities
    take another run."""
    import rlx

    batches, count = Batches(path, length), 8
    ways: dict[str, dict[str, Any]] = {
        "plain": {}, "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2},
        "a logit bias": {"logit_bias": {5: 3.0}}, "log probabilities": {"logprobs": 5},
    }  # fmt: skip
    with rlx.Engine(
        path, device="cuda", requests=count, context=2048, cache_tokens=2048 * count
    ) as engine:
        for name, more in ways.items():
            batches.decoding(engine, count, **more)  # compiles
            time.sleep(0.1)
            found = sorted(batches.decoding(engine, count, **more) for _ in range(3))
            time.sleep(0.1)
            print(f"engine {shape} {kind} x{count}, {name}: decode {found[1]:.0f} tokens/s")


def torch_batch(torch: Any, shape: str, context: int, position: int) -> Callable[[int], float]:
    """Seconds of a step of so many sequences, compiled by torch."""
    model = torch_gpu.Qwen3(torch, shape, context)
    return lambda count: float(model.timed_batch(count, position)())


def starts(path: Path, artifact: Path | None) -> list[float]:
    """Seconds of a new process: its imports, loading, and the first two tokens."""
    import json

    root = str(Path(__file__).resolve().parent.parent)
    command = [sys.executable, "-c", _FIRST, str(path), str(artifact or ""), root]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found
