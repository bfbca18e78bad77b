"""Chat templates as well-known families of models have them, and conversations for them."""

from __future__ import annotations

from typing import Any

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """{% set loop_messages = messages %}{% for message in loop_messages %}
{%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
    + message['content'] | trim + '<|eot_id|>' %}
{%- if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}
{%- endfor %}{% if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{- raise_exception('System role not supported') }}{% endif %}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}
{%- set role = message['role'] %}{% endif %}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

MISTRAL = """{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content'] %}
{%- set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}
{{- bos_token }}{% for message in loop_messages %}{% if message['role'] == 'user' %}
{%- if loop.last and system_message is defined %}
{{- '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}{% else %}
{{- '[INST] ' + message['content'] + '[/INST]' }}{% endif %}
{%- elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + eos_token }}
{%- endif %}{% endfor %}"""

PHI3 = """{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}
{{- '<|system|>\\n' + message['content'] + '<|end|>\\n' }}{% elif message['role'] == 'user' %}
{{- '<|user|>\\n' + message['content'] + '<|end|>\\n' }}{% elif message['role'] == 'assistant' %}
{{- '<|assistant|>\\n' + message['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

ZEPHYR = """{% for message in messages %}{% if message['role'] == 'user' %}
{{- '<|user|>\\n' + message['content'] + eos_token }}{% elif message['role'] == 'system' %}
{{- '<|system|>\\n' + message['content'] + eos_token }}{% else %}
{{- '<|assistant|>\\n'  + message['content'] + eos_token }}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '\\n<|assistant|>' }}{% endif %}{% endfor %}"""

# template, whether it is SentencePiece (a space before texts), BOS, EOS, other special tokens
FAMILIES: dict[str, tuple[str, bool, str, str, list[str]]] = {
    "chatml": (CHATML, False, "<|endoftext|>", "<|im_end|>", ["<|im_start|>"]),
    "llama3": (
        LLAMA3, False, "<|begin_of_text|>", "<|eot_id|>",
        ["<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"],
    ),
    "gemma": (GEMMA, True, "<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>"]),
    "mistral": (MISTRAL, True, "<s>", "</s>", ["[INST]", "[/INST]"]),
    "phi3": (
        PHI3, True, "<s>", "<|endoftext|>", ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    ),
    "zephyr": (ZEPHYR, True, "<s>", "</s>", []),
}  # fmt: skip

_USER = {"role": "user", "content": " What is 1 < 2 | 3?\n<b>Tell</b> me, é 日本 🦙.  "}
_ANSWER = {"role": "assistant", "content": "  It is a [list] of <things>; see {{ x }}.\n"}
TALKS: dict[str, list[dict[str, Any]]] = {
    "one": [_USER],
    "three": [_USER, _ANSWER, {"role": "user", "content": "and\tthen?"}],
    "system": [{"role": "system", "content": "Be  brief. "}, _USER],
}


def write_tokenizer(family: str, folder: Any, library: Any) -> None:
    """tokenizer.json of a small vocabulary with the family's special tokens; `library` is the
    `tokenizers` module."""
    _, spaced, bos, eos, others = FAMILIES[family]
    words = ["th", "he", "is", "user", "system", "in", "st", "ist", "me", "te", "ll"]
    pairs = [(w[:-1], w[-1]) for n in range(2, 9) for w in _prefixes(words, n)]
    if spaced:
        letters = sorted({c for w in words for c in w} | {"▁", "<", ">", "|"})
        tokens = ["<unk>", bos, eos, *(f"<0x{i:02X}>" for i in range(256)), *letters]
        tokens += [a + b for a, b in pairs]
        vocab = {t: i for i, t in enumerate(dict.fromkeys(tokens))}
        model = library.models.BPE(vocab, pairs, unk_token="<unk>", byte_fallback=True)
        made = library.Tokenizer(model)
        norm, dec = library.normalizers, library.decoders
        made.normalizer = norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")])
        made.decoder = dec.Sequence(
            [dec.Replace("▁", " "), dec.ByteFallback(), dec.Fuse(), dec.Strip(" ", 1, 0)]
        )
        specials = ["<unk>", bos, eos, *others]
    else:
        alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
        tokens = [*alphabet, *(a + b for a, b in pairs)]
        vocab = {t: i for i, t in enumerate(dict.fromkeys(tokens))}
        made = library.Tokenizer(library.models.BPE(vocab, pairs))
        made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = library.decoders.ByteLevel()
        specials = [bos, eos, *others]
    rstrip = family == "phi3"
    made.add_special_tokens(
        [library.AddedToken(t, normalized=False, rstrip=rstrip and t in others) for t in specials]
    )
    made.save(str(folder / "tokenizer.json"))


def _prefixes(words: list[str], length: int) -> list[str]:
    """The beginnings of the words that have this length: each is a merge."""
    return list(dict.fromkeys(w[:length] for w in words if len(w) >= length))
