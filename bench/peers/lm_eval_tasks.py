"""Two tasks of our own for lm-eval, which need no download: questions with four choices, whose
log likelihoods are compared, and the same questions to be answered in a chat."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

CHOICES, CHAT = "rlx_choices", "rlx_chat"
STOP, TOKENS = "\n", 16  # of an answer in the chat

_CAPITALS = (
    "France Paris, Spain Madrid, Italy Rome, Germany Berlin, Japan Tokyo, China Beijing, "
    "Russia Moscow, Egypt Cairo, Greece Athens, Cuba Havana, Peru Lima, Kenya Nairobi, "
    "Norway Oslo, Sweden Stockholm, Poland Warsaw, Austria Vienna, Hungary Budapest, "
    "Portugal Lisbon, Ireland Dublin, Belgium Brussels, Canada Ottawa, Turkey Ankara, "
    "Iran Tehran, Iraq Baghdad, India Delhi, Finland Helsinki, Denmark Copenhagen, "
    "Ukraine Kyiv, Chile Santiago, Thailand Bangkok"
)
_OPPOSITES = (
    "hot cold, big small, up down, left right, day night, black white, good bad, fast slow, "
    "high low, open closed, wet dry, old new, rich poor, hard soft, happy sad, early late, "
    "long short, strong weak, light dark, first last, full empty, near far, in out, loud quiet, "
    "sweet sour, thick thin, true false, deep shallow, clean dirty, alive dead"
)
_SUMS = 40


@dataclass(frozen=True)
class Question:
    question: str
    choices: list[str]
    answer: int  # a place among the choices


def questions() -> list[Question]:
    """100 questions, always the same."""
    rng = random.Random(18)
    asked: list[tuple[str, str, list[str]]] = []
    for pairs, form in (
        (_CAPITALS, "Question: What is the capital of {}?\nAnswer:"),
        (_OPPOSITES, "Question: What is the opposite of {}?\nAnswer:"),
    ):
        known = dict(pair.split() for pair in pairs.split(", "))
        asked += [(form.format(name), right, [*known.values()]) for name, right in known.items()]
    for _ in range(_SUMS):
        a, b = rng.randrange(1, 10), rng.randrange(1, 10)
        near = [str(n) for n in range(max(a + b - 5, 1), a + b + 6)]
        asked.append((f"Question: What is {a} + {b}?\nAnswer:", str(a + b), near))
    found = []
    for text, right, others in asked:
        choices = [right, *rng.sample([o for o in others if o != right], 3)]
        rng.shuffle(choices)
        found.append(Question(text, choices, choices.index(right)))
    return found


def write_tasks(folder: Path, asked: list[Question]) -> None:
    """The tasks as lm-eval reads them."""
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(asdict(one)) + "\n" for one in asked))
    head = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test", "num_fewshot": 0, "doc_to_text": "{{question}}",
    }  # fmt: skip
    choices = head | {
        "task": CHOICES, "output_type": "multiple_choice", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    chat = head | {
        "task": CHAT, "output_type": "generate_until", "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": [STOP], "max_gen_toks": TOKENS, "temperature": 0},
        "filter_list": [{"name": "last", "filter": [
            {"function": "regex", "regex_pattern": "(\\w+)\\W*$"}, {"function": "take_first"},
        ]}],
        "metric_list": [{"metric": "exact_match", "ignore_case": True}],
    }  # fmt: skip
    for task in (choices, chat):
        (folder / f"{task['task']}.yaml").write_text(json.dumps(task))  # JSON is YAML
