"""Constrained draws and log probabilities of a device, on the stand-in, against NumPy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fake_driver import FakeDriver, installed, make_stand_in

from rlx.backends.cuda.backend import CudaBackend
from rlx.ir.ops.sample import Sample
from rlx.models import device_draws
from rlx.models.batch.step_result import DeviceRows
from rlx.models.builder import EntryPoint
from rlx.models.bundle import EntryPointSpec
from rlx.models.device_draws import Constrained, DeviceDraws, device_specs
from rlx.models.generation import top_logprobs
from rlx.models.sampling import GenerationSettings, Penalties
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.template import make_template
from rlx.specialize.options import CompileOptions

VOCAB, ROWS = 1100, 6


@pytest.fixture(scope="module")
def backend() -> Iterator[CudaBackend]:
    with installed(FakeDriver()):
        yield make_stand_in()


@pytest.fixture
def draws(backend: CudaBackend) -> DeviceDraws:
    def compiled(name: str, spec: EntryPointSpec) -> dict[str, CompiledGraph]:
        assert name in device_specs(VOCAB, ROWS)  # so that it is in artifacts
        (variant,) = spec.variants.values()
        options = CompileOptions(binding=variant.dim_binding())
        graph = CompiledGraph(make_template(spec.build().module, options, backend))
        report = graph.template.result.dispatch_report
        assert not [row for row in report.rows if row.outcome == "host"], str(report)
        return {"rows": graph}

    return DeviceDraws(VOCAB, ROWS, compiled)


class Masked(Penalties):
    """Penalties with a mask of the even tokens, as a grammar has one."""

    def __init__(self, settings: GenerationSettings, prompt: list[int]) -> None:
        super().__init__(settings, VOCAB, prompt)
        self.entry_point = EntryPoint("sample", penalties=settings.has_penalties, grammar=True)

    inputs = {"allowed": np.full(-(-VOCAB // 32), 0x55555555, np.int32)}  # type: ignore[assignment]


def request(number: int, masked: bool = False, **options: Any) -> Constrained:
    settings = GenerationSettings(seed=number, **options)
    prompt = [1, 5, 5, 900 + number]
    penalties = Masked(settings, prompt) if masked else Penalties(settings, VOCAB, prompt)
    for token in (3, 7, 7):
        penalties.count(token)
    return Constrained(penalties, np.array([number, 4], np.uint64), settings.row())


REQUESTS = [
    request(1, repetition_penalty=1.7, temperature=0.9),
    request(2, masked=True, temperature=1.3, top_k=0, top_p=1.0),
    request(3, logit_bias={4: 30.0, 6: -100.0}, temperature=0.0),
    request(4, masked=True, presence_penalty=9.0, frequency_penalty=5.0, logit_bias={7: 2.0}),
    request(5, masked=True, repetition_penalty=1.4, temperature=0.0),
]


def expected(asked: Any, row: Any) -> int:
    """As `builder.sample` does it for one request."""
    p = asked.penalties
    x = np.where(row > 0, row / p.factor, row * p.factor) + p.bias
    if p.entry_point.grammar:
        x = np.where(np.arange(VOCAB) % 2 == 0, x, np.float32(-np.inf))
    return int(Sample().reference(x[None].astype(np.float32), asked.rng, asked.sampling)[0][0])


def test_constrained_rows_are_drawn_together(backend: CudaBackend, draws: DeviceDraws) -> None:
    logits = np.random.default_rng(0).normal(scale=3, size=(ROWS, VOCAB)).astype(np.float32)
    logits[:, 7] = 12.0  # likely, but for penalties and masks
    rows = DeviceRows(backend.allocator.put(logits), 0, ROWS)
    for places in ([0, 1, 2, 3, 4], [5, 0, 3, 1, 2], [4, 4, 4, 4, 4]):
        drawn = draws.draw(rows, places, REQUESTS)
        wanted = [expected(r, logits[at]) for r, at in zip(REQUESTS, places, strict=True)]
        assert drawn == wanted
    plain = [int(row.argmax()) for row in logits[:5]]
    assert plain == [7] * 5
    assert draws.draw(rows[2:4], [1], REQUESTS[1:2]) == [expected(REQUESTS[1], logits[3])]
    np.testing.assert_array_equal(rows.copy_out(), logits)  # others read them too


def test_too_many_changes_are_left_to_draws_one_by_one(
    backend: CudaBackend, draws: DeviceDraws, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = DeviceRows(backend.allocator.put(np.zeros((ROWS, VOCAB), np.float32)), 0, ROWS)
    monkeypatch.setattr(device_draws, "MOST_CHANGES", 4)
    assert draws.draw(rows, [0], REQUESTS[:1]) is None
    assert draws.draw(rows, [0], REQUESTS[1:2]) is not None


@pytest.mark.parametrize("counts", [[1, 5, 2], [20, 3, 11]])
def test_log_probabilities_are_those_of_the_logits(
    backend: CudaBackend, draws: DeviceDraws, counts: list[int]
) -> None:
    """Logits come back as they are; the sum of 1,100 terms differs in its last bits alone."""
    logits = np.random.default_rng(1).normal(scale=4, size=(ROWS, VOCAB)).astype(np.float32)
    rows = DeviceRows(backend.allocator.put(logits), 0, ROWS)
    places, tokens = [4, 0, 2], [77, int(logits[0].argmax()), VOCAB - 1]
    found = draws.logprobs(rows, places, tokens, counts)
    for row, at, token, count in zip(found, places, tokens, counts, strict=True):
        want = top_logprobs(logits[at], token, count)
        assert list(row) == list(want)
        np.testing.assert_allclose([*row.values()], [*want.values()], rtol=0, atol=1e-12)
