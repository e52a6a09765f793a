"""Learns an initialisation and an optimizer from which five steps learn a sine, in a minute.

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
    import numpy as np
    from tqdm import trange

    import slalom as sl
except ImportError as error:
    raise SystemExit(f'{error}. Install the dependencies: pip install -e ".[examples]"') from None

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TASKS = 25  # in each outer step
POINTS = 10  # of each task
INNER_STEPS = 5


def make_tasks(key, count, points):
    """Points of sines with amplitudes from 0.1 to 5 and any phase: x and y, one row per task."""
    key1, key2, key3 = jax.random.split(key, 3)
    amplitude = jax.random.uniform(key1, (count, 1), minval=0.1, maxval=5.0)
    phase = jax.random.uniform(key2, (count, 1), maxval=2 * jnp.pi)
    x = jax.random.uniform(key3, (count, points), minval=-5.0, maxval=5.0)
    return x, amplitude * jnp.sin(x + phase)


def task_loss(model, x, y):
    """The mean squared error of one task."""
    return jnp.mean((jax.vmap(model)(x[:, None]) - y) ** 2)


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
    """A network and an inner optimizer whose rates are arrays, so that they can be trained too."""
    model = eqx.nn.MLP("scalar", "scalar", width_size=40, depth=2, key=key)
    return model, tx
