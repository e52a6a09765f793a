"""What a user of a line search reads when something is wrong: the whole message of each."""

import jax.numpy as jnp
import pytest

import slalom as sl

CASES = {}


def refused(error, message):
    """Enters a bad input into the table."""

    def enter(bad):
        CASES[bad.__name__] = (bad, error, message)
        return bad

    return enter


def loss_fn(x):
    return jnp.sum(x**2)


def step(tx=None, **given):
    params = jnp.ones(3)
    known = {"value": jnp.array(3.0), "grad": 2 * params, "value_fn": loss_fn} | given
    opt = sl.Optimizer(sl.lbfgs() if tx is None else tx, params)
    return opt.step(params, 2 * params, **known)


BACKTRACKING = sl.sgd(1.0) | sl.ScaleByBacktrackingLinesearch(9)

# --- what a step must be given ----------------------------------------------------------------

ITSELF = " `sl.train_step` passes value, grad and value_fn itself."


@refused(
    TypeError,
    "ScaleByZoomLinesearch ('scale_by_zoom_linesearch') needs 'value_fn': pass the loss as a "
    "function of the model: `opt.step(..., value_fn=fn)`." + ITSELF,
)
def no_value_fn():
    step(value_fn=None)


@refused(
    TypeError,
    "ScaleByZoomLinesearch ('scale_by_zoom_linesearch') needs 'value': pass the loss: "
    "`opt.step(model, grads, value=loss)`, or `sl.Context(value=loss)`." + ITSELF,
)
def no_value():
    step(value=None)


@refused(
    TypeError,
    "ScaleByBacktrackingLinesearch ('scale_by_backtracking_linesearch') needs 'grad': pass the "
    "gradient of the loss: `opt.step(model, grads, grad=grads)`." + ITSELF,
)
def no_grad():
    step(BACKTRACKING, grad=None)


@refused(
    TypeError,
    "ScaleByLbfgs needs 'params': pass the parameters: `tx.update(grads, state, params)`.",
)
def no_params():
    tx = sl.ScaleByLbfgs()
    tx.update(jnp.ones(3), tx.init(jnp.ones(3)))


@refused(
    ValueError,
    "The `value_fn` passed to ScaleByZoomLinesearch must return a scalar, got an array of "
    "shape (3,). Average it over the batch, for example with `jnp.mean`.",
)
def a_loss_for_each_example():
    step(value_fn=lambda x: x**2)


@refused(
    ValueError,
    "The `value_fn` passed to ScaleByBacktrackingLinesearch must return a scalar, got an "
    "array of shape (1,). Average it over the batch, for example with `jnp.mean`.",
)
def a_loss_in_a_vector():
    step(BACKTRACKING, value_fn=lambda x: jnp.sum(x)[None])


@refused(
    TypeError,
    "The `value_fn` passed to ScaleByZoomLinesearch must return a real scalar, got None of "
    "type NoneType.",
)
def a_loss_that_returns_nothing():
    step(value_fn=lambda x: None)


@refused(
    TypeError,
    "The `value_fn` passed to ScaleByZoomLinesearch must return a real floating-point number, got "
    "dtype complex64.",
)
def a_complex_loss():
    step(value_fn=lambda x: jnp.sum(x).astype(jnp.complex64))


# --- hyperparameters --------------------------------------------------------------------------


@refused(ValueError, "ScaleByZoomLinesearch.max_linesearch_steps must be at least 1, got 0.")
def no_steps():
    sl.ScaleByZoomLinesearch(0)


@refused(
    TypeError,
    "ScaleByZoomLinesearch.max_linesearch_steps must be an int, got True of type bool.",
)
def a_bool_as_steps():
    sl.ScaleByZoomLinesearch(True)


@refused(
    TypeError,
    "ScaleByBacktrackingLinesearch.max_backtracking_steps must be an int, got 2.5 of type float.",
)
def half_a_step():
    sl.ScaleByBacktrackingLinesearch(2.5)


@refused(ValueError, "ScaleByBacktrackingLinesearch.decrease_factor must be in (0, 1), got 1.0.")
def no_decrease():
    sl.ScaleByBacktrackingLinesearch(9, decrease_factor=1.0)


@refused(ValueError, "ScaleByBacktrackingLinesearch.increase_factor must be in [1, inf], got 0.5.")
def a_decrease_as_increase():
    sl.ScaleByBacktrackingLinesearch(9, increase_factor=0.5)


@refused(ValueError, "ScaleByZoomLinesearch.increase_factor must be in (1, inf), got 1.0.")
def no_increase():
    sl.ScaleByZoomLinesearch(9, increase_factor=1.0)


@refused(ValueError, "ScaleByZoomLinesearch.slope_rtol must be in [0, 1), got -0.1.")
def an_ascending_condition():
    sl.ScaleByZoomLinesearch(9, slope_rtol=-0.1)


@refused(ValueError, "ScaleByZoomLinesearch.approx_dec_rtol must be in [0, inf), got -1.0.")
def a_negative_tolerance():
    sl.ScaleByZoomLinesearch(9, approx_dec_rtol=-1.0)


@refused(
    TypeError,
    "ScaleByZoomLinesearch.tol must be a real number, a 0-d array or a schedule, got None of type "
    "NoneType.",
)
def no_tolerance():
    sl.ScaleByZoomLinesearch(9, tol=None)  # pyright: ignore[reportArgumentType]


@refused(
    ValueError,
    "ScaleByZoomLinesearch.initial_guess_strategy must be 'one' or 'keep', got 'two'.",
)
def an_unknown_strategy():
    sl.ScaleByZoomLinesearch(9, initial_guess_strategy="two")


@refused(ValueError, "ScaleByLbfgs.memory_size must be at least 1, got 0.")
def no_memory():
    sl.lbfgs(memory_size=0)


# --- reuse ------------------------------------------------------------------------------------


@refused(
    ValueError,
    "`reuse_linesearch=True` reuses the loss of the previous step, so there is no `aux` to return. "
    "Remove `has_aux`.",
)
def reuse_with_aux():
    sl.train_step(loss_fn, reuse_linesearch=True, has_aux=True)


NONE_KEPT = (
    "`reuse_linesearch=True` takes loss and gradient from a line search that ends the chain, such "
    "as `sl.ScaleByZoomLinesearch` or `sl.ScaleByBacktrackingLinesearch(…, store_grad=True)`. This "
    "chain ends with {}, which keeps no gradient."
)


@refused(TypeError, NONE_KEPT.format("ScaleByBacktrackingLinesearch"))
def reuse_of_a_gradient_that_is_not_kept():
    params = jnp.ones(3)
    sl.train_step(loss_fn, reuse_linesearch=True)(params, sl.Optimizer(BACKTRACKING, params))


@refused(TypeError, NONE_KEPT.format("Mask"))
def reuse_under_a_wrapper():
    params = jnp.ones(3)
    tx = sl.sgd(1.0) | sl.ScaleByZoomLinesearch(9).mask(sl.where.everything())
    sl.train_step(loss_fn, reuse_linesearch=True)(params, sl.Optimizer(tx, params))


@pytest.mark.parametrize("name", CASES)
def test_messages_are_as_stated_to_the_last_word(name):
    bad, error, message = CASES[name]
    with pytest.raises(error) as caught:
        bad()
    assert str(caught.value) == message
