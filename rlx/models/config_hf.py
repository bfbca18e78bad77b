"""A model's configuration from a Hugging Face config.json.

`read_config` of an architecture's page reads it with `HfSettings`, which holds the file against the
fields that the page declares: every field is applied, known to be harmless, or refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from rlx.errors import FormatError, UnsupportedError
from rlx.formats.hf import HfFolder
from rlx.models.arch import architecture, encoder_architecture
from rlx.models.builder import activation_named
from rlx.models.config import MOST_LAYERS, EncoderConfig, ExpertConfig, ModelConfig
from rlx.models.config_fields import (
    HARMLESS,
    ROPE_KEYS,
    ROPE_TYPES,
    Field,
    Fields,
    is_listed,
    is_unset,
)
from rlx.models.rope_tables import RopeConfig

# model_type → the page in arch/encoders/
HF_ENCODERS = {
    "bert": "bert",
    "roberta": "roberta",
    "xlm-roberta": "roberta",
    "camembert": "roberta",
    "mpnet": "mpnet",
    "distilbert": "distilbert",
    "nomic_bert": "nomic_bert",
    "modernbert": "modernbert",
    "electra": "electra",
    "albert": "albert",
    "gte": "gte",
    "new": "gte",
    "jina_embeddings_v3": "jina_embeddings_v3",
    "deberta-v2": "deberta_v2",
}
_OUTER = ("tie_word_embeddings", "quantization_config")  # what counts beside a text_config
_BIGGEST = 1 << 40  # of whole numbers
_TAGS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_SLIDING, _FULL = "sliding_attention", "full_attention"
# weights with these ends are of a mixture of experts
_EXPERTS = ("ffn_gate_inp", "_exps.", "_shexp.")


def from_hf(folder: HfFolder) -> ModelConfig:
    """The configuration in a Hugging Face folder."""
    c: dict[str, Any] = folder.config
    inner = c.get("text_config")
    if isinstance(inner, Mapping):  # of a multimodal model
        c = {**{n: c[n] for n in _OUTER if n in c}, **inner}
        c.setdefault("model_type", folder.config.get("model_type"))
    kind = c.get("model_type")
    if not isinstance(kind, str):
        raise FormatError("no model_type in config.json", where=folder.name)
    page: ModuleType
    if inner is None and kind in HF_ENCODERS:
        page = encoder_architecture(HF_ENCODERS[kind])
    else:
        page = architecture(kind.removesuffix("_text"), folder.name)
    settings = HfSettings(c, folder.name, page.FIELDS, getattr(page, "HARMLESS", ()))
    config: ModelConfig = page.read_config(settings.check())
    return config.check(folder.name)


class HfSettings:
    """A config.json, held against the fields that a page declares."""

    def __init__(
        self, values: Mapping[str, Any], where: str, fields: Fields,
        harmless: Iterable[str] = (), within: str = "",
    ) -> None:  # fmt: skip
        """`within` is the field of which this is the object."""
        self.values, self.where, self.fields = values, where, fields
        self._harmless, self._within = (*harmless, *HARMLESS), within

    # -- the fields one by one ----------------------------------------------------------------

    def check(self) -> HfSettings:
        """Raise for a field that is neither read nor harmless, and for values not supported."""
        known = {name for n, f in self.fields.items() for name in (n, *f.also)}
        for name, value in self.values.items():
            if name not in known and not is_unset(value) and not is_listed(name, self._harmless):
                raise UnsupportedError(
                    f"{self._within}{name} of config.json is not supported", where=self.where,
                    got=repr(value)[:60], expected=", ".join(sorted(self.fields)),
                    hint="it is not known what the field changes",
                )  # fmt: skip
        for name, field in self.fields.items():
            value = self.get(name)
            if field.values and value not in field.values:
                self.refuse(name, " or ".join(map(repr, field.values)))
            if name in ("num_hidden_layers", "n_layer"):
                self.require(name, 0 < value <= MOST_LAYERS, f"1 … {MOST_LAYERS}")
        return self

    def get(self, name: str) -> Any:
        """The value of a declared field, or its default."""
        field = self.fields[name]
        for stored in (name, *field.also):
            if stored in self.values:
                value = self._typed(stored, field)
                if value is not None or field.null:
                    return value
        return field.default

    def _typed(self, name: str, field: Field) -> Any:
        value, kind = self.values[name], field.type
        if value is None or kind is type(None):
            return value
        if kind is tuple and isinstance(value, list):
            return tuple(_number(v) for v in value)
        if kind is float:
            value = _number(value)
            value = value if isinstance(value, float) and math.isfinite(value) else None
        wrong = isinstance(value, bool) and kind in (int, float)  # true is no number
        wrong = wrong or (isinstance(value, int) and abs(value) > _BIGGEST)
        if wrong or not isinstance(value, kind):
            raise FormatError(
                f"{self._within}{name} of config.json has the wrong type", where=self.where,
                got=repr(self.values[name])[:40], expected=kind.__name__,
            )  # fmt: skip
        return value

    def refuse(self, name: str, expected: str) -> None:
        """Raise for the value of a field."""
        raise UnsupportedError(
            f"{self._within}{name} of config.json has a value that is not supported",
            where=self.where, got=repr(self.get(name))[:60], expected=expected,
        )  # fmt: skip

    def require(self, name: str, holds: bool, expected: str) -> None:
        """Refuse the value of a field unless `holds`."""
        if not holds:
            self.refuse(name, expected)

    def declared(self, *names: str) -> str:
        """The one of several names that the page declares."""
        return next(n for n in names if n in self.fields)

    def inside(self, name: str, fields: Fields, harmless: Iterable[str] = ()) -> HfSettings:
        """A nested object; empty where there is none."""
        within = f"{self._within}{name}."
        return HfSettings(self.get(name) or {}, self.where, fields, harmless, within).check()

    def activation(self, *names: str) -> str:
        name = self.declared(*names)
        return activation_named(self.get(name), self.where, name)

    # -- rotary embedding ---------------------------------------------------------------------

    def rope(
        self, width: int, share: float | None = None, types: tuple[str, ...] = ROPE_TYPES,
        harmless: Iterable[str] = (), theta: float | None = None, older: tuple[str, ...] = (),
    ) -> RopeConfig:  # fmt: skip
        """The rotary embedding of heads of `width`; `share` is how much of them is rotated, where
        that is a setting of the type; `older` are names of longrope."""
        name = "rope_scaling" if self.get("rope_scaling") else "rope_parameters"
        given = self.inside(name, ROPE_KEYS, harmless)
        if given.get("rope_type") in older:
            changed = {**given.values, "rope_type": "longrope"}
            given = HfSettings(changed, self.where, ROPE_KEYS, harmless, f"{name}.")
        theta = self.get("rope_theta") if theta is None else theta
        return self.rope_of(given, width, theta, share, types)

    def rope_of(
        self, given: HfSettings, width: int, theta: float, share: float | None = None,
        types: tuple[str, ...] = ROPE_TYPES,
    ) -> RopeConfig:  # fmt: skip
        """The rotary embedding that an object describes."""
        kind = given.get("rope_type")
        given.require("rope_type", kind in types, ", ".join(types))
        values: dict[str, Any] = {"theta": given.get("rope_theta") or theta}
        given.require("rope_theta", values["theta"] > 0, "a positive number")
        values |= self._rotated(given, kind, width, share)
        if kind in ("yarn", "longrope", "llama3"):
            values["original_context"] = self._original(given)
            fits = values["original_context"] > 1 and values["theta"] != 1.0
            name = "original_max_position_embeddings"
            given.require(name, fits, "more than 1 position, and a base other than 1")
        if kind in ("linear", "yarn", "llama3"):
            factor = given.get("factor")
            if factor is None and kind == "yarn" and "factor" in given.values:
                factor = self.get("max_position_embeddings") / values["original_context"]
            given.require("factor", factor is not None and factor > 0, "a positive number")
            values["factor"] = factor
        if kind == "proportional":
            values["factor"] = given.get("factor") or 1.0
        more = {"yarn": self._yarn, "longrope": self._longrope, "llama3": self._llama3}
        values |= more[kind](given, values) if kind in more else {}
        for name in ("long_factor", "short_factor"):
            half = (values.get("n_rot") or width) // 2
            fits = kind != "longrope" or len(values[f"{name}s"]) == half
            given.require(name, fits, f"{half} numbers: half of a head (head_dim)")
        # a dynamic base grows beyond max_position_embeddings only, where no context reaches
        return RopeConfig(scaling={"default": "none", "dynamic": "none"}.get(kind, kind), **values)

    def _rotated(
        self, given: HfSettings, kind: str, width: int, share: float | None
    ) -> dict[str, Any]:
        outer = (
            self.get("partial_rotary_factor") if "partial_rotary_factor" in self.fields else None
        )
        stated = given.get("partial_rotary_factor")
        stated = outer if stated is None else stated
        if kind == "proportional":
            return {"proportion": 1.0 if stated is None else stated}
        if share is None:
            given.require("partial_rotary_factor", stated in (None, 1.0), "1.0 for this type")
            return {}
        n_rot = int(width * (share if stated is None else stated))
        given.require(
            "partial_rotary_factor", 0 < n_rot <= width and n_rot % 2 == 0,
            "a share of the head (hidden_size / num_attention_heads, or head_dim) that is even",
        )  # fmt: skip
        return {"n_rot": n_rot if n_rot < width else 0}

    def _original(self, given: HfSettings) -> int:
        outer = None
        if "original_max_position_embeddings" in self.fields:
            outer = self.get("original_max_position_embeddings")
        inner = given.get("original_max_position_embeddings")
        found: int = outer or inner or self.get("max_position_embeddings")
        return found

    def _yarn(self, given: HfSettings, values: Mapping[str, Any]) -> dict[str, Any]:
        mscale, of_scores = given.get("mscale"), given.get("mscale_all_dim")
        grown = 0.1 * math.log(values["factor"]) if values["factor"] > 1 else 0.0
        attention = given.get("attention_factor")
        for name in ("beta_fast", "beta_slow"):
            given.require(name, (given.get(name) or 1) > 0, "a positive number")
        given.require("attention_factor", attention is None or attention > 0, "a positive number")
        if attention is None and mscale and of_scores:
            attention = (mscale * grown + 1) / (of_scores * grown + 1)
        return {
            "beta_fast": given.get("beta_fast") or 32.0,
            "beta_slow": given.get("beta_slow") or 1.0,
            "attention_factor": grown + 1 if attention is None else attention,
            "whole_steps": given.get("truncate"),
            "log_factor": of_scores or 0.0,
        }

    def _longrope(self, given: HfSettings, values: Mapping[str, Any]) -> dict[str, Any]:
        original = values["original_context"]
        factor = given.get("factor")
        factor = self.get("max_position_embeddings") / original if factor is None else factor
        attention = given.get("attention_factor")
        if attention is None:
            grown = math.log(factor) / math.log(original) if factor > 1 else 0.0
            attention = math.sqrt(1 + grown)
        factors = {}
        for name in ("long_factor", "short_factor"):
            numbers = given.get(name)
            fits = isinstance(numbers, list) and all(_is_positive(n) for n in numbers)
            given.require(name, fits and bool(numbers), "a list of positive numbers")
            factors[f"{name}s"] = tuple(map(float, numbers))
        return {"factor": factor, "attention_factor": attention, **factors}

    def _llama3(self, given: HfSettings, values: Mapping[str, Any]) -> dict[str, Any]:
        low, high = given.get("low_freq_factor"), given.get("high_freq_factor")
        given.require("low_freq_factor", low is not None and low > 0, "a positive number")
        fits = high is not None and high > 0 and high != low
        given.require("high_freq_factor", fits, "another positive number")
        return {"low_freq_factor": low, "high_freq_factor": high}

    # -- windows and experts ------------------------------------------------------------------

    def layer_types(self, otherwise: Iterable[str], known: tuple[str, ...]) -> list[str]:
        """The kind of each layer; `otherwise` where the file does not say."""
        found = self.get("layer_types") or list(otherwise)
        layers = self.get("num_hidden_layers")
        fits = len(found) == layers and all(kind in known for kind in found)
        expected = " or ".join(known)
        self.require("layer_types", fits, f"{expected} for each of {layers} layers")
        return found

    def windows(self, is_full: Iterable[bool], used: bool = True) -> dict[str, Any]:
        """The window and the layers that have it; `is_full` is of each layer, where the file does
        not say; `used` is false where the window is switched off."""
        kinds = self.layer_types(
            (_FULL if full else _SLIDING for full in is_full), (_SLIDING, _FULL)
        )
        layers = frozenset(i for i, kind in enumerate(kinds) if kind == _SLIDING)
        window = self.get("sliding_window") if used else None
        if not layers:
            return {}
        name = "sliding_window" if used else "layer_types"
        self.require(
            name, window is not None and window > 0, "a window for layers of sliding_attention"
        )
        return {"sliding_window": window, "window_layers": layers}

    def window(self) -> int:
        """The window of all layers; 0: none."""
        window = self.get("sliding_window")
        self.require("sliding_window", window is None or window > 0, "a number of tokens, or null")
        return window or 0

    def experts(self, count: str, **changes: Any) -> ExpertConfig:
        """A mixture of as many experts as the field `count` says."""
        number, active = self.get(count), self.get("num_experts_per_tok")
        self.require(count, number > 0, "a positive number")
        fits = active is not None and 0 < active <= number
        self.require("num_experts_per_tok", fits, f"1 … {number}")
        return ExpertConfig(number, active, **changes)

    def dense_layers(self) -> frozenset[int]:
        """The layers of Qwen's mixtures that have one FFN instead of experts."""
        step, layers = self.get("decoder_sparse_step"), range(self.get("num_hidden_layers"))
        self.require("decoder_sparse_step", step > 0, "a positive number")
        dense = self.get("mlp_only_layers") or []
        return frozenset(i for i in layers if i in dense or (i + 1) % step)

    # -- whole models -------------------------------------------------------------------------

    def head_dim(self) -> int:
        hidden, heads = self.get("hidden_size"), self.get("num_attention_heads")
        given = self.get("head_dim") if "head_dim" in self.fields else None
        self.require("num_attention_heads", heads > 0, "a positive number")
        return given or int(hidden // heads)

    def decoder(
        self, arch: str, switches: Mapping[str, tuple[str, ...]], **changes: Any
    ) -> ModelConfig:
        """A language model. `switches` are fields with the weights that are there only if they are
        true; `changes` are fields of the ModelConfig."""
        heads = self.get("num_attention_heads")
        values: dict[str, Any] = {
            "arch": arch,
            "vocab": self.get("vocab_size"),
            "hidden": self.get("hidden_size"),
            "layers": self.get("num_hidden_layers"),
            "heads": heads,
            "kv_heads": self.get("num_key_value_heads") or heads,
            "head_dim": self.head_dim(),
            "ffn": changes["ffn"] if "ffn" in changes else self.get("intermediate_size"),
            "context": self.get("max_position_embeddings"),
            "eps": self.get(self.declared("rms_norm_eps", "layer_norm_eps", "norm_epsilon")),
            "activation": changes.get("activation")
            or self.activation("hidden_act", "hidden_activation"),
            "tied": self.get("tie_word_embeddings"),
        }
        if "rope" not in changes:
            values["rope"] = self.rope(values["head_dim"])
        off = (names for field, names in switches.items() if not self.get(field))
        absent = {f"blk.{{i}}.{part}" for names in off for part in names}
        absent |= changes.pop("without", frozenset())
        return ModelConfig(**(values | changes | {"without": frozenset(absent)}))

    def encoder(
        self, arch: str, parts: Mapping[str, Any] | None = None, **changes: Any
    ) -> ModelConfig:
        """An encoder; `parts` are fields of its EncoderConfig, `changes` of the ModelConfig."""
        hidden, heads = self.get("hidden_size"), self.get("num_attention_heads")
        self.require("num_attention_heads", heads > 0, "a positive number")
        values: dict[str, Any] = {
            "arch": arch,
            "vocab": self.get("vocab_size"),
            "hidden": hidden,
            "layers": self.get("num_hidden_layers"),
            "heads": heads,
            "kv_heads": heads,
            "head_dim": hidden // heads,
            "ffn": self.get("intermediate_size"),
            "context": self.get("max_position_embeddings"),
            "eps": changes.get("eps") or self.get(self.declared("layer_norm_eps", "norm_eps")),
            "activation": changes.get("activation")
            or self.activation("hidden_act", "hidden_activation", "activation"),
            "encoder": EncoderConfig(
                rotary="rope" in changes, labels=self._labels(), **(parts or {})
            ),
        }
        return ModelConfig(**(values | changes))

    def _labels(self) -> int:
        kinds = self.get("architectures")
        if not any(str(k).endswith("ForSequenceClassification") for k in kinds):
            return 0
        return len(self.get("id2label")) or self.get("num_labels")


def _is_positive(value: Any) -> bool:
    number = _number(value)
    return isinstance(number, float) and 0 < number < math.inf


def _number(value: Any) -> Any:
    """A float out of JSON; infinities are tagged, as transformers writes them."""
    if isinstance(value, Mapping):
        return _TAGS.get(str(value.get("__float__")), value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e300:
        return value if value in (math.inf, -math.inf) else None
    return float(value)


def only_experts(dense: frozenset[int], layers: int, names: Iterable[str]) -> frozenset[str]:
    """The weights that are not there: those of experts in dense layers, those of one FFN in others.
    `names` are all of them, by layer."""
    found = set()
    for name in names:
        of_experts = any(part in name for part in _EXPERTS)
        if of_experts or (name.startswith("blk.{i}.ffn_") and "_norm" not in name):
            wrong = (i for i in range(layers) if (i in dense) == of_experts)
            found |= {name.replace("{i}", str(i)) for i in wrong}
    return frozenset(found)


__all__ = ["HF_ENCODERS", "HfSettings", "from_hf", "only_experts"]
