"""Ascent on purpose: `.maximize()` is descent of the negative loss, for every transform."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import assert_same_bits
from table import GRADIENT_ROWS, rows

model = {"w": jnp.linspace(-1, 1, 6).reshape(2, 3), "b": jnp.linspace(0.5, 1, 3)}
is_matrix = sl.where.ndim(2)


def loss_fn(params):
    return sum(jnp.sum(0.5 * x + 0.05 * x**2) for x in jax.tree.leaves(params))


def three_steps(tx, sign):
    """Steps along or against the loss, given all that a step may know."""

    def value_fn(params):
        return sign * loss_fn(params)

    def body(carry, _):
        params, opt = carry
        value, grads = jax.value_and_grad(value_fn)(params)
        params, opt = opt.step(params, grads, value=value, grad=grads, value_fn=value_fn)
        return (params, opt), params

    run = jax.jit(lambda opt: jax.lax.scan(body, (model, opt), None, 3))
    (_, opt), path = run(sl.Optimizer(tx, model))
    return path, opt


@pytest.mark.filterwarnings("ignore:A step of this optimizer ascends")
@rows(2, GRADIENT_ROWS, everyday=("ScaleByAdam", "Average", "EveryK, skip", "ScaleByPolyak"))
def test_to_maximize_is_to_minimize_the_negative(row):
    expected, descended = three_steps(row.tx, -1)
    path, opt = three_steps(row.tx.maximize(), 1)
    # Not the same bits: XLA fuses the negation, and contracts other products and sums.
    found, known = (
        jax.tree.leaves(tree) for tree in ((path, opt.state), (expected, descended.state))
    )
    for ours, theirs in zip(found, known, strict=True):
        assert ours.dtype == theirs.dtype
        if jnp.issubdtype(ours.dtype, jnp.inexact):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        else:
            assert_same_bits(ours, theirs)


def saddle(model):
    return 0.5 * jnp.sum((model["w"] - 1) ** 2) - 0.5 * jnp.sum((model["b"] - 2) ** 2)


@pytest.mark.parametrize(
    "tx",
    [
        sl.sgd(0.1).partition({sl.where.path("b"): sl.sgd(0.1).maximize()}),
        sl.partition({"min": sl.sgd(0.1), "max": sl.sgd(0.1).maximize()}, {"w": "min", "b": "max"}),
        sl.sgd(0.1).only(sl.where.path("w")) | sl.Identity(),
        pytest.param(
            sl.ClipByGlobalNorm(100.0)
            | sl.sgd(0.1).partition({sl.where.path("b"): sl.sgd(0.1).maximize().every_k(1)}),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["selector", "labels", "only", "chain"],
)
def test_groups_may_ascend_without_a_warning(tx):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt = sl.Optimizer(tx, model)
        params, _, _ = sl.train_step(saddle, donate=False).scan(model, opt, length=100)
    np.testing.assert_allclose(params["w"], 1, atol=1e-3)
    if "only" not in repr(tx):
        np.testing.assert_allclose(params["b"], 2, atol=1e-3)


@pytest.mark.slow
def test_other_wrappers_may_be_outside():
    def run(loss_fn, tx):
        step, opt, params = sl.train_step(loss_fn), sl.Optimizer(tx, model), model
        for _ in range(3):
            params, opt, _ = step(params, opt)
        return params

    for wrap in (
        lambda tx: tx.scale_loss(),
        lambda tx: tx.every_k(2),
        lambda tx: tx.lookahead(2, 0.5),
        lambda tx: tx.store("int8"),
        lambda tx: tx.write("master"),
    ):
        ascended = run(saddle, wrap(sl.adam(0.1).maximize()))
        assert_same_bits(ascended, run(lambda model: -saddle(model), wrap(sl.adam(0.1))))


@pytest.mark.slow
def test_an_augmented_lagrangian_takes_the_steps_of_cooper():
    """The minimum of x² for x ≥ 1, with c = 1 and both rates 0.1, as in Cooper 1.0.1."""

    @sl.train_step
    def step(model):
        active = jax.nn.relu(model["multiplier"] + 1 - model["x"])
        return model["x"] ** 2 + (active**2 - model["multiplier"] ** 2) / 2

    ascent = sl.sgd(0.1).maximize().project(sl.projections.non_negative())
    tx = sl.sgd(0.1).partition({sl.where.path("multiplier"): ascent})
    model = {"x": jnp.zeros(()), "multiplier": jnp.zeros(())}
    opt, path = sl.Optimizer(tx, model), []
    for _ in range(300):
        model, opt, _ = step(model, opt)
        path.append((float(model["x"]), float(model["multiplier"])))
    np.testing.assert_allclose(path[:3], [(0.1, 0.1), (0.18, 0.19), (0.245, 0.272)], atol=1e-6)
    np.testing.assert_allclose(path[-1], (1.0, 2.0), atol=1e-4)
