"""Everything public that transforms updates, in a representative form: the rows of many tests."""

import slalom as sl

matrices = sl.where.ndim(min=2)
halving = sl.schedules.linear(1.0, 0.5, transition_steps=10)

# The rules: one row for each class and for each option that changes what is computed.
RULES = {
    "Identity": sl.Identity(),
    "SetToZero": sl.SetToZero(),
    "Scale": sl.Scale(-0.1),
    "ScaleByLearningRate": sl.ScaleByLearningRate(0.1),
    "ScaleByLearningRate, scheduled": sl.ScaleByLearningRate(halving),
    "ScaleBySchedule": sl.ScaleBySchedule(halving),
    "ScaleByAdam": sl.ScaleByAdam(),
    "ScaleByAdam, nesterov": sl.ScaleByAdam(nesterov=True),
    "ScaleByAdam, dtypes": sl.ScaleByAdam(mu_dtype="bfloat16", nu_dtype="bfloat16"),
    "ScaleByAmsgrad": sl.ScaleByAmsgrad(),
    "ScaleByAmsgrad, uncorrected": sl.ScaleByAmsgrad(
        bias_correction_mu=False, bias_correction_nu=False
    ),
    "ScaleByAdamax": sl.ScaleByAdamax(),
    "ScaleByBelief": sl.ScaleByBelief(),
    "ScaleByBelief, nesterov": sl.ScaleByBelief(nesterov=True),
    "ScaleByYogi": sl.ScaleByYogi(),
    "ScaleByRadam": sl.ScaleByRadam(),
    "ScaleByRadam, nesterov": sl.ScaleByRadam(b2=0.9, nesterov=True),
    "ScaleByNovograd": sl.ScaleByNovograd(weight_decay=0.1),
    "ScaleByAdan": sl.ScaleByAdan(),
    "ScaleByRss": sl.ScaleByRss(),
    "ScaleByRss, from zero": sl.ScaleByRss(0.0, eps=0.0),
    "ScaleByAdadelta": sl.ScaleByAdadelta(),
    "ScaleBySign": sl.ScaleBySign(),
    "ScaleByRprop": sl.ScaleByRprop(0.1),
    "ScaleBySM3": sl.ScaleBySM3(),
    "ScaleBySM3, decaying": sl.ScaleBySM3(b2=0.9),
    "ScaleByLion": sl.ScaleByLion(),
    "ScaleByRms": sl.ScaleByRms(),
    "ScaleByRms, bias correction": sl.ScaleByRms(bias_correction=True, eps_in_sqrt=False),
    "ScaleByStddev": sl.ScaleByStddev(),
    "ScaleByStddev, bias correction": sl.ScaleByStddev(bias_correction=True, eps_in_sqrt=False),
    "Trace": sl.Trace(0.9),
    "Trace, nesterov": sl.Trace(0.9, nesterov=True),
    "AddDecayedWeights": sl.AddDecayedWeights(0.1),
    "Clip": sl.Clip(0.5),
    "ClipByGlobalNorm": sl.ClipByGlobalNorm(1.0),
}

RECIPES = {
    "sgd": sl.sgd(0.1),
    "sgd, momentum": sl.sgd(0.1, momentum=0.9),
    "adam": sl.adam(0.1),
    "adamw": sl.adamw(0.1, decay_where=matrices),
    "nadam": sl.nadam(0.1),
    "nadamw": sl.nadamw(0.1, decay_where=matrices),
    "amsgrad": sl.amsgrad(0.1),
    "adamax": sl.adamax(0.1),
    "adamaxw": sl.adamaxw(0.1, decay_where=matrices),
    "adabelief": sl.adabelief(0.1),
    "yogi": sl.yogi(0.1),
    "radam": sl.radam(0.1),
    "novograd": sl.novograd(0.1),
    "novograd, decay_where": sl.novograd(0.1, weight_decay=0.1, decay_where=matrices),
    "adan": sl.adan(0.1, weight_decay=0.1, decay_where=matrices),
    "adagrad": sl.adagrad(0.1),
    "adadelta": sl.adadelta(weight_decay=0.1, decay_where=matrices),
    "sign_sgd": sl.sign_sgd(0.01),
    "signum": sl.signum(0.01),
    "rprop": sl.rprop(0.01),
    "sm3": sl.sm3(0.1),
    "lion": sl.lion(0.01),
    "rmsprop": sl.rmsprop(0.01, momentum=0.9),
    "rmsprop, centered": sl.rmsprop(0.01, centered=True),
}

WRAPPERS = {
    "Chain": sl.ClipByGlobalNorm(1.0) | sl.adamw(0.1),
    "Masked": sl.Trace(0.9).mask(matrices) | sl.Scale(-0.1),
    "Only": sl.adam(0.1).only(matrices),
    "Partition": sl.adam(0.1).partition({matrices: sl.sgd(0.1, momentum=0.9)}),
    "partition": sl.partition({2: sl.adam(0.1), 1: sl.sgd(0.1)}, {matrices: 2, ~matrices: 1}),
    "EveryK": sl.adam(0.1).every_k(2),
    "EveryK, scheduled": sl.adam(0.1).every_k(lambda n: n + 1, mean=False),
    "EveryK in Partition": sl.adam(0.1).every_k(2).partition({matrices: sl.sgd(0.1)}),
    "nested": (sl.ClipByGlobalNorm(1.0) | sl.adam(0.1).only(matrices)).every_k(2).every_k(2),
}

EVERYTHING = RULES | RECIPES | WRAPPERS
