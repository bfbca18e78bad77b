"""Every architecture against Hugging Face transformers, on tiny weights from a seed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
from tiny import CONFIGS, PROMPT, write_folder

from rlx import CompileOptions, DimBinding, Session
from rlx.models.builder import LOGITS, build_graph
from rlx.models.model_file import ModelFile
from rlx.models.recurrent import CARRIED

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"


def load(name: str, folder: Path, device: str):  # type: ignore[no-untyped-def]
    write_folder(name, folder)
    context = 32 if name == "phi3_long" else 40  # within the original context: short factors
    return compiled(ModelFile.open(folder), context, device)


def compiled(model: ModelFile, context: int, device: str):  # type: ignore[no-untyped-def]
    """The model for logits of all tokens, sequence and past both dynamic; f32 cache."""
    described = build_graph(model, model.weights(), LOGITS, context=context, kv="f32")
    binding = DimBinding().set_live("seq", 32).set_live("past_seq", context - 1)
    made = Session(device).compile(described.module, CompileOptions(binding=binding))
    return made.set_params(described.params)


def begin(f) -> None:  # type: ignore[no-untyped-def]
    """No tokens yet: states that are carried from one to the next are zeros."""
    for state in f.manifest.states:
        if state.name.startswith(CARRIED):
            f.read_state(state.name).fill(0)


def close(got: np.ndarray, wanted: np.ndarray) -> None:
    """f32 all the way: sums of at most 96 terms in another order, three to seven layers; 1e-4 of
    the largest logit is the stated bar, about ten times what is seen."""
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * float(np.abs(wanted).max()))


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_chunks_and_decode_equal_transformers(
    name: str, device: str, tmp_path: Path
) -> None:
    golden = np.load(GOLDENS / f"logits_{name}.npz")
    tokens, wanted = golden["tokens"].astype(np.int32), golden["logits"]
    f = load(name, tmp_path, device)

    def run(start: int, stop: int) -> np.ndarray:
        if start == 0:
            begin(f)
        (logits,) = f.run(ids=tokens[None, start:stop], sizes={"past_seq": start})
        return logits[0]

    count = len(PROMPT)
    close(run(0, len(tokens)), wanted)  # one prefill of everything
    close(run(0, 5), wanted[:5])  # in chunks
    close(run(5, count), wanted[5:count])
    singly = len(tokens) if device == "cpu" else count + 3  # the interpreter takes its time
    for i in range(count, singly):  # then token by token
        close(run(i, i + 1), wanted[i : i + 1])
    if singly < len(tokens):
        close(run(singly, len(tokens)), wanted[singly:])
    assert np.array_equal(wanted[count - 1 : -1].argmax(-1), tokens[count:])
