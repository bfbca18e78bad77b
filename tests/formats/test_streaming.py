"""Text that comes token by token is the text of all tokens, and never part of a character."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlx.formats.tokenizer.tokenizer import (
    StreamDecoder,
    TokenDecoder,
    WindowDecoder,
    byte_level,
    metaspace,
)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [*pieces, data[at:]]


@given(st.text(), st.lists(st.integers(0, 3)))
def test_characters_come_whole(text: str, sizes: list[int]) -> None:
    pieces = cut(text.encode(), sizes)
    stream = StreamDecoder(pieces.__getitem__, (), strip_first=False)
    out = [stream.push(i) for i in range(len(pieces))]
    assert "".join(out) == text  # nothing is held back once it is whole
    assert stream.flush() == ""
    for piece in out:
        assert piece.encode().decode() == piece
        assert "\ufffd" not in piece or "\ufffd" in text


@given(st.binary(), st.lists(st.integers(0, 3)))
def test_broken_bytes_do_not_break_the_stream(data: bytes, sizes: list[int]) -> None:
    pieces = cut(data, sizes)
    stream = StreamDecoder(pieces.__getitem__, (), strip_first=False)
    found = "".join(stream.push(i) for i in range(len(pieces))) + stream.flush()
    assert found == data.decode("utf-8", "replace")


def test_the_first_space_goes_where_a_text_begins() -> None:
    pieces = {0: b"", 1: b" a", 2: b" b", 3: b"<s>"}
    for strip, expected in [(True, "a b a"), (False, " a b a")]:
        stream = StreamDecoder(pieces.__getitem__, {3}, strip_first=strip)
        assert "".join(map(stream.push, [3, 0, 1, 2, 3, 1])) == expected


def test_a_cut_character_is_told_at_the_end() -> None:
    stream = StreamDecoder({0: "é".encode()[:1]}.__getitem__, (), strip_first=False)
    assert stream.push(0) == ""
    assert stream.flush() == "\ufffd"


def test_a_window_gives_what_the_whole_would() -> None:
    words = {0: "Hello", 1: ",", 2: "world", 3: "\ud83e", 4: "\udd99", 9: "<s>"}

    def decode(ids: list[int]) -> str:
        """Words with spaces between, and a character that two tokens make."""
        raw = " ".join(words[i] for i in ids).replace(" ,", ",").replace("\ud83e \udd99", "🦙")
        return raw.replace("\ud83e", "\ufffd")

    stream = WindowDecoder(decode, {9})
    out = [stream.push(i) for i in (9, 0, 1, 2, 3, 4, 2)]
    assert out == ["", "Hello", ",", " world", "", " 🦙", " world"]
    assert stream.flush() == ""


def test_spellings() -> None:
    assert byte_level("ĠHÃ©Ċ") == " Hé\n".encode()
    assert byte_level("<｜end▁of▁sentence｜>") == "<｜end▁of▁sentence｜>".encode()
    assert metaspace("▁a▁") == b" a "
    assert metaspace("<0xe9>") == b"\xe9"
    assert metaspace("<0xE9> ") == b"<0xE9> "
    words = TokenDecoder("wordpiece", cleanup=True).to_bytes
    assert [words(t) for t in ("##ing", "a", ".", "do not")] == [b"ing", b" a", b".", b" don't"]
