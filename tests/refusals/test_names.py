"""Names that are not there."""

import slalom as sl

from .messages import bound, refused

OTHERS = [
    (sl, "clip_by_global_norm", "sl.ClipByGlobalNorm"),
    (sl, "cosine_decay_schedule", "sl.schedules.cosine_decay"),
    (sl, "huber_loss", "`optax.huber_loss`"),
    (sl, "losses", "`optax.losses`"),
    (sl, "polyak_averaging", "`tx.average()`, or `sl.incremental_update(new, old, step_size)`"),
    (sl, "apply_every", "sl.ApplyEvery"),
    (sl, "skip_not_finite", "tx.every_k(k, skip=sl.SkipNotFinite())"),
    (sl, "train", "step = sl.train_step(loss_fn)"),
    (sl, "value_and_grad", "eqx.filter_value_and_grad(loss_fn)"),
    (sl, "MultiSteps", "tx.every_k(k)"),
    (sl, "from_optax", "sl.interop.from_optax"),
    (sl, "UPGrad", "sl.combine.UPGrad"),
    (sl, "metrics", "opt.metrics"),
    (sl, "clip_grad_norm_", "sl.ClipByGlobalNorm(1.0) | tx"),
    (sl.projections, "projection_simplex", "sl.projections.simplex"),
    (sl.schedules, "CosineAnnealingLR", "sl.adam(sl.schedules.cosine_decay(1e-3, steps))"),
    (sl.checkpoint, "restore", "sl.checkpoint.load(path, model=model, opt=opt)"),
    (sl.where, "name", "dtype … ndim … path … regex … type"),
]
"""Names of other libraries, or of what a user expects, and ours."""


def test_names_and_keywords_of_other_libraries():
    for module, name, ours in OTHERS:
        with refused(AttributeError, f"module '{module.__name__}' … '{name}'", ours):
            getattr(module, name)
    with refused(
        AttributeError, "module 'slalom' has no attribute 'amos'", obvious="no name is close"
    ):
        sl.amos  # noqa: B018

    others = [
        (sl.adam, "lr", "learning_rate"),
        (sl.adam, "betas", "b1 and b2"),
        (sl.adamw, "mask", "decay_where"),
        (sl.sgd, "momentun", "momentum"),
        (sl.sgd, "maximize", "Write `tx.maximize()`"),
        (sl.sgd, "mu_dtype", "Write accumulator_dtype"),
        (sl.ScaleByAdam, "nu_dtype", 'Write `tx.store({"nu": "bfloat16"}, min_size=1)`'),
        (sl.contrib.acprop, "mu_dtype", 'Write `tx.store({"mu": "bfloat16"}, min_size=1)`'),
        (sl.adagrad, "accumulator_dtype", 'Write `tx.store("bfloat16", min_size=1)`'),
        (sl.adam(1e-3).every_k, "use_grad_mean", "Write mean"),
        (sl.ScaleByAdam, "beta1", "b1"),
        (sl.train_step, "optimizer", "It takes loss_fn, has_aux"),
        (sl.minimize, "steps", "max_steps"),
        (sl.minimize, "method", "Write tx."),
        (sl.minimize, "maxiter", "Write max_steps."),
        (sl.minimize, "x0", "Write model."),
        (sl.muon, "muon_weight_dimension_numbers", "Write layout"),
        (sl.adam, "clipnorm", "sl.ClipByGlobalNorm(1.0) | tx"),
        (sl.Optimizer, "lr", "transform, model, trainable, hyperparam_dtype"),
        (sl.schedules.linear, "slope", "init_value, end_value, transition_steps, transition_begin"),
    ]
    for function, keyword, ours in others:
        with refused(TypeError, f"{function.__name__}() … '{keyword}'", ours):
            function(**{keyword: 0.9})


def test_attributes():
    with refused(
        AttributeError,
        "'Optimizer' object … 'learning_rate'",
        'transform, state, count, … `opt.hyperparams["learning_rate"]` … `opt = '
        "opt.with_hyperparams(learning_rate=1e-4)` … does not hold the model",
    ):
        bound().learning_rate  # noqa: B018
    with refused(
        AttributeError,
        "DynamicJaxprTracer has no attribute foo",
        obvious="the error is the schedule's own",
    ):
        bound(sl.sgd(lambda n: n.foo)).hyperparams["learning_rate"]
    with refused(
        AttributeError, "'Readings' object … 'learning_rate'", '`opt.hyperparams["learning_rate"]`'
    ):
        bound().hyperparams.learning_rate  # noqa: B018
