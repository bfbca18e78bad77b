"""Commands that pages show run as they stand, where that is quick; all are parsed in tests/cli."""

from __future__ import annotations

import pytest
from blocks import PAGES, Command, commands, fits
from typer.testing import CliRunner

from rlx.cli.app import app

QUICK = ("run", "list", "inspect", "doctor")
ELSEWHERE = ("model", "folder", "mlp", "tuned", "net.onnx")  # that a reader has, or a block wrote
SLOW = ("--html", "--peer")


def quick() -> list[Command]:
    """In order: some use what those before them wrote."""
    found: dict[str, Command] = {}
    for page in PAGES:
        for command in commands(page):
            words = command.words
            theirs = any(w.startswith(ELSEWHERE) or w in SLOW for w in words)
            if command.alone and words[0] in QUICK and not theirs:
                found.setdefault(" ".join(words), command)
    return list(found.values())


def test_commands_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert len(quick()) > 10
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("reader"))
        for words, _, printed in quick():
            wrong = printed.startswith("error: ")
            done = CliRunner().invoke(app, words, prog_name="rlx")
            assert done.exit_code == wrong, (words, done.output)
            if wrong or (words[0] == "inspect" and printed):
                assert fits(done.output, printed), (words, done.output)
