"""`rlx bench`: language models, encoders, a peer, a plot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from cli_support import CONTEXT, HIDDEN, VOCAB

from rlx.cli.peers import PeerMissing, start_llama_cpp
from rlx.formats.gguf import GgufFile
from rlx.viz.plot import Chart, draw

REFERENCE = ("--device", "reference", "-r", "1")
# What the server script uses of llama-cpp-python. A decode of any number of tokens takes 20 ms.
LLAMA = """
import time
__version__ = "0"
class Llama:
    def __init__(self, path, n_ctx, n_threads, **options):
        assert path.endswith(".gguf") and n_threads >= 1
        self.n_tokens, self.n_ctx = 0, n_ctx
    def reset(self):
        self.n_tokens = 0
    def eval(self, tokens):
        time.sleep(0.02)
        self.n_tokens += len(tokens)
        assert self.n_tokens <= self.n_ctx
"""


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "peer"
    folder.mkdir()
    (folder / "llama_cpp.py").write_text(LLAMA)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_lengths_of_a_language_model(rlx: Any, tiny: Path) -> None:
    command = ("bench", tiny, *REFERENCE, "-p", "8", "-p", "20", "-n", "3")
    done = rlx(*command, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    with GgufFile(tiny) as file:
        weights = sum(t.nbytes for t in file.tensors.values())
    assert found["weight_bytes"] == weights - VOCAB * HIDDEN * 4  # of the table only rows
    tests = [(t["test"], t["tokens"], t["past"]) for t in found["tests"]]
    assert tests == [("prefill", 8, 0), ("decode", 3, 8), ("prefill", 20, 0), ("decode", 3, 20)]
    for t in found["tests"]:
        assert t["tokens_per_second"] == pytest.approx(t["tokens"] / t["seconds"])
    decode = found["tests"][1]
    rate = found["weight_bytes"] * decode["tokens_per_second"] / 1e9
    assert decode["weights_gb_per_second"] == pytest.approx(rate)
    lines = rlx(*command).stdout.splitlines()
    assert lines[3].split() == ["test", "batch", "tokens", "past", "tokens/s", "ms/token", "GB/s"]
    assert [len(line.split()) for line in lines[4:]] == [6, 7, 6, 7]
    assert rlx("bench", tiny, *REFERENCE, "-p", CONTEXT, "-n", "1").exit_code == 1


def test_requests_at_once(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    plot = tmp_path / "speed.svg"
    command = ("bench", tiny, "-r", "1", "-p", "8", "-n", "4", "--batch", "1", "--batch", "3")
    found = json.loads(rlx(*command, "--json", "--plot", plot).stdout)
    tests = [(t["test"], t["batch"], t["tokens"], t["past"]) for t in found["tests"]]
    assert tests == [("prefill", 1, 8, 0), ("decode", 1, 4, 8), ("decode", 3, 4, 8)]
    many = found["tests"][2]
    assert many["tokens_per_second"] == pytest.approx(3 * 4 / many["seconds"])
    assert {"rlx", "rlx, 3 at once"} <= texts_of(plot.read_text())


def test_batches_of_an_encoder(rlx: Any, encoder: Path, tmp_path: Path) -> None:
    plot = tmp_path / "speed.svg"
    command = ("bench", encoder, *REFERENCE, "-p", "8", "-p", "16", "-b", "1", "-b", "3")
    found = json.loads(rlx(*command, "--json", "--plot", plot).stdout)
    tests = [(t["test"], t["tokens"], t["batch"]) for t in found["tests"]]
    assert tests == [("encode", n, b) for n in (8, 16) for b in (1, 3)]
    for t in found["tests"]:
        assert t["tokens_per_second"] == pytest.approx(t["tokens"] * t["batch"] / t["seconds"])
    lines = rlx(*command).stdout.splitlines()
    assert [line.split()[:3] for line in lines[4:6]] == [["encode", "1", "8"], ["encode", "3", "8"]]
    assert {"8 tokens", "16 tokens", "texts"} <= texts_of(plot.read_text())
    peer = rlx(*command, "--peer", "llama.cpp")
    assert (peer.exit_code, "language models in GGUF files" in peer.stderr) == (1, True)


def test_a_peer_in_turn(rlx: Any, tiny: Path, llama: None, tmp_path: Path) -> None:
    plot = tmp_path / "speed.svg"
    command = ("bench", tiny, *REFERENCE, "-p", "8", "-n", "2", "--peer", "llama.cpp")
    found = json.loads(rlx(*command, "--json", "--plot", plot).stdout)
    prefill, decode = found["tests"]
    # the sleeps take 20 ms or more: 8 tokens at once, and one token each
    assert 8 / 0.2 < prefill["peer_tokens_per_second"] <= 8 / 0.02
    assert 1 / 0.2 < decode["peer_tokens_per_second"] <= 1 / 0.02
    assert {"rlx", "llama.cpp", "prefill", "decode"} <= texts_of(plot.read_text())
    lines = rlx(*command).stdout.splitlines()
    assert lines[3].split()[-2:] == ["llama.cpp", "ratio"]
    assert float(lines[5].split()[-1]) > 0


def test_a_peer_that_is_not_there(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    empty = tmp_path / "llama_cpp.py"
    empty.write_text("raise ModuleNotFoundError('no llama here')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        done = rlx("bench", tiny, *REFERENCE, "--peer", "llama.cpp")
    assert done.exit_code == 1
    assert "got ModuleNotFoundError: no llama here" in done.stderr
    assert f"{sys.executable} -m pip install llama-cpp-python" in done.stderr
    nowhere = rlx("bench", tiny, *REFERENCE, "--peer", "llama.cpp", "--peer-python", "/no/python")
    assert (nowhere.exit_code, "No such file" in nowhere.stderr) == (1, True)
    unknown = rlx("bench", tiny, "--peer", "llama")
    assert (unknown.exit_code, "no peer 'llama'" in unknown.stderr) == (2, True)


def test_a_peer_that_ends(llama: None, tiny: Path) -> None:
    with start_llama_cpp(sys.executable, tiny, 1, 16) as peer:
        assert peer.hello["ready"]
        assert peer.ask("prefill", tokens=16)["seconds"] >= 0.02
        with pytest.raises(PeerMissing, match="AssertionError"):
            peer.ask("prefill", tokens=17)


def test_a_chart() -> None:
    lines = {"<a>": [(512.0, 50.0), (128.0, 100.0)], "b": [(128.0, 25.0)]}
    svg = draw([Chart("speed & size", "tokens", "tokens/s", lines)])
    assert {"speed & size", "tokens", "tokens/s", "<a>", "b", "128", "512", "100"} <= texts_of(svg)
    points = [e.attrib["points"] for e in elements(svg, "polyline")]
    places = [[tuple(map(float, p.split(","))) for p in line.split()] for line in points]
    (left, high), (right, half) = places[0]
    assert left < right and high < half  # sizes to the right, speed upwards
    assert places[1][0][0] == left
    bottom = max(float(e.attrib["y1"]) for e in elements(svg, "line"))
    assert bottom - half == pytest.approx((bottom - high) / 2, abs=0.11)  # places have one decimal
    assert draw([]).startswith("<svg")


def elements(svg: str, name: str) -> list[ElementTree.Element]:
    return [*ElementTree.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{name}")]


def texts_of(svg: str) -> set[str]:
    return {e.text or "" for e in elements(svg, "text")}
