"""Schedules in an optimizer: step n uses the value at n, and plain functions are schedules too."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import assert_same_bits, gradients, lenient, public, sampled
from slalom._core.fields.declare import hyperparameter_fields

S = sl.schedules


def rules():
    """Every rule with a hyperparameter, and one such field: the first, the second and so on."""
    for i, (name, cls) in enumerate(sorted((vars(sl) | vars(sl.contrib)).items())):
        is_rule = inspect.isclass(cls) and issubclass(cls, sl.AbstractTransform)
        if not is_rule or inspect.isabstract(cls):
            continue
        if names := [field.name for field in hyperparameter_fields(cls)]:
            field = names[i % len(names)]
            yield f"{name}.{field}"


def made_with(cls, name, value):
    """The rule with one field given; others that must be given are 0.5."""
    required = {f.name: 0.5 for f in hyperparameter_fields(cls) if f.default is dataclasses.MISSING}
    return cls(**(required | OTHERS.get(cls, {}) | {name: value}))


# What must be given besides hyperparameters.
OTHERS = {
    sl.DifferentiallyPrivateAggregate: {"key": 0},
    sl.MeasureWithEma: {"measure": sl.tree.global_norm},
    sl.contrib.QKClip: {"heads": 1, "where": {sl.where.everything(): "q:k"}, "layout": "oi"},
    sl.ScaleByBacktrackingLinesearch: {"max_backtracking_steps": 20, "slope_rtol": 0.9},
    sl.ScaleByZoomLinesearch: {"max_linesearch_steps": 20, "curv_rtol": 0.01, "slope_rtol": 0.4},
    sl.ScaleByLion: {"mode": "smooth"},
    sl.ScaleBySoap: {"precondition_frequency": 2},
    sl.ScaleByShampoo: {"precondition_frequency": 2},
    sl.contrib.ScaleBySophia: {"clip_threshold": None, "update_interval": 2},
}


PER_EXAMPLE = {
    sl.DifferentiallyPrivateAggregate,
    sl.contrib.MeasureGradientNoise,
    sl.PerExampleGlobalNormClip,
    sl.PerExampleLayerNormClip,
}

# Values from here on lie within the intervals of these fields, or have an effect; of all others
# from 0.
LEAST = {
    "ScaleByRadam.threshold": 4.0,
    "ScaleByRprop.eta_plus": 1.0,
    "ScaleByApollo.max_growth": 1.0,
    "ScaleByBacktrackingLinesearch.increase_factor": 1.0,
    "ScaleByZoomLinesearch.increase_factor": 1.0,
    "UpdateFloor.ratio": 100.0,
}

# Only ever asked at binding: a start, which the first value of a schedule gives.
STARTS = """
    ScaleByDistanceOverGradients.reps_rel ScaleByRms.initial_scale ScaleByStddev.initial_scale
    ScaleByRss.initial_accumulator_value ScaleByYogi.initial_accumulator_value
    ScaleByRprop.learning_rate ScaleByDog.init_step ScaleByDowg.init_estim_sq_dist
    ScaleByKron.preconditioner_init_scale ScaleByDAdaptAdam.estim_lr0
"""

# Fields that the loop is too short or too coarse for, by the reason.
INSENSITIVE = {
    "It changes no update: a mean that is only looked at, a tolerance for what rounding hides.": (
        "MeasureWithEma.decay MeasureGradientNoise.decay ScaleByZoomLinesearch.approx_dec_rtol"
    ),
    "RAdam never rectifies with this decay, and its degrees of freedom pass all thresholds.": (
        "ScaleByRadam.b2 ScaleByRadam.threshold"
    ),
    "The hills are concave there, so ε divides. `test_hessian_estimates.py` has others.": (
        "ScaleBySophia.b2 ScaleBySophia.gamma"
    ),
    "The estimate stays below its start.": "ScaleByProdigy.b3 ScaleByProdigy.estim_lr_coef",
    "The parameters stay where they were, so these rules choose the damping themselves.": (
        "ScaleByGaussNewton.damping ScaleByGaussNewton.momentum ScaleByLevenbergMarquardt.damping"
    ),
    "The parameters stay where they were, the updates grow less, and there is no decay.": (
        "AddDecayToInitialParams.weight_decay ScaleByApollo.max_growth "
        "ScaleByLearningRateWithCorrectedDecay.max_learning_rate"
    ),
    "The gradients are larger, and G + L than α·L.": "ScaleByCocob.eps ScaleByCocob.alpha",
    "It measures more steps before it clips.": "ZClip.threshold ZClip.decay ZClip.eps",
}


def hills(x):
    """A loss with several minima in every direction."""
    r = jnp.sqrt(jnp.sum((x - jnp.array([0.1, -0.2, 0.05])) ** 2) + 1e-6)
    return 0.5 - r / 4 + jnp.cos(3 * r) / 2


def residual(params, x):
    return jnp.tanh(x * params) - x


# All rules read their numbers in the same way.
@pytest.mark.parametrize("rule", sampled([*rules()], "ScaleByLearningRate.learning_rate"))
def test_update_n_uses_the_schedule_at_n(rule):
    # Compared with giving each step's number by hand: the same bits. The values are computed
    # without rounding.
    cls, name = public(rule.partition(".")[0]), rule.partition(".")[2]
    least = LEAST.get(rule, 0.0)
    schedule = S.linear(least + 0.75, least + 0.25, 4)
    values = schedule.values(8)
    params = jnp.array([0.1, -0.2, 0.05])
    if "layout" in {field.name for field in dataclasses.fields(cls)}:
        params = jnp.outer(jnp.array([1.0, -0.7]), params)  # it takes matrices
    grads = gradients(params, 8)
    if cls in PER_EXAMPLE:
        grads = jnp.stack([grads, -0.3 * grads], axis=1)
    scheduled = sl.Optimizer(made_with(cls, name, schedule), params)
    by_hand = constant = sl.Optimizer(made_with(cls, name, values[0]), params)
    if rule in STARTS.split():
        constant = sl.Optimizer(made_with(cls, name, 0.1), params)
    needs = scheduled.transform.needs
    differs = False
    for n in range(8):
        known = {"value": 0.5, "grad": grads[n - 1] if "grad" in needs else None}
        if "residuals" in needs:
            known["residuals"] = sl.LeastSquares(residual).on(jnp.linspace(0.5, 1, 3))
        if "max_logits" in needs:
            known["max_logits"] = jnp.array([200.0])
        if {"value_fn", "grad_fn"} & {*needs}:
            # To a line search, what it is given descends.
            known = {"value": 1.0, "grad": -0.3 * grads[n], "value_fn": hills}
        assert scheduled.hyperparams[name] == values[n]
        by_hand = by_hand.with_hyperparams({name: values[n]})
        updates, scheduled = scheduled.update(params, grads[n], **known)
        same, by_hand = by_hand.update(params, grads[n], **known)
        # XLA may contract its sum of two products of scalars to a fused multiply-add or not.
        if rule == "ScaleByNovograd.b2":
            np.testing.assert_allclose(updates, same, rtol=1e-6)
        else:
            assert_same_bits(updates, same)
        other, constant = constant.update(params, grads[n], **known)
        differs |= bool(np.any(updates != other))
    # Without this a field that has no effect would pass.
    assert differs or rule in " ".join(INSENSITIVE.values()).split()


def test_a_function_is_a_schedule_that_must_be_told_the_time():
    tx = sl.sgd(S.linear(1.0, 0.0, 4))
    g = jnp.ones(())
    with pytest.raises(TypeError, match=r"ScaleByLearningRate\.learning_rate.*Context\(step=n\)"):
        tx.update(g, tx.init(g), g)
    updates, _ = tx.update(g, tx.init(g), g, sl.Context(step=1))
    assert float(updates) == -0.75

    opt = sl.Optimizer(sl.sgd(lambda n: 1 / (n + 1)), jnp.ones(()))
    for rate in (1, 1 / 2, 1 / 3):
        np.testing.assert_allclose(opt.hyperparams["learning_rate"], rate, rtol=1e-7)
        with lenient():
            _, opt = opt.step(jnp.ones(()), jnp.ones(()))
    # What it returns becomes a float.
    for value in (1, 0.5, np.float32(0.5), True):
        tx = sl.sgd(lambda n, value=value: value)
        rate = sl.Optimizer(tx, jnp.ones(())).hyperparams["learning_rate"]
        assert (rate.dtype, rate.weak_type, float(rate)) == (jnp.float32, False, value)


@pytest.mark.slow
def test_a_schedule_of_another_library_is_a_schedule():
    theirs = optax.cosine_decay_schedule(0.3, 10)
    tx = sl.sgd(theirs)
    with lenient():
        opt = sl.Optimizer(tx, jnp.ones(()))
        _, used = jax.lax.scan(lambda opt, g: opt.update(g, g)[::-1], opt, jnp.ones(12))
    np.testing.assert_allclose(-used, S.cosine_decay(0.3, 10).values(12), rtol=1e-6, atol=1e-7)
