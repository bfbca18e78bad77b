"""A tokenizer in GGUF metadata: byte-level BPE, SentencePiece BPE, unigram, WordPiece read; BPE
written."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import FormatError, RlxError, UnsupportedError
from rlx.formats.gguf import GgufFile, StringArray
from rlx.formats.hf import HfFolder
from rlx.formats.json_file import read_object
from rlx.formats.tokenizer import Tokenizer, Vocabulary
from rlx.formats.tokenizer.pretokenizers import (
    GPT2_WORDS,
    Split,
    find_split,
    gguf_name,
    make_pre_tokenizer,
)
from rlx.formats.tokenizer.tokenizer import SPACE, TokenDecoder, end_tokens
from rlx.support.gc_pause import without_gc
from rlx.support.optional import library

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6  # types of tokens
KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"


class GgufVocabulary:
    """The metadata that all vocabulary types share."""

    def __init__(self, file: GgufFile, tokenizers: Any) -> None:
        self.file, self.lib = file, tokenizers
        self.texts = file.need(KEY + "tokens", StringArray)
        self.tokens = list(self.texts)
        if not self.tokens:
            raise FormatError("an empty vocabulary", where=file.name)
        backwards = range(len(self.tokens) - 1, -1, -1)  # of equal tokens the first one counts
        self.vocab = {self.tokens[i]: i for i in backwards}
        self.types = self._types()

    def _types(self) -> npt.NDArray[Any]:
        types = self.per_token("token_type")
        if types is None:
            return np.full(len(self.tokens), NORMAL)
        types = types.copy()
        types[list(end_tokens(self.vocab, set(np.flatnonzero(types == CONTROL).tolist())))] = (
            CONTROL  # some are not marked
        )
        return types

    def per_token(self, key: str) -> npt.NDArray[Any] | None:
        """A metadata array with a number for every token."""
        if KEY + key not in self.file.metadata:
            return None
        values = self.file.need(KEY + key, np.ndarray)
        if len(values) < len(self.tokens) or values.dtype.kind not in "iuf":
            raise FormatError(
                f"{KEY}{key} does not fit the vocabulary",
                where=self.file.name,
                got=f"{len(values)} of {values.dtype}",
                expected=f"{len(self.tokens)} numbers",
            )
        return values[: len(self.tokens)]

    def scores(self) -> npt.NDArray[Any]:
        values = self.per_token("scores")
        if values is None or not np.isfinite(values).all():
            raise FormatError(
                "a vocabulary without scores", where=self.file.name, expected=f"{KEY}scores"
            )
        return values

    def flag(self, key: str, default: bool) -> bool:
        return self.file.get(KEY + key, bool, default)

    def token(self, key: str, default: int | None = None) -> int | None:
        """The id that the file has under a key, where it is one."""
        found = self.file.metadata.get(f"{KEY}{key}_token_id", default)
        return found if type(found) is int and 0 <= found < len(self.tokens) else None

    def ids(self, *kinds: int) -> list[int]:
        """The tokens of these types."""
        found: list[int] = np.flatnonzero(np.isin(self.types, kinds)).tolist()
        return found

    def finish(
        self,
        backend: Any,
        decoder: TokenDecoder,
        *,
        bos: int | None,
        eos: int | None,
        add_bos: bool,
        add_eos: bool,
        unknown: int | None = None,
    ) -> Tokenizer:
        """The tokenizer with its special tokens, BOS, EOS and chat templates."""
        self._add_special(backend)
        ends = end_tokens(self.vocab, set(self.ids(CONTROL)))
        ends |= {i for i in (eos, self.token("eot"), self.token("eom")) if i is not None}
        special = frozenset(self.ids(CONTROL, UNKNOWN))
        vocabulary = Vocabulary(
            size=len(self.tokens),
            text=self.texts.__getitem__,
            decoder=decoder,
            special=special,
            added={i: self.tokens[i] for i in [*special, *self.ids(USER)]},
            prefix=(bos,) if add_bos and bos is not None else (),
            suffix=(eos,) if add_eos and eos is not None else (),
            bos=bos,
            eos=eos,
            pad=self.token("padding"),
            unknown=unknown,
            end=frozenset(ends),
            templates=self._templates(),
        )
        return Tokenizer(backend, vocabulary, self.file.name)

    def _add_special(self, backend: Any) -> None:
        # which tokens take the white space after or before them; files do not say so: it follows
        # from the model's name, as in llama.cpp
        name = self.file.get("general.name", str, "").lower()
        pre = self.file.get(KEY + "pre", str, "").lower()
        phi = "phi-3" in name or "phi3" in name
        jina = any(p in pre for p in ("jina-v2-de", "jina-v2-es", "jina-v2-code"))
        mask = "<mask>" if jina else "[MASK]" if "modern-bert" in name else ""
        plain = ("<unk>", "<s>", "<|endoftext|>")

        def added(*kinds: int) -> list[Any]:
            texts = [t for t in map(self.tokens.__getitem__, self.ids(*kinds)) if t]
            make = partial(self.lib.AddedToken, normalized=False)
            return [make(t, rstrip=phi and t not in plain, lstrip=t == mask) for t in texts]

        backend.add_special_tokens(added(CONTROL, UNKNOWN))
        backend.add_tokens(added(USER))

    def _templates(self) -> dict[str, str]:
        found = {}
        for key, value in self.file.metadata.items():
            if isinstance(value, str) and (key + ".").startswith(_TEMPLATE + "."):
                found[key[len(_TEMPLATE) + 1 :] or "default"] = value
        return found


_SPACED_BPE = ("gemma4", "sarvam-moe", "granite-embed-multi-311m")  # BPE on text, not on bytes
Pairs = list[tuple[str, str]]
_LONGEST = 256  # characters of a token that is merged from others


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer:
    """Builds the tokenizer that the file describes."""
    model = file.need(KEY + "model", str)
    if model == "gpt2" and file.get(KEY + "pre", str, "") in _SPACED_BPE:
        model = "gemma4"
    build = _BUILDERS.get(model)
    if build is None:
        raise UnsupportedError(
            "unknown tokenizer model",
            where=file.name,
            got=f"{KEY}model {model!r}",
            expected=", ".join(_BUILDERS),
            hint="use the model with token ids" if model in ("none", "no_vocab") else "",
        )
    source = GgufVocabulary(file, library("tokenizers", "text"))
    try:
        with without_gc():
            return build(source)
    except RlxError:
        raise
    except BaseException as e:
        # the library raises bare exceptions for what it cannot use, and panics on broken tables
        if isinstance(e, Exception) or type(e).__name__ == "PanicException":
            text = f"a vocabulary that cannot be used: {e}"[:200]
            raise FormatError(text, where=file.name) from e
        raise


def _byte_bpe(s: GgufVocabulary) -> Tokenizer:
    """Byte-level BPE, as in GPT-2."""
    split = find_split(s.file.get(KEY + "pre", str, "default"), s.file.name)
    backend = s.lib.Tokenizer(_bpe(s, _merges(s), ignore_merges=split.ignore_merges))
    backend.pre_tokenizer = make_pre_tokenizer(split, s.lib)
    return s.finish(
        backend,
        TokenDecoder("byte_level"),
        bos=s.token("bos"),
        eos=s.token("eos"),
        add_bos=s.flag("add_bos_token", split.add_bos),
        add_eos=s.flag("add_eos_token", False),
        unknown=s.token("unknown"),
    )


def _sentencepiece(s: GgufVocabulary) -> Tokenizer:
    """SentencePiece BPE: the score of the merged token is its merge rank."""
    return _spaced(s, _merges_by_score(s), space_first=s.flag("add_space_prefix", True))


def _spaced_bpe(s: GgufVocabulary) -> Tokenizer:
    """The same with the merges listed in the file."""
    return _spaced(s, _merges(s), space_first=s.flag("add_space_prefix", False))


def _spaced(s: GgufVocabulary, merges: Pairs, *, space_first: bool) -> Tokenizer:
    unknown = s.token("unknown", 0)
    has_bytes = bool(s.ids(BYTE))
    backend = s.lib.Tokenizer(
        _bpe(
            s,
            merges,
            byte_fallback=has_bytes,
            unk_token=None if unknown is None else s.tokens[unknown],
        )
    )
    norm = s.lib.normalizers
    spaces = norm.Replace(" ", SPACE)
    backend.normalizer = norm.Sequence([norm.Prepend(SPACE), spaces]) if space_first else spaces
    return s.finish(
        backend,
        TokenDecoder("metaspace", strip_first=space_first),
        bos=s.token("bos", 1),
        eos=s.token("eos", 2),
        add_bos=s.flag("add_bos_token", True),
        add_eos=s.flag("add_eos_token", False),
        unknown=unknown,
    )


def _unigram(s: GgufVocabulary) -> Tokenizer:
    """Unigram: the most probable segmentation by the scores of the tokens."""
    lib, unknown = s.lib, s.token("unknown", 2)
    scores = np.where(s.types == USER, 0.0, s.scores()).tolist()
    pairs = list(zip(s.tokens, scores, strict=True))
    backend = lib.Tokenizer(lib.models.Unigram(pairs, unknown, byte_fallback=bool(s.ids(BYTE))))
    parts = []
    if (charsmap := KEY + "precompiled_charsmap") in s.file.metadata:
        parts.append(lib.normalizers.Precompiled(s.file.need(charsmap, np.ndarray).tobytes()))
    if s.flag("remove_extra_whitespaces", False):
        parts += [lib.normalizers.Strip(), lib.normalizers.Replace(lib.Regex(" {2,}"), " ")]
    backend.normalizer = lib.normalizers.Sequence(parts)
    space_first = s.flag("add_space_prefix", False)
    backend.pre_tokenizer = lib.pre_tokenizers.Metaspace(
        SPACE, prepend_scheme="always" if space_first else "never", split=False
    )
    return s.finish(
        backend,
        TokenDecoder("metaspace", strip_first=space_first),
        bos=s.token("bos"),
        eos=s.token("eos", 1),
        add_bos=s.flag("add_bos_token", False),
        add_eos=s.flag("add_eos_token", True),
        unknown=unknown,
    )


def _wordpiece(s: GgufVocabulary) -> Tokenizer:
    """WordPiece, as in BERT. GGUF marks the first piece of a word with a metaspace; BERT marks the
    continuation with ##."""
    vocab: dict[str, int] = {}
    for i, text in enumerate(s.tokens):
        if text.startswith(SPACE):
            text = text[1:]
        elif not (text.startswith("[") and text.endswith("]")) and s.types[i] != CONTROL:
            text = "##" + text
        vocab.setdefault(text, i)
    lower = s.flag("normalizer.lowercase", True)
    accents = s.flag("normalizer.strip_accents", lower)
    unknown = s.token("unknown", s.vocab.get("[UNK]"))
    if unknown is None:
        raise FormatError("a vocabulary without an unknown token", where=s.file.name)
    model = s.lib.models.WordPiece(vocab, unk_token=s.tokens[unknown], max_input_chars_per_word=100)
    backend = s.lib.Tokenizer(model)
    backend.normalizer = s.lib.normalizers.BertNormalizer(lowercase=lower, strip_accents=accents)
    backend.pre_tokenizer = s.lib.pre_tokenizers.BertPreTokenizer()
    first = s.token("cls", s.token("bos", s.vocab.get("[CLS]")))
    # the key is misspelled in the format
    last = s.token("seperator", s.token("eos", s.vocab.get("[SEP]")))
    return s.finish(
        backend,
        TokenDecoder("metaspace", strip_first=True),
        bos=first,
        eos=last,
        add_bos=s.flag("add_bos_token", True),
        add_eos=s.flag("add_eos_token", True),
        unknown=unknown,
    )


_BUILDERS: dict[str, Callable[[GgufVocabulary], Tokenizer]] = {
    "gpt2": _byte_bpe,
    "llama": _sentencepiece,
    "t5": _unigram,
    "bert": _wordpiece,
    "gemma4": _spaced_bpe,
}


def _bpe(s: GgufVocabulary, merges: Pairs, **options: Any) -> Any:
    try:
        return s.lib.models.BPE(s.vocab, merges, **options)
    except Exception:
        # merges of tokens that the vocabulary does not have can never end in a token
        known = s.vocab
        usable = [p for p in merges if p[0] in known and p[1] in known and p[0] + p[1] in known]
        if len(usable) == len(merges):
            raise
        return s.lib.models.BPE(s.vocab, usable, **options)


def _merges(s: GgufVocabulary) -> Pairs:
    """The file's merges, each written as `left right`."""
    lines = s.file.need(KEY + "merges", StringArray)
    pairs: Any = [line.partition(" ")[::2] for line in lines]
    if not all(map(all, pairs)):
        i = next(i for i, pair in enumerate(pairs) if not all(pair))
        raise FormatError(
            "a merge that is not two tokens",
            where=s.file.name,
            got=f"{KEY}merges[{i}] = {lines[i]!r}"[:80],
        )
    return pairs  # type: ignore[no-any-return]


def _merges_by_score(s: GgufVocabulary) -> Pairs:
    """All ways to make a token of two others, tokens with the best score first."""
    order = np.argsort(-s.scores().astype(np.float64), kind="stable")
    usable = ~np.isin(s.types, (CONTROL, UNKNOWN, BYTE))
    texts = [s.tokens[i] for i in order[usable[order]].tolist()]
    parts = set(texts)
    pairs: Pairs = []
    for text in texts:
        if len(text) > _LONGEST:
            continue
        for i in range(1, len(text)):
            left = text[:i]
            if left in parts and (right := text[i:]) in parts:
                pairs.append((left, right))
    return pairs


_UNUSED = 5  # type of tokens that fill the table up
_LARGEST = 1 << 28  # bytes of tokenizer.json
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def tokenizer_metadata(folder: HfFolder, rows: int) -> dict[str, Any]:
    """What GGUF says of the folder's vocabulary, filled up to `rows` tokens."""
    path = folder.path / "tokenizer.json"
    vocabulary = folder.tokenizer().vocabulary
    stored = read_object(path, _LARGEST)
    model = stored["model"]
    kind = vocabulary.decoder.kind
    if model.get("type") != "BPE" or kind not in ("byte_level", "metaspace"):
        got = f"{model.get('type')} with decoder {kind}"
        raise _unsupported(path, "a vocabulary", got, "byte-level or metaspace BPE")
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    tokens = _tokens(stored, rows)
    found: dict[str, Any] = {
        "tokens": tokens,
        "token_type": _types(stored, tokens, metaspace=kind == "metaspace"),
        "add_bos_token": vocabulary.bos is not None and vocabulary.bos in vocabulary.prefix,
        "add_eos_token": vocabulary.eos is not None and vocabulary.eos in vocabulary.suffix,
    }
    if kind == "byte_level":
        pre = gguf_name(_split(stored, model, path), str(path))
        found |= {"model": "gpt2", "pre": pre, "merges": [" ".join(m) for m in merges]}
    else:
        found |= {"model": "llama", "scores": _scores(tokens, merges)}
        found["add_space_prefix"] = vocabulary.decoder.strip_first
    ids = {"bos": vocabulary.bos, "eos": vocabulary.eos, "padding": vocabulary.pad}
    ids["unknown"] = vocabulary.unknown
    found |= {f"{name}_token_id": i for name, i in ids.items() if i is not None}
    metadata = {KEY + name: value for name, value in found.items()}
    for name, text in vocabulary.templates.items():
        suffix = "" if name == "default" else f".{name}"
        metadata[f"tokenizer.chat_template{suffix}"] = text
    return metadata


def _tokens(stored: dict[str, Any], rows: int) -> list[str]:
    by_id = {i: text for text, i in stored["model"]["vocab"].items()}
    by_id |= {t["id"]: t["content"] for t in stored.get("added_tokens", [])}
    count = max(rows, max(by_id, default=-1) + 1)
    return [by_id.get(i, f"[PAD{i}]") for i in range(count)]


def _types(stored: dict[str, Any], tokens: list[str], *, metaspace: bool) -> Any:
    types = np.full(len(tokens), NORMAL, np.int32)
    known = set(stored["model"]["vocab"].values())
    for i, text in enumerate(tokens):
        if i not in known:
            types[i] = _UNUSED
        elif metaspace and _BYTE_TOKEN.fullmatch(text):
            types[i] = BYTE
    for token in stored.get("added_tokens", []):
        types[token["id"]] = CONTROL if token.get("special") else USER
    unknown = stored["model"].get("unk_token")
    if unknown in stored["model"]["vocab"]:
        types[stored["model"]["vocab"][unknown]] = UNKNOWN
    return types


def _scores(tokens: list[str], merges: list[tuple[str, ...]]) -> Any:
    """The earlier a merge, the better the token it makes; what no merge makes comes last."""
    rank: dict[str, int] = {}
    for i, pair in enumerate(merges):
        rank.setdefault("".join(pair), i)
    return np.array([-float(rank.get(t, len(merges))) for t in tokens], np.float32)


def _split(stored: dict[str, Any], model: dict[str, Any], path: Path) -> Split:
    """The pre-tokenizer of the folder's tokenizer."""
    pre = stored.get("pre_tokenizer") or {}
    patterns: list[str] = []
    for part in pre.get("pretokenizers", [pre]):
        kind, pattern = part.get("type"), part.get("pattern", {})
        if kind == "Split" and "Regex" in pattern and part.get("behavior") == "Isolated":
            patterns.append(pattern["Regex"])
        elif kind == "Digits" and part.get("individual_digits"):
            patterns.append(r"\p{N}")
        elif kind == "ByteLevel" and not part.get("add_prefix_space"):
            patterns += [GPT2_WORDS] if part.get("use_regex", True) else []
        else:
            raise _unsupported(path, "a pre-tokenizer", part, "Split, Digits and ByteLevel")
    return Split(tuple(patterns), bool(model.get("ignore_merges")))


def _unsupported(path: Path, what: str, got: object, expected: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} that cannot be written as GGUF", where=str(path), got=str(got)[:80],
        expected=expected,
    )  # fmt: skip
