"""Dion: numbers from the authors' equations, and what holds for every matrix."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from known_matrix import GRADS, START

import slalom as sl
from helpers import sampled


def begun(tx, params, basis):
    """The state of a `ScaleByDion` with this Q."""
    state = tx.init(params)
    q = jnp.asarray(basis).conj().T[None]
    assert state.basis.shape == q.shape
    return eqx.tree_at(lambda s: s.basis, state, q.astype(state.basis.dtype))


def drawn(*shape, seed=0, dtype=np.float64):
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape)
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * random.standard_normal(shape)
    return x.astype(dtype)


def by_equations(grads, q, b1, eps=0.0):
    """P·Qᴴ after the last of these gradients, and M, with a QR decomposition in NumPy."""
    m = np.zeros_like(grads[0])
    u = m
    for g in grads:
        m = m + g
        p, _ = np.linalg.qr(m @ q)
        r = m.conj().T @ p
        m = m - (1 - b1) * p @ r.conj().T
        q = r / (np.linalg.norm(r, axis=0) + eps)
        u = p @ q.conj().T
    return u, m


def run(tx, grads, q):
    state = begun(tx, jnp.asarray(grads[0]), q)
    update, u = jax.jit(tx.update), None
    for g in grads:
        u, state = update(jnp.asarray(g), state)
    return np.asarray(u), state


def test_dion_gives_known_numbers():
    with jax.enable_x64(True):
        rule = sl.contrib.ScaleByDion(0.5, scale=None, layout="oi")
        first, state = run(rule, GRADS[:1], np.array([[1.0], [0.0], [0.0]]))
        wanted = [[0.554700, 0.665640, 0.221880], [0.277350, 0.332820, 0.110940]]
        np.testing.assert_allclose(first, wanted, atol=6e-7)
        wanted = [[0.95, 1.94, -1.02], [0.475, -1.03, 2.99]]
        np.testing.assert_allclose(state.mu, wanted, atol=1e-12)

        tx = sl.contrib.ScaleByDion(0.5, layout="oi") | sl.AddDecayedWeights(0.01)
        tx = tx | sl.ScaleByLearningRate(0.01)
        p = jnp.asarray(START)
        links = tx.init(p)
        state = (begun(tx.links[0], p, np.array([[1.0], [0.0], [0.0]])), *links[1:])
        update, found = jax.jit(tx.update), []
        for g in GRADS[:2]:
            u, state = update(jnp.asarray(g), state, p)
            p = p + u
            found.append(p)
        wanted = [[0.495421, -1.005335, 1.498038], [1.997535, 0.247258, -0.750831]]
        np.testing.assert_allclose(found[0], wanted, atol=6e-7)
        wanted = [[0.491304, -1.006635, 1.493267], [1.994001, 0.246085, -0.754545]]
        np.testing.assert_allclose(found[1], wanted, atol=6e-7)


DTYPES = (np.float32, np.float64, np.complex64, np.complex128)
CASES = [(shape, dtype) for shape in [(12, 20), (20, 12)] for dtype in DTYPES]


@pytest.mark.parametrize("case", sampled(CASES), ids=str)
def test_dion_follows_its_equations(case):
    shape, dtype = case
    tolerance = 1e-12 if np.finfo(dtype).bits == 64 else 2e-5
    grads = [drawn(*shape, seed=i, dtype=dtype) for i in range(3)]
    q = drawn(shape[1], 4, seed=9, dtype=dtype)
    with jax.enable_x64(True):
        u, state = run(sl.contrib.ScaleByDion(1 / 3, 0.9, None, layout="oi"), grads, q)
    wide = np.result_type(dtype, np.float64)
    want, m = by_equations([g.astype(wide) for g in grads], q.astype(wide), 0.9)
    assert u.dtype == dtype
    np.testing.assert_allclose(u, want, atol=tolerance)
    np.testing.assert_allclose(state.mu, m, atol=10 * tolerance)


@pytest.mark.slow
def test_the_scale_of_an_update_does_not_depend_on_the_size_of_gradients():
    tx = sl.contrib.ScaleByDion(0.5, layout="oi")
    grads = drawn(3, 8, 6, dtype=np.float32)
    q = drawn(6, 3, seed=1)
    want, _ = run(tx, grads, q)
    for size in (1e-30, 1e-3, 1e30):
        got, _ = run(tx, np.float32(size) * grads, q)
        np.testing.assert_allclose(got, want, atol=1e-5, err_msg=f"{size}")

    q = drawn(3, 1)
    want, _ = run(sl.contrib.ScaleByDion(0.5, scale=None, layout="oi"), GRADS[:1], q)
    scales = {"spectral": (2 / 3) ** 0.5, "original": 1.0, "match_rms_adamw": 0.2 * 6**0.5}
    for scale, factor in scales.items():
        got, _ = run(sl.contrib.ScaleByDion(0.5, scale=scale, layout="oi"), GRADS[:1], q)
        np.testing.assert_allclose(got, factor * want, rtol=1e-6, err_msg=scale)


def test_the_first_basis_follows_from_key_path_and_rank_and_zeros_keep_it():
    tx = sl.contrib.ScaleByDion(0.5, layout="oi")
    zeros = jnp.zeros((4, 6))
    before = tx.init(zeros)
    update, after = jax.jit(tx.update)(zeros, before)
    np.testing.assert_array_equal(update, 0)
    np.testing.assert_array_equal(after.mu, 0)
    np.testing.assert_array_equal(after.basis, before.basis)

    ranks = {0.1: 3, 1 / 3: 10, 0.25: 8, 1e-6: 1, 1.0: 30}
    assert {fraction: sl.contrib.ScaleByDion(fraction).rank(30, 40) for fraction in ranks} == ranks
    assert sl.contrib.ScaleByDion(1).rank(30, 40) == 30
    assert sl.contrib.ScaleByDion(0.1).rank(40, 0) == 0

    params = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4))}
    where = {sl.where.everything(): "oi"}
    state = sl.contrib.ScaleByDion(layout=where).init(params)
    again = sl.contrib.ScaleByDion(key=jax.random.key(0), layout=where).init({"b": params["b"]})
    other = sl.contrib.ScaleByDion(key=1, layout=where).init(params)
    np.testing.assert_array_equal(state.basis["b"], again.basis["b"])
    assert not jnp.allclose(state.basis["a"], state.basis["b"])
    assert not jnp.allclose(state.basis["b"], other.basis["b"])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 3])
def test_an_update_has_no_larger_rank_than_the_momentum(rank):
    g = np.ones((48, 32)) if rank == 1 else drawn(48, 3) @ drawn(3, 32, seed=1)
    tx = sl.contrib.ScaleByDion(0.5, scale=None, layout="oi")
    g = jnp.asarray(g, jnp.float32)
    before = tx.init(g)
    update, after = jax.jit(tx.update)(g, before)
    values = np.linalg.svd(update, compute_uv=False)
    assert np.all(values[:rank] > 0.2)
    assert np.all(values[rank:] < 1e-6)
    np.testing.assert_array_equal(after.basis[0, rank:], before.basis[0, rank:])
    np.testing.assert_allclose(np.linalg.norm(after.basis[0, :rank], axis=1), 1, atol=1e-6)


@pytest.mark.slow
def test_nearly_dependent_columns_are_as_accurate_as_those_of_a_decomposition():
    u, _ = np.linalg.qr(drawn(96, 64))
    v, _ = np.linalg.qr(drawn(64, 64, seed=1))
    g = (u * np.logspace(0, -3, 64) @ v).astype(np.float32)
    q = drawn(64, 32, seed=2, dtype=np.float32)
    got, _ = run(sl.contrib.ScaleByDion(0.5, scale=None, layout="oi"), [g], q)
    p, _ = np.linalg.qr(g @ q)
    r = g.T @ p
    householder = p @ (r / np.linalg.norm(r, axis=0)).T
    want, _ = by_equations([g.astype(np.float64)], q.astype(np.float64), 0.95)
    assert np.abs(got - want).max() <= 2 * np.abs(householder - want).max() + 1e-6
