"""GGUF files that are right: what is read is what was written, by us and by the `gguf` package."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import gguf
import gguf_bytes as b
import ml_dtypes
import numpy as np
import pytest

from rlx.errors import FormatError, InputError
from rlx.formats.gguf import GgufFile, PackedTensor, ValueType, write_gguf
from rlx.ir.quant.scheme import GGUF_SCHEMES, encode


def saved(folder: Path, data: bytes, name: str = "m.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


SCALARS = [
    (0, 255),
    (1, -128),
    (2, 65535),
    (3, -32768),
    (4, 2**32 - 1),
    (5, -(2**31)),
    (6, 0.5),
    (7, True),
    (8, "grün 🦙"),
    (10, 2**64 - 1),
    (11, -(2**63)),
    (12, 1e-300),
]


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type_is_read(tmp_path: Path, version: int) -> None:
    pairs = [b.pair(f"k{kind}", kind, value) for kind, value in SCALARS]
    pairs += [b.array(f"a{kind}", kind, [value] * 3) for kind, value in SCALARS]
    file = GgufFile(saved(tmp_path, b.document(pairs, version=version)))
    assert file.version == version
    for kind, value in SCALARS:
        assert file.metadata[f"k{kind}"] == value
        assert type(file.metadata[f"k{kind}"]) is type(value)
        assert file.types[f"k{kind}"] == file.types[f"a{kind}"] == kind
        assert list(file.metadata[f"a{kind}"]) == [value] * 3


def test_nested_arrays_are_read(tmp_path: Path) -> None:
    inner = struct.pack("<IQ3i", 5, 3, 1, -2, 3)
    words = struct.pack("<IQ", 8, 2) + b.string("a") + b.string("bc")
    empty = struct.pack("<IQ", 6, 0)
    nested = b.string("n") + struct.pack("<IIQ", 9, 9, 3) + inner + words + empty
    value = GgufFile(saved(tmp_path, b.document([nested]))).metadata["n"]
    assert [list(v) for v in value] == [[1, -2, 3], ["a", "bc"], []]


def test_long_strings_among_short_ones(tmp_path: Path) -> None:
    """The fast walk reads one byte per length; longer strings must not derail it."""
    words = ["x" * n for n in (0, 1, 255, 256, 257, 9000, 3)] * 900
    file = GgufFile(saved(tmp_path, b.document([b.array("w", 8, words), b.pair("after", 4, 7)])))
    found = file.metadata["w"]
    assert list(found) == words
    assert found[-1] == "xxx"
    assert found[3:5] == words[3:5]
    assert found == words
    assert file.metadata["after"] == 7


def test_tensors_are_where_the_file_says(tmp_path: Path) -> None:
    values = np.arange(24, dtype="<f4").reshape(2, 3, 4)
    data = values.tobytes() + bytes(32) + np.arange(5, dtype="<i2").tobytes()
    tensors = [b.tensor("w", [4, 3, 2], 0, 0), b.tensor("i", [5], 25, 128)]
    path = saved(tmp_path, b.document([b.pair("x", 4, 1)], tensors, data))
    with GgufFile(path) as file:
        info = file.tensors["w"]
        assert info.shape == (2, 3, 4)
        assert info.scheme is GGUF_SCHEMES["F32"]
        assert path.read_bytes()[info.offset :][: info.nbytes] == values.tobytes()
        w, i = file.array("w"), file.array("i")
    assert np.array_equal(w, values)  # and after closing
    assert np.array_equal(i, np.arange(5))
    assert not w.flags.writeable
    assert not w.flags.owndata


def samples() -> dict[str, Any]:
    """One tensor of every scheme, and the plain ones."""
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {
        "f32": rng.standard_normal((3, 8), dtype=np.float32),
        "f16": rng.standard_normal((2, 2, 8)).astype(np.float16),
        "bf16": rng.standard_normal((3, 5)).astype(ml_dtypes.bfloat16),
        "f64": rng.standard_normal(7),
        "i8": np.arange(-3, 4, dtype=np.int8),
        "i16": np.arange(-3, 4, dtype=np.int16),
        "i32": np.arange(-3, 4, dtype=np.int32),
        "i64": np.arange(-3, 4, dtype=np.int64),
    }
    for scheme in GGUF_SCHEMES.values():
        if scheme.block_size > 1:
            raw = rng.integers(0, 256, (2, 3, scheme.row_bytes(512)), dtype=np.uint8)
            tensors[scheme.name] = PackedTensor((2, 3, 512), scheme, raw)
    return tensors


METADATA = {
    "general.architecture": "llama",
    "bool": True,
    "int": 7,
    "negative": -7,
    "wide": 2**40,
    "float": 0.25,
    "u8": np.uint8(200),
    "f64": np.float64(0.1),
    "strings": ["a", "", "日本"],
    "ints": [1, 2, 3],
    "floats": [0.5, 1.5],
    "mixed": [1, 0.5],
    "array": np.arange(4, dtype=np.uint16),
    "flags": [True, False],
}


def test_what_we_write_the_gguf_package_reads(tmp_path: Path) -> None:
    # the package has Q8_1 in its form of 2023, and no Q1_0 yet
    tensors = {k: v for k, v in samples().items() if k not in ("Q1_0", "Q8_1")}
    write_gguf(tmp_path / "m.gguf", METADATA, tensors)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    for key, value in METADATA.items():
        found = reader.fields[key].contents()
        assert np.array_equal(found, value), key
    assert reader.fields["int"].types == [gguf.GGUFValueType.UINT32]
    assert reader.fields["negative"].types == [gguf.GGUFValueType.INT32]
    assert reader.fields["u8"].types == [gguf.GGUFValueType.UINT8]
    assert reader.fields["ints"].types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32]
    assert len(reader.tensors) == len(tensors)
    for t in reader.tensors:
        wanted = tensors[t.name]
        raw = wanted.data if isinstance(wanted, PackedTensor) else wanted
        assert t.data.tobytes() == raw.tobytes(), t.name
        assert tuple(t.shape[::-1]) == wanted.shape
        assert t.data_offset % 32 == 0


def test_what_the_gguf_package_writes_we_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_block_count(2)
    writer.add_array("words", ["ein", "zwei"])
    writer.add_float32("eps", 1e-5)
    writer.add_custom_alignment(64)
    weights = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("plain", weights)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "m.gguf")
    assert file.alignment == 64
    assert file.need("general.architecture", str) == "llama"
    assert file.need("llama.block_count", int) == 2
    assert list(file.metadata["words"]) == ["ein", "zwei"]
    assert np.array_equal(file.array("plain"), weights)
    assert np.array_equal(file.array("packed"), packed)
    assert file.tensors["packed"].shape == (4, 64)
    assert file.tensors["packed"].packed
    assert not file.tensors["plain"].packed


def test_a_file_can_be_copied_exactly(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", METADATA, samples())
    file = GgufFile(tmp_path / "a.gguf")
    again: dict[str, Any] = {}
    for name, info in file.tensors.items():
        array = file.array(name)
        again[name] = PackedTensor(info.shape, info.scheme, array) if info.scheme else array
    write_gguf(tmp_path / "b.gguf", file.metadata, again, types=file.types)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_tensors_may_be_made_when_their_turn_comes(tmp_path: Path) -> None:
    scheme = GGUF_SCHEMES["Q8_0"]
    weights = np.random.default_rng(2).standard_normal((4, 64)).astype(np.float32)
    made = []

    def make() -> Any:
        made.append(1)
        return encode(scheme, weights).data

    write_gguf(tmp_path / "m.gguf", {}, {"w": PackedTensor((4, 64), scheme, make)})
    assert made == [1]
    stored = GgufFile(tmp_path / "m.gguf").array("w")
    assert np.array_equal(stored, encode(scheme, weights).data)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    scheme = GGUF_SCHEMES["Q8_0"]
    wrong = PackedTensor((4, 64), scheme, np.zeros((4, 67), np.uint8))
    with pytest.raises(InputError, match="wrong size; got 268 bytes; expected 272 bytes"):
        write_gguf(tmp_path / "m.gguf", {}, {"w": wrong})
    with pytest.raises(InputError, match="'k' has no GGUF type"):
        write_gguf(tmp_path / "m.gguf", {"k": object()}, {})
    with pytest.raises(InputError, match="'k' does not fit its type"):
        write_gguf(tmp_path / "m.gguf", {"k": -1}, {}, types={"k": ValueType.UINT8})
    with pytest.raises(InputError, match="'w' has no place"):
        write_gguf(tmp_path / "m.gguf", {}, {"w": np.zeros(3, np.complex64)})
    assert list(tmp_path.iterdir()) == []


def test_typed_access(tmp_path: Path) -> None:
    pairs = [b.pair("n", 4, 3), b.pair("f", 6, 0.5), b.pair("flag", 7, True)]
    file = GgufFile(saved(tmp_path, b.document(pairs)))
    assert file.need("n", int) == 3
    assert file.need("n", float) == 3.0
    assert file.get("absent", str, "x") == "x"
    with pytest.raises(
        FormatError, match=r"missing; expected 'n_' \(int\)\n  hint: close names: n"
    ):
        file.need("n_", int)
    with pytest.raises(FormatError, match="'flag' has the wrong type; got bool True; expected int"):
        file.need("flag", int)
    with pytest.raises(FormatError, match=r"wrong type; got float 0\.5; expected str"):
        file.get("f", str, "")
    with pytest.raises(InputError, match="no such tensor; got 'w'"):
        file.array("w")


def test_a_large_file_opens_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    columns = 1 << 20
    head = b.document([b.pair("x", 4, 1)], [b.tensor("w", [columns, 100], 0, 0)])
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(len(head) + columns * 100 * 4)  # 400 MB, none of them on disk
    start = time.perf_counter()
    opened = GgufFile(path)
    taken = time.perf_counter() - start
    assert opened.array("w").shape == (100, columns)
    assert taken < 0.1  # it takes well under a millisecond; reading it would take longer than this


def parts(folder: Path, count: int = 3, total: int | None = None) -> list[Path]:
    """A model with one tensor in each of its parts."""
    paths = []
    for i in range(count):
        path = folder / f"m-{i + 1:05d}-of-{count:05d}.gguf"
        metadata: dict[str, Any] = {"split.no": np.uint16(i), "split.count": np.uint16(count)}
        if i == 0:
            metadata |= {"general.architecture": "llama"}
            metadata["split.tensors.count"] = np.int32(count if total is None else total)
        write_gguf(path, metadata, {f"w{i}": np.full((2, 3), i, np.float32)})
        paths.append(path)
    return paths


def test_any_part_opens_the_whole_model(tmp_path: Path) -> None:
    paths = parts(tmp_path)
    for path in paths:
        file = GgufFile(path)
        assert file.path == paths[0]
        assert file.files == paths
        assert file.need("general.architecture", str) == "llama"
        assert list(file.tensors) == ["w0", "w1", "w2"]
        for i in range(3):
            assert np.array_equal(file.array(f"w{i}"), np.full((2, 3), i))


def test_missing_parts_are_named(tmp_path: Path) -> None:
    paths = parts(tmp_path)
    paths[1].unlink()
    with pytest.raises(FormatError, match=r"got 2 of 3 files; expected m-00002-of-00003\.gguf"):
        GgufFile(paths[0])


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    paths = parts(tmp_path)
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(FormatError, match=r"another split; got split\.no 1.*expected split\.no 2"):
        GgufFile(paths[0])
    renamed = paths[0].rename(tmp_path / "m.gguf")
    with pytest.raises(FormatError, match=r"under another name; got m\.gguf"):
        GgufFile(renamed)


def test_parts_that_do_not_add_up(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="do not add up; got 3 tensors; expected 4"):
        GgufFile(parts(tmp_path, total=4)[0])


def test_a_tensor_in_two_parts(tmp_path: Path) -> None:
    paths = parts(tmp_path, count=2)
    numbers = {"split.no": np.uint16(1), "split.count": np.uint16(2)}
    write_gguf(paths[1], numbers, {"w0": np.zeros((2, 3), np.float32)})
    with pytest.raises(FormatError, match="in two parts of a split model; got w0"):
        GgufFile(paths[0])
