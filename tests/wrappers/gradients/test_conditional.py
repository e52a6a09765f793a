"""Transforms that run on a condition: where gradients are finite, or where a function says so."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import (
    after_steps,
    assert_close,
    assert_same_bits,
    at,
    gradients,
    lenient,
    nested_dict,
    slalom_trajectory,
    trajectory,
)
from table import halving

MODEL = nested_dict(jax.random.key(0))
GRADS = gradients(MODEL, 12)
BAD = (1, 4, 5, 8, 9, 10)
"""Where a gradient is spoilt: runs of one, two and three."""


def odd(context, updates):
    return context.step % 2 == 1


def spoilt(grads, *steps, by=jnp.nan):
    """The gradients with one number of one leaf not finite at some steps."""
    spoil = [p.at[jnp.array(steps)].set(by) for p in grads["scales"]]
    return grads | {"scales": spoil}


def after_each(tx, model, grads, look):
    """What `look(opt)` gives after each step, stacked, and the trajectory, in one scan."""

    def step(before, opt, grads):
        params, opt = opt.step(before[0], grads)
        return (params, look(opt)), opt

    opt = sl.Optimizer(tx, model)
    return trajectory(step, (model, look(opt)), opt, (grads,))[0]


@jax.jit
def both_verbs(opt, model, grads):
    return {"step": opt.step(model, grads), "update": opt.update(model, grads)}


def assert_idle(opt, model, grads):
    """Neither verb changes a bit of the model and of the inner state. Returns the optimizers."""
    results = both_verbs(opt, model, grads)
    for verb, (made, after) in results.items():
        still = model if verb == "step" else jax.tree.map(jnp.zeros_like, model)
        assert_same_bits(made, still)
        assert_same_bits(after.state.inner, opt.state.inner)
        assert int(after.state.count) == int(opt.state.count)
        assert not bool(after.has_updated)
    return [after for _, after in results.values()]


INNER = sl.ClipByGlobalNorm(1.0) | sl.adamw(halving, weight_decay=0.1)
LEFT_OUT = {
    "if_finite": (INNER.if_finite(1), [jnp.nan, -jnp.inf], 2),
    "when": (INNER.when(odd, otherwise="zero"), [1.0], 1),
    "scale_loss": (INNER.scale_loss(), [jnp.nan, -jnp.inf], 2),
    "skip_spikes": (INNER.skip_spikes(window=2, by="grad_norm"), [jnp.nan, 1e3], 2),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_step_that_is_left_out_changes_no_bit(name):
    tx, numbers, ran = LEFT_OUT[name]
    opt = sl.Optimizer(tx, MODEL)
    for _ in range(2):
        _, opt = both_verbs(opt, MODEL, at(GRADS, 0))["step"]
    assert bool(opt.has_updated)
    assert int(opt.state.count) == ran
    for number in numbers:
        for after in assert_idle(opt, MODEL, at(spoilt(GRADS, 0, by=number), 0)):
            # The clock of schedules stands still too.
            rates = [x for path, x in after.hyperparams.items() if path.endswith("learning_rate")]
            np.testing.assert_allclose(rates, [1 - 0.05 * ran], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["if_finite", "scale_loss", "skip_spikes"])
def test_under_vmap_each_run_has_its_own_condition(name):
    tx, _, _ = LEFT_OUT[name]
    grads = jax.tree.map(lambda g: g[:2], spoilt(GRADS, 1))
    model = jax.tree.map(lambda x: jnp.stack([x, x]), MODEL)
    opt = jax.vmap(lambda m: sl.Optimizer(tx, m))(model)
    together, opt = jax.jit(jax.vmap(lambda m, o, g: o.step(m, g)))(model, opt, grads)
    alone, _ = sl.Optimizer(tx, MODEL).step(MODEL, at(grads, 0))
    assert_close(at(together, 0), alone, rtol=1e-6)
    assert_same_bits(at(together, 1), MODEL)
    assert opt.has_updated.tolist() == [True, False]
    if name == "scale_loss":
        assert opt.loss_scale.tolist() == [2.0**15, 2.0**14]


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 2])
def test_if_finite_is_apply_if_finite_also_around_the_limit(limit, x64):
    model = nested_dict(jax.random.key(0), jnp.float64)
    grads = spoilt(gradients(model, 12), *BAD)
    # What is accepted must not spoil the parameters, or nothing could be compared after it.
    inner = sl.ZeroNans() | sl.adam(0.1)
    theirs = optax.apply_if_finite(optax.chain(optax.zero_nans(), optax.adam(0.1)), limit)

    def look(opt):
        return dict(opt.metrics), opt.has_updated

    history, (metrics, updated) = after_each(inner.if_finite(limit), model, grads, look)

    def step(before, state, grads):
        updates, state = theirs.update(grads, state, before[0])
        return (optax.apply_updates(before[0], updates), state), state

    start = theirs.init(model)
    with lenient():
        expected, state = trajectory(step, (model, start), start, (grads,))[0]
    assert_close(history, expected, rtol=1e-9)
    for name in ("notfinite_count", "last_finite", "total_notfinite"):
        np.testing.assert_array_equal(metrics[f"if_finite.{name}"], getattr(state, name))
    accepted = state.last_finite | (state.notfinite_count > limit)
    np.testing.assert_array_equal(updated, accepted)


@pytest.mark.slow
def test_skipping_goes_on_for_ever_and_raising_waits_for_the_end_of_a_scan():
    tx = sl.adam(0.1).if_finite(1, on_limit="skip")
    history, emitted = after_each(tx, MODEL, spoilt(GRADS, *BAD), lambda opt: opt.has_updated)
    good = [i for i in range(12) if i not in BAD]
    plain, _ = slalom_trajectory(sl.adam(0.1), MODEL, at(GRADS, jnp.array(good)))
    assert_same_bits(at(history, jnp.array(good)), plain)
    assert list(np.asarray(emitted)) == [i in good for i in range(12)]

    tx = sl.adam(0.1).if_finite(1, on_limit="raise", check="both").every_k(1)
    history, opt = slalom_trajectory(tx, MODEL, spoilt(GRADS, 9, 10, 11))
    assert_same_bits(at(history, 11), at(history, 8))
    with pytest.raises(FloatingPointError, match=r"3 steps in a row, and 'every_k\.if_finite'"):
        opt.step(MODEL, at(GRADS, 0))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
def test_finiteness_in_every_dtype(dtype):
    bad = [jnp.inf, -jnp.inf, jnp.nan]
    if dtype == jnp.complex64:
        bad.append(complex(0.0, jnp.nan))
    largest = jnp.asarray(jnp.finfo(dtype).max, dtype)
    numbers = jnp.stack([largest, -largest, *(jnp.asarray(x, dtype) for x in bad)])

    @jax.jit
    @jax.vmap
    def finite(x):
        spoilt = jnp.zeros((2, 3), dtype).at[1, 1].set(x)
        return sl.tree.all_finite({"a": largest, "b": spoilt, "empty": jnp.zeros((0, 2), dtype)})

    assert finite(numbers).tolist() == [True, True] + [False] * len(bad)


def test_raising_is_an_error_of_the_next_call_that_needs_no_transfer():
    tx = sl.named_chain(safe=sl.adam(0.1).if_finite(1, on_limit="raise"))
    opt = sl.Optimizer(tx, MODEL)
    bad = at(spoilt(GRADS, 0), 0)
    model, opt = opt.step(MODEL, bad)
    model, opt = opt.step(model, at(GRADS, 1))
    expected = model
    model, opt = after_steps(opt, 2, model, bad)
    assert_same_bits(model, expected)
    message = (
        "The gradients were not finite in 2 steps in a row, and 'safe' allows 1. These steps were "
        "skipped, so the model is that of the last finite step. Check the loss, the data and the "
        'learning rate. To skip any number of steps, use `on_limit="skip"`.'
    )
    step = sl.train_step(lambda model: jnp.sum(model["scales"][0]))
    for call in (
        lambda: opt.step(model, at(GRADS, 1)),
        lambda: opt.update(model, at(GRADS, 1)),
        lambda: step(model, opt),
    ):
        with pytest.raises(FloatingPointError) as error:
            call()
        assert str(error.value) == message

    step = sl.train_step(lambda model: jnp.sum(model["w"] ** 2))
    model = {"w": jnp.ones(3)}
    opt = sl.Optimizer(sl.sgd(0.1).if_finite(on_limit="raise"), model)
    model, opt = opt.step(model, model)
    with jax.transfer_guard("disallow"):
        opt.step(model, model)
    step(model, opt)
    with pytest.raises(ValueError, match="was donated"):
        step(model, opt)


@pytest.mark.slow
def test_only_an_optimizer_that_may_raise_is_read_on_the_host(monkeypatch):
    asked, read = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: asked.append(x) or read(x))
    for on_limit in ("accept", "skip", "raise"):
        assert not asked
        sl.Optimizer(sl.adam(0.1).if_finite(on_limit=on_limit), MODEL).step(MODEL, at(GRADS, 0))
    assert len(asked) == 1


@pytest.mark.slow
def test_conditions_see_the_updates_and_results_are_checked_too():
    # As a last link: the raw update is added outside of the branches.
    opt = sl.Optimizer(sl.Scale(-0.1) | sl.Trace(0.9).when(odd), MODEL)
    expected = jax.tree.map(lambda p, g: p - jnp.float32(0.1) * g, MODEL, at(GRADS, 0))
    results = both_verbs(opt, MODEL, at(GRADS, 0))
    for verb, (made, after) in results.items():
        made = made if verb == "step" else sl.apply_updates(MODEL, made)
        assert_close(made, expected, rtol=1e-6)
        assert_same_bits(after.state[1].inner, opt.state[1].inner)
        assert bool(after.has_updated)

    tx = sl.ClipByGlobalNorm(1.5).when(lambda c, u: sl.tree.global_norm(u) > 1.5) | sl.sgd(0.1)
    history, _ = slalom_trajectory(tx, MODEL, GRADS)
    plain, _ = slalom_trajectory(sl.ClipByGlobalNorm(1.5) | sl.sgd(0.1), MODEL, GRADS)
    assert_close(history, plain, rtol=1e-6)

    grads = {"w": jnp.full(3, 0.1, jnp.bfloat16)}
    tx = sl.Scale(0.3).when(odd)
    updates, _ = tx.update(grads, tx.init(grads), None, sl.Context(step=jnp.int32(0)))
    assert updates["w"].dtype == jnp.float32
    assert_same_bits(updates["w"], grads["w"].astype(jnp.float32))

    # The gradients are finite, the updates overflow.
    params, grads = {"w": jnp.ones(3)}, {"w": jnp.full(3, 1e30)}
    tx = sl.sgd(1e30, momentum=0.9)
    blind = both_verbs(sl.Optimizer(tx.if_finite(), params), params, grads)
    for made, _ in blind.values():
        assert not np.all(np.isfinite(made["w"]))
    for after in assert_idle(sl.Optimizer(tx.if_finite(check="both"), params), params, grads):
        assert int(after.metrics["notfinite_count"]) == 1


ASCENDS = (
    "Raw gradients would be added in every step in which the condition of 'when' is false, so the "
    "parameters would ascend: it passes the gradients through unchanged in these steps, and flips "
    "their sign in all others. To leave the parameters unchanged in these steps, use "
    '`.when(condition, otherwise="zero")`. To descend in these steps too, apply `.when` only to '
    "the links before the learning rate."
)


def test_a_transform_that_would_climb_and_bad_options_are_refused():
    for tx in (
        sl.adam(0.1).when(odd),
        sl.ClipByGlobalNorm(1.0) | sl.adam(0.1).when(odd) | sl.Clip(1.0),
        sl.sgd(0.1).partition({sl.where.ndim(2): sl.adam(0.1).when(odd)}, names=("a",)),
        sl.adam(0.1).when(odd).every_k(2).lookahead(2, 0.5),
    ):
        with pytest.raises(ValueError, match="Raw gradients") as error:
            sl.Optimizer(tx, MODEL)
        path = str(error.value).split("'")[1]
        assert path.split(".")[-1] == "when"
        assert str(error.value) == ASCENDS.replace("'when'", f"'{path}'")
    for tx in (
        sl.Trace(0.9).when(odd) | sl.sgd(0.1),
        sl.adam(0.1).when(odd, otherwise="zero"),
        sl.adam(0.1) | sl.Clip(0.1).when(odd),
        sl.adam(0.1) | sl.SetToZero().when(odd),
    ):
        sl.Optimizer(tx, MODEL)

    for name, given, message in [
        ("max_consecutive_errors", -1, "at least 0, got -1."),
        ("on_limit", "ignore", "'accept', 'skip' or 'raise', got 'ignore'."),
        ("check", "updates", "'grads' or 'both', got 'updates'."),
    ]:
        with pytest.raises(ValueError) as error:  # noqa: PT011  the whole text is compared
            sl.adam(0.1).if_finite(**{name: given})
        assert str(error.value) == f"IfFinite.{name} must be {message}"


ONE_BOOL = (
    "must return a bool scalar, got {}. Return a comparison such as `context.step < n`, and reduce "
    "arrays with `jnp.all` or `jnp.any`."
)
BRANCHES = (
    "branches in Python on a traced value. Return the comparison itself, `context.step < n`, and "
    "combine several with `&` and `|` instead of `and` and `or`."
)
BAD_CONDITIONS = [
    (lambda c, u: u["dense"]["bias"] > 0, ONE_BOOL.format("an array of dtype bool and shape (2,)")),
    (lambda c, u: c.step, ONE_BOOL.format("an int32 scalar")),
    (lambda c, u: "yes", ONE_BOOL.format("a str")),
    (lambda c, u: c.step > 1 and c.step < 3, BRANCHES),
]


@pytest.mark.parametrize(("returns", "message"), BAD_CONDITIONS, ids=["leaf", "int", "str", "and"])
def test_a_condition_that_is_no_bool_is_refused(returns, message):
    def condition(context, updates):
        return returns(context, updates)

    with pytest.raises(TypeError) as error:
        sl.Optimizer(sl.Trace(0.9).when(condition), MODEL).step(MODEL, at(GRADS, 0))
    assert str(error.value) == f"The condition condition of `.when` {message}"
