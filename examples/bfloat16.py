"""Trains a network whose parameters are bfloat16, with and without a policy for writing them.

    pip install -e ".[examples]" && python examples/bfloat16.py

The learning rate is small, as it is late in training. Rounded to the nearest bfloat16 number, most
updates are lost, and the network hardly learns. Each policy of `.write` reaches what float32 does.
The data are the 1797 images of 8 × 8 pixels that come with scikit-learn.
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
    from sklearn.datasets import load_digits
    from tqdm import trange

    import slalom as sl
except ImportError as error:
    raise SystemExit(f'{error}. Install the dependencies: pip install -e ".[examples]"') from None

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BATCH = 64
POLICIES = ("nearest", "stochastic", "ecc", "kahan", "master")


def load_data():
    """Images in [0, 1] as vectors, and their labels."""
    images, labels = load_digits(return_X_y=True)
    return images.astype(np.float32) / 16, labels.astype(np.int32)


def cast(model, dtype):
    """The model with floating arrays of another dtype."""
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, model)


def loss_fn(model, images, labels):
    """Mean cross-entropy of a batch, computed in the dtype of the model up to the logits."""
    logits = jax.vmap(model)(images.astype(model.layers[0].weight.dtype))
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[:, None], axis=1))


def train(tx, model, images, labels, steps, seed, name):
    """Returns the loss of every batch, the optimizer, and the bytes of parameters and state."""
    rng = np.random.default_rng(seed)
    opt, step = sl.Optimizer(tx.record(), model), sl.train_step(loss_fn)
    held = jax.tree.leaves((eqx.filter(model, eqx.is_array), opt.state))
    losses = []
    for _ in trange(steps, unit="step", desc=name):
        batch = rng.integers(len(images), size=BATCH)
        model, opt, loss = step(model, opt, images[batch], labels[batch])
        losses.append(loss)  # `float(loss)` would block until the step finishes
    return np.array(losses), opt, sum(x.nbytes for x in held)


def plot(losses, path):
    figure, axes = plt.subplots(figsize=(5.5, 3.5), layout="constrained")
    for name, own in losses.items():
        window = min(50, len(own))
        smooth = np.convolve(own, np.ones(window) / window, mode="valid")
        style = {"color": "black", "linewidth": 3, "alpha": 0.4} if name == "float32" else {}
        axes.plot(smooth, label=name, **style)
    axes.set(xlabel="step", ylabel="training loss", title="bfloat16 parameters, by policy")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000, help="number of steps (1000)")
    parser.add_argument("--quick", action="store_true", help="300 steps")
    parser.add_argument("--seed", type=int, default=0, help="random seed (0)")
    parser.add_argument("--out", type=Path, default=Path("bfloat16.png"), help="file of the plot")
    args = parser.parse_args()

    images, labels = load_data()
    model = eqx.nn.MLP(64, 10, width_size=64, depth=2, key=jax.random.key(args.seed))
    # Both start from the same numbers, those of bfloat16.
    half = cast(model, jnp.bfloat16)
    tx = sl.adamw(2e-4, weight_decay=0.1, decay_where=sl.where.ndim(min=2))
    runs = {"float32": (tx, cast(half, jnp.float32))}
    runs |= {policy: (tx.write(policy), half) for policy in POLICIES}

    start = time.perf_counter()
    losses = {}
    for name, (own, network) in runs.items():
        steps = 300 if args.quick else args.steps
        losses[name], opt, size = train(own, network, images, labels, steps, args.seed, name)
        last = losses[name][-steps // 10 :].mean()
        lost = float(opt.metrics["lost_updates"])
        print(f"{name}: loss {last:.4f}, {lost:.1%} of the updates lost, {size / 1e3:.0f} kB")
    print(f"{time.perf_counter() - start:.1f} s")

    plot(losses, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
