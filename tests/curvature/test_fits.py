"""Fits: where they converge, robust losses and the uncertainty of parameters, against SciPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from benchmarks.fits.problems import PROBLEMS, RUNS, start_of

import slalom as sl
from helpers import lenient, sampled


@functools.cache
def ended(rule, name):
    """The results of a rule from all starts of a problem."""
    residuals = PROBLEMS[name].residuals
    if rule == "lm":
        tx = sl.levenberg_marquardt()
        loss_fn = sl.LeastSquares(lambda x: residuals(x), per_example=False)
    else:
        tx, loss_fn = sl.lbfgs(), lambda x: jnp.sum(residuals(x) ** 2) / 2
    solve = jax.jit(lambda x: sl.minimize(loss_fn, tx, x, max_steps=600))
    with lenient():  # the problems are written as SciPy's users write them
        return {f: solve(start_of(name, f)) for problem, f in RUNS if problem == name}


# Line searches stand still in the valleys of the first three.
BY_LBFGS = ("meyer", "powell_badly_scaled", "watson_6", "osborne_2", "wood")
SAMPLE = [("lm", *run) for run in RUNS] + [("lbfgs", *run) for run in RUNS if run[0] in BY_LBFGS]


@pytest.mark.parametrize("run", sampled(SAMPLE), ids=lambda run: "-".join(map(str, run)))
def test_it_says_converged_at_minima_and_nowhere_else(x64, run):
    rule, name, factor = run
    found = ended(rule, name)[factor]
    with lenient():
        squares = float(np.sum(np.asarray(PROBLEMS[name].residuals(found.model)) ** 2))
    minima = np.array(PROBLEMS[name].minima)
    at_minimum = np.any(np.abs(squares - minima) <= 1e-5 * minima + 1e-12)
    assert bool(found.converged) == at_minimum, (found, squares)


def decay(x, a, b, c):
    return a * np.exp(-b * x) + c


X = np.linspace(0, 4, 30)
SIGMA = np.where(np.arange(30) % 3, 0.05, 0.2)
Y = decay(X, 2.5, 1.3, 0.5) + SIGMA * np.random.default_rng(0).normal(size=30)
Y[[4, 20]] += 3
START = {"a": 1.0, "b": 1.0, "c": 0.0}


def fit_residual(p, x, y):
    return p["a"] * jnp.exp(-p["b"] * x) + p["c"] - y


def fitted(loss_fn, **options):
    start = jax.tree.map(jnp.asarray, START)
    options.update(dict.fromkeys(("ftol", "xtol", "gtol"), 1e-11))  # SciPy's are tight too
    found = sl.minimize(loss_fn, sl.levenberg_marquardt(), start, X, Y, max_steps=200, **options)
    assert found.converged
    return found


@pytest.mark.parametrize("absolute", [False, True])
def test_covariances_and_errors_are_those_of_curve_fit(x64, absolute):
    options = {"absolute_sigma": absolute, "ftol": 1e-12, "xtol": 1e-12}
    expected, known = scipy.optimize.curve_fit(
        decay, X, Y, list(START.values()), sigma=SIGMA, **options
    )
    loss_fn = sl.LeastSquares(fit_residual, weights=3.0)
    omega = jnp.asarray(1 / SIGMA**2)
    found = fitted(loss_fn, example_weights=omega)
    np.testing.assert_allclose(list(found.model.values()), expected, rtol=1e-5)
    options = {"example_weights": omega, "absolute_sigma": absolute}
    np.testing.assert_allclose(found.covariance(loss_fn, X, Y, **options), known, rtol=1e-4)
    errors = found.standard_errors(loss_fn, X, Y, **options)
    np.testing.assert_allclose(list(errors.values()), np.sqrt(np.diag(known)), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["soft_l1", "huber", "cauchy", "arctan"])
def test_robust_losses_are_those_of_scipy(x64, loss):
    known = scipy.optimize.least_squares(
        lambda p: decay(X, *p) - Y,
        list(START.values()),
        loss=loss,
        f_scale=0.2,
        xtol=1e-12,
        ftol=1e-12,
        gtol=1e-12,
    )
    found = fitted(sl.LeastSquares(fit_residual, loss=loss, scale=0.2))
    np.testing.assert_allclose(list(found.model.values()), known.x, rtol=1e-5)
    np.testing.assert_allclose(found.loss * len(X) / 2, known.cost, rtol=1e-8)


FORMS = {
    "default": {},
    "columns": {"scaling": "columns"},
    "chunks": {"chunk": 7},
    "rows of chunks": {"chunk": 7, "form": "residuals"},
    "qr": {"solver": "qr", "form": "residuals"},
}


@pytest.mark.parametrize("form", sampled(FORMS))
def test_bounded_fits_are_those_of_scipy(x64, form):
    lower, upper = [2.0, 0.0, 0.6], [np.inf, 1.1, np.inf]
    start = [2.0, 1.0, 0.7]
    tight = dict.fromkeys(("xtol", "ftol", "gtol"), 1e-12)
    known = scipy.optimize.least_squares(
        lambda p: decay(X, *p) - Y, start, bounds=(lower, upper), **tight
    )
    lower, upper, start = (dict(zip("abc", x, strict=True)) for x in (lower, upper, start))
    tx = sl.levenberg_marquardt(**FORMS[form], bounds=(lower, upper))
    start = jax.tree.map(jnp.asarray, start)
    found = sl.minimize(sl.LeastSquares(fit_residual), tx, start, X, Y, max_steps=100)
    assert found.converged
    np.testing.assert_allclose(list(found.model.values()), known.x, rtol=1e-5)
    assert found.model["b"] == 1.1, "a bound is reached, not approached"
