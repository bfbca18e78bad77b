"""Kernels changed by hand: their LLVM IR or assembly, to run in place of what RLX made.

A file has a line for each kernel, `; kernel KEY LANGUAGE TITLE`, and its code below. KEY is that of
the unit which the code came from, LANGUAGE is `llvm OPT LEVEL` (as in `jit.Unit`) or `asm`.
"""

from __future__ import annotations

import pickle
import re
import subprocess
import sys

from rlx.errors import CodegenError, ParseError
from rlx.llvm.jit import Kernel, Unit, compile_unit
from rlx.llvm.target import Target
from rlx.records import dataclass

_HEAD = re.compile(r"^; kernel ([0-9a-f]{64}) (?:(asm)|llvm (\w+) (\d))(?: .*)?$", re.MULTILINE)
_ASSEMBLE = "import pickle, sys; sys.stdout.buffer.write(pickle.load(sys.stdin.buffer).compile())"


@dataclass(frozen=True)
class EditedKernel:
    """Code for the unit of that key."""

    key: str
    text: str
    is_assembly: bool
    opt: str = "none"
    level: int = 2

    def compile(self, target: Target) -> Kernel:
        if not self.is_assembly:
            return compile_unit(Unit(self.text, target, self.opt, self.level))
        unit = Unit(_as_module(self.text), target)
        return Kernel(unit.key, _assembled(unit))


def write_kernel(unit: Unit, title: str, *, assembly: bool) -> str:
    """A kernel as `parse_kernels` reads it."""
    kind = "asm" if assembly else f"llvm {unit.opt} {unit.level}"
    return f"; kernel {unit.key} {kind} {title}\n{unit.assembly() if assembly else unit.text}"


def is_code(text: str) -> bool:
    """Whether a file holds kernels, and not a graph."""
    return text.startswith("; kernel ")


def parse_kernels(text: str, where: str) -> list[EditedKernel]:
    heads = [*_HEAD.finditer(text)]
    if not heads or heads[0].start() != 0 or len(heads) != len(re.findall("(?m)^; kernel ", text)):
        raise ParseError(
            "a kernel without its line", where=where,
            expected="; kernel KEY llvm OPT LEVEL, or ; kernel KEY asm",
            hint="leave the lines that begin with `; kernel` as they are",
        )  # fmt: skip
    ends = [*(h.start() for h in heads[1:]), len(text)]
    return [
        EditedKernel(
            h[1], text[h.end() + 1 : end], h[2] is not None, h[3] or "none", int(h[4] or 2)
        )
        for h, end in zip(heads, ends, strict=True)
    ]


def _as_module(assembly: str) -> str:
    """A module that is all assembly."""

    def quoted(line: str) -> str:
        return re.sub(r'[\\"\x00-\x1f\x7f-\U0010ffff]', _escaped, line)

    return "".join(f'module asm "{quoted(line)}"\n' for line in assembly.splitlines())


def _escaped(match: re.Match[str]) -> str:
    return "".join(f"\\{byte:02X}" for byte in match[0].encode())


def _assembled(unit: Unit) -> bytes:
    """The object, made by another process: a fault in the text ends the one that assembles it."""
    done = subprocess.run(
        [sys.executable, "-c", _ASSEMBLE],
        input=pickle.dumps(unit),
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        raise CodegenError(
            "LLVM refuses the assembly", where="llvm", got=done.stderr.decode().strip()
        )
    return done.stdout
