"""Makes optim.npz: 20 steps of torch's optimisers and schedules, and of optax's where torch has
none, for tests/optim. Needs torch, jax and optax.

python tests/goldens/make_optim.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import optax
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "optim"))
from optim_cases import CASES, SCHEDULES, STEPS, gradient, start

# Muon rounds to bf16 for its iteration, which leaves 3 digits to compare: here it keeps f32
torch.Tensor.bfloat16 = lambda self: self.clone()  # type: ignore[method-assign]


def of_optax(case: str, theirs: str) -> dict[str, np.ndarray]:
    optimizer, params = eval(theirs, {"optax": optax}), start(case)
    state, steps = optimizer.init(params), []
    for i in range(STEPS):
        updates, state = optimizer.update(gradient(case, i), state, params)
        params = optax.apply_updates(params, updates)
        steps.append({k: np.asarray(p) for k, p in params.items()})
    return {k: np.stack([s[k] for s in steps]) for k in params}


def main() -> None:
    made: dict[str, np.ndarray] = {}
    for case, (theirs, _, _) in CASES.items():
        if theirs.startswith("optax."):
            made |= {f"{case}/{k}": x for k, x in of_optax(case, theirs).items()}
            continue
        params = {k: torch.nn.Parameter(torch.tensor(x)) for k, x in start(case).items()}
        optimizer = eval(f"torch.optim.{theirs}", {"torch": torch, "p": list(params.values())})
        steps: dict[str, list[np.ndarray]] = {k: [] for k in params}
        for i in range(STEPS):
            for k, g in gradient(case, i).items():
                params[k].grad = torch.tensor(g)
            optimizer.step()
            for k, p in params.items():
                steps[k].append(p.detach().numpy().copy())
        made |= {f"{case}/{k}": np.stack(x) for k, x in steps.items()}
    for name, (theirs, _) in SCHEDULES.items():
        o = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        schedule = eval(theirs, {**vars(torch.optim.lr_scheduler), "o": o})
        rates = []
        for _ in range(STEPS):
            rates.append(o.param_groups[0]["lr"])
            o.step()
            schedule.step()
        made[f"schedule/{name}"] = np.array(rates)
    grads = [torch.nn.Parameter(torch.tensor(x)) for x in start("adam").values()]
    for p, g in zip(grads, gradient("adam", 1).values(), strict=True):
        p.grad = torch.tensor(g)
    made["clip/norm"] = torch.nn.utils.clip_grad_norm_(grads, 0.5).numpy()
    made |= {f"clip/{i}": p.grad.numpy() for i, p in enumerate(grads)}
    np.savez_compressed(Path(__file__).with_name("optim.npz"), **made)


if __name__ == "__main__":
    main()
