"""`rlx serve` as evaluation and load-test tools see it: lm-eval and guidellm, over HTTP.

lm-eval scores 100 questions with four choices by their log likelihoods (/v1/completions with echo
and logprobs) and has them answered in chats (/v1/chat/completions). Bars: both the same as the
model used directly, by `rlx.load`. guidellm sends synthetic prompts; what it reports is printed.
Nothing is downloaded. The tokenizer that the tools need is made from the file.

    python -m bench serve_clients --peer-python path/to/python    # has requirements-serve.txt
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import Bar, arguments, finish
from bench.peers.lm_eval_tasks import CHAT, CHOICES, STOP, TOKENS, Question, questions, write_tasks
from bench.serve import Served, free_port, start_command

NAME = "bench"
REQUESTS, CONTEXT = 8, 1024
NEAR = 1e-4  # of log likelihoods: the engine prefills in other chunks, lm-eval adds them in f64
PROMPT, OUTPUT = 128, 64  # tokens of a request of guidellm


class Tools:
    """Tools in another Python, offline."""

    def __init__(self, python: str, folder: Path) -> None:
        self.python, self.folder = python, folder
        self.tokenizer = folder / "tokenizer"
        self._env = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
        self._env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "OPENAI_API_KEY": "x"}

    def run(self, *command: object) -> str:
        """What a command prints; an error if it fails."""
        line = [self.python, *map(str, command)]
        done = subprocess.run(line, env=self._env, cwd=self.folder, capture_output=True, text=True)
        if done.returncode:
            told = (done.stdout + done.stderr)[-3000:]
            raise RuntimeError(f"{told}\n{' '.join(line[:4])} … failed; --peer-python needs "
                               f"bench/requirements-serve.txt")  # fmt: skip
        return done.stdout

    def export_tokenizer(self, model: str) -> None:
        script = Path(__file__).parent / "peers" / "export_tokenizer.py"
        self.run(script, Path(model).resolve(), self.tokenizer)

    def evaluate(self, task: str, address: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The metrics of a task of lm-eval, and its samples."""
        chat, out = task == CHAT, self.folder / f"out-{task}"
        kind, path = ("chat-completions", "chat/completions") if chat else ("completions",) * 2
        given = f"model={NAME},base_url={address}/v1/{path},num_concurrent={REQUESTS}"
        if not chat:
            given += f",tokenizer={self.tokenizer},tokenizer_backend=huggingface"
        command: list[object] = ["-m", "lm_eval", "run", "--model", f"local-{kind}"]
        command += [
            "--model_args",
            given,
            "--tasks",
            task,
            "--include_path",
            self.folder,
            "--log_samples",
        ]
        command += ["--output_path", out, *(["--apply_chat_template"] if chat else [])]
        self.run(*command)
        (figures,), (samples,) = out.rglob("results_*.json"), out.rglob("samples_*.jsonl")
        rows = [json.loads(line) for line in samples.read_text().splitlines()]
        return json.loads(figures.read_text())["results"][task], sorted(
            rows, key=lambda row: int(row["doc_id"])
        )

    def load_test(self, address: str, clients: int, requests: int) -> dict[str, Any]:
        """What guidellm measures with so many clients."""
        out = self.folder / f"load-{clients}.json"
        backend = f"kind=openai_http,target={address},model={NAME},request_format=/v1/completions"
        data = f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}"
        command = ["-m", "guidellm", "run", "--disable-console", "--backend", backend]
        command += ["--profile", f"kind=concurrent,streams={clients}", "--data", data]
        command += ["--constraint", f"kind=max_requests,count={requests}"]
        command += ["--tokenizer", f"kind=hf_auto,model={self.tokenizer}"]
        self.run(*command, "--output", f"kind=json,path={out}")
        found: dict[str, Any] = json.loads(out.read_text())["benchmarks"][0]["metrics"]
        return found


def direct_scores(model: Any, asked: list[Question]) -> list[list[float]]:
    """The log likelihood of each choice after its question."""
    found = []
    for one in asked:
        known = len(model.tokenize(one.question))
        row = []
        for choice in one.choices:
            tokens = model.tokenize(f"{one.question} {choice}")
            logits = np.asarray(model.logits(tokens), np.float64)[known - 1 : -1]
            logs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
            row.append(float(logs[np.arange(len(logs)), tokens[known:]].sum()))
        found.append(row)
    return found


def direct_answers(model: Any, asked: list[Question]) -> list[str]:
    settings = {"max_tokens": TOKENS, "stop": STOP, "temperature": 0, "stream": False}
    talks = ([{"role": "user", "content": one.question}] for one in asked)
    return [model.chat(talk, **settings).text for talk in talks]


def compare(tools: Tools, address: str, model: Any, asked: list[Question]) -> list[Bar]:
    """lm-eval over HTTP against the model used directly."""
    metrics, samples = tools.evaluate(CHOICES, address)
    ours = np.array([[float(r[0][0]) for r in s["resps"]] for s in samples])
    direct = np.array(direct_scores(model, asked))
    right = float(np.mean(direct.argmax(-1) == [one.answer for one in asked]))
    apart = float(np.abs(ours - direct).max())
    print(f"lm-eval {CHOICES}: acc {metrics['acc,none']:.3f}, directly {right:.3f}; "
          f"log likelihoods at most {apart:.2g} apart", flush=True)  # fmt: skip
    talked, samples = tools.evaluate(CHAT, address)
    answers, alone = [s["resps"][0][0] for s in samples], direct_answers(model, asked)
    same = sum(a == b for a, b in zip(answers, alone, strict=True)) / len(alone)
    print(f"lm-eval {CHAT}: exact_match {talked['exact_match,last']:.3f}; "
          f"{same:.0%} of the answers are the same directly", flush=True)  # fmt: skip
    alike = 1 - abs(metrics["acc,none"] - right)
    return [
        Bar("lm_eval_accuracy", alike, "less the difference", "rlx.load", 1.0, 1.0),
        Bar("lm_eval_loglikelihood", max(apart, 1e-9), "apart", "the tolerance", NEAR, 1.0, False),
        Bar("lm_eval_answers", same, "the same", "rlx.load", 1.0, 1.0),
    ]


def report(clients: int, metrics: dict[str, Any]) -> None:
    def of(name: str, part: str) -> float:
        found = metrics[name]["successful"]
        return float(found["percentiles"][part] if part.startswith("p") else found[part])

    print(f"guidellm, {clients} clients: {of('output_tokens_per_second', 'mean'):.1f} tok/s; "
          f"first token {of('time_to_first_token_ms', 'median'):.0f} ms, "
          f"p95 {of('time_to_first_token_ms', 'p95'):.0f} ms; between tokens "
          f"{of('inter_token_latency_ms', 'median'):.1f} ms, "
          f"p95 {of('inter_token_latency_ms', 'p95'):.1f} ms", flush=True)  # fmt: skip


def main(argv: list[str]) -> int:
    from rlx import load
    from rlx.formats.fetch import resolve

    parser = arguments("serve_clients", __doc__ or "")
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF file of SmolLM2")
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--clients", type=int, nargs="+", default=(1, 8))
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(argv)
    path = resolve(options.model)
    file = str(next(path.glob("*.gguf")) if path.is_dir() else path)
    asked = questions()[:: 5 if options.quick else 1]
    with tempfile.TemporaryDirectory() as folder:
        tools = Tools(options.peer_python, Path(folder))
        tools.export_tokenizer(file)
        write_tasks(tools.folder, asked)
        port = free_port()
        command = start_command(file, NAME, port, REQUESTS, CONTEXT, options.threads)
        server, address = Served(command, port, NAME, []), f"http://127.0.0.1:{port}"
        try:
            asyncio.run(server.ready())
            with load(file, kv="f16", context=CONTEXT, threads=options.threads) as model:
                bars = compare(tools, address, model, asked)
            for clients in options.clients:
                requests = (2 if options.quick else 8) * clients
                report(clients, tools.load_test(address, clients, requests))
        finally:
            server.stop()
    return finish(bars, options.json)
