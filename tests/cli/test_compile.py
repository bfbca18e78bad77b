"""`rlx compile`: one file to ship, and `--artifact` to run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

GREEDY = ("--temperature", "0", "--max-tokens", "5", "--raw")


def test_it_is_made_described_and_run_without_llvmlite(
    rlx: Any, tiny: Path, tmp_path: Path
) -> None:
    made = rlx(
        "compile", tiny, "--out", tmp_path, "--context", "64", "--variant", "prefill:1x16",
        "--variant", "decode:1", "--cpu", "generic", "--json",
    )  # fmt: skip
    assert made.exit_code == 0, made.stderr
    report = json.loads(made.stdout)
    file = tmp_path / "tiny.rlx"
    assert report["path"] == str(file) and report["bytes"] == file.stat().st_size
    assert (report["kind"], report["context"], report["chunk"]) == ("language", 64, 16)
    assert report["cpu"] == "generic" and "sample" in report["entry_points"]
    wanted = rlx("run", tiny, "ab", *GREEDY, "--context", "64").stdout
    code = "import sys; sys.modules['llvmlite'] = None; from rlx.cli import main; main()"
    arguments = ["run", str(tiny), "ab", "--artifact", str(file), *GREEDY]
    env = os.environ | {"RLX_CACHE_DIR": str(tmp_path / "elsewhere")}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env
    )
    assert (done.returncode, done.stdout) == (0, wanted), done.stderr
    report = rlx(
        "profile", tiny, "--artifact", file, "--prompt", "4", "--new", "2", "--repeat", "1"
    )
    assert report.exit_code == 0, report.stderr


def test_batching_and_speculation_go_along(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "many.rlx"
    made = rlx(
        "compile", tiny, "--out", file, "--context", "64", "--requests", "2", "--cache-tokens",
        "100", "--speculate", "3", "--json",
    )  # fmt: skip
    assert made.exit_code == 0, made.stderr
    report = json.loads(made.stdout)
    assert (report["requests"], report["cache_tokens"]) == (2, 128), "whole pages"
    assert {"requests", "verify-4", "row-sample-penalties"} <= set(report["entry_points"])
    assert {"any", "verify-4", "decode"} <= report["variants"].keys()
    arguments = ("bench", tiny, "--artifact", file, "--prompt", "4", "--new", "2", "--repeat", "1")
    measured = rlx(*arguments, "--batch", "1", "--batch", "2", "--json")
    assert measured.exit_code == 0, measured.stderr
    assert [row["batch"] for row in json.loads(measured.stdout)["tests"]] == [1, 1, 2]
    other = rlx(*arguments, "--batch", "3")
    assert other.exit_code == 2 and "made for something else" in other.stderr


def test_encoders_and_what_is_said_about_it(rlx: Any, encoder: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "e.rlx"
    made = rlx("compile", encoder, "-o", file, "-v", "encoder:2x16", "--weights")
    assert made.exit_code == 0, made.stderr
    assert "e.rlx: " in made.stderr and " executables, " in made.stderr and not made.stdout
    wanted, found = (
        json.loads(rlx("embed", encoder, "the cat", *more).stdout)
        for more in ((), ("--artifact", file))
    )
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--variant", "prefil:1"), "not a variant"),
        (("--variant", "prefill:2x16"), "one sequence at a time"),
        (("--variant", "encoder:1x16"), "for encoders only"),
        (("--variant", "encoder:1"), "a length is missing"),
        (("--variant", "inference:1"), "not a phase of this model"),
        (("--cpu", "z80"), "unknown target"),
        (("--context", "100000"), "context out of range"),
        (("--kv", "f17"), "unknown type of the KV cache"),
    ],
)
def test_what_cannot_be_made(
    rlx: Any, tiny: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    done = rlx("compile", tiny, "--out", tmp_path / "x.rlx", *arguments)
    assert done.exit_code in (1, 2) and said in done.stderr
    assert not (tmp_path / "x.rlx").exists()


def test_artifacts_that_do_not_fit(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.rlx"
    assert rlx("compile", tiny, "--out", file, "--context", "64").exit_code == 0
    other = rlx("run", tiny, "ab", "--artifact", file, "--context", "32")
    assert other.exit_code == 2 and "made for something else" in other.stderr
    missing = rlx("run", tiny, "ab", "--artifact", tmp_path / "none.rlx")
    assert missing.exit_code == 1 and "no such bundle" in missing.stderr
    file.chmod(0o666)
    open_to_all = rlx("run", tiny, "ab", "--artifact", file)
    assert open_to_all.exit_code == 1 and "others could have changed" in open_to_all.stderr
