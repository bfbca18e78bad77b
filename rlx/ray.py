"""Offline jobs on a Ray cluster: embed or generate for every row of a Ray dataset.

    import ray, rlx.ray

    rows = ray.data.read_parquet("prompts/")
    done = rlx.ray.generate(rows, "smollm2-135m", workers=4, checkpoint="run-1", max_tokens=64)

A pool of actors takes batches of rows; each has the model. With a checkpoint folder a finished
batch is a file there, written atomically under a name made of the ids of its rows. A worker that
dies costs the batch it had; a job that dies goes on from the files when it is started again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rlx.errors import InputError, OptionError, RlxError, UnsupportedError
from rlx.support.files import private_file, write_atomic
from rlx.support.records import dataclass

_JOB, _PARTS = "job.json", "batch-*.parquet"


def generate(
    dataset: Any,
    model: str | os.PathLike[str] = "smollm2-135m",
    *,
    prompt: str = "prompt",
    output: str = "text",
    id: str = "id",
    checkpoint: str | os.PathLike[str] | None = None,
    batch_size: int = 64,
    workers: int | tuple[int, int] = 1,
    cpus: float = 1,
    gpus: float = 0,
    engine: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """The dataset with an answer to each row's `prompt`, a text or a list of messages.

    New columns: `output`, finish_reason, prompt_tokens, completion_tokens and error, which says
    why a row has no answer. `workers` actors, or from some to some, take `cpus` and `gpus` each.
    `engine` has options of `rlx.Engine`; `settings` are those of its `submit`. With a `checkpoint`
    folder, which all machines must see, the job runs now, and `id` names the column of unique ids;
    without, rows are computed when they are read.
    """
    options = {"threads": max(1, int(cpus)), **(engine or {})}
    options.setdefault("waiting", max(1024, batch_size))
    job = _Job("generate", str(model), prompt, output, id, options, settings)
    return _run(dataset, job, checkpoint, batch_size, workers, cpus, gpus)


def embed(
    dataset: Any,
    model: str | os.PathLike[str],
    *,
    text: str = "text",
    output: str = "embedding",
    id: str = "id",
    checkpoint: str | os.PathLike[str] | None = None,
    batch_size: int = 256,
    workers: int | tuple[int, int] = 1,
    cpus: float = 1,
    gpus: float = 0,
    load: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """The dataset with a vector of each row's `text` in `output`: f32, as `EncoderModel.embed`
    gives it with these `settings`. `load` has options of `rlx.load`; the rest is as in `generate`.
    """
    options = {"threads": max(1, int(cpus)), **(load or {})}
    job = _Job("embed", str(model), text, output, id, options, settings)
    return _run(dataset, job, checkpoint, batch_size, workers, cpus, gpus)


@dataclass(frozen=True)
class _Job:
    """What is done to every row."""

    kind: str
    model: str
    source: str  # the column that is read
    output: str
    id: str
    options: Mapping[str, Any]
    settings: Mapping[str, Any]


def _run(
    dataset: Any, job: _Job, checkpoint: str | os.PathLike[str] | None, batch_size: int,
    workers: int | tuple[int, int], cpus: float, gpus: float,
) -> Any:  # fmt: skip
    data = _ray_data()
    low, high = (workers, workers) if isinstance(workers, int) else workers
    if not 1 <= low <= high:
        raise OptionError("not a number of workers", where="workers", got=workers,
                          expected="1 or more, or (least, most)")  # fmt: skip
    if batch_size < 1:
        raise OptionError("not a number of rows", where="batch_size", got=batch_size)
    folder = None if checkpoint is None else _open_folder(checkpoint, job)
    mapped = dataset.map_batches(
        _Worker,
        fn_constructor_args=(job, None if folder is None else str(folder)),
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=data.ActorPoolStrategy(min_size=low, max_size=high),
        num_cpus=cpus,
        num_gpus=gpus,
    )  # actors that die are started again and their tasks repeated: Ray Data's default
    if folder is None:
        return mapped
    for _ in mapped.iter_batches(batch_size=None, batch_format="pyarrow"):
        pass  # the rows are in files
    return _delivered(data, folder, job.id)


def _ray_data() -> Any:
    try:
        import ray.data
    except ImportError as error:
        raise UnsupportedError(
            f"this needs Ray, which is not installed ({error})", where="rlx.ray",
            hint="pip install 'ray[serve,data]'",
        ) from None  # fmt: skip
    return ray.data


# -- the checkpoint folder ------------------------------------------------------------------------


def _open_folder(checkpoint: str | os.PathLike[str], job: _Job) -> Path:
    """The folder of a job, made if need be. That of another job is an error."""
    if "://" in str(checkpoint):
        raise OptionError(
            "not a folder", where="checkpoint", got=str(checkpoint),
            hint="give a folder that all machines of the cluster mount",
        )  # fmt: skip
    folder = Path(checkpoint).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    told = json.dumps(asdict(job), default=str, sort_keys=True, indent=1).encode()
    file = folder / _JOB
    if not file.exists():
        if any(folder.glob(_PARTS)):
            raise OptionError(f"batches without {_JOB}", where="checkpoint", got=str(folder))
        write_atomic(file, told)
    elif file.read_bytes() != told:
        raise OptionError(
            "this folder has rows of a job with another model or other settings",
            where="checkpoint", got=str(folder), hint=f"{file} says which; take a new folder",
        )  # fmt: skip
    return folder


def _finished_ids(parts: Iterable[Path], column: str) -> list[tuple[str, list[Any]]]:
    """The ids in each file."""
    import pyarrow.parquet as pq

    found = []
    for path in sorted(parts):
        table = pq.read_table(path, columns=[column], partitioning=None)
        found.append((str(path), table.column(column).to_pylist()))
    return found


def _part_name(ids: Iterable[Any]) -> str:
    """The same rows have the same file, whoever computes them."""
    text = json.dumps(sorted(map(repr, ids))).encode()
    return f"batch-{hashlib.blake2b(text, digest_size=16).hexdigest()}.parquet"


def _delivered(data: Any, folder: Path, column: str) -> Any:
    """All finished rows. One that is in two files, because a batch was cut otherwise when it was
    computed again, is taken from the first."""
    parts = sorted(folder.glob(_PARTS))
    if not parts:
        return data.from_items([])
    first: dict[Any, str] = {}
    twice = False
    for path, ids in _finished_ids(parts, column):
        for one in ids:
            twice |= first.setdefault(one, path) != path
    paths = [str(path) for path in parts]
    if not twice:
        return data.read_parquet(paths)
    kept: dict[str, list[Any]] = {path: [] for path in paths}
    for one, path in first.items():
        kept[path].append(one)
    read = [
        data.read_parquet(path).map_batches(
            partial(_only, column=column, ids=kept[path]), batch_format="pyarrow"
        )
        for path in paths
    ]
    return read[0].union(*read[1:])


def _only(table: Any, column: str, ids: list[Any]) -> Any:
    """The rows with these ids."""
    wanted = set(ids)
    return table.filter([one in wanted for one in table.column(column).to_pylist()])


# -- workers --------------------------------------------------------------------------------------


class _Worker:
    """An actor with the model. It computes batches, or writes them and gives their sizes."""

    def __init__(self, job: _Job, folder: str | None) -> None:
        self._job = job
        self._compute = (_Generate if job.kind == "generate" else _Embed)(job)
        self._folder = None if folder is None else Path(folder)
        self._done: set[Any] = set()
        if self._folder is not None:
            for _, ids in _finished_ids(self._folder.glob(_PARTS), job.id):
                self._done.update(ids)

    def __call__(self, table: Any) -> Any:
        import pyarrow as pa

        job = self._job
        columns = table.column_names
        self._require(job.source, columns)
        if self._folder is None:
            return self._computed(table)
        self._require(job.id, columns)
        ids = table.column(job.id).to_pylist()
        if len(set(ids)) < len(ids) or None in ids:
            raise InputError(f"ids in the column {job.id!r} are not unique, or are missing",
                             where="id", hint="every row needs an id of its own")  # fmt: skip
        table = table.filter([one not in self._done for one in ids])
        path = self._folder / _part_name(table.column(job.id).to_pylist())
        if len(table) and not path.exists():
            self._write(self._computed(table), path)
        return pa.table({"rows": [len(table)]})

    def _computed(self, table: Any) -> Any:
        if not len(table):
            return table
        made = self._compute(table.column(self._job.source).to_pylist())
        for name, column in made.items():
            if name in table.column_names:
                raise InputError(f"the dataset has a column {name!r} already", where="output",
                                 hint="name another output=, or drop the column")  # fmt: skip
            table = table.append_column(name, column)
        return table

    @staticmethod
    def _require(name: str, columns: list[str]) -> None:
        if name not in columns:
            raise InputError("no such column", got=name, expected=", ".join(columns))

    @staticmethod
    def _write(table: Any, path: Path) -> None:
        import pyarrow.parquet as pq

        with private_file(path) as file:
            pq.write_table(table, file)


class _Generate:
    def __init__(self, job: _Job) -> None:
        from rlx.models.batch.engine import Engine

        self._output, self._settings = job.output, dict(job.settings)
        self._engine = Engine(job.model, **job.options)
        self._engine.settings(**self._settings)  # what is wrong in them is wrong for all rows

    def __call__(self, prompts: list[Any]) -> dict[str, Any]:
        import pyarrow as pa

        answers = [self._answer(reply) for reply in [self._submit(p) for p in prompts]]
        whole = {"prompt_tokens": 1, "completion_tokens": 2}
        return {
            self._output: pa.array([a[0] for a in answers], pa.string()),
            "finish_reason": pa.array([a[3] for a in answers], pa.string()),
            **{n: pa.array([a[i] for a in answers], pa.int32()) for n, i in whole.items()},
            "error": pa.array([a[4] for a in answers], pa.string()),
        }

    def _submit(self, prompt: Any) -> Any:
        """A reply, or why there is none."""
        try:
            if isinstance(prompt, list):
                messages = [{k: v for k, v in m.items() if v is not None} for m in prompt]
                return self._engine.chat(messages, **self._settings)
            if not isinstance(prompt, str):
                raise InputError("neither a text nor a list of messages", got=repr(prompt)[:60])
            return self._engine.submit(prompt, **self._settings)
        except (RlxError, AttributeError, ValueError) as error:
            return error

    @staticmethod
    def _answer(reply: Any) -> tuple[str | None, int, int, str, str | None]:
        try:
            if isinstance(reply, Exception):
                raise reply
            done = reply.wait()
        except (RlxError, AttributeError, ValueError) as error:
            return None, 0, 0, "error", str(error)
        return done.text, done.prompt_tokens, len(done.tokens), done.finish_reason, None


class _Embed:
    def __init__(self, job: _Job) -> None:
        from rlx.models.load import load_text_model

        self._output, self._settings = job.output, dict(job.settings)
        self._model: Any = load_text_model(job.model, **job.options)

    def __call__(self, texts: list[Any]) -> dict[str, Any]:
        import pyarrow as pa

        rows = self._model.embed(texts, **self._settings)
        flat = pa.array(rows.reshape(-1), pa.float32())
        return {self._output: pa.FixedSizeListArray.from_arrays(flat, rows.shape[1])}
