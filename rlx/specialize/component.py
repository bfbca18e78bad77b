"""Model components: a variant and how it is compiled, everything that selects an executable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from enum import Enum
from functools import cached_property
from typing import Any

from rlx.errors import OptionError
from rlx.ir.binding import DimBinding
from rlx.ir.quant.scheme import QuantScheme
from rlx.specialize.compile_profile import CompileProfile, register_profile
from rlx.specialize.dispatch import KernelDispatchConfig
from rlx.specialize.key import make_key
from rlx.specialize.variant import ModelVariant
from rlx.support.records import dataclass


class CompilationMode(Enum):
    EAGER = "eager"  # compiled before the first run
    LAZY = "lazy"  # planned at load, compiled by the first run
    AOT = "aot"  # loaded from disk without fusion or code generation

    @staticmethod
    def of(value: object) -> CompilationMode:
        if isinstance(value, CompilationMode):
            return value
        try:
            return CompilationMode(str(value).lower())
        except ValueError:
            names = ", ".join(m.value for m in CompilationMode)
            raise OptionError("unknown compilation mode", got=repr(value), expected=names) from None


@dataclass(frozen=True)
class LayerComposition:
    """A layer stack: a single layer, `count` equal ones, or a pair that alternates."""

    kind: str
    layers: tuple[str, ...]
    count: int

    @staticmethod
    def single(layer: str) -> LayerComposition:
        return LayerComposition("single", (layer,), 1)

    @staticmethod
    def homogeneous(layer: str, count: int) -> LayerComposition:
        if count < 1:
            raise OptionError("a stack has at least one layer", got=count)
        return LayerComposition("homogeneous", (layer,), count)

    @staticmethod
    def pair(first: str, second: str) -> LayerComposition:
        return LayerComposition("pair", (first, second), 2)

    def key_material(self) -> Mapping[str, object]:
        return {"kind": self.kind, "layers": self.layers, "count": self.count}

    @property
    def key(self) -> str:
        """A content hash. Reading it registers the composition, so that components can use it."""
        key = make_key("composition", self)
        _compositions[key] = self
        return key

    @staticmethod
    def of_key(key: str) -> LayerComposition | None:
        """The composition of a key that was read in this process, else None."""
        return _compositions.get(key)

    def __str__(self) -> str:
        times = f" × {self.count}" if self.kind == "homogeneous" else ""
        return " + ".join(self.layers) + times


_compositions: dict[str, LayerComposition] = {}


@dataclass(frozen=True)
class ModelComponent:
    """A variant and how to compile it. Every field is applied, not only hashed."""

    variant: ModelVariant
    kernel_dispatch: KernelDispatchConfig = field(
        default_factory=KernelDispatchConfig.from_environment
    )
    compilation_mode: CompilationMode = CompilationMode.EAGER
    profile_key: str = ""
    quant: QuantScheme | None = None
    layer_composition_key: str = ""

    def with_variant(self, variant: ModelVariant) -> ModelComponent:
        return replace(self, variant=variant)

    def with_kernel_dispatch(self, config: KernelDispatchConfig) -> ModelComponent:
        return replace(self, kernel_dispatch=config)

    def with_compilation_mode(self, mode: CompilationMode | str) -> ModelComponent:
        return replace(self, compilation_mode=CompilationMode.of(mode))

    def with_profile_key(self, key: str) -> ModelComponent:
        return replace(self, profile_key=key)

    def with_profile(self, profile: CompileProfile) -> ModelComponent:
        """Compile with this profile; the key of the component depends on it."""
        return self.with_profile_key(register_profile(profile))

    def with_quant(self, scheme: QuantScheme | str | None) -> ModelComponent:
        return replace(self, quant=QuantScheme.parse(scheme) if isinstance(scheme, str) else scheme)

    def with_layer_composition_key(self, key: str) -> ModelComponent:
        return replace(self, layer_composition_key=key)

    def dim_binding(self) -> DimBinding:
        return self.variant.dim_binding()

    def key_material(self) -> Mapping[str, Any]:
        return {
            "variant": self.variant,
            "kernel_dispatch": self.kernel_dispatch,
            "compilation_mode": self.compilation_mode.value,
            "profile": self.profile_key,
            "quant": None if self.quant is None else str(self.quant),
            "layer_composition": self.layer_composition_key,
        }

    def cache_key(self) -> str:
        return self._key

    @cached_property
    def _key(self) -> str:  # computed once: a cache hit must not cost a hash
        return make_key("component", self)

    def aot_disk_base(self) -> str:
        """The stem of artifact names: `rlx_` and 16 hex digits of the key."""
        return f"rlx_{self.cache_key()[:16]}"
