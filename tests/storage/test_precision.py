"""Exact values, rounding, codecs, half precision, extreme gradients and complex parameters."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import (
    assert_same_bits,
    distance,
    gradients,
    nested_dict,
    slalom_trajectory,
    slow_except,
    updates_of,
)
from slalom._core.engine.encoded import Spec


def test_constant_gradients_move_adamw_and_bfloat16_means_of_squares():
    g = jnp.array([1e-6, -1e-3, 0.3, -1.0, 7.0, 1e4], jnp.float32)
    grads = jnp.broadcast_to(g, (10, 6))

    @jax.jit
    @jax.vmap
    def run(b2):
        return updates_of(sl.adamw(1e-3, b2=b2, weight_decay=0.0), grads, jnp.ones_like(g))

    # η·g / (|g| + ε) in every step; each of the ten within 4 units in the last place.
    updates = run(jnp.array([0.9, 0.99, 0.999, 0.9999]))
    wide = np.asarray(g, np.float64)
    exact = -np.float32(1e-3) * wide / (np.abs(wide) + np.float32(1e-8))
    ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    assert np.max(np.abs(np.asarray(updates, np.float64) - exact) / ulp) <= 4

    updates = updates_of(sl.lion(1e-3, weight_decay=0.0), grads, jnp.ones_like(g))
    np.testing.assert_array_equal(updates, -np.float32(1e-3) * jnp.sign(grads))

    params = jnp.ones((), jnp.bfloat16)

    def after(tx, n=6000):
        def body(state, step):
            return tx.update(params, state, params, sl.Context(step=step))[1], None

        return jax.lax.scan(body, tx.init(params), jnp.arange(n))[0]

    nu = after(sl.ScaleByAdam()).nu
    assert nu.dtype == jnp.float32
    np.testing.assert_allclose(nu, 1 - 0.999**6000, rtol=1e-3)
    # Rounded to the nearest bfloat16, it does stall: why that is not the default.
    nearest = sl.codecs.cast("bfloat16", stochastic=False)
    stored = sl.ScaleByAdam().store({"nu": nearest}, min_size=1)
    assert float(after(stored).inner.nu) < 0.3


def test_adamw_golden_column(x64):
    # ε = 2 is added after the root of the debiased mean of squares.
    tx = sl.adamw(1.0, eps=2.0, weight_decay=0.5)
    path, _ = slalom_trajectory(tx, jnp.array(1.0), jnp.array([0.01, 0.1, 0.1, 0.1, 0.1]))
    golden = [0.49502488, 0.21981269, 0.07479392, -0.00138156, -0.04164672]
    np.testing.assert_allclose(path, golden, atol=5e-9, rtol=0)


def test_a_step_rounds_once_from_the_mean_as_it_is_stored():
    grads = np.random.default_rng(3).standard_normal((20, 4)).astype(np.float32)
    tx = sl.ScaleByAdam(b1=0.5, b2=0.75, eps=0.5, mu_dtype=jnp.bfloat16)
    updates = updates_of(tx, jnp.asarray(grads))
    m, v = np.zeros(4), np.zeros(4)
    for t, g in enumerate(grads, start=1):
        m = (0.5 * m + 0.5 * g).astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
        v = 0.75 * v + 0.25 * g.astype(np.float64) ** 2
        exact = m / (1 - 0.5**t) / (np.sqrt(v / (1 - 0.75**t)) + 0.5)
        # A mean that float32 and float64 round to different sides would show as 2e-3.
        np.testing.assert_allclose(updates[t - 1], exact, rtol=2e-6, atol=1e-7)

    draw = functools.partial(gradients, jnp.zeros(512), 1, dtype=jnp.bfloat16)
    p, g = draw(seed=5)[0], draw(seed=6)[0]
    factors = (1 / 3, 3.0, -0.37)
    tx = sl.chain(*map(sl.Scale, factors))
    stepped, _ = sl.Optimizer(tx, p).step(p, g)
    wide, update = p.astype(jnp.float32), g.astype(jnp.float32)
    for factor in factors:
        update = update * jnp.float32(factor)
    assert stepped.dtype == jnp.bfloat16
    np.testing.assert_array_equal(stepped, (wide + update).astype(jnp.bfloat16))
    # The update rounded by itself first would give other numbers somewhere.
    twice = (wide + update.astype(jnp.bfloat16).astype(jnp.float32)).astype(jnp.bfloat16)
    assert np.any(np.asarray(stepped) != np.asarray(twice))


SAME_BITS = {
    "adam": sl.adam(3e-3, eps_root=1e-12),
    "adam-nesterov": sl.adam(3e-3, nesterov=True),
    "adamw": sl.ClipByGlobalNorm(1.0) | sl.adamw(3e-3, weight_decay=0.1),
    "rmsprop": sl.rmsprop(3e-3, bias_correction=True),
    "rmsprop-centered": sl.rmsprop(3e-3, centered=True),
    "lion": sl.lion(3e-3),
    "sgd-momentum": sl.Clip(1.0) | sl.sgd(3e-3, momentum=0.9, nesterov=True),
    "adam-scheduled": sl.adam(sl.schedules.cosine_decay(3e-3, 40)),
}


def constant_and_traced(tx):
    """50 steps with the numbers compiled in, and with the numbers as arguments."""
    params = nested_dict(jax.random.key(0))
    grads = gradients(params, 50)

    def walk(tx, grads):
        def body(carry, given):
            params, state = carry
            step, grads = given
            params, state = tx.step(grads, state, params, sl.Context(step=step))
            return (params, state), params

        return jax.lax.scan(body, (params, tx.init(params)), (jnp.arange(50), grads))[1]

    constant = jax.jit(lambda grads: walk(tx, grads))(grads)
    return constant, jax.jit(walk)(sl.Optimizer(tx, params).transform, grads)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME_BITS)
def test_constant_and_traced_hyperparameters_give_the_same_bits(name):
    assert_same_bits(*constant_and_traced(SAME_BITS[name]))


@pytest.mark.slow
def test_traced_numbers_and_ages_of_single_leaves():
    # −η·u + γ·t: the compiler may fuse the sum with either product, and chooses by what it
    # knows of η and γ. Each step may so differ by a rounding, the sum by a few.
    constant, traced = constant_and_traced(sl.rmsprop(3e-3, momentum=0.9))
    assert distance(constant, traced) <= 4 * np.finfo(np.float32).eps

    params = {"new": jnp.ones(2), "old": jnp.ones(2)}
    grads = {"new": jnp.full(2, 0.5), "old": jnp.full(2, 0.25)}
    tx = sl.ScaleByAdam()
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update(grads, state)

    fresh = tx.init(params)
    mixed = eqx.tree_at(
        lambda s: (s.age, s.mu["new"], s.nu["new"]),
        state,
        (jnp.array([0, 3], jnp.int32), fresh.mu["new"], fresh.nu["new"]),
    )
    updates, after = jax.jit(tx.update)(grads, mixed)

    np.testing.assert_array_equal(after.age, [1, 4])
    np.testing.assert_allclose(updates["new"], tx.update(grads, fresh)[0]["new"], rtol=1e-6)
    np.testing.assert_allclose(updates["old"], tx.update(grads, state)[0]["old"], rtol=1e-6)


def updated(tx, grads):
    return sl.Optimizer(tx, grads).update(grads, grads)[0]


def clipped(grads, max_norm):
    return updated(sl.ClipByGlobalNorm(max_norm), grads)


@pytest.mark.slow
def test_norms_of_half_precision_are_right_and_clips_scale_to_them():
    # 300² is infinite in float16, and (2e-4)² is zero.
    for n, size, max_norm, rtol in ((100, 300.0, 1.0, 2**-10), (10_000, 2e-4, 0.01, 2**-9)):
        updates = clipped(jnp.full((n,), size, jnp.float16), max_norm)
        assert updates.dtype == jnp.float16
        np.testing.assert_allclose(updates.astype(jnp.float32), max_norm / n**0.5, rtol=rtol)
    np.testing.assert_array_equal(clipped(jnp.zeros(3, jnp.float16), 1.0), np.zeros(3))

    g = {"a": jnp.array([3.0, 0.0]), "b": jnp.array(-4.0)}
    run = jax.jit(lambda max_norm: clipped(g, max_norm))
    updates = run(1.0)
    np.testing.assert_allclose(updates["a"], [0.6, 0.0], rtol=1e-6)
    np.testing.assert_allclose(updates["b"], -0.8, rtol=1e-6)
    for max_norm in (5.0, 5.5, np.inf):
        assert_same_bits(run(max_norm), g)
    assert not any(np.any(u) for u in jax.tree.leaves(run(0.0)))
    np.testing.assert_array_equal(clipped(jnp.zeros(2), 0.0), jnp.zeros(2))
    z = jnp.array([3 + 4j, -0.5j], jnp.complex64)
    np.testing.assert_allclose(clipped(z, 1.0), np.asarray(z) / np.sqrt(25.25), rtol=1e-6)

    def leaves(first):
        return jax.tree.leaves(clipped({"a": jnp.array([first, 1.0]), "b": jnp.array(2.0)}, 1.0))

    assert all(np.all(np.isnan(u)) for u in leaves(jnp.nan))
    # Zeros would look like an optimum.
    assert not all(np.all(np.isfinite(u)) for u in leaves(jnp.inf))
    # A gradient whose square overflows has a norm.
    np.testing.assert_allclose(leaves(1e30)[0], [1.0, 1e-30], rtol=1e-6)
    g = jnp.array([jnp.nan, jnp.inf, -3.0, 0.5])
    np.testing.assert_array_equal(updated(sl.Clip(1.0), g), [np.nan, 1.0, -1.0, 0.5])
    np.testing.assert_array_equal(updated(sl.SetToZero(), g), np.zeros(4))
    z = jnp.array([3 + 4j, -0.5j], jnp.complex64)
    np.testing.assert_array_equal(updated(sl.Clip(1.0), z), np.array([1 + 1j, -0.5j], np.complex64))


@pytest.mark.parametrize("rule", slow_except(["sgd", "adam"], "adam"))
def test_train_step_descends_on_real_and_complex_parameters(rule):
    tx = {"sgd": sl.sgd(0.02, momentum=0.5), "adam": sl.adam(0.05)}[rule]
    model = {"real": jnp.ones(2), "complex": jnp.ones(2, jnp.complex64)}

    def loss(model):
        z = model["complex"] * model["real"].astype(jnp.complex64)
        return jnp.sum(jnp.square(jnp.abs(z - (1 - 2j))))

    step = sl.train_step(loss, donate=False)
    # The same by hand: what jax.grad returns is conjugated before it goes in.
    grad = jax.jit(lambda model: jax.tree.map(jnp.conj, jax.grad(loss)(model)))
    opt = opt_by_hand = sl.Optimizer(tx, model)
    by_hand, first = model, float(loss(model))
    for n in range(200):
        model, opt, value = step(model, opt)
        if n < 5:
            by_hand, opt_by_hand = opt_by_hand.step(by_hand, grad(by_hand))
            assert distance(model, by_hand) <= 1e-6
    assert first > 1
    assert float(value) < 1e-2
    assert (model["real"].dtype, model["complex"].dtype) == (jnp.float32, jnp.complex64)
    if rule == "adam":  # the mean of |g|²: one step size for both parts
        assert opt.state_of("scale_by_adam").nu["complex"].dtype == jnp.float32


C = sl.codecs
CODECS = (
    *(C.int8(), C.dynamic8(), C.int4()),
    *(C.cast("float8_e4m3fn"), C.cast("float16"), C.cast("bfloat16")),
)
SIGNED = (
    *(C.int8(stochastic=True), C.int8(False, stochastic=True), C.dynamic8(stochastic=True)),
    *(C.int4(), C.cast("float8_e4m3fn"), C.cast("bfloat16", stochastic=True)),
)
FLOORS = {C.int8(): 1 / 65025, C.int4(): 1 / 256, C.dynamic8(): 1e-7}
"""The smallest share of the largest number of a block that a field ≥ 0 can have."""


def spec(length, nonnegative=False):
    return Spec((length,), np.dtype("float32"), nonnegative)


def mean_of_roundings(codec, x, nonnegative):
    """The mean of what the codec makes of one block of numbers with many random bits."""
    kind = spec(len(x), nonnegative)

    def rounded(key):
        return codec.decode(codec.encode(x, kind, jax.random.bits(key, x.shape)), kind)

    keys = jax.random.split(jax.random.key(0), 20_000)
    return np.asarray(jax.jit(lambda: jnp.mean(jax.vmap(rounded)(keys), 0))())


SHARES = np.array([1, 0.7, 0.301, 0.1003, 0.0307, 0.011, 3.1e-3, 1.3e-3, 4e-4, 1.5e-4, 2e-5])


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_the_mean_of_roundings_of_a_mean_of_squares_is_right(codec):
    expected = np.maximum(SHARES, FLOORS.get(codec, 0))
    got = mean_of_roundings(codec, jnp.asarray(3 * SHARES, jnp.float32), nonnegative=True)
    np.testing.assert_allclose(got / 3, expected, rtol=0.01)


@pytest.mark.parametrize("codec", slow_except(SIGNED, C.int8(stochastic=True)), ids=repr)
def test_the_mean_of_roundings_of_signed_numbers_is_right(codec):
    x = np.concatenate([SHARES, -SHARES[1:]])
    got = mean_of_roundings(codec, jnp.asarray(3 * x, jnp.float32), nonnegative=False)
    np.testing.assert_allclose(got / 3, x, rtol=0.01, atol=4e-4)


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_mean_of_squares_does_not_drift(codec):
    # 30 000 steps of Adam with b2 = 0.999, with squares that differ by up to 10⁴.
    shares = np.tile([1.0, 1e-1, 1e-2, 1e-3, 1e-4], 51)
    squares, kind = jnp.asarray(shares, jnp.float32), spec(255, True)

    def step(carry, key):
        arrays, total = carry
        nu = 0.999 * codec.decode(arrays, kind) + 0.001 * squares
        arrays = codec.encode(nu, kind, jax.random.bits(key, nu.shape))
        return (arrays, total + codec.decode(arrays, kind)), None

    start = codec.encode(squares, kind), jnp.zeros(255)
    keys = jax.random.split(jax.random.key(0), 30_000)
    (_, total), _ = jax.jit(lambda: jax.lax.scan(step, start, keys))()
    ratios = (np.asarray(total) / 30_000 / np.maximum(shares, FLOORS.get(codec, 0))).reshape(51, 5)
    np.testing.assert_allclose(ratios.mean(0), 1, atol=0.03)


STALLS = {C.cast("bfloat16"): 0.21, C.cast("float16"): 0.025}
"""They round to the nearest. A mean stalls where a step is less than half of their unit."""


@pytest.mark.parametrize("codec", slow_except(CODECS, C.dynamic8()), ids=repr)
def test_a_mean_of_gradients_reaches_the_largest_numbers_of_both_signs(codec):
    grads = jnp.tile(jnp.array([1.0, -1.0]), (2000, 64))
    made = updates_of(sl.Ema(0.99, debias=False).store(codec, min_size=1), grads)
    np.testing.assert_allclose(made[-1], grads[-1], atol=STALLS.get(codec, 0.01))


@pytest.mark.slow
def test_accumulators_have_other_random_bits_in_each_window():
    grads = jnp.asarray(np.random.default_rng(0).standard_normal(256), jnp.float32)
    for tx in (sl.Identity().every_k(2), sl.Identity().every_k(2).every_k(1)):
        stored = tx.store({"accumulated": "int4"}, min_size=1)
        mean = jnp.mean(updates_of(stored, jnp.broadcast_to(grads, (400, 256)))[1::2], 0)
        # The same bits in each window would leave 0.14, and the same in both accumulators 0.02.
        assert float(jnp.sqrt(jnp.mean(jnp.square(mean - grads)))) < 0.015
