"""Finds ground states by variational Monte Carlo, of three oscillators and of the helium atom.

    pip install -e ".[examples]" && python examples/wave_function.py

A network changes a simple wave function ψ. Metropolis walkers sample |ψ|², the local energies
E(x) = −½·∇²ψ/ψ + V(x) are averaged, and `sl.natural_gradient` lowers their mean. The exact energies
are 1.5 and −2.90372 hartree.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

try:
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import matplotlib
    import numpy as np

    import slalom as sl
except ImportError as error:
    raise SystemExit(f'{error}. Install the dependencies: pip install -e ".[examples]"') from None

matplotlib.use("Agg")
import matplotlib.pyplot as plt


class Wave(eqx.Module):
    """log ψ(x): a fixed part with the right behavior far away, and a network of features."""

    mlp: eqx.nn.MLP
    scale: jax.Array
    envelope: Callable = eqx.field(static=True)
    features: Callable = eqx.field(static=True)

    def __init__(self, envelope, features, size, scale, key):
        self.mlp = eqx.nn.MLP(size, "scalar", 16, 2, jnp.tanh, key=key)
        self.scale = jnp.asarray(scale)
        self.envelope, self.features = envelope, features

    def __call__(self, x):
        return self.envelope(self.scale, x) + self.mlp(self.features(x))


def oscillator(key):
    """Three independent oscillators, from a Gaussian that is too wide."""

    def envelope(scale, x):
        return -scale * jnp.sum(x**2)

    wave = Wave(envelope, lambda x: x / (1 + jnp.abs(x)), 3, 0.2, key)
    return wave, (lambda x: jnp.sum(x**2) / 2), 3


def distances(x):
    a, b = x[:3], x[3:]
    return jnp.stack([jnp.linalg.norm(a), jnp.linalg.norm(b), jnp.linalg.norm(a - b)])


def helium(key):
    """Two electrons. The envelope has the cusps where particles meet, whatever its scale."""

    def envelope(scale, x):
        *radii, apart = distances(x)
        inside = sum((2 * r + scale * r**2) / (1 + r) for r in radii)
        return -inside + apart / (2 * (1 + apart))

    def features(x):
        near, far, apart = distances(x)
        # Quadratic at 0, so that the cusps stay; the same for both orders of the electrons.
        soft = jnp.stack([near, far, apart])
        one, two, three = soft**2 / (1 + soft**2)
        return jnp.stack([one + two, one * two, three])

    def potential(x):
        near, far, apart = distances(x)
        return -2 / near - 2 / far + 1 / apart

    return Wave(envelope, features, 3, 1.5, key), potential, 6


def local_energy(wave, potential, x):
    """−½·(∇² log ψ + |∇ log ψ|²) + V."""
    grad = jax.grad(wave)

    def second(direction):
        return direction @ jax.jvp(grad, (x,), (direction,))[1]

    laplacian = jnp.sum(jax.vmap(second)(jnp.eye(x.size)))
    return -(laplacian + jnp.sum(grad(x) ** 2)) / 2 + potential(x)


def moved(wave, walkers, key, width, moves):
    """Walkers after some Metropolis moves."""
    log_psi = jax.vmap(wave)

    def move(carry, key):
        x, old = carry
        one, two = jax.random.split(key)
        y = x + width * jax.random.normal(one, x.shape)
        new = log_psi(y)
        accept = jnp.log(jax.random.uniform(two, new.shape)) < 2 * (new - old)
        return (jnp.where(accept[:, None], y, x), jnp.where(accept, new, old)), None

    keys = jax.random.split(key, moves)
    return jax.lax.scan(move, (walkers, log_psi(walkers)), keys)[0][0]


def train(wave, potential, dim, steps, walkers, key, width=0.4):
    """The energy of each step, and that of the trained wave function on new samples with its
    standard error."""
    loss_fn = sl.VariationalEnergy(lambda wave, x: wave(x))
    # The norm of a step is bounded, since the first samples say little about ψ.
    opt = sl.Optimizer(sl.natural_gradient(0.05, max_norm=0.1), wave)
    step = sl.train_step(loss_fn)
    energies_of = jax.vmap(lambda wave, x: local_energy(wave, potential, x), (None, 0))

    @eqx.filter_jit
    def sample(wave, x, key, moves=20):
        x = moved(wave, x, key, width, moves)
        energies = energies_of(wave, x)
        # A few walkers come close to where particles meet, and would dominate the mean.
        middle = jnp.median(energies)
        spread = 5 * jnp.mean(jnp.abs(energies - middle))
        return x, jnp.clip(energies, middle - spread, middle + spread), energies

    key, start = jax.random.split(key)
    x = jax.random.normal(start, (walkers, dim))
    x, *_ = sample(wave, x, start, 200)
    history, means = [], []
    for _ in range(steps):
        key, now = jax.random.split(key)
        x, clipped, energies = sample(wave, x, now)
        wave, opt, _ = step(wave, opt, x, clipped)
        history.append(jnp.mean(energies))
    for now in jax.random.split(key, 100):
        x, _, energies = sample(wave, x, now)
        means.append(jnp.mean(energies))
    return np.array(history), float(np.mean(means)), float(np.std(means) / 10)


def draw(histories, path):
    figure, panels = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for axes, (name, history, exact) in zip(panels, histories, strict=True):
        axes.plot(history - exact, linewidth=1)
        axes.axhline(0, color="black", linewidth=0.8, linestyle="--")
        axes.set_yscale("symlog", linthresh=1e-3)
        axes.set(title=name, xlabel="step", ylabel="energy above the exact one")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
    print(f"wrote {path}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="number of steps (300)")
    parser.add_argument("--walkers", type=int, default=512, help="number of walkers (512)")
    parser.add_argument("--quick", action="store_true", help="few steps and walkers")
    parser.add_argument("--out", type=Path, default=Path("wave_function.png"), help="the picture")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.walkers = 40, 128
    start, histories = time.perf_counter(), []
    for make, exact in ((oscillator, 1.5), (helium, -2.90372)):
        key, seed = jax.random.split(jax.random.key(0))
        wave, potential, dim = make(seed)
        history, energy, error = train(wave, potential, dim, args.steps, args.walkers, key)
        print(f"{make.__name__}: energy {energy:.4f} ± {error:.4f}, exact {exact}")
        histories.append((make.__name__, history, exact))
    print(f"{time.perf_counter() - start:.1f} s, compilation included")
    draw(histories, args.out)


if __name__ == "__main__":
    main()
