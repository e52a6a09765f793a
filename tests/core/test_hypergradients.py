"""Derivatives through every rule: with respect to its hyperparameters, and to the parameters."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import EXHAUSTIVE, SLOW, known, slow_except
from slalom._core.fields.schedule import hyperparameter_fields
from slalom._core.protocol.parts import CHECK
from table import GRADIENT_ROWS, RULES, rows

# Chains, whose numbers are in their links, rules that round to another dtype than float64, and
# rules that linearize a loss.
SKIPPED = (
    *("ScaleByGaussNewton", "ScaleByLevenbergMarquardt"),
    *("ScaleByLbfgs", "ScaleByBacktrackingLinesearch", "ScaleByZoomLinesearch", "Freeze"),
    *("ScaleByAdam, dtypes", "Ema, without debias", "Orthogonalize, bfloat16"),
)

# Where the formula itself has no derivative.
SINGULAR = {
    # The distance of the gradient from its mean is 0 there, and its root is in the divisor.
    ("ScaleByBelief", "b1", 0.0),
    ("ScaleByAcprop", "b1", 0.0),
    ("ScaleByStddev", "decay", 0.0),
    ("ScaleByStddev", "initial_scale", 0.0),
    # The weight of the newest square is 1 there, and 1 − b2 elsewhere.
    ("ScaleBySm3", "b2", 1.0),
    # A cube root, whose derivative only ε keeps finite, on a scale of 1e-18.
    ("ScaleByMadgrad", "learning_rate", 0.0),
    # The corrected gradient is nearly 0 in one place, and its square is the divisor.
    ("ScaleByMars", "b2", 0.0),
    # The root mean square that is clipped is exactly the threshold there.
    ("ScaleByStableAdam", "b2", 0.0),
    # The standard deviation of the noise is the root of this number.
    ("AddNoise", "eta", 0.0),
    # The decay of the sums is the root of this number.
    ("ScaleByDAdaptAdam", "b2", 0.0),
    # Without a step the loss stays where the lower bound was put.
    ("ScaleByMomo", "learning_rate", 0.0),
    ("ScaleByMomoAdam", "learning_rate", 0.0),
}
SMOOTH = [name for name in RULES if not name.startswith(SKIPPED)]

GRADS = np.random.default_rng(0).uniform(0.3, 1, (3, 2, 3)) * [[[1], [-1]]]
PARAMS = np.random.default_rng(1).uniform(0.5, 1.5, (2, 3))
WEIGHTS = np.random.default_rng(2).standard_normal((2, 3))


def total(tx, params):
    """A sum of the updates of three steps, whose gradients depend on the parameters."""
    state, sums = tx.init(params), 0.0
    for step, g in enumerate(GRADS):
        grads = jnp.asarray(g) * (1 + 0.1 * params)
        context = sl.Context(
            step=step, value=jnp.sum(params), grad=grads, value_fn=lambda p: jnp.sum(p**4)
        )
        updates, state = tx.update(grads, state, params, context)
        sums += (step + 1) * jnp.sum(updates * WEIGHTS)
    return sums


def points_of(tx):
    """Each number of a rule: its name, its values, and the sides on which it may move."""
    for field in hyperparameter_fields(tx):
        value = getattr(tx, field.name)
        if not isinstance(value, float):
            continue
        interval = field.metadata[CHECK].args[0]
        low, high = interval.low, interval.high
        between = (low + high) / 2 if np.isfinite(high) else low + 0.5
        yield field.name, value if low < value < high else between, 0
        ends = (low, 1, interval.above(low, low)), (high, -1, interval.below(high, high))
        for end, side, is_inside in ends:
            is_singular = (type(tx).__name__, field.name, end) in SINGULAR
            if is_inside and np.isfinite(end) and not is_singular:
                yield field.name, end, side


def step_at(name, x):
    """The step of a finite difference: small beside the number, and beside squares of gradients."""
    if 0 < x < 1e-2:
        return 1e-3 * x
    return 1e-8 if x == 0 and name.startswith(("eps", "initial", "floor")) else 1e-5


def differences(side):
    """The offsets and weights of a finite difference of second order, in units of its step."""
    if side == 0:
        return (-1, 1), (-0.5, 0.5)
    return (0, side, 2 * side), (-1.5 * side, 2 * side, -0.5 * side)


# Where the error of the finite difference itself is larger.
ROUGH = {
    *(("ScaleByAdan", "b3=0.0"), ("ScaleByApollo", "b2=0.0"), ("ScaleByShampoo", "the parameters")),
    *((name, "b2=0.999") for name in ("ScaleByYogi", "ScaleByAmsgrad, uncorrected")),
    *((name, "b2=0.999") for name in ("ScaleByProdigy", "ScaleByProdigy, uncorrected")),
    ("ScaleByDAdaptAdam", "b2=0.999"),
}
AT_ZERO = "ScaleByAdam", "ScaleByAdan", "ScaleByRadam", "ScaleByRms, bias correction"


@rows(SMOOTH, everyday=("ScaleByRss, from zero", "Ema"), ci=AT_ZERO)
def test_derivatives_are_those_of_finite_differences(row, x64):
    tx, params = row.tx, jnp.asarray(PARAMS)
    points = list(points_of(tx))
    names = list(dict.fromkeys(name for name, _, _ in points))
    size = 1.0
    own = {name: getattr(tx, name) for name in names}

    def of_numbers(numbers):
        changed = eqx.tree_at(lambda t: [getattr(t, n) for n in names], tx, list(numbers))
        return total(changed, params)

    @jax.jit
    def along(rate):
        return total(tx, params + rate * WEIGHTS)

    h = 1e-5
    found, expected, steps = [jax.grad(along)(0.0)], [(along(h) - along(-h)) / (2 * h)], [h]
    if names:
        values = jax.jit(jax.vmap(of_numbers))
        bases = [np.array(list({**own, n: x}.values())) for n, x, _ in points]
        grads = jax.jit(jax.vmap(jax.grad(of_numbers)))(jnp.asarray(np.stack(bases)))
        nearby, sums, owners = [], [], []
        for i, ((n, x, side), base) in enumerate(zip(points, bases, strict=True)):
            offsets, weights = differences(side)
            unit = np.array([n == other for other in names])
            steps.append(step_at(n, x))
            nearby += [base + steps[-1] * offset * unit for offset in offsets]
            sums += [weight / steps[-1] for weight in weights]
            owners += [i] * len(offsets)
        at_points = np.asarray(values(jnp.asarray(np.stack(nearby))))
        size = np.max(np.abs(at_points))
        found += [slopes[names.index(n)] for slopes, (n, _, _) in zip(grads, points, strict=True)]
        expected += [*np.bincount(owners, at_points * sums)]
    labels = ["the parameters", *(f"{n}={x}" for n, x, _ in points)]
    for label, ours, theirs, h in zip(labels, found, expected, steps, strict=True):
        rounding = 1e-15 * size / h
        rtol, atol = (1e-4, 1e-6) if (row.name, label) in ROUGH else (1e-6, 1e-8)
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol + rounding, err_msg=label)


NO_REVERSE = "Linesearch", "Lbfgs", "Broyden"
# Numbers that a wrapper sets, and a step of 1e30, whose square is the weight of an average.
NO_DERIVATIVE = "Drive", "ScheduleFree, polyak"
SMALL = [n for n in GRADIENT_ROWS if not any(x in n for x in (*NO_REVERSE, *NO_DERIVATIVE))]
# Each with another division by numbers whose squares underflow.
DIVIDING = (
    *("ScaleByMomo", "ScaleByPolyak", "ScaleByProdigy", "ScaleByFactoredRms, factored"),
    *("ScaleByMars", "ScaleByDion", "ScaleByShampoo", "Store, by field"),
)


@pytest.mark.parametrize(
    "row",
    [pytest.param(n, marks=SLOW if n in DIVIDING else EXHAUSTIVE) for n in SMALL],
    indirect=True,
)
def test_derivatives_by_all_numbers_are_finite_where_gradients_are_zero_or_tiny(row):
    params = {"w": jnp.linspace(-1, 1, 6).reshape(2, 3), "b": jnp.ones(2)}
    opt = sl.Optimizer(row.tx, params)
    numbers = {path: x for path, x in opt.hyperparams.items() if eqx.is_inexact_array(x)}

    @jax.jit
    @jax.vmap
    def slopes(size):
        grads = jax.tree.map(lambda p: jnp.full_like(p, size), params)

        def end(numbers):
            model, changed = params, opt.with_hyperparams(numbers, replace_schedules=True)
            for _ in range(3):
                model, changed = changed.step(model, grads, **known(model, grads))
            return sum(jnp.sum(x) for x in jax.tree.leaves(model))

        return jax.grad(end)(numbers)

    found = slopes(jnp.array([0.0, 1e-30, 1e-22, 1e-15]))
    assert all(np.isfinite(x).all() for x in found.values()), found


def test_bias_correction_has_the_right_derivative(x64):
    decay = np.array([0.0, 0.1, 0.5, 0.9])[:, None]
    age = np.array([1, 2, 1_000, 2**31 - 2])
    of_ages = jax.vmap(jax.grad(sl.tree.bias_correction), (None, 0))
    of_decays = jax.jit(jax.vmap(of_ages, (0, None)))
    derivatives = of_decays(jnp.asarray(decay[:, 0]), jnp.asarray(age))
    with np.errstate(under="ignore"):
        expected = age * decay ** (age - 1) / (1 - decay**age) ** 2
    np.testing.assert_allclose(derivatives, expected, rtol=1e-12, atol=1e-30)


def loss_of(p):
    return jnp.sum(p**4) + jnp.sum((p - 1) ** 2)


def terms_of(p):
    return {"a": jnp.sum(p**4), "b": jnp.sum((p - 1) ** 2)}


RESIDUALS = sl.LeastSquares(lambda p: jnp.concatenate([p**2, p - 1]), per_example=False)
LOOPS = {
    "ScaleByZoomLinesearch": (sl.lbfgs(), loss_of),
    "ScaleByGaussNewton": (sl.gauss_newton(), RESIDUALS),
    "ScaleByLevenbergMarquardt": (sl.levenberg_marquardt(), RESIDUALS),
    "MGDA": (sl.sgd(0.1).combine(sl.combine.MGDA(), ["a", "b"]), terms_of),
    "UPGrad": (sl.sgd(0.1).combine(sl.combine.UPGrad(), ["a", "b"]), terms_of),
    "`sl.minimize`": (sl.sgd(0.1), loss_of),
}


@pytest.mark.parametrize("who", slow_except(LOOPS, "`sl.minimize`"))
def test_loops_of_unknown_length_pass_derivatives_forward_and_refuse_others_by_name(who):
    tx, loss_fn = LOOPS[who]

    def end(p):
        if "minimize" in who:
            return jnp.sum(sl.minimize(loss_fn, tx, p, max_steps=2).model)
        return jnp.sum(sl.train_step(loss_fn)(p, sl.Optimizer(tx, p))[0])

    start = jnp.array([0.3, 2.0, -1.0])
    with pytest.raises(ValueError, match=f"passes through {who}: .* with `jax.jvp`"):
        jax.grad(end)(start)
    assert jnp.isfinite(jax.jvp(end, (start,), (jnp.ones(3),))[1])
