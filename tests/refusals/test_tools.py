"""Plots, sweeps and the learning-rate range test, used wrongly."""

from typing import Any

import jax
import jax.numpy as jnp

import slalom as sl

from .messages import bound, params, refused

BATCHES_ARE = "an iterable of batches … `[(x, y)]`"
BATCHES = [(jnp.ones(()),)]
DRIVEN = sl.sgd(0.1).drive({"learning_rate": sl.schedules.ReduceOnPlateau(0.1)})
IS_DRIVEN = (
    "'drive.scale_by_learning_rate.learning_rate' is driven by sl.schedules.ReduceOnPlateau(0.1)"
)


def loss_fn(model: Any, x: jax.Array) -> jax.Array:
    return x * (jnp.sum(model["b"] ** 2) + jnp.sum(model["w"] ** 2))


RATES = {"learning_rate": [0.1]}


def sweep(grid: Any, tx: Any = None, batches: Any = BATCHES, **options: Any) -> Any:
    tx = sl.adamw(0.1) if tx is None else tx
    return sl.sweep(loss_fn, tx, params(), batches, grid, **{"steps": 2, **options})


def search(tx: Any = None, batches: Any = BATCHES, **options: Any) -> Any:
    tx = sl.adam(0.1) if tx is None else tx
    return sl.lr_range_test(loss_fn, tx, params(), batches, **options)


def test_plots():
    with refused(
        ValueError, "no schedules", "`sl.adam(sl.schedules.cosine_decay(1e-3, decay_steps=1000))`"
    ):
        bound().plot_schedules(10)
    with refused(
        ValueError,
        IS_DRIVEN,
        "`tx.record()` … `opt.metrics` … `sl.plot_metrics(history)` … `schedule.plot(steps)`",
    ):
        bound(DRIVEN).plot_schedules(10)
    with refused(
        ValueError,
        "`vmap` … 3 runs",
        "`jax.tree.map(lambda leaf: leaf[0], opt).plot_schedules(steps)`",
    ):
        opt = jax.vmap(lambda rate: bound(sl.sgd(sl.schedules.linear(rate, 0.0, 10))))(jnp.ones(3))
        opt.plot_schedules(10)
    with refused(ValueError, "the history is empty", "Collect `opt.metrics` … `tx.record()`"):
        sl.plot_metrics([{}, {}])
    with refused(
        TypeError, "got 1.0 of type float", "a list of dicts of numbers, or a dict of arrays"
    ):
        sl.plot_metrics([1.0, 2.0])
    with refused(ValueError, "The history of 'name' … 'adam'", "numbers of one shape"):
        sl.plot_metrics([{"name": "adam"}, {"name": "sgd"}])
    with refused(KeyError, "'los' is not in the history", "'loss', 'record.grad_norm'"):
        sl.plot_metrics([{"loss": 1.0, "record.grad_norm": 2.0}], ["los"])
    with refused(KeyError, "'norm' is ambiguous", "'b.norm', 'a.norm'"):
        sl.plot_metrics([{"a.norm": 1.0, "b.norm": 2.0}], ["norm"])


def test_batches_steps_and_the_learning_rate_range_test():
    outside = "Call it outside. `step.scan` and `sl.minimize`"
    with refused(TypeError, "`sl.sweep` … under `jit`, `vmap` or `grad`", outside):
        jax.vmap(lambda x: sweep(RATES, batches=[x]))(jnp.ones(2))
    with refused(TypeError, "`sl.lr_range_test` … under `jit`, `vmap` or `grad`", outside):
        jax.jit(search)()
    with refused(TypeError, "`sl.sweep` … got a tuple of 2", BATCHES_ARE):
        sweep(RATES, batches=(jnp.ones(2), jnp.ones(2)))
    with refused(TypeError, "second argument of `sl.sweep` … got <function adam", "`adam(...)`"):
        sweep(RATES, sl.adam)
    with refused(TypeError, "`sl.lr_range_test` … got an array", BATCHES_ARE):
        search(batches=jnp.ones((4, 2)))
    with refused(TypeError, "`sl.sweep` … got an object of type int", BATCHES_ARE):
        sweep(RATES, batches=3)
    with refused(ValueError, "`sl.sweep` got no batches", "`[(x, y)]`"):
        sweep(RATES, batches=[])
    with refused(
        ValueError,
        "`sl.lr_range_test` got 4 batches for 100 steps",
        "`steps=4`, or a list or a data loader",
    ):
        search(batches=iter(BATCHES * 4))
    with refused(TypeError, "`steps` of `sl.sweep` … got 2.5", "an int"):
        sweep(RATES, steps=2.5)
    for name in ("steps", "chunk"):
        with refused(ValueError, f"`{name}` of `sl.sweep` … got 0", "at least 1"):
            sweep(RATES, **{name: 0})
    with refused(ValueError, "`steps` of `sl.lr_range_test` … got 5", "at least 10"):
        search(steps=5)

    with refused(
        ValueError, "`sl.lr_range_test` … got lr_min=1.0 and lr_max=0.1", "0 < lr_min < lr_max"
    ):
        search(lr_min=1.0, lr_max=0.1)
    with refused(ValueError, "`stop_factor` … got 0.5", "larger than 1"):
        search(stop_factor=0.5)
    with refused(
        KeyError,
        "'learning_rate' is ambiguous … 'partition.0.scale_by_learning_rate.learning_rate', "
        "'partition.rest.scale_by_learning_rate.learning_rate'",
        "`name=` … `name='**.learning_rate'`",
    ):
        search(sl.sgd(0.1).partition({sl.where.path("b"): sl.sgd(0.2)}))
    with refused(ValueError, IS_DRIVEN, "the schedule's own numbers … `.drive` … `opt.rebind`"):
        search(DRIVEN)


def test_sweeps():
    with refused(TypeError, "`grid` … got [0.1]", "{'learning_rate': [1e-4, 1e-3]}"):
        sweep([0.1])
    with refused(ValueError, "`grid` is empty", "`grid={'learning_rate': [1e-4, 1e-3]}`"):
        sweep({})
    with refused(ValueError, "`grid['learning_rate']` … got 0.1", "a list of numbers"):
        sweep({"learning_rate": 0.1})
    with refused(KeyError, "'momentum' is not known", "Candidates: 'scale_by_adam.b1'"):
        sweep({"momentum": [0.1]})
    with refused(ValueError, "scale_by_adam.b1 … got 1.5", "in [0, 1)"):
        sweep({"b1": [0.9, 1.5]})
    with refused(
        ValueError,
        "`grid` contains 'scale_by_learning_rate.learning_rate' twice: as 'learning_rate' and as "
        "'**.learning_rate'",
        "Remove one",
    ):
        sweep({"learning_rate": [0.1], "**.learning_rate": [0.2]})
    with refused(
        ValueError,
        "'scale_by_learning_rate.learning_rate' in `grid` is the schedule "
        "sl.schedules.linear(init_value=1.0,",
        "'scale_by_learning_rate.learning_rate.init_value'",
    ):
        sweep(RATES, sl.sgd(sl.schedules.linear(1.0, 0.0, 9)))
    with refused(
        ValueError,
        "'scale_by_learning_rate.learning_rate' in `grid` is the schedule <lambda>",
        "Replace it by a number … `sl.schedules`",
    ):
        sweep(RATES, sl.sgd(lambda step: 0.1))
    with refused(TypeError, "The loss … missing a required argument: 'x'", "`sl.sweep` … `[(x,)]`"):
        sweep(RATES, batches=[()])
    with refused(TypeError, "`chunk` … got 'all'", "an int, the number of runs at a time"):
        sweep(RATES, chunk="all")
