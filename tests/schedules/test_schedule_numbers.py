"""The clock of schedules, and their numbers: refused, printed, traced and differentiated."""

import dataclasses
import functools
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_schedules import ALL, CYCLES, values_of

import slalom as sl
from helpers import assert_same_bits, gradients, kind_of, lenient, public, sampled
from slalom._core.fields.schedule import hyperparameter_fields

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


# XLA may contract their sums of two products to fused multiply-adds or not, and bases that turn
# amplify what that rounds.
ROUNDED = {"ScaleByNovograd.b2": 1e-6, "ScaleBySoap.eps": 1e-5}


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
            fit = sl.LeastSquares(lambda params, x: jnp.tanh(x * params) - x)
            known["residuals"] = fit.on(jnp.linspace(0.5, 1, 3))
        if "max_logits" in needs:
            known["max_logits"] = jnp.array([200.0])
        if {"value_fn", "grad_fn"} & {*needs}:
            # To a line search, what it is given descends.
            known = {"value": 1.0, "grad": -0.3 * grads[n], "value_fn": hills}
        assert scheduled.hyperparams[name] == values[n]
        by_hand = by_hand.with_hyperparams({name: values[n]})
        updates, scheduled = scheduled.update(params, grads[n], **known)
        same, by_hand = by_hand.update(params, grads[n], **known)
        if rule in ROUNDED:
            np.testing.assert_allclose(updates, same, rtol=ROUNDED[rule])
        else:
            assert_same_bits(updates, same)
        other, constant = constant.update(params, grads[n], **known)
        differs |= bool(np.any(updates != other))
    # Without this a field that has no effect would pass.
    assert differs or rule in " ".join(INSENSITIVE.values()).split()


def test_functions_are_schedules_and_schedules_print_as_the_code_that_makes_them():
    tx = sl.sgd(S.linear(1.0, 0.0, 4))
    g = jnp.ones(())
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

    for name, schedule in ALL.items():
        again = eval(repr(schedule), {"sl": sl})
        assert again == schedule, name
        assert repr(again) == repr(schedule)
        assert jax.tree.structure(again) == jax.tree.structure(schedule), name
        assert jax.tree.leaves(again) == jax.tree.leaves(schedule), name
    tx = sl.chain(*map(sl.ScaleBySchedule, ALL.values()))
    assert repr(sl.Optimizer(tx, jnp.ones(())).transform) == repr(tx)


@pytest.mark.slow
def test_schedules_of_other_libraries_and_numbers_inside_are_changed_by_path():
    theirs = optax.cosine_decay_schedule(0.3, 10)
    tx = sl.sgd(theirs)
    with lenient():
        opt = sl.Optimizer(tx, jnp.ones(()))
        _, used = jax.lax.scan(lambda opt, g: opt.update(g, g)[::-1], opt, jnp.ones(12))
    np.testing.assert_allclose(-used, S.cosine_decay(0.3, 10).values(12), rtol=1e-6, atol=1e-7)

    used, after = {}, {}
    for schedule, path, value, expected in CHANGES:
        opt = sl.Optimizer(sl.sgd(schedule), jnp.ones(()))
        changed = opt.with_hyperparams({path: value})
        assert kind_of(changed) == kind_of(opt), path  # so no program is traced again
        used[path] = changed.transform[sl.ScaleByLearningRate].learning_rate
        after[path] = expected
    used, after = values_of(used, 60), values_of(after, 60)
    for path in used:
        np.testing.assert_allclose(used[path], after[path], rtol=1e-6, atol=1e-7, err_msg=path)


ONE, STABLE = S.constant(1.0), functools.partial(S.warmup_stable_decay, 0.0, 1.0, 5)
# Messages, as expressions, and what they refuse.
BAD = {
    r"linear\.transition_begin.*got -1": lambda: S.linear(1.0, 0.0, 5, transition_begin=-1),
    r"cosine_decay\.decay_steps.*got 0": lambda: S.cosine_decay(1.0, 0),
    r"cosine_decay\.decay_steps.*got -3": lambda: S.cosine_decay(1.0, -3),
    r"cosine_decay\.decay_steps must be less than 2\*\*31.*got 10000000000": (
        lambda: S.cosine_decay(1.0, 10**10)
    ),
    r"cosine_decay\.exponent.*got 0": lambda: S.cosine_decay(1.0, 10, exponent=0.0),
    r"decay_steps.*warmup_steps=10.*got 10": lambda: S.warmup_cosine_decay(0.0, 1.0, 10, 10),
    r"warmup_cosine_decay.*warmup_steps.*got -1": lambda: S.warmup_cosine_decay(0.0, 1.0, -1, 10),
    r"increasing.*\[5, 2\]": lambda: S.join([ONE] * 3, [5, 2]),
    r"increasing.*\[5, 5\]": lambda: S.join([ONE] * 3, [5, 5]),
    r"non-negative.*\[-1\]": lambda: S.join([ONE] * 2, [-1]),
    r"boundaries must be .*increasing.*\[9, 5\]": lambda: ONE.then(0.5, at=9).then(0.1, at=5),
    r"3 schedules and 1 boundaries": lambda: S.join([ONE] * 3, [5]),
    r"0 schedules": lambda: S.join([], []),
    r"polynomial\.transition_steps.*got 0": lambda: S.polynomial(1.0, 0.0, 2.0, 0),
    r"polynomial\.power.*got 0": lambda: S.polynomial(1.0, 0.0, 0.0, 9),
    r"exponential_decay\.transition_steps.*got 0": lambda: S.exponential_decay(1.0, 0, 0.5),
    r"exponential_decay\.decay_rate.*got 0": lambda: S.exponential_decay(1.0, 9, 0.0),
    r"each step of boundaries_and_scales.*got -3": lambda: S.piecewise_constant(1.0, {-3: 0.5}),
    r"boundaries_and_scales\[3\].*got -0\.5": (
        lambda: S.piecewise_interpolate("linear", 1.0, {5: 0.5, 3: -0.5})
    ),
    r"interpolate_type must be 'linear' or 'cosine', got 'cubic'": (
        lambda: S.piecewise_interpolate("cubic", 1.0)
    ),
    r"warmup_constant\.warmup_steps.*got -1": lambda: S.warmup_constant(0.0, 1.0, -1),
    r"warmup_exponential_decay\.transition_steps.*got 0": (
        lambda: S.warmup_exponential_decay(0.0, 1.0, 5, 0, 0.5)
    ),
    r"linear_onecycle\.transition_steps.*got 0": lambda: S.linear_onecycle(0, 1.0),
    r"cosine_onecycle\.transition_steps.*got -2": lambda: S.cosine_onecycle(-2, 1.0),
    r"pct_start.*got 1\.5": lambda: S.cosine_onecycle(9, 1.0, 1.5),
    r"pct_final must be at least pct_start=0\.5, got 0\.4": (
        lambda: S.linear_onecycle(9, 1.0, 0.5, 0.4)
    ),
    r"div_factor.*got 0": lambda: S.linear_onecycle(9, 1.0, div_factor=0.0),
    r"at least one cycle": lambda: S.sgdr([]),
    r"cosine_kwargs\[1\]: .*warmup_steps=5.*got 5": (
        lambda: S.sgdr([CYCLES[0], CYCLES[0] | {"decay_steps": 5}])
    ),
    r"stable_steps.*got -1": lambda: STABLE(-1, 9),
    r"warmup_stable_decay\.decay_steps.*got 0": lambda: STABLE(5, 0),
    r"decay_type must be 'linear', 'cosine' or 'sqrt', got 'exp'": (
        lambda: STABLE(5, 5, decay_type="exp")
    ),
    r"timescale.*got 0": lambda: S.inverse_sqrt(0.0, 1.0, 5, timescale=0),
    r"symbol must be '\+', '-', '\*' or '/', got '%'": (lambda: S.CombinedSchedule("%", 1.0, ONE)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_refused(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


NO_NUMBERS, NO_STEPS = ("fast", None, 1j, True, jnp.ones(2)), (2.5, "ten", None, True)
NO_FACTORS = ({2.5: 0.1}, {"ten": 0.1}, {True: 0.1}, {3: "half"}, [3, 0.1])
# What makes a schedule of one value, the message, and the values that are refused.
NO_VALUES = {
    r"cosine_decay\.init_value must be": (lambda x: S.cosine_decay(x, 10), NO_NUMBERS),
    r"cosine_decay\.decay_steps must be": (lambda x: S.cosine_decay(0.1, x), NO_STEPS),
    r"CombinedSchedule\.right must be": (lambda x: S.constant(1.0) * x, (*NO_NUMBERS, np.ones(2))),
    r"CombinedSchedule\.left must be": (lambda x: x * S.constant(1.0), (*NO_NUMBERS, np.ones(2))),
    "boundaries_and_scales": (lambda x: S.piecewise_constant(1.0, x), NO_FACTORS),
    r"boundaries|'at'": (lambda x: S.constant(1.0).then(0.1, at=x), NO_STEPS),
    "cosine_kwargs": (S.sgdr, (3, [3], [{"peak_value": 1.0}], [{"speed": 1.0}])),
}


@pytest.mark.parametrize(
    ("message", "value"),
    [(message, value) for message, (_, values) in NO_VALUES.items() for value in values],
)
def test_values_of_another_type_are_refused(message, value):
    make, _ = NO_VALUES[message]
    with pytest.raises((TypeError, ValueError), match=message):
        make(value)


def test_callables_are_schedules_in_the_right_place_without_tracers():
    s = S.constant(1.0)
    with pytest.raises(ZeroDivisionError, match=r"constant\(1\.0\) is divided by zero"):
        s / 0
    with pytest.raises(TypeError, match=r"linear\.init_value must be a number.*`s \* t`"):
        S.linear(s, 0.0, 4)
    with pytest.raises(TypeError, match=r"boundaries_and_scales\[3\] must be a number"):
        S.piecewise_constant(1.0, {3: s})

    def helper(lr):
        return lambda step: lr / (step + 1)

    @jax.jit
    def sweep(lr):
        partial = functools.partial(lambda step, lr: lr / (step + 1), lr=lr)
        for schedule in (lambda step: lr / (step + 1), helper(lr), partial):
            with pytest.raises(TypeError, match="closes over a traced value"):
                sl.adam(schedule)
        return lr

    sweep(0.1)

    def decaying(step, lr):
        return lr / (step.astype(jnp.float32) + 1)

    @jax.jit
    def first_rates(lr):
        tx = sl.adam(jax.tree_util.Partial(decaying, lr=lr))
        return sl.Optimizer(tx, jnp.ones(2)).hyperparams["learning_rate"]

    assert float(first_rates(0.5)) == 0.5
    assert len(jax.tree.leaves(sl.sgd(jax.tree_util.Partial(decaying, lr=jnp.float32(0.1))))) == 1


@pytest.mark.slow
def test_all_numbers_are_leaves():
    # One program for all numbers, over a batch of schedules too, and differentiable.
    @jax.jit
    def values(schedules, steps):
        return {name: jax.vmap(lambda n, s=s: s(n))(steps) for name, s in schedules.items()}

    # In an optimizer their numbers are arrays.
    each = {name: sl.ScaleBySchedule(schedule) for name, schedule in ALL.items()}
    schedules = {k: sl.Optimizer(tx, jnp.ones(())).transform.step_size for k, tx in each.items()}
    steps = jnp.arange(60)
    changed = jax.tree.map(lambda x: x * 2 if x.dtype == jnp.int32 else x / 2, schedules)
    first, second = values(schedules, steps), values(changed, steps)
    assert values._cache_size() == 1
    both = jax.tree.map(lambda a, b: jnp.stack([a, b]), schedules, changed)

    @jax.jit
    @jax.vmap
    def with_slopes(schedules):
        numbers, rest = eqx.partition(schedules, eqx.is_inexact_array)

        def total(numbers):
            made = {k: jax.vmap(s)(steps) for k, s in eqx.combine(numbers, rest).items()}
            return sum(map(jnp.sum, made.values())), made

        return jax.grad(total, has_aux=True)(numbers)

    slopes, batched = with_slopes(both)
    for name in ALL:
        assert np.any(first[name] != second[name]), name
        close = {"rtol": 2e-6, "atol": 1e-7, "err_msg": name}
        np.testing.assert_allclose(batched[name][0], first[name], **close)
        assert all(np.isfinite(slope[0]) for slope in jax.tree.leaves(slopes[name])), name


UP, DOWN, FLAT = S.linear(0.0, 1.0, 4), S.linear(1.0, 0.0, 4), S.constant(0.5)
JUMPS = S.piecewise_constant(1.0, {2: 0.1, 3: 0.1})
CHANGES = [
    (2 * FLAT, "learning_rate.left", 4.0, 4 * FLAT),
    (2 * FLAT, "value", 1.0, 2 * S.constant(1.0)),
    (-FLAT, "learning_rate.schedule.value", 1.0, -S.constant(1.0)),
    (UP.then(DOWN, at=4), "schedules.1.transition_steps", 9, UP.then(S.linear(1.0, 0.0, 9), at=4)),
    (S.sgdr(CYCLES), "**.end_value", 0.2, S.sgdr([c | {"end_value": 0.2} for c in CYCLES])),
    (FLAT + S.constant(1.0), "right", S.constant(2.0), FLAT + 2.0),
    (UP, "scale_by_learning_rate.learning_rate", DOWN, DOWN),
    (S.piecewise_constant(1.0, {1: 0.5, 4: 0.5}), "learning_rate", JUMPS, JUMPS),
]
