"""Compile profiles: fusion, precision, target and passes, from a TOML file or a preset.

fusion = "direct"            # or "fusable"
precision = "f32"            # element type of activations: f32, f16, bf16
target = "host"              # or a named CPU
batch_invariant = true       # a row's bits do not depend on the others (CPUs: always)
passes = ["simplify", …]     # default: all passes

Kernel dispatch says for each op whether a native kernel or its decomposition (`common`) runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

from rlx.errors import OptionError, did_you_mean
from rlx.ir.op import REGISTRY
from rlx.specialize.variant import ModelPhase, make_key
from rlx.support.records import dataclass
from rlx.support.settings import setting


@dataclass(frozen=True)
class CompileProfile:
    fusion: str = "direct"
    precision: str = "f32"
    target: str = "host"
    passes: tuple[str, ...] | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        _one_of("fusion", self.fusion, ("direct", "fusable"))
        _one_of("precision", self.precision, ("f32", "f16", "bf16"))
        if not isinstance(self.target, str) or not self.target:
            raise OptionError("not a target name", where="profile.target", got=repr(self.target))
        _one_of("batch_invariant", self.batch_invariant, (True, False))
        if self.passes is not None:
            if isinstance(self.passes, str) or not all(isinstance(p, str) for p in self.passes):
                raise OptionError("not a list of names", where="profile.passes", got=self.passes)
            object.__setattr__(self, "passes", tuple(self.passes))

    @staticmethod
    def from_toml(text: str, where: str = "profile") -> CompileProfile:
        import tomllib  # slow to import, and most profiles are presets

        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as e:
            raise OptionError("not TOML", where=where, got=str(e)) from e
        return CompileProfile.from_table(table, where)

    @staticmethod
    def from_table(table: Mapping[str, Any], where: str = "profile") -> CompileProfile:
        known = [f.name for f in fields(CompileProfile)]
        for name in table:
            if name not in known:
                hint = did_you_mean(name, known)
                raise OptionError(
                    "unknown setting", where=where, got=name, expected=", ".join(known), hint=hint
                )
        return CompileProfile(**table)

    @staticmethod
    def load(path: str | Path) -> CompileProfile:
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise OptionError("profile cannot be read", where=str(path), got=str(e)) from e
        return CompileProfile.from_toml(text, str(path))

    @staticmethod
    def preset(name: str, phase: str = "inference") -> CompileProfile:
        """The profile of that name for a phase: `default`, `debug` or `fusable`."""
        for key in ((name, ModelPhase.of(phase).value), (name, "*")):
            if key in PRESETS:
                return PRESETS[key]
        names = list(dict.fromkeys(known for known, _ in PRESETS))
        raise OptionError(
            "unknown profile", got=repr(name), expected=", ".join(names),
            hint=did_you_mean(str(name), names) or "`default` is for every architecture",
        )  # fmt: skip

    def key_material(self) -> Mapping[str, object]:
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        if not self.batch_invariant:
            del found["batch_invariant"]
        return found

    @property
    def profile_key(self) -> str:
        """A content hash: name and formatting of a file do not matter."""
        return make_key("profile", self)


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if not any(value is one or (isinstance(value, str) and value == one) for one in allowed):
        expected = ", ".join(map(str, allowed))
        raise OptionError(
            "unknown value", where=f"profile.{name}", got=repr(value), expected=expected
        )


_by_key: dict[str, CompileProfile] = {}


def register_profile(profile: CompileProfile) -> str:
    """Register a profile, so that components can use its key. Returns the key."""
    key = profile.profile_key
    _by_key[key] = profile
    return key


def is_registered(key: str) -> bool:
    """Whether the profile of this key is known here: registered, or a preset."""
    if key not in _by_key:
        for preset in PRESETS.values():
            register_profile(preset)
    return key in _by_key


def profile_of(key: str) -> CompileProfile:
    """The registered profile or preset of a key."""
    if not is_registered(key):
        raise OptionError(
            "unknown profile key", where="component", got=str(key)[:16],
            expected="the key of a registered profile, a preset, or the options' own profile",
            hint="register_profile(profile), or component.with_profile(profile)",
        )  # fmt: skip
    return _by_key[key]


PRESETS: dict[tuple[str, str], CompileProfile] = {
    # fused kernels; one choice is right for all architectures and phases
    ("default", "*"): CompileProfile(),
    # no op is fused, folded or simplified: each op of the model is a node that can be looked at
    ("debug", "*"): CompileProfile(fusion="fusable", passes=()),
    # blocks become primitives, which the passes fuse: the same numbers from the other lowering
    ("fusable", "*"): CompileProfile(fusion="fusable"),
}
"""Profiles by name and phase (`*`: any), no two of them equal."""


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
