"""The program around the commands: help, start-up, errors and exit codes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from rlx.cli import console, load_model
from rlx.cli.app import app
from rlx.cli.options import Sampling
from rlx.errors import InputError
from rlx.models.sampling import GenerationSettings

COMMAND = typer.main.get_command(app)


def commands(group: Any = COMMAND, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found += commands(command, (*path, name))
        else:
            found.append(((*path, name), command))
    return found


@pytest.mark.parametrize(
    ("path", "command"), commands(), ids=lambda v: " ".join(v) if isinstance(v, tuple) else ""
)
def test_every_command_and_option_says_what_it_does(
    rlx: Any, path: tuple[str, ...], command: Any
) -> None:
    assert command.help
    assert all(p.help for p in command.params), [p.name for p in command.params if not p.help]
    shown = rlx(*path, "--help")
    assert shown.exit_code == 0
    assert all(p.opts[-1] in shown.stdout for p in command.params if p.opts[-1].startswith("--"))


@pytest.mark.parametrize("command", ["compile", "quantize", "run"])
def test_help_shows_a_default_only_where_there_is_one(rlx: Any, command: str) -> None:
    text = rlx(command, "--help").stdout
    assert ("smollm2-135m" in text) == (command == "run")


def test_help_and_version_load_nothing_heavy() -> None:
    """What takes long to import is what made other tools slow to answer."""
    code = (
        "import sys; from rlx.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'numpy','llvmlite','tokenizers','jinja2','rlx.models','rlx.ir'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    for option in ("--help", "--version"):
        done = subprocess.run(
            [sys.executable, "-c", code, option], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "rlx" in done.stdout


def test_version(rlx: Any) -> None:
    from importlib.metadata import version

    assert rlx("--version").stdout == f"rlx {version('rlx')}\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_libraries_it_says_how_to_get_them(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from rlx.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"rlx: the command line needs {missing}: pip install typer rich\n"


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlx", "nonsense"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Usage: rlx" in done.stderr
    assert "nonsense" in done.stderr


def test_options_are_those_of_a_generation() -> None:
    """The same names, and the defaults that help shows are the true ones."""
    known = {f.name: f for f in fields(GenerationSettings)}
    assert [f.name for f in fields(Sampling)] == [*known]
    run = dict(commands())[("run",)]
    for option in run.params:
        if option.name in known and isinstance(option.show_default, str):
            default = known[option.name].default
            shown = option.show_default.removeprefix("the model's, or ")
            assert shown == ("random" if default is None else str(default))


def test_settings_hold_what_was_asked_for_and_no_more() -> None:
    asked = Sampling(temperature=0.5, stop=["a", "b"], stop_tokens=[3], logit_bias=["7=-1.5"])
    assert asked.settings() == {
        "temperature": 0.5, "stop": ("a", "b"), "stop_tokens": frozenset([3]),
        "logit_bias": {7: -1.5},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["run", "nowhere.gguf", "x"], 1, "[nowhere.gguf] no such model"),
        (["run", "--temperature", "-1", "x"], 2, "[temperature] out of range; got -1.0"),
        (["run", "--logit-bias", "seven=1", "x"], 2, "not a bias; got 'seven=1'"),
        (["run", "--device", "abacus", "TINY", "x"], 2, "unknown device; got 'abacus'"),
        (["run", "--kv", "q1", "TINY", "x"], 2, "unknown type of the KV cache"),
        (["run", "--context", "9999", "TINY", "x"], 1, "context out of range"),
        (["run", "--max-tokens", "many", "x"], 2, "--max-tokens"),
        (["run", "--raw", "--system", "a", "x"], 2, "--raw"),
        (["run", "a", "b", "c"], 2, "c"),
        (["run", ""], 2, "prompt is empty"),
    ],
)
def test_errors_are_one_message_and_a_code(
    rlx: Any, tiny: Path, arguments: list[str], code: int, text: str
) -> None:
    done = rlx(*(str(tiny) if a == "TINY" else a for a in arguments))
    assert done.exit_code == code, done.output
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def failing(error: BaseException) -> Any:
    def load(*_: object) -> None:
        raise error

    return load


def test_debug_shows_where_an_error_came_from(rlx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_DEBUG", "1")
    done = rlx("run", "nowhere.gguf", "x")
    assert isinstance(done.exception, InputError)


def test_interrupts_memory_and_files(rlx: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 1, "error: not enough memory"),
        (PermissionError(13, "Permission denied", "/x"), 1, "error: [/x] Permission denied"),
    ]
    for error, code, text in cases:
        monkeypatch.setattr("rlx.cli.run.load_model", failing(error))
        done = rlx("run", tiny, "x")
        assert (done.exit_code, text in done.stderr) == (code, True), done.output


def test_warnings_are_a_line(own_cache: Path) -> None:
    """In a process of its own: one that has the code already would not look for the cache."""
    own_cache.mkdir()
    (own_cache / "kernels").write_text("not a folder")
    command = [sys.executable, "-m", "rlx", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.startswith("warning: [cache] not used: ")
    assert done.stderr.count("\n") == 1


def test_what_steers_a_terminal_is_taken_out() -> None:
    assert console.plain("a\x1b[31mb\x07\nc\td\x9be\r") == "a[31mb\nc\tde"


def test_sizes_read_well() -> None:
    sizes = [0, 999, 1000, 98_362_432, 2_500_000_000, 7e12]
    assert [console.size(s) for s in sizes] == [
        "0 B", "999 B", "1.0 kB", "98.4 MB", "2.5 GB", "7.0 TB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("smollm2", True),
        ("SmolLM2-135M", True),
        ("missing.gguf", True),
        ("Qwen/Qwen3-0.6B", True),
        ("Qwen/Qwen3-0.6B:Q4_0", True),
        ("Why is the sky blue?", False),
        ("Explain model.gguf", False),
        ("hello", False),
        ("x" * 5000, False),
        ("nul\0byte", False),
    ],
)
def test_what_counts_as_a_model(text: str, expected: bool) -> None:
    assert load_model.is_model(text) is expected


def test_a_file_counts_as_a_model(tiny: Path, tmp_path: Path) -> None:
    assert load_model.is_model(str(tiny))
    assert load_model.is_model(str(tmp_path))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("rlx run smol", ["smollm2-135m"]),
        ("rlx run my", ["my.gguf"]),
        ("rlx run ./m", ["./more/", "./my.gguf"]),
        ("rlx run more/", ["more/other.gguf"]),
        ("rlx chat --over", ["--overflow"]),
        ("rlx ch", ["chat"]),
    ],
)
def test_the_shell_completes(
    words: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more").mkdir()
    for name in ("my.gguf", "my.txt", "more/other.gguf"):
        (tmp_path / name).touch()
    number = str(len(words.split()) - 1)
    shell = {"_RLX_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": number}
    done = CliRunner().invoke(app, [], env=shell, prog_name="rlx")
    assert done.stdout.split() == expected
