"""Answers with tool calls, as the families publish their formats: the same events at any split."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.serve.events import Event, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from rlx.serve.tools.definitions import Tool
from rlx.serve.tools.families import find_family
from rlx.serve.tools.scanner import joined

WEATHER = Tool(
    "get_weather", "The weather of a place.",
    {"type": "object", "required": ["city"], "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"},
        "units": {"enum": ["metric", "imperial"]}, "at": {"type": ["number", "null"]}}},
)  # fmt: skip
CLOCK = Tool("clock", "The time.", {})
PARIS = '{"city": "Pa\\"r}is é", "days": 3}'

# a part of a template that names the family: enough to find the format
SIGNS = {
    "hermes": "<tool_call>\n{{ call }}\n</tool_call>",
    "generic": "{{ messages }}",
    "xml": "<tool_call>\n<function=…> <parameter=…>",
    "llama": '<|python_tag|> "parameters": ',
    "mistral": "[TOOL_CALLS]",
    "mistral-args": "[TOOL_CALLS] [ARGS]",
    "deepseek": "<｜tool▁call▁begin｜> ```json",
    "deepseek-v3.1": "<｜tool▁call▁begin｜>",
    "phi": "<|tool|> <|/tool|>",
    "granite": "<|tool_call|>",
    "cohere": "<|START_ACTION|>",
    "smollm3": "xml_tools <tool_call>",
    "harmony": "<|channel|> <|message|>",
}
_CALL = f'{{"name": "get_weather", "arguments": {PARIS}}}'
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_ALL, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

# family, answer, what is read from it: reasoning, text, calls
ANSWERS: list[tuple[str, str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", f"<tool_call>\n{_CALL}\n</tool_call>", "", "", [("get_weather", PARIS)]),
    ("hermes", f"Let me see.\n\n<tool_call>\n{_CALL}\n</tool_call>\n"
     '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>', "", "Let me see.",
     [("get_weather", PARIS), ("clock", "{}")]),
    ("hermes", '<tool_call>{"arguments": {"city": "x"}, "name": "get_weather"}</tool_call>', "",
     "", [("get_weather", '{"city": "x"}')]),
    ("hermes", '<tool_call>{"name": "clock"}</tool_call>', "", "", [("clock", "{}")]),
    ("hermes", '<tool_call>{"name": "clock", "arguments": "{\\"a\\": \\"\\\\n\\"}"}</tool_call>',
     "", "", [("clock", '{"a": "\\n"}')]),
    ("hermes", "1 < 2, <tool_box>, and <tool_call", "", "1 < 2, <tool_box>, and <tool_call", []),
    ("hermes", "A <tool_call> is a tag.", "", "A <tool_call> is a tag.", []),
    ("hermes", "cut <tool_call>\n{\"na", "", "cut", []),
    ("generic", f"<tool_call>[{_CALL}, {_CALL}]</tool_call>", "", "",
     [("get_weather", PARIS)] * 2),
    ("xml", "Now:\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis <é>\n\"2\"\n"
     "</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=units>\nmetric\n</parameter>\n"
     "<parameter=at>\nnull\n</parameter>\n</function>\n</tool_call>", "", "Now:",
     [("get_weather", {"city": 'Paris <é>\n"2"', "days": 3, "units": "metric", "at": None})]),
    ("xml", "<function=clock>\n</function>\n</tool_call>", "", "", [("clock", {})]),
    ("llama", f'{{"name": "get_weather", "parameters": {PARIS}}}', "", "",
     [("get_weather", PARIS)]),
    ("llama", f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {PARIS}}}',
     "", "", [("get_weather", PARIS)]),
    ("llama", '{"name": "clock", "parameters": {}}; {"name": "clock", "parameters": {}}', "", "",
     [("clock", "{}")] * 2),
    ("llama", '{"name": "Ann", "age": 3} is JSON.', "", '{"name": "Ann", "age": 3} is JSON.', []),
    ("llama", '{"city": {"a": [1', "", '{"city": {"a": [1', []),
    ("llama", "Hello {there}", "", "Hello {there}", []),
    ("mistral", f'[TOOL_CALLS][{_CALL}, {{"name": "clock", "arguments": {{}}, "id": "abcdefghi"}}]',
     "", "", [("get_weather", PARIS), ("clock", "{}")]),
    ("mistral-args", f"Yes.[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]clock[CALL_ID]abcdefghi"
     "[ARGS]{}", "", "Yes.", [("get_weather", PARIS), ("clock", "{}")]),
    ("deepseek", f"Let me look.{_ALL}{_BEGIN}function{_SEP}get_weather\n```json\n{PARIS}\n```{_END}"
     f"\n{_BEGIN}function{_SEP}clock\n```json\n{{}}\n```{_END}{_ALL_END}", "", "Let me look.",
     [("get_weather", PARIS), ("clock", "{}")]),
    ("deepseek-v3.1", f"{_ALL}{_BEGIN}get_weather{_SEP}{PARIS}{_END}{_BEGIN}clock{_SEP}{{}}{_END}"
     f"{_ALL_END}", "", "", [("get_weather", PARIS), ("clock", "{}")]),
    ("phi", f"<|tool_call|>[{_CALL}]<|/tool_call|>", "", "", [("get_weather", PARIS)]),
    ("granite", f"<|tool_call|>[{_CALL}]", "", "", [("get_weather", PARIS)]),
    ("cohere", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
     f'"parameters": {PARIS}}}\n]<|END_ACTION|>', "", "", [("get_weather", PARIS)]),
    ("smollm3", f"<tool_call>{_CALL}</tool_call>", "", "", [("get_weather", PARIS)]),
    ("harmony", "<|channel|>analysis<|message|>User asks.<|end|><|start|>assistant<|channel|>"
     f"commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|>",
     "User asks.", "", [("get_weather", PARIS)]),
    ("harmony", "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final"
     "<|message|>It is < 3 <|x|> warm.<|return|>", "Hm", "It is < 3 <|x|> warm.", []),
    ("harmony", " to=functions.clock<|channel|>commentary json<|message|>{}", "", "",
     [("clock", "{}")]),
    ("harmony", "plain", "", "plain", []),
]  # fmt: skip


def read(family: str, pieces: list[str]) -> list[Event]:
    parser = find_family(SIGNS[family]).scanner([WEATHER, CLOCK])
    events = [e for piece in pieces for e in parser.push(piece)]
    return joined([*events, *parser.end()])


def parts(events: list[Event]) -> tuple[str, str, list[tuple[str, str]]]:
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            assert event.index == len(calls) and event.id
            calls.append([event.name, ""])
        elif isinstance(event, ToolCallDelta):
            assert event.index == len(calls) - 1
            calls[-1][1] += event.arguments
    text = "".join(e.text for e in events if isinstance(e, TextDelta))
    thought = "".join(e.text for e in events if isinstance(e, ReasoningDelta))
    return thought, text, [(n, a) for n, a in calls]


@pytest.mark.parametrize("family", SIGNS)
def test_templates_name_their_family(family: str) -> None:
    assert find_family(SIGNS[family]).name == family


@pytest.mark.parametrize("case", ANSWERS, ids=lambda c: f"{c[0]}: {c[1][:24]!r}")
def test_answers_are_read(case: tuple[str, str, str, str, list[tuple[str, Any]]]) -> None:
    family, answer, thought, text, calls = case
    for pieces in ([answer], list(answer)):
        found = parts(read(family, pieces))
        assert found[:2] == (thought, text)
        assert [n for n, _ in found[2]] == [n for n, _ in calls]
        for (_, got), (_, wanted) in zip(found[2], calls, strict=True):
            wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
            assert json.loads(got) == wanted


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_split_gives_the_same_events(data: st.DataObject) -> None:
    family, answer, *_ = data.draw(st.sampled_from(ANSWERS))
    end = data.draw(st.integers(0, len(answer)))  # cut off anywhere
    cuts = sorted(data.draw(st.lists(st.integers(0, end), max_size=12)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, end], strict=True)]
    assert parts(read(family, pieces)) == parts(read(family, [answer[:end]]))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_text_is_read_without_failing(data: st.DataObject) -> None:
    """Pieces of all formats in any order: no error, the same at any split, arguments that begin."""
    family = data.draw(st.sampled_from([*SIGNS]))
    words = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "{", "}", "[", "]", '"', ":",
             "<function=", "<parameter=", ">", "</parameter>", "clock", '{"name": "clock"', ",",
             '"arguments": ', "<|channel|>", "<|message|>", "<|end|>", "<|start|>", " ", "\n", "\\",
             _ALL, _BEGIN, _SEP, "<|tool_call|>", "<|START_ACTION|>", "é", "to=functions.f",
             "<|python_tag|>", "function", "```json", "1", "null"]  # fmt: skip
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=14)))
    assert parts(read(family, list(text))) == parts(read(family, [text]))


def test_deltas_come_as_soon_as_they_are_certain() -> None:
    parser = find_family(SIGNS["hermes"]).scanner([WEATHER])
    assert parser.push("Hi <tool") == [TextDelta("Hi")]
    assert parser.push('_call>\n{"name": "get_wea') == []  # the space went with the marker
    (start,) = parser.push('ther"')
    assert isinstance(start, ToolCallStart) and start.name == "get_weather"
    assert parser.push(', "arguments": {"ci') == [ToolCallDelta(0, '{"ci')]
    assert parser.push('ty": "x"}}\n</tool_') == [ToolCallDelta(0, 'ty": "x"}')]
    assert parser.push("call>") == [] == parser.end()


@pytest.mark.parametrize("case", ANSWERS, ids=lambda c: f"{c[0]}: {c[1][:24]!r}")
def test_an_answer_cut_off_in_a_call_shows_no_marker(
    case: tuple[str, str, str, str, list[tuple[str, Any]]],
) -> None:
    family, answer, _, text, calls = case
    names = [n for n, _ in calls]
    for end in range(len(answer)):
        _, shown, found = parts(read(family, [answer[:end]]))
        assert [n for n, _ in found] == names[: len(found)]
        assert not found or shown == text, (end, shown)
        assert not any("</" in a or "<｜" in a for _, a in found), found
