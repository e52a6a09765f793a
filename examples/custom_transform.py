"""Writes quasi-hyperbolic momentum as a transform, checks it, and compares it with SGD.

    pip install -e ".[examples]" && python examples/custom_transform.py

The transform has state, a moving average of the gradients, and two hyperparameters. A sweep in one
program gives each rule the best of several learning rates. It takes half a minute.
"""

# %%
import argparse
import time
from pathlib import Path

try:
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import matplotlib.pyplot as plt
    import numpy as np
    from jaxtyping import PyTree
    from sklearn.datasets import load_digits
    from tqdm import trange

    import slalom as sl
except ImportError as error:
    raise SystemExit(f'{error}. Install the dependencies: pip install -e ".[examples]"') from None

BATCH = 16
RATES = np.geomspace(0.03, 3.0, 9, dtype=np.float32)
STEPS = 3000
SEED = 0

# %% tags=["script"]
parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--steps", type=int, default=STEPS, help="number of updates (3000)")
parser.add_argument("--quick", action="store_true", help="make 200 updates only")
parser.add_argument("--seed", type=int, default=SEED, help="random seed (0)")
parser.add_argument(
    "--out", type=Path, default=Path("custom_transform.png"), help="file of the plot"
)
args = parser.parse_args()
STEPS, SEED = 200 if args.quick else args.steps, args.seed
plt.switch_backend("Agg")


def display(value):
    """Prints what a notebook shows. The picture goes to a file instead."""
    if not isinstance(value, plt.Figure):
        print(value)


# %% [markdown]
# ## The rule
#
# Quasi-hyperbolic momentum (Ma & Yarats, 2019) is a weighted mean of the gradient and its moving
# average. With ν = 0 it is plain gradient descent, with ν = 1 it is momentum. A transform declares
# its hyperparameters, and its state declares what has the shapes of the parameters. Masks,
# `.every_k`, checkpoints and `opt.hyperparams` then work without further code.


# %%
class QuasiHyperbolicState(eqx.Module):
    mean: PyTree = sl.fields.param_like()


class QuasiHyperbolicMomentum(sl.AbstractTransform):
    """mₙ = β·mₙ₋₁ + (1 − β)·gₙ,   uₙ = (1 − ν)·gₙ + ν·mₙ"""

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


display(QuasiHyperbolicMomentum() | sl.ScaleByLearningRate(1.0))

# %% [markdown]
# ## A check
#
# With ν = 1 it must equal a built-in rule: the moving average without a bias correction.

# %%
start = time.perf_counter()
model = eqx.nn.MLP(64, 10, width_size=32, depth=2, key=jax.random.key(SEED))
params = eqx.filter(model, eqx.is_inexact_array)
ours, built_in = QuasiHyperbolicMomentum(nu=1.0, beta=0.9), sl.Ema(0.9, debias=False)
state1, state2 = ours.init(params), built_in.init(params)
for fn in (jnp.sin, jnp.cos, jnp.tanh):
    grads = jax.tree.map(fn, params)  # any will do
    updates1, state1 = ours.update(grads, state1)
    updates2, state2 = built_in.update(grads, state2)
assert eqx.tree_equal(updates1, updates2, rtol=1e-6)

# %% [markdown]
# ## A comparison
#
# Each rule trains networks with nine learning rates at once: `bind` makes one optimizer for each
# rate under `vmap`, and one program takes the steps of all of them.

# %%
images, labels = load_digits(return_X_y=True)
images, labels = images.astype(np.float32) / 16, labels.astype(np.int32)


def loss_fn(model, images, labels):
    """Mean cross-entropy of a batch."""
    log_probabilities = jax.nn.log_softmax(jax.vmap(model)(images))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[:, None], axis=1))


def train_with_all_rates(rule, name):
    """The losses, one row for each learning rate."""

    @eqx.filter_vmap
    def bind(rate):
        return model, sl.Optimizer(rule | sl.ScaleByLearningRate(rate), model)

    models, opts = bind(RATES)
    each = eqx.if_array(0)  # the models and optimizers differ, the batch is the same
    step = eqx.filter_jit(
        eqx.filter_vmap(sl.train_step(loss_fn, donate=False), in_axes=(each, each, None, None))
    )
    rng = np.random.default_rng(SEED)
    losses = []
    for i in (progress := trange(STEPS, unit="step", desc=name)):
        batch = rng.integers(len(images), size=BATCH)
        models, opts, loss = step(models, opts, images[batch], labels[batch])
        losses.append(loss)
        if (i + 1) % 100 == 0:
            progress.set_postfix(lowest=f"{jnp.nanmin(loss):.3f}")
    return np.array(losses).T


rules = {
    "SGD": sl.Identity(),
    "momentum": sl.Ema(0.9, debias=False),
    "quasi-hyperbolic": QuasiHyperbolicMomentum(),
}
results = {}
for name, rule in rules.items():
    losses = train_with_all_rates(rule, name)
    last = losses[:, -STEPS // 10 :].mean(axis=1)
    results[name] = losses, np.where(np.isfinite(last), last, np.inf)
    rate = RATES[np.argmin(results[name][1])]
    print(f"{name}: training loss {min(results[name][1]):.4f} with learning rate {rate:.2g}")

# %% tags=["script"]
print(f"{time.perf_counter() - start:.1f} s, compilation included")

# %% [markdown]
# ## Losses with the best learning rate, and with all

# %%
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
display(figure)

# %% tags=["script"]
figure.savefig(args.out, dpi=160)
print(f"wrote {args.out}")
