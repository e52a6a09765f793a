"""What is special about the rules that adapt no scale of their own."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from slalom import tree

# --- functions ------------------------------------------------------------------------------


def test_a_function_is_told_when_there_are_no_parameters():
    updates = {"w": jnp.array([1.0, -2.0])}
    for tx in (
        sl.Stateless(lambda u, p: u if p is None else p),
        sl.StatelessPerLeaf(lambda u, p: u if p is None else p),
    ):
        np.testing.assert_array_equal(tx.update(updates, None)[0]["w"], updates["w"])
        params = {"w": jnp.array([3.0, 4.0])}
        np.testing.assert_array_equal(tx.update(updates, None, params)[0]["w"], params["w"])


@pytest.mark.parametrize(
    "tx",
    [
        sl.Stateless(lambda u, p: {"w": u["w"].sum()}),
        sl.StatelessPerLeaf(lambda u, p: u.sum()),
    ],
)
def test_a_function_that_changes_a_shape_is_refused(tx):
    with pytest.raises(ValueError, match=r"'w' has shape \(2,\).*shape \(\)"):
        tx.update({"w": jnp.ones(2)}, None)


def test_what_a_function_returns_is_wide_and_strongly_typed():
    tx = sl.Stateless(lambda u, p: jax.tree.map(lambda x: x * 2, u))
    (made,), _ = tx.update([jnp.ones(2, jnp.bfloat16)], None)
    assert made.dtype == jnp.float32
    assert not made.weak_type


# --- the moving average ---------------------------------------------------------------------


def test_a_debiased_average_of_a_constant_is_the_constant():
    tx = sl.Ema(0.999)
    g = {"w": jnp.array([0.3, -7.0])}
    state = tx.init(g)
    for _ in range(3):
        updates, state = tx.update(g, state)
        np.testing.assert_allclose(updates["w"], g["w"], rtol=1e-6)


# --- ratios of norms ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_trust_ratios_are_finite_at_zero_and_where_squares_overflow(dtype):
    zero, large = jnp.zeros(3, dtype), jnp.full(3, 1000.0, dtype)
    one = jnp.ones(3, dtype)
    tx = sl.ScaleByTrustRatio()
    for u, p, expected in [
        (zero, one, 0.0),
        (one, zero, 1.0),
        (large, one, 1.0),
        (one, large, 1e3),
    ]:
        made = tx.update({"w": u}, None, {"w": p})[0]["w"]
        np.testing.assert_allclose(made, expected, rtol=1e-2 if dtype == jnp.bfloat16 else 1e-3)
    for tx in (sl.ScaleByParamBlockNorm(), sl.ScaleByParamBlockRMS()):
        made = tx.update({"w": one}, None, {"w": zero})[0]["w"]
        np.testing.assert_allclose(made, 1e-3, rtol=1e-5)


def test_lamb_moves_every_leaf_by_the_learning_rate_times_its_norm():
    params = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([0.0, 2.0])}
    grads = {"w": jnp.array([1e-3, -7.0]), "b": jnp.array([1.0, 1.0])}
    moved, _ = sl.Optimizer(sl.lamb(0.01), params).step(params, grads)
    for p, q in zip(jax.tree.leaves(params), jax.tree.leaves(moved), strict=True):
        np.testing.assert_allclose(jnp.linalg.norm(q - p), 0.01 * jnp.linalg.norm(p), rtol=1e-4)


def test_fromage_keeps_the_norm_under_orthogonal_gradients():
    params = {"w": jnp.array([1.0, 0.0])}
    tx = sl.fromage(0.01)
    updates, _ = tx.update({"w": jnp.array([0.0, 5.0])}, tx.init(params), params)
    # 1/√(1.0001) − 1 to the last digits of float32, not to three of them.
    np.testing.assert_allclose(updates["w"][0], -4.9996250312e-05, rtol=1e-6)
    np.testing.assert_allclose(jnp.linalg.norm(params["w"] + updates["w"]), 1.0, rtol=1e-6)


# --- common means and sizes -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_sizes_are_bounded_leaf_by_leaf_and_finite_at_zero(dtype):
    updates = {"large": jnp.full((2, 2), 1000, dtype), "zero": jnp.zeros(3, dtype)}
    made, _ = sl.ClipByBlockRms(0.5).update(updates, None)
    np.testing.assert_allclose(made["large"], 0.5, rtol=1e-6)
    np.testing.assert_array_equal(made["zero"], 0)
    made, _ = sl.NormalizeByUpdateNorm(eps=0.0).update(updates, None)
    np.testing.assert_allclose(made["large"], 0.5, rtol=1e-6)
    made, _ = sl.NormalizeByUpdateNorm(eps=0.0).update({"zero": updates["zero"]}, None)
    np.testing.assert_array_equal(made["zero"], 0)


def test_a_nan_stays_visible_in_its_own_block_and_nowhere_else():
    updates = {"bad": jnp.array([1.0, jnp.nan]), "good": jnp.array([3.0, 4.0])}
    made, _ = sl.ClipByBlockRms(0.5).update(updates, None)
    assert jnp.all(jnp.isnan(made["bad"]))
    np.testing.assert_allclose(tree.rms(made["good"]), 0.5, rtol=1e-6)


def test_centralize_takes_the_mean_of_each_output():
    layer = eqx.nn.Conv2d(2, 3, 2, key=jax.random.key(0))
    grads = eqx.filter(layer, eqx.is_array)
    made, _ = sl.Centralize().update(grads, None)
    np.testing.assert_allclose(made.weight.mean((1, 2, 3)), 0, atol=1e-7)
    np.testing.assert_array_equal(made.bias, grads.bias)


# --- optimism -------------------------------------------------------------------------------


def test_optimism_finds_the_saddle_that_descent_circles():
    # min over x, max over y of x·y: the gradients rotate around the solution.
    def play(tx):
        def body(carry, _):
            (x, y), opt = carry
            return opt.step((x, y), (y, -x)), None

        start = (jnp.array(1.0), jnp.array(1.0))
        (point, _), _ = jax.lax.scan(body, (start, sl.Optimizer(tx, start)), length=500)
        return float(jnp.hypot(*point))

    assert play(sl.sgd(0.1)) > 1.5
    assert play(sl.optimistic_gradient_descent(0.1)) < 0.2


# --- every recipe arrives -------------------------------------------------------------------


def parabola(x):
    return jnp.sum((x - jnp.array([1.0, -1.0])) ** 2)


def rosenbrock(x):
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


def fading(rate, steps=10_000):
    return sl.schedules.cosine_decay(rate, steps)


CONVERGING = {
    "lamb": (sl.lamb(fading(1e-2)), sl.lamb(fading(1e-2))),
    "lars": (sl.lars(fading(1.0), momentum=0.9), sl.lars(fading(1.0), momentum=0.9)),
    "optimistic_gradient_descent": (
        sl.optimistic_gradient_descent(0.1),
        sl.optimistic_gradient_descent(1e-3, beta=0.3),
    ),
    "optimistic_adam_v2": (sl.optimistic_adam_v2(1e-2), sl.optimistic_adam_v2(1e-2)),
    "fromage": (sl.fromage(fading(1e-2)), sl.fromage(fading(1e-2))),
}
FUNCTIONS = {"parabola": (parabola, (1.0, -1.0)), "rosenbrock": (rosenbrock, (1.0, 1.0))}


@pytest.mark.parametrize("name", CONVERGING)
@pytest.mark.parametrize("which", FUNCTIONS)
def test_recipe_converges(name, which):
    of, minimum = FUNCTIONS[which]
    tx = CONVERGING[name][list(FUNCTIONS).index(which)]
    start = jnp.array([-1.0, 1.0]) if which == "parabola" else jnp.array([0.0, 0.0])

    def body(carry, _):
        x, opt = carry
        value, grad = jax.value_and_grad(of)(x)
        return opt.step(x, grad, value=value), None

    start = (start, sl.Optimizer(tx, start))
    (x, _), _ = jax.jit(lambda c: jax.lax.scan(body, c, length=10_000))(start)
    np.testing.assert_allclose(x, jnp.array(minimum), atol=3e-2, rtol=3e-2)
