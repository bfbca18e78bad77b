"""Benches over every GGUF weight type: files of random weights, instruction sets, names."""

from __future__ import annotations

import numpy as np
import pytest

from bench import __main__ as benches
from bench import llm
from bench.instruction_set import AVX2, instruction_set
from bench.random_model import BLOCK_TYPES, SPREAD, random_blocks, write_random_model
from rlx.errors import InputError
from rlx.formats.gguf import GgufFile
from rlx.ir.quant.scheme import GGUF_SCHEMES, decode
from rlx.llvm.target import Target

FOR_ACTIVATIONS = {"Q8_1", "Q8_K"}
# what the script of the peer uses of llama-cpp-python, built for AVX-512
LLAMA = """
__version__ = "0"
class Llama:
    def __init__(self, *args, **settings):
        pass
def llama_print_system_info():
    return b"CPU : AVX2 = 1 | AVX512 = 1"
"""


def test_every_packed_type_of_weights_can_be_made():
    packed = {n for n, s in GGUF_SCHEMES.items() if not s.is_float}
    assert set(BLOCK_TYPES) == packed - FOR_ACTIVATIONS
    assert set(BLOCK_TYPES) < set(llm.TYPES)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_random_blocks_have_the_spread_of_weights(name):
    scheme = GGUF_SCHEMES[name]
    weights = decode(scheme, random_blocks(np.random.default_rng(3), scheme, 32, 512))
    # MXFP4 has powers of two for scales; the others are near
    assert SPREAD / 1.42 < weights.std() < SPREAD * 1.42
    # codes of 0 to 3 for TQ2_0, whose weights are -1, 0 and 1: half a step above zero
    assert abs(weights.mean()) < (0.5 if name == "TQ2_0" else 0.15) * SPREAD


def test_a_preset_mixes_types_and_a_type_does_not(tmp_path):
    for kind, found in (("Q4_K_M", {"Q4_K", "Q6_K", "F32"}), ("TQ1_0", {"TQ1_0", "F32"})):
        write_random_model(tmp_path / "model.gguf", "0.6b", kind, layers=2, vocab=512)
        with GgufFile(tmp_path / "model.gguf") as file:
            assert {str(t.scheme) for t in file.tensors.values()} == found
            assert len(file.metadata["tokenizer.ggml.tokens"]) == 512


def test_instruction_sets_have_names():
    names = {"znver4": "avx512", AVX2: "avx2", "x86-64-v2": "sse", "apple-m1": "neon"}
    assert {n: instruction_set(Target.named(n)) for n in names} == names


def test_a_peer_with_more_than_avx2_is_refused(tmp_path, monkeypatch):
    (tmp_path / "llama_cpp.py").write_text(LLAMA)
    (tmp_path / "model.gguf").write_bytes(b"")
    given = ["--type", "Q8_0", "--avx2", "--avx2-peer", str(tmp_path)]
    options = llm._parser().parse_args(given)
    monkeypatch.setattr(llm, "weight_type", lambda path: "Q8_0")
    bench = llm.Bench(str(tmp_path / "model.gguf"), options, made=True)
    with pytest.raises(InputError, match=r"held to AVX2.*AVX512"):
        bench.theirs(64)


def test_qmatmul_is_qgemm(capsys):
    with pytest.raises(SystemExit):
        benches.main(["qmatmul", "--help"])
    assert "python -m bench qgemm" in capsys.readouterr().out
