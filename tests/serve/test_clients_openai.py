"""OpenAI's library against a running server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import openai
import pytest
from conftest import CLIENT_KEY, RunningServer
from pydantic import BaseModel, Field

import rlx

HI: Any = [{"role": "user", "content": "Hi"}]
ASK: Any = {"model": "tiny", "messages": HI, "max_tokens": 12, "seed": 3, "temperature": 1.0}


class Trip(BaseModel):
    city: str = Field(max_length=6)
    days: int = Field(ge=1, le=9)
    by: Literal["train", "bus"]


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=6)


@pytest.fixture(scope="module")
def client(client_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{client_server.url}/v1", api_key=CLIENT_KEY, max_retries=0
    ) as made:
        yield made


def test_chat_and_stream(client: openai.OpenAI, tool_model: Path) -> None:
    whole = client.chat.completions.create(**ASK)
    with rlx.load(tool_model, kv="f32", threads=1) as model:
        alone = model.chat(HI, stream=False, max_tokens=12, seed=3, temperature=1.0)
        count = len(model.apply_chat_template(HI))
    assert whole.choices[0].message.content == alone.text
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (count, 12)
    text, usage = "", None
    options: Any = {"include_usage": True}
    for chunk in client.chat.completions.create(stream=True, stream_options=options, **ASK):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == alone.text and usage.total_tokens == whole.usage.total_tokens
    with client.chat.completions.stream(extra_body={"regex": "[a-z]{9}"}, **ASK) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert len(final.choices[0].message.content) == 9 and {"content.delta", "content.done"} <= kinds


def test_tools_of_pydantic(client: openai.OpenAI) -> None:
    tools: Any = [openai.pydantic_function_tool(GetWeather)]
    ask = ASK | {"max_tokens": 300, "tool_choice": "required", "parallel_tool_calls": False}
    made = client.chat.completions.parse(tools=tools, **ask)
    (call,) = made.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)
    assert made.choices[0].finish_reason == "tool_calls"
    counts = []
    for _ in range(5):
        with client.chat.completions.stream(tools=tools, **ask) as stream:
            parts = [e for e in stream if e.type == "tool_calls.function.arguments.delta"]
            final = stream.get_final_completion()
        (again,) = final.choices[0].message.tool_calls
        assert again.function.arguments == call.function.arguments
        assert "".join(p.arguments_delta for p in parts) == call.function.arguments
        counts.append(len(parts))
    assert max(counts) > 1  # tokens that come while the client is slow are one part
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    after = client.chat.completions.create(
        tools=tools, **ASK | {"messages": [*HI, made.choices[0].message, result]}
    )
    assert after.usage.prompt_tokens > made.usage.prompt_tokens


def test_structured_outputs_of_pydantic(client: openai.OpenAI) -> None:
    ask = ASK | {"max_tokens": 300}
    made = client.chat.completions.parse(response_format=Trip, **ask)
    trip = made.choices[0].message.parsed
    assert isinstance(trip, Trip) and len(trip.city) <= 6 and 1 <= trip.days <= 9
    with client.chat.completions.stream(response_format=Trip, **ask) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == trip
    parsed = client.responses.parse(
        model="tiny", input="Hi", text_format=Trip, max_output_tokens=300
    )
    assert isinstance(parsed.output_parsed, Trip) and parsed.status == "completed"
    with client.responses.stream(
        model="tiny", input="Hi", text_format=Trip, max_output_tokens=300
    ) as events:
        *_, last = events
        assert isinstance(events.get_final_response().output_parsed, Trip)
    assert last.type == "response.completed"


def test_responses(client: openai.OpenAI) -> None:
    ask: Any = {"model": "tiny", "input": "Hi", "max_output_tokens": 9, "temperature": 0}
    whole = client.responses.create(**ask)
    assert whole.usage.output_tokens == 9 and whole.status == "incomplete"
    text = ""
    for event in client.responses.create(stream=True, **ask):
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == whole.output_text
    tools: Any = [openai.pydantic_function_tool(GetWeather)["function"] | {"type": "function"}]
    called = client.responses.parse(
        tools=tools, tool_choice="required", parallel_tool_calls=False,
        **ask | {"max_output_tokens": 300},
    )  # fmt: skip
    (call,) = called.output
    assert call.type == "function_call" and set(json.loads(call.arguments)) == {"city"}


@pytest.mark.parametrize("form", [openai.omit, "float"], ids=["base64", "float"])
def test_embeddings(client: openai.OpenAI, tiny_encoder: Path, form: Any) -> None:
    texts = ["a cat", "the dog runs"]
    made = client.embeddings.create(model="encoder", input=texts, encoding_format=form)
    with rlx.load(tiny_encoder, threads=1) as encoder:
        alone = np.asarray(encoder.embed(texts))
    assert [one.index for one in made.data] == [0, 1]
    # the same f32 numbers, in a batch of another width: some ulps
    assert np.allclose([one.embedding for one in made.data], alone, atol=1e-6)


def test_completions_models_and_errors(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny", "encoder"]
    assert client.models.retrieve("tiny").owned_by == "rlx"
    made = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=3, n=2)
    assert [c.index for c in made.choices] == [0, 1, 2, 3]
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(**ASK | {"model": "gpt-9"})
    with pytest.raises(openai.BadRequestError, match="temperature") as wrong:
        client.chat.completions.create(**ASK | {"temperature": 9})
    assert (wrong.value.param, wrong.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_the_asynchronous_client(client_server: RunningServer) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{client_server.url}/v1", api_key=CLIENT_KEY, max_retries=0
        ) as made:

            async def one(seed: int) -> str:
                stream = await made.chat.completions.create(stream=True, **ASK | {"seed": seed})
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            return await asyncio.gather(*[one(seed) for seed in (3, 4, 5, 3)])

    texts = asyncio.run(main())
    assert texts[0] == texts[3] and len(set(texts)) == 3
