"""Kernel dispatch: a native kernel or a decomposition (`common`), for each op."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from rlx.errors import OptionError, did_you_mean
from rlx.ir.op import REGISTRY
from rlx.support.records import dataclass
from rlx.support.settings import setting


class KernelDispatchPolicy(Enum):
    PREFER_NATIVE = "prefer_native"
    FORCE_COMMON = "force_common"
    FORCE_NATIVE = "force_native"


KernelPolicy = KernelDispatchPolicy


@dataclass(frozen=True)
class KernelDispatchConfig:
    """Precedence: force_native_kinds, then force_common_kinds, then the policy."""

    policy: KernelDispatchPolicy = KernelDispatchPolicy.PREFER_NATIVE
    force_common_kinds: frozenset[str] = frozenset()
    force_native_kinds: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", parse_policy(self.policy))
        for field in ("force_common_kinds", "force_native_kinds"):
            object.__setattr__(self, field, _kinds(getattr(self, field)))

    @staticmethod
    def from_environment() -> KernelDispatchConfig:
        """`RLX_KERNEL_DISPATCH=common|native` sets the policy where none is given."""
        wanted = setting("RLX_KERNEL_DISPATCH")
        return KernelDispatchConfig(parse_policy(wanted)) if wanted else KernelDispatchConfig()

    def choose(self, kind: str, has_native: bool, has_common: bool) -> str:
        """What runs an op: its `native` kernel, its decomposition (`common`), or `unsupported`.

        PREFER_NATIVE takes the kernel if there is one, else the decomposition. A forced choice that
        does not exist is unsupported; but FORCE_COMMON leaves primitive ops native, because
        decompositions consist of them.
        """
        if kind in self.force_native_kinds:
            return "native" if has_native else "unsupported"
        if kind in self.force_common_kinds:
            return "common" if has_common else "unsupported"
        if self.policy is KernelDispatchPolicy.FORCE_NATIVE:
            return "native" if has_native else "unsupported"
        if self.policy is KernelDispatchPolicy.FORCE_COMMON and has_common:
            return "common"
        if has_native:
            return "native"
        return "common" if has_common else "unsupported"

    def key_material(self) -> Mapping[str, object]:
        return {
            "policy": self.policy.value,
            "common": self.force_common_kinds,
            "native": self.force_native_kinds,
        }


_SHORT = {"common": KernelDispatchPolicy.FORCE_COMMON, "native": KernelDispatchPolicy.FORCE_NATIVE}


def parse_policy(value: object) -> KernelDispatchPolicy:
    if isinstance(value, KernelDispatchPolicy):
        return value
    text = str(value).lower()
    if text in _SHORT:
        return _SHORT[text]
    try:
        return KernelDispatchPolicy(text)
    except ValueError:
        names = ", ".join([*_SHORT, *(p.value for p in KernelDispatchPolicy)])
        raise OptionError("unknown kernel policy", got=repr(value), expected=names) from None


def _kinds(kinds: Iterable[str]) -> frozenset[str]:
    if isinstance(kinds, str):
        raise OptionError("expected a set of op names", got=repr(kinds), hint=f"[{kinds!r}]")
    found = frozenset(kinds)
    ops = [name for name, cls in REGISTRY.items() if not cls.is_block] if found else []
    unknown = sorted(str(k) for k in found if k not in ops)
    if unknown:
        raise OptionError(
            "unknown ops", where="kernel dispatch", got=", ".join(unknown),
            expected="names of MIR ops (docs/ops.md)",
            hint=did_you_mean(unknown[0], ops) or "register an op before it is named here",
        )  # fmt: skip
    return found
