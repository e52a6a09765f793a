"""One compiled step over several parts of a batch, and what the transforms are told beside."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import slalom as sl
from helpers import Counting, assert_close, distance, mean_square, mlp, params_of, slow_except
from refusals.messages import refused

random = np.random.default_rng(0)
X = jnp.asarray(random.standard_normal((12, 2)), jnp.float32)
Y = jnp.asarray(random.standard_normal((12, 1)), jnp.float32)
MODEL = mlp(jax.random.key(0))
TX = sl.ClipByGlobalNorm(0.1) | sl.sgd(0.1, 0.9)


def stepped(loss_fn, *args, tx=TX, model=MODEL, context=None, keywords=None, **options):
    """The parameters after a step, the optimizer and what came beside."""
    step = sl.train_step(loss_fn, donate=False, **options)
    opt = sl.Optimizer(tx, model)
    model, opt, loss = step(model, opt, *args, context=context, **(keywords or {}))
    return params_of(model), opt, loss


def in_parts(loss_fn, *args, number=3, batch_args=None, **options):
    """The results of the step over the whole batch and of that over parts: of equal parameters."""
    whole = stepped(loss_fn, *args, **options)
    parts = stepped(loss_fn, *args, microbatches=number, batch_args=batch_args, **options)
    assert distance(parts[0], whole[0]) <= 1e-6
    return whole, parts


@pytest.mark.parametrize("number", slow_except([1, 3], 3))
def test_equal_to_the_whole_batch(number):
    (_, opt, loss), (_, by_parts, mean) = in_parts(mean_square, X, Y, number=number)
    np.testing.assert_allclose(mean, loss, rtol=1e-6)
    assert distance(by_parts, opt) <= 1e-6


@pytest.mark.slow
def test_equal_to_the_whole_batch_in_double_precision(x64):
    model, x, y = mlp(dtype=jnp.float64), X.astype(jnp.float64), Y.astype(jnp.float64)
    whole, _, loss = stepped(mean_square, x, y, model=model)
    parts, _, mean = stepped(mean_square, x, y, model=model, microbatches=4)
    assert_close((parts, mean), (whole, loss), rtol=1e-12)


@pytest.mark.slow
def test_batches_are_arguments_by_name_position_or_come_split():
    # A table that belongs to no example, a keyword and something static are passed whole.
    def loss_fn(model, x, y, table=None, *, scale=1.0, kind):
        assert kind == "mean"
        bias = 0.0 if table is None else jnp.sum(table)
        return scale * jnp.mean((jax.vmap(model)(x) - y + bias) ** 2)

    def of_tree(model, batch, scale):
        return scale * mean_square(model, batch["x"], batch["y"])

    same = {"kind": "mean", "scale": 2.0}
    tree = {"batch": {"x": X, "y": Y, "name": "train"}, "scale": jnp.float32(2.0)}
    table = jnp.ones(5)
    in_parts(loss_fn, X, Y, table, keywords=same, batch_args=("x", "y"))
    in_parts(loss_fn, X, Y, table, keywords=same, batch_args=["x", 1])
    in_parts(loss_fn, X, Y, keywords=same)
    in_parts(of_tree, keywords=tree, batch_args=0)

    def loss_fn(w, x, key):
        return jnp.mean((x @ w - jax.random.uniform(key)) ** 2)

    w, x = jnp.ones(3), jnp.arange(24.0).reshape(4, 2, 3) / 10
    step = sl.train_step(loss_fn, microbatches="split")
    new, _, loss = step(w, sl.Optimizer(sl.sgd(0.1), w), x, jax.random.split(jax.random.key(0), 4))
    # Without "split", part i has the examples i, i + 4, …
    whole = jnp.swapaxes(x, 0, 1).reshape(8, 3)
    expected, _, same = sl.train_step(loss_fn, microbatches=4)(
        w, sl.Optimizer(sl.sgd(0.1), w), whole, jax.random.key(0)
    )
    np.testing.assert_allclose(new, expected, rtol=1e-6)
    np.testing.assert_allclose(loss, same, rtol=1e-6)
    with pytest.raises(ValueError, match=r"has 4 entries and that of .* has 3"):
        step(w, sl.Optimizer(sl.sgd(0.1), w), x[:3], jax.random.split(jax.random.key(0), 4))


def weighted(model, x, y, mask):
    errors = (jax.vmap(model)(x) - y) ** 2 * mask
    return jnp.sum(errors) / jnp.maximum(jnp.sum(mask), 1), jnp.sum(mask)


# By threes, the microbatches count 3, 0 and 2: the one without weight is all padding.
MASK = jnp.asarray([[1, 0, 1], [1, 0, 0], [1, 0, 1], [0, 0, 0]], jnp.float32).reshape(12, 1)


class Seen(eqx.Module):
    seen: jax.Array


class SeeWeight(sl.AbstractTransform):
    """Passes updates on, and notes the weight."""

    def init(self, params):
        return Seen(jnp.zeros(()))

    def update(self, updates, state, params=None, context=None):
        return updates, Seen(jnp.asarray(context.weight, jnp.float32))


class SeeValue(sl.AbstractTransform):
    """Passes updates on, and notes the loss as `value_fn` evaluates it, and its slopes."""

    needs = ("params", "value_fn", "grad")

    def init(self, params):
        return Seen(jnp.zeros(3))

    def update(self, updates, state, params=None, context=None):
        value, grad = jax.value_and_grad(context.value_fn)(params)
        slopes = map(sl.tree.global_norm, (grad, context.grad))
        return updates, Seen(jnp.stack([value, *slopes]))


def assert_value_seen(opt, loss):
    value, own, given = opt.state_of(SeeValue).seen
    np.testing.assert_allclose([value, own], [loss, given], rtol=1e-6)


@pytest.mark.slow
def test_unequal_weights_equal_the_whole_batch_and_parts_without_leave_no_trace():
    def loss_fn(model, x, y, mask):
        return *weighted(model, x, y, mask), {"x": x, "kind": "train"}

    options = {"tx": SeeWeight() | SeeValue() | TX, "has_weight": True, "has_aux": True}
    results = in_parts(loss_fn, X, Y, MASK, **options)
    for _, opt, (loss, weight, aux) in results:
        assert float(weight) == float(opt.state_of(SeeWeight).seen) == 5.0
        assert aux["kind"] == "train"
        assert_value_seen(opt, loss)
    (_, _, (loss, _, aux)), (_, _, (mean, _, stacked)) = results
    np.testing.assert_allclose(mean, loss, rtol=1e-6)
    np.testing.assert_array_equal(aux["x"], X)
    # Part i holds the examples i, i + 3, i + 6, i + 9.
    np.testing.assert_array_equal(stacked["x"], np.stack([X[i::3] for i in range(3)]))

    # The second of three parts holds the examples 1, 4, 7, 10.
    def loss_fn(model, x, y, mask):
        return mean_square(model, x, y), jnp.sum(mask)

    part = jnp.arange(12) % 3 == 1
    mask = jnp.where(part, 0.0, 1.0)
    exact, _, (loss, _) = stepped(loss_fn, X[~part], Y[~part], mask[~part], has_weight=True)
    x = jnp.where(part[:, None], jnp.nan, X)
    options = {"has_weight": True, "microbatches": 3}
    parts, _, (mean, weight) = stepped(loss_fn, x, Y, mask, **options)
    assert float(weight) == 8.0
    np.testing.assert_allclose(mean, loss, rtol=1e-6)
    assert distance(parts, exact) <= 1e-6


@pytest.mark.slow
def test_complex_parameters_and_weights_under_every_k_equal_the_whole_batch():
    # Microbatches inside, mini-batches outside: weights are counted through both.
    exact, _, _ = stepped(weighted, X, Y, MASK, has_weight=True)
    step = sl.train_step(weighted, has_weight=True, microbatches=2, donate=False)
    model, opt = MODEL, sl.Optimizer(TX.every_k(3), MODEL)
    for i in range(3):
        rows = slice(4 * i, 4 * i + 4)
        model, opt, _ = step(model, opt, X[rows], Y[rows], MASK[rows])
    assert distance(params_of(model), exact) <= 1e-6

    def loss_fn(z, targets):
        return jnp.mean(jnp.abs(z[None] - targets) ** 2)

    z = jnp.array([1 + 2j, 0.5j], jnp.complex64)
    targets = jnp.asarray(random.standard_normal((6, 2)) + 1j, jnp.complex64)
    in_parts(loss_fn, targets, model=z)


def test_half_precision_is_averaged_in_float32_and_a_step_prints_as_code():
    # One part pulls with 1, 63 parts with 2⁻¹²: in bfloat16 each of the small ones would be lost.
    pull = np.full(64, 2**-12, np.float32)
    pull[0] = 1.0

    w = jnp.zeros((), jnp.bfloat16)
    opt = sl.Optimizer(sl.Trace(0.0, accumulator_dtype="float32"), w)
    step = sl.train_step(lambda w, x: jnp.sum(w * x), microbatches=64, donate=False)
    _, opt, loss = step(w, opt, jnp.asarray(pull, jnp.bfloat16))
    np.testing.assert_allclose(jax.tree.leaves(opt.state)[0], pull.sum() / 64, rtol=1e-6)
    assert loss.dtype == jnp.bfloat16

    step = sl.train_step(mean_square, has_weight=True, microbatches=4, batch_args="x")
    shown = "sl.train_step(mean_square, has_weight=True, microbatches=4, batch_args=('x',))"
    assert repr(step) == shown
    assert repr(sl.train_step(mean_square)) == "sl.train_step(mean_square)"


@pytest.mark.slow
def test_sharded_batches_stay_and_other_contexts_compile_nothing():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    x = jax.device_put(jnp.tile(X, (2, 1)), NamedSharding(mesh, PartitionSpec("data")))
    y = jax.device_put(jnp.tile(Y, (2, 1)), NamedSharding(mesh, PartitionSpec("data")))
    model = eqx.filter_shard(MODEL, NamedSharding(mesh, PartitionSpec()))
    opt = sl.Optimizer(TX, model)
    step = sl.train_step(mean_square, microbatches=3, donate=False)
    text = step.lower(model, opt, x, y).compile().as_text()
    # Of 24 examples on 4 devices each has 2 of a microbatch of 8: none is gathered.
    assert "all-gather" not in text
    assert "all-to-all" not in text
    exact, _, _ = stepped(mean_square, X, Y)
    new, _, _ = step(model, opt, x, y)
    assert distance(params_of(new), exact) <= 1e-6

    loss_fn = Counting(mean_square)
    step = sl.train_step(loss_fn, donate=False, microbatches=2)
    opt = sl.Optimizer(TX.every_k(2), MODEL)
    for weight in (1.0, 2.0):
        _, opt, _ = step(MODEL, opt, X, Y, context={"weight": weight})
    assert loss_fn.traces == 1


@pytest.mark.slow
def test_scratch_is_one_accumulator_and_the_gradient_of_a_part():
    model = {f"layer{i}": jnp.full((256, 256), 0.01) for i in range(4)}
    size = sum(x.nbytes for x in jax.tree.leaves(model))

    def loss_fn(model, x):
        for w in model.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    opt = sl.Optimizer(sl.adamw(1e-3), model)
    step = sl.train_step(loss_fn, donate="all", microbatches=8)
    program = step.lower(model, opt, jnp.ones((16, 256))).compile()
    assert program.memory_analysis().temp_size_in_bytes <= 2.1 * size


def noisy(model, x, y, key, scale=1.0):
    """A loss with dropout of the inputs, which also returns what was dropped."""
    keep = jax.random.bernoulli(key, 0.5, x.shape)
    return scale * mean_square(model, jnp.where(keep, x, 0), y), keep


@pytest.mark.slow
def test_each_microbatch_draws_from_a_key_of_its_own():
    key = jax.random.key(7)
    options = {"has_aux": True, "microbatches": 3, "tx": SeeValue() | TX}
    parts, opt, (loss, keep) = stepped(noisy, X, Y, key, **options)
    by_hand = [jax.random.bernoulli(k, 0.5, (4, 2)) for k in jax.random.split(key, 3)]
    np.testing.assert_array_equal(keep, by_hand)
    assert_value_seen(opt, loss)

    # The step is that of the whole batch with the same masks: part i holds i, i + 3, i + 6, i + 9.
    mask = jnp.swapaxes(jnp.stack(by_hand), 0, 1).reshape(12, 2)
    whole, _, exact = stepped(mean_square, jnp.where(mask, X, 0), Y)
    assert distance(parts, whole) <= 1e-6
    np.testing.assert_allclose(loss, exact, rtol=1e-6)

    for names in (("x", "y", "key"), ("x", "y")):
        named, _, _ = stepped(noisy, X, Y, key, batch_args=names, **options)
        assert distance(named, parts) == 0, names

    # An array of keys is divided like any array.
    def of_keys(model, x, y, keys):
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (2,)))(keys)
        return mean_square(model, jnp.where(keep, x, 0), y)

    keys = jax.random.split(key, 12)
    (_, _, loss), (_, _, mean) = in_parts(of_keys, X, Y, keys)
    np.testing.assert_allclose(mean, loss, rtol=1e-6)


class ScaleByTemperature(sl.AbstractStatelessTransform):
    """Adds the gradient of the loss, and scales by what only this transform is told."""

    needs = ("temperature", "key", "grad")

    def apply(self, updates, params, context):
        scale = context.extra["temperature"] * jax.random.uniform(context.key)
        return jax.tree.map(lambda u, g: (u + g) * scale, updates, context.grad)


@pytest.mark.slow
@pytest.mark.parametrize("number", [None, 3])
def test_transforms_are_told_of_the_context_and_of_transformed_gradients_only(number):
    def clear_biases(grads):
        return eqx.tree_at(lambda m: m.layers[0].bias, grads, replace_fn=jnp.zeros_like)

    tx = ScaleByTemperature() | SeeWeight() | sl.sgd(0.1)
    grads = clear_biases(eqx.filter_grad(mean_square)(MODEL, X, Y))
    known = {"key": jax.random.key(3), "weight": 2, "temperature": jnp.float32(3.0)}
    exact, _ = sl.Optimizer(tx, MODEL).step(MODEL, grads, grad=grads, **known)
    options = {"transform_grads": clear_biases, "microbatches": number}
    new, opt, _ = stepped(mean_square, X, Y, tx=tx, context=known, **options)
    assert distance(new, params_of(exact)) <= 1e-6
    assert float(opt.state_of(SeeWeight).seen) == 2.0


@pytest.mark.slow
def test_gradients_are_averaged_over_devices_under_shard_map():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    params, static = eqx.partition(MODEL, eqx.is_array)
    average = functools.partial(jax.lax.pmean, axis_name="data")
    step = sl.train_step(lambda *args: average(mean_square(*args)), transform_grads=average)

    def on_each_device(params, opt, x, y):
        model, opt, loss = step(eqx.combine(params, static), opt, x, y)
        return params_of(model), opt, loss

    whole, split = PartitionSpec(), PartitionSpec("data")
    in_specs = (whole, whole, split, split)
    on_all = jax.shard_map(on_each_device, mesh=mesh, in_specs=in_specs, out_specs=whole)
    new, opt, loss = jax.jit(on_all)(params, sl.Optimizer(TX, MODEL), X, Y)
    exact, by_one, mean = stepped(mean_square, X, Y)
    assert distance(new, exact) <= 1e-6
    assert distance(opt, by_one) <= 1e-6
    np.testing.assert_allclose(loss, mean, rtol=1e-6)


NAME_THEM = (
    " Name the arguments that hold the batch: `sl.train_step(loss_fn, ..., batch_args=('x', 'y'))`."
)


def run(*args, **options):
    def loss_fn(model, x, y, scale=1.0):
        return mean_square(model, x, y) * scale

    return stepped(loss_fn, *args, **options)


def returning(result, **options):
    def loss_fn(model, x):
        return result(jnp.mean(jax.vmap(model)(x)), x)

    return stepped(loss_fn, X, has_weight=True, **options)


TYPES = {
    "The argument 'scale' contains no arrays, so it cannot be divided into microbatches. Remove it "
    "from `batch_args`.": lambda: run(X, Y, 2.0, microbatches=3, batch_args="scale"),
    "There are no arrays among the arguments after `opt` to divide into microbatches. Pass the "
    "batch to the step: `step(model, opt, x, y)`.": (
        lambda: stepped(lambda model: jnp.sum(model.layers[0].weight), microbatches=3)
    ),
    "With `has_weight=True` the loss must return a pair (loss, weight), got an array of shape "
    "().": lambda: returning(lambda loss, x: loss),
    "The weight that the loss returns must be a scalar, got a NoneType.": (
        lambda: returning(lambda loss, x: (loss, None))
    ),
    "The training step passes 'value' itself. Remove it from `context`.": (
        lambda: run(X, Y, context={"value": 1.0})
    ),
    "The training step passes 'weight' itself. Remove it from `context`.": (
        lambda: returning(lambda loss, x: (loss, 1), context={"weight": 1.0})
    ),
    "No transform uses 'temperature'. These keywords are always accepted: value, grad, value_fn, "
    "key, weight, per_param. To pass it on in `context.extra`, declare it in a transform: "
    "`needs = ('temperature',)`.": lambda: run(X, Y, context={"temperature": 1.0}),
}
VALUES = {
    "train_step.microbatches must be at least 1, got 0.": lambda: run(X, Y, microbatches=0),
    "The batch has 12 examples, which cannot be divided into 5 microbatches of equal size. "
    "Pass a multiple of 5, or pad the batch and let the loss return a weighted mean and its "
    "weight, with `has_weight=True`.": lambda: run(X, Y, microbatches=5),
    "The argument 'scale' has no leading axis, so it cannot be divided into microbatches."
    + NAME_THEM: lambda: run(X, Y, jnp.float32(2.0), microbatches=3),
    "The leading axis of the argument 'y' has 6 entries and that of 'x' has 12, so they cannot be "
    "divided into the same microbatches." + NAME_THEM: lambda: run(X, Y[:6], microbatches=3),
    "`batch_args` names 'z', but the step was called without such an argument. Arguments after "
    "`opt`: 'x', 'y'.": lambda: run(X, Y, microbatches=3, batch_args=("x", "z")),
    "`batch_args` names 2, but the step was called without such an argument. Arguments after "
    "`opt`: 'x', 'y'.": lambda: run(X, Y, microbatches=3, batch_args=2),
    "`batch_args` names the arguments that are divided into microbatches or examples, but this "
    "step does not divide the batch. Pass `microbatches=` too, or remove `batch_args`.": (
        lambda: run(X, Y, batch_args=("x", "y"))
    ),
    "This optimizer uses the residuals of the loss, and takes the batch as a whole. Join its first "
    "two axes, and pass their number: `microbatches=n`.": (
        lambda: stepped(sl.LeastSquares(run), X, tx=sl.gauss_newton(), microbatches="split")
    ),
    "The weight that the loss returns must be a real scalar, got an array of shape (12,) and "
    "dtype float32.": lambda: returning(lambda loss, x: (loss, x[:, 0])),
}


@pytest.mark.parametrize(
    ("error", "message"),
    [(error, m) for error, cases in ((TypeError, TYPES), (ValueError, VALUES)) for m in cases],
)
def test_what_cannot_be_done_is_refused(error, message):
    # JAX may put a note of its own under the message.
    with pytest.raises(error, match=rf"\A{re.escape(message)}(\n-+\n|\Z)"):
        (TYPES | VALUES)[message]()


def normed_loss(net, state, x, y, weight=None):
    predict = jax.vmap(net, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    predicted, state = predict(x, state)
    loss = jnp.mean((predicted - y) ** 2)
    return (loss, state) if weight is None else (loss, jnp.sum(weight), {"state": state})


@pytest.mark.parametrize("has_weight", slow_except([False, True], True))
def test_a_state_of_the_model_goes_from_one_microbatch_to_the_next(has_weight):
    net, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="batch")
    x = jax.random.normal(jax.random.key(0), (8, 2)) + 3
    batch = (x, jnp.sin(x), jnp.tile(jnp.array([1.0, 0.0]), 4))  # all padding is in one part
    batch = batch if has_weight else batch[:2]
    step = sl.train_step(normed_loss, has_aux=True, has_weight=has_weight, microbatches=2)
    _, _, (*_, aux) = step(net, sl.Optimizer(sl.sgd(0.1), net), state, *batch)
    expected = state
    for part in range(1 if has_weight else 2):
        expected = normed_loss(net, expected, batch[0][part::2], batch[1][part::2])[1]
    assert_close(aux["state"] if has_weight else aux, expected)

    stateful = sl.train_step(normed_loss, has_aux=True, microbatches=2)
    stacked = [jnp.stack([a, a]) for a in batch[:2]]
    opt = sl.Optimizer(sl.sgd(0.1), net)
    (_, _, (losses, last)) = stateful.scan(net, opt, *stacked, model_state=state)
    assert losses.shape == (2,)
    assert jax.tree.structure(last) == jax.tree.structure(state)


def test_states_that_cannot_be_carried():
    net, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="batch")
    x = jnp.ones((8, 2))

    def twice(net, state, x, y):
        loss, state = normed_loss(net, state, x, y)
        return loss, (state, state)

    step = sl.train_step(twice, has_aux=True, microbatches=2)
    with refused(ValueError, "takes 1 `eqx.nn.State` and returns 2", "Return each that it takes"):
        step(net, sl.Optimizer(sl.sgd(0.1), net), state, x, x)
    tx = sl.DifferentiallyPrivateAggregate(1.0, 1.0, 0) | sl.sgd(0.1)
    step = sl.train_step(normed_loss, has_aux=True)
    with refused(ValueError, "`eqx.nn.State` … each example", "`eqx.nn.GroupNorm`"):
        step(net, sl.Optimizer(tx, net), state, x, x)
