"""LangChain and LiteLLM against a running server."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CLIENT_KEY, RunningServer
from pydantic import BaseModel, Field

import rlx

# the libraries are imported by the tests that use them: it takes seconds
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
HI: Any = [{"role": "user", "content": "Hi"}]
SETTINGS: Any = {"max_tokens": 12, "seed": 3, "temperature": 1.0}


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=6)


@pytest.fixture(scope="module")
def litellm() -> Any:
    import litellm

    return litellm


@pytest.fixture(scope="module")
def alone(tool_model: Path) -> str:
    """What the model says without a server."""
    with rlx.load(tool_model, kv="f32", threads=1) as model:
        return str(model.chat(HI, stream=False, **SETTINGS).text)


def chat(server: RunningServer, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    settings = {"model": "tiny", "max_retries": 0, **SETTINGS, **more}
    return ChatOpenAI(base_url=f"{server.url}/v1", api_key=CLIENT_KEY, **settings)


def test_langchain_answers_and_streams(client_server: RunningServer, alone: str) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage

    model = chat(client_server)
    whole = model.invoke("Hi")
    assert whole.content == alone and whole.usage_metadata["output_tokens"] == 12
    assert "".join(str(part.content) for part in model.stream([HumanMessage("Hi")])) == alone
    assert asyncio.run(model.ainvoke("Hi")).content == alone
    assert [one.content for one in model.batch(["Hi", "Hi"])] == [alone, alone]
    longer = model.invoke([SystemMessage("Be brief."), HumanMessage("Hi")])
    assert longer.usage_metadata["input_tokens"] > whole.usage_metadata["input_tokens"]
    by_responses = chat(client_server, use_responses_api=True, seed=None, temperature=0)
    assert by_responses.invoke("Hi").text == chat(client_server, temperature=0).invoke("Hi").content


def test_langchain_tools(client_server: RunningServer) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    model = chat(client_server, max_tokens=300)
    bound = model.bind_tools([GetWeather], tool_choice="required", parallel_tool_calls=False)
    made = bound.invoke("Hi")
    (call,) = made.tool_calls
    assert call["name"] == "GetWeather"
    GetWeather.model_validate(call["args"])
    whole: Any = None
    for part in bound.stream("Hi"):
        whole = part if whole is None else whole + part
    assert whole.tool_calls[0]["args"] == call["args"]
    assert isinstance(made, AIMessage)
    talk = [HumanMessage("Hi"), made, ToolMessage("sunny", tool_call_id=call["id"])]
    after = chat(client_server).invoke(talk)
    assert after.usage_metadata["input_tokens"] > made.usage_metadata["input_tokens"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(client_server: RunningServer, method: Any) -> None:
    model = chat(client_server, max_tokens=300).with_structured_output(GetWeather, method=method)
    found = model.invoke("Hi")
    assert isinstance(found, GetWeather) and len(found.city) <= 6


def test_langchain_embeddings(client_server: RunningServer, tiny_encoder: Path) -> None:
    from langchain_openai import OpenAIEmbeddings

    made = OpenAIEmbeddings(
        base_url=f"{client_server.url}/v1", api_key=CLIENT_KEY, model="encoder",
        check_embedding_ctx_length=False,  # tokens of OpenAI's vocabularies mean nothing here
    )  # fmt: skip
    texts = ["a cat", "the dog runs"]
    with rlx.load(tiny_encoder, threads=1) as encoder:
        vectors = np.asarray(encoder.embed(texts))
    # the same f32 numbers, in a batch of another width: some ulps
    assert np.allclose(made.embed_documents(texts), vectors, atol=1e-6)
    assert np.allclose(made.embed_query(texts[1]), vectors[1], atol=1e-6)


def test_litellm(litellm: Any, client_server: RunningServer, alone: str) -> None:
    place = {"api_base": f"{client_server.url}/v1", "api_key": CLIENT_KEY, "max_retries": 0}
    ask: Any = {"model": "openai/tiny", "messages": HI, **SETTINGS, **place}
    whole = litellm.completion(**ask)
    assert whole.choices[0].message.content == alone and whole.usage.completion_tokens == 12
    parts = litellm.completion(stream=True, **ask)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == alone
    assert asyncio.run(litellm.acompletion(**ask)).choices[0].message.content == alone
    formed = litellm.completion(response_format=GetWeather, **ask | {"max_tokens": 300})
    assert set(json.loads(formed.choices[0].message.content)) == {"city"}
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**ask | {"temperature": 9})


def test_litellm_speaks_as_anthropic(litellm: Any, client_server: RunningServer) -> None:
    ask: Any = {
        "model": "anthropic/tiny", "messages": HI, "max_tokens": 12, "temperature": 0,
        "api_base": client_server.url, "api_key": CLIENT_KEY,
    }  # fmt: skip
    whole = litellm.completion(**ask)
    assert (
        whole.choices[0].message.content == chat(client_server, temperature=0).invoke("Hi").content
    )
    parts = litellm.completion(stream=True, **ask)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content


def test_litellm_embeddings(litellm: Any, client_server: RunningServer, tiny_encoder: Path) -> None:
    made = litellm.embedding(
        model="openai/encoder", input=["a cat"], api_base=f"{client_server.url}/v1",
        api_key=CLIENT_KEY,
    )  # fmt: skip
    with rlx.load(tiny_encoder, threads=1) as encoder:
        vector = np.asarray(encoder.embed(["a cat"]))[0]
    assert np.allclose(made.data[0]["embedding"], vector, atol=1e-6)
