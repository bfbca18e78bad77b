"""Quant presets: which scheme each tensor of a model gets. GGUF files are named after them.

A preset such as Q4_K_M is a scheme (Q4_K) with exceptions, where a few more bits pay:

    the output matrix, or the tied embedding table       Q6_K, unless all are Q8_0 or floats
    attn_v and ffn_down of Q4_K_M and Q5_K_M             Q6_K in the first and the last eighth of
                                                         the layers and every third between
    those of Q4_K_S                                      Q5_K in the first 4, or the first eighth
    those of Q3_K and Q2_K, attn_output, attn_qkv        a bit or two more: `_EXTRA`

Norms, biases, positions, routers and 1-D tensors are not quantised. Rows that are not a
multiple of 256 (the superblock) get the next scheme with blocks of 32, others f16.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from rlx.errors import OptionError, close_names
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme
from rlx.support.records import dataclass

# name: scheme, and the number that `general.file_type` has for it
_PRESETS = {
    "F32": ("F32", 0),
    "F16": ("F16", 1),
    "BF16": ("BF16", 32),
    "Q8_0": ("Q8_0", 7),
    "Q6_K": ("Q6_K", 18),
    "Q5_K_M": ("Q5_K", 17),
    "Q5_K_S": ("Q5_K", 16),
    "Q5_1": ("Q5_1", 9),
    "Q5_0": ("Q5_0", 8),
    "Q4_K_M": ("Q4_K", 15),
    "Q4_K_S": ("Q4_K", 14),
    "Q4_1": ("Q4_1", 3),
    "Q4_0": ("Q4_0", 2),
    "Q3_K_L": ("Q3_K", 13),
    "Q3_K_M": ("Q3_K", 12),
    "Q3_K_S": ("Q3_K", 11),
    "Q2_K": ("Q2_K", 10),
}
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
NAMES = tuple(_PRESETS)

_SAMPLES = "Q4_K_M, Q8_0, int8, int4_b32, …"
_NARROWER = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_NOT_QUANTISED = re.compile(
    r"_norm\.weight$|^position_embd|^token_types|ffn_gate_inp|ssm_conv1d|^rope_(freqs|factors)"
)
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+?)(?:_exps|_shexp)?\.weight")


def _more_bits(i: int, n: int) -> bool:
    """The first and the last eighth of the layers, and every third between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _always(i: int, n: int) -> bool:
    return True


# preset, part: scheme, and in which layers (number, count)
_EXTRA: dict[tuple[str, str], tuple[str, Callable[[int, int], bool]]] = {
    ("Q2_K", "attn_v"): ("Q3_K", _always),
    ("Q2_K", "ffn_down"): ("Q3_K", _always),
    ("Q2_K", "attn_output"): ("Q3_K", _always),
    ("Q3_K_M", "attn_output"): ("Q4_K", _always),
    ("Q3_K_M", "attn_qkv"): ("Q4_K", _always),
    ("Q3_K_L", "attn_v"): ("Q5_K", _always),
    ("Q3_K_L", "ffn_down"): ("Q5_K", _always),
    ("Q3_K_L", "attn_output"): ("Q5_K", _always),
    ("Q3_K_L", "attn_qkv"): ("Q4_K", _always),
    ("Q4_K_S", "attn_v"): ("Q5_K", lambda i, n: i < 4),
    ("Q4_K_S", "ffn_down"): ("Q5_K", lambda i, n: i < n // 8),
    ("Q4_K_M", "attn_v"): ("Q6_K", _more_bits),
    ("Q4_K_M", "ffn_down"): ("Q6_K", _more_bits),
    ("Q4_K_M", "attn_qkv"): ("Q5_K", _always),
    ("Q5_K_M", "attn_v"): ("Q6_K", _more_bits),
    ("Q5_K_M", "ffn_down"): ("Q6_K", _more_bits),
    ("Q5_K_M", "attn_qkv"): ("Q6_K", _always),
}


@dataclass(frozen=True)
class QuantPreset:
    """A named preset. Get one from `parse`."""

    name: str
    scheme: QuantScheme  # of tensors without a rule of their own
    file_type: int | None  # None: GGUF has no number for it

    @staticmethod
    def parse(name: str) -> QuantPreset:
        found = name.strip().upper()
        found = _ALIASES.get(found, found)
        if found not in _PRESETS:
            raise OptionError(
                "no such quant preset", where="type", got=repr(name),
                expected="one of " + ", ".join(NAMES), hint=close_names(found, NAMES),
            )  # fmt: skip
        scheme, number = _PRESETS[found]
        return QuantPreset(found, GGUF_SCHEMES[scheme], number)

    @staticmethod
    def of(name: str) -> QuantPreset:
        """The value of `quant=`: a preset, or one scheme for all, such as int8 or int4_b32."""
        if not isinstance(name, str):
            raise OptionError(
                "not a quant preset", where="quant", got=repr(name), expected="a name"
            )
        found = name.strip().upper()
        if found in _PRESETS or found in _ALIASES:
            preset = QuantPreset.parse(name)
        elif found == "INT8":
            # one scale for a row loses too much where a few activations are far above the others
            preset = QuantPreset("int8", QuantScheme.int8(64), None)
        else:
            scheme = QuantScheme.parse(name)
            preset = QuantPreset(scheme.name, scheme, None)
        if preset.scheme.is_float:
            raise OptionError(
                "a float type is not a quantisation", where="quant", got=name, expected=_SAMPLES
            )
        return preset

    def pick(
        self, name: str, shape: tuple[int, ...], *, layers: int, tied: bool
    ) -> QuantScheme | None:
        """The scheme of a tensor, by its GGUF name; None: it is not quantised.

        `tied`: the embedding table is the output matrix too.
        """
        if len(shape) < 2 or not name.endswith("weight") or _NOT_QUANTISED.search(name):
            return None
        if self.file_type is None:
            return None if shape[-1] % self.scheme.block_size else self.scheme
        return _fitting(self._wanted(name, layers, tied), shape[-1])

    def _wanted(self, name: str, layers: int, tied: bool) -> str:
        plain = self.scheme.name
        if name == ("token_embd.weight" if tied else "output.weight"):
            return plain if self.scheme.is_float or plain == "Q8_0" else "Q6_K"
        match = _IN_LAYER.fullmatch(name)
        if match is None:
            return plain
        layer, part = int(match[1]), match[2]
        if self.name == "Q3_K_M" and part in ("attn_v", "ffn_down"):
            first = 2 if part == "attn_v" else layers // 16
            return "Q5_K" if layer < first else "Q4_K"
        scheme, where = _EXTRA.get((self.name, part), (plain, _always))
        return scheme if where(layer, layers) else plain

    def __str__(self) -> str:
        return self.name


def _fitting(name: str, columns: int) -> QuantScheme:
    """The scheme, or the nearest one whose blocks fill rows of so many columns."""
    while columns % GGUF_SCHEMES[name].block_size:
        name = _NARROWER.get(name, "F16")
    return GGUF_SCHEMES[name]
