"""ONNX files in the commands `inspect`, `profile`, `bench` and `compile`.

Dimensions that a file leaves open are 1 unless `--bind NAME=SIZE` says more.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlx.cli import console
from rlx.cli.kernel_table import HEADER, kernel_rows
from rlx.cli.load_model import find_model
from rlx.errors import OptionError

if TYPE_CHECKING:
    from rlx.onnx.onnx_model import OnnxModel

Bind = Annotated[
    list[str] | None,
    typer.Option(
        "--bind", metavar="NAME=SIZE", help="A dimension of an ONNX file. May be repeated."
    ),
]


def is_onnx(name: str) -> bool:
    """Whether an argument is an ONNX file, or a model of the catalogue that is one."""
    from rlx.formats.catalogue import find

    known = find(name)
    return name.endswith(".onnx") or (known is not None and known.main.endswith(".onnx"))


def open_onnx_file(name: str, device: str, threads: int | None) -> OnnxModel:
    path = find_model(name)
    with console.working(f"loading {name}"):
        from rlx.onnx.onnx_model import OnnxModel

        return OnnxModel(path, device=device, threads=threads)


def sizes_of(bind: Sequence[str] | None) -> dict[str, Any]:
    """The sizes of `--bind`; names may be "input:axis"."""
    found: dict[str, Any] = {}
    for text in bind or ():
        name, mark, number = text.partition("=")
        if not mark or not number.strip().isdecimal():
            raise OptionError("not a size", where="--bind", got=repr(text), expected="NAME=SIZE")
        found[name.strip()] = int(number)
    return found


def summary(model: OnnxModel) -> dict[str, Any]:
    """What the file says, without running it."""
    file = model.file
    operators = Counter(node.op_type for node in file.graph.nodes)
    weights = sum(made.size * made.dtype.itemsize for made in file.graph.initializers.values())
    return {
        "name": file.graph.name,
        "producer": file.producer,
        "opsets": ", ".join(f"{d or 'ai.onnx'} {n}" for d, n in file.opsets.items()),
        "inputs": ", ".join(f"{a.name}: {a.type}" for a in file.graph.inputs),
        "outputs": ", ".join(f"{a.name}: {a.type}" for a in file.graph.outputs),
        "weight_bytes": weights,
        "nodes": len(file.graph.nodes),
        "operators": ", ".join(f"{name} {n}" for name, n in operators.most_common()),
    }


def write_onnx_report(model: OnnxModel, path: Path, sizes: dict[str, Any]) -> None:
    """The HTML report of the largest segment."""
    from rlx.ir.module import GraphModule
    from rlx.onnx.run_parts import parts_of
    from rlx.specialize.options import CompileOptions
    from rlx.viz.report import make_report, write_page
    from rlx.viz.report.page import charting_library

    charting_library()  # raises before the work where it is missing
    with console.working("compiling and measuring"):
        parts = [p for p in parts_of(model.program, model.example_inputs(**sizes)) if p.is_compiled]
        if not parts:
            raise OptionError("nothing of the file is compiled", where=model.file.path, got="0")
        part = max(parts, key=lambda p: len(p.traced.graph.nodes))  # type: ignore[union-attr]
        traced = part.traced
        assert traced is not None and traced.graph is not None
        used = {s: n for s, n in (part.sizes or {}).items() if s in traced.graph.symbols()}
        facts = [(k.replace("_", " "), str(v)) for k, v in summary(model).items()]
        report = make_report(
            GraphModule.from_mir(traced.graph),
            CompileOptions.of({"binding": used, "threads": model.threads}),
            device=model.session.device.backend, params=traced.params,
            name=Path(model.file.path).name, facts=facts,
        )  # fmt: skip
        write_page(path, report)
    console.note(f"wrote {path}: open it in a browser")


def inspect_onnx(model: OnnxModel, stage: str | None, sizes: dict[str, Any], json: bool) -> str:
    """The text of a stage; the summary is printed."""
    if stage is not None:
        with console.working("compiling"):
            return model.inspect("mir" if stage == "hir" else stage, **sizes)
    found = summary(model)
    if json:
        console.write_json(found)
    else:
        shown = {**found, "weight_bytes": console.size(found["weight_bytes"])}
        console.facts([(key.replace("_", " "), value) for key, value in shown.items()])
    return ""


def profile_onnx(model: OnnxModel, name: str, sizes: dict[str, Any], json: bool) -> None:
    with console.working("measuring"):
        found = model.profile(**sizes)
    if json:
        console.write_json(
            {
                "model": name,
                **{
                    part: {"seconds": p.elapsed, "kernels": [asdict(k) for k in p.by_kernel()]}
                    for part, p in found.items()
                },
            }
        )
        return
    for i, (part, profile) in enumerate(found.items()):
        console.heading(f"{part}: {1e3 * profile.elapsed:.2f} ms", first=i == 0)
        console.table(HEADER, kernel_rows(profile), right=" ".join(HEADER[1:7]))


def compile_onnx(model: OnnxModel, out: Path, bind: Sequence[str] | None, json: bool) -> None:
    """One file with code for the sizes of `--bind`, and weights."""
    name = Path(model.file.path).stem
    file = out / f"{name}.rlx" if out.is_dir() or not out.suffix else out
    file.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with console.working("compiling"):
        model.compile(file, sizes_of(bind))
    seconds, size = time.perf_counter() - start, file.stat().st_size
    inputs = _shapes(model.example_inputs(**sizes_of(bind)))
    if json:
        console.write_json({"path": str(file), "bytes": size, "seconds": seconds, "inputs": inputs})
    else:
        console.note(f"{file}: for {_shown(inputs)}; {console.size(size)}, {seconds:.1f} s")


def _shapes(inputs: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: list(array.shape) for name, array in inputs.items()}


def _shown(shapes: Mapping[str, list[int]]) -> str:
    return ", ".join(f"{name} {dims}" for name, dims in shapes.items())


def bench_onnx(model: OnnxModel, name: str, sizes: dict[str, Any], repeat: int, json: bool) -> None:
    """Latency of the first run and of those after it."""
    inputs = model.example_inputs(**sizes)
    begin = time.perf_counter()
    model.run(inputs)
    first, times = time.perf_counter() - begin, list[float]()
    rounds = max(repeat, 3)
    while len(times) < rounds or (sum(times) < 1.0 and len(times) < 100):
        begin = time.perf_counter()
        model.run(inputs)
        times.append(time.perf_counter() - begin)
    median = statistics.median(times)
    found = {
        "model": name, "inputs": _shapes(inputs),
        "first_seconds": first, "seconds": median, "runs": len(times),
    }  # fmt: skip
    if json:
        console.write_json(found)
        return
    console.facts([
        ("model", name), ("inputs", _shown(_shapes(inputs))),
        ("first run", f"{1e3 * first:.1f} ms"),
        ("median", f"{1e3 * median:.3f} ms of {len(times)} runs"),
    ])  # fmt: skip
