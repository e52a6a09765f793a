"""The methods that wrap transforms, compared with the classes that they return."""

import dataclasses
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import slalom as sl

METHODS = {
    name: getattr(sl.wrappers, str(returned).rpartition(".")[2])
    for name, method in inspect.getmembers(sl.AbstractTransform, inspect.isfunction)
    if str(returned := method.__annotations__.get("return")).startswith("slalom.wrappers.")
}
METHODS["project"] = sl.wrappers.Project  # a `ScheduleFree` is projected inside
"""The methods that return a wrapper, with its class."""
# `sl.partition` makes a partition from labels too, so it has the fields of both. `.lookahead` is
# `.outer` with an `sl.sgd`.
COMPARED = sorted(METHODS.keys() - {"partition", "lookahead"})


def is_early(context, updates):
    return context.step < 3


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
    "condition": is_early,
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
    wrappers = {
        cls
        for name, cls in vars(sl.wrappers).items()
        if inspect.isclass(cls)
        and issubclass(cls, sl.AbstractTransform)
        and not name.startswith("Abstract")
    }
    assert set(METHODS.values()) == wrappers
    for name, cls in METHODS.items():
        assert name == "lookahead" or cls.__name__.lower() == name.replace("_", "")


@pytest.mark.parametrize("name", COMPARED)
def test_a_method_has_the_signature_of_its_class_and_describes_it(name):
    method, cls = getattr(sl.AbstractTransform, name), METHODS[name]
    of_method, of_class = arguments(method), arguments(cls)
    assert [argument[:2] for argument in of_method] == [argument[:2] for argument in of_class]
    for (argument, _, default), (_, _, own) in zip(of_method, of_class, strict=True):
        assert type(default) is type(own), argument
        assert default == own, argument

    assert f"Made by `tx.{name}`, which describes the arguments." in cls.__doc__
    assert "**Arguments:**" not in cls.__doc__
    for argument, _, _ in of_method:
        assert f"\n- `{argument}`: " in inspect.getdoc(method)


@pytest.mark.parametrize("name", COMPARED)
def test_a_method_passes_every_argument_on_and_prints_as_it_was_called(name):
    method, cls = getattr(sl.adam(0.1), name), METHODS[name]
    given = {argument: VALUES[argument] for argument in inspect.signature(method).parameters}
    made = method(**given)
    assert type(made) is cls
    default = {f.name: f.default for f in dataclasses.fields(made)}
    for argument in given:
        assert repr(getattr(made, argument)) != repr(default[argument]), argument
    assert eqx.tree_equal(made, cls(sl.adam(0.1), **given))
    for printed in (repr(made), *(eqx.tree_pformat(made, width=width) for width in (30, 200))):
        assert f".{name}(" in printed
        assert eval(printed, {"sl": sl, "is_early": is_early}) == made
    assert repr(jax.tree.map(jnp.asarray, made)) == repr(made)
