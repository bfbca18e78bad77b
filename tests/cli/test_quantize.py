"""`rlx quantize`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from cli_support import write_tiny

from rlx.formats.gguf import GgufFile


def test_a_smaller_model_that_answers(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.gguf"
    done = rlx("quantize", tiny, out, "--type", "Q8_0", "--threads", 1)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.strip() == str(out)
    assert "Q8_0" in done.stderr
    with GgufFile(out) as file:
        assert file.tensors["blk.0.attn_q.weight"].scheme.name == "Q8_0"  # type: ignore[union-attr]
        # rows of 48 are no whole blocks of 32
        assert file.tensors["blk.0.ffn_down.weight"].scheme.name == "F16"  # type: ignore[union-attr]
    answer = rlx("run", out, "Hi", "--temperature", 0, "--max-tokens", 4, "--json")
    assert answer.exit_code == 0, answer.stderr
    assert json.loads(answer.stdout)["tokens"]


def test_as_json(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.gguf"
    done = rlx("quantize", tiny, out, "-q", "q4_0", "--json")
    found = json.loads(done.stdout)
    assert found["type"] == "Q4_0" and found["path"] == str(out)
    assert found["bytes"] == out.stat().st_size
    rows = {t["name"]: (t["before"], t["after"]) for t in found["tensors"]}
    assert rows["blk.1.attn_k.weight"] == ("F32", "Q4_0")
    assert rows["output.weight"] == ("F32", "Q8_0")  # Q6_K, but rows of 32
    assert rows["output_norm.weight"] == ("F32", "F32")


@pytest.mark.parametrize(
    "options, code, message",
    [
        (["--type", "Q4_M"], 2, "no such quant preset"),
        (["--type", "Q8_0"], 1, "--force"),
        (["--threads", "0", "--force"], 2, "number of threads"),
    ],
)
def test_refusals(
    rlx: Any, tiny: Path, tmp_path: Path, options: list[str], code: int, message: str
) -> None:
    out = tmp_path / "there.gguf"
    out.write_text("mine")
    done = rlx("quantize", tiny, out, *options)
    assert done.exit_code == code
    assert message in done.stderr
    assert out.read_text() == "mine"


def test_twice(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    once, twice = tmp_path / "once.gguf", tmp_path / "twice.gguf"
    assert rlx("quantize", tiny, once, "-q", "Q8_0").exit_code == 0
    refused = rlx("quantize", once, twice, "-q", "Q4_0")
    assert refused.exit_code == 1 and "--requantize" in refused.stderr
    done = rlx("quantize", once, twice, "-q", "Q4_0", "--requantize")
    assert done.exit_code == 0 and "warning" in done.stderr


def same(kind: str, model: Path) -> Path:
    """Another name of the model."""
    name = model.with_name("other.gguf")
    if kind == "symbolic link":
        name.symlink_to(model)
    elif kind == "hard link":
        os.link(model, name)
    elif kind == "path":
        (model.parent / "folder").mkdir()
        name = model.parent / "folder" / ".." / model.name
    return name


@pytest.mark.parametrize("kind", ["path", "symbolic link", "hard link"])
@pytest.mark.parametrize("command", ["quantize", "compile", "inspect"])
def test_a_model_is_never_replaced_by_what_is_made_of_it(
    rlx: Any, tmp_path: Path, command: str, kind: str
) -> None:
    model = write_tiny(tmp_path / "model.gguf")
    before, out = model.read_bytes(), same(kind, model)
    options = {
        "quantize": [model, out, "--type", "Q8_0", "--force"],
        "compile": [model, "--out", out],
        "inspect": [model, "--stage", "hir", "-o", out],
    }[command]
    done = rlx(command, *options)
    assert done.exit_code == 1
    assert "the output would replace the model that is read" in done.stderr
    assert model.read_bytes() == before and out.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == sorted(
        {"model.gguf", out.name}
    )


def test_files_of_a_folder_are_not_replaced(tmp_path: Path) -> None:
    from tiny import write_folder

    from rlx.errors import InputError
    from rlx.models.to_gguf import quantize_model

    write_folder("llama", tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(InputError, match="would replace the model"):
        quantize_model(tmp_path, tmp_path / "config.json", "Q8_0", overwrite=True)
    assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.slow
def test_calibrated(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    out, text, matrix = tmp_path / "o.gguf", tmp_path / "text.txt", tmp_path / "m.gguf"
    text.write_text("Some words to read. " * 40)
    options = ["--calibrate", text, "--imatrix-out", matrix, "--chunks", 1]
    done = rlx("quantize", tiny, out, "-q", "Q4_0", *options)
    assert done.exit_code == 0, done.stderr
    made = out.read_bytes()
    done = rlx("quantize", tiny, out, "-q", "Q4_0", "--imatrix", matrix, "--force")
    assert done.exit_code == 0, done.stderr
    with GgufFile(out) as file, GgufFile(matrix) as kept:
        assert file.metadata["quantize.imatrix.file"] == "m.gguf"
        assert file.metadata["quantize.imatrix.chunks_count"] == 1
        assert "blk.0.attn_q.weight.in_sum2" in kept.tensors
    plain = tmp_path / "plain.gguf"
    assert rlx("quantize", tiny, plain, "-q", "Q4_0").exit_code == 0
    name = "blk.0.attn_q.weight"
    with GgufFile(out) as file, GgufFile(plain) as other:
        assert (file.array(name) != other.array(name)).any()
        assert made[-1000:] == out.read_bytes()[-1000:]


@pytest.mark.parametrize(
    "options, code, message",
    [
        (["--imatrix", "none.gguf"], 1, "no such file"),
        (["--chunks", 3], 2, "only with --calibrate"),
        (["--imatrix-out", "m.gguf"], 2, "only with --calibrate"),
        (["--imatrix", "a", "--calibrate", "b"], 2, "not both"),
        (["--calibrate", "none.txt"], 1, "none.txt"),
    ],
)
def test_refused_calibration(
    rlx: Any, tiny: Path, tmp_path: Path, options: list[Any], code: int, message: str
) -> None:
    done = rlx("quantize", tiny, tmp_path / "o.gguf", *options)
    assert done.exit_code == code and message in done.stderr, done.stderr
    assert not (tmp_path / "o.gguf").exists()
