"""What a model does with given inputs: its segments at each stage of the compiler, and their
times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from rlx.errors import OptionError
from rlx.ir.module import GraphModule
from rlx.onnx.values import Data
from rlx.runtime.stages import STAGES, Stages
from rlx.specialize.options import CompileOptions

if TYPE_CHECKING:
    from rlx.backends.timing import Profile
    from rlx.onnx.onnx_model import OnnxModel
    from rlx.onnx.program import Program
    from rlx.onnx.segment import Traced


class Part(NamedTuple):
    """A piece of a run: a compiled segment with its inputs, or a node that runs on the host."""

    title: str
    traced: Traced | None = None
    sizes: Mapping[str, int] | None = None
    arrays: tuple[Data, ...] = ()

    @property
    def is_compiled(self) -> bool:
        return self.traced is not None and self.traced.graph is not None


def parts_of(program: Program, given: Mapping[str, Any]) -> list[Part]:
    """The pieces of a run with these inputs, in order. It runs once to find them."""
    found: list[Part] = []
    program.run(given, watch=found)
    return found


def stage_text(model: OnnxModel, given: Mapping[str, Any], stage: str) -> str:
    """The segments of a run at a stage of the compiler."""
    if stage not in STAGES:
        raise OptionError(
            "no such stage", where=model.file.path, got=repr(stage), expected=", ".join(STAGES)
        )
    texts = []
    parts = parts_of(model.program, given)
    compiled = [p for p in parts if p.is_compiled]
    for part in parts:
        if not part.is_compiled:
            texts.append(f"-- {part.title}: on the host\n")
            continue
        head = "" if len(compiled) == len(parts) == 1 else f"-- {part.title}\n"
        texts.append(head + _stage_of(model, part, stage))
    return "\n".join(texts)


def _stage_of(model: OnnxModel, part: Part, stage: str) -> str:
    assert part.traced is not None and part.traced.graph is not None
    module = GraphModule.from_mir(part.traced.graph)
    if stage == "mir":
        return module.inspect()
    sizes = {s: n for s, n in (part.sizes or {}).items() if s in module.into_graph().symbols()}
    options = CompileOptions.of({"binding": sizes, "threads": model.threads})
    return Stages(module, model.session.device.backend, options).text(stage)


def profiles_of(model: OnnxModel, given: Mapping[str, Any]) -> dict[str, Profile]:
    """Kernels of each segment of a run, by the segment's title."""
    found = {}
    for part in parts_of(model.program, given):
        if part.is_compiled:
            assert part.traced is not None and part.traced.compiled is not None
            compiled = part.traced.compiled
            named = dict(zip(compiled.input_names, part.arrays, strict=True))
            sizes = {s: (part.sizes or {})[s] for s in part.traced.explicit} or None
            found[part.title] = compiled.profile(named, sizes=sizes)
    return found
