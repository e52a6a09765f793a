"""Grafting: the direction of one transform and the norms of another, layer by layer."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import assert_same_bits, transforms_in


def grafted(tx, grads, params=None):
    params = jax.tree.map(jnp.ones_like, grads) if params is None else params
    update = jax.jit(lambda g, p: tx.update(g, tx.init(p), p, sl.Context(step=0))[0])
    return update(grads, params)


def drawn(shape, dtype=np.float32):
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


def test_each_layer_has_the_direction_of_one_transform_and_the_norm_of_another():
    g = {"b": drawn(3), "w": drawn((4, 3))}
    u = grafted(sl.ScaleBySign().graft(sl.Scale(2.0)), jax.tree.map(jnp.asarray, g))
    for name, x in g.items():
        wanted = np.sign(x) * 2 * np.linalg.norm(x) / np.sqrt(x.size)
        np.testing.assert_allclose(u[name], wanted, rtol=1e-6)

    def make(key):
        return eqx.nn.Linear(3, 4, key=key)

    stack = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 5))
    u = grafted(sl.ScaleBySign().graft(sl.Identity()), stack)
    for x, g in ((u.weight, stack.weight), (u.bias, stack.bias)):
        one = [np.sign(a) * np.linalg.norm(a) / np.sqrt(a.size) for a in np.asarray(g)]
        np.testing.assert_allclose(x, np.stack(one), rtol=1e-6)

    g = {"b": jnp.asarray(drawn(6)), "w": jnp.asarray(drawn((6, 3)))}
    rule = sl.Orthogonalize(scale=None, layout="(2o)i").mask(sl.where.ndim(2))
    u = grafted(rule.graft(sl.Identity()), g)
    for block in (slice(0, 3), slice(3, 6)):
        norm = np.linalg.norm(g["w"][block])
        np.testing.assert_allclose(np.linalg.norm(u["w"][block]), norm, rtol=1e-6)
    np.testing.assert_allclose(u["b"], g["b"], rtol=1e-6)

    zeros = {"w": jnp.zeros((2, 3)), "empty": jnp.zeros((0, 2))}
    for tx in (sl.Identity(), sl.ScaleByShampoo(layout="io")):
        assert_same_bits(grafted(tx.graft(sl.Identity()), zeros), zeros)
    assert_same_bits(grafted(sl.Identity().graft(sl.SetToZero()), zeros), zeros)


@pytest.mark.parametrize(("direction", "size"), [(1e-30, 1e30), (1e30, 1e-30), (3e38, 1e-36)])
def test_norms_are_right_where_their_squares_are_out_of_range(direction, size):
    g = {"w": jnp.array([[3.0, -4.0], [0.0, 1.0]]) / 4}
    tx = sl.Scale(direction).graft(sl.Scale(size))
    np.testing.assert_allclose(grafted(tx, g)["w"], g["w"] * size, rtol=1e-6)


def test_norms_are_those_of_the_magnitude_and_both_have_state():
    g = {"h": jnp.array([300.0, 400.0], jnp.float16), "z": jnp.array([3 + 4j, 0], jnp.complex64)}
    u = grafted(sl.Scale(1e-3).graft(sl.Identity()), g)
    assert u["h"].dtype == jnp.float32
    np.testing.assert_allclose(u["h"], g["h"], rtol=1e-6)
    np.testing.assert_allclose(u["z"], g["z"], rtol=1e-6)

    tx = sl.ScaleByLion(b1=0.8).graft(sl.adam(0.1))
    opt = sl.Optimizer(sl.chain(tx, sl.Scale(-1.0)), {"w": jnp.ones(3)})
    assert float(opt.hyperparams["graft.magnitude.scale_by_learning_rate.learning_rate"]) == (
        pytest.approx(0.1)
    )
    assert float(opt.hyperparams["graft.scale_by_lion.b1"]) == pytest.approx(0.8)
    _, opt = opt.step({"w": jnp.ones(3)}, {"w": jnp.ones(3)})
    np.testing.assert_allclose(opt.state_of("magnitude.scale_by_adam").mu["w"], 0.1, rtol=1e-6)
    assert repr(tx).startswith("sl.ScaleByLion(b1=0.8).graft(")

    parts = sl.ScaleByShampoo().graft(sl.ScaleByRms(0.999, bias_correction=True, eps_in_sqrt=False))
    parts = parts | sl.Ema(0.9) | sl.ScaleByLearningRate(0.1)
    assert parts in list(transforms_in(sl.shampoo(0.1), type(parts)))
