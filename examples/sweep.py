"""Finds a learning rate for handwritten digits with a range test and a sweep.

    pip install -e ".[examples]" && python examples/sweep.py

The range test takes a single short run. The sweep then trains networks with many learning rates and
weight decays side by side, as one program. The best of them are compared with the test set, which
no network is trained on. The data are the 1797 images of 8 × 8 pixels that come with scikit-learn.
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
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from tqdm import trange

    import slalom as sl
except ImportError as error:
    raise SystemExit(f'{error}. Install the dependencies: pip install -e ".[examples]"') from None

BATCH = 64
EPOCHS = 20
RATES = 12
SEED = 0

# %% tags=["script"]
parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--epochs", type=int, default=EPOCHS, help="number of epochs of a run (20)")
parser.add_argument("--rates", type=int, default=RATES, help="number of learning rates (12)")
parser.add_argument("--quick", action="store_true", help="4 learning rates, 2 epochs")
parser.add_argument("--seed", type=int, default=SEED, help="random seed (0)")
parser.add_argument("--out", type=Path, default=Path("sweep.png"), help="file of the plot")
args = parser.parse_args()
EPOCHS, RATES, SEED = (2, 4, args.seed) if args.quick else (args.epochs, args.rates, args.seed)
plt.switch_backend("Agg")


def display(value):
    """Prints what a notebook shows. The picture goes to a file instead."""
    if not isinstance(value, plt.Figure):
        print(value)


# %% [markdown]
# ## Data, network and loss
#
# The images are vectors of 64 numbers in [0, 1]. The split does not depend on the seed.

# %%
images, labels = load_digits(return_X_y=True)
train_images, test_images, train_labels, test_labels = train_test_split(
    images.astype(np.float32) / 16,
    labels.astype(np.int32),
    test_size=0.2,
    stratify=labels,
    random_state=0,
)
steps = EPOCHS * (len(train_images) // BATCH)
model = eqx.nn.MLP(64, 10, width_size=64, depth=2, key=jax.random.key(SEED))


def loss_fn(model, images, labels):
    """Mean cross-entropy of a batch."""
    log_probabilities = jax.nn.log_softmax(jax.vmap(model)(images))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[:, None], axis=1))


@eqx.filter_jit
def accuracy(model, images, labels):
    return jnp.mean(jnp.argmax(jax.vmap(model)(images), axis=1) == labels)


def batches(epochs=EPOCHS):
    """The batches of some epochs. Leftover examples are dropped."""
    rng = np.random.default_rng(SEED)
    for _ in range(epochs):
        rows = rng.permutation(len(train_images))[: len(train_images) // BATCH * BATCH]
        for batch in rows.reshape(-1, BATCH):
            yield train_images[batch], train_labels[batch]


# %% [markdown]
# ## Range test
#
# One short run, in which the learning rate grows from step to step, shows where the loss falls
# fastest.

# %%
tx = sl.adamw(1e-3, decay_where=sl.where.ndim(min=2))
tested = sl.lr_range_test(
    loss_fn, tx, model, list(batches(1)), lr_min=1e-5, lr_max=10.0, progress=True
)
display(tested)

# %% [markdown]
# ## Sweep
#
# `sl.sweep` trains the networks of a grid at once. Its result lists the best runs first.

# %%
grid = {"learning_rate": np.geomspace(1e-4, 1.0, RATES), "weight_decay": [0.0, 1e-2, 1e-1]}
start = time.perf_counter()
found = sl.sweep(loss_fn, tx, model, batches(), grid, steps=steps, progress=True)
together = time.perf_counter() - start
display(found)

# %%
figure = found.plot()
display(figure)

# %% [markdown]
# ## The best run
#
# It is trained once more, by itself, and tested.

# %%
start = time.perf_counter()
best = sl.adamw(**found.best, decay_where=sl.where.ndim(min=2))
opt, step = sl.Optimizer(best, model), sl.train_step(loss_fn)
for _, batch in zip(trange(steps, desc="best run", unit="step"), batches(), strict=True):
    model, opt, _ = step(model, opt, *batch)
test_accuracy = accuracy(model, test_images, test_labels)
alone = time.perf_counter() - start
print(f"{3 * RATES} runs in one program: {together:.1f} s; one run alone: {alone:.1f} s")
print(f"test accuracy of the best run {test_accuracy:.2%}")

# %% tags=["script"]
figure.savefig(args.out, dpi=150)
print(f"wrote {args.out}")
