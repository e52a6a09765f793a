"""Gradients and parameters whose squares overflow or underflow."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import slow_except

SIZES = [1e-36, 1e-30, 1e-22, 1e-16, 1.0, 1e15, 3e20, 1e36]


def around(size):
    return jnp.asarray([[3.0, -4.0], [0.0, 1.0]], jnp.float32) * jnp.float32(size)


def test_norms_and_trust_ratios_of_any_size_have_values_and_derivatives():
    scale = jax.jit(lambda u, p: sl.ScaleByTrustRatio().update(u, None, p)[0])
    for size in SIZES:
        for of_params in (1e-15, 1.0, 4e20):
            u = around(size)
            wanted = np.asarray(u) / np.float32(size) * of_params
            out = scale(u, around(of_params))
            np.testing.assert_allclose(out, wanted, rtol=2e-6, err_msg=f"{size}, {of_params}")

    u = jnp.full(4, 3e38)
    for tx in (sl.NormalizeByUpdateNorm(), sl.ScaleByTrustRatio(), sl.ClipByGlobalNorm(1.0)):
        out, _ = tx.update(u, tx.init(u), jnp.ones(4))
        assert not bool(jnp.any(jnp.isfinite(out)))

    derivative = jax.jit(jax.grad(sl.tree.global_norm))
    for size in (1e-30, 1.0, 1e30):
        wanted = around(1.0) / np.sqrt(26)
        np.testing.assert_allclose(derivative(around(size)), wanted, rtol=1e-6, err_msg=f"{size}")


@pytest.mark.parametrize("name", slow_except(["lamb", "lars", "fromage"], "lars"))
def test_large_parameters_take_a_finite_step(name):
    params = {"w": around(4e20), "b": jnp.zeros(2)}
    grads = {"w": around(1.0), "b": jnp.ones(2)}
    opt = sl.Optimizer(getattr(sl, name)(0.1), params)
    updates, _ = opt.update(params, grads)
    scale = np.linalg.norm(np.asarray(params["w"], np.float64))
    size = np.linalg.norm(np.asarray(updates["w"], np.float64))
    assert 1e-5 * scale < size < scale


HUGE = [(shape, bound) for shape in [(3,), (4, 4)] for bound in (None, 1.0)]


@pytest.mark.parametrize("case", slow_except(HUGE, HUGE[-1]), ids=str)
def test_adafactor_recovers_from_a_huge_gradient(case):
    shape, clipping_threshold = case
    tx = sl.ScaleByFactoredRms(min_dim_size_to_factor=2, clipping_threshold=clipping_threshold)
    state, update = tx.init(jnp.ones(shape)), jax.jit(tx.update)
    for g in (1.0, 3e20, 1.0):
        updates, state = update(jnp.full(shape, g), state)
        assert bool(jnp.all(jnp.isfinite(updates) & (updates > 0)))
    later = jnp.full(shape, 1e17)
    state = jax.jit(lambda s: jax.lax.fori_loop(0, 200, lambda _, s: tx.update(later, s)[1], s))(
        state
    )
    updates, _ = update(later, state)
    assert bool(jnp.all(updates > 1e-2))


def test_adafactor_takes_the_smallest_epsilon():
    tx = sl.ScaleByFactoredRms(min_dim_size_to_factor=2, eps=1e-300)
    zeros = {"vector": jnp.zeros(3), "matrix": jnp.zeros((4, 4))}
    updates, _ = jax.jit(tx.update)(zeros, tx.init(zeros))
    assert eqx.tree_equal(updates, zeros)


LAYOUT = {sl.where.path("w"): "oi"}
NORMS = {
    "ClipByGlobalNorm": sl.ClipByGlobalNorm(0.7),
    "delayed": sl.ClipByGlobalNorm(0.7, delayed=True),
    "ClipByBlockRms": sl.ClipByBlockRms(0.7),
    "UnitwiseClip": sl.UnitwiseClip(0.7, layout=LAYOUT),
    "AdaptiveGradClip": sl.AdaptiveGradClip(0.1, layout=LAYOUT),
    "ZClip": sl.ZClip(0.5, warmup_steps=1, eps=0.0),
    "NormalizeByUpdateNorm": sl.NormalizeByUpdateNorm(eps=0.0),
    "ScaleByTrustRatio": sl.ScaleByTrustRatio(),
    "ScaleByPolyak": sl.ScaleByPolyak(),
    "PerExampleGlobalNormClip": sl.PerExampleGlobalNormClip(0.7, single_batch_element=True),
    "KeepInitialNorm": sl.KeepInitialNorm(),
    "graft": sl.Trace(0.9).graft(sl.ScaleByTrustRatio()),
    "sam": sl.Trace(0.9).sam(0.1),
    "skip_spikes": sl.Trace(0.9).skip_spikes(sigma=0.5, window=2, by="grad_norm"),
    "l2_ball": sl.Scale(1.0).project(sl.projections.l2_ball(0.7)),
    "l2_sphere": sl.Scale(1.0).project(sl.projections.l2_sphere(0.7)),
}
"""Transforms that compute a norm of what comes in."""


def updates_of_sizes(tx, dtype):
    """The updates for gradients of several sizes, which grow by 10 % in each of three steps."""
    random = np.random.default_rng(0)
    params = {"w": random.standard_normal((3, 4)), "b": random.standard_normal(4)}
    given = {name: random.standard_normal(p.shape) for name, p in params.items()}
    params, given = jax.tree.map(lambda x: jnp.asarray(x, dtype), (params, given))

    @jax.jit
    def run(size):
        def step(opt, growth):
            grads = jax.tree.map(lambda g: g * (size * growth), given)
            known = {"value": size}
            if "grad_fn" in tx.needs:
                known["grad_fn"] = lambda p: jax.tree.map(lambda g, x: g + size * x, grads, p)
            updates, opt = opt.update(params, grads, **known)
            return opt, updates

        return jax.lax.scan(step, sl.Optimizer(tx, params), jnp.asarray([1.0, 1.1, 1.21], dtype))

    return [jax.device_get(run(jnp.asarray(size, dtype))[1]) for size in (1e-25, 1e-20, 1e20, 1e25)]


@pytest.mark.parametrize("name", slow_except(NORMS, "delayed", "AdaptiveGradClip", "skip_spikes"))
def test_norms_of_gradients_of_any_size_are_those_of_float64(name):
    found = updates_of_sizes(NORMS[name], jnp.float32)
    with jax.enable_x64(True):
        wanted = updates_of_sizes(NORMS[name], jnp.float64)
    for own, exact in zip(map(jax.tree.leaves, found), map(jax.tree.leaves, wanted), strict=True):
        for x, y in zip(own, exact, strict=True):
            # An update that constrains a parameter is a difference of two of its size.
            unit = 1 if NORMS[name].constrains else np.max(np.abs(y))
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6 * unit)


@pytest.mark.parametrize("size", slow_except((1e-25, 1e-20, 1e20, 1e25), 1e-25))
def test_a_common_factor_changes_no_direction(size):
    random = np.random.default_rng(0)
    x, a = ({"w": jnp.asarray(random.standard_normal((2, 3)), jnp.float32)} for _ in range(2))
    large = jax.tree.map(lambda y: y * jnp.float32(size), a)
    b = np.float32(0.3)
    for of in (
        lambda a, _: sl.projections.vector(a),
        lambda a, b: sl.projections.hyperplane(a, b),
        lambda a, b: sl.projections.halfspace(a, b),
    ):
        found, wanted = of(large, b * np.float32(size))(x), of(a, b)(x)
        np.testing.assert_allclose(found["w"], wanted["w"], rtol=1e-5, atol=1e-6)

    @sl.train_step
    def step(model, size):
        return {"a": size * jnp.sum(model["w"] * a["w"]), "b": size * jnp.sum(jnp.cos(model["w"]))}

    for combination in (sl.combine.UPGrad(), sl.combine.PCGrad(), sl.combine.MGDA()):
        tx = sl.sgd(0.0).combine(combination, ("a", "b"))
        metrics = [step(x, sl.Optimizer(tx, x), jnp.float32(s))[1].metrics for s in (size, 1.0)]
        for name in ("weights.a", "weights.b", "cosines.a.b"):
            np.testing.assert_allclose(metrics[0][name], metrics[1][name], rtol=1e-4, atol=1e-5)


def test_a_fit_with_tiny_gradients_goes_on():
    def loss(x):
        return 1e-22 * jnp.sum((x - 1) ** 2)

    result = sl.minimize(loss, sl.sgd(1e21), jnp.zeros(3), max_steps=3, gtol=0.0)
    np.testing.assert_allclose(result.model, 1 - 0.8**3, rtol=1e-5)
