"""Rules that take the gradient of each example: their numbers, their place, and `train_step`."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import (
    assert_same_path,
    distance,
    gradients,
    kind_of,
    lenient,
    mean_square,
    mlp,
    nested_dict,
    params_of,
    slalom_trajectory,
)
from table import PER_EXAMPLE

EXAMPLES, STEPS = 4, 50
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


# --- the numbers ----------------------------------------------------------------------------


def by_function(function, **options):
    """optax's function of one step, over many, as a descent of rate 0.1."""

    def step(params, grads):
        with lenient():
            made, clipped = function(grads, **options)
            return jax.tree.map(lambda p, u: p - 0.1 * u, params, made), clipped

    return step


CLIPS = {
    "global": (sl.PerExampleGlobalNormClip(0.7), optax.per_example_global_norm_clip, {}),
    "layer": (
        sl.PerExampleLayerNormClip(0.7),
        optax.per_example_layer_norm_clip,
        {"uniform": True},
    ),
    "layer by size": (
        sl.PerExampleLayerNormClip(0.7, uniform=False),
        optax.per_example_layer_norm_clip,
        {"uniform": False},
    ),
}


def both_clipped(name, params, grads):
    tx, function, options = CLIPS[name]
    limit = {"l2_norm_clip" if name == "global" else "global_l2_norm_clip": 0.7}
    reference = by_function(function, **limit, **options)

    def body(params, grads):
        params, clipped = reference(params, grads)
        return params, (params, clipped)

    _, (exact, clipped) = jax.lax.scan(body, params, grads)
    opt = sl.Optimizer(tx | sl.Scale(-0.1), params)

    def ours(carry, grads):
        params, opt = carry
        params, opt = opt.step(params, grads)
        return (params, opt), (params, opt.metrics)

    _, (path, metrics) = jax.lax.scan(ours, (params, opt), grads)
    return path, exact, list(metrics.values()), jax.tree.leaves(clipped)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIPS)
def test_clips_as_the_functions_of_optax(name):
    path, exact, ours, theirs = both_clipped(name, PARAMS, per_example(PARAMS, STEPS))
    assert_same_path(path, exact, PARAMS, 2e-5)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)
    assert 0 < int(np.sum(ours)) < EXAMPLES * STEPS * len(ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIPS)
def test_clips_as_the_functions_of_optax_in_double_precision(name, x64):
    params = nested_dict(jax.random.key(0), jnp.float64)
    path, exact, _, _ = both_clipped(name, params, per_example(params, STEPS))
    for a, b in zip(jax.tree.leaves(path), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-13)


def private_paths(params, grads):
    tx = sl.DifferentiallyPrivateAggregate(0.7, 0.3, key=5) | sl.sgd(0.1, 0.9)
    path, _ = slalom_trajectory(tx, params, grads)
    theirs = optax.chain(
        optax.contrib.differentially_private_aggregate(0.7, 0.3, key=jax.random.key(5)),
        optax.sgd(0.1, 0.9),
    )

    def body(carry, grads):
        params, state = carry
        with lenient():
            updates, state = theirs.update(grads, state)
            params = optax.apply_updates(params, updates)
        return (params, state), params

    with lenient():
        _, exact = jax.lax.scan(body, (params, theirs.init(params)), grads)
    return path, exact


@pytest.mark.slow
def test_private_aggregate_walks_as_optax_with_the_same_noise():
    path, exact = private_paths(PARAMS, per_example(PARAMS, STEPS))
    assert_same_path(path, exact, PARAMS, 2e-5)


@pytest.mark.slow
def test_private_aggregate_walks_as_optax_in_double_precision(x64):
    params = nested_dict(jax.random.key(0), jnp.float64)
    path, exact = private_paths(params, per_example(params, STEPS))
    for a, b in zip(jax.tree.leaves(path), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(
    ("limit", "total", "clipped"), [(np.inf, 7.0, 0), (0.0, 0.0, 3), (1.25, 1.75, 3), (5.0, 7.0, 0)]
)
def test_clipped_sums_match_numbers_by_hand(limit, total, clipped):
    # Norms 0, 5, 5, 5; the last limit is exactly the norm.
    grads = jnp.array([[0, 0, 0], [0, 3, 4], [4, 0, 3], [3, 4, 0]], jnp.float32)
    for tx in (sl.PerExampleGlobalNormClip(limit), sl.PerExampleLayerNormClip(limit)):
        opt = sl.Optimizer(tx, jnp.zeros(3))
        updates, opt = opt.update(jnp.zeros(3), grads)
        np.testing.assert_allclose(updates, np.full(3, total), rtol=1e-6)
        assert int(opt.metrics["num_clipped"]) == clipped


def test_a_single_example_has_no_axis_of_its_own():
    tx = sl.PerExampleGlobalNormClip(1.0, single_batch_element=True)
    opt = sl.Optimizer(sl.Trace(0.0) | tx, PARAMS)  # and so it may stand anywhere
    grads = jax.tree.map(lambda g: g[0] * 9, gradients(PARAMS, 1))
    updates, opt = opt.update(PARAMS, grads)
    exact, _ = sl.Optimizer(sl.ClipByGlobalNorm(1.0), PARAMS).update(PARAMS, grads)
    assert distance(updates, exact) <= 1e-6
    assert int(opt.metrics["num_clipped"]) == 1


def test_half_precision_norms_do_not_overflow_and_sums_are_wide():
    params = jnp.zeros(2, jnp.float16)
    grads = jnp.full((3, 2), 300.0, jnp.float16)
    updates, _ = sl.Optimizer(sl.PerExampleGlobalNormClip(1.0), params).update(params, grads)
    np.testing.assert_allclose(updates, np.full(2, 3 / np.sqrt(2)), rtol=1e-3)


def test_a_gradient_that_is_not_finite_is_seen():
    for bad in (jnp.nan, jnp.inf):
        grads = jnp.array([[1.0, 1.0], [bad, 1.0]])
        opt = sl.Optimizer(sl.PerExampleGlobalNormClip(1.0), jnp.zeros(2))
        assert not np.any(np.isfinite(opt.update(jnp.zeros(2), grads)[0]))


def noise_of(key, params, steps=2):
    """The noise of each step: gradients are zero, and 4 examples share it."""
    opt = sl.Optimizer(sl.DifferentiallyPrivateAggregate(2.0, 3.0, key), params)
    grads = jax.tree.map(lambda p: jnp.zeros((4, *p.shape), p.dtype), params)
    drawn = []
    for _ in range(steps):
        updates, opt = opt.update(params, grads)
        drawn.append(updates)
    return drawn


@pytest.mark.slow
def test_noise_is_reproducible_and_new_for_each_step_and_leaf():
    params = {"a": jnp.zeros(2000), "b": jnp.zeros(2000)}
    first, second = noise_of(1, params)
    again, _ = noise_of(jax.random.key(1), params)
    assert distance(first, again) == 0
    other, _ = noise_of(2, params)
    drawn = [first["a"], first["b"], second["a"], second["b"], other["a"]]
    for i, x in enumerate(drawn):
        np.testing.assert_allclose(np.std(x), 2.0 * 3.0 / 4, rtol=0.1)
        for y in drawn[i + 1 :]:
            assert abs(np.corrcoef(x, y)[0, 1]) < 0.1


@pytest.mark.slow
def test_noise_has_the_whole_variance_in_both_parts_of_a_complex_leaf():
    (first, _) = noise_of(1, jnp.zeros(4000, jnp.complex64))
    np.testing.assert_allclose(np.std(first.real), 1.5, rtol=0.1)
    np.testing.assert_allclose(np.std(first.imag), 1.5, rtol=0.1)


# --- properties that every rule has ---------------------------------------------------------

DTYPES = {
    "mixed": ("bfloat16", "float32", "float16"),
    "complex": ("complex64", "float32", "complex64"),
}
rows = pytest.mark.parametrize("tx", PER_EXAMPLE.values(), ids=PER_EXAMPLE.keys())


def make(dtypes):
    a, b, c = dtypes
    params = {
        "w": jnp.linspace(-1, 1, 6).reshape(2, 3).astype(a),
        "b": (jnp.linspace(0.5, 1, 3).astype(b), jnp.asarray(0.25, c)),
        "empty": jnp.zeros((0, 2), a),
        "hole": None,
    }
    return params, jax.tree.map(
        lambda p: jnp.stack([p * 0 + 0.5, p * 0 + 3]).astype(p.dtype), params
    )


@pytest.mark.slow
@rows
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES.keys())
def test_step_returns_what_it_was_given_and_compiles_once(tx, dtypes):
    params, grads = make(dtypes)
    opt = sl.Optimizer(tx, params)
    before = kind_of((params, opt))
    step = jax.jit(lambda params, opt: opt.step(params, grads), donate_argnums=(0, 1))
    after = step(*step(params, opt))
    assert kind_of(after) == before
    assert step._cache_size() == 1
    assert all(jnp.all(jnp.isfinite(p)) for p in jax.tree.leaves(after[0]))


@rows
def test_printed_code_shapes_and_trees_without_leaves(tx):
    assert eval(repr(tx), {"sl": sl}) == tx
    params, _ = make(("float32",) * 3)
    shapes = jax.eval_shape(lambda: sl.Optimizer(tx, params))
    assert jax.tree.structure(shapes) == jax.tree.structure(sl.Optimizer(tx, params))
    nothing = {"hole": None}
    made, _ = tx.update(nothing, tx.init(nothing), nothing, sl.Context(step=0))
    assert made == nothing


@pytest.mark.slow
def test_vmap_over_runs_equals_the_runs():
    params, grads = make(("float32",) * 3)

    def run(limit):
        tx = sl.DifferentiallyPrivateAggregate(limit, 0.5, key=3)
        return sl.Optimizer(tx, params).step(params, grads)[0]

    together, alone = jax.vmap(run)(jnp.array([1.0, 2.0])), run(jnp.float32(2.0))
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a[1], b, rtol=1e-6)


# --- train_step -----------------------------------------------------------------------------

X = jnp.asarray(np.random.default_rng(0).standard_normal((6, 2)), jnp.float32)
Y = jnp.asarray(np.random.default_rng(1).standard_normal((6, 1)), jnp.float32)
MODEL = mlp(jax.random.key(0))
CLIP = sl.PerExampleGlobalNormClip(0.5) | sl.sgd(0.1)


@pytest.mark.slow
def test_train_step_differentiates_each_example():
    def of_one(model, x, y):
        return mean_square(model, x[None], y[None])

    grads = jax.vmap(eqx.filter_grad(of_one), in_axes=(None, 0, 0))(MODEL, X, Y)
    exact, opt = sl.Optimizer(CLIP, MODEL).step(MODEL, grads)
    step = sl.train_step(mean_square, donate=False)
    new, by_step, loss = step(MODEL, sl.Optimizer(CLIP, MODEL), X, Y)
    assert distance(params_of(new), params_of(exact)) <= 1e-6
    np.testing.assert_allclose(loss, mean_square(MODEL, X, Y), rtol=1e-6)
    assert int(by_step.metrics["num_clipped"]) == int(opt.metrics["num_clipped"]) > 0


@pytest.mark.slow
def test_without_clipping_the_mean_is_that_of_the_batch():
    step = sl.train_step(mean_square, donate=False)
    exact, _, _ = step(MODEL, sl.Optimizer(sl.adam(0.1), MODEL), X, Y)
    tx = sl.DifferentiallyPrivateAggregate(1e6, 0.0, 0) | sl.adam(0.1)
    new, _, _ = step(MODEL, sl.Optimizer(tx, MODEL), X, Y)
    assert distance(params_of(new), params_of(exact)) <= 1e-5


@pytest.mark.slow
def test_train_step_cuts_the_named_arguments_and_stacks_what_comes_beside():
    def with_table(model, batch, table):
        return mean_square(model, batch["x"], batch["y"]) * jnp.sum(table), {
            "y": batch["y"],
            "a": 1,
        }

    step = sl.train_step(with_table, has_aux=True, batch_args="batch", donate=False)
    opt = sl.Optimizer(CLIP, MODEL)
    _, _, (loss, aux) = step(MODEL, opt, {"x": X, "y": Y}, jnp.ones(3))
    np.testing.assert_allclose(loss, 3 * mean_square(MODEL, X, Y), rtol=1e-6)
    np.testing.assert_array_equal(aux["y"], Y[:, None])
    assert aux["a"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["PerExampleLayerNormClip, by size", "DifferentiallyPrivateAggregate"],
)
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
    assert distance(by_parts.arrays, opt.arrays) <= 1e-6  # the counts, and the key
    assert any(int(n) > 0 for n in by_parts.metrics.values())
    np.testing.assert_allclose(mean, loss, rtol=1e-6)
    np.testing.assert_array_equal(aux[:, :, 0], np.stack([X[i::3] for i in range(3)]))


@pytest.mark.slow
@pytest.mark.parametrize("number", [None, 3])
def test_each_example_draws_from_a_key_of_its_own(number):
    key = jax.random.key(5)

    def dropped(model, x, y, key):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return mean_square(model, jnp.where(keep, x, 0), y)

    # The clip of example n sees the mask that was drawn from key n, in microbatches too.
    keep = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, (1, 2))[0])(jax.random.split(key, 6))
    step = sl.train_step(mean_square, donate=False)
    exact, _, mean = step(MODEL, sl.Optimizer(CLIP, MODEL), jnp.where(keep, X, 0), Y)
    step = sl.train_step(dropped, donate=False, microbatches=number)
    new, _, loss = step(MODEL, sl.Optimizer(CLIP, MODEL), X, Y, key)
    np.testing.assert_allclose(loss, mean, rtol=1e-6)
    assert distance(params_of(new), params_of(exact)) <= 1e-6


@pytest.mark.slow
def test_microbatches_need_the_scratch_of_a_part():
    model = {f"layer{i}": jnp.full((128, 128), 0.01) for i in range(3)}
    size = sum(x.nbytes for x in jax.tree.leaves(model))

    def deep(model, x):
        for w in model.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    opt = sl.Optimizer(CLIP, model)
    step = sl.train_step(deep, microbatches=8, donate="all")
    program = step.lower(model, opt, jnp.ones((32, 128))).compile()
    # The gradients of 4 examples, their sum and the accumulator; 32 at once without it.
    assert program.memory_analysis().temp_size_in_bytes <= 7 * size


@pytest.mark.parametrize("number", [None, 2])
def test_conjugation_and_what_links_behind_are_told(number):
    class SeeGradient(sl.AbstractTransform):
        needs = ("grad", "value_fn")

        def init(self, params):
            return None

        def update(self, updates, state, params=None, context=None):
            return jax.tree.map(lambda u, g: u - 2 * g, updates, context.grad), state

    def of_complex(z, targets):
        return jnp.mean(jnp.abs(z[None] - targets) ** 2)

    z = jnp.array([1 + 2j, 0.5j], jnp.complex64)
    targets = jnp.asarray([[1j, 2.0], [3.0, 1 + 1j]], jnp.complex64)
    tx = sl.PerExampleGlobalNormClip(jnp.inf) | SeeGradient() | sl.Scale(-1.0)
    step = sl.train_step(of_complex, donate=False, microbatches=number)
    new, _, _ = step(z, sl.Optimizer(tx, z), targets)
    # The sum over two examples is twice the mean.
    np.testing.assert_allclose(new, z, rtol=1e-6)


@pytest.mark.slow
def test_accumulation_after_a_clip_averages_clipped_sums():
    tx = sl.PerExampleGlobalNormClip(0.5) | sl.sgd(0.1).every_k(2)
    step = sl.train_step(mean_square, donate=False)
    model, opt = MODEL, sl.Optimizer(tx, MODEL)
    for rows in (slice(0, 3), slice(3, 6)):
        model, opt, _ = step(model, opt, X[rows], Y[rows])
    exact, _, _ = step(MODEL, sl.Optimizer(CLIP, MODEL), X, Y)
    moved, right = params_of(model), params_of(exact)
    # The mean of two sums is half of the whole sum.
    half = jax.tree.map(lambda p, q: (p + q) / 2, right, params_of(MODEL))
    assert distance(moved, half) <= 1e-6


# --- what is refused ------------------------------------------------------------------------

PARAMETERS = {"b": jnp.zeros(2), "w": jnp.zeros((2, 3))}
FIRST = (
    "aggregates per-example gradients, so it must be the first link of the chain, and must not be "
    "wrapped. Write `{} | rest`, and wrap only the rest."
)
CLIPPED = "sl.PerExampleGlobalNormClip(1.0)"


def bind(tx):
    return sl.Optimizer(tx, PARAMETERS)


def feed(**grads):
    opt = bind(sl.PerExampleGlobalNormClip(1.0) | sl.sgd(0.1))
    return opt.update(PARAMETERS, {name: jnp.zeros(shape) for name, shape in grads.items()})


REFUSED = {
    "not first": (
        lambda: bind(sl.Trace(0.9) | sl.PerExampleGlobalNormClip(1.0)),
        f"'per_example_global_norm_clip' {FIRST.format(CLIPPED)}",
    ),
    "wrapped": (
        lambda: bind((sl.DifferentiallyPrivateAggregate(1.0, 2.0, 3) | sl.sgd(0.1)).every_k(2)),
        "'every_k.differentially_private_aggregate' "
        + FIRST.format(
            "sl.DifferentiallyPrivateAggregate(l2_norm_clip=1.0, noise_multiplier=2.0, key=3)"
        ),
    ),
    "masked": (
        lambda: bind(sl.PerExampleLayerNormClip(1.0).mask(sl.where.ndim(2)) | sl.sgd(0.1)),
        "'mask.per_example_layer_norm_clip' " + FIRST.format("sl.PerExampleLayerNormClip(1.0)"),
    ),
    "no axis of examples": (
        lambda: feed(b=(2,), w=(2, 3)),
        "The gradient at 'b' has shape (2,), but the first link needs per-example gradients of "
        "shape (examples, 2). Compute them with `jax.vmap(jax.grad(loss), in_axes=(None, 0))`, or "
        "use `sl.train_step`.",
    ),
    "other examples": (
        lambda: feed(b=(4, 2), w=(5, 2, 3)),
        "The gradient at 'w' has 5 examples, but the gradient at 'b' has 4. Per-example gradients "
        "must all come from one batch.",
    ),
    "uneven microbatches": (
        lambda: sl.train_step(mean_square, microbatches=4)(MODEL, sl.Optimizer(CLIP, MODEL), X, Y),
        "The batch has 6 examples, which cannot be divided into 4 microbatches of equal size. Pass "
        "a multiple of 4.",
    ),
    "weights": (
        lambda: sl.train_step(mean_square, has_weight=True)(MODEL, sl.Optimizer(CLIP, MODEL), X, Y),
        "The first link uses per-example gradients, and weights all examples equally. Remove "
        "`has_weight`.",
    ),
    "transformed gradients": (
        lambda: sl.train_step(mean_square, transform_grads=lambda g: g)(
            MODEL, sl.Optimizer(CLIP, MODEL), X, Y
        ),
        "The first link uses per-example gradients, so there is no single gradient to transform. "
        "Remove `transform_grads`.",
    ),
    "a key": (
        lambda: sl.DifferentiallyPrivateAggregate(1.0, 1.0, key=-1),
        "DifferentiallyPrivateAggregate.key must be in [0, 2**31), got -1. Pass "
        "`jax.random.key(-1)` instead.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused(name):
    bad, message = REFUSED[name]
    # JAX may put a note of its own under the message.
    with pytest.raises(ValueError, match=rf"\A{re.escape(message)}(\n-+\n|\Z)"):
        bad()


def test_an_option_is_refused_after_a_step_without_it():
    # Steps that differ only in `transform_grads` share a program.
    opt = sl.Optimizer(CLIP, MODEL)
    sl.train_step(mean_square, donate=False)(MODEL, opt, X, Y)
    with pytest.raises(ValueError, match="Remove `transform_grads`"):
        sl.train_step(mean_square, donate=False, transform_grads=lambda g: g)(MODEL, opt, X, Y)
