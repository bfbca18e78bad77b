"""`rlx chat`: turns, commands, and a person who changes their mind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_support import write_tiny

import rlx as api
from rlx.cli.chat import read_message

CHAT = ("--device", "reference", "--seed", "5", "-n", "4")


def talk(rlx: Any, model: Path, *lines: str, more: tuple[str, ...] = ()) -> Any:
    return rlx("chat", model, *CHAT, *more, input="".join(f"{line}\n" for line in lines))


def test_turns_see_those_before_them(rlx: Any, tiny: Path) -> None:
    done = talk(rlx, tiny, "Hi", "And?", more=("--system", "Be."))
    with api.load(tiny, device="reference") as model:
        settings = {"seed": 5, "max_tokens": 4, "stream": False}
        messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}]
        first = model.chat(messages, **settings)
        messages += [{"role": "assistant", "content": first.text}]
        second = model.chat([*messages, {"role": "user", "content": "And?"}], **settings)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{first.text}\n{second.text}\n"


def test_only_what_is_new_is_run(rlx: Any, tiny: Path) -> None:
    always = ("--logit-bias", "104=1000")  # an answer that reads back as the same tokens
    done = talk(rlx, tiny, "Hi", "And?", "/stats", more=always)
    before = len("<user\nHi>\n<assistant\nhhh")  # a mark is one token; the last token has not run
    assert f"after {before} reused" in done.stdout
    assert "messages     4" in done.stdout


def test_saved_conversations_decode_n(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    talk(rlx, tiny, "/system Be brief.", "Hi", f"/save {file}")
    held = json.loads(file.read_text())
    assert held["system"] == "Be brief."
    assert [m["role"] for m in held["messages"]] == ["user", "assistant"]
    straight = talk(rlx, tiny, "/system Be brief.", "Hi", "And?").stdout.splitlines()[-1]
    done = talk(rlx, tiny, f"/load {file}", "/system", "And?")
    assert done.stdout.splitlines() == ["Be brief.", straight]
    assert "loaded 2 messages" in done.stderr


def test_reset_forgets(rlx: Any, tiny: Path) -> None:
    done = talk(rlx, tiny, "Hi", "/reset", "Hi")
    first, second = done.stdout.splitlines()
    assert first == second


def test_settings_are_shown_and_changed(rlx: Any, tiny: Path) -> None:
    lines = [
        "/set",
        "/set max_tokens 2",
        "/set logit_bias 104=1000",
        "Hi",
        "/set top-k",
        "/exit",
        "x",
    ]
    done = talk(rlx, tiny, *lines)
    assert done.exit_code == 0
    shown = done.stdout.splitlines()
    assert shown[-2:] == ["hh", "top_k  40"]
    assert any(line.split() == ["temperature", "0.8"] for line in shown)
    assert any(line.split() == ["stop", "none"] for line in shown)
    assert "cut at 2 tokens" in done.stderr


def test_settings_that_may_be_none(rlx: Any, tiny: Path) -> None:
    lines = [
        "/set keep 5",
        "/set keep none",
        "/set speculate 2",
        "/set regex a+",
        "/set regex none",
    ]
    shown = [line.split() for line in talk(rlx, tiny, *lines).stdout.splitlines()]
    assert shown == [["keep", "5"], ["keep", "none"], ["speculate", "2"], ["regex", "a+"],
                     ["regex", "none"]]  # fmt: skip


def test_settings_are_those_that_the_model_recommends(rlx: Any, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "cool.gguf", more={"general.sampling.temp": 0.25})
    lines = ("/set temperature", "/set temperature 0", "/set top_p")
    shown = [line.split() for line in talk(rlx, path, *lines).stdout.splitlines()]
    assert shown == [["temperature", "0.25"], ["temperature", "0.0"], ["top_p", "0.95"]]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("/sav x", "unknown command; got /sav"),
        ("/set temprature 1", "unknown setting; got temprature"),
        ("/set temperature hot", "[temperature] not a value of this setting; got 'hot'"),
        ("/set temperature 200", "[temperature] out of range"),
        ("/load /nowhere/x", "No such file"),
        ("/save", "no file named"),
        ("y" * 500, "the prompt is longer than the context"),
    ],
)
def test_mistakes_do_not_end_the_conversation(rlx: Any, tiny: Path, line: str, text: str) -> None:
    done = talk(rlx, tiny, line, "/set logit_bias 104=1000", "Hi")
    assert done.exit_code == 0
    assert text in done.stderr
    assert done.stdout.endswith("hhhh\n")


def test_files_that_are_no_conversation(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    for i, text in enumerate(("{", "[]", '{"system": "", "messages": [{"role": "x"}]}')):
        file = tmp_path / f"{i}.json"
        file.write_text(text)
        assert "not a conversation" in talk(rlx, tiny, f"/load {file}").stderr


def test_a_full_context_is_reported(rlx: Any, tiny: Path) -> None:
    more = ("--context", "40", "--max-tokens", "100", "--logit-bias", "104=1000")
    done = talk(rlx, tiny, "Hi", more=more)
    assert "the context of 40 tokens is full" in done.stderr


def test_a_model_that_was_not_made_for_chat(rlx: Any, base: Path) -> None:
    done = talk(rlx, base, "Hi")
    assert done.exit_code == 1
    assert "no chat template" in done.stderr


def test_help_names_every_command(rlx: Any, tiny: Path) -> None:
    done = talk(rlx, tiny, "/help")
    for name in ["/help", "/reset", "/system", "/save", "/load", "/set", "/stats", "/exit"]:
        assert name in done.stdout


def read(*lines: str) -> list[str]:
    """The messages that lines make."""
    given = iter(lines)

    def next_line(_: str) -> str:
        try:
            return next(given)
        except StopIteration:
            raise EOFError from None

    found = []
    while True:
        try:
            found.append(read_message(next_line))
        except EOFError:
            return found


def test_messages_of_several_lines() -> None:
    assert read("one", "two") == ["one", "two"]
    assert read("one \\", "two\\", "three", "four") == ["one \ntwo\nthree", "four"]
    assert read('"""', "one", "", 'two"""', "three") == ["one\n\ntwo", "three"]
    assert read('"""one', '  """') == ["one\n  "]
    assert read('"""one"""') == ["one"]
    assert read('"""never ends') == []


def test_a_message_may_begin_with_a_slash(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    talk(rlx, tiny, "//etc is a folder", "", f"/save {file}")
    assert json.loads(file.read_text())["messages"][0]["content"] == "/etc is a folder"


def test_what_is_saved_is_for_its_owner_alone(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    file, target = tmp_path / "talk.json", tmp_path / "kept" / "real.json"
    talk(rlx, tiny, "Hi", f"/save {file}")
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)  # of an older version
    talk(rlx, tiny, "Hi", f"/save {file}")
    assert file.stat().st_mode & 0o777 == 0o600
    target.parent.mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(target)
    talk(rlx, tiny, "Hi", f"/save {link}")
    assert link.is_symlink() and json.loads(target.read_text())["messages"]
