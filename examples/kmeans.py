"""k-means: one jitted step, for any number of points and clusters.

python examples/kmeans.py [POINTS] [CLUSTERS]
"""

from __future__ import annotations

import sys
import time

import numpy as np

import rlx
import rlx.numpy as rnp


@rlx.jit
def step(points: rlx.Array, centres: rlx.Array) -> tuple[rlx.Array, rlx.Array, rlx.Array]:
    """Assign each point to its nearest centre, then move the centres to the means.

    Returns the new centres, the label of each point, and the mean squared distance.
    """
    # |p - c|² = |p|² - 2 p·c + |c|²: one matrix product instead of points × clusters × axes
    squared = rnp.sum(points * points, axis=1)[:, None] + rnp.sum(centres * centres, axis=1)
    distances = squared - 2 * (points @ centres.mT)
    labels = rnp.argmin(distances, axis=1)
    member = rnp.astype(labels[:, None] == rnp.arange(centres.shape[0]), points.dtype)
    count = rnp.sum(member, axis=0)[:, None]
    means = (member.mT @ points) / rnp.maximum(count, 1.0)
    moved = rnp.where(count > 0, means, centres)  # a centre without points stays
    return moved, labels, rnp.mean(rnp.min(distances, axis=1))


def fit(points: rlx.Array, clusters: int, rounds: int = 100) -> tuple[rlx.Array, rlx.Array, float]:
    """Lloyd's algorithm from centres that are spread over the points."""
    centres, labels, error = step(points, spread(points, clusters))
    before = float(error)
    for _ in range(rounds - 1):
        centres, labels, error = step(points, centres)
        if abs(before - float(error)) <= 1e-6 * float(error):
            break
        before = float(error)
    return centres, labels, float(error)


def spread(points: rlx.Array, clusters: int) -> rlx.Array:
    """Each further centre is the point that is farthest from all centres so far."""
    centres = points[:1]
    for _ in range(1, clusters):
        gaps = rnp.sum((points[:, None, :] - centres[None, :, :]) ** 2, axis=2)
        farthest = int(rnp.argmax(rnp.min(gaps, axis=1)))
        centres = rnp.concat([centres, points[farthest : farthest + 1]])
    return centres


def main() -> None:
    count, clusters = (int(a) for a in (sys.argv[1:] + ["20000", "5"][len(sys.argv) - 1 :]))
    rng = np.random.default_rng(0)
    true = rng.uniform(-10, 10, (clusters, 2))
    chosen = rng.integers(0, clusters, count)
    points = rnp.asarray((true[chosen] + rng.normal(0, 0.4, (count, 2))).astype(np.float32))
    began = time.perf_counter()
    centres, labels, error = fit(points, clusters)
    spent = time.perf_counter() - began
    print(
        f"{count} points, {clusters} clusters: mean squared distance {error:.3f} in {spent:.2f} s"
    )
    sizes = rnp.sum(labels[:, None] == rnp.arange(clusters), axis=0)
    for place, size in zip(np.asarray(centres), np.asarray(sizes), strict=True):
        print(f"  ({place[0]:6.2f}, {place[1]:6.2f})  {size} points")
    print(f"traces: {len(step.variants())}")


if __name__ == "__main__":
    main()
