"""Dion, relatives of Muon, floors of updates, the radial brake and the pinned radius."""

import equinox as eqx
import jax
import jax.numpy as jnp
import known_matrix
import numpy as np
import pytest

import slalom as sl
from helpers import sampled, slalom_trajectory, slow_except, transforms_in
from table import EVERYTHING


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
def test_dependent_columns_are_exact_and_scales_are_factors():
    q = drawn(3, 1)
    want, _ = run(sl.contrib.ScaleByDion(0.5, scale=None, layout="oi"), known_matrix.GRADS[:1], q)
    scales = {"spectral": (2 / 3) ** 0.5, "original": 1.0, "match_rms_adamw": 0.2 * 6**0.5}
    for scale, factor in scales.items():
        got, _ = run(
            sl.contrib.ScaleByDion(0.5, scale=scale, layout="oi"), known_matrix.GRADS[:1], q
        )
        np.testing.assert_allclose(got, factor * want, rtol=1e-6, err_msg=scale)

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


@pytest.mark.slow
def test_bases_follow_from_key_and_path_and_floors_are_for_rows():
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

    w = np.array([[3.0, 4.0], [0.0, 0.0], [0.6, 0.8]], np.float32)
    u = np.array([[0.1, 0.0], [0.2, 0.0], [5.0, 0.0]], np.float32)
    rows, _ = sl.contrib.UpdateFloor(0.5, layout="oi").update(jnp.asarray(u), None, jnp.asarray(w))
    np.testing.assert_allclose(rows, [[2.5, 0.0], [0.2, 0.0], [5.0, 0.0]], rtol=1e-6)
    floor = sl.contrib.UpdateFloor(2.0, per="matrix", layout="soi")
    found, _ = floor.update(jnp.stack([u, 0 * u]), None, jnp.stack([w, w]))
    wanted = u * 2 * np.linalg.norm(w) / np.linalg.norm(u)
    np.testing.assert_allclose(found, np.stack([wanted, 0 * u]), rtol=1e-6)

    for tx in (
        sl.contrib.RadialBrake(layout="oi"),
        sl.contrib.PinRadius(layout="oi"),
        sl.contrib.UpdateFloor(9.0),
    ):
        update = jax.jit(lambda u, w, tx=tx: tx.update(u, None, w)[0])
        for scale in (1e-30, 1e30):
            wanted = scale * update(OUTWARD, W)
            np.testing.assert_allclose(update(scale * OUTWARD, scale * W), wanted, rtol=1e-5)


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


START, GRADS = (jnp.asarray(x, jnp.float32) for x in (known_matrix.START, known_matrix.GRADS))
MEAN = sl.Ema(0.95, debias=False, nesterov=True)


def path(tx, steps):
    """The parameters after each step."""
    return slalom_trajectory(tx, START, GRADS[:steps])[0]


def after_decay(rule, rate, weight_decay):
    return rule | sl.AddDecayedWeights(weight_decay) | sl.ScaleByLearningRate(rate)


@pytest.mark.slow
def test_relatives_of_muon_give_known_numbers():
    rule = (
        MEAN
        | sl.ScaleBySign()
        | sl.Orthogonalize(scale=None, layout="oi")
        | sl.ScaleByRms(0.95, 1e-8, eps_in_sqrt=False)
    ).graft(sl.ScaleBySign() | sl.Scale(0.2))
    second = path(after_decay(rule, 0.02, 0.01), 2)[-1]
    wanted = [[0.491509, -0.999915, 1.499398], [1.990909, 0.250215, -0.757700]]
    np.testing.assert_allclose(second, wanted, atol=3e-6)

    rule = (
        sl.contrib.CorrectByMars(layout="oi")
        | sl.Ema(0.95, debias=False)
        | sl.Orthogonalize(scale="match_rms_adamw", layout="oi")
    )
    first, _, third = path(after_decay(rule, 1e-3, 0.1), 3)
    wanted = [[0.499739, -1.000182, 1.499816], [1.999675, 0.249945, -0.750184]]
    np.testing.assert_allclose(first, wanted, atol=2e-6)
    wanted = [[0.499781, -1.000057, 1.498983], [1.998847, 0.249762, -0.750148]]
    np.testing.assert_allclose(third, wanted, atol=2e-6)
    # Its correction has a norm for each matrix.
    stack = jnp.stack([GRADS[0], GRADS[1] / 100])
    tx = sl.contrib.CorrectByMars(layout="soi")
    updates, _ = tx.update(stack, tx.init(stack))
    np.testing.assert_allclose(updates[0], GRADS[0] / jnp.linalg.norm(GRADS[0]), rtol=1e-6)
    np.testing.assert_allclose(updates[1], stack[1], rtol=1e-6)

    (first,) = path(after_decay(MEAN | AURORA, 0.05, 0.025), 1)
    wanted = [[0.464590, -1.034120, 1.504371], [1.973302, 0.266340, -0.789524]]
    np.testing.assert_allclose(first, wanted, atol=3e-6)
    squares = jnp.sum(balanced(GRADS[0]) ** 2, axis=0)
    np.testing.assert_allclose(squares, [0.718202, 0.611328, 0.670470], atol=1e-5)


AURORA = sl.Orthogonalize((2.0, -1.5, 0.5), 12, balance=2, layout="oi")
balanced = jax.jit(lambda g: AURORA.update(g, None)[0])


def test_balanced_updates_ignore_the_size_of_gradients_and_constraints_other_updates():
    g = GRADS[0].at[:, 1].set(0.0).T
    wanted = balanced(g)
    np.testing.assert_array_equal(wanted[1], 0)
    np.testing.assert_allclose(wanted.T @ wanted, 1.5 * np.eye(2), atol=1e-3)
    for scale in (1e-30, 1e30):
        updates = balanced(scale * g)
        np.testing.assert_allclose(updates, wanted, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(updates[1], 0)
    # Square matrices need no balance.
    g = jax.random.normal(jax.random.key(0), (3, 3))
    plain = sl.Orthogonalize((2.0, -1.5, 0.5), 12, layout="oi")
    np.testing.assert_array_equal(balanced(g), jax.jit(plain.update)(g, None)[0])

    assert {*CONSTRAINTS} == {"KeepInitialNorm", "KeepParamsNonnegative", "PinRadius", "QKClip"}
    for constraint in CONSTRAINTS.values():
        tx = sl.sgd(0.1) | constraint
        for wrap in (
            lambda tx: tx.schedule_free(),
            lambda tx: tx.every_k(2).mechanize(),
            lambda tx: tx.graft(sl.sgd(0.1)),
            lambda tx: sl.sgd(0.1).graft(tx.only(sl.where.everything())),
        ):
            with pytest.raises(ValueError, match="cannot be inside"):
                wrap(tx)


W = jnp.diag(jnp.array([3.0, 4.0]))
OUTWARD = -jnp.ones((2, 2))


@pytest.mark.slow
def test_the_brake_and_the_pin_give_known_numbers_however_small_the_step():
    # From the equations of modded-nanogpt's record: a step outwards, of which half is taken.
    tx = (
        sl.contrib.RadialBrake(layout="oi")
        | sl.ScaleByLearningRate(0.1)
        | sl.contrib.PinRadius(layout="oi")
    )
    after, _ = sl.Optimizer(tx, W).step(W, OUTWARD)
    wanted = [[3.056787, 0.099960], [0.099960, 4.042396]]
    np.testing.assert_allclose(after, wanted, atol=2e-6)
    np.testing.assert_allclose(jnp.linalg.norm(after), 5.07, rtol=1e-6)
    # Steps inwards and matrices of zeros pass the brake.
    brake = sl.contrib.RadialBrake(1.0, layout="oi")
    np.testing.assert_array_equal(brake.update(-OUTWARD, None, W)[0], -OUTWARD)
    np.testing.assert_array_equal(brake.update(OUTWARD, None, 0 * W)[0], OUTWARD)
    tangent, _ = brake.update(OUTWARD, None, W)
    np.testing.assert_allclose(jnp.sum(tangent * W), 0, atol=1e-5)

    tangent = jnp.array([[0.0, 1.0], [-1.0, 0.0]])
    pin = sl.contrib.PinRadius(layout="oi")
    np.testing.assert_allclose(jnp.linalg.norm(W + pin.update(tangent, None, W)[0]), 5, rtol=1e-6)
    small, _ = pin.update(1e-6 * tangent, None, W)
    np.testing.assert_allclose(small, 1e-6 * tangent, rtol=1e-5, atol=1e-11)
    np.testing.assert_array_equal(pin.update(tangent, None, 0 * W)[0], tangent)


PARTS = [part for tx in EVERYTHING.values() for part in transforms_in(tx)]
CONSTRAINTS = {type(part).__name__: part for part in PARTS if part.constrains}
TERMS = sl.combine.Terms(jnp.array([1.0, 2.0]), jnp.array([[2.0, -1.0], [-1.0, 3.0]]))
AROUND = {
    "average": lambda tx: tx.average(),
    "combine": lambda tx: tx.combine(sl.combine.UPGrad(), ("first", "second")),
    "every_k": lambda tx: tx.every_k(2).every_k(1),
    "graft": lambda tx: sl.ScaleByAdam().graft(sl.Identity()) | tx,
    "if_finite": lambda tx: tx.if_finite(check="both").record(),
    "maximize": lambda tx: tx.maximize(),
    "mechanize": lambda tx: sl.sgd(1.0).mechanize(s_init=0.1) | tx[sl.KeepInitialNorm],
    "partition": lambda tx: tx.partition({sl.where.path("w"): sl.Trace(0.9) | tx}).when(
        lambda context, updates: context.step != 1, otherwise="zero"
    ),
    "scale_loss": lambda tx: tx.skip_spikes().scale_loss(4.0),
    "split_complex": lambda tx: tx.split_complex(),
    "store": lambda tx: (sl.Trace(0.9) | tx).store("int8", min_size=1),
    "write": lambda tx: tx.write("kahan"),
}


@pytest.mark.parametrize("name", slow_except(AROUND, "partition"))
def test_a_norm_is_kept_inside_of_every_wrapper_that_takes_it(name):
    params = {"w": jnp.arange(1.0, 7).reshape(2, 3), "b": jnp.ones(3)}
    opt = sl.Optimizer(AROUND[name](sl.sgd(0.5) | sl.KeepInitialNorm()), params)
    model = params
    for i in range(4):
        grads = jax.tree.map(lambda x, i=i: jnp.cos(x * (i + 1)), params)
        model, opt = opt.step(model, grads, value=jnp.ones(()), terms=TERMS)
    assert not jnp.allclose(model["w"], params["w"], atol=0.1)
    for before, after in zip(*map(jax.tree.leaves, (params, model)), strict=True):
        np.testing.assert_allclose(*map(jnp.linalg.norm, (after, before)), rtol=1e-6)
