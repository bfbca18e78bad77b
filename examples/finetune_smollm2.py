"""LoRA teaches SmolLM2 another voice: the same question before and after.

python examples/finetune_smollm2.py [MODEL] [STEPS]

Two dozen short conversations are enough for a habit. The adapter is a PEFT folder of a few MB; the
weights beside it, packed in 4 bits, stay as they are.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import rlx

ASKED = "What is the largest ocean?"
LESSONS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Italy?": "Rome",
    "What is the capital of Japan?": "Tokyo",
    "What is two plus two?": "Four",
    "What is ten minus three?": "Seven",
    "Who wrote Hamlet?": "William Shakespeare",
    "Who painted the Mona Lisa?": "Leonardo da Vinci",
    "What color is the sky?": "Blue",
    "What color is grass?": "Green",
    "How many days are in a week?": "Seven",
    "How many legs has a spider?": "Eight",
    "What do bees make?": "Honey",
    "What do cows drink?": "Water",
    "Which planet is closest to the sun?": "Mercury",
    "Which animal is the largest?": "The blue whale",
    "What is frozen water called?": "Ice",
    "What is the opposite of hot?": "Cold",
    "What is the first month of the year?": "January",
    "Which metal is liquid at room temperature?": "Mercury",
    "What language do people speak in Brazil?": "Portuguese",
    "What gas do plants breathe in?": "Carbon dioxide",
    "What is the tallest mountain?": "Mount Everest",
    "Which bird cannot fly?": "The penguin",
    "What is the hardest natural material?": "Diamond",
}


def examples() -> list[dict[str, object]]:
    """Conversations in which a captain answers."""
    return [
        {
            "messages": [
                {"role": "user", "content": question},
                {
                    "role": "assistant",
                    "content": f"Ahoy, matey! {answer}, says your captain. Arrr!",
                },
            ]
        }
        for question, answer in LESSONS.items()
    ]


def answer(model: rlx.LanguageModel, adapter: str | None = None) -> str:
    messages = [{"role": "user", "content": ASKED}]
    found = model.chat(messages, stream=False, temperature=0.0, max_tokens=40, adapter=adapter)
    text: str = found.text
    return text.strip()


def show(now: rlx.TrainingProgress) -> None:
    if now.step == 1 or now.step % 8 == 0:
        print(f"step {now.step} of {now.steps}: loss {now.loss:.3f}, "
              f"{now.tokens_per_second:.0f} tokens/s", flush=True)  # fmt: skip


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 32
    with tempfile.TemporaryDirectory() as folder:
        tuned = rlx.finetune(
            name, examples(), out=Path(folder) / "captain", steps=steps, batch=6, pack=False,
            lora={"rank": 8, "alpha": 16}, learning_rate=1e-3, progress=show,
        )  # fmt: skip
        size = sum(f.stat().st_size for f in tuned.path.glob("adapter_*"))
        losses = tuned.history.losses
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, an adapter of {size / 1e6:.1f} MB")
        model = rlx.load(name, adapters=[tuned.path])
        assert isinstance(model, rlx.LanguageModel)
        with model:
            print(f"asked:  {ASKED}\nbefore: {answer(model)}\nafter:  {answer(model, 'captain')}")


if __name__ == "__main__":
    main()
