"""A tokenizer in GGUF metadata: byte-level BPE, SentencePiece BPE, unigram, WordPiece."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import FormatError, RlxError, UnsupportedError
from rlx.formats.gguf import GgufFile, StringArray
from rlx.formats.tokenizer import Tokenizer, Vocabulary
from rlx.formats.tokenizer.partial_backend import Found, PartialBackend
from rlx.formats.tokenizer.pretokenizers import find_split, make_pre_tokenizer
from rlx.formats.tokenizer.tokenizer import SPACE, TokenDecoder, end_tokens
from rlx.formats.tokenizer.vocabulary_index import VocabularyIndex
from rlx.support.gc_pause import without_gc
from rlx.support.optional import library

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6  # types of tokens
KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_BPE = ("gpt2", "llama", "gemma4")
SMALL = 8192  # tokens that are built at once: an index gains nothing


class GgufVocabulary:
    """The metadata that all vocabulary types share."""

    def __init__(self, file: GgufFile, tokenizers: Any) -> None:
        self.file, self.lib = file, tokenizers
        self.texts = file.need(KEY + "tokens", StringArray)
        if not self.texts:
            raise FormatError("an empty vocabulary", where=file.name)
        self.size = len(self.texts)
        self.types = self._types()

    @cached_property
    def tokens(self) -> list[str]:
        return list(self.texts)

    @cached_property
    def vocab(self) -> Mapping[str, int]:
        """Ids by text; of equal tokens the first one counts."""
        return self.whole_vocab if self.index is None else self.index.tokens

    @cached_property
    def whole_vocab(self) -> dict[str, int]:
        return {self.tokens[i]: i for i in range(self.size - 1, -1, -1)}

    @cached_property
    def index(self) -> VocabularyIndex | None:
        """The index of a vocabulary that takes long to build; None for others."""
        model = self.file.metadata.get(KEY + "model")
        if self.size < SMALL or model not in _BPE:
            return None
        merges = None if model == "llama" else self.file.need(KEY + "merges", StringArray)
        return VocabularyIndex.open(self.texts, merges)

    def _types(self) -> npt.NDArray[Any]:
        types = self.per_token("token_type")
        if types is None:
            return np.full(self.size, NORMAL)
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
        if len(values) < self.size or values.dtype.kind not in "iuf":
            raise FormatError(
                f"{KEY}{key} does not fit the vocabulary",
                where=self.file.name,
                got=f"{len(values)} of {values.dtype}",
                expected=f"{self.size} numbers",
            )
        return values[: self.size]

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
        return found if type(found) is int and 0 <= found < self.size else None

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
        """The tokenizer with BOS, EOS and chat templates."""
        ends = end_tokens(self.vocab, set(self.ids(CONTROL)))
        ends |= {i for i in (eos, self.token("eot"), self.token("eom")) if i is not None}
        special = frozenset(self.ids(CONTROL, UNKNOWN))
        vocabulary = Vocabulary(
            size=self.size,
            text=self.texts.__getitem__,
            decoder=decoder,
            special=special,
            added={i: self.texts[i] for i in [*special, *self.ids(USER)]},
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

    def add_special(self, backend: Any) -> Any:
        """The backend with the special tokens."""
        # which tokens take the white space after or before them; files do not say so: it follows
        # from the model's name, as in llama.cpp
        name = self.file.get("general.name", str, "").lower()
        pre = self.file.get(KEY + "pre", str, "").lower()
        phi = "phi-3" in name or "phi3" in name
        jina = any(p in pre for p in ("jina-v2-de", "jina-v2-es", "jina-v2-code"))
        mask = "<mask>" if jina else "[MASK]" if "modern-bert" in name else ""
        plain = ("<unk>", "<s>", "<|endoftext|>")

        def added(*kinds: int) -> list[Any]:
            texts = [t for t in map(self.texts.__getitem__, self.ids(*kinds)) if t]
            make = partial(self.lib.AddedToken, normalized=False)
            return [make(t, rstrip=phi and t not in plain, lstrip=t == mask) for t in texts]

        backend.add_special_tokens(added(CONTROL, UNKNOWN))
        backend.add_tokens(added(USER))
        return backend

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
    pre_tokenizer = make_pre_tokenizer(split, s.lib)
    backend = _backend(s, _Listed(s), None, pre_tokenizer, ignore_merges=split.ignore_merges)
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
    return _spaced(s, _ByScore(s), space_first=s.flag("add_space_prefix", True))


def _spaced_bpe(s: GgufVocabulary) -> Tokenizer:
    """The same with the merges listed in the file."""
    return _spaced(s, _Listed(s), space_first=s.flag("add_space_prefix", False))


def _spaced(s: GgufVocabulary, merges: _Merges, *, space_first: bool) -> Tokenizer:
    unknown = s.token("unknown", 0)
    norm = s.lib.normalizers
    spaces = norm.Replace(" ", SPACE)
    normalizer = norm.Sequence([norm.Prepend(SPACE), spaces]) if space_first else spaces
    name = None if unknown is None else s.texts[unknown]
    has_bytes = bool(s.ids(BYTE))
    backend = _backend(s, merges, normalizer, None, unk_token=name, byte_fallback=has_bytes)
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
        s.add_special(backend),
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
        s.add_special(backend),
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


# -- BPE ------------------------------------------------------------------------------------------


class _Listed:
    """Merges that the file lists, each written as `left right`."""

    def __init__(self, s: GgufVocabulary) -> None:
        self._s = s
        self._lines = s.file.need(KEY + "merges", StringArray)

    def all(self) -> Pairs:
        pairs: Any = [line.partition(" ")[::2] for line in self._lines]
        if not all(map(all, pairs)):
            i = next(i for i, pair in enumerate(pairs) if not all(pair))
            raise FormatError(
                "a merge that is not two tokens",
                where=self._s.file.name,
                got=f"{KEY}merges[{i}] = {self._lines[i]!r}"[:80],
            )
        return pairs  # type: ignore[no-any-return]

    def among(self, index: VocabularyIndex, found: Found) -> Pairs:
        """Those of which both parts and the result were found."""
        if index.merges is None:
            return []
        return [(a.decode(), b.decode()) for a, b in index.merges.usable(found)]


class _ByScore:
    """All ways to make a token of two others, tokens with the best score first."""

    def __init__(self, s: GgufVocabulary) -> None:
        self._s, self._scores = s, s.scores().astype(np.float64)

    def all(self) -> Pairs:
        return self._of(np.arange(self._s.size))

    def among(self, index: VocabularyIndex, found: Found) -> Pairs:
        """The ways to make one of these tokens of two others."""
        return self._of(np.array(sorted(i for _, ids in found.values() for i in ids), np.int64))

    def _of(self, ids: npt.NDArray[np.int64]) -> Pairs:
        """`ids` are in order."""
        ids = ids[~np.isin(self._s.types[ids], (CONTROL, UNKNOWN, BYTE))]
        ids = ids[np.argsort(-self._scores[ids], kind="stable")]
        tokens: Any = self._s.texts if len(ids) < self._s.size // 4 else self._s.tokens
        texts = [tokens[i] for i in ids.tolist()]
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


_Merges = _Listed | _ByScore


def _backend(
    s: GgufVocabulary, merges: _Merges, normalizer: Any, pre_tokenizer: Any, **options: Any
) -> Any:
    """A backend of BPE with its special tokens; a partial one where the vocabulary is large."""

    def make(model: Any) -> Any:
        backend = s.lib.Tokenizer(model)
        backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
        return s.add_special(backend)

    def whole() -> Any:
        with without_gc():
            return make(_bpe(s, merges.all(), **options))

    index = s.index
    if index is None:
        return whole()
    added = {s.texts[i]: index.tokens.first(i) for i in s.ids(CONTROL, UNKNOWN, USER)}
    always = [t for t in (options.get("unk_token"),) if t]  # what no text has, but a model needs
    always += [f"<0x{i:02X}>" for i in range(256)] if options.get("byte_fallback") else []
    base = {t: index.tokens[t] for t in always if t in index.tokens}

    def model(found: Found) -> Any:
        vocab = base | {text.decode(): ids[0] for text, (_, ids) in found.items()}
        return s.lib.models.BPE(vocab, merges.among(index, found), **options)

    first = make(s.lib.models.BPE(base | added, [], **options))
    return PartialBackend(s.lib, first, index.tokens, model, whole)


def _bpe(s: GgufVocabulary, merges: Pairs, **options: Any) -> Any:
    known = s.whole_vocab
    try:
        return s.lib.models.BPE(known, merges, **options)
    except Exception:
        # merges of tokens that the vocabulary does not have can never end in a token
        usable = [p for p in merges if p[0] in known and p[1] in known and p[0] + p[1] in known]
        if len(usable) == len(merges):
            raise
        return s.lib.models.BPE(known, usable, **options)
