"""Schedules with a memory: what they remember, where it is kept, what it drives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import Falling
from table import halving

PARAMS = {"w": jnp.ones(3), "b": jnp.zeros(())}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)
Plateau = sl.schedules.ReduceOnPlateau


@jax.jit
def driven(opt, losses):
    """All hyperparameters after each step with these losses."""

    def body(opt, loss):
        _, opt = opt.step(PARAMS, GRADS, value=loss)
        return opt, dict(opt.hyperparams)

    return jax.lax.scan(body, opt, losses)[1]


def rates(tx, losses):
    seen = driven(sl.Optimizer(tx, PARAMS), jnp.asarray(losses, jnp.float32))
    (path,) = (path for path in seen if path.endswith("scale_by_learning_rate.learning_rate"))
    return np.asarray(seen[path])


def by_hand(losses, init, factor, patience, rtol, atol, cooldown, size, min_scale):
    """The rule in plain Python."""
    value, best, bad, wait, seen, out = init, np.inf, 0, 0, [], []
    for loss in losses:
        seen.append(loss)
        if len(seen) == size:
            mean, seen = float(np.mean(seen)), []
            improved = best == np.inf or mean < best - rtol * abs(best) - atol
            best = mean if improved else best
            if wait:
                wait, bad = wait - 1, 0
            else:
                bad = 0 if improved else bad + 1
                if bad == patience:
                    value, bad, wait = max(value * factor, min_scale * init), 0, cooldown
        out.append(value)
    return out


PLATEAUS = (
    (2.0, 0.5, 1, 0.0, 0.0, 0, 1, 0.0),
    (0.1, 0.3, 3, 0.1, 0.05, 2, 1, 0.02),
    (1.0, 0.5, 2, 0.05, 0.0, 1, 3, 0.1),
)


def test_plateaus_and_schedules_of_ones_own_are_shown_in_their_place():
    losses = np.random.default_rng(0).normal(0.5, 1.0, 60).astype(np.float32)
    before = driven._cache_size()
    for options in PLATEAUS:
        seen = rates(sl.sgd(1.0).drive({"learning_rate": Plateau(*options)}), losses)
        np.testing.assert_allclose(seen, by_hand(losses, *options), rtol=1e-5)
        assert len(set(seen.tolist())) > 2
    assert driven._cache_size() == before + 1

    opt = sl.Optimizer(sl.sgd(1.0).drive({"learning_rate": Falling()}), PARAMS)
    for n in (1, 2, 3):
        promised = opt.hyperparams["learning_rate"]
        updates, opt = opt.update(PARAMS, GRADS)
        np.testing.assert_allclose(updates["b"], -0.5 * 0.75**n, rtol=1e-6)
        np.testing.assert_allclose(promised, 0.5 * 0.75**n, rtol=1e-6)

    tx = sl.adam(0.1).drive({"learning_rate": Plateau(0.1)})
    link = tx["scale_by_learning_rate"]
    assert repr(link) == "sl.ScaleByLearningRate(sl.schedules.ReduceOnPlateau(0.1))"

    tx = sl.sgd(0.1).drive({"learning_rate": OfTheLoss()}).every_k(2)
    params, opt = PARAMS, sl.Optimizer(tx.schedule_free().record(), PARAMS)
    for loss in (1.0, 3.0):
        params, opt = opt.step(params, GRADS, value=loss)
    assert float(opt.state.inner.max_rate) == 2
    (used,) = (x for path, x in opt.metrics.items() if path.endswith("learning_rate"))
    assert float(used) == 2


HALVED = {"learning_rate": Plateau(1.0, 0.5, 1)}
SEEN = {
    # −1.0001 is no improvement of −1 by 1 %, and −0.995, which optax takes for one, even less.
    "negative losses": (
        sl.sgd(1.0).drive({"learning_rate": Plateau(1.0, 0.5, 2, rtol=0.01)}),
        [-1.0, -0.995, -1.0001, -1.1, -1.1, -1.1],
        [1.0, 1.0, 0.5, 0.5, 0.5, 0.25],
    ),
    # What a field held before does not matter.
    "a number": (sl.sgd(7.0).drive(HALVED), [3.0, 2.0, 2.0, 2.0], [1.0, 1.0, 0.5, 0.25]),
    "a schedule": (sl.sgd(halving).drive(HALVED), [3.0, 2.0, 2.0, 2.0], [1.0, 1.0, 0.5, 0.25]),
    "an array": (sl.sgd(jnp.float32(3)).drive(HALVED), [2.0, 2.0], [1.0, 0.5]),
    # The means of the windows are 2, 2, 1: the single losses would say something else.
    "windows": (
        sl.sgd(1.0).drive(HALVED).every_k(2),
        [1.0, 3.0, 3.0, 1.0, 1.5, 0.5],
        [1.0, 0.5, 0.5],
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_the_rate_follows_the_loss(name):
    tx, losses, expected = SEEN[name]
    every = 2 if name == "windows" else 1
    assert rates(tx, losses)[every - 1 :: every].tolist() == expected


vectors = sl.where.ndim(1)
NAMES = {
    # Half a line from the driven 0.5 to 9, at the second of five steps.
    "init_value": (sl.sgd(sl.schedules.linear(9.0, 9.0, 5)), 1.0, [0.5 + 2 / 5 * 8.5]),
    "b2": (sl.ScaleByAdam().mask(vectors) | sl.sgd(0.1), 0.9, [0.45]),
    "**.learning_rate": (sl.adam(0.1).partition({vectors: sl.sgd(0.1)}), 1.0, [0.5, 0.5]),
}


@pytest.mark.parametrize("name", NAMES)
def test_paths_suffixes_and_globs_name_what_is_driven(name):
    tx, start, expected = NAMES[name]
    opt = sl.Optimizer(tx.drive({name: Plateau(start, 0.5, 1)}), PARAMS)
    ending = "b2" if name == "b2" else "learning_rate"
    found = [x[-1] for path, x in driven(opt, jnp.ones(2)).items() if path.endswith(ending)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_numbers_of_schedules_change_by_name_and_bad_input_is_refused():
    step = jax.jit(lambda opt: opt.step(PARAMS, GRADS, value=1.0))
    tx = sl.adam(0.1).drive({"learning_rate": Plateau(1.0, 0.5, 2)}).every_k(1)
    opt = sl.Optimizer(tx, PARAMS)
    _, opt = step(opt)
    opt = opt.with_hyperparams({"every_k.drive.learning_rate.patience": 1, "factor": 0.25})
    _, opt = step(opt)
    assert float(opt.hyperparams["learning_rate"]) == 0.25
    assert float(opt.with_hyperparams(init_value=8.0).hyperparams["learning_rate"]) == 2.0
    with pytest.raises(ValueError, match=r"learning_rate\.factor must be in \(0, 1\), got 2\.0"):
        opt.with_hyperparams(factor=2.0)
    assert step._cache_size() == 1

    for error, cases in ((TypeError, WRONG_KIND), (ValueError, WRONG_VALUE), (KeyError, AMBIGUOUS)):
        for message, bad in cases.items():
            with pytest.raises(error) as caught:
                bad()
            assert caught.value.args[0] == message

    factors = {"step_size": sl.Scale(1.0), "scale_factor": sl.NormalizeByUpdateNorm(1.0)}
    for field, link in factors.items():
        tx = (sl.adam(0.1) | link).drive({field: Plateau(1.0)})
        assert sl.Optimizer(tx, {"w": jnp.ones(2)}).hyperparams[field] == 1


class OfTheLoss(sl.schedules.AbstractStatefulSchedule):
    """The loss as the value of a schedule."""

    needs = ("value",)

    def init(self):
        return jnp.zeros(())

    def update(self, state, context):
        return context.value

    def value(self, state):
        return state


DRIVEN = sl.sgd(0.1).drive({"learning_rate": Plateau(0.1)})
RATE = "'drive.scale_by_learning_rate.learning_rate' is"
PLATEAU = "sl.schedules.ReduceOnPlateau(0.1)"
TAKES = "`.drive` takes stateful schedules, such as `sl.schedules.ReduceOnPlateau(1e-3)`, got "
WRONG_KIND = {
    f"{TAKES}0.5 of type float for 'b1'.": lambda: sl.adam(0.1).drive({"b1": 0.5}),
    f"{TAKES}sl.schedules.constant(0.5) of type constant for 'learning_rate'. Pass a stateless "
    "schedule as the hyperparameter itself, in place of a number.": (
        lambda: sl.sgd(0.1).drive({"learning_rate": sl.schedules.constant(0.5)})
    ),
    "Drive ('drive') needs 'value': pass the loss: `opt.step(model, grads, value=loss)`, or "
    "`sl.Context(value=loss)`. `sl.train_step` passes value, grad and value_fn itself.": (
        lambda: sl.Optimizer(DRIVEN, PARAMS).step(PARAMS, GRADS)
    ),
    "ScaleByLearningRate.learning_rate must be a real number, a 0-d array or a schedule, got "
    f"{PLATEAU}. A stateful schedule cannot be passed as a hyperparameter. Pass a number and drive "
    "it: `tx.drive({'learning_rate': schedule})`.": lambda: sl.sgd(Plateau(0.1)),
}
WRONG_VALUE = {
    "'scale_by_adam.b1' would be driven twice: by 'b1' and by 'scale_by_adam.b1'.": (
        lambda: sl.adam(0.1).drive({"b1": Plateau(0.1), "scale_by_adam.b1": Plateau(0.2)})
    ),
    f"{RATE} already driven by {PLATEAU}, which '**' would override. Drive it once.": (
        lambda: DRIVEN.drive({"**": Plateau(0.2)})
    ),
    f"{RATE} driven by {PLATEAU}, so a number would have no effect. Change one of the schedule's "
    "own numbers by its name, or bind a transform without `.drive` to the model with "
    "`opt.rebind`.": lambda: sl.Optimizer(DRIVEN, PARAMS).with_hyperparams(learning_rate=0.5),
    "ReduceOnPlateau.patience must be in [1, inf), got 0.": lambda: Plateau(0.1, patience=0),
    "ReduceOnPlateau.accumulation_size must be in [1, inf), got 0.": (
        lambda: Plateau(0.1, accumulation_size=0)
    ),
}
AMBIGUOUS = {
    "'decay' is ambiguous. Candidates: 'trace.decay', 'trace_2.decay'. For all of them, write "
    "'**.decay'.": (lambda: (sl.Trace(0.9) | sl.Trace(0.5)).drive({"decay": Plateau(0.1)})),
}
