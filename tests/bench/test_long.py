"""`python -m bench long`: its shallow models, the filled context, and the line it prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_support import HIDDEN, LAYERS, VOCAB, write_tiny

from bench import long
from bench.instruction_set import instruction_set
from bench.peers.pipe import HERE
from bench.shallow_model import write_shallow_model
from rlx import load
from rlx.cli.peers import start_llama_cpp
from rlx.errors import InputError
from rlx.formats.gguf import GgufFile

FLASH = "llama.cpp AVX2 with flash attention"
# What the server uses of llama-cpp-python. A run of any number of tokens takes 20 ms.
LLAMA = """
import time
from types import SimpleNamespace
__version__ = "0"
def llama_print_system_info():
    return b"CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 |"
def llama_state_seq_get_size(context, sequence):
    return 8
def llama_state_seq_get_data(context, data, size, sequence):
    assert sequence == 0
    return size
def llama_state_seq_set_data(context, data, size, sequence):
    assert sequence == 1
    CELLS.append(None)
    return size
def llama_context_default_params():
    return SimpleNamespace(n_seq_max=1, kv_unified=False)
CELLS = []
class Context:
    ctx = None
    def kv_cache_clear(self):
        CELLS[:] = [0]
    def kv_cache_seq_shift(self, sequence, first, last, places):
        CELLS[-1] = places
    def kv_cache_seq_cp(self, source, target, first, last):
        assert (source, target) == (1, 0)
    def kv_cache_seq_rm(self, sequence, first, last):
        assert sequence == 1
class Llama:
    def __init__(self, path, n_ctx, type_k, type_v, flash_attn, **options):
        params = llama_context_default_params()
        assert (params.n_seq_max, params.kv_unified) == (2, True)
        assert (type_k, type_v, flash_attn) == (1, 1, True)
        self.n_tokens, self.n_ctx, self._ctx = 0, n_ctx, Context()
    def reset(self):
        self.n_tokens = 0
    def eval(self, tokens):
        assert CELLS == [0, 512][: max(self.n_tokens // 512, 1)]
        time.sleep(0.02)
        self.n_tokens += len(tokens)
        assert self.n_tokens <= self.n_ctx
import sys
llama_cpp = sys.modules[__name__]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    more = {"llama.context_length": 16384}
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", more=more)


@pytest.mark.slow
def test_a_shallow_model_has_a_part_of_layers_and_words(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    write_shallow_model(model, path, LAYERS // 2)
    with GgufFile(model) as whole, GgufFile(path) as half:
        assert half.tensors["token_embd.weight"].shape == (VOCAB // 2, HIDDEN)
        assert len(half.metadata["tokenizer.ggml.tokens"]) == VOCAB // 2
        names = {n for n in whole.tensors if not n.startswith("blk.1.")}
        assert half.tensors.keys() == names
        for name in names:
            rows = half.array(name)
            assert (rows == whole.array(name)[: len(rows)]).all()
    with load(path) as loaded:
        assert len(list(loaded.generate([1, 2, 3], max_tokens=2, temperature=0.0))) == 2
    with pytest.raises(InputError, match="1 to 2"):
        write_shallow_model(model, path, LAYERS + 1)


@pytest.mark.slow
def test_a_filled_context_repeats_a_chunk(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    from rlx_server import Server  # type: ignore[import-not-found]

    # the model has 258 words
    monkeypatch.setattr("rlx_server.ids", lambda count: [i % 250 for i in range(count)])
    server = Server(str(model), 1, 2048, "f16")
    server.fill(1300)
    assert len(server.runner.tokens) == 1300
    for state in server.runner._states.values():
        rows = np.asarray(state.array)
        assert rows[:, :, :512].any()
        assert (rows[:, :, 512:1024] == rows[:, :, :512]).all()
        assert (rows[:, :, 1024:1300] == rows[:, :, :276]).all()
        assert not rows[:, :, 1300:].any()
    server.prefill(8, past=1300)
    server.decode(past=1300, steps=2)
    assert len(server.runner.tokens) == 1300
    server.model.close()


class Answers:
    """A side that takes so many seconds for a chunk of a prompt, and for a decoded token."""

    def __init__(self, prefill: float, decode: float) -> None:
        self.taken, self.hello, self.filled = (prefill, decode), {"instructions": "AVX2"}, 0

    def ask(self, do: str, past: int = 0, tokens: int = 0, steps: int = 0) -> dict[str, float]:
        if do == "fill":
            self.filled = past
        if do == "memory":
            return {"bytes": 100e6, "cache": 10e6}
        assert self.filled == past or past in (0, long.CHUNK)  # the start before
        return {"seconds": self.taken[0] if do == "prefill" else steps * self.taken[1]}

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_the_faster_kind_of_peer_counts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def llama(python: str, path: Path, threads: int, context: int, *words: str) -> Answers:
        given.append((path.name, context, *words))
        return Answers(8.0, 0.1) if "flash" in words else Answers(4.0, 0.2)

    monkeypatch.setattr(long, "start_llama_cpp", llama)
    monkeypatch.setattr(long, "Peer", lambda *a, **b: Answers(2.0, 0.05))
    out = tmp_path / "bars.json"
    command = ["--model", str(model), "--layers", "1", "--context", "8k", "--json", str(out)]
    assert long.main(command) == 0
    assert given == [
        ("tiny.gguf", 9216, "flash", "f16"),
        ("tiny.gguf", 9216, "f16"),
        ("tiny.gguf", 9216, "flash", "q8_0"),  # without flash attention llama.cpp has none
    ]
    bars = json.loads(out.read_text())
    assert [
        (b["name"], b["value"], b["peer"], b["peer_value"]) for b in bars if "mem" not in b["name"]
    ] == [
        (f"prefill_8k_tiny, KV cache f16, {instruction_set()}", 256, "llama.cpp AVX2", 128),
        (f"decode_8k_tiny, KV cache f16, {instruction_set()}", 20, FLASH, 10),
        (f"prefill_8k_tiny, KV cache q8_0, {instruction_set()}", 256, FLASH, 64),
        (f"decode_8k_tiny, KV cache q8_0, {instruction_set()}", 20, FLASH, 10),
    ]


def test_llama_cpp_fills_its_context(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama_cpp.py").write_text(LLAMA)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with start_llama_cpp(sys.executable, model, 1, 2048, "flash", "f16") as peer:
        assert peer.hello["instructions"] == "AVX2"
        peer.ask("fill", past=1024)
        assert peer.ask("prefill", past=1024, tokens=512)["seconds"] >= 0.02
        assert peer.ask("decode", past=1024, steps=2)["seconds"] >= 0.04
