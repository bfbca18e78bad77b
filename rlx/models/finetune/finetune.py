"""`rlx.finetune`: a model, examples, and what comes out of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rlx.numpy as rnp
from rlx.errors import InputError, OptionError, UnsupportedError, did_you_mean
from rlx.formats import open_model
from rlx.formats.fetch import resolve
from rlx.models.finetune.batches import BatchSource, Pairs, Rows, row_length, split_off
from rlx.models.finetune.examples import Data, Dataset, read_examples, read_pairs
from rlx.models.finetune.history import History, TrainingProgress, check_chart
from rlx.models.finetune.outputs import (
    require_folder,
    require_names,
    weight_changes,
    write_adapter,
    write_folder,
    write_gguf_model,
)
from rlx.models.finetune.trained_weights import LoraConfig
from rlx.models.finetune.trainer import Task, Trainer
from rlx.models.finetune.training_encoder import EncoderTrainingModel
from rlx.models.finetune.training_model import TrainingModel
from rlx.models.finetune.training_settings import TrainingSettings
from rlx.models.model_file import ModelFile
from rlx.numpy.array import Array
from rlx.support.files import require_other_file
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.models.encoder_model import EncoderModel
    from rlx.models.language_model import LanguageModel

_FINISHED = "training.json"
_RATES = {"lora": 2e-4, "full": 2e-5}  # that suit AdamW
_LONGEST = 2048  # tokens of an example, unless told


@dataclass(frozen=True)
class FineTuned:
    """The result of a run: `path` is what `rlx.load` takes, as a model or in `adapters=`."""

    path: Path
    history: History
    kind: str  # adapter, folder or gguf
    merged: Path | None = None  # a GGUF file with the adapter in its weights
    dataset: Dataset | None = None

    def __repr__(self) -> str:
        losses = self.history.losses
        last = f", loss {losses[-1]:.4f}" if losses else ""
        return f"<FineTuned {self.kind} {self.path}, {len(losses)} steps{last}>"


def finetune(
    model: str | os.PathLike[str] | LanguageModel | EncoderModel,
    data: Data,
    *,
    out: str | os.PathLike[str],
    lora: LoraConfig | Mapping[str, Any] | None = None,
    full: bool = False,
    evaluation: float | Data | None = None,
    pack: bool = True,
    overlong: str = "cut",
    answers: str = "all",
    template: str = "default",
    temperature: float = 0.05,
    remat: str = "none",
    merge: str | os.PathLike[str] | None = None,
    type: str | None = None,
    resume: bool = True,
    progress: Callable[[TrainingProgress], None] | None = None,
    plot: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> FineTuned:
    """Fine-tune a language model on answers, or an encoder on pairs of texts.

    `data` is a file of JSON lines or a list of objects: {"messages"}, {"prompt", "completion"} or
    {"text"}; for an encoder {"query", "positive"} and perhaps "negative". A language model gets
    LoRA adapters (`lora`: rank, alpha, dropout, targets, use_dora) beside its weights, float or
    packed, or is trained in `full`; an encoder is trained in full unless `lora` is given.
    `evaluation` is a share of the data, or data of its own. `overlong` examples are "cut", "split"
    (texts), "drop"ped or an "error"; `answers` that are learned are "all", or the "last".

    The folder `out` gets the result: a PEFT adapter, or a model; `merge` names a GGUF file for
    a model with the adapter in its weights, of the model's types or of `type`. Checkpoints are
    there too: the same call goes on where an earlier one was stopped or killed, unless `resume` is
    False, and ends in the same bits. `progress` is called behind each step, `plot` (.svg, .html) is
    a chart of the losses. `remat` saves memory: "matmuls", or more with "nothing".

    `settings` are epochs, steps, batch, accumulate, context, optimizer, learning_rate, schedule,
    warmup, weight_decay, clip, seed, eval_every, patience, save_every, keep.
    """
    _require_known(settings)
    made = TrainingSettings(**settings)
    file, base = _opened(model)
    job = _Job(file, base, _lora(lora, full, file), made, Path(out), remat, temperature)
    job.check_outputs(merge, type, resume)
    if plot is not None:
        check_chart(plot)
    if file.is_encoder:
        task, dataset = job.encoder_task(data, evaluation), None
    else:
        examples = {"overlong": overlong, "answers": answers, "template": template}
        task, dataset = job.language_task(data, evaluation, pack, examples)
    job.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(task, made, job.out, progress, resume)
    try:
        params = trainer.run()
    finally:
        if plot is not None:
            trainer.history.plot(plot)
    return job.written(params, trainer.history, merge, type, dataset)


def _require_known(settings: Mapping[str, Any]) -> None:
    known = [f.name for f in fields(TrainingSettings)]
    for name in settings:
        if name not in known:
            raise OptionError(
                "unknown setting", where="finetune", got=name, expected=", ".join(known),
                hint=did_you_mean(name, known),
            )  # fmt: skip


def _opened(model: Any) -> tuple[ModelFile, str]:
    """The file of a model, and what to call it."""
    if isinstance(model, str | os.PathLike):
        path = resolve(model)
        return ModelFile.of(path, open_model(path)), os.fspath(model)
    file = getattr(model, "model", None)
    if not isinstance(file, ModelFile):
        raise InputError(
            "not a model", where="finetune", got=repr(model)[:60], expected="a path or a name, or "
            "what rlx.load gives",
        )  # fmt: skip
    return file, str(file.path)


def _lora(lora: Any, full: bool, file: ModelFile) -> LoraConfig | None:
    """The adapters that are trained; None: all weights are."""
    if full and lora is not None:
        raise OptionError("not with full", where="lora", got=lora, expected="one of them")
    if full or (lora is None and file.is_encoder):
        return None
    if lora is None or isinstance(lora, LoraConfig):
        return lora or LoraConfig()
    known = [f.name for f in fields(LoraConfig)]
    unknown = [name for name in lora if name not in known]
    if unknown:
        raise OptionError(
            "unknown setting", where="lora", got=unknown[0], expected=", ".join(known),
            hint=did_you_mean(unknown[0], known),
        )  # fmt: skip
    return LoraConfig(**lora)


@dataclass
class _Job:
    """A model that is fine-tuned into a folder."""

    file: ModelFile
    base: str
    lora: LoraConfig | None
    settings: TrainingSettings
    out: Path
    remat: str
    temperature: float

    # -- checks -------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        if self.lora is not None and not self.file.is_encoder:
            return "adapter"
        return "folder" if self.file.path.is_dir() else "gguf"

    def check_outputs(self, merge: Any, type: str | None, resume: bool) -> None:
        """Raise now for what could not be written after training."""
        if merge is not None and self.kind != "adapter":
            raise OptionError(
                "only an adapter is merged", where="merge", got=os.fspath(merge),
                hint=f"{self.out} has the whole model",
            )  # fmt: skip
        if type is not None and merge is None and self.kind != "gguf":
            raise OptionError("a type of GGUF files", where="type", got=type, expected="merge too")
        if merge is not None:
            require_other_file(Path(merge), *self.file.file.files)
            if Path(merge).suffix.lower() != ".gguf" or Path(merge).is_dir():
                raise OptionError("no GGUF file", where="merge", got=merge, expected="NAME.gguf")
        if self.out.exists() and not self.out.is_dir():
            raise OptionError("not a folder", where="out", got=self.out)
        there = {p.name for p in self.out.iterdir()} if self.out.is_dir() else set()
        if there and "checkpoints" not in there and (resume or _FINISHED not in there):
            raise InputError(
                "the folder is not empty, and has no checkpoints to go on from",
                where=str(self.out), got=", ".join(sorted(there)[:4]),
                hint="another out" + ("; or resume=False" if _FINISHED in there else ""),
            )  # fmt: skip

    # -- what is trained ----------------------------------------------------------------------

    def language_task(
        self, data: Data, evaluation: float | Data | None, pack: bool, options: Mapping[str, str]
    ) -> tuple[Task, Dataset]:
        s, config = self.settings, self.file.config
        longest = config.context_length(s.context) if s.context else min(_LONGEST, config.context)
        tokenizer = self.file.tokenizer()
        # the last token of an example has nothing to say: a row has one less
        dataset = read_examples(data, tokenizer, longest=longest + 1, **options)
        train, kept = dataset.examples, None
        if isinstance(evaluation, int | float):
            train, kept = split_off(train, evaluation, s.seed)
        elif evaluation is not None:
            found = read_examples(evaluation, tokenizer, longest=longest + 1, **options)
            kept = found.examples
        pack = pack and not self._is_recurrent()
        length = row_length([*train, *(kept or [])], longest, pack)
        source: BatchSource = Rows(train, length, s.batch, parts=s.accumulate, pack=pack)
        held = None if kept is None else Rows(kept, length, s.batch, pack=pack)
        model = TrainingModel(self.file, self.lora, context=length, remat=self.remat)
        params = model.init(s.seed)
        if self.kind == "adapter":
            require_names(self.file, params)
        elif self.kind == "folder":
            require_folder(self.file, params)
        task = Task(model.loss, params, source, held, self._usual_rate(), self._identity())
        return task, dataset

    def encoder_task(self, data: Data, evaluation: float | Data | None) -> Task:
        from rlx.models.encoder_inputs import TextReader

        s, config = self.settings, self.file.config
        if config.encoder is not None and config.encoder.labels:
            raise UnsupportedError(
                "a cross-encoder is not fine-tuned", where=str(self.file.path),
                expected="an encoder that embeds texts",
            )  # fmt: skip
        if s.accumulate > 1:
            raise OptionError(
                "negatives are those of one batch", where="accumulate", got=s.accumulate, expected=1
            )
        if not isinstance(self.temperature, int | float) or not 0 < self.temperature < 100:
            raise OptionError("not a temperature", where="temperature", got=self.temperature)
        longest = s.context or min(self.file.sentence.max_tokens or 512, 512, config.context)
        reader = TextReader(self.file, self.file.tokenizer(), longest)
        known = self.file.sentence.prompts
        prompts = (known.get("query", ""), known.get("document", known.get("passage", "")))
        train, kept = read_pairs(data, reader, prompts), None
        if isinstance(evaluation, int | float):
            train, kept = split_off(train, evaluation, s.seed)
        elif evaluation is not None:
            kept = read_pairs(evaluation, reader, prompts)
        model = EncoderTrainingModel(self.file, self.lora, remat=self.remat)
        params = model.init(s.seed)
        if self.kind == "folder":
            require_folder(self.file, params)
        loss = contrastive_loss(model, s.batch, self.temperature)
        held = None if kept is None else Pairs(kept, s.batch)
        identity = self._identity() | {"temperature": self.temperature}
        return Task(loss, params, Pairs(train, s.batch), held, self._usual_rate(), identity)

    def _is_recurrent(self) -> bool:
        """Whether layers carry a state along a row, which must then be one document."""
        return bool(self.file.config.recurrent)

    def _usual_rate(self) -> float:
        return _RATES["full" if self.lora is None else "lora"]

    def _identity(self) -> dict[str, Any]:
        """What a run depends on beside settings and data."""
        found = sha256()
        for path in self.file.file.files:
            found.update(f"{path.name} {path.stat().st_size}".encode())
        adapters = None if self.lora is None else repr(self.lora)
        return {"model": found.hexdigest()[:16], "lora": adapters, "remat": self.remat}

    # -- what is written ----------------------------------------------------------------------

    def written(
        self, params: Any, history: History, merge: Any, type: str | None, dataset: Dataset | None
    ) -> FineTuned:
        changes = weight_changes(params, self.lora)
        path, merged = self.out, None
        if self.kind == "adapter":
            assert self.lora is not None
            write_adapter(self.out, self.file, params, self.lora, self.base)
            if merge is not None:
                merged = Path(merge)
                write_gguf_model(merged, self.file, changes, type)
        elif self.kind == "folder":
            write_folder(self.out, self.file, changes)
        else:
            path = self.out / "model.gguf"
            write_gguf_model(path, self.file, changes, type, is_full=self.lora is None)
        history.write(self.out / _FINISHED)
        return FineTuned(path, history, self.kind, merged, dataset)


def contrastive_loss(
    model: EncoderTrainingModel, count: int, temperature: float
) -> Callable[[Any, Any, Any], tuple[Array, Array]]:
    """InfoNCE over the documents of a batch: −log of the probability that a softmax of cosine
    similarities over `temperature` gives to the document that answers the query."""

    def loss(params: Any, batch: Any, key: Any) -> tuple[Array, Array]:
        texts = {"tokens": batch["tokens"], "lengths": batch["lengths"]}
        x = model.embed(params, texts, key)
        x = x / rnp.sqrt(rnp.sum(x * x, axis=-1, keepdims=True) + 1e-12)
        queries, documents = x[:count], x[count:]
        scores = (queries @ documents.mT) / temperature
        scores = rnp.where(batch["known"], scores, -1e9)
        highest = rnp.max(scores, axis=-1, keepdims=True)
        total = rnp.log(rnp.sum(rnp.exp(scores - highest), axis=-1)) + highest[:, 0]
        own = rnp.sum(queries * documents[:count], axis=-1) / temperature
        weight = rnp.asarray(batch["weight"])
        number = rnp.sum(weight)
        return rnp.sum((total - own) * weight) / rnp.maximum(number, 1.0), number

    return loss
