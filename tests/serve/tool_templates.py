"""Chat templates with tools, written after those of well-known families, and a vocabulary of bytes
with their special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlx.formats.tokenizer import Tokenizer
from rlx.formats.tokenizer.from_json import tokenizer_from_file

_CHATML_END = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_HERMES = """{% if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- '<tools>\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{{- '</tools>\\nAnswer with <tool_call>{"name": …, "arguments": …}</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages if m.role != 'system' %}{% if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{% set f = call.function %}
{{- '\\n<tool_call>\\n{"name": "' + f.name + '", "arguments": ' + f.arguments | tojson }}
{{- '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"""
_QWEN3 = _CHATML_END.replace(
    "assistant\\n' }}",
    "assistant\\n' }}{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{% elif enable_thinking == 'opened' %}{{ '<think>\\n' }}{% endif %}",
)
_CODER = """{% if tools %}<|im_start|>system
{% for tool in tools %}<function>{{ tool.function.name }}</function>{% endfor %}
<function=example><parameter=x></parameter></function><|im_end|>{{ '\\n' }}{% endif %}
{%- for m in messages %}{% if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for k, v in call.function.arguments | items %}
{{- '<parameter=' + k + '>\\n' + v | string + '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"""
_LLAMA = """{{ bos_token }}{% set head = '<|start_header_id|>' %}{% for m in messages %}
{%- if m.role == 'tool' %}
{{- head + 'ipython<|end_header_id|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- head + 'assistant<|end_header_id|>\\n\\n{"name": "' + f.name + '", "parameters": ' }}
{{- f.arguments | tojson + '}<|eot_id|>' }}
{%- else %}{{ head + m.role + '<|end_header_id|>\\n\\n' }}
{%- if tools and loop.first %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}
{{- m.content + '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ head + 'assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
_MISTRAL = """{{ bos_token }}{% if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson }}
{{- '[/AVAILABLE_TOOLS]' }}{% endif %}{% for m in messages %}{% if m.role == 'user' %}
{{- '[INST]' + m.content + '[/INST]' }}{% elif m.tool_calls %}CALLS{{ eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{{- '[TOOL_RESULTS]' + m.tool_call_id + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.role == 'system' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"""
_LIST = """{{ '[TOOL_CALLS][' }}{% for c in m.tool_calls %}{{ c.function | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}]"""
_ARGS = """{% for c in m.tool_calls %}{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}
{{- c.function.arguments | tojson }}{% endfor %}"""
_DEEPSEEK = """{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- elif m.tool_calls and m.content is none %}{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
{%- for c in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' }}
{{- c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}
{%- else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""
_PHI = """{% for m in messages %}{% if m.role == 'system' and m.tools %}
{{- '<|system|>' + m.content + '<|tool|>' + m.tools + '<|/tool|><|end|>' }}{% else %}
{{- '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
_GRANITE = """{% for m in messages %}
{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\\n' }}
{%- endfor %}{% if tools %}{{ '<|start_of_role|>available_tools<|end_of_role|>' + tools | tojson }}
{{- ' answer with <|tool_call|>, or <response>' }}{% endif %}
{%- if thinking %}{{ '<think>' }}{% endif %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}"""
_COHERE = """{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}
{%- if m.tool_calls %}<|CHATBOT_TOKEN|><|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>
{{- '<|START_ACTION|>[' }}{% for c in m.tool_calls %}
{{- '{"tool_call_id": "0", "tool_name": "' + c.function.name + '", "parameters": ' }}
{{- c.function.arguments | tojson + '}' }}{% endfor %}{{ ']<|END_ACTION|>' }}
{%- elif m.role == 'tool' %}<|START_TOOL_RESULT|>{{ m.content | tojson }}<|END_TOOL_RESULT|>
{%- else %}<|{{ m.role | upper }}_TOKEN|>{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>
{%- endfor %}<|CHATBOT_TOKEN|>"""
_HARMONY = """<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>
{%- if tools %}<|start|>developer<|message|>
{%- for t in tools %}{{ t.function.name }} {% endfor %}<|end|>{% endif %}
{%- set last = namespace(name='') %}{% for m in messages %}{% if m.tool_calls %}
{%- set c = m.tool_calls[0].function %}{% set last.name = c.name %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>
{%- endif %}
{{- '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary json<|message|>' }}
{{- c.arguments | tojson + '<|call|>' }}{% elif m.role == 'tool' %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson + '<|end|>' }}{% elif m.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% else %}
{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
_GEMMA = """{{ bos_token }}{% if messages[0].role == 'system' %}
{{- raise_exception('System role not supported') }}{% endif %}{% for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + m.role + '\\n' + m.content + '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
_DS_TOKENS = [
    f"<｜tool▁{n}｜>" for n in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
]
_IM = ["<|im_start|>"]

# template, the token that ends a turn, special tokens
TEMPLATES: dict[str, tuple[str, str, list[str]]] = {
    "hermes": (_HERMES + _CHATML_END, "<|im_end|>", _IM),
    "qwen3": (_HERMES + _QWEN3, "<|im_end|>", _IM),
    "xml": (_CODER + _CHATML_END, "<|im_end|>", _IM),
    "llama": (_LLAMA + "{# <|python_tag|> #}", "<|eot_id|>",
              ["<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"]),
    "mistral": (_MISTRAL.replace("CALLS", _LIST), "</s>",
                ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]),
    "mistral-args": (_MISTRAL.replace("CALLS", _ARGS), "</s>",
                     ["[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]"]),
    "deepseek": (_DEEPSEEK, "<｜end▁of▁sentence｜>",
                 ["<｜User｜>", "<｜Assistant｜>", *_DS_TOKENS]),
    "phi": (_PHI, "<|end|>", ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>",
                              "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"]),
    "granite": (_GRANITE, "<|end_of_text|>", ["<|start_of_role|>", "<|end_of_role|>",
                                              "<|tool_call|>"]),
    "cohere": (_COHERE, "<|END_OF_TURN_TOKEN|>",
               ["<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>",
                "<|START_RESPONSE|>", "<|END_RESPONSE|>"]),
    "harmony": (_HARMONY, "<|return|>", ["<|start|>", "<|end|>", "<|message|>", "<|channel|>",
                                         "<|constrain|>", "<|call|>"]),
    "gemma": (_GEMMA, "<end_of_turn>", ["<start_of_turn>"]),
}  # fmt: skip


def tokenizer(family: str, folder: Path, library: Any) -> Tokenizer:
    """A byte-level vocabulary with some words of JSON, and the family's special tokens."""
    template, end, special = TEMPLATES[family]
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("n", "a"),
        ("m", "e"),
        ("na", "me"),
        ("t", "o"),
        ("o", "l"),
        ("to", "ol"),
        ("<", "/"),
    ]
    vocab = {t: i for i, t in enumerate([*alphabet, *(a + b for a, b in merges)])}
    made = library.Tokenizer(library.models.BPE(vocab, merges))
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = library.decoders.ByteLevel()
    made.add_special_tokens(
        [library.AddedToken(t, normalized=False) for t in ["<s>", end, *special]]
    )
    made.save(str(folder / "tokenizer.json"))
    told = {"bos_token": "<s>", "eos_token": end, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(told), encoding="utf-8")
    return tokenizer_from_file(folder / "tokenizer.json")
