"""What the serving guide shows works: commands with curl, and the files in deploy/."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from pathlib import Path

from conftest import RunningServer

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


def test_the_commands_with_curl(smollm2_server: RunningServer) -> None:
    found = re.findall(r"^\$ (curl .*)$", PAGE, re.MULTILINE)
    assert len(found) >= 4
    for command in found:
        words = shlex.split(command.replace("http://127.0.0.1:8000", smollm2_server.url))
        done = subprocess.run([*words, "-sS"], capture_output=True, text=True, check=True)
        assert "error" not in json.loads(done.stdout), done.stdout


def test_the_table_of_paths_is_that_of_the_routes() -> None:
    from rlx.serve.app import ROUTES

    told = set(re.findall(r"`(?:GET|POST) (/[\w/]*)`", PAGE))
    routes = {r.path for r in ROUTES if "{" not in r.path}
    assert told == routes


def test_metrics_that_are_named_exist(server: RunningServer) -> None:
    server.post(
        "/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 2, "stream": True}
    )
    named = set(re.findall(r"`(rlx_\w+)`", PAGE))
    assert len(named) > 10
    deadline = time.monotonic() + 10
    missing = named
    while missing and time.monotonic() < deadline:  # a request counts once its answer has gone out
        text = server.client.get("/metrics").text
        missing = {n for n in named if f"\n{n}" not in text}
    assert not missing


def test_the_examples_of_deployment_name_options_that_exist() -> None:
    from typer.testing import CliRunner

    from rlx.cli.app import app

    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    unit = (ROOT / "deploy" / "rlx-serve.service").read_text(encoding="utf-8")
    docker = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", docker, re.MULTILINE)
    options = re.findall(r"(--[\w-]+)", start + entry)
    assert len(options) >= 7
    assert not [o for o in options if o not in shown]
