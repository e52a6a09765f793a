"""Rules that take the gradient of each example: their numbers, their place, and `train_step`."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import (
    assert_close,
    assert_same_path,
    distance,
    gradients,
    lenient,
    mean_square,
    mlp,
    nested_dict,
    params_of,
    sampled,
    slow_except,
    trajectory,
)
from refusals.messages import refused
from table import PER_EXAMPLE
from table.row import make_params

EXAMPLES, STEPS = 4, 50
PRIVATE = "DifferentiallyPrivateAggregate"
PARAMS = nested_dict(jax.random.key(0))


def per_example(params, n, scale=1.0):
    """Gradients of `EXAMPLES` examples at each of `n` steps, of very different lengths."""
    grads = gradients(params, n * EXAMPLES)
    lengths = scale * jnp.asarray([0.0, 0.1, 1.0, 10.0])

    def stack(g):
        g = g.reshape(n, EXAMPLES, *g.shape[1:])
        factors = lengths.reshape(1, EXAMPLES, *(1 for _ in g.shape[2:]))
        return g * factors.astype(jnp.zeros((), g.dtype).real.dtype).astype(g.dtype)

    return jax.tree.map(stack, grads)


def counting(function, **options):
    """A function of Optax as a transform whose state is what it counted in the last step."""

    def init(params):
        zeros = jax.tree.map(lambda p: jnp.zeros((1, *p.shape), p.dtype), params)
        return function(zeros, **options)[1]

    def update(grads, state, params=None):
        return function(grads, **options)

    return optax.GradientTransformation(init, update)


whole = counting(optax.per_example_global_norm_clip, l2_norm_clip=0.7)
by_layer = functools.partial(counting, optax.per_example_layer_norm_clip, global_l2_norm_clip=0.7)
PATHS = {
    "global": (sl.PerExampleGlobalNormClip(0.7), whole),
    "layer": (sl.PerExampleLayerNormClip(0.7), by_layer(uniform=True)),
    "layer by size": (sl.PerExampleLayerNormClip(0.7, uniform=False), by_layer(uniform=False)),
    # The noise is the same.
    "private": (
        sl.DifferentiallyPrivateAggregate(0.7, 0.3, key=5),
        optax.contrib.differentially_private_aggregate(0.7, 0.3, key=jax.random.key(5)),
    ),
}


def both_paths(name, params):
    """Our parameters and counts after each step, and Optax's."""
    tx, theirs = PATHS[name]
    opt = sl.Optimizer(tx | sl.sgd(0.1, 0.9), params)
    theirs = optax.chain(theirs, optax.sgd(0.1, 0.9))
    grads = per_example(params, STEPS)

    def counts(found):
        """What is counted, in order. Optax does not count what the aggregate clips."""
        return [] if name == "private" else jax.tree.leaves(found)

    def ours(now, opt, grads):
        params, opt = opt.step(now[0], grads)
        return (params, counts([*opt.metrics.values()])), opt

    def exact(now, state, grads):
        updates, state = theirs.update(grads, state, now[0])
        return (optax.apply_updates(now[0], updates), counts(state[0])), state

    found, _ = trajectory(ours, (params, counts([*opt.metrics.values()])), opt, (grads,))
    with lenient():
        state = theirs.init(params)
        expected, _ = trajectory(exact, (params, counts(state[0])), state, (grads,))
    return found, expected


def assert_same_counts(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not found or 0 < int(np.sum(found)) < EXAMPLES * STEPS * len(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", PATHS)
def test_same_path_as_optax_in_double_precision(name, x64):
    (path, found), (exact, expected) = both_paths(name, nested_dict(jax.random.key(0), jnp.float64))
    assert_close(path, exact, rtol=1e-9, atol=1e-13)
    assert_same_counts(found, expected)


@pytest.mark.parametrize("name", sampled(PATHS))
def test_same_path_as_optax_in_single_precision(name):
    (path, found), (exact, expected) = both_paths(name, PARAMS)
    assert_same_path(path, exact, PARAMS, 2e-5)
    assert_same_counts(found, expected)


@pytest.mark.slow
def test_clipped_sums_match_numbers_by_hand_in_half_precision_too():
    # Norms 0, 5, 5, 5; the last limit is exactly the norm.
    grads = jnp.array([[0, 0, 0], [0, 3, 4], [4, 0, 3], [3, 4, 0]], jnp.float32)
    for clip in (sl.PerExampleGlobalNormClip, sl.PerExampleLayerNormClip):

        @jax.jit
        def run(limit, clip=clip):
            updates, opt = sl.Optimizer(clip(limit), jnp.zeros(3)).update(jnp.zeros(3), grads)
            return updates, opt.metrics["num_clipped"]

        for limit, total, clipped in ((np.inf, 7, 0), (0.0, 0, 3), (1.25, 1.75, 3), (5.0, 7, 0)):
            updates, number = run(limit)
            np.testing.assert_allclose(updates, np.full(3, total), rtol=1e-6)
            assert int(number) == clipped

    tx = sl.PerExampleGlobalNormClip(1.0, single_batch_element=True)
    opt = sl.Optimizer(sl.Trace(0.0) | tx, PARAMS)  # and so it may stand anywhere
    grads = jax.tree.map(lambda g: g[0] * 9, gradients(PARAMS, 1))
    updates, opt = opt.update(PARAMS, grads)
    exact, _ = sl.Optimizer(sl.ClipByGlobalNorm(1.0), PARAMS).update(PARAMS, grads)
    assert distance(updates, exact) <= 1e-6
    assert int(opt.metrics["num_clipped"]) == 1

    def clipped(grads):
        params = jnp.zeros(2, grads.dtype)
        return sl.Optimizer(sl.PerExampleGlobalNormClip(1.0), params).update(params, grads)[0]

    updates = clipped(jnp.full((3, 2), 300.0, jnp.float16))
    np.testing.assert_allclose(updates, np.full(2, 3 / np.sqrt(2)), rtol=1e-3)
    for bad in (jnp.nan, jnp.inf):
        assert not np.any(np.isfinite(clipped(jnp.array([[1.0, 1.0], [bad, 1.0]]))))


def noise_of(key):
    """The noise of two steps: gradients are zero, and 4 examples share it."""
    params = {"a": jnp.zeros(2000), "b": jnp.zeros(2000), "z": jnp.zeros(2000, jnp.complex64)}
    grads = jax.tree.map(lambda p: jnp.zeros((4, *p.shape), p.dtype), params)
    opt = sl.Optimizer(sl.DifferentiallyPrivateAggregate(2.0, 3.0, key), params)
    first, opt = opt.update(params, grads)
    return first, opt.update(params, grads)[0]


@pytest.mark.slow
def test_noise_is_new_for_each_leaf_and_runs_under_vmap_are_alone():
    first, second = noise_of(1)
    assert distance(first, noise_of(jax.random.key(1))[0]) == 0
    other, _ = noise_of(2)
    # Both parts of a complex number have the whole variance.
    drawn = [first["a"], first["b"], second["a"], second["b"], other["a"]]
    drawn += [first["z"].real, first["z"].imag]
    for i, x in enumerate(drawn):
        np.testing.assert_allclose(np.std(x), 2.0 * 3.0 / 4, rtol=0.1)
        for y in drawn[i + 1 :]:
            assert abs(np.corrcoef(x, y)[0, 1]) < 0.1

    params = make_params()
    grads = jax.tree.map(lambda p: jnp.stack([p * 0 + 0.5, p * 0 + 3]), params)

    def run(limit):
        tx = sl.DifferentiallyPrivateAggregate(limit, 0.5, key=3)
        return sl.Optimizer(tx, params).step(params, grads)[0]

    second = jax.tree.map(lambda x: x[1], jax.vmap(run)(jnp.array([1.0, 2.0])))
    assert_close(second, run(jnp.float32(2.0)), rtol=1e-6)


X = jnp.asarray(np.random.default_rng(0).standard_normal((6, 2)), jnp.float32)
Y = jnp.asarray(np.random.default_rng(1).standard_normal((6, 1)), jnp.float32)
MODEL = mlp(jax.random.key(0))
CLIP = sl.PerExampleGlobalNormClip(0.5) | sl.sgd(0.1)
STEP = sl.train_step(mean_square, donate=False)


@pytest.mark.slow
def test_train_step_differentiates_each_example_of_the_named_arguments():
    def of_one(model, x, y):
        return mean_square(model, x[None], y[None])

    grads = jax.vmap(eqx.filter_grad(of_one), in_axes=(None, 0, 0))(MODEL, X, Y)
    exact, opt = sl.Optimizer(CLIP, MODEL).step(MODEL, grads)
    new, by_step, loss = STEP(MODEL, sl.Optimizer(CLIP, MODEL), X, Y)
    assert distance(params_of(new), params_of(exact)) <= 1e-6
    np.testing.assert_allclose(loss, mean_square(MODEL, X, Y), rtol=1e-6)
    assert int(by_step.metrics["num_clipped"]) == int(opt.metrics["num_clipped"]) > 0
    # Without clipping, the mean is that of the batch.
    exact, _, _ = STEP(MODEL, sl.Optimizer(sl.adam(0.1), MODEL), X, Y)
    tx = sl.DifferentiallyPrivateAggregate(1e6, 0.0, 0) | sl.adam(0.1)
    new, _, _ = STEP(MODEL, sl.Optimizer(tx, MODEL), X, Y)
    assert distance(params_of(new), params_of(exact)) <= 1e-5

    def with_table(model, batch, table):
        loss = mean_square(model, batch["x"], batch["y"]) * jnp.sum(table)
        return loss, {"y": batch["y"], "a": 1}

    step = sl.train_step(with_table, has_aux=True, batch_args="batch", donate=False)
    opt = sl.Optimizer(CLIP, MODEL)
    _, _, (loss, aux) = step(MODEL, opt, {"x": X, "y": Y}, jnp.ones(3))
    np.testing.assert_allclose(loss, 3 * mean_square(MODEL, X, Y), rtol=1e-6)
    np.testing.assert_array_equal(aux["y"], Y[:, None])
    assert aux["a"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PerExampleLayerNormClip, by size", PRIVATE])
def test_microbatches_gather_what_the_whole_batch_gives(name):
    tx = PER_EXAMPLE[name] | sl.Scale(-0.1)

    def with_aux(model, x, y):
        return mean_square(model, x, y), x

    def run(**options):
        step = sl.train_step(with_aux, has_aux=True, donate=False, **options)
        model, opt, (loss, aux) = step(MODEL, sl.Optimizer(tx, MODEL), X, Y)
        return params_of(model), opt, loss, aux

    whole, opt, loss, _ = run()
    parts, by_parts, mean, aux = run(microbatches=3)
    assert distance(parts, whole) <= 1e-6
    assert distance(by_parts, opt) <= 1e-6  # the counts, and the key
    assert any(int(n) > 0 for n in by_parts.metrics.values())
    np.testing.assert_allclose(mean, loss, rtol=1e-6)
    np.testing.assert_array_equal(aux[:, :, 0], np.stack([X[i::3] for i in range(3)]))


@pytest.mark.slow
def test_sums_over_microbatches_are_divided_as_the_parameters_are():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    step = sl.train_step(lambda w, x: jnp.mean(x) * jnp.sum(w**2), microbatches=2)
    w = jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, jax.P("i")))
    with jax.set_mesh(mesh):
        new, _, _ = step(w, sl.Optimizer(CLIP, w), jnp.ones(4))
    assert new.sharding == w.sharding


@pytest.mark.slow
@pytest.mark.parametrize("number", [None, 3])
def test_each_example_draws_from_a_key_of_its_own(number):
    key = jax.random.key(5)

    def dropped(model, x, y, key):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return mean_square(model, jnp.where(keep, x, 0), y)

    # The clip of example n sees the mask that was drawn from key n, in microbatches too.
    keep = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, (1, 2))[0])(jax.random.split(key, 6))
    exact, _, mean = STEP(MODEL, sl.Optimizer(CLIP, MODEL), jnp.where(keep, X, 0), Y)
    step = sl.train_step(dropped, donate=False, microbatches=number)
    new, _, loss = step(MODEL, sl.Optimizer(CLIP, MODEL), X, Y, key)
    np.testing.assert_allclose(loss, mean, rtol=1e-6)
    assert distance(params_of(new), params_of(exact)) <= 1e-6


@pytest.mark.slow
def test_microbatches_need_the_scratch_of_a_part_and_windows_average_sums():
    model = {f"layer{i}": jnp.full((128, 128), 0.01) for i in range(3)}
    size = sum(x.nbytes for x in jax.tree.leaves(model))

    def deep(model, x):
        for w in model.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    opt = sl.Optimizer(CLIP, model)
    step = sl.train_step(deep, microbatches=8, donate="all")
    program = step.lower(model, opt, jnp.ones((32, 128))).compile()
    # The gradients of 4 examples, their sum, the accumulator, and a copy of one leaf for its norm.
    # Without microbatches there would be 32 gradients.
    assert program.memory_analysis().temp_size_in_bytes <= 8 * size

    tx = sl.PerExampleGlobalNormClip(0.5) | sl.sgd(0.1).every_k(2)
    model, opt = MODEL, sl.Optimizer(tx, MODEL)
    for rows in (slice(0, 3), slice(3, 6)):
        model, opt, _ = STEP(model, opt, X[rows], Y[rows])
    exact, _, _ = STEP(MODEL, sl.Optimizer(CLIP, MODEL), X, Y)
    # The mean of two sums is half of the whole sum.
    half = jax.tree.map(lambda p, q: (p + q) / 2, params_of(exact), params_of(MODEL))
    assert distance(params_of(model), half) <= 1e-6


@pytest.mark.parametrize("number", slow_except([None, 2], None))
def test_conjugation_and_what_links_behind_are_told(number):
    class SeeGradient(sl.AbstractStatelessTransform):
        needs = ("grad", "value_fn")

        def apply(self, updates, params, context):
            return jax.tree.map(lambda u, g: u - 2 * g, updates, context.grad)

    def of_complex(z, targets):
        return jnp.mean(jnp.abs(z[None] - targets) ** 2)

    z = jnp.array([1 + 2j, 0.5j], jnp.complex64)
    targets = jnp.asarray([[1j, 2.0], [3.0, 1 + 1j]], jnp.complex64)
    tx = sl.PerExampleGlobalNormClip(jnp.inf) | SeeGradient() | sl.Scale(-1.0)
    step = sl.train_step(of_complex, donate=False, microbatches=number)
    new, _, _ = step(z, sl.Optimizer(tx, z), targets)
    # The sum over two examples is twice the mean.
    np.testing.assert_allclose(new, z, rtol=1e-6)


def test_examples_count_alike_and_only_the_first_link_aggregates_them():
    params = {"b": jnp.zeros(2), "w": jnp.zeros((2, 3))}
    opt = sl.Optimizer(CLIP, params)
    shape = "The gradient at 'b' has shape (2,) … per-example gradients of shape (examples, 2)"
    remedy = "`jax.vmap(jax.grad(loss), in_axes=(None, 0))`, or use `sl.train_step`"
    with refused(ValueError, shape, remedy):
        opt.update(params, params)
    unequal = "The gradient at 'w' has 5 examples, but the gradient at 'b' has 4"
    with refused(ValueError, unequal, "must all come from one batch"):
        opt.update(params, {"b": jnp.zeros((4, 2)), "w": jnp.zeros((5, 2, 3))})
    opt = sl.Optimizer(CLIP, MODEL)
    with refused(ValueError, "The batch has 6 examples … 4 microbatches", "Pass a multiple of 4"):
        sl.train_step(mean_square, microbatches=4)(MODEL, opt, X, Y)
    with refused(ValueError, "weights all examples equally", "Remove `has_weight`"):
        sl.train_step(mean_square, has_weight=True)(MODEL, opt, X, Y)
    STEP(MODEL, opt, X, Y)  # steps that differ only in `transform_grads` share a program
    no_gradient = "there is no single gradient to transform"
    with refused(ValueError, no_gradient, "Remove `transform_grads`"):
        sl.train_step(mean_square, donate=False, transform_grads=lambda g: g)(MODEL, opt, X, Y)
    negative = "DifferentiallyPrivateAggregate.key must be in [0, 2**31), got -1"
    with refused(ValueError, negative, "Pass `jax.random.key(-1)`"):
        sl.DifferentiallyPrivateAggregate(1.0, 1.0, key=-1)

    clip, step = sl.PerExampleGlobalNormClip(1.0), sl.sgd(0.1)
    private = sl.DifferentiallyPrivateAggregate(1.0, 2.0, 3)
    code = "sl.DifferentiallyPrivateAggregate(l2_norm_clip=1.0, noise_multiplier=2.0, key=3)"
    for tx, name, link in (
        (sl.Trace(0.9) | clip, "per_example_global_norm_clip", repr(clip)),
        ((private | step).every_k(2), "every_k.differentially_private_aggregate", code),
        (clip.mask(sl.where.ndim(2)) | step, "mask.per_example_global_norm_clip", repr(clip)),
    ):
        later = f"'{name}' aggregates per-example gradients, so it must be the first link"
        with refused(ValueError, later, f"Write `{link} | rest`, and wrap only the rest"):
            sl.Optimizer(tx, PARAMS)
