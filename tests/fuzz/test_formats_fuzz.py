"""Ten thousand damaged model files: what comes out is a typed error, or a file that can be read.

Memory is watched too: whatever a file claims, reading it takes no more than a small multiple of
its size.
"""

from __future__ import annotations

import json
import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx.errors import FormatError, RlxError
from rlx.formats.gguf import GgufFile, PackedTensor, write_gguf
from rlx.formats.safetensors import SafetensorsFile
from rlx.formats.tokenizer.gguf_vocabulary import KEY, tokenizer_from_gguf
from rlx.ir.quant.scheme import GGUF_SCHEMES

ROUNDS, PER_ROUND = 10, 500  # of each format
MEMORY = 1 << 20  # bytes at once, for files of some kilobytes
ODD_NUMBERS = [0, 1, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 2**40, 31, 33]


def gguf_file(folder: Path) -> bytes:
    path = folder / "whole.gguf"
    rng = np.random.default_rng(0)
    q4 = GGUF_SCHEMES["Q4_K"]
    metadata = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.block_count": 2,
        "flag": True,
        "eps": 1e-5,
        "wide": 2**50,
        KEY + "model": "gpt2",
        KEY + "pre": "gpt-2",
        KEY + "tokens": [chr(33 + i) for i in range(90)] + ["ab", "<s>"],
        KEY + "token_type": np.array([1] * 91 + [3], np.int32),
        KEY + "scores": np.arange(92, dtype=np.float32),
        KEY + "merges": ["a b"],
        KEY + "bos_token_id": 91,
        "flags": [True, False],
        "nested": [[1, 2], ["a", "b"], [[0.5]]],
    }
    tensors: dict[str, Any] = {
        "f32": rng.standard_normal((3, 8)).astype(np.float32),
        "f16": rng.standard_normal((2, 2, 4)).astype(np.float16),
        "i8": np.arange(5, dtype=np.int8),
        "q4": PackedTensor((2, 256), q4, rng.integers(0, 256, (2, 144), np.uint8)),
    }
    write_gguf(path, metadata, tensors)
    return path.read_bytes()


def safetensors_file(folder: Path) -> bytes:
    sizes = {"a.weight": ("F32", [2, 3], 24), "b": ("BF16", [8], 16), "c": ("I64", [], 8)}
    header: dict[str, Any] = {"__metadata__": {"format": "np"}}
    at = 0
    for name, (dtype, shape, size) in sizes.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(range(at))


def damaged(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    head = min(len(out), 1600)  # the damage that matters is before the weights
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        at = rng.randrange(head if rng.random() < 0.95 else len(out))
        kind = rng.randrange(8)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at] = rng.choice([0, 1, 8, 9, 0x22, 0x2C, 0x39, 0x5B, 0x7B, 0x7D, 0x7F, 0x80, 0xFF])
        elif kind == 2:
            out[at : at + 8] = struct.pack("<Q", rng.choice(ODD_NUMBERS))
        elif kind == 3:
            out[at : at + 4] = struct.pack("<I", rng.choice(ODD_NUMBERS) & 0xFFFFFFFF)
        elif kind == 4:
            del out[at : at + rng.randrange(1, 20)]
        elif kind == 5:
            out[at:at] = rng.randbytes(rng.randrange(1, 20))
        elif kind == 6:
            start = rng.randrange(len(out))
            out[at : at + rng.randrange(40)] = out[start : start + rng.randrange(40)]
        else:
            del out[rng.randrange(len(out)) :]
        if not out:
            break
        head = min(head, len(out))
    return bytes(out)


def read_gguf(path: Path) -> None:
    with GgufFile(path) as file:
        for value in file.metadata.values():
            str(value)
        for name, info in file.tensors.items():
            assert file.array(name).nbytes == info.nbytes
            file.array(name).tobytes()  # a fault here would end the process


def read_safetensors(path: Path) -> None:
    with SafetensorsFile(path) as file:
        for name, info in file.tensors.items():
            assert file.array(name).nbytes == info.nbytes
            file.array(name).tobytes()


FORMATS: dict[str, tuple[Callable[[Path], bytes], Callable[[Path], None]]] = {
    "gguf": (gguf_file, read_gguf),
    "safetensors": (safetensors_file, read_safetensors),
}


@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.parametrize("format", FORMATS)
def test_damage_raises(tmp_path: Path, format: str, seed: int) -> None:
    make, read = FORMATS[format]
    whole, rng = make(tmp_path), random.Random(seed)
    refused = 0
    tracemalloc.start()
    try:
        for i in range(PER_ROUND):
            path = tmp_path / f"{i}.{format}"
            path.write_bytes(damaged(whole, rng))
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                read(path)
            except FormatError as e:
                refused += 1
                assert str(path) in e.where
            assert tracemalloc.get_traced_memory()[1] - before < MEMORY
            os.unlink(path)
    finally:
        tracemalloc.stop()
    assert PER_ROUND // 2 < refused < PER_ROUND  # some changes are harmless


def test_noise_raises(tmp_path: Path) -> None:
    rng = random.Random(7)
    path = tmp_path / "noise"
    for head in (b"", b"GGUF\3\0\0\0", b"GGUF\3\0\0\0" + bytes(8) + b"\x05" + bytes(7)):
        for _ in range(300):
            path.write_bytes(head + rng.randbytes(rng.randrange(1, 300)))
            for kind in (GgufFile, SafetensorsFile):
                with pytest.raises(FormatError):
                    kind(path)


def test_damaged_vocabularies_raise(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole, rng = gguf_file(tmp_path), random.Random(5)
    built = 0
    for i in range(600):
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(damaged(whole, rng))
        try:
            tokenizer = tokenizer_from_gguf(GgufFile(path))
        except RlxError:
            continue
        built += 1
        tokenizer.decode(tokenizer.encode("abc <s> é"))
    assert 20 < built < 500
    assert "panicked" not in capfd.readouterr().err
