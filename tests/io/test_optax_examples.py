"""Public examples written for Optax, with Slalom: they move as the originals do.

Another port is `examples/dqn.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import (
    assert_same_bits,
    gradients,
    mlp,
    optax_trajectory,
    params_of,
    slalom_trajectory,
    trajectory,
)

# All of them compare with Optax.
pytestmark = pytest.mark.slow
STEPS = 5


def last(history):
    return jax.tree.map(lambda h: h[-1], history)


def by_function(tx, params, grads):
    """The loop of the original in the functional core."""

    def step(params, state, grads, n):
        updates, state = tx.update(grads, state, params, sl.Context(step=n))
        return sl.apply_updates(params, updates), state

    return trajectory(step, params, tx.init(params), (grads, jnp.arange(STEPS)))[0]


def assert_moves_as(original, start, params):
    assert jax.tree.structure(params) == jax.tree.structure(original)
    columns = zip(*map(jax.tree.leaves, (last(params), last(original), start)), strict=True)
    for ours, theirs, begin in columns:
        assert ours.dtype == theirs.dtype
        distance = float(jnp.max(jnp.abs(theirs - begin)))
        # 2e-5 of the distance moved, since optax rounds b2 before it corrects the bias; and where
        # that is less than a unit in the last place of the parameter itself, two of these.
        np.testing.assert_allclose(ours, theirs, rtol=2.4e-7, atol=2e-5 * distance)


NET = {"linear": {"w": jnp.full((3, 2), 2.0), "b": jnp.ones(2)}, "norm": {"scale": jnp.ones(3)}}
LAYERS = {
    "dense": {"weight": jnp.ones((2, 3)), "bias": jnp.zeros(3)},
    "head": {"weight": jnp.ones((3, 1)), "bias": jnp.zeros(1)},
}
PAIR = ({"w": jnp.ones((2, 2)), "b": jnp.ones(2)}, [jnp.ones(3), jnp.ones(())])
NAMES = ("generator", "discriminator")


def mask_fn(p):
    return jax.tree.map(lambda x: x.ndim != 1, p)


def label_fn(params):
    return jax.tree.map_with_path(lambda path, _: path[-1].key, params)


bias_or_weight = label_fn(LAYERS)
bias_tx, weight_tx = sl.Scale(-0.01), sl.Scale(-0.001)
only_biases = sl.where.regex("bias$")

# What a page computes, on which parameters, and the forms in which Slalom has it.
EXAMPLES = {
    "custom optimizer with chaining": (
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.add_decayed_weights(weight_decay=1e-4),
            optax.scale_by_adam(b1=0.9, b2=0.999),
            optax.scale(-0.001),
        ),
        {"w": jnp.ones((10, 5)), "b": jnp.zeros((5,))},
        [
            sl.ClipByGlobalNorm(1.0)
            | sl.AddDecayedWeights(weight_decay=1e-4)
            | sl.ScaleByAdam(b1=0.9, b2=0.999)
            | sl.Scale(-0.001)
        ],
    ),
    "Adam for the weights, gradient descent for the biases": (
        optax.partition({"w": optax.adam(1.0), "b": optax.sgd(1.0)}, label_fn),
        {
            "linear_1": {"w": jnp.zeros((5, 6)), "b": jnp.zeros(5)},
            "linear_2": {"w": jnp.zeros((6, 1)), "b": jnp.zeros(1)},
        },
        [
            sl.partition({"w": sl.adam(1.0), "b": sl.sgd(1.0)}, label_fn),
            sl.adam(1.0).partition({sl.where.path("**.b"): sl.sgd(1.0)}),
        ],
    ),
    "a prefix of labels": (
        optax.partition({"generator": optax.adam(0.1), "discriminator": optax.adam(0.5)}, NAMES),
        PAIR,
        [sl.partition({"generator": sl.adam(0.1), "discriminator": sl.adam(0.5)}, NAMES)],
    ),
    # The link on its own, in front of gradient descent.
    "decay of matrices only": (
        optax.chain(optax.masked(optax.add_decayed_weights(0.001), mask_fn), optax.sgd(0.1)),
        NET,
        [
            sl.AddDecayedWeights(0.001).mask(where) | sl.sgd(0.1)
            for where in (
                *(mask_fn, mask_fn(NET), sl.where.ndim(min=2)),
                *(~sl.where.ndim(1), sl.where.path("**.w")),
            )
        ],
    ),
    "AdamW without decay of biases and norms": (
        optax.adamw(0.1, weight_decay=0.5, mask=mask_fn),
        NET,
        [
            sl.adamw(0.1, weight_decay=0.5, decay_where=where)
            for where in (mask_fn, mask_fn(NET), sl.where.ndim(min=2))
        ],
    ),
    "another rate for the biases": (
        optax.partition(
            {"bias": optax.scale(-0.01), "weight": optax.scale(-0.001)}, bias_or_weight
        ),
        LAYERS,
        [
            weight_tx.partition({sl.where.leaf(lambda path, _: "bias" in path): bias_tx}),
            weight_tx.partition({sl.where.path("**.bias"): bias_tx}, names=("bias",)),
            sl.partition({"bias": bias_tx, "weight": weight_tx}, bias_or_weight),
            weight_tx.mask(~only_biases) | bias_tx.mask(only_biases),
        ],
    ),
    # The page's `apply_every(5, adam)`, which Optax itself spells `MultiSteps`.
    "accumulation": (
        optax.MultiSteps(optax.adam(0.001), every_k_schedule=5),
        {"w": jnp.ones((2, 2)), "b": jnp.zeros(2)},
        [sl.adam(0.001).every_k(5)],
    ),
    "a scheduled b1 beside a constant b2": (
        optax.chain(
            optax.inject_hyperparams(optax.scale_by_adam)(
                b1=optax.linear_schedule(0.1, 0.9, 100), b2=0.99
            ),
            optax.scale(-0.01),
        ),
        {"w": jnp.ones(3)},
        [sl.ScaleByAdam(b1=sl.schedules.linear(0.1, 0.9, 100), b2=0.99) | sl.Scale(-0.01)],
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_moves_as_the_original(name):
    original, params, forms = EXAMPLES[name]
    grads = gradients(params, STEPS)
    moved, _ = optax_trajectory(original, params, grads)
    assert_moves_as(moved, params, by_function(forms[0], params, grads))
    for tx in forms:
        assert_moves_as(moved, params, slalom_trajectory(tx, params, grads)[0])


def test_labels_are_prefixes_and_some_parameters_are_not_optimized():
    original, _, (ours,) = EXAMPLES["a prefix of labels"]
    models = (mlp(0), mlp(1))
    params, grads = params_of(models), gradients(models, STEPS)
    moved, opt = slalom_trajectory(ours, models, grads)
    assert_moves_as(optax_trajectory(original, params, grads)[0], params, moved)
    rates = opt.hyperparams
    assert rates["generator.scale_by_learning_rate.learning_rate"] == np.float32(0.1)
    assert rates["discriminator.scale_by_learning_rate.learning_rate"] == 0.5

    # The page wraps `partition` with `masked`, which would add raw gradients to the others.
    params = {name: {"w": jnp.ones((5, 6)), "b": jnp.ones(5)} for name in ("linear_1", "linear_2")}
    grads = gradients(params, STEPS)
    first, second = params.values()
    labels = {sl.where.path("**.w"): "w", sl.where.path("**.b"): "b"}
    by_name = sl.partition({"w": sl.adam(1.0), "b": sl.sgd(1.0)}, labels)
    original = optax.partition({"w": optax.adam(1.0), "b": optax.sgd(1.0)}, {"w": "w", "b": "b"})
    whole, _ = optax_trajectory(original, first, grads["linear_1"])
    only = by_name.only(sl.where.path("linear_1.**"))
    stepped, opt = slalom_trajectory(only, params, grads)
    assert_moves_as(whole, first, stepped["linear_1"])
    assert_same_bits(last(stepped["linear_2"]), second)
    assert opt.state_of("partition.w.scale_by_adam").mu["linear_2"]["w"] is None
