"""Texts, JSON lines and sequences: right items, hostile files, files that change."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx
from rlx import data

# -- text -----------------------------------------------------------------------------------------


def test_windows_of_tokens(tmp_path: Path) -> None:
    windows = data.TokenWindows(np.arange(10), 3)
    assert len(windows) == 3  # tokens 0 to 9 as 0-3, 3-6, 6-9
    assert windows[1]["inputs"].tolist() == [3, 4, 5] and windows[1]["targets"].tolist() == [
        4,
        5,
        6,
    ]
    assert len(data.TokenWindows(np.arange(10), 3, stride=1)) == 7
    assert len(data.TokenWindows(np.arange(4), 3)) == 1
    (batch,) = data.Loader(windows, 3, shuffle=False)
    assert batch["inputs"].dtype == np.int32 and batch["targets"].shape == (3, 3)
    with pytest.raises(IndexError):
        windows[3]
    for bad in (np.arange(3), np.zeros((4, 4), int), np.zeros(9)):
        with pytest.raises(rlx.InputError):
            data.TokenWindows(bad, 3)


def test_tokens_of_files(tmp_path: Path) -> None:
    for name, text in (("a.txt", "Grüße"), ("b.txt", "x\ny")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    expected = [*"Grüße".encode(), 256, *b"x\ny", 256]
    assert data.read_tokens(paths, end=256).tolist() == expected
    assert data.read_tokens(paths[1], encode=lambda text: [len(text)]).tolist() == [3]
    (tmp_path / "bad.txt").write_bytes(b"one\ntwo \xff\n")
    with pytest.raises(rlx.FormatError, match=r"bad.txt:2\] not UTF-8; got byte 0xff"):
        data.read_tokens(tmp_path / "bad.txt")
    with pytest.raises(rlx.InputError, match="no such file"):
        data.read_tokens(tmp_path / "none.txt")


# -- JSON lines -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(st.just(b""), st.just(b"\r"), st.dictionaries(
    st.text(max_size=5), st.one_of(st.integers(-9, 9), st.text(max_size=30)), max_size=3))),
    st.booleans(), st.integers(1, 40))  # fmt: skip
def test_lines_are_those_of_a_plain_reader(
    tmp_path_factory: Any, rows: list[Any], last: bool, chunk: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "d.jsonl"
    lines = [
        r if isinstance(r, bytes) else json.dumps(r, ensure_ascii=False).encode() for r in rows
    ]
    path.write_bytes(b"\n".join(lines) + (b"\n" if last else b""))
    from rlx.data import json_lines

    before, json_lines._CHUNK = json_lines._CHUNK, chunk  # chunks that end anywhere
    try:
        found = data.JsonLines(path)
        mapped = data.JsonLines(path, index=path.with_suffix(".index"))
        again = data.JsonLines(path, index=path.with_suffix(".index"))
    finally:
        json_lines._CHUNK = before
    expected = [r for r in rows if not isinstance(r, bytes)]
    for each in (found, mapped, again):
        assert [each[i] for i in range(len(each))] == expected
        assert [int(n) for n in each._rows["line"]] == [
            i + 1 for i, r in enumerate(rows) if not isinstance(r, bytes)
        ]
        each.close()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"a": 1, "a": 2}', "appears twice"),
        (b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", "nests too deep"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nests too deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"ok": 1}\n\n' + line + b'\n{"ok": 2}\n')
    lines = data.JsonLines(path)
    assert lines[0] == {"ok": 1} and lines[2] == {"ok": 2}
    with pytest.raises(rlx.FormatError, match=rf"d.jsonl:3\] .*{message}"):
        lines[1]
    loader = data.Loader(lines, 1, shuffle=False)
    with pytest.raises(rlx.FormatError, match=r"d\.jsonl:3"):
        list(loader)


def test_long_lines_and_other_files(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{}\n{"a": "' + b"x" * 100 + b'"}\n')
    with pytest.raises(rlx.FormatError, match=r"d.jsonl:2\] a line that is too long; got 109"):
        data.JsonLines(path, max_line=50)
    with path.open("wb") as file:  # a hole of zeros, and no line in it
        file.truncate(1 << 26)
    with pytest.raises(rlx.FormatError, match=r"d.jsonl:1\] a line that is too long"):
        data.JsonLines(path, max_line=1 << 20)
    path.write_bytes(b"")
    assert len(data.JsonLines(path)) == 0
    with pytest.raises(rlx.InputError, match="no such file"):
        data.JsonLines(tmp_path / "none.jsonl")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(rlx.InputError, match="not a regular file"):
        data.JsonLines(tmp_path / "pipe")


def test_an_index_that_does_not_fit_is_made_anew(tmp_path: Path) -> None:
    path, index = tmp_path / "d.jsonl", tmp_path / "d.index"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n')
    rows = data.JsonLines(path, index=index)
    good = index.read_bytes()
    assert len(rows) == 2 and isinstance(rows._rows, np.memmap)
    damaged = bytearray(good)
    damaged[32:40] = (2**63).to_bytes(8, "little")  # the offset of line 1
    swapped = good[:32] + good[48:64] + good[32:48]
    for bad in (b"", good[:-1], bytes(damaged), swapped, b"RLXLINES", b"x" * 64):
        index.write_bytes(bad)
        found = data.JsonLines(path, index=index)
        assert [found[i]["a"] for i in range(2)] == [1, 2]
        assert index.read_bytes() == good
    path.write_bytes(b'{"a": 3}\n')
    assert data.JsonLines(path, index=index)[0] == {"a": 3}
    lines = data.JsonLines(path)
    path.write_bytes(b"")
    with pytest.raises(rlx.FormatError, match="was cut while it was read"):
        lines[0]


# -- sequences ------------------------------------------------------------------------------------


def test_padding() -> None:
    made, mask = data.pad([[1, 2, 3], [4]], multiple=4, value=9)
    assert made.tolist() == [[1, 2, 3, 9], [4, 9, 9, 9]]
    assert mask.tolist() == [[True, True, True, False], [True, False, False, False]]
    assert data.pad([[1.5]], 3)[0].tolist() == [[1.5, 0, 0]]
    assert data.pad([])[0].shape == (0, 0)
    with pytest.raises(rlx.InputError, match="too long"):
        data.pad([[1, 2]], 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=30), st.integers(1, 12))
def test_packing_keeps_every_token(lengths: list[int], capacity: int) -> None:
    sequences = [np.arange(100 * i, 100 * i + n) for i, n in enumerate(lengths)]
    packed = data.pack(sequences, capacity, value=-1, too_long="split")
    parts = []
    for tokens, segments, positions in zip(*packed, strict=True):
        assert (tokens[segments == 0] == -1).all()
        for k in range(1, segments.max() + 1):
            part = tokens[segments == k]
            assert (np.diff(part) == 1).all()
            assert positions[segments == k].tolist() == list(range(len(part)))
            parts.append(part.tolist())
    expected = [s[i : i + capacity].tolist() for s in sequences for i in range(0, len(s), capacity)]
    assert sorted(parts) == sorted(expected)
    # best fit leaves no two rows that would fit into one
    filled = sorted((packed.segments > 0).sum(1))
    assert len(filled) < 2 or filled[0] + filled[1] > capacity


def test_sequences_that_are_too_long() -> None:
    with pytest.raises(rlx.InputError, match="too long"):
        data.pack([[1, 2, 3]], 2)
    assert data.pack([[1, 2, 3]], 2, too_long="cut").tokens.tolist() == [[1, 2]]
    with pytest.raises(rlx.OptionError, match="no such way"):
        data.pack([[1]], 2, too_long="drop")
