"""Parameters that are evaluated apart from those that are trained: lookahead and averages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import (
    assert_close,
    assert_same_bits,
    assert_same_path,
    gradients,
    mlp,
    nested_dict,
    optax_trajectory,
    params_of,
    slalom_trajectory,
)
from slalom._core.protocol.parameter_writer import params_to_evaluate

MODEL = nested_dict(jax.random.key(0))
GRADS = gradients(MODEL, 12)


def at(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


@pytest.mark.slow
@pytest.mark.parametrize("reset_state", [False, True])
def test_lookahead_walks_the_path_of_optax(reset_state, x64):
    model = nested_dict(jax.random.key(0), jnp.float64)
    grads = gradients(model, 12)
    ours, opt = slalom_trajectory(
        sl.sgd(0.1, momentum=0.9).lookahead(3, 0.4, reset_state), model, grads
    )
    tx = optax.lookahead(optax.sgd(0.1, 0.9), 3, 0.4, reset_state=reset_state)
    both, _ = optax_trajectory(tx, optax.LookaheadParams.init_synced(model), grads)
    assert_same_path(ours, both.fast, model, 1e-9)
    assert_close(opt.eval_params(at(ours, -1)), at(both.slow, -1), rtol=1e-9)


def test_a_fast_state_that_starts_anew_keeps_clocks_and_tells_that_a_step_was_made():
    halving = sl.schedules.exponential_decay(1.0, 1, 0.5)
    tx = sl.sgd(halving).every_k(2).lookahead(1, 1.0, reset_state=True).average()
    path, emitted = [jnp.zeros(())], []
    opt = sl.Optimizer(tx, path[0])
    for _ in range(6):
        model, opt = opt.step(path[-1], jnp.ones(()))
        path.append(model)
        emitted.append(bool(opt.has_updated))
    assert np.diff(path).tolist() == [0.0, -1.0, 0.0, -0.5, 0.0, -0.25]
    assert emitted == [False, True] * 3
    assert int(opt.metrics["gradient_step"]) == 3
    np.testing.assert_allclose(opt.eval_params(model), np.mean(path[2::2]), rtol=1e-6)


@pytest.mark.slow
def test_a_fast_state_starts_anew_also_where_ages_differ():
    tx = sl.adam(0.1).lookahead(2, 0.5, reset_state=True)
    model, opt = MODEL, sl.Optimizer(tx, MODEL)
    model, opt = opt.step(model, at(GRADS, 0))
    opt = opt.reset(model, where=sl.where.path("scales.0"))
    model, opt = opt.step(model, at(GRADS, 1))
    np.testing.assert_array_equal(opt.state_of("scale_by_adam").age, [0, 0, 0])


SINCE_THE_START = 0.5 ** np.arange(12, -1, -1)
# The weights of the initial parameters and of those after each step.
AVERAGES = {
    "exponential": (sl.sgd(0.1).average(0.9), [0, *0.9 ** np.arange(11, -1, -1)]),
    "without debias": (
        sl.sgd(0.1).average(0.5, debias=False),
        SINCE_THE_START * np.where(np.arange(13) == 0, 1, 0.5),
    ),
    "of what was emitted": (sl.sgd(0.1).every_k(3).average(), [0, *[0, 0, 1] * 4]),
    # The outermost of two writers is evaluated.
    "of lookahead": (sl.sgd(0.1).lookahead(2, 0.5).average(), [0, *[1] * 12]),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_is_the_weighted_mean_of_the_parameters(name):
    tx, weights = AVERAGES[name]
    history, opt = slalom_trajectory(tx, MODEL, GRADS)
    evaluated = opt.eval_params(at(history, -1))
    for a, p, h in zip(*map(jax.tree.leaves, (evaluated, MODEL, history)), strict=True):
        visited = np.concatenate([p[None], h]).astype(np.float64)
        expected = np.average(visited, axis=0, weights=weights)
        np.testing.assert_allclose(a, expected, rtol=1e-5, atol=1e-7)


def test_an_average_begins_with_the_parameters_and_changes_no_step():
    plain, *averaged = jax.jit(
        lambda: [
            slalom_trajectory(tx, MODEL, GRADS)[0]
            for tx in (sl.adamw(0.1), sl.adamw(0.1).average(0.999), sl.adamw(0.1).average())
        ]
    )()
    for path in averaged:
        assert_same_bits(path, plain)

    for tx in (sl.sgd(0.1).average(0.9999), sl.Scale(2.0) | sl.sgd(0.1).average()):
        opt = sl.Optimizer(tx, MODEL)
        assert_same_bits(opt.eval_params(MODEL), MODEL)
        model, opt = opt.step(MODEL, at(GRADS, 0))
        assert_same_bits(opt.eval_params(model), model)

    model = mlp()
    for tx in (sl.adam(0.1), sl.adam(0.1).every_k(2), sl.lion(0.1)):
        evaluated = sl.Optimizer(tx, model).eval_params(model)
        for a, b in zip(jax.tree.leaves(evaluated), jax.tree.leaves(model), strict=True):
            assert a is b


def test_a_half_precision_average_does_not_stall():
    model = jnp.zeros(4, jnp.bfloat16)
    tx = sl.sgd(1.0).average(0.999, debias=False)

    def body(carry, _):
        model, opt = carry
        return opt.step(model, jnp.zeros_like(model)), None

    opt = sl.Optimizer(tx, model)
    (model, opt), _ = jax.lax.scan(body, (jnp.ones_like(model), opt), length=3000)
    evaluated = opt.eval_params(model)
    assert evaluated.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(evaluated, np.float32), 1 - 0.999**3000, rtol=4e-3)


@pytest.mark.slow
def test_only_the_leaves_of_a_writer_are_replaced():
    model = mlp(jax.random.key(1))
    weights = sl.where.ndim(min=2)
    for tx in (
        sl.sgd(0.1).average(0.5).only(weights),
        sl.sgd(0.1).partition({weights: sl.sgd(0.1).average(0.5)}),
        sl.sgd(0.1).average(0.5).every_k(1).partition({~weights: sl.SetToZero()}),
    ):
        opt = sl.Optimizer(tx, model)
        grads = jax.tree.map(jnp.ones_like, params_of(model))
        after = model
        for _ in range(2):
            after, opt = opt.step(after, grads)
        evaluated = opt.eval_params(after)
        assert evaluated.activation is model.activation
        assert not jnp.array_equal(evaluated.layers[0].weight, after.layers[0].weight)
        assert evaluated.layers[0].bias is after.layers[0].bias


FOLLOWED = "writes the parameters itself, so nothing may follow it: make it the last link of the "
RANGE = "must be in [0, 1], got 1.5. For other steps, use `.outer`."
ADAM, SLOW = sl.adam(0.1), sl.sgd(0.1).lookahead(2, 0.5)
OTHER_MODEL = (
    "The trainable parameters of this model differ from those that the optimizer was created "
    "with: 'v' is in this model but not in the original model. Create a new optimizer with "
    "`sl.Optimizer(tx, model)`, or transfer the state with `opt.rebind(model)`."
)
REFUSED = [
    (lambda: SLOW | sl.Scale(2.0), f"Outer {FOLLOWED}chain."),
    (lambda: SLOW.every_k(2) | sl.Scale(2.0), f"EveryK {FOLLOWED}chain."),
    (lambda: ADAM.lookahead(0, 0.5), "Outer.every must be at least 1, got 0."),
    (lambda: ADAM.lookahead(2, 1.5), f"`slow_step_size` of `.lookahead` {RANGE}"),
    (lambda: ADAM.average(1.0), "Average.decay must be in [0, 1), got 1.0."),
    (lambda: sl.Optimizer(ADAM, {"w": jnp.ones(2)}).eval_params({"v": jnp.ones(2)}), OTHER_MODEL),
    (lambda: ADAM.outer(sl.sgd(0.5), 2.5), "Outer.every must be an int, got 2.5 of type float."),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_bad_input_is_refused_by_name(make, message):
    with pytest.raises(TypeError if "an int" in message else ValueError) as caught:
        make()
    assert str(caught.value) == message


def test_evaluation_runs_a_compiled_program(monkeypatch):
    traced = []

    def counted(*args, **options):
        traced.append(args)
        return params_to_evaluate(*args, **options)

    monkeypatch.setattr("slalom._loop.programs.compiled.params_to_evaluate", counted)
    model = {"counted": jnp.ones(3)}
    opt = sl.Optimizer(sl.sgd(0.1).average(0.5), model)
    for _ in range(3):
        model, opt = opt.step(model, model)
        evaluated = opt.eval_params(model)
    expected = params_to_evaluate(opt.transform, opt.state, model)
    assert len(traced) == 1
    assert_close(evaluated, expected, rtol=1e-6)
