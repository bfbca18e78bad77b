"""A Kalman filter over noisy positions, as one scan: a track of any length in one native call.

python examples/kalman.py [MEASUREMENTS]
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np

import rlx
import rlx.numpy as rnp


class Belief(NamedTuple):
    """A Gaussian over the state: position and velocity along two axes."""

    mean: rlx.Array  # [4]
    covariance: rlx.Array  # [4, 4]


def motion(dt: float) -> np.ndarray:
    """Constant velocity: the position moves by velocity · dt."""
    moved = np.eye(4, dtype=np.float32)
    moved[0, 2] = moved[1, 3] = dt
    return moved


def drift(dt: float, noise: float) -> np.ndarray:
    """The covariance that unknown accelerations add in a step."""
    gain = np.array([[dt * dt / 2, 0], [0, dt * dt / 2], [dt, 0], [0, dt]], np.float32)
    return noise**2 * gain @ gain.T


@rlx.jit
def track(
    start: Belief, measured: rlx.Array, moves: rlx.Array, added: rlx.Array, noise: rlx.Array
) -> tuple[Belief, rlx.Array]:
    """Filter all measurements [n, 2]; returns the last belief and the mean after each."""
    seen = rnp.eye(2, 4)  # positions are measured, velocities are not

    def step(belief: Belief, position: rlx.Array) -> tuple[Belief, rlx.Array]:
        mean = moves @ belief.mean
        covariance = moves @ belief.covariance @ moves.mT + added
        surprise = position - seen @ mean
        spread = seen @ covariance @ seen.mT + noise**2 * rnp.eye(2)
        gain = covariance @ seen.mT @ rnp.linalg.inv(spread)
        mean = mean + gain @ surprise
        return Belief(mean, (rnp.eye(4) - gain @ seen) @ covariance), mean

    return rlx.scan(step, start, measured)


def flight(count: int, dt: float, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """A path that turns slowly, and what a noisy sensor sees of it."""
    rng = np.random.default_rng(0)
    heading = np.cumsum(rng.normal(0, 0.03, count))
    velocity = 10 * np.stack([np.cos(heading), np.sin(heading)], 1)
    path = np.cumsum(velocity * dt, 0)
    return path, (path + rng.normal(0, noise, path.shape)).astype(np.float32)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    dt, noise = 0.1, 2.0
    start = Belief(rnp.zeros(4), 100 * rnp.eye(4))
    for length in (count // 2, count):
        path, measured = flight(length, dt, noise)
        _, means = track(
            start, rnp.asarray(measured), rnp.asarray(motion(dt)),
            rnp.asarray(drift(dt, 8.0)), rnp.asarray(np.float32(noise)),
        )  # fmt: skip
        raw = np.sqrt(np.mean((measured - path) ** 2))
        filtered = np.sqrt(np.mean((np.asarray(means)[:, :2] - path) ** 2))
        print(f"{length} measurements: error {raw:.2f} measured, {filtered:.2f} filtered")
    print(f"traces: {len(track.variants())}")


if __name__ == "__main__":
    main()
