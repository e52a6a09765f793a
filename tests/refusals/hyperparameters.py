"""Numbers and schedules that are none."""

import math

import equinox as eqx
import jax.numpy as jnp

import slalom as sl

from ._table import bound, params, refused

REAL = "a real number, a 0-d array or a schedule"
ONE = "one number for one step"
PRECISION = "another number or a dtype with more precision"
IN_JAX = "`jax.numpy` … `jnp.array(values)[step]` … `int` or `float` on the step"
ADAM_KNOWS = (
    "'scale_by_adam.b1', 'scale_by_adam.b2', 'scale_by_adam.eps', 'scale_by_adam.eps_root', "
    "'scale_by_learning_rate.learning_rate'."
)


@refused(
    TypeError,
    "A path is a string such as 'learning_rate', got sl.where.path('w') of type _Path",
    ADAM_KNOWS,
    unchecked=True,
)
def a_selector_as_the_name_of_a_hyperparameter():
    bound().with_hyperparams({sl.where.path("w"): 0.1})


@refused(TypeError, "EveryK.mean … got 'sum'", "True or False", unchecked=True)
def a_word_as_mean():
    sl.adam(0.1).every_k(2, mean="sum")


@refused(TypeError, "ScaleByAdam.mu_dtype … got 'int32'", "a floating dtype")
def integer_means():
    sl.adam(0.1, mu_dtype=jnp.int32)


@refused(TypeError, "ScaleByAdam.mu_dtype … got 'float31'", "a floating dtype")
def an_unknown_dtype():
    sl.adam(0.1, mu_dtype="float31")


@refused(
    TypeError,
    "This mapping is read-only",
    "`opt = opt.with_hyperparams(learning_rate=1e-4)` … `state = "
    "sl.interop.with_hyperparams(state, learning_rate=1e-4)`",
)
def a_hyperparameter_assigned():
    bound().hyperparams["learning_rate"] = 0.2


@refused(ValueError, "EveryK.k … got 0", "at least 1 mini-step")
def every_0():
    sl.adam(0.1).every_k(0)


@refused(TypeError, "EveryK.k … got 2.5 of type float", "an int or a schedule", unchecked=True)
def every_2_and_a_half():
    sl.adam(0.1).every_k(2.5)


@refused(TypeError, "EveryK.k … got True of type bool", "an int or a schedule")
def every_true():
    sl.adam(0.1).every_k(True)


@refused(ValueError, "ScaleByAdam.b2 … got 1.0", "in [0, 1)")
def b2_of_1():
    sl.adam(0.1, b2=1.0)


@refused(ValueError, "ScaleByAdam.b2 … got -0.1", "in [0, 1)")
def b2_below_0():
    sl.adam(0.1, b2=-0.1)


@refused(ValueError, "ScaleByAdam.eps … got nan", "in [0, inf)")
def eps_of_nan():
    sl.adam(0.1, eps=float("nan"))


@refused(ValueError, "ScaleByLearningRate.learning_rate … got nan", "in (-inf, inf)")
def a_learning_rate_of_nan():
    sl.sgd(float("nan"))


@refused(ValueError, "ClipByGlobalNorm.max_norm … got -1.0", "in [0, inf]")
def a_negative_max_norm():
    sl.ClipByGlobalNorm(-1)


@refused(ValueError, "ClipByGlobalNorm.max_norm … got -1.0", "in [0, inf]")
def a_negative_max_norm_in_an_array():
    sl.ClipByGlobalNorm(jnp.array(-1.0))


@refused(
    ValueError,
    "ScaleByLearningRate.learning_rate … got an array of shape (2,)",
    "`.partition` … `eqx.filter_vmap`",
    unchecked=True,
)
def two_learning_rates():
    sl.sgd(jnp.ones(2))


@refused(TypeError, "ScaleByLearningRate.learning_rate … got True of type bool", REAL)
def a_bool_as_learning_rate():
    sl.sgd(True)


@refused(
    TypeError, "ScaleByLearningRate.learning_rate … got '0.1' of type str", REAL, unchecked=True
)
def a_string_as_learning_rate():
    sl.sgd("0.1")


@refused(
    TypeError, "ScaleByLearningRate.learning_rate … got None of type NoneType", REAL, unchecked=True
)
def none_as_learning_rate():
    sl.sgd(None)


@refused(
    TypeError,
    "ScaleByLearningRate.learning_rate … got an array of dtype complex64",
    REAL,
    unchecked=True,
)
def a_complex_learning_rate():
    sl.sgd(jnp.array(1j, jnp.complex64))


@refused(
    TypeError,
    "ScaleByLearningRate.learning_rate … got sl.ScaleByLearningRate(0.1) of type "
    "ScaleByLearningRate",
    REAL,
    unchecked=True,
)
def a_transform_as_learning_rate():
    sl.adam(sl.sgd(0.1))


@refused(ValueError, "linear.transition_steps … got 0", "in [1, inf)")
def a_schedule_of_no_steps():
    sl.schedules.linear(0.0, 1.0, 0)


@refused(TypeError, "The schedule … branches", "`jnp.where(step < n, a, b)`")
def a_schedule_that_branches():
    bound(sl.sgd(lambda n: 0.1 if n < 3 else 0.2)).step(params(), params())


@refused(ValueError, "The schedule … returned an array of shape (2,)", ONE)
def a_schedule_of_vectors():
    bound(sl.sgd(lambda n: jnp.ones(2))).step(params(), params())


@refused(TypeError, "The schedule … needs the value of the step", IN_JAX)
def a_schedule_of_math():
    bound(sl.sgd(lambda n: 0.1 * math.cos(n))).step(params(), params())


@refused(TypeError, "The schedule … needs the value of the step", IN_JAX)
def a_schedule_out_of_a_list():
    bound(sl.sgd(lambda n: [0.1, 0.2][n])).step(params(), params())


@refused(TypeError, "The schedule … returned None", ONE)
def a_schedule_without_a_return():
    bound(sl.adam(0.1).every_k(lambda n: None)).step(params(), params())


@refused(TypeError, "The schedule … returned a complex64 number", "a real one")
def a_complex_schedule():
    bound(sl.sgd(lambda n: jnp.complex64(1j))).step(params(), params())


class Pairs(sl.schedules.AbstractSchedule):
    def __call__(self, step):
        return jnp.ones(2)


@refused(ValueError, "Pairs() returned an array of shape (2,)", ONE, unchecked=True)
def a_schedule_class_of_vectors():
    bound(sl.sgd(Pairs())).step(params(), params())


class DrivenPairs(sl.schedules.AbstractStatefulSchedule):
    def init(self):
        return None

    def update(self, state, context):
        return state

    def value(self, state):
        return jnp.ones(2)


@refused(ValueError, "DrivenPairs() returned an array of shape (2,)", ONE, unchecked=True)
def a_driving_schedule_of_vectors():
    bound(sl.sgd(0.1).drive({"learning_rate": DrivenPairs()})).step(params(), params())


@refused(
    TypeError,
    "The class <class 'slalom.schedules.basic.linear'> is not a schedule",
    "`linear(...)`",
    unchecked=True,
)
def a_schedule_that_was_not_called():
    sl.adam(sl.schedules.linear)


@refused(
    TypeError,
    "`.drive` … got sl.schedules.ReduceOnPlateau(0.1)",
    "{'learning_rate': schedule}",
    unchecked=True,
)
def a_schedule_that_drives_nothing():
    sl.adam(0.1).drive(sl.schedules.ReduceOnPlateau(0.1))


@refused(ValueError, "ScaleByAdam.b2 is 0.999999999 … float32 … 1.0", PRECISION)
def b2_that_rounds_to_1():
    bound(sl.adam(0.1, b2=1 - 1e-9))


@refused(ValueError, "scale_by_adam.b2 is 0.999999999 … float32 … 1.0", PRECISION)
def a_new_b2_that_rounds_to_1():
    bound().with_hyperparams(b2=1 - 1e-9)


@refused(ValueError, "Scale.step_size is 1e-38 … float32 … 0.0", PRECISION)
def a_number_that_processors_treat_as_zero():
    bound(sl.Scale(1e-38))


@refused(ValueError, "ScaleByAdam.eps is 1e-08 … float16 … 0.0", PRECISION)
def an_eps_that_rounds_to_0():
    bound(hyperparam_dtype=jnp.float16)


@refused(TypeError, "`hyperparam_dtype` … got … int32", "a floating dtype")
def hyperparameters_of_integers():
    bound(hyperparam_dtype=jnp.int32)


@refused(ValueError, "ScaleByAdam.b2 … got 1.5", "in [0, 1)")
def b2_set_past_its_check():
    bound(eqx.tree_at(lambda tx: tx.b2, sl.ScaleByAdam(), 1.5))


@refused(TypeError, "linear.init_value … got '1' of type str", REAL)
def a_number_of_a_schedule_set_past_its_check():
    tx = sl.sgd(sl.schedules.linear(1.0, 0.0, 10))
    bound(eqx.tree_at(lambda tx: tx.learning_rate.init_value, tx, "1"))


@refused(
    TypeError,
    "`with_hyperparams` … got 0.2",
    "`opt.with_hyperparams(learning_rate=1e-4)`",
    unchecked=True,
)
def a_new_value_without_a_name():
    bound().with_hyperparams(0.2)


@refused(
    TypeError,
    "got 3 of type int",
    "by its path or its class, in a chain also by its position",
    unchecked=True,
)
def a_state_by_position():
    bound().state_of(3)


@refused(KeyError, "'lr' is not known", ADAM_KNOWS + " … Write learning_rate")
def an_unknown_hyperparameter():
    bound().with_hyperparams(lr=0.1)


@refused(KeyError, "'lr' is not known", ADAM_KNOWS + " … Write learning_rate")
def an_unknown_hyperparameter_read():
    bound().hyperparams["lr"]


@refused(KeyError, "'**.lr' matches no hyperparameter", ADAM_KNOWS)
def a_glob_over_no_hyperparameter():
    bound().with_hyperparams({"**.lr": 0.1})


@refused(KeyError, "'b1' is ambiguous", "'scale_by_lion.b1', 'scale_by_adam.b1'")
def an_ambiguous_hyperparameter():
    bound(sl.ScaleByLion() | sl.adam(0.1)).with_hyperparams(b1=0.1)


@refused(
    ValueError,
    "'scale_by_learning_rate.learning_rate' is the schedule … the number 0.1",
    "`replace_schedules=True` … recompiles … 'scale_by_learning_rate.learning_rate.<field>'",
)
def a_number_in_place_of_a_schedule():
    bound(sl.adam(sl.schedules.linear(0.0, 1.0, 10))).with_hyperparams(learning_rate=0.1)


@refused(
    TypeError,
    "ScaleByDion.rank_fraction must be a float, got '1/4' of type str.",
    obvious="pass a float",
)
def a_share_as_text():
    sl.ScaleByDion("1/4")


@refused(ValueError, "ScaleByDion.rank_fraction must be in (0, 1], got 64.", obvious="pass a share")
def a_rank_as_a_share():
    sl.ScaleByDion(64)


@refused(
    ValueError,
    "ScaleByDion.scale … 'match_rms_adamw', None, got 'rms'.",
    obvious="choose one of them",
)
def a_scale_that_dion_does_not_know():
    sl.dion(0.1, scale="rms")


@refused(ValueError, "scale_by_adam.b2 … got 1.5", "in [0, 1)")
def a_new_value_out_of_range():
    bound().with_hyperparams(b2=1.5)


@refused(TypeError, "scale_by_learning_rate.learning_rate … got '0.1' of type str", REAL)
def a_string_as_new_value():
    bound().with_hyperparams(learning_rate="0.1")
