"""ONNX files as users meet them: sizes, subgraphs, functions, sequences, errors, artifacts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import packaged_models
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import drawn, expected_of_network, model, network, value

import rlx
from rlx.models.load import load_text_model
from rlx.onnx import OnnxModel

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def opened(proto: Any, **options: Any) -> OnnxModel:
    return OnnxModel(proto.SerializeToString(), **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "net.onnx"
    onnx.save(network(), place)
    return place


# -- sizes ----------------------------------------------------------------------------------------


def test_a_new_size_needs_no_new_trace(path: Path) -> None:
    net = rlx.load(path)
    assert isinstance(net, OnnxModel)
    proto = onnx.load(path)
    for batch, height, width in ((1, 9, 11), (3, 9, 9), (5, 17, 4), (1, 1, 6)):
        x = drawn(batch, 3, height, width)
        (y,) = net.run(x=x)
        np.testing.assert_allclose(y, expected_of_network(proto, x), rtol=2e-5, atol=2e-5)
    (segment,) = net.program.segments.values()
    assert len(segment.traces) == 1


def test_what_is_computed_from_shapes_stays_symbolic() -> None:
    """Reshape to a shape that Shape, Gather and Concat make, as exporters write it."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "one"], ["n"], axis=0),
        helper.make_node("Mul", ["n", "two"], ["m"]),
        helper.make_node("Concat", ["m", "minus"], ["t"], axis=0),
        helper.make_node("Reshape", ["x", "t"], ["y"]),
    ]
    constants = {"one": np.array([1]), "two": np.array([2]), "minus": np.array([-1])}
    net = opened(model(nodes, [value("x", ["a", "b", 4])], [value("y", None)], constants))
    for a, b in ((2, 3), (5, 7), (3, 2)):
        x = drawn(a, b, 4)
        assert np.array_equal(net(x), x.reshape(2 * b, -1))
    (segment,) = net.program.segments.values()
    assert len(segment.traces) == 1


def test_sizes_that_are_an_input() -> None:
    nodes = [helper.make_node("Expand", ["x", "s"], ["y"])]
    net = opened(model(nodes, [value("x", [1, 4]), value("s", [2], np.int64)], [value("y", None)]))
    x = drawn(1, 4)
    for n in (2, 3, 9):
        assert np.array_equal(net(x, np.array([n, 4])), np.broadcast_to(x, (n, 4)))
    assert len(net.program.segments[0].traces) == 1


# -- subgraphs and functions ----------------------------------------------------------------------


def _body(nodes: list[Any], inputs: list[Any], outputs: list[Any]) -> Any:
    return helper.make_graph(nodes, "body", inputs, outputs)


def test_if_by_an_input() -> None:
    then = _body([helper.make_node("Exp", ["x"], ["a"])], [], [value("a", None)])
    other = _body([helper.make_node("Neg", ["x"], ["b"])], [], [value("b", None)])
    node = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    net = opened(model([node], [value("c", [], np.bool_), value("x", ["n"])], [value("y", None)]))
    x = drawn(4)
    np.testing.assert_allclose(net(np.array(True), x), np.exp(x), rtol=1e-6)
    assert np.array_equal(net(np.array(False), x), -x)


def test_branches_of_different_shapes() -> None:
    """Which no op of a graph can give: the node runs between segments."""
    cut = helper.make_node("Slice", ["x", "zero", "two"], ["a"])
    then = _body([cut], [], [value("a", None)])
    other = _body([helper.make_node("Identity", ["x"], ["b"])], [], [value("b", None)])
    nodes = [
        helper.make_node("If", ["c"], ["z"], then_branch=then, else_branch=other),
        helper.make_node("Abs", ["z"], ["y"]),
    ]
    constants = {"zero": np.array([0]), "two": np.array([2])}
    net = opened(
        model(nodes, [value("c", [], np.bool_), value("x", ["n"])], [value("y", None)], constants)
    )
    x = drawn(5)
    assert np.array_equal(net(np.array(True), x), np.abs(x[:2]))
    assert np.array_equal(net(np.array(False), x), np.abs(x))


def test_a_loop_that_ends_by_its_condition() -> None:
    """x doubles until its sum is above 100."""
    body = _body(
        [
            helper.make_node("Add", ["v", "v"], ["w"]),
            helper.make_node("ReduceSum", ["w"], ["t"], keepdims=0),
            helper.make_node("Less", ["t", "limit"], ["more"]),
        ],
        [value("i", [], np.int64), value("c", [], np.bool_), value("v", ["n"])],
        [value("more", [], np.bool_), value("w", ["n"])],
    )
    node = helper.make_node("Loop", ["", "yes", "x"], ["y"], body=body)
    constants = {"yes": np.array(True), "limit": np.float32(100)}
    net = opened(model([node], [value("x", ["n"])], [value("y", ["n"])], constants))
    x = np.abs(drawn(6)) + 0.1
    expected = x
    while expected.sum() < 100:
        expected = expected + expected
    np.testing.assert_allclose(net(x), expected, rtol=1e-6)
    assert not net.program.on_host  # one native loop


def test_a_scan_of_rows() -> None:
    body = _body(
        [helper.make_node("Add", ["s", "r"], ["t"]), helper.make_node("Identity", ["t"], ["o"])],
        [value("s", [3]), value("r", [3])], [value("t", [3]), value("o", [3])],
    )  # fmt: skip
    node = helper.make_node("Scan", ["s0", "x"], ["last", "y"], body=body, num_scan_inputs=1)
    net = opened(
        model([node], [value("s0", [3]), value("x", ["n", 3])], [value("last", [3]),
              value("y", ["n", 3])])
    )  # fmt: skip
    x, s = drawn(7, 3), drawn(3)
    last, y = net(s, x)
    np.testing.assert_allclose(y, s + np.cumsum(x, axis=0), atol=1e-5)
    assert np.array_equal(last, y[-1])


def test_functions_of_the_file() -> None:
    opsets = [helper.make_opsetid("", 20)]
    alpha = helper.make_node("Constant", [], ["k"])
    alpha.attribute.append(onnx.AttributeProto(name="value_float", type=1, ref_attr_name="factor"))
    inner = [alpha, helper.make_node("Mul", ["a", "k"], ["b"])]
    scaled = helper.make_function("mine", "Scaled", ["a"], ["b"], inner, opsets, ["factor"])
    node = helper.make_node("Scaled", ["x"], ["y"], domain="mine", factor=2.5)
    proto = model([node], [value("x", ["n"])], [value("y", ["n"])], functions=[scaled],
                  domains=["mine"])  # fmt: skip
    x = drawn(4)
    np.testing.assert_allclose(opened(proto)(x), 2.5 * x, rtol=1e-6)


def test_functions_that_call_themselves_are_refused() -> None:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    call = helper.make_node("F", ["a"], ["b"], domain="mine")
    endless = helper.make_function("mine", "F", ["a"], ["b"], [call], opsets)
    node = helper.make_node("F", ["x"], ["y"], domain="mine")
    proto = model([node], [value("x", ["n"])], [value("y", ["n"])], functions=[endless],
                  domains=["mine"])  # fmt: skip
    with pytest.raises(rlx.FormatError, match="without an end"):
        opened(proto)


# -- the package's light models -------------------------------------------------------------------


LIGHT_MODELS = ("squeezenet resnet50 densenet121 shufflenet inception_v1 inception_v2 zfnet512 "
                "bvlc_alexnet")  # fmt: skip


@pytest.mark.parametrize("name", LIGHT_MODELS.split())
def test_light_models(name: str) -> None:
    """Networks with generated weights, whose results the package has."""
    proto = onnx.load(LIGHT / f"light_{name}.onnx")
    fixed = {t.name for t in proto.graph.initializer}
    given = {}
    for info in proto.graph.input:
        if info.name not in fixed:
            shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
            count = int(np.prod(shape))
            given[info.name] = (np.arange(count).reshape(shape) / count).astype(np.float32)
    found = opened(proto).run(given)
    for i, y in enumerate(found):
        data = (LIGHT / f"light_{name}_output_{i}.pb").read_bytes()
        expected = numpy_helper.to_array(onnx.TensorProto.FromString(data))
        np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-7)


# -- models that ship in packages -----------------------------------------------------------------

GOLDENS = np.load(Path(__file__).resolve().parents[1] / "goldens" / "onnx.npz")


@pytest.mark.parametrize("name", packaged_models.inputs())
def test_packaged_models_give_the_results_of_onnx_runtime(name: str) -> None:
    net = rlx.load(packaged_models.place(name))
    found = net.run(packaged_models.inputs()[name])
    for i, y in enumerate(found):
        expected = GOLDENS[f"{name}.{i}"]
        largest = float(np.abs(expected).max())
        kept = y.reshape(-1)[:: packaged_models.STEP]
        # probabilities of a deep network: sums of thousands of terms in another order
        np.testing.assert_allclose(kept, expected, rtol=0, atol=1e-4 * max(largest, 1e-3))


def test_models_of_the_catalogue_are_named() -> None:
    assert isinstance(rlx.load("silero-vad"), OnnxModel)
    with pytest.raises(rlx.FormatError, match=r"cls\.onnx, det\.onnx, rec\.onnx"):
        rlx.load("rapidocr")  # a folder of three
    with pytest.raises(rlx.OptionError, match="not a model of text"):
        load_text_model("silero-vad")


# -- what goes wrong ------------------------------------------------------------------------------


def test_all_unknown_operators_are_named_at_once() -> None:
    then = _body([helper.make_node("Deep", ["x"], ["a"], domain="odd")], [], [value("a", None)])
    nodes = [
        helper.make_node("First", ["x"], ["u"], domain="odd"),
        helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=then),
    ]
    proto = model(nodes, [value("c", [], np.bool_), value("x", ["n"])], [value("y", None)],
                  domains=["odd"])  # fmt: skip
    with pytest.raises(rlx.UnsupportedError) as raised:
        opened(proto)
    assert "odd.Deep (opset 1); odd.First (opset 1)" in str(raised.value)


def test_inputs_are_checked(path: Path) -> None:
    net = rlx.load(path)
    x = drawn(2, 3, 8, 8)
    for given, text in [
        ({}, "x missing"), ({"x": x, "z": x}, "z unknown"), ({"x": x[:, :2]}, "wrong shape"),
        ({"x": x.astype(np.float64)}, "wrong element type"), ({"x": x[0]}, "wrong shape"),
    ]:  # fmt: skip
        with pytest.raises(rlx.InputError, match=text):
            net.run(given)
    assert net.run(x=x.tolist())[0].shape == (2, 5)  # lists become arrays of the type


def test_options_of_language_models_are_refused(path: Path) -> None:
    with pytest.raises(rlx.OptionError, match="an option that an ONNX file does not have"):
        rlx.load(path, quant="int8")


def _external(folder: Path, location: str, length: int = 48, offset: int = 0) -> Path:
    tensor = TensorProto(name="w", dims=[3, 4], data_type=1, data_location=1)
    for key, text in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=text)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [value("x", ["n", 3])],
        [value("y", ["n", 4])],
    )  # fmt: skip
    graph.initializer.append(tensor)
    place = folder / "external.onnx"
    opsets = [helper.make_opsetid("", 20)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    place.write_bytes(proto.SerializeToString())
    return place


def test_weights_in_a_file_beside_the_model(tmp_path: Path) -> None:
    w = drawn(3, 4)
    (tmp_path / "weights.bin").write_bytes(b"\0" * 64 + w.tobytes())
    net = rlx.load(_external(tmp_path, "weights.bin", offset=64))
    x = drawn(2, 3)
    np.testing.assert_allclose(net(x), x @ w, atol=1e-6)


def test_weights_outside_the_folder_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(64))
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    places = ["../secret.bin", str(tmp_path / "secret.bin"), "link.bin", "sub/../../secret.bin", ""]
    for location in places:
        with pytest.raises(rlx.FormatError):
            rlx.load(_external(folder, location))


@pytest.mark.parametrize(("length", "offset"), [(48, 20), (2**62, 0), (47, 0), (48, 2**63 - 1)])
def test_lengths_that_do_not_fit(tmp_path: Path, length: int, offset: int) -> None:
    (tmp_path / "weights.bin").write_bytes(bytes(64))
    with pytest.raises(rlx.FormatError):
        rlx.load(_external(tmp_path, "weights.bin", length, offset))


# -- seeing inside, and artifacts -----------------------------------------------------------------


def test_inspect_names_the_file_s_parts(path: Path) -> None:
    net = rlx.load(path)
    text = net.inspect("mir", batch=2, height=8, width=8)
    assert '"w"' in text and "[batch, 8, height, width]" in text and "// block stem.Conv" in text
    assert "conv" in net.inspect("program", batch=2, height=8, width=8)
    with pytest.raises(rlx.OptionError, match="no such stage"):
        net.inspect("sketch")
    with pytest.raises(rlx.InputError, match="no such dimension"):
        net.inspect("mir", depth=3)


def test_profile(path: Path) -> None:
    (profile,) = rlx.load(path).profile(batch=2, height=32, width=32).values()
    assert profile.elapsed > 0 and sum(k.calls for k in profile.by_kernel()) >= 2


WITHOUT_COMPILER = """
import sys
sys.modules["llvmlite"] = sys.modules["onnx"] = None  # importing either is an error
import numpy as np, rlx
model = rlx.onnx.load_compiled(sys.argv[1])
np.save(sys.argv[3], model.run(x=np.load(sys.argv[2]))[0])
"""


def test_a_compiled_file_runs_without_a_compiler(path: Path, tmp_path: Path) -> None:
    net = rlx.load(path)
    made = net.compile(
        tmp_path / "net.rlx", {"batch": 2, "height": 8, "width": 8},
        {"batch": 4, "height": 8, "width": 8},
    )  # fmt: skip
    x = drawn(4, 3, 8, 8)
    np.save(tmp_path / "x.npy", x)
    command = [sys.executable, "-c", WITHOUT_COMPILER, made, tmp_path / "x.npy",
               tmp_path / "y.npy"]  # fmt: skip
    subprocess.run(command, check=True)
    assert np.array_equal(np.load(tmp_path / "y.npy"), net(x))
    with pytest.raises(rlx.InputError, match="not inputs that this file was compiled for"):
        rlx.onnx.load_compiled(made).run(x=x[:3])


def test_what_needs_the_host_is_not_compiled_to_a_file(tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["y"])]
    net = opened(model(nodes, [value("x", ["n"])], [value("y", None)]))
    with pytest.raises(rlx.UnsupportedError, match="parts run on the host"):
        net.compile(tmp_path / "m.rlx", {"x": drawn(4)})


def test_on_another_device(path: Path) -> None:
    x = drawn(2, 3, 6, 6)
    here, there = rlx.load(path), rlx.load(path, device="reference")
    np.testing.assert_allclose(here(x), there(x), rtol=1e-5, atol=1e-5)


# -- classic models -------------------------------------------------------------------------------


def test_trees_of_scikit_learn() -> None:
    from sklearn.ensemble import RandomForestRegressor

    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 5)).astype(np.float32)
    forest = RandomForestRegressor(7, max_depth=6, random_state=0).fit(x, x[:, 0] * x[:, 1])
    keys = ["treeids", "nodeids", "featureids", "modes", "values", "truenodeids", "falsenodeids"]
    rows: dict[str, list[Any]] = {k: [] for k in keys}
    leaves: list[tuple[int, int, float]] = []
    for t, estimator in enumerate(forest.estimators_):
        tree = estimator.tree_
        for i in range(tree.node_count):
            leaf = tree.children_left[i] < 0
            found = (
                t, i, max(int(tree.feature[i]), 0), "LEAF" if leaf else "BRANCH_LEQ",
                # thresholds are f64, features f32: the next f32 below keeps the answers
                0.0 if leaf else float(_below(tree.threshold[i])),
                0 if leaf else int(tree.children_left[i]),
                0 if leaf else int(tree.children_right[i]),
            )  # fmt: skip
            for key, one in zip(keys, found, strict=True):
                rows[key].append(one)
            if leaf:
                leaves.append((t, i, float(tree.value[i, 0, 0])))
    node = helper.make_node(
        "TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", n_targets=1,
        aggregate_function="AVERAGE", **{f"nodes_{k}": v for k, v in rows.items()},
        target_treeids=[r[0] for r in leaves], target_nodeids=[r[1] for r in leaves],
        target_ids=[0] * len(leaves), target_weights=[r[2] for r in leaves],
    )  # fmt: skip
    net = opened(model([node], [value("x", ["n", 5])], [value("y", None)], domains=["ai.onnx.ml"]))
    test = rng.standard_normal((64, 5)).astype(np.float32)
    np.testing.assert_allclose(net(test)[:, 0], forest.predict(test), rtol=1e-5, atol=1e-6)


def _below(threshold: float) -> Any:
    near = np.float32(threshold)
    return near if float(near) <= threshold else np.nextafter(near, np.float32(-np.inf))


def test_support_vectors_of_scikit_learn() -> None:
    from sklearn.svm import SVC

    rng = np.random.default_rng(1)
    x = rng.standard_normal((90, 4)).astype(np.float32)
    machine = SVC(gamma=0.4).fit(x, np.digitize(x[:, 0], [-0.5, 0.5]))
    node = helper.make_node(
        "SVMClassifier", ["x"], ["label", "scores"], domain="ai.onnx.ml", kernel_type="RBF",
        kernel_params=[0.4, 0.0, 3.0], classlabels_ints=[0, 1, 2],
        vectors_per_class=machine.n_support_.tolist(), rho=machine.intercept_.tolist(),
        support_vectors=machine.support_vectors_.reshape(-1).tolist(),
        coefficients=machine.dual_coef_.reshape(-1).tolist(),
    )  # fmt: skip
    outputs = [value("label", None, np.int64), value("scores", None)]
    net = opened(model([node], [value("x", ["n", 4])], outputs, domains=["ai.onnx.ml"]))
    test = rng.standard_normal((50, 4)).astype(np.float32)
    assert np.array_equal(net(test)[0], machine.predict(test))


@pytest.mark.parametrize("binary", [True, False])
def test_linear_models_of_scikit_learn(binary: bool) -> None:
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(2)
    x = rng.standard_normal((120, 3)).astype(np.float32)
    wanted = (x[:, 0] > 0).astype(int) if binary else np.digitize(x[:, 0], [-0.5, 0.5])
    fitted = LogisticRegression().fit(x, wanted)
    node = helper.make_node(
        "LinearClassifier", ["x"], ["label", "scores"], domain="ai.onnx.ml",
        coefficients=fitted.coef_.reshape(-1).tolist(), intercepts=fitted.intercept_.tolist(),
        classlabels_ints=fitted.classes_.tolist(),
        post_transform="LOGISTIC" if binary else "SOFTMAX",
    )  # fmt: skip
    outputs = [value("label", None, np.int64), value("scores", None)]
    net = opened(model([node], [value("x", ["n", 3])], outputs, domains=["ai.onnx.ml"]))
    test = rng.standard_normal((40, 3)).astype(np.float32)
    label, scores = net(test)
    assert np.array_equal(label, fitted.predict(test))
    np.testing.assert_allclose(scores, fitted.predict_proba(test), rtol=1e-5, atol=1e-6)
