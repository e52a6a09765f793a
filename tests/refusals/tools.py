"""Plots, sweeps and the learning-rate range test, used wrongly."""

from typing import Any

import jax
import jax.numpy as jnp

import slalom as sl

from ._table import bound, params, refused

BATCHES = [(jnp.ones(()),)]
DRIVEN = sl.schedules.ReduceOnPlateau(0.1)


def loss_fn(model: Any, x: jax.Array) -> jax.Array:
    return x * (jnp.sum(model["b"] ** 2) + jnp.sum(model["w"] ** 2))


def sweep(grid: Any, tx: Any = None, batches: Any = BATCHES, **options: Any) -> Any:
    tx = sl.adamw(0.1) if tx is None else tx
    return sl.sweep(loss_fn, tx, params(), batches, grid, **{"steps": 2, **options})


def search(tx: Any = None, batches: Any = BATCHES, **options: Any) -> Any:
    tx = sl.adam(0.1) if tx is None else tx
    return sl.lr_range_test(loss_fn, tx, params(), batches, **options)


# --- pictures ---------------------------------------------------------------------------------


@refused(
    ValueError,
    "There is nothing to plot: this optimizer has no schedules. Pass one in place of a number, "
    "such as `sl.adam(sl.schedules.cosine_decay(1e-3, decay_steps=1000))`.",
)
def a_plot_of_no_schedules():
    bound().plot_schedules(10)


@refused(
    ValueError,
    f"'drive.scale_by_learning_rate.learning_rate' is driven by {DRIVEN!r}, whose values depend "
    "on the losses of the run. Record them with `tx.record()`, and plot `opt.metrics` with "
    "`sl.plot_metrics(history)`. `schedule.plot(steps)` plots a schedule without state.",
)
def a_plot_of_a_schedule_with_state():
    bound(sl.sgd(0.1).drive({"learning_rate": DRIVEN})).plot_schedules(10)


@refused(
    ValueError,
    "This optimizer was created under `vmap` and holds 3 runs. Plot one of them: "
    "`jax.tree.map(lambda leaf: leaf[0], opt).plot_schedules(steps)`.",
)
def a_plot_of_the_schedules_of_several_runs():
    def make(rate: Any) -> sl.Optimizer:
        return bound(sl.sgd(sl.schedules.linear(rate, 0.0, 10)))

    jax.vmap(make)(jnp.ones(3)).plot_schedules(10)


@refused(
    ValueError,
    "There is nothing to plot: the history is empty. Collect `opt.metrics` in every step; "
    "`tx.record()` reports norms and hyperparameters.",
)
def a_plot_of_an_empty_history():
    sl.plot_metrics([{}, {}])


@refused(
    TypeError,
    "A history is a list of dicts of numbers, or a dict of arrays, got 1.0 of type float in it.",
    unchecked=True,
)
def a_plot_of_a_list_of_losses():
    sl.plot_metrics([1.0, 2.0])  # pyright: ignore[reportArgumentType]


@refused(ValueError, "The history of 'name' does not consist of numbers of one shape: 'adam', …")
def a_plot_of_something_else_than_numbers():
    sl.plot_metrics([{"name": "adam"}, {"name": "sgd"}])


@refused(KeyError, "'los' is not in the history. Candidates: 'loss', 'record.grad_norm'.")
def a_plot_of_an_unknown_metric():
    sl.plot_metrics([{"loss": 1.0, "record.grad_norm": 2.0}], ["los"])


@refused(KeyError, "'norm' is ambiguous. Candidates: <…>.")
def a_plot_of_an_ambiguous_metric():
    sl.plot_metrics([{"a.norm": 1.0, "b.norm": 2.0}], ["norm"])


# --- batches and steps ------------------------------------------------------------------------


@refused(
    TypeError,
    "`sl.sweep` takes an iterable of batches, got a tuple of 2, which looks like a single batch. "
    "To use one batch in every step, pass a list with it: `[(x, y)]`.",
)
def a_single_batch():
    sweep({"learning_rate": [0.1]}, batches=(jnp.ones(2), jnp.ones(2)))


@refused(
    TypeError,
    "`sl.lr_range_test` takes an iterable of batches, got an array. To use one batch in every "
    "step, pass a list with it: `[(x, y)]`.",
    unchecked=True,
)
def an_array_instead_of_batches():
    search(batches=jnp.ones((4, 2)))


@refused(
    TypeError,
    "`sl.sweep` takes an iterable of batches, got an object of type int. To use one batch in every "
    "step, pass a list with it: `[(x, y)]`.",
    unchecked=True,
)
def a_number_instead_of_batches():
    sweep({"learning_rate": [0.1]}, batches=3)


@refused(
    ValueError,
    "`sl.sweep` got no batches. Pass tuples of the arguments of the loss after the model, such as "
    "`[(x, y)]`.",
)
def no_batches():
    sweep({"learning_rate": [0.1]}, batches=[])


@refused(
    ValueError,
    "`sl.lr_range_test` got 4 batches for 100 steps. Pass `steps=4`, or a list or a data loader, "
    "which can be read several times.",
)
def an_iterator_with_too_few_batches():
    search(batches=iter(BATCHES * 4))


@refused(TypeError, "`steps` of `sl.sweep` must be an int, got 2.5.", unchecked=True)
def half_a_step():
    sweep({"learning_rate": [0.1]}, steps=2.5)


@refused(ValueError, "`steps` of `sl.sweep` must be at least 1, got 0.")
def a_sweep_without_steps():
    sweep({"learning_rate": [0.1]}, steps=0)


@refused(ValueError, "`steps` of `sl.lr_range_test` must be at least 10, got 5.")
def a_range_test_of_few_steps():
    search(steps=5)


# --- the learning-rate range test -------------------------------------------------------------


@refused(
    ValueError,
    "`sl.lr_range_test` needs 0 < lr_min < lr_max, got lr_min=1.0 and lr_max=0.1.",
)
def a_range_from_above():
    search(lr_min=1.0, lr_max=0.1)


@refused(ValueError, "`stop_factor` must be larger than 1, got 0.5.")
def a_test_that_stops_at_once():
    search(stop_factor=0.5)


@refused(
    KeyError,
    "'learning_rate' is ambiguous. Candidates: 'partition.0.scale_by_learning_rate.learning_rate', "
    "'partition.rest.scale_by_learning_rate.learning_rate'. Pass the path of the learning rate as "
    "`name=`, or a glob such as `name='**.learning_rate'` to set several.",
)
def a_range_test_of_two_learning_rates():
    search(sl.sgd(0.1).partition({sl.where.path("b"): sl.sgd(0.2)}))


@refused(
    ValueError,
    f"'drive.scale_by_learning_rate.learning_rate' is driven by {DRIVEN!r}, so a number would "
    "have no effect. Change one of the schedule's own numbers by its name, or bind a transform "
    "without `.drive` to the model with `opt.rebind`.",
)
def a_range_test_of_a_driven_learning_rate():
    search(sl.sgd(0.1).drive({"learning_rate": DRIVEN}))


@refused(
    ValueError,
    "`model_state` cannot be combined with `microbatches`: every microbatch would start from the "
    "same state. Leave out one of them.",
)
def a_model_state_in_microbatches():
    search(model_state=jnp.ones(()), microbatches=2)


# --- sweeps -----------------------------------------------------------------------------------


@refused(
    TypeError,
    "`grid` must be a dict from hyperparameters to their values, such as {'learning_rate': [1e-4, "
    "1e-3]}, got [0.1].",
    unchecked=True,
)
def a_grid_without_names():
    sweep([0.1])


@refused(ValueError, "`grid` is empty. Write `grid={'learning_rate': [1e-4, 1e-3]}`.")
def an_empty_grid():
    sweep({})


@refused(
    ValueError,
    "`grid['learning_rate']` must be a list of numbers, such as [1e-4, 1e-3], got 0.1.",
    unchecked=True,
)
def a_grid_of_single_numbers():
    sweep({"learning_rate": 0.1})


@refused(
    KeyError,
    "'momentum' is not known. Candidates: <…>",
)
def a_grid_of_an_unknown_hyperparameter():
    sweep({"momentum": [0.1]})


@refused(
    ValueError,
    "scale_by_adam.b1 must be in [0, 1), got 1.5.",
)
def a_grid_with_an_invalid_value():
    sweep({"b1": [0.9, 1.5]})


@refused(
    ValueError,
    "`grid` contains 'scale_by_learning_rate.learning_rate' twice: as 'learning_rate' and as "
    "'**.learning_rate'. Remove one of them.",
)
def a_grid_with_a_hyperparameter_twice():
    sweep({"learning_rate": [0.1], "**.learning_rate": [0.2]})


@refused(
    ValueError,
    "'scale_by_learning_rate.learning_rate' in `grid` is the schedule sl.schedules.linear("
    "init_value=1.0, end_value=0.0, transition_steps=9). Sweep one of its numbers: <…>'"
    "scale_by_learning_rate.learning_rate.init_value'<…>.",
)
def a_grid_of_a_schedule():
    sweep({"learning_rate": [0.1]}, sl.sgd(sl.schedules.linear(1.0, 0.0, 9)))


@refused(
    ValueError,
    "'scale_by_learning_rate.learning_rate' in `grid` is the schedule <…>. Replace it by a number, "
    "or by a schedule from `sl.schedules`.",
)
def a_grid_of_a_function():
    sweep({"learning_rate": [0.1]}, sl.sgd(lambda step: 0.1))


@refused(
    TypeError,
    "`chunk` must be an int, the number of runs at a time, got 'all'.",
    unchecked=True,
)
def a_chunk_that_is_no_number():
    sweep({"learning_rate": [0.1]}, chunk="all")


@refused(ValueError, "`chunk` must be at least 1, got 0.")
def a_chunk_of_no_runs():
    sweep({"learning_rate": [0.1]}, chunk=0)


@refused(
    ValueError,
    "No run of this sweep has a finite final loss. Sweep smaller learning rates, or clip the "
    "gradients with `sl.ClipByGlobalNorm(1.0)`.",
)
def the_best_of_runs_that_all_diverged():
    sweep({"learning_rate": [1e30, 1e35]}, sl.sgd(0.1), steps=20).best  # noqa: B018
