"""Encoders that learn from pairs of texts: the loss against NumPy, what is learned and written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))
from encoder_files import write_model
from finetune_models import chats, write_llama

import rlx

TEMPERATURE = 0.1
PAIRS = [
    {"query": "the cat", "positive": "a b c"},
    {"query": "dog?", "positive": "x y z, 1"},
    {"query": "q r", "positive": "the cats"},
    {"query": "m n o", "positive": "p 2 3"},
]
WITH_NEGATIVES = [p | {"negative": n} for p, n in zip(PAIRS, ["u", "v", "w", "k"], strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bert"))


def vectors(path: Path, pairs: Any) -> list[np.ndarray]:
    """Of queries, answers, and what does not answer, of length 1."""
    with rlx.load(path) as model:
        names = [n for n in ("query", "positive", "negative") if n in pairs[0]]
        found = [np.asarray(model.embed([p[n] for p in pairs]), np.float64) for n in names]
    return [x / np.linalg.norm(x, axis=1, keepdims=True) for x in found]


def info_nce(path: Path, pairs: Any) -> float:
    """−log softmax of the similarities of each query to all documents, at its own."""
    queries, *documents = vectors(path, pairs)
    scores = queries @ np.concatenate(documents).T / TEMPERATURE
    own = np.diag(scores)
    return float(np.mean(np.log(np.sum(np.exp(scores - own[:, None]), axis=1))))


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
@pytest.mark.parametrize("pairs", [PAIRS, WITH_NEGATIVES])
def test_the_loss_of_the_first_step_is_info_nce(
    folder: Path, tmp_path: Path, pairs: Any, lora: Any
) -> None:
    """Inference and training sum in different orders: f32 of vectors of length 1, over 0.1."""
    found = rlx.finetune(
        folder, pairs, out=tmp_path / "out", steps=1, batch=4, lora=lora, temperature=TEMPERATURE
    )
    assert abs(found.history.losses[0] - info_nce(folder, pairs)) < 1e-4


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_queries_find_their_answers(folder: Path, tmp_path: Path, lora: Any) -> None:
    """The result is a folder like that of the model, whose loss is the one the run ended with."""
    out, before = tmp_path / "out", info_nce(folder, WITH_NEGATIVES)
    found = rlx.finetune(
        folder, WITH_NEGATIVES, out=out, steps=40, batch=4, lora=lora, learning_rate=5e-3,
        temperature=TEMPERATURE, schedule="constant", warmup=0.0,
    )  # fmt: skip
    assert found.kind == "folder" and found.path == out
    after = info_nce(out, WITH_NEGATIVES)
    assert after < 0.1 * before and after < found.history.losses[-2]
    queries, answers, _ = vectors(out, WITH_NEGATIVES)
    assert np.array_equal(np.argmax(queries @ answers.T, axis=1), np.arange(4))


def test_the_text_of_an_answer_does_not_compete_with_itself(folder: Path, tmp_path: Path) -> None:
    """Two queries with one answer: each sees it once, so with nothing else there is no loss."""
    pairs = [{"query": q, "positive": "a b c"} for q in ("the cat", "dog?")]
    found = rlx.finetune(folder, pairs, out=tmp_path / "out", steps=2, batch=2)
    assert max(map(abs, found.history.losses)) < 1e-5


def test_evaluation_stops_and_interrupted_runs_resume(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "steps": 8, "batch": 2, "evaluation": WITH_NEGATIVES[2:], "eval_every": 2, "save_every": 2,
    }  # fmt: skip
    straight = rlx.finetune(folder, WITH_NEGATIVES[:2], out=tmp_path / "a", **options)
    assert [step for step, _ in straight.history.evaluations] == [2, 4, 6, 8]

    def stop(now: rlx.TrainingProgress) -> None:
        if now.step == 5:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        rlx.finetune(folder, WITH_NEGATIVES[:2], out=tmp_path / "b", progress=stop, **options)
    resumed = rlx.finetune(folder, WITH_NEGATIVES[:2], out=tmp_path / "b", **options)
    assert resumed.history.losses == straight.history.losses
    names = [tmp_path / x / "model.safetensors" for x in "ab"]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_examples_of_the_other_kind_of_model_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(rlx.InputError, match=r'0\] query is no text.*expected \{"query"'):
        rlx.finetune(folder, chats(2), out=tmp_path / "a", steps=1)
    llama = write_llama(tmp_path / "llama")
    with pytest.raises(rlx.InputError, match="not a training example; got 'query', 'positive'"):
        rlx.finetune(llama, PAIRS, out=tmp_path / "b", steps=1)
    with pytest.raises(rlx.InputError, match="negative"):
        rlx.finetune(folder, [*PAIRS, WITH_NEGATIVES[0]], out=tmp_path / "c", steps=1)
