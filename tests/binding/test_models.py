"""Whole models: everything that is not trained stays the very object, and dtypes stay."""

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
    assert_same_bits,
    mean_square,
    mlp,
    params_of,
    slow_except,
)

X = jnp.linspace(-1, 1, 8).reshape(4, 2)
Y = jnp.sum(X, axis=1, keepdims=True)


def ones(model):
    return jax.tree.map(jnp.ones_like, params_of(model))


def everything():
    """One of each kind of leaf that a model may hold."""
    return {
        "linear": eqx.nn.Linear(2, 1, key=jax.random.key(0)),
        "pair": (eqx.nn.Linear(2, 1, key=jax.random.key(1)), jax.nn.relu),
        "table": {"scale": jnp.ones(()), "label": "a"},
        "nothing": None,
        "function": jnp.tanh,
        "count": 3,
        "rate": 0.5,
        "flag": True,
        "key": jax.random.key(7),
        "indices": jnp.arange(3),
        "mask": jnp.array([True, False]),
        "constants": np.ones((1, 1), np.float32),
        "whole": np.arange(3),
    }


TRAINED = {
    *("linear.weight", "linear.bias", "pair.0.weight", "pair.0.bias"),
    *("table.scale", "constants"),
}
KEPT = ("function", "count", "rate", "flag", "key", "indices", "mask", "whole")


def everything_loss(model, x, y):
    hidden = model["function"](jax.vmap(model["linear"])(x)) * model["table"]["scale"]
    noise = model["rate"] * jax.random.normal(model["key"], (1, 1))
    other = model["pair"][1](jax.vmap(model["pair"][0])(x))
    return jnp.mean((hidden + other + model["constants"] * noise - y) ** 2)


@pytest.mark.slow
def test_every_kind_of_leaf_passes_through_a_step():
    model = everything()
    opt = sl.Optimizer(sl.adamw(0.1, weight_decay=0.1), model)
    rows = opt.describe(model).to_dict()
    assert {path for path, row in rows.items() if row["trainable"]} == TRAINED
    stepped, _ = opt.step(model, ones(model))
    step = sl.train_step(everything_loss)
    trained, opt, first = step(model, opt, X, Y)
    _, opt, second = step(trained, opt, X, Y)
    assert second < first
    for new in (stepped, trained):
        assert_same_bits(*(eqx.partition(m, eqx.is_inexact_array)[1] for m in (new, model)))
        assert all(new[name] is model[name] for name in KEPT)
        leaves = (jax.tree.leaves(params_of(m)) for m in (model, new))
        for old, now in zip(*leaves, strict=True):
            assert isinstance(now, jax.Array)
            assert (old.dtype, old.shape) == (now.dtype, now.shape)
            assert not np.array_equal(old, now)
    # Only trained leaves are donated.
    assert not model["key"].is_deleted()
    assert not model["indices"].is_deleted()
    np.testing.assert_array_equal(model["constants"], [[1.0]])


def test_shared_leaves_and_the_states_of_models_stay():
    # A module that was not taken apart by `make_with_state` holds its initial state itself.
    model = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
    opt = sl.Optimizer(sl.adamw(0.1, weight_decay=0.5), model)
    assert len(jax.tree.leaves(params_of(model))) > 2
    trained = [path for path, row in opt.describe(model).to_dict().items() if row["trainable"]]
    assert trained == ["weight", "bias"]
    new, opt = opt.step(model, ones(model))
    for name, index in vars(model).items():
        if isinstance(index, eqx.nn.StateIndex):
            pairs = zip(*map(jax.tree.leaves, (index, getattr(new, name))), strict=True)
            assert all(a is b for a, b in pairs)
    assert len(jax.tree.leaves(opt.state_of(sl.ScaleByAdam).mu)) == 2

    _, state = pair = eqx.nn.make_with_state(lambda: model)()
    opt = sl.Optimizer(sl.adamw(0.1, weight_decay=0.5), pair, trainable=~sl.where.path("0.bias"))
    (new, kept), opt = opt.step(pair, ones(pair))
    assert not jnp.array_equal(new.weight, model.weight)
    assert eqx.tree_equal(kept, state)

    shared = eqx.nn.Shared(untied(), where_head, lambda m: m.embed.weight)
    opt = sl.Optimizer(sl.adam(0.1), shared)
    assert opt.binding.params.num_leaves == 1
    step = sl.train_step(lambda shared, x: jnp.mean(jnp.square(jax.vmap(shared())(x) - 1)))
    shared, _, _ = after_training(step, opt, 3, shared, X)
    model = shared()
    assert model.head.weight is model.embed.weight
    assert not eqx.tree_equal(untied().embed, model.embed)


def test_gradients_may_be_none_and_of_other_dtypes_than_parameters():
    model = mlp()
    opt = sl.Optimizer(sl.adam(0.1), model, trainable=sl.where.path("layers.1.**"))
    grads = ones(model)
    with_holes = eqx.tree_at(
        lambda g: (g.layers[0].weight, g.layers[0].bias), grads, replace=(None, None)
    )
    holes, _ = opt.step(model, with_holes)
    full, _ = opt.step(model, grads)
    assert_same_bits(holes, full)
    assert holes.layers[0].weight is model.layers[0].weight

    pairs = ((jnp.bfloat16, jnp.float32), (jnp.float16, jnp.float32), (jnp.float32, jnp.bfloat16))
    model, grads = ([jnp.ones(2, dtype) for dtype in column] for column in zip(*pairs, strict=True))
    opt = sl.Optimizer(sl.adam(0.5), model)
    new, opt = opt.step(model, grads)
    assert {x.dtype for x in opt.state_of(sl.ScaleByAdam).nu} == {np.dtype("float32")}
    for x, (dtype, _) in zip(new, pairs, strict=True):
        assert x.dtype == dtype
        np.testing.assert_allclose(x.astype(jnp.float32), 0.5, rtol=1e-2)


class Tied(eqx.Module):
    embed: eqx.nn.Linear
    head: eqx.nn.Linear

    def __call__(self, x):
        return self.head(jnp.tanh(self.embed(x)))


def untied():
    keys = jax.random.split(jax.random.key(0))
    return Tied(*(eqx.nn.Linear(2, 2, use_bias=False, key=key) for key in keys))


def where_head(m):
    return m.head.weight


def test_arrays_at_two_places_and_missing_learning_rates_are_warned_of():
    model = eqx.tree_at(where_head, untied(), untied().embed.weight)
    model = eqx.tree_at(where_head, model, model.embed.weight)
    with pytest.warns(UserWarning, match="Shared") as caught:
        sl.Optimizer(sl.adam(0.1), model)
    assert str(caught[0].message) == (
        "The model contains the same array twice, at 'embed.weight' and 'head.weight'. They are "
        "trained as two separate parameters. To tie them, use `eqx.nn.Shared`."
    )
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="Shared") as again:
        sl.Optimizer(sl.adam(0.1), untied()).rebind(model)
    assert {w.filename for w in (*caught, *again)} == {__file__}

    params = jnp.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt = sl.Optimizer(sl.ScaleByAdam(eps=0.125), params)
        opt.update(params, params)
        sl.Optimizer(sl.ScaleByAdam(eps=0.125) | sl.Scale(1.0), params).step(params, params)
    with pytest.warns(UserWarning, match="ascends the loss: nothing in 'scale_by_adam'"):
        opt.step(params, params)


@pytest.mark.parametrize(("trainable", "loss"), [(None, 1.0), (sl.where.path("a"), 5.0)])
@pytest.mark.filterwarnings("ignore:The model contains the same array twice")
def test_a_buffer_at_two_places_is_donated_once(trainable, loss):
    array = jnp.ones(2)
    model = {"a": array, "b": array}
    opt = sl.Optimizer(sl.sgd(0.5), model, trainable=trainable)
    step = sl.train_step(lambda m: jnp.sum(m["a"] + 2 * m["b"]), donate="all")
    model, opt, _ = step(model, opt)
    assert step(model, opt)[2] == loss


def head_spec(model):
    spec = jax.tree.map(lambda _: False, model)
    return eqx.tree_at(lambda m: (m.layers[1].weight, m.layers[1].bias), spec, (True, True))


def test_frozen_leaves_are_bit_identical_and_no_gradient_of_them_is_taken():
    # E3: decay and momentum must not reach them; −0 must stay −0.
    model = eqx.tree_at(lambda m: m.layers[0].bias, mlp(), jnp.full(4, -0.0))
    tx = sl.ClipByGlobalNorm(1.0) | sl.adamw(0.01, weight_decay=0.1)
    opt = sl.Optimizer(tx, model, trainable=sl.where.path("layers.1.**"))
    for same in (head_spec, head_spec(model)):
        assert sl.Optimizer(tx, model, trainable=same).binding.params == opt.binding.params
    trained, frozen = eqx.partition(model, eqx.is_array)

    def body(carry, _):
        trained, opt = carry
        whole = eqx.combine(trained, frozen)
        grads = eqx.filter_grad(mean_square)(whole, X, Y)
        whole, opt = opt.step(whole, grads)
        return (eqx.partition(whole, eqx.is_array)[0], opt), None

    (trained, opt), _ = jax.jit(lambda c: jax.lax.scan(body, c, None, length=1000))((trained, opt))
    new = eqx.combine(trained, frozen)
    assert_same_bits(new.layers[0], model.layers[0])
    assert not eqx.tree_equal(model.layers[1], new.layers[1])
    assert len(jax.tree.leaves(opt.state_of(sl.ScaleByAdam).nu)) == 2
    assert opt.count == 1000

    # The square root of zero has an infinite slope: differentiated at all, it gives NaN.
    model = {"a": jnp.ones(2), "frozen": jnp.zeros(2)}

    def loss(m):
        return jnp.sum(m["a"]) + jnp.sum(0 * jnp.sqrt(m["frozen"])) + jnp.sum(m["frozen"])

    opt = sl.Optimizer(
        sl.ClipByGlobalNorm(10.0) | sl.sgd(1.0), model, trainable=~sl.where.path("frozen")
    )
    frozen = model["frozen"]
    new, _, _ = sl.train_step(loss)(model, opt)
    np.testing.assert_array_equal(new["a"], np.zeros(2))
    assert new["frozen"] is frozen
    assert not frozen.is_deleted()


def test_weakly_typed_leaves_become_strong():
    loss = Counting(lambda model: jnp.square(model["w"]))
    model = {"w": jnp.asarray(1.0)}
    assert model["w"].weak_type
    opt = sl.Optimizer(sl.adam(0.1), model)
    step = sl.train_step(loss)
    for _ in range(3):
        model, opt, _ = step(model, opt)
        assert not model["w"].weak_type
    assert loss.traces == 1
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(opt))


def test_mistakes_with_a_bound_optimizer_are_told():
    class Needy(sl.AbstractStatelessTransform):
        needs = ("replace",)

        def apply(self, updates, params, context):
            return updates

    with pytest.raises(TypeError, match="needs 'replace'"):
        sl.Optimizer(Needy() | sl.sgd(0.1), jnp.ones(2)).step(jnp.ones(2), jnp.ones(2))

    params = jnp.ones(2)
    opt = sl.Optimizer(sl.adam(sl.schedules.linear(0.1, 0.0, 10)), params)
    hyperparams = opt.hyperparams
    sl.train_step(jnp.sum)(params, opt)
    assert float(hyperparams["learning_rate"]) == pytest.approx(0.1)
    reads = [lambda: opt.count, lambda: opt.metrics, lambda: opt.has_updated]
    for read in (*reads, lambda: opt.hyperparams):
        with pytest.raises(ValueError, match="was donated to a training step"):
            read()
    assert "<donated>" in repr(opt)

    model = mlp(jax.random.key(0))
    grads = params_of(model)
    with pytest.raises(ValueError, match=r"swapped.*`opt.step\(model, grads\)`"):
        sl.Optimizer(sl.sgd(0.1), model).step(grads, model)

    opt = sl.Optimizer(sl.sgd(0.1), jnp.ones(2))
    with pytest.raises(AttributeError, match=r"with_hyperparams\(learning_rate=...\)"):
        opt.learning_rate = 1e-3


def test_abstract_models_bools_of_numpy_and_predicates_of_leaves():
    with pytest.raises(TypeError, match="returned False for the whole parameter tree"):
        sl.Optimizer(sl.adamw(0.1, decay_where=eqx.is_inexact_array), mlp(jax.random.key(0)))

    abstract = sl.Optimizer(sl.adam(0.1), eqx.filter_eval_shape(mlp))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(abstract))
    with pytest.raises(TypeError, match="ShapeDtypeStruct"):
        sl.adam(0.1).init(jax.ShapeDtypeStruct((3,), jnp.float32))

    params = {"w": jnp.ones(2)}
    tx = sl.sgd(0.1) | sl.freeze(np.array(True))
    stepped, _ = sl.Optimizer(tx, params).step(params, params)
    assert stepped["w"].tolist() == [1.0, 1.0]


def test_trees_like_a_model_with_state_are_masks_labels_bounds_and_updates():
    class Net(eqx.Module):
        linear: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

    make = lambda key: Net(  # noqa: E731
        eqx.nn.Linear(2, 3, key=key), eqx.nn.BatchNorm(3, "batch", mode="ema")
    )
    model, _ = eqx.nn.make_with_state(make)(jax.random.key(0))
    params, adam = params_of(model), sl.adam(0.1)
    for like in (model, params):
        bools = jax.tree.map(eqx.is_inexact_array, like)
        labels = jax.tree.map(lambda _: "a", like)
        for tx in (
            *(adam.only(bools), adam | sl.freeze(bools), sl.adamw(0.1, decay_where=bools)),
            *(sl.partition({"a": adam}, labels), adam.project(sl.projections.box(params, None))),
        ):
            sl.Optimizer(tx, model, trainable=bools).reset(model, bools)
    added = sl.apply_updates(model, params)
    assert_same_bits(params_of(added.linear), jax.tree.map(lambda p: p + p, params.linear))
    assert added.norm.ema_state_index is model.norm.ema_state_index


GRADS = {"w": jnp.ones((3, 4)), "b": jnp.ones(3)}
ON_GRADS = sl.Optimizer(sl.adam(0.1), GRADS)
TOTAL = sl.train_step(lambda model: jnp.sum(model["w"]) + jnp.sum(model["b"]))
CAPTURED = {
    "jit": lambda tx: jax.jit(lambda m: sl.Optimizer(tx, GRADS).step(m, m)[0])(GRADS),
    "without state": lambda tx: CAPTURED["of a step"](sl.Optimizer(sl.sgd(0.1), GRADS)),
    "of a step": lambda opt: jax.jit(lambda m: opt.step(m, m)[0])(GRADS),
    "of an update": lambda opt: eqx.filter_jit(lambda g: opt.update(GRADS, g)[0])(GRADS),
    "of a training step": lambda opt: jax.jit(lambda m: TOTAL(m, opt)[0])(GRADS),
    "of a scan": lambda opt: jax.lax.scan(
        lambda m, _: (opt.step(m, m)[0], None), GRADS, None, length=2
    ),
}


def warnings_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("how", slow_except(CAPTURED, "of a step"))
def test_an_optimizer_that_a_traced_function_captures_is_noticed(how):
    given = sl.adam(0.1) if how == "jit" else ON_GRADS
    found = warnings_of(lambda: CAPTURED[how](given))
    if how in ("jit", "without state"):  # it is made in there, or always the same
        assert not found
    else:
        assert "captured this optimizer" in found[0]
        assert "def step(model, opt, x)" in found[0]
    arguments = lambda: jax.jit(lambda m, opt: opt.step(m, m))(GRADS, ON_GRADS)  # noqa: E731
    assert not warnings_of(arguments)


SCALED = {
    "alone": lambda tx: tx,
    "averaged": lambda tx: tx.average(0.9),
    "a part": lambda tx: tx.only(sl.where.path("w")),
}
READ = {
    "not": lambda opt: None,
    "loss_scale": lambda opt: opt.loss_scale,
    "metrics": lambda opt: opt.metrics["loss_scale"],
}


@pytest.mark.parametrize("wrap", slow_except(SCALED, "alone"))
def test_a_scale_that_nobody_reads_is_noticed(wrap):
    for n, how in enumerate(READ, 1):
        # Another structure each time, because the warning comes where a step is traced.
        opt = sl.Optimizer(SCALED[wrap](sl.sgd(0.1).scale_loss(growth_interval=n)), GRADS)
        READ[how](opt)
        found = warnings_of(lambda opt=opt: opt.step(GRADS, GRADS))
        assert len(found) == (how == "not")
        assert all("`opt.loss_scale * loss`" in message for message in found)
        assert not warnings_of(lambda opt=opt: TOTAL(GRADS, opt))


@pytest.mark.slow
def test_stores_and_groups_without_anything_to_do_are_noticed():
    def of(tx, model=GRADS):
        return warnings_of(lambda: sl.Optimizer(tx, model))

    for tx, reason in (
        (sl.adam(0.1).store("int8"), "has 12 entries, and `min_size` is 4096"),
        (sl.adam(0.1).store({"nu": "int8"}, min_size=13), "has 12 entries, and `min_size` is 13"),
        (sl.adam(0.1).store("int4", where=sl.where.path("b")), "has 3 entries"),
        (sl.sgd(0.1).store("bfloat16", min_size=1), "has none that is shaped like"),
        (sl.sgd(0.1).average().store("int8", min_size=1), "fields 'average' stay as they are"),
        (sl.adam(0.1).every_k(2).store("int8", where=sl.where.nothing()), "selects no parameter"),
    ):
        (message,) = of(tx)
        assert reason in message
        assert "`.store` changes nothing" in message
    assert not of(sl.adam(0.1).store("int8", min_size=4))
    for recipe in (sl.muon, sl.soap, sl.contrib.dion):
        in_a_group = recipe(0.1).partition({sl.where.path("w"): sl.sgd(0.1)})
        for tx, model in ((recipe(0.1), {"b": GRADS["b"]}), (in_a_group, GRADS)):
            (message,) = of(tx, model)
            assert "none of these parameters is a matrix" in message
        assert not of(recipe(0.1))
