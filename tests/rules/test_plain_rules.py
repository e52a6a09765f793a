"""What is special about the rules that adapt no scale of their own, and gradient noise scales."""

import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import after_training, assert_same_bits, distance, updates_of


def test_functions_may_miss_parameters_and_return_the_same_shape():
    updates, params = {"w": jnp.array([1.0, -2.0])}, {"w": jnp.array([3.0, 4.0])}
    for kind in (sl.Stateless, sl.StatelessPerLeaf):
        tx = kind(lambda u, p: u if p is None else p)
        np.testing.assert_array_equal(tx.update(updates, None)[0]["w"], updates["w"])
        np.testing.assert_array_equal(tx.update(updates, None, params)[0]["w"], params["w"])

    tx = sl.Stateless(lambda u, p: jax.tree.map(lambda x: x * 2, u))
    (made,), _ = tx.update([jnp.ones(2, jnp.bfloat16)], None)
    assert made.dtype == jnp.float32
    assert not made.weak_type
    per_leaf = sl.StatelessPerLeaf(lambda u, p: u.sum())
    for tx in (sl.Stateless(lambda u, p: {"w": u["w"].sum()}), per_leaf):
        with pytest.raises(ValueError, match=r"less.* 'w' has shape \(\).*shape \(2,\)"):
            tx.update({"w": jnp.ones(2)}, None)


@pytest.mark.slow
def test_trust_ratios_are_finite_and_centralize_reads_layouts():
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        zero, one, large = jnp.zeros(3, dtype), jnp.ones(3, dtype), jnp.full(3, 1000.0, dtype)
        rtol = 1e-2 if dtype == jnp.bfloat16 else 1e-3
        for u, p, expected in ((zero, one, 0), (one, zero, 1), (large, one, 1), (one, large, 1e3)):
            made, _ = sl.ScaleByTrustRatio().update(u, None, p)
            np.testing.assert_allclose(made, expected, rtol=rtol)
        for tx in (sl.ScaleByParamBlockNorm(), sl.ScaleByParamBlockRms()):
            np.testing.assert_allclose(tx.update(one, None, zero)[0], 1e-3, rtol=1e-5)

    drawn = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3)), jnp.float32)
    keys = jax.random.split(jax.random.key(0))
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 4, key=key))(keys)
    layers = jax.tree.map(lambda x: x * x, layers)
    embedding = eqx.nn.Embedding(4, 3, key=jax.random.key(0))
    conv = eqx.filter(eqx.nn.Conv2d(2, 3, 2, key=jax.random.key(0)), eqx.is_array)
    params = {"layers": layers, "embedding": embedding, "io": drawn, "unknown": drawn, "conv": conv}
    made, _ = sl.Centralize(layout={sl.where.path("io"): "io"}).update(params, None)
    np.testing.assert_allclose(made["layers"].weight.mean(2), 0, atol=1e-6)
    assert float(jnp.min(jnp.abs(layers.weight.mean(2)))) > 1e-3
    np.testing.assert_array_equal(made["layers"].bias, layers.bias)
    np.testing.assert_allclose(made["embedding"].weight.mean(1), 0, atol=1e-6)
    np.testing.assert_allclose(made["io"].mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(made["unknown"].mean(1), 0, atol=1e-6)
    np.testing.assert_allclose(made["conv"].weight.mean((1, 2, 3)), 0, atol=1e-7)
    np.testing.assert_array_equal(made["conv"].bias, conv.bias)


def test_sizes_are_bounded_leaf_by_leaf_finite_at_zero_and_nan_where_a_number_is():
    # 1000² is infinite in float16.
    updates = {"large": jnp.full((2, 2), 1000, jnp.float16), "zero": jnp.zeros(3, jnp.float16)}
    made, _ = sl.ClipByBlockRms(0.5).update(updates, None)
    np.testing.assert_allclose(made["large"], 0.5, rtol=1e-6)
    np.testing.assert_array_equal(made["zero"], 0)
    made, _ = sl.NormalizeByUpdateNorm(eps=0.0).update(updates, None)
    np.testing.assert_allclose(made["large"], 0.5, rtol=1e-6)
    made, _ = sl.NormalizeByUpdateNorm(eps=0.0).update({"zero": updates["zero"]}, None)
    np.testing.assert_array_equal(made["zero"], 0)
    updates = {"bad": jnp.array([1.0, jnp.nan]), "good": jnp.array([3.0, 4.0])}
    made, _ = sl.ClipByBlockRms(0.5).update(updates, None)
    assert jnp.all(jnp.isnan(made["bad"]))
    np.testing.assert_allclose(sl.tree.rms(made["good"]), 0.5, rtol=1e-6)


def noises(tx, params, n=3):
    """What the first `n` updates add to zero."""
    return updates_of(tx, jax.tree.map(lambda p: jnp.zeros((n, *p.shape), p.dtype), params))


def test_noise_is_new_for_each_leaf_and_step_reproducible_and_scheduled():
    params = {"a": jnp.zeros(5), "b": jnp.zeros(5)}
    made = noises(sl.AddNoise(1.0, 0.0, key=1), params)
    assert len(np.unique([*made.values()])) == 2 * 3 * 5
    for key in (1, np.int64(1), jax.random.key(1), jax.random.PRNGKey(1)):
        assert_same_bits(noises(sl.AddNoise(1.0, 0.0, key=key), params), made)
    assert distance(noises(sl.AddNoise(1.0, 0.0, key=2), params), made) > 0.1

    made = noises(sl.AddNoise(lambda n: jnp.where(n < 1, 1.0, 0.0), 0), jnp.zeros(4))
    assert jnp.all(made[0] != 0)
    np.testing.assert_array_equal(made[1], 0)

    with pytest.raises(ValueError, match=r"AddNoise\.eta must be in \[0, inf\), got -1\.0"):
        sl.AddNoise(-1, 0.55)
    numbers = (1.5, True, "a", -1, 2**31)
    arrays = (jnp.ones(2), jnp.ones((2, 2), int), jax.random.split(jax.random.key(0)))
    for key in (*numbers, *arrays):
        with pytest.raises((TypeError, ValueError), match=r"AddNoise.key must be"):
            sl.AddNoise(0.1, 0.55, key=key)
    tx = sl.AddNoise(0.1, 0.55)
    with pytest.raises(TypeError, match=r"AddNoise needs 'step'.*Context\(step=n\)"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


@pytest.mark.slow
def test_the_variance_fades_with_the_clock_and_keys_may_be_swept():
    params = {"real": jnp.zeros(20_000), "complex": jnp.zeros(20_000, jnp.complex64)}
    made = noises(sl.AddNoise(4.0, 0.5), params)
    for x in made.values():
        mean_square = jnp.mean(sl.tree.abs_squared(x), 1)
        np.testing.assert_allclose(mean_square, 4.0 / np.arange(1, 4) ** 0.5, rtol=0.05)
    parts = made["complex"]
    np.testing.assert_allclose(parts.real.var(1), parts.imag.var(1), rtol=0.05)

    params = {"w": jnp.zeros(4)}

    def run(key):
        moved, _ = sl.Optimizer(sl.noisy_sgd(0.1, key=key), params).step(params, params)
        return moved["w"]

    keys = jax.random.split(jax.random.key(0), 3)
    together = jax.jit(jax.vmap(run))(keys)
    for row, key in zip(together, keys, strict=True):
        np.testing.assert_allclose(row, run(key), rtol=1e-6)


KEYS = (3, jax.random.key(3), jax.random.PRNGKey(3), jax.random.key(3, impl="rbg"))


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS, ids=("int", "key", "words", "rbg"))
def test_keys_of_every_kind_are_donated_scanned_mapped_and_saved(key):
    params = {"w": jnp.zeros(4)}
    tx = sl.noisy_sgd(0.1, key=key)
    opt = sl.Optimizer(tx, params)
    assert "donated" not in repr(opt.transform)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(opt))

    def twice(params, opt):
        return jax.lax.scan(lambda c, _: (c[1].step(c[0], c[0]), None), (params, opt), length=2)[0]

    expected, last = jax.jit(twice)(params, opt)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, last.state)
    file.seek(0)
    loaded = eqx.tree_deserialise_leaves(file, opt.state)
    assert_same_bits(loaded, last.state)
    # The same transform, bound again, finds its key alive after the first binding's donation.
    run = jax.jit(lambda params, state, opt: opt.step(params, params), donate_argnums=(0, 1))
    copies = jax.tree.map(jnp.copy, (params, opt.state))
    moved, opt = run(*copies, opt)
    moved, _ = opt.step(moved, moved)
    np.testing.assert_allclose(moved["w"], expected["w"], rtol=1e-6)
    step = sl.train_step(lambda p: jnp.sum(p["w"] ** 2) / 2)
    trained, _, _ = after_training(step, tx, 2, {"w": jnp.zeros(4)})
    np.testing.assert_allclose(trained["w"], expected["w"], rtol=1e-6)


def test_polyak_halves_a_parabola_and_stops_at_the_bound_and_at_zero_gradients():
    # f = ½x², g = x: the step is f/g² = ½.
    opt = sl.Optimizer(sl.polyak_sgd(), jnp.array(4.0))
    with pytest.raises(TypeError, match=r"ScaleByPolyak.*needs 'value'"):
        opt.step(jnp.array(4.0), jnp.array(4.0))
    moved, opt = opt.step(jnp.array(4.0), jnp.array(4.0), value=8.0)
    np.testing.assert_allclose(moved, 2.0, rtol=1e-6)
    # `sl.train_step` passes the loss itself.
    moved, _, loss = sl.train_step(lambda x: x**2 / 2)(moved, opt)
    np.testing.assert_allclose([loss, moved], [2.0, 1.0], rtol=1e-6)

    u = jnp.array([3.0, 4.0])

    def made(variant, u):
        tx, context = sl.ScaleByPolyak(1.0, variant=variant), sl.Context(value=jnp.float32(0.5))
        return tx.update(u, None, None, context)[0]

    np.testing.assert_allclose(made("sps", u), -0.02 * u, rtol=1e-6)
    np.testing.assert_array_equal(made("sps+", u), 0 * u)
    np.testing.assert_array_equal(made("sps", 0 * u), 0 * u)
    with pytest.raises(ValueError, match=r"variant must be 'sps' or 'sps\+', got 'other'"):
        sl.ScaleByPolyak(variant="other")


def test_negative_parameters_stop_at_zero_nans_are_counted_and_freeze_stops_both():
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        params = jnp.array([0.3, 0.3, -0.2, 0.0], dtype)
        opt = sl.Optimizer(sl.sgd(1.0) | sl.KeepParamsNonnegative(), params)
        moved, _ = opt.step(params, jnp.array([0.7, 0.1, 0.0, -0.5], dtype))
        np.testing.assert_array_equal(moved, jnp.array([0, params[1] - 0.1, 0, 0.5], dtype))
    with pytest.raises(TypeError, match=r"KeepParamsNonnegative.*'w'.*complex64.*\.mask\("):
        sl.KeepParamsNonnegative().init({"w": jnp.ones(2, jnp.complex64)})

    clean = {"a": jnp.ones(2), "b": jnp.array([1.0, jnp.inf]), "c": jnp.ones(1, jnp.complex64)}
    dirty = {**clean, "a": jnp.array([jnp.nan, 5.0]), "c": jnp.array([complex(jnp.nan, 1)])}
    tx = sl.ZeroNans()
    state = tx.init(clean)
    made, state = tx.update(dirty, state)
    np.testing.assert_array_equal(made["a"], [0, 5])
    np.testing.assert_array_equal(made["b"], clean["b"])
    np.testing.assert_array_equal(made["c"], [0])
    _, state = tx.update(clean, state)
    _, state = tx.update({**clean, "a": dirty["a"]}, state)
    np.testing.assert_array_equal(state.found_nan, [2, 0, 1])

    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    opt = sl.Optimizer(sl.adamw(0.1) | sl.freeze(sl.where.ndim(1)), params)
    moved, _ = opt.step(params, jax.tree.map(lambda p: p * jnp.nan, params))
    assert_same_bits(moved["b"], params["b"])
    assert jnp.all(jnp.isnan(moved["w"]))


def test_held_back_updates_come_as_a_sum_and_a_nan_ends_with_its_window():
    tx = sl.ApplyEvery(2)
    state, made = tx.init(jnp.ones(())), []
    for g in (1.0, 2.0, jnp.nan, 3.0, 4.0, 5.0):
        u, state = tx.update(jnp.array(g), state)
        made.append(float(u))
    np.testing.assert_array_equal(made, [0, 3, 0, jnp.nan, 0, 9])
    opt = sl.Optimizer(tx | sl.sgd(0.1), jnp.ones(()))
    wrote = []
    for _ in range(4):
        _, opt = opt.step(jnp.ones(()), jnp.ones(()))
        wrote.append(bool(opt.has_updated))
    assert wrote == [False, True, False, True]
    for k, error in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"ApplyEvery\.k must be"):
            sl.ApplyEvery(k)


MEAN, DEVIATION = 0.5, 2.0
SIZE = 12
EXACT = SIZE * DEVIATION**2 / (SIZE * MEAN**2)
"""The noise scale of gradients that are normal with this mean and deviation."""


def draw(key, examples):
    w = MEAN + DEVIATION * jax.random.normal(key, (examples, SIZE))
    return {"w": w[:, :8].reshape(-1, 2, 4), "b": w[:, 8:], "hole": None}


@pytest.mark.slow
def test_noise_scales_are_their_formula_from_examples_and_microbatches():
    tx = sl.contrib.MeasureGradientNoise(0.9999) | sl.sgd(0.0)
    params = {"w": jnp.zeros((2, 4)), "b": jnp.zeros(4), "hole": None}

    @jax.jit
    def run(opt):
        def body(opt, key):
            return opt.update(params, draw(key, 8))[1], None

        return jax.lax.scan(body, opt, jax.random.split(jax.random.key(0), 2_000))[0]

    metrics = run(sl.Optimizer(tx, params)).metrics
    np.testing.assert_allclose(metrics["noise_scale"], EXACT, rtol=0.05)
    np.testing.assert_allclose(metrics["gradient_variance"], SIZE * DEVIATION**2, rtol=0.05)
    np.testing.assert_allclose(metrics["squared_gradient_norm"], SIZE * MEAN**2, rtol=0.05)

    grads = draw(jax.random.key(1), 5)
    params = jax.tree.map(lambda g: g[0], grads)
    tx = sl.contrib.MeasureGradientNoise()
    updates, state = tx.update(grads, tx.init(params), params)
    jax.tree.map(lambda u, g: np.testing.assert_allclose(u, g.mean(0), rtol=1e-6), updates, grads)
    rows = np.concatenate([np.asarray(g).reshape(5, -1) for g in jax.tree.leaves(grads)], 1)
    trace = np.sum(np.var(rows, 0, ddof=1))
    np.testing.assert_allclose(state.variance, trace, rtol=1e-5)
    norm = np.sum(rows.mean(0) ** 2) - trace / 5
    np.testing.assert_allclose(state.squared_norm, norm, rtol=1e-4)

    def loss(w, x):
        return jnp.mean((x - w[None]) ** 2)

    x = jax.random.normal(jax.random.key(0), (8, 3))
    tx = sl.contrib.MeasureGradientNoise() | sl.sgd(0.1)
    w = jnp.ones(3)
    found = []
    for microbatches in (None, 4):
        step = sl.train_step(loss, donate=False, microbatches=microbatches)
        found.append(step(w, sl.Optimizer(tx, w), x)[1].metrics["noise_scale"])
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_two_batch_sizes_give_the_same_and_bad_input_is_refused():
    # The expected squared norm of the mean of n gradients.
    def squared(n):
        return SIZE * (MEAN**2 + DEVIATION**2 / n)

    found = sl.contrib.gradient_noise_scale(squared(4), 4, squared(64), 64)
    np.testing.assert_allclose(found, EXACT, rtol=1e-5)
    assert sl.contrib.gradient_noise_scale(2.0, 1, 0.5, 2) == jnp.inf

    with pytest.raises(ValueError, match=r"^gradient_noise_scale needs a large batch that is larg"):
        sl.contrib.gradient_noise_scale(1.0, 4, 1.0, 4)
    tx, w = sl.contrib.MeasureGradientNoise(), jnp.ones(3)
    with pytest.raises(ValueError, match=r"^MeasureGradientNoise needs the gradients of at"):
        tx.update(w[None], tx.init(w), w)
