"""Quantised weights in native code: dequantised bit for bit, in column tiles, repacked once."""

from __future__ import annotations

import mmap
from pathlib import Path

import gguf.quants as gguf_quants
import numpy as np
import pytest
from program_support import HOST, TARGETS, Native, check, compare, reference
from qgemm_support import (
    INTEGER,
    QUICK_AND_GRIDS,
    SCHEMES,
    columns,
    named,
    random_weight,
    weight_params,
)

import rlx
from rlx.backends.cpu.kernels.qgemm.gather import has_tile_rows
from rlx.backends.cpu.kernels.qgemm.pack_quantised import pack_quantised
from rlx.backends.cpu.layouts.quant_rows import RowLayout, dequantized_rows, quantize_rows
from rlx.backends.cpu.layouts.quant_tiles import (
    TILED_SCHEMES,
    column_tile_layout,
    pack_column_tiles,
    unpack_column_tiles,
)
from rlx.backends.cpu.prepare import prepare_params, release_pages
from rlx.errors import InputError
from rlx.formats.tensor_file import MappedFile
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme, decode
from rlx.ir.shape import Shape

HALVES = (0, 0x8000, 1, 0x3FF, 0x400, 0x3C00, 0xBC00, 0x7BFF, 0x7C00, 0xFC00, 0x7E00)
# gguf has no decoder for these; rlx.ir.quant.scheme is checked against their definition elsewhere.
ALONE = ("Q8_1", "Q8_K", "Q1_0")


def edge_blocks(scheme: QuantScheme) -> np.ndarray:
    """Blocks of one repeated byte, and random ones with special f16 numbers at every offset."""
    size = scheme.bytes_per_block
    rng = np.random.default_rng(size)
    flat = np.repeat(np.array([0, 0xFF, 0x80, 0x7F, 0x55], np.uint8), size).reshape(-1, size)
    rows = [flat, rng.integers(0, 256, (40, size), dtype=np.uint8)]
    for half in HALVES if size > 4 else ():
        blocks = rng.integers(0, 256, (size - 1, size), dtype=np.uint8)
        for offset in range(size - 1):
            blocks[offset, offset : offset + 2] = [half & 0xFF, half >> 8]
        rows.append(blocks)
    return np.concatenate(rows)


def same_bits(got: np.ndarray, want: np.ndarray) -> None:
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(
        got[~nan].view(np.uint32), want.astype(np.float32)[~nan].view(np.uint32)
    )


# -- decoding ---------------------------------------------------------------------------------


def gather_graph(scheme: QuantScheme, parts: list[np.ndarray], ids: np.ndarray) -> Graph:
    g = Graph("gather")
    table, *sides = weight_params(g, parts)
    rows = g.dequant_gather(
        table, g.input("ids", Shape(ids.shape, ids.dtype)), *sides, scheme=scheme
    )  # fmt: skip
    g.set_outputs(rows)
    return g


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_type_decodes_to_the_same_bits(scheme):
    if scheme.ggml_type is not None:
        parts = [edge_blocks(scheme)]
    else:
        parts = random_weight(scheme, (19,), columns(scheme), np.random.default_rng(3))
    ids = np.arange(len(parts[0]), dtype=np.int64)[::-1].reshape(1, -1)
    graph = gather_graph(scheme, parts, ids)
    if scheme.ggml_type is not None and scheme.name not in ALONE:
        kind = gguf_quants.GGMLQuantizationType[scheme.name]
        with np.errstate(all="ignore"):
            want = gguf_quants.dequantize(parts[0], kind)
    else:
        want = decode(scheme, *parts)
    for target in TARGETS:
        (got,) = Native(graph, target, 2, {}).run({"ids": ids, **named(parts)})
        same_bits(got[0, ::-1], want.reshape(len(parts[0]), -1))


@pytest.mark.parametrize("index", ["i32", "i64", "u8"])
def test_gather_takes_any_index_and_names_one_out_of_range(index):
    scheme = GGUF_SCHEMES["Q4_K"]
    parts = random_weight(scheme, (10,), 512, np.random.default_rng(0))
    ids = np.array([[3, 9, 0], [9, 9, 1]], DType.of(index).numpy)
    graph = gather_graph(scheme, parts, ids)
    compare(graph, {"ids": ids, **named(parts)}, 0.0)
    ids[1, 1] = 10
    native = Native(graph, HOST, 2, {})
    native.run({"ids": ids, **named(parts)})
    assert native.linked.status[0] != 0, "an index out of range went unseen"
    with pytest.raises(InputError):
        reference(graph, {"ids": ids, **named(parts)})


# -- layouts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("scheme", INTEGER, ids=str)
def test_column_tiles_hold_every_weight_once(scheme, pair):
    rng = np.random.default_rng(1)
    for n, blocks in ((37, 3), (16, 2), (5, 1)):
        k = blocks * max(scheme.block or scheme.block_size, 32)
        rows = 2 * n if pair else n
        w, *sides = random_weight(scheme, (2, rows), k, rng)
        scale, zp = [*sides, None, None][:2]
        packed = pack_column_tiles(scheme, w, scale, zp, pair)
        want = decode(scheme, w, scale, zp)
        got = unpack_column_tiles(scheme, packed, n, k, pair)
        np.testing.assert_array_equal(got, want.reshape(2, 2, n, k) if pair else want)
        # Column tiles take the bytes of their rows, but for the padding of the last one
        # and lines that groups of blocks begin.
        layout = column_tile_layout(scheme, k)
        filled = packed.shape[1] * 16
        assert packed.nbytes - 2 * scheme.stored_bytes(filled, k) <= 2 * packed.shape[1] * 4 * 64
        assert layout.tile_bytes % 64 == 0


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cpu)
@pytest.mark.parametrize("scheme", QUICK_AND_GRIDS)
def test_repacking_natively_gives_the_same_column_tiles(scheme, target):
    k = columns(scheme)
    for dims, pair in (((37,), False), ((2, 18), False), ((2, 34), True)):
        parts = random_weight(scheme, dims, k, np.random.default_rng(2))
        g = Graph("pack")
        g.set_outputs(g.pack_quant(*weight_params(g, parts), scheme=scheme, pair=pair))
        compare(g, named(parts), 0.0, setups=[(target, 1), (target, 3)])


@pytest.mark.parametrize(
    "layout",
    [
        *["block32x8", "block64x4", "block0x8", "shared64x8", "shared128x4", "unsigned64x4"],
        *["superblock256x8", "block32x8p", "block0x8p", "shared64x8p", "superblock256x8p"],
        *["block32x16m", "block0x16m", "shared64x16m", "superblock256x16m"],
        *["block32x4w", "block0x4w", "superblock256x4w", "block32x4r", "superblock256x4r"],
    ],
)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_quantised_rows_are_those_of_the_reference(layout, dtype):
    rng = np.random.default_rng(5)
    parsed = RowLayout.parse(layout, "test")
    tile = parsed.tile
    for rows, k in ((1, 512), (2, 256), (7, 512), (tile + 13, 256), (tile, 768), (0, 256)):
        x = rng.standard_normal((rows, k)) * 10 ** rng.uniform(-3, 3, (rows, 1))
        if rows:
            x[0, :64], x[-1, 70] = 0, 1e-42
        x = x.astype(DType.of(dtype).numpy)
        g = Graph("rows")
        g.set_outputs(g.quantize_rows(g.input("x", Shape(x.shape, dtype)), layout=layout))
        want = quantize_rows(parsed, x)
        for target in TARGETS:
            # Rows that only fill up a tile hold anything, so the numbers are compared.
            (got,) = Native(g, target, 2, {}).run({"x": x})
            numbers = dequantized_rows(parsed, got, rows, k)
            np.testing.assert_array_equal(numbers, dequantized_rows(parsed, want, rows, k))
            if rows in (1, tile):
                used = rows * 4 * parsed.block_words(rows, k) * k // parsed.size(k)
                np.testing.assert_array_equal(got.reshape(-1)[:used], want.reshape(-1)[:used])


def test_words_lie_in_pairs_for_matrix_products():
    """Rows 0 to 3 of a tile, each with the codes 0 … 127 but for its first: those count rows."""
    x = np.tile(np.arange(128, dtype=np.float32), (4, 1))
    x[:, 0], x[:, 127] = range(4), 127
    packed = quantize_rows(RowLayout("block", 128, 4, paired=True), x).reshape(-1)
    first = packed[:32].view(np.int8).reshape(4, 8)  # the first pair of words of every row
    np.testing.assert_array_equal(first, [[r, *range(1, 8)] for r in range(4)])
    np.testing.assert_array_equal(packed[32:40].view(np.int8), range(8, 16))


def test_rows_lie_whole_for_tile_registers():
    """Codes of a full tile are those of one row after another; a row left over has no other."""
    x = np.arange(17, dtype=np.float32)[:, None] * np.ones((1, 64), np.float32)
    x[:, 0] = 127
    packed = quantize_rows(RowLayout("block", 32, 16, matrix=True), x).reshape(-1)
    block = 16 * (32 + 12)
    for b in range(2):
        codes = packed[block * b :][: 16 * 32].view(np.int8).reshape(16, 32)
        want = np.arange(16)[:, None] if b == 0 else np.where(np.arange(16)[:, None] > 0, 127, 0)
        np.testing.assert_array_equal(codes[:, 1:], np.broadcast_to(want, (16, 31)))
    last = packed[2 * block :][:32].view(np.int8)
    np.testing.assert_array_equal(last[1:], 16)


@pytest.mark.parametrize(("letter", "first"), [("w", [0, 2, 1, 3]), ("r", [128, 129, 130, 131])])
def test_tiles_of_several_rows_may_have_codes_of_another_kind(letter, first):
    """Codes of a row of 0, 1, 2, … 127: i16 in planes, or 128 more; a row left over as ever."""
    x = np.tile(np.arange(128, dtype=np.float32), (5, 1))
    layout = RowLayout.parse(f"block128x4{letter}", "test")
    packed = quantize_rows(layout, x).reshape(-1)
    wide = letter == "w"
    words = packed[: 4 * (256 if wide else 128)].view(np.int16 if wide else np.uint8)
    words = words.reshape(-1, 4, 2 if wide else 4)  # [word][row]
    np.testing.assert_array_equal(words[: 2 if wide else 1, 3].reshape(-1), first)
    last = packed[4 * layout.row_bytes(128) :][:128].view(np.int8)
    np.testing.assert_array_equal(last, range(128))
    assert layout.row_bytes(128) == (256 if wide else 128) + 12


@pytest.mark.parametrize("name", [s.name for s in TILED_SCHEMES if has_tile_rows(s)])
def test_rows_of_column_tiles_are_those_of_the_table(name):
    """A table that is also multiplied with is kept once: its rows come out of the column tiles."""
    scheme, k = GGUF_SCHEMES[name], columns(GGUF_SCHEMES[name])
    (table,) = random_weight(scheme, (37,), k, np.random.default_rng(5))
    ids = np.array([[0, 36, 15, 16, 17, 5]], np.int32)
    g = gather_graph(scheme, [table], ids)
    rows = g.outputs[0]
    product = g.dequant_matmul(rows, g.find("w0"), scheme=scheme)
    g.set_outputs({"rows": rows, "product": product})
    packed = pack_quantised(g.copy(), HOST)
    op_names = [n.op.name for n in packed.nodes]
    assert "dequant_gather" not in op_names and "packed_dequant_gather" in op_names
    want = decode(scheme, table)[ids]
    by_reference = evaluate(packed, {"ids": ids, "w0": table})[0]
    same_bits(by_reference, want)
    f = rlx.Session("cpu").compile(g)
    f.set_params({"w0": table})
    same_bits(f.run(ids=ids)[0], want)
    with pytest.raises(InputError):
        f.run(ids=ids + 1)


# -- prepare ----------------------------------------------------------------------------------


def test_prepare_repacks_natively_and_hands_the_file_back(tmp_path):
    """A mapped weight is resident once: as column tiles, no longer as pages of the file."""
    scheme, n, k = GGUF_SCHEMES["Q8_0"], 8192, 2048
    (rows,) = random_weight(scheme, (n,), k, np.random.default_rng(0))
    path = tmp_path / "weight"
    path.write_bytes(b"header" + rows.tobytes())
    w = MappedFile(path).view(6, rows.shape, DType.of("u8"))
    g = Graph("prepare")
    packed = g.pack_quant(g.param("w", Shape(w.shape, "u8")), scheme=scheme)
    g.set_outputs({"packed": packed})
    (column_tiles,) = prepare_params(g, {"w": w})
    np.testing.assert_array_equal(column_tiles, pack_column_tiles(scheme, rows, None, None))
    assert column_tiles.ctypes.data % 64 == 0, "lines of column_tiles must be lines of the cache"
    before = mapped_bytes(path)
    assert int(w[::4096].sum()) == int(rows[::4096].sum())  # the file can still be read
    release_pages(w)
    assert before == mapped_bytes(path) == 0
    writable = rows.copy()
    release_pages(writable)
    np.testing.assert_array_equal(writable, rows)


def mapped_bytes(path) -> int:
    """Bytes of a file that are resident in this process, but for pages at its ends."""
    found, counting = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0] and not line.startswith("VmFlags"):
            counting = str(path) in line
        elif counting and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return max(0, found - 2 * mmap.PAGESIZE)


def test_a_whole_graph_on_the_device():
    """Embedding, a gated product, and a head that shares the table: rows in, logits out."""
    scheme = GGUF_SCHEMES["Q4_K"]
    rng = np.random.default_rng(1)
    table, gate, up = (random_weight(scheme, (n,), 256, rng)[0] for n in (300, 512, 512))
    down = random_weight(GGUF_SCHEMES["Q6_K"], (256,), 512, rng)[0]
    params = {"table": table, "gate": gate, "up": up, "down": down}
    g = rlx.Graph("tiny")
    values = {name: g.param(name, Shape(a.shape, "u8")) for name, a in params.items()}
    x = g.dequant_gather(
        values["table"], g.input("ids", Shape(("batch", "seq"), "i32")), scheme=scheme
    )  # fmt: skip
    inner = g.mul(
        g.silu(g.dequant_matmul(x, values["gate"], scheme=scheme)),
        g.dequant_matmul(x, values["up"], scheme=scheme),
    )
    x = g.add(x, g.dequant_matmul(inner, values["down"], scheme=GGUF_SCHEMES["Q6_K"]))
    g.set_outputs({"logits": g.dequant_matmul(x, values["table"], scheme=scheme)})
    results = {}
    for device in ("cpu", "reference"):
        f = rlx.Session(device).compile(g)
        f.set_params(params)
        ids = np.array([[3, 299, 0, 17, 5]], np.int32)
        results[device] = [f.run(ids=ids[:, :count])[0] for count in (1, 5)]
    for got, want in zip(results["cpu"], results["reference"], strict=True):
        # Three products in a row, each with activations of 8 bits.
        check(got, want, 0.02)
