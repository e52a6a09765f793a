"""Trains a generative adversarial network on handwritten digits with one optimizer, in a minute.

    pip install -e ".[examples]" && python examples/gan.py

Generator and discriminator are one model, a pair, and `sl.partition` gives each its own rule. The
images are drawn by an average of the generator. The data come with scikit-learn.
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
    from sklearn.model_selection import train_test_split
    from sklearn.neighbors import KNeighborsClassifier
    from tqdm import trange

    import slalom as sl
except ImportError as error:
    raise SystemExit(f'{error}. Install the dependencies: pip install -e ".[examples]"') from None

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BATCH = 64
NOISE = 16  # numbers from which the generator draws an image


def load_data():
    """Images in [-1, 1], as vectors of 64 pixels, and their labels. A fifth is held out."""
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32) / 8 - 1
    return train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)


def make_players(key):
    """A generator, from noise to images, and a discriminator, from images to a logit."""
    key1, key2 = jax.random.split(key)
    generator = eqx.nn.MLP(NOISE, 64, 128, 2, jax.nn.relu, jnp.tanh, key=key1)
    discriminator = eqx.nn.MLP(64, "scalar", 128, 2, jax.nn.leaky_relu, key=key2)
    return generator, discriminator


def constant(tree):
    """The same values, through which no gradient flows."""
    return jax.tree.map(lambda x: jax.lax.stop_gradient(x) if eqx.is_array(x) else x, tree)


def loss_fn(players, images, key):
    """The sum of both losses. Each depends on one player only, so one gradient serves both."""
    generator, discriminator = players
    fakes = jax.vmap(generator)(jax.random.normal(key, (len(images), NOISE)))

    on_real = jax.vmap(discriminator)(images)
    on_fake = jax.vmap(discriminator)(constant(fakes))
    # Labels of 0.9 keep the discriminator from becoming too sure.
    real_loss = jnp.mean(0.9 * jax.nn.softplus(-on_real) + 0.1 * jax.nn.softplus(on_real))
    discriminator_loss = real_loss + jnp.mean(jax.nn.softplus(on_fake))

    fooled = jax.vmap(constant(discriminator))(fakes)
    generator_loss = jnp.mean(jax.nn.softplus(-fooled))
    return generator_loss + discriminator_loss, jnp.stack([generator_loss, discriminator_loss])


def train(images, steps, seed):
    """Returns the averaged generator, and the losses of both players in every step."""
    rng = np.random.default_rng(seed)
    players_key, noise_key = jax.random.split(jax.random.key(seed))
    players = make_players(players_key)
    tx = sl.partition(
        {
            "generator": sl.adam(5e-4, b1=0.5).average(0.998),
            "discriminator": sl.adam(5e-4, b1=0.5),
        },
        ("generator", "discriminator"),  # the labels have the structure of `players`
    )
    opt = sl.Optimizer(tx, players)
    print(opt)

    step = sl.train_step(loss_fn, has_aux=True)
    losses = []
    for i in (progress := trange(steps, unit="step")):
        batch = images[rng.integers(len(images), size=BATCH)]
        players, opt, (_, both) = step(players, opt, batch, jax.random.fold_in(noise_key, i))
        losses.append(both)
        if (i + 1) % 100 == 0:
            progress.set_postfix(generator=f"{both[0]:.2f}", discriminator=f"{both[1]:.2f}")
    generator, _ = opt.eval_params(players)
    return generator, np.array(losses)


@eqx.filter_jit
def draw(generator, count, key):
    return jax.vmap(generator)(jax.random.normal(key, (count, NOISE)))


def judge(images, labels, others):
    """The mean distance of other images to the nearest training image, and their digits."""
    neighbors = KNeighborsClassifier(1).fit(images, labels)
    distances, _ = neighbors.kneighbors(others)
    return distances.mean(), np.bincount(neighbors.predict(others), minlength=10)


def plot(images, drawn, losses, path):
    """Shows real and generated images above the losses."""
    figure = plt.figure(figsize=(5.5, 5.5), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[3, 2])
    for axes, title, digits in zip(
        top.subplots(1, 2), ("real", "generated"), (images, drawn), strict=True
    ):
        grid = digits[:64].reshape(8, 8, 8, 8)
        grid = np.pad(grid, [(0, 0), (0, 0), (1, 1), (1, 1)], constant_values=-1)
        axes.imshow(grid.swapaxes(1, 2).reshape(80, 80), cmap="gray_r")
        axes.set(title=title, xticks=[], yticks=[])
    axes = bottom.subplots()
    for player, color, values in zip(
        ("generator", "discriminator"), ("tab:orange", "tab:blue"), losses.T, strict=True
    ):
        window = min(100, len(values))
        smooth = np.convolve(values, np.ones(window) / window, mode="valid")
        axes.plot(np.arange(len(smooth)) + window // 2, smooth, color=color, label=player)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12_000, help="number of updates (12000)")
    parser.add_argument("--quick", action="store_true", help="make 500 updates only")
    parser.add_argument("--seed", type=int, default=0, help="random seed (0)")
    parser.add_argument("--out", type=Path, default=Path("gan.png"), help="file of the plot")
    args = parser.parse_args()

    start = time.perf_counter()
    images, test_images, labels, _ = load_data()
    generator, losses = train(images, 500 if args.quick else args.steps, args.seed)
    drawn = np.asarray(draw(generator, 1000, jax.random.key(args.seed + 1)))
    distance, digits = judge(images, labels, drawn)
    test_distance, _ = judge(images, labels, test_images)
    noise = np.random.default_rng(0).uniform(-1, 1, (1000, 64))
    noise_distance, _ = judge(images, labels, noise)
    print(
        f"distance to the nearest training image: generated {distance:.2f}, "
        f"held-out digits {test_distance:.2f}, noise {noise_distance:.2f}"
    )
    print("of 1000 generated images, per digit:", *digits)
    print(f"{time.perf_counter() - start:.1f} s, compilation included")

    plot(images, drawn, losses, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
