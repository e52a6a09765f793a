"""Public examples written for Optax, with Slalom: what they do there works here, with equal losses.

The other port is `examples/dqn.py`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import lenient, mean_square

# Equinox's example on freezing: a line is fitted by the last layer of a network alone.
# https://docs.kidger.site/equinox/examples/frozen_layer

STEPS, BATCH = 40, 32


def network():
    return eqx.nn.MLP(1, 1, width_size=8, depth=1, key=jax.random.key(0))


def line(n=STEPS * BATCH):
    x = jax.random.normal(jax.random.key(1), (n, 1))
    return x, 5 * x - 2


def batches():
    x, y = line()
    for i in range(STEPS):
        rows = slice(i * BATCH, (i + 1) * BATCH)
        yield x[rows], y[rows]


def last_layer(model):
    """The mask that Equinox's example makes: `False` everywhere but at the last layer."""
    nothing = jax.tree.map(lambda _: False, model)
    return eqx.tree_at(
        lambda m: (m.layers[-1].weight, m.layers[-1].bias), nothing, replace=(True, True)
    )


def losses_with_optax():
    model = network()
    mask = last_layer(model)
    tx = optax.sgd(0.1)
    state = tx.init(eqx.filter(model, mask))

    @eqx.filter_jit
    def step(model, state, x, y):
        trained, frozen = eqx.partition(model, mask)
        loss, grads = eqx.filter_value_and_grad(
            lambda trained: mean_square(eqx.combine(trained, frozen), x, y)
        )(trained)
        with lenient():
            updates, state = tx.update(grads, state)
        return eqx.apply_updates(model, updates), state, loss

    losses = []
    for x, y in batches():
        model, state, loss = step(model, state, x, y)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("trainable", ["mask", "path"])
def test_only_the_last_layer_learns(trainable):
    model = original = best = network()
    opt = sl.Optimizer(
        sl.sgd(0.1),
        model,
        trainable=last_layer(model) if trainable == "mask" else sl.where.path("layers.1.**"),
    )
    step = sl.train_step(mean_square)
    losses = []
    for x, y in batches():
        model, opt, loss = step(model, opt, x, y)
        if not losses or float(loss) < min(losses):
            best = model
        losses.append(float(loss))

    np.testing.assert_allclose(losses, losses_with_optax(), rtol=1e-5)
    assert losses[-1] < losses[0] / 4
    # The aliases made before the loop can still be read, and frozen arrays are the very objects.
    assert model.layers[0].weight is original.layers[0].weight
    assert not jnp.array_equal(model.layers[1].weight, original.layers[1].weight)
    x, y = line(64)
    assert mean_square(best, x, y) < mean_square(original, x, y)
