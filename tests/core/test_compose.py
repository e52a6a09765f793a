"""Masks and partitions do what the plainly written result says, under every transformation."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_chains import B, W, grads, params

import slalom as sl
from helpers import assert_same_bits, sampled

CLIP = sl.ClipByGlobalNorm(1.0)


def test_labels_and_cases_say_the_same():
    def stepped(tx):
        """The parameters after two steps in the functional core."""
        model, state = params(), tx.init(params())
        for n in range(2):
            model, state = tx.step(grads(n), state, model, sl.Context(step=n))
        return model

    cases = stepped(sl.adam(0.1).partition({B: sl.sgd(0.3)}))
    adam_and_sgd = {"adam": sl.adam(0.1), "sgd": sl.sgd(0.3), "unused": sl.lion(0.1)}
    for labels in (
        {"b": "sgd", "w": "adam"},
        lambda params: {"b": "sgd", "w": "adam"},
        {B: "sgd", sl.where.everything(): "adam"},
    ):
        assert_same_bits(stepped(sl.partition(adam_and_sgd, labels)), cases)


def test_masks_nest_the_first_match_counts_and_groups_have_their_own_norms():
    tx = sl.SetToZero().partition({B: sl.sgd(1.0), sl.where.everything(): sl.sgd(0.5)})
    updates, _ = tx.update(grads(), tx.init(params()), params())
    assert_same_bits(updates["b"], -grads()["b"])
    assert_same_bits(updates["w"], -0.5 * grads()["w"])

    tree = {name: jnp.ones(2) for name in ("a", "b", "c")}
    a, b = sl.where.path("a"), sl.where.path("b")
    tx = (sl.Scale(2.0) | sl.Scale(3.0).mask(~b)).mask(~a)
    updates, _ = tx.update(tree, tx.init(tree), tree)
    assert {name: float(u[0]) for name, u in updates.items()} == {"a": 1, "b": 2, "c": 6}

    only = sl.Scale(2.0).only(~b).only(~a)
    updates, _ = only.update(tree, only.init(tree), tree)
    assert {name: float(u[0]) for name, u in updates.items()} == {"a": 0, "b": 0, "c": 2}

    ones = {"b": jnp.ones(4), "w": jnp.ones((4, 3))}
    inside = (sl.ClipByGlobalNorm(1.0) | sl.Scale(1.0)).partition({B: sl.Identity()})
    outside = sl.ClipByGlobalNorm(1.0) | sl.Scale(1.0).partition({B: sl.Identity()})
    got, _ = inside.update(ones, inside.init(ones), ones)
    np.testing.assert_allclose(got["w"], np.full((4, 3), 12**-0.5), rtol=1e-6)
    got, _ = outside.update(ones, outside.init(ones), ones)
    np.testing.assert_allclose(got["w"], np.full((4, 3), 0.25), rtol=1e-6)

    bad = {"b": jnp.full(2, jnp.nan), "w": jnp.ones((2, 2))}
    tx = CLIP.mask(W) | sl.SetToZero().mask(B)
    updates, _ = tx.update(bad, tx.init(params()), params())
    assert_same_bits(updates["b"], jnp.zeros(2))
    np.testing.assert_allclose(updates["w"], np.full((2, 2), 0.5), rtol=1e-6)


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


def test_apply_updates_leaves_everything_else_and_params_may_be_left_out():
    model = eqx.nn.MLP(1, 1, 2, 1, key=jax.random.key(0))
    ones = jax.tree.map(jnp.ones_like, eqx.filter(model, eqx.is_inexact_array))
    some = eqx.tree_at(lambda m: (m.layers[0].weight, m.layers[0].bias), ones, (None, None))
    new = sl.apply_updates(model, some)
    assert new.layers[0].weight is model.layers[0].weight
    assert_same_bits(new.layers[1].weight, model.layers[1].weight + 1)
    assert new.activation is model.activation

    half = {"w": jnp.ones(2, jnp.bfloat16)}
    new = sl.apply_updates(half, {"w": jnp.full(2, 2.0**-7, jnp.float32)})
    assert_same_bits(new["w"], jnp.full(2, 1 + 2.0**-7, jnp.bfloat16))

    tx = (CLIP | sl.adam(0.1).mask(W)).partition({B: sl.sgd(0.1, 0.9).every_k(2)})
    state = tx.init(params())
    without, given = jax.jit(lambda: [tx.update(grads(), state, p)[0] for p in (None, params())])()
    assert_same_bits(without, given)


SGD = sl.sgd(0.1)
WRITES = [
    (CLIP | sl.adam(0.1).every_k(2).only(W), [False, True, False, True]),
    (sl.Identity().every_k(2) | sl.sgd(0.1), [False, True, False, True]),
    (sl.adam(0.1).every_k(2).partition({B: sl.sgd(0.1).every_k(3)}), [False, True, True, True]),
    (sl.sgd(0.1).every_k(2).mask(W) | sl.sgd(0.1).mask(~W), [True] * 4),
    # Adam makes updates of the zeros of an idle step, in a mask too.
    (sl.Identity().every_k(2) | sl.adam(0.1).mask(W) | SGD.mask(~W), [True] * 4),
    # A group without parameters has nothing to write.
    (sl.sgd(0.1).partition({W | B: sl.sgd(0.1).every_k(2)}), [False, True, False, True]),
    (SGD.every_k(2).mask(W) | SGD.every_k(3).mask(~W) | CLIP, [False, True, True, True]),
    (sl.adam(0.1), [True] * 4),
    (sl.adam(0.1).every_k(2), [False, True, False, True]),
    (sl.Identity().every_k(2) | sl.adam(0.1), [True] * 4),
    (sl.adam(0.1).partition({B: sl.sgd(0.1).every_k(3)}), [True] * 4),
    (SGD.every_k(2).mask(W) | SGD.every_k(2).mask(~W), [False, True] * 2),
    (sl.adam(0.1).every_k(2).every_k(2), [False, False, False, True]),
    (sl.adam(0.1).every_k(2).partition({B: sl.SetToZero()}), [False, True, False, True]),
    (sl.Trace(0.9).every_k(2).mask(W) | sl.Scale(-0.1), [True] * 4),
]
"""Transforms, and after which steps each has written a parameter."""


@pytest.mark.parametrize("case", sampled(WRITES, *WRITES[:6]), ids=lambda case: repr(case[0]))
@pytest.mark.filterwarnings("ignore:'every_k' returns zeros")
@pytest.mark.filterwarnings("ignore:'clip_by_global_norm' comes after")
def test_has_updated_says_whether_a_parameter_was_written(case):
    tx, expected = case
    opt = sl.Optimizer(tx, params())
    assert not opt.has_updated

    def body(carry, grads):
        model, opt = carry
        new, opt = opt.step(model, grads)
        moved = [jnp.any(a != b) for a, b in zip(model.values(), new.values(), strict=True)]
        return (new, opt), (opt.has_updated, jnp.any(jnp.stack(moved)))

    many = jax.tree.map(lambda *g: jnp.stack(g), *(grads() for _ in expected))
    seen, moved = jax.lax.scan(body, (params(), opt), many)[1]
    assert seen.tolist() == expected
    # Adam writes what it makes of zeros, which at first are zeros.
    assert not np.any(moved & ~seen)
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
    text = text.replace("jit(_at_leaf)/", "")
    for scope in (
        "clip/",
        "partition/rest/scale_by_adam/",
        "partition/rest/scale_by_learning_rate/",
        "partition/bias/every_k/",
        "scale_by_learning_rate/",
    ):
        assert scope in text, scope


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
    # Masks are followed.
    tx = sl.Trace(0.9).mask(W) | sl.sgd(0.1)
    table = sl.Optimizer(tx, params()).describe(params()).to_dict()
    assert table["b"]["transform"] == "scale_by_learning_rate"
    assert table["w"]["transform"] == "mask.trace | scale_by_learning_rate"
