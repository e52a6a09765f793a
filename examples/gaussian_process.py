"""Fits a Gaussian process with L-BFGS-B from many starts at once, in half a minute.

    pip install -e ".[examples]" && python examples/gaussian_process.py

The kernel is a slowly changing period. Its five numbers maximize the marginal likelihood of noisy
data with a gap. The likelihood has many local optima, so `jax.vmap` of `sl.minimize` solves from
many random starts in one program, and the best one predicts the gap.
"""

import argparse
import time
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

# A likelihood of float32 numbers is too rough for a line search near its optimum.
jax.config.update("jax_enable_x64", True)

NOISE = 0.2
# The least and the greatest value of each number, from which starts are drawn too.
BOUNDS = {
    "variance": (0.05, 20.0),
    "length": (0.5, 50.0),
    "period": (0.3, 5.0),
    "smoothness": (0.1, 5.0),
    "noise": (1e-3, 2.0),
}


class Process(eqx.Module):
    """A Gaussian process with mean zero."""

    variance: jax.Array
    length: jax.Array
    period: jax.Array
    smoothness: jax.Array
    noise: jax.Array

    def kernel(self, a, b):
        apart = a[:, None] - b[None, :]
        wave = jnp.sin(jnp.pi * apart / self.period) / self.smoothness
        return self.variance * jnp.exp(-0.5 * (apart / self.length) ** 2 - 2 * wave**2)

    def factor(self, x):
        """The Cholesky factor of the covariance of noisy data."""
        return jnp.linalg.cholesky(self.kernel(x, x) + self.noise**2 * jnp.eye(x.size))

    def predict(self, x, y, at):
        """The mean and the standard deviation of the noiseless function."""
        factor, across = self.factor(x), self.kernel(x, at)
        half = jax.scipy.linalg.solve_triangular(factor, across, lower=True)
        white = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
        return half.T @ white, jnp.sqrt(self.variance - jnp.sum(half**2, axis=0))


def loss_fn(process, x, y):
    """Minus the logarithm of the marginal likelihood."""
    factor = process.factor(x)
    white = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
    logarithms = jnp.sum(jnp.log(jnp.diag(factor)))
    return 0.5 * jnp.sum(white**2) + logarithms + 0.5 * x.size * jnp.log(2 * jnp.pi)


def true_function(x):
    return np.sin(2 * np.pi * x / 1.7) * np.exp(-0.05 * x) + 0.4 * np.sin(4 * np.pi * x / 1.7)


def draw_starts(rng, count):
    """Processes with random numbers inside of the bounds, stacked."""
    drawn = {
        name: jnp.asarray(np.exp(rng.uniform(np.log(low), np.log(high), count)))
        for name, (low, high) in BOUNDS.items()
    }
    return Process(**drawn)


def fit(starts, x, y, steps):
    """The result of each start."""
    tx = sl.lbfgs(bounds={sl.where.path(name): pair for name, pair in BOUNDS.items()})

    @eqx.filter_jit
    @jax.vmap
    def solve(start):
        return sl.minimize(loss_fn, tx, start, x, y, max_steps=steps)

    return solve(starts)


def plot(x, y, at, mean, deviation, losses, path):
    """Shows the prediction, and the loss of each start over the steps."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(5.5, 6), layout="constrained")
    top.plot(at, true_function(at), color="tab:orange", linewidth=3, alpha=0.5, label="true")
    top.plot(at, mean, color="tab:blue", label="mean")
    band = (mean - 2 * deviation, mean + 2 * deviation)
    top.fill_between(at, *band, color="tab:blue", alpha=0.2, linewidth=0, label="± 2 deviations")
    top.plot(x, y, ".", color="black", markersize=4, label="data")
    top.set(title="The best of all starts", xlabel="x", ylabel="y")
    top.legend(frameon=False, ncols=2)
    bottom.plot(losses.T - np.nanmin(losses) + 1e-3, color="tab:blue", alpha=0.4, linewidth=1)
    bottom.set(xlabel="step", ylabel="loss above the least", yscale="log")
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--starts", type=int, default=16, help="number of random starts (16)")
    parser.add_argument("--quick", action="store_true", help="only 6 starts and 25 steps")
    parser.add_argument("--seed", type=int, default=0, help="random seed (0)")
    parser.add_argument("--out", type=Path, default=Path("gp.png"), help="file of the plot")
    args = parser.parse_args()

    start = time.perf_counter()
    rng = np.random.default_rng(args.seed)
    x = np.sort(np.concatenate([rng.uniform(0, 6, 30), rng.uniform(9, 12, 15)]))
    y = true_function(x) + NOISE * rng.standard_normal(x.size)
    steps = 25 if args.quick else 60
    found = fit(draw_starts(rng, 6 if args.quick else args.starts), x, y, steps)
    losses = np.asarray(found.loss)
    best = jax.tree.map(lambda leaf: leaf[np.nanargmin(losses)], found.model)
    print(f"loss {np.nanmin(losses):.2f}, reached from {np.mean(losses < losses.min() + 0.1):.0%}")
    for name, (low, high) in BOUNDS.items():
        print(f"{name} {getattr(best, name):.3g}, in [{low:g}, {high:g}]")

    at = np.linspace(0, 12, 400)
    mean, deviation = best.predict(x, y, at)
    gap = (at > 6) & (at < 9)
    error = np.sqrt(np.mean((mean - true_function(at))[gap] ** 2))
    print(f"RMS error in the gap: {error:.3f}")
    print(f"{time.perf_counter() - start:.1f} s, compilation included")
    plot(x, y, at, mean, deviation, np.asarray(found.losses), args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
