"""Tools from the request to the call: what templates show, and what a model that draws anything
the grammar allows can write."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers as lib
from tool_templates import TEMPLATES, tokenizer

from rlx.errors import InputError, OptionError
from rlx.models.sampling import GenerationSettings
from rlx.models.structured_output import GrammarMask
from rlx.serve.answer_format import AnswerFormat, PreparedChat
from rlx.serve.events import Event, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from rlx.serve.reasoning import thinking_options

WEATHER = {
    "type": "object", "required": ["city", "days"], "additionalProperties": False,
    "properties": {
        "city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1,
                                                             "maximum": 14},
        "units": {"enum": ["metric", "imperial"]},
        "parts": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.",
                                      "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock", "description": "Time."}},
]  # fmt: skip
SCHEMAS = {"get_weather": WEATHER, "clock": {"type": "object", "maxProperties": 0}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "first-question"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {
            "name": "get_weather", "arguments": '{"city": "Paris-arg", "days": 3}'}},
        {"id": "call_2", "type": "function", "function": {
            "name": "clock", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny-result"},
    {"role": "tool", "tool_call_id": "call_2", "content": "noon-result"},
]  # fmt: skip
# reasoning that has an end: chance would never write the tag
OPENED = {"deepseek": "hm</think>", "qwen3": "<think>hm</think>", "granite": "<think>hm</think>"}
ASK = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AnswerFormat]:
    return {f: AnswerFormat(tokenizer(f, tmp_path_factory.mktemp(f), lib)) for f in TEMPLATES}


def draw(form: AnswerFormat, chat: PreparedChat, seed: int, wish: str = "") -> list[int]:
    """Tokens as a model of no mind draws them: `wish` as long as it is allowed, then anything; it
    ends when it may, and strings are short because quotes and ends are likely."""
    rng, vocab = random.Random(seed), len(form.tokenizer)
    settings = GenerationSettings.of({"max_tokens": 1000} | chat.settings)
    mask = GrammarMask(settings, form.tokenizer, vocab, [])
    hopes = form.tokenizer.encode(wish, add_special=False)
    tokens: list[int] = []
    liked = [*form.special.values()]
    liked += [i for t in '"}]\n<{' for i in form.tokenizer.encode(t, add_special=False)]
    while len(tokens) < 700:
        allowed = np.flatnonzero(np.unpackbits(mask.allowed.view(np.uint8), bitorder="little"))
        able = [int(t) for t in allowed if t < vocab]
        assert able, form.tokenizer.decode(tokens, skip_special=False)
        if hopes and hopes[0] in able:
            token = hopes.pop(0)
        elif form.tokenizer.end_ids & {*able} and not hopes:
            return tokens
        else:
            hopes = []
            good = [t for t in able if t in liked]
            token = rng.choice(good if good and rng.random() < 0.4 else able)
        tokens.append(token)
        mask.count(token)
    raise AssertionError("no end: " + form.tokenizer.decode(tokens, skip_special=False))


def read(form: AnswerFormat, chat: PreparedChat, tokens: list[int]) -> list[Event]:
    """Through the decoder that the engine would use, token by token."""
    stream = form.tokenizer.stream(shown=chat.settings.get("shown_special", frozenset()))
    parser = chat.parser()
    assert parser is not None
    events = [e for t in tokens for e in parser.push(stream.push(t))]
    return [*events, *parser.push(stream.flush()), *parser.end()]


def calls_of(events: list[Event]) -> list[tuple[str, str]]:
    names = [e.name for e in events if isinstance(e, ToolCallStart)]
    parts = [[e.arguments for e in events if isinstance(e, ToolCallDelta) and e.index == i]
             for i in range(len(names))]  # fmt: skip
    return [(n, "".join(p)) for n, p in zip(names, parts, strict=True)]


def text_of(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, TextDelta))


@pytest.mark.parametrize("family", TEMPLATES)
def test_templates_show_tools_calls_and_results(
    forms: dict[str, AnswerFormat], family: str
) -> None:
    form = forms[family]
    prompt = form.prepare(TALK, tools=TOOLS).prompt
    text = form.tokenizer.decode(prompt, skip_special=False)
    for part in ("first-question", "get_weather", "clock", "Paris-arg", "sunny-result",
                 "noon-result"):  # fmt: skip
        assert part in text, (part, text)
    assert '\\"city' not in text and "'city" not in text  # neither escaped twice nor Python
    assert "Paris-arg" not in form.tokenizer.decode(form.prepare(ASK, tools=TOOLS).prompt)


@pytest.mark.slow
@pytest.mark.parametrize("family", TEMPLATES)
def test_required_calls_fit_their_schemas(forms: dict[str, AnswerFormat], family: str) -> None:
    form = forms[family]
    chat = form.prepare(ASK, tools=TOOLS, choice="required")
    seen = set()
    for seed in range(12):
        wish = OPENED.get(family, "")
        if seed % 3 == 0 and family in ("qwen3", "granite"):
            wish = form.tools.first_marker
        events = read(form, chat, draw(form, chat, seed, wish))
        found = calls_of(events)
        assert found and not text_of(events).strip(), events
        for name, arguments in found:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        seen |= {n for n, _ in found}
    assert seen == {"get_weather", "clock"}


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_named_tool_is_called_once(forms: dict[str, AnswerFormat], family: str) -> None:
    named = {"type": "function", "function": {"name": "clock"}}
    chat = forms[family].prepare(ASK, tools=TOOLS, choice=named, parallel=False)
    for seed in range(4):
        events = read(forms[family], chat, draw(forms[family], chat, seed, OPENED.get(family, "")))
        assert [n for n, _ in calls_of(events)] == ["clock"]


@pytest.mark.slow
@pytest.mark.parametrize("family", TEMPLATES)
def test_text_is_free_and_calls_are_not(forms: dict[str, AnswerFormat], family: str) -> None:
    form = forms[family]
    chat = form.prepare(ASK, tools=TOOLS)
    plain = 'No tool: {"a": 1} <b> [x].'
    opened = OPENED.get(family, "")
    if family == "harmony":
        opened = "<|channel|>final<|message|>"
    tokens = draw(form, chat, 1, opened + plain)
    assert text_of(read(form, chat, tokens)) == plain
    written = form.tools.written([("get_weather", '{"city": "x", "days": 2}')])
    begun = written[: written.index("x")]
    for seed in range(4):
        lead = "" if family in ("llama", "harmony") else opened + "Let me see. "
        events = read(form, chat, draw(form, chat, seed, lead + begun))
        found = calls_of(events)
        assert found and found[0][0] == "get_weather", events
        assert text_of(events) == ("" if family in ("llama", "harmony") else "Let me see.")
        for name, arguments in found:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_an_object_without_properties_is_free(forms: dict[str, AnswerFormat]) -> None:
    free = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for family, wish in (
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"any": [1]}}\n</tool_call>'),
        ("xml", "<tool_call>\n<function=f>\n<parameter=any>\n[1]\n</parameter>\n</function>"),
    ):
        chat = forms[family].prepare(ASK, tools=free, choice="required", parallel=False)
        events = read(forms[family], chat, draw(forms[family], chat, 2, wish))
        assert [(n, json.loads(a)) for n, a in calls_of(events)] == [("f", {"any": [1]})]


def test_no_tools_need_no_grammar(forms: dict[str, AnswerFormat]) -> None:
    for family, form in forms.items():
        for given in (form.prepare(ASK), form.prepare(ASK, tools=TOOLS, choice="none")):
            assert "grammar" not in given.settings, family
    assert forms["hermes"].prepare(ASK).parser() is None


def test_reasoning_is_split_and_counted(forms: dict[str, AnswerFormat]) -> None:
    form = forms["qwen3"]
    for option, text in (
        (None, "<think>\nA b.\n</think>\n\nYes."),
        ("opened", "A b.\n</think>\nYes."),
    ):
        chat = form.prepare(ASK, template_options={"enable_thinking": option})
        tokens = form.tokenizer.encode(text, add_special=False)
        events = read(form, chat, tokens)
        thought = "".join(e.text for e in events if isinstance(e, ReasoningDelta))
        assert (thought, text_of(events)) == ("A b.", "Yes.")
        # one token a byte here, but "</": up to the "." with which the thought became certain
        assert chat.reasoning_tokens(tokens) == text.index("A b.") + 4
    closed = form.prepare(ASK, template_options=thinking_options(effort="none"))
    assert form.tokenizer.decode(closed.prompt).endswith("<think>\n\n</think>\n\n")
    events = read(form, closed, form.tokenizer.encode(" Yes. <think>", add_special=False))
    assert text_of(events) == " Yes. <think>"


def test_markers_of_granite_and_cohere_are_no_text(forms: dict[str, AnswerFormat]) -> None:
    for family, text in (
        ("granite", "<think>A b.</think><response>Yes.</response>"),
        ("cohere", "<|START_THINKING|>A b.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>"),
    ):
        chat = forms[family].prepare(ASK, template_options={"thinking": True})
        events = read(forms[family], chat, forms[family].tokenizer.encode(text, add_special=False))
        thought = "".join(e.text for e in events if isinstance(e, ReasoningDelta))
        assert (thought, text_of(events)) == ("A b.", "Yes."), family


def test_reasoning_and_a_schema_go_together(forms: dict[str, AnswerFormat]) -> None:
    wanted = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    for family, wish in (("deepseek", "hm</think>"), ("qwen3", "<think>hm</think>"), ("qwen3", "{"),
                         ("harmony", "<|channel|>analysis<|message|>hm<|end|>"
                          "<|start|>assistant<|channel|>final<|message|>")):  # fmt: skip
        form = forms[family]
        chat = form.prepare(ASK, settings={"json_schema": wanted})
        assert "json_schema" not in chat.settings
        events = read(form, chat, draw(form, chat, 3, wish))
        assert json.loads(text_of(events)).keys() == {"a"}, family


def test_options_of_templates() -> None:
    assert thinking_options() == {}
    assert thinking_options(False) == {"enable_thinking": False, "thinking": False}
    assert thinking_options(effort="xhigh")["reasoning_effort"] == "high"
    with pytest.raises(OptionError, match=r"unknown effort.*'huge'"):
        thinking_options(effort="huge")


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}],
         "auto", r"\[tools\[0\] \(f\)\]"),
        ([{"name": "g", "parameters": {"type": "object", "properties": {"a": {"type": 3}}}}],
         "auto", r"\[tools\[0\] \(g\)\] not a JSON schema"),
        ([{"type": "function", "function": {"name": "a b"}}], "auto", "a tool needs a name"),
        ([TOOLS[1], TOOLS[1]], "auto", "two tools of one name; got clock"),
        ([{"type": "retrieval"}], "auto", "only functions"),
        (["x"], "auto", "not a tool"),
        (TOOLS, "always", "unknown choice"),
        (TOOLS, {"function": {"name": "x"}}, "no such tool.*get_weather, clock"),
        ([], "required", "no tools"),
    ],
)  # fmt: skip
def test_wrong_tools_are_named(
    forms: dict[str, AnswerFormat], tools: Any, choice: Any, message: str
) -> None:
    with pytest.raises((InputError, OptionError), match=message):
        forms["hermes"].prepare(ASK, tools=tools, choice=choice)


def test_a_special_token_in_a_grammar_is_that_one_alone(forms: dict[str, AnswerFormat]) -> None:
    """Other special tokens were allowed with it, an end of the text among them."""
    form = forms["mistral"]
    chat = form.prepare(ASK, tools=TOOLS, choice="required")
    mask = GrammarMask(
        GenerationSettings.of(chat.settings), form.tokenizer, len(form.tokenizer), []
    )
    allowed = np.flatnonzero(np.unpackbits(mask.allowed.view(np.uint8), bitorder="little"))
    assert [*allowed] == [form.tokenizer.id_of("[TOOL_CALLS]")]
