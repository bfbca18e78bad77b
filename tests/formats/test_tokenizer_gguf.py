"""Vocabularies of every kind against plain algorithms written here, and the rules around them."""

from __future__ import annotations

import random
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import vocab_files as v

from rlx.errors import FormatError, InputError, UnsupportedError
from rlx.formats.tokenizer.gguf_vocabulary import tokenizer_from_gguf
from rlx.formats.tokenizer.pretokenizers import _BY_NAME, find_split, make_pre_tokenizer

MARKS: list[v.Token] = [("<unk>", v.UNKNOWN, 0), ("<s>", v.CONTROL, 0), ("</s>", v.CONTROL, 0)]


def random_words(rng: random.Random, letters: str, count: int) -> list[str]:
    """Words such that all prefixes are words too, as training makes them."""
    words = dict.fromkeys(letters)
    while len(words) < count:
        words[rng.choice(list(words)) + rng.choice(list(words))] = None
    return list(words)


def best_merges(text: str, score: dict[str, float]) -> list[str]:
    """SentencePiece BPE: again and again join the pair that makes the token with the best score,
    the leftmost of several."""
    parts = list(text)
    while True:
        joins = [(-score[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in score]
        if not joins:
            return parts
        at = min(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_sentencepiece_is_greedy_by_score(tmp_path: Path) -> None:
    rng = random.Random(1)
    words = random_words(rng, "▁abc", 60)
    tokens = [*MARKS, *v.BYTE_TOKENS, *((w, v.NORMAL, -float(i)) for i, w in enumerate(words))]
    tokenizer = tokenizer_from_gguf(v.vocab_file(tmp_path, "llama", tokens))
    ids = {t: i for i, (t, _, _) in enumerate(tokens)}
    score = {w: -float(i) for i, w in enumerate(words)}
    for _ in range(300):
        text = "".join(rng.choices("abc ", k=rng.randrange(1, 25)))
        expected = [ids[p] for p in best_merges("▁" + text.replace(" ", "▁"), score)]
        assert tokenizer.encode(text, add_special=False) == expected
        assert tokenizer.decode(expected) == text


def test_sentencepiece_falls_back_to_bytes(tmp_path: Path) -> None:
    tokens = [*MARKS, *v.BYTE_TOKENS, ("▁", v.NORMAL, -1), ("a", v.NORMAL, -2)]
    tokenizer = tokenizer_from_gguf(v.vocab_file(tmp_path, "llama", tokens))
    space, a, first_byte = 259, 260, 3
    ids = tokenizer.encode("aé\n", add_special=False)
    assert ids == [space, a, *(first_byte + b for b in "é\n".encode())]
    assert tokenizer.decode(ids) == "aé\n"
    assert tokenizer.piece(first_byte + 0xC3) == b"\xc3"


def test_sentencepiece_marks(tmp_path: Path) -> None:
    more: list[v.Token] = [("▁", v.NORMAL, -1), ("a", v.NORMAL, -2), ("[X]", v.USER, -9)]
    tokens = [*MARKS, *v.BYTE_TOKENS, *more]
    tokenizer = tokenizer_from_gguf(v.vocab_file(tmp_path, "llama", tokens))
    space, a, user = 259, 260, 261
    assert tokenizer.encode("a") == [1, space, a]  # BOS by default, and a space before the text
    assert tokenizer.encode("") == [1]
    # a text after a mark is a text again
    assert tokenizer.encode("a</s>a", add_special=False) == [space, a, 2, space, a]
    assert tokenizer.encode("a[X]a", add_special=False) == [space, a, user, space, a]
    plain = tokenizer.encode("</s>", add_special=False, parse_special=False)
    assert 2 not in plain
    assert tokenizer.decode(plain) == "</s>"
    assert tokenizer.encode("[X]", add_special=False, parse_special=False) == [user]
    assert tokenizer.decode([1, space, a, 2]) == "a"
    assert tokenizer.decode([1, space, a, 2], skip_special=False) == "<s> a</s>"
    assert tokenizer.decode([space, a], at_start=False) == " a"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.end_ids) == (1, 2, {2})
    assert tokenizer.adds_bos


def test_sentencepiece_without_a_first_space(tmp_path: Path) -> None:
    tokens = [*MARKS, *v.BYTE_TOKENS, ("▁", v.NORMAL, -1), ("a", v.NORMAL, -2)]
    settings = {"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True}
    tokenizer = tokenizer_from_gguf(v.vocab_file(tmp_path, "llama", tokens, **settings))
    assert tokenizer.encode(" a") == [259, 260, 2]
    assert tokenizer.decode([259, 260]) == " a"


def test_special_tokens_are_text_for_unigram_too(tmp_path: Path) -> None:
    """Ids as llama.cpp has them: its unigram model never finds a control token in a text."""
    tokens: list[v.Token] = [("<pad>", v.CONTROL, 0), ("</s>", v.CONTROL, 0), ("<unk>", 2, 0)]
    tokens += [("▁", v.NORMAL, -2), *((c, v.NORMAL, -3.0) for c in "abs</>k"), ("[X]", v.USER, 0)]
    tokenizer = tokenizer_from_gguf(v.vocab_file(tmp_path, "t5", tokens, add_space_prefix=True))
    expected = {
        "a</s>b": ([3, 4, 1, 3, 5, 1], [3, 4, 7, 8, 6, 9, 5, 1]),
        "<pad>a": ([0, 3, 4, 1], [3, 7, 2, 4, 2, 9, 4, 1]),
        "<unk>": ([2, 1], [3, 7, 2, 10, 9, 1]),
        "[X]</s>": ([11, 1, 1], [11, 3, 7, 8, 6, 9, 1]),
    }
    for text, (parsed, plain) in expected.items():
        assert tokenizer.encode(text) == parsed
        assert tokenizer.encode(text, parse_special=False) == plain
        assert tokenizer.encode_batch([text], parse_special=False) == [plain[:-1]]
        assert tokenizer.encode(text) == parsed


def test_tokens_that_take_white_space(tmp_path: Path) -> None:
    """Ids as llama.cpp has them: what Phi-3 marks turns with takes the white space after it, also
    where the file calls it user-defined."""
    tokens = [*MARKS[:2], ("</s>", v.USER, 0.0), *v.BYTE_TOKENS]
    tokens += [(t, v.NORMAL, -float(i)) for i, t in enumerate(["▁", "a", "b", "ab", "▁a", "▁▁"])]
    tokens += [("<|endoftext|>", v.CONTROL, 0.0), ("<|user|>", v.USER, 0.0)]
    tokens += [("<|end|>", v.CONTROL, 0.0), ("<mask>", v.USER, 0.0)]
    named = {"general.name": "Phi-3 Mini"}
    tokenizer = tokenizer_from_gguf(v.vocab_file(tmp_path, "llama", tokens, **named))
    assert tokenizer.encode("<|user|>\n a") == [1, 266, 263]
    assert tokenizer.encode("<|user|> a b<|end|>\n\n a") == [1, 266, 263, 259, 261, 267, 263]
    assert tokenizer.encode("</s>  a") == [1, 2, 263]
    assert tokenizer.encode("<|endoftext|>  a") == [1, 265, 264, 263]
    assert tokenizer.encode("a  <|user|>b") == [1, 263, 264, 266, 259, 261]
    other = tokenizer_from_gguf(v.vocab_file(tmp_path, "llama", tokens))
    assert other.encode("<|user|> a") == [1, 266, 259, 263]
    # BERT-like models' mask takes what is before it
    words = [*v.bpe_tokens([]), ("<mask>", v.USER, 0.0)]
    for pre, found in (("jina-v2-de", [256, 97]), ("gpt-2", [32, 256, 97])):
        file = v.vocab_file(tmp_path, "gpt2", words, merges=[], pre=pre)
        assert tokenizer_from_gguf(file).encode(" <mask>a", add_special=False) == found


def test_merges_on_text(tmp_path: Path) -> None:
    """SentencePiece's spelling with merges in the file, as newer files have it."""
    tokens = [*MARKS, *v.BYTE_TOKENS]
    tokens += [(t, v.NORMAL, 0) for t in ("▁", "a", "b", "ab", "▁ab", "ba")]
    file = v.vocab_file(tmp_path, "gemma4", tokens, merges=["b a", "a b", "▁ ab"], scores=None)
    tokenizer = tokenizer_from_gguf(file)
    assert [tokenizer.token(i) for i in tokenizer.encode("ab ab")] == ["<s>", "ab", "▁ab"]
    assert [tokenizer.token(i) for i in tokenizer.encode("aba", add_special=False)] == ["a", "ba"]


def byte_bpe(word: str, merges: list[tuple[str, str]]) -> list[str]:
    """Plain BPE: apply the merge of the lowest rank everywhere, from left to right."""
    parts = [v.byte_characters()[b] for b in word.encode()]
    rank = {pair: i for i, pair in reversed(list(enumerate(merges)))}
    while True:
        pairs = [p for p in pairwise(parts) if p in rank]
        if not pairs:
            return parts
        best = min(pairs, key=rank.__getitem__)
        out: list[str] = []
        for part in parts:
            if out and (out[-1], part) == best:
                out[-1] += part
            else:
                out.append(part)
        parts = out


def test_bpe_on_bytes(tmp_path: Path) -> None:
    rng = random.Random(2)
    space = v.byte_characters()[32]
    made = ["a", "b", "c", space, "Ã", "©"]
    merges: dict[tuple[str, str], None] = {}
    while len(merges) < 80:
        pair = (rng.choice(made), rng.choice(made))
        if pair[0] + pair[1] not in made:
            merges[pair] = None
            made.append(pair[0] + pair[1])
    tokens = v.bpe_tokens(list(merges), [("<|end|>", v.CONTROL, 0)])
    file = v.vocab_file(tmp_path, "gpt2", tokens, pre="gpt-2", merges=v.merge_lines(list(merges)))
    tokenizer = tokenizer_from_gguf(file)
    ids = {t: i for i, (t, _, _) in enumerate(tokens)}
    for _ in range(300):
        words = ["".join(rng.choices("abcé", k=rng.randrange(1, 9))) for _ in range(3)]
        text = " ".join(words)
        cut = [words[0], *(" " + w for w in words[1:])]  # letters take the space before them
        expected = [ids[p] for w in cut for p in byte_bpe(w, list(merges))]
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == text
    assert tokenizer.encode("a<|end|>b") == [ids["a"], ids["<|end|>"], ids["b"]]
    assert tokenizer.end_ids == {ids["<|end|>"]}
    assert not tokenizer.adds_bos


def test_whole_words_may_be_tokens_without_merges(tmp_path: Path) -> None:
    tokens = v.bpe_tokens([], [("abc", v.NORMAL, 0), ("<s>", v.CONTROL, 0)])
    whole = v.vocab_file(tmp_path, "gpt2", tokens, pre="llama-bpe", merges=[], bos_token_id=257)
    assert tokenizer_from_gguf(whole).encode("abc") == [257, 256]
    apart = v.vocab_file(tmp_path, "gpt2", tokens, pre="qwen2", merges=[], bos_token_id=257)
    assert tokenizer_from_gguf(apart).encode("abc") == [97, 98, 99]


def best_cut(text: str, score: dict[str, float]) -> list[str]:
    """The cut with the largest sum of scores."""
    best: list[tuple[float, list[str]]] = [(0.0, [])]
    for end in range(1, len(text) + 1):
        ways = [
            (best[start][0] + score[text[start:end]], [*best[start][1], text[start:end]])
            for start in range(end)
            if text[start:end] in score
        ]
        best.append(max(ways, key=lambda w: w[0]))
    return best[-1][1]


def test_unigram_takes_the_most_probable_cut(tmp_path: Path) -> None:
    rng = random.Random(3)
    words = random_words(rng, "▁abc", 50)
    scores = {w: -rng.uniform(1, 10) - len(w) for w in words}
    marks: list[v.Token] = [
        ("<pad>", v.CONTROL, 0),
        ("</s>", v.CONTROL, 0),
        ("<unk>", v.UNKNOWN, 0),
    ]
    tokens = [*marks, *((w, v.NORMAL, float(np.float32(s))) for w, s in scores.items())]
    file = v.vocab_file(
        tmp_path, "t5", tokens, add_space_prefix=True, remove_extra_whitespaces=True
    )
    tokenizer = tokenizer_from_gguf(file)
    ids = {t: i for i, (t, _, _) in enumerate(tokens)}
    exact = {w: float(np.float32(s)) for w, s in scores.items()}
    for _ in range(300):
        text = " ".join("".join(rng.choices("abc", k=rng.randrange(1, 7))) for _ in range(3))
        expected = [ids[p] for p in best_cut("▁" + text.replace(" ", "▁"), exact)]
        assert tokenizer.encode(text) == [*expected, 1]  # EOS by default
        assert tokenizer.encode(f"  {text.replace(' ', '   ')} ", add_special=False) == expected
        assert tokenizer.decode(expected) == text
    assert ids["<unk>"] in tokenizer.encode("aXb")


def test_wordpiece(tmp_path: Path) -> None:
    texts = ["▁un", "aff", "able", "▁the", "▁,", "s", "▁a"]
    tokens: list[v.Token] = [(f"[{t}]", v.CONTROL, 0) for t in ("PAD", "UNK", "CLS", "SEP")]
    tokens += [("[unused0]", v.NORMAL, 0), *((t, v.NORMAL, 0) for t in texts)]
    ids = {t: i for i, (t, _, _) in enumerate(tokens)}
    special = {"unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3}
    tokenizer = tokenizer_from_gguf(v.vocab_file(tmp_path, "bert", tokens, **special))
    words = ["▁the", "▁un", "aff", "able", "s", "▁,", "▁a", "[UNK]"]
    assert tokenizer.encode("The  Unaffables, ä xyz") == [2, *(ids[w] for w in words), 3]
    assert tokenizer.decode([ids["▁un"], ids["aff"], ids["▁the"]]) == "unaff the"


def test_special_tokens_of_files_that_are_not_careful(tmp_path: Path) -> None:
    special: list[v.Token] = [("<|im_end|>", v.NORMAL, 0), ("<|endoftext|>", v.CONTROL, 0)]
    tokens = v.bpe_tokens([], [*special, ("a", v.NORMAL, 0)])  # "a" is there twice
    settings: dict[str, Any] = {"pre": "gpt-2", "merges": ["x yz", "a a"]}
    file = v.vocab_file(tmp_path, "gpt2", tokens, eos_token_id=999, bos_token_id=257, **settings)
    tokenizer = tokenizer_from_gguf(file)
    assert tokenizer.eos_id is None  # beyond the vocabulary
    assert tokenizer.end_ids == {256, 257}
    assert tokenizer.encode("a<|im_end|>") == [97, 256]  # taken as the mark that it is
    assert tokenizer.decode([97, 256, 258]) == "aa"
    assert tokenizer.id_of("<|im_end|>") == 256
    assert tokenizer.id_of("absent") is None


def test_without_types_all_tokens_are_text(tmp_path: Path) -> None:
    file = v.vocab_file(tmp_path, "gpt2", v.bpe_tokens([]), merges=[], token_type=None)
    assert tokenizer_from_gguf(file).encode("ab") == [97, 98]


def test_phi3_marks_take_the_space_after_them(tmp_path: Path) -> None:
    tokens = [*MARKS, ("<|end|>", v.CONTROL, 0), ("▁", v.NORMAL, -1), ("a", v.NORMAL, -2)]
    for name, expected in [("Phi-3-mini", [3, 4, 5]), ("Llama", [3, 4, 4, 5])]:
        file = v.vocab_file(tmp_path, "llama", tokens, **{"general.name": name})
        tokenizer = tokenizer_from_gguf(file)
        assert tokenizer.encode("<|end|> a", add_special=False) == expected


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "kind": ({"model": "rwkv"}, UnsupportedError, r"got tokenizer\.ggml\.model 'rwkv'"),
    "cut": (
        {"pre": "qwen3"},
        UnsupportedError,
        "got tokenizer.ggml.pre 'qwen3'.*close names: qwen",
    ),
    "no merges": ({"merges": None}, FormatError, "missing; expected 'tokenizer.ggml.merges'"),
    "merge": ({"merges": ["ab"]}, FormatError, r"not two tokens; got tokenizer\.ggml\.merges\[0\]"),
    "no tokens": ({"tokens": None}, FormatError, "missing; expected 'tokenizer.ggml.tokens'"),
    "empty": ({"tokens": np.zeros(0, np.int32)}, FormatError, "has the wrong type; got ndarray"),
    "types": ({"token_type": [1, 2]}, FormatError, "does not fit the vocabulary; got 2 of int32"),
    "flag": ({"add_bos_token": 1}, FormatError, "has the wrong type; got int 1; expected bool"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_vocabularies_that_cannot_be_used(tmp_path: Path, fault: str) -> None:
    settings, error, message = WRONG[fault]
    given = {"pre": "gpt-2", "merges": ["a b"]} | settings
    model = given.pop("model", "gpt2")
    tokens = v.bpe_tokens([("a", "b")])
    file = v.vocab_file(tmp_path, model, tokens, **given)
    with pytest.raises(error, match=f"(?s){message}"):
        tokenizer_from_gguf(file)


@pytest.mark.parametrize("scores", [None, [float("nan")] * 3, [1.0]])
def test_scores_that_are_none(tmp_path: Path, scores: list[float] | None) -> None:
    file = v.vocab_file(tmp_path, "llama", MARKS, scores=scores)
    with pytest.raises(FormatError, match=r"without scores|does not fit the vocabulary"):
        tokenizer_from_gguf(file)


def test_a_table_of_characters_that_is_noise(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, 64, dtype=np.uint8)
    file = v.vocab_file(tmp_path, "t5", MARKS, precompiled_charsmap=noise)
    with pytest.raises(FormatError, match="a vocabulary that cannot be used"):
        tokenizer_from_gguf(file)


def test_only_text_is_tokenised(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(v.vocab_file(tmp_path, "gpt2", v.bpe_tokens([]), merges=[]))
    for wrong in (7, b"a", None, "\ud800"):
        with pytest.raises(InputError, match="only text can be tokenised"):
            tokenizer.encode(wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no such token; got 256; expected 0 to 255"):
        tokenizer.token(256)
    assert tokenizer.decode([97, 256, 300]) == "a"  # padding of logits has no text


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = v.vocab_file(tmp_path, "gpt2", v.bpe_tokens([]), merges=[])
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UnsupportedError, match="hint: pip install tokenizers"):
        tokenizer_from_gguf(file)


def test_threads_do_not_mix_their_settings(tmp_path: Path) -> None:
    tokens = v.bpe_tokens([], [("<s>", v.CONTROL, 0)])
    tokenizer = tokenizer_from_gguf(v.vocab_file(tmp_path, "gpt2", tokens, merges=[]))
    expected = {True: [256], False: [60, 115, 62]}
    wrong: list[object] = []

    def work(parse: bool) -> None:
        for _ in range(2000):
            found = tokenizer.encode("<s>", parse_special=parse)
            if found != expected[parse]:
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


# "I'll pay" and so on, cut at the bars
CUTS = {
    "gpt-2": "I|'ll| pay| 12345| $|9|.|5|!|\n\n  | Ok",
    "smollm": "I|'ll| pay| |1|2|3|4|5| $|9|.|5|!|\n\n  | Ok",
    "llama-bpe": "I|'ll| pay| |123|45| $|9|.|5|!\n\n|  | Ok",
    "qwen2": "I|'ll| pay| |1|2|3|4|5| $|9|.|5|!\n\n|  | Ok",
    "deepseek-v3": "I|'ll| pay| |123|45| $|9|.|5|!\n\n|  | Ok",
    "deepseek-coder": "I|'|ll| pay| |1|2|3|4|5| $|9|.|5|!|\n|\n|  | Ok",
    "gpt-4o": "I'll| pay| |123|45| $|9|.|5|!\n\n|  | Ok",
    "tekken": "I|'ll| pay| |1|2|3|4|5| $|9|.|5|!\n\n|  | Ok",
}


@pytest.mark.parametrize("name", CUTS)
def test_how_text_is_cut(name: str) -> None:
    """Worked out by hand from what each vocabulary does with contractions, digits and spaces."""
    text = "I'll pay 12345 $9.5!\n\n   Ok"
    assert words(name, text) == CUTS[name].split("|")


def words(name: str, text: str) -> list[str]:
    cut = make_pre_tokenizer(find_split(name, "test"), tokenizers)
    byte_of = {c: b for b, c in enumerate(v.byte_characters())}
    return [bytes(byte_of[c] for c in w).decode() for w, _ in cut.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", sorted(_BY_NAME))
def test_no_cut_loses_anything(name: str) -> None:
    text = "Hé'S  ab\tCD12³ ½x 日本語かな한국 \r\n\n…、。!?~` i\u0301o\u0308 🦙<|x|>  "
    assert "".join(words(name, text)) == text
