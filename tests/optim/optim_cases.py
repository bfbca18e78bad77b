"""Optimisers of torch, or optax, and ours with the same settings; for the goldens and the tests."""

from __future__ import annotations

import numpy as np

STEPS = 20
SHAPES = {"weight": (7, 5), "tall": (12, 4), "kernel": (3, 2, 4), "bias": (5,)}

# name -> (torch's or optax's, ours, whether it is for matrices alone)
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
    "lion": (
        "optax.lion(0.01, b1=0.9, b2=0.99, weight_decay=0.1)",
        "Lion(0.01, weight_decay=0.1)",
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
    "exponential": ("ExponentialLR(o, 0.9)", "step(0.1, 1, 0.9)"),
    "polynomial": ("PolynomialLR(o, 15, 2.0)", "polynomial(0.1, 15, 2.0)"),
    "multi_step": (
        "MultiStepLR(o, [4, 11], 0.2)",
        "chain([(constant(0.1), 4), (constant(0.02), 7)], constant(0.004))",
    ),
    "restarts": (
        "CosineAnnealingWarmRestarts(o, 8, eta_min=0.01)",
        "chain([(cosine(0.1, 8, 0.01), 8), (cosine(0.1, 8, 0.01), 8)], cosine(0.1, 8, 0.01))",
    ),
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
