"""A network learns the energy of a pendulum from how it moves: gradients of gradients.

python examples/pendulum.py [STEPS] [--out pendulum.svg]

Two networks of the same size see the same noisy measurements (Greydanus, Dzamba and Yosinski,
"Hamiltonian neural networks", 2019). One gives the velocity of each state (angle, momentum). The
other gives an energy H, and Hamilton's equations the velocity: (∂H/∂p, −∂H/∂q) is a gradient, so
that training it takes the gradient of a gradient. Energy is kept where there is one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

import rlx
import rlx.numpy as rnp
from rlx import data, nn, optim, random

Batch = dict[str, rlx.Array]  # states and velocities [n, 2]
Velocity = Callable[["Network", rlx.Array], rlx.Array]  # of one state


class Network(nn.Module):
    def __init__(self, results: int, key: rlx.Array) -> None:
        a, b, c = random.split(key, 3)
        self.first, self.second = nn.Linear(2, 48, key=a), nn.Linear(48, 48, key=b)
        self.last = nn.Linear(48, results, key=c)

    def __call__(self, state: rlx.Array) -> rlx.Array:
        return self.last(rnp.tanh(self.second(rnp.tanh(self.first(state)))))


# -- two models of the same motion ----------------------------------------------------------------


def energy(network: Network, state: rlx.Array) -> rlx.Array:
    return network(state)[0]


def hamiltonian(network: Network, state: rlx.Array) -> rlx.Array:
    """The velocity that the energy gives."""
    by_angle, by_momentum = rnp.unstack(rlx.grad(energy, argnums=1)(network, state))
    return rnp.stack([by_momentum, -by_angle])


def plain(network: Network, state: rlx.Array) -> rlx.Array:
    """The velocity as the network says it."""
    return network(state)


def true_energy(state: rlx.Array) -> rlx.Array:
    return state[..., 1] ** 2 / 2 + 1 - rnp.cos(state[..., 0])


def measured(count: int, key: rlx.Array) -> Batch:
    """States, and their velocities with some noise."""
    a, b = random.split(key)
    states = random.uniform(a, (count, 2), minval=-2.5, maxval=2.5)
    angle, momentum = rnp.unstack(states, axis=1)
    exact = rnp.stack([momentum, -rnp.sin(angle)], axis=1)
    return {"states": states, "velocities": exact + 0.05 * random.normal(b, exact.shape)}


# -- training -------------------------------------------------------------------------------------


def fit(velocity: Velocity, network: Network, known: Batch, steps: int) -> Network:
    def loss(network: Network, batch: Batch) -> rlx.Array:
        found = rlx.vmap(velocity, in_axes=(None, 0))(network, batch["states"])
        return rnp.mean(rnp.square(found - batch["velocities"]))

    optimizer = optim.AdamW(optim.schedules.one_cycle(1e-2, steps), weight_decay=1e-4)

    @rlx.jit(donate=["network", "state"])
    def step(
        network: Network, state: optim.State, batch: Batch
    ) -> tuple[Network, optim.State, rlx.Array]:
        value, grads = rlx.value_and_grad(loss)(network, batch)
        return *optimizer.update(grads, state, network), value

    state, losses = optimizer.init(network), []
    batches = data.Loader(known, 128).repeat()
    for _ in range(steps):
        network, state, value = step(network, state, next(batches))
        losses.append(float(value))
    batches.close()
    print(f"{velocity.__name__:12} {curve(losses)}  loss {np.mean(losses[-20:]):.5f}")
    return network


def curve(losses: list[float], width: int = 40) -> str:
    """The losses as a line of bars, on a logarithmic scale."""
    parts = [float(np.mean(p)) for p in np.array_split(np.log(losses), min(width, len(losses)))]
    low, high = min(parts), max(parts)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (x - low) / (high - low or 1))] for x in parts)


# -- what they know -------------------------------------------------------------------------------


def moved(velocity: Velocity, network: Network, state: rlx.Array, by: float) -> rlx.Array:
    """The state after a short time: a step of Runge and Kutta's."""
    a = velocity(network, state)
    b = velocity(network, state + by / 2 * a)
    c = velocity(network, state + by / 2 * b)
    d = velocity(network, state + by * c)
    return state + by / 6 * (a + 2 * b + 2 * c + d)


def path(
    velocity: Velocity, network: Network, start: rlx.Array, steps: int, by: float
) -> rlx.Array:
    """The states on the way from `start`, one native call for all steps."""

    @rlx.jit
    def run(network: Network, start: rlx.Array) -> rlx.Array:
        def step(state: rlx.Array, _: None) -> tuple[rlx.Array, rlx.Array]:
            return moved(velocity, network, state, by), state

        return rlx.scan(step, start, None, length=steps)[1]

    return run(network, start)


def area(velocity: Velocity, network: Network, state: rlx.Array, steps: int, by: float) -> float:
    """By what a small area of states grows around a path: the determinant of a Jacobian."""

    @rlx.jit
    def grown(network: Network, state: rlx.Array) -> rlx.Array:
        def end(state: rlx.Array) -> rlx.Array:
            return rlx.fori_loop(0, steps, lambda i, s: moved(velocity, network, s, by), state)

        return rnp.linalg.det(rlx.jacfwd(end)(state))

    return float(grown(network, state))


def orbit(height: float) -> np.ndarray:
    """The states of this energy."""
    turn = np.linspace(0, 2 * np.pi, 200)
    angle = math.acos(1 - height) * np.cos(turn)
    momentum = np.sqrt(np.maximum(2 * (height - 1 + np.cos(angle)), 0)) * np.sign(np.sin(turn))
    return np.stack([angle, momentum], 1)


def picture(paths: dict[str, np.ndarray], colours: list[str]) -> str:
    """Paths in the plane of angle and momentum, as SVG."""
    lines = []
    for i, ((name, points), colour) in enumerate(zip(paths.items(), colours, strict=True)):
        places = " ".join(f"{240 + 80 * q:.1f},{240 - 80 * p:.1f}" for q, p in points)
        lines.append(f'<polyline points="{places}" fill="none" stroke="{colour}"/>')
        lines.append(f'<text x="12" y="{24 + 18 * i}" fill="{colour}">{name}</text>')
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" width="480" height="480" font-family="sans-serif">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *lines, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", type=int, nargs="?", default=1500)
    parser.add_argument("--out", type=Path, default=Path("pendulum.svg"))
    given = parser.parse_args()
    key, own, other = random.split(random.key(0), 3)
    known, start, by = measured(2000, key), rnp.asarray([1.5, 0.0]), 0.1
    models: list[tuple[Velocity, Network]] = [
        (hamiltonian, fit(hamiltonian, Network(1, own), known, given.steps)),
        (plain, fit(plain, Network(2, other), known, given.steps)),
    ]
    height = float(true_energy(start))
    print(f"\nfrom an angle of 1.5, after {1000 * by:.0f} time units:")
    paths = {"exact": orbit(height)}
    for velocity, network in models:
        states = path(velocity, network, start, 1000, by)
        paths[velocity.__name__] = np.asarray(states)
        energies = np.asarray(true_energy(states))
        away = np.abs(energies / height - 1).max()
        grown = area(velocity, network, start, 200, by)
        print(
            f"{velocity.__name__:12} energy off by {100 * away:6.2f} %, an area times {grown:.4f}"
        )
    # near rest, H is a quadratic form whose determinant is the frequency squared: 1
    second = np.asarray(rlx.jit(rlx.hessian(energy, argnums=1))(models[0][1], rnp.zeros(2)))
    print(f"frequency of small swings {math.sqrt(np.linalg.det(second)):.3f} (exactly 1)")
    given.out.write_text(picture(paths, ["#999999", "#1967d2", "#d93025"]), encoding="utf-8")
    print(f"the paths: {given.out}")


if __name__ == "__main__":
    main()
