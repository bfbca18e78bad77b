"""Every op and block is a method of graphs, modules and values, typed in a stub kept in step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import make_methods

import rlx
from rlx.ir.hir import REGISTERED
from rlx.ir.op import ELSEWHERE, REGISTRY, Op, op
from rlx.ir.ops.elementwise import unary


def test_the_stub_is_what_the_registry_gives() -> None:
    found = make_methods.STUB.read_text(encoding="utf-8")
    assert found == make_methods.render(), "run python tests/ir/make_methods.py"


def test_every_op_and_block_has_its_methods() -> None:
    hir, mir = rlx.GraphModule.hir("h"), rlx.GraphModule.mir("m")
    for name, cls in REGISTRY.items():
        if cls.is_block or cls.is_source:
            continue
        assert callable(getattr(mir, name)) and callable(getattr(hir, name))
        assert name in dir(mir) and name in dir(hir)
        assert not cls.num_required or callable(getattr(rlx.Value, name))
    for name in REGISTERED:
        assert callable(getattr(hir, name)) and callable(getattr(rlx.Value, name))
        assert getattr(hir, name).__doc__.endswith(f"\n\n{REGISTERED[name].__doc__}")
    usage = "softmax(x, axis=-1)\n"
    assert mir.softmax.__doc__.startswith(usage) and rlx.Value.softmax.__doc__.startswith(usage)
    assert hir.linear.__doc__.startswith(
        "linear(x, w, bias=None, activation=None, transposed=False"
    )


def test_a_value_builds_the_block_at_hir_and_the_op_at_mir() -> None:
    for module, kind in (
        (rlx.GraphModule.hir("h"), "hir.rms_norm"),
        (rlx.GraphModule.mir("m"), "rms_norm"),
    ):
        x, gamma = module.input("x", ["n", 4]), module.param("gamma", [4])
        assert x.rms_norm(gamma, eps=0.5).node.kind == kind
        assert module.rms_norm(x, gamma, eps=0.5).node.op == x.rms_norm(gamma, eps=0.5).node.op


def test_tensors_may_be_named_and_numpys_names_are_the_attributes() -> None:
    g = rlx.Graph("names")
    x, w = g.input("x", ["n", 2, 6]), g.param("w", [6])
    assert g.rms_norm(x=x, gamma=w, eps=1e-3).node.inputs == (x, w)
    assert g.rms_norm(x, w, beta=w).node.inputs == (x, w, w)
    assert g.where(x > 0, a=x, b=0.0).shape is x.shape
    for made, dims in (
        (g.sum(x, axis=-1, keepdims=True), "[n, 2, 1]"),
        (x.mean(axis=(0, 2)), "[2]"),
        (x.max(), "[]"),
        (g.reshape(x, shape=(-1, 3)), "[4 * n, 3]"),
        (g.reshape(x, (2, -1)), "[2, 6 * n]"),
        (g.transpose(x, axes=(2, 0, 1)), "[6, n, 2]"),
        (g.expand(w, shape=(3, 6)), "[3, 6]"),
        (g.iota(shape=(4,)), "[4]"),
        (g.concat([x, x], axis=1), "[n, 4, 6]"),
        (x.concat(x, axis=2), "[n, 2, 12]"),
        (x.softmax(axis=1), "[n, 2, 6]"),
        (x.top_k(k=2)[0], "[n, 2, 2]"),
    ):
        assert str(made.shape).rpartition(" ")[0] == dims, made.node
    with pytest.raises(rlx.InputError, match="unknown argument; got axes"):
        g.sum(x, axes=1)  # type: ignore[call-arg]


def test_unknown_methods_hint_at_what_to_write() -> None:
    g = rlx.GraphModule.hir("names")
    x = g.input("x", ["n", 4])
    for owner in (g, x):
        for name, hint in (("clip", r"write x.clamp\(low, high\)"), ("sofmax", "softmax")):
            assert not hasattr(owner, name)
            with pytest.raises(AttributeError, match=f"got {name}\n  hint: .*{hint}"):
                getattr(owner, name)
    with pytest.raises(
        rlx.InputError, match=r"missing argument; got no high; expected pad\(x; low"
    ):
        g.pad(x, [(0, 0), (1, 1)])  # type: ignore[call-arg]
    with pytest.raises(rlx.OptionError, match="hint: did you mean bf16"):
        g.input("y", ["n"], "bfloat16")


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_hints_say_runs(name: str) -> None:
    g = rlx.Graph("hints")
    x, y, ids = g.input("x", [4, 4]), g.input("y", [4, 4]), g.input("ids", [4, 4], "i32")
    given = {
        "low": 0,
        "high": 1,
        "axis": 0,
        "axes": (1, 0),
        "shape": (2, 4, 4),
        "number": 2.0,
        "n": 2,
    }
    if name == "view":
        given["shape"] = (2, 8)
    code = ELSEWHERE[name].removesuffix(", which takes the axis away")
    made = eval(code, {"g": g, "x": x, "y": y, "ids": ids, "dtype": "f16"} | given)
    for value in made if isinstance(made, tuple) else (made,):
        assert isinstance(value, rlx.Value)


def test_an_op_of_the_users_is_a_method_too() -> None:
    try:

        @op("thrice")
        class Thrice(Op):
            """3 · x"""

            def infer(self, x: rlx.Shape) -> rlx.Shape:
                return x

            def reference(self, x: Any) -> Any:
                return x * 3

        g = rlx.GraphModule.hir("own")
        x: Any = g.input("x", [2])
        assert x.thrice().node.kind == g.thrice(x).node.kind == "thrice"
        g.set_outputs(x.thrice())
        (y,) = rlx.evaluate(g.into_mir(), [np.float32([1, 2])])
        assert y.tolist() == [3, 6]
    finally:
        from rlx.ir.methods import OpMethods, ValueMethods

        del REGISTRY["thrice"], OpMethods.thrice, ValueMethods.thrice  # type: ignore[attr-defined]


def test_what_is_wrong_with_a_row_is_said() -> None:
    with pytest.raises(rlx.OptionError, match="not a name for an op; got 'two words'"):
        unary("two words", np.cbrt, "∛x")
    try:
        unary("total", np.cbrt, "not elementwise", lambda g, x: g.sum(x))
        g = rlx.Graph("row")
        g.set_outputs(g.total(g.input("x", ["n", 3])))  # type: ignore[attr-defined]
        with pytest.raises(rlx.ShapeError, match=r"formula is not elementwise; got \[\] f32"):
            rlx.Session("cpu").compile(g, binding={"n": 2})
    finally:
        from rlx.ir.methods import OpMethods, ValueMethods

        del REGISTRY["total"], OpMethods.total, ValueMethods.total  # type: ignore[attr-defined]


TYPED = """
import rlx

def build(g: rlx.GraphModule) -> rlx.Value:
    x = g.input("x", ["batch", 64])
    w = g.param("w", [64, 10])
    reveal_type(g.linear(x, w, activation="gelu"))
    reveal_type(x.reshape(-1, 8, 8).sum(axis=-1, keepdims=True))
    reveal_type(x[1:, None] == 0)
    reveal_type(x @ w)
    reveal_type(x.top_k(k=2))
    reveal_type(rlx.Graph("g").softmax(x, axis=-1))
    g.softmax(x, axis="last")
    return x.rms_norm(w, eps=1e-5)
"""


@pytest.mark.slow
def test_type_checkers_know_the_methods(tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    page.write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), str(page)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=make_methods.ROOT, check=False
    )
    revealed = [
        line.partition('"')[2].strip('"') for line in done.stdout.splitlines() if "Revealed" in line
    ]
    value = "rlx.ir.node.Value"
    assert revealed == [value] * 4 + [f"tuple[{value}, {value}]", value], done.stdout
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(errors) == 1 and 'expected "int"' in errors[0], done.stdout
