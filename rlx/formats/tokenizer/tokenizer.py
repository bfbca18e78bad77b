"""Text to token ids and back, whatever file the vocabulary came from.

tokenizer = tokenizer_from_gguf(GgufFile("model.gguf"))
tokenizer = tokenizer_from_file("folder/tokenizer.json")
ids = tokenizer.encode("Hello")
tokenizer.decode(ids)
"""

from __future__ import annotations

import codecs
import re
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from functools import cached_property, partial
from typing import Any, Literal

from rlx.errors import InputError
from rlx.formats.chat_template import ChatTemplate
from rlx.formats.tokenizer.message_text import (
    SpacePrefix,
    SpecialTexts,
    is_turn_token,
    unused_mark,
    without_special,
)
from rlx.support.optional import library
from rlx.support.pickling import Unpicklable
from rlx.support.records import dataclass

SPACE = "\u2581"  # SentencePiece's visible space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenDecoder:
    """How the tokens of a vocabulary become bytes; the names are those of Hugging Face's decoders.

    `byte_level`: GPT-2's characters for bytes; `metaspace`: SPACE for a space and <0xAB> for bytes
    (SentencePiece); `wordpiece`: a token without `prefix` starts a word; `library`: another one,
    run by the `tokenizers` library.
    """

    kind: Literal["byte_level", "metaspace", "wordpiece", "library"]
    strip_first: bool = False  # the first token of a text loses its leading space
    prefix: str = "##"
    cleanup: bool = False  # no space before punctuation

    @property
    def to_bytes(self) -> Callable[[str], bytes]:
        """Token text → bytes."""
        if self.kind == "byte_level":
            return byte_level
        if self.kind == "metaspace":
            return metaspace
        return self._wordpiece if self.kind == "wordpiece" else str.encode

    def _wordpiece(self, text: str) -> bytes:
        text = text[len(self.prefix) :] if text.startswith(self.prefix) else " " + text
        return (_clean_up(text) if self.cleanup else text).encode("utf-8")


def _byte_characters() -> dict[str, int]:
    """GPT-2's character for every byte: itself where that prints, else one from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in plain}
    rest = [b for b in range(256) if b not in set(plain)]
    return table | {chr(0x100 + i): b for i, b in enumerate(rest)}


_BYTE_OF = _byte_characters()


def byte_level(text: str) -> bytes:
    """The bytes of a byte-level BPE token; added tokens stand for themselves."""
    try:
        return bytes([_BYTE_OF[c] for c in text])
    except KeyError:
        return text.encode("utf-8")


def metaspace(text: str) -> bytes:
    """The bytes of a SentencePiece token."""
    if match := _BYTE_TOKEN.fullmatch(text):
        return bytes([int(match[1], 16)])
    return text.replace(SPACE, " ").encode("utf-8")


# the same as the WordPiece decoder of the `tokenizers` library
_CLEANUP = {
    " .": ".",
    " ?": "?",
    " !": "!",
    " ,": ",",
    " ' ": "'",
    " n't": "n't",
    " 'm": "'m",
    " do not": " don't",
    " 's": "'s",
    " 've": "'ve",
    " 're": "'re",
}


def _clean_up(text: str) -> str:
    for pair in _CLEANUP.items():
        text = text.replace(*pair)
    return text


class StreamDecoder:
    """Joins the bytes of tokens; bytes that may still become a character wait for the rest."""

    def __init__(
        self, piece: Callable[[int], bytes], skip: Container[int], strip_first: bool
    ) -> None:
        self._piece, self._skip = piece, skip
        self._strip = strip_first
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that became certain with this token; it may be empty."""
        if token in self._skip:
            return ""
        raw = self._piece(token)
        if self._strip and raw:
            self._strip = False
            raw = raw.removeprefix(b" ")
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """What is left at the end: a replacement character where a character was cut off."""
        return self._decoder.decode(b"", final=True)


class WindowDecoder:
    """For decoders that only the `tokenizers` library has: decodes a window of tokens twice, with
    and without the new token, and returns the difference once it is complete UTF-8."""

    def __init__(self, decode: Callable[[list[int]], str], skip: Container[int]) -> None:
        self._decode, self._skip = decode, skip
        self._tokens: list[int] = []
        self._given = 0  # tokens whose text is out

    def push(self, token: int) -> str:
        """The text that became certain with this token; it may be empty."""
        if token not in self._skip:
            self._tokens.append(token)
        return self._take(final=False)

    def flush(self) -> str:
        """What is left at the end."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._decode(self._tokens[: self._given])
        text = self._decode(self._tokens)
        if len(text) <= len(before) or (text.endswith("\ufffd") and not final):
            return ""
        self._tokens = self._tokens[self._given :]
        self._given = len(self._tokens)
        return text[len(before) :]


@dataclass(frozen=True)
class Vocabulary:
    """What a file says about its tokens."""

    size: int
    text: Callable[[int], str | None]  # a token as the file has it
    decoder: TokenDecoder
    special: frozenset[int] = frozenset()  # control tokens: not text
    added: Mapping[int, str] = field(default_factory=dict)  # they stand for themselves
    prefix: tuple[int, ...] = ()  # what `add_special` puts around a text
    suffix: tuple[int, ...] = ()
    between: tuple[int, ...] | None = None  # separates a pair of texts; None: unknown
    second_kind: int = 1  # token type id of the second text of a pair
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    unknown: int | None = None
    end: frozenset[int] = frozenset()  # tokens that end a generation
    templates: Mapping[str, str] = field(default_factory=dict)  # chat templates by name


class Tokenizer(Unpicklable):
    """Text to token ids and back. Thread-safe."""

    def __init__(self, backend: Any, vocabulary: Vocabulary, name: str = "tokenizer") -> None:
        self._backend, self.vocabulary, self.name = backend, vocabulary, name
        self._lock = threading.Lock()  # the library keeps settings that differ by call
        self._plain: Any = None  # the backend for `parse_special=False`
        self._space: SpacePrefix | None = None
        self._pieces: dict[int, bytes] = {}
        self._chat: dict[str, ChatTemplate] = {}

    def __len__(self) -> int:
        return self.vocabulary.size

    @property
    def bos_id(self) -> int | None:
        return self.vocabulary.bos

    @property
    def eos_id(self) -> int | None:
        return self.vocabulary.eos

    @property
    def end_ids(self) -> frozenset[int]:
        """Every token that ends a generation."""
        return self.vocabulary.end

    @property
    def adds_bos(self) -> bool:
        """Whether `encode` starts with the BOS token."""
        return self.bos_id is not None and self.vocabulary.prefix[:1] == (self.bos_id,)

    def ignore_case(self) -> None:
        """Take texts in lower case from now on; special tokens stay what they are."""
        kinds = library("tokenizers", "text").normalizers
        own = self._backend.normalizer
        parts = [kinds.Lowercase(), *([] if own is None else [own])]
        self._backend.normalizer = kinds.Sequence(parts)
        self._plain = self._space = None

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids. `add_special`: with what the model wants around a text (BOS, EOS);
        `parse_special`: special tokens written out in the text are parsed as such."""
        with self._prepared(parse_special) as backend:
            ids = self._ids(backend, text)
        if not add_special:
            return ids
        return [*self.vocabulary.prefix, *ids, *self.vocabulary.suffix]

    def encode_continuation(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Token ids of a text that goes on after another one: the space that some vocabularies put
        before the first word is not there."""
        with self._prepared(parse_special) as backend:
            if self._space is None:
                self._space = SpacePrefix(backend)
            with self._space.left_out(backend):
                return self._ids(backend, text)

    @contextmanager
    def _prepared(self, parse_special: bool) -> Iterator[Any]:
        """The backend, for one caller at a time."""
        with self._lock:
            if parse_special:
                backend = self._backend
            else:
                if self._plain is None:
                    self._plain = without_special(self._backend, self.vocabulary.special)
                backend = self._plain
            backend.encode_special_tokens = not parse_special
            yield backend

    def _ids(self, backend: Any, text: str) -> list[int]:
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):
            _require_text(text, self.name)
            raise
        return ids

    def encode_batch(
        self, texts: Sequence[str], *, parse_special: bool = True, first: int = 0
    ) -> list[list[int]]:
        """Token ids of many texts, by all cores, without what the model wants around them. `first`
        is the number of the first text, for messages."""
        try:
            with self._prepared(parse_special) as backend:
                found = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            for i, text in enumerate(texts, first):  # one of them is to blame: say which
                _require_text(text, f"{self.name}, text {i}")
            raise
        return [e.ids for e in found]

    def decode(
        self, ids: Iterable[int], *, skip_special: bool = True, at_start: bool = True
    ) -> str:
        """The text of the tokens. `at_start`: they begin a text, so that the space that some
        vocabularies put before the first word goes."""
        if self.vocabulary.decoder.kind == "library":
            return self._library_decode([i for i in ids if not skip_special or not self._skips(i)])
        stream = self.stream(skip_special=skip_special, at_start=at_start)
        return "".join([*map(stream.push, ids), stream.flush()])

    def stream(
        self,
        *,
        skip_special: bool = True,
        at_start: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> StreamDecoder | WindowDecoder:
        """A decoder for tokens as they come; by default they go on after a prompt. Special tokens
        are skipped, those aside that are to be `shown`."""
        v = self.vocabulary
        skip = v.special - shown if skip_special else frozenset[int]()
        if v.decoder.kind == "library":
            return WindowDecoder(self._library_decode, skip)
        return StreamDecoder(self.piece, skip, at_start and v.decoder.strip_first)

    def piece(self, token: int) -> bytes:
        """The bytes that the token adds to a text; none for ids beyond the vocabulary."""
        known = self._pieces.get(token)
        if known is None:
            known = self._pieces[token] = self._to_bytes(token)
        return known

    def _to_bytes(self, token: int) -> bytes:
        v = self.vocabulary
        if token >= v.size:  # logits are often padded to a multiple
            return b""
        literal = v.added.get(token)
        if literal is not None:
            return literal.encode("utf-8")
        return v.decoder.to_bytes(self.token(token))

    def token(self, token: int) -> str:
        """A token as the file has it."""
        if not 0 <= token < self.vocabulary.size:
            raise InputError(
                "no such token",
                where=self.name,
                got=token,
                expected=f"0 to {self.vocabulary.size - 1}",
            )
        return self.vocabulary.text(int(token)) or ""

    def id_of(self, token: str) -> int | None:
        """The id of a token as the file has it."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def chat_template(self, name: str = "default") -> ChatTemplate:
        """The file's chat template; InputError where it has none of that name."""
        if name not in self._chat:
            v = self.vocabulary
            source = v.templates.get(name)
            if source is None:
                raise InputError(
                    "no chat template" if name == "default" else f"no chat template {name!r}",
                    where=self.name,
                    expected=", ".join(v.templates) or None,
                    hint="this model completes text; it was not made for chat"
                    if not v.templates
                    else "",
                )
            self._chat[name] = ChatTemplate(
                source,
                bos_token=self._text_of(v.bos),
                eos_token=self._text_of(v.eos),
                where=self.name,
            )
        return self._chat[name]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str = "default",
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        parse_special: bool = False,
        **variables: Any,
    ) -> list[int]:
        """The tokens of a conversation. Special tokens written out in messages are text, unless
        `parse_special`; those that the template writes are special. BOS comes first where the
        vocabulary wants it, once."""
        render = partial(
            self.chat_template(template).render, add_generation_prompt=add_generation_prompt
        )
        if parse_special:
            ids = self.encode(render(messages, tools=tools, **variables), add_special=False)
        else:
            mark = unused_mark(messages, tools, variables)
            given = self._special_texts.marked([messages, tools, variables], mark)
            text = render(given[0], tools=given[1], **given[2])
            ids = self._encode_pieces(text.split(mark), at_start=True)
        return self._with_bos(ids)

    def encode_turns(
        self,
        messages: Sequence[Mapping[str, Any]],
        answers: Iterable[int],
        *,
        template: str = "default",
        tools: Sequence[Any] | None = None,
    ) -> list[tuple[list[int], bool]]:
        """The tokens of a conversation in parts, up to the last of the messages `answers`, and
        whether a part is one of them: what the model writes behind the prompt for it. InputError
        where the template writes the messages before an answer in another way behind it."""
        mark = unused_mark(messages, tools)
        given, tools = self._special_texts.marked([messages, tools], mark)
        render = partial(self.chat_template(template).render, tools=tools)
        whole = render(given, add_generation_prompt=False)
        parts: list[tuple[str, bool]] = []
        done = ""
        for i in answers:
            before = render(given[:i], add_generation_prompt=True)
            behind = render(given[: i + 1], add_generation_prompt=False)
            if not (whole.startswith(behind) and behind.startswith(before) and before >= done):
                raise InputError(
                    f"the chat template writes what is before message {i} in another way when more "
                    "follows", where=self.name, hint='answers="last" learns the last one only',
                )  # fmt: skip
            parts += [(before[len(done) :], False), (behind[len(before) :], True)]
            done = behind
        made: list[tuple[list[int], bool]] = []
        for text, is_answer in parts:
            ids = self._encode_pieces(text.split(mark), at_start=not made)
            made.append((ids if made else self._with_bos(ids), is_answer))
        return made

    def _encode_pieces(self, pieces: Sequence[str], *, at_start: bool) -> list[int]:
        """Tokens of a text that is cut where no token may be."""
        ids = self.encode(pieces[0], add_special=False) if at_start else []
        return ids + [i for text in pieces[at_start:] for i in self._encode_after_cut(text)]

    def _with_bos(self, ids: list[int]) -> list[int]:
        """BOS first where the vocabulary wants it, once."""
        bos = self.bos_id
        return [bos, *ids] if bos is not None and self.adds_bos and ids[:1] != [bos] else ids

    def _encode_after_cut(self, text: str) -> list[int]:
        """Tokens of a text that goes on in the middle of a message; after the next token that
        stands for itself it is as any other."""
        at = next(self._added_texts.places(text), len(text))
        return self.encode_continuation(text[:at]) + self.encode(text[at:], add_special=False)

    @cached_property
    def _added_texts(self) -> SpecialTexts:
        return SpecialTexts(self.vocabulary.added.values())

    @cached_property
    def _special_texts(self) -> SpecialTexts:
        v = self.vocabulary
        turns = {i for i, text in v.added.items() if is_turn_token(text)}
        texts = [v.added.get(i) or v.text(i) or "" for i in v.special | v.end | turns]
        added = self._backend.get_added_tokens_decoder().values()
        own = self._backend.normalizer
        normal = own is not None and any(t.normalized for t in added)
        return SpecialTexts(texts, own.normalize_str if normal else None)

    def _text_of(self, token: int | None) -> str:
        return "" if token is None else self.token(token)

    def _skips(self, token: int) -> bool:
        return token in self.vocabulary.special

    def _library_decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


def _require_text(text: object, where: str) -> None:
    try:
        if isinstance(text, str):
            text.encode("utf-8")
            return
    except UnicodeEncodeError:
        pass  # bytes that were no UTF-8 come as lone surrogates
    raise InputError(
        "only text can be tokenised",
        where=where,
        got=f"{type(text).__name__} {text!r}"[:80],
        expected="str without lone surrogates",
    )


# end of turn, of text, of message, and what code models write when a file is done
_ENDS_TEXT = (
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> "
    "<end_of_turn> <turn|> <|tool_response> <|endoftext|> <|end_of_text|> <end_of_utterance> "
    "<EOT> _<EOT> [EOT] [EOS] <eos> <｜end▁of▁sentence｜> [e~[ "
    "<|fim_pad|> <fim-pad> <fim_pad> <|fim_repo|> <|repo_name|> <fim-repo> <reponame> <|file_sep|>"
)
_ENDS = _ENDS_TEXT.split()
_MARKED_END = "</s>"  # only where the file marks it as a control token: it could be text


def end_tokens(vocab: Mapping[str, int], control: Container[int]) -> set[int]:
    """Ids of the tokens that end a generation; `control` tells which ids are no text."""
    found = {t: vocab[t] for t in _ENDS if t in vocab}
    if _MARKED_END in vocab and vocab[_MARKED_END] in control:
        found[_MARKED_END] = vocab[_MARKED_END]
    # where calls end a turn, <|end|> only ends one of several messages in it
    if ("<|call|>" in found and "<|return|>" in found) or (
        "<|calls|>" in found and "<|flush|>" in found
    ):
        found.pop("<|end|>", None)
    if "<|tool_response>" in found:
        found.pop(_MARKED_END, None)
    return set(found.values())
