"""What a user reads when something is wrong: bad inputs and the whole message of each."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl


class Case(NamedTuple):
    bad: Callable[[], Any]
    error: type[Exception]
    message: str
    unchecked: bool


CASES: dict[str, Case] = {}


def refused(error: type[Exception], message: str, *, unchecked: bool = False):
    """Enters a bad input into the table. `<…>` in a message is what varies from run to run.

    Where `unchecked`, the checks of SLALOM_TYPECHECK=1 would refuse the input first, so the
    message is the one of a process that runs without them, as users do.
    """

    def enter(bad: Callable[[], Any]) -> Callable[[], Any]:
        CASES[bad.__name__] = Case(bad, error, message, unchecked)
        return bad

    return enter


def params() -> Any:
    return {"b": jnp.ones(2), "w": jnp.ones((3, 2))}


def bound(tx: Any = None, **options: Any) -> sl.Optimizer:
    return sl.Optimizer(sl.adam(0.1) if tx is None else tx, params(), **options)


def mlp(depth: int = 1) -> eqx.nn.MLP:
    return eqx.nn.MLP(2, 1, 4, depth, key=jax.random.key(0))


def arrays(model: Any) -> Any:
    return eqx.filter(model, eqx.is_inexact_array)


class ScaleByValue(sl.AbstractTransform):
    needs = ("value",)

    def init(self, params):
        del params

    def update(self, updates, state, params=None, context=None):
        value = self.demand("value", context and context.value)
        return jax.tree.map(lambda u: u * value, updates), state


class ScaleByTemperature(sl.AbstractTransform):
    needs = ("temperature",)

    def init(self, params):
        del params

    def update(self, updates, state, params=None, context=None):
        temperature = context.extra["temperature"]
        return jax.tree.map(lambda u: u * temperature, updates), state


class Count(eqx.Module):
    n: Any


class Forgetful(sl.AbstractTransform):
    """Returns whatever state or updates it is told to."""

    state: Any = eqx.field(static=True, default=None)
    result: Any = eqx.field(static=True, default=None)

    def init(self, params):
        return Count(jnp.zeros((), jnp.int32))

    def update(self, updates, state, params=None, context=None):
        made = updates if self.result is None else self.result(updates)
        return made, state if self.state is None else self.state(state)


# --- gradients --------------------------------------------------------------------------------

DIFFERENTIATE = (
    "Differentiate the same model that you pass, for example with `eqx.filter_grad(loss)(model)`."
)
NOT_BROADCAST = "Shapes must be equal: nothing is broadcast."


@refused(
    ValueError,
    "The gradients have another structure than the model: 'v' is in the gradients and missing in "
    "the model. " + DIFFERENTIATE,
)
def gradients_under_another_name():
    bound().step(params(), {"b": jnp.ones(2), "v": jnp.ones((3, 2))})


@refused(
    ValueError,
    "The gradients have another structure than the model: 'w' is in the model and missing in the "
    "gradients. " + DIFFERENTIATE,
)
def gradients_without_a_leaf():
    bound().step(params(), {"b": jnp.ones(2)})


@refused(
    ValueError,
    "The gradients have another structure than the model: 'layers.2.weight' is in the gradients "
    "and missing in the model. " + DIFFERENTIATE,
)
def gradients_of_a_deeper_model():
    sl.Optimizer(sl.adam(0.1), mlp()).step(mlp(), arrays(mlp(depth=2)))


@refused(
    ValueError,
    "The gradients have another structure than the model: the gradients are of type tuple, the "
    "model of type dict. " + DIFFERENTIATE,
)
def the_loss_beside_the_gradients():
    bound().step(params(), (jnp.ones(()), params()))


@refused(
    ValueError,
    "The gradient at 'b' has shape (5,), but the parameter there has shape (2,). "
    + NOT_BROADCAST
    + " Average over a batch axis before the step.",
)
def a_gradient_of_another_shape():
    bound().step(params(), params() | {"b": jnp.ones(5)})


@refused(
    ValueError,
    "The gradient at 'b' has shape (), but the parameter there has shape (2,). "
    + NOT_BROADCAST
    + " Average over a batch axis before the step.",
)
def a_gradient_that_would_broadcast():
    bound().step(params(), params() | {"b": jnp.ones(())})


@refused(
    ValueError,
    "The gradient at 'b' is None, but the parameter there is trainable. Either it was frozen while "
    "differentiating: then bind with `sl.Optimizer(tx, model, trainable=~sl.where.path('b'))`; or "
    "differentiate it too.",
)
def no_gradient_at_a_trainable_leaf():
    bound().step(params(), params() | {"b": None})


@refused(
    TypeError,
    "The gradient at 'b' must be a floating or complex array, got an array of dtype int32.",
)
def a_gradient_of_integers():
    bound().step(params(), params() | {"b": jnp.arange(2)})


@refused(
    TypeError,
    "The gradient at 'b' is complex64, but the parameter there is float32. Pass its real part.",
)
def a_complex_gradient_of_a_real_parameter():
    bound().step(params(), params() | {"b": jnp.ones(2, jnp.complex64)})


@refused(
    ValueError,
    "`grad` has another structure than the model: 'w' is in the model and missing in `grad`. "
    + DIFFERENTIATE,
)
def another_structure_passed_as_grad():
    bound().step(params(), params(), grad={"b": jnp.ones(2)})


@refused(
    ValueError,
    "The updates have another structure than the model: 'w' is in the model and missing in the "
    "updates.",
)
def updates_of_another_structure():
    sl.apply_updates(params(), {"b": jnp.ones(2)})


@refused(
    ValueError,
    "The update at 'b' has shape (3,), but the parameter there has shape (2,). " + NOT_BROADCAST,
)
def an_update_of_another_shape():
    sl.apply_updates(params(), {"b": jnp.ones(3), "w": None})


# --- the functional core ----------------------------------------------------------------------

PARAMETERS_ARE = (
    "; parameters and gradients are trees of floating or complex arrays. Bind the whole model with "
    "`sl.Optimizer(tx, model)`, which steps over everything else, or pass "
    "`eqx.filter(model, eqx.is_inexact_array)`."
)


@refused(TypeError, "The leaf 'n' is of type int" + PARAMETERS_ARE, unchecked=True)
def init_with_an_int():
    sl.adam(0.1).init({"n": 3, "w": jnp.ones(2)})


@refused(TypeError, "The leaf 'n' is of type int" + PARAMETERS_ARE, unchecked=True)
def init_of_a_stateless_transform_with_an_int():
    sl.sgd(0.1).init({"n": 3, "w": jnp.ones(2)})


@refused(TypeError, "The leaf 'activation' is of type <…>" + PARAMETERS_ARE, unchecked=True)
def init_with_a_whole_model():
    sl.adam(0.1).init(mlp())


@refused(TypeError, "The leaf 'n' is an array of dtype int32" + PARAMETERS_ARE, unchecked=True)
def init_with_integers():
    sl.adam(0.1).init({"n": jnp.arange(3), "w": jnp.ones(2)})


@refused(
    ValueError,
    "The updates have another structure than the state or the parameters that meet them: 'w' is in "
    "what meets them and missing in the updates. Pass gradients, state and parameters of one "
    "model.",
    unchecked=True,
)
def update_without_a_leaf():
    tx = sl.adam(0.1)
    tx.update({"b": jnp.ones(2)}, tx.init(params()), params())


@refused(
    ValueError,
    "The update at 'b' has shape (), but the state or parameter that meets it there has shape "
    "(2,). " + NOT_BROADCAST,
    unchecked=True,
)
def update_of_another_shape():
    tx = sl.adam(0.1)
    tx.update(params() | {"b": jnp.ones(())}, tx.init(params()), params())


@refused(
    TypeError,
    "AddDecayedWeights needs 'params': pass the parameters: `tx.update(grads, state, params)`.",
)
def decay_without_parameters():
    tx = sl.adamw(0.1)
    tx.update(params(), tx.init(params()))


@refused(
    TypeError,
    "ScaleByLearningRate.learning_rate is a schedule and must be told the time: pass "
    "`context=sl.Context(step=n)` with the number of updates made before.",
)
def a_schedule_without_a_clock():
    tx = sl.sgd(sl.schedules.linear(0.0, 1.0, 10))
    tx.update(params(), tx.init(params()))


# --- names ------------------------------------------------------------------------------------


@refused(
    AttributeError,
    "module 'slalom' has no attribute 'clip_by_global_norm'. Did you mean sl.ClipByGlobalNorm?",
)
def a_name_of_optax():
    sl.clip_by_global_norm  # noqa: B018


@refused(
    AttributeError,
    "module 'slalom' has no attribute 'cosine_decay_schedule'. Did you mean "
    "sl.schedules.cosine_decay?",
)
def a_schedule_of_optax():
    sl.cosine_decay_schedule  # noqa: B018


@refused(AttributeError, "module 'slalom' has no attribute 'MultiSteps'. Write tx.every_k(k).")
def a_name_that_has_another_form():
    sl.MultiSteps  # noqa: B018


@refused(
    AttributeError,
    "'Optimizer' object has no attribute 'learning_rate'. It has transform, state, count, <…>. "
    'Numbers are read with `opt.hyperparams["learning_rate"]` and changed with `opt = '
    "opt.with_hyperparams(learning_rate=1e-4)`; the model is not in it.",
)
def a_learning_rate_as_attribute():
    bound().learning_rate  # noqa: B018


@refused(AttributeError, "'jaxlib._jax.ArrayImpl' object has no attribute 'foo'")
def an_attribute_error_inside_of_a_property():
    bound(sl.sgd(lambda n: n.foo)).hyperparams  # noqa: B018


# --- models -----------------------------------------------------------------------------------

NOTHING_TO_TRAIN = (
    "There is no parameter to train: parameters are floating or complex arrays, and the model "
    "holds none"
)


@refused(ValueError, NOTHING_TO_TRAIN + ". It holds: leaves of type int.")
def an_int_as_model():
    sl.Optimizer(sl.adam(0.1), 3)


@refused(ValueError, NOTHING_TO_TRAIN + ". It holds: leaves of type function.")
def a_function_as_model():
    sl.Optimizer(sl.adam(0.1), mlp)


@refused(ValueError, NOTHING_TO_TRAIN + ". It holds: int32 arrays, leaves of type float.")
def a_model_of_integers_and_floats():
    sl.Optimizer(sl.adam(0.1), {"n": jnp.arange(3), "x": 1.0})


@refused(ValueError, NOTHING_TO_TRAIN + ". It holds: no leaf at all.")
def an_empty_model():
    sl.Optimizer(sl.adam(0.1), {})


@refused(ValueError, NOTHING_TO_TRAIN + " that `trainable` selects. It holds: float32 arrays.")
def nothing_is_trainable():
    bound(trainable=sl.where.nothing())


@refused(
    TypeError,
    "The leaf 'w' is a NumPy array of dtype bfloat16, which Equinox does not see as a floating "
    "array: it would get no gradient and never be trained. Pass `jnp.asarray(leaf)` in its place.",
)
def numpy_bfloat16():
    sl.Optimizer(sl.adam(0.1), {"w": np.ones(2, jnp.bfloat16)})


@refused(
    ValueError,
    "This optimizer was bound to a model with other trainable parameters: 'w' is in the model at "
    "binding and missing in the model given now. Bind a new one with `sl.Optimizer(tx, model)`.",
)
def a_model_with_fewer_parameters_than_bound():
    bound().step({"b": jnp.ones(2)}, {"b": jnp.ones(2)})


@refused(
    ValueError,
    "This optimizer was bound to a model with other trainable parameters: 'layers.2.weight' is in "
    "the model given now and missing in the model at binding. Bind a new one with "
    "`sl.Optimizer(tx, model)`.",
)
def a_deeper_model_than_bound():
    sl.Optimizer(sl.adam(0.1), mlp()).step(mlp(depth=2), arrays(mlp(depth=2)))


@refused(
    ValueError,
    "This optimizer was bound to a model with other trainable parameters: '0.out_features' is 8 "
    "in the model given now and 4 in the model at binding. Bind a new one with "
    "`sl.Optimizer(tx, model)`.",
)
def a_wider_model_than_bound():
    narrow, wide = (eqx.nn.MLP(2, 1, n, 1, key=jax.random.key(0)).layers for n in (4, 8))
    sl.Optimizer(sl.adam(0.1), narrow).step(wide, wide)


@refused(
    ValueError,
    "The state 'scale_by_adam.mu' was made for a parameter of shape (2,) at 'b', where there is "
    "one of shape (3,) now. Bind a new optimizer with `sl.Optimizer(tx, model)`.",
)
def a_model_of_other_shapes_than_bound():
    other = params() | {"b": jnp.ones(3)}
    bound().step(other, other)


# --- transforms -------------------------------------------------------------------------------

TAKES_A_TRANSFORM = "An optimizer takes a transform such as `sl.adam(1e-3)`, got "


@refused(TypeError, TAKES_A_TRANSFORM + "0.1.", unchecked=True)
def an_optimizer_of_a_number():
    bound(0.1)


@refused(TypeError, TAKES_A_TRANSFORM + "<…>. Call it first: `adam(...)`.", unchecked=True)
def a_recipe_that_was_not_called():
    bound(sl.adam)


@refused(TypeError, TAKES_A_TRANSFORM + "<…>. Call it first: `ScaleByAdam(...)`.", unchecked=True)
def a_class_that_was_not_called():
    bound(sl.ScaleByAdam)


@refused(
    TypeError,
    TAKES_A_TRANSFORM + "a dict. The transform comes first: `sl.Optimizer(tx, model)`.",
    unchecked=True,
)
def model_and_transform_exchanged():
    sl.Optimizer(params(), sl.adam(0.1))


@refused(TypeError, "Link 1 is no transform: got 0.1 of type float.", unchecked=True)
def a_number_as_link():
    sl.chain(sl.Identity(), 0.1)


@refused(
    TypeError,
    "Link 'rule' is no transform: got <…> of type function. Call it first: `adam(...)`.",
    unchecked=True,
)
def a_recipe_as_link():
    sl.named_chain(clip=sl.ClipByGlobalNorm(1.0), rule=sl.adam)


@refused(
    TypeError,
    "Link 1 is no transform: got <…> of type function. Call it first: `sgd(...)`.",
    unchecked=True,
)
def a_recipe_after_a_transform():
    sl.Clip(1.0) | sl.sgd


@refused(
    TypeError,
    "Link 0 is no transform: got <…> of type <…>. Call it first: `Clip(...)`.",
    unchecked=True,
)
def a_class_before_a_transform():
    sl.Clip | sl.sgd(0.1)


@refused(ValueError, "A chain has at least one link; `sl.Identity()` does nothing.")
def a_chain_of_nothing():
    sl.Chain((), ())


class ReturnsUpdates(sl.AbstractTransform):
    def init(self, params):
        return None

    def update(self, updates, state, params=None, context=None):
        return updates


@refused(
    TypeError,
    "ReturnsUpdates must return a pair, the updates (from `step`, the parameters) and the new "
    "state, got something of type dict.",
)
def updates_returned_without_a_state():
    bound(ReturnsUpdates() | sl.sgd(0.1)).step(params(), params())


@refused(TypeError, "NeedsText.needs must be a tuple of names: ('value',).")
def a_string_as_needs():
    class NeedsText(sl.AbstractTransform):
        needs = "value"


class CountsInPython(sl.AbstractTransform):
    def init(self, params):
        return 0

    def update(self, updates, state, params=None, context=None):
        return updates, state + 1


@refused(
    TypeError,
    "The state at 'counts_in_python' is 0 of type int, which is no array and so stands still, and "
    "`update` made it 1. Let `init` return an array, such as `jnp.zeros((), jnp.int32)` for a "
    "count.",
)
def a_count_that_is_no_array():
    bound(CountsInPython() | sl.sgd(0.1)).step(params(), params())


@refused(
    ValueError,
    "The updates have another structure than the parameters: 'b' is in the parameters and missing "
    "in the updates.",
)
def updates_made_with_a_hole():
    bound(Forgetful(result=lambda u: u | {"b": None})).step(params(), params())


@refused(
    TypeError,
    "Group 'a' of a partition is no transform: got <…> of type function. Call it first: "
    "`adam(...)`.",
    unchecked=True,
)
def a_recipe_as_group():
    sl.partition({"a": sl.adam}, {"b": "a"})


@refused(ValueError, "Two links of this chain are named 'rule'; names must differ.")
def two_links_of_one_name():
    sl.named_chain(rule=sl.Identity()) | sl.named_chain(rule=sl.Identity())


@refused(
    TypeError,
    "Bad has a field 'mask', which is the name of a method of every transform. Rename the field.",
)
def a_field_named_like_a_method():
    class Bad(sl.AbstractTransform):
        mask: int

        def init(self, params):
            del params

        def update(self, updates, state, params=None, context=None):
            return updates, state


@refused(
    KeyError,
    "'clip' is not in this transform. Candidates: 'scale_by_adam', 'scale_by_learning_rate'.",
)
def a_part_that_is_not_there():
    sl.adam(0.1)["clip"]


@refused(KeyError, "Scale is ambiguous. Candidates: 'scale', 'scale_2'.")
def a_part_that_is_there_twice():
    (sl.Scale(1.0) | sl.Scale(2.0))[sl.Scale]


@refused(TypeError, "Scale has no positions; use a name or a class.")
def a_position_without_a_chain():
    sl.Scale(1.0)[0]


RAW = (
    " lets them pass through there, and turns them into descending steps elsewhere. To leave those "
    "parameters alone, write `.only(where)` instead of `.mask(where)`, or in a partition give them "
    "`sl.SetToZero()`. To train them too, mask links further left and let the last one, with the "
    "learning rate, act on all."
)


@refused(ValueError, "Raw gradients would be added to 'b', which would climb: 'masked'" + RAW)
def raw_gradients_out_of_a_mask():
    bound(sl.adam(0.1).mask(sl.where.path("w")))


@refused(ValueError, "Raw gradients would be added to 'b', which would climb: 'masked'" + RAW)
def raw_gradients_out_of_the_last_link():
    bound(sl.ClipByGlobalNorm(1.0) | sl.adam(0.1).mask(sl.where.path("w")))


@refused(
    ValueError, "Raw gradients would be added to 'b', which would climb: 'every_k.masked'" + RAW
)
def raw_gradients_out_of_an_inner_mask():
    bound(sl.adam(0.1).mask(sl.where.path("w")).every_k(2))


MUST_STAY = (
    " It must stay what `init` made: cast the new value, for example with `.astype(old.dtype)`."
)


@refused(
    TypeError,
    "The state at 'forgetful.n' was int32[] and `update` made it float32[]." + MUST_STAY,
)
def a_state_that_changes_dtype():
    tx = Forgetful(state=lambda old: Count(old.n.astype(jnp.float32))) | sl.sgd(0.1)
    bound(tx).step(params(), params())


@refused(
    TypeError,
    "The state at 'forgetful.n' was int32[] and `update` made it int32[1]." + MUST_STAY,
)
def a_state_that_changes_shape():
    tx = Forgetful(state=lambda old: Count(old.n[None])) | sl.sgd(0.1)
    bound(tx).step(params(), params())


@refused(
    TypeError,
    "The state that `update` returned has another structure than the one that `init` made (gone: "
    "['forgetful.n'], new: []). They must be equal, so that a second call does not compile again.",
)
def a_state_that_changes_structure():
    bound(Forgetful(state=lambda old: ()) | sl.sgd(0.1)).step(params(), params())


@refused(
    ValueError,
    "The update at 'b' has shape (), but the state or parameter that meets it there has shape "
    "(2,). " + NOT_BROADCAST,
)
def updates_made_of_another_shape():
    tx = Forgetful(result=lambda updates: jax.tree.map(jnp.sum, updates))
    bound(tx).update(params(), params())


@refused(
    ValueError,
    "The updates have another structure than the state or the parameters that meet them: 'w' is in "
    "what meets them and missing in the updates. Pass gradients, state and parameters of one "
    "model.",
)
def updates_made_of_another_structure():
    bound(Forgetful(result=lambda updates: {"b": updates["b"]})).update(params(), params())


# --- hyperparameters --------------------------------------------------------------------------

REAL = "ScaleByLearningRate.learning_rate must be a real number, a 0-d array or a schedule, got "


@refused(TypeError, "EveryK.mean must be True or False, got 'sum'.", unchecked=True)
def a_word_as_mean():
    sl.adam(0.1).every_k(2, mean="sum")


@refused(TypeError, "ScaleByAdam.mu_dtype must be a floating dtype, got 'int32'.")
def integer_means():
    sl.adam(0.1, mu_dtype=jnp.int32)


@refused(TypeError, "ScaleByAdam.mu_dtype must be a floating dtype, got 'float31'.")
def an_unknown_dtype():
    sl.adam(0.1, mu_dtype="float31")


@refused(
    TypeError,
    "What is read here cannot be written: an optimizer is immutable. For hyperparameters write "
    "`opt = opt.with_hyperparams(learning_rate=1e-4)`.",
)
def a_hyperparameter_assigned():
    bound().hyperparams["learning_rate"] = 0.2


@refused(ValueError, "EveryK.k must be at least 1 mini-step, got 0.")
def every_0():
    sl.adam(0.1).every_k(0)


@refused(TypeError, "EveryK.k must be an int or a schedule, got 2.5 of type float.", unchecked=True)
def every_2_and_a_half():
    sl.adam(0.1).every_k(2.5)


@refused(TypeError, "EveryK.k must be an int or a schedule, got True of type bool.")
def every_true():
    sl.adam(0.1).every_k(True)


@refused(ValueError, "ScaleByAdam.b2 must be in [0, 1), got 1.0.")
def b2_of_1():
    sl.adam(0.1, b2=1.0)


@refused(ValueError, "ScaleByAdam.b2 must be in [0, 1), got -0.1.")
def b2_below_0():
    sl.adam(0.1, b2=-0.1)


@refused(ValueError, "ScaleByAdam.eps must be in [0, inf), got nan.")
def eps_of_nan():
    sl.adam(0.1, eps=float("nan"))


@refused(ValueError, "ScaleByLearningRate.learning_rate must be in (-inf, inf), got nan.")
def a_learning_rate_of_nan():
    sl.sgd(float("nan"))


@refused(ValueError, "ClipByGlobalNorm.max_norm must be in [0, inf], got -1.0.")
def a_negative_max_norm():
    sl.ClipByGlobalNorm(-1)


@refused(ValueError, "ClipByGlobalNorm.max_norm must be in [0, inf], got -1.0.")
def a_negative_max_norm_in_an_array():
    sl.ClipByGlobalNorm(jnp.array(-1.0))


@refused(
    ValueError,
    REAL + "an array of shape (2,). For other values at other parameters use `.partition`; for "
    "several runs, `eqx.filter_vmap`.",
    unchecked=True,
)
def two_learning_rates():
    sl.sgd(jnp.ones(2))


@refused(TypeError, REAL + "True of type bool.")
def a_bool_as_learning_rate():
    sl.sgd(True)


@refused(TypeError, REAL + "'0.1' of type str.", unchecked=True)
def a_string_as_learning_rate():
    sl.sgd("0.1")


@refused(TypeError, REAL + "None of type NoneType.", unchecked=True)
def none_as_learning_rate():
    sl.sgd(None)


@refused(TypeError, REAL + "an array of dtype complex64.", unchecked=True)
def a_complex_learning_rate():
    sl.sgd(jnp.array(1j, jnp.complex64))


@refused(
    TypeError, REAL + "sl.ScaleByLearningRate(0.1) of type ScaleByLearningRate.", unchecked=True
)
def a_transform_as_learning_rate():
    sl.adam(sl.sgd(0.1))


@refused(ValueError, "linear.transition_steps must be in [1, inf), got 0.")
def a_schedule_of_no_steps():
    sl.schedules.linear(0.0, 1.0, 0)


@refused(
    TypeError,
    "The schedule <…> branches in Python on the step, which is traced. Instead of `a if step < n "
    "else b`, write `jnp.where(step < n, a, b)`.",
)
def a_schedule_that_branches():
    bound(sl.sgd(lambda n: 0.1 if n < 3 else 0.2)).step(params(), params())


@refused(
    ValueError,
    "The schedule <…> returned an array of shape (2,); a schedule returns one number for one step.",
)
def a_schedule_of_vectors():
    bound(sl.sgd(lambda n: jnp.ones(2))).step(params(), params())


ASKED_FOR = (
    "The schedule <…> asks for the value of the step, which is traced. Instead of `math` and "
    "`numpy` use `jax.numpy`, instead of `values[step]` write `jnp.array(values)[step]`, and leave "
    "out `int` and `float`."
)


@refused(TypeError, ASKED_FOR)
def a_schedule_of_math():
    bound(sl.sgd(lambda n: 0.1 * math.cos(n))).step(params(), params())


@refused(TypeError, ASKED_FOR)
def a_schedule_out_of_a_list():
    bound(sl.sgd(lambda n: [0.1, 0.2][n])).step(params(), params())


@refused(
    TypeError,
    "The schedule <…> returned None of type NoneType; a schedule returns one number for one step.",
)
def a_schedule_without_a_return():
    bound(sl.adam(0.1).every_k(lambda n: None)).step(params(), params())


@refused(TypeError, "The schedule <…> returned a complex64 number; a schedule returns a real one.")
def a_complex_schedule():
    bound(sl.sgd(lambda n: jnp.complex64(1j))).step(params(), params())


class Pairs(sl.schedules.AbstractSchedule):
    def __call__(self, step):
        return jnp.ones(2)


@refused(
    ValueError,
    "The schedule Pairs() returned an array of shape (2,); a schedule returns one number for one "
    "step.",
    unchecked=True,
)
def a_schedule_class_of_vectors():
    bound(sl.sgd(Pairs())).step(params(), params())


class DrivenPairs(sl.schedules.AbstractStatefulSchedule):
    def init(self):
        return None

    def update(self, state, context):
        return state

    def value(self, state):
        return jnp.ones(2)


@refused(
    ValueError,
    "The schedule DrivenPairs() returned an array of shape (2,); a schedule returns one number for "
    "one step.",
    unchecked=True,
)
def a_driving_schedule_of_vectors():
    bound(sl.sgd(0.1).drive({"learning_rate": DrivenPairs()})).step(params(), params())


@refused(TypeError, "The class <…> is no schedule. Call it first: `linear(...)`.", unchecked=True)
def a_schedule_that_was_not_called():
    sl.adam(sl.schedules.linear)


@refused(
    TypeError,
    "`.drive` takes a mapping from hyperparameters to schedules, such as {'learning_rate': "
    "schedule}, got sl.schedules.ReduceOnPlateau(0.1).",
    unchecked=True,
)
def a_schedule_that_drives_nothing():
    sl.adam(0.1).drive(sl.schedules.ReduceOnPlateau(0.1))


@refused(
    ValueError,
    "ScaleByAdam.b2 is 0.999999999, which float32 can only keep as 1.0. Choose another number, or "
    "a finer dtype.",
)
def b2_that_rounds_to_1():
    bound(sl.adam(0.1, b2=1 - 1e-9))


@refused(
    ValueError,
    "scale_by_adam.b2 is 0.999999999, which float32 can only keep as 1.0. Choose another number, "
    "or a finer dtype.",
)
def a_new_b2_that_rounds_to_1():
    bound().with_hyperparams(b2=1 - 1e-9)


@refused(
    ValueError,
    "ScaleByAdam.eps is 1e-08, which float16 can only keep as 0.0. Choose another number, or a "
    "finer dtype.",
)
def an_eps_that_rounds_to_0():
    bound(hyperparam_dtype=jnp.float16)


@refused(TypeError, "`hyperparam_dtype` must be a floating dtype, got <…>.")
def hyperparameters_of_integers():
    bound(hyperparam_dtype=jnp.int32)


@refused(ValueError, "ScaleByAdam.b2 must be in [0, 1), got 1.5.")
def b2_set_past_its_check():
    bound(eqx.tree_at(lambda tx: tx.b2, sl.ScaleByAdam(), 1.5))


@refused(
    TypeError,
    "linear.init_value must be a real number, a 0-d array or a schedule, got '1' of type str.",
)
def a_number_of_a_schedule_set_past_its_check():
    tx = sl.sgd(sl.schedules.linear(1.0, 0.0, 10))
    bound(eqx.tree_at(lambda tx: tx.learning_rate.init_value, tx, "1"))


@refused(
    TypeError,
    "`with_hyperparams` takes numbers by name, got 0.2: write "
    "`opt.with_hyperparams(learning_rate=1e-4)`.",
    unchecked=True,
)
def a_new_value_without_a_name():
    bound().with_hyperparams(0.2)


@refused(
    TypeError,
    "A part is named by its path or its class, in a chain also by its position, got 3 of type int.",
    unchecked=True,
)
def a_state_by_position():
    bound().state_of(3)


ADAM_KNOWS = (
    "'scale_by_adam.b1', 'scale_by_adam.b2', 'scale_by_adam.eps', 'scale_by_adam.eps_root', "
    "'scale_by_learning_rate.learning_rate'."
)


@refused(KeyError, "'lr' is not known. Candidates: " + ADAM_KNOWS)
def an_unknown_hyperparameter():
    bound().with_hyperparams(lr=0.1)


@refused(KeyError, "'lr' is not known. Candidates: " + ADAM_KNOWS)
def an_unknown_hyperparameter_read():
    bound().hyperparams["lr"]


@refused(KeyError, "'**.lr' matches no hyperparameter. Known: " + ADAM_KNOWS)
def a_glob_over_no_hyperparameter():
    bound().with_hyperparams({"**.lr": 0.1})


@refused(KeyError, "'b1' is ambiguous. Candidates: 'scale_by_lion.b1', 'scale_by_adam.b1'.")
def an_ambiguous_hyperparameter():
    bound(sl.ScaleByLion() | sl.adam(0.1)).with_hyperparams(b1=0.1)


@refused(
    ValueError,
    "'scale_by_learning_rate.learning_rate' is the schedule <…>. To "
    "put the number 0.1 in its place, pass `replace_schedules=True`; the next step recompiles, "
    "once. To change one of its numbers, name it: "
    "'scale_by_learning_rate.learning_rate.<field>'.",
)
def a_number_in_place_of_a_schedule():
    bound(sl.adam(sl.schedules.linear(0.0, 1.0, 10))).with_hyperparams(learning_rate=0.1)


@refused(ValueError, "scale_by_adam.b2 must be in [0, 1), got 1.5.")
def a_new_value_out_of_range():
    bound().with_hyperparams(b2=1.5)


@refused(
    TypeError,
    "scale_by_learning_rate.learning_rate must be a real number, a 0-d array or a schedule, got "
    "'0.1' of type str.",
)
def a_string_as_new_value():
    bound().with_hyperparams(learning_rate="0.1")


# --- masks and labels -------------------------------------------------------------------------


def test_labels_that_are_one_name_in_paths_are_refused():
    with pytest.raises(ValueError, match="have the name '1' in paths: their labels are 1, '1'"):
        sl.partition({1: sl.sgd(0.1), "1": sl.sgd(0.2)}, {"w": 1, "b": "1"})


GLOBS = (
    " matches no parameter. The whole path must match, `*` is one segment and `**` any number of "
    "them. Paths here: "
)


@refused(
    ValueError,
    "sl.where.path('layer.*.weight')" + GLOBS + "'layers.0.weight', 'layers.0.bias', "
    "'layers.1.weight', 'layers.1.bias'.",
)
def a_glob_that_matches_nothing():
    sl.Optimizer(sl.adamw(0.1, decay_where=sl.where.path("layer.*.weight")), mlp())


@refused(ValueError, "sl.where.path('bias')" + GLOBS + "'b', 'w'.")
def a_glob_of_a_partition_that_matches_nothing():
    bound(sl.adam(0.1).partition({sl.where.path("bias"): sl.sgd(0.1)}))


@refused(ValueError, "sl.where.path('layers.**')" + GLOBS + "'b', 'w'.")
def a_glob_of_trainable_that_matches_nothing():
    bound(trainable=~sl.where.path("layers.**"))


@refused(
    ValueError,
    "sl.where.regex('^layers') is found in no parameter's path. Paths here: 'b', 'w'.",
)
def a_regex_that_matches_nothing():
    bound(sl.adam(0.1).only(sl.where.regex("^layers")))


@refused(
    ValueError,
    "The parameter 'w' has the label 'c', for which there is no transform. Labels with a "
    "transform: 'a', 'd'.",
)
def a_label_without_a_transform():
    bound(sl.partition({"a": sl.adam(0.1), "d": sl.sgd(0.1)}, {"b": "a", "w": "c"}))


@refused(
    ValueError,
    "The parameter 'w' has no label. Give every leaf one, for example with "
    "`sl.where.everything()` as the last case.",
)
def a_leaf_without_a_label():
    bound(sl.partition({"a": sl.adam(0.1)}, {sl.where.path("b"): "a"}))


SEVERAL = " To select by several, join selectors: `sl.where.path(...) | sl.where.path(...)`."


@refused(TypeError, "sl.where.path takes one glob, got ['b', 'w']." + SEVERAL, unchecked=True)
def a_list_of_globs():
    sl.where.path(["b", "w"])


@refused(
    TypeError,
    "A selector is neither true nor false. Join selectors with `&`, `|` and `~` instead of `and`, "
    "`or` and `not`.",
)
def selectors_joined_by_and():
    sl.where.path("b") and sl.where.path("w")


@refused(TypeError, "None is no selector. Write `sl.where.everything()`, or `.nothing()`.")
def none_as_selector():
    sl.adam(0.1).only(None)


@refused(TypeError, "A string is no selector, got 'w'. Write `sl.where.path('w')`.")
def a_string_beside_a_selector_as_case():
    sl.partition({1: sl.adam(0.1)}, {sl.where.path("b"): 1, "w": 1})


@refused(
    TypeError,
    "`.partition` takes a mapping from selectors to transforms, got sl.where.path('w') of type "
    "_Path.",
    unchecked=True,
)
def a_partition_by_a_selector_alone():
    sl.adam(0.1).partition(sl.where.path("w"), sl.sgd(0.1))


@refused(
    ValueError,
    "`names` must give a name to each of the 1 groups, all different and none of them 'rest', got "
    "('a', 'b').",
)
def names_for_other_groups():
    sl.adam(0.1).partition({sl.where.path("b"): sl.sgd(0.1)}, names=("a", "b"))


@refused(TypeError, "A mask must hold bools, got 1 of type int at 'b' from {'b': 1, 'w': True}.")
def a_mask_of_ints():
    bound(sl.adam(0.1).only({"b": 1, "w": True}))


@refused(TypeError, "A mask must hold bools, got 1 of type int at 'b' from sl.where.leaf(<…>).")
def a_leaf_function_of_ints():
    bound(sl.adam(0.1).only(sl.where.leaf(lambda path, leaf: len(leaf.shape))))


NO_SELECTOR = "A string is no selector, got 'w'. Write `sl.where.path('w')`."


@refused(TypeError, NO_SELECTOR)
def a_string_as_selector():
    sl.adamw(0.1, decay_where="w")


@refused(TypeError, NO_SELECTOR)
def a_string_as_case():
    sl.adam(0.1).partition({"w": sl.sgd(0.1)})


NO_PREFIX = "The mask or label tree is neither a tree like the parameters nor a prefix of one: "


@refused(ValueError, NO_PREFIX + "'v' is in the mask and missing in the parameters.")
def a_mask_of_another_structure():
    bound(sl.adam(0.1).only({"b": True, "v": True}))


@refused(ValueError, NO_PREFIX + "'w' is in the parameters and missing in the mask.")
def a_mask_function_of_another_structure():
    bound(sl.adam(0.1).only(lambda params: {"b": True}))


PYTHON_VALUE = (
    " of dtype bool. What is selected must be known before anything is computed: decide by path, "
    "shape or dtype, for example `sl.where.ndim(min=2)`."
)


@refused(TypeError, "A mask or label must be a Python value, got an array" + PYTHON_VALUE)
def a_mask_of_arrays():
    sl.adam(0.1).only({"b": jnp.array(True), "w": True})


@refused(TypeError, "A mask or label must be a Python value, got a traced array" + PYTHON_VALUE)
def a_traced_mask():
    jax.jit(lambda flag: sl.adam(0.1).only({"b": flag, "w": True}))(True)


ONLY_SHAPES = (
    " It sees shapes and dtypes (`jax.ShapeDtypeStruct` leaves), never values: a mask or label "
    "that depended on values could change between two steps."
)


@refused(
    TypeError,
    "The function <…> failed on the parameter tree: '>' not supported between instances of "
    "'ShapeDtypeStruct' and 'int'." + ONLY_SHAPES,
)
def a_mask_of_values_compared():
    bound(sl.adam(0.1).only(lambda params: jax.tree.map(lambda x: bool(jnp.all(x > 0)), params)))


@refused(
    TypeError,
    "The function <…> failed on the parameter tree: 'ShapeDtypeStruct' object has no attribute "
    "'sum'." + ONLY_SHAPES,
)
def a_mask_of_values_summed():
    bound(sl.adam(0.1).only(lambda params: jax.tree.map(lambda x: bool(x.sum() > 0), params)))


@refused(
    TypeError,
    "The function <…> failed at 'b': '>' not supported between instances of 'ShapeDtypeStruct' and "
    "'int'." + ONLY_SHAPES,
)
def a_leaf_function_of_values():
    bound(sl.adam(0.1).only(sl.where.leaf(lambda path, leaf: bool(jnp.all(leaf > 0)))))


# --- keywords of a step -----------------------------------------------------------------------

PASS_THE_LOSS = (
    " needs 'value': pass the loss: `opt.step(model, grads, value=loss)`, or "
    "`sl.Context(value=loss)`. `sl.train_step` passes value, grad and value_fn itself."
)
WELCOME = "Always welcome are value, grad, value_fn, key, weight, per_param; "


@refused(TypeError, "ScaleByValue ('every_k.scale_by_value')" + PASS_THE_LOSS)
def no_value():
    bound((ScaleByValue() | sl.sgd(0.1)).every_k(2)).step(params(), params())


@refused(TypeError, "ScaleByValue" + PASS_THE_LOSS)
def no_value_in_the_functional_core():
    tx = ScaleByValue() | sl.sgd(0.1)
    tx.update(params(), tx.init(params()), params(), sl.Context(step=0))


@refused(
    TypeError,
    "ScaleByTemperature ('scale_by_temperature') needs 'temperature': pass it: "
    "`opt.step(model, grads, temperature=...)`.",
)
def no_value_for_a_declared_keyword():
    bound(ScaleByTemperature() | sl.sgd(0.1)).step(params(), params())


@refused(
    TypeError,
    "No transform here declares 'temprature'. "
    + WELCOME
    + "declared by these transforms: nothing else.",
)
def an_undeclared_keyword():
    bound().step(params(), params(), temprature=1.0)


@refused(
    TypeError,
    "No transform here declares 'temprature'. "
    + WELCOME
    + "declared by these transforms: temperature.",
)
def a_declared_keyword_misspelt():
    tx = ScaleByTemperature() | sl.sgd(0.1)
    bound(tx).step(params(), params(), temprature=1.0, temperature=1.0)


@refused(ValueError, "`value` must be a scalar, got an array of shape (2,).")
def a_vector_as_value():
    bound().step(params(), params(), value=jnp.ones(2))


@refused(TypeError, "`value` must be a scalar, got '2' of type str.")
def a_string_as_value():
    bound().step(params(), params(), value="2")


@refused(ValueError, "`weight` must be a scalar, got an array of shape (2,).")
def a_vector_as_weight():
    bound().step(params(), params(), weight=jnp.ones(2))


@refused(ValueError, "`weight` must be at least 0, got -1.")
def a_negative_weight():
    bound().step(params(), params(), weight=-1)


@refused(TypeError, "`value` must be real, got a scalar of dtype complex64.")
def a_complex_value():
    bound().step(params(), params(), value=jnp.complex64(1))


@refused(TypeError, "`key` must be a PRNG key, such as `jax.random.key(0)`, got 3.")
def an_int_as_key():
    bound().step(params(), params(), key=3)


@refused(
    TypeError,
    "`per_param` must be a dict of trees like the parameters, by name, got a list.",
    unchecked=True,
)
def a_list_as_per_param():
    bound().step(params(), params(), per_param=[params()])


@refused(
    TypeError, "`value_fn` must be the loss as a function of the model, got 3.0.", unchecked=True
)
def a_number_as_value_fn():
    bound().step(params(), params(), value_fn=3.0)


@refused(
    ValueError,
    "This optimizer is of 3 runs, since it was made under `vmap`. Use it under one too: "
    "`eqx.filter_vmap(lambda opt, model, ...: opt.step(model, grads))`.",
)
def several_runs_stepped_as_one():
    # The learning rates would be broadcast along an axis of the parameters.
    models = {"w": jnp.ones((3, 2, 3))}
    opt = eqx.filter_vmap(lambda model: sl.Optimizer(sl.sgd(0.1), model))(models)
    opt.step(models, models)


# --- the training step ------------------------------------------------------------------------

HAS_AUX = (
    " To return something beside the loss, write `sl.train_step(loss_fn, has_aux=True)` and return "
    "a pair (loss, aux)."
)
PAIR = "With `has_aux=True` the loss must return a pair (loss, aux), got "
NO_OPTIMIZER = "A training step is called as `step(model, opt, *args)` with an `sl.Optimizer`, got "
DONATED = """This model or optimizer was donated: an earlier call of the training step took its \
buffers for its own result, so it can no longer be read (model.b, model.w<…>). Go on with what \
the step returned:
    model, opt, loss = step(model, opt, ...)
or keep what you pass, at the cost of a copy in memory:
    step = sl.train_step(loss_fn, donate=False)"""


def total(model: Any) -> jax.Array:
    return jnp.sum(model["b"]) + jnp.sum(model["w"])


def train(loss_fn: Any, **options: Any) -> Any:
    return sl.train_step(loss_fn, **options)(params(), bound())


@refused(
    ValueError,
    "The loss must be a scalar, got an array of shape (2,). Average it over the batch, for example "
    "with `jnp.mean`.",
)
def a_loss_that_is_a_vector():
    train(lambda model: model["b"])


@refused(TypeError, "The loss returned a tuple of 2." + HAS_AUX)
def a_loss_that_is_a_tuple():
    train(lambda model: (total(model), 1))


@refused(TypeError, "The loss returned a dict." + HAS_AUX)
def a_loss_that_is_a_dict():
    train(lambda model: {"loss": total(model)})


@refused(TypeError, "The loss returned None. Does the function end with `return`?")
def a_loss_that_is_none():
    train(lambda model: None)


@refused(TypeError, "The loss must be a real floating number, got dtype complex64.")
def a_complex_loss():
    train(lambda model: total(model).astype(jnp.complex64))


@refused(TypeError, "The loss must be a real floating number, got dtype int32.")
def an_integer_loss():
    train(lambda model: 3)


@refused(TypeError, PAIR + "an array of shape ().")
def no_aux():
    train(total, has_aux=True)


@refused(TypeError, PAIR + "a tuple of 3.")
def too_much_aux():
    train(lambda model: (total(model), 1, 2), has_aux=True)


@refused(TypeError, "train_step takes a loss function, got 3.", unchecked=True)
def a_loss_that_is_no_function():
    sl.train_step(3)


@refused(TypeError, NO_OPTIMIZER + "dict in its place.", unchecked=True)
def model_and_optimizer_exchanged():
    sl.train_step(total)(bound(), params())


@refused(
    TypeError,
    "The leaf 'args.0' of type set is no array, so it is static and must be hashable, which it is "
    "not. Wrap it in an array, or mark the field that holds it as static.",
)
def an_argument_that_cannot_be_hashed():
    sl.train_step(lambda model, names: total(model))(params(), bound(), {"a"})


@refused(ValueError, DONATED)
def a_donated_model_trained_again():
    model = params()
    step = sl.train_step(total)
    _, opt, _ = step(model, sl.Optimizer(sl.adam(0.1), model))
    step(model, opt)


@refused(ValueError, DONATED)
def a_donated_model_stepped_by_hand():
    model, grads = params(), params()
    opt = sl.Optimizer(sl.adam(0.1), model)
    sl.train_step(total)(model, opt)
    opt.step(model, grads)


# --- the table, asserted ----------------------------------------------------------------------


def pattern(message: str) -> str:
    return "(?s:.*?)".join(map(re.escape, message.split("<…>")))


def text(error: Exception) -> str:
    # `str` of a KeyError is the repr of its message.
    return error.args[0] if isinstance(error, KeyError) else str(error)


def heard(name: str) -> tuple[str, str]:
    """The class and message of the error that a bad input gives."""
    try:
        CASES[name].bad()
    except Exception as error:
        return type(error).__name__, text(error)
    return "no error", ""


def assert_refused(name: str, error: str, message: str) -> None:
    assert error == CASES[name].error.__name__, message
    assert re.fullmatch(pattern(CASES[name].message), message), message


@pytest.fixture(scope="module")
def heard_without_checks() -> dict[str, tuple[str, str]]:
    command = [sys.executable, __file__]
    environment = os.environ | {"SLALOM_TYPECHECK": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.unchecked])
def test_message(name):
    assert_refused(name, *heard(name))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.unchecked])
def test_message_without_type_checks(name, heard_without_checks):
    assert_refused(name, *heard_without_checks[name])


# --- when an error comes ----------------------------------------------------------------------

BAD_STEPS = {
    "structure": (gradients_without_a_leaf, {"b": jnp.ones(2)}, {}),
    "shape": (a_gradient_that_would_broadcast, {"b": jnp.ones(()), "w": jnp.ones((3, 2))}, {}),
    "hole": (no_gradient_at_a_trainable_leaf, {"b": None, "w": jnp.ones((3, 2))}, {}),
    "keyword": (an_undeclared_keyword, params(), {"temprature": 1.0}),
    "value": (a_vector_as_value, params(), {"value": jnp.ones(2)}),
}


@pytest.mark.parametrize("bad", BAD_STEPS)
@pytest.mark.parametrize("how", ["eval_shape", "filter_jit", "jit"])
def test_a_bad_step_is_refused_while_tracing(bad, how):
    # Under `eval_shape` nothing can be computed, so the error came before.
    named, grads, known = BAD_STEPS[bad]
    case = CASES[named.__name__]
    opt = bound()
    transform = {
        "eval_shape": lambda f: lambda *args: jax.eval_shape(f, *args),
        "filter_jit": eqx.filter_jit,
        "jit": jax.jit,
    }[how]
    step = transform(lambda model, grads, opt: opt.step(model, grads, **known))
    with pytest.raises(case.error, match=pattern(case.message)):
        step(params(), grads, opt)


def test_a_refused_training_step_donates_nothing():
    model = params()
    opt = sl.Optimizer(sl.adam(0.1), model)
    with pytest.raises(ValueError, match="must be a scalar"):
        sl.train_step(lambda model: model["b"])(model, opt)
    model, opt, loss = sl.train_step(total)(model, opt)
    assert loss == 8
    assert opt.count == 1


def test_a_refused_step_leaves_the_optimizer_as_it_was():
    model, opt = params(), bound()
    with pytest.raises(ValueError, match="nothing is broadcast"):
        opt.step(model, params() | {"b": jnp.ones(5)})
    _, opt = opt.step(model, params())
    assert opt.count == 1


def test_two_learning_rates_are_warned_of():
    with pytest.warns(UserWarning, match="together they climb") as caught:
        bound((sl.adam(0.1) | sl.sgd(0.1)).every_k(2))
    assert str(caught[0].message).startswith(
        "'every_k.scale_by_learning_rate' and 'every_k.scale_by_learning_rate_2' both turn updates "
    )


def test_learning_rates_of_different_leaves_and_a_turned_sign_are_no_mistake():
    rate, w = sl.ScaleByLearningRate(0.1), sl.where.path("w")
    bound(rate.mask(w) | rate.mask(~w))
    bound(sl.Scale(-1.0) | sl.adam(0.1))


def test_traced_values_are_not_validated():
    @jax.jit
    def step(b2):
        return sl.Optimizer(sl.adam(0.1, b2=b2), params()).hyperparams["b2"]

    assert step(1.5) == 1.5


def test_a_donated_optimizer_can_be_printed():
    model = params()
    opt = sl.Optimizer(sl.adam(0.1), model)
    sl.train_step(total)(model, opt)
    assert "sl.ScaleByAdam()" in repr(opt)


if __name__ == "__main__":
    print(json.dumps({name: heard(name) for name, case in CASES.items() if case.unchecked}))
