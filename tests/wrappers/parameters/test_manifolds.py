"""Projections onto smooth sets: tangent spaces, retractions, and the minima that they lead to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import slow_except
from slalom import projections

RANDOM = np.random.default_rng(0)
SYMMETRIC = np.cov(RANDOM.standard_normal((8, 20)) * np.arange(1, 9)[:, None])
COLUMNS = RANDOM.standard_normal((6, 4))
BEFORE = RANDOM.standard_normal((4, 10))
ROTATION = np.linalg.qr(RANDOM.standard_normal((4, 4)))[0]
ROTATION[:, 0] *= np.linalg.det(ROTATION)
AFTER = ROTATION @ BEFORE + 0.1 * RANDOM.standard_normal((4, 10))
PLANE = RANDOM.standard_normal(5)
CENTER = RANDOM.standard_normal(5)
WEIGHTS = np.array([3.0, 2.0, 1.0])

OTHERS = ("eigenvector", "components", "columns", "rotation")
SETS = {
    "eigenvector": projections.sphere(),
    "components": projections.stiefel(),
    "columns": projections.sphere(axis=-2),
    "rotation": projections.stiefel(),
    "plane": projections.hyperplane(
        dict.fromkeys(OTHERS) | {"plane": jnp.asarray(PLANE, jnp.float32)}, 2.0
    ),
}


def costs(m):
    """A problem for each set; but for the last, examples of Pymanopt."""
    a = jnp.asarray(SYMMETRIC / 10, jnp.float32)
    square = lambda x: 0.5 * jnp.sum(x**2)  # noqa: E731
    return {
        "eigenvector": -m["eigenvector"] @ a @ m["eigenvector"],
        "components": -jnp.sum(
            m["components"] * (a @ m["components"]) * WEIGHTS.astype("f4")[None]
        ),
        "columns": square(m["columns"] - COLUMNS.astype("f4")),
        "rotation": square(m["rotation"] @ BEFORE.astype("f4") - AFTER.astype("f4")) / 10,
        "plane": square((m["plane"] - CENTER.astype("f4")) * np.arange(1, 6).astype("f4")),
    }


def minima():
    """Their closed forms. Pymanopt 2.2.1 finds the same values, to 1e-10."""
    values = np.linalg.eigvalsh(SYMMETRIC / 10)[::-1]
    singular = np.linalg.svd(AFTER @ BEFORE.T, compute_uv=False)
    scales = np.arange(1.0, 6.0) ** 2
    distance = 2 - PLANE @ CENTER
    return {
        "eigenvector": -values[0],
        "components": -values[:3] @ WEIGHTS,
        "columns": 0.5 * np.sum((np.linalg.norm(COLUMNS, axis=0) - 1) ** 2),
        "rotation": 0.5 * (np.sum(BEFORE**2) + np.sum(AFTER**2) - 2 * singular.sum()) / 10,
        "plane": 0.5 * distance**2 / np.sum(PLANE**2 / scales),
    }


def start():
    random = np.random.default_rng(1)
    shapes = {"eigenvector": (8,), "components": (8, 3), "columns": (6, 4)}
    drawn = {k: jnp.asarray(random.standard_normal(s), jnp.float32) for k, s in shapes.items()}
    return drawn | {"rotation": jnp.eye(4), "plane": jnp.zeros(5)}


RATE = sl.schedules.cosine_decay(0.05, 1500)


@pytest.mark.slow
@pytest.mark.parametrize("tx", [sl.sgd(RATE, momentum=0.9), sl.adam(RATE)], ids=["sgd", "adam"])
def test_minima_on_smooth_sets_are_those_of_pymanopt(tx):
    for name, onto in SETS.items():
        tx = tx.project(onto, where=sl.where.path(name))
    step = sl.train_step(lambda m: sum(costs(m).values()))
    model = start()
    model, _, _ = step.scan(model, sl.Optimizer(tx, model), length=1500)
    costs_found = costs(model)
    found = {name: float(costs_found[name]) - value for name, value in minima().items()}
    assert max(map(abs, found.values())) < 2e-5, found
    np.testing.assert_allclose(np.linalg.norm(model["eigenvector"]), 1, atol=1e-6)
    np.testing.assert_allclose(model["components"].T @ model["components"], np.eye(3), atol=2e-6)
    np.testing.assert_allclose(np.linalg.norm(model["columns"], axis=0), np.ones(4), atol=1e-6)
    np.testing.assert_allclose(model["plane"] @ PLANE, 2, atol=1e-5)


# Of geoopt, with its retractions of the sphere and, by the polar factor, of the Stiefel manifold.
ON_SPHERE = [0.975900, -0.195180, 0.097590]
ORTHONORMAL = [[0.960683, -0.086121], [0.153569, 0.956837], [-0.231311, 0.277573]]
TANGENTS = [
    (projections.sphere(), [1, 0, 0], [0.3, 0.4, -0.2], ON_SPHERE),
    (projections.stiefel(), np.eye(3, 2), [[0.1, 0.2], [-0.3, 0.4], [0.5, -0.6]], ORTHONORMAL),
]


@pytest.mark.parametrize("case", TANGENTS, ids=["sphere", "stiefel"])
def test_a_step_is_along_the_tangent(case):
    onto, point, gradient, expected = case
    x, g = jnp.asarray(point, jnp.float32), jnp.asarray(gradient)
    opt = sl.Optimizer(sl.sgd(0.5).project(onto), x)
    np.testing.assert_allclose(opt.step(x, g)[0], expected, atol=1e-6)
    if x.ndim == 2:
        opt = sl.Optimizer(sl.sgd(0.5).project(onto), x.T)
        np.testing.assert_allclose(opt.step(x.T, g.T)[0].T, expected, atol=1e-6)


SMOOTH = {
    "sphere": projections.sphere(),
    "columns": projections.sphere(axis=-2),
    "l2_sphere": projections.l2_sphere(3.0),
    "stiefel": projections.stiefel(),
    "hyperplane": projections.hyperplane(jnp.linspace(-1, 2, 15).reshape(5, 3), 0.5),
    "vector": projections.vector(jnp.linspace(-1, 2, 15).reshape(5, 3)),
}


@pytest.mark.parametrize("name", slow_except(SMOOTH, "sphere"))
def test_tangents_are_the_derivatives_of_the_projection(name):
    """At a point of a smooth set, the derivative of the nearest point is the tangent part."""
    onto, step = SMOOTH[name], 1e-3

    @jax.jit
    def tangents(point, u):
        x = onto(point)
        tangent = onto.along(x, u)
        around = (onto(x + step * u) - onto(x - step * u)) / (2 * step)
        return tangent, around, onto.along(x, tangent)

    real, imaginary = np.random.default_rng(2).standard_normal((2, 2, 5, 3))
    for given in (real.astype(np.float32), (real + 1j * imaginary).astype(np.complex64)):
        tangent, expected, again = tangents(*map(jnp.asarray, given))
        np.testing.assert_allclose(tangent, expected, atol=2e-3)
        np.testing.assert_allclose(again, tangent, atol=1e-5)
