"""A backend with a part of a vocabulary gives the ids of the whole one, and its index on disk is
made again whenever it cannot be trusted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import vocab_files as v
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rlx.formats.tokenizer.gguf_vocabulary as gguf_vocabulary
from rlx.formats.gguf import GgufFile
from rlx.formats.tokenizer import Tokenizer
from rlx.formats.tokenizer.gguf_vocabulary import tokenizer_from_gguf
from rlx.formats.tokenizer.index_cache import cached_indexes, damaged_indexes
from rlx.formats.tokenizer.partial_backend import PartialBackend

MERGES = [
    ("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc"), ("\u0120", "a"), ("\u0120a", "bc"),
    ("c", "c"), ("cc", "cc"), ("\u00c3", "\u00a9"),
]  # fmt: skip
SPECIAL = [("<|end|>", v.CONTROL, 0.0), ("<tool>", v.USER, 0.0)]
PIECES = ["a", "b", "c", "\u2581", "ab", "bc", "abc", "\u2581a", "\u2581abc", "cc", "\u00e9"]
ALPHABET = "abc \n\u00e9\u4e2d\0<|>"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))


def bpe_file(folder: Path) -> GgufFile:
    # two ways to make one token, a merge that is there twice, and one without its token
    listed = [*MERGES, ("ab", "c"), ("x", "yz")]
    tokens = v.bpe_tokens([m for m in MERGES if m != ("a", "bc")], SPECIAL)
    return v.vocab_file(folder, "gpt2", tokens, pre="gpt-2", merges=v.merge_lines(listed))


def spm_file(folder: Path) -> GgufFile:
    tokens: list[v.Token] = [("<unk>", v.UNKNOWN, 0.0), ("<s>", v.CONTROL, 0.0)]
    tokens += v.BYTE_TOKENS + SPECIAL
    tokens += [(t, v.NORMAL, -float(i)) for i, t in enumerate(PIECES)]
    tokens += [("abc", v.NORMAL, -99.0)]  # of equal tokens the first one counts
    return v.vocab_file(folder, "llama", tokens, bos_token_id=1, eos_token_id=2)


FILES = {"bpe": bpe_file, "spm": spm_file}


def both(file: GgufFile, monkeypatch: pytest.MonkeyPatch) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer with all of the vocabulary, and the one with a part."""
    monkeypatch.setattr(gguf_vocabulary, "SMALL", 1 << 30)
    whole = tokenizer_from_gguf(file)
    monkeypatch.setattr(gguf_vocabulary, "SMALL", 0)
    part = tokenizer_from_gguf(file)
    assert isinstance(part._backend, PartialBackend)
    assert not isinstance(whole._backend, PartialBackend)
    return whole, part


@pytest.mark.parametrize("kind", FILES)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts=st.lists(st.text(ALPHABET, max_size=12), min_size=1, max_size=4))
def test_a_part_gives_the_ids_of_the_whole(
    kind: str, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, part = both(FILES[kind](tmp_path), monkeypatch)
    for text in [*texts, "<|end|>".join(texts), "<tool>".join(texts)]:
        for parse in (True, False):
            expected = whole.encode(text, parse_special=parse)
            assert part.encode(text, parse_special=parse) == expected
        assert part.encode_continuation(text) == whole.encode_continuation(text)
        assert part.decode(part.encode(text)) == whole.decode(whole.encode(text))
    assert part.encode_batch(texts) == whole.encode_batch(texts)


def test_ids_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, part = both(bpe_file(tmp_path), monkeypatch)
    # a b → ab, then ab c → abc: \u0120a never comes about, though it has an earlier id
    assert part.encode("abc") == [part.id_of("abc")] == [258]
    assert part.encode(" abc") == [0x20, 258]
    assert part.encode("<|end|>cccc") == [part.id_of("<|end|>"), part.id_of("cccc")]
    assert part.id_of("no token") is None


@pytest.mark.parametrize("kind", FILES)
def test_it_becomes_the_whole_when_texts_ask_for_much(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, part = both(FILES[kind](tmp_path), monkeypatch)
    part.encode("abc")
    assert not part._backend.is_whole
    long = "abc cab " * 3000
    assert part.encode(long) == whole.encode(long)
    assert part._backend.is_whole
    assert part.encode("abc") == whole.encode("abc")


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_with_another(path: Path) -> None:
    """The whole index of another vocabulary under this name."""
    other = Path(os.environ["RLX_CACHE_DIR"]).parent / "other"
    other.mkdir()
    tokenizer_from_gguf(spm_file(other))
    (made,) = (e.path for e in cached_indexes() if e.path != path)
    made.replace(path)


def open_to_others(path: Path) -> None:
    damage(path)
    path.chmod(0o666)


@pytest.mark.parametrize(
    "harm", [damage, truncate, empty, replace_with_another, open_to_others, os.unlink]
)
def test_an_index_that_cannot_be_used_is_made_again(
    harm: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = bpe_file(tmp_path)
    whole, _ = both(file, monkeypatch)
    (entry,) = cached_indexes()
    sound = entry.path.read_bytes()
    harm(entry.path)  # type: ignore[operator]
    part = tokenizer_from_gguf(file)
    assert part.encode("abc abc<|end|>") == whole.encode("abc abc<|end|>")
    assert entry.path.read_bytes() == sound
    assert entry.path.stat().st_mode & 0o77 == 0
    assert entry.path not in damaged_indexes()


def test_damage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both(bpe_file(tmp_path), monkeypatch)
    (entry,) = cached_indexes()
    assert damaged_indexes() == {}
    damage(entry.path)
    assert "digest" in damaged_indexes()[entry.path]


def test_a_changed_file_has_another_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its content: size and time of the file are the same."""
    file = bpe_file(tmp_path)
    both(file, monkeypatch)
    before, times = file.path.read_bytes(), file.path.stat()
    changed = before.replace(b"\x04\0\0\0\0\0\0\0cccc", b"\x04\0\0\0\0\0\0\0ccca")
    assert changed != before
    file.path.write_bytes(changed)
    os.utime(file.path, ns=(times.st_atime_ns, times.st_mtime_ns))
    part = tokenizer_from_gguf(GgufFile(file.path))
    assert part.encode("cccc") == [part.id_of("cc")] * 2
    assert len(cached_indexes()) == 2


def test_nothing_is_stored_where_the_cache_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLX_CACHE", "0")
    whole, part = both(bpe_file(tmp_path), monkeypatch)
    assert part.encode("abc cc") == whole.encode("abc cc")
    assert cached_indexes() == []


@pytest.mark.slow
def test_processes_may_write_one_index_at_once(tmp_path: Path) -> None:
    path = bpe_file(tmp_path).path
    code = (
        "import sys, rlx.formats.tokenizer.gguf_vocabulary as g\n"
        "from rlx.formats.gguf import GgufFile\n"
        "g.SMALL = 0\n"
        "input()\n"
        "print(g.tokenizer_from_gguf(GgufFile(sys.argv[1])).encode('abc cc'))\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for _ in range(4)]  # type: ignore[call-overload]
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    answers = {process.communicate()[0] for process in started}
    assert len(answers) == 1
    assert answers != {""}
    assert len(cached_indexes()) == 1
    assert damaged_indexes() == {}
    assert sorted(p.suffix for p in (tmp_path / "cache/tokenizers").iterdir()) == [".vocab"]
