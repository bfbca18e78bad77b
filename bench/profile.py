"""What profiling costs: decoding with every launch of every worker recorded, against without."""

from __future__ import annotations

import statistics

from bench.common import Bar, arguments, finish
from rlx import load
from rlx.models.benchmark import LanguageRuns
from rlx.models.builder import SAMPLE
from rlx.models.language_model import LanguageModel

PROMPT, STEPS = 64, 16
GOAL = 1 / 1.02  # at most two percent slower


def measure(model: LanguageModel, rounds: int) -> tuple[float, float]:
    """Seconds of `STEPS` tokens, recorded and not. The difference is far below the noise of a
    machine, so pairs are compared, each the other way round than the last."""
    runs = LanguageRuns(model)
    runs.prefill(PROMPT)
    runs.decode(STEPS)
    watched, plain = [], []
    for i in range(rounds):
        if i % 2:
            plain.append(_decode(runs))
        with runs.runner.executables(SAMPLE).decode.recording() as recording:
            watched.append(_decode(runs))
        if not i % 2:
            plain.append(_decode(runs))
        assert recording.profile().elapsed > 0
    slower = statistics.median(a / b for a, b in zip(watched, plain, strict=True))
    usual = statistics.median(plain)
    return slower * usual, usual


def _decode(runs: LanguageRuns) -> float:
    """From the same past every time."""
    del runs.runner.tokens[PROMPT:]
    return runs.decode(STEPS)


def main(argv: list[str]) -> int:
    parser = arguments("profile", __doc__ or "")
    parser.add_argument("--model", default="smollm2-135m", metavar="MODEL")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(argv)
    with load(options.model, threads=options.threads, context=256) as model:
        assert isinstance(model, LanguageModel)
        watched, plain = measure(model, 41 if options.quick else 151)
    return finish(
        [
            Bar(
                "profile_decode", 1e3 * watched / STEPS, "ms", "the same without profiling",
                1e3 * plain / STEPS, GOAL, higher_is_better=False,
            )
        ],
        options.json,
    )  # fmt: skip
