"""Tokens that end a generation, known by their text where files do not name them all."""

from __future__ import annotations

from collections.abc import Container, Mapping

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
