"""Target networks: `incremental_update` and `periodic_update`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import (
    assert_close,
    assert_same_bits,
    lenient,
    mean_square,
    mlp,
    nested_dict,
    params_of,
)

NEW, OLD = nested_dict(jax.random.key(0)), nested_dict(jax.random.key(1))


@pytest.mark.slow
def test_targets_move_as_in_optax_when_due_and_the_rest_is_that_of_the_model():
    for size in (0.005, 0.5, 0.99):
        with lenient():
            expected = optax.incremental_update(NEW, OLD, size)
        assert_close(sl.incremental_update(NEW, OLD, size), expected, rtol=1e-5, atol=1e-6)

    model = {"w": jnp.ones(2, "bfloat16"), "n": jnp.array(3), "f": jax.nn.relu, "k": 2, "z": None}
    target = {"w": jnp.zeros(2), "n": jnp.array(1), "f": jax.nn.tanh, "k": 1, "z": None}
    moved = sl.incremental_update(model, target, 0.25)
    assert_same_bits(moved["w"], jnp.array([0.25, 0.25]))
    assert moved["f"] is jax.nn.relu
    assert (int(moved["n"]), moved["k"], moved["z"]) == (3, 2, None)
    assert sl.periodic_update(model, target, 1, 2)["f"] is jax.nn.relu
    assert int(sl.periodic_update(model, target, 1, 2)["n"]) == 1

    new, old = jnp.array([1.0, 3.0], "bfloat16"), jnp.array([0.5, -1.0], "bfloat16")
    expected = (old.astype(float) + 0.3 * (new.astype(float) - old.astype(float))).astype(old.dtype)
    assert_same_bits(sl.incremental_update(new, old, 0.3), expected)

    for steps in range(5):
        expected = NEW if steps % 2 == 0 else OLD
        assert_same_bits(sl.periodic_update(NEW, OLD, steps, 2), expected)
        compiled = jax.jit(sl.periodic_update)(NEW, OLD, steps, 2)
        assert_same_bits(compiled, expected)
        assert_same_bits(compiled, optax.periodic_update(NEW, OLD, jnp.array(steps), 2))
    keys = jax.random.key(0), jax.random.key(1)
    assert_same_bits(sl.periodic_update(*keys, 1, 2), keys[1])

    def network():
        return eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")[0]

    new, old = network(), network()
    moved = sl.incremental_update(new, old, 0.5)
    indices = [jax.tree.leaves(m, is_leaf=is_index) for m in (moved, new)]
    assert [x for x in indices[0] if is_index(x)] == [x for x in indices[1] if is_index(x)]

    gradient = jax.grad(lambda s: jnp.sum(sl.incremental_update(NEW, OLD, s)["scales"][0]))(0.5)
    np.testing.assert_allclose(gradient, NEW["scales"][0] - OLD["scales"][0], rtol=1e-6)


@pytest.mark.parametrize("traced", [False, True])
def test_the_ends_are_exact_and_equal_models_do_not_drift(traced):
    update = jax.jit(sl.incremental_update) if traced else sl.incremental_update
    assert_same_bits(update(NEW, OLD, 1.0), NEW)
    assert_same_bits(update(NEW, OLD, 0.0), OLD)
    assert_same_bits(update(NEW, NEW, 0.1), NEW)
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), OLD)
    assert_same_bits(update(broken, OLD, 0.0), OLD)
    assert_same_bits(update(NEW, broken, 1.0), NEW)


@pytest.mark.slow
def test_whole_models_follow_a_training_that_donates_everything():
    x, y = jax.random.normal(jax.random.key(2), (8, 2)), jnp.ones((8, 1))
    model = mlp()
    opt = sl.Optimizer(sl.adam(0.1), model)
    target = copied = sl.periodic_update(model, model, 0, 1)
    step = sl.train_step(mean_square, donate="all")
    for _ in range(3):
        model, opt, _ = step(model, opt, x, y)
        target = sl.incremental_update(model, target, 0.5)
        copied = sl.periodic_update(model, copied, opt.count, 3)
    assert_same_bits(params_of(copied), params_of(model))
    step(model, opt, x, y)
    assert jnp.isfinite(mean_square(target, x, y))
    assert jnp.isfinite(mean_square(copied, x, y))


def is_index(x):
    return isinstance(x, eqx.nn.StateIndex)


TWO_OF_ONE = "incremental_update takes two models "
BAD = {
    "The `step_size` of incremental_update must be in [0, 1], got 1.5.": (
        lambda: sl.incremental_update(NEW, OLD, 1.5)
    ),
    TWO_OF_ONE + "of one structure: 'w' is in the model but not in the target.": (
        lambda: sl.incremental_update({"w": jnp.ones(2)}, {"v": jnp.ones(2)}, 0.5)
    ),
    TWO_OF_ONE + "with equal shapes, but 'w' has shape (2,) in the model and shape () in the "
    "target.": lambda: sl.incremental_update({"w": jnp.ones(2)}, {"w": jnp.ones(())}, 0.5),
    "The `update_period` of periodic_update must be at least 1, got 0.": (
        lambda: sl.periodic_update(NEW, OLD, 1, 0)
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused(message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the whole text is compared
        BAD[message]()
    assert str(caught.value) == message
