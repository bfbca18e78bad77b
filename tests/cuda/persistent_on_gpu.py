"""On a machine with a GPU: decode as a graph of launches and as one persistent kernel, in turns.

    python tests/cuda/persistent_on_gpu.py [--shape 0.6b|1.7b|8b] [--type BF16,Q8_0,Q4_K_M]
        [--variants "ahead=6;piece=64"] [--rounds N] [--peer] [--layers N] [--vocab N]

Random weights, sampled through `model.generate` from position 512 on. Each variant of the kernel
must give the tokens of the graph, greedy ones and sampled ones. With packed weights sums are
rounded in other places: where a sequence first differs, the logits of both must be as close as
rounding allows, and the reference must draw from each what was drawn. With 0 rounds nothing is
timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
import numpy as np

import rlx
from bench.gpu import POSITION, TOKENS, Letters, decode, in_turns, prompt
from bench.gpu_decode import parsed
from bench.peers import torch_gpu
from bench.random_model import SHAPES, write_random_model
from rlx.backends.cuda.kernels.persistent import plan
from rlx.ir.ops.sample import Settings, sample_row
from rlx.ir.philox import draw_words, uniform
from rlx.models.model_file import ModelFile
from rlx.models.sampling import GenerationSettings

GRAPH = "graph of launches"
SEQUENCES: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"seed": 1}, {"seed": 2})
# Between logits of both forms, in their standard deviations. Keys and values are f16, with 11 bits:
# where sums are rounded otherwise one of them changes by 2⁻¹¹, and 36 layers and hundreds of tokens
# add such changes to each other. A wrong row or scale gives logits of another model, 1 apart.
TOLERANCE = 1 / 32


def loaded(path: Path, variant: str) -> Any:
    """A model with its programs made for a variant."""
    kernel, shape = plan.PersistentDecode, plan.DenseShape
    os.environ["RLX_PERSISTENT"] = "0" if variant == GRAPH else "1"
    changes = {} if variant == GRAPH else parsed(variant)
    of_shape = {k: changes.pop(k) for k in ("piece", "widest") if k in changes}
    plan.PersistentDecode = partial(kernel, **changes)  # type: ignore[assignment,misc]
    plan.DenseShape = partial(shape, **of_shape)  # type: ignore[assignment,misc]
    model = rlx.load(path, device="cuda", context=4096)
    model.generate(prompt(POSITION, 1), stream=False, max_tokens=2, seed=0)
    plan.PersistentDecode, plan.DenseShape = kernel, shape  # type: ignore[misc]
    return model


def tokens(model: Any) -> list[int]:
    """Greedy ones and sampled ones, more than one launch of the host's graph has."""
    found: list[int] = []
    for options in SEQUENCES:
        made = model.generate(prompt(POSITION, 3), stream=False, max_tokens=TOKENS, **options)
        found += made.tokens
    return found


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def agreeing(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x == y for x, y in zip(a, b, strict=False))


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--type", default="BF16", help="of weights, several by commas")
    parser.add_argument("--layers", type=int, default=None, help="fewer than the shape has")
    parser.add_argument("--vocab", type=int, default=None, help="words of the vocabulary")
    parser.add_argument("--variants", default="", help="settings, by semicolons")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", action="store_true", help="torch.compile, in turns with the rest")
    options = parser.parse_args()
    ModelFile.tokenizer = lambda self: Letters()  # type: ignore[method-assign,assignment,return-value]
    return max([measured(kind, options) for kind in options.type.split(",")])


def logits(model: Any, options: dict[str, Any], count: int) -> tuple[list[int], Any]:
    """So many tokens, and the logits from which the last one was drawn."""
    given = {"stream": False, "max_tokens": count, "logprobs": 1, **options}
    made = model.generate(prompt(POSITION, 3), **given)
    return made.tokens, np.array(model.runner.last_logits, np.float32).reshape(-1)


def is_near(models: Sequence[Any], options: dict[str, Any], place: int) -> bool:
    """Whether sequences that first differ at a place do so by rounding alone."""
    settings = GenerationSettings(**options)
    seed, first = (int(v) for v in settings.rng())
    point = float(uniform(draw_words(seed, first + place, 1))[0])
    found = [logits(model, options, place + 1) for model in models]
    (wanted, a), (got, b) = found
    drawn = [sample_row(x, point, Settings.of(settings.row())) for x in (a, b)]
    apart, best = float(np.abs(a - b).max() / a.std()), np.sort(a)[-2:]
    print(
        f"  {options}, token {place}: {wanted[-1]} and {got[-1]}, the reference draws {drawn}; "
        f"logits {apart:.2e} of their deviation apart at most, the two best ones "
        f"{(best[1] - best[0]) / a.std():.2e}"
    )
    same = wanted[:-1] == got[:-1] and drawn == [wanted[-1], got[-1]]
    return same and apart <= TOLERANCE


def are_near(models: Sequence[Any], wanted: Sequence[int], found: Sequence[int]) -> bool:
    near = True
    for i, options in enumerate(SEQUENCES):
        of = slice(i * TOKENS, (i + 1) * TOKENS)
        place = common(wanted[of], found[of])
        if place < TOKENS:
            near = is_near(models, options, place) and near
    return near


def measured(kind: str, options: Any) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_random_model(path, options.shape, kind, options.layers, options.vocab)
        models = {name: loaded(path, name) for name in (GRAPH, *options.variants.split(";"))}
    wanted, failed = tokens(models[GRAPH]), 0
    for name, model in models.items():
        found = [tokens(model) for _ in range(3 if options.rounds else 1)]
        same, equal = (min(how(wanted, f) for f in found) for how in (common, agreeing))
        what = f"{options.shape} {kind} {name or 'persistent'}: the first {same} of {len(wanted)}"
        print(f"{what} tokens are those of the graph, {equal} in all", flush=True)
        if same < len(wanted):
            near = kind != "BF16" and are_near((models[GRAPH], model), wanted, found[0])
            failed += not near
            print("  by rounding alone" if near else "  WRONG", flush=True)
    if options.rounds:
        time_models(models, kind, options)
    for model in models.values():
        model.close()
    return 1 if failed else 0


def time_models(models: dict[str, Any], kind: str, options: Any) -> None:
    runs = [partial(decode, model) for model in models.values()]
    names = list(models)
    if options.peer:
        torch = torch_gpu.load()
        peer = torch_gpu.Qwen3(torch, options.shape, POSITION + 2 * TOKENS)
        runs.append(peer.timed_step(1, POSITION))
        names.append("torch.compile")
    for name, seconds in zip(names, in_turns(runs, options.rounds), strict=True):
        what = f"{options.shape} {kind} {name or 'persistent'}"
        print(f"{what}: {1 / seconds:.0f} tokens/s")
    if not options.peer:
        spread = statistics.pstdev([decode(models[""]) for _ in range(5)])
        print(f"spread of five runs: {spread * 1e6:.1f} us a token")


if __name__ == "__main__":
    raise SystemExit(main())
