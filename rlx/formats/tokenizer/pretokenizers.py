"""Pre-tokenizers of byte-level BPE vocabularies, by their GGUF name (`tokenizer.ggml.pre`).

A pre-tokenizer splits text into words with a list of regular expressions. Each isolates its matches
in what the ones before left; BPE then merges the bytes of each word. The patterns are those of the
models' own tokenizers.
"""

from __future__ import annotations

from typing import Any

from rlx.errors import UnsupportedError, close_names
from rlx.support.records import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """The regular expressions of one family of vocabularies."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token stays whole
    add_bos: bool = False  # where the file does not say


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str, contraction: str = _CONTRACTION + "|") -> str:
    """Words with at most one other character before them, digits, runs of symbols, spaces."""
    return (
        rf"{contraction}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased_words(digits: str, contraction: str) -> str:
    """Like `_words`, but a new word starts where lower case turns into upper case."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{contraction}|{before}{upper}+{lower}*{contraction}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


# cased letters, less those that joined Unicode after this vocabulary was made
_DEEPSEEK_LETTER = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C88}\x{2D00}-\x{2D2D}"
    r"\x{A790}-\x{A7FA}\x{AB30}-\x{AB68}\x{10570}-\x{105BC}\x{16E40}-\x{16E7F}"
    r"\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF1E}]]"
)
_DEEPSEEK_PUNCTUATION = (
    r"[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]"
)
_EAST_ASIAN = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"
_KANJI_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_DEEPSEEK3 = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
) + _SPACES
_NOT_PUNCTUATION = r" ?[^(\s|.,!?…。，、।۔،)]+"
_MARKS = (
    _CONTRACTION
    + (r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|")
    + _SPACES
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES

_LLAMA3, _QWEN2 = _words(r"\p{N}{1,3}"), _words(r"\p{N}")
_O200K = _cased_words(r"\p{N}{1,3}", _CONTRACTION + "?")

_SPLITS: dict[str, Split] = {
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 modern-bert mellum gigachat "
    "a.x-4.0 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe": Split(
        (GPT2_WORDS,)
    ),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Split(
        (r"\p{N}", GPT2_WORDS)
    ),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": Split(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": Split((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan solar-open grok-2 kormo f2llmv2": Split(
        (_QWEN2,)
    ),
    "qwen35": Split((_MARKS,)),
    "minicpm5": Split((r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True),
    "deepseek-llm": Split(
        (
            r"[\r\n]",
            rf"\s?{_DEEPSEEK_LETTER}+",
            rf"\s?{_DEEPSEEK_PUNCTUATION}+",
            r"\s+$",
            _EAST_ASIAN,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm": Split((r"\p{N}{1,3}", _KANJI_KANA, _DEEPSEEK3)),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", GPT2_WORDS, "[0-9][0-9][0-9]")),
    "bloom poro-chat gpt3-finnish": Split((_NOT_PUNCTUATION,)),
    "viking": Split((_NOT_PUNCTUATION, r"\p{N}")),
    "tekken": Split((_cased_words(r"\p{N}", ""),), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 minimax-m2": Split((_O200K,)),
    "bailingmoe bailingmoe2 llada-moe": Split((_BAILING,)),
    "seed-coder": Split((_SEED,)),
}
_BY_NAME = {name: split for names, split in _SPLITS.items() for name in names.split()}


def find_split(name: str, where: str) -> Split:
    """The split of a GGUF name."""
    split = _BY_NAME.get(name)
    if split is None:
        raise UnsupportedError(
            "unknown pre-tokenizer",
            where=where,
            got=f"tokenizer.ggml.pre {name!r}",
            expected=", ".join(sorted(_BY_NAME)),
            hint=close_names(name, _BY_NAME),
        )
    return split


def gguf_name(split: Split, where: str) -> str:
    """The GGUF name of a split."""
    for names, known in _SPLITS.items():
        if (known.patterns, known.ignore_merges) == (split.patterns, split.ignore_merges):
            return names.split()[0]
    raise UnsupportedError(
        "a pre-tokenizer that GGUF has no name for",
        where=where,
        got=" then ".join(split.patterns)[:200],
    )


def make_pre_tokenizer(split: Split, tokenizers: Any) -> Any:
    """The split as a pre-tokenizer of the `tokenizers` library."""
    pre = tokenizers.pre_tokenizers
    *patterns, last = split.patterns
    built_in = last == GPT2_WORDS  # much faster than the same as a pattern
    if not built_in:
        patterns.append(last)
    parts = [pre.Split(tokenizers.Regex(p), "isolated") for p in patterns]
    parts.append(pre.ByteLevel(add_prefix_space=False, use_regex=built_in))
    return pre.Sequence(parts) if len(parts) > 1 else parts[0]
