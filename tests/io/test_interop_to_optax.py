"""`sl.interop.to_optax`: the same bits as `opt.update`, in code for Optax, at the same cost."""

import dataclasses
import itertools
import pickle
import re
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import GetAttrKey

import slalom as sl
from helpers import (
    Counting,
    after_steps,
    assert_close,
    assert_same_bits,
    lenient,
    loss_of_any,
    mlp,
    slow_except,
    transforms_in,
)
from slalom._core.state.marks import marks
from slalom.interop import to_optax
from slalom.interop._state import without_names
from table import GRADIENT_ROWS, PER_EXAMPLE, WITH_GRADIENT, rows

matrices = sl.where.ndim(min=2)
params = {
    "w": jnp.linspace(-1, 1, 6).reshape(2, 3),
    "b": (jnp.linspace(0.5, 1, 3), jnp.asarray(0.25)),
}
ones = jax.tree.map(jnp.ones_like, params)


def at(step):
    """The gradients of one step."""
    return jax.tree.map(lambda p: jnp.cos(p * (step + 1)), params)


def known(grads):
    return {"value": loss_of_any(grads), "grad": grads, "value_fn": loss_of_any}


def three_updates(update, state):
    """The updates of three steps at fixed parameters, and the last state, compiled as one."""

    def body(state, step):
        updates, state = update(at(step), state)
        return state, updates

    return jax.jit(lambda state: jax.lax.scan(body, state, jnp.arange(3.0)))(state)


# IVON is refused, since a loop for Optax takes no gradients at its samples.
WITH_GRADIENT = {name: tx for name, tx in WITH_GRADIENT.items() if "ivon" not in name.lower()}
GRADIENT_ROWS = [name for name in GRADIENT_ROWS if name in WITH_GRADIENT]


@rows(GRADIENT_ROWS, everyday=("ScaleByAdam", "Average"))
def test_every_transform_updates_as_an_optimizer_does(row):
    tx = to_optax(row.tx)

    def ours(grads, opt):
        return opt.update(params, grads, **known(grads))

    def theirs(grads, state):
        return tx.update(grads, state, params, **known(grads))

    opt, expected = three_updates(ours, sl.Optimizer(row.tx, params))
    state, updates = three_updates(theirs, tx.init(params))
    assert_same_bits(updates, expected)
    assert_same_bits(state.inner_state, opt.state)
    assert_same_bits(sl.interop.metrics(state).to_dict(), opt.metrics.to_dict())
    assert_same_bits(sl.interop.hyperparams(state).to_dict(), opt.hyperparams.to_dict())
    assert_same_bits(sl.interop.eval_params(state, params), opt.eval_params(params))


@pytest.mark.parametrize("name", slow_except(PER_EXAMPLE, "PerExampleLayerNormClip"))
def test_per_example_gradients_are_accepted(name):
    stacked = jax.tree.map(lambda *x: jnp.stack(x), at(0), at(1))
    expected, _ = sl.Optimizer(PER_EXAMPLE[name], params).update(params, stacked)
    tx = to_optax(PER_EXAMPLE[name])
    assert_same_bits(tx.update(stacked, tx.init(params), params)[0], expected)
    with pytest.raises(TypeError, match=r"needs 'params': write `tx.update\(grads, state, params"):
        tx.update(stacked, tx.init(params))


def test_updates_have_the_dtype_of_the_model_and_extra_arguments_are_passed():
    # Shapes are enough; the bits are the same by the test above.
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    tx = to_optax(sl.adamw(0.1, decay_where=matrices))
    updates, state = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), half)
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
    assert jax.tree.leaves(state.inner_state[0].nu)[0].dtype == jnp.float32

    model = mlp()
    arrays = eqx.filter(model, eqx.is_inexact_array)
    updates = eqx.filter_eval_shape(lambda m: tx.update(arrays, tx.init(m), m)[0], model)
    assert jax.tree.structure(updates) == jax.tree.structure(arrays)

    tx = to_optax(ScaleByLoss())
    state = tx.init(params)
    updates, _ = tx.update(ones, state, params, loss=jnp.asarray(3.0), other=1, value=None)
    assert_same_bits(updates, jax.tree.map(lambda g: 3 * g, ones))
    with pytest.raises(TypeError, match=r"'loss': write `tx.update\(grads, state, params, loss="):
        tx.update(ones, state, params, other=1)
    # In a chain, each transform takes its own.
    known = {"loss": jnp.asarray(3.0), "value": jnp.asarray(1.0)}
    with lenient():
        tx = optax.chain(tx, optax.scale(1.0), optax.polyak_sgd(), to_optax(sl.sgd(0.1)))
        jax.eval_shape(lambda: tx.update(ones, tx.init(params), params, **known)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "Flatten", "EveryK, skip"])
def test_parameters_may_be_left_out_where_no_link_needs_them(name):
    given = sl.adam(0.1).flatten() if name == "Flatten" else WITH_GRADIENT[name]
    tx = to_optax(given)
    state, updates = three_updates(tx.update, tx.init(params))
    after, expected = three_updates(lambda g, s: tx.update(g, s, params), tx.init(params))
    assert_same_bits((updates, state), (expected, after))


def test_what_is_missing_unknown_or_of_another_structure_is_named():
    for tx, message in (
        (sl.adamw(0.1), r"AddDecayedWeights \('add_decayed_weights'\) needs 'params'"),
        (sl.adam(0.1).average(), "Average needs 'params'"),
        (sl.sgd(0.1).project(sl.projections.non_negative()), "Project needs 'params'"),
    ):
        tx = to_optax(tx)
        with pytest.raises(TypeError, match=message + r".*`tx.update\(grads, state, params\)`"):
            tx.update(ones, tx.init(params))

    state = optax.adam(0.1).init(params)
    given = {"hyperparams": (), "with_hyperparams": ({"b1": 0.5},), "metrics": ()}
    for name, further in {**given, "eval_params": (params,)}.items():
        with pytest.raises(TypeError, match=f"`sl.interop.{name}` takes the state of a transform"):
            getattr(sl.interop, name)(state, *further)

    falling = sl.schedules.linear(1.0, 0.0, 4)
    structure = r"structure of the state.*`sl.interop.to_optax\(new_tx\)`"
    for tx, values, message in (
        (sl.adam(0.1), {"learningrate": 1.0}, "'learningrate' is not known. Candid.*learning_rate"),
        (sl.adam(0.1), {"learning_rate": falling}, structure),
        (sl.sgd(0.1).average(), {"average.decay": 0.9}, structure),
    ):
        with pytest.raises((KeyError, ValueError), match=message):
            sl.interop.with_hyperparams(to_optax(tx).init(params), values)


class ScaleByLoss(sl.AbstractStatelessTransform):
    needs = ("loss",)

    def apply(self, updates, params, context):
        return jax.tree.map(lambda u: u * context.extra["loss"], updates)


@pytest.mark.parametrize("kind", ["NamedSharding", "SingleDeviceSharding"])
def test_parameters_may_be_placed(kind):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    named = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    place = (
        named if kind == "NamedSharding" else jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    params = jax.device_put({"w": jnp.ones((4, 4))}, place)
    tx = sl.interop.to_optax(sl.muon(0.1))
    state = tx.init(params)
    assert all(x.sharding.device_set == place.device_set for x in jax.tree.leaves(state))
    updates, _ = tx.update(params, state, params)
    assert updates["w"].sharding.is_equivalent_to(place, 2)


@pytest.mark.slow
def test_stored_state_goes_through_optax_and_back():
    tx = sl.adam(0.1).every_k(2).store("int8", min_size=1)
    params = {"w": jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)}
    both = (tx, sl.interop.from_optax(sl.interop.to_optax(tx)))
    found = [after_steps(own, 4, params, params)[0] for own in both]
    # What is rounded at random depends on the path, which is another one.
    assert_close(*found, atol=5e-3)


def test_hyperparameters_are_live_and_found_inside_of_other_states():
    tx = to_optax(sl.adam(0.1))
    update = jax.jit(lambda state: tx.update(ones, state, params))
    start = tx.init(params)
    slow = sl.interop.with_hyperparams(start, {"learning_rate": lambda lr: lr / 4})
    assert_same_bits(update(slow)[0], jax.tree.map(lambda u: u / 4, update(start)[0]))
    assert update._cache_size() == 1
    assert slow.hyperparams["learning_rate"] == np.float32(0.1) / 4
    state = to_optax(sl.sgd(0.1), hyperparam_dtype="bfloat16").init(params)
    assert sl.interop.hyperparams(state)["learning_rate"].dtype == jnp.bfloat16

    tx = optax.chain(optax.clip(1.0), to_optax(sl.adam(sl.schedules.linear(1.0, 0.0, 4))))
    state = {"opt": tx.init(params), "step": 3}
    _, state["opt"] = tx.update(ones, state["opt"], params)
    assert sl.interop.hyperparams(state)["learning_rate"] == 0.75
    state = sl.interop.with_hyperparams(state, {"learning_rate.init_value": 2.0})
    assert sl.interop.hyperparams(state)["learning_rate"] == 1.5
    assert state["step"] == 3
    # Those of two transforms are told apart.
    groups = {"a": to_optax(sl.sgd(0.1)), "b": to_optax(sl.adam(0.1))}
    state = optax.partition(groups, {"w": "a", "b": "b"}).init(params)
    message = re.escape("`state.inner_states['a'].inner_state`, `state.inner_states['b']")
    message = f"contains 2 states .* `sl.interop.hyperparams`: {message}"
    with pytest.raises(ValueError, match=message):
        sl.interop.hyperparams(state)
    assert sl.interop.hyperparams(state.inner_states["a"])["learning_rate"] == np.float32(0.1)


def test_injected_numbers_gradients_and_functions_reach_the_state():
    injected = optax.inject_hyperparams(lambda rate: to_optax(sl.adam(rate)))(rate=0.1)
    state = injected.init(params)
    state.hyperparams["rate"] = jnp.asarray(0.5)
    for update in (injected.update, jax.jit(injected.update)):
        updates, after = update(ones, state, params)
        np.testing.assert_allclose(updates["w"], -0.5, rtol=1e-5)
        assert sl.interop.hyperparams(after)["learning_rate"] == 0.5
        assert jax.tree.structure(after) == jax.tree.structure(state)
    # What each call sets is not changed in the state.
    state = to_optax(sl.adam(jnp.asarray(0.1))).init(params)
    sl.interop.with_hyperparams(state, b1=0.5)
    message = r"'scale_by_learning_rate.learning_rate' was passed .* as an array.*Python number"
    with pytest.raises(ValueError, match=message):
        sl.interop.with_hyperparams(state, learning_rate=0.2)

    fixed = to_optax(sl.sgd(0.1))

    def first_updates(rate):
        tx = to_optax(sl.sgd(rate))
        of_state = sl.interop.with_hyperparams(fixed.init(params), learning_rate=rate)
        both = (tx.update(ones, tx.init(params), params), fixed.update(ones, of_state, params))
        return jnp.stack([updates["w"][0, 0] for updates, _ in both])

    assert jax.jacobian(first_updates)(jnp.asarray(0.1)).tolist() == [-1, -1]

    tx = to_optax(Learned(mlp()) | sl.sgd(0.1))
    state = tx.init(params)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    updates, after = jax.jit(tx.update)(ones, state, params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    expected, _ = sl.Optimizer(Learned(mlp()) | sl.sgd(0.1), params).update(params, ones)
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-6)


class Learned(sl.AbstractTransform):
    """A rule with a network, which holds a function next to its arrays."""

    net: eqx.nn.MLP

    def init(self, params):
        return {"name": "learned"}

    def update(self, updates, state, params=None, context=None):
        return jax.tree.map(lambda u: u * self.net(jnp.ones(2))[0], updates), state


def test_chains_partitions_and_masks_are_those_of_optax():
    unused = to_optax(sl.sgd(0.5))
    groups = {"adam": to_optax(sl.adam(0.1)), "none": unused, "off": optax.set_to_zero()}
    with lenient():
        tx = optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.multi_transform(groups, {"w": "adam", "b": ("off", "adam")}),
            optax.masked(to_optax(sl.Scale(2.0)), {"w": True, "b": False}),
        )
        update = jax.jit(tx.update)
        updates, state = update(ones, tx.init(params), params)
        again, _ = update(ones, state, params)
    np.testing.assert_allclose(updates["w"], -0.2, rtol=1e-5)
    np.testing.assert_allclose(updates["b"][1], -0.1, rtol=1e-5)
    assert not np.any(updates["b"][0])
    np.testing.assert_allclose(again["w"], -0.2, rtol=1e-5)

    first, second = sl.adam(0.1).mask(matrices), sl.sgd(0.1).mask(~matrices)
    tx = optax.chain(to_optax(first), to_optax(second))
    with pytest.warns(UserWarning, match=r"Raw gradients .* `sl.interop.to_optax\(first \| second"):
        state = tx.init(params)
    updates, _ = tx.update(ones, state, params)
    together = to_optax(first | second)
    expected, _ = together.update(ones, together.init(params), params)
    assert_same_bits(updates, expected)


@pytest.mark.slow
def test_multi_steps_of_optax_equals_every_k():
    tx = optax.MultiSteps(to_optax(sl.adam(0.1)), 2)
    opt = sl.Optimizer(sl.adam(0.1).every_k(2), params)
    state = tx.init(params)
    for step in range(4):
        with lenient():
            updates, state = tx.update(at(step), state, params)
        expected, opt = opt.update(params, at(step))
    assert_close(updates, expected, rtol=1e-5)


@rows(WITH_GRADIENT, everyday=("Partition", "Flatten", "adamw", "ScaleBySm3"))
def test_optax_maps_what_slalom_maps_and_all_that_belongs_to_a_parameter(row):
    if row.name == "Monitor":
        pytest.skip("it measures a list of leaves, which no tree without leaves shows")
    tx = to_optax(row.tx)
    state = tx.init(params)
    mapped = optax.tree.map_params(tx, lambda _: "param", state)
    expected = sl.map_params(lambda _: "param", state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    ours, theirs = (
        {path for path, x in jax.tree.leaves_with_path(tree) if x == "param"}
        for tree in (expected, mapped)
    )
    assert ours <= theirs
    others = fields_with_other_shapes(state)
    assert all(any(key in others for key in path) for path in theirs - ours)

    # Optax finds each field by its name.
    parts = [node for node in transforms_in([state.inner_state], eqx.Module) if marks(node)]
    for name in {name for node in parts for name in marks(node)} - {"count"}:
        values = [getattr(node, name) for node in parts if name in marks(node)]
        found = [without_names(x) for _, x in optax.tree.get_all_with_path(state, name)]
        assert list(map(id, jax.tree.leaves(found))) == list(map(id, jax.tree.leaves(values)))
    assert optax.tree.get(state, "count") is state.count


def fields_with_other_shapes(state):
    """Those with arrays of other shapes for each parameter, as keys of a path."""
    kinds = itertools.product((False, True), (None, "reduced", "copy"))
    other = [dict(sl.fields.per_param(spread=a, stored=b).metadata) for a, b in kinds]
    nodes = transforms_in(state, eqx.Module)
    fields = [field for node in nodes for field in dataclasses.fields(node)]
    return {GetAttrKey(field.name) for field in fields if dict(field.metadata) in other}


def test_optax_reads_sets_and_maps_the_state_by_names():
    tx = to_optax(sl.ClipByGlobalNorm(1.0) | sl.adamw(0.1))
    _, state = tx.update(params, tx.init(params), params)
    assert int(optax.tree.get(state, "count")) == 1
    zeros = jax.tree.map(jnp.zeros_like, optax.tree.get(state, "mu"))
    after = optax.tree.set(optax.tree.set(state, mu=zeros), count=jnp.int32(5))
    assert_same_bits(after.inner_state[1].mu, zeros)
    assert_same_bits(after.inner_state[1].nu, optax.tree.get(state, "ScaleByAdamState").nu)
    assert int(after.count) == 5
    assert_same_bits(pickle.loads(pickle.dumps(after)), after)
    assert int(optax.tree.get(tx.update(params, after, params)[1], "count")) == 6

    tx = to_optax(sl.ClipByGlobalNorm(1.0) | sl.adam(0.1))
    names = jax.tree.map(lambda p: "param", params)
    state = optax.tree.map_params(
        tx, lambda _, name: name, tx.init(params), names, transform_non_params=lambda _: "other"
    )
    assert jax.tree.leaves(state.inner_state[1].mu) == ["param"] * 3
    assert set(jax.tree.leaves((state.transform, state.count))) == {"other"}

    large = {"w": jnp.ones((100, 100)), "b": jnp.ones(3), "c": jnp.ones(4)}
    names = jax.tree.map(lambda _: "param", large)
    tx = to_optax(sl.adam(0.1).partition({sl.where.path("w"): sl.sgd(0.1, momentum=0.9)}))
    state = optax.tree.map_params(
        tx, lambda _, name: name, tx.init(large), names, is_leaf=lambda x: x is None
    )
    assert jax.tree.leaves(state.inner_state.groups[0]) == ["param"] * 3
    tx = to_optax(sl.adam(0.1).flatten())
    state = optax.tree.map_params(tx, jnp.zeros_like, tx.init(large))
    assert state.inner_state.inner[0].mu.together["float32"].shape == (7,)
    assert state.inner_state.inner[0].mu.apart["w"].shape == (100, 100)


@pytest.mark.parametrize("tx", [sl.lbfgs(), sl.adam(0.1).sam(0.05)], ids=["search", "sam"])
def test_the_loss_gets_the_data_that_it_takes_and_other_data_compile_nothing(tx):
    def loss_of(params, batch, key=None):
        scale = 1.0 if key is None else jax.random.uniform(key)
        return scale * sum(jnp.sum(jnp.square(p - batch)) for p in jax.tree.leaves(params))

    tx, loss_fn, key = to_optax(tx), Counting(loss_of), jax.random.key(0)
    state = tx.init(params)
    for batch in (jnp.asarray(0.5), jnp.asarray(2.0)):
        grads = jax.grad(loss_of)(params, batch, key)
        known = {"value": loss_of(params, batch, key), "grad": grads}
        before = loss_fn.traces
        given = {"value_fn": loss_fn, "batch": batch, "key": key, "other": 1}
        updates, _ = tx.update(grads, state, params, **known, **given)
        taken = loss_fn.traces - before
        known["value_fn"] = Counting(lambda p, batch=batch: loss_of(p, batch, key))
        known["value_fn"].__signature__ = 0  # which nothing can read
        assert_same_bits(updates, tx.update(grads, state, params, **known)[0])
    assert taken == 0


def test_optax_code_can_sweep_and_donate_and_compiles_once():
    tx = to_optax(sl.adam(0.1))

    def run(rate):
        state = sl.interop.with_hyperparams(tx.init(params), learning_rate=rate)
        return tx.update(ones, state, params)

    updates, state = jax.vmap(run)(jnp.array([0.1, 0.2]))
    np.testing.assert_allclose(updates["w"][1], -0.2, rtol=1e-5)
    assert sl.interop.hyperparams(state)["learning_rate"].shape == (2,)

    tx = to_optax(sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3).average(0.9))
    step = jax.jit(tx.update, donate_argnums=1)
    before = tx.init(params)
    _, after = step(ones, before, params)
    assert all(x.is_deleted() for x in jax.tree.leaves(before))
    for _ in range(2):
        _, after = step(ones, after, params)
    assert step._cache_size() == 1


large = {f"layer{i}": jnp.full((256, 512), 0.1 * (i + 1)) for i in range(3)}
COSTS = {
    "adamw": sl.adamw(1e-3),
    "clip, adamw": sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3),
    "average": sl.adamw(1e-3).average(0.9),
    "every_k": sl.adamw(1e-3).every_k(4),
}


@pytest.mark.parametrize("name", slow_except(COSTS, "adamw"))
def test_an_update_compiles_to_the_program_of_an_optimizer(name):
    def compiled(init, update):
        def step(params, state, grads):
            updates, state = update(params, state, grads)
            return optax.apply_updates(params, updates), state

        return jax.jit(step, donate_argnums=(0, 1)).lower(large, init, large).compile()

    tx, opt = to_optax(COSTS[name]), sl.Optimizer(COSTS[name], large)
    ours = compiled(opt, lambda params, opt, grads: opt.update(params, grads))
    theirs = compiled(tx.init(large), lambda params, state, grads: tx.update(grads, state, params))
    costs = []
    for program in (theirs, ours):
        kernels = re.findall(r" = \S.* (?:fusion|copy|custom-call|reduce)\(", program.as_text())
        costs.append((len(kernels), program.memory_analysis().temp_size_in_bytes))
    (kernels, scratch), (usual, usual_scratch) = costs
    assert kernels == usual > 0
    assert scratch <= usual_scratch


def test_what_is_no_transform_or_an_optimizer_refuses_is_refused():
    for given, message in (
        (sl.Optimizer(sl.adam(0.1), params), r"`sl.interop.to_optax\(opt.transform\)`"),
        (optax.adam(0.1), "is not a transform: .*This is a transform of Optax"),
        (sl.adam, r"Call it first: `adam\(...\)`"),
    ):
        with pytest.raises(TypeError, match=message):
            to_optax(given)

    with pytest.raises(ValueError, match="There is nothing to train"):
        to_optax(sl.adam(0.1)).init({"w": 1})
    tx = to_optax(sl.adam(0.1))
    with pytest.raises(ValueError, match="The gradient at 'w' has shape"):
        tx.update(ones | {"w": jnp.ones(2)}, tx.init(params), params)
    with pytest.raises(TypeError, match=r"`tx.update\(grads, state, params\)`"):
        tx.update(params, ones, tx.init(params))

    tx = to_optax(sl.adam(0.1).if_finite(0, on_limit="raise"))
    bad = jax.tree.map(lambda p: p * jnp.nan, params)
    _, state = jax.jit(tx.update)(bad, tx.init(params), params)
    for given in ((params,), ()):
        with pytest.raises(FloatingPointError, match="not finite in 1 steps"):
            tx.update(ones, state, *given)


def test_a_missing_optax_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    for name in ("to_optax", "from_optax"):
        with pytest.raises(ImportError, match=f"`sl.interop.{name}` needs Optax: pip install opt"):
            getattr(sl.interop, name)(sl.adam(0.1))
