"""Relatives of Muon, made of links: numbers from the authors' equations, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl

START = jnp.array([[0.5, -1.0, 1.5], [2.0, 0.25, -0.75]])
GRADS = jnp.array(
    [
        [[1.0, 2.0, -1.0], [0.5, -1.0, 3.0]],
        [[0.5, -1.0, 2.0], [1.0, 1.0, -0.5]],
        [[-1.0, 0.5, 1.0], [2.0, -0.5, 1.0]],
    ]
)
MEAN = sl.Ema(0.95, debias=False, nesterov=True)


def path(tx, steps):
    """The parameters after each step."""
    opt, p, found = sl.Optimizer(tx, START), START, []
    for g in GRADS[:steps]:
        p, opt = opt.step(p, g)
        found.append(p)
    return found


def after_decay(rule, rate, weight_decay):
    return rule | sl.AddDecayedWeights(weight_decay) | sl.ScaleByLearningRate(rate)


def test_ada_muon_gives_known_numbers():
    rule = (
        MEAN
        | sl.ScaleBySign()
        | sl.Orthogonalize(scale=None, layout="oi")
        | sl.ScaleByRms(0.95, 1e-8, eps_in_sqrt=False)
    ).graft(sl.ScaleBySign() | sl.Scale(0.2))
    second = path(after_decay(rule, 0.02, 0.01), 2)[-1]
    wanted = [[0.491509, -0.999915, 1.499398], [1.990909, 0.250215, -0.757700]]
    np.testing.assert_allclose(second, wanted, atol=3e-6)


def test_mars_m_gives_known_numbers():
    rule = (
        sl.CorrectByMars(layout="oi")
        | sl.Ema(0.95, debias=False)
        | sl.Orthogonalize(scale="match_rms_adamw", layout="oi")
    )
    first, _, third = path(after_decay(rule, 1e-3, 0.1), 3)
    wanted = [[0.499739, -1.000182, 1.499816], [1.999675, 0.249945, -0.750184]]
    np.testing.assert_allclose(first, wanted, atol=2e-6)
    wanted = [[0.499781, -1.000057, 1.498983], [1.998847, 0.249762, -0.750148]]
    np.testing.assert_allclose(third, wanted, atol=2e-6)


def test_the_correction_of_mars_has_a_norm_for_each_matrix():
    stack = jnp.stack([GRADS[0], GRADS[1] / 100])
    tx = sl.CorrectByMars(layout="soi")
    updates, _ = tx.update(stack, tx.init(stack))
    np.testing.assert_allclose(updates[0], GRADS[0] / jnp.linalg.norm(GRADS[0]), rtol=1e-6)
    np.testing.assert_allclose(updates[1], stack[1], rtol=1e-6)


AURORA = sl.Orthogonalize((2.0, -1.5, 0.5), 12, balance=2, layout="oi")


def test_aurora_gives_known_numbers():
    (first,) = path(after_decay(MEAN | AURORA, 0.05, 0.025), 1)
    wanted = [[0.464590, -1.034120, 1.504371], [1.973302, 0.266340, -0.789524]]
    np.testing.assert_allclose(first, wanted, atol=3e-6)
    updates, _ = AURORA.update(GRADS[0], None)
    squares = jnp.sum(updates**2, axis=0)
    np.testing.assert_allclose(squares, [0.718202, 0.611328, 0.670470], atol=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_balanced_updates_do_not_depend_on_the_size_of_gradients_and_keep_zeros(scale):
    g = GRADS[0].at[:, 1].set(0.0).T
    updates, _ = AURORA.update(scale * g, None)
    np.testing.assert_allclose(updates, AURORA.update(g, None)[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(updates[1], 0)
    np.testing.assert_allclose(updates.T @ updates, 1.5 * np.eye(2), atol=1e-3)


def test_square_matrices_need_no_balance():
    g = jax.random.normal(jax.random.key(0), (3, 3))
    plain = sl.Orthogonalize((2.0, -1.5, 0.5), 12, layout="oi")
    np.testing.assert_array_equal(AURORA.update(g, None)[0], plain.update(g, None)[0])
