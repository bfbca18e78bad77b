"""On a real terminal: Ctrl-C stops an answer and not the chat, colour comes and goes."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli_support import VOCAB

pty = pytest.importorskip("pty")

LIMIT = 60.0  # seconds; a busy machine is slow to start
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A process on a terminal of its own, driven as a person would."""

    def __init__(self, process: int, keys: int) -> None:
        self.process, self.keys, self.shown = process, keys, ""

    def read(self) -> bool:
        """Take what has been shown; False at the end."""
        if not select.select([self.keys], [], [], 0.1)[0]:
            return True
        try:
            data = os.read(self.keys, 4096)
        except OSError:  # Linux says so when the other side is closed
            return False
        self.shown += data.decode("utf-8", "replace")
        return bool(data)

    def expect(self, pattern: str, again: str = "") -> None:
        """Wait until the pattern is shown, and forget what is shown up to there. `again` is typed
        once a second: a Ctrl-C just before Python waits for a key shows with the next key only."""
        start = pressed = time.monotonic()
        while (match := re.search(pattern, self.text)) is None:
            alive, now = self.read(), time.monotonic()
            assert now < start + LIMIT and alive, f"no {pattern!r} in {self.text!r}"
            if again and now > pressed + 1:
                pressed = now
                self.type(again)
        self.shown = self.text[match.end() :]

    @property
    def text(self) -> str:
        return ESCAPE.sub("", self.shown)

    def type(self, text: str) -> None:
        os.write(self.keys, text.encode())

    def leave(self) -> int:
        """The exit code."""
        end = time.monotonic() + LIMIT
        while self.read():
            assert time.monotonic() < end, f"still running: {self.text!r}"
        _, status = os.waitpid(self.process, 0)
        self.process = 0
        return os.waitstatus_to_exitcode(status)


@contextmanager
def terminal(
    *arguments: str, python: tuple[str, ...] = ("-m", "rlx"), **environment: str
) -> Iterator[Terminal]:
    """`python -m rlx …`, or other arguments of Python's, on a terminal."""
    process, keys = pty.fork()
    if not process:
        os.environ.pop("NO_COLOR", None)
        os.environ |= {"TERM": "xterm-256color"} | environment
        os.execv(sys.executable, [sys.executable, *python, *arguments])
    screen = Terminal(process, keys)
    try:
        yield screen
    finally:
        if screen.process:
            os.kill(screen.process, signal.SIGKILL)
            os.waitpid(screen.process, 0)
        os.close(keys)


ENDLESS = ("--max-tokens", "1000000", "--overflow", "shift", "--logit-bias", f"{VOCAB - 1}=-1000")


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_ctrl_c_stops_the_answer_not_the_program(device: str, tiny: Path, own_cache: Path) -> None:
    chat = ("chat", str(tiny), "--device", device, "--logit-bias", "104=1000", *ENDLESS)
    with terminal(*chat) as screen:
        screen.expect("> ")
        screen.type("go on\r")
        screen.expect("hhhhhhhhhh")
        screen.type("\x03")
        screen.expect("stopped")
        screen.expect("> ")
        screen.type("/set max_tokens 3\r")
        screen.expect("max_tokens +3")
        screen.expect("> ")
        screen.type("again\r")  # the model is as usable as before
        screen.expect("(?s)again\r\n.*hhh\r\n")
        screen.expect("cut at 3 tokens")
        screen.expect("> ")
        screen.type("half a line")
        screen.expect("half a line")
        screen.type("\x03")  # at the prompt it forgets the line
        screen.expect("Ctrl-D or /exit leaves", again="\x03")
        screen.expect("> ")
        screen.type("/stats\r")
        screen.expect("messages +4")
        screen.expect("> ")
        screen.type("\x04")
        assert screen.leave() == 0
    history = own_cache / "chat-history"
    assert [w for w in history.read_text().split() if w in ("go", "on", "again")] == [
        "go",
        "on",
        "again",
    ]
    assert history.stat().st_mode & 0o077 == 0


def test_ctrl_c_ends_a_run(tiny: Path) -> None:
    run = ("run", str(tiny), "Hi", "--device", "reference", "--logit-bias", "104=1000", *ENDLESS)
    with terminal(*run) as screen:
        screen.expect("hhhhh")
        screen.type("\x03")
        screen.expect("interrupted")
        assert screen.leave() == 130


@pytest.mark.parametrize("color", [True, False])
def test_colour_on_a_terminal_unless_told_not_to(color: bool) -> None:
    with terminal("list", **({} if color else {"NO_COLOR": "1"})) as screen:
        assert screen.leave() == 0
        assert "smollm2-135m" in screen.text
        assert ("\x1b[" in screen.shown) is color


def test_run_without_a_prompt_says_so() -> None:
    with terminal("run") as screen:
        screen.expect("no prompt")
        assert screen.leave() == 2


def test_bars_show_how_far_a_download_is() -> None:
    code = """
import time
from rlx.cli import console
with console.transfer("smollm2") as show:
    for done in range(5):
        show("download", done * 25_000_000, 100_000_000)
        time.sleep(0.15)
print("done")
"""
    with terminal(python=("-c", code)) as screen:
        assert screen.leave() == 0
        assert "download smollm2" in screen.text
        assert re.search(r"50\.0/100\.0 MB", screen.text)
        assert screen.text.endswith("done\r\n")


def test_a_bench_shows_that_it_works(tiny: Path) -> None:
    command = ("bench", str(tiny), "--device", "reference", "-p", "4", "-n", "2", "-r", "1")
    with terminal(*command) as screen:
        screen.expect("measuring")
        screen.expect("decode +1 +2 +4 ")
        assert screen.leave() == 0


def test_words_wrap_at_the_width_of_the_terminal(tiny: Path, own_cache: Path) -> None:
    """Random bytes, of which only two may come: words of one letter, and spaces."""
    letters = [f"--logit-bias={token}=1000" for token in (ord("w"), ord(" "))]
    options = ("--max-tokens", "200", "--seed", "1", "--temperature", "100", "--top-k", "2")
    with terminal("run", str(tiny), "go on", *letters, *options, COLUMNS="30") as screen:
        screen.leave()
    lines = re.findall(r"^[w ]+$", screen.text.replace("\r", ""), re.MULTILINE)  # no spinner
    assert len(lines) > 4
    assert max(map(len, lines)) <= 30
    assert all(not line.startswith(" ") for line in lines[1:])


def test_embedding_shows_how_far_it_is(encoder: Path, own_cache: Path, tmp_path: Path) -> None:
    texts = tmp_path / "lines.txt"
    texts.write_text("the cat\n" * 3000)
    command = ("embed", str(encoder), "--input", str(texts), "--output", str(tmp_path / "out.npy"))
    with terminal(*command, COLUMNS="100") as screen:
        screen.expect(r"compiling \d+ of \d+ kernels .*0/3000 texts")
        screen.expect(r"embedding .*\d+/3000 texts")
        screen.expect("wrote 3000 vectors")
        assert screen.leave() == 0
    with terminal("embed", str(encoder), "a", "b", "c", "--query", "a", COLUMNS="100") as screen:
        screen.expect(r"ranking .*\d/3 texts")
        assert screen.leave() == 0


def test_a_first_start_shows_what_it_does(tiny: Path, own_cache: Path) -> None:
    with terminal("run", str(tiny), "Hi", "--max-tokens", "2", COLUMNS="100") as screen:
        screen.expect(r"compiling \d+ of \d+ kernels")
        assert screen.leave() == 0


def test_fine_tuning_draws_its_losses(tiny: Path, own_cache: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "one two three"}\n' * 4)
    run = ("finetune", str(tiny), str(data), "--steps", "6", "--context", "32", "--live")
    with terminal(*run, "--out", str(tmp_path / "tuned")) as screen:
        screen.expect("[\u2801-\u28ff]")  # braille with a dot
        screen.expect("training.* 6/6 loss")
        screen.expect("6 steps, ")
        assert screen.leave() == 0
