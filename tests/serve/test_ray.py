"""Jobs and a service on a local Ray cluster, with workers killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rlx
import rlx.ray
from rlx.errors import OptionError
from rlx.formats.fetch import cached

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Ray, in its own files
]
ROOT = Path(__file__).resolve().parents[2]
GREEDY = {"max_tokens": 120, "temperature": 0.0}
ENGINE = {"requests": 4, "kv": "f32", "threads": 1}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of this machine alone; it ends with the tests."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    import ray.data

    ray.init(
        address="local", num_cpus=3, include_dashboard=False, object_store_memory=80 << 20,
        log_to_driver=False, _node_ip_address="127.0.0.1", logging_level="warning",
    )  # fmt: skip
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.use_datasource_v2 = False  # it takes seconds to list a few files
    context.wait_for_min_actors_s = 60  # so that no worker has done all before others start
    yield ray
    ray.shutdown()


def _processes(title: str) -> list[int]:
    """Processes of the cluster with this in their title: those below this one."""
    parents, named = {}, []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            told = (entry / "cmdline").read_bytes().decode(errors="replace")
        except (OSError, ValueError):
            continue
        parents[int(entry.name)] = parent
        if told.startswith("ray::") and title in told:
            named.append(int(entry.name))

    def is_ours(pid: int) -> bool:
        while pid > 1 and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid == os.getpid()

    return sorted(pid for pid in named if is_ours(pid))


def _wait_for(what: Any, seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_a_killed_worker_costs_a_batch_and_every_row_is_delivered_once(
    cluster: Any, tiny_model: Path, tmp_path: Path
) -> None:
    rows = [{"id": f"row {i}", "prompt": f"Tell me of {i * 7919 % 97}"} for i in range(48)]
    source = cluster.data.from_items(rows, override_num_blocks=6)
    folder = tmp_path / "run"

    def job(workers: int) -> Any:
        return rlx.ray.generate(
            source, tiny_model, checkpoint=folder, batch_size=4, workers=workers, engine=ENGINE,
            **GREEDY,
        )  # fmt: skip

    found: list[list[dict[str, Any]]] = []
    running = threading.Thread(target=lambda: found.append(job(2).take_all()))
    running.start()
    _wait_for(lambda: len(list(folder.glob("batch-*"))) >= 2)
    workers = _processes("_Worker")
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    again = _wait_for(lambda: set(_processes("_Worker")) - set(workers))
    running.join(90)
    assert len(again) == 1, "the worker was killed with a batch, which another took over"
    with rlx.Engine(tiny_model, **ENGINE) as engine:
        alone = [engine.submit(row["prompt"], **GREEDY).wait() for row in rows]
    expected = sorted((r["id"], a.text, len(a.tokens)) for r, a in zip(rows, alone, strict=True))
    assert _answers(found[0]) == expected
    # a job that died has some of its batches: only the others are computed when it starts again
    files = sorted(folder.glob("batch-*"))
    assert len(files) == 12
    for lost in files[::3]:
        lost.unlink()
    kept = {path: path.stat().st_mtime_ns for path in files if path.exists()}
    job(1)
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    assert sorted(folder.glob("batch-*")) == files
    assert _answers(row for path in files for row in pq.read_table(path).to_pylist()) == expected


@pytest.mark.nightly
def test_a_killed_job_goes_on_when_it_is_started_again(
    cluster: Any, tiny_model: Path, tmp_path: Path
) -> None:
    folder, count = tmp_path / "run", 160
    job = f"""
import ray, ray.data, rlx.ray

def run(ray):
    rows = [{{"id": f"row {{i}}", "prompt": f"Tell me of {{i}}"}} for i in range({count})]
    source = ray.data.from_items(rows, override_num_blocks=10)
    return rlx.ray.generate(
        source, {str(tiny_model)!r}, checkpoint={str(folder)!r}, batch_size=4, workers=2,
        engine={ENGINE!r}, **{GREEDY!r})

if __name__ == "__main__":
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)
    run(ray)
"""
    program = tmp_path / "job.py"
    program.write_text(job, encoding="utf-8")
    with subprocess.Popen([sys.executable, program], stderr=subprocess.DEVNULL) as running:
        _wait_for(lambda: len(list(folder.glob("batch-*"))) >= 5)
        running.kill()
    before = {path: path.stat().st_mtime_ns for path in folder.glob("batch-*")}
    assert 5 <= len(before) < count // 4, "the job was killed in the middle"
    names: dict[str, Any] = {"__name__": "job"}
    exec(job, names)
    answers = _answers(names["run"](cluster).take_all())
    with rlx.Engine(tiny_model, **ENGINE) as engine:
        asked = [(f"row {i}", engine.submit(f"Tell me of {i}", **GREEDY)) for i in range(count)]
        expected = sorted((name, r.wait().text, len(r.wait().tokens)) for name, r in asked)
    assert answers == expected
    for path, written in before.items():
        assert path.stat().st_mtime_ns == written


def _answers(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, int]]:
    return sorted((row["id"], row["text"], row["completion_tokens"]) for row in rows)


def test_vectors_are_those_of_the_encoder_and_rows_of_two_files_are_delivered_once(
    cluster: Any, tiny_encoder: Path, tmp_path: Path
) -> None:
    texts = ["a cat sits", "stocks fell", "the sun", "rain again", "a dog", "no news"]
    rows = cluster.data.from_items(
        [{"id": i, "text": t} for i, t in enumerate(texts)], override_num_blocks=1
    )
    found = rlx.ray.embed(rows, tiny_encoder, batch_size=4).take_all()
    assert [row["text"] for row in found] == texts
    vectors = np.stack([row["embedding"] for row in found])
    assert np.array_equal(vectors, rlx.load(tiny_encoder).embed(texts))
    # as if a batch had been cut otherwise when it was computed again
    for name, ids in (("a", [0, 1, 2]), ("b", [2, 3]), ("c", [1, 3, 4, 5])):
        part = pa.table({"id": ids, "text": [texts[i] for i in ids], "file": [name] * len(ids)})
        pq.write_table(part, tmp_path / f"batch-{name}.parquet")
    made = rlx.ray._delivered(cluster.data, tmp_path, "id").take_all()
    assert sorted((row["id"], row["file"]) for row in made) == [
        (0, "a"), (1, "a"), (2, "a"), (3, "b"), (4, "c"), (5, "c")
    ]  # fmt: skip


def test_the_example_of_the_guide_runs(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cached("smollm2-135m") is None:
        pytest.skip("SmolLM2-135M is not in the cache")
    page = (ROOT / "docs" / "ray.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```\n(import ray\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(example, names)
    assert sorted(names["answers"]) == list(range(8)) and all(names["answers"].values())
    assert len(list((tmp_path / "run-1").glob("batch-*"))) == 2


def test_folders_of_other_jobs_are_refused(tmp_path: Path) -> None:
    def folder(**settings: Any) -> Path:
        job = rlx.ray._Job("embed", "model", "text", "embedding", "id", {"threads": 1}, settings)
        return rlx.ray._open_folder(tmp_path / "run", job)

    assert folder() == folder() == tmp_path / "run"
    with pytest.raises(OptionError, match="another model or other settings"):
        folder(truncate_dim=2)
    (tmp_path / "run" / "job.json").unlink()
    (tmp_path / "run" / "batch-1.parquet").touch()
    with pytest.raises(OptionError, match=r"batches without job\.json"):
        folder()
    for wrong, what in (
        ({"checkpoint": "s3://bucket/run"}, "not a folder"),
        ({"workers": 0}, "not a number of workers"),
        ({"workers": (3, 2)}, "not a number of workers"),
        ({"batch_size": 0}, "not a number of rows"),
    ):
        with pytest.raises(OptionError, match=what):
            rlx.ray.embed(None, "model", **wrong)


@pytest.fixture(scope="module")
def service(cluster: Any, tiny_model: Path, tiny_encoder: Path) -> Iterator[httpx.Client]:
    """An application with two replicas."""
    from ray import serve

    from rlx.serve.ray import app

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    models = [{"name": "tiny", "path": str(tiny_model), **ENGINE}]
    told = {"models": models, "replicas": 2, "cpus": 0.5, "api_keys": ["key-of-tests"]}
    serve.run(app(told), name="rlx", route_prefix="/")
    address = f"http://127.0.0.1:{port}"
    key = {"Authorization": "Bearer key-of-tests"}
    with httpx.Client(base_url=address, headers=key, timeout=60, trust_env=False) as client:
        yield client


def _asked(service: httpx.Client, text: str, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "input": text, "max_output_tokens": 4, "temperature": 0, **more}
    answer = service.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def _replica(answer: dict[str, Any]) -> str:
    return str(answer["id"].split("_")[1])


def test_requests_go_to_the_replica_that_has_their_prefix(service: httpx.Client) -> None:
    homes: dict[str, str] = {}
    first: dict[str, dict[str, Any]] = {}
    while len(set(homes.values())) < 2 or len(homes) < 4:
        assert len(homes) < 40, "one replica gets all"
        text = f"{len(homes)} ships of the {len(homes)} " * 8
        first[text] = _asked(service, text + "sail")
        homes[text] = _replica(first[text])
        cached = first[text]["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached < 100, "nobody has this prefix yet"
    for text in homes:
        for end in ("sank", "came home"):
            answer = _asked(service, text + end)
            assert _replica(answer) == homes[text]
            assert answer["usage"]["input_tokens_details"]["cached_tokens"] >= 100
    # what a replica keeps is found there
    for text, answer in list(first.items())[-2:]:
        got = service.get(f"/v1/responses/{answer['id']}")
        assert (got.status_code, got.json()["id"]) == (200, answer["id"])
        more = _asked(service, "go on", previous_response_id=answer["id"])
        assert _replica(more) == homes[text]


def test_the_application_is_that_of_rlx_serve(service: httpx.Client) -> None:
    assert [m["id"] for m in service.get("/v1/models").json()["data"]] == ["tiny"]
    wrong = service.post("/v1/chat/completions", content=b"{")
    assert wrong.status_code == 400 and "could not parse" in wrong.json()["error"]["message"]
    assert service.get("/v1/models", headers={"Authorization": "Bearer no"}).status_code == 401
    assert service.get("/health", headers={"Authorization": ""}).status_code == 200
    large = service.post("/v1/completions", content=b" " * ((8 << 20) + 1))
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5,
            "temperature": 0}  # fmt: skip
    whole = service.post("/v1/chat/completions", json=body).json()
    with service.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    pieces = [json.loads(line[6:])["choices"][0]["delta"] for line in lines[:-1]]
    text = "".join(piece.get("content") or "" for piece in pieces)
    assert text == whole["choices"][0]["message"]["content"]


@pytest.mark.nightly
def test_a_killed_replica_is_replaced_and_requests_go_on(service: httpx.Client) -> None:
    before = _wait_for(lambda: p if len(p := _processes("ServeReplica:rlx:Models")) == 2 else [])
    stop, answers = threading.Event(), []

    def ask(number: int) -> None:
        while not stop.is_set():
            body = {"model": "tiny", "prompt": f"{number} men", "max_tokens": 40, "temperature": 0}
            answer = service.post("/v1/completions", json=body)
            answers.append((number, answer.status_code, answer.text))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    _wait_for(lambda: len(answers) >= 4)
    os.kill(before[0], signal.SIGKILL)
    replaced = _wait_for(
        lambda: p if len(p := _processes("ServeReplica:rlx:Models")) == 2 and p != before else []
    )
    count = len(answers)
    _wait_for(lambda: len(answers) >= count + 8)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert before[0] not in replaced and before[1] in replaced
    assert {status for _, status, _ in answers} == {200}
    texts = {(number, json.loads(text)["choices"][0]["text"]) for number, _, text in answers}
    assert len(texts) == 4, "the same answers before and after"


@pytest.mark.nightly
def test_replicas_follow_the_queue_and_answers_end_with_their_clients(
    service: httpx.Client, tiny_model: Path
) -> None:
    from ray import serve

    from rlx.serve.ray import app

    soon = {"upscale_delay_s": 0.5, "metrics_interval_s": 0.2, "look_back_period_s": 1}
    scale = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, **soon}
    models = [{"name": "tiny", "path": str(tiny_model), **ENGINE}]
    told = {"models": models, "replicas": scale, "cpus": 0.5, "no_auth": True}
    serve.run(app(told), name="scaled", route_prefix="/scaled")

    def left() -> bool:
        text = service.get("/scaled/metrics").text
        return bool(re.search(r'^rlx_requests_total\{.*completions".*"499"\} 1\.0$', text, re.M))

    long = {"model": "tiny", "prompt": "a", "max_tokens": 200, "n": 8, "stream": True}
    with service.stream("POST", "/scaled/v1/completions", json=long) as stream:
        next(stream.iter_lines())
    _wait_for(left, 10)
    assert len(_processes("ServeReplica:scaled:Models")) == 1
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            body = {"model": "tiny", "prompt": "b", "max_tokens": 200, "temperature": 0}
            assert service.post("/scaled/v1/completions", json=body).status_code == 200

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        _wait_for(lambda: len(_processes("ServeReplica:scaled:Models")) == 2)
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    serve.delete("scaled")
