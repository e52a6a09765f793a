"""Floors of updates, the radial brake and the pinned radius, against their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import slow_except
from slalom._core.state.walk import transforms
from table import EVERYTHING

W = jnp.diag(jnp.array([3.0, 4.0]))
OUTWARD = -jnp.ones((2, 2))


def stepped(tx, w, g):
    return sl.Optimizer(tx, w).step(w, g)[0]


def test_the_brake_and_the_pin_give_known_numbers():
    # From the equations of modded-nanogpt's record: a step outwards, of which half is taken.
    tx = sl.RadialBrake(layout="oi") | sl.ScaleByLearningRate(0.1) | sl.PinRadius(layout="oi")
    after = stepped(tx, W, OUTWARD)
    wanted = [[3.056787, 0.099960], [0.099960, 4.042396]]
    np.testing.assert_allclose(after, wanted, atol=2e-6)
    np.testing.assert_allclose(jnp.linalg.norm(after), 5.07, rtol=1e-6)


def test_the_brake_lets_steps_inwards_and_matrices_of_zeros_pass():
    brake = sl.RadialBrake(1.0, layout="oi")
    np.testing.assert_array_equal(brake.update(-OUTWARD, None, W)[0], -OUTWARD)
    np.testing.assert_array_equal(brake.update(OUTWARD, None, 0 * W)[0], OUTWARD)
    tangent, _ = brake.update(OUTWARD, None, W)
    np.testing.assert_allclose(jnp.sum(tangent * W), 0, atol=1e-5)


def test_the_pin_keeps_the_radius_of_a_tangent_step_however_small():
    tangent = jnp.array([[0.0, 1.0], [-1.0, 0.0]])
    pin = sl.PinRadius(layout="oi")
    np.testing.assert_allclose(jnp.linalg.norm(W + pin.update(tangent, None, W)[0]), 5, rtol=1e-6)
    small, _ = pin.update(1e-6 * tangent, None, W)
    np.testing.assert_allclose(small, 1e-6 * tangent, rtol=1e-5, atol=1e-11)
    np.testing.assert_array_equal(pin.update(tangent, None, 0 * W)[0], tangent)


def test_a_floor_is_for_each_row_or_for_each_matrix():
    w = np.array([[3.0, 4.0], [0.0, 0.0], [0.6, 0.8]], np.float32)
    u = np.array([[0.1, 0.0], [0.2, 0.0], [5.0, 0.0]], np.float32)
    rows, _ = sl.UpdateFloor(0.5, layout="oi").update(jnp.asarray(u), None, jnp.asarray(w))
    np.testing.assert_allclose(rows, [[2.5, 0.0], [0.2, 0.0], [5.0, 0.0]], rtol=1e-6)
    floor = sl.UpdateFloor(2.0, per="matrix", layout="soi")
    found, _ = floor.update(jnp.stack([u, 0 * u]), None, jnp.stack([w, w]))
    wanted = u * 2 * np.linalg.norm(w) / np.linalg.norm(u)
    np.testing.assert_allclose(found, np.stack([wanted, 0 * u]), rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_sizes_may_be_extreme(scale):
    w, u = scale * W, scale * OUTWARD
    for tx in (sl.RadialBrake(layout="oi"), sl.PinRadius(layout="oi"), sl.UpdateFloor(9.0)):
        wanted = scale * tx.update(OUTWARD, None, W)[0]
        np.testing.assert_allclose(tx.update(u, None, w)[0], wanted, rtol=1e-5)


# --- constraints inside wrappers -----------------------------------------------------------

CONSTRAINTS = {
    type(part.module).__name__: part.module
    for tx in EVERYTHING.values()
    for part in transforms(tx)
    if part.module.constrains
}
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


@pytest.mark.parametrize("name", slow_except(AROUND, "mechanize", "partition"))
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


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_wrappers_that_add_other_updates_refuse_constraints(name):
    tx = sl.sgd(0.1) | CONSTRAINTS[name]
    for wrap in (
        lambda: tx.schedule_free(),
        lambda: tx.every_k(2).mechanize(),
        lambda: tx.graft(sl.sgd(0.1)),
        lambda: sl.sgd(0.1).graft(tx.only(sl.where.everything())),
    ):
        with pytest.raises(ValueError, match="cannot be inside"):
            wrap()


def test_the_constraints_are_known():
    assert {*CONSTRAINTS} == {"KeepInitialNorm", "KeepParamsNonnegative", "PinRadius", "QKClip"}
