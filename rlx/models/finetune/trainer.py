"""The training loop: steps, evaluations, checkpoints; goes on where a process was killed.

All that a step depends on is in a checkpoint or follows from the number of the step, so a run that
is killed and goes on ends in the same bits as one that is not.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import rlx.numpy as rnp
from rlx import random
from rlx.data import Loader
from rlx.errors import InputError, NumericsError, OptionError
from rlx.models.finetune.batches import BatchSource, TrainingBatch
from rlx.models.finetune.history import History, TrainingProgress
from rlx.models.finetune.training_settings import TrainingSettings
from rlx.numpy.array import Array
from rlx.numpy.control_flow import scan
from rlx.numpy.differentiate import value_and_grad
from rlx.numpy.dispatch import as_array
from rlx.numpy.jit import jit
from rlx.numpy.tree import tree_map
from rlx.optim import Optimizer, clip_by_global_norm, global_norm
from rlx.optim.checkpoints import CheckpointManager
from rlx.optim.checkpoints import load as load_checkpoint
from rlx.optim.checkpoints import save as save_checkpoint
from rlx.support.records import dataclass

Loss = Callable[[Any, Any, Any], tuple[Array, Array]]  # mean, and of how many
_CHECKPOINTS, _BEST = "checkpoints", "best.safetensors"
_RECENT = 20  # steps that tell the speed


@dataclass
class Task:
    """What is trained on what."""

    loss: Loss  # of params, the arrays of a batch, and a key; without a key nothing is random
    params: Any
    source: BatchSource
    evaluation: BatchSource | None
    usual_rate: float
    identity: dict[str, Any]  # what a run depends on beside settings and data


@dataclass
class Trainer:
    """A run in a folder."""

    task: Task
    settings: TrainingSettings
    folder: Path
    progress: Callable[[TrainingProgress], None] | None = None
    resume: bool = True
    history: History = field(default_factory=History)

    def run(self) -> Any:
        """Train; returns the parameters, with `patience` those of the best evaluation."""
        s = self.settings
        self._loader = Loader(
            self.task.source, s.batch * s.accumulate, seed=s.seed, drop_last=False
        )
        self.total = s.total(len(self._loader))
        self.optimizer = s.made_optimizer(self.total, self.task.usual_rate)
        self._step = training_step(self.task.loss, self.optimizer, s.clip, s.accumulate)
        self._evaluate = jit(lambda params, batch: self.task.loss(params, batch, None))
        now = self._restored()
        self.first, self._began, self._times = now["step"], time.perf_counter(), list[Any]()
        with _Interrupt() as interrupt, closing(self._batches()) as stream:
            while now["step"] < self.total and not self._is_over():
                self._one_step(now, next(stream))
                if self._is_due(now["step"]) or interrupt.asked:
                    self._save(now)
                if interrupt.asked:
                    break
        if interrupt.asked:
            raise self._interrupted(now["step"])
        if s.patience and self.history.best is not None:
            return load_checkpoint(self._best, now["params"])
        return now["params"]

    # -- steps --------------------------------------------------------------------------------

    def _batches(self) -> Generator[TrainingBatch, None, None]:
        yield from self._loader.repeat()

    def _one_step(self, now: dict[str, Any], batch: TrainingBatch) -> None:
        """A step, and the evaluation that is due behind it."""
        key = random.fold_in(random.key(self.settings.seed), now["step"])
        params, state, numbers = self._step(now["params"], now["optimizer"], batch.arrays, key)
        now["params"], now["optimizer"] = params, state
        loss, norm, rate = np.asarray(numbers).tolist()
        now["step"] += 1
        self._require_finite(now["step"], loss, norm)
        now["data"] = self._loader.state_dict()
        self.history.add(now["step"], loss, norm, rate)
        evaluated = None
        if self.task.evaluation is not None and self._is_evaluated(now["step"]):
            evaluated = self._evaluation(now)
        self._tell(now["step"], batch.tokens, loss, evaluated)

    def _require_finite(self, step: int, loss: float, norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        saved = CheckpointManager(self.folder / _CHECKPOINTS, self.settings.keep).steps()
        raise NumericsError(
            f"the {'gradient' if math.isfinite(loss) else 'loss'} of step {step} is not finite",
            where=str(self.folder), got=f"loss {loss:g}, gradient {norm:g}", expected="numbers",
            hint="a smaller learning_rate, more warmup or a smaller clip; begin with resume=False. "
            + (f"The checkpoint of step {saved[-1]} stays" if saved else "Nothing was saved yet"),
        )  # fmt: skip

    def _tell(self, step: int, tokens: int, loss: float, evaluated: float | None) -> None:
        if self.progress is None:
            return
        now = time.perf_counter()
        self._times = [*self._times, (now, tokens)][-_RECENT - 1 :]
        spent = now - (self._times[0][0] if len(self._times) > 1 else self._began)
        counted = self._times[1:] or self._times
        self.progress(
            TrainingProgress(
                step, self.total, step / len(self._loader), loss, self.history.smoothed(),
                evaluated if evaluated is not None else self.history.last_evaluation,
                self.history.rates[-1], sum(n for _, n in counted) / max(spent, 1e-9),
                spent / len(counted) * (self.total - step), evaluated is not None,
            )
        )  # fmt: skip

    # -- evaluation ---------------------------------------------------------------------------

    def _is_evaluated(self, step: int) -> bool:
        every = self.settings.eval_every or min(len(self._loader), max(1, self.total // 5))
        return step % every == 0 or step == self.total

    def _evaluation(self, now: dict[str, Any]) -> float:
        """The mean loss of the evaluation's tokens; the best parameters so far are kept."""
        source = self.task.evaluation
        assert source is not None
        total = count = 0.0
        for begin in range(0, len(source), self.settings.batch):
            indices = np.arange(begin, min(begin + self.settings.batch, len(source)))
            mean, number = self._evaluate(now["params"], source.batch(indices).arrays)
            total, count = total + float(mean) * float(number), count + float(number)
        found = total / max(count, 1.0)
        if self.settings.patience and (self.history.best is None or found < self.history.best):
            save_checkpoint(self._best, now["params"])
        self.history.add_evaluation(now["step"], found)
        return found

    def _is_over(self) -> bool:
        """Whether no evaluation was better for too long."""
        patience = self.settings.patience
        return patience is not None and self.history.without_better() >= patience

    # -- checkpoints --------------------------------------------------------------------------

    @property
    def _best(self) -> Path:
        return self.folder / _CHECKPOINTS / _BEST

    def _is_due(self, step: int) -> bool:
        every = self.settings.save_every or max(1, min(100, self.total // 10))
        return step % every == 0 or step == self.total or self._is_over()

    def _save(self, now: dict[str, Any]) -> None:
        self._manager.save(now["step"], {**now, "history": self.history.as_text()})

    def _restored(self) -> dict[str, Any]:
        """Where the run is: at its start, or at its newest checkpoint."""
        place = self.folder / _CHECKPOINTS
        if not self.resume and place.is_dir():
            shutil.rmtree(place)
        self._manager = CheckpointManager(place, self.settings.keep)
        task, run = self.task, json.dumps(self._identity(), sort_keys=True)
        start = {
            "params": task.params, "optimizer": self.optimizer.init(task.params), "step": 0,
            "data": self._loader.state_dict(), "run": run, "history": "",
        }  # fmt: skip
        try:
            now = self._manager.restore(start)
        except InputError as error:
            raise self._other_run() from error
        if now["run"] != run:
            raise self._other_run(json.loads(now["run"]), json.loads(run))
        if now is not start:
            self.history = History.of(now["history"])
            self._loader.load_state_dict(now["data"])
        return {**now, "history": ""}

    def _identity(self) -> dict[str, Any]:
        """What decides the bits of a run."""
        s, optimizer = self.settings, self.settings.optimizer
        names = ("batch", "accumulate", "schedule", "warmup", "weight_decay", "clip", "seed",
                 "eval_every", "patience", "learning_rate")  # fmt: skip
        found = {name: getattr(s, name) for name in names}
        kept = self.task.evaluation
        return {
            **found, **self.task.identity, "steps": self.total, "data": self.task.source.digest,
            "optimizer": optimizer if isinstance(optimizer, str) else type(optimizer).__name__,
            "evaluation": None if kept is None else kept.digest,
        }  # fmt: skip

    def _other_run(self, was: dict[str, Any] | None = None, now: Any = None) -> OptionError:
        changed = [n for n in now if was.get(n) != now[n]] if was else []
        return OptionError(
            "the folder has checkpoints of another run", where=str(self.folder),
            got=", ".join(f"{n} {now[n]}" for n in changed) or "other parameters",
            expected=", ".join(f"{n} {was.get(n)}" for n in changed) if was else None,
            hint="the same settings and data go on; resume=False (--no-resume) begins anew there; "
            "or another out",
        )  # fmt: skip

    def _interrupted(self, step: int) -> KeyboardInterrupt:
        error = KeyboardInterrupt(f"interrupted; saved step {step} of {self.total}")
        error.add_note(f"  hint: the same call goes on from there ({self.folder})")
        return error


class _Interrupt:
    """Holds Ctrl-C back until a step is done: one in the middle would leave parameters that were
    given away. The second one is not held back."""

    def __init__(self) -> None:
        self.asked, self._before = False, None

    def __enter__(self) -> _Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)  # type: ignore[assignment]
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


def training_step(
    loss: Loss, optimizer: Optimizer, clip: float | None, parts: int
) -> Callable[..., tuple[Any, Any, Array]]:
    """A jitted step: (params, state, batch, key) → (params, state, [loss, norm, rate]).

    With several parts, gradients are summed over all tokens that count, so that a token weighs the
    same in whatever part it is.
    """
    gradient = value_and_grad(loss, has_aux=True)

    def whole(params: Any, batch: Any, key: Any) -> tuple[Array, Any]:
        (value, _), grads = gradient(params, batch, key)
        return value, grads

    def summed(params: Any, batch: Any, key: Any) -> tuple[Array, Any]:
        def add(total: Any, part: Any) -> tuple[Any, None]:
            (value, count), grads = gradient(params, part["arrays"], random.fold_in(key, part["i"]))
            added = tree_map(lambda a, g: a + g * count, total[2], grads)
            return (total[0] + value * count, total[1] + count, added), None

        zero = rnp.zeros((), dtype="f32")
        start = zero, zero, tree_map(lambda p: rnp.zeros(as_array(p).shape, dtype="f32"), params)
        numbers = rnp.arange(parts, dtype="i32")
        (value, count, grads), _ = scan(add, start, {"arrays": batch, "i": numbers})
        count = rnp.maximum(count, 1.0)
        return value / count, tree_map(lambda g: g / count, grads)

    def step(params: Any, state: Any, batch: Any, key: Any) -> tuple[Any, Any, Array]:
        value, grads = (whole if parts == 1 else summed)(params, batch, key)
        if clip is None:
            norm = global_norm(grads)
        else:
            grads, norm = clip_by_global_norm(grads, clip)
        rate = optimizer.rate(state["step"]).astype("f64")
        params, state = optimizer.update(grads, state, params)
        numbers = rnp.stack([value.astype("f64"), norm.astype("f64"), rate])
        return params, state, numbers

    made: Callable[..., tuple[Any, Any, Array]] = jit(step, donate=["params", "state"])
    return made
