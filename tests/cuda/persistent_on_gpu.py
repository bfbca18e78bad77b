"""On a machine with a GPU: decode as a graph of launches and as one persistent kernel, in turns.

    python tests/cuda/persistent_on_gpu.py [--shape 0.6b|1.7b|8b] [--type BF16,Q8_0,Q4_K_M]
        [--variants "ahead=6;piece=64"] [--rounds N] [--peer] [--layers N] [--vocab N]

Random weights, sampled through `model.generate` from position 512 on. Each variant of the kernel
must give the tokens of the graph, greedy ones and sampled ones; with packed weights, whose sums are
rounded in other places, more than half of them. With 0 rounds nothing is timed.
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
import rlx
from bench.gpu import POSITION, TOKENS, Letters, decode, in_turns, prompt
from bench.gpu_decode import parsed
from bench.peers import torch_gpu
from bench.random_model import SHAPES, write_random_model
from rlx.backends.cuda.kernels.persistent import plan
from rlx.models.model_file import ModelFile

GRAPH = "graph of launches"


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
    for options in ({"temperature": 0.0}, {"seed": 1}, {"seed": 2}):
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


def measured(kind: str, options: Any) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_random_model(path, options.shape, kind, options.layers, options.vocab)
        models = {name: loaded(path, name) for name in (GRAPH, *options.variants.split(";"))}
    wanted, failed = tokens(models[GRAPH]), 0
    for name, model in models.items():
        found = [tokens(model) for _ in range(3 if options.rounds else 1)]
        same, equal = (min(how(wanted, f) for f in found) for how in (common, agreeing))
        failed += same < len(wanted) if kind == "BF16" else equal <= len(wanted) // 2
        what = f"{options.shape} {kind} {name or 'persistent'}: the first {same} of {len(wanted)}"
        print(f"{what} tokens are those of the graph, {equal} in all", flush=True)
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
