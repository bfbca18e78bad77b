"""Quant presets: which scheme each tensor of a model gets. GGUF files are named after them.

A preset such as Q4_K_M is a scheme (Q4_K) with exceptions, where a few more bits pay:

    the output matrix, or the tied embedding table       Q6_K, unless all are Q8_0 or floats; Q5_K
                                                         with IQ1 and IQ2
    attn_v and ffn_down of Q4_K_M and Q5_K_M             Q6_K in the first and the last eighth of
                                                         the layers and every third between
    those of Q4_K_S                                      Q5_K in the first 4, or the first eighth
    those of Q3_K, Q2_K and IQ, attn_output, attn_qkv    a bit or two more: `_EXTRA`
    the embedding table of IQ1 to IQ3 and TQ             one that needs no calibration: `_TABLE`

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
    "IQ4_NL": ("IQ4_NL", 25),
    "IQ4_XS": ("IQ4_XS", 30),
    "IQ3_M": ("IQ3_S", 27),
    "IQ3_S": ("IQ3_S", 26),
    "IQ3_XS": ("IQ3_S", 22),
    "IQ3_XXS": ("IQ3_XXS", 23),
    "IQ2_M": ("IQ2_S", 29),
    "IQ2_S": ("IQ2_XS", 28),
    "IQ2_XS": ("IQ2_XS", 20),
    "IQ2_XXS": ("IQ2_XXS", 19),
    "IQ1_M": ("IQ1_M", 31),
    "IQ1_S": ("IQ1_S", 24),
    "TQ2_0": ("TQ2_0", 37),
    "TQ1_0": ("TQ1_0", 36),
    "MXFP4_MOE": ("Q8_0", 38),
}
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
NAMES = tuple(_PRESETS)

_SAMPLES = "Q4_K_M, Q8_0, int8, int4_b32, …"
_NARROWER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0"}
_NARROWER |= dict.fromkeys(("Q2_K", "Q3_K", "IQ4_XS", "IQ3_S", "IQ3_XXS"), "IQ4_NL")
_NARROWER |= dict.fromkeys(("IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"), "IQ4_NL")
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


def _first_eighth(i: int, n: int) -> bool:
    return i < n // 8


def _middle(i: int, n: int) -> bool:
    return n // 8 <= i < 7 * n // 8


_LOW = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS")
_EXTRA |= {(p, "attn_v"): ("Q4_K", _always) for p in (*_LOW, "IQ2_S", "IQ2_M")}
_EXTRA |= {(p, "ffn_down"): ("Q2_K", _first_eighth) for p in _LOW}
_EXTRA |= {(p, "ffn_down"): ("IQ3_S", _first_eighth) for p in ("IQ2_S", "IQ2_M")}
_EXTRA |= {(p, "attn_output"): ("IQ2_XXS", _always) for p in ("IQ1_S", "IQ1_M")}
_EXTRA |= {(p, "attn_output"): ("IQ3_S", _always) for p in ("IQ2_S", "IQ2_M", "IQ3_XXS")}
_EXTRA |= {(p, "attn_v"): ("Q4_K", _always) for p in ("IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M")}
_EXTRA |= {("IQ3_XXS", part): ("IQ2_S", _always) for part in ("attn_q", "attn_k")}
_EXTRA |= {("IQ3_XS", part): ("IQ3_XXS", _always) for part in ("attn_q", "attn_k")}
_EXTRA |= {("IQ3_XS", part): ("IQ3_XXS", _middle) for part in ("ffn_gate", "ffn_up")}
_EXTRA |= {("IQ3_M", part): ("Q4_K", _always) for part in ("attn_output", "attn_qkv")}
_EXTRA |= {(p, "attn_v"): ("Q5_K", _always) for p in ("IQ4_NL", "IQ4_XS")}
_EXTRA |= {(p, "ffn_down"): ("Q5_K", _first_eighth) for p in ("IQ4_NL", "IQ4_XS")}

# preset: scheme of an embedding table that is not the output matrix too
_TABLE = {
    **dict.fromkeys(_LOW, "Q2_K"),
    **dict.fromkeys(("IQ2_S", "IQ2_M", "IQ3_XXS"), "IQ3_S"),
    **dict.fromkeys(("TQ1_0", "TQ2_0"), "Q4_K"),
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
        if preset.scheme.needs_importance:
            raise OptionError(
                "a type that needs an importance matrix", where="quant", got=name,
                expected=_SAMPLES,
                hint="rlx quantize MODEL OUT --calibrate TEXT writes a file of that type",
            )  # fmt: skip
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
            if self.scheme.is_float or plain == "Q8_0":
                return plain
            return "Q5_K" if self.name.startswith(("IQ1", "IQ2", "IQ3_XXS")) else "Q6_K"
        if name == "token_embd.weight":
            return _TABLE.get(self.name, plain)
        if self.name == "MXFP4_MOE":
            return "MXFP4" if "_exps." in name else plain
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
