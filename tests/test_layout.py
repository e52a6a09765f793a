"""Rules that must know outputs from inputs: Equinox's layers, stacks of them, and plain arrays."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import gradients, lenient, params_of, slow_except

keys = jax.random.split(jax.random.key(0), 8)


class Mine(eqx.Module):
    """A layer that nobody knows."""

    weight: jax.Array
    scale: jax.Array


def zoo():
    return {
        "linear": eqx.nn.Linear(3, 4, key=keys[0]),
        "attention": eqx.nn.MultiheadAttention(2, 4, use_query_bias=True, key=keys[1]),
        "conv2": eqx.nn.Conv2d(3, 4, (2, 1), key=keys[2]),
        "conv3": eqx.nn.Conv3d(4, 6, 2, groups=2, key=keys[3]),
        "transposed": eqx.nn.ConvTranspose2d(2, 3, 2, key=keys[4]),
        "embedding": eqx.nn.Embedding(5, 3, key=keys[5]),
        "gru": eqx.nn.GRUCell(2, 3, key=keys[6]),
    }


def inputs_first(tree):
    """The arrays as a library stores them that puts inputs first, as Optax assumes."""

    def turn(path, x):
        where = jax.tree_util.keystr(path)
        if "embedding" in where or "bias" in where:
            return x
        return jnp.moveaxis(x, (0, 1), (-1, -2))  # out, in, kernel → kernel, in, out

    return jax.tree_util.tree_map_with_path(turn, tree)


def drawn(make, seed=0):
    """The parameters of a model that is not made: drawn by NumPy, so that nothing compiles."""
    random = np.random.default_rng(seed)
    shapes = eqx.filter_eval_shape(lambda: params_of(make()))
    return jax.tree.map(lambda s: jnp.asarray(random.normal(size=s.shape), s.dtype), shapes)


CLIPS = {
    "AdaptiveGradClip": (sl.AdaptiveGradClip(0.3), optax.adaptive_grad_clip(0.3)),
    "ScaleByFactoredRms": (
        sl.ScaleByFactoredRms(min_dim_size_to_factor=3),
        optax.scale_by_factored_rms(min_dim_size_to_factor=3),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "theirs"), CLIPS.values(), ids=CLIPS.keys())
def test_layers_of_equinox_are_what_optax_makes_of_their_transposes(ours, theirs):
    params, grads = drawn(zoo), drawn(zoo, seed=1)

    @jax.jit
    def both(params, grads):
        got, _ = ours.update(grads, ours.init(params), params, sl.Context(step=0))
        with lenient():
            turned = inputs_first(params)
            want, _ = theirs.update(inputs_first(grads), theirs.init(turned), turned)
        return inputs_first(got), want

    changed = False
    for a, b, g in zip(*map(jax.tree.leaves, (*both(params, grads), grads)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        changed = changed or (a.shape != g.shape)
    assert changed


@pytest.mark.slow
def test_the_norm_of_each_unit_is_bounded_and_no_other_unit_is_touched():
    weight = jnp.array([[3.0, 4.0], [0.3, 0.4]])
    grads = eqx.tree_at(lambda l: l.weight, eqx.nn.Linear(2, 2, key=keys[0]), weight)
    grads = eqx.tree_at(lambda l: l.bias, grads, jnp.array([0.0, 8.0]))
    got, _ = sl.UnitwiseClip(1.0).update(params_of(grads), None)
    np.testing.assert_allclose(got.weight, [[0.6, 0.8], [0.3, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(got.bias, [0.0, 1.0], rtol=1e-6)
    # The same numbers in an array that nothing is known of: inputs first.
    plain, _ = sl.UnitwiseClip(1.0).update({"w": weight.T}, None)
    np.testing.assert_allclose(plain["w"], np.asarray(got.weight).T, rtol=1e-6)
    along, _ = sl.UnitwiseClip(1.0, axis=-1).update({"w": weight}, None)
    np.testing.assert_allclose(along["w"], got.weight, rtol=1e-6)
    whole, _ = sl.UnitwiseClip(1.0, axis=(0, 1)).update({"w": weight}, None)
    np.testing.assert_allclose(jnp.linalg.norm(whole["w"]), 1.0, rtol=1e-6)


def test_a_norm_layer_is_one_unit():
    got, _ = sl.UnitwiseClip(0.5).update(drawn(lambda: eqx.nn.LayerNorm((3, 2))), None)
    np.testing.assert_allclose(jnp.linalg.norm(got.weight), 0.5, rtol=1e-6)


@pytest.mark.parametrize(
    "tx",
    [sl.AdaptiveGradClip(0.3), sl.ScaleByFactoredRms(min_dim_size_to_factor=2)],
    ids=lambda tx: type(tx).__name__,
)
def test_a_stack_of_layers_is_what_each_of_them_is(tx):
    def make(key):
        return (eqx.nn.Linear(3, 4, key=key), eqx.nn.Conv1d(3, 2, 2, key=key))

    def stack():
        return eqx.filter_vmap(make)(keys[:3])

    def update(params, grads):
        return tx.update(grads, tx.init(params), params, sl.Context(step=0))[0]

    params, grads = drawn(stack), drawn(stack, seed=1)
    together, each = jax.jit(lambda *trees: (update(*trees), jax.vmap(update)(*trees)))(
        params, grads
    )
    for a, b, g in zip(*map(jax.tree.leaves, (together, each, grads)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
        assert not np.allclose(a, g)


def shapes(tx, params):
    return jax.tree.map(jnp.shape, tx.init(params).nu, is_leaf=eqx.is_array)


def test_rows_and_columns_are_those_of_the_layer():
    tx = sl.ScaleByFactoredRms(min_dim_size_to_factor=2)
    conv = drawn(lambda: eqx.nn.Conv2d(3, 4, 8, key=keys[0]))
    # Outputs and inputs, although the kernel is longer in both directions.
    assert shapes(tx, conv).weight == ((4, 1, 8, 8), (1, 3, 8, 8))
    assert shapes(tx, conv).bias == ((4, 1, 1),)
    plain = {"w": conv.weight}
    assert shapes(tx, plain)["w"] == ((4, 3, 8, 1), (4, 3, 1, 8))
    chosen = sl.ScaleByFactoredRms(min_dim_size_to_factor=2, axis=(0, -1))
    assert shapes(chosen, plain)["w"] == ((4, 3, 8, 1), (1, 3, 8, 8))
    assert shapes(sl.ScaleByFactoredRms(), plain)["w"] == ((4, 3, 8, 8),)
    assert shapes(sl.ScaleByFactoredRms(False, min_dim_size_to_factor=2), plain)["w"] == (
        (4, 3, 8, 8),
    )


@pytest.mark.slow
def test_factors_are_kept_in_single_precision_and_are_finite_at_zero():
    params = {"w": jnp.ones((4, 3), jnp.float16), "b": jnp.ones(3, jnp.float16)}
    tx = sl.ScaleByFactoredRms(min_dim_size_to_factor=2, clipping_threshold=1.0)
    state = tx.init(params)
    assert {x.dtype for x in jax.tree.leaves(state.nu)} == {jnp.dtype("float32")}
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, state = tx.update(zeros, state, params, sl.Context(step=0))
    for u in jax.tree.leaves(updates):
        np.testing.assert_array_equal(u, 0)


@pytest.mark.parametrize("dtype", slow_except([jnp.float32, jnp.complex64], jnp.float32))
@pytest.mark.parametrize("factored", [True, False])
def test_the_bound_inside_is_the_bound_after(factored, dtype):
    params = {"w": jnp.ones((4, 3), dtype), "b": jnp.ones(3, dtype)}
    grads = jax.tree.map(lambda g: g, gradients(params, 3))
    inside = sl.ScaleByFactoredRms(factored, 0.8, 0, 2, clipping_threshold=0.7)
    after = sl.ScaleByFactoredRms(factored, 0.8, 0, 2) | sl.ClipByBlockRms(0.7)
    states = inside.init(params), after.init(params)
    for i in range(3):
        g = jax.tree.map(lambda x, i=i: x[i], grads)
        a, first = inside.update(g, states[0], params, sl.Context(step=i))
        b, second = after.update(g, states[1], params, sl.Context(step=i))
        states = first, second
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-6)


def test_steps_that_do_not_count_leave_the_first_decay_at_zero():
    tx = sl.ScaleByFactoredRms(step_offset=2)
    state = tx.init(jnp.zeros(()))
    seen = []
    for step, g in enumerate([3.0, 5.0, 7.0, 1.0]):
        _, state = tx.update(jnp.array(g), state, None, sl.Context(step=step))
        seen.append(float(state.nu[0]))
    last = 1 - 2**-0.8
    np.testing.assert_allclose(seen, [9, 25, 49, last * 49 + (1 - last)], rtol=1e-6)


def test_adafactor_arrives_at_the_minimum():
    def rosenbrock(x):
        return 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2

    def parabola(x):
        return jnp.sum(jnp.square(x - jnp.array([1.0, -1.0])))

    # The step never gets smaller by itself: it is the size of the parameter.
    decaying = sl.schedules.exponential_decay(0.02, 1000, 0.6)
    for function, minimum in ((rosenbrock, [1.0, 1.0]), (parabola, [1.0, -1.0])):

        @jax.jit
        def run(params, opt, function=function):
            def body(carry, _):
                params, opt = carry
                return opt.step(params, jax.grad(function)(params)), None

            return jax.lax.scan(body, (params, opt), length=10_000)[0]

        params, _ = run(jnp.zeros(2), sl.Optimizer(sl.adafactor(decaying), jnp.zeros(2)))
        np.testing.assert_allclose(params, minimum, atol=3e-2, rtol=3e-2)


# --- what a user reads ----------------------------------------------------------------------


def test_a_layer_that_is_not_known_says_so_where_its_layout_counts():
    params = {"net": Mine(jnp.ones((3, 2)), jnp.ones(3))}
    sl.ScaleByFactoredRms().init(params)  # which of two axes comes first is all the same to it
    sl.AdaptiveGradClip(0.1, axis=0).mask(sl.where.ndim(min=2)).init(params)
    with pytest.warns(UserWarning) as warned:  # noqa: PT030  the whole text is compared
        sl.Optimizer(sl.AdaptiveGradClip(0.1) | sl.sgd(0.1), params)
    assert [str(w.message) for w in warned] == [
        "AdaptiveGradClip does not know how Mine stores 'net.weight', and assumes, as Optax "
        "does, that the numbers of one unit lie along axis 0. Equinox's own layers store out × in. "
        "To choose the axes and silence this warning: "
        "`sl.AdaptiveGradClip(..., axis=...).mask(sl.where.type(Mine))`."
    ]


ERRORS = {
    "too many axes": (
        lambda: sl.UnitwiseClip(0.1).init({"w": jnp.ones((2,) * 6)}),
        "UnitwiseClip does not know the units of 'w', which has 6 axes. Pass the axes along which "
        "the numbers of one unit lie, for this array only: "
        "`sl.UnitwiseClip(..., axis=...).mask(sl.where.path('w'))`.",
    ),
    "no such axis": (
        lambda: sl.Optimizer(sl.AdaptiveGradClip(0.1, axis=1), {"b": jnp.ones(2)}),
        "AdaptiveGradClip has axis=1, but 'b' has ndim=1. Apply it only to parameters that have "
        "this axis, for example with `.mask(sl.where.ndim(min=2))`.",
    ),
    "one axis for two": (
        lambda: sl.ScaleByFactoredRms(axis=(1, 1)),
        "ScaleByFactoredRms.axis must be two different axes, got (1, 1).",
    ),
}


@pytest.mark.parametrize(("bad", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_the_whole_message(bad, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011  the whole text is compared
        bad()
    assert str(error.value) == message
