"""Words wrap on a terminal as they arrive; the oracle is the standard library's textwrap."""

from __future__ import annotations

import random
import textwrap

import pytest
from rich.cells import cell_len

from rlx.cli.render import WordWrap

WIDTH = 20


def wrapped(text: str, width: int = WIDTH, seed: int = 0) -> str:
    """The text in pieces of any length."""
    chance, wrap, shown = random.Random(seed), WordWrap(lambda: width), ""
    while text:
        size = chance.randint(1, 7)
        shown, text = shown + wrap.push(text[:size]), text[size:]
    return shown + wrap.flush()


@pytest.mark.parametrize("seed", range(50))
def test_lines_are_those_of_textwrap(seed: int) -> None:
    chance = random.Random(seed)
    text = " ".join("x" * chance.randint(1, 25) for _ in range(40))
    expected = textwrap.wrap(text, WIDTH, break_long_words=False)
    assert wrapped(text, seed=seed).split("\n") == expected


def test_line_breaks_and_spaces_stay() -> None:
    for text in ("a\n\nb", " a", "a  b ", "", "\n", "- one\n- two\n"):
        assert wrapped(text) == text


def test_a_word_is_shown_when_it_no_longer_fits() -> None:
    wrap = WordWrap(lambda: WIDTH)
    assert wrap.push("h" * WIDTH) == ""
    assert wrap.push("h") == "h" * (WIDTH + 1)  # an endless word streams
    assert wrap.push("hh") == "hh"
    assert wrap.push(" n") == "\nn"  # that line is full


def test_code_between_fences_is_left_alone() -> None:
    code = "```python\nfor number in range(1000): print(number, end=' ')\n```\n"
    assert wrapped(f"{code}and then some words more") == f"{code}and then some words\nmore"


def test_wide_characters_count_twice_and_break_anywhere() -> None:
    text = "一二三四五六七八九十" * 3
    lines = wrapped(text).split("\n")
    assert "".join(lines) == text
    assert [cell_len(line) for line in lines] == [WIDTH] * 3


def test_the_width_of_the_moment_counts() -> None:
    size = [40]
    wrap = WordWrap(lambda: size[0])
    shown = wrap.push("aaaa bbbb cccc ")
    size[0] = 10
    assert shown + wrap.push("dddd eeee ") + wrap.flush() == "aaaa bbbb cccc\ndddd eeee "
