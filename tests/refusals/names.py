"""Names that are not there."""

import slalom as sl

from ._table import bound, refused


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
    "'Optimizer' object has no attribute 'learning_rate'. Its attributes are transform, state, "
    'count, <…>. Read hyperparameters with `opt.hyperparams["learning_rate"]` and change them with '
    "`opt = opt.with_hyperparams(learning_rate=1e-4)`. The optimizer does not hold the model.",
)
def a_learning_rate_as_attribute():
    bound().learning_rate  # noqa: B018


@refused(AttributeError, "DynamicJaxprTracer has no attribute foo")
def an_attribute_error_inside_of_a_schedule():
    bound(sl.sgd(lambda n: n.foo)).hyperparams["learning_rate"]
