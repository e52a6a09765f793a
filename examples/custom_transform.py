"""Writes quasi-hyperbolic momentum as a transform, checks it, and compares it with SGD.

    pip install -e ".[examples]" && python examples/custom_transform.py

The transform has state, a moving average of the gradients, and two hyperparameters. A sweep in one
program gives each rule the best of several learning rates. It takes half a minute.
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
    from jaxtyping import PyTree
    from sklearn.datasets import load_digits
    from tqdm import trange

    import slalom as sl
except ImportError as error:
    raise SystemExit(f'{error}. Install the dependencies: pip install -e ".[examples]"') from None

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BATCH = 16
RATES = np.geomspace(0.03, 3.0, 9, dtype=np.float32)


class QuasiHyperbolicState(eqx.Module):
    mean: PyTree = sl.fields.param_like()


class QuasiHyperbolicMomentum(sl.AbstractTransform):
    """A weighted mean of the gradient and its moving average (Ma & Yarats, 2019).

    mₙ = β·mₙ₋₁ + (1 − β)·gₙ,   uₙ = (1 − ν)·gₙ + ν·mₙ

    With ν = 0 it is plain gradient descent, with ν = 1 it is momentum.
    """

    nu: sl.Hyperparameter = sl.fields.hyperparameter(0.7, within="[0, 1]")
    beta: sl.Hyperparameter = sl.fields.hyperparameter(0.999, within="[0, 1)")

    def init(self, params):
        return QuasiHyperbolicState(mean=sl.tree.zeros_like(params))

    def update(self, updates, state, params=None, context=None):
        def rule(now, g, mean):
            mean = now.beta * mean + (1 - now.beta) * g
            return (1 - now.nu) * g + now.nu * mean, mean

        updates, mean = sl.tree.map_leaves(rule, (updates, state.mean), self.at(context))
        return updates, QuasiHyperbolicState(sl.tree.cast_like(mean, state.mean))


def check(model):
    """With ν = 1 it must equal a built-in rule: the moving average without a bias correction."""
    params = eqx.filter(model, eqx.is_inexact_array)
    ours, built_in = QuasiHyperbolicMomentum(nu=1.0, beta=0.9), sl.Ema(0.9, debias=False)
    state1, state2 = ours.init(params), built_in.init(params)
    for fn in (jnp.sin, jnp.cos, jnp.tanh):
        grads = jax.tree.map(fn, params)  # any will do
        updates1, state1 = ours.update(grads, state1)
        updates2, state2 = built_in.update(grads, state2)
    assert eqx.tree_equal(updates1, updates2, rtol=1e-6)


def load_data():
    """Images as vectors of 64 numbers in [0, 1], and their labels."""
    images, labels = load_digits(return_X_y=True)
    return images.astype(np.float32) / 16, labels.astype(np.int32)


def loss_fn(model, images, labels):
    """Mean cross-entropy of a batch."""
    log_probabilities = jax.nn.log_softmax(jax.vmap(model)(images))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[:, None], axis=1))


def sweep(rule, model, images, labels, steps, seed, name):
    """Trains with all learning rates at once. Returns the losses, one row per rate."""

    @eqx.filter_vmap
    def bind(rate):
        return model, sl.Optimizer(rule | sl.ScaleByLearningRate(rate), model)

    models, opts = bind(RATES)
    each = eqx.if_array(0)  # the models and optimizers differ, the batch is the same
    step = eqx.filter_jit(
        eqx.filter_vmap(sl.train_step(loss_fn, donate=False), in_axes=(each, each, None, None))
    )
    rng = np.random.default_rng(seed)
    losses = []
    for i in (progress := trange(steps, unit="step", desc=name)):
        batch = rng.integers(len(images), size=BATCH)
        models, opts, loss = step(models, opts, images[batch], labels[batch])
        losses.append(loss)
        if (i + 1) % 100 == 0:
            progress.set_postfix(lowest=f"{jnp.nanmin(loss):.3f}")
    return np.array(losses).T


def plot(results, path):
    """Plots the losses with the best rate, and the last losses with every rate."""
    figure, (top, bottom) = plt.subplots(2, figsize=(5.5, 6), layout="constrained")
    for color, (name, (losses, last)) in zip(
        ("gray", "tab:orange", "tab:blue"), results.items(), strict=True
    ):
        best = losses[np.argmin(last)]
        window = min(100, len(best) // 4)
        smooth = np.convolve(best, np.ones(window) / window, mode="valid")
        top.semilogy(np.arange(len(smooth)) + window // 2, smooth, color=color, label=name)
        bottom.loglog(RATES, last, color=color, marker="o", markersize=4, label=name)
    top.set(title="Each with its best learning rate", xlabel="step", ylabel="training loss")
    bottom.set(xlabel="learning rate", ylabel="last training loss")
    for axes in (top, bottom):
        axes.legend(frameon=False)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3000, help="number of updates (3000)")
    parser.add_argument("--quick", action="store_true", help="make 200 updates only")
    parser.add_argument("--seed", type=int, default=0, help="random seed (0)")
    parser.add_argument(
        "--out", type=Path, default=Path("custom_transform.png"), help="file of the plot"
    )
    args = parser.parse_args()

    start = time.perf_counter()
    images, labels = load_data()
    model = eqx.nn.MLP(64, 10, width_size=32, depth=2, key=jax.random.key(args.seed))
    check(model)

    rules = {
        "SGD": sl.Identity(),
        "momentum": sl.Ema(0.9, debias=False),
        "quasi-hyperbolic": QuasiHyperbolicMomentum(),
    }
    results = {}
    for name, rule in rules.items():
        steps = 200 if args.quick else args.steps
        losses = sweep(rule, model, images, labels, steps, args.seed, name)
        last = losses[:, -len(losses[0]) // 10 :].mean(axis=1)
        results[name] = losses, np.where(np.isfinite(last), last, np.inf)
    for name, (_, last) in results.items():
        rate = RATES[np.argmin(last)]
        print(f"{name}: training loss {min(last):.4f} with learning rate {rate:.2g}")
    print(f"{time.perf_counter() - start:.1f} s, compilation included")

    plot(results, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
