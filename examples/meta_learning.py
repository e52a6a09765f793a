"""Learns an initialization and an optimizer from which three steps learn a sine, in a minute.

    pip install -e ".[examples]" && python examples/meta_learning.py

Each task is a sine of its own amplitude and phase, given by ten points. An inner optimizer fits a
network to it. An outer optimizer differentiates through the steps of the inner one, and trains the
initial network together with the learning rate of each layer (MAML, Finn et al., 2017, with learned
rates as in Meta-SGD, Li et al., 2017).
"""

import argparse
import time
from pathlib import Path

try:
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import matplotlib
    from tqdm import trange

    import slalom as sl
except ImportError as error:
    raise SystemExit(f'{error}. Install the dependencies: pip install -e ".[examples]"') from None

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TASKS = 25  # in each outer step
POINTS = 10  # of each task
INNER_STEPS = 3


@eqx.filter_jit
def make_tasks(key, count, points):
    """Points of sines with amplitudes from 0.1 to 5 and any phase: x and y, one row per task."""
    key1, key2, key3 = jax.random.split(key, 3)
    amplitude = jax.random.uniform(key1, (count, 1), minval=0.1, maxval=5.0)
    phase = jax.random.uniform(key2, (count, 1), maxval=2 * jnp.pi)
    x = jax.random.uniform(key3, (count, points), minval=-5.0, maxval=5.0)
    return x, amplitude * jnp.sin(x + phase)


def task_loss(model, x, y):
    """The mean squared error of one task."""
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@eqx.filter_jit
def adapt(model, tx, x, y, steps):
    """The models after 0, 1, …, `steps` steps on the points of one task."""
    opt = sl.Optimizer(tx, model)
    models = [model]
    for _ in range(steps):
        model, opt = opt.step(model, eqx.filter_grad(task_loss)(model, x, y))
        models.append(model)
    return models


def meta_loss(learner, x, y):
    """The error on the second half of the points, after inner steps on the first half."""
    model, tx = learner

    def one_task(x, y):
        adapted = adapt(model, tx, x[:POINTS], y[:POINTS], INNER_STEPS)[-1]
        return task_loss(adapted, x[POINTS:], y[POINTS:])

    return jnp.mean(jax.vmap(one_task)(x, y))


def pretrain_loss(model, x, y):
    """The error without any inner step, for comparison: it learns the mean of all sines."""
    return jnp.mean(jax.vmap(task_loss, in_axes=(None, 0, 0))(model, x, y))


def make_learner(key):
    """A network, and an inner optimizer whose rates are arrays, so that they can be trained too."""
    model = eqx.nn.MLP("scalar", "scalar", 40, 2, activation=jnp.tanh, key=key)
    rates = {sl.where.path(f"layers.{i}.**"): jnp.array(0.01) for i in range(3)}
    # The clip keeps a task from diverging if the rates become too large for it. Its norm is a
    # Python number, and so a constant.
    return model, sl.ClipByGlobalNorm(20.0) | sl.ScaleBy(rates) | sl.Scale(-1.0)


def train(loss_fn, learner, steps, key, name):
    """Trains a model, or a model and its optimizer, on fresh tasks in each step."""
    opt = sl.Optimizer(sl.ClipByGlobalNorm(1.0) | sl.adam(1e-3), learner)
    step = sl.train_step(loss_fn)
    for i in (progress := trange(steps, unit="step", desc=name)):
        x, y = make_tasks(jax.random.fold_in(key, i), TASKS, 2 * POINTS)
        learner, opt, loss = step(learner, opt, x, y)
        if (i + 1) % 100 == 0:
            progress.set_postfix(loss=f"{loss:.3f}")
    return learner


@eqx.filter_jit
def errors(model, tx, x, y, steps):
    """The mean error on new tasks after 0, 1, …, `steps` inner steps."""

    def one_task(x, y):
        models = adapt(model, tx, x[:POINTS], y[:POINTS], steps)
        return jnp.stack([task_loss(m, x[POINTS:], y[POINTS:]) for m in models])

    return jnp.mean(jax.vmap(one_task)(x, y), axis=0)


def plot(learner, curves, path):
    """Shows one task, and the errors after each step."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(5.5, 6), layout="constrained")
    x = jax.random.uniform(jax.random.key(0), (POINTS,), minval=-5.0, maxval=5.0)
    y = 3 * jnp.sin(x + 1)
    models = adapt(*learner, x, y, INNER_STEPS)
    grid = jnp.linspace(-5, 5, 200)
    for label, color, model in (
        ("initial network", "lightgray", models[0]),
        ("after 1 step", "tab:cyan", models[1]),
        (f"after {INNER_STEPS} steps", "tab:blue", models[-1]),
    ):
        top.plot(grid, jax.vmap(model)(grid), color=color, label=label)
    top.plot(grid, 3 * jnp.sin(grid + 1), color="black", linestyle=":", label="the sine")
    top.plot(x, y, "o", color="black", markersize=4, label="points")
    top.set(title="A new task", xlabel="x", ylabel="y", ylim=(-4, 7))
    for label, color, values in curves:
        bottom.plot(values, color=color, marker="o", markersize=4, label=label)
    bottom.set(
        title="The mean of 1000 new tasks", xlabel="gradient steps", ylabel="mean squared error"
    )
    bottom.set(xticks=range(INNER_STEPS + 1), ylim=(0, None))
    top.legend(frameon=False, ncols=2)
    bottom.legend(frameon=False)
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4000, help="number of outer steps (4000)")
    parser.add_argument("--quick", action="store_true", help="take 150 outer steps only")
    parser.add_argument("--seed", type=int, default=0, help="random seed (0)")
    parser.add_argument(
        "--out", type=Path, default=Path("meta_learning.png"), help="file of the plot"
    )
    args = parser.parse_args()

    start = time.perf_counter()
    steps = 150 if args.quick else args.steps
    key1, key2, key3 = jax.random.split(jax.random.key(args.seed), 3)
    model, tx = make_learner(key1)
    print(tx)
    learned = train(meta_loss, (model, tx), steps, key2, "meta-learning")
    pretrained = train(pretrain_loss, model, steps, key2, "pretraining")
    print(learned[1])

    x, y = make_tasks(key3, 1000, 2 * POINTS)
    by_meta_learning = errors(*learned, x, y, INNER_STEPS)
    # Pretraining has no say in the inner rate, so it gets the best of several.
    by_pretraining = min(
        (
            errors(pretrained, sl.sgd(rate), x, y, INNER_STEPS)
            for rate in jnp.array([1e-3, 3e-3, 1e-2, 3e-2])
        ),
        key=lambda curve: curve[-1],
    )
    for name, curve in ("meta-learned", by_meta_learning), ("pretrained", by_pretraining):
        print(f"error after {INNER_STEPS} steps, {name}: {curve[-1]:.3f} ({curve[0]:.3f} before)")
    print(f"{time.perf_counter() - start:.1f} s, compilation included")

    curves = [
        ("pretrained", "gray", by_pretraining),
        ("meta-learned", "tab:blue", by_meta_learning),
    ]
    plot(learned, curves, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
