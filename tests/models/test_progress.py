"""Progress of a first start: what is told, and what an error of the function does."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cli"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
from cli_support import write_tiny
from encoder_files import write_model

import rlx
from rlx.llvm import jit
from rlx.models.bundle import EntryPointSpec
from rlx.models.model_runner import ModelRunner
from rlx.support.progress import COMPILING, PACKING, current, reporting

PROMPT = [5, 6, 7, 8, 9]
Calls = list[tuple[str, int, int]]


@pytest.fixture(autouse=True)
def first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither disk nor memory has any code."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))
    jit.forget()
    yield
    jit.forget()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny.gguf")


def told(into: Calls) -> Callable[[str, int, int], None]:
    return lambda *call: into.append(call)


def check_counts(calls: Calls, stage: str, begins: int = 1) -> int:
    """Counts of a stage grow to their total, `begins` times from nothing; the sum of totals."""
    counts = [(done, total) for name, done, total in calls if name == stage]
    starts = [i for i, (done, _) in enumerate(counts) if done == 0]
    assert len(starts) == begins and starts[0] == 0
    ends = [*starts[1:], len(counts)]
    for start, end in zip(starts, ends, strict=True):
        part = counts[start:end]
        for (done, total), (later, larger) in pairwise(part):
            assert done <= later and total <= larger and (done, total) != (later, larger)
            assert later <= larger
        assert part[-1][0] == part[-1][1] > 0
    return sum(counts[end - 1][1] for end in ends)


def test_counts_grow_to_their_total_at_the_first_token_only(tiny: Path) -> None:
    calls: Calls = []
    with rlx.load(tiny, progress=told(calls)) as model:
        assert not calls  # a load compiles nothing
        before = jit.counters.compilations
        model.warm()
        assert {name for name, _, _ in calls} == {PACKING, COMPILING}
        assert check_counts(calls, COMPILING) == jit.counters.compilations - before > 1
        packed = model.runner.params.prepared
        assert check_counts(calls, PACKING) == sum(a.nbytes for a in packed.values())
        assert len([c for c in calls if c[0] == PACKING]) == len(packed) + 1  # each, and the start
        calls.clear()
        model.generate(PROMPT, max_tokens=2, stream=False)
    with rlx.load(tiny, progress=told(calls), warm=True) as model:
        model.generate(PROMPT, max_tokens=2, stream=False)
    assert not calls  # from the caches


def test_the_first_token_does_not_wait_for_decode(tiny: Path) -> None:
    """What is compiled behind it is not told, and used for the second token."""
    calls: Calls = []
    with rlx.load(tiny, progress=told(calls)) as model:
        before = jit.counters.compilations
        found = model.generate(PROMPT, max_tokens=4, temperature=0, stream=False).tokens
        assert 0 < check_counts(calls, COMPILING) < jit.counters.compilations - before
        calls.clear()
        assert model.generate(PROMPT, max_tokens=4, temperature=0, stream=False).tokens == found
    with rlx.load(tiny, progress=told(calls), warm=True) as model:
        assert model.generate(PROMPT, max_tokens=4, temperature=0, stream=False).tokens == found
    assert not calls  # the code and packed weights behind the first token are stored too


def test_an_error_behind_the_first_token_comes_with_the_second(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = ModelRunner._make

    def broken(self: ModelRunner, name: str, spec: EntryPointSpec, *rest: Any) -> Any:
        if "decode" in spec.variants:
            raise ZeroDivisionError("decode")
        return make(self, name, spec, *rest)

    monkeypatch.setattr(ModelRunner, "_make", broken)
    with rlx.load(tiny) as model:
        assert model.generate(PROMPT, max_tokens=1, stream=False).tokens
        with pytest.raises(ZeroDivisionError, match="decode"):
            model.generate(PROMPT, max_tokens=2, stream=False)


def test_weights_that_are_quantised_one_by_one_count_towards_one_total(tiny: Path) -> None:
    calls: Calls = []
    with rlx.load(tiny, progress=told(calls), warm=True, quant="Q8_0") as model:
        packed = model.runner.params.prepared
        assert check_counts(calls, PACKING) == sum(a.nbytes for a in packed.values())
    totals = {total for name, _, total in calls if name == PACKING}
    assert len(totals) == 1


def test_drafts_engines_and_encoders_tell_too(tiny: Path, tmp_path: Path) -> None:
    calls: Calls = []
    small = write_tiny(tmp_path / "small.gguf", more={"general.name": "small"})
    with rlx.load(tiny, draft=small, progress=told(calls), warm=True):
        assert check_counts(calls, PACKING, begins=2)
    calls.clear()
    with rlx.Engine(tiny, requests=2, context=64, progress=told(calls)):
        assert check_counts(calls, COMPILING, begins=2)  # the model, and the sampler
    calls.clear()
    with rlx.load(write_model(tmp_path), progress=told(calls)) as encoder:
        encoder.embed("a text")
        assert check_counts(calls, COMPILING)


@pytest.mark.parametrize("stage", [PACKING, COMPILING])
def test_an_error_of_the_function_comes_when_all_is_cached(tiny: Path, stage: str) -> None:
    calls: Calls = []

    def broken(name: str, done: int, total: int) -> None:
        calls.append((name, done, total))
        if name == stage:
            raise ZeroDivisionError(stage)

    with rlx.load(tiny, progress=broken) as model:
        with pytest.raises(ZeroDivisionError, match=stage):
            model.warm()
        assert [c[0] for c in calls].count(stage) == 1 and calls[-1][0] == stage
        compiled, packed = jit.counters.compilations, model.runner.params.preparations
        found = model.generate(PROMPT, max_tokens=6, temperature=0, stream=False).tokens
        assert (jit.counters.compilations, model.runner.params.preparations) == (compiled, packed)
    jit.forget()
    with rlx.load(tiny) as model:
        again = model.generate(PROMPT, max_tokens=6, temperature=0, stream=False).tokens
        assert model.runner.params.preparations == 0
    assert again == found and jit.counters.compilations == compiled


@pytest.mark.parametrize("make", [rlx.load, rlx.Engine])
def test_what_is_no_function_is_refused(make: Any, tiny: Path) -> None:
    with pytest.raises(rlx.OptionError, match=r"progress\(stage, done, total\)"):
        make(tiny, progress="yes")


def test_calls_of_many_threads_come_one_at_a_time_and_in_order() -> None:
    calls: Calls = []
    with reporting(told(calls)):
        reporter = current()
        reporter.expect("work", 400)
        work = [lambda: [reporter.advance("work") for _ in range(100)]] * 4
        threads = [threading.Thread(target=w) for w in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert calls == [("work", n, 400) for n in range(401)]
    current().advance("work")  # nobody is told any more
    assert len(calls) == 401


def test_the_inner_function_is_told_and_none_leaves_it_to_the_outer() -> None:
    outer: Calls = []
    inner: Calls = []
    with reporting(told(outer)):
        with reporting(None):
            current().expect("a", 2)
        with reporting(told(inner)):
            current().expect("b", 3)
        current().finish("a")
    assert outer == [("a", 0, 2), ("a", 2, 2)]
    assert inner == [("b", 0, 3)]
