"""What transforms report of their last step, in `opt.metrics`."""

import json
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import assert_same_bits, at, compiled_step, gradients, nested_dict

MODEL = nested_dict(jax.random.key(0))
GRADS = gradients(MODEL, 6)


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree)))


def test_metrics_are_a_flat_dict_that_takes_suffixes():
    opt = sl.Optimizer((sl.Clip(1.0) | sl.sgd(0.1)).record(), MODEL)
    metrics = opt.metrics
    assert isinstance(metrics, Mapping)
    assert list(metrics) == [
        "record.grad_norm",
        "record.update_norm",
        "record.param_norm",
        "record.lost_updates",
        "record.clip.max_delta",
        "record.scale_by_learning_rate.learning_rate",
    ]
    assert metrics["learning_rate"] == metrics["record.scale_by_learning_rate.learning_rate"]
    assert "grad_norm" in metrics
    assert "loss" not in metrics
    assert metrics.get("loss", 3) == 3
    with pytest.raises(KeyError, match=r"'norm' is not known. Candidates: 'record.grad_norm'"):
        metrics["norm"]

    # Those of twins are told apart.
    opt = sl.Optimizer(sl.Clip(1.0).record() | sl.sgd(0.1).record(), MODEL)
    assert {"record.grad_norm", "record_2.grad_norm"} <= set(opt.metrics)
    with pytest.raises(KeyError, match=r"'grad_norm' is ambiguous. Candidates: 'record.grad"):
        opt.metrics["grad_norm"]
    # Most transforms have nothing to report.
    metrics = sl.Optimizer(sl.adamw(0.1), MODEL).metrics
    assert metrics == {}
    with pytest.raises(KeyError, match=r"tx\.record\(\)"):
        metrics["grad_norm"]


def test_metrics_outlive_donation_and_are_plain_numbers_for_loggers():
    model = jax.tree.map(jnp.copy, MODEL)
    opt = sl.Optimizer(sl.sgd(0.1).record().lookahead(2, 0.5), model)
    step = sl.train_step(lambda model: sum(jnp.sum(x**2) for x in jax.tree.leaves(model)))
    evaluated, logged = opt.eval_params(model), []
    for _ in range(3):
        model, opt, _ = step(model, opt)
        logged.append(opt.metrics)
    assert all(float(metrics["grad_norm"]) > 0 for metrics in logged)
    assert_same_bits(evaluated, MODEL)
    opt = sl.Optimizer(sl.sgd(0.1).scale_loss(), model)
    before = opt.loss_scale
    step(model, opt)
    assert float(before) == 2.0**15
    with pytest.raises(ValueError, match="donated"):
        _ = opt.loss_scale

    params = jnp.zeros(2)
    opt = sl.Optimizer(sl.adam(0.1).record().if_finite(), params)
    _, opt = opt.step(params, jnp.ones(2))
    logged = json.loads(json.dumps(opt.metrics.to_dict() | opt.hyperparams.to_dict()))
    assert logged["if_finite.record.scale_by_learning_rate.learning_rate"] == 0.1
    assert logged["if_finite.last_finite"] is True


def test_record_measures_what_comes_in_and_goes_out_and_measures_may_be_trees():
    tx = (sl.ClipByGlobalNorm(0.5) | sl.sgd(0.1)).record()
    stepped, opt = sl.Optimizer(tx, MODEL).step(MODEL, at(GRADS, 0))
    np.testing.assert_allclose(opt.metrics["grad_norm"], norm(at(GRADS, 0)), rtol=1e-6)
    np.testing.assert_allclose(opt.metrics["update_norm"], 0.05, rtol=1e-6)
    np.testing.assert_allclose(opt.metrics["param_norm"], norm(stepped), rtol=1e-6)
    # Also updates that rounding swallows.
    model = jnp.ones(4, jnp.bfloat16)
    for tx in (sl.sgd(1e-6), sl.sgd(1e-6) | sl.Identity().when(lambda *_: jnp.bool_(False))):
        opt = sl.Optimizer(tx.record(), model)
        for _, after in (opt.step(model, model), opt.update(model, model)):
            np.testing.assert_allclose(after.metrics["update_norm"], 2e-6, rtol=1e-5)
            assert after.metrics["lost_updates"] == 1

    tx = sl.Monitor({"long": too_long, "parts": lambda u: {"w": jax.tree.leaves(u)[0]}})
    opt = sl.Optimizer(tx | sl.sgd(0.1), MODEL)
    _, opt = opt.step(MODEL, at(GRADS, 0))
    assert opt.metrics["monitor.long"].dtype == bool
    assert bool(opt.metrics["long"]) == (norm(at(GRADS, 0)) > 2)
    np.testing.assert_array_equal(opt.metrics["monitor.parts.w"], jax.tree.leaves(at(GRADS, 0))[0])


@pytest.mark.slow
def test_record_tells_the_hyperparameters_as_used_and_nothing_of_idle_steps():
    halving = sl.schedules.piecewise_constant(1.0, {1: 0.5, 2: 0.5})
    opt = sl.Optimizer(sl.sgd(halving).record(), MODEL)
    model, used = MODEL, []
    for i in range(3):
        model, opt = opt.step(model, at(GRADS, i))
        used.append(float(opt.metrics["learning_rate"]))
    assert used == [1.0, 0.5, 0.25]
    assert opt.hyperparams["learning_rate"] == 0.25

    model = {"w": jnp.ones(1 << 16)}
    paced = (sl.Clip(1.0) | sl.adam(0.1).every_k(2)).record()
    _, opt = sl.Optimizer(paced, model).step(model, model)
    assert opt.metrics["update_norm"] == 0
    # XLA keeps the updates for their norm, and what they are the learning rate's multiple of.
    for tx in (sl.adam(0.1).record(), paced):
        memory = compiled_step(tx, model).memory_analysis()
        assert memory.temp_size_in_bytes <= 2.01 * model["w"].nbytes

    params, huge = jnp.zeros(2), jnp.full(2, 1e20)
    plain = sl.Optimizer(sl.sgd(1.0).if_finite(check="both"), params)
    recorded = sl.Optimizer(sl.sgd(1.0).record().if_finite(check="both"), params)
    outside = sl.Optimizer(sl.sgd(1.0).if_finite(check="both").record(), params)
    expected, _ = plain.step(params, huge)
    for opt in (recorded, outside):
        stepped, _ = opt.step(params, huge)
        assert stepped.tolist() == expected.tolist() != params.tolist()


def too_long(updates):
    return sl.tree.global_norm(updates) > 2.0


def test_monitors_measure_with_averages_also_in_a_scan():
    measures = {
        "norm": sl.tree.global_norm,
        "ema": sl.MeasureWithEma(sl.tree.global_norm, 0.5),
        "plain": sl.MeasureWithEma(sl.tree.global_norm, 0.5, debias=False),
        # The share of the true ones.
        "share": sl.MeasureWithEma(too_long, 0.5),
    }

    def body(carry, grads):
        model, opt = carry
        model, opt = opt.step(model, grads)
        return (model, opt), opt.metrics

    start = MODEL, sl.Optimizer(sl.Monitor(measures) | sl.sgd(0.1), MODEL)
    (_, opt), history = jax.jit(lambda: jax.lax.scan(body, start, GRADS))()
    norms = np.array([norm(at(GRADS, i)) for i in range(6)])
    weights = 0.5 ** np.arange(6, 0, -1)
    expected = {
        "norm": norms[-1],
        "ema": np.average(norms, weights=weights),
        "plain": norms @ weights,
        "share": np.average(norms > 2, weights=weights),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(opt.metrics[name], value, rtol=2e-6)
        assert history[name][-1] == opt.metrics[name]
    np.testing.assert_allclose(history["norm"], norms, rtol=1e-6)


@pytest.mark.parametrize("make", [lambda: sl.Snapshot("n", 3), lambda: sl.Monitor({"n": 3})])
def test_a_measure_that_is_no_function_is_refused(make):
    with pytest.raises(TypeError):
        make()


@pytest.mark.slow
def test_numbers_are_compiled_once_for_all_steps():
    calls = []

    def rate(step):
        calls.append(step)
        return 0.1 / (step.astype(jnp.float32) + 1)

    opt = sl.Optimizer(sl.adam(rate), jnp.zeros(2))
    opt.hyperparams["learning_rate"]
    traced = len(calls)
    for _ in range(3):
        _, opt = opt.step(jnp.zeros(2), jnp.ones(2))
    after_steps = len(calls)
    assert float(opt.hyperparams["learning_rate"]) == pytest.approx(0.025)
    assert (traced, len(calls)) == (1, after_steps)
