"""Numbers and schedules that are none."""

import math

import equinox as eqx
import jax.numpy as jnp

import slalom as sl

from ._table import bound, params, refused

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
    "This mapping is read-only, since an optimizer is immutable. To change hyperparameters, write "
    "`opt = opt.with_hyperparams(learning_rate=1e-4)`, or with Optax `state = "
    "sl.interop.with_hyperparams(state, learning_rate=1e-4)`.",
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
    REAL + "an array of shape (2,). To use different values for different parameters, use "
    "`.partition`. For several runs, use `eqx.filter_vmap`.",
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
    "The schedule <…> needs the value of the step, which is traced. Instead of `math` and "
    "`numpy`, use `jax.numpy`. Instead of `values[step]`, write `jnp.array(values)[step]`. Do not "
    "call `int` or `float` on the step."
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


@refused(
    TypeError, "The class <…> is not a schedule. Call it first: `linear(...)`.", unchecked=True
)
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
    "ScaleByAdam.b2 is 0.999999999, which float32 can only keep as 1.0. Choose another number or "
    "a dtype with more precision.",
)
def b2_that_rounds_to_1():
    bound(sl.adam(0.1, b2=1 - 1e-9))


@refused(
    ValueError,
    "scale_by_adam.b2 is 0.999999999, which float32 can only keep as 1.0. Choose another number "
    "or a dtype with more precision.",
)
def a_new_b2_that_rounds_to_1():
    bound().with_hyperparams(b2=1 - 1e-9)


@refused(
    ValueError,
    "Scale.step_size is 1e-38, which float32 can only keep as 0.0. Choose another number or a "
    "dtype with more precision.",
)
def a_number_that_processors_treat_as_zero():
    bound(sl.Scale(1e-38))


@refused(
    ValueError,
    "ScaleByAdam.eps is 1e-08, which float16 can only keep as 0.0. Choose another number or a "
    "dtype with more precision.",
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
    "`with_hyperparams` takes a mapping from names to values, got 0.2. Write "
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


@refused(KeyError, "'lr' is not known. Candidates: " + ADAM_KNOWS + " Write learning_rate.")
def an_unknown_hyperparameter():
    bound().with_hyperparams(lr=0.1)


@refused(KeyError, "'lr' is not known. Candidates: " + ADAM_KNOWS + " Write learning_rate.")
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
    "'scale_by_learning_rate.learning_rate' is the schedule <…>. To replace it by the number 0.1, "
    "pass `replace_schedules=True`; the next step then recompiles once. To change one of its "
    "numbers, use 'scale_by_learning_rate.learning_rate.<field>'.",
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
