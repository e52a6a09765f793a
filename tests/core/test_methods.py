"""The methods that wrap transforms, compared with the classes that they return."""

import dataclasses
import inspect

import equinox as eqx
import jax.numpy as jnp
import pytest

import slalom as sl
from slalom._core.methods.fluent import FLUENT
from slalom.tree.paths import snake_case

CLASSES = {
    snake_case(name): cls
    for name, cls in vars(sl.wrappers).items()
    if inspect.isclass(cls)
    and issubclass(cls, sl.AbstractTransform)
    and not name.startswith("Abstract")
}
# `sl.partition` makes a partition from labels too, so it has the fields of both. `.lookahead` is
# `.outer` with an `sl.sgd`, and `.transfer` adds `sl.ScaleBy`.
COMPARED = sorted(FLUENT - {"partition", "lookahead", "transfer"})

VALUES = {
    "combination": sl.combine.MGDA(),
    "terms": ("first", "second"),
    "accumulator_dtype": jnp.bfloat16,
    "adaptive": True,
    "average_after": 2,
    "by": "loss",
    "b1": 0.7,
    "check": "both",
    "codec": sl.codecs.int8(),
    "condition": lambda context, updates: context.step < 3,
    "debias": False,
    "decay": 0.7,
    "decay_where": sl.where.path("w"),
    "eps": 0.25,
    "every": 3,
    "fn": sl.projections.non_negative(),
    "growth_interval": 7,
    "initial": 4.0,
    "k": 3,
    "key": 5,
    "magnitude": sl.Identity(),
    "max_consecutive": 2,
    "max_consecutive_errors": 2,
    "max_size": 3,
    "mean": False,
    "min_size": 3,
    "num_betas": 3,
    "on_limit": "raise",
    "optimizer": sl.sgd(0.7),
    "otherwise": "zero",
    "policy": "kahan",
    "polyak": True,
    "polyak_beta": 0.5,
    "r": 0.5,
    "reset_state": True,
    "rho": 0.5,
    "s_init": 0.5,
    "schedules": {"learning_rate": sl.schedules.ReduceOnPlateau(0.1)},
    "sigma": 3.0,
    "skip": sl.SkipNotFinite(),
    "state_dtype": jnp.float32,
    "weight_decay": 0.5,
    "weight_lr_power": 1.0,
    "where": sl.where.path("w"),
    "window": 5,
}
"""A value for every argument that is not its default."""


def arguments(function):
    """(name, kind, default) of everything after the transform itself."""
    _, *parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters]


def test_every_method_has_the_name_of_its_class():
    assert set(CLASSES) == FLUENT - {"lookahead", "transfer"}


@pytest.mark.parametrize("name", COMPARED)
def test_a_method_has_the_signature_of_its_class(name):
    of_method = arguments(getattr(sl.AbstractTransform, name))
    of_class = arguments(CLASSES[name])
    assert [argument[:2] for argument in of_method] == [argument[:2] for argument in of_class]
    for (argument, _, default), (_, _, own) in zip(of_method, of_class, strict=True):
        assert type(default) is type(own), argument
        assert default == own, argument


@pytest.mark.parametrize("name", COMPARED)
def test_a_method_passes_every_argument_on(name):
    method = getattr(sl.adam(0.1), name)
    given = {argument: VALUES[argument] for argument in inspect.signature(method).parameters}
    made = method(**given)
    assert type(made) is CLASSES[name]
    default = {f.name: f.default for f in dataclasses.fields(made)}
    for argument in given:
        assert repr(getattr(made, argument)) != repr(default[argument]), argument
    assert eqx.tree_equal(made, CLASSES[name](sl.adam(0.1), **given))


@pytest.mark.parametrize("name", COMPARED)
def test_a_class_points_to_its_method_which_describes_the_arguments(name):
    assert f"Made by `tx.{name}`, which describes the arguments." in CLASSES[name].__doc__
    assert "**Arguments:**" not in CLASSES[name].__doc__
    described = inspect.getdoc(getattr(sl.AbstractTransform, name))
    for argument in list(inspect.signature(getattr(sl.adam(0.1), name)).parameters):
        assert f"\n- `{argument}`: " in described


def test_a_wrapper_prints_as_the_call_that_makes_it():
    assert (
        repr(sl.sgd(0.1).average(0.9).every_k(2))
        == "sl.ScaleByLearningRate(0.1).average(0.9).every_k(2)"
    )


def test_a_wrapper_of_a_user_prints_as_its_constructor():
    class Mask(sl.wrappers.AbstractWrapper):
        inner: sl.AbstractTransform

        def init(self, params):
            return self.inner.init(params)

        def run(self, here, write, updates):
            return self.inner_part(here).run(write, updates)

    assert repr(Mask(sl.sgd(0.1))).startswith("Mask(")
