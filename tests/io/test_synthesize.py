"""Power-function averages, and averages of other widths made from checkpoints."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from slalom.schedules.averages import exponent, synthesis_weights

power = sl.schedules.power_average


def test_weights_are_those_of_the_authors_code_and_powers_of_the_step():
    expected = [16.972199, 6.937204, 3.557869]
    np.testing.assert_allclose([exponent(s) for s in (0.05, 0.1, 0.15)], expected, atol=5e-7)
    # Karras et al., edm2 `training/phema.py`, divided by their sum.
    snapshots = [(50.0, 0.05), (50.0, 0.1), (100.0, 0.05), (100.0, 0.1)]
    weights = synthesis_weights(snapshots, 100.0, 0.075)
    np.testing.assert_allclose(weights, [0.000136, -0.002427, 0.342969, 0.659322], atol=5e-7)
    # An average that was tracked is made of itself.
    weights = synthesis_weights(snapshots, 50.0, 0.1)
    np.testing.assert_allclose(weights, [0, 1, 0, 0], rtol=0, atol=1e-9)

    # The golden values of the authors' update.
    tx = sl.sgd(1.0).average(power(0.1))
    model = {"w": jnp.zeros(())}
    opt = sl.Optimizer(tx, model)
    for change in (1.0, 1.0, 2.0):
        model, opt = opt.step(model, {"w": jnp.array(-change)})
    np.testing.assert_allclose(opt.eval_params(model)["w"], 3.919787, rtol=2e-7)
    # Far into a run, where 1 − s(n) has lost digits.
    age = jnp.array(10**6)
    exact = -np.expm1((exponent(0.1) + 1) * np.log1p(-1e-6))
    np.testing.assert_allclose(power(0.1).newest_weight(age), exact, rtol=1e-6)


MODEL = {"w": jnp.zeros(3), "b": jnp.zeros((2, 2), jnp.bfloat16)}


def train(directory, tx, steps=64, every=8, model=MODEL):
    opt = sl.Optimizer(tx, model)
    snapshots = sl.checkpoint.Rolling(directory, keep=None)
    grads = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), model)
    for n in range(1, steps + 1):
        # Parameters that rise with the logarithm of the step.
        model, opt = opt.step(model, grads)
        if n % every == 0:
            snapshots.save(model=model, opt=opt)
    return model, opt


@pytest.mark.slow
def test_a_width_that_was_not_tracked_is_made_from_checkpoints(tmp_path):
    rate = sl.schedules.exponential_decay(1.0, 10, 0.5)
    tracked = sl.sgd(rate).average(power(0.1)).average(power(0.05))
    model, opt = train(tmp_path / "run", tracked)
    # The outermost average is the one to evaluate.
    alone, one = train(tmp_path / "narrow", sl.sgd(rate).average(power(0.05)))
    np.testing.assert_array_equal(opt.eval_params(model)["w"], one.eval_params(alone)["w"])
    for sigma_rel in (0.05, 0.07, 0.1):
        alone, one = train(tmp_path / str(sigma_rel), sl.sgd(rate).average(power(sigma_rel)))
        made = sl.checkpoint.synthesize(tmp_path / "run", model, sigma_rel=sigma_rel)
        expected = one.eval_params(alone)
        np.testing.assert_allclose(made["w"], expected["w"], rtol=2e-4)
        assert made["b"].dtype == jnp.bfloat16
        np.testing.assert_allclose(*map(np.float32, (made["b"], expected["b"])), rtol=0.01)
    earlier = sl.checkpoint.synthesize(tmp_path / "run", model, sigma_rel=0.1, step=32)
    alone, one = train(tmp_path / "short", sl.sgd(rate).average(power(0.1)), steps=32)
    np.testing.assert_allclose(earlier["w"], one.eval_params(alone)["w"], rtol=2e-5)


@pytest.mark.slow
def test_stored_averages_are_decoded(tmp_path):
    averaged = sl.sgd(0.1).average(power(0.1)).average(power(0.05))
    found = []
    for name, tx in (
        ("plain", averaged),
        ("stored", averaged.store({"average": "int8"}, min_size=1)),
    ):
        model, _ = train(tmp_path / name, tx, steps=16, every=4)
        found.append(sl.checkpoint.synthesize(tmp_path / name, model, sigma_rel=0.07)["w"])
    np.testing.assert_allclose(*found, rtol=0.05)


def test_a_model_may_be_one_array(tmp_path):
    tx = sl.sgd(0.1).average(power(0.1))
    model, opt = train(tmp_path, tx, steps=3, every=1, model=jnp.zeros(3))
    made = sl.checkpoint.synthesize(tmp_path, model, sigma_rel=0.1)
    np.testing.assert_allclose(made, opt.eval_params(model), rtol=1e-6)


@pytest.mark.slow
def test_a_run_may_have_more_snapshots_than_open_files(tmp_path):
    resource = pytest.importorskip("resource")  # which Windows does not have
    tx = sl.sgd(0.1).average(power(0.1)).average(power(0.05))
    model, opt = train(tmp_path, tx, steps=40, every=1)
    expected = opt.eval_params(model)["w"]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, limits[1]))
    try:
        made = sl.checkpoint.synthesize(tmp_path, model, sigma_rel=0.05)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    np.testing.assert_allclose(made["w"], expected, rtol=1e-4)
