"""Numbers and schedules that are none."""

import math

import equinox as eqx
import jax.numpy as jnp

import slalom as sl

from .messages import bound, params, refused

REAL = "a real number, a 0-d array or a schedule"
ONE = "one number for one step"
PRECISION = "another number or a dtype with more precision"
IN_JAX = "`jax.numpy` … `jnp.array(values)[step]` … `int` or `float` on the step"
ADAM_KNOWS = (
    "'scale_by_adam.b1', 'scale_by_adam.b2', 'scale_by_adam.eps', 'scale_by_adam.eps_root', "
    "'scale_by_learning_rate.learning_rate'."
)


def test_types_and_ranges_of_numbers():
    with refused(TypeError, "got {'w': 0.001} of type dict", f"{REAL} … use `.partition`."):
        sl.adam({"w": 1e-3})

    values = {
        "True of type bool": True,
        "'0.1' of type str": "0.1",
        "None of type NoneType": None,
        "an array of dtype complex64": jnp.array(1j, jnp.complex64),
        "sl.ScaleByLearningRate(0.1) of type ScaleByLearningRate": sl.sgd(0.1),
    }
    for got, value in values.items():
        with refused(TypeError, f"ScaleByLearningRate.learning_rate … got {got}", REAL):
            sl.sgd(value)

    for b2 in (1.0, -0.1):
        with refused(ValueError, f"ScaleByAdam.b2 … got {b2}", "in [0, 1)"):
            sl.adam(0.1, b2=b2)
    with refused(ValueError, "ScaleByAdam.eps … got nan", "in [0, inf)"):
        sl.adam(0.1, eps=float("nan"))
    with refused(ValueError, "ScaleByLearningRate.learning_rate … got nan", "in (-inf, inf)"):
        sl.sgd(float("nan"))
    for norm in (-1, jnp.array(-1.0)):
        with refused(ValueError, "ClipByGlobalNorm.max_norm … got -1.0", "in [0, inf]"):
            sl.ClipByGlobalNorm(norm)
    with refused(
        ValueError,
        "ScaleByLearningRate.learning_rate … got an array of shape (2,)",
        "`.partition` … `eqx.filter_vmap`",
    ):
        sl.sgd(jnp.ones(2))


def test_names_dtypes_and_counts():
    with refused(
        TypeError,
        "A path is a string such as 'learning_rate', got sl.where.path('w') of type _Selector",
        ADAM_KNOWS,
    ):
        bound().with_hyperparams({sl.where.path("w"): 0.1})
    with refused(TypeError, "EveryK.mean … got 'sum'", "True or False"):
        sl.adam(0.1).every_k(2, mean="sum")
    for name, dtype in {"int32": jnp.int32, "float31": "float31"}.items():
        with refused(TypeError, f"ScaleByAdam.mu_dtype … got '{name}'", "a floating dtype"):
            sl.adam(0.1, mu_dtype=dtype)
    with refused(
        TypeError,
        "This mapping is read-only",
        "`opt = opt.with_hyperparams(learning_rate=1e-4)` … `state = "
        "sl.interop.with_hyperparams(state, learning_rate=1e-4)`",
    ):
        bound().hyperparams["learning_rate"] = 0.2
    for k, wanted in ((jnp.array(0), "at least 1 mini-step"), (2**31, "less than 2**31")):
        with refused(ValueError, f"EveryK.k … got {k}", wanted):
            sl.adam(0.1).every_k(k)
    for k in (2.5, True, jnp.array([2, 2])):
        with refused(TypeError, f"EveryK.k … got {k!r} of type", "an int or a schedule"):
            sl.adam(0.1).every_k(k)


class Pairs(sl.schedules.AbstractSchedule):
    def __call__(self, step):
        return jnp.ones(2)


class DrivenPairs(sl.schedules.AbstractStatefulSchedule):
    def init(self):
        return None

    def update(self, state, context):
        return state

    def value(self, state):
        return jnp.ones(2)


def test_schedules():
    with refused(ValueError, "linear.transition_steps … got 0", "in [1, inf)"):
        sl.schedules.linear(0.0, 1.0, 0)
    with refused(TypeError, "The schedule … branches", "`jnp.where(step < n, a, b)`"):
        bound(sl.sgd(lambda n: 0.1 if n < 3 else 0.2)).step(params(), params())
    with refused(ValueError, "The schedule … returned an array of shape (2,)", ONE):
        bound(sl.sgd(lambda n: jnp.ones(2))).step(params(), params())
    for schedule in (lambda n: 0.1 * math.cos(n), lambda n: [0.1, 0.2][n]):
        with refused(TypeError, "The schedule … needs the value of the step", IN_JAX):
            bound(sl.sgd(schedule)).step(params(), params())
    with refused(TypeError, "The schedule … returned None", ONE):
        bound(sl.adam(0.1).every_k(lambda n: None)).step(params(), params())
    with refused(TypeError, "The schedule … returned a complex64 number", "a real one"):
        bound(sl.sgd(lambda n: jnp.complex64(1j))).step(params(), params())
    with refused(ValueError, "Pairs() returned an array of shape (2,)", ONE):
        bound(sl.sgd(Pairs())).step(params(), params())
    with refused(ValueError, "DrivenPairs() returned an array of shape (2,)", ONE):
        bound(sl.sgd(0.1).drive({"learning_rate": DrivenPairs()})).step(params(), params())
    with refused(
        TypeError,
        "The class <class 'slalom.schedules.basic.linear'> is not a schedule",
        "`linear(...)`",
    ):
        sl.adam(sl.schedules.linear)
    for call, culprit in [
        (sl.schedules.linear(0.0, 1.0, 2), "schedule() is missing 'step'"),
        (lambda: sl.schedules.linear(0.0, 1.0, 2)(1, 2), "schedule() takes 1 … got 2"),
    ]:
        with refused(TypeError, culprit, "`schedule(100)` … `sl.adam(schedule)`"):
            call()
    with refused(TypeError, "<lambda> takes (step, epoch)", "`lambda step: ...`"):
        sl.adam(lambda step, epoch: 0.1)
    with refused(TypeError, "ReduceOnPlateau follows the run", "`tx.drive({"):
        sl.schedules.ReduceOnPlateau(0.1)(3)
    with refused(
        TypeError, "`.drive` … got sl.schedules.ReduceOnPlateau(0.1)", "{'learning_rate': schedule}"
    ):
        sl.adam(0.1).drive(sl.schedules.ReduceOnPlateau(0.1))


def test_new_values_and_numbers_that_a_dtype_cannot_hold():
    with refused(ValueError, "ScaleByAdam.b2 is 0.999999999 … float32 … 1.0", PRECISION):
        bound(sl.adam(0.1, b2=1 - 1e-9))
    with refused(ValueError, "scale_by_adam.b2 is 0.999999999 … float32 … 1.0", PRECISION):
        bound().with_hyperparams(b2=1 - 1e-9)
    with refused(ValueError, "Scale.step_size is 1e-38 … float32 … 0.0", PRECISION):
        bound(sl.Scale(1e-38))
    with refused(ValueError, "ScaleByAdam.eps is 1e-08 … float16 … 0.0", PRECISION):
        bound(hyperparam_dtype=jnp.float16)
    with refused(TypeError, "`hyperparam_dtype` … got … int32", "a floating dtype"):
        bound(hyperparam_dtype=jnp.int32)
    with refused(ValueError, "ScaleByAdam.b2 … got 1.5", "in [0, 1)"):
        bound(eqx.tree_at(lambda tx: tx.b2, sl.ScaleByAdam(), 1.5))
    with refused(TypeError, "linear.init_value … got '1' of type str", REAL):
        tx = sl.sgd(sl.schedules.linear(1.0, 0.0, 10))
        bound(eqx.tree_at(lambda tx: tx.learning_rate.init_value, tx, "1"))

    with refused(
        TypeError, "`with_hyperparams` … got 0.2", "`opt.with_hyperparams(learning_rate=1e-4)`"
    ):
        bound().with_hyperparams(0.2)
    with refused(
        TypeError, "got 3 of type int", "by its path or its class, in a chain also by its position"
    ):
        bound().state_of(3)
    for use in (lambda opt: opt.with_hyperparams(lr=0.1), lambda opt: opt.hyperparams["lr"]):
        with refused(KeyError, "'lr' is not known", ADAM_KNOWS + " … Write learning_rate"):
            use(bound())
    with refused(KeyError, "'momentum' is not known", "'trace.decay' … Write trace.decay"):
        bound(sl.sgd(0.1, momentum=0.9)).with_hyperparams(momentum=0.8)
    with refused(KeyError, "'**.lr' matches no hyperparameter", ADAM_KNOWS):
        bound().with_hyperparams({"**.lr": 0.1})
    both = "'scale_by_lion.b1', 'scale_by_adam.b1' … For all of them, write '**.b1'"
    with refused(KeyError, "'b1' is ambiguous", both):
        bound(sl.ScaleByLion() | sl.adam(0.1)).with_hyperparams(b1=0.1)
    with refused(
        ValueError,
        "'scale_by_learning_rate.learning_rate' is the schedule … the number 0.1",
        "`replace_schedules=True` … recompiles … 'scale_by_learning_rate.learning_rate.<field>'",
    ):
        bound(sl.adam(sl.schedules.linear(0.0, 1.0, 10))).with_hyperparams(learning_rate=0.1)
    with refused(ValueError, "scale_by_adam.b2 … got 1.5", "in [0, 1)"):
        bound().with_hyperparams(b2=1.5)
    with refused(TypeError, "scale_by_learning_rate.learning_rate … got '0.1' of type str", REAL):
        bound().with_hyperparams(learning_rate="0.1")


def test_dion():
    with refused(
        TypeError,
        "ScaleByDion.rank_fraction must be a float, got '1/4' of type str.",
        obvious="pass a float",
    ):
        sl.contrib.ScaleByDion("1/4")
    with refused(
        ValueError, "ScaleByDion.rank_fraction must be in (0, 1], got 64.", obvious="pass a share"
    ):
        sl.contrib.ScaleByDion(64)
    with refused(
        ValueError,
        "ScaleByDion.scale … 'match_rms_adamw' or None, got 'rms'.",
        obvious="choose one of them",
    ):
        sl.contrib.dion(0.1, scale="rms")
