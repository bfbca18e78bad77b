"""Importance matrices in both formats of llama.cpp, whole and damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from rlx.errors import FormatError, InputError, RlxError, ShapeError
from rlx.formats.gguf import GgufFile, write_gguf
from rlx.formats.gguf.quantized import QuantizeOptions, quantize_gguf
from rlx.formats.imatrix import ImportanceMatrix, InputSquares
from rlx.formats.quant_presets import QuantPreset
from rlx.ir.quant.scheme import GGUF_SCHEMES, encode

NAME, EXPERTS = "blk.0.attn_v.weight", "blk.0.ffn_up_exps.weight"


def dat(*entries: tuple[bytes, int, list[float]], tail: bytes = b"", count: int = -1) -> bytes:
    """A file by the description of the format: lengths and numbers are i32."""
    head = struct.pack("<i", len(entries) if count < 0 else count)
    for name, calls, values in entries:
        head += struct.pack("<i", len(name)) + name + struct.pack("<ii", calls, len(values))
        head += struct.pack(f"<{len(values)}f", *values)
    return head + tail


def test_the_old_format(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    tail = struct.pack("<ii", 7, 8) + b"wiki.txt"
    path.write_bytes(dat((b"a", 4, [8.0, 2.0, 0.0]), (b"b", 0, [5.0]), tail=tail))
    found = ImportanceMatrix.read(path)
    assert found.chunks == 7 and found.datasets == ("wiki.txt",)
    # values are means times calls; a file from before there were calls has means
    np.testing.assert_array_equal(found.importance("a", (9, 3)), [2.0, 0.5, 0.0])  # type: ignore[arg-type]
    np.testing.assert_array_equal(found.importance("b", (9, 1)), [5.0])  # type: ignore[arg-type]
    assert found.importance("c", (9, 1)) is None
    path.write_bytes(dat((b"a", 1, [1.0])))  # without chunks and text, as the first ones were
    assert ImportanceMatrix.read(path).datasets == ()


def write_theirs(path: Path) -> None:
    """A file as llama.cpp writes it, by llama.cpp's own package."""
    writer = gguf.GGUFWriter(path, arch="")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["wiki.txt"])
    writer.add_uint32("imatrix.chunk_count", 3)
    writer.add_uint32("imatrix.chunk_size", 512)
    writer.add_tensor(NAME + ".in_sum2", np.array([[4.0, 8.0]], np.float32))
    writer.add_tensor(NAME + ".counts", np.array([[4.0]], np.float32))
    writer.add_tensor(EXPERTS + ".in_sum2", np.array([[3.0, 6.0], [0.0, 0.0]], np.float32))
    writer.add_tensor(EXPERTS + ".counts", np.array([[3.0], [0.0]], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_new_format(tmp_path: Path) -> None:
    write_theirs(tmp_path / "theirs.gguf")
    found = ImportanceMatrix.read(tmp_path / "theirs.gguf")
    assert (found.chunks, found.chunk_size, found.datasets) == (3, 512, ("wiki.txt",))
    np.testing.assert_array_equal(found.importance(NAME, (9, 2)), [1.0, 2.0])  # type: ignore[arg-type]
    # the second expert was never chosen: all its columns count the same
    means = found.importance(EXPERTS, (2, 9, 2))
    np.testing.assert_array_equal(means, [[1.0, 2.0], [1.0, 1.0]])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["out.gguf", "out.dat", "out.imatrix"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    write_theirs(tmp_path / "theirs.gguf")
    first = ImportanceMatrix.read(tmp_path / "theirs.gguf")
    first.write(tmp_path / name)
    second = ImportanceMatrix.read(tmp_path / name)
    assert second.entries.keys() == first.entries.keys()
    assert (second.chunks, second.datasets) == (first.chunks, first.datasets)
    for weight, shape in ((NAME, (9, 2)), (EXPERTS, (2, 9, 2))):
        want, got = first.importance(weight, shape), second.importance(weight, shape)
        np.testing.assert_allclose(got, want, rtol=1e-6)  # type: ignore[arg-type]
    if name != "out.dat":
        reader = gguf.GGUFReader(tmp_path / name)
        tensors = {t.name: t.data for t in reader.tensors}
        np.testing.assert_array_equal(tensors[EXPERTS + ".counts"], [[3.0], [0.0]])
        assert reader.fields["imatrix.chunk_count"].parts[-1][0] == 3


@pytest.mark.parametrize(
    "raw, message",
    [
        (b"\1", "past the end"),
        (struct.pack("<i", 0), "number of entries is out of range"),
        (struct.pack("<i", -5), "number of entries is out of range"),
        (struct.pack("<i", 2**31 - 1), "more entries than the file can hold"),
        (dat((b"", 1, [1.0])) + bytes(9), "length of a name is out of range"),
        (dat((b"a\xff", 1, [1.0])), "name is not UTF-8"),
        (dat((b"a", -1, [1.0])), "calls of 'a' is out of range"),
        (dat((b"a", 1, []), tail=bytes(8)), "number of values of 'a' is out of range"),
        (dat((b"a", 1, [1.0, 2.0]))[:-1], "values of 'a' reaches past the end"),
        (struct.pack("<ii", 1, 1) + b"a" + struct.pack("<iif", 1, 2**31 - 1, 1), "past the end"),
        (struct.pack("<ii", 1, 2**31 - 1) + bytes(20), "length of a name is out of range"),
        (dat((b"a", 1, [1.0]), (b"a", 1, [1.0])), "appears twice"),
        (dat((b"a", 1, [float("nan")])), "no sums of squares"),
        (dat((b"a", 1, [float("inf")])), "no sums of squares"),
        (dat((b"a", 1, [-1.0])), "no sums of squares"),
        (dat((b"a", 1, [1.0]), tail=bytes(9)), "bytes after the end"),
        (dat((b"a", 1, [1.0]), tail=struct.pack("<ii", 1, 50)), "past the end"),
    ],
)
def test_damaged_old_files(tmp_path: Path, raw: bytes, message: str) -> None:
    (tmp_path / "bad.dat").write_bytes(raw)
    with pytest.raises(FormatError, match=message):
        ImportanceMatrix.read(tmp_path / "bad.dat")


def test_every_cut_of_a_file_is_an_error(tmp_path: Path) -> None:
    write_theirs(tmp_path / "theirs.gguf")
    ImportanceMatrix.read(tmp_path / "theirs.gguf").write(tmp_path / "whole.dat")
    for name, step in (("whole.dat", 1), ("theirs.gguf", 37)):
        whole = (tmp_path / name).read_bytes()
        for size in range(0, len(whole) - 32, step):  # GGUF ends in padding
            (tmp_path / "cut").write_bytes(whole[:size])
            with pytest.raises(RlxError):
                ImportanceMatrix.read(tmp_path / "cut")


SUMS = np.ones((1, 4), np.float32)


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({"a.in_sum2": SUMS}, "sums without counts: 'a'"),
        ({"a.in_sum2": SUMS, "a.counts": np.ones((2, 1), np.float32)}, "do not fit its sums"),
        ({"a.in_sum2": SUMS, "a.counts": np.ones((1, 1), np.float16)}, "got float16"),
        ({"a.in_sum2": -SUMS, "a.counts": SUMS[:, :1]}, "no sums of squares"),
        ({"a.in_sum2": SUMS, "a.counts": SUMS[:, :1] * np.nan}, "no sums of squares"),
        ({".in_sum2": SUMS, ".counts": SUMS[:, :1]}, "do not fit its sums"),
        ({"token_embd.weight": SUMS}, "not an importance matrix"),
    ],
)
def test_wrong_new_files(tmp_path: Path, tensors: dict[str, np.ndarray], message: str) -> None:
    write_gguf(tmp_path / "bad.gguf", {"general.type": "imatrix"}, tensors)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=message):
        ImportanceMatrix.read(tmp_path / "bad.gguf")


def test_a_model_is_no_importance_matrix(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {"general.type": "model"}, {"a.in_sum2": SUMS})
    with pytest.raises(FormatError, match="not an importance matrix; got a GGUF file of type 'mod"):
        ImportanceMatrix.read(tmp_path / "m.gguf")
    with pytest.raises(InputError, match="no such file"):
        ImportanceMatrix.read(tmp_path / "none.gguf")
    with pytest.raises(InputError, match="without entries"):
        ImportanceMatrix({}).write(tmp_path / "empty.gguf")


# -- quantising with one --------------------------------------------------------------------------


def matrix(**shapes: tuple[int, ...]) -> ImportanceMatrix:
    rng = np.random.default_rng(3)
    return ImportanceMatrix(
        {
            n.replace("__", "."): InputSquares(np.exp(rng.standard_normal(s)), np.ones(s[0]))
            for n, s in shapes.items()
        }
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    tensors = {
        "token_embd.weight": rng.standard_normal((64, 256)).astype(np.float32),
        "blk.0.attn_k.weight": rng.standard_normal((32, 256)).astype(np.float32),
        "blk.0.ffn_up_exps.weight": rng.standard_normal((2, 8, 256)).astype(np.float32),
    }
    metadata = {"general.architecture": "llama", "llama.block_count": 1}
    write_gguf(tmp_path / "in.gguf", metadata, tensors)
    return tmp_path / "in.gguf"


FULL = {"blk__0__attn_k__weight": (1, 256), "blk__0__ffn_up_exps__weight": (2, 256)}


def quantise(model: Path, preset: str, given: ImportanceMatrix | None) -> GgufFile:
    options = QuantizeOptions(QuantPreset.parse(preset), overwrite=True, imatrix=given)
    with GgufFile(model) as file:
        quantize_gguf(file, model.with_name("out.gguf"), options)
    return GgufFile(model.with_name("out.gguf"))


def test_every_weight_is_quantised_by_its_importance(model: Path) -> None:
    given = matrix(**FULL)
    with quantise(model, "IQ2_XXS", given) as out, GgufFile(model) as source:
        for name, shape in (("blk.0.attn_k.weight", (32, 256)), (EXPERTS, (2, 8, 256))):
            assert out.tensors[name].scheme is GGUF_SCHEMES["IQ2_XXS"]
            want = encode(
                GGUF_SCHEMES["IQ2_XXS"], source.array(name),
                importance=given.importance(name, shape),
            )  # fmt: skip
            np.testing.assert_array_equal(out.array(name), want.data)
        assert out.metadata["quantize.imatrix.entries_count"] == 2


def test_without_one_where_it_is_needed(model: Path) -> None:
    with pytest.raises(InputError, match=r"IQ2_XXS needs an importance.*blk\.0\.attn_k"):
        quantise(model, "IQ2_XXS", None)
    with pytest.raises(InputError, match=r"IQ2_XXS needs.*none for blk\.0\.ffn_up_exps"):
        quantise(model, "IQ2_XXS", matrix(blk__0__attn_k__weight=(1, 256)))
    assert not model.with_name("out.gguf").exists()
    quantise(model, "IQ3_XXS", None).close()


def test_one_of_another_model(model: Path) -> None:
    with pytest.raises(ShapeError, match=r"'blk.0.attn_k.weight' does not fit.*got 512 values"):
        quantise(model, "Q4_K_S", matrix(blk__0__attn_k__weight=(1, 512)))
    with pytest.raises(ShapeError, match=r"ffn_up_exps.*got 768 values; expected \[2, 256\]"):
        quantise(model, "Q4_K_S", matrix(blk__0__ffn_up_exps__weight=(3, 256)))
    with pytest.raises(InputError, match=r"one of another model; got blk\.9\.attn_k"):
        quantise(model, "Q4_K_S", matrix(blk__9__attn_k__weight=(1, 256)))
    with pytest.warns(UserWarning, match=r"no entry for blk\.0\.ffn_up_exps\.weight"):
        quantise(model, "Q4_K_S", matrix(blk__0__attn_k__weight=(1, 256))).close()
    with pytest.warns(UserWarning, match=r"no weight named blk\.1\.attn_k\.weight"):
        quantise(model, "Q4_K_S", matrix(blk__1__attn_k__weight=(1, 256), **FULL)).close()
