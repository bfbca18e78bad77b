"""Real vocabularies: every text gives the ids that its makers expect. The files lie beside the
repository; without them there is nothing to check."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlx.formats.gguf import GgufFile
from rlx.formats.tokenizer import Tokenizer
from rlx.formats.tokenizer.gguf_vocabulary import tokenizer_from_gguf

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "vocab"
NAMES = ["bert-bge", "gpt-2", "llama-bpe", "llama-spm", "qwen2"]
SEPARATOR = "\n__ggml_vocab_test__\n"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="no vocabularies beside the repository")


@pytest.fixture(scope="module", params=NAMES)
def vocabulary(request: pytest.FixtureRequest) -> tuple[str, Tokenizer]:
    return request.param, tokenizer_from_gguf(GgufFile(path_of(request.param)))


def path_of(name: str) -> Path:
    return FOLDER / f"ggml-vocab-{name}.gguf"


def cases(name: str) -> list[tuple[str, list[int]]]:
    texts = Path(f"{path_of(name)}.inp").read_text("utf-8").split(SEPARATOR)
    lines = Path(f"{path_of(name)}.out").read_text("utf-8").split("\n")
    assert texts.pop() == ""  # both end with what separates
    assert lines.pop() == ""
    return list(zip(texts, [[int(n) for n in line.split()] for line in lines], strict=True))


def test_every_text_gives_its_ids(vocabulary: tuple[str, Tokenizer]) -> None:
    name, tokenizer = vocabulary
    found = cases(name)
    assert len(found) > 40
    for text, ids in found:
        assert tokenizer.encode(text, add_special=False) == ids, repr(text)


def test_texts_come_back(vocabulary: tuple[str, Tokenizer]) -> None:
    name, tokenizer = vocabulary
    if name == "bert-bge":
        pytest.skip("it forgets case, accents and spaces by design")
    for text, ids in cases(name):
        assert tokenizer.decode(ids) == text
        stream = tokenizer.stream(at_start=True)
        pieces = [stream.push(i) for i in ids]
        assert "".join(pieces) + stream.flush() == text
        assert "\ufffd" not in "".join(pieces)  # no character was cut
