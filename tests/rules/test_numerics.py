"""Accuracy: what rules and schedules compute in float32, against references of more digits."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import after_training, sampled, slow_except, updates_of
from slalom import tree


def test_adafactor_averages_sums_of_scalars_and_first_steps_of_lbfgs():
    age, steps, g = 10**6, 100_000, 3.3
    tx = sl.ScaleByFactoredRms(decay_rate=1.0)
    grads = jnp.full(2, g)
    square = np.float64(np.float32(g)) ** 2
    state = type(tx.init(grads))(jnp.asarray(age, jnp.int32), (2 * jnp.square(grads),))
    step = jax.jit(lambda s: jax.lax.fori_loop(0, steps, lambda _, s: tx.update(grads, s)[1], s))
    reference = square * (2 * age + steps) / (age + steps)
    np.testing.assert_allclose(step(state).nu[0], reference, rtol=1e-4)

    tx, params = sl.ScaleByLbfgs(), jnp.ones(2)
    first = jax.jit(lambda g: tx.update(g, tx.init(g), params)[0])
    for size in (1e3, 0.5, 1e-2):
        u = first(jnp.asarray([0.6, -0.8]) * size)
        np.testing.assert_allclose(jnp.linalg.norm(u), min(size, 1), rtol=1e-6)

    xs = np.random.default_rng(0).normal(size=1100).astype(np.float32) * 1e3
    program = jax.jit(tree.sum_of).lower(list(xs)).compile()
    expected = np.float32(0)
    for x in xs:
        expected = expected + x
    assert program(list(xs)) == expected
    kernels = re.findall(r"^%fused_computation.*?^}", program.as_text(), re.M | re.S)
    assert max(kernel.count(" add(") for kernel in kernels) <= 80


MANTISSAS = jnp.linspace(1.0, 2.0, 200)
"""How a product rounds depends on the mantissa: 1.1 alone shows no drift."""


def average_errors(tx, age, steps, swings):
    """The relative errors of averages of parameters that alternate around `MANTISSAS`."""

    @jax.jit
    @jax.vmap
    def run(swing):
        def body(i, state):
            params = MANTISSAS * (1 + swing * jnp.where(i % 2 == 0, 1.0, -1.0))
            return tx.update(jnp.zeros_like(params), state, params)[1]

        state = eqx.tree_at(lambda s: s.age, tx.init(MANTISSAS), jnp.asarray(age, jnp.int32))
        return jax.lax.fori_loop(0, steps, body, state).average

    found = np.asarray(run(jnp.array(swings)), np.float64)
    return np.max(np.abs(found / np.asarray(MANTISSAS) - 1), axis=1)


AVERAGES = {
    "of 10⁵": (sl.Identity().average(0.99999), 10**4, 2_000_000),
    "of 10⁶": (sl.Identity().average(0.999999), 10**4, 2_000_000),
    "uniform": (sl.Identity().average(), 3 * 10**7, 2_000_000),
}


@pytest.mark.parametrize("name", sampled(AVERAGES))
def test_an_average_of_parameters_does_not_drift(name):
    # The sum of two products would drift by more than 1e-4.
    constant, alternating = average_errors(*AVERAGES[name], (0.0, 0.1))
    assert constant == 0
    assert alternating <= 1e-5


@pytest.mark.slow
def test_averages_and_variances_start_at_the_first_value_and_do_not_drift():
    tx, new = sl.Identity().average(0.9), jnp.asarray([0.1, -3.3])
    _, state = tx.update(jnp.zeros(2), tx.init(jnp.asarray([1e8, 3.0])), new)
    np.testing.assert_array_equal(state.average, new)

    tx = sl.MeasureWithEma(lambda u: u, 0.99999)
    state = tx.init(MANTISSAS)
    state = eqx.tree_at(lambda s: (s.age, s.ema), state, (jnp.asarray(10**4, jnp.int32), MANTISSAS))
    step = jax.jit(
        lambda s: jax.lax.fori_loop(0, 100_000, lambda _, s: tx.update(MANTISSAS, s)[1], s)
    )
    np.testing.assert_array_equal(step(state).ema, MANTISSAS)

    tx = sl.MeasureWithEma(lambda u: u, 0.9)
    state = tx.init(jnp.zeros(()))
    for value in (jnp.inf, 2.0, jnp.nan, 2.0, -jnp.inf):
        _, state = tx.update(jnp.asarray(value), state)
    np.testing.assert_allclose(state.ema, 2, rtol=1e-6)
    assert int(state.age) == 2

    def first(tx, *entries):
        return updates_of(tx, jnp.array([entries]))[0]

    # Without an epsilon, the update of a zero variance is zero.
    for eps_in_sqrt in (False, True):
        tx = sl.ScaleByStddev(0.9, 0.0, eps_in_sqrt=eps_in_sqrt, bias_correction=True)
        np.testing.assert_array_equal(first(tx, 0.3, 1e30, 0.0, jnp.nan), [0, 0, 0, np.nan])
    updates = first(sl.ScaleByStddev(0.9, 1e-8, bias_correction=True), 0.3, 1e3, -7.7)
    np.testing.assert_allclose(updates, [3e3, 1e7, -7.7e4], rtol=1e-6)
    scaled = sl.ScaleByStddev(0.9, 0.0, 2.0, bias_correction=True)
    np.testing.assert_allclose(first(scaled, 0.3), 0.3 / np.sqrt(0.9 * 2 / (1 - 0.9)), rtol=1e-6)


S = sl.schedules
LONG = 100_000_000
LEFT = np.array([1, 10, 1_000, 10_000_000])
TAILS = [
    (S.linear(1.0, 0.0, LONG), lambda f: f),
    (S.polynomial(1.0, 0.0, 2.0, LONG), lambda f: f**2),
    (S.cosine_decay(1.0, LONG), lambda f: np.sin(np.pi / 2 * f) ** 2),
    (S.warmup_cosine_decay(0.0, 1.0, 0, LONG), lambda f: np.sin(np.pi / 2 * f) ** 2),
    (S.cosine_decay(1.0, LONG, 0.0, 2.0), lambda f: np.sin(np.pi / 2 * f) ** 4),
    (S.warmup_stable_decay(0.0, 1.0, 0, 0, LONG), lambda f: f),
    (S.warmup_stable_decay(0.0, 1.0, 0, 0, LONG, 0.0, "sqrt"), lambda f: f / (1 + np.sqrt(1 - f))),
    (S.piecewise_interpolate("linear", 1.0, {LONG: 0.0}), lambda f: f),
]


@pytest.mark.slow
def test_the_tail_of_a_schedule_keeps_its_digits_and_steps_may_sum_to_more_than_an_int32_holds():
    steps = jnp.asarray(LONG - LEFT, jnp.int32)
    compiled = jax.jit(lambda steps: [jax.vmap(schedule)(steps) for schedule, _ in TAILS])(steps)
    for (schedule, reference), found in zip(TAILS, compiled, strict=True):
        expected, message = reference(LEFT / LONG), repr(schedule)
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=message)
        # Outside of `jax.jit` other roundings are fused.
        alone = jax.vmap(schedule)(steps)
        np.testing.assert_allclose(alone, expected, rtol=1e-6, err_msg=message)
    # And the head of a rising one.
    f, steps = LEFT / LONG, jnp.asarray(LEFT, jnp.int32)
    rising = jax.vmap(S.polynomial(0.0, 1.0, 3.0, LONG))(steps)
    np.testing.assert_allclose(rising, 1 - (1 - f) ** 3, 1e-6)
    np.testing.assert_allclose(jax.vmap(S.linear(0.0, 1.0, LONG))(steps), f, 1e-6)

    half = 2**30
    long = S.warmup_stable_decay(0.0, 1.0, half, 2**31 - 1, 10)
    np.testing.assert_allclose(long(half // 2), 0.5, rtol=1e-6)
    assert long(2**31 - 1) == 1
    cycle = {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": 0, "decay_steps": half}
    restarts = S.sgdr([cycle] * 4)
    np.testing.assert_allclose(restarts(half + half // 2), 0.5, rtol=1e-6)
    np.testing.assert_allclose(restarts(2**31 - 1), 0, atol=1e-6)


@pytest.mark.parametrize("kind", slow_except(["linear", "cosine", "sqrt"], "cosine"))
def test_a_schedule_never_leaves_the_interval_between_its_values(kind):
    @jax.jit
    def extremes(length, high, low):
        schedule = S.warmup_stable_decay(low, high, 0, 0, length, low, kind)
        values = jax.vmap(schedule)(jnp.arange(408))
        return values.min() - low, high - values.max(), schedule(length) == low

    lengths = jnp.arange(1, 408)
    for high, low in ((0.3, 0.0), (0.1, 0.1), (1e-3, 0.7e-3)):
        high, low = jnp.float32(high), jnp.float32(low)
        below, above, ends = jax.vmap(extremes, (0, None, None))(lengths, high, low)
        assert bool(jnp.all(below >= 0) & jnp.all(above >= 0) & jnp.all(ends))


WITH_EPSILON = (
    *(sl.ScaleByAdam, sl.ScaleByAmsgrad, sl.ScaleByNovograd, sl.ScaleByAdan, sl.ScaleBySm3),
    *(sl.ScaleByRms, sl.ScaleByStddev, sl.ScaleByTrustRatio, sl.NormalizeByUpdateNorm),
    *(sl.ScaleByPolyak, functools.partial(sl.ScaleByAdam, nesterov=True)),
    functools.partial(sl.ScaleByBelief, eps_root=0.0),
    functools.partial(sl.ScaleByYogi, initial_accumulator_value=0.0),
    functools.partial(sl.ScaleByRadam, b2=0.5, threshold=4.0),
    functools.partial(sl.ScaleByRss, 0.0),
    functools.partial(sl.ScaleByRms, eps_in_sqrt=False),
)
WITHOUT = [rule(eps=0.0) for rule in WITH_EPSILON]


@pytest.mark.parametrize("tx", slow_except(WITHOUT, sl.ScaleByAdam(eps=0.0)), ids=repr)
def test_small_gradients_do_no_harm_without_an_epsilon(tx):
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    context = sl.Context(value=jnp.float32(1.0))

    def total(size):
        grads = jax.tree.map(lambda p: size * p, params)

        def body(state, _):
            updates, state = tx.update(grads, state, params, context)
            return state, updates

        _, updates = jax.lax.scan(body, tx.init(params), length=8)
        return sum(map(jnp.sum, jax.tree.leaves(updates))), updates

    sizes = jnp.array([0, 1e-30])
    (_, updates), derivative = jax.jit(jax.vmap(jax.value_and_grad(total, has_aux=True)))(sizes)
    for x in jax.tree.leaves(updates):
        assert bool(jnp.all(jnp.isfinite(x)))
        assert bool(jnp.all(x[0] == 0))
    assert bool(jnp.isfinite(derivative[0]))


def test_polyak_scales_updates_of_any_size():
    losses = jnp.array([0.0, 1e-36, 1e-30, 1e-22, 1e-16, 1.0, 1e15])
    updates = jnp.outer(losses, jnp.array([3.0, -4.0]))

    @jax.jit
    def run(eps):
        tx = sl.ScaleByPolyak(max_learning_rate=float("inf"), eps=eps)
        return jax.vmap(lambda u, loss: tx.update(u, tx.init(u), u, sl.Context(value=loss))[0])(
            updates, losses
        )

    u, value = np.asarray(updates, np.float64), np.asarray(losses, np.float64)[:, None]
    for eps in jnp.array([0.0, 1e-30, 1e-3]):
        squares = np.sum(u * u, axis=1, keepdims=True) + np.float64(eps)
        expected = u * value / np.where(u == 0, 1, squares)
        # Where the result itself is too small for float32, it is 0.
        np.testing.assert_allclose(run(eps), expected, rtol=2e-6, atol=1e-37)

    # It is its formula to the last digit.
    tx = sl.ScaleByPolyak(max_learning_rate=10.0)
    random = np.random.default_rng(0)
    for _ in range(5):
        updates, loss = jnp.asarray(random.standard_normal(7), jnp.float32), jnp.float32(1.3)
        out, _ = tx.update(updates, None, updates, sl.Context(value=loss))
        np.testing.assert_array_equal(out, updates * (loss / jnp.sum(jnp.square(updates))))


def stddev_in_float64(grads, decay, eps, debias):
    m = v = np.zeros_like(grads[0])
    made = []
    for t, g in enumerate(grads, 1):
        m, v = decay * m + (1 - decay) * g, decay * v + (1 - decay) * g * g
        rest = 1 - decay**t if debias else 1.0
        made.append(g / np.sqrt(np.maximum(v / rest - (m / rest) ** 2, 0) + eps))
    return made


@pytest.mark.parametrize("debias", slow_except([False, True], True))
def test_a_variance_that_is_small_beside_the_mean_keeps_its_digits(debias):
    noise = np.random.default_rng(0).standard_normal((400, 100))
    grads = (1 + 1e-3 * noise).astype(np.float32)

    @jax.jit
    @jax.vmap
    def run(decay):
        return updates_of(sl.ScaleByStddev(decay, 1e-16, bias_correction=debias), grads)

    decays = np.float32([0.5, 0.9, 0.99])
    for decay, updates in zip(decays.astype(np.float64), run(jnp.asarray(decays)), strict=True):
        # The variance of the first gradient alone is 0, and the next test is about it.
        exact = np.stack(stddev_in_float64(grads.astype(np.float64), decay, 1e-16, debias))[1:]
        assert np.quantile(abs(updates[1:] / exact - 1), 0.99) < 2e-4, decay


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "start"), [(1e-10, 0.01), (1e-14, 1.0), (1e-17, 100.0)])
def test_lbfgs_minimizes_tiny_losses(scale, start):
    def loss(x):
        return 0.5 * scale * jnp.sum(jnp.asarray([1.0, 3.0, 10.0, 0.5]) * jnp.square(x - 2))

    x = jnp.full(4, start)
    x, _, _ = after_training(sl.train_step(loss), sl.lbfgs(), 25, x)
    np.testing.assert_allclose(x, 2, rtol=1e-3)


@pytest.mark.slow
def test_lbfgs_needs_as_many_iterations_as_scipy(x64):
    optimize = pytest.importorskip("scipy.optimize")

    def rosenbrock(x):
        return jnp.sum(100 * jnp.square(x[1:] - jnp.square(x[:-1])) + jnp.square(1 - x[:-1]))

    grad, start, tol = jax.jit(jax.grad(rosenbrock)), jnp.zeros(100), 1e-5

    def body(carry):
        x, opt, count = carry
        value, g = jax.value_and_grad(rosenbrock)(x)
        x, opt = opt.step(x, g, value=value, grad=g, value_fn=rosenbrock)
        return x, opt, count + 1

    def on(carry):
        return jnp.max(jnp.abs(grad(carry[0]))) > tol

    opt = sl.Optimizer(sl.lbfgs(), start)
    count = jax.jit(lambda *carry: jax.lax.while_loop(on, body, carry))(start, opt, 0)[2]
    options = {"maxcor": 10, "ftol": 0, "gtol": tol, "maxiter": 2000}
    how = {"jac": grad, "method": "L-BFGS-B", "options": options}
    theirs = optimize.minimize(jax.jit(rosenbrock), start, **how)
    assert abs(int(count) / theirs.nit - 1) <= 0.05
