"""Model folders, and finding out what a path holds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_safetensors import packed, shards

from rlx.errors import FormatError, InputError
from rlx.formats import open_model
from rlx.formats.gguf import GgufFile, write_gguf
from rlx.formats.hf import HfFolder


def folder(path: Path, name: str = "model.safetensors") -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    (path / name).write_bytes(packed({"w": ("F32", np.ones((2, 3), np.float32))}))
    return path


def test_a_folder(tmp_path: Path) -> None:
    (folder(tmp_path) / "generation_config.json").write_text('{"eos_token_id": 2}')
    with HfFolder(tmp_path) as model:
        assert model.config["hidden_size"] == 8
        assert model.tensors["w"].shape == (2, 3)
        assert np.array_equal(model.array("w"), np.ones((2, 3)))
        assert model.json("generation_config.json") == {"eos_token_id": 2}
        assert model.json("absent.json") == {}
        assert repr(model) == f"HfFolder({str(tmp_path)!r}, llama, 1 tensors)"


def test_a_folder_of_shards(tmp_path: Path) -> None:
    shards(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert set(HfFolder(tmp_path).tensors) == {"w1", "w2"}


def test_weights_under_another_name(tmp_path: Path) -> None:
    assert set(HfFolder(folder(tmp_path, "other.safetensors")).tensors) == {"w"}


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        HfFolder(tmp_path / "absent")
    with pytest.raises(FormatError, match="not a model folder"):
        HfFolder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FormatError, match="no safetensors weights in the folder; got none"):
        HfFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FormatError, match=r"got pytorch_model.bin; .*\n  hint: pickled weights"):
        HfFolder(tmp_path)
    with pytest.raises(FormatError, match=r"no tokenizer\.json in the folder"):
        HfFolder(folder(tmp_path)).tokenizer()
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(FormatError, match="not a JSON object"):
        HfFolder(tmp_path)


def test_what_a_path_holds(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path, {"general.architecture": "llama"}, {})
    assert isinstance(open_model(path), GgufFile)
    found = open_model(tmp_path)
    assert isinstance(found, GgufFile)
    assert found.path == path
    write_gguf(tmp_path / "b.gguf", {}, {})
    with pytest.raises(FormatError, match=r"not one model; got a\.gguf, b\.gguf"):
        open_model(tmp_path)
    folder(tmp_path)
    assert isinstance(open_model(tmp_path), HfFolder)
    assert isinstance(open_model(tmp_path / "model.safetensors"), HfFolder)
    with pytest.raises(InputError, match="no such file"):
        open_model(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match="no model in the folder"):
        open_model(tmp_path / "empty")
