"""What is learned of an example: answers alone. Hostile data, lengths, packing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finetune_models import chats, write_lines, write_llama

import rlx
from rlx.formats.chat_template import ChatTemplate
from rlx.formats.hf import HfFolder
from rlx.formats.tokenizer import Tokenizer
from rlx.models.finetune.batches import Rows, row_length, split_off
from rlx.models.finetune.examples import Example, read_examples

TURN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return HfFolder(write_llama(tmp_path_factory.mktemp("llama"))).tokenizer()


def shown(tokenizer: Tokenizer, example: Example) -> list[tuple[str, bool]]:
    """Runs of text, and whether they are learned."""
    found: list[tuple[str, bool]] = []
    for token, learned in zip(example.tokens.tolist(), example.learned.tolist(), strict=True):
        text = tokenizer.decode([token], skip_special=False)
        if found and found[-1][1] == learned:
            text = found.pop()[0] + text
        found.append((text, learned))
    return found


def read(tokenizer: Tokenizer, *entries: dict[str, Any], **options: Any) -> list[Example]:
    return read_examples(list(entries), tokenizer, **{"longest": 200, **options}).examples


def test_answers_with_the_end_of_their_turn_are_learned(tokenizer: Tokenizer) -> None:
    system = {"role": "system", "content": "be brief"}
    (found,) = read(tokenizer, {"messages": [system, *TURN, *TURN]})
    asked = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert shown(tokenizer, found) == [
        (f"<|im_start|>system\nbe brief<|im_end|>\n{asked}", False), ("yo<|im_end|>", True),
        (f"\n{asked}", False), ("yo<|im_end|>", True), ("\n", False),
    ]  # fmt: skip
    (last,) = read(tokenizer, {"messages": [*TURN, *TURN]}, answers="last")
    assert [learned for _, learned in shown(tokenizer, last)] == [False, True, False]
    # the model sees the same tokens as in a chat
    prompt = tokenizer.encode_chat([system, *TURN, TURN[0]])
    assert found.tokens[: len(prompt)].tolist() == prompt


def test_prompts_completions_and_texts(tokenizer: Tokenizer) -> None:
    plain, listed, text = read(
        tokenizer, {"prompt": "2+2=", "completion": " 4"},
        {"prompt": [*TURN, TURN[0]], "completion": [TURN[1]]}, {"text": "once"},
    )  # fmt: skip
    assert shown(tokenizer, plain) == [("2+2=", False), (" 4<|im_end|>", True)]
    assert [text for text, learned in shown(tokenizer, listed) if learned] == ["yo<|im_end|>"]
    assert shown(tokenizer, text) == [("once<|im_end|>", True)]


def test_special_tokens_in_messages_are_text(tokenizer: Tokenizer) -> None:
    sly = {"role": "assistant", "content": "a<|im_end|>b"}
    (found,) = read(tokenizer, {"messages": [TURN[0], sly]})
    ends = found.tokens == tokenizer.id_of("<|im_end|>")
    assert int(ends.sum()) == 2  # the template's own
    learned = [text for text, learned in shown(tokenizer, found) if learned]
    assert learned == ["a<|im_end|>b<|im_end|>"]


def test_a_template_that_rewrites_what_was_before_is_an_error(tokenizer: Tokenizer) -> None:
    """As those that leave out what the model thought in earlier turns."""
    source = tokenizer.vocabulary.templates["default"].replace(
        "{{ m['content'] }}",
        "{% if loop.last and m['role'] == 'assistant' %}hm: {% endif %}{{ m['content'] }}",
    )
    changed = Tokenizer(tokenizer._backend, tokenizer.vocabulary, "x")
    changed._chat["default"] = ChatTemplate(source)
    with pytest.raises(rlx.InputError, match=r"\[example 0\] the chat template writes what is"):
        read(changed, {"messages": [*TURN, *TURN]})
    (found,) = read(changed, {"messages": [*TURN, *TURN]}, answers="last")
    assert [t for t, learned in shown(changed, found) if learned] == ["hm: yo<|im_end|>"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"txt": "x"}, "not a training example; got 'txt'"),
        ({}, "not a training example; got {}"),
        ({"messages": "hi"}, "messages are not a list; got str"),
        ({"messages": []}, "messages are not a list"),
        ({"messages": [1]}, "no message of the assistant; got None"),
        ({"messages": TURN[:1]}, "no message of the assistant; got user"),
        ({"messages": [TURN[0], {"role": "assistant", "content": 3}]}, "content that is not text"),
        ({"messages": TURN, "tools": "x"}, "tools are not a list"),
        ({"prompt": 1, "completion": "x"}, "prompt is no text; got int"),
        ({"text": ["a"]}, "text is no text; got list"),
        ({"text": "\ud800"}, "only text can be tokenised"),
    ],
)
def test_what_is_no_example_is_named_with_its_line(
    tokenizer: Tokenizer, entry: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "d.jsonl", [*chats(1), entry])
    with pytest.raises(rlx.RlxError, match=message) as raised:
        read_examples(path, tokenizer, longest=200)
    assert f"[{path}:2] " in str(raised.value)


def test_files_that_are_no_json_lines(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "a b"}\n\n{"text": \n')
    with pytest.raises(rlx.FormatError, match=r"d\.jsonl:3"):
        read_examples(path, tokenizer, longest=9)
    path.write_text("")
    with pytest.raises(rlx.InputError, match="no example has anything to learn"):
        read_examples(path, tokenizer, longest=9)
    with pytest.raises(rlx.InputError, match="no such file"):
        read_examples(tmp_path / "none", tokenizer, longest=9)
    with pytest.raises(rlx.InputError, match="not an object"):
        read_examples(["x"], tokenizer, longest=9)  # type: ignore[list-item]
    with pytest.raises(rlx.InputError, match="not examples; got int"):
        read_examples(3, tokenizer, longest=9)  # type: ignore[arg-type]


def test_examples_that_are_too_long(tokenizer: Tokenizer) -> None:
    long, short = {"text": "a" * 20}, {"prompt": "b" * 12, "completion": "c"}
    (cut,) = read(tokenizer, long, longest=8)
    assert len(cut) == 8
    assert [len(e) for e in read(tokenizer, long, longest=8, overlong="split")] == [8, 8, 5]
    found = read_examples([long, short, {"text": "d"}], tokenizer, longest=8, overlong="drop")
    assert (len(found.examples), found.dropped) == (1, 2)
    found = read_examples([long, short], tokenizer, longest=8)
    assert (len(found.examples), found.cut, found.dropped) == (1, 2, 1)  # c did not fit
    with pytest.raises(rlx.InputError, match=r"example 0.*too long; got 21 tokens"):
        read(tokenizer, long, longest=8, overlong="error")
    with pytest.raises(rlx.OptionError, match="unknown overlong"):
        read(tokenizer, long, overlong="trim")


@pytest.mark.parametrize(("pack", "parts"), [(True, 1), (False, 1), (True, 3)])
def test_rows_have_each_example_once_and_its_labels_one_further(
    tokenizer: Tokenizer, pack: bool, parts: int
) -> None:
    examples = read(tokenizer, *chats(7), {"text": "a longer text, of some more letters"})
    length = row_length(examples, 192, pack)
    rows = Rows(examples, length, 2, parts=parts, pack=pack)
    seen, counted = [], 0
    for begin in range(0, len(rows), 2 * parts):
        made = rows.batch(np.arange(begin, min(begin + 2 * parts, len(rows))))
        arrays = {n: x.reshape(-1, length) for n, x in made.arrays.items() if n != "rows"}
        assert len(arrays["tokens"]) == 2 * parts  # the last batch is filled up
        counted += made.tokens
        for part, places in zip(
            arrays["labels"].reshape(parts, -1), made.arrays["rows"].reshape(parts, -1), strict=True
        ):
            assert places[places >= 0].tolist() == np.flatnonzero(part != -100).tolist()
        for row in range(2 * parts):
            labels, tokens = arrays["labels"][row], arrays["tokens"][row]
            if not pack:  # what fills a row is not learned
                seen.append((tokens[: labels.nonzero()[0][-1] + 1], labels))
                continue
            numbers = arrays["segments"][row]
            for k in range(1, numbers.max() + 1):
                here = numbers == k
                assert arrays["positions"][row][here].tolist() == list(range(here.sum()))
                seen.append((tokens[here], labels[here]))
    wanted = [(e.tokens[:-1], np.where(e.learned, e.tokens, -100)[1:]) for e in examples]
    assert counted == sum(len(tokens) for tokens, _ in wanted)

    def as_text(tokens: Any, labels: Any) -> tuple[Any, Any]:
        places = np.flatnonzero(labels != -100)
        return labels[places].tolist(), tokens[: places[-1] + 1 if len(places) else 0].tolist()

    learned = [pair for pair in seen if (pair[1] != -100).any()]
    assert sorted(as_text(*p) for p in learned) == sorted(as_text(*p) for p in wanted)


def test_an_evaluation_split_is_a_share_chosen_by_the_seed() -> None:
    items = list(range(50))
    train, kept = split_off(items, 0.1, seed=1)
    assert sorted(train + kept) == items and len(kept) == 5 and kept == sorted(kept)
    assert split_off(items, 0.1, seed=1) == (train, kept) != split_off(items, 0.1, seed=2)
    for share in (0, 1, 1.5, True):
        with pytest.raises(rlx.OptionError, match="not a share"):
            split_off(items, share, seed=0)
    with pytest.raises(rlx.InputError, match="nothing is left"):
        split_off([1], 0.5, seed=0)
