"""Fine-tunes a network on few images: first a new head, then all layers, in half a minute.

    pip install -e ".[examples]" && python examples/finetuning.py

A network that reads the digits 0 to 5 in noisy images learns to read all ten, from three images of
each. The layers of its body are frozen at first, and unfrozen with `opt.rebind`, which keeps the
state of the head. For comparison, a fresh network is trained on the same images. All of it is
repeated with other images, because three of each are a matter of luck.
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
    from matplotlib.ticker import PercentFormatter
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from tqdm import trange

    import slalom as sl
except ImportError as error:
    raise SystemExit(f'{error}. Install the dependencies: pip install -e ".[examples]"') from None

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BATCH = 64
SHOTS = 3  # images of each digit to fine-tune on
NOISE = 0.3  # standard deviation; the digits themselves are in [0, 1]
EVERY = 10  # steps between two measurements
HEAD, BODY = sl.where.path("head.**"), sl.where.path("body.**")


class Network(eqx.Module):
    """Maps an image of shape (1, 8, 8) to ten logits."""

    body: eqx.nn.Sequential
    head: eqx.nn.Linear

    def __init__(self, key):
        key1, key2, key3, key4 = jax.random.split(key, 4)
        self.body = eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(1, 16, kernel_size=3, padding=1, key=key1),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1, key=key2),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.Lambda(jnp.ravel),
                eqx.nn.Linear(32 * 4 * 4, 64, key=key3),
                eqx.nn.Lambda(jax.nn.relu),
            ]
        )
        self.head = eqx.nn.Linear(64, 10, key=key4)

    def __call__(self, image):
        return self.head(self.body(image))


def load_data():
    """Two halves of the images, with their labels. The first half has no 6, 7, 8 and 9."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype(np.float32) / 16
    first, second, first_labels, second_labels = train_test_split(
        images, labels.astype(np.int32), test_size=0.5, stratify=labels, random_state=0
    )
    known = first_labels < 6
    return (first[known], first_labels[known]), (second, second_labels)


def noisy(images, rng):
    return images + NOISE * rng.standard_normal(images.shape, dtype=np.float32)


def loss_fn(model, images, labels):
    """Mean cross-entropy of a batch."""
    log_probabilities = jax.nn.log_softmax(jax.vmap(model)(images))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[:, None], axis=1))


@eqx.filter_jit
def accuracy(model, images, labels):
    return jnp.mean(jnp.argmax(jax.vmap(model)(images), axis=1) == labels)


step = sl.train_step(loss_fn)


def pretrain(images, labels, epochs, seed):
    """A network that reads the digits 0 to 5."""
    rng = np.random.default_rng(seed)
    model = Network(jax.random.key(seed))
    opt = sl.Optimizer(sl.adam(1e-3), model)
    for _ in (progress := trange(epochs, unit="epoch", desc="pretraining")):
        order = rng.permutation(len(images))[: len(images) // BATCH * BATCH]
        for batch in order.reshape(-1, BATCH):
            model, opt, loss = step(model, opt, noisy(images[batch], rng), labels[batch])
        progress.set_postfix(loss=f"{loss:.3f}")
    return model


def fit(model, opt, few, test, steps):
    """Takes steps on all of the few images. Returns the test accuracies on the way too."""
    accuracies = []
    for i in range(steps):
        model, opt, _ = step(model, opt, *few)
        if (i + 1) % EVERY == 0:
            accuracies.append(float(accuracy(model, *test)))
    return model, opt, accuracies


def finetune(model, few, test, steps, key):
    """Trains a new head, then all layers. Returns test accuracies and the report of `rebind`."""
    model = eqx.tree_at(lambda m: m.head, model, eqx.nn.Linear(64, 10, key=key))
    body = model.body

    opt = sl.Optimizer(sl.adam(3e-3), model, trainable=HEAD)
    model, opt, of_head = fit(model, opt, few, test, steps)
    assert eqx.tree_equal(model.body, body)  # not a bit has changed

    # The head keeps its moments. Those of the body start at zero, with a bias correction of their
    # own. Pretrained layers need smaller steps than a new head.
    opt, report = opt.rebind(model, trainable=None, tx=sl.adam(3e-3) | sl.ScaleBy({BODY: 0.3}))
    model, opt, of_all = fit(model, opt, few, test, steps)
    return of_head + of_all, report


def train_from_scratch(few, test, steps, key):
    model = Network(key)
    _, _, accuracies = fit(model, sl.Optimizer(sl.adam(1e-3), model), few, test, steps)
    return accuracies


def plot(finetuned, from_scratch, path):
    """Plots the mean test accuracies, and the range over the draws."""
    figure, axes = plt.subplots(figsize=(5.5, 4), layout="constrained")
    steps = EVERY * np.arange(1, finetuned.shape[1] + 1)
    half = len(steps) // 2
    for label, color, x, y in (
        ("from scratch", "gray", steps, from_scratch),
        ("new head, body frozen", "tab:blue", steps[:half], finetuned[:, :half]),
        ("all layers", "tab:orange", steps[half - 1 :], finetuned[:, half - 1 :]),
    ):
        axes.plot(x, y.mean(axis=0), color=color, label=label)
        axes.fill_between(x, y.min(axis=0), y.max(axis=0), color=color, alpha=0.15, linewidth=0)
    axes.axvline(steps[half - 1], color="gray", linestyle=":")
    axes.set(title=f"Ten digits, {SHOTS} images of each", xlabel="step")
    axes.set(ylabel="test accuracy", ylim=(0, None))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.legend(frameon=False, loc="lower right")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=10, help="number of choices of images (10)")
    parser.add_argument("--quick", action="store_true", help="2 draws and fewer steps only")
    parser.add_argument("--seed", type=int, default=0, help="random seed (0)")
    parser.add_argument("--out", type=Path, default=Path("finetuning.png"), help="file of the plot")
    args = parser.parse_args()

    start = time.perf_counter()
    draws, steps = (2, 60) if args.quick else (args.draws, 150)
    known, (images, labels) = load_data()
    images = noisy(images, np.random.default_rng(args.seed))
    pretrained = pretrain(*known, 5 if args.quick else 30, args.seed)

    finetuned, from_scratch = [], []
    for i in (progress := trange(draws, unit="draw", desc="fine-tuning")):
        few, test, few_labels, test_labels = train_test_split(
            images, labels, train_size=10 * SHOTS, stratify=labels, random_state=args.seed + i
        )
        few, test = (few, few_labels), (test, test_labels)
        key1, key2 = jax.random.split(jax.random.fold_in(jax.random.key(args.seed), i))
        accuracies, report = finetune(pretrained, few, test, steps, key1)
        finetuned.append(accuracies)
        from_scratch.append(train_from_scratch(few, test, 2 * steps, key2))
        progress.set_postfix(finetuned=f"{finetuned[-1][-1]:.0%}")
    print(report)
    finetuned, from_scratch = np.array(finetuned), np.array(from_scratch)
    print(
        f"test accuracy: new head {finetuned[:, steps // EVERY - 1].mean():.1%}, "
        f"then all layers {finetuned[:, -1].mean():.1%}, "
        f"from scratch {from_scratch[:, -1].mean():.1%} (means of {draws} draws)"
    )
    print(f"{time.perf_counter() - start:.1f} s, compilation included")

    plot(finetuned, from_scratch, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
