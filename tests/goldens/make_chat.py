"""Token ids of conversations by transformers' apply_chat_template: writes chat_ids.json.

python tests/goldens/make_chat.py, where transformers is installed.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import tokenizers
import transformers
from chat_templates import FAMILIES, TALKS, write_tokenizer


def main() -> None:
    made: dict[str, dict[str, list[int] | None]] = {}
    for family, (template, _, bos, eos, _) in FAMILIES.items():
        made[family] = {}
        with tempfile.TemporaryDirectory() as name:
            write_tokenizer(family, Path(name), tokenizers)
            tokenizer = transformers.PreTrainedTokenizerFast(
                tokenizer_file=f"{name}/tokenizer.json", bos_token=bos, eos_token=eos
            )
        for talk, messages in TALKS.items():
            for prompt in (True, False):
                try:
                    ids = tokenizer.apply_chat_template(
                        messages, chat_template=template, add_generation_prompt=prompt,
                        return_dict=False,
                    )  # fmt: skip
                except Exception as error:  # the template refuses a system message
                    assert "System role not supported" in str(error)
                    ids = None
                made[family][f"{talk}, {'prompt' if prompt else 'no prompt'}"] = ids
    path = Path(__file__).with_name("chat_ids.json")
    path.write_text(json.dumps(made) + "\n", encoding="utf-8")


main()
