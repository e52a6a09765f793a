"""Self-scaled Broyden: the numbers of the authors' code, and what every matrix has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import slow_except

FAMILIES = ("broyden", "bfgs", "plain")
DIAGONAL = np.array([1.0, 10.0])
# After the second of two steps of 0.9 times the exact length, from a run of the authors' code.
SCALED = [[0.347080, 0.065879], [0.065879, 0.093353]]


def walk(family, steps):
    """Matrices, positions and differences after steps of 0.9 times the exact length."""
    tx, x = sl.contrib.ScaleBySelfScaledBroyden(family), jnp.ones(2)
    update, diagonal = jax.jit(tx.update), jnp.asarray(DIAGONAL)
    direction, state = update(diagonal * x, tx.init(x), x)
    found = []
    for _ in range(steps):
        g = diagonal * x
        rate = 0.9 * jnp.vdot(g, direction) / jnp.vdot(direction, diagonal * direction)
        s, x = -rate * direction, x - rate * direction
        direction, state = update(diagonal * x, state, x)
        found.append((state.inverse, x, s, direction))
    return found


@pytest.mark.slow
def test_two_steps_are_those_of_the_authors_code(x64):
    (first, x, *_), (second, *_) = walk("broyden", 2)
    np.testing.assert_allclose(x, [0.909191, 0.091908], atol=1e-6)
    np.testing.assert_allclose(first, [[0.101888, 0.008981], [0.008981, 0.099910]], atol=1e-6)
    np.testing.assert_allclose(second, SCALED, atol=1e-6)


@pytest.mark.parametrize("family", slow_except(FAMILIES, "broyden"))
def test_the_matrix_is_positive_definite_and_solves_the_secant_equation(x64, family):
    for inverse, x, s, direction in walk(family, 4):
        np.testing.assert_allclose(inverse @ (DIAGONAL * s), s, rtol=1e-9)
        assert np.linalg.eigvalsh(inverse).min() > 0
        # The direction is computed without a second pass over the matrix.
        np.testing.assert_allclose(direction, inverse @ (DIAGONAL * x), rtol=1e-9)


@pytest.mark.slow
def test_a_step_that_stood_still_forgets_the_matrix():
    params = {"x": jnp.ones(2), "z": jnp.array(1.0 + 2.0j)}
    tx = sl.contrib.ScaleBySelfScaledBroyden()
    grads = jax.tree.map(lambda x: 0.1 * x, params)
    _, state = tx.update(grads, tx.init(params), params)
    moved = jax.tree.map(lambda x: 0.9 * x, params)
    _, state = tx.update(jax.tree.map(lambda x: 0.8 * x, grads), state, moved)
    assert state.inverse.shape == (4, 4)
    assert float(state.inverse[0, 0]) > 0
    direction, state = tx.update(grads, state, moved)
    assert not np.any(state.inverse)
    ratios = [u / g for u, g in zip(*map(jax.tree.leaves, (direction, grads)), strict=True)]
    np.testing.assert_allclose(np.concatenate([x.ravel() for x in ratios]), ratios[0][0], rtol=1e-5)
