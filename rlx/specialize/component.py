"""Model components: a variant and how it is compiled, everything that selects an executable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from enum import Enum
from functools import cached_property
from typing import Any, TypeAlias

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


Layer: TypeAlias = "str | LayerComposition"


@dataclass(frozen=True)
class LayerComposition:
    """A layer stack: a single layer, `count` equal ones, or a pair that alternates.

    A layer is a name, or a stack itself: `homogeneous(pair("attention", "mamba"), 12)`.
    """

    kind: str
    layers: tuple[Layer, ...]
    count: int

    @staticmethod
    def single(layer: Layer) -> LayerComposition:
        return LayerComposition("single", _layers(layer), 1)

    @staticmethod
    def homogeneous(layer: Layer, count: int) -> LayerComposition:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise OptionError("a stack has at least one layer", got=repr(count))
        return LayerComposition("homogeneous", _layers(layer), count)

    @staticmethod
    def pair(first: Layer, second: Layer) -> LayerComposition:
        return LayerComposition("pair", _layers(first, second), 2)

    def counts(self) -> dict[str, int]:
        """How often each layer occurs in the whole stack."""
        times = self.count if self.kind == "homogeneous" else 1
        found: dict[str, int] = {}
        for layer in self.layers:
            inner = layer.counts() if isinstance(layer, LayerComposition) else {layer: 1}
            for name, count in inner.items():
                found[name] = found.get(name, 0) + times * count
        return found

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
        shown = [f"({x})" if isinstance(x, LayerComposition) else x for x in self.layers]
        return " + ".join(shown) + times


def _layers(*layers: object) -> tuple[Layer, ...]:
    for layer in layers:
        if not isinstance(layer, LayerComposition) and not (isinstance(layer, str) and layer):
            raise OptionError(
                "not a layer", where="LayerComposition", got=repr(layer),
                expected="a name or a LayerComposition",
            )  # fmt: skip
    return layers  # type: ignore[return-value]


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "compilation_mode", CompilationMode.of(self.compilation_mode))
        if isinstance(self.quant, str):
            object.__setattr__(self, "quant", QuantScheme.parse(self.quant))
        wanted = {
            "variant": ModelVariant, "kernel_dispatch": KernelDispatchConfig, "profile_key": str,
            "quant": QuantScheme | None, "layer_composition_key": str,
        }  # fmt: skip
        for name, kind in wanted.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                shown = getattr(kind, "__name__", str(kind))
                raise OptionError(
                    "wrong type", where=f"component.{name}", got=repr(value)[:80], expected=shown
                )

    def with_variant(self, variant: ModelVariant) -> ModelComponent:
        return replace(self, variant=variant)

    def with_kernel_dispatch(self, config: KernelDispatchConfig) -> ModelComponent:
        return replace(self, kernel_dispatch=config)

    def with_compilation_mode(self, mode: CompilationMode | str) -> ModelComponent:
        return replace(self, compilation_mode=CompilationMode.of(mode))

    def with_layer_composition(self, layers: LayerComposition) -> ModelComponent:
        """Compile this layer stack; the key of the component depends on it."""
        return self.with_layer_composition_key(layers.key)

    def with_profile_key(self, key: str) -> ModelComponent:
        return replace(self, profile_key=key)

    def with_profile(self, profile: CompileProfile) -> ModelComponent:
        """Compile with this profile; the key of the component depends on it."""
        return self.with_profile_key(register_profile(profile))

    def with_quant(self, scheme: QuantScheme | str | None) -> ModelComponent:
        return replace(self, quant=scheme)  # type: ignore[arg-type]  # parsed if it is a name

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
