"""Bad inputs are refused before anything is computed or given away, and good ones are not."""

import jax
import jax.numpy as jnp
import pytest

import slalom as sl

from .messages import bound, params, total


def test_a_bad_step_is_refused_while_tracing():
    for error, culprit, grads, known in [
        (ValueError, "'w' is in the model but not in the gradients", {"b": jnp.ones(2)}, {}),
        (ValueError, "The gradient at 'b' has shape ()", params() | {"b": jnp.ones(())}, {}),
        (ValueError, "The gradient at 'b' is None", params() | {"b": None}, {}),
        (TypeError, "No transform uses 'temprature'", params(), {"temprature": 1.0}),
        (ValueError, "`value` must be a scalar", params(), {"value": jnp.ones(2)}),
    ]:
        with pytest.raises(error) as caught:  # under `eval_shape`, where nothing can be computed
            jax.eval_shape(lambda *args, known=known: bound().step(*args, **known), params(), grads)
        assert culprit in str(caught.value)


def test_a_refused_step_donates_nothing_and_leaves_the_optimizer_as_it_was():
    model = params()
    opt = sl.Optimizer(sl.adam(0.1), model)
    with pytest.raises(ValueError, match="must be a scalar"):
        sl.train_step(lambda model: model["b"])(model, opt)
    model, opt, loss = sl.train_step(total)(model, opt)
    assert loss == 8
    assert opt.count == 1
    # A donated optimizer can be printed.
    sl.train_step(total)(model, opt)
    assert "sl.ScaleByAdam()" in repr(opt)

    model, opt = params(), bound()
    with pytest.raises(ValueError, match="not broadcast"):
        opt.step(model, params() | {"b": jnp.ones(5)})
    _, opt = opt.step(model, params())
    assert opt.count == 1


def test_learning_rates_are_warned_of_where_both_act():
    with pytest.warns(UserWarning, match="together they ascend") as caught:
        bound((sl.adam(0.1) | sl.sgd(0.1)).every_k(2))
    assert str(caught[0].message).startswith(
        "'every_k.scale_by_learning_rate' and 'every_k.scale_by_learning_rate_2' both flip the "
    )

    rate, w = sl.ScaleByLearningRate(0.1), sl.where.path("w")
    bound(rate.mask(w) | rate.mask(~w))
    bound(sl.Scale(-1.0) | sl.adam(0.1))

    @jax.jit
    def step(b2):
        return sl.Optimizer(sl.adam(0.1, b2=b2), params()).hyperparams["b2"]

    assert step(1.5) == 1.5
