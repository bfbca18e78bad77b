"""`rlx run`: prompts in, answers out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_support import VOCAB, write_tiny

import rlx as api
from rlx.backends.cpu.executable import CpuExecutable
from rlx.llvm import jit

REFERENCE = ("--device", "reference", "--seed", "5", "-n", "6")
END = VOCAB - 1


def answer(path: Path, prompt: Any, **more: Any) -> Any:
    """The same through the Python API."""
    with api.load(path, device="reference") as model:
        call = model.generate if isinstance(prompt, str) else model.chat
        return call(prompt, seed=5, max_tokens=6, stream=False, **more)


def test_a_prompt_is_a_message_where_there_is_a_template(rlx: Any, tiny: Path) -> None:
    done = rlx("run", tiny, "Hi", *REFERENCE)
    expected = answer(tiny, [{"role": "user", "content": "Hi"}])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.rstrip("\n") == expected.text.rstrip("\n")
    assert done.stderr == ""


def test_raw_prompts_and_models_without_a_template(rlx: Any, tiny: Path, base: Path) -> None:
    expected = answer(tiny, "Hi")
    for model, more in ((tiny, ["--raw"]), (base, [])):
        done = rlx("run", model, "Hi", *REFERENCE, *more, "--json")
        found = json.loads(done.stdout)
        assert (found["text"], found["tokens"]) == (expected.text, expected.tokens)
        assert found["prompt_tokens"] == 2  # a token is a byte here


def test_a_first_start_says_nothing_where_there_is_no_terminal(rlx: Any, tiny: Path) -> None:
    jit.forget()
    compiled = jit.counters.compilations
    found = rlx("run", tiny, "Hi", "--max-tokens", 2)
    assert found.exit_code == 0 and found.stderr == ""
    assert jit.counters.compilations > compiled


def test_json_says_everything(rlx: Any, tiny: Path) -> None:
    done = rlx("run", tiny, "Hi", *REFERENCE, "--system", "Be.", "--logprobs", "2", "--json")
    found = json.loads(done.stdout)
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}]
    expected = answer(tiny, messages, logprobs=2)
    assert found["text"] == expected.text
    assert found["prompt_tokens"] == expected.prompt_tokens
    assert found["finish_reason"] == expected.finish_reason
    assert found["model"] == str(tiny)
    assert [{int(t): v for t, v in step.items()} for step in found["logprobs"]] == expected.logprobs
    times = [found[k] for k in ("load_seconds", "prefill_seconds", "decode_seconds")]
    assert all(t > 0 for t in times)


def test_settings_reach_the_model(rlx: Any, tiny: Path) -> None:
    """A bias that leaves one token, and stops that end at it."""
    always = ("--logit-bias", "104=1000", "--json")  # "h"
    found = json.loads(rlx("run", tiny, "Hi", *REFERENCE, *always).stdout)
    assert (found["text"], found["finish_reason"]) == ("hhhhhh", "length")
    found = json.loads(rlx("run", tiny, "Hi", *REFERENCE, *always, "--stop", "hhh").stdout)
    assert (found["text"], found["finish_reason"]) == ("", "stop")
    found = json.loads(rlx("run", tiny, "Hi", *REFERENCE, *always, "--stop-token", "104").stdout)
    assert (found["text"], found["finish_reason"]) == ("", "stop")


def test_stats_go_to_standard_error(rlx: Any, tiny: Path) -> None:
    done = rlx("run", tiny, "Hi", *REFERENCE, "--raw", "--stats", "--logit-bias", "104=1000")
    assert done.stdout == "hhhhhh\n"
    assert done.stderr.startswith("loaded in ")
    assert "prompt 2 tokens in " in done.stderr
    assert "answer 6 tokens in " in done.stderr
    sampling = "sampling: temperature 0.8, top_k 40, top_p 0.95\n"
    assert done.stderr.endswith("/s), length\n" + sampling)


def test_the_models_own_sampling_is_used(rlx: Any, tmp_path: Path) -> None:
    more = {"general.sampling.temp": 0.25, "general.sampling.top_p": 0.5}
    path = write_tiny(tmp_path / "cool.gguf", more=more)
    for told, expected in (
        ([], "temperature 0.25, top_k 40, top_p 0.5"),
        (["--top-p", "1"], "temperature 0.25, top_k 40, top_p 1"),
        (["--temperature", "0"], "greedy"),
    ):
        done = rlx("run", path, "Hi", *REFERENCE, "--raw", "--stats", *told)
        assert done.stderr.endswith(f"sampling: {expected}\n")
    found = json.loads(rlx("inspect", path, "--json").stdout)
    assert found["sampling"] == "temperature 0.25, top_k 40, top_p 0.5"


def test_the_prompt_may_come_from_standard_input(rlx: Any, tiny: Path) -> None:
    for arguments in ((tiny,), (tiny, "-")):
        done = rlx("run", *arguments, *REFERENCE, "--raw", "--json", input="Hello\n")
        assert json.loads(done.stdout)["prompt_tokens"] == 6


def test_a_single_argument_is_the_prompt_of_the_default_model(
    rlx: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def resolve(name: str, *, progress: Any) -> Path:
        asked.append(name)
        progress("download", 0, 2_000_000)
        progress("download", 2_000_000, 2_000_000)
        progress("unpack", 1, 1)
        return tiny

    monkeypatch.setattr("rlx.formats.fetch.resolve", resolve)
    done = rlx("run", "Why is the sky blue?", *REFERENCE)
    assert done.exit_code == 0
    assert asked == ["smollm2-135m"]
    assert done.stderr == "download smollm2-135m (2.0 MB)\nunpack smollm2-135m (1 B)\n"


def test_a_reader_that_leaves_is_no_error_to_shout_about(tiny: Path) -> None:
    command = [sys.executable, "-m", "rlx", "run", str(tiny), "Hi", "--device", "reference"]
    bias = ["--logit-bias", f"{END}=-1000", "-n", "200"]
    process = subprocess.Popen(
        [*command, *bias], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(60) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


def test_an_edited_program_runs(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    """As it was written it answers the same; with another norm it does not."""
    program = tmp_path / "edited.mir"
    rlx("inspect", tiny, "--stage", "mir", "-o", program)
    command = (program, "Hi", "--weights", tiny, *REFERENCE, "--json")
    plain = json.loads(rlx("run", tiny, "Hi", *REFERENCE, "--json").stdout)
    assert json.loads(rlx("run", *command).stdout)["tokens"] == plain["tokens"]
    text = program.read_text()
    program.write_text(re.sub(r"(rms_norm\(.*); eps=[^)]*", r"\1; eps=100.0", text))
    assert program.read_text() != text
    assert json.loads(rlx("run", *command).stdout)["tokens"] != plain["tokens"]


def test_edited_programs_that_do_not_fit(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    program = tmp_path / "edited.mir"
    rlx("inspect", tiny, "--stage", "mir", "-o", program)
    command = ("run", program, "Hi", "--weights", tiny, *REFERENCE)
    shorter = rlx(*command, "--context", "64")
    assert shorter.exit_code == 1
    assert "is not the model's" in shorter.stderr
    assert "not in an edited program" in rlx(*command, "--repetition-penalty", "1.2").stderr
    program.write_text(program.read_text().replace('as "token"', 'as "word"'))
    assert "other outputs than the model's; got word" in rlx(*command).stderr
    assert rlx("run", "Hi", "--weights", tiny).exit_code == 2


@pytest.mark.parametrize("variant", ["decode:1", "prefill:1"])
def test_an_edited_plan_runs(rlx: Any, tiny: Path, tmp_path: Path, variant: str) -> None:
    """In other places of a wider arena the same comes out; with another norm it does not."""
    file = tmp_path / "edited.lir"
    rlx("inspect", tiny, "--stage", "lir", "--variant", variant, "-o", file)
    greedy = ("--temperature", "0", "-n", "6", "--json")
    command = ("run", file, "Hi", "--weights", tiny, *greedy)
    plain = json.loads(rlx("run", tiny, "Hi", *greedy).stdout)["tokens"]
    text = file.read_text()
    size = int(text.split()[1])
    moved = re.sub(r" at (\d+)", lambda m: f" at {int(m[1]) + 640}", text)
    file.write_text(moved.replace(f"lir {size}", f"lir {size + 640}"))
    assert json.loads(rlx(*command).stdout)["tokens"] == plain
    file.write_text(re.sub(r"(rms_norm\(.*); eps=[^)]*", r"\1; eps=100.0", text))
    assert json.loads(rlx(*command).stdout)["tokens"] != plain
    file.write_text(text.replace('"ids"', '"idz"'))
    assert "is not the model's" in rlx(*command).stderr


@pytest.mark.parametrize("stage", ["llvm", "asm"])
def test_edited_kernels_run(rlx: Any, tiny: Path, tmp_path: Path, stage: str) -> None:
    """As they were written the model answers the same; with one that does nothing it does not."""
    file = tmp_path / f"edited.{stage}"
    rlx("inspect", tiny, "--stage", stage, "-o", file)
    greedy = ("--temperature", "0", "-n", "6", "--json")
    command = ("run", file, "Hi", "--weights", tiny, *greedy)
    plain = json.loads(rlx("run", tiny, "Hi", *greedy).stdout)["tokens"]
    assert json.loads(rlx(*command).stdout)["tokens"] == plain
    text = file.read_text()
    head, attention, after = re.split(r"(?m)^(; kernel .*blk\.0\.rms_norm.*\n)", text)[:3]
    empty = "define void @kernel(ptr %args, i32 %tid, i32 %nth) {\n  ret void\n}\n"
    if stage == "asm":
        empty = "\t.globl kernel\nkernel:\n\tret\n"
    rest = after[after.find("\n; kernel ") + 1 :] if "\n; kernel " in after else ""
    file.write_text(head + attention + empty + rest)
    assert json.loads(rlx(*command).stdout)["tokens"] != plain
    assert json.loads(rlx("run", tiny, "Hi", *greedy).stdout)["tokens"] == plain  # nothing stays


@pytest.mark.parametrize("variant", ["decode:1", "prefill:1"])
def test_an_edited_table_of_launches_runs(
    rlx: Any, tiny: Path, tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A barrier after every step changes nothing but the time."""
    given: list[list[bool]] = []
    kept = CpuExecutable.set_barriers

    def spy(self: CpuExecutable, after: list[bool]) -> None:
        given.append(after)
        kept(self, after)

    monkeypatch.setattr(CpuExecutable, "set_barriers", spy)
    file = tmp_path / "edited.program"
    rlx("inspect", tiny, "--stage", "program", "--variant", variant, "-o", file)
    greedy = ("--temperature", "0", "-n", "6", "--json")
    command = ("run", file, "Hi", "--weights", tiny, *greedy)
    plain = json.loads(rlx("run", tiny, "Hi", *greedy).stdout)["tokens"]
    assert json.loads(rlx(*command).stdout)["tokens"] == plain
    text = file.read_text()
    file.write_text(re.sub(r"  +(// block)", r"  barrier  \1", text))
    assert json.loads(rlx(*command).stdout)["tokens"] == plain
    as_made, everywhere = given
    head = re.match(r"program llama: (\d+) launches, \d+ kernels, (\d+) barriers", text)
    assert head is not None
    assert (len(as_made), sum(as_made)) == (int(head[1]), int(head[2]))
    assert sum(everywhere) > sum(as_made)
    file.write_text(re.sub("#0 +", "#0  other ", text))
    assert "launches that the model does not have" in rlx(*command).stderr


def test_edited_kernels_that_do_not_fit(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "edited.asm"
    command = ("run", file, "Hi", "--weights", tiny, "-n", "1")
    rlx("inspect", tiny, "--stage", "asm", "--cpu", "x86-64-v2", "-o", file)
    assert "kernels that the model does not run" in rlx(*command).stderr
    rlx("inspect", tiny, "--stage", "asm", "--block", "blk.0.rope", "-o", file)
    text = file.read_text()
    file.write_text(text.replace("kernel:\n", "kernel:\n\tnonsense %rax\n"))
    refused = rlx(*command)
    assert refused.exit_code == 1
    assert "LLVM rejects the assembly" in refused.stderr
    assert "nonsense" in refused.stderr
    file.write_text(re.sub("; kernel [0-9a-f]*", "; kernel", text))
    assert "a kernel without its header line" in rlx(*command).stderr
    elsewhere = rlx("run", file, "Hi", "--weights", tiny, *REFERENCE)
    assert (elsewhere.exit_code, "has no native code" in elsewhere.stderr) == (1, True)
