"""How to train: the numbers of a run, checked; its optimiser and learning rate."""

from __future__ import annotations

import math
from typing import Any

from rlx.errors import OptionError, did_you_mean
from rlx.optim import (
    SGD,
    Adafactor,
    Adam,
    AdamW,
    Lion,
    Muon,
    Optimizer,
    matrices_only,
    schedules,
)
from rlx.support.records import dataclass

OPTIMIZERS = ("adamw", "adam", "sgd", "lion", "adafactor", "muon")
SCHEDULES = ("cosine", "linear", "constant")
_COUNTS = ("batch", "accumulate", "keep")
_PERHAPS = ("steps", "context", "eval_every", "patience", "save_every")


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of a run. None: a default that depends on the model or the data."""

    epochs: float = 3
    steps: int | None = None  # instead of epochs
    batch: int = 4  # rows, or pairs, of a step
    accumulate: int = 1  # parts with `batch` rows each that make one step
    context: int | None = None  # tokens of the longest example
    optimizer: str | Optimizer = "adamw"
    learning_rate: float | None = None
    schedule: str = "cosine"
    warmup: float = 0.03  # steps; below 1, a share of all steps
    weight_decay: float = 0.0
    clip: float | None = 1.0  # of the norm of the gradient
    seed: int = 0
    eval_every: int | None = None  # steps
    patience: int | None = None  # evaluations without a better one before it stops
    save_every: int | None = None  # steps
    keep: int = 2  # checkpoints

    def __post_init__(self) -> None:
        for name in (*_COUNTS, *_PERHAPS):
            value = getattr(self, name)
            if value is None and name in _PERHAPS:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                _refuse(name, value, "a whole number, 1 or more")
        _require(self.epochs, "epochs", above=0)
        _require(self.warmup, "warmup", least=0)
        _require(self.weight_decay, "weight_decay", least=0)
        for name in ("clip", "learning_rate"):
            if getattr(self, name) is not None:
                _require(getattr(self, name), name, above=0)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            _refuse("seed", self.seed, "a whole number, 0 or more")
        for name, known in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
            value = getattr(self, name)
            if value not in known and not isinstance(value, Optimizer):
                raise OptionError(
                    f"unknown {name}", where="finetune", got=repr(value)[:60],
                    expected=", ".join(known), hint=did_you_mean(str(value), known),
                )  # fmt: skip
        if isinstance(self.optimizer, Optimizer) and self.learning_rate is not None:
            raise OptionError(
                "an optimizer has a learning rate of its own", where="learning_rate",
                got=self.learning_rate,
            )  # fmt: skip

    def total(self, steps_of_epoch: int) -> int:
        """How many steps there are."""
        return self.steps or max(1, math.ceil(self.epochs * steps_of_epoch))

    def made_optimizer(self, total: int, usual_rate: float) -> Optimizer:
        """The optimiser, with its learning rate over all steps."""
        if isinstance(self.optimizer, Optimizer):
            return self.optimizer
        peak = self.learning_rate or self._usual(usual_rate)
        warmup = math.ceil(self.warmup * total) if self.warmup < 1 else int(self.warmup)
        warmup = min(warmup, total - 1)
        rest = total - warmup
        after: Any = {
            "cosine": schedules.cosine(peak, rest), "constant": schedules.constant(peak),
            "linear": schedules.linear(peak, 0.0, rest),
        }[self.schedule]  # fmt: skip
        # the first step has a rate above zero, too
        rate = schedules.warmup(after, warmup, peak / (warmup + 1)) if warmup else after
        decay: dict[str, Any] = {"weight_decay": self.weight_decay, "mask": matrices_only}
        makers: dict[str, Any] = {
            "adamw": lambda: AdamW(rate, **decay), "adam": lambda: Adam(rate, **decay),
            "sgd": lambda: SGD(rate, 0.9, **decay), "lion": lambda: Lion(rate, **decay),
            "adafactor": lambda: Adafactor(rate, **decay),
            "muon": lambda: Muon(
                rate, adjust="match_rms_adamw", matrices=_in_layer, other=AdamW(rate), **decay
            ),
        }  # fmt: skip
        made: Optimizer = makers[self.optimizer]()
        return made

    def _usual(self, rate: float) -> float:
        """A rate that suits the optimiser, where `rate` suits AdamW."""
        if self.optimizer in ("sgd", "adafactor"):
            raise OptionError(
                f"{self.optimizer} has no usual learning rate", where="learning_rate", got=None,
                expected="a number", hint="its rates are nothing like AdamW's; try a few",
            )  # fmt: skip
        return rate / 5 if self.optimizer == "lion" else rate


def _in_layer(path: str, param: object) -> bool:
    """Muon is for the matrices of layers, not for the embedding and the head."""
    return path.startswith("blk.")


def _require(
    value: object, name: str, *, least: float = -math.inf, above: float = -math.inf
) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and value >= least and value > above):  # type: ignore
        _refuse(name, value, f"above {above:g}" if above > -math.inf else f"{least:g} or more")


def _refuse(name: str, value: object, expected: str) -> None:
    raise OptionError(
        f"not a value of {name}", where="finetune", got=repr(value), expected=expected
    )
