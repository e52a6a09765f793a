"""Models that mark what is not trained: `paramax.NonTrainable`, and `__frozen__` in a class."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import after_training, assert_same_bits, lenient, slow_except
from slalom.tree.paths import leaf_paths


class Normalized(eqx.Module):
    mean: jax.Array
    scale: dict
    linear: eqx.nn.Linear

    __frozen__ = ("mean", "scale.*")

    def __call__(self, x):
        return self.linear((x - self.mean) / self.scale["std"])


class Inherited(Normalized):
    pass


class Stack(eqx.Module):
    layers: list
    head: eqx.nn.Linear

    __frozen__ = ("layers.0", "head.bias")


def normalized(cls=Normalized):
    return cls(jnp.ones(2), {"std": jnp.full(2, 2.0)}, eqx.nn.Linear(2, 1, key=jax.random.key(0)))


def trained(model, **options):
    rows = sl.Optimizer(sl.sgd(0.1), model, **options).describe(model).to_dict()
    return {path for path, row in rows.items() if row["trainable"]}


LINEAR = eqx.nn.Linear(2, 2, key=jax.random.key(0))
WEIGHTS = {"linear.weight", "linear.bias"}
STACKED = eqx.filter_vmap(lambda s: Normalized(s, {"std": s}, jnp.ones(2)))(jnp.ones((3, 2)))
# Models, and what is trained of them.
MARKED = {
    "a class": (normalized(), WEIGHTS),
    "a class that inherits": (normalized(Inherited), WEIGHTS),
    "inside of containers": (
        {"a": [normalized(), jnp.ones(2)], "b": (normalized(),)},
        {"a.1"} | {f"{at}.{weight}" for at in ("a.0", "b.0") for weight in WEIGHTS},
    ),
    # A path freezes everything below it, and marks of the parts count too.
    "a path to a layer": (
        Stack([LINEAR, normalized()], LINEAR),
        {*(f"layers.1.{weight}" for weight in WEIGHTS), "head.weight"},
    ),
    "layers stacked by vmap": (STACKED, {"linear"}),
    "what optimizes another part": (
        {
            "net": LINEAR,
            "critic": (jnp.ones(2), sl.Optimizer(sl.adam(0.1), jnp.ones(2))),
            "own": sl.ScaleByAdam().init(LINEAR),
            "optax": sl.interop.to_optax(sl.adam(0.1)).init(LINEAR),
            "loss": sl.LeastSquares(lambda model, x: x),
        },
        {"net.weight", "net.bias", "critic.0"},
    ),
}


def test_marks_freeze_through_rebinding_unless_a_selection_overrides_them():
    for name, (model, expected) in MARKED.items():
        assert trained(model) == expected, name

    model, everything = normalized(), sl.where.everything()
    assert trained(model, trainable=everything) == WEIGHTS | {"mean", "scale.std"}
    assert trained(model, trainable=sl.where.path("mean")) == {"mean"}
    rows = sl.Optimizer(sl.sgd(0.1), model).describe(model).to_dict()
    assert {k for k, row in rows.items() if row["notes"] == "marked"} == {"mean", "scale.std"}
    chosen = sl.Optimizer(sl.sgd(0.1), model, trainable=everything)
    assert not any(row["notes"] for row in chosen.describe(model).to_dict().values())

    model = normalized()
    opt = sl.Optimizer(sl.adam(0.1), model)
    again, report = opt.rebind(model)
    assert not report.new
    assert not report.dropped
    assert again.binding.params == opt.binding.params


TRANSFORMS = {
    "adamw": sl.adamw(0.1, weight_decay=0.1),
    "fromage": sl.fromage(0.1),
    "noise": sl.AddNoise(1.0, 0.55, key=0) | sl.sgd(0.1),
    "project": sl.sgd(0.1).project(sl.projections.l2_ball(0.1)),
    "average": sl.adamw(0.1).every_k(2).average(),
}


def paramax_model():
    paramax = pytest.importorskip("paramax", reason="needs paramax: pip install paramax")
    return paramax, {
        "fixed": paramax.NonTrainable({"a": jnp.array([1.0, -2.0]), "b": jnp.zeros(2)}),
        "positive": paramax.Parameterize(jnp.exp, jnp.zeros(2)),
        "inner": paramax.Parameterize(jnp.add, paramax.NonTrainable(jnp.ones(2)), jnp.zeros(2)),
    }


@pytest.mark.parametrize("name", slow_except(TRANSFORMS, "project"))
def test_what_paramax_marks_keeps_every_bit(name):
    tx = TRANSFORMS[name]
    paramax, model = paramax_model()

    def loss_fn(model):
        held = paramax.unwrap(model)
        return jnp.sum((held["fixed"]["a"] * held["positive"] + held["inner"] - 3.0) ** 2)

    trained, _, _ = after_training(sl.train_step(loss_fn), tx, 4, model)
    assert_same_bits(trained["fixed"], model["fixed"])
    assert_same_bits(trained["inner"].args[0], model["inner"].args[0])
    assert not np.array_equal(trained["positive"].args[0], model["positive"].args[0])
    assert not np.array_equal(trained["inner"].args[1], model["inner"].args[1])


@pytest.mark.slow
def test_unmarked_wrappers_of_paramax_are_trained():
    paramax, model = paramax_model()
    norm = paramax.WeightNormalization(jnp.ones((2, 3)))
    assert trained(model | {"norm": norm}) == {
        "positive.args.0",
        "inner.args.1",
        "norm.weight",
        "norm.scale.args.0",
    }


@pytest.mark.slow
def test_a_flow_of_flowjax_keeps_its_constants():
    pytest.importorskip("flowjax", reason="needs flowjax: pip install flowjax")
    import paramax
    from flowjax.distributions import Normal
    from flowjax.flows import coupling_flow
    from flowjax.train.losses import MaximumLikelihoodLoss

    with lenient():
        base = paramax.non_trainable(Normal(jnp.zeros(2)))
        flow = coupling_flow(jax.random.key(0), base_dist=base, flow_layers=1, nn_width=4)
        x = jax.random.normal(jax.random.key(1), (8, 2)) * 2 + 1
        loss = MaximumLikelihoodLoss()

        def loss_fn(flow, x):
            return loss(*eqx.partition(flow, eqx.is_inexact_array), x, key=jax.random.key(2))

        step, tx = sl.train_step(loss_fn), sl.adamw(0.1, weight_decay=0.1)
        new, _, _ = after_training(step, tx, 3, flow, x)
        assert_same_bits(new.base_dist, flow.base_dist)
        # What FlowJAX itself trains, and nothing else.
        free, _ = eqx.partition(
            flow, eqx.is_inexact_array, is_leaf=lambda x: isinstance(x, paramax.NonTrainable)
        )
        assert set(leaf_paths(free)) == trained(flow)
        assert loss_fn(new, x) < loss_fn(flow, x)
