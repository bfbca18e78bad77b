"""`f(x)` runs a compiled graph; what notebooks show of modules, graphs and models."""

from __future__ import annotations

import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx

X, Y = np.float32([[1, 2, 3]]), np.float32([[10, 20, 30], [40, 50, 60]])


def compiled(device: str, outputs: int = 1) -> rlx.CompiledGraph:
    def build(g: rlx.GraphModule) -> Any:
        x, y = g.input("x", ["n", 3]), g.input("y", ["m", 3])
        return [x @ y.T, x * 2][:outputs]

    return rlx.Session(device).compile(rlx.GraphModule.define("call", build))


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_inputs_by_position_by_name_or_as_a_mapping(device: str) -> None:
    f = compiled(device)
    for y in (f(X, Y), f(x=X, y=Y), f(X, y=Y), f({"x": X, "y": Y}), f({"x": X}, y=Y)):
        assert isinstance(y, np.ndarray)  # one output: the array itself
        np.testing.assert_array_equal(y, X @ Y.T)
    assert isinstance(f.run(x=X, y=Y), tuple)
    both = compiled(device, outputs=2)(X, Y)
    assert isinstance(both, tuple)
    np.testing.assert_array_equal(both[1], X * 2)


def test_what_is_wrong_with_a_call_is_said() -> None:
    f = compiled("reference")
    with pytest.raises(rlx.InputError, match=r"too many inputs; got 3; expected x, y"):
        f(X, Y, X)
    with pytest.raises(rlx.InputError, match="given twice; got x"):
        f(X, x=X, y=Y)
    with pytest.raises(rlx.InputError, match=r"missing inputs; expected y \[m, 3\] f32"):
        f(X)
    with pytest.raises(rlx.InputError, match="unknown input; got z"):
        f(X, z=Y)
    for by_name in (f.run, f.profile):
        with pytest.raises(
            rlx.InputError, match="inputs have names here; got ndarray; expected x="
        ):
            by_name(X)  # type: ignore[arg-type]
    with pytest.raises(rlx.OptionError, match=r"not a graph; got function.*\n.*GraphModule.define"):
        rlx.Session("reference").compile(lambda g: g.input("x", [1]))  # type: ignore[arg-type]
    with pytest.raises(rlx.BindingError, match=r"not a binding; got 4; expected a DimBinding"):
        rlx.Session("reference").compile(rlx.Graph("g"), binding=4)  # type: ignore[arg-type]


def test_reprs_say_what_things_are() -> None:
    assert repr(rlx.Session("reference")) == "<Session on reference>"
    f = rlx.Session("reference").compile(
        rlx.GraphModule.define("r", lambda g: g.input("x", ["n", 3]) * g.param("w", [3])),
        binding={"n": 2},
    )
    f.set_param("w", np.ones(3, np.float32))
    assert repr(f.params) == "<ParamStore: 1 params, 12 bytes>"
    assert repr(f.executable) == "<ReferenceExecutable: x [2, 3] f32 -> output_0 [2, 3] f32>"


def test_sizes_that_no_input_shows_go_with_the_call() -> None:
    module = rlx.GraphModule.define("count", lambda g: g.iota(("n",)) + g.input("x", []))
    f = rlx.Session("reference").compile(module)
    assert f(np.float32(1), sizes={"n": 3}).tolist() == [1, 2, 3]  # type: ignore[union-attr]


def test_the_version_is_that_of_the_project() -> None:
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    assert rlx.__version__ == tomllib.loads(project.read_text())["project"]["version"]
    assert "__version__" in dir(rlx)


class Checked(HTMLParser):
    """Knows whether tags are balanced, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_notebooks_show_modules_at_every_stage() -> None:
    module = rlx.GraphModule.define("<b>&", lambda g: {"<i>": g.relu(g.input("<x>", ["n", 3]))})
    for stage in (module, module.lower()):
        page = stage._repr_html_()
        shown = Checked(page)
        for part in ("<b>&", "input <x>", "[n, 3] f32", "output <i>", "relu", str(stage.stage)):
            assert part in shown.text, part
        assert "<x>" not in page and "<i>" not in page, "names are escaped"
    long = rlx.GraphModule.mir("long")
    x = long.input("x", [1])
    for _ in range(3000):
        x = -x
    assert len(long.set_outputs(x)._repr_html_()) < 40_000


def test_notebooks_show_compiled_graphs() -> None:
    f = compiled("reference", outputs=2)
    f(X, Y)
    shown = Checked(f._repr_html_()).text
    for part in ("call on reference", "input x", "[n, 3] f32", "output_0, output_1", "variants1"):
        assert part in shown, part
