"""What a GGUF file says about its vocabulary, whatever its kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import FormatError
from rlx.formats.gguf import GgufFile, StringArray
from rlx.formats.pieces import Spelling
from rlx.formats.specials import end_tokens
from rlx.formats.tokenizer import Tokenizer, Vocabulary

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6  # types of tokens
KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"


class Source:
    """The metadata that all kinds of vocabularies share."""

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
        spelling: Spelling,
        *,
        bos: int | None,
        eos: int | None,
        add_bos: bool,
        add_eos: bool,
        unknown: int | None = None,
    ) -> Tokenizer:
        """The tokenizer, with special tokens and what does not depend on the kind."""
        self._add_special(backend)
        ends = end_tokens(self.vocab, set(self.ids(CONTROL)))
        ends |= {i for i in (eos, self.token("eot"), self.token("eom")) if i is not None}
        special = frozenset(self.ids(CONTROL, UNKNOWN))
        vocabulary = Vocabulary(
            size=len(self.tokens),
            text=self.texts.__getitem__,
            spelling=spelling,
            special=special,
            literal={i: self.tokens[i] for i in [*special, *self.ids(USER)]},
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
        added = self.lib.AddedToken
        # Phi-3's own tokenizer takes the spaces after its marks into them; files do not say so
        name = self.file.get("general.name", str, "").lower()
        strips = "phi-3" in name or "phi3" in name
        plain = ("<unk>", "<s>", "<|endoftext|>")
        control = [t for t in map(self.tokens.__getitem__, self.ids(CONTROL, UNKNOWN)) if t]
        backend.add_special_tokens(
            [added(t, normalized=False, rstrip=strips and t not in plain) for t in control]
        )
        users = [t for t in map(self.tokens.__getitem__, self.ids(USER)) if t]
        backend.add_tokens([added(t, normalized=False) for t in users])

    def _templates(self) -> dict[str, str]:
        found = {}
        for key, value in self.file.metadata.items():
            if isinstance(value, str) and (key + ".").startswith(_TEMPLATE + "."):
                found[key[len(_TEMPLATE) + 1 :] or "default"] = value
        return found
