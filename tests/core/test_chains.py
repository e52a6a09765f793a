"""Chains and transforms of users: their names, parts, states and keywords, on any tree."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import ScaleByTemperature, assert_same_bits

W, B = sl.where.path("**.w"), sl.where.path("**.b")


def params():
    return {"b": jnp.array([1.0, -0.0]), "w": jnp.array([[2.0, -3.0], [0.5, 4.0]])}


def grads(step=0):
    return jax.tree.map(lambda p: 0.5 * p + 0.25 * (1 + step), params())


CLIP, ADAM, RATE = sl.ClipByGlobalNorm(1.0), sl.ScaleByAdam(), sl.ScaleByLearningRate(0.1)


def test_chains_flatten_and_run_their_links_in_order():
    joined = (CLIP | ADAM) | (RATE | sl.chain(CLIP, sl.chain(ADAM)))
    assert joined.links == (CLIP, ADAM, RATE, CLIP, ADAM)
    assert joined == sl.chain(CLIP, ADAM, RATE, CLIP, ADAM)
    assert len(joined) == 5
    assert sl.chain() == sl.named_chain() == sl.Identity()
    assert sl.chain(ADAM) is ADAM
    assert sl.chain(sl.chain(ADAM)) is ADAM

    # Clip(1) then ×2 differs from ×2 then Clip(1).
    ones = {"w": jnp.ones(2)}
    after, _ = (sl.Clip(1.0) | sl.Scale(2.0)).update(ones, (None, None))
    before, _ = (sl.Scale(2.0) | sl.Clip(1.0)).update(ones, (None, None))
    assert jnp.array_equal(after["w"], jnp.full(2, 2.0))
    assert jnp.array_equal(before["w"], jnp.ones(2))


def test_links_are_reached_by_position_class_and_name_which_is_never_taken_twice():
    tx = sl.named_chain(clip=CLIP, rule=sl.adam(0.1)) | sl.Scale(0.5)
    assert tx["clip"] is tx[0] == CLIP
    assert tx[-1] == tx["scale"] == tx[sl.Scale] == sl.Scale(0.5)
    assert tx["rule"] == sl.adam(0.1)
    assert tx["rule.scale_by_adam"] == tx["scale_by_adam"] == tx[sl.ScaleByAdam] == ADAM
    assert (sl.named_chain(clip=CLIP) | RATE)["clip"] == sl.named_chain(clip=CLIP)["clip"] == CLIP
    for which in (slice(0, 1), sl.ScaleByAdam(), None):
        with pytest.raises(TypeError, match="named by its path or its class, in a chain also by"):
            sl.adam(0.1)[which]

    tx = sl.Scale(1.0) | sl.Scale(2.0) | ADAM | sl.Scale(3.0)
    assert [tx[name].step_size for name in ("scale", "scale_2", "scale_3")] == [1.0, 2.0, 3.0]
    paths = list(sl.Optimizer(tx, params()).hyperparams)
    assert paths[:2] == ["scale.step_size", "scale_2.step_size"]
    tx = sl.named_chain(scale=sl.Scale(1.0)) | sl.Scale(2.0)
    assert (tx["scale"], tx["scale_2"]) == (sl.Scale(1.0), sl.Scale(2.0))
    tx = sl.Scale(1.0) | sl.Scale(2.0) | sl.named_chain(scale_2=sl.Scale(3.0))
    assert len(sl.Optimizer(tx, params()).hyperparams) == 3
    assert tx["scale_2"] == sl.Scale(3.0)


class AverageState(eqx.Module):
    average: object = sl.fields.param_like()
    seen: jax.Array


class Average(sl.AbstractTransform):
    """An exponential average of updates, written as a user would."""

    decay: sl.fields.Number = sl.fields.hyperparameter(0.9, within="[0, 1)")

    def init(self, params):
        return AverageState(jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))

    def update(self, updates, state, params=None, context=None):
        decay = self.at(context).decay
        average = jax.tree.map(lambda a, u: decay * a + (1 - decay) * u, state.average, updates)
        return average, AverageState(average, state.seen + 1)


def test_transforms_of_users_are_ordinary_ones_with_states_by_path_and_class():
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


def test_map_params_finds_marked_fields_anywhere_and_in_optimizers():
    for tx, marked in (
        (Average(), {"b", "w"}),
        (Average().mask(W), {"w"}),
        (Average().only(W).every_k(2), {"w"}),
        (sl.Identity().partition({B: Average()}), {"b"}),
        ((Average() | sl.Scale(-1.0)).every_k(2), {"b", "w"}),
    ):
        state = (tx | sl.ScaleByLearningRate(0.1)).init(params())
        filled = sl.map_params(lambda leaf, p: jnp.full_like(leaf, 7), state, params())
        assert jax.tree.structure(filled) == jax.tree.structure(state)
        is_average = lambda node: isinstance(node, AverageState)  # noqa: E731
        (found,) = filter(is_average, jax.tree.leaves(filled, is_leaf=is_average))
        assert {name for name, leaf in found.average.items() if leaf is not None} == marked, tx
        assert all((leaf == 7).all() for leaf in jax.tree.leaves(found.average))
        assert found.seen == 0

    state = sl.adam(0.1).init(params())
    mapped = sl.map_params(lambda leaf: "param", state, other=lambda leaf: "other")
    assert mapped[0].mu == mapped[0].nu == {"b": "param", "w": "param"}
    assert mapped[0].age == "other"

    opt = sl.Optimizer(sl.adam(0.1).store("bfloat16"), params())
    ones = sl.map_params(jnp.ones_like, {"opt": opt})["opt"]
    assert (ones.state_of("scale_by_adam").mu["w"] == 1).all()
    ones.step(params(), grads())
    specs = {"b": "b", "w": "w"}
    mapped = sl.map_params(lambda leaf, spec: spec, opt, specs, other=lambda leaf: "other")
    assert {*jax.tree.leaves(mapped)} == {"b", "w", "other"}
    assert jax.tree.structure(mapped) == jax.tree.structure(opt)


def test_keywords_reach_nested_transforms_and_are_cut_with_masks():
    tx = ScaleByTemperature() | sl.sgd(1.0)
    for wrapped in (tx, tx.every_k(1), tx.only(W | B)):
        opt = sl.Optimizer(wrapped, params())
        model, _ = opt.step(params(), grads(), temperature=jnp.array(0.5))
        assert_same_bits(model["w"], params()["w"] - 0.5 * grads()["w"])

    tx = sl.sgd(1.0).partition({B: MultiplyByTree() | sl.sgd(1.0)})
    factor = {"b": jnp.array([2.0, 3.0]), "w": jnp.ones((2, 2))}
    model, _ = sl.Optimizer(tx, params()).step(params(), grads(), per_param={"factor": factor})
    np.testing.assert_allclose(model["b"], params()["b"] - factor["b"] * grads()["b"], rtol=1e-6)


class MultiplyByTree(sl.AbstractStatelessTransform):
    needs = ("per_param",)

    def apply(self, updates, params, context):
        return jax.tree.map(jnp.multiply, updates, context.per_param["factor"])
