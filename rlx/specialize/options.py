"""Compile options: binding, kernel dispatch, profile, quantisation, threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from functools import cached_property
from typing import Any

from rlx.errors import OptionError
from rlx.ir.binding import DimBinding
from rlx.ir.phase import PhaseSchedule
from rlx.ir.quant.scheme import QuantScheme
from rlx.specialize.compile_profile import CompileProfile, profile_of
from rlx.specialize.component import ModelComponent
from rlx.specialize.dispatch import KernelDispatchConfig
from rlx.specialize.key import make_key
from rlx.support.records import dataclass


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
