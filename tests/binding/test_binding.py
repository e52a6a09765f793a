"""Binding a transform to a model: what it checks, and that it stays cheap."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import slalom as sl

model = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}


checks = []


class Counted(sl.AbstractStatelessTransform):
    """Counts how often it is checked."""

    def warnings(self, params):
        checks.append(params)
        return ()

    def apply(self, updates, params, context):
        return updates


def test_an_equal_pair_is_checked_once_and_another_pair_again():
    tx = sl.adam(0.0124)
    first, second = (sl.Optimizer(Counted() | tx, model) for _ in range(2))
    assert len(checks) == 1
    held = [x.unsafe_buffer_pointer() for opt in (first, second) for x in opt.arrays]
    assert len(set(held)) == len(held)
    pairs = [
        (tx, model | {"a": jnp.ones(4)}),
        (tx, model | {"a": jnp.ones(3, jnp.bfloat16)}),
        (tx, {"c": model["a"], "b": model["b"]}),
        (sl.adam(0.0125), model),
        (sl.adam(0.0124, b1=0.8), model),
        (sl.adam(0.0124, nesterov=True), model),
    ]
    for number, (other, params) in enumerate(pairs, 2):
        sl.Optimizer(Counted() | other, params)
        assert len(checks) == number


def test_errors_and_warnings_come_at_every_binding():
    ascending = sl.Scale(-1.0).mask(sl.where.path("a"))
    twice = sl.sgd(0.1) | sl.sgd(0.1)
    for _ in range(2):
        with pytest.raises(ValueError, match="would ascend"):
            sl.Optimizer(ascending, model)
        with pytest.warns(UserWarning, match="both flip the sign"):
            sl.Optimizer(twice, model)
        with pytest.warns(UserWarning, match=r"is -0\.1, so each step ascends .* Write 0\.1\."):
            sl.Optimizer(sl.sgd(-0.1), model)
    sl.Optimizer(sl.ScaleByLearningRate(0.1, flip_sign=False), model)


def test_numbers_are_checked_when_fields_were_replaced():
    tx = eqx.tree_at(lambda t: t.links[0].b1, sl.adam(0.1), 2.0)
    for _ in range(2):
        with pytest.raises(ValueError, match="b1 must be"):
            sl.Optimizer(tx, model)


def test_under_a_trace_binding_makes_only_constants():
    jaxpr = jax.make_jaxpr(lambda m: jax.tree.leaves(sl.Optimizer(sl.adam(1e-3), m)))(model)
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    assert names <= {"broadcast_in_dim", "gt", "select_n", "jit"}


DECAY, RATE = sl.AddDecayedWeights(0.1), sl.ScaleByLearningRate(0.1)
A, B = sl.where.path("a"), sl.where.path("b")


def test_a_decay_that_is_added_to_a_step_is_warned_of():
    for tx, where in (
        (sl.adam(0.1) | DECAY.mask(A), "'mask.add_decayed_weights' comes after 'scale_by_learning"),
        ((sl.adam(0.1) | DECAY).if_finite(), "'if_finite.add_decayed_weights' comes after 'if_fin"),
        (sl.adamw(0.1) | DECAY, "'add_decayed_weights_2' comes after 'scale_by_learning_rate'"),
        (sl.adam(0.1).only(A) | DECAY.mask(A), "'mask.add_decayed_weights' comes after 'only'"),
    ):
        with pytest.warns(UserWarning, match="they grow.*`sl.SubtractDecayedWeights`") as caught:
            sl.Optimizer(tx, model)
        assert [str(w.message).startswith(where) for w in caught] == [True]


def test_a_decay_before_the_learning_rate_of_the_same_parameters_is_not_warned_of():
    # Every warning is an error here.
    for tx in (
        sl.ScaleByAdam() | DECAY | RATE,
        RATE.mask(A) | DECAY.mask(B) | RATE.mask(B),
        sl.Scale(-1.0) | DECAY | sl.Scale(-0.1),
        sl.adam(0.1) | sl.SubtractDecayedWeights(0.1),
        sl.ScaleByAdam() | DECAY | sl.Scale(lambda n: -0.1),
    ):
        sl.Optimizer(tx, model)
