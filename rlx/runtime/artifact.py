"""An artifact: one compiled variant of a model, which runs without passes and without a compiler.

Its parts are the `stamp` of the compiler, read before all others, `about` (device, key material,
signature, binding, manifest, compile profile), the plan as LIR, and the device's own parts:
program, object code and target.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from rlx.backends.base import Backend, Executable, Parts, PlanInfo
from rlx.errors import FormatError, OptionError
from rlx.ir import serial
from rlx.ir.binding import DimBinding, UpTo
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.ir.phase import Phase
from rlx.ir.serial.reader import Reader
from rlx.ir.serial.writer import Writer
from rlx.runtime.variants import Signature
from rlx.specialize.compile_profile import CompileProfile
from rlx.specialize.manifest import BindingManifest, ManifestEntry
from rlx.specialize.options import CompileOptions
from rlx.support.records import dataclass

ABOUT, LIR, STAMP = "about", "lir", "stamp"
_COMPILER = ("ir", "passes", "specialize", "loops", "llvm", "backends")


@cache
def compiler_stamp() -> str:
    """The identity of this compiler: a digest of its source, so that every edit changes it."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in _COMPILER:
        for path in _sources(os.path.join(root, folder)):
            with open(path, "rb", buffering=0) as file:
                digest.update(file.read())
    return digest.hexdigest()


def _sources(folder: str) -> Iterator[str]:
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        if entry.is_dir():
            yield from _sources(entry.path)
        elif entry.name.endswith(".py"):
            yield entry.path


@dataclass
class Artifact:
    """A stored variant. `material` is everything that its cache key hashes."""

    device: str
    stamp: str
    material: str  # hexadecimal
    signature: Signature
    binding: DimBinding
    manifest: BindingManifest
    output_phases: tuple[Phase, ...]
    parts: Parts  # of the device: see `Backend.export`
    plan: bytes  # LIR
    profile: CompileProfile  # that it was compiled with

    @staticmethod
    def of(
        device: str, signature: Signature, binding: DimBinding, lir: Lir, parts: Parts,
        profile: CompileProfile, material: bytes = b"",
    ) -> Artifact:  # fmt: skip
        info = PlanInfo.of(lir)
        return Artifact(
            device, compiler_stamp(), material.hex(), signature, binding, info.manifest,
            tuple(info.output_phases), parts, serial.to_bytes(lir), profile,
        )  # fmt: skip

    # -- bytes ------------------------------------------------------------------------------------

    def to_parts(self) -> dict[str, bytes]:
        s = self.signature
        about = (
            self.device, self.material, s.name,
            *(tuple(table.items()) for table in (s.inputs, s.params, s.states)), s.output_names,
            tuple(self.binding.sizes.items()), tuple(self.binding.live.items()),
            self.manifest.arena_size, tuple(_row(e) for e in self.manifest),
            tuple(p.value for p in self.output_phases), tuple(self.profile.key_material().items()),
        )  # fmt: skip
        stamp = self.stamp.encode()
        return {STAMP: stamp, ABOUT: Writer().value(about), LIR: self.plan, **self.parts}

    @staticmethod
    def from_parts(parts: Mapping[str, bytes]) -> Artifact:
        """Read an artifact; its plan and code stay bytes until they are used."""
        rest = dict(parts)
        try:
            stamp, about, plan = (rest.pop(name) for name in (STAMP, ABOUT, LIR))
        except KeyError as error:
            raise FormatError("a part is missing", where="artifact", expected=error) from None
        reader = Reader(about)
        fields = reader.value()
        reader.finish()
        device, material, name, *tables, sizes, live, arena, rows, phases, profile = fields
        inputs, params, states, outputs = tables
        binding = DimBinding(dict(sizes))
        for symbol, bound in live:
            binding.set(symbol, UpTo(bound))
        manifest = BindingManifest(tuple(_entry(row) for row in rows), arena)
        signature = Signature(name, dict(inputs), dict(params), dict(states), outputs)
        done = tuple(Phase.of(p) for p in phases)
        return Artifact(
            device, stamp.decode(), material, signature, binding, manifest, done, rest, plan,
            CompileProfile.from_table(dict(profile), "artifact"),
        )  # fmt: skip

    # -- running ----------------------------------------------------------------------------------

    @cached_property
    def lir(self) -> Lir:
        """The plan, read on first use: runs do without it."""
        found: Any = serial.from_bytes(self.plan, "artifact")
        if not isinstance(found, Lir):
            raise FormatError("not a plan", where="artifact", got=type(found).__name__)
        return found

    def executable(self, backend: Backend, options: CompileOptions) -> Executable:
        info = PlanInfo(self.manifest, self.output_phases, lambda: self.lir)
        return backend.restore(self.parts, info, options)


def _row(entry: ManifestEntry) -> tuple[Any, ...]:
    shape = entry.shape
    numbers = (entry.num_elements, entry.num_bytes, entry.arena_offset, entry.arena_size)
    return (entry.role, entry.name, shape, *numbers, entry.is_view)


def _entry(row: tuple[Any, ...]) -> ManifestEntry:
    return ManifestEntry(*row)


@dataclass
class StoredVariant:
    """The provider of a compiled graph that has one variant, loaded from disk."""

    artifact: Artifact
    backend: Backend
    options: CompileOptions

    @property
    def signature(self) -> Signature:
        return self.artifact.signature

    @property
    def binding(self) -> DimBinding:
        return self.artifact.binding

    @property
    def dynamic_dims(self) -> dict[str, int]:
        return self.artifact.binding.live

    @property
    def open_symbols(self) -> frozenset[str]:
        return frozenset()

    @property
    def prepare(self) -> Graph | None:
        return self.artifact.lir.prepare

    def specialize(self, open_sizes: Mapping[str, int]) -> Executable:
        if open_sizes:
            raise OptionError("an artifact holds one variant", got=dict(open_sizes))
        return self.artifact.executable(self.backend, self.options)
