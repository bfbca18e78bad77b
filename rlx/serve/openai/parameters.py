"""Parameters that OpenAI's endpoints have in common, as settings of a generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlx.serve.api_errors import bad_request
from rlx.serve.json_body import Fields

_WHOLE = 1 << 31
_MOST_STOPS = 16
_MOST_BIASES = 1024
_LONGEST_GRAMMAR = 256 << 10

_FIELDS = (
    "temperature top_p seed stop presence_penalty frequency_penalty logit_bias max_tokens n stream "
    "stream_options user model top_k min_p repetition_penalty grammar regex stop_token_ids "
    "priority ignore_eos"
)
SAMPLING = frozenset(_FIELDS.split())
"""Known everywhere. The last eight are extensions."""


def sampling_settings(fields: Fields) -> dict[str, Any]:
    """Settings that were given, those of a generation and `ignore_eos`; what was not is the
    model's own."""
    found: dict[str, Any] = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.whole("top_k", -1, _WHOLE - 1),
        "min_p": fields.number("min_p", 0, 1),
        "repetition_penalty": fields.number("repetition_penalty", 0.01, 100),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "seed": fields.whole("seed", -(1 << 63), (1 << 63) - 1),
        "max_tokens": fields.whole("max_tokens", 0, _WHOLE - 1),
        "ignore_eos": fields.flag("ignore_eos") or None,
        "stop": _stops(fields),
        "stop_tokens": _stop_tokens(fields),
        "logit_bias": _biases(fields),
        "grammar": _grammar(fields, "grammar"),
        "regex": _grammar(fields, "regex"),
    }
    if found["top_k"] == -1:  # all, for other servers
        found["top_k"] = 0
    return {name: value for name, value in found.items() if value is not None}


def _grammar(fields: Fields, name: str) -> str | None:
    text = fields.text(name)
    if text is not None and len(text) > _LONGEST_GRAMMAR:
        raise fields.wrong(name, f"at most {_LONGEST_GRAMMAR} characters")
    return text


def _stops(fields: Fields) -> tuple[str, ...] | None:
    given = fields.get("stop")
    if given is None:
        return None
    many = [given] if isinstance(given, str) else given
    if not isinstance(many, list) or len(many) > _MOST_STOPS:
        raise fields.wrong("stop", f"a string or an array of at most {_MOST_STOPS} strings")
    if not all(isinstance(stop, str) and len(stop) <= 1000 for stop in many):
        raise fields.wrong("stop", "strings of at most 1000 characters")
    return tuple(many)


def _stop_tokens(fields: Fields) -> frozenset[int] | None:
    given = fields.array("stop_token_ids", _MOST_BIASES)
    if given is None:
        return None
    if not all(_is_token(token) for token in given):
        raise fields.wrong("stop_token_ids", "token ids")
    return frozenset(given)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _WHOLE


def _biases(fields: Fields) -> dict[int, float] | None:
    given = fields.object("logit_bias")
    if given is None:
        return None
    if len(given) > _MOST_BIASES:
        raise fields.wrong("logit_bias", f"at most {_MOST_BIASES} tokens")
    found = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise fields.wrong("logit_bias", "token ids as keys")
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not number or not -100 <= bias <= 100:
            raise fields.wrong("logit_bias", "numbers from -100 to 100")
        found[int(token)] = float(bias)
    return found


def choices(fields: Fields, most: int) -> int:
    """`n`: how many answers are wanted."""
    return fields.whole("n", 1, most) or 1


def stream_usage(fields: Fields, stream: bool) -> bool:
    """Whether the last chunk of a stream has the usage."""
    given = fields.object("stream_options")
    if given is None:
        return False
    if not stream:
        raise bad_request(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            "stream_options", "invalid_value",
        )  # fmt: skip
    # with continuous_usage_stats other servers tell the usage in every chunk: here it is at the end
    known = ("include_usage", "include_obfuscation", "continuous_usage_stats")
    options = Fields(given, known, "stream_options.")
    options.flag("continuous_usage_stats")
    return options.flag("include_usage")


def response_format(fields: Fields) -> Mapping[str, Any] | None:
    """The JSON schema that an answer is to follow, if any."""
    given = fields.object("response_format")
    if given is None:
        return None
    inner = Fields(given, ("type", "json_schema", "schema"), "response_format.")
    kind = inner.choice("type", ("text", "json_object", "json_schema"), "")
    if kind == "text":
        return None
    if kind == "json_object":
        return inner.object("schema") or {"type": "object"}
    named = inner.object("json_schema")
    if named is None:
        raise inner.missing("json_schema")
    known = ("name", "schema", "strict", "description")
    schema = Fields(named, known, "response_format.json_schema.")
    schema.needed_text("name")
    return schema.object("schema") or {"type": "object"}
