"""A tokenizer from a Hugging Face `tokenizer.json` and the small files beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rlx.errors import FormatError, InputError
from rlx.formats.json_file import read_bounded, read_object
from rlx.formats.tokenizer import Tokenizer, Vocabulary
from rlx.formats.tokenizer.tokenizer import SPACE, TokenDecoder, end_tokens
from rlx.support.optional import library

_MAX_TEMPLATE = 1 << 24


def tokenizer_from_file(path: str | os.PathLike[str]) -> Tokenizer:
    """Reads `tokenizer.json`; settings come from tokenizer_config.json and its like."""
    place = Path(path)
    name = os.fspath(path)
    if not place.is_file():
        raise InputError("no such file", where=name)
    tokenizers = library("tokenizers", "text")
    try:
        backend = tokenizers.Tokenizer.from_file(name)
    except Exception as e:  # the library raises nothing narrower
        raise FormatError(f"not a tokenizer: {e}"[:200], where=name) from e
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(backend, _vocabulary(backend, place.parent), name)


def _vocabulary(backend: Any, folder: Path) -> Vocabulary:
    settings = _settings(folder)
    bos, eos, pad, unknown = (
        _id(backend, settings.get(f"{k}_token")) for k in ("bos", "eos", "pad", "unk")
    )
    added: dict[int, Any] = backend.get_added_tokens_decoder()
    special = frozenset(i for i, t in added.items() if t.special)
    texts = {t.content: i for i, t in added.items()}
    ends = end_tokens(texts, special) | _generation_ends(folder)
    prefix, suffix = _around(backend)
    between, kind = _between(backend)
    if bos is not None and settings.get("add_bos_token") is not None:
        prefix = _switched(prefix, bos, settings["add_bos_token"])
    if eos is not None and settings.get("add_eos_token") is not None:
        suffix = _switched(suffix, eos, settings["add_eos_token"])
    return Vocabulary(
        size=max(backend.get_vocab_size(), max(added, default=-1) + 1),
        text=backend.id_to_token,
        decoder=_decoder(backend),
        special=special,
        added={i: t.content for i, t in added.items()},
        prefix=prefix,
        suffix=suffix,
        between=between,
        second_kind=kind,
        bos=bos,
        eos=eos,
        pad=pad,
        unknown=unknown,
        end=frozenset(ends if eos is None else ends | {eos}),
        templates=_templates(folder, settings),
    )


def _settings(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            found |= read_object(folder / name)
    return found


def _id(backend: Any, token: object) -> int | None:
    """The id of a token in the settings: its text, or an object that has it."""
    text = token.get("content") if isinstance(token, dict) else token
    found: int | None = backend.token_to_id(text) if isinstance(text, str) else None
    return found


def _around(backend: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The special tokens before and after a text."""
    seen = backend.encode("a")
    marks: list[int] = seen.special_tokens_mask
    if all(marks):
        return (), ()
    first = marks.index(0)
    last = len(marks) - marks[::-1].index(0)
    return tuple(seen.ids[:first]), tuple(seen.ids[last:])


def _between(backend: Any) -> tuple[tuple[int, ...] | None, int]:
    """The separator of a pair of texts, and the token type id of the second one."""
    seen = backend.encode("a", "a")
    if not {0, 1} <= {*seen.sequence_ids}:
        return None, 1
    second = seen.sequence_ids.index(1)
    first = second - seen.sequence_ids[second::-1].index(0)
    return tuple(seen.ids[first + 1 : second]), seen.type_ids[second]


def _switched(around: tuple[int, ...], token: int, on: object) -> tuple[int, ...]:
    """With the token added or removed, as the settings say."""
    if on:
        return around if token in around else (*around, token)
    return tuple(t for t in around if t != token)


def _generation_ends(folder: Path) -> set[int]:
    path = folder / "generation_config.json"
    found = read_object(path).get("eos_token_id") if path.is_file() else None
    ids = found if isinstance(found, list) else [found]
    return {i for i in ids if type(i) is int and i >= 0}


def _decoder(backend: Any) -> TokenDecoder:
    """The decoder, by its type in the library."""
    decoder = backend.decoder
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    parts = state.get("decoders", [state]) if isinstance(state, dict) else []
    kinds = [p.get("type") for p in parts]
    if kinds == ["ByteLevel"]:
        return TokenDecoder("byte_level")
    if kinds == ["WordPiece"]:
        return TokenDecoder(
            "wordpiece", strip_first=True, prefix=parts[0]["prefix"], cleanup=parts[0]["cleanup"]
        )
    if kinds == ["Metaspace"] and parts[0].get("replacement") == SPACE:
        return TokenDecoder("metaspace", strip_first=parts[0].get("prepend_scheme") != "never")
    spaced = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and parts[0] == spaced:
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        if parts[3:] in ([], [strip]):
            return TokenDecoder("metaspace", strip_first=parts[3:] == [strip])
    return TokenDecoder("library")


def _templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name, from any of the files that may have them."""
    found: dict[str, str] = {}
    given = settings.get("chat_template")
    if given is None and (folder / "chat_template.json").is_file():
        given = read_object(folder / "chat_template.json").get("chat_template")
    if isinstance(given, str):
        found["default"] = given
    for entry in given if isinstance(given, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("template"), str):
            found[str(entry.get("name", "default"))] = entry["template"]
    if (folder / "chat_template.jinja").is_file():
        found["default"] = _text(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = _text(path)
    return found


def _text(path: Path) -> str:
    return read_bounded(path, _MAX_TEMPLATE).decode("utf-8", "replace")
