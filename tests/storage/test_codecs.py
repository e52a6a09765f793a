"""What codecs make of numbers: without a bias, with both signs, up to the ends of the range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import slow_except, updates_of
from slalom._core.engine.encoded import Spec

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
def test_an_accumulator_has_other_random_bits_in_each_window():
    grads = jnp.asarray(np.random.default_rng(0).standard_normal(256), jnp.float32)
    tx = sl.Identity().every_k(2).store({"accumulated": "int4"}, min_size=1)
    made = updates_of(tx, jnp.broadcast_to(grads, (400, 256)))
    mean = jnp.mean(made[1::2], 0)
    # The same bits in each window would leave 0.14.
    assert float(jnp.sqrt(jnp.mean(jnp.square(mean - grads)))) < 0.015
