"""Names that are not there."""

import slalom as sl

from ._table import bound, refused


@refused(AttributeError, "module 'slalom' … 'clip_by_global_norm'", "sl.ClipByGlobalNorm")
def a_name_of_optax():
    sl.clip_by_global_norm  # noqa: B018


@refused(AttributeError, "module 'slalom' … 'cosine_decay_schedule'", "sl.schedules.cosine_decay")
def a_schedule_of_optax():
    sl.cosine_decay_schedule  # noqa: B018


@refused(AttributeError, "module 'slalom' … 'huber_loss'", "`optax.huber_loss`")
def a_loss_of_optax():
    sl.huber_loss  # noqa: B018


@refused(AttributeError, "module 'slalom' … 'losses'", "`optax.losses`")
def the_losses_of_optax():
    sl.losses  # noqa: B018


@refused(
    AttributeError,
    "module 'slalom' … 'polyak_averaging'",
    "tx.average(), or sl.incremental_update(new, old, step_size)",
)
def averaging_by_another_name():
    sl.polyak_averaging  # noqa: B018


@refused(
    AttributeError, "module 'slalom.projections' … 'projection_simplex'", "sl.projections.simplex"
)
def a_projection_of_optax():
    sl.projections.projection_simplex  # noqa: B018


@refused(AttributeError, "module 'slalom' … 'apply_every'", "sl.ApplyEvery")
def a_transform_of_optax():
    sl.apply_every  # noqa: B018


@refused(
    AttributeError, "module 'slalom' … 'skip_not_finite'", "tx.every_k(k, skip=sl.SkipNotFinite())"
)
def a_skip_condition_of_optax():
    sl.skip_not_finite  # noqa: B018


@refused(
    AttributeError, "module 'slalom' has no attribute 'amos'", obvious="no name of Slalom is close"
)
def a_name_that_is_close_to_none():
    sl.amos  # noqa: B018


@refused(TypeError, "adam() … 'lr'", "learning_rate")
def a_learning_rate_by_another_name():
    sl.adam(lr=1e-3)  # pyright: ignore[reportCallIssue]


@refused(TypeError, "adam() … 'betas'", "b1 and b2")
def both_decays_at_once():
    sl.adam(1e-3, betas=(0.9, 0.99))  # pyright: ignore[reportCallIssue]


@refused(TypeError, "adamw() … 'mask'", "decay_where")
def a_mask_of_optax():
    sl.adamw(1e-3, mask=None)  # pyright: ignore[reportCallIssue]


@refused(TypeError, "sgd() … 'momentun'", "momentum")
def a_keyword_misspelt():
    sl.sgd(1e-3, momentun=0.9)  # pyright: ignore[reportCallIssue]


@refused(TypeError, "every_k() … 'use_grad_mean'", "Write mean")
def a_keyword_of_multi_steps():
    sl.adam(1e-3).every_k(2, use_grad_mean=False)  # pyright: ignore[reportCallIssue]


@refused(TypeError, "ScaleByAdam() … 'beta1'", "b1")
def a_keyword_of_a_class():
    sl.ScaleByAdam(beta1=0.9)  # pyright: ignore[reportCallIssue]


@refused(
    TypeError, "linear() … 'slope'", "init_value, end_value, transition_steps, transition_begin"
)
def a_keyword_that_is_close_to_none():
    sl.schedules.linear(1.0, 0.0, slope=1.0)  # pyright: ignore[reportCallIssue]


@refused(AttributeError, "module 'slalom' … 'MultiSteps'", "tx.every_k(k)")
def a_name_that_has_another_form():
    sl.MultiSteps  # noqa: B018


@refused(
    AttributeError,
    "'Optimizer' object … 'learning_rate'",
    'transform, state, count, … `opt.hyperparams["learning_rate"]` … `opt = '
    "opt.with_hyperparams(learning_rate=1e-4)` … does not hold the model",
)
def a_learning_rate_as_attribute():
    bound().learning_rate  # noqa: B018


@refused(
    AttributeError,
    "DynamicJaxprTracer has no attribute foo",
    obvious="the error is the schedule's own",
)
def an_attribute_error_inside_of_a_schedule():
    bound(sl.sgd(lambda n: n.foo)).hyperparams["learning_rate"]


@refused(
    AttributeError,
    "module 'slalom.schedules' … 'CosineAnnealingLR'",
    "sl.adam(sl.schedules.cosine_decay(1e-3, steps))",
)
def a_schedule_of_torch():
    sl.schedules.CosineAnnealingLR  # noqa: B018


@refused(AttributeError, "module 'slalom' … 'clip_grad_norm_'", "sl.ClipByGlobalNorm(1.0) | tx")
def a_clip_of_torch():
    sl.clip_grad_norm_  # noqa: B018


@refused(
    AttributeError, "'Readings' object … 'learning_rate'", '`opt.hyperparams["learning_rate"]`'
)
def a_hyperparameter_as_attribute():
    bound().hyperparams.learning_rate  # noqa: B018  # pyright: ignore


@refused(
    AttributeError,
    "'Optimizer' object … 'fit'",
    "`step = sl.train_step(loss_fn)` and `model, opt, loss = step(model, opt, x, y)`",
)
def a_method_of_keras():
    bound().fit  # noqa: B018  # pyright: ignore


@refused(
    AttributeError,
    "module 'slalom.checkpoint' … 'restore'",
    "sl.checkpoint.load(path, model=model, opt=opt)",
)
def a_checkpoint_that_is_restored():
    sl.checkpoint.restore  # noqa: B018


@refused(AttributeError, "module 'slalom.where' … 'name'", "dtype … ndim … path … regex … type")
def a_selector_that_does_not_exist():
    sl.where.name  # noqa: B018
