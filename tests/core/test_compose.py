"""Composition: chains, masks and partitions do what the plainly written result says, anywhere."""

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import assert_same_bits

W, B = sl.where.path("**.w"), sl.where.path("**.b")


def params():
    return {"b": jnp.array([1.0, -0.0]), "w": jnp.array([[2.0, -3.0], [0.5, 4.0]])}


def grads(step=0):
    return jax.tree.map(lambda p: 0.5 * p + 0.25 * (1 + step), params())


def trajectory(tx, model, steps=3):
    """Parameters after some steps on `grads`, in the functional core."""
    state = tx.init(model)
    for n in range(steps):
        model, state = tx.step(grads(n), state, model, sl.Context(step=n))
    return model


# --- chains -----------------------------------------------------------------------------------

CLIP, ADAM, RATE = sl.ClipByGlobalNorm(1.0), sl.ScaleByAdam(), sl.ScaleByLearningRate(0.1)


def test_chains_flatten():
    joined = (CLIP | ADAM) | (RATE | sl.chain(CLIP, sl.chain(ADAM)))
    assert joined.links == (CLIP, ADAM, RATE, CLIP, ADAM)
    assert joined == sl.chain(CLIP, ADAM, RATE, CLIP, ADAM)
    assert len(joined) == 5


def test_a_chain_of_none_is_identity_and_of_one_the_link():
    assert sl.chain() == sl.named_chain() == sl.Identity()
    assert sl.chain(ADAM) is ADAM
    assert sl.chain(sl.chain(ADAM)) is ADAM


def test_links_are_reached_by_position_name_and_class():
    tx = sl.named_chain(clip=CLIP, rule=sl.adam(0.1)) | sl.Scale(0.5)
    assert tx["clip"] is tx[0]
    assert tx[0] == CLIP
    assert tx[-1] == tx["scale"] == tx[sl.Scale] == sl.Scale(0.5)
    assert tx["rule"] == sl.adam(0.1)
    assert tx["rule.scale_by_adam"] == tx["scale_by_adam"] == tx[sl.ScaleByAdam] == ADAM


@pytest.mark.parametrize("which", [slice(0, 1), sl.ScaleByAdam(), None], ids=repr)
def test_a_part_is_asked_for_by_what_names_one(which):
    with pytest.raises(TypeError, match="named by its path or its class, in a chain also by its"):
        sl.adam(0.1)[which]


def test_one_named_link_keeps_its_name():
    tx = sl.named_chain(clip=CLIP)
    assert tx["clip"] == CLIP
    assert (tx | RATE)["clip"] == CLIP


def test_repeated_links_are_numbered():
    tx = sl.Scale(1.0) | sl.Scale(2.0) | ADAM | sl.Scale(3.0)
    assert tx["scale"] == sl.Scale(1.0)
    assert tx["scale_2"] == sl.Scale(2.0)
    assert tx["scale_3"] == sl.Scale(3.0)
    assert list(sl.Optimizer(tx, params()).hyperparams)[:2] == [
        "scale.step_size",
        "scale_2.step_size",
    ]


def test_a_given_name_is_never_taken_by_a_number():
    tx = sl.named_chain(scale=sl.Scale(1.0)) | sl.Scale(2.0)
    assert tx["scale"] == sl.Scale(1.0)
    assert tx["scale_2"] == sl.Scale(2.0)


def test_numbered_links_step_around_given_names():
    tx = sl.Scale(1.0) | sl.Scale(2.0) | sl.named_chain(scale_2=sl.Scale(3.0))
    paths = list(sl.Optimizer(tx, params()).hyperparams)
    assert len(set(paths)) == 3
    assert tx["scale_2"] == sl.Scale(3.0)


def test_a_chain_runs_its_links_in_order():
    # Clip(1) then ×2 differs from ×2 then Clip(1).
    ones = {"w": jnp.ones(2)}
    after, _ = (sl.Clip(1.0) | sl.Scale(2.0)).update(ones, (None, None))
    before, _ = (sl.Scale(2.0) | sl.Clip(1.0)).update(ones, (None, None))
    assert jnp.array_equal(after["w"], jnp.full(2, 2.0))
    assert jnp.array_equal(before["w"], jnp.ones(2))


def test_states_are_reached_by_path_and_class():
    tx = sl.named_chain(rule=sl.adam(0.1)).partition({B: sl.sgd(0.1, 0.9).every_k(2)}, ("bias",))
    model, opt = params(), sl.Optimizer(tx, params())
    model, opt = opt.step(model, grads())
    adam = opt.state_of(sl.ScaleByAdam)
    for path in ("scale_by_adam", "rule.scale_by_adam", "partition.rest.rule.scale_by_adam"):
        assert eqx.tree_equal(opt.state_of(path), adam)
    assert adam.mu["b"] is None
    assert adam.mu["w"].shape == (2, 2)
    assert opt.state_of("partition.bias.every_k").mini_step == 1
    assert opt.state_of("trace").trace["w"] is None
    with pytest.raises(KeyError, match=r"'partition[.]bias[.]every_k[.]trace'"):
        opt.state_of(sl.ScaleByLion)


# --- repr -------------------------------------------------------------------------------------


def half_life(step):
    return 0.5**step


def is_bias(path, leaf):
    return path.endswith("b")


LINEAR = sl.schedules.linear(0.1, 0.0, 10)
PRINTED = [
    sl.Identity(),
    sl.SetToZero(),
    sl.Scale(-0.1),
    sl.ScaleByLearningRate(1e-3),
    sl.ScaleByLearningRate(half_life),
    sl.ScaleBySchedule(LINEAR),
    sl.ScaleByAdam(),
    sl.ScaleByAdam(0.8, b2=0.99, mu_dtype=jnp.bfloat16, nesterov=True, nu_dtype="float32"),
    sl.ScaleByLion(b1=0.8),
    sl.ScaleByRms(eps_in_sqrt=False, bias_correction=True),
    sl.ScaleByStddev(initial_scale=1.0),
    sl.Trace(0.9),
    sl.Trace(0.9, nesterov=True, accumulator_dtype="float32"),
    sl.AddDecayedWeights(0.1),
    sl.Clip(1.0),
    sl.ClipByGlobalNorm(float("inf")),
    sl.sgd(0.1),
    sl.sgd(0.1, momentum=0.9, nesterov=True),
    sl.adam(LINEAR),
    sl.adamw(1e-3, weight_decay=0.1, decay_where=sl.where.ndim(min=2)),
    sl.adamw(1e-3, decay_where=sl.where.leaf(is_bias)),
    sl.lion(1e-4, decay_where={"b": False, "w": True}),
    sl.rmsprop(0.01, centered=True, momentum=0.9),
    sl.named_chain(clip=CLIP, rule=sl.adam(0.1)),
    sl.Clip(1.0) | sl.named_chain(a=ADAM, b=RATE) | sl.Scale(0.5) | sl.named_chain(c=sl.Scale(2)),
    sl.named_chain(only=sl.adam(0.1)),
    sl.adam(0.1).mask(W),
    sl.Trace(0.5).mask(W & ~B).only(W | B),
    sl.adam(0.1).only(sl.where.everything()).every_k(4),
    sl.adam(0.1).every_k(LINEAR, mean=False, accumulator_dtype=jnp.float32),
    sl.adam(0.1).partition({B: sl.sgd(0.1)}),
    sl.adam(0.1).partition({B: sl.sgd(0.1), W: sl.lion(0.1).every_k(2)}, names=("bias", "weight")),
    sl.partition({"a": sl.adam(0.1), "b": sl.SetToZero()}, {"b": "a", "w": "b"}),
    sl.partition({"a": sl.adam(0.1), 1: sl.sgd(0.1)}, {B: "a", sl.where.everything(): 1}),
    sl.partition({"a": sl.adam(0.1), "d": sl.sgd(0.1)}, ("a", "d")),
    (CLIP | sl.adamw(LINEAR, weight_decay=0.1, decay_where=sl.where.ndim(min=2))).every_k(4),
    sl.Identity() | sl.adam(0.1).partition({B: CLIP | sl.sgd(0.1)}).every_k(2) | sl.Scale(1),
    sl.adam(sl.schedules.join([LINEAR, sl.schedules.constant(0.1)], [10])),
    sl.adam(sl.schedules.warmup_cosine_decay(0.0, 3e-3, 100, 2_000, end_value=1e-5)),
    sl.adam(sl.schedules.cosine_decay(0.1, 100, exponent=2.0)),
]
NAMES = {"sl": sl, "half_life": half_life, "is_bias": is_bias, "inf": float("inf")}


@pytest.mark.parametrize("tx", PRINTED)
def test_transforms_print_as_the_code_that_makes_them(tx):
    again = eval(repr(tx), NAMES)
    assert eqx.tree_equal(again, tx) is True
    assert repr(again) == repr(tx)


@pytest.mark.parametrize("tx", [sl.adamw(1e-3), sl.adam(LINEAR).every_k(2), sl.sgd(1 / 3, 0.9)])
def test_bound_transforms_print_as_unbound_ones(tx):
    # Binding rounds to float32, which prints its shortest form.
    bound = repr(sl.Optimizer(tx, params()).transform)
    assert bound == repr(tx).replace(repr(1 / 3), "0.33333334")


def test_defaults_are_left_out():
    assert repr(sl.adam(1e-3)) == "sl.ScaleByAdam() | sl.ScaleByLearningRate(0.001)"
    assert repr(sl.adam(1, b2=0.9)) == "sl.ScaleByAdam(b2=0.9) | sl.ScaleByLearningRate(1.0)"


def test_the_optimizer_prints_its_values():
    opt = sl.Optimizer(sl.adam(1e-2), params(), trainable=W)
    opt = opt.with_hyperparams(learning_rate=3e-3)
    assert repr(opt) == (
        "Optimizer(\n"
        "    sl.ScaleByAdam() | sl.ScaleByLearningRate(0.003),\n"
        "    trainable=sl.where.path('**.w'),\n"
        "    count=0,\n"
        "    parameters=1 array,\n"
        "    state=3 arrays, 36 B\n"
        ")"
    )


# --- masks and partitions ---------------------------------------------------------------------


def test_mask_transforms_the_selected_and_passes_the_others():
    tx = sl.Trace(0.9).mask(W)
    whole, part = sl.Trace(0.9), tx.init(params())
    state = whole.init(params())
    assert part.trace["b"] is None
    for n in range(3):
        got, part = tx.update(grads(n), part, params())
        expected, state = whole.update(grads(n), state, params())
        assert_same_bits(got["w"], expected["w"])
        assert got["b"] is not None
        assert_same_bits(got["b"], grads(n)["b"])


RULES = {
    "adam": sl.adam(0.1),
    "adamw": sl.adamw(0.1, weight_decay=0.1),
    "momentum": sl.sgd(0.1, 0.9, nesterov=True),
    "lion": sl.lion(0.1),
    "rmsprop": sl.rmsprop(0.1),
    "every_k": sl.adam(0.1).every_k(2),
    "clipped": CLIP | sl.sgd(0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_only_is_the_rule_on_the_selected_leaves_alone(rule):
    tx, model = RULES[rule], params()
    got = trajectory(tx.only(W), model)
    alone = sl.Optimizer(tx, {"w": model["w"]})
    weights = {"w": model["w"]}
    for n in range(3):
        weights, alone = alone.step(weights, {"w": grads(n)["w"]})
    np.testing.assert_allclose(got["w"], weights["w"], rtol=2e-6)
    assert_same_bits(got["b"], model["b"])


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_partition_is_each_rule_alone(rule):
    tx, other = RULES[rule], sl.sgd(0.3, 0.5)
    got = trajectory(tx.partition({B: other}), params())
    assert_same_bits(got["w"], trajectory(tx.only(W), params())["w"])
    assert_same_bits(got["b"], trajectory(other.only(B), params())["b"])


def test_labels_and_cases_say_the_same():
    cases = trajectory(sl.adam(0.1).partition({B: sl.sgd(0.3)}), params())
    adam_and_sgd = {"adam": sl.adam(0.1), "sgd": sl.sgd(0.3), "unused": sl.lion(0.1)}
    for labels in (
        {"b": "sgd", "w": "adam"},
        lambda params: {"b": "sgd", "w": "adam"},
        {B: "sgd", sl.where.everything(): "adam"},
    ):
        assert_same_bits(trajectory(sl.partition(adam_and_sgd, labels), params()), cases)


def test_the_first_match_counts():
    tx = sl.SetToZero().partition({B: sl.sgd(1.0), sl.where.everything(): sl.sgd(0.5)})
    updates, _ = tx.update(grads(), tx.init(params()), params())
    assert_same_bits(updates["b"], -grads()["b"])
    assert_same_bits(updates["w"], -0.5 * grads()["w"])


def test_masks_nest():
    tree = {name: jnp.ones(2) for name in ("a", "b", "c")}
    a, b = sl.where.path("a"), sl.where.path("b")
    tx = (sl.Scale(2.0) | sl.Scale(3.0).mask(~b)).mask(~a)
    updates, _ = tx.update(tree, tx.init(tree), tree)
    assert {name: float(u[0]) for name, u in updates.items()} == {"a": 1, "b": 2, "c": 6}

    only = sl.Scale(2.0).only(~b).only(~a)
    updates, _ = only.update(tree, only.init(tree), tree)
    assert {name: float(u[0]) for name, u in updates.items()} == {"a": 0, "b": 0, "c": 2}


def test_partition_in_only_in_every_k():
    tx = sl.adam(0.1).partition({B: sl.sgd(0.3)}).only(W).every_k(2)
    model, opt = params(), sl.Optimizer(tx, params())
    for _ in range(4):
        model, opt = opt.step(model, grads())
    plain, alone = {"w": params()["w"]}, sl.Optimizer(sl.adam(0.1), {"w": params()["w"]})
    for _ in range(2):
        plain, alone = alone.step(plain, {"w": grads()["w"]})
    np.testing.assert_allclose(model["w"], plain["w"], rtol=2e-6)
    assert_same_bits(model["b"], params()["b"])


def test_a_norm_inside_a_group_is_the_norm_of_the_group():
    ones = {"b": jnp.ones(4), "w": jnp.ones((4, 3))}
    inside = (sl.ClipByGlobalNorm(1.0) | sl.Scale(1.0)).partition({B: sl.Identity()})
    outside = sl.ClipByGlobalNorm(1.0) | sl.Scale(1.0).partition({B: sl.Identity()})
    got, _ = inside.update(ones, inside.init(ones), ones)
    np.testing.assert_allclose(got["w"], np.full((4, 3), 12**-0.5), rtol=1e-6)
    got, _ = outside.update(ones, outside.init(ones), ones)
    np.testing.assert_allclose(got["w"], np.full((4, 3), 0.25), rtol=1e-6)


@pytest.mark.slow
def test_only_keeps_every_bit():
    # −0 + 0 is +0, and NaN + 0 may lose its payload: the unselected must not be touched.
    nan = np.array([0x7FC12345], np.uint32).view(np.float32)
    model = {"b": jnp.array([-0.0, np.inf, nan[0]]), "w": jnp.ones(2)}
    bad = {"b": jnp.full(3, jnp.nan), "w": jnp.ones(2)}
    for tx in (
        sl.adamw(0.1).only(W),
        sl.adamw(0.1).only(W).every_k(1),
        sl.SetToZero().partition({W: sl.adam(0.1)}).only(W),
        CLIP.mask(W) | sl.adam(0.1).only(W),
    ):
        new, _ = sl.Optimizer(tx, model).step(model, bad)
        assert_same_bits(new["b"], model["b"])
        assert jnp.isfinite(new["w"]).all()
        assert not jnp.array_equal(new["w"], model["w"])


def test_unselected_nan_does_not_spread():
    bad = {"b": jnp.full(2, jnp.nan), "w": jnp.ones((2, 2))}
    tx = CLIP.mask(W) | sl.SetToZero().mask(B)
    updates, _ = tx.update(bad, tx.init(params()), params())
    assert_same_bits(updates["b"], jnp.zeros(2))
    np.testing.assert_allclose(updates["w"], np.full((2, 2), 0.5), rtol=1e-6)


@pytest.mark.slow
def test_prefix_labels_over_a_pair_of_models():
    generator = eqx.nn.MLP(1, 1, 2, 1, key=jax.random.key(0))
    critic = eqx.nn.Linear(2, 1, key=jax.random.key(1))
    tx = sl.partition({"g": sl.sgd(1.0), "d": sl.sgd(0.5)}, ("g", "d"))
    model = (generator, critic)
    opt = sl.Optimizer(tx, model)
    ones = jax.tree.map(jnp.ones_like, eqx.filter(model, eqx.is_inexact_array))
    (new_generator, new_critic), _ = opt.step(model, ones)
    assert_same_bits(new_generator.layers[0].weight, generator.layers[0].weight - 1)
    assert_same_bits(new_critic.weight, critic.weight - 0.5)
    assert new_generator.activation is generator.activation


# --- transformations of JAX -------------------------------------------------------------------

CONTROL = (CLIP | sl.adamw(LINEAR, weight_decay=0.1, decay_where=W)).partition(
    {B: sl.sgd(0.1, 0.9)}
)


@pytest.fixture(scope="module")
def stepped():
    """Three steps of the compiled `opt.step`."""
    model, opt = params(), sl.Optimizer(CONTROL, params())
    for n in range(3):
        model, opt = opt.step(model, grads(n))
    return model, opt


@pytest.mark.slow
def test_an_optimizer_is_a_scan_carry(stepped):
    def body(carry, grads):
        model, opt = carry
        return opt.step(model, grads), opt.hyperparams["rest.scale_by_learning_rate.learning_rate"]

    many = jax.tree.map(lambda *g: jnp.stack(g), *(grads(n) for n in range(3)))
    carry = (params(), sl.Optimizer(CONTROL, params()))
    (model, opt), rates = jax.lax.scan(body, carry, many)
    assert jax.tree.structure((model, opt)) == jax.tree.structure(stepped)
    for got, expected in zip(jax.tree.leaves((model, opt)), jax.tree.leaves(stepped), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_allclose(rates, LINEAR.values(3), rtol=1e-6)


def test_an_optimizer_goes_through_cond():
    opt = sl.Optimizer(CONTROL, params())

    @jax.jit
    def maybe(go, model, opt):
        return jax.lax.cond(go, lambda m, o: o.step(m, grads()), lambda m, o: (m, o), model, opt)

    model, after = maybe(False, params(), opt)
    assert_same_bits((model, after), (params(), opt))
    model, after = maybe(True, params(), opt)
    assert after.count == 1
    assert not jnp.array_equal(model["w"], params()["w"])


def test_the_functional_core_in_plain_jit(stepped):
    @jax.jit
    def step(model, state, grads, n):
        updates, state = CONTROL.update(grads, state, model, sl.Context(step=n))
        return sl.apply_updates(model, updates), state

    model, state = params(), CONTROL.init(params())
    for n in range(3):
        model, state = step(model, state, grads(n), n)
    for got, expected in zip(jax.tree.leaves(model), jax.tree.leaves(stepped[0]), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert jax.tree.structure(state) == jax.tree.structure(stepped[1].state)


def test_update_and_apply_is_step(stepped):
    model, opt = params(), sl.Optimizer(CONTROL, params())
    for n in range(3):
        updates, opt = opt.update(model, grads(n))
        model = sl.apply_updates(model, updates)
    # Within a unit in the last place: the one program may fuse the last product and the sum.
    for got, expected in zip(jax.tree.leaves(model), jax.tree.leaves(stepped[0]), strict=True):
        np.testing.assert_allclose(got, expected, rtol=3e-7)
    assert opt.count == 3


def test_apply_updates_leaves_everything_else_the_very_object():
    model = eqx.nn.MLP(1, 1, 2, 1, key=jax.random.key(0))
    ones = jax.tree.map(jnp.ones_like, eqx.filter(model, eqx.is_inexact_array))
    half = eqx.tree_at(lambda m: (m.layers[0].weight, m.layers[0].bias), ones, (None, None))
    new = sl.apply_updates(model, half)
    assert new.layers[0].weight is model.layers[0].weight
    assert_same_bits(new.layers[1].weight, model.layers[1].weight + 1)
    assert new.activation is model.activation


def test_apply_updates_keeps_half_precision():
    model = {"w": jnp.ones(2, jnp.bfloat16)}
    new = sl.apply_updates(model, {"w": jnp.full(2, 2.0**-7, jnp.float32)})
    assert_same_bits(new["w"], jnp.full(2, 1 + 2.0**-7, jnp.bfloat16))


def test_params_may_be_left_out_where_none_are_needed():
    tx = (CLIP | sl.adam(0.1).mask(W)).partition({B: sl.sgd(0.1, 0.9).every_k(2)})
    state = tx.init(params())
    without, _ = tx.update(grads(), state)
    given, _ = tx.update(grads(), state, params())
    assert_same_bits(without, given)


WRITES = [
    (CLIP | sl.adam(0.1).every_k(2).only(W), [False, True, False, True]),
    (sl.Identity().every_k(2) | sl.sgd(0.1), [False, True, False, True]),
    (sl.adam(0.1).every_k(2).partition({B: sl.sgd(0.1).every_k(3)}), [False, True, True, True]),
    (sl.sgd(0.1).every_k(2).mask(W) | sl.sgd(0.1).mask(~W), [True] * 4),
    (sl.adam(0.1), [True] * 4),
    (sl.adam(0.1).every_k(2), [False, True, False, True]),
    (sl.Identity().every_k(2) | sl.adam(0.1), [True] * 4),
    (sl.adam(0.1).partition({B: sl.sgd(0.1).every_k(3)}), [True] * 4),
    (sl.adam(0.1).every_k(2).every_k(2), [False, False, False, True]),
    (sl.adam(0.1).every_k(2).partition({B: sl.SetToZero()}), [False, True, False, True]),
    (sl.Trace(0.9).every_k(2).mask(W) | sl.Scale(-0.1), [True] * 4),
    (sl.sgd(0.1).every_k(2).mask(W) | sl.sgd(0.1).every_k(2).mask(~W), [False, True] * 2),
    (
        sl.sgd(0.1).every_k(2).mask(W) | sl.sgd(0.1).every_k(3).mask(~W) | CLIP,
        [False, True, True, True],
    ),
]
"""Transforms, and after which steps each has written a parameter."""


@pytest.mark.parametrize(
    ("tx", "expected"),
    [*WRITES[:4], *(pytest.param(*row, marks=pytest.mark.slow) for row in WRITES[4:])],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore:'every_k' returns zeros")
@pytest.mark.filterwarnings("ignore:'clip_by_global_norm' comes after")
def test_has_updated_says_whether_a_parameter_was_written(tx, expected):
    model, opt = params(), sl.Optimizer(tx, params())
    assert not opt.has_updated
    seen, moved = [], []
    for _ in expected:
        new, opt = opt.step(model, grads())
        moved.append(not eqx.tree_equal(new, model))
        seen.append(bool(opt.has_updated))
        model = new
    assert seen == expected
    # Adam writes what it makes of zeros, which at first are zeros.
    assert all(said or not did for said, did in zip(seen, moved, strict=True))
    assert moved[-1]


def test_every_name_stands_in_the_program():
    tx = sl.named_chain(clip=CLIP) | sl.adam(0.1).partition(
        {B: sl.sgd(0.1).every_k(2)}, names=("bias",)
    )
    opt = sl.Optimizer(tx, params())
    lowered = jax.jit(lambda o, m, g: o.step(m, g)).lower(opt, params(), grads())
    # A program from the cache may have the names of an older source.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    try:
        text = lowered.compile().as_text()
    finally:
        jax.config.update("jax_compilation_cache_include_metadata_in_key", False)
    # Leaves of equal shape share a trace, whose name stands in between.
    text = text.replace("jit(at_leaf)/", "")
    for scope in (
        "clip/",
        "partition/rest/scale_by_adam/",
        "partition/rest/scale_by_learning_rate/",
        "partition/bias/every_k/",
        "scale_by_learning_rate/",
    ):
        assert scope in text, scope


# --- custom transforms ------------------------------------------------------------------------


class AverageState(eqx.Module):
    average: object = sl.fields.param_like()
    seen: jax.Array


class Average(sl.AbstractTransform):
    """An exponential average of updates, written as a user would."""

    decay: sl.Hyperparameter = sl.fields.hyperparameter(0.9, within="[0, 1)")

    def init(self, params):
        return AverageState(jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))

    def update(self, updates, state, params=None, context=None):
        decay = self.at(context).decay
        average = jax.tree.map(lambda a, u: decay * a + (1 - decay) * u, state.average, updates)
        return average, AverageState(average, state.seen + 1)


def test_a_custom_transform_is_an_ordinary_one():
    tx = Average(0.5) | sl.ScaleByLearningRate(1.0)
    assert repr(tx) == "Average(decay=0.5) | sl.ScaleByLearningRate(1.0)"
    opt = sl.Optimizer(tx, params())
    assert opt.hyperparams["average.decay"] == 0.5
    model, opt = opt.step(params(), grads())
    assert_same_bits(model["w"], params()["w"] - 0.5 * grads()["w"])
    opt = opt.with_hyperparams({"average.decay": 0.0})
    model, opt = opt.step(model, grads())
    assert_same_bits(model["w"], params()["w"] - 0.5 * grads()["w"] - grads()["w"])
    assert opt.state_of(Average).seen == 2


@pytest.mark.parametrize(
    ("tx", "marked"),
    [
        (Average(), ["b", "w"]),
        (Average().mask(W), ["w"]),
        (Average().only(W).every_k(2), ["w"]),
        (sl.Identity().partition({B: Average()}), ["b"]),
        ((Average() | sl.Scale(-1.0)).every_k(2), ["b", "w"]),
    ],
    ids=repr,
)
def test_map_params_finds_marked_fields_anywhere(tx, marked):
    tx = tx | sl.ScaleByLearningRate(0.1)
    opt = sl.Optimizer(tx, params())
    _, opt = opt.step(params(), grads())
    state = opt.state
    filled = sl.map_params(lambda leaf, p: jnp.full_like(leaf, 7), state, params())
    assert jax.tree.structure(filled) == jax.tree.structure(state)
    found = sl.Optimizer(tx, params())
    structure = jax.tree.structure((found.state, found.count))
    assert structure == jax.tree.structure((filled, found.count))
    replaced = eqx.tree_at(
        lambda o: tuple(o.arrays),
        opt,
        (*opt.arrays[: opt.binding.rules], *jax.tree.leaves(filled), opt.count),
    )
    average = replaced.state_of(Average)
    assert {name for name, leaf in average.average.items() if leaf is not None} == set(marked)
    assert all((leaf == 7).all() for leaf in jax.tree.leaves(average.average))
    assert_same_bits(average.seen, opt.state_of(Average).seen)


def test_map_params_maps_the_others_too():
    state = sl.adam(0.1).init(params())
    mapped = sl.map_params(lambda leaf: "param", state, other=lambda leaf: "other")
    assert mapped[0].mu == mapped[0].nu == {"b": "param", "w": "param"}
    assert mapped[0].age == "other"


class CountedScale(sl.AbstractTransform):
    """Needs an entry of its own in the context, and no parameters."""

    needs = ("temperature",)

    def init(self, params):
        del params

    def update(self, updates, state, params=None, context=None):
        temperature = context.extra["temperature"]
        return jax.tree.map(lambda u: u * temperature, updates), state


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: t.every_k(1), lambda t: t.only(W | B)])
def test_declared_keywords_reach_nested_transforms(wrap):
    opt = sl.Optimizer(wrap(CountedScale() | sl.sgd(1.0)), params())
    model, _ = opt.step(params(), grads(), temperature=jnp.array(0.5))
    assert_same_bits(model["w"], params()["w"] - 0.5 * grads()["w"])


class MultiplyByTree(sl.AbstractTransform):
    needs = ("per_param",)

    def init(self, params):
        del params

    def update(self, updates, state, params=None, context=None):
        return jax.tree.map(jnp.multiply, updates, context.per_param["factor"]), state


def test_per_param_trees_are_cut_with_masks():
    tx = sl.sgd(1.0).partition({B: MultiplyByTree() | sl.sgd(1.0)})
    factor = {"b": jnp.array([2.0, 3.0]), "w": jnp.ones((2, 2))}
    model, _ = sl.Optimizer(tx, params()).step(params(), grads(), per_param={"factor": factor})
    np.testing.assert_allclose(model["b"], params()["b"] - factor["b"] * grads()["b"], rtol=1e-6)


# --- inspection -------------------------------------------------------------------------------


def test_describe_says_what_happens_to_each_parameter():
    model = eqx.nn.MLP(1, 1, 2, 1, key=jax.random.key(0))
    tx = CLIP | sl.adam(0.1).partition({sl.where.path("**.bias"): sl.sgd(0.1)}, names=("bias",))
    opt = sl.Optimizer(tx, model, trainable=~sl.where.path("layers.1.bias"))
    table = opt.describe(model).to_dict()
    assert list(table) == ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]
    assert table["layers.0.weight"] == {
        "path": "layers.0.weight",
        "dtype": "float32",
        "shape": (2, 1),
        "trainable": True,
        "group": "rest",
        "learning_rate": jnp.float32(0.1),
        "weight_decay": None,
        "state_bytes": 16,
        "transform": (
            "clip_by_global_norm | partition.rest.scale_by_adam | "
            "partition.rest.scale_by_learning_rate"
        ),
        "notes": "",
    }
    assert table["layers.0.bias"]["group"] == "bias"
    assert table["layers.0.bias"]["transform"].endswith("partition.bias.scale_by_learning_rate")
    assert table["layers.1.bias"]["trainable"] is False
    assert table["layers.1.bias"]["transform"] == ""
    printed = repr(opt.describe(model)).splitlines()
    assert printed[0].split() == list(table["layers.0.weight"])[:-1]  # nobody notes anything
    assert printed[4].split() == [
        *("layers.1.bias", "float32", "(1,)", "no", "–", "–", "–", "0", "–")
    ]
    assert len(printed) == 6  # the last one has the totals


def test_describe_tells_the_numbers_that_the_next_step_uses_at_each_parameter():
    halving = sl.schedules.piecewise_constant(1.0, {1: 0.5})
    tx = sl.adamw(halving, weight_decay=0.3, decay_where=W, mu_dtype="bfloat16")
    opt = sl.Optimizer(tx.partition({~W: sl.sgd(0.2)}), params())
    _, opt = opt.step(params(), grads())
    table = opt.describe(params()).to_dict()
    assert float(table["w"]["learning_rate"]) == 0.5
    assert float(table["w"]["weight_decay"]) == np.float32(0.3)
    assert table["w"]["state_bytes"] == params()["w"].size * (2 + 4)
    assert float(table["b"]["learning_rate"]) == np.float32(0.2)
    assert table["b"]["weight_decay"] is None
    assert table["b"]["state_bytes"] == 0


def test_describe_follows_masks():
    tx = sl.Trace(0.9).mask(W) | sl.sgd(0.1)
    table = sl.Optimizer(tx, params()).describe(params()).to_dict()
    assert table["b"]["transform"] == "scale_by_learning_rate"
    assert table["w"]["transform"] == "mask.trace | scale_by_learning_rate"


# --- any tree, any chain ----------------------------------------------------------------------

LEAVES = st.sampled_from(
    [((), "float32"), ((2,), "float32"), ((0,), "float32"), ((2, 1), "bfloat16"), ((1,), "float16")]
)
TREES = st.recursive(
    LEAVES.map(lambda leaf: jnp.ones(*leaf)) | st.none(),
    lambda below: (
        st.dictionaries(st.sampled_from("abc"), below, max_size=3)
        | st.lists(below, max_size=3).map(tuple)
    ),
    max_leaves=5,
).filter(lambda tree: bool(jax.tree.leaves(tree)))
LINKS = st.sampled_from(
    [
        CLIP,
        sl.Clip(0.5),
        ADAM,
        sl.Trace(0.9),
        sl.ScaleByLion(),
        sl.ScaleByRms(),
        sl.AddDecayedWeights(0.1),
        sl.AddDecayedWeights(0.1).mask(sl.where.ndim(min=1)),
        sl.Identity().every_k(2),
        sl.SetToZero().mask(sl.where.ndim(0)),
        sl.Identity().partition({sl.where.dtype(jnp.bfloat16): sl.Trace(0.5)}),
    ]
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'every_k' returns zeros")
@hypothesis.given(TREES, st.lists(LINKS, max_size=3))
@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
def test_any_chain_keeps_any_tree(model, links):
    tx = sl.chain(*links, sl.ScaleByLearningRate(0.1))
    opt = sl.Optimizer(tx, model)

    def described(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)

    # `eval_shape`, since compiling each tree and chain would take minutes.
    new, after = jax.eval_shape(lambda m, o: o.step(m, m), model, opt)
    assert jax.tree.structure(new) == jax.tree.structure(model)
    assert described(new) == described(model)
    assert jax.tree.structure(after) == jax.tree.structure(opt)
    assert jax.tree.leaves(described(after)) == jax.tree.leaves(described(opt))
