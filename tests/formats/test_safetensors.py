"""safetensors files, whole, sharded and damaged; the oracle is the format's own library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rlx.errors import FormatError, InputError
from rlx.formats.safetensors import SafetensorsFile
from rlx.ir.quant.scheme import GGUF_SCHEMES


def document(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[Any], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


ARRAYS: dict[str, tuple[str, Any]] = {
    "f64": ("F64", np.arange(6.0).reshape(2, 3)),
    "f32": ("F32", np.arange(6, dtype=np.float32).reshape(1, 6)),
    "f16": ("F16", np.arange(4, dtype=np.float16)),
    "bf16": ("BF16", np.arange(4).astype(ml_dtypes.bfloat16)),
    "e4m3": ("F8_E4M3", np.arange(4).astype(ml_dtypes.float8_e4m3fn)),
    "e5m2": ("F8_E5M2", np.arange(4).astype(ml_dtypes.float8_e5m2)),
    "i64": ("I64", np.array([-(2**63), 2**63 - 1])),
    "u64": ("U64", np.array([2**64 - 1], np.uint64)),
    "i32": ("I32", np.array([[-1], [1]], np.int32)),
    "u16": ("U16", np.array([65535], np.uint16)),
    "i8": ("I8", np.array([-128], np.int8)),
    "bool": ("BOOL", np.array([True, False])),
    "scalar": ("F32", np.array(2.5, np.float32)),
    "empty": ("F32", np.zeros((0, 3), np.float32)),
}


def packed(arrays: dict[str, tuple[str, Any]], metadata: dict[str, str] | None = None) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, (dtype, array) in arrays.items():
        end = len(data) + array.nbytes
        header[name] = entry(dtype, list(array.shape), len(data), end)
        data += array.tobytes()
    return document(header, data)


def test_every_element_type(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(packed(ARRAYS, {"format": "np"}))
    with SafetensorsFile(path) as file:
        assert file.metadata == {"format": "np"}
        assert list(file.tensors) == list(ARRAYS)
        found = {name: file.array(name) for name in ARRAYS}
    for name, (_, array) in ARRAYS.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()
        assert not found[name].flags.writeable
    assert file.tensors["bf16"].scheme is GGUF_SCHEMES["BF16"]
    assert file.tensors["i8"].scheme is None
    with pytest.raises(InputError, match="the file is closed"):
        file.array("f32")


def test_what_the_library_writes(tmp_path: Path) -> None:
    import safetensors.numpy as library

    rng = np.random.default_rng(0)
    arrays = {f"layer.{i}.w": rng.standard_normal((i, 7)).astype(np.float32) for i in range(5)}
    library.save_file(arrays, tmp_path / "m.safetensors", metadata={"a": "b"})
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert file.tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        assert np.array_equal(file.array(name), array)
    with pytest.raises(InputError, match=r"no such tensor; got 'layer.9.w'\n.*close names: layer"):
        file.array("layer.9.w")


ONE = entry("F32", [2], 0, 8)
DEEP = b'{"a":' * 100_000 + b"}" * 100_000
DAMAGE: dict[str, tuple[bytes, str]] = {
    "short": (b"\0\0\0", "not a safetensors file; got 3 bytes"),
    "length": (document({}, length=2**63), "the header does not fit; got 9223372036854775808"),
    "no JSON": (document(b"{nonsense"), "not valid JSON"),
    "no object": (document([1]), "not a JSON object; got list"),
    "not UTF-8": (document(b'{"\xff": 1}'), "not valid JSON"),
    "deep": (document(DEEP), "nests too deep"),
    "long number": (document(b'{"a":' + b"9" * 5000 + b"}"), "not valid JSON"),
    "twice": (document(b'{"a": 1, "b": 2, "a": 3}'), "the key 'a' appears twice"),
    "metadata": (document({"__metadata__": {"a": 1}}), "__metadata__ is not a map of strings"),
    "no entry": (document({"w": [1]}), "'w' is not described"),
    "fields": (document({"w": {**ONE, "more": 1}}, bytes(8)), "'w' is not described"),
    "dtype": (document({"w": entry("F7", [2], 0, 8)}, bytes(8)), "unknown dtype; got 'F7'"),
    "dtype kind": (document({"w": entry(7, [2], 0, 8)}, bytes(8)), "unknown dtype; got 7"),  # type: ignore[arg-type]
    "negative": (document({"w": entry("F32", [-2], 0, 8)}, bytes(8)), "wrong shape"),
    "fraction": (document({"w": entry("F32", [2.0], 0, 8)}, bytes(8)), "wrong shape"),
    "truth": (document({"w": entry("F32", [True], 0, 4)}, bytes(4)), "wrong shape"),
    "rank": (document({"w": entry("F32", [1] * 65, 0, 4)}, bytes(4)), "wrong shape"),
    "overflow": (document({"w": entry("F32", [2**61, 2**61], 0, 8)}, bytes(8)), "larger than any"),
    "backwards": (document({"w": entry("F32", [2], 8, 0)}, bytes(8)), "wrong data_offsets"),
    "offsets": (document({"w": {**ONE, "data_offsets": [0]}}, bytes(8)), "wrong data_offsets"),
    "past the end": (document({"w": ONE}, bytes(4)), "'w' does not fit its bytes"),
    "wrong size": (document({"w": entry("F32", [3], 0, 8)}, bytes(8)), r"F32 \[3\]: 12 bytes"),
    "overlap": (
        document({"a": ONE, "b": entry("F32", [2], 4, 12)}, bytes(12)),
        "'a' and 'b' overlap",
    ),
    "gap": (document({"w": entry("F32", [2], 4, 12)}, bytes(12)), "belong to no tensor"),
    "rest": (document({"w": ONE}, bytes(9)), "belong to no tensor; got 8 bytes"),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_damage_has_its_own_message(tmp_path: Path, fault: str) -> None:
    data, message = DAMAGE[fault]
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=message) as raised:
        SafetensorsFile(path)
    assert str(path) in raised.value.where


def shards(folder: Path, weight_map: dict[str, Any] | None = None) -> Path:
    for i in (1, 2):
        array = np.full(3, i, np.float32)
        name = f"model-0000{i}-of-00002.safetensors"
        (folder / name).write_bytes(packed({f"w{i}": ("F32", array)}))
    places = {f"w{i}": f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map or places}))
    return index


def test_shards_are_one_model(tmp_path: Path) -> None:
    file = SafetensorsFile(shards(tmp_path))
    assert [p.name[6:11] for p in file.files] == ["00001", "00002"]
    for i in (1, 2):
        assert np.array_equal(file.array(f"w{i}"), np.full(3, i))


def test_missing_shards_are_named(tmp_path: Path) -> None:
    index = shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FormatError, match=r"got 1 of 2 files; expected model-00002-of-00002\."):
        SafetensorsFile(index)


@pytest.mark.parametrize("name", ["../m.safetensors", "/etc/passwd", "..", "a\\b", "", "c:x"])
def test_an_index_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(FormatError, match="only name files in its own folder"):
        SafetensorsFile(shards(tmp_path, {"w1": name}))


def test_an_index_that_is_wrong(tmp_path: Path) -> None:
    index = shards(tmp_path, {"w9": "model-00001-of-00002.safetensors"})
    with pytest.raises(FormatError, match="does not have; got 'w9'"):
        SafetensorsFile(index)
    index.write_text('{"weight_map": {"w": 1}}')
    with pytest.raises(FormatError, match="not an index of shards"):
        SafetensorsFile(index)
