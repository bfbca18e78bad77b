"""Peers of `python -m bench llm` with pipelines of their own; stand-ins answer for them."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from cli_support import write_tiny

from bench import llm, results
from bench.instruction_set import instruction_set
from bench.peers.genai import openvino_genai, ort_genai
from bench.peers.pipe import PeerMissing
from rlx.errors import InputError
from rlx.formats.gguf import GgufFile, write_gguf
from rlx.ir.quant.scheme import GGUF_SCHEMES

ROOT = Path(__file__).resolve().parent.parent.parent
# What the scripts use of onnxruntime-genai. A run of any number of tokens takes 20 ms.
ORT = """
import json, time
__version__ = "0"
class Config:
    def __init__(self, folder):
        self.folder = folder
    def overlay(self, text):
        options = json.loads(text)["model"]["decoder"]["session_options"]
        assert options == {"intra_op_num_threads": 1}
class Model:
    def __init__(self, config):
        self.config = config
class GeneratorParams:
    def __init__(self, model):
        pass
    def set_search_options(self, max_length, do_sample):
        self.context = max_length
class Generator:
    def __init__(self, model, settings):
        self.context = settings.context
    def rewind_to(self, count):
        self.count = count
    def append_tokens(self, tokens):
        time.sleep(0.02)
        self.count += len(tokens)
        assert self.count <= self.context
"""
BUILDER = """
import json, pathlib, sys
given = sys.argv[1:]
print("progress, which is no answer")
floats, out = (pathlib.Path(given[given.index(o) + 1]) for o in ("-i", "-o"))
if (floats / "refused").exists():
    sys.exit("no such architecture")
out.mkdir()
(out / "genai_config.json").write_text(json.dumps(given))
"""
TRANSFORMERS = """
import pathlib, types
class Saved:
    hf_quantizer = "gguf"
    def __init__(self):
        self.config = types.SimpleNamespace(quantization_config="gguf")
    def save_pretrained(self, folder):
        pathlib.Path(folder).mkdir(exist_ok=True)
class Model(Saved):
    def save_pretrained(self, folder):
        assert self.hf_quantizer is None and not vars(self.config)
        if (self.source / "refuse").exists():
            (folder / "refused").touch()
class Auto:
    def __init__(self, kind):
        self.kind = kind
    def from_pretrained(self, pretrained_model_name_or_path, gguf_file):
        assert (pretrained_model_name_or_path / gguf_file).is_file()
        made = self.kind()
        made.source = pretrained_model_name_or_path
        return made
AutoTokenizer, AutoModelForCausalLM = Auto(Saved), Auto(Model)
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny.gguf")


@pytest.fixture
def ort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of stand-ins."""
    folder = tmp_path / "peer"
    (folder / "onnxruntime_genai" / "models").mkdir(parents=True)
    (folder / "onnxruntime_genai" / "__init__.py").write_text(ORT)
    (folder / "onnxruntime_genai" / "models" / "builder.py").write_text(BUILDER)
    (folder / "transformers.py").write_text(TRANSFORMERS)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def options(*models: Path, **more: Any) -> Namespace:
    given = {"threads": 1, "quick": True, "no_long": True, "genai_python": None}
    return Namespace(**given | {"ort_genai_python": None, "model": models} | more)


@pytest.mark.parametrize(
    ("scheme", "precision"),
    [("Q4_K", "int4"), ("Q4_0", "int4"), ("Q6_K", "int8"), ("Q8_0", "int8"), ("F16", "fp32")],
)
def test_as_many_bits_as_ours(ort: Path, tiny: Path, scheme: str, precision: str) -> None:
    ort_genai(sys.executable, str(tiny), 1, 64, GGUF_SCHEMES[scheme])
    (config,) = tiny.parent.glob("*/genai_config.json")
    assert config.parent == tiny.parent / f"tiny.ort-genai-{precision}"
    asked = json.loads(config.read_text())
    assert asked[asked.index("-p") + 1] == precision
    assert asked[asked.index("-e") + 1] == "cpu"
    assert "prune_lm_head=true" in asked
    assert ("accuracy_level=4" in asked) == (precision != "fp32")
    # nothing of what was between is left
    assert {p.name for p in tiny.parent.iterdir()} == {"tiny.gguf", "peer", config.parent.name}


def test_a_folder_is_made_once_for_a_file(ort: Path, tiny: Path) -> None:
    def made() -> int:
        ort_genai(sys.executable, str(tiny), 1, 64, GGUF_SCHEMES["Q4_0"])
        return (tiny.parent / "tiny.ort-genai-int4" / "genai_config.json").stat().st_mtime_ns

    first = made()
    assert made() == first
    os.utime(tiny, ns=(first + 1, first + 1))
    assert made() > first


def test_it_is_asked_as_the_others_are(ort: Path, tiny: Path) -> None:
    bench = llm.Bench(str(tiny), options(ort_genai_python=sys.executable))
    assert [*bench.others] == ["ONNX Runtime GenAI"]
    with bench.others["ONNX Runtime GenAI"]() as peer:
        # one run for the prompt, one for each token after it
        assert 0.02 <= peer.ask("prefill", tokens=512)["seconds"] < 0.2
        assert 0.1 <= peer.ask("decode", past=64, steps=5)["seconds"] < 1
        with pytest.raises(PeerMissing, match="AssertionError"):
            peer.ask("prefill", tokens=2000)


def test_bars_of_each_peer(tiny: Path) -> None:
    bench = llm.Bench(str(tiny), options())
    speeds = {"decode": 100.0, "prefill": 600.0}
    peers = ("rlx", "llama.cpp", "OpenVINO GenAI", "ONNX Runtime GenAI")
    bars = bench._speed_bars({name: dict(speeds) for name in peers}, 0.5)
    goals = {bar.name: (bar.peer, bar.goal) for bar in bars}
    for use in speeds:
        name = f"{use}_tiny_{instruction_set()}"
        assert goals[name][0] == "llama.cpp"
        assert goals[f"{name}_genai"] == ("OpenVINO GenAI", 1.3)
        assert goals[f"{name}_ort_genai"] == ("ONNX Runtime GenAI", 1.3)


def test_a_peer_that_is_not_there(
    ort: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (ort / "transformers.py").write_text("raise ModuleNotFoundError('no transformers here')\n")
    command = ["--model", str(tiny), "--ort-genai-python", sys.executable]
    assert llm.main(command) == 2
    said = capsys.readouterr().err
    assert "got ModuleNotFoundError: no transformers here" in said
    assert f"{sys.executable} -m pip install -r bench/requirements-ort-genai.txt" in said
    assert "with --ort-genai-python" in said
    assert (ROOT / "bench" / "requirements-ort-genai.txt").is_file()


def test_a_model_that_the_builder_refuses(ort: Path, tiny: Path) -> None:
    (tiny.parent / "refuse").touch()
    with pytest.raises(PeerMissing, match="got no such architecture"):
        ort_genai(sys.executable, str(tiny), 1, 64, GGUF_SCHEMES["Q4_0"])
    assert not [*tiny.parent.glob("*ort-genai*")]


def test_a_file_that_does_not_say_its_type(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=r"no general\.file_type"):
        openvino_genai(sys.executable, str(tiny), 1)
    assert llm.main(["--model", str(tiny), "--genai-python", sys.executable]) == 2
    assert "hint: `rlx quantize" in capsys.readouterr().err
    with GgufFile(tiny) as file:
        tensors = {name: file.array(name) for name in file.tensors}
        write_gguf(tmp_path / "typed.gguf", {**file.metadata, "general.file_type": 0}, tensors)
    openvino_genai(sys.executable, str(tmp_path / "typed.gguf"), 1)  # not started: no error


def test_all_benches_hand_them_on() -> None:
    given = Namespace(quick=False, peer_python=None, llm=["m.gguf"], genai_python="a")
    given.ort_genai_python, given.type = "b", ["all"]
    want = ["--genai-python", "a", "--ort-genai-python", "b", "--type", "all"]
    want += ["--model", "m.gguf"]
    assert results._arguments("llm", given) == want
    assert results._arguments("memory", given) == ["--model", "m.gguf"]
