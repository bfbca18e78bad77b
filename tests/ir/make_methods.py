"""Writes rlx/ir/methods.pyi: the builder methods of every op and block, typed.

    python tests/ir/make_methods.py

The registry is the truth; a test compares what this renders with the file. Ops of a backend's own
layouts are left out: nobody builds them by hand.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import rlx.ir.module  # noqa: F401  (registers every op and block)
from rlx.ir.hir import REGISTERED
from rlx.ir.op import REGISTRY, Op
from rlx.ir.operators import Operators

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "rlx" / "ir" / "methods.pyi"
PRIVATE = ("pack", "qpack")  # groups of ops that only passes and backends make

HEADER = '''"""Signatures of the builder methods, for type checkers and editors.

Generated from the registry of ops by `python tests/ir/make_methods.py`: do not edit by hand.
"""

# mypy: disable-error-code="override"

from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict, Unpack, overload

import numpy as np

from rlx.ir.attrs import Body, MaskKind
from rlx.ir.dim import DimLike
from rlx.ir.dtype import DTypeLike
from rlx.ir.graph import Graph
from rlx.ir.module import GraphModule
from rlx.ir.node import Value
from rlx.ir.operators import Operators
from rlx.ir.quant.scheme import QuantScheme
from rlx.ir.shape import ShapeLike

Tensor: TypeAlias = Operators | float | np.ndarray[Any, Any] | np.generic | list[Any]
BodyLike: TypeAlias = Body | Graph | GraphModule

class Result(TypedDict, total=False):
    """What every builder takes besides."""

    name: str  # of the result
    shape: ShapeLike  # the expected one, which is then checked
'''

TYPES = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "object": "object",
    "Dim": "DimLike",
    "DType": "DTypeLike",
    "MaskKind": "MaskKind | str",
    "QuantScheme": "QuantScheme | str",
    "Body": "BodyLike",
    "tuple[int, ...]": "int | Sequence[int]",
    "tuple[int | None, ...]": "Sequence[int | None]",
    "tuple[Dim, ...]": "DimLike | Sequence[DimLike]",
}
RESULTS = {"Shape": "Value", "tuple[Shape, Shape]": "tuple[Value, Value]"}


# a second form of a builder: what it takes after the first tensor, and what it gives
FORMS = {
    "sample": (
        "top_k: int = 0, top_p: float = 1.0, temperature: float = 1.0, seed: int = 0, *, "
        "min_p: float = 0.0, **result: Unpack[Result]",
        "Value",
    )
}


def accepted(annotation: str) -> str:
    """What an attribute of this annotation may be given as."""
    if annotation.endswith(" | None"):
        return f"{accepted(annotation.removesuffix(' | None'))} | None"
    return TYPES[annotation]


def result(cls: type[Op]) -> str:
    """What the builder gives: a value, several, or what only the operands tell."""
    made = inspect.unwrap(getattr(cls, "fusable", None) or cls.infer)
    found = str(inspect.get_annotations(made).get("return", ""))
    return RESULTS.get(found.replace("Value", "Shape"), "Any")


def tensors(cls: type[Op]) -> Iterator[str]:
    for i, name in enumerate(cls.input_names):
        yield f"{name}: Tensor" + (" | None = None" if i >= cls.num_required else "")


def attributes(cls: type[Op]) -> Iterator[str]:
    optional = False  # what follows an attribute with a default may be left out of the call too
    for field, annotation in cls.annotations.items():
        if cls.is_block and field.startswith("has_"):
            continue
        keyword_only = cls.variadic or bool(cls.num_optional)
        optional = not keyword_only and (optional or field in cls.defaults)
        default = cls.defaults.get(field, ...)
        plain = isinstance(default, (int, float, str, tuple, type(None))) and default == default
        shown = repr(default) if plain and "inf" not in repr(default) else "..."
        has_default = optional or field in cls.defaults
        yield f"{field}: {accepted(annotation)}" + (f" = {shown}" if has_default else "")


def signature(cls: type[Op], *, of_value: bool = False) -> str:
    """The parameters; those of a value's method lack the first tensor."""
    parts = list(attributes(cls))
    if cls.variadic:
        parts = ["*tensors: Any", *parts]
    else:
        # after tensors that may be left out, attributes are named
        apart = ["*"] if cls.num_optional and parts else []
        parts = [*list(tensors(cls))[of_value:], *apart, *parts]
    if "shape" in cls.fields:  # there it is what the op makes
        parts += ["*", "name: str = ''"]
    else:
        parts.append("**result: Unpack[Result]")
    return ", ".join(["self", *parts])


def method(name: str, cls: type[Op], *, of_value: bool = False) -> str:
    doc = (inspect.getdoc(cls) or "").partition("\n\n")[0]
    first = f"{' '.join(doc.split()).rstrip('.')} [{cls.__module__}.{cls.__qualname__}]"
    lines = textwrap.wrap(first, 84, break_on_hyphens=False)
    lines[0], lines[-1] = f'"""{lines[0]}', f'{lines[-1]}"""'
    if len(lines) == 1:
        lines = [f'"""{first}"""']
    body = "\n".join(f"    {line}" for line in lines)
    head = f"def {name}({signature(cls, of_value=of_value)}) -> {result(cls)}:"
    forms = [f"{head}\n{body}"]
    if name in FORMS:
        takes, gives = FORMS[name]
        first = "" if of_value else f"{cls.input_names[0]}: Tensor, "
        forms.append(f"def {name}(self, {first}{takes}) -> {gives}:\n{body}")
        forms = [f"@overload\n{form}" for form in forms]
    return textwrap.indent("\n".join(forms), "    ")


def public() -> Iterator[type[Op]]:
    for name in sorted(REGISTRY):
        cls = REGISTRY[name]
        ours = cls.__module__.startswith("rlx.ir.")
        if ours and not cls.is_source and not cls.group.startswith(PRIVATE):
            yield cls


def render() -> str:
    ops = [c for c in public() if not c.is_block]
    by_name: dict[str, type[Op]] = {c.name: c for c in ops} | dict(sorted(REGISTERED.items()))
    on_values = {n: c for n, c in by_name.items() if c.num_required and n not in vars(Operators)}
    parts = [HEADER, 'class OpMethods:\n    """A method for every MIR op."""\n']
    parts += [method(c.name, c) for c in ops]
    parts.append('class BlockMethods(OpMethods):\n    """A method for every HIR block."""\n')
    parts += [method(n, c) for n, c in sorted(REGISTERED.items())]
    parts.append('class ValueMethods:\n    """Every op and block, its first tensor the value."""\n')
    parts += [method(n, c, of_value=True) for n, c in sorted(on_values.items())]
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(STUB), "-"]
    text = "\n".join(parts) + "\n"
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


if __name__ == "__main__":
    STUB.write_text(render(), encoding="utf-8")
