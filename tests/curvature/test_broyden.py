"""Self-scaled Broyden: the numbers of the authors' code, and what every matrix has."""

import equinox as eqx
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
    tx, x = sl.ScaleBySelfScaledBroyden(family), jnp.ones(2)
    diagonal = jnp.asarray(DIAGONAL)
    direction, state = tx.update(diagonal * x, tx.init(x), x)
    found = []
    for _ in range(steps):
        g = diagonal * x
        rate = 0.9 * jnp.vdot(g, direction) / jnp.vdot(direction, diagonal * direction)
        s, x = -rate * direction, x - rate * direction
        direction, state = tx.update(diagonal * x, state, x)
        found.append((state.inverse, x, s, direction))
    return found


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
    tx = sl.ScaleBySelfScaledBroyden()
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


def poisson(seed):
    """A small form of the problem of `benchmarks/curvature.py`, after some steps of Adam."""
    keys = jax.random.split(jax.random.key(seed), 3)
    model = eqx.nn.MLP(2, 1, 12, 2, jnp.tanh, key=keys[0])
    inside = jax.random.uniform(keys[1], (100, 2))
    edge = jax.random.uniform(keys[2], (10,))
    zero, one = jnp.zeros(10), jnp.ones(10)
    edges = [jnp.stack(pair, 1) for pair in ((edge, zero), (edge, one), (zero, edge), (one, edge))]

    def pde(model, x):
        hessian = jax.hessian(lambda x: model(x)[0])(x)
        force = 2 * jnp.pi**2 * jnp.sin(jnp.pi * x[0]) * jnp.sin(jnp.pi * x[1])
        return hessian[0, 0] + hessian[1, 1] + force

    loss_fn = sl.LeastSquares(
        {"pde": pde, "edge": lambda model, x: model(x)[0]}, weights={"edge": 100.0}
    )
    batch = {"pde": inside, "edge": jnp.concatenate(edges)}
    return loss_fn, batch, sl.minimize(loss_fn, sl.adam(3e-3), model, batch, max_steps=300).model


@pytest.mark.slow
def test_the_loss_of_a_network_is_a_fifth_of_that_of_bfgs(x64):
    """The median of three seeds, after the same number of steps."""
    ratios = []
    for seed in range(3):
        loss_fn, batch, model = poisson(seed)
        losses = [
            float(sl.minimize(loss_fn, sl.ss_broyden(family), model, batch, max_steps=500).loss)
            for family in ("broyden", "plain")
        ]
        ratios.append(losses[0] / losses[1])
    assert np.median(ratios) <= 1 / 5, ratios
