"""Minima in a set, under every rule that scales the elements, sets of matrices, and smooth sets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.optimize

import slalom as sl
from helpers import sampled, slow_except
from slalom import projections

P = sl.projections
RANDOM = np.random.default_rng(0)
MIX = RANDOM.normal(size=(4, 4))
CURVATURE = MIX @ MIX.T + np.diag([0.3, 1.0, 2.0, 4.0])
CENTER = np.array([1.5, -2.0, 0.8, 2.5])
NORMAL = np.array([0.3, -1.2, 2.0, 0.7])
ROWS = {"a": jnp.asarray(NORMAL[:3], jnp.float32), "b": jnp.asarray(NORMAL[3], jnp.float32)}

# Each with the bounds of an entry, and with a function that is at least 0 in the set.
SETS = {
    "l2_ball": (P.l2_ball(1.5), None, lambda x: 1.5**2 - x @ x),
    "l1_ball": (P.l1_ball(1.5), None, lambda x: 1.5 - np.abs(x).sum()),
    "simplex": (P.simplex(2.0), (0, None), lambda x: 2 - x.sum()),
    "halfspace": (P.halfspace(ROWS, 0.4), None, lambda x: 0.4 - NORMAL @ x),
    "linf_ball": (P.linf_ball(0.7), (-0.7, 0.7), None),
    "non_negative": (P.non_negative(), (0, None), None),
    "box": (P.box(-0.5, 0.8), (-0.5, 0.8), None),
    "hypercube": (P.hypercube(0.7), (0, 0.7), None),
}
RATE = sl.schedules.cosine_decay(0.05, 1500)
NAMES = ("adam", "rmsprop", "lion", "adabelief", "nadam", "amsgrad", "adan", "radam", "sgd")
RULES = {name: getattr(sl, name)(RATE) for name in NAMES} | {
    "maximized": (sl.Scale(-1.0) | sl.adam(RATE)).maximize(),
    "average": sl.adam(RATE).average(0.9),
    "lookahead": sl.adam(RATE).lookahead(5, 0.5),
    "outer": sl.adam(RATE).outer(sl.sgd(0.7, momentum=0.5, nesterov=True), 5),
    "schedule_free": sl.schedule_free_sgd(0.05),
    "clipped schedule_free": sl.ClipByGlobalNorm(10.0) | sl.sgd(0.05).schedule_free(),
}
CASES = [(name, rule) for rule in RULES for name in SETS]


def loss(x):
    return 0.5 * (x - CENTER) @ CURVATURE @ (x - CENTER)


def minimum(bounds, inside):
    """The smallest loss in the set, by SLSQP from many points, as |x| has no derivative at 0."""
    found = [
        scipy.optimize.minimize(
            loss,
            start,
            method="SLSQP",
            bounds=[bounds or (None, None)] * 4,
            constraints=[] if inside is None else {"type": "ineq", "fun": inside},
            options={"ftol": 1e-14, "maxiter": 1000},
        )
        for start in RANDOM.normal(size=(10, 4))
    ]
    return min(result.fun for result in found if inside is None or inside(result.x) > -1e-9)


def as_vector(m):
    return np.append(m["a"], m["b"]).astype(np.float64)


def of_tree(m):
    apart = jnp.append(m["a"], m["b"]) - CENTER.astype("f4")
    return 0.5 * apart @ CURVATURE.astype("f4") @ apart


@pytest.mark.parametrize("case", sampled(CASES, ("l2_ball", "rmsprop")))
def test_steps_end_at_the_minimum_in_the_set(case):
    """The model ends there, and what is evaluated too; both are in the set."""
    name, rule = case
    onto, bounds, inside = SETS[name]
    model = {"a": jnp.full(3, 0.1), "b": jnp.array(0.1)}
    opt = sl.Optimizer(RULES[rule].project(onto), model)
    model, opt, _ = sl.train_step(of_tree).scan(model, opt, length=1500)
    expected = minimum(bounds, inside)
    for m in (model, opt.eval_params(model)):
        np.testing.assert_allclose(as_vector(m), as_vector(onto(m)), atol=1e-5)
        assert loss(as_vector(m)) == pytest.approx(expected, abs=2e-3 * (1 + abs(expected)))


MATRICES = {
    "psd": P.psd(),
    "l1_sphere": P.l1_sphere(2.0),
    "sphere": P.sphere(),
    "l2_sphere": P.l2_sphere(2.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MATRICES)
def test_nothing_of_the_gradient_is_along_the_set_at_the_end(name):
    onto = MATRICES[name]
    center = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3)), jnp.float32)
    weights = jnp.linspace(0.5, 2, 9).reshape(3, 3)
    value = lambda x: jnp.sum(weights * (x - center) ** 2)  # noqa: E731
    for tx in (sl.adam(RATE), sl.rmsprop(RATE), sl.lion(RATE)):
        model = onto(jnp.eye(3) + 0.3)
        model, *_ = sl.train_step(value).scan(
            model, sl.Optimizer(tx.project(onto), model), length=1500
        )
        along = onto.along(model, -jax.grad(value)(model))
        assert jnp.linalg.norm(along) < 5e-3 * jnp.linalg.norm(jax.grad(value)(model))


MINIMIZERS = {
    "sgd": lambda onto, bounds: sl.sgd(0.02).project(onto),
    "adam": lambda onto, bounds: sl.adam(RATE).project(onto),
    "lbfgs": lambda onto, bounds: sl.lbfgs(bounds=bounds),
    "zoom": lambda onto, bounds: (sl.sgd(1.0) | sl.ScaleByZoomLinesearch(30)).project(onto),
}
BOXES = {name for name, (_, bounds, inside) in SETS.items() if bounds and inside is None}
MINIMIZED = [(n, how) for how in MINIMIZERS for n in SETS if how != "lbfgs" or n in BOXES]


@pytest.mark.parametrize("case", sampled(MINIMIZED))
def test_a_fit_in_a_set_ends_as_converged_at_the_minimum(case):
    name, how = case
    onto, bounds, inside = SETS[name]
    model = {"a": jnp.full(3, 0.1), "b": jnp.array(0.1)}
    found = sl.minimize(of_tree, MINIMIZERS[how](onto, bounds), model, max_steps=1500)
    assert found.converged, found.reason
    np.testing.assert_allclose(found.loss, minimum(bounds, inside), rtol=1e-3)


stiefel, psd = sl.projections.stiefel(), sl.projections.psd()


def random(*shape, dtype=np.float32, seed=0):
    x = np.random.default_rng(seed).standard_normal((*shape, 2))
    return jnp.asarray((x @ np.array([1, 1j]) if dtype == np.complex64 else x[..., 0]), dtype)


DTYPES = slow_except([np.float32, np.complex64], np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_orthonormal_columns_are_the_polar_factor(dtype):
    x = {"tall": random(5, 3, dtype=dtype), "stack": random(2, 3, 4, dtype=dtype)}
    p = stiefel(x)
    np.testing.assert_allclose(p["tall"], scipy.linalg.polar(x["tall"])[0], atol=2e-6)
    for one, own in zip(x["stack"], p["stack"], strict=True):
        np.testing.assert_allclose(own, scipy.linalg.polar(one, side="left")[0], atol=2e-6)
        own = np.asarray(own)  # a GPU would multiply with 11 bits
        np.testing.assert_allclose(own @ own.conj().T, np.eye(3), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_semidefinite_matrices_have_no_negative_eigenvalues(dtype):
    x = random(2, 4, 4, dtype=dtype)
    p = np.asarray(psd(x))
    for one, own in zip(np.asarray(x), p, strict=True):
        values, vectors = np.linalg.eigh((one + one.conj().T) / 2)
        expected = (vectors * np.maximum(values, 0)) @ vectors.conj().T
        np.testing.assert_allclose(own, expected, atol=3e-6)
        np.testing.assert_allclose(psd(jnp.asarray(own)), own, atol=3e-6)


def test_a_half_precision_matrix_is_projected_in_float32():
    x = random(6, 2)
    p = stiefel(x.astype(jnp.bfloat16))
    assert p.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(p, np.float32), stiefel(x), atol=0.02)


DRAWN = np.random.default_rng(0)
SYMMETRIC = np.cov(DRAWN.standard_normal((8, 20)) * np.arange(1, 9)[:, None])
COLUMNS = DRAWN.standard_normal((6, 4))
BEFORE = DRAWN.standard_normal((4, 10))
ROTATION = np.linalg.qr(DRAWN.standard_normal((4, 4)))[0]
ROTATION[:, 0] *= np.linalg.det(ROTATION)
AFTER = ROTATION @ BEFORE + 0.1 * DRAWN.standard_normal((4, 10))
PLANE = DRAWN.standard_normal(5)
FAR = DRAWN.standard_normal(5)
WEIGHTS = np.array([3.0, 2.0, 1.0])

OTHERS = ("eigenvector", "components", "columns", "rotation")
SMOOTH = {
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
        "plane": square((m["plane"] - FAR.astype("f4")) * np.arange(1, 6).astype("f4")),
    }


def minima():
    """Their closed forms. Pymanopt 2.2.1 finds the same values, to 1e-10."""
    values = np.linalg.eigvalsh(SYMMETRIC / 10)[::-1]
    singular = np.linalg.svd(AFTER @ BEFORE.T, compute_uv=False)
    scales = np.arange(1.0, 6.0) ** 2
    distance = 2 - PLANE @ FAR
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


@pytest.mark.slow
@pytest.mark.parametrize("tx", [sl.sgd(RATE, momentum=0.9), sl.adam(RATE)], ids=["sgd", "adam"])
def test_minima_on_smooth_sets_are_those_of_pymanopt(tx):
    for name, onto in SMOOTH.items():
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


def test_a_line_search_knows_a_smooth_set():
    tx = (sl.sgd(1.0, momentum=0.5) | sl.ScaleByBacktrackingLinesearch(30)).project(P.sphere())
    square, model = jnp.asarray(SYMMETRIC / 10, jnp.float32), start()["eigenvector"]
    found = sl.minimize(lambda x: -x @ square @ x, tx, model, max_steps=100)
    np.testing.assert_allclose(found.loss, minima()["eigenvector"], rtol=1e-5)


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


ONTO = {
    "sphere": projections.sphere(),
    "columns": projections.sphere(axis=-2),
    "l2_sphere": projections.l2_sphere(3.0),
    "stiefel": projections.stiefel(),
    "hyperplane": projections.hyperplane(jnp.linspace(-1, 2, 15).reshape(5, 3), 0.5),
    "vector": projections.vector(jnp.linspace(-1, 2, 15).reshape(5, 3)),
}


@pytest.mark.parametrize("name", slow_except(ONTO, "sphere"))
def test_tangents_are_the_derivatives_of_the_projection(name):
    """At a point of a smooth set, the derivative of the nearest point is the tangent part."""
    onto, step = ONTO[name], 1e-3

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
