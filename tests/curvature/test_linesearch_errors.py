"""What a user of a line search reads when something is wrong: the whole message of each."""

from functools import partial

import jax.numpy as jnp
import pytest

import slalom as sl


def loss_fn(x):
    return jnp.sum(x**2)


def step(tx=None, **given):
    params = jnp.ones(3)
    known = {"value": jnp.array(3.0), "grad": 2 * params, "value_fn": loss_fn} | given
    opt = sl.Optimizer(sl.lbfgs() if tx is None else tx, params)
    return opt.step(params, 2 * params, **known)


def reused(tx):
    params = jnp.ones(3)
    sl.train_step(loss_fn, reuse_linesearch=True)(params, sl.Optimizer(tx, params))


BACKTRACKING = sl.sgd(1.0) | sl.ScaleByBacktrackingLinesearch(9)
ITSELF = " `sl.train_step` passes value, grad and value_fn itself."
NONE_KEPT = (
    "`reuse_linesearch=True` takes loss and gradient from a line search that ends the chain, such "
    "as `sl.ScaleByZoomLinesearch` or `sl.ScaleByBacktrackingLinesearch(…, store_grad=True)`. This "
    "chain ends with {}, which keeps no gradient."
)

TYPES = {
    "ScaleByZoomLinesearch ('scale_by_zoom_linesearch') needs 'value_fn': pass the loss as a "
    "function of the model: `opt.step(..., value_fn=fn)`." + ITSELF: (lambda: step(value_fn=None)),
    "ScaleByZoomLinesearch ('scale_by_zoom_linesearch') needs 'value': pass the loss: "
    "`opt.step(model, grads, value=loss)`, or `sl.Context(value=loss)`." + ITSELF: (
        lambda: step(value=None)
    ),
    "ScaleByBacktrackingLinesearch ('scale_by_backtracking_linesearch') needs 'grad': pass the "
    "gradient of the loss: `opt.step(model, grads, grad=grads)`." + ITSELF: (
        lambda: step(BACKTRACKING, grad=None)
    ),
    "ScaleByLbfgs needs 'params': pass the parameters: `tx.update(grads, state, params)`.": (
        lambda: sl.ScaleByLbfgs().update(jnp.ones(3), sl.ScaleByLbfgs().init(jnp.ones(3)))
    ),
    "The `value_fn` passed to ScaleByZoomLinesearch must return a real scalar, got None of type "
    "NoneType.": lambda: step(value_fn=lambda x: None),
    "The `value_fn` passed to ScaleByZoomLinesearch must return a real floating-point number, got "
    "dtype complex64.": lambda: step(value_fn=lambda x: jnp.sum(x).astype(jnp.complex64)),
    "ScaleByZoomLinesearch.max_linesearch_steps must be an int, got True of type bool.": (
        lambda: sl.ScaleByZoomLinesearch(True)
    ),
    "ScaleByBacktrackingLinesearch.max_backtracking_steps must be an int, got 2.5 of type "
    "float.": lambda: sl.ScaleByBacktrackingLinesearch(2.5),
    "ScaleByZoomLinesearch.tol must be a real number, a 0-d array or a schedule, got None of type "
    "NoneType.": lambda: sl.ScaleByZoomLinesearch(9, tol=None),
    NONE_KEPT.format("ScaleByBacktrackingLinesearch"): lambda: reused(BACKTRACKING),
    NONE_KEPT.format("Mask"): (
        lambda: reused(sl.sgd(1.0) | sl.ScaleByZoomLinesearch(9).mask(sl.where.everything()))
    ),
}

# A number outside of its interval.
OUTSIDE = [
    (sl.ScaleByBacktrackingLinesearch, "decrease_factor", 1.0, "(0, 1)"),
    (sl.ScaleByBacktrackingLinesearch, "increase_factor", 0.5, "[1, inf]"),
    (sl.ScaleByZoomLinesearch, "increase_factor", 1.0, "(1, inf)"),
    (sl.ScaleByZoomLinesearch, "slope_rtol", -0.1, "[0, 1)"),
    (sl.ScaleByZoomLinesearch, "approx_dec_rtol", -1.0, "[0, inf)"),
]
VALUES = {
    f"{search.__name__}.{field} must be in {interval}, got {x}.": partial(search, 9, **{field: x})
    for search, field, x, interval in OUTSIDE
} | {
    "The `value_fn` passed to ScaleByZoomLinesearch must return a scalar, got an array of "
    "shape (3,). Average it over the batch, for example with `jnp.mean`.": (
        lambda: step(value_fn=lambda x: x**2)
    ),
    "The `value_fn` passed to ScaleByBacktrackingLinesearch must return a scalar, got an "
    "array of shape (1,). Average it over the batch, for example with `jnp.mean`.": (
        lambda: step(BACKTRACKING, value_fn=lambda x: jnp.sum(x)[None])
    ),
    "ScaleByZoomLinesearch.max_linesearch_steps must be at least 1, got 0.": (
        lambda: sl.ScaleByZoomLinesearch(0)
    ),
    "ScaleByZoomLinesearch.initial_guess_strategy must be 'one' or 'keep', got 'two'.": (
        lambda: sl.ScaleByZoomLinesearch(9, initial_guess_strategy="two")
    ),
    "ScaleByLbfgs.memory_size must be at least 1, got 0.": lambda: sl.lbfgs(memory_size=0),
    "`reuse_linesearch=True` reuses the loss of the previous step, so there is no `aux` to return. "
    "Remove `has_aux`.": lambda: sl.train_step(loss_fn, reuse_linesearch=True, has_aux=True),
}


@pytest.mark.parametrize(
    ("error", "message"),
    [(error, m) for error, cases in ((TypeError, TYPES), (ValueError, VALUES)) for m in cases],
)
def test_messages_are_as_stated_to_the_last_word(error, message):
    with pytest.raises(error) as caught:
        (TYPES | VALUES)[message]()
    assert str(caught.value) == message
