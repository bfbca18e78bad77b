"""`rlx.finetune` on small models: what it learns, what it writes, and going on after a stop."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from finetune_models import chats, write_copy, write_lines, write_llama
from safetensors.numpy import load_file

import rlx
from rlx.ir.quant.scheme import decode
from rlx.models.finetune.history import History
from rlx.models.model_file import ModelFile
from rlx.models.to_gguf import quantize_model

FAST = {"batch": 4, "learning_rate": 1e-2, "context": 64}
TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PROMPT = [11, 52, 7, 80, 33, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def gguf(folder: Path) -> Path:
    return write_copy(folder, folder.parent / "llama.gguf")


@pytest.fixture(scope="module")
def tuned(folder: Path) -> rlx.FineTuned:
    """30 steps on two questions."""
    out = folder.parent / "tuned"
    return rlx.finetune(folder, chats(2), out=out, steps=30, pack=False, **FAST)


def logits(path: Path, **options: Any) -> np.ndarray:
    adapter = options.pop("adapter", None)
    with rlx.load(path, context=96, kv="f32", **options) as model:
        return model.logits(PROMPT, adapter=adapter)


def same(got: np.ndarray, wanted: np.ndarray) -> None:
    """f32 all the way, sums in another order."""
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5 * float(np.abs(wanted).max()))


def ask(model: Any, text: str, **options: Any) -> str:
    messages = [{"role": "user", "content": text}]
    found = model.chat(messages, stream=False, temperature=0.0, max_tokens=12, **options)
    return str(found.text)


# -- adapters -------------------------------------------------------------------------------------


def test_an_adapter_that_answers_as_it_learned(folder: Path, tuned: rlx.FineTuned) -> None:
    losses = tuned.history.losses
    assert tuned.kind == "adapter" and len(losses) == 30
    assert losses[0] > 4 and losses[-1] < 0.1
    with rlx.load(folder, adapters=[tuned.path]) as model:
        assert ask(model, "red", adapter="tuned") == "yes red"
        assert ask(model, "blue", adapter="tuned") == "yes blue"
        assert ask(model, "red") != "yes red"
    asked = [{"role": "user", "content": "blue"}]
    with rlx.Engine(folder, adapters=[tuned.path], requests=2, context=96) as engine:
        reply = engine.chat(asked, temperature=0.0, max_tokens=12, adapter="tuned")
        assert "".join(reply) == "yes blue"


def test_the_adapter_is_the_change_of_the_weights(
    folder: Path, tuned: rlx.FineTuned, tmp_path: Path
) -> None:
    """W + alpha / rank · B · A, added by hand."""
    tensors = load_file(tuned.path / TENSORS)
    config = json.loads((tuned.path / CONFIG).read_text())
    base = load_file(folder / "model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." in name:
            stored = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            change = tensors[name.replace("lora_A", "lora_B")] @ a
            base[stored] = base[stored] + config["lora_alpha"] / config["r"] * change
    assert len(tensors) == 3 * 7 * 2 and config["target_modules"][0] == "down_proj"
    changed = write_llama(tmp_path / "changed")
    from tiny import write_safetensors

    write_safetensors(changed / "model.safetensors", base)
    wanted = logits(changed)
    same(logits(folder, adapters=[tuned.path], adapter="tuned"), wanted)
    assert np.abs(logits(folder) - wanted).max() > 0.1


def test_a_gguf_file_gives_the_same_adapter(folder: Path, gguf: Path, tmp_path: Path) -> None:
    """With Hugging Face's names, and its order of rows in q and k."""
    for name, model in (("a", folder), ("b", gguf)):
        rlx.finetune(model, chats(4), out=tmp_path / name, steps=3, **FAST)
    a, b = (load_file(tmp_path / name / TENSORS) for name in "ab")
    assert a.keys() == b.keys()
    for name, x in a.items():
        # Adam divides by the root of a square: where a gradient is nearly zero, its last bits count
        error = np.linalg.norm(x - b[name]) / max(np.linalg.norm(x), 1e-9)
        assert error < 1e-2, name
    same(logits(gguf, adapters=[tmp_path / "a"], adapter="a"),
         logits(folder, adapters=[tmp_path / "a"], adapter="a"))  # fmt: skip


def test_merged_into_gguf(folder: Path, gguf: Path, tmp_path: Path, tuned: rlx.FineTuned) -> None:
    wanted = logits(folder, adapters=[tuned.path], adapter="tuned")
    # a finished run goes on at its end: only the result is written once more
    again = rlx.finetune(folder, chats(2), out=tuned.path, steps=30, pack=False,
                         merge=tmp_path / "m.gguf", **FAST)  # fmt: skip
    assert again.history.losses == tuned.history.losses
    same(logits(tmp_path / "m.gguf"), wanted)
    made = rlx.finetune(gguf, chats(2), out=tmp_path / "a", steps=2, merge=tmp_path / "q.gguf",
                        type="Q8_0", **FAST)  # fmt: skip
    assert made.merged == tmp_path / "q.gguf"
    plain = logits(gguf, adapters=[tmp_path / "a"], adapter="a")
    # weights are rounded to 8 bits: 0.4 % of the largest of a block each, less in a sum
    error = logits(tmp_path / "q.gguf") - plain
    assert np.square(error).mean() < 1e-3 * np.square(plain).mean()


def test_merged_into_a_file_of_four_bits(folder: Path, tmp_path: Path) -> None:
    """What two small steps change is less than half a step of Q4_0."""
    small = tmp_path / "small.gguf"
    quantize_model(folder, small, "Q4_0")
    made = rlx.finetune(small, chats(2), out=tmp_path / "a", steps=2, merge=tmp_path / "m.gguf",
                        **FAST | {"learning_rate": 1e-3})  # fmt: skip

    def down(path: Path) -> np.ndarray:
        weight = ModelFile.open(path).weights().get("blk.0.ffn_down.weight")
        return decode(weight.scheme, np.ascontiguousarray(weight.array))

    found = down(tmp_path / "m.gguf") - down(small)
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_"
    parts = load_file(made.path / TENSORS)
    wanted = 2 * parts[f"{name}B.weight"] @ parts[f"{name}A.weight"]  # alpha / rank
    # 8 bits round without a bias; rounded to 4 bits again, nothing would be left: 0
    assert abs(np.sum(found * wanted) / np.sum(wanted * wanted) - 1) < 0.1


def test_dora(folder: Path, tmp_path: Path) -> None:
    """Read back merged, as PEFT defines it: rows of W + s · B · A with lengths of their own."""
    rlx.finetune(folder, chats(2), out=tmp_path / "d", steps=3, lora={"use_dora": True}, **FAST)
    tensors = load_file(tmp_path / "d" / TENSORS)
    base = load_file(folder / "model.safetensors")
    for name, magnitude in tensors.items():
        if name.endswith(".lora_magnitude_vector"):
            module = name.removesuffix(".lora_magnitude_vector")
            total = base[module.removeprefix("base_model.model.") + ".weight"]
            update = tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
            total = total + 2.0 * update
            total *= (magnitude / np.linalg.norm(total, axis=1))[:, None]
            base[module.removeprefix("base_model.model.") + ".weight"] = total
    changed = write_llama(tmp_path / "changed")
    from tiny import write_safetensors

    write_safetensors(changed / "model.safetensors", base)
    same(logits(folder, adapters=[tmp_path / "d"], merge=True), logits(changed))
    with pytest.raises(rlx.UnsupportedError, match="DoRA cannot run beside"):
        rlx.load(folder, adapters=[tmp_path / "d"])


# -- all weights ----------------------------------------------------------------------------------


def test_all_weights_of_a_folder_and_of_a_file(folder: Path, gguf: Path, tmp_path: Path) -> None:
    made = {}
    for name, model in (("folder", folder), ("file", gguf)):
        made[name] = rlx.finetune(model, chats(2), out=tmp_path / name, full=True, steps=25,
                                  pack=False, **FAST)  # fmt: skip
        with rlx.load(made[name].path) as loaded:
            assert ask(loaded, "red") == "yes red"
    assert made["folder"].path == tmp_path / "folder"
    assert made["file"].path == tmp_path / "file" / "model.gguf"
    assert made["folder"].history.losses[0] == pytest.approx(made["file"].history.losses[0])
    changed = load_file(tmp_path / "folder" / "model.safetensors")
    stored = load_file(folder / "model.safetensors")
    assert all((changed[n] != x).any() and changed[n].dtype == x.dtype for n, x in stored.items())


# -- steps ----------------------------------------------------------------------------------------


def test_parts_of_a_batch_weigh_as_the_whole(folder: Path, tmp_path: Path) -> None:
    """Answers differ in length: a mean of the parts' means would be another number."""
    data = [*chats(4), *chats(4, "a rather longer answer: {}")]
    found = [
        rlx.finetune(folder, data, out=tmp_path / f"{n}", steps=4, pack=False, batch=4 // n,
                     accumulate=n, learning_rate=1e-2).history
        for n in (1, 2)
    ]  # fmt: skip
    # f32 sums in another order, and Adam in between
    np.testing.assert_allclose(found[0].losses, found[1].losses, rtol=1e-4)
    np.testing.assert_allclose(found[0].norms, found[1].norms, rtol=1e-3)


def test_rates_warm_up_and_fall(folder: Path, tmp_path: Path) -> None:
    found = rlx.finetune(folder, chats(4), out=tmp_path / "a", steps=6, warmup=2,
                         schedule="linear", **FAST).history  # fmt: skip
    wanted = [1e-2 / 3, 2e-2 / 3, 1e-2, 7.5e-3, 5e-3, 2.5e-3]
    np.testing.assert_allclose(found.rates, wanted, rtol=1e-12)


def test_evaluation_and_an_early_stop(folder: Path, tmp_path: Path) -> None:
    """A rate so high that it gets worse: the best parameters are the result."""
    seen = []
    made = rlx.finetune(
        folder, chats(8), out=tmp_path / "a", steps=40, evaluation=0.25, eval_every=1, patience=3,
        batch=4, learning_rate=0.3, schedule="constant", warmup=0, progress=seen.append,
        save_every=1, pack=False,
    )  # fmt: skip
    losses = [loss for _, loss in made.history.evaluations]
    best = losses.index(min(losses))
    assert len(losses) == best + 4 < 40 and seen[-1].step == len(losses)
    assert seen[0].eval_loss == losses[0] and seen[-1].steps == 40
    kept = load_file(tmp_path / "a" / "checkpoints" / "best.safetensors")
    found = load_file(made.path / TENSORS)
    for layer in ("blk.0.attn_v.weight.b", "blk.1.ffn_up.weight.a"):
        assert any(np.array_equal(kept[layer], x) for x in found.values())
    last = load_file(tmp_path / "a" / "checkpoints" / f"step-{len(losses):08}.safetensors")
    assert not np.array_equal(last["params.blk.0.attn_v.weight.b"], kept["blk.0.attn_v.weight.b"])


# -- stops ----------------------------------------------------------------------------------------


def test_an_interrupted_run_ends_in_the_same_bits(folder: Path, tmp_path: Path) -> None:
    """Also with dropout, evaluation, and several parts of a batch."""
    data, options = chats(6), {
        "steps": 6, "lora": {"dropout": 0.2, "rank": 4}, "evaluation": 0.3, "eval_every": 2,
        "accumulate": 2, "batch": 1, "patience": 9, "pack": False, "save_every": 4,
    }  # fmt: skip
    wanted = rlx.finetune(folder, data, out=tmp_path / "straight", **options)

    def stop(now: rlx.TrainingProgress) -> None:
        if now.step in (1, 3):
            os.kill(os.getpid(), signal.SIGINT)

    out = tmp_path / "stopped"
    for step in (1, 3):
        with pytest.raises(KeyboardInterrupt, match=f"saved step {step} of 6") as raised:
            rlx.finetune(folder, data, out=out, progress=stop, **options)
        assert "the same call goes on" in raised.value.__notes__[0]
        assert not (out / TENSORS).exists()
    found = rlx.finetune(folder, data, out=out, progress=stop, **options)
    assert found.history == wanted.history
    assert (out / TENSORS).read_bytes() == (wanted.path / TENSORS).read_bytes()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_run_is_not_gone_on_with(folder: Path, tmp_path: Path) -> None:
    run = {"steps": 2, **FAST}
    first = rlx.finetune(folder, chats(4), out=tmp_path / "a", **run)
    bits = (first.path / TENSORS).read_bytes()
    for changed in ({"seed": 1}, {"learning_rate": 1e-3}, {"lora": {"rank": 4}}):
        name = next(iter(changed))
        with pytest.raises(rlx.OptionError, match=f"another run; got (.*{name} |other)"):
            rlx.finetune(folder, chats(4), out=tmp_path / "a", **{**run, **changed})
    with pytest.raises(rlx.OptionError, match=r"another run; got .*data"):
        rlx.finetune(folder, chats(4, "no"), out=tmp_path / "a", **run)
    assert (first.path / TENSORS).read_bytes() == bits
    other = rlx.finetune(folder, chats(4), out=tmp_path / "a", resume=False, seed=1, **run)
    assert (other.path / TENSORS).read_bytes() != bits
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("mine")
    with pytest.raises(rlx.InputError, match="not empty, and has no checkpoints"):
        rlx.finetune(folder, chats(4), out=tmp_path / "b", resume=False, **run)


def test_a_loss_that_is_not_finite_stops_the_run(folder: Path, tmp_path: Path) -> None:
    options = {"optimizer": "sgd", "clip": None, "warmup": 0, "schedule": "constant", "steps": 40,
               "save_every": 1}  # fmt: skip
    with pytest.raises(rlx.NumericsError, match=r"step (\d+) is not finite") as raised:
        rlx.finetune(folder, chats(4), out=tmp_path / "a", learning_rate=1e35, batch=4, **options)
    assert "smaller learning_rate" in raised.value.hint
    saved = rlx.CheckpointManager(tmp_path / "a" / "checkpoints").steps()
    assert f"checkpoint of step {saved[-1]} stays" in raised.value.hint if saved else True
    for step in saved:
        for x in load_file(tmp_path / "a" / "checkpoints" / f"step-{step:08}.safetensors").values():
            assert np.isfinite(x).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epoch": 3}, "unknown setting; got epoch"),
        ({"batch": 0}, "not a value of batch"),
        ({"optimizer": "adamv"}, "unknown optimizer"),
        ({"optimizer": "sgd"}, "sgd has no usual learning rate"),
        ({"learning_rate": float("nan")}, "not a value of learning_rate"),
        ({"lora": {"rnk": 3}}, "unknown setting; got rnk"),
        ({"lora": {"targets": "x_proj"}}, "no weights of that name"),
        ({"lora": {}, "full": True}, "not with full"),
        ({"merge": "m.bin"}, "no GGUF file"),
        ({"merge": "m.gguf", "full": True}, "only an adapter is merged"),
        ({"type": "Q8_0"}, "a type of GGUF files"),
        ({"plot": "a.png"}, "unknown kind of chart"),
        ({"overlong": "no"}, "unknown overlong"),
        ({"evaluation": 2}, "not a share"),
        ({"remat": "all"}, "unknown policy"),
    ],
)
def test_wrong_options_are_said_before_anything_runs(
    folder: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(rlx.OptionError, match=message):
        rlx.finetune(folder, chats(4), out=tmp_path / "a", **options)
    assert not list((tmp_path / "a").glob("*.safetensors"))


# -- history --------------------------------------------------------------------------------------


def test_a_history_is_text_and_a_chart(tmp_path: Path) -> None:
    history = History()
    for step in range(1, 2501):
        history.add(step, 3.0 + 1 / step, 0.1 * step, 1e-3 / 3)
    history.add_evaluation(1000, 3.5)
    assert History.of(history.as_text()) == history
    history.plot(tmp_path / "a.svg")
    history.plot(tmp_path / "a.html")
    text = (tmp_path / "a.svg").read_text()
    root = ElementTree.fromstring(text)
    lines = {x.get("class"): x.get("points") for x in root if x.tag.endswith("polyline")}
    assert {"loss", "mean", "eval"} <= lines.keys() and len(lines["loss"].split()) <= 1001
    first, last = (lines["loss"].split()[i].split(",") for i in (0, -1))
    assert float(first[0]) < float(last[0]) and float(first[1]) < float(last[1])  # falls
    assert text in (tmp_path / "a.html").read_text() and "step 1000: 3.5000" in text
    assert History().svg()  # of a run that did no step


def test_data_from_a_file_is_that_of_a_list(folder: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", chats(4))
    a = rlx.finetune(folder, path, out=tmp_path / "a", steps=2, **FAST)
    b = rlx.finetune(folder, chats(4), out=tmp_path / "b", steps=2, **FAST)
    assert (
        a.history == b.history
        and (a.path / TENSORS).read_bytes() == (b.path / TENSORS).read_bytes()
    )
