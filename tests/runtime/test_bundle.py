"""Bundles: one file with code and weights that runs where nothing can be compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_model import CLOSE, build, component, expected, inputs, weights

import rlx
from rlx import DimBinding, ModelVariant, compile_bundle, load_bundle
from rlx.llvm.target import Target

HERE = str(Path(__file__).resolve().parent)
VARIANTS = {"short": component(1, 4), "long": ModelVariant.prefill(1, rlx.UpTo(32))}


def bundle(path: Path, **settings: object) -> Path:
    given: dict[str, object] = {"options": {"threads": 1}, "params": weights(), **settings}
    return compile_bundle(path / "small.rlx", build, VARIANTS, **given)  # type: ignore[arg-type]


def check(compiled: rlx.CompiledGraph, seq: int) -> None:
    x = inputs(1, seq)
    np.testing.assert_allclose(compiled.run(x=x)[0], expected(x, weights()), **CLOSE)


def test_a_bundle_holds_variants_weights_and_extras(tmp_path: Path) -> None:
    path = bundle(tmp_path, extras={"tokenizer": b"\x00words"})
    loaded = load_bundle(path, options={"threads": 1})
    assert list(loaded) == ["short", "long"] and loaded.extras == {"tokenizer": b"\x00words"}
    check(loaded["short"], 4)
    for seq in (1, 9, 32):
        check(loaded["long"], seq)
    assert loaded.params.preparations == 0  # weights came prepared
    assert loaded["short"].params is loaded["long"].params
    with pytest.raises(rlx.InputError, match=r"no such variant; got 'other'; expected short, long"):
        loaded["other"]


_ELSEWHERE = """
import sys
sys.modules["llvmlite"] = None
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "llvmlite" else real(name, *a)
import numpy as np
from rlx import load_bundle
from small_model import CLOSE, expected, inputs, weights
bundle = load_bundle({path!r}, options={{"threads": 1}})
if {give}:
    bundle["short"].set_params(weights())
x = inputs(1, 4)
np.testing.assert_allclose(bundle["short"].run(x=x)[0], expected(x, weights()), **CLOSE)
from rlx.llvm.jit import counters as jit
from rlx.passes.report import counters
print(counters.passes, jit.compilations, sys.modules["llvmlite"])
"""


@pytest.mark.parametrize("with_weights", [True, False], ids=["weights", "code only"])
def test_it_loads_where_llvmlite_is_not_installed(tmp_path: Path, with_weights: bool) -> None:
    path = bundle(tmp_path, params=weights() if with_weights else None)
    code = _ELSEWHERE.format(path=str(path), give=not with_weights)
    paths = os.pathsep.join([HERE, *(p for p in sys.path if p)])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": paths, "RLX_CACHE": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "0", "None"]


def test_named_cpus(tmp_path: Path) -> None:
    for name in ("generic", "x86-64-v3"):
        loaded = load_bundle(bundle(tmp_path, target=name), options={"threads": 1})
        if Target.named(name).runs_on(Target.host()):
            check(loaded["short"], 4)
    other = "apple-m1" if Target.host().arch == "x86_64" else "x86-64"
    foreign = load_bundle(bundle(tmp_path, target=other))
    with pytest.raises(rlx.CodegenError, match="code for another CPU"):
        foreign["short"]


def test_variants_share_states(tmp_path: Path) -> None:
    def counter() -> rlx.Graph:
        g = rlx.Graph("counter")
        x = g.input("x", ["seq", 2])
        updated = g.state_update(g.state("kept", [8, 2]), x, axis=0, start="past_seq")
        g.set_outputs({"sum": g.sum(g.narrow(updated, 0, 0, "past_seq + seq"), 0)})
        return g

    variants = {
        "prefill": DimBinding(seq=3).set_live("past_seq", 7),
        "decode": DimBinding(seq=1).set_live("past_seq", 7),
    }
    path = compile_bundle(tmp_path / "c.rlx", counter, variants, options={"threads": 1})
    loaded = load_bundle(path, options={"threads": 1})
    loaded["prefill"].run(x=np.ones((3, 2), np.float32), sizes={"past_seq": 0})
    (total,) = loaded["decode"].run(x=np.full((1, 2), 5, np.float32), sizes={"past_seq": 3})
    assert total.tolist() == [8, 8]


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(rlx.InputError, match="no such bundle"):
        load_bundle(tmp_path / "none.rlx")
    path = bundle(tmp_path)
    whole = path.read_bytes()
    for at in (200, len(whole) // 2, len(whole) - 3):  # in the head, and in the weights
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        with pytest.raises(rlx.FormatError, match="damaged"):
            load_bundle(path)
    path.write_bytes(whole)
    path.chmod(0o666)
    if hasattr(os, "geteuid"):
        with pytest.raises(rlx.FormatError, match="others could have changed"):
            load_bundle(path)
    with pytest.raises(rlx.OptionError, match="at least one variant"):
        rlx.write_bundle(tmp_path / "empty.rlx", {})
