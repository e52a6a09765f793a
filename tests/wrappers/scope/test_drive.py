"""Schedules with a memory: what they remember, where it is kept, what it drives."""

import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from table import halving

PARAMS = {"w": jnp.ones(3), "b": jnp.zeros(())}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)
Plateau = sl.schedules.ReduceOnPlateau


def rates(tx, losses, name="learning_rate", every=1, opt=None):
    """The hyperparameter after each step with these losses, and the last optimizer."""

    def body(opt, loss):
        _, opt = opt.step(PARAMS, GRADS, value=loss)
        return opt, opt.hyperparams[name]

    opt = sl.Optimizer(tx, PARAMS) if opt is None else opt
    opt, seen = jax.lax.scan(body, opt, jnp.asarray(losses, jnp.float32))
    return np.asarray(seen)[every - 1 :: every], opt


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


@pytest.mark.parametrize(
    "options",
    [
        (2.0, 0.5, 1, 0.0, 0.0, 0, 1, 0.0),
        (0.1, 0.3, 3, 0.1, 0.05, 2, 1, 0.02),
        (1.0, 0.5, 2, 0.05, 0.0, 1, 3, 0.1),
    ],
)
def test_plateau_is_what_plain_python_says(options):
    losses = np.random.default_rng(0).normal(0.5, 1.0, 60).astype(np.float32)
    seen, _ = rates(sl.sgd(1.0).drive({"learning_rate": Plateau(*options)}), losses)
    np.testing.assert_allclose(seen, by_hand(losses, *options), rtol=1e-5)
    assert len(set(seen.tolist())) > 2


def test_negative_losses_must_improve_too():
    # −1.0001 is no improvement of −1 by 1 %, and −0.995, which optax takes for one, even less.
    tx = sl.sgd(1.0).drive({"learning_rate": Plateau(1.0, 0.5, 2, rtol=0.01)})
    seen, _ = rates(tx, [-1.0, -0.995, -1.0001, -1.1, -1.1, -1.1])
    assert seen.tolist() == [1.0, 1.0, 0.5, 0.5, 0.5, 0.25]


def test_the_loss_of_a_step_counts_in_that_step():
    tx = sl.sgd(1.0).drive({"learning_rate": Plateau(1.0, 0.5, 1)})
    opt = sl.Optimizer(tx.record(), PARAMS)
    moved, used = [], []
    for loss in (1.0, 1.0, 0.5):
        updates, opt = opt.update(PARAMS, GRADS, value=loss)
        moved.append(float(updates["b"]))
        used.append(float(opt.metrics["learning_rate"]))
    assert moved == [-1.0, -0.5, -0.5]
    assert used == [1.0, 0.5, 0.5]


def test_what_a_field_held_before_does_not_matter():
    plateau = {"learning_rate": Plateau(1.0, 0.5, 1)}
    losses = [3.0, 2.0, 2.0, 2.0]
    expected, _ = rates(sl.sgd(7.0).drive(plateau), losses)
    for held in (halving, jnp.float32(3.0)):
        seen, _ = rates(sl.sgd(held).drive(plateau), losses)
        assert seen.tolist() == expected.tolist()


def test_inside_of_every_k_it_sees_the_mean_loss_of_a_window():
    # The means are 2, 2, 1: the single losses would say something else.
    losses = [1.0, 3.0, 3.0, 1.0, 1.5, 0.5]
    tx = sl.sgd(1.0).drive({"learning_rate": Plateau(1.0, 0.5, 1)})
    seen, _ = rates(tx.every_k(2), losses, every=2)
    assert seen.tolist() == [1.0, 0.5, 0.5]


def test_a_skipped_step_is_not_taken_in():
    tx = sl.sgd(1.0).drive({"learning_rate": Plateau(1.0, 0.5, 1)}).if_finite()
    opt = sl.Optimizer(tx, PARAMS)
    _, opt = opt.step(PARAMS, GRADS, value=1.0)
    _, opt = opt.step(PARAMS, jax.tree.map(lambda g: g * jnp.nan, GRADS), value=2.0)
    assert float(opt.hyperparams["learning_rate"]) == 1.0


@pytest.mark.slow
def test_it_is_saved_and_goes_on():
    losses = np.random.default_rng(1).normal(1.0, 0.5, 20).astype(np.float32)
    tx = sl.sgd(1.0).drive({"learning_rate": Plateau(1.0, 0.5, 2)}).every_k(2)
    whole, _ = rates(tx, losses)
    first, opt = rates(tx, losses[:10])
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, opt)
    file.seek(0)
    opt = eqx.tree_deserialise_leaves(file, sl.Optimizer(tx, PARAMS))
    second, _ = rates(tx, losses[10:], opt=opt)
    assert [*first, *second] == whole.tolist()


def test_a_training_step_feeds_it():
    tx = sl.sgd(0.0).drive({"learning_rate": Plateau(1.0, 0.5, 1)})
    model, opt = {"w": jnp.ones(2)}, sl.Optimizer(tx, {"w": jnp.ones(2)})
    step = sl.train_step(lambda model: 0 * jnp.sum(model["w"]), donate=False)
    for _ in range(3):
        model, opt, _ = step(model, opt)
    assert float(opt.hyperparams["learning_rate"]) == 0.25


@pytest.mark.parametrize(
    ("tx", "name", "path", "after"),
    [
        (sl.sgd(sl.schedules.linear(9.0, 9.0, 5)), "init_value", "learning_rate", 1.0),
        (sl.ScaleByAdam().mask(sl.where.ndim(1)) | sl.sgd(0.1), "b2", "scale_by_adam.b2", 0.5),
        (sl.adam(0.1).partition({sl.where.ndim(1): sl.sgd(0.1)}), "**.learning_rate", "0.**", 0.5),
    ],
    ids=["a schedule's number", "under a mask", "a glob"],
)
def test_paths_suffixes_and_globs_name_what_is_driven(tx, name, path, after):
    start = 2 * after if after < 1 else 1.0
    start = min(start, 0.9) if name == "b2" else start
    opt = sl.Optimizer(tx.drive({name: Plateau(start, 0.5, 1)}), PARAMS)
    _, opt = opt.step(PARAMS, GRADS, value=1.0)
    _, opt = opt.step(PARAMS, GRADS, value=1.0)
    if name == "init_value":
        # Half a line from the driven 0.5 to 9, at the second of five steps.
        np.testing.assert_allclose(opt.hyperparams[path], 0.5 + 2 / 5 * 8.5, rtol=1e-6)
    elif name == "b2":
        np.testing.assert_allclose(opt.hyperparams[path], 0.45, rtol=1e-6)
    else:
        found = {k: float(v) for k, v in opt.hyperparams.items() if k.endswith("learning_rate")}
        assert list(found.values()) == [0.5, 0.5]


class Thermostat(sl.schedules.AbstractStatefulSchedule):
    """Counts its steps; needs nothing of the context."""

    def init(self):
        return jnp.zeros((), jnp.int32)

    def update(self, state, context):
        return state + 1

    def value(self, state):
        return 1.0 / state.astype(jnp.float32)


def test_a_schedule_of_ones_own_and_exact_hyperparams():
    opt = sl.Optimizer(sl.sgd(1.0).drive({"learning_rate": Thermostat()}), PARAMS)
    for n in (1, 2, 3):
        promised = opt.hyperparams["learning_rate"]
        updates, opt = opt.update(PARAMS, GRADS)
        np.testing.assert_allclose(updates["b"], -1 / n, rtol=1e-6)
        np.testing.assert_allclose(promised, 1 / n, rtol=1e-6)


def test_one_program_for_all_steps_and_numbers():
    traced = 0

    @jax.jit
    def step(opt, loss):
        nonlocal traced
        traced += 1
        return opt.step(PARAMS, GRADS, value=loss)

    for factor, patience in ((0.5, 1), (0.1, 7)):
        tx = sl.adam(0.1).drive({"learning_rate": Plateau(0.1, factor, patience)})
        opt = sl.Optimizer(tx, PARAMS)
        for loss in (1.0, 2.0):
            _, opt = step(opt, loss)
    assert traced == 1


def test_the_numbers_of_a_schedule_are_changed_by_name_without_a_new_program():
    traced = 0

    @jax.jit
    def step(opt):
        nonlocal traced
        traced += 1
        return opt.step(PARAMS, GRADS, value=1.0)

    tx = sl.adam(0.1).drive({"learning_rate": Plateau(1.0, 0.5, 2)}).every_k(1)
    opt = sl.Optimizer(tx, PARAMS)
    _, opt = step(opt)
    opt = opt.with_hyperparams({"every_k.drive.learning_rate.patience": 1, "factor": 0.25})
    _, opt = step(opt)
    assert float(opt.hyperparams["learning_rate"]) == 0.25
    assert float(opt.with_hyperparams(init_value=8.0).hyperparams["learning_rate"]) == 2.0
    with pytest.raises(ValueError, match=r"learning_rate\.factor must be in \(0, 1\), got 2\.0"):
        opt.with_hyperparams(factor=2.0)
    assert traced == 1


def test_a_part_is_shown_with_the_schedule_in_its_place():
    tx = sl.adam(0.1).drive({"learning_rate": Plateau(0.1)})
    link = tx["scale_by_learning_rate"]
    assert repr(link) == "sl.ScaleByLearningRate(sl.schedules.ReduceOnPlateau(0.1))"


class OfTheLoss(sl.schedules.AbstractStatefulSchedule):
    """The loss as the value of a schedule."""

    needs = ("value",)

    def init(self):
        return jnp.zeros(())

    def update(self, state, context):
        return context.value

    def value(self, state):
        return state


def test_a_reader_outside_of_every_k_sees_the_loss_of_the_window():
    tx = sl.sgd(0.1).drive({"learning_rate": OfTheLoss()}).every_k(2)
    opt = sl.Optimizer(tx.schedule_free().record(), PARAMS)
    params = PARAMS
    for loss in (1.0, 3.0):
        params, opt = opt.step(params, GRADS, value=loss)
    assert float(opt.state.inner.max_rate) == 2
    (used,) = (x for path, x in opt.metrics.items() if path.endswith("learning_rate"))
    assert float(used) == 2


DRIVEN = sl.adam(0.1).drive({"learning_rate": Plateau(0.1)})
TAKES = "`.drive` takes stateful schedules, such as `sl.schedules.ReduceOnPlateau(1e-3)`, got "

BAD_INPUTS = [
    (
        lambda: sl.adam(0.1).drive({"lr": Plateau(0.1)}),
        KeyError,
        "'lr' is not known. Candidates: 'scale_by_adam.b1', 'scale_by_adam.b2', "
        "'scale_by_adam.eps', 'scale_by_adam.eps_root', 'scale_by_learning_rate.learning_rate'. "
        "Write learning_rate.",
    ),
    (
        lambda: (sl.Trace(0.9) | sl.Trace(0.5)).drive({"decay": Plateau(0.1)}),
        KeyError,
        "'decay' is ambiguous. Candidates: 'trace.decay', 'trace_2.decay'.",
    ),
    (
        lambda: sl.adam(0.1).drive({"b1": 0.5}),
        TypeError,
        TAKES + "0.5 of type float for 'b1'.",
    ),
    (
        lambda: sl.sgd(0.1).drive({"learning_rate": sl.schedules.constant(0.5)}),
        TypeError,
        TAKES + "sl.schedules.constant(0.5) of type constant for 'learning_rate'. Pass a "
        "stateless schedule as the hyperparameter itself, in place of a number.",
    ),
    (
        lambda: sl.adam(0.1).drive({"b1": Plateau(0.1), "scale_by_adam.b1": Plateau(0.2)}),
        ValueError,
        "'scale_by_adam.b1' would be driven twice: by 'b1' and by 'scale_by_adam.b1'.",
    ),
    (
        lambda: sl.sgd(0.1).drive({"learning_rate": Plateau(0.1)}).drive({"**": Plateau(0.2)}),
        ValueError,
        "'drive.scale_by_learning_rate.learning_rate' is already driven by "
        "sl.schedules.ReduceOnPlateau(0.1), which '**' would override. Drive it once.",
    ),
    (
        lambda: sl.Optimizer(DRIVEN, PARAMS).step(PARAMS, GRADS),
        TypeError,
        "Drive ('drive') needs 'value': pass the loss: `opt.step(model, grads, value=loss)`, or "
        "`sl.Context(value=loss)`. `sl.train_step` passes value, grad and value_fn itself.",
    ),
    (
        lambda: DRIVEN.update(GRADS, DRIVEN.init(PARAMS)),
        TypeError,
        "Drive needs 'value': pass the loss: `opt.step(model, grads, value=loss)`, or "
        "`sl.Context(value=loss)`. `sl.train_step` passes value, grad and value_fn itself.",
    ),
    (
        lambda: sl.Optimizer(DRIVEN, PARAMS).with_hyperparams(learning_rate=0.5),
        ValueError,
        "'drive.scale_by_learning_rate.learning_rate' is driven by "
        "sl.schedules.ReduceOnPlateau(0.1), so a number would have no effect. Change "
        "one of the schedule's own numbers by its name, or bind a transform without `.drive` to "
        "the model with `opt.rebind`.",
    ),
    (
        lambda: Plateau(0.1, factor=1.5),
        ValueError,
        "ReduceOnPlateau.factor must be in (0, 1), got 1.5.",
    ),
    (
        lambda: Plateau(0.1, patience=0),
        ValueError,
        "ReduceOnPlateau.patience must be in [1, inf), got 0.",
    ),
    (
        lambda: Plateau(0.1, accumulation_size=0),
        ValueError,
        "ReduceOnPlateau.accumulation_size must be in [1, inf), got 0.",
    ),
]


@pytest.mark.parametrize(("bad", "error", "message"), BAD_INPUTS)
def test_bad_input_is_refused_in_words(bad, error, message):
    with pytest.raises(error) as caught:
        bad()
    assert caught.value.args[0] == message


@pytest.mark.slow
def test_a_stateful_schedule_in_a_field_is_refused_with_the_remedy():
    field = sl.ScaleByLearningRate.__dataclass_fields__["learning_rate"]
    with pytest.raises(TypeError) as error:
        field.metadata["slalom.check"]("ScaleByLearningRate.learning_rate", Plateau(0.1))
    assert str(error.value) == (
        "ScaleByLearningRate.learning_rate must be a real number, a 0-d array or a schedule, "
        "got sl.schedules.ReduceOnPlateau(0.1). A stateful schedule cannot be passed as a "
        "hyperparameter. Pass a number and drive it: `tx.drive({'learning_rate': schedule})`."
    )


@pytest.mark.parametrize(
    ("link", "field"),
    [(sl.Scale(1.0), "step_size"), (sl.NormalizeByUpdateNorm(1.0), "scale_factor")],
    ids=["scale", "normalize"],
)
def test_a_driven_factor_has_an_unknown_sign_at_binding(link, field):
    tx = (sl.adam(0.1) | link).drive({field: sl.schedules.ReduceOnPlateau(1.0)})
    opt = sl.Optimizer(tx, {"w": jnp.ones(2)})
    assert opt.hyperparams[field] == 1
