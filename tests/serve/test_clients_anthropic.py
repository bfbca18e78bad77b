"""Anthropic's library against a running server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from conftest import CLIENT_KEY, RunningServer
from pydantic import BaseModel

HI: Any = [{"role": "user", "content": "Hi"}]
GREEDY: Any = {"model": "tiny", "max_tokens": 10, "messages": HI, "extra_body": {"temperature": 0}}


class Trip(BaseModel):
    by: Literal["train", "bus"]


@pytest.fixture(scope="module")
def client(client_server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=client_server.url, api_key=CLIENT_KEY, max_retries=0) as made:
        yield made


def test_messages_and_streams(client: anthropic.Anthropic, client_server: RunningServer) -> None:
    whole = client.messages.create(**GREEDY)
    asked = {"model": "tiny", "messages": HI, "max_tokens": 10, "temperature": 0}
    headers = {"authorization": f"Bearer {CLIENT_KEY}"}
    chat = client_server.post("/v1/chat/completions", asked, headers=headers).json()
    assert whole.content[0].text == chat["choices"][0]["message"]["content"]
    assert whole.usage.output_tokens == 10 and whole.stop_reason == "max_tokens"
    with client.messages.stream(**GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == 10
    events = [e.type for e in client.messages.create(stream=True, **GREEDY)]
    assert events[0] == "message_start" and events[-1] == "message_stop"


def test_a_tool_is_run_by_the_client(client: anthropic.Anthropic) -> None:
    """The library's own loop: the model calls, the function runs, the result goes back."""
    seen: list[str] = []

    @anthropic.beta_tool
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """The weather.

        Args:
            city: Where.
        """
        seen.append(city)
        return "sunny"

    runner = client.beta.messages.tool_runner(
        model="tiny", max_tokens=600, messages=HI, tools=[weather], max_iterations=2,
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    )  # fmt: skip
    answers = list(runner)
    assert len(answers) == 2 and {*seen} <= {"Oslo", "Rome"} and seen
    assert answers[0].stop_reason == "tool_use"
    second = answers[1].usage
    read = second.input_tokens + (second.cache_read_input_tokens or 0)
    assert read > answers[0].usage.input_tokens + len("sunny")


def test_structured_outputs(client: anthropic.Anthropic) -> None:
    made = client.messages.parse(model="tiny", max_tokens=300, messages=HI, output_format=Trip)
    assert isinstance(made.parsed_output, Trip)


def test_tokens_models_and_errors(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=HI)
    assert counted.input_tokens == client.messages.create(**GREEDY).usage.input_tokens + (
        client.messages.create(**GREEDY).usage.cache_read_input_tokens or 0
    )
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**GREEDY | {"model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        client.messages.create(**GREEDY | {"messages": []})
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**GREEDY)
