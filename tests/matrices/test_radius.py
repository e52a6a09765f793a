"""Floors of updates, the radial brake and the pinned radius, against their formulas."""

import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl

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
