"""A LoRA adapter is a model for clients; several run in one batch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from cli_support import FFN, HIDDEN, LAYERS
from conftest import TINY, StartServer
from test_adapters import write_peft

import rlx
from rlx.serve.model_pool import ModelSpec

HI = [{"role": "user", "content": "Hi"}]


def adapter(path: Path, seed: int) -> Path:
    rng, found = np.random.default_rng(seed), {}
    for i in range(LAYERS):
        for name, inner in (("self_attn.o_proj", HIDDEN), ("mlp.down_proj", FFN)):
            module = f"base_model.model.model.layers.{i}.{name}"
            found[f"{module}.lora_A.weight"] = rng.standard_normal((4, inner)).astype(np.float32)
            found[f"{module}.lora_B.weight"] = rng.standard_normal((HIDDEN, 4)).astype(np.float32)
    return write_peft(path, found, 4)


def test_adapters_are_models(start: StartServer, tiny_model: Path, tmp_path: Path) -> None:
    paths = {name: adapter(tmp_path / f"file-{name}", i) for i, name in enumerate(("one", "two"))}
    told = tuple((name, str(path)) for name, path in paths.items())
    server = start(models=(ModelSpec("tiny", str(tiny_model), adapters=told, options=TINY),))
    same: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    names = ["tiny", "one", "two", "tiny:one"]

    def ask(name: str) -> str:
        found = server.post("/v1/chat/completions", {"model": name, "messages": HI, **same})
        assert found.status_code == 200, found.text
        assert found.json()["model"] == name
        text: str = found.json()["choices"][0]["message"]["content"]
        return text

    with rlx.load(tiny_model, adapters=[*paths.values()], kv="f32", threads=1) as alone:
        chosen = (None, "file-one", "file-two", "file-one")
        wanted = [alone.chat(HI, stream=False, adapter=a, **same).text for a in chosen]
    assert len(set(wanted)) == 3
    assert [ask(name) for name in names] == wanted
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, names * 4)) == wanted * 4
    listed = server.client.get("/v1/models").json()["data"]
    assert [(m["id"], m.get("parent")) for m in listed] == [
        ("tiny", None), ("one", "tiny"), ("two", "tiny"),
    ]  # fmt: skip
