"""Products with packed weights on the simulated GPU, at sizes that choose each of the kernels."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fake_driver import FakeDriver, installed, make_stand_in
from test_kernels import compiled, draw, drawn_blocks
from test_ptx import assemble, needs_ptxas, ptx_of

from rlx.backends.cuda.backend import CudaBackend
from rlx.backends.cuda.kernels.gemm.epilogue import Epilogue
from rlx.backends.cuda.kernels.qgemm import lower_qgemm, stream_gemv
from rlx.backends.cuda.kernels.qgemm.digits import HAVE_BYTES
from rlx.backends.cuda.kernels.qgemm.few_packed_rows import (
    FewPackedRows,
    few_packed_rows_for,
)
from rlx.backends.cuda.kernels.qgemm.packed_gemm import PackedGemm, PackedPlan
from rlx.backends.cuda.kernels.qgemm.stream_gemv import StreamGemv, stream_gemv_for
from rlx.backends.cuda.lower_program import LoweredProgram
from rlx.ir.dtype import bf16, f32
from rlx.ir.graph import Graph
from rlx.ir.quant.scheme import GGUF_SCHEMES, decode
from rlx.runtime.compiled import CompiledGraph

TYPES = sorted(HAVE_BYTES)


@pytest.fixture(scope="module")
def backend() -> Iterator[CudaBackend]:
    with installed(FakeDriver()):
        yield make_stand_in()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights stream through shared memory too, by three blocks."""
    monkeypatch.setattr(lower_qgemm, "_LARGE", 0)
    monkeypatch.setattr(stream_gemv, "BLOCKS", 3)


def kernels_of(made: CompiledGraph) -> list[Any]:
    program = LoweredProgram(made.template.plan({}), "sm_90a", 132)
    return [x.kernel for x in program.launches]


def product(name: str, packed: Any, rows: int, k: int) -> Any:
    def build(g: Graph) -> Any:
        w = g.param("w", list(packed.shape), "u8")
        return g.dequant_matmul(g.input("x", [rows, k]), w, scheme=GGUF_SCHEMES[name])

    return build


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(
    ("n", "k"), [(37, 256), (61, 1280), (19, 4096), (300, 512), (9, 5120), (3, 16640)]
)
def test_rows_stream_through_shared_memory(
    backend: CudaBackend, streams: None, name: str, n: int, k: int
) -> None:
    """One warp or several for a row, lanes without columns and with two chunks of them, a last slot
    that shares rows with the one before, more items than slots, digits that a block shares or not.
    A number of x has 22 bits below the largest of 32: the result differs by roundings of f32."""
    packed = drawn_blocks(name, n, k, 1)
    made = compiled(backend, product(name, packed, 1, k)).set_param("w", packed)
    [kernel] = kernels_of(made)
    assert isinstance(kernel, StreamGemv)
    x = draw(9, 1, k)
    want = x.astype(np.float64) @ decode(GGUF_SCHEMES[name], packed).astype(np.float64).T
    assert np.abs(made.run(x=x)[0] - want).max() <= 2e-6 * np.abs(want).max()


@pytest.mark.parametrize("name", ["Q8_0", "Q6_K"])
def test_slots_are_filled_again(backend: CudaBackend, streams: None, name: str) -> None:
    """Few slots and many items: teams of one warp, and of two, go around them several times."""
    for k, room in ((512, 12 << 10), (2048, 24 << 10)):
        packed = drawn_blocks(name, 150, k, 2)

        def build(*given: Any, room: int = room) -> StreamGemv | None:
            return stream_gemv_for(*given, warps=2, rows=2, room=room)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lower_qgemm, "stream_gemv_for", build)
            made = compiled(backend, product(name, packed, 1, k)).set_param("w", packed)
            [kernel] = kernels_of(made)
            assert isinstance(kernel, StreamGemv)
            assert kernel.items > 2 * kernel.slots * kernel.teams * kernel.blocks
            x = draw(3, 1, k)
            got = made.run(x=x)[0]
        want = x.astype(np.float64) @ decode(GGUF_SCHEMES[name], packed).astype(np.float64).T
        assert np.abs(got - want).max() <= 2e-6 * np.abs(want).max()


def layer(name: str, rows: int, joined: Any, down: Any, k: int) -> Any:
    """A norm, a gated product, and one that a residual is added to before the next norm."""
    scheme = GGUF_SCHEMES[name]

    def build(g: Graph) -> Any:
        x, r = g.input("x", [rows, k]), g.input("r", [rows, k])
        w, v = (g.param(n, list(a.shape), "u8") for n, a in (("w", joined), ("v", down)))
        normed = g.rms_norm(x, g.param("before", [k]), eps=1e-5)
        y = g.fused_gated_act(g.dequant_matmul(normed, w, scheme=scheme))
        h = g.add(g.dequant_matmul(y, v, scheme=scheme), r)
        return g.rms_norm(h, g.param("gamma", [k]), eps=1e-5), g.mul(h, 2.0)

    return build


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize(
    ("rows", "k", "kind", "allowed"),
    [
        (1, 768, StreamGemv, 8e-6), (1, 5120, StreamGemv, 8e-6), (3, 768, FewPackedRows, 8e-6),
        (20, 768, PackedGemm, 2**-9), (140, 768, PackedGemm, 2**-7),
    ],
)  # fmt: skip
def test_gates_norms_and_residuals(
    backend: CudaBackend, streams: None, name: str, rows: int, k: int, kind: type, allowed: float
) -> None:
    """Sums of 768 or 5120 and of 256 products of f32 with 22 bits or more; many rows have 11 bits,
    gates of more than 128 rows 8: each rounding is 2⁻¹² or 2⁻⁹ at most."""
    inner = 256
    joined, down = drawn_blocks(name, 2 * inner, k, 1), drawn_blocks(name, k, inner, 2)
    made = compiled(backend, layer(name, rows, joined, down, k))
    before = 1 + 0.1 * draw(5, k)
    made.set_params({"w": joined, "v": down, "before": before, "gamma": np.ones(k, np.float32)})
    found = [x for x in kernels_of(made) if isinstance(x, kind)]
    assert len(found) == 2 and found[0].epilogue.pair and found[1].epilogue.residual
    x, r = draw(3, rows, k), draw(4, rows, k)
    x64 = x.astype(np.float64)
    normed = x64 / np.sqrt((x64**2).mean(1, keepdims=True) + 1e-5) * before
    scheme = GGUF_SCHEMES[name]
    a, b = np.split(normed @ decode(scheme, joined).astype(np.float64).T, 2, axis=1)
    with np.errstate(over="ignore"):
        h = (a / (1 + np.exp(-a)) * b) @ decode(scheme, down).astype(np.float64).T + r
    want = h / np.sqrt((h**2).mean(1, keepdims=True) + 1e-5)
    got = made.run(x=x, r=r)
    assert np.abs(got[1] - 2 * h).max() <= allowed * np.abs(h).max()
    assert np.abs(got[0] - want).max() <= allowed * np.abs(want).max()


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(("rows", "n", "k"), [(2, 21, 2304), (8, 40, 256), (11, 17, 1536)])
@pytest.mark.parametrize("is_split", [False, True])
def test_few_rows_by_products_of_bytes(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch, name: str, rows: int, n: int, k: int,
    is_split: bool,
) -> None:  # fmt: skip
    """Steps that some warps have and others not, rows that fill no tile, more rows than a tile
    has; x is split by each block, or before."""
    monkeypatch.setattr(lower_qgemm, "_LARGE", 0 if is_split else 1 << 60)
    packed = drawn_blocks(name, n, k, 3)
    made = compiled(backend, product(name, packed, rows, k)).set_param("w", packed)
    *before, kernel = kernels_of(made)
    assert isinstance(kernel, FewPackedRows) and kernel.is_split == bool(before) == is_split
    x = draw(9, rows, k) * np.float32(10.0) ** np.arange(rows)[:, None].astype(np.float32)
    want = x.astype(np.float64) @ decode(GGUF_SCHEMES[name], packed).astype(np.float64).T
    off = np.abs(made.run(x=x)[0] - want) / np.abs(want).max(1, keepdims=True)
    assert off.max() <= 2e-6


def test_what_is_no_number_stays_none(backend: CudaBackend, streams: None) -> None:
    """An infinite number of x makes the sums of its row NaN, and those of other rows stay."""
    packed = drawn_blocks("Q4_K", 24, 256, 5)
    for rows in (1, 4):
        made = compiled(backend, product("Q4_K", packed, rows, 256)).set_param("w", packed)
        x = draw(1, rows, 256)
        x[0, 7] = np.inf
        got = made.run(x=x)[0]
        assert np.isnan(got[0]).all()
        assert np.isfinite(got[1:]).all()


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(
    ("m", "n", "k", "width", "splits"),
    [(70, 150, 512, 64, 2), (200, 264, 256, 128, 1), (200, 40, 768, 192, 3)],
)
def test_blocks_take_several_tiles(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch, name: str, m: int, n: int, k: int,
    width: int, splits: int,
) -> None:  # fmt: skip
    """Three blocks for all tiles, ragged ones among them, and parts that the last block adds up. x
    and the weight are rounded by 2⁻¹² at most; rows of x are scaled."""
    scheme, packed = GGUF_SCHEMES[name], drawn_blocks(name, n, k, 5)
    tiles = -(-n // 128) * -(-m // width)
    at = -(-2 * m * k // 256) * 256, -(-2 * m * k // 256) * 256 + -(-4 * m // 256) * 256
    plan = PackedPlan(width, tiles, splits, *at, at[1] + 4 * tiles * splits * 128 * width)
    monkeypatch.setattr(lower_qgemm, "plan_packed", lambda *_: plan)
    monkeypatch.setattr(lower_qgemm, "blocks_of", lambda _: 3)
    made = compiled(backend, product(name, packed, m, k)).set_param("w", packed)
    kernel = kernels_of(made)[-1]
    assert isinstance(kernel, PackedGemm) and kernel.splits == splits
    x = draw(9, m, k) * np.float32(10.0) ** (np.arange(m) % 30 - 15)[:, None].astype(np.float32)
    want = x.astype(np.float64) @ decode(scheme, packed).astype(np.float64).T
    rows = np.sqrt((want**2).mean(1, keepdims=True))
    for _ in range(2):  # counters are 0 again after a run
        off = (made.run(x=x)[0] - want) / rows
        assert np.sqrt((off**2).mean(1)).max() < 2**-11


HOT: list[Any] = [
    *(
        stream_gemv_for(name, k, n, Epilogue(f32))
        for name in TYPES
        for n, k in ((151936, 1024), (28672, 4096), (4096, 14336))
    ),
    *(
        few_packed_rows_for(name, 8, k, n, epilogue, False)
        for name in TYPES
        for n, k, epilogue in (
            (6144, 1024, Epilogue(f32)),
            (3072, 1024, Epilogue(f32, "silu", pair=True)),
        )
    ),
    *(few_packed_rows_for(n, 8, 4096, 28672, Epilogue(f32), False, True) for n in TYPES),
    *(
        PackedGemm(name, 1024, 4096, width, splits, epilogue)
        for name in ("Q8_0", "Q4_K", "Q6_K")
        for width, splits, epilogue in (
            (256, 1, Epilogue(f32)),
            (256, 1, Epilogue(bf16, "silu", pair=True)),
            (128, 2, Epilogue(f32, residual=f32)),
            (64, 4, Epilogue(f32)),
        )
    ),
]


@needs_ptxas
@pytest.mark.parametrize("kernel", HOT, ids=lambda k: f"{k.label}-{k.scheme}")
def test_hot_kernels_do_not_spill(kernel: Any) -> None:
    said = assemble(ptx_of(kernel), "sm_90a")
    numbers = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", said)
    assert numbers is not None
    assert set(numbers.groups()) == {"0"}
    assert "serializ" not in said  # wgmma runs beside what decodes
