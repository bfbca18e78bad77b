"""Optimisers of torch and ours with the same settings; used by the goldens and by the tests."""

from __future__ import annotations

import numpy as np

STEPS = 20
SHAPES = {"weight": (7, 5), "tall": (12, 4), "kernel": (3, 2, 4), "bias": (5,)}

# name -> (torch's, ours, whether it is for matrices alone)
CASES = {
    "sgd": ("SGD(p, lr=0.1)", "SGD(0.1)", False),
    "sgd_momentum": (
        "SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05)",
        "SGD(0.1, momentum=0.9, weight_decay=0.05)",
        False,
    ),
    "sgd_nesterov": (
        "SGD(p, lr=0.05, momentum=0.9, nesterov=True)",
        "SGD(0.05, momentum=0.9, nesterov=True)",
        False,
    ),
    "adam": ("Adam(p, lr=0.01, weight_decay=0.1)", "Adam(0.01, weight_decay=0.1)", False),
    "adamw": (
        "AdamW(p, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)",
        "AdamW(0.01, beta2=0.95, weight_decay=0.1)",
        False,
    ),
    "adafactor": (
        "Adafactor(p, lr=0.05, weight_decay=0.1)",
        "Adafactor(0.05, weight_decay=0.1)",
        False,
    ),
    "muon": ("Muon(p, lr=0.02, weight_decay=0.1)", "Muon(0.02, weight_decay=0.1)", True),
    "muon_rms": (
        "Muon(p, lr=0.02, nesterov=False, adjust_lr_fn='match_rms_adamw')",
        "Muon(0.02, nesterov=False, adjust='match_rms_adamw')",
        True,
    ),
}

# torch's schedule of an optimiser of rate 0.1, and ours
SCHEDULES = {
    "constant": ("LambdaLR(o, lambda i: 1.0)", "constant(0.1)"),
    "linear": ("LinearLR(o, 0.5, 0.1, total_iters=12)", "linear(0.05, 0.01, 12)"),
    "cosine": ("CosineAnnealingLR(o, 30, 0.01)", "cosine(0.1, 30, 0.01)"),
    "step": ("StepLR(o, 6, 0.3)", "step(0.1, 6, 0.3)"),
    "one_cycle": ("OneCycleLR(o, 0.1, total_steps=25)", "one_cycle(0.1, 25)"),
    "chain": (
        "SequentialLR(o, [LinearLR(o, 0.25, 1.0, total_iters=5), CosineAnnealingLR(o, 20)], [5])",
        "warmup(cosine(0.1, 20), 5, start=0.025)",
    ),
}


def shapes_of(case: str) -> dict[str, tuple[int, ...]]:
    return {k: s for k, s in SHAPES.items() if len(s) == 2 or not CASES[case][2]}


def start(case: str) -> dict[str, np.ndarray]:
    rng = np.random.RandomState(1)
    return {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes_of(case).items()}


def gradient(case: str, step: int) -> dict[str, np.ndarray]:
    rng = np.random.RandomState(100 + step)
    return {
        k: (rng.standard_normal(s) * 3.0 ** rng.randint(-4, 2)).astype(np.float32)
        for k, s in shapes_of(case).items()
    }
