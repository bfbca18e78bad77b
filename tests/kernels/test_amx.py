"""AMX's tiles: what is emitted, and their emulation against NumPy.

Kernels run with tiles emulated in memory, on a CPU with AMX in its registers too; what others would
run is read as assembly.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence

import numpy as np
import pytest
from program_support import EMULATED, TILED

from rlx.errors import CodegenError
from rlx.llvm.amx import Tiles
from rlx.llvm.builder import Module
from rlx.llvm.jit import Unit, compile_unit
from rlx.llvm.target import Target

SAPPHIRE = Target.named("sapphirerapids")
SHAPES = [((16, 64), (16, 64), (16, 64)), ((5, 28), (5, 12), (3, 28))]


def product(target: Target, kind: str, shapes: Sequence[tuple[int, int]]) -> Module:
    """total += a x b for rows of 80 bytes in memory, given as operands in this order."""
    m = Module(target)
    f = m.kernel()
    total, a, b = (f.arg(f["args"], i) for i in range(3))
    tiles = Tiles(f, shapes)
    tiles.configure()
    for tile, at in enumerate((total, a, b)):
        tiles.load(tile, at, 80)
    tiles.multiply(kind, 0, 1, 2)
    tiles.store(0, total, 80)
    tiles.release()
    return m


def run(kind: str, shapes: Sequence[tuple[int, int]], *operands: np.ndarray) -> np.ndarray:
    """The total's memory, 16 rows of 80 bytes, which is the same on all targets."""
    found = [_run(target, kind, shapes, operands) for target in TILED]
    assert len({total.tobytes() for total in found}) == 1
    return found[0]


def _run(
    target: Target, kind: str, shapes: Sequence[tuple[int, int]], operands: Sequence[np.ndarray]
) -> np.ndarray:
    memory = [np.full((16, 80), 0xA5, np.uint8) for _ in operands]
    for place, rows, shape in zip(memory, operands, shapes, strict=True):
        place[: shape[0], : shape[1]] = rows.view(np.uint8)
    kernel = compile_unit(Unit(product(target, kind, shapes).text(), target))
    call = kernel.function("kernel", None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
    args = (ctypes.c_void_p * 3)(*(m.ctypes.data for m in memory))
    call(ctypes.addressof(args), 0, 1)
    return memory[0]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("kind", ["ss", "su", "us", "uu"])
def test_products_of_bytes(kind, shapes):
    rng = np.random.default_rng(1)
    (rows, width), (_, inner), _ = shapes
    types = [np.int8 if sign == "s" else np.uint8 for sign in kind]
    a = rng.integers(0, 256, (rows, inner), dtype=np.uint8)
    b = rng.integers(0, 256, (inner // 4, width), dtype=np.uint8)
    total = rng.integers(-(2**31), 2**31, (rows, width // 4)).astype(np.int32)
    got = run(kind, shapes, total, a, b)
    columns = b.reshape(inner // 4, width // 4, 4).swapaxes(1, 2).reshape(inner, width // 4)
    want = total + a.view(types[0]).astype(np.int64) @ columns.view(types[1]).astype(np.int64)
    np.testing.assert_array_equal(got[:rows, :width].view(np.int32), want.astype(np.int32))
    assert (got[rows:] == 0xA5).all() and (got[:, width:] == 0xA5).all(), "stored beyond the tile"


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def flushed(values: np.ndarray) -> np.ndarray:
    values = values.astype(np.float32)
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.copysign(0, values), values)


@pytest.mark.parametrize("shapes", SHAPES)
def test_products_of_bf16(shapes):
    """As the manual's operation section has it, rounding as it says; a product of two bf16 is exact
    in f64, and so, but for ties that these numbers do not have, is an fma rounded once."""
    rng = np.random.default_rng(2)
    (rows, width), (_, inner), _ = shapes
    a = bf16(rng.standard_normal((rows, inner // 2)))
    b = bf16(rng.standard_normal((inner // 4, width // 2)))
    a[0, :2], b[0, :2] = (0x0040, 0x3F80), (0x7F00, 0x8001)  # denormals: zero, though 2^127 times
    total = rng.standard_normal((rows, width // 4)).astype(np.float32)
    total[-1, -1] = 1e-40
    wide_a, wide_b = ((v.astype(np.uint32) << 16).view(np.float32) for v in (a, b))
    sums = np.zeros((2, *total.shape), np.float32)
    for k in range(inner // 4):
        for odd in range(2):
            x, y = flushed(wide_a[:, 2 * k + odd]), flushed(wide_b[k, odd::2])
            exact = x[:, None].astype(np.float64) * y[None].astype(np.float64) + sums[odd]
            sums[odd] = flushed(exact)
    want = flushed(flushed(total) + flushed(sums[0] + sums[1]))
    got = run("bf16", shapes, total, a, b)
    np.testing.assert_array_equal(got[:rows, :width].view(np.float32), want)


def test_results_below_the_normal_numbers_are_zero():
    shapes = [(1, 4), (1, 4), (1, 4)]
    small = bf16(np.array([[2.0**-70, 0]]))
    got = run("bf16", shapes, np.zeros((1, 1), np.float32), small, small)
    assert got[0, :4].view(np.float32) == 0


def test_instructions():
    text = Unit(product(SAPPHIRE, "su", SHAPES[1]).text(), SAPPHIRE).assembly()
    found = re.findall(r"\b(?:ld)?t(?:ile|dp)\w+|ldtilecfg", text)
    want = ["ldtilecfg", *["tileloadd"] * 3, "tdpbsud", "tilestored", "tilerelease"]
    assert found == want
    assert re.search(r"tdpbsud\s+%tmm2, %tmm1, %tmm0", text), "a x b, in AT&T's order"
    assert "tdpbf16ps" in Unit(product(SAPPHIRE, "bf16", SHAPES[1]).text(), SAPPHIRE).assembly()


def test_configuration():
    """64 bytes: palette 1; from byte 16 on bytes of a row, two each; from 48 on rows."""
    [table] = re.findall(r'c"((?:\\\w\w){64})"', product(SAPPHIRE, "ss", SHAPES[1]).text())
    data = np.frombuffer(bytes.fromhex(table.replace("\\", "")), np.uint8)
    assert data[0] == 1 and not data[1:16].any()
    assert data[16:48].view("<u2").tolist() == [28, 12, 28, *[0] * 13]
    assert data[48:].tolist() == [5, 5, 3, *[0] * 13]


@pytest.mark.parametrize(
    "shapes",
    [
        [(16, 64), (16, 64), (15, 64)],  # k of b
        [(16, 64), (15, 64), (16, 64)],  # rows of a
        [(16, 60), (16, 64), (16, 64)],  # columns of b
        [(17, 64), (17, 64), (16, 64)],
        [(16, 66), (16, 64), (16, 66)],
        [(16, 64)] * 9,
    ],
)
def test_shapes_that_would_fault_are_refused(shapes):
    with pytest.raises(CodegenError):
        product(EMULATED, "ss", shapes)


def test_a_tile_without_a_shape_is_refused():
    f = Module(EMULATED).kernel()
    with pytest.raises(CodegenError, match="no such tile"):
        Tiles(f, [(16, 64)]).zero(1)


def test_a_target_without_tiles_is_refused():
    """LLVM would abort the process."""
    with pytest.raises(CodegenError, match="no tile registers; got znver4"):
        product(Target.named("znver4"), "ss", SHAPES[0])
