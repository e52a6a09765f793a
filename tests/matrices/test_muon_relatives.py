"""Relatives of Muon, floors of updates, the radial brake and the pinned radius: known numbers."""

import jax
import jax.numpy as jnp
import known_matrix
import numpy as np
import pytest

import slalom as sl
from helpers import slalom_trajectory, slow_except, transforms_in
from table import EVERYTHING

START, GRADS = (jnp.asarray(x, jnp.float32) for x in (known_matrix.START, known_matrix.GRADS))
MEAN = sl.Ema(0.95, debias=False, nesterov=True)


def path(tx, steps):
    """The parameters after each step."""
    return slalom_trajectory(tx, START, GRADS[:steps])[0]


def after_decay(rule, rate, weight_decay):
    return rule | sl.AddDecayedWeights(weight_decay) | sl.ScaleByLearningRate(rate)


def test_relatives_of_muon_give_known_numbers():
    rule = (
        MEAN
        | sl.ScaleBySign()
        | sl.Orthogonalize(scale=None, layout="oi")
        | sl.ScaleByRms(0.95, 1e-8, eps_in_sqrt=False)
    ).graft(sl.ScaleBySign() | sl.Scale(0.2))
    second = path(after_decay(rule, 0.02, 0.01), 2)[-1]
    wanted = [[0.491509, -0.999915, 1.499398], [1.990909, 0.250215, -0.757700]]
    np.testing.assert_allclose(second, wanted, atol=3e-6)

    rule = (
        sl.contrib.CorrectByMars(layout="oi")
        | sl.Ema(0.95, debias=False)
        | sl.Orthogonalize(scale="match_rms_adamw", layout="oi")
    )
    first, _, third = path(after_decay(rule, 1e-3, 0.1), 3)
    wanted = [[0.499739, -1.000182, 1.499816], [1.999675, 0.249945, -0.750184]]
    np.testing.assert_allclose(first, wanted, atol=2e-6)
    wanted = [[0.499781, -1.000057, 1.498983], [1.998847, 0.249762, -0.750148]]
    np.testing.assert_allclose(third, wanted, atol=2e-6)
    # Its correction has a norm for each matrix.
    stack = jnp.stack([GRADS[0], GRADS[1] / 100])
    tx = sl.contrib.CorrectByMars(layout="soi")
    updates, _ = tx.update(stack, tx.init(stack))
    np.testing.assert_allclose(updates[0], GRADS[0] / jnp.linalg.norm(GRADS[0]), rtol=1e-6)
    np.testing.assert_allclose(updates[1], stack[1], rtol=1e-6)

    (first,) = path(after_decay(MEAN | AURORA, 0.05, 0.025), 1)
    wanted = [[0.464590, -1.034120, 1.504371], [1.973302, 0.266340, -0.789524]]
    np.testing.assert_allclose(first, wanted, atol=3e-6)
    squares = jnp.sum(balanced(GRADS[0]) ** 2, axis=0)
    np.testing.assert_allclose(squares, [0.718202, 0.611328, 0.670470], atol=1e-5)


AURORA = sl.Orthogonalize((2.0, -1.5, 0.5), 12, balance=2, layout="oi")
balanced = jax.jit(lambda g: AURORA.update(g, None)[0])


def test_balanced_updates_do_not_depend_on_the_size_of_gradients_and_keep_zeros():
    g = GRADS[0].at[:, 1].set(0.0).T
    wanted = balanced(g)
    np.testing.assert_array_equal(wanted[1], 0)
    np.testing.assert_allclose(wanted.T @ wanted, 1.5 * np.eye(2), atol=1e-3)
    for scale in (1e-30, 1e30):
        updates = balanced(scale * g)
        np.testing.assert_allclose(updates, wanted, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(updates[1], 0)
    # Square matrices need no balance.
    g = jax.random.normal(jax.random.key(0), (3, 3))
    plain = sl.Orthogonalize((2.0, -1.5, 0.5), 12, layout="oi")
    np.testing.assert_array_equal(balanced(g), jax.jit(plain.update)(g, None)[0])


W = jnp.diag(jnp.array([3.0, 4.0]))
OUTWARD = -jnp.ones((2, 2))


def test_the_brake_and_the_pin_give_known_numbers_however_small_the_step():
    # From the equations of modded-nanogpt's record: a step outwards, of which half is taken.
    tx = (
        sl.contrib.RadialBrake(layout="oi")
        | sl.ScaleByLearningRate(0.1)
        | sl.contrib.PinRadius(layout="oi")
    )
    after, _ = sl.Optimizer(tx, W).step(W, OUTWARD)
    wanted = [[3.056787, 0.099960], [0.099960, 4.042396]]
    np.testing.assert_allclose(after, wanted, atol=2e-6)
    np.testing.assert_allclose(jnp.linalg.norm(after), 5.07, rtol=1e-6)
    # Steps inwards and matrices of zeros pass the brake.
    brake = sl.contrib.RadialBrake(1.0, layout="oi")
    np.testing.assert_array_equal(brake.update(-OUTWARD, None, W)[0], -OUTWARD)
    np.testing.assert_array_equal(brake.update(OUTWARD, None, 0 * W)[0], OUTWARD)
    tangent, _ = brake.update(OUTWARD, None, W)
    np.testing.assert_allclose(jnp.sum(tangent * W), 0, atol=1e-5)

    tangent = jnp.array([[0.0, 1.0], [-1.0, 0.0]])
    pin = sl.contrib.PinRadius(layout="oi")
    np.testing.assert_allclose(jnp.linalg.norm(W + pin.update(tangent, None, W)[0]), 5, rtol=1e-6)
    small, _ = pin.update(1e-6 * tangent, None, W)
    np.testing.assert_allclose(small, 1e-6 * tangent, rtol=1e-5, atol=1e-11)
    np.testing.assert_array_equal(pin.update(tangent, None, 0 * W)[0], tangent)


def test_floors_are_for_rows_or_matrices_and_sizes_may_be_extreme():
    w = np.array([[3.0, 4.0], [0.0, 0.0], [0.6, 0.8]], np.float32)
    u = np.array([[0.1, 0.0], [0.2, 0.0], [5.0, 0.0]], np.float32)
    rows, _ = sl.contrib.UpdateFloor(0.5, layout="oi").update(jnp.asarray(u), None, jnp.asarray(w))
    np.testing.assert_allclose(rows, [[2.5, 0.0], [0.2, 0.0], [5.0, 0.0]], rtol=1e-6)
    floor = sl.contrib.UpdateFloor(2.0, per="matrix", layout="soi")
    found, _ = floor.update(jnp.stack([u, 0 * u]), None, jnp.stack([w, w]))
    wanted = u * 2 * np.linalg.norm(w) / np.linalg.norm(u)
    np.testing.assert_allclose(found, np.stack([wanted, 0 * u]), rtol=1e-6)

    for tx in (
        sl.contrib.RadialBrake(layout="oi"),
        sl.contrib.PinRadius(layout="oi"),
        sl.contrib.UpdateFloor(9.0),
    ):
        update = jax.jit(lambda u, w, tx=tx: tx.update(u, None, w)[0])
        for scale in (1e-30, 1e30):
            wanted = scale * update(OUTWARD, W)
            np.testing.assert_allclose(update(scale * OUTWARD, scale * W), wanted, rtol=1e-5)


PARTS = [part for tx in EVERYTHING.values() for part in transforms_in(tx)]
CONSTRAINTS = {type(part).__name__: part for part in PARTS if part.constrains}
TERMS = sl.combine.Terms(jnp.array([1.0, 2.0]), jnp.array([[2.0, -1.0], [-1.0, 3.0]]))
AROUND = {
    "average": lambda tx: tx.average(),
    "combine": lambda tx: tx.combine(sl.combine.UPGrad(), ("first", "second")),
    "every_k": lambda tx: tx.every_k(2).every_k(1),
    "graft": lambda tx: sl.ScaleByAdam().graft(sl.Identity()) | tx,
    "if_finite": lambda tx: tx.if_finite(check="both").record(),
    "maximize": lambda tx: tx.maximize(),
    "mechanize": lambda tx: sl.sgd(1.0).mechanize(s_init=0.1) | tx[sl.KeepInitialNorm],
    "partition": lambda tx: tx.partition({sl.where.path("w"): sl.Trace(0.9) | tx}).when(
        lambda context, updates: context.step != 1, otherwise="zero"
    ),
    "scale_loss": lambda tx: tx.skip_spikes().scale_loss(4.0),
    "split_complex": lambda tx: tx.split_complex(),
    "store": lambda tx: (sl.Trace(0.9) | tx).store("int8", min_size=1),
    "write": lambda tx: tx.write("kahan"),
}


@pytest.mark.parametrize("name", slow_except(AROUND, "partition"))
def test_a_norm_is_kept_inside_of_every_wrapper_that_takes_it(name):
    params = {"w": jnp.arange(1.0, 7).reshape(2, 3), "b": jnp.ones(3)}
    opt = sl.Optimizer(AROUND[name](sl.sgd(0.5) | sl.KeepInitialNorm()), params)
    model = params
    for i in range(4):
        grads = jax.tree.map(lambda x, i=i: jnp.cos(x * (i + 1)), params)
        model, opt = opt.step(model, grads, value=jnp.ones(()), terms=TERMS)
    assert not jnp.allclose(model["w"], params["w"], atol=0.1)
    for before, after in zip(*map(jax.tree.leaves, (params, model)), strict=True):
        np.testing.assert_allclose(*map(jnp.linalg.norm, (after, before)), rtol=1e-6)


def test_wrappers_that_add_other_updates_refuse_constraints():
    assert {*CONSTRAINTS} == {"KeepInitialNorm", "KeepParamsNonnegative", "PinRadius", "QKClip"}
    for constraint in CONSTRAINTS.values():
        tx = sl.sgd(0.1) | constraint
        for wrap in (
            lambda tx: tx.schedule_free(),
            lambda tx: tx.every_k(2).mechanize(),
            lambda tx: tx.graft(sl.sgd(0.1)),
            lambda tx: sl.sgd(0.1).graft(tx.only(sl.where.everything())),
        ):
            with pytest.raises(ValueError, match="cannot be inside"):
                wrap(tx)
