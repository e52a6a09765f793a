"""Trains a small convolutional network on handwritten digits, in seconds.

    pip install -e ".[examples]" && python examples/digits.py

The data are the 1797 images of 8 × 8 pixels that come with scikit-learn. A fifth is held out.
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

BATCH = 32
ACCUMULATE = 2  # batches per update
EPOCHS = 25
SEED = 0

# %% tags=["script"]
parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--epochs", type=int, default=EPOCHS, help="number of epochs (25)")
parser.add_argument("--quick", action="store_true", help="train for 2 epochs only")
parser.add_argument("--seed", type=int, default=SEED, help="random seed (0)")
parser.add_argument("--out", type=Path, default=Path("digits.png"), help="file of the plot")
args = parser.parse_args()
EPOCHS, SEED = 2 if args.quick else args.epochs, args.seed
plt.switch_backend("Agg")


def display(value):
    """Prints what a notebook shows. The picture goes to a file instead."""
    if not isinstance(value, plt.Figure):
        print(value)


# %% [markdown]
# ## Data
#
# The split does not depend on the seed.

# %%
images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 1, 8, 8).astype(np.float32) / 16
train_images, test_images, train_labels, test_labels = train_test_split(
    images, labels.astype(np.int32), test_size=0.2, stratify=labels, random_state=0
)


def shuffled_batches(rng, size):
    """The batches of one epoch as rows of indices. Leftover examples are dropped."""
    return rng.permutation(size)[: size // BATCH * BATCH].reshape(-1, BATCH)


# %% [markdown]
# ## Network and loss
#
# The network maps an image of shape (1, 8, 8) to ten logits. The loss is the mean cross-entropy of
# a batch, and every image has its own dropout key.


# %%
def make_network(key):
    key1, key2, key3 = jax.random.split(key, 3)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 32, kernel_size=3, padding=1, use_bias=False, key=key1),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Conv2d(32, 64, kernel_size=3, padding=1, use_bias=False, key=key2),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(kernel_size=2, stride=2),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Dropout(0.5),
            eqx.nn.Linear(64 * 4 * 4, 10, key=key3),
        ]
    )


def loss_fn(model, images, labels, key):
    logits = jax.vmap(model)(images, key=jax.random.split(key, len(images)))
    log_probabilities = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[:, None], axis=1))


@eqx.filter_jit
def accuracy(model, images, labels):
    model = eqx.nn.inference_mode(model)
    return jnp.mean(jnp.argmax(jax.vmap(model)(images), axis=1) == labels)


# %% [markdown]
# ## Optimizer
#
# The schedule is inside `.every_k`, so it counts updates, not batches.

# %%
start = time.perf_counter()
steps = EPOCHS * (len(train_images) // BATCH)
updates = steps // ACCUMULATE
schedule = sl.schedules.warmup_cosine_decay(
    init_value=0.0, peak_value=3e-3, warmup_steps=updates // 10, decay_steps=updates
)
tx = (
    sl.ClipByGlobalNorm(1.0)
    | sl.adamw(schedule, weight_decay=0.1, decay_where=sl.where.ndim(min=2))
).every_k(ACCUMULATE)

model_key, dropout_key = jax.random.split(jax.random.key(SEED))
model = make_network(model_key)
opt = sl.Optimizer(tx, model)
display(opt)

# %% [markdown]
# `opt.describe(model)` lists what is decayed and what is not.

# %%
display(opt.describe(model))

# %% [markdown]
# ## Training
#
# Idle steps of `.every_k` need not copy the parameters if these are donated too. The loop collects
# losses without reading them: `float(loss)` would wait until the step finishes.

# %%
step = sl.train_step(loss_fn, donate="all")
rng, losses = np.random.default_rng(SEED), []
for _ in (progress := trange(EPOCHS, unit="epoch")):
    for batch in shuffled_batches(rng, len(train_images)):
        key = jax.random.fold_in(dropout_key, len(losses))
        model, opt, loss = step(model, opt, train_images[batch], train_labels[batch], key)
        losses.append(loss)
    progress.set_postfix(loss=f"{loss:.4f}")

train_accuracy = accuracy(model, train_images, train_labels)
test_accuracy = accuracy(model, test_images, test_labels)
print(f"train accuracy {train_accuracy:.2%}, test accuracy {test_accuracy:.2%}")

# %% tags=["script"]
print(f"{time.perf_counter() - start:.1f} s, compilation included")

# %% [markdown]
# `opt.hyperparams` are those of the next step, and `opt.metrics` those of the last one.

# %%
display(opt.hyperparams)
display(opt.metrics)

# %% [markdown]
# ## Loss and learning rate

# %%
figure, (top, bottom) = plt.subplots(
    2, sharex=True, figsize=(5.5, 4.5), height_ratios=[2, 1], layout="constrained"
)
losses = np.array(losses)
window = min(50, len(losses))
smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
middles = np.arange(len(smooth)) + window // 2
top.semilogy(losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="each batch")
top.semilogy(middles, smooth, color="tab:blue", label=f"mean of {window} batches")
top.set(title=f"Handwritten digits: test accuracy {test_accuracy:.1%}", ylabel="training loss")
top.legend(frameon=False)
rates = schedule.values(updates)
bottom.plot(ACCUMULATE * np.arange(len(rates)), rates, color="tab:orange")
bottom.set(xlabel="batch", ylabel="learning rate", xlim=(0, len(losses)), ylim=(0, None))
for axes in (top, bottom):
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
display(figure)

# %% tags=["script"]
figure.savefig(args.out, dpi=160)
print(f"wrote {args.out}")
