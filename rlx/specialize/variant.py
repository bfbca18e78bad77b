"""Model variants (batch, sequence length and phase of one use of a model), and cache keys.

A key is the SHA-256 of a tagged, length-prefixed encoding, computed here and nowhere else.
Different contents have different encodings, and equal contents the same one in every process,
machine and Python version.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Protocol, runtime_checkable

from rlx.errors import OptionError, did_you_mean
from rlx.ir.binding import WELL_KNOWN, DimBinding, Size, UpTo, check_size, symbol_name
from rlx.ir.dim import Expr
from rlx.support.records import dataclass


@runtime_checkable
class Keyed(Protocol):
    """An object that lists what its key depends on."""

    def key_material(self) -> Mapping[str, object]: ...


def encode(value: object) -> bytes:
    """Encode as tag, length, contents. 1, 1.0, True and "1" differ; mappings are sorted."""
    if value is None:
        return b"n"
    if value is True or value is False:
        return b"t" if value else b"f"
    if isinstance(value, int):
        return _framed(b"i", str(value).encode())
    if isinstance(value, float):
        return b"d" + struct.pack("<d", value)
    if isinstance(value, str):
        return _framed(b"s", value.encode())
    if isinstance(value, bytes):
        return _framed(b"b", value)
    if isinstance(value, (tuple, list)):
        return _framed(b"l", b"".join(map(encode, value)))
    if isinstance(value, (set, frozenset)):
        return _framed(b"u", b"".join(sorted(map(encode, value))))
    if isinstance(value, Mapping):
        items = sorted((encode(k), encode(v)) for k, v in value.items())
        return _framed(b"m", b"".join(k + v for k, v in items))
    if isinstance(value, Keyed):
        name = type(value).__name__
        return _framed(b"k", encode(name) + encode(value.key_material()))
    raise OptionError("cannot be part of a key", got=f"{value!r} ({type(value).__name__})")


def _framed(tag: bytes, contents: bytes) -> bytes:
    return tag + str(len(contents)).encode() + b":" + contents


def make_key(kind: str, material: object) -> str:
    """The SHA-256 of `kind` and `material`, as 64 hex digits."""
    return hashlib.sha256(encode(("rlx", kind, material))).hexdigest()


class ModelPhase(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODER = "encoder"
    INFERENCE = "inference"

    @staticmethod
    def of(value: object) -> ModelPhase:
        """The phase itself, or the one of that name."""
        try:
            return value if isinstance(value, ModelPhase) else ModelPhase(str(value).lower())
        except ValueError:
            names = [p.value for p in ModelPhase]
            raise OptionError(
                "unknown model phase", got=repr(value), expected=", ".join(names),
                hint=did_you_mean(str(value), names),
            ) from None  # fmt: skip


@dataclass(frozen=True)
class ModelVariant:
    """Sizes and phase of one use. A size may be a bounded dynamic dimension (`UpTo(4096)`).

    `past_seq` None leaves that symbol unbound, for models without one. Extras are sorted by symbol:
    variants that bind the same sizes are equal.
    """

    batch: Size = 1
    seq: Size = 1
    past_seq: Size | None = 0
    phase: ModelPhase = ModelPhase.INFERENCE
    extra: tuple[tuple[str, Size], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "phase", ModelPhase.of(self.phase))
        object.__setattr__(self, "extra", _extras(self.extra))
        for symbol, size in (("batch", self.batch), ("seq", self.seq), *self.extra):
            check_size(symbol, size)
        if self.past_seq is not None:
            check_size("past_seq", self.past_seq)

    @staticmethod
    def prefill(batch: Size, seq: Size) -> ModelVariant:
        return ModelVariant(batch, seq, 0, ModelPhase.PREFILL)

    @staticmethod
    def decode(batch: Size, past_seq: Size | None, new_tokens: Size = 1) -> ModelVariant:
        return ModelVariant(batch, new_tokens, past_seq, ModelPhase.DECODE)

    @staticmethod
    def encoder(batch: Size, seq: Size) -> ModelVariant:
        return ModelVariant(batch, seq, 0, ModelPhase.ENCODER)

    def with_extra(self, symbol: str | Expr, size: Size) -> ModelVariant:
        """The same variant with one more symbol bound."""
        return replace(self, extra=(*self.extra, (symbol_name(symbol), size)))

    def dim_binding(self) -> DimBinding:
        """Decode binds batch, past_seq, and seq to the new tokens; other phases batch and seq."""
        binding = DimBinding(batch=self.batch, seq=self.seq)
        if self.phase is ModelPhase.DECODE and self.past_seq is not None:
            binding.set("past_seq", self.past_seq)
        for symbol, size in self.extra:
            binding.set(symbol, size)
        return binding

    def key_material(self) -> Mapping[str, object]:
        return {
            "batch": _sized(self.batch),
            "seq": _sized(self.seq),
            "past_seq": _sized(self.past_seq),
            "phase": self.phase.value,
            "extra": {symbol: _sized(size) for symbol, size in self.extra},
        }

    def cache_key(self) -> str:
        return make_key("variant", self)

    def __str__(self) -> str:
        past = f" past {self.past_seq}" if self.phase is ModelPhase.DECODE else ""
        more = "".join(f" {k}={v}" for k, v in self.extra)
        return f"{self.phase.value}:{self.batch}x{self.seq}{past}{more}"


def _extras(
    given: Mapping[str, Size] | Iterable[tuple[str | Expr, Size]],
) -> tuple[tuple[str, Size], ...]:
    """Symbol and size of each extra, sorted; each symbol once, and none that the variant has."""
    found: dict[str, Size] = {}
    for symbol, size in given.items() if isinstance(given, Mapping) else given:
        name = symbol_name(symbol)
        if name in found or name in WELL_KNOWN:
            raise OptionError(
                "symbol already bound", where="extra", got=name,
                expected=f"a symbol other than {', '.join([*WELL_KNOWN, *found])}",
            )  # fmt: skip
        found[name] = size
    return tuple(sorted(found.items()))


def _sized(size: Size | None) -> object:
    return ("up to", size.bound) if isinstance(size, UpTo) else size
