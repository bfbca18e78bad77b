"""Compile options (binding, dispatch, profile, quantisation, threads), and model components.

A component is a variant and how it is compiled: everything that selects an executable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from enum import Enum
from functools import cached_property
from typing import Any, TypeAlias

from rlx.errors import OptionError
from rlx.ir.binding import DimBinding
from rlx.ir.phase import PhaseSchedule
from rlx.ir.quant.scheme import QuantScheme
from rlx.specialize.compile_profile import (
    CompileProfile,
    KernelDispatchConfig,
    profile_of,
    register_profile,
)
from rlx.specialize.variant import ModelVariant, make_key
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


@dataclass(frozen=True)
class CompileOptions:
    """How to compile. Symbols that `binding` does not bind follow the inputs of each run. `phases`
    is a schedule of the graph's nodes; by default it is derived."""

    binding: DimBinding = field(default_factory=DimBinding)
    dispatch: KernelDispatchConfig = field(default_factory=KernelDispatchConfig.from_environment)
    profile: CompileProfile = field(default_factory=CompileProfile)
    quant: QuantScheme | None = None
    threads: int | None = None
    phases: PhaseSchedule | None = None

    def __post_init__(self) -> None:
        if isinstance(self.quant, str):
            object.__setattr__(self, "quant", QuantScheme.parse(self.quant))
        if self.threads is not None and type(self.threads) is not int:
            raise OptionError(
                "not a number of threads", where="threads", got=repr(self.threads)[:40],
                expected="1 or more",
            )  # fmt: skip
        if not isinstance(self.binding, DimBinding):
            object.__setattr__(self, "binding", DimBinding(self.binding))
        _require_type("dispatch", self.dispatch, KernelDispatchConfig)
        _require_type("profile", self.profile, CompileProfile)
        if self.phases is not None:
            _require_type("phases", self.phases, PhaseSchedule)
            object.__setattr__(self, "phases", self.phases.copy())

    @staticmethod
    def of(value: CompileOptions | Mapping[str, Any] | None) -> CompileOptions:
        if value is None:
            return CompileOptions()
        if isinstance(value, CompileOptions):
            return value
        if isinstance(value, Mapping):
            try:
                return CompileOptions(**value)
            except TypeError as e:
                known = ", ".join(CompileOptions.__dataclass_fields__)
                raise OptionError("unknown option", got=str(e), expected=known) from e
        raise OptionError("not compile options", got=repr(value))

    def for_component(self, component: ModelComponent) -> CompileOptions:
        """These options with those of a component applied. What both give must agree."""
        binding = component.dim_binding()
        if len(self.binding) and self.binding != binding:
            raise _twice("binding", self.binding, binding, "variant.with_extra(symbol, size)")
        dispatch = component.kernel_dispatch
        if self.dispatch not in (dispatch, KernelDispatchConfig.from_environment()):
            raise _twice("dispatch", self.dispatch, dispatch, "component.with_kernel_dispatch(…)")
        quant = component.quant
        if None not in (self.quant, quant) and self.quant != quant:
            raise _twice("quant", self.quant, quant, "component.with_quant(…)")
        return replace(
            self,
            binding=binding,
            dispatch=dispatch,
            profile=self._profile_of(component.profile_key),
            quant=self.quant if quant is None else quant,
        )

    def _profile_of(self, key: str) -> CompileProfile:
        if not key or key == self.profile.profile_key:
            return self.profile
        found = profile_of(key)
        if self.profile != CompileProfile():
            raise _twice("profile", self.profile, found, "component.with_profile(…)")
        return found

    def template_material(self) -> Mapping[str, object]:
        """What a template depends on: everything but binding and threads."""
        return {
            "dispatch": self.dispatch,
            "profile": self.profile,
            "quant": None if self.quant is None else str(self.quant),
            "phases": None if self.phases is None else [(i, p.value) for i, p in self.phases],
        }

    def template_key(self) -> str:
        return self._template_key

    @cached_property
    def _template_key(self) -> str:
        return make_key("options", self.template_material())


def _require_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise OptionError(
            "wrong type", where=f"options.{name}", got=repr(value)[:80], expected=kind.__name__
        )


def _twice(name: str, ours: object, theirs: object, remedy: str) -> OptionError:
    return OptionError(
        f"the component and the options give another {name} each", where=f"options.{name}",
        got=ours, expected=theirs, hint=f"leave it to the component: {remedy}",
    )  # fmt: skip
