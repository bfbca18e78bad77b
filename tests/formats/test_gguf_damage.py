"""GGUF files that are wrong: each fault has its own typed error, with the place and the values."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf_bytes as b
import pytest

from rlx.errors import FormatError, InputError
from rlx.formats.gguf import GgufFile

F32, Q8_0 = 0, 8
DATA = bytes(256)
HUGE = 2**64 - 1


def pairs(*more: bytes) -> list[bytes]:
    return [b.pair("general.architecture", 8, "llama"), *more]


def nested(depth: int) -> bytes:
    body = struct.pack("<IQ", 4, 0)
    for _ in range(depth):
        body = struct.pack("<IQ", 9, 1) + body
    return b.string("deep") + struct.pack("<I", 9) + body


def one(dims: list[int], kind: int = F32, offset: int = 0, name: str | bytes = "w") -> bytes:
    return b.document(pairs(), [b.tensor(name, dims, kind, offset)], DATA)


def wrong(*found: bytes) -> bytes:
    """A file with these pairs and nothing else."""
    return b.document(found)


def two(first: bytes, second: bytes) -> bytes:
    return b.document(pairs(), [first, second], DATA)


DAMAGE = {
    "vast axis": (one([2**63 + 32, 0]), "is larger than any memory; got dimensions"),
    "vast empty": (one([0, 2**32, 2**31], Q8_0), "is larger than any memory"),
    "magic": (b.document(magic=b"GGML"), "not a GGUF file; got 47 47 4d 4c"),
    "old": (b.document(magic=b"lmgg"), "hint: older GGML files need converting"),
    "version": (b.document(version=1), "unknown version of GGUF; got version 1"),
    "future": (b.document(version=4), "unknown version of GGUF; got version 4"),
    "big endian": (b.document(version=0x03000000), "a big-endian GGUF file; got version 3"),
    "short": (b"GGUF\3\0\0\0\0", "tensor count reaches past the end"),
    "pair count": (b.document(pairs(), pair_count=HUGE), "more metadata pairs than"),
    "pairs missing": (b.document(pairs(), pair_count=2), "a metadata key that is empty"),
    "tensor count": (b.document(pairs(), tensor_count=HUGE), "more tensors than the file can"),
    "key length": (wrong(struct.pack("<Q", HUGE) + bytes(20)), f"key too long; got {HUGE}"),
    "key not UTF-8": (wrong(b.pair(b"\xff\xfe", 4, 1)), "metadata key is not UTF-8"),
    "key twice": (wrong(b.pair("k", 4, 1), b.pair("k", 4, 1)), "key appears twice; got 'k'"),
    "value type": (
        wrong(b.raw_pair("k", struct.pack("<II", 13, 1))),
        "unknown type of 'k'; got 13",
    ),
    "string length": (
        wrong(b.raw_pair("k", struct.pack("<IQ", 8, HUGE))),
        f"value of 'k' reaches past the end of the file; got {HUGE} bytes",
    ),
    "array length": (wrong(b.array("k", 4, [1], HUGE)), "more elements in 'k' than"),
    "string count": (wrong(b.array("k", 8, ["a"], HUGE)), "more strings in 'k' than"),
    "string in array": (
        wrong(b.raw_pair("k", struct.pack("<IIQQ", 9, 8, 1, 999) + bytes(30))),
        "a string in 'k' reaches past the end of the file; got 999 bytes",
    ),
    "array count": (wrong(b.array("k", 9, [], HUGE)), "more arrays in 'k' than"),
    "nesting": (wrong(nested(9)), "'deep' nests too deep"),
    "boolean": (wrong(b.raw_pair("k", struct.pack("<IB", 7, 2))), "'k' is not a boolean; got 2"),
    "booleans": (
        wrong(b.raw_pair("k", struct.pack("<IIQBB", 9, 7, 2, 0, 9))),
        "'k' holds bytes that are no booleans; got 9",
    ),
    "alignment": (wrong(b.pair("general.alignment", 4, 48)), "out of range; got 48"),
    "no alignment": (wrong(b.pair("general.alignment", 4, 0)), "out of range; got 0"),
    "alignment type": (wrong(b.pair("general.alignment", 8, "32")), "out of range; got 32"),
    "rank": (one([1] * 5), "'w' has too many dimensions; got 5; expected at most 4"),
    "type": (one([32], kind=99), "'w' has an unknown type; got type 99"),
    "type that left": (one([32], kind=31), r"got type 31 \(Q4_0_4_4, removed from the format\)"),
    "blocks": (one([33, 2], kind=Q8_0), "got 33 columns; expected a multiple of 32"),
    "overflow": (one([2**62, 2**62, 2**62, 8]), "'w' is larger than any memory"),
    "past the end": (one([65]), "'w' reaches past the end of the file; got bytes 128 to 388"),
    "offset": (one([8], offset=2**63 - 32), "'w' reaches past the end of the file"),
    "unaligned": (one([8], offset=8), "'w' is not aligned; got offset 8; expected a multiple"),
    "tensor twice": (
        two(b.tensor("w", [8], F32, 0), b.tensor("w", [8], F32, 32)),
        "tensor name appears twice; got 'w'",
    ),
    "overlap": (
        two(b.tensor("a", [16], F32, 0), b.tensor("b", [8], F32, 32)),
        "tensors 'a' and 'b' overlap",
    ),
    "tensor name": (one([8], name=b"\xff"), "tensor name is not UTF-8"),
    "no tensor name": (one([8], name=b""), "a tensor name that is empty"),
    "split number": (wrong(b.pair("split.count", 8, "2")), r"split\.count is no number; got 2"),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_damage_has_its_own_message(tmp_path: Path, fault: str) -> None:
    data, message = DAMAGE[fault]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=message) as raised:
        GgufFile(path)
    assert raised.value.where.startswith(str(path))


def test_files_that_are_none(tmp_path: Path) -> None:
    empty = tmp_path / "empty.gguf"
    empty.touch()
    with pytest.raises(FormatError, match="empty file"):
        GgufFile(empty)
    with pytest.raises(InputError, match="no such file"):
        GgufFile(tmp_path / "absent.gguf")
    with pytest.raises(InputError, match=r"cannot be read: Is a directory|not a regular file"):
        GgufFile(tmp_path)


def test_every_cut_raises(tmp_path: Path) -> None:
    whole = b.document(
        pairs(b.array("words", 8, ["a", "bc"]), b.array("n", 4, [1, 2])),
        [b.tensor("w", [8, 2], F32, 0)],
        bytes(64),
    )
    path = tmp_path / "cut.gguf"
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError):
            GgufFile(path)
    path.write_bytes(whole)
    assert GgufFile(path).array("w").shape == (2, 8)


def test_empty_tensors_lie_nowhere(tmp_path: Path) -> None:
    tensors = [b.tensor("none", [0, 3], F32, 0), b.tensor("w", [8], F32, 0)]
    path = tmp_path / "m.gguf"
    path.write_bytes(b.document(pairs(), tensors, DATA))
    assert GgufFile(path).array("none").shape == (3, 0)
