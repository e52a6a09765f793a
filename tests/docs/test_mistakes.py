"""Warnings of what may be meant, and what looks like a function but is none."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import slalom as sl
from slalom.tree.types import is_function


def model():
    return {"w": jnp.ones(2)}


def total(model):
    return jnp.sum(model["w"])


def weighted(model, weights):
    return total(model) * jnp.mean(weights)


def compiled_in_a_loop(make_step, times=3):
    """The warnings of a loop that makes a step and calls it once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            make_step()
    return [str(w.message) for w in caught]


@pytest.mark.slow
def test_lambdas_in_a_loop_are_mistakes_and_programs_used_again_are_not():
    def make_step():
        sl.train_step(lambda model: total(model))(model(), sl.Optimizer(sl.sgd(0.1), model()))

    assert compiled_in_a_loop(make_step, times=2) == []
    assert compiled_in_a_loop(make_step, times=3) == [
        "`sl.train_step` was compiled three times for arguments that look the same, and each "
        "program ran once: the function `<lambda>` is a new one each time. Create it once, before "
        "the loop, with what it is part of: `step = sl.train_step(loss_fn)`."
    ]

    def make_and_use():
        step = sl.train_step(lambda model: 2 * total(model))
        trained, opt = model(), sl.Optimizer(sl.sgd(0.1), model())
        for _ in range(2):
            trained, opt, _ = step(trained, opt)

    def make_with_a_known_function():
        sl.train_step(total)(model(), sl.Optimizer(sl.adam(0.1), model()))
        sl.Optimizer(sl.adam(0.1), model()).step(model(), model())

    parts = iter((1, 2, 4))

    def make_with_other_options():
        step = sl.train_step(weighted, microbatches=next(parts))
        step(model(), sl.Optimizer(sl.sgd(0.1), model()), jnp.ones(4))

    assert compiled_in_a_loop(make_and_use) == []
    assert compiled_in_a_loop(make_with_a_known_function) == []
    assert compiled_in_a_loop(make_with_other_options) == []


def test_a_new_loss_for_a_step_by_hand():
    opt = sl.Optimizer(sl.sgd(0.1), model())
    (message,) = compiled_in_a_loop(lambda: opt.step(model(), model(), value_fn=lambda m: total(m)))
    assert ".<lambda>` in its arguments is a new one each time" in message


@pytest.mark.parametrize("name", ["sl.train_step", "opt.step"])
def test_an_optimizer_with_a_new_schedule_in_a_loop(name):
    step = sl.train_step(total)

    def make_step():
        opt = sl.Optimizer(sl.sgd(lambda step: 0.1), model())
        step(model(), opt) if name == "sl.train_step" else opt.step(model(), model())

    place = "test_an_optimizer_with_a_new_schedule_in_a_loop.<locals>.make_step.<locals>.<lambda>"
    assert compiled_in_a_loop(make_step) == [
        f"`{name}` was compiled three times for arguments that look the same, and each program ran "
        f"once: `{place}` in its arguments is a new one each time. Create it once, before the "
        "loop, with what it is part of: `opt = sl.Optimizer(tx, model)`."
    ]


@pytest.mark.parametrize(
    ("number", "path"),
    [(float, "'args.0'"), (lambda i: [float(i), i / 2, 0.5], "'args.0.0' and 1 more")],
)
def test_a_number_that_differs_in_each_step(number, path):
    trained, opt = model(), sl.Optimizer(sl.sgd(0.1), model())
    step = sl.train_step(lambda model, x: total(model) * jnp.sum(jnp.asarray(x)), donate=False)
    numbers = iter(range(9))
    assert compiled_in_a_loop(lambda: step(trained, opt, number(next(numbers))), times=4) == [
        "`sl.train_step` was compiled three times for Python numbers with other values, and each "
        f"program ran once: {path} is a number, which is static. Pass an array in place of the "
        "number, or of the list of numbers: `jnp.asarray(x)`."
    ]


@pytest.mark.parametrize("kept", ["model", "optimizer", "both", "none"])
def test_a_loop_that_keeps_one_result_of_a_step(kept):
    line = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    now = {"model": line, "optimizer": sl.Optimizer(sl.adam(0.1), line)}

    def take():
        new = now["optimizer"].step(now["model"], line)
        results = dict(zip(now, new, strict=True))
        now.update(results if kept == "both" else {k: v for k, v in results.items() if k == kept})

    what = {"model": "optimizer, so its state", "optimizer": "model, so it"}.get(kept)
    assert compiled_in_a_loop(take, times=5) == [
        f"`opt.step` was called 3 times with the same {what} never changes. Assign both results: "
        "`model, opt = opt.step(model, grads)`."
    ] * (what is not None)


@pytest.mark.parametrize(
    ("tx", "kept"), [(sl.sgd(0.1), "model"), (sl.adam(0.1).every_k(5), "optimizer")]
)
def test_results_that_are_as_before_may_be_left_out(tx, kept):
    now = {"model": eqx.nn.Linear(2, 2, key=jax.random.key(0))}
    now["optimizer"] = sl.Optimizer(tx, now["model"])

    def take():
        new = now["optimizer"].step(now["model"], now["model"])
        now["left out"] = new
        now[kept] = dict(zip(("model", "optimizer"), new, strict=True))[kept]

    assert compiled_in_a_loop(take, times=5) == []


def bind(*transforms, params):
    """Binds transforms to shapes, which is enough for their warnings."""
    for tx in transforms:
        jax.eval_shape(lambda tx=tx: sl.Optimizer(tx, params))


def test_a_loss_that_does_not_use_the_model():
    for loss_fn in (lambda m, x: x, lambda m, x: jnp.where(m["w"][0] > 0, x, 2 * x)):
        with pytest.warns(UserWarning, match="does not depend on the parameters.* Use the model"):
            sl.train_step(loss_fn)(model(), sl.Optimizer(sl.sgd(0.1), model()), jnp.ones(()))


def test_clips_after_the_learning_rate_and_calls_of_transforms():
    clips = (sl.Clip, sl.ClipByGlobalNorm, sl.ClipByBlockRms, sl.AdaptiveGradClip, sl.UnitwiseClip)
    for clip in (rule(1.0) for rule in clips):
        with pytest.warns(UserWarning, match="clips the step") as caught:
            bind(sl.adam(0.1) | clip, params=model())
        assert f"put it first: `{clip!r} | ...`." in str(caught[0].message)
        first = sl.ScaleByAdam() | clip | sl.ScaleByLearningRate(0.1)
        bind(clip | sl.adam(0.1), first, params=model())

    tx = sl.adam(0.1)
    assert not is_function(tx)
    assert not is_function(sl.Optimizer(tx, model()))
    assert is_function(sl.schedules.constant(1.0))
    assert is_function(eqx.nn.Identity())
    with pytest.raises(TypeError, match="condition"):
        tx.when(sl.Clip(1.0))  # pyright: ignore[reportArgumentType]
    # An attribute that is missing is missing, whatever the message suggests.
    assert not hasattr(tx, "every")
    assert getattr(tx, "accumulate", None) is None


LINKS = [sl.ScaleByAdam(), sl.Scale(0.5), sl.SubtractDecayedWeights(0.1)]


@pytest.mark.parametrize(
    "constraint",
    [sl.KeepInitialNorm(), pytest.param(sl.KeepParamsNonnegative(), marks=pytest.mark.slow)],
    ids=repr,
)
def test_a_link_that_undoes_a_constraint(constraint):
    params = {"b": jnp.ones(2), "w": jnp.ones((3, 2))}
    w, b = sl.where.path("w"), sl.where.path("b")
    for link in LINKS:
        for tx in (
            constraint | link,
            sl.sgd(0.1) | constraint.mask(w) | link,
            (constraint | link).every_k(2).average(),
        ):
            with pytest.warns(UserWarning, match="no longer meet the constraint") as caught:
                bind(tx, params=params)
            assert f"Put the constraint last: `... | {constraint!r}`." in str(caught[0].message)
        bind(
            link | constraint,
            constraint.mask(w) | sl.Scale(0.5).mask(b),
            link | constraint | sl.Identity() | sl.freeze(w) | sl.ZeroNans(),
            link | sl.KeepInitialNorm() | sl.KeepParamsNonnegative(),
            params=params,
        )


def test_the_check_for_finite_numbers_works_under_jit_and_vmap():
    def twice(rate, grads):
        opt = sl.Optimizer(sl.CheckFinite() | sl.sgd(rate), model())
        trained, opt = opt.step(model(), grads)
        trained, opt = opt.step(trained, grads)
        return trained, opt

    trained, after = jax.jit(twice, static_argnums=0)(0.1, {"w": jnp.array([1.0, jnp.inf])})
    assert after.state_of(sl.CheckFinite).first == 0
    with pytest.raises(FloatingPointError, match=r"In step 0 the gradient was not finite at 'w'\."):
        after.step(trained, model())

    trained, after = jax.vmap(twice, in_axes=(0, None))(jnp.array([0.25, jnp.inf]), model())
    assert after.state_of(sl.CheckFinite).first.tolist() == [-1, 1]
    assert (trained["w"][0] == 0.5).all()  # what is finite passes unchanged
