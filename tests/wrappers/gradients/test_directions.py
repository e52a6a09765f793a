"""The direction of a step: grafts, SAM and ascent."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import (
    Counting,
    after_training,
    assert_close,
    assert_same_bits,
    mean_square,
    mlp,
    params_of,
    transforms_in,
)
from table import GRADIENT_ROWS, rows


def grafted(tx, grads, params=None):
    params = jax.tree.map(jnp.ones_like, grads) if params is None else params
    update = jax.jit(lambda g, p: tx.update(g, tx.init(p), p, sl.Context(step=0))[0])
    return update(grads, params)


def drawn(shape, dtype=np.float32):
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


@pytest.mark.slow
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


X = jax.random.normal(jax.random.key(1), (4, 2))
Y = jnp.sin(X.sum(axis=1, keepdims=True))
MODEL = mlp()


@eqx.filter_jit
def by_the_book(model, steps, rho, rate, every):
    """Adaptive SAM, on every few steps."""
    for n in range(steps):
        grads = eqx.filter_grad(mean_square)(model, X, Y)
        if n % every == 0:
            sizes = jax.tree.map(jnp.abs, params_of(model))
            scaled = jax.tree.map(jnp.multiply, sizes, grads)
            norm = jnp.sqrt(sum(jnp.sum(u**2) for u in jax.tree.leaves(scaled)))
            up = jax.tree.map(lambda s, u, n=norm: rho * s * u / n, sizes, scaled)
            grads = eqx.filter_grad(mean_square)(eqx.apply_updates(model, up), X, Y)
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -rate * g, grads))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [None, 2])
def test_steps_are_those_of_the_textbook(microbatches):
    expected = by_the_book(MODEL, 3, 0.3, 0.1, every=2)
    step = sl.train_step(mean_square, donate=False, microbatches=microbatches)
    tx = sl.sgd(0.1).sam(0.3, adaptive=True, every=2)
    for either in (tx, tx.scale_loss()):
        model, _, _ = after_training(step, either, 3, MODEL, X, Y)
        assert_close(params_of(model), params_of(expected), rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_both_gradients_see_the_same_masks_and_transformation():
    def loss_fn(w, key):
        return jnp.sum(jnp.where(jax.random.bernoulli(key, 0.5, w.shape), w**2, 0))

    doubled = Counting(lambda grads: 2 * grads)
    step = sl.train_step(loss_fn, transform_grads=doubled)
    w = jnp.arange(1.0, 9.0)
    new, _, loss = step(w, sl.Optimizer(sl.sgd(0.1).sam(0.5), w), jax.random.key(3))
    assert doubled.traces == 2
    kept = jax.random.bernoulli(jax.random.key(3), 0.5, w.shape).astype(float)
    grad = 4 * kept * w
    worst = w + 0.5 * grad / jnp.linalg.norm(grad)
    np.testing.assert_allclose(new, w - 0.1 * 4 * kept * worst, rtol=1e-5)
    np.testing.assert_allclose(loss, jnp.sum(kept * w**2), rtol=1e-6)


@pytest.mark.slow
def test_second_gradients_of_groups_idle_steps_and_overflows():
    vectors = sl.where.ndim(1)

    @sl.train_step
    def step(model):
        return jnp.sum(model["m"] ** 2) * jnp.sum(model["v"] ** 2)

    model = {"m": jnp.ones((2, 2)), "v": jnp.array([3.0, 4.0])}
    tx = sl.sgd(0.1).partition({vectors: sl.sgd(0.01).sam(1.0)})
    new, _, _ = step(model, sl.Optimizer(tx, model))
    np.testing.assert_allclose(new["m"], model["m"] * (1 - 0.1 * 2 * 25), rtol=1e-6)
    worst = model["v"] * (1 + 1 / 5)
    np.testing.assert_allclose(new["v"], model["v"] - 0.01 * 2 * 4 * worst, rtol=1e-6)

    def loss_fn(w):
        return jnp.sum(jnp.tanh(w) ** 2)

    w = jnp.ones(5)
    tx = sl.sgd(0.1).sam(0.5, every=3)
    text = sl.train_step(loss_fn).lower(w, sl.Optimizer(tx, w)).as_text()
    outside, *_ = text.partition("stablehlo.case")
    assert outside.count("stablehlo.tanh") == 1
    assert text.count("stablehlo.tanh") == 2

    def loss_fn(w):
        return jnp.sum(jnp.where(w > 1, jnp.inf, 1.0) * w)

    w = jnp.array([0.9, 0.5])
    opt = sl.Optimizer(sl.sgd(0.1).if_finite().sam(1.0).scale_loss(), w)
    new, opt, _ = sl.train_step(loss_fn)(w, opt)
    np.testing.assert_array_equal(new, w)
    assert opt.metrics["scale_loss.last_finite"]  # the first gradient was


def test_losses_places_and_second_gradients_by_hand_are_checked():
    w = jnp.zeros(3)
    new, _, _ = sl.train_step(lambda w: jnp.sum(w**2))(w, sl.Optimizer(sl.sgd(0.1).sam(), w))
    assert jnp.all(new == 0)

    opt = sl.Optimizer(sl.sgd(0.1).sam(), MODEL)
    with pytest.raises(TypeError, match=r"Sam \('sam'\) needs 'grad_fn': pass the loss as a funct"):
        opt.step(MODEL, MODEL)
    tx = sl.sgd(0.1).sam()
    with pytest.raises(TypeError, match="Sam needs 'grad_fn'"):
        tx.update(X, tx.init(X), X)
    converted = sl.interop.to_optax(tx)
    with pytest.raises(TypeError, match=r"params, value_fn=\.\.\."):
        converted.update(X, converted.init(X), X)

    model = {"w": X}
    opt = sl.Optimizer(sl.sgd(0.1).sam(), model)
    with pytest.raises(ValueError, match="The result of `grad_fn` does not have the structure"):
        opt.step(model, model, grad_fn=lambda model: {"v": X})
    with pytest.raises(TypeError, match="No transform uses 'grad_fn'"):
        sl.Optimizer(sl.sgd(0.1), model).step(model, model, grad_fn=lambda model: model)
    with pytest.raises(ValueError, match=r"`\(clip \| adam\)\.sam\(0\.05\)`"):
        sl.ClipByGlobalNorm(1.0) | sl.sgd(0.1).sam()
    with pytest.raises(ValueError, match=r"`tx\.every_k\(k\)\.sam\(\.\.\.\)`"):
        sl.sgd(0.1).sam().every_k(2)

    def loss_fn(w):
        return jnp.sum(w**2) / 2

    w = jnp.array([3.0, 4.0])
    opt = sl.Optimizer(sl.sgd(0.1).sam(1.0).scale_loss(2.0**10), w)
    new, _ = opt.step(w, jax.grad(lambda w: opt.loss_scale * loss_fn(w))(w), value_fn=loss_fn)
    np.testing.assert_allclose(new, w - 0.1 * w * (1 + 1 / 5), rtol=1e-6)


model = {"w": jnp.linspace(-1, 1, 6).reshape(2, 3), "b": jnp.linspace(0.5, 1, 3)}
is_matrix = sl.where.ndim(2)


def loss_fn(params):
    return sum(jnp.sum(0.5 * x + 0.05 * x**2) for x in jax.tree.leaves(params))


def three_steps(tx, sign):
    """Steps along or against the loss, given all that a step may know."""

    def value_fn(params):
        return sign * loss_fn(params)

    def body(carry, _):
        params, opt = carry
        value, grads = jax.value_and_grad(value_fn)(params)
        params, opt = opt.step(params, grads, value=value, grad=grads, value_fn=value_fn)
        return (params, opt), params

    run = jax.jit(lambda opt: jax.lax.scan(body, (model, opt), None, 3))
    (_, opt), path = run(sl.Optimizer(tx, model))
    return path, opt


@pytest.mark.filterwarnings("ignore:A step of this optimizer ascends")
@rows(GRADIENT_ROWS, everyday=("ScaleByAdam", "Average", "EveryK, skip", "ScaleByPolyak"))
def test_to_maximize_is_to_minimize_the_negative(row):
    expected, descended = three_steps(row.tx, -1)
    path, opt = three_steps(row.tx.maximize(), 1)
    # Not the same bits: XLA fuses the negation, and contracts other products and sums.
    found, known = (
        jax.tree.leaves(tree) for tree in ((path, opt.state), (expected, descended.state))
    )
    for ours, theirs in zip(found, known, strict=True):
        assert ours.dtype == theirs.dtype
        if jnp.issubdtype(ours.dtype, jnp.inexact):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        else:
            assert_same_bits(ours, theirs)


def saddle(model):
    return 0.5 * jnp.sum((model["w"] - 1) ** 2) - 0.5 * jnp.sum((model["b"] - 2) ** 2)


@pytest.mark.parametrize(
    "tx",
    [
        sl.sgd(0.1).partition({sl.where.path("b"): sl.sgd(0.1).maximize()}),
        sl.partition({"min": sl.sgd(0.1), "max": sl.sgd(0.1).maximize()}, {"w": "min", "b": "max"}),
        sl.sgd(0.1).only(sl.where.path("w")) | sl.Identity(),
        pytest.param(
            sl.ClipByGlobalNorm(100.0)
            | sl.sgd(0.1).partition({sl.where.path("b"): sl.sgd(0.1).maximize().every_k(1)}),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["selector", "labels", "only", "chain"],
)
def test_groups_may_ascend_without_a_warning(tx):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt = sl.Optimizer(tx, model)
        params, _, _ = sl.train_step(saddle, donate=False).scan(model, opt, length=100)
    np.testing.assert_allclose(params["w"], 1, atol=1e-3)
    if "only" not in repr(tx):
        np.testing.assert_allclose(params["b"], 2, atol=1e-3)


@pytest.mark.slow
def test_other_wrappers_may_be_outside():
    def run(loss_fn, tx):
        return after_training(sl.train_step(loss_fn), tx, 3, model)[0]

    for wrap in (
        lambda tx: tx.scale_loss(),
        lambda tx: tx.every_k(2),
        lambda tx: tx.lookahead(2, 0.5),
        lambda tx: tx.store("int8"),
        lambda tx: tx.write("master"),
    ):
        ascended = run(saddle, wrap(sl.adam(0.1).maximize()))
        assert_same_bits(ascended, run(lambda model: -saddle(model), wrap(sl.adam(0.1))))


@pytest.mark.slow
def test_an_augmented_lagrangian_takes_the_steps_of_cooper():
    """The minimum of x² for x ≥ 1, with c = 1 and both rates 0.1, as in Cooper 1.0.1."""

    @sl.train_step
    def step(model):
        active = jax.nn.relu(model["multiplier"] + 1 - model["x"])
        return model["x"] ** 2 + (active**2 - model["multiplier"] ** 2) / 2

    ascent = sl.sgd(0.1).maximize().project(sl.projections.non_negative())
    tx = sl.sgd(0.1).partition({sl.where.path("multiplier"): ascent})
    model = {"x": jnp.zeros(()), "multiplier": jnp.zeros(())}
    opt, path = sl.Optimizer(tx, model), []
    for _ in range(300):
        model, opt, _ = step(model, opt)
        path.append((float(model["x"]), float(model["multiplier"])))
    np.testing.assert_allclose(path[:3], [(0.1, 0.1), (0.18, 0.19), (0.245, 0.272)], atol=1e-6)
    np.testing.assert_allclose(path[-1], (1.0, 2.0), atol=1e-4)
