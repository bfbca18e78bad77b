"""Compile options: binding, kernel dispatch, profile, quantisation, threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

from rlx.errors import OptionError
from rlx.ir.binding import DimBinding
from rlx.ir.quant.scheme import QuantScheme
from rlx.specialize.compile_profile import CompileProfile, profile_of
from rlx.specialize.component import ModelComponent
from rlx.specialize.dispatch import KernelDispatchConfig
from rlx.specialize.key import make_key
from rlx.support.records import dataclass


@dataclass(frozen=True)
class CompileOptions:
    """How to compile. Symbols that `binding` does not bind follow the inputs of each run."""

    binding: DimBinding = field(default_factory=DimBinding)
    dispatch: KernelDispatchConfig = field(default_factory=KernelDispatchConfig.from_environment)
    profile: CompileProfile = field(default_factory=CompileProfile)
    quant: QuantScheme | None = None
    threads: int | None = None

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
        """These options with those of a component applied."""
        key = component.profile_key
        own = not key or key == self.profile.profile_key
        return replace(
            self,
            binding=component.dim_binding(),
            dispatch=component.kernel_dispatch,
            profile=self.profile if own else profile_of(key),
            quant=component.quant if component.quant is not None else self.quant,
        )

    def template_material(self) -> Mapping[str, object]:
        """What a template depends on: everything but binding and threads."""
        return {
            "dispatch": self.dispatch,
            "profile": self.profile,
            "quant": None if self.quant is None else str(self.quant),
        }

    def template_key(self) -> str:
        return make_key("options", self.template_material())
