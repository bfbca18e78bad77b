"""Tools and reasoning over HTTP, by the clients that people use: openai and anthropic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
from cli_support import write_tiny
from conftest import TINY, RunningServer

from rlx.serve.api_errors import ApiError
from rlx.serve.model_pool import ModelSpec
from rlx.serve.openai.response_store import ResponseStore
from rlx.serve.server_config import ServerConfig

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
THINKS = TEMPLATE + "{% if enable_thinking %}<think>\n{% endif %}"
SCHEMA = {
    "type": "object", "required": ["city", "days"], "additionalProperties": False,
    "properties": {"city": {"type": "string", "maxLength": 5},
                   "days": {"type": "integer", "minimum": 1, "maximum": 9}},
}  # fmt: skip
# a byte is a token, three marks begin turns, two end them; Jinja drops the last line break
PROMPT = 5 + len("system\nBe brief.\nuser\nHi\nassistant")
KEY = "secret-key-of-tests"
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
CLAUDE_TOOLS: Any = [{"name": "weather", "description": "It.", "input_schema": SCHEMA}]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("tools")
    specs = []
    for name, template in (("tiny", TEMPLATE), ("thinker", THINKS)):
        path = folder / f"{name}.gguf"
        write_tiny(path, template=template, more={"llama.context_length": 2048})
        specs.append(ModelSpec(name, str(path), options=TINY))
    config = ServerConfig(models=tuple(specs), port=0, shutdown_seconds=5, keys=(KEY,))
    running = RunningServer(config)
    yield running
    running.stop()


@pytest.fixture
def gpt(tool_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def claude(tool_server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tool_server.url, api_key=KEY, max_retries=0) as client:
        yield client


def fits(arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), SCHEMA)


def test_chat_tools(gpt: openai.OpenAI) -> None:
    ask: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "seed": 3,
                "tools": CHAT_TOOLS, "tool_choice": "required", "parallel_tool_calls": False,
                "max_tokens": 300}  # fmt: skip
    whole = gpt.chat.completions.create(**ask)
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    fits(call.function.arguments)
    streamed, ids = "", set()
    for chunk in gpt.chat.completions.create(stream=True, **ask):
        for delta in chunk.choices[0].delta.tool_calls or []:
            ids |= {delta.id} - {None}
            streamed += delta.function.arguments or ""
    assert streamed == call.function.arguments and len(ids) == 1
    after = gpt.chat.completions.create(
        model="tiny", max_tokens=4, tools=CHAT_TOOLS, tool_choice="none",
        messages=[*ask["messages"], choice.message,
                  {"role": "tool", "tool_call_id": call.id, "content": "sunny"}],
    )  # fmt: skip
    assert after.usage.prompt_tokens > whole.usage.prompt_tokens + len(call.function.arguments)


def test_a_wrong_schema_names_its_tool(gpt: openai.OpenAI) -> None:
    wrong: Any = [{"type": "function", "name": "bad", "parameters": {"type": "objekt"}}]
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\] \(bad\)"):
        gpt.responses.create(model="tiny", input="Hi", tools=wrong)


def test_responses(gpt: openai.OpenAI) -> None:
    made = gpt.responses.create(
        model="tiny", input="Hi", instructions="Be brief.", max_output_tokens=5, metadata={"a": "b"}
    )
    assert made.status == "incomplete" and made.incomplete_details.reason == "max_output_tokens"
    assert made.usage.output_tokens == 5 and made.metadata == {"a": "b"}
    assert made.usage.input_tokens == PROMPT
    assert made.output[0].content[0].text == made.output_text
    again = gpt.responses.create(
        model="tiny", previous_response_id=made.id, max_output_tokens=3,
        input=[{"role": "user", "content": [{"type": "input_text", "text": "More"}]}],
    )  # fmt: skip
    assert again.usage.input_tokens > made.usage.input_tokens  # the first turn is there
    assert gpt.responses.retrieve(again.id).output_text == again.output_text
    gpt.responses.delete(again.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(again.id)
    forgotten = gpt.responses.create(model="tiny", input="x", store=False, max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="not found"):
        gpt.responses.create(model="tiny", input="y", previous_response_id=forgotten.id)


def test_responses_call_tools(gpt: openai.OpenAI) -> None:
    ask: Any = {"model": "tiny", "input": "Hi", "tools": TOOLS, "tool_choice": "required",
                "parallel_tool_calls": False, "max_output_tokens": 300}  # fmt: skip
    made = gpt.responses.create(**ask)
    (call,) = made.output
    assert call.type == "function_call" and call.name == "weather" and made.status == "completed"
    fits(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    by_id = gpt.responses.create(
        model="tiny", input=[result], previous_response_id=made.id, max_output_tokens=2
    )
    whole: Any = [{"role": "user", "content": "Hi"}, call.model_dump(exclude_none=True), result]
    by_items = gpt.responses.create(model="tiny", input=whole, max_output_tokens=2)
    assert by_id.usage.input_tokens == by_items.usage.input_tokens


def test_events_of_responses(gpt: openai.OpenAI) -> None:
    ask: Any = {"model": "tiny", "input": "Hi", "stream": True, "temperature": 0}
    events = list(gpt.responses.create(max_output_tokens=6, **ask))
    kinds = [e.type for e in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]  # fmt: skip
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done",
                          "response.output_item.done", "response.incomplete"]  # fmt: skip
    assert {*kinds[4:-4]} == {"response.output_text.delta"}
    assert [e.sequence_number for e in events] == [*range(len(events))]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == events[-4].text
    called = list(gpt.responses.create(tools=TOOLS, tool_choice="required", max_output_tokens=300,
                                       parallel_tool_calls=False, **ask))  # fmt: skip
    kinds = [e.type for e in called]
    assert kinds[2] == "response.output_item.added" and called[2].item.name == "weather"
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done",
                          "response.completed"]  # fmt: skip
    arguments = "".join(e.delta for e in called[3:-3])
    assert arguments == called[-3].arguments
    fits(arguments)


def test_responses_think_and_follow_schemas(gpt: openai.OpenAI) -> None:
    thought = gpt.responses.create(
        model="thinker", input="Hi", reasoning={"effort": "high"}, max_output_tokens=7
    )
    assert [i.type for i in thought.output] == ["reasoning"] and thought.output[0].content[0].text
    assert thought.usage.output_tokens_details.reasoning_tokens > 0
    stream = gpt.responses.create(
        model="thinker", input="Hi", reasoning={"effort": "low"}, max_output_tokens=7, stream=True
    )
    assert "response.reasoning_text.delta" in [e.type for e in stream]
    form: Any = {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA}}
    quiet: Any = {"effort": "none"}  # then the answer is the JSON alone
    made = gpt.responses.create(
        model="thinker", input="Hi", text=form, reasoning=quiet, max_output_tokens=300
    )
    assert [i.type for i in made.output] == ["message"]
    fits(made.output_text)


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ({"input": []}, "1 to 4096 items"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "function_call_output"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "wrong": 1}, "Unknown parameter: 'wrong'"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, r"tools\[0\]"),
        ({"input": "x", "tools": TOOLS, "tool_choice": {"type": "function", "name": "y"}},
         "no such tool"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "reads text"),
        ({}, "Missing required parameter: 'input'"),
    ],
)  # fmt: skip
def test_wrong_responses(tool_server: RunningServer, body: Any, match: str) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    found = tool_server.post("/v1/responses", {"model": "tiny"} | body, headers=headers)
    assert found.status_code == 400
    with pytest.raises(ValueError, match=match):
        raise ValueError(found.json()["error"]["message"])


def test_the_store_is_bounded_and_keeps_callers_apart() -> None:
    store = ResponseStore(most=2, most_bytes=400)
    for name in "abc":
        store.add("me", name, [{"role": "user", "content": name}], {"id": name})
    assert len(store) == 2 and store.get("me", "c").response == {"id": "c"}
    for caller, name in (("me", "a"), ("you", "c")):
        with pytest.raises(ApiError, match="not found"):
            store.get(caller, name)
    store.add("me", "d", [{"role": "user", "content": "x" * 320}], {"id": "d"})
    assert len(store) == 1 and store.size <= 400
    store.add("me", "e", [{"role": "user", "content": "x" * 500}], {"id": "e"})
    assert len(store) == 1


def test_messages(claude: anthropic.Anthropic) -> None:
    made = claude.messages.create(
        model="tiny", max_tokens=5, system=[{"type": "text", "text": "Be brief."}],
        messages=[{"role": "user", "content": "Hi"}],
    )  # fmt: skip
    assert made.stop_reason == "max_tokens" and made.content[0].type == "text"
    assert made.usage.input_tokens + made.usage.cache_read_input_tokens == PROMPT
    assert made.usage.output_tokens == 5
    counted = claude.messages.count_tokens(
        model="tiny", system="Be brief.", messages=[{"role": "user", "content": "Hi"}]
    )
    assert counted.input_tokens == PROMPT


def test_messages_stop_at_a_sequence(claude: anthropic.Anthropic) -> None:
    ask: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    ask["extra_body"] = {"temperature": 0}
    text = claude.messages.create(max_tokens=12, **ask).content[0].text
    stop = text[5:8]
    made = claude.messages.create(max_tokens=12, stop_sequences=["nothing", stop], **ask)
    assert made.stop_reason == "stop_sequence" and made.stop_sequence == stop
    assert "".join(b.text for b in made.content) == text[: text.index(stop)]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_messages_use_tools(claude: anthropic.Anthropic, choice: Any) -> None:
    choice = choice | {"disable_parallel_tool_use": True}
    ask: Any = {"model": "tiny", "max_tokens": 300, "tools": CLAUDE_TOOLS, "tool_choice": choice}
    talk: Any = [{"role": "user", "content": "Hi"}]
    with claude.messages.stream(messages=talk, **ask) as stream:
        kinds = [e.type for e in stream]
        made = stream.get_final_message()
    assert made.stop_reason == "tool_use" and kinds[0] == "message_start"
    raw = [k for k in kinds if k.startswith(("message", "content_block"))]
    assert raw[1] == "content_block_start" and {*raw[2:-3]} == {"content_block_delta"}
    assert raw[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    (use,) = made.content
    assert use.type == "tool_use" and use.name == "weather"
    jsonschema.validate(use.input, SCHEMA)
    result = {"type": "tool_result", "tool_use_id": use.id,
              "content": [{"type": "text", "text": "sunny"}]}  # fmt: skip
    talk += [{"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    counted = claude.messages.count_tokens(model="tiny", tools=CLAUDE_TOOLS, messages=talk)
    assert counted.input_tokens > made.usage.input_tokens + len("sunny")


def test_messages_think(claude: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    made = claude.messages.create(
        model="thinker",
        max_tokens=9,
        thinking=thinking,
        messages=[{"role": "user", "content": "Hi"}],
    )
    assert [b.type for b in made.content] == ["thinking"] and made.content[0].thinking
    with claude.messages.stream(
        model="thinker",
        max_tokens=9,
        thinking=thinking,
        messages=[{"role": "user", "content": "Hi"}],
    ) as stream:
        deltas = [e.delta.type for e in stream if e.type == "content_block_delta"]
    assert deltas[-1] == "signature_delta" and "thinking_delta" in deltas


def test_errors_of_messages(tool_server: RunningServer, claude: anthropic.Anthropic) -> None:
    talk: Any = [{"role": "user", "content": "Hi"}]
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="unknown", max_tokens=1, messages=talk)
    assert missing.value.body["error"]["type"] == "not_found_error"
    other = claude.with_options(api_key="wrong-key")
    with pytest.raises(anthropic.AuthenticationError) as refused:
        other.messages.create(model="tiny", max_tokens=1, messages=talk)
    assert refused.value.body["error"]["type"] == "authentication_error"
    for wrong, match in (
        ({"messages": [*talk, {"role": "assistant", "content": "I"}]}, "must end with a user"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "reads text alone"),
        ({"messages": talk, "tool_choice": {"type": "any"}}, "tools must be given"),
        ({"messages": talk, "max_tokens": 0}, "max_tokens"),
        ({"messages": talk, "extra": 1}, "extra"),
    ):
        headers = {"x-api-key": KEY}
        body = {"model": "tiny", "max_tokens": 4} | wrong
        found = tool_server.post("/v1/messages", body, headers=headers)
        assert found.status_code == 400 and found.json()["type"] == "error"
        assert found.json()["error"]["type"] == "invalid_request_error"
        assert match in found.json()["error"]["message"]
